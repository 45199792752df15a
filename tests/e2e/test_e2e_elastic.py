"""Jobs that live through what happens to them, seen through the API alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from e2e_cluster import OPERATOR_LABELS, OPERATOR_NAMESPACE, E2ECluster, until_operator_is_ready
from e2e_jobs import TRAIN, RunningJob, left_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Start = Callable[..., RunningJob]


def names(pods: list[dict]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


def test_a_job_succeeds_and_proves_its_samples(e2e: E2ECluster, start: Start) -> None:
    running = start("succeeds", workers=2, epochs=30)
    running.until_condition("Succeeded")
    status = running.status()
    assert status["data"]["totalSeen"] == 30 * 64
    assert (status["data"]["repeated"], status["data"]["lost"]) == (0, 0)
    assert status["restarts"]["failures"] == 0
    assert float(status["values"]["slope"]) == pytest.approx(3.0, abs=0.3)
    assert not e2e.warnings(running.namespace), running.describe()
    table = e2e.kubectl("get", "stj", "succeeds", "-n", running.namespace)
    assert "Succeeded" in table.splitlines()[1]
    assert e2e.kubectl("wait", "--for=condition=Succeeded", "stj/succeeds", "-n", running.namespace)


def test_scaling_up_and_down_changes_workers_restarts_nobody(e2e: E2ECluster, start: Start) -> None:
    """Scale with every call of the coordinator encrypted."""
    running = start("scales", workers=1, epochs=100_000, security={"tls": True})
    running.until_trains(1)
    secret = e2e.labelled("secrets", running.namespace, "springtide.dev/job=scales")[0]
    assert set(secret["data"]) == {"token", "ca.crt", "tls.crt", "tls.key"}
    first = running.pods()[0]
    running.scale(3)
    running.until_trains(3)
    running.scale(1)
    running.until_trains(1)
    running.until_goes_on()
    e2e.until(120, "those that left to go", lambda: len(running.pods()) == 1)
    assert running.pods()[0]["metadata"]["uid"] == first["metadata"]["uid"]
    assert running.pods()[0]["status"]["containerStatuses"][0]["restartCount"] == 0
    assert running.status()["restarts"]["failures"] == 0


@pytest.mark.slow
def test_worker_deleted_by_force_is_followed_by_the_standby(e2e: E2ECluster, start: Start) -> None:
    running = start("replaced", workers=2, standby=1, epochs=80, pace="1")
    running.until_trains(2)

    def ready() -> bool:
        return bool(running.status().get("standby", {}).get("ready"))

    e2e.until(120, "a standby to be ready", ready)
    lost, kept, standby = running.pods()
    generation = running.status()["generation"]
    running.delete_pod(lost["metadata"]["name"], "--force", "--grace-period=0")
    running.until_goes_on()
    e2e.until(120, "another standby to be ready", lambda: len(running.pods()) == 3 and ready())
    status = running.status()
    assert status["standby"]["steppedIn"] == (
        f"standby {standby['metadata']['name']} takes the place of {lost['metadata']['name']}"
    )
    assert status["generation"] == generation + 1, "no generation went on without it"
    kept_uids = {pod["metadata"]["uid"] for pod in (kept, standby)}
    assert kept_uids < {pod["metadata"]["uid"] for pod in running.pods()}
    running.set_pace(0)
    running.until_condition("Succeeded")
    status = running.status()
    assert (status["data"]["repeated"], status["data"]["lost"]) == (0, 0)
    assert status["data"]["totalSeen"] == 80 * 64
    assert status["restarts"]["failures"] == 0
    assert status["restarts"]["preemptions"] == 1


IN_SHARDS = (
    TRAIN.replace(
        "torch.nn.Linear(1, 1)",
        "torch.nn.Sequential(torch.nn.Linear(1, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1))",
    )
    .replace("torch.optim.SGD(model.parameters(), lr=0.1)", "torch.optim.AdamW(model.parameters(), lr=0.01)")
    .replace("springtide.report(slope=model.weight.item())", "springtide.report(slope=0.0)")
)


@pytest.mark.slow
def test_shards_survive_lost_and_leaving_workers(e2e: E2ECluster, start: Start) -> None:
    """The optimizer's state is nowhere whole: nothing of it is lost, and no checkpoint exists.

    One worker is deleted by force, the node of another is drained, and two leave.
    """
    sharded = {"type": "AllReduce", "allReduce": {"shard": "Gradients"}}
    running = start("sharded", IN_SHARDS, workers=3, epochs=40, pace="1", strategy=sharded)
    running.until_trains(3)
    lost, kept, _ = running.pods()
    running.delete_pod(lost["metadata"]["name"], "--force", "--grace-period=0")
    running.until_goes_on()
    running.until_trains(3)
    assert kept["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in running.pods()}
    drained = next(pod for pod in running.pods() if pod["metadata"]["uid"] != kept["metadata"]["uid"])
    node = drained["spec"]["nodeName"]
    try:
        e2e.drain(node, running.name)
        running.until_trains(3)
        assert node not in {pod["spec"]["nodeName"] for pod in running.pods()}
    finally:
        e2e.kubectl("uncordon", node)
    before = {pod["metadata"]["uid"] for pod in running.pods()}
    running.set_pace(0.5)
    running.scale(1)
    running.until_trains(1)
    e2e.until(120, "those that left to go", lambda: len(running.pods()) == 1)
    stays = running.pods()[0]["metadata"]["uid"]
    assert stays in before
    running.scale(3)
    running.until_trains(3)
    running.set_pace(0)
    running.until_condition("Succeeded")
    status = running.status()
    assert (status["data"]["repeated"], status["data"]["lost"], status["statesLost"]) == (0, 0, 0)
    assert status["data"]["totalSeen"] == 40 * 64
    assert status["restarts"]["failures"] == 0
    assert stays in {pod["metadata"]["uid"] for pod in running.pods()}


def test_deleted_coordinator_is_replaced_while_training_goes_on(start: Start) -> None:
    running = start("conducted", workers=1, epochs=100_000)
    running.until_trains(1)
    worker = running.pods()[0]["metadata"]["uid"]
    before = names(running.pods("coordinator"))
    running.delete_pod(*before, "--force", "--grace-period=0")
    running.until_goes_on()
    running.until_trains(1)
    running.scale(2)  # only a coordinator lets somebody in
    running.until_trains(2)
    assert names(running.pods("coordinator")).isdisjoint(before)
    assert worker in {pod["metadata"]["uid"] for pod in running.pods()}


def test_deleted_operator_is_replaced_and_the_next_goes_on(e2e: E2ECluster, start: Start) -> None:
    running = start("operated", workers=1, epochs=100_000)
    running.until_trains(1)
    worker = running.pods()[0]["metadata"]["uid"]
    pod = e2e.pods(OPERATOR_NAMESPACE, OPERATOR_LABELS)[0]["metadata"]
    e2e.kubectl("delete", "pod", pod["name"], "-n", OPERATOR_NAMESPACE, "--force", "--grace-period=0")
    running.scale(2)
    running.until_goes_on()
    until_operator_is_ready(e2e, other_than=pod["uid"])
    running.until_trains(2)
    assert worker in {pod["metadata"]["uid"] for pod in running.pods()}


def test_a_cordoned_and_drained_node_costs_no_sample(e2e: E2ECluster, start: Start) -> None:
    running = start("moved", workers=2, epochs=100_000, elasticity={"moveOnCordon": True})
    running.until_trains(2)
    node = running.pods()[0]["spec"]["nodeName"]
    e2e.kubectl("cordon", node)
    try:
        e2e.until(
            120,
            f"two workers that train, none of them on {node}",
            lambda: (
                {pod["spec"].get("nodeName") for pod in running.pods()}.isdisjoint({node})
                and len(running.pods()) == running.status()["workers"]["active"] == 2
            ),
        )
        e2e.drain(node, running.name)
    finally:
        e2e.kubectl("uncordon", node)
    running.until_goes_on()
    status = running.status()
    assert (status["data"]["repeated"], status["data"]["lost"], status["statesLost"]) == (0, 0, 0)
    assert status["restarts"]["total"] == 0  # they had left before the drain


@pytest.mark.slow
def test_job_deleted_without_operator_takes_everything_along(e2e: E2ECluster, start: Start) -> None:
    running = start("orphaned", workers=1, epochs=100_000)
    running.until_trains(1)
    deployment = e2e.kubectl("get", "deployments", "-n", OPERATOR_NAMESPACE, "-o", "name").split()[0]
    replicas = e2e.kubectl("get", deployment, "-n", OPERATOR_NAMESPACE, "-o", "jsonpath={.spec.replicas}")
    e2e.kubectl("scale", deployment, "-n", OPERATOR_NAMESPACE, "--replicas=0")
    try:
        e2e.until(
            120,
            "the operator to go",
            lambda: not e2e.pods(OPERATOR_NAMESPACE, OPERATOR_LABELS),
        )
        e2e.kubectl("delete", "stj", "orphaned", "-n", running.namespace, "--timeout=60s")
        e2e.until(120, "all that the job made to go", lambda: not left_of(e2e, running))
    finally:
        e2e.kubectl("scale", deployment, "-n", OPERATOR_NAMESPACE, f"--replicas={replicas}")
        until_operator_is_ready(e2e)
