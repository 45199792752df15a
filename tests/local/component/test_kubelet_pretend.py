"""Pods that are only said to run, with which the operator is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_cluster import Kube, until

from springtide_local.cluster import Cluster
from springtide_local.settings import Settings

pytestmark = pytest.mark.timeout(300)


def test_pretended_pods_run_until_they_are_deleted(tmp_path: Path) -> None:
    shape = Settings(nodes=1, pods=20, pretend="127.0.0.2")
    with Cluster.start(tmp_path / "data", shape) as cluster:
        kube = Kube(cluster.kubeconfig, "default")
        try:
            spec = {"containers": [{"name": "c", "image": "nowhere.example.com/none:1"}]}
            for name in ("a", "b"):
                kube.create("pods", {"kind": "Pod", "metadata": {"name": name}, "spec": spec})
            until(
                lambda: all(kube.get("pods", n).get("status", {}).get("phase") == "Running" for n in "ab"),
                "both pods to be said to run",
            )
            status = kube.get("pods", "a")["status"]
            assert status["podIP"] == "127.0.0.2"
            assert status["containerStatuses"][0]["ready"] is True
            assert "running" in status["containerStatuses"][0]["state"]
            kube.request("DELETE", "/api/v1/namespaces/default/pods/a")
            until(lambda: kube.gone("pods", "a"), "the deleted pod to go")
            assert kube.get("pods", "b")["status"]["phase"] == "Running"
            assert "nowhere.example.com" not in cluster.log_end(200)
        finally:
            kube.close()
