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


def test_finished_with_another_exit_code_is_a_failure() -> None:
    end = ended(1, finished_message(3)).end
    assert end is not None
    assert end.kind == reasons.END_FAILED


@pytest.mark.parametrize(
    ("code", "message", "reason", "kind", "word", "says"),
    [
        (0, "", None, reasons.END_FAILED, "NotFinished", "springtide.init()"),
        (0, "bye", None, reasons.END_FAILED, "NotFinished", "bye"),
        (0, '{"outcome": "Left", "reason": "SIGTERM"}', None, reasons.END_LEFT, "Left", "SIGTERM"),
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


def test_the_scripts_container_decides_beside_sidecars_that_run_on() -> None:
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


@pytest.mark.parametrize(
    ("waiting", "reason", "says"),
    [
        ("ErrImagePull", reasons.IMAGE_PULL_FAILED, "'img'"),
        ("ImagePullBackOff", reasons.IMAGE_PULL_FAILED, "digits-worker-0-0"),
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


def test_an_unschedulable_pod_is_named() -> None:
    def unschedulable(world: World, raw: dict[str, Any]) -> None:
        raw["status"]["conditions"] = [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes fit"}
        ]

    problem = pod_that(unschedulable).problem
    assert problem is not None
    assert problem.reason == reasons.UNSCHEDULABLE
    assert "0/3 nodes fit" in problem.message
