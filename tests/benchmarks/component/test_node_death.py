"""A machine loses power with a job's coordinator and a worker: its addresses are silent, its node is Ready.

Kubernetes' default times: nobody calls the node lost before 40 s are over.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from forked_start import forked

from benchmarks import node_death
from springtide_local.kubelet import blackout

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("fork_server"),
    pytest.mark.skipif(
        bool(os.environ.get("SPRINGTIDE_E2E_KUBECONFIG")), reason="crashes nodes of the embedded cluster"
    ),
    pytest.mark.skipif(bool(blackout.why_impossible()), reason=blackout.why_impossible() or "possible"),
]
# On an idle machine the next step comes after 12 s; NotReady would come after 40.
LIMIT_SECONDS = 30.0


@pytest.mark.slow
def test_job_goes_on_before_kubernetes_misses_the_node(tmp_path: Path) -> None:
    with ExitStack() as stack:
        with forked():
            cluster, kube = stack.enter_context(node_death.cluster_with_operator(tmp_path / "cluster"))
        job = node_death.Job(kube, node_death.ALL_REDUCE, tmp_path / "steps")
        jobs = {job.name: job}
        node_death.until(120, "three workers to train", job.whole)
        node_death.arrange("coordinator", jobs)
        node_death.until(120, "three workers to train", job.whole)
        _, node = node_death.choose("coordinator", jobs)
        stay = {pod["metadata"]["uid"] for pod in job.pods("worker") if pod["spec"]["nodeName"] != node}
        before, at = job.history().newest().generation, time.time()
        assert node in job.nodes("worker")

        cluster.crash_node(node)
        watch = node_death.StatusWatch(job, at)

        def goes_on() -> bool:
            newest = job.history().newest()
            return bool(newest.generation > before and newest.unix_time > at)

        node_death.until(60, f"a step without node {node}", goes_on)
        pause = node_death.longest_pause([c.unix_time for c in job.history().curve()], at)
        told = watch.stop()
        assert pause < LIMIT_SECONDS
        assert told is not None, "status said meanwhile that the job trains"
        assert told < pause

        found = kube.request("GET", f"/api/v1/nodes/{node}")
        ready = next(c for c in found["status"]["conditions"] if c["type"] == "Ready")
        assert ready["status"] == "True", "it was not Kubernetes' word that helped"
        assert job.nodes("coordinator") - {node}, "the successor is elsewhere"
        assert job.status()["coordinator"]["incarnation"] == before.incarnation.number + 1
        assert {pod["metadata"]["uid"] for pod in job.pods("worker")} >= stay, "no worker was killed for it"
        node_death.until(
            30, "status to say that it trains", lambda: job.status()["state"] in ("Running", "Rescaling")
        )
        data = job.status()["data"]
        assert (data["lost"], data["repeated"]) == (0, 0)
