"""How a worker's end is read from its pod."""

from __future__ import annotations

import json
from typing import Any

import pytest
from operator_world import World, finished_message, job_object

from springtide_operator.api import reasons
from springtide_operator.manifests.worker import worker_pod
from springtide_operator.plan import observe
from springtide_operator.plan.observation import WorkerPod

TRACEBACK = """loading
Traceback (most recent call last):
  File "/app/train.py", line 31, in <module>
    main()
  File "/app/train.py", line 9, in main
    raise ValueError("bad batch")
ValueError: bad batch
"""


def pod_that(change: Any) -> WorkerPod:
    world = World(job=job_object())
    raw = world.add(worker_pod(world.parsed(), 0, 0, "10.0.0.1:7070"))
    world.run(raw)
    change(world, raw)
    parsed = observe.worker_pod(raw)
    assert parsed is not None
    return parsed


def ended(code: int, message: str = "", reason: str | None = None) -> WorkerPod:
    return pod_that(lambda world, raw: world.end(raw, code, message, reason))


def test_a_running_pod_has_not_ended() -> None:
    pod = pod_that(lambda world, raw: None)
    assert pod.end is None
    assert pod.live
    assert pod.running


def test_finished_carries_what_the_worker_said() -> None:
    end = ended(0, finished_message(3)).end
    assert end is not None
    assert end.finished is not None
    assert end.kind == reasons.END_FINISHED
    assert (end.finished.incarnation, end.finished.generation, end.finished.step) == (3, 7, 2400)
    assert end.finished.values == {"test_accuracy": 0.978}
    assert end.finished.data["totalSeen"] == 431100


@pytest.mark.parametrize("code", [1, 255])
def test_finished_with_another_exit_code_is_a_failure(code: int) -> None:
    end = ended(code, finished_message(3)).end
    assert end is not None
    assert (end.kind, end.exit_code) == (reasons.END_FAILED, code)
    assert f"exited with code {code}" in end.message


@pytest.mark.parametrize(
    ("code", "reason", "number"), [(134, None, 6), (139, None, 11), (137, None, 9), (137, "OOMKilled", 9)]
)
def test_finished_worker_killed_at_its_planned_end_has_finished(
    code: int, reason: str | None, number: int
) -> None:
    """Kill a finished worker at its end (a library with threads that live too long does): it has finished."""
    end = ended(code, finished_message(3), reason).end
    assert end is not None
    assert end.finished is not None
    assert (end.kind, end.exit_code) == (reasons.END_FINISHED, code)
    assert f"killed by signal {number}" in end.message


def test_job_says_that_the_finished_process_was_killed() -> None:
    world = World(job=job_object(1))
    world.settle()
    world.end(world.workers()[0], 134, finished_message(1))
    world.settle()
    (succeeded,) = (c for c in world.status["conditions"] if c["type"] == "Succeeded")
    assert (succeeded["status"], succeeded["reason"]) == ("True", reasons.WORKER_FINISHED)
    assert "killed by signal 6" in succeeded["message"]


@pytest.mark.parametrize(
    ("code", "message", "reason", "kind", "word", "says"),
    [
        (0, "", None, reasons.END_FAILED, "NotFinished", "springtide.init()"),
        (0, "bye", None, reasons.END_FAILED, "NotFinished", "bye"),
        (0, '{"outcome": "Left", "reason": "SIGTERM"}', None, reasons.END_LEFT, "Left", "SIGTERM"),
        (
            0,
            '{"outcome": "Left", "reason": "the job is finished", "finished": true}',
            None,
            reasons.END_SURPLUS,
            "Left",
            "the job had finished",
        ),
        (1, TRACEBACK, None, reasons.END_FAILED, "Error", "ValueError: bad batch"),
        (1, TRACEBACK, None, reasons.END_FAILED, "Error", 'train.py", line 9'),
        (137, "step 3", None, reasons.END_FAILED, "Error", "killed by signal 9"),
        (139, "Segfault", None, reasons.END_FAILED, "Error", "killed by signal 11: Segfault"),
        (137, "", "OOMKilled", reasons.END_FAILED, "OOMKilled", "out of memory"),
        (128, 'exec: "pyhton": not found', "StartError", reasons.END_FAILED, "StartError", "pyhton"),
        (1, '{"outcome": ', None, reasons.END_FAILED, "Error", '{"outcome":'),
        (1, "[1, 2]", None, reasons.END_FAILED, "Error", "[1, 2]"),
        (1, '{"outcome": 7}', None, reasons.END_FAILED, "Error", "exited with code 1"),
    ],
)
def test_ends(code: int, message: str, reason: str | None, kind: str, word: str, says: str) -> None:
    end = ended(code, message, reason).end
    assert end is not None
    assert (end.kind, end.reason) == (kind, word)
    assert says in end.message


