"""A Secret that somebody made under the job's name first, and a real coordinator with the token in it."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

from coordinator_process import CoordinatorProcess
from operator_cluster import FakeCluster, FakeCoordinator
from operator_running import operator, until

from springtide_operator.api import names
from springtide_operator.job_credentials import JobCredentials
from springtide_operator.plan.values import timestamp
from springtide_protocol.sync_client import SyncClient

THEIRS = "a token of somebody else's making"


class Process(FakeCoordinator):
    """Leads every address to one process, by the operator's own client."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address

    def connect(self, address: str, token: str, authority: str = "", operator_token: str = "") -> Any:
        return SyncClient(self.address, token, authority=authority, operator_token=operator_token)


def make_ready(cluster: FakeCluster) -> None:
    """Have the kubelet say that the coordinator serves: it does, to whoever has its token."""
    for pod in cluster.pods(names.ROLE_COORDINATOR):
        if pod["status"]["phase"] == "Running" and "conditions" not in pod["status"]:
            since = timestamp(time.time())
            pod["status"]["conditions"] = [{"type": "Ready", "status": "True", "lastTransitionTime": since}]
            cluster.put("pods", pod)


async def test_a_foreign_secret_is_named_in_the_condition(tmp_path: Path) -> None:
    cluster = FakeCluster()
    uid = cluster.add_job()["metadata"]["uid"]
    name = names.secret_name("digits", uid, JobCredentials(b"k" * 32, uid).key)
    data = {"token": base64.b64encode(THEIRS.encode()).decode()}
    cluster.put("secrets", {"metadata": {"name": name, "namespace": "default"}, "data": data})

    def told() -> str:
        cluster.run_pods()
        make_ready(cluster)
        conditions = (cluster.job().get("status") or {}).get("conditions") or []
        found = [c for c in conditions if c["type"] == "Degraded" and c["status"] == "True"]
        return found[0]["message"] if found and found[0]["reason"] == "CoordinatorUnreachable" else ""

    with CoordinatorProcess(tmp_path, SPRINGTIDE_TOKEN=THEIRS) as process:
        async with operator(cluster, Process(process.address)):
            await until(told, "the condition")
            said = told()
    assert "UNAUTHENTICATED" in said
    assert f"the job's Secret {name} holds another token than the operator's" in said
    assert "delete that Secret, and then the pod digits-coordinator-1" in said
    assert cluster.objects["secrets", "default", name]["data"] == data  # it is left as it is
