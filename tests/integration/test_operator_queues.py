"""Other schedulers on a cluster: gang start, against a stand-in of their controllers."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import pytest
from e2e_cluster import E2ECluster, cluster
from gang_standin import CRDS, SCHEDULERS, gang_scheduler
from operator_fake_worker import FakeJob, read

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2ECluster]:
    with cluster(tmp_path_factory.mktemp("queues")) as running:
        running.kubectl("apply", "-f", str(CRDS))
        yield running


@pytest.fixture
def job(system: E2ECluster) -> Iterator[FakeJob]:
    with system.namespace(f"queues-{secrets.token_hex(4)}") as namespace:
        yield FakeJob(system, namespace, "fake")


@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_pods_start_together_when_the_group_is_whole(
    system: E2ECluster, job: FakeJob, scheduler: str
) -> None:
    with gang_scheduler(system, job.namespace):
        job.start(replicas=2, pod={"schedulerName": scheduler})
        job.until_running("0-0", "1-0", seconds=60)
    api = SCHEDULERS[scheduler][0]
    group = job.status()["gang"]
    assert (group["apiVersion"], group["minMember"]) == (api, 2)  # one worker and the coordinator
    plural = f"podgroups.{api.partition('/')[0]}"
    made = read(system, plural, group["podGroup"], "-n", job.namespace)
    assert made["metadata"]["ownerReferences"][0]["kind"] == "TrainingJob"
    assert made["spec"]["minResources"]["cpu"] == "50m"  # the coordinator's; the workers ask for nothing
    events = read(system, "events", "-n", job.namespace)["items"]
    assert "GangRequested" in {event["reason"] for event in events}
    job.cluster.kubectl(
        *("patch", "stj/fake", "-n", job.namespace, "--type=merge", "-p"),
        json.dumps({"spec": {"suspend": True}}),
    )
    system.until(
        60,
        "the PodGroup to go with the pods",
        lambda: not read(system, plural, "-n", job.namespace)["items"] and "gang" not in job.status(),
    )
