"""Keys are replaced under jobs that train: no worker ends, and each coordinator is soon heard again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from e2e_cluster import OPERATOR_NAMESPACE, E2ECluster, until_operator_is_ready
from e2e_jobs import RunningJob

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
Start = Callable[..., RunningJob]
Object = dict[str, Any]
ROOT_KEY = "secret/springtide-root-key"
SHORT = 30  # seconds, of a certificate


def key_of(running: RunningJob) -> str:
    """Return the id of the job's newest key, once its coordinator has answered to it; "" before."""
    status, pods = running.status(), running.pods("coordinator")
    coordinator, newest = status.get("coordinator") or {}, str(status["keys"][0]["id"])
    numbers = {pod["metadata"]["labels"]["springtide.dev/incarnation"] for pod in pods}
    heard = coordinator.get("reachable") and str(coordinator["incarnation"]) in numbers
    # The status names a key before the coordinator's pod is replaced for it.
    return newest if heard and all(knows(running, pod)[0] == newest for pod in pods) else ""


def knows(running: RunningJob, pod: Object) -> list[str]:
    """Return the ids of the keys that a pod of the job has, without those of certificates."""
    marked: str = pod["metadata"]["annotations"]["springtide.dev/key"]
    return [name.partition("-")[0] for name in marked.split(",")]


def until_key_is_another(running: RunningJob, before: str) -> str:
    """Wait until the job's coordinator answers to another key; return its id."""

    def changed() -> str:
        now = key_of(running)
        return now if now not in ("", before) else ""

    return running.cluster.until(90, f"{running.name} to have another key than {before}", changed)


def begun(running: RunningJob) -> set[tuple[str, int]]:
    """Return the workers that run, and how often each was restarted."""
    return {
        (pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"])
        for pod in running.pods()
    }


@pytest.mark.slow
def test_root_key_is_replaced_while_a_job_trains(e2e: E2ECluster, start: Start) -> None:
    """Replace it under a job with certificates; `test_user_gives_a_job_another_key` has one without."""
    running = start("keyed", workers=2, epochs=100_000, security={"tls": True})
    running.until_trains(2)
    before, workers = key_of(running), begun(running)
    generation = running.status()["generation"]
    e2e.kubectl("delete", ROOT_KEY, "-n", OPERATOR_NAMESPACE)
    now = until_key_is_another(running, before)
    running.until_goes_on()
    assert begun(running) == workers, "no worker has ended"
    assert running.status()["generation"] == generation, "nor was there a recovery"
    (coordinator,) = running.pods("coordinator")
    assert knows(running, coordinator) == [now, before]
    # A worker with the new key beside those with the old one.
    running.scale(3)
    running.until_trains(3)
    assert sorted(knows(running, pod)[0] for pod in running.pods()) == sorted([before, before, now])
    assert workers < begun(running)


@pytest.mark.slow
def test_servers_of_an_older_key_hand_over_and_lose_nothing(e2e: E2ECluster, start: Start) -> None:
    running = start(
        "served",
        workers=2,
        epochs=100_000,
        strategy={"type": "ParameterServer"},
        parameterServers={"replicas": 2},
        security={"tls": True},
    )
    running.until_trains(2)
    running.until_goes_on()
    before, workers = key_of(running), begun(running)
    e2e.kubectl("delete", ROOT_KEY, "-n", OPERATOR_NAMESPACE)
    now = until_key_is_another(running, before)

    def all_new() -> bool:
        servers = running.pods("parameter-server")
        return len(servers) == 2 and all(knows(running, pod) == [now] for pod in servers)

    e2e.until(150, "both servers to have the new key", all_new)
    running.scale(3)  # a worker of the new key, beside two of the old one
    running.until_trains(3)
    running.until_goes_on()
    assert workers < begun(running), "no worker has ended"
    status = running.status()
    assert status.get("statesLost", 0) == 0
    assert (status["data"]["repeated"], status["data"]["lost"]) == (0, 0)
    assert status["restarts"]["total"] == 0


@pytest.mark.slow
def test_user_gives_a_job_another_key(e2e: E2ECluster, start: Start) -> None:
    running = start("turned", workers=1, epochs=100_000)
    running.until_trains(1)
    before, workers = key_of(running), begun(running)
    e2e.kubectl("annotate", "stj/turned", "-n", running.namespace, "springtide.dev/key-turn=leaked")
    now = until_key_is_another(running, before)
    running.until_goes_on()
    assert begun(running) == workers
    # When its last pod has gone, nobody is let in with the old key any more.
    running.delete_pod(running.pods()[0]["metadata"]["name"])
    e2e.until(
        90,
        "the coordinator to know the new key alone",
        lambda: [knows(running, pod) for pod in running.pods("coordinator")] == [[now]],
    )
    running.until_trains(1)


@pytest.mark.slow
def test_deleted_secret_of_a_job_is_made_again(e2e: E2ECluster, start: Start) -> None:
    running = start("bereft", workers=1, epochs=100_000)
    running.until_trains(1)
    e2e.kubectl("delete", "secret", running.status()["keys"][0]["secret"], "-n", running.namespace)
    running.scale(2)
    running.until_trains(2)


@pytest.mark.slow
def test_certificates_are_renewed_before_they_end(e2e: E2ECluster, start: Start) -> None:
    """Certificates last half a minute here; workers that began with the first are let in after its end."""

    def set_seconds(change: str) -> None:
        e2e.kubectl("set", "env", "deployment", "--all", "-n", OPERATOR_NAMESPACE, change)
        until_operator_is_ready(e2e)

    set_seconds(f"SPRINGTIDE_CERTIFICATE_SECONDS={SHORT}")
    try:
        running = start("renewed", workers=2, epochs=100_000, security={"tls": True})
        running.until_trains(2)
        began, workers = time.monotonic(), begun(running)
        generation = running.status()["generation"]
        first = running.status()["keys"][0]

        def ends() -> set[str]:
            return {running.status()["keys"][0]["certificateEnds"]} - {first["certificateEnds"]}

        second = e2e.until(SHORT, "another certificate", ends)
        e2e.until(2 * SHORT, "a third certificate", lambda: ends() - second)
        e2e.until(60, "the first one to have ended", lambda: time.monotonic() - began > SHORT + 1)
        key = e2e.until(60, "the coordinator to answer", lambda: key_of(running))
        assert key == first["id"], "only the certificate is another one"
        running.until_goes_on()
        running.scale(3)  # only a coordinator that workers reach lets somebody in
        running.until_trains(3)
        assert workers < begun(running)
        assert running.status()["generation"] == generation + 1
    finally:
        set_seconds("SPRINGTIDE_CERTIFICATE_SECONDS-")
