"""Next actions of the kubelet, its restarts, and the status that follows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide_local.kubelet.plan import decide
from springtide_local.kubelet.restarts import Backoff, describe
from springtide_local.kubelet.state import ContainerRecord, Running, Terminated, Waiting, new_records
from springtide_local.kubelet.status import phase, pod_status

NOW = 1000.0


def ended(code: int, at: float = NOW) -> Terminated:
    return Terminated(code, "Completed" if code == 0 else "Error", at - 1, at)


def pod(
    *mains: str, inits: tuple[str, ...] = (), sidecars: tuple[str, ...] = ()
) -> dict[str, ContainerRecord]:
    made = [{"name": name, "image": "i", "restartPolicy": "Always"} for name in sidecars]
    made += [{"name": name, "image": "i"} for name in inits]
    return new_records(
        {"initContainers": made, "containers": [{"name": name, "image": "i"} for name in mains]}
    )


def start(record: ContainerRecord, now: float = NOW) -> None:
    """Change a record as the worker does when it starts the container."""
    before = record.ended
    if before is not None:
        record.backoff = record.backoff.next(before.finished_at, now)
        record.restarts += 1
        record.last = before
    record.starts += 1
    record.state = Running(f"process://{record.starts}", now)
    record.passed_startup = record.ready = True


def test_first_restart_is_immediate_then_delay_doubles_to_5_min() -> None:
    backoff, now, delays = Backoff(), 0.0, []
    for _ in range(8):
        ready = backoff.ready_at(now)
        delays.append(ready - now)
        backoff = backoff.next(now, ready)
        now = ready
    assert delays == [0, 10, 20, 40, 80, 160, 300, 300]


def test_ten_quiet_minutes_forget_the_delay() -> None:
    backoff = Backoff(160.0, updated=0.0)
    assert backoff.ready_at(600.0) == 760.0
    assert backoff.ready_at(601.0) == 601.0
    assert backoff.next(601.0, 601.0) == Backoff(10.0, 601.0)


@pytest.mark.parametrize(("seconds", "text"), [(10, "10s"), (80, "1m20s"), (300, "5m0s")])
def test_delays_are_printed_as_the_kubelet_does(seconds: float, text: str) -> None:
    assert describe(seconds) == text


def test_all_containers_start_together() -> None:
    assert decide(pod("a", "b"), "Always", "p", NOW).start == ["a", "b"]


def test_init_containers_run_one_after_the_other() -> None:
    records = pod("main", inits=("one", "two"))
    assert decide(records, "Never", "p", NOW).start == ["one"]
    start(records["one"])
    assert decide(records, "Never", "p", NOW).start == []
    records["one"].state = ended(0)
    assert decide(records, "Never", "p", NOW).start == ["two"]
    start(records["two"])
    records["two"].state = ended(0)
    assert decide(records, "Never", "p", NOW).start == ["main"]


def test_a_failed_init_container_ends_the_pod_or_is_tried_again() -> None:
    records = pod("main", inits=("one",))
    start(records["one"])
    records["one"].state = ended(2)
    assert decide(records, "Never", "p", NOW).finished == "init container one failed with exit code 2"
    assert phase(records, "Never") == "Failed"
    assert decide(records, "OnFailure", "p", NOW).start == ["one"]
    assert phase(records, "OnFailure") == "Pending"


def test_a_sidecar_starts_first_and_others_wait_until_it_is_up() -> None:
    records = pod("main", sidecars=("side",))
    assert decide(records, "Never", "p", NOW).start == ["side"]
    start(records["side"])
    records["side"].passed_startup = False
    assert decide(records, "Never", "p", NOW).start == []
    records["side"].passed_startup = True
    assert decide(records, "Never", "p", NOW).start == ["main"]
    start(records["main"])
    records["side"].state = ended(1)
    assert decide(records, "Never", "p", NOW).start == ["side"]
    records["main"].state = ended(0)
    assert decide(records, "Never", "p", NOW).finished


@pytest.mark.parametrize(
    ("policy", "code", "again"),
    [
        ("Always", 0, True),
        ("Always", 1, True),
        ("OnFailure", 1, True),
        ("OnFailure", 0, False),
        ("Never", 1, False),
    ],
)
def test_restart_policies(policy: str, code: int, again: bool) -> None:
    records = pod("main")
    start(records["main"])
    records["main"].state = ended(code)
    decision = decide(records, policy, "p", NOW)
    assert decision.start == (["main"] if again else [])
    assert bool(decision.finished) is not again


def test_a_crash_loop_waits_says_so_and_starts_again() -> None:
    records = pod("main")
    record = records["main"]
    start(record)
    record.state = ended(1)
    start(record)
    record.state = ended(1, NOW + 1)
    decision = decide(records, "Always", "p_ns(uid)", NOW + 1)
    assert decision.start == []
    text = "back-off 10s restarting failed container=main pod=p_ns(uid)"
    assert decision.waiting == {"main": Waiting("CrashLoopBackOff", text)}
    assert decision.wake_at == NOW + 11
    record.last, record.state = record.state, decision.waiting["main"]
    assert decide(records, "Always", "p_ns(uid)", NOW + 11).start == ["main"]
    assert phase(records, "Always") == "Running"


def test_what_could_not_be_made_is_not_tried_before_its_time() -> None:
    records = pod("main", "other")
    records["main"].state = Waiting("ImagePullBackOff")
    records["main"].retry_at = NOW + 5
    decision = decide(records, "Never", "p", NOW)
    assert (decision.start, decision.wake_at) == (["other"], NOW + 5)


STATES = st.sampled_from([Waiting("ContainerCreating"), Running("process://1", NOW), ended(0), ended(1)])


@given(
    st.lists(STATES, min_size=1, max_size=4), st.sampled_from(["Always", "OnFailure", "Never"]), st.booleans()
)
def test_a_pod_is_finished_exactly_when_its_phase_is_final(
    states: list[Any], policy: str, started_before: bool
) -> None:
    records = pod(*[f"c{i}" for i in range(len(states))])
    for record, state in zip(records.values(), states, strict=True):
        record.state = state
        record.starts = int(not isinstance(state, Waiting)) + started_before
    final = phase(records, policy) in ("Succeeded", "Failed")
    decision = decide(records, policy, "p", NOW)
    assert bool(decision.finished) == final
    assert not (decision.finished and decision.start)
    running = {name for name, record in records.items() if isinstance(record.state, Running)}
    assert not running & set(decision.start)


def _conditions(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {c["type"]: (c["status"], c.get("reason", "")) for c in status["conditions"]}


def test_conditions_follow_the_containers() -> None:
    records = pod("a", "b")
    status = pod_status({}, records, "Always", [], NOW)
    assert status["phase"] == "Pending"
    assert _conditions(status)["ContainersReady"] == ("False", "ContainersNotReady")
    start(records["a"])
    start(records["b"])
    records["b"].ready = False
    status = pod_status(status, records, "Always", [], NOW)
    assert status["phase"] == "Running"
    ready = next(c for c in status["conditions"] if c["type"] == "Ready")
    assert ready["message"] == "containers with unready status: [b]"
    records["b"].ready = True
    assert _conditions(pod_status(status, records, "Always", [], NOW))["Ready"] == ("True", "")


def test_containers_end_before_the_phase_says_so() -> None:
    records = pod("a")
    start(records["a"])
    running = pod_status({}, records, "Never", [], NOW)
    records["a"].state = ended(0)
    first = pod_status(running, records, "Never", [], NOW, settled=False)
    assert (first["phase"], _conditions(first)["Ready"][1]) == ("Running", "ContainersNotReady")
    assert "terminated" in first["containerStatuses"][0]["state"]
    assert pod_status(first, records, "Never", [], NOW)["phase"] == "Succeeded"


def test_the_time_of_a_condition_moves_only_with_its_value() -> None:
    records = pod("a")
    first = pod_status({}, records, "Always", [], NOW)
    later = pod_status(first, records, "Always", [], NOW + 60)
    assert first["conditions"] == later["conditions"]
    start(records["a"])
    times = {
        c["type"]: c["lastTransitionTime"]
        for c in pod_status(later, records, "Always", [], NOW + 90)["conditions"]
    }
    assert times["Initialized"] != times["Ready"]


def test_conditions_of_others_are_kept() -> None:
    other = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    status = pod_status({"conditions": [other], "qosClass": "Burstable"}, pod("a"), "Never", [], NOW)
    assert other in status["conditions"]
    assert status["qosClass"] == "Burstable"


def test_readiness_gates_hold_back_ready_not_containers_ready() -> None:
    records = pod("a")
    start(records["a"])
    status = pod_status({}, records, "Always", ["example.com/open"], NOW)
    assert _conditions(status)["ContainersReady"] == ("True", "")
    assert _conditions(status)["Ready"] == ("False", "ReadinessGatesNotReady")
    gate = {"type": "example.com/open", "status": "True"}
    assert (
        _conditions(pod_status({"conditions": [gate]}, records, "Always", ["example.com/open"], NOW))[
            "Ready"
        ][0]
        == "True"
    )


def test_failure_of_the_pod_is_its_phase_at_any_containers_end() -> None:
    records = pod("a")
    start(records["a"])
    records["a"].state = ended(0)
    status = pod_status({}, records, "Never", [], NOW, ("DeadlineExceeded", "too long"))
    assert (status["phase"], status["reason"], status["message"]) == (
        "Failed",
        "DeadlineExceeded",
        "too long",
    )


def test_a_container_status_has_what_clients_read() -> None:
    records = pod("a")
    start(records["a"])
    records["a"].state = Terminated(137, "Error", NOW - 5, NOW, 9, "bye", "process://7")
    start(records["a"], NOW + 1)
    (found,) = pod_status({}, records, "Always", [], NOW)["containerStatuses"]
    assert found["restartCount"] == 1
    assert found["state"] == {"running": {"startedAt": "1970-01-01T00:16:41Z"}}
    assert found["lastState"]["terminated"] == {
        "exitCode": 137,
        "signal": 9,
        "reason": "Error",
        "message": "bye",
        "startedAt": "1970-01-01T00:16:35Z",
        "finishedAt": "1970-01-01T00:16:40Z",
        "containerID": "process://7",
    }