def test_the_log_of_a_killed_process_is_not_given_as_the_reason() -> None:
    end = ended(137, "step 3 of 9").end
    assert end is not None
    assert "step 3" not in end.message


def test_a_failure_names_exception_message_and_frame() -> None:
    said = {"outcome": "Failed", "exception": "KeyError", "message": "'lr'", "frame": "train.py:31 in main"}
    end = ended(1, json.dumps(said)).end
    assert end is not None
    assert end.message == "KeyError: 'lr' (train.py:31 in main)"


@pytest.mark.parametrize("reason", ["ContainerStatusUnknown", "Unknown"])
def test_container_lost_sight_of_by_node_is_no_script_failure(reason: str) -> None:
    end = ended(255, "The container could not be located when the pod was terminated", reason).end
    assert end is not None
    assert (end.kind, end.reason) == (reasons.END_PREEMPTED, reason)
    assert "its node lost sight of it" in end.message


def test_pod_past_its_time_failed_although_container_is_unknown() -> None:
    def over(world: World, raw: dict[str, Any]) -> None:
        world.end(raw, 137, "", reason="ContainerStatusUnknown")
        raw["status"] |= {"reason": "DeadlineExceeded", "message": "Pod was active on the node for too long"}

    end = pod_that(over).end
    assert end is not None
    assert end.kind == reasons.END_FAILED


@pytest.mark.parametrize("reason", ["TopologyAffinityError", "SomeReasonOfNextYear"])
def test_kubelet_refusing_a_pod_is_no_failure_of_the_script(reason: str) -> None:
    def rejected(world: World, raw: dict[str, Any]) -> None:
        raw["status"] = {
            "phase": "Failed",
            "reason": reason,
            "message": "Pod was rejected: no NUMA node fits",
        }

    end = pod_that(rejected).end
    assert end is not None
    assert (end.kind, end.reason) == (reasons.END_PREEMPTED, reason)


