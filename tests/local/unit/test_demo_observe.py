from __future__ import annotations

import json
from typing import Any

import pytest

from springtide_demo.observe import PodView, WorkerWatch, node_to_drain, pod_view, process_id


def pod(name: str = "digits-worker-0-0", **changes: Any) -> dict[str, Any]:
    status = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [{"containerID": "process://41", "state": {"running": {"startedAt": "t"}}}],
    }
    made: dict[str, Any] = {
        "metadata": {"name": name, "uid": f"uid-{name}"},
        "spec": {"nodeName": "node-1"},
        "status": status | changes,
    }
    return made


def ended(code: int, message: str = "", pid: int = 41) -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "message": message, "containerID": f"process://{pid}"}}
    return {
        "phase": "Failed" if code else "Succeeded",
        "containerStatuses": [{"containerID": f"process://{pid}", "state": state}],
    }


def test_a_running_pod_has_its_process() -> None:
    view = pod_view(pod())
    assert (view.pid, view.ready, view.node, view.leaving, view.outcome) == (41, True, "node-1", False, {})


def test_a_pod_without_a_status_is_pending() -> None:
    view = pod_view({"metadata": {"name": "a", "uid": "b"}})
    assert (view.phase, view.pid, view.ready, view.node) == ("Pending", None, False, "")


def test_an_ended_pod_has_its_outcome_and_no_process() -> None:
    view = pod_view(pod(**ended(0, json.dumps({"outcome": "Finished"}))))
    assert (view.pid, view.past_pids, view.exit_code, view.outcome) == (
        None,
        (41,),
        0,
        {"outcome": "Finished"},
    )


@pytest.mark.parametrize("message", ["", "Traceback", "[1]"])
def test_a_message_that_is_no_outcome_is_none(message: str) -> None:
    assert pod_view(pod(**ended(1, message))).outcome == {}


def test_only_the_embedded_clusters_containers_have_a_process_id() -> None:
    assert process_id("process://7") == 7
    assert process_id("containerd://abc") is None
    assert process_id(None) is None


def test_the_watch_notes_when_a_process_ended_once() -> None:
    watch = WorkerWatch()
    watch.update([pod_view(pod())], 1.0)
    watch.update([pod_view(pod(**ended(137)))], 2.0)
    watch.update([pod_view(pod(**ended(137)))], 3.0)
    assert [(p.pid, p.ended_at) for p in watch.processes()] == [(41, 2.0)]


def test_a_pod_that_vanished_has_ended() -> None:
    watch = WorkerWatch()
    watch.update([pod_view(pod())], 1.0)
    watch.update([], 2.0)
    assert [p.ended_at for p in watch.processes()] == [2.0]


def test_container_restarted_in_place_is_two_processes() -> None:
    watch = WorkerWatch()
    watch.update([pod_view(pod())], 1.0)
    again = {
        "containerID": "process://42",
        "state": {"running": {}},
        "lastState": ended(1)["containerStatuses"][0]["state"],
    }
    watch.update([pod_view(pod(containerStatuses=[again]))], 2.0)
    assert [(p.pid, p.ended_at) for p in watch.processes()] == [(41, 2.0), (42, None)]


def test_the_first_finished_outcome_is_kept() -> None:
    watch = WorkerWatch()
    watch.update([pod_view(pod(**ended(0, json.dumps({"outcome": "Left"}))))], 1.0)
    assert watch.outcome == {}
    watch.update(
        [
            pod_view(
                pod("digits-worker-1-0", **ended(0, json.dumps({"outcome": "Finished", "step": 9}), pid=50))
            )
        ],
        2.0,
    )
    assert watch.outcome["step"] == 9
    assert {p.pod: p.outcome for p in watch.processes()} == {
        "digits-worker-0-0": "",
        "digits-worker-1-0": "Finished",
    }


def running(name: str, node: str) -> PodView:
    view = pod(name)
    view["spec"]["nodeName"] = node
    return pod_view(view)


def test_the_drained_node_has_workers_and_best_no_controller() -> None:
    workers = [running("a", "node-1"), running("b", "node-1"), running("c", "node-2"), running("d", "node-3")]
    assert node_to_drain(workers, [running("coordinator", "node-2")]) == "node-3"
    assert (
        node_to_drain(workers, [running("coordinator", "node-2"), running("operator", "node-3")]) == "node-1"
    )
    with pytest.raises(ValueError, match="no node runs a worker"):
        node_to_drain([], [])
