"""Real parameter servers under the real operator and coordinator, with workers that only pretend to train."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator

import operator_session_worker
import pytest
from e2e_cluster import E2ECluster, RefusedError, cluster
from operator_fake_worker import FakeJob, Object, kill, read

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[E2ECluster]:
    with cluster(tmp_path_factory.mktemp("operator")) as running:
        yield running


@pytest.fixture
def job(system: E2ECluster) -> Iterator[FakeJob]:
    with system.namespace(f"ps-{secrets.token_hex(4)}") as name:
        yield FakeJob(system, name, "fake")


def serving(job: FakeJob) -> dict[str, Object]:
    """Pods of servers that are to stay, by slot and attempt."""
    pods = job.pods("parameter-server").items()
    return {
        name.removeprefix("fake-ps-"): pod
        for name, pod in pods
        if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") == "Running"
    }


def until_trains(job: FakeJob, generation: int, *servers: str) -> Object:
    """Wait until a generation above the given one commits steps with exactly these servers; its status."""

    def true() -> Object | None:
        status = job.status()
        ready = (status.get("parameterServers") or {}).get("summary") == f"{len(servers)}/{len(servers)}"
        trains = any(c["type"] == "Running" and c["status"] == "True" for c in status.get("conditions") or [])
        if not (ready and trains and set(serving(job)) == set(servers) and status["generation"] > generation):
            return None
        return status

    try:
        return job.cluster.until(150, f"training with the servers {servers}", true)
    except AssertionError as error:
        raise AssertionError(f"{error}; {sorted(job.pods('parameter-server'))}; {job.status()}") from None


@pytest.mark.slow
def test_life_of_a_job_with_parameter_servers(system: E2ECluster, job: FakeJob) -> None:
    """Live a whole life in one go, since processes that import torch are costly."""
    job.start(
        replicas=2,
        strategy={"type": "ParameterServer", "parameterServer": {"replication": 2}},
        parameterServers={"replicas": 2},
        container=operator_session_worker.container(),
    )
    status = until_trains(job, 0, "0-0", "1-0")
    first = serving(job)

    uid8 = job.read()["metadata"]["uid"][:8]

    def budget() -> Object:
        return read(system, "pdb", f"fake-servers-{uid8}", "-n", job.namespace)

    assert budget()["spec"]["minAvailable"] == 1
    system.until(60, "the budget to count both", lambda: budget()["status"]["currentHealthy"] == 2)
    shown = system.kubectl("get", "stj/fake", "-n", job.namespace).splitlines()
    assert shown[1].split()[shown[0].split().index("PS")] == "2/2"

    # A drain of a server's node ends, and costs no state: the server goes when its successor has taken over.
    node = first["1-0"]["spec"]["nodeName"]
    on_it = [place for place, pod in first.items() if pod["spec"]["nodeName"] == node]
    drain = ("drain", node, "--force", "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=60s")
    system.kubectl(*drain, timeout=200)
    left = ["0-1" if "0-0" in on_it else "0-0", "1-1"]
    status = until_trains(job, status["generation"], *left)
    assert all(pod["spec"]["nodeName"] != node for pod in serving(job).values())
    system.kubectl("uncordon", node)

    # A process that is killed comes back in its pod, and is another server.
    kill(system, serving(job)["1-1"])
    status = until_trains(job, status["generation"], *left)
    restarts = [pod["status"]["containerStatuses"][0]["restartCount"] for pod in serving(job).values()]
    assert sorted(restarts) == [0, 1]

    # More and fewer, by the manifest; the one that goes is deleted when a generation runs without it.
    def scale(replicas: int) -> None:
        patch = json.dumps({"spec": {"parameterServers": {"replicas": replicas}}})
        system.kubectl("patch", "stj/fake", "-n", job.namespace, "--type=merge", "-p", patch)

    scale(3)
    status = until_trains(job, status["generation"], *left, "2-0")
    scale(2)
    status = until_trains(job, status["generation"], *left)

    # The coordinator's successor takes the generation as it is.
    for pod in job.pods("coordinator").values():
        if "deletionTimestamp" not in pod["metadata"]:
            kill(system, pod)
    before = status["coordinator"]

    def adopted() -> bool:
        now = job.status()["coordinator"]
        return now["reachable"] and (now["incarnation"], now.get("restart")) > (
            before["incarnation"],
            before.get("restart"),
        )

    system.until(60, "the coordinator to come back", adopted)
    assert until_trains(job, status["generation"] - 1, *left)["generation"] == status["generation"]
    assert job.status().get("statesLost", 0) == 0
    assert job.status()["restarts"]["failures"] == 0

    system.kubectl("delete", "stj/fake", "-n", job.namespace, "--timeout=60s")

    def gone() -> bool:
        kinds = "pods,poddisruptionbudgets"
        labels = "springtide.dev/job=fake"
        return not system.kubectl("get", kinds, "-n", job.namespace, "-l", labels, "-o", "name").split()

    system.until(60, "all that the job made to go", gone)


def test_a_manifest_that_cannot_be_is_refused(job: FakeJob) -> None:
    with pytest.raises(RefusedError, match="two copies need two servers"):
        job.start(strategy={"type": "ParameterServer", "parameterServer": {"replication": 2}})
    with pytest.raises(RefusedError, match=r"for strategy\.type ParameterServer and Hybrid only"):
        job.start(parameterServers={"replicas": 2})