@pytest.mark.parametrize(
    "message",
    [
        'Usage of EmptyDir volume "springtide-shm" exceeds the limit "1Gi". ',
        "Pod ephemeral local storage usage exceeds the total limit of containers 10Gi. ",
        'Container worker exceeded its local ephemeral storage limit "10Gi". ',
    ],
)
def test_a_pod_that_is_evicted_for_a_limit_of_its_own_has_failed(message: str) -> None:
    def evicted(world: World, raw: dict[str, Any]) -> None:
        world.end(raw, 137)
        raw["status"] |= {"reason": "Evicted", "message": message}

    end = pod_that(evicted).end
    assert end is not None
    assert (end.kind, end.reason) == (reasons.END_FAILED, "Evicted")
    assert message.strip() in end.message

    def marked(world: World, raw: dict[str, Any]) -> None:
        evicted(world, raw)
        raw["status"]["conditions"] = [
            {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet"}
        ]

    assert pod_that(marked).end.kind == reasons.END_PREEMPTED  # type: ignore[union-attr]


def test_a_pod_that_is_evicted_for_its_nodes_sake_has_not_failed() -> None:
    """Kubelets before DisruptionTarget, too."""

    def evicted(world: World, raw: dict[str, Any]) -> None:
        world.end(raw, 137)
        message = (
            "The node was low on resource: ephemeral-storage. Threshold quantity: 1Gi, available: 900Mi."
            " Container worker was using 10Gi, request is 0, has larger consumption of ephemeral-storage."
        )
        raw["status"] |= {"reason": "Evicted", "message": message}

    assert pod_that(evicted).end.kind == reasons.END_PREEMPTED  # type: ignore[union-attr]


@pytest.mark.parametrize("reason", ["Evicted", "Preempting", "OutOfcpu", "NodeLost", "Terminated"])
def test_the_nodes_reasons_are_no_failures(reason: str) -> None:
    def evicted(world: World, raw: dict[str, Any]) -> None:
        raw["status"] = {"phase": "Failed", "reason": reason, "message": "low on memory"}

    end = pod_that(evicted).end
    assert end is not None
    assert (end.kind, end.reason, end.message) == (reasons.END_PREEMPTED, reason, "low on memory")


def test_a_disruption_is_no_failure_but_finished_stays_finished() -> None:
    assert pod_that(lambda world, raw: world.evict(raw)).end.kind == reasons.END_PREEMPTED  # type: ignore[union-attr]

    def finished_then_disrupted(world: World, raw: dict[str, Any]) -> None:
        world.end(raw, 0, finished_message(1))
        raw["status"]["conditions"] = [{"type": "DisruptionTarget", "status": "True"}]

    assert pod_that(finished_then_disrupted).end.kind == reasons.END_FINISHED  # type: ignore[union-attr]


def test_a_failed_init_container_is_named() -> None:
    def broken(world: World, raw: dict[str, Any]) -> None:
        raw["status"] = {
            "phase": "Failed",
            "initContainerStatuses": [
                {"name": "fetch", "state": {"terminated": {"exitCode": 4, "message": "no such bucket"}}}
            ],
            "containerStatuses": [{"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}],
        }

    end = pod_that(broken).end
    assert end is not None
    assert end.kind == reasons.END_FAILED
    assert "'fetch'" in end.message
    assert "no such bucket" in end.message


def test_script_container_decides_beside_running_sidecars() -> None:
    def ended_beside_sidecar(world: World, raw: dict[str, Any]) -> None:
        raw["spec"]["containers"].insert(0, {"name": "proxy", "image": "p"})
        raw["status"]["containerStatuses"] = [
            {"name": "proxy", "state": {"running": {}}},
            {"name": "worker", "state": {"terminated": {"exitCode": 1, "message": "boom"}}},
        ]

    pod = pod_that(ended_beside_sidecar)
    assert pod.end is not None
    assert pod.phase == "Running"
    assert not pod.live


def test_container_put_first_by_webhook_is_not_the_script() -> None:
    """The template's only container has a name of the user's own."""
    job = job_object(1)
    job["spec"]["workers"]["template"]["spec"]["containers"][0]["name"] = "train"
    world = World(job=job)
    world.settle()
    (raw,) = world.workers()
    raw["spec"]["containers"].insert(0, {"name": "a-proxy", "image": "p"})
    proxy = {"name": "a-proxy", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    raw["status"]["containerStatuses"] = [proxy, {"name": "train", "state": {"waiting": {}}}]
    waits = observe.worker_pod(raw)
    assert waits is not None
    assert (waits.end, waits.running) == (None, False)
    raw["status"]["containerStatuses"][1]["state"] = {
        "terminated": {"exitCode": 0, "message": finished_message(1)}
    }
    ended = observe.worker_pod(raw)
    assert ended is not None
    assert ended.end is not None
    assert ended.end.kind == reasons.END_FINISHED


def test_beside_injected_containers_own_ones_decide_running() -> None:
    job = job_object(1)
    job["spec"] |= {"strategy": {"type": "ParameterServer"}, "parameterServers": {"replicas": 1}}
    world = World(job=job)
    world.settle()
    proxy = {"name": "a-proxy", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    for raw in (world.coordinators()[0], world.servers()[0]):
        raw["spec"]["containers"].insert(0, {"name": "a-proxy", "image": "p"})
        own = raw["spec"]["containers"][1]["name"]
        raw["status"]["containerStatuses"] = [proxy, {"name": own, "state": {"waiting": {}}}]
    coordinator, serving = (
        observe.coordinator_pod(world.coordinators()[0]),
        observe.server_pod(world.servers()[0]),
    )
    assert coordinator is not None
    assert serving is not None
    assert (coordinator.running_since, serving.running) == (None, False)


@pytest.mark.parametrize(
    ("waiting", "reason", "says"),
    [
        ("ErrImagePull", reasons.IMAGE_PULL_FAILED, "'img'"),
        ("ErrImagePull", reasons.IMAGE_PULL_FAILED, "(secret not found)"),
        ("ImagePullBackOff", reasons.IMAGE_PULL_FAILED, "digits-worker-0-0"),
        ("RegistryUnavailable", reasons.IMAGE_PULL_FAILED, "(secret not found)"),
        ("CreateContainerConfigError", reasons.CONTAINER_CONFIG_ERROR, "secret not found"),
    ],
)
def test_what_keeps_a_pod_waiting_is_named(waiting: str, reason: str, says: str) -> None:
    def stuck(world: World, raw: dict[str, Any]) -> None:
        state = {"waiting": {"reason": waiting, "message": "secret not found"}}
        raw["status"] = {
            "phase": "Pending",
            "containerStatuses": [{"name": "worker", "image": "img", "state": state}],
        }

    problem = pod_that(stuck).problem
    assert problem is not None
    assert problem.reason == reason
    assert says in problem.message


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ('Back-off pulling image "img"', "check its name and the pull secrets"),
        ('Back-off pulling image "img": ErrImagePull: pull access denied', "secrets (pull access denied)"),
    ],
)
def test_what_the_registry_said_is_passed_on(message: str, says: str) -> None:
    def stuck(world: World, raw: dict[str, Any]) -> None:
        state = {"waiting": {"reason": "ImagePullBackOff", "message": message}}
        raw["status"] = {
            "phase": "Pending",
            "containerStatuses": [{"name": "worker", "image": "img", "state": state}],
        }

    problem = pod_that(stuck).problem
    assert problem is not None
    assert problem.message.endswith(says)


def test_an_unschedulable_pod_is_named() -> None:
    def unschedulable(world: World, raw: dict[str, Any]) -> None:
        raw["status"]["conditions"] = [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes fit"}
        ]

    problem = pod_that(unschedulable).problem
    assert problem is not None
    assert problem.reason == reasons.UNSCHEDULABLE
    assert "0/3 nodes fit" in problem.message
