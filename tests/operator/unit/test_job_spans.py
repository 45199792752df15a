"""The operator's spans: pods that take the place of lost ones, coordinators, the job itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from operator_world import job_object
from recorded_spans import RecordedSpans

from springtide_operator.api import reasons
from springtide_operator.api.job import Job
from springtide_operator.job_spans import FORGET_SECONDS, PATIENCE_SECONDS, JobSpans
from springtide_operator.plan.observation import (
    CoordinatorPod,
    End,
    Observation,
    Report,
    ServerPod,
    TraceReport,
    WorkerPod,
)
from springtide_protocol.tracing import TraceContext, of_coordinator, of_job

UID = "uid-of-the-job"
LOSS = TraceContext(0xABC, 0xDEF)


def worker(slot: int, attempt: int = 0, **fields: Any) -> WorkerPod:
    fields = {"phase": "Running", "running": True, "node": "node-1", **fields}
    return WorkerPod(f"w-{slot}-{attempt}", f"uid-{slot}-{attempt}", slot, attempt, **fields)


def report(*lost: str, incarnation: int = 1) -> Report:
    traces = (TraceReport(str(LOSS), frozenset(lost)),) if lost else ()
    return Report(incarnation, 0, 0.0, "RUNNING", traces=traces)


class Operator:
    """The spans of one job, with a clock."""

    def __init__(self, enabled: bool = True) -> None:
        self.spans = RecordedSpans(enabled=enabled)
        self.job = Job.parse(job_object(2))
        self.traces = JobSpans(self.spans, "ml", "digits", UID)
        self.now = 1000.0
        self.said: Report | None = report()

    def look(self, *workers: WorkerPod, **fields: Any) -> None:
        """Look at these pods, a second after the last look."""
        self.now += 1
        found = Observation(workers=workers, report=self.said, **fields)
        self.traces.look(self.job, found, self.now)


def ended(pod: WorkerPod) -> WorkerPod:
    end = End(reasons.END_FAILED, "OOMKilled", "it took too much")
    return replace(pod, running=False, phase="Failed", end=end)


def test_lost_workers_successor_is_a_part_of_the_loss() -> None:
    operator = Operator()
    operator.look(worker(0), worker(1))
    operator.look(worker(0), ended(worker(1)))
    operator.look(worker(0), worker(1, 1, phase="Pending", running=False, node=None))
    operator.said = report("uid-1-0")
    operator.look(worker(0), worker(1, 1, phase="Pending", running=False))
    assert not operator.spans.spans
    operator.look(worker(0), worker(1, 1))
    found = operator.spans.one("replace pod")
    assert found.parent == LOSS
    assert found.linked == (of_job(UID),)
    assert (found.began, found.ended) == (1002.0, 1005.0)
    assert [(event.name, event.at) for event in found.events] == [
        ("pod created", 1003.0),
        ("pod scheduled", 1004.0),
        ("pod runs", 1005.0),
    ]
    assert found.attributes["springtide.reason"] == "OOMKilled: it took too much"
    assert found.attributes["springtide.lost_pod"] == "w-1-0"
    assert found.attributes["k8s.pod.name"] == "w-1-1"
    operator.look(worker(0), worker(1, 1))
    assert len(operator.spans.spans) == 1


def test_pod_that_is_simply_gone_is_noticed() -> None:
    operator = Operator()
    operator.look(worker(0), worker(1))
    operator.look(worker(0))
    operator.said = report("uid-1-0")
    operator.look(worker(0), worker(1, 1))
    assert operator.spans.one("replace pod").began == 1002.0


def test_successor_that_is_lost_too_leaves_one_span_of_the_place() -> None:
    operator = Operator()
    operator.said = report("uid-1-0")
    operator.look(worker(0), worker(1))
    operator.look(worker(0), worker(1, 1, running=False, node=None))
    operator.look(worker(0), worker(1, 2, running=False, node=None))
    operator.look(worker(0), worker(1, 2))
    found = operator.spans.one("replace pod")
    assert [event.name for event in found.events].count("pod created") == 2
    assert found.attributes["k8s.pod.name"] == "w-1-2"


def test_span_waits_for_the_coordinators_word_and_not_for_ever() -> None:
    operator = Operator()
    operator.look(worker(0), worker(1))
    operator.look(worker(0))
    operator.look(worker(0), worker(1, 1))
    assert not operator.spans.spans
    operator.now += PATIENCE_SECONDS
    operator.look(worker(0), worker(1, 1))
    found = operator.spans.one("replace pod")
    assert found.parent == of_job(UID)
    assert found.linked == ()
    assert found.ended == 1003.0


def test_pods_that_nobody_replaces_are_no_gap() -> None:
    operator = Operator()
    gone = replace(worker(1), gone_by=1.0, deleted_because=reasons.DELETE_SCALE_DOWN)
    operator.look(worker(0), worker(1))
    operator.look(worker(0), gone)
    operator.look(worker(0))
    operator.now += 10
    operator.look(worker(0), worker(1, 1))  # the job is larger again
    operator.now += PATIENCE_SECONDS
    operator.look(worker(0), worker(1, 1))
    assert not operator.spans.spans


def test_place_that_stays_empty_is_forgotten() -> None:
    operator = Operator()
    operator.look(worker(0), worker(1))
    operator.look(worker(0))
    operator.now += FORGET_SECONDS
    operator.look(worker(0))
    operator.look(worker(0), worker(1, 1))
    operator.now += PATIENCE_SECONDS
    operator.look(worker(0), worker(1, 1))
    assert not operator.spans.spans


def test_suspended_job_has_lost_nothing() -> None:
    operator = Operator()
    operator.look(worker(0), worker(1))
    suspended = job_object(2)
    suspended["spec"]["suspend"] = True
    resumed, operator.job = operator.job, Job.parse(suspended)
    operator.look()
    operator.job = resumed
    operator.look(worker(0, 1), worker(1, 1))
    operator.now += PATIENCE_SECONDS
    operator.look(worker(0, 1), worker(1, 1))
    assert not operator.spans.spans


def test_servers_are_replaced_alike() -> None:
    operator = Operator()
    before, after = ServerPod("ps-0-0", "uid-ps-0", 0, 0), ServerPod("ps-0-1", "uid-ps-1", 0, 1, running=True)
    operator.look(servers=(before,))
    operator.said = report("uid-ps-0")
    operator.look(servers=(replace(before, phase="Failed"),))
    operator.look(servers=(after,))
    found = operator.spans.one("replace pod")
    assert found.parent == LOSS
    assert found.attributes["springtide.role"] == "parameter-server"


def test_coordinators_successor_has_a_trace_that_it_computes_too() -> None:
    operator = Operator()
    old = CoordinatorPod("c-1", "uid-c-1", 1, running_since=1.0)
    new = CoordinatorPod("c-2", "uid-c-2", 2, running_since=2.0)
    operator.look(coordinators=(old,))
    operator.look(coordinators=(replace(old, lost=True, why_lost="its node is lost"),))
    operator.look(coordinators=(new,))
    assert not operator.spans.spans  # it has not answered
    operator.said = report(incarnation=2)
    operator.look(coordinators=(new,))
    found = operator.spans.one("replace coordinator")
    assert (found.context, found.parent, found.linked) == (of_coordinator(UID, 2, 0), None, (of_job(UID),))
    assert found.attributes["springtide.reason"] == "its node is lost"


def test_ended_job_is_a_span_from_its_creation() -> None:
    operator = Operator()
    over = {
        "state": reasons.STATE_SUCCEEDED,
        "completionTime": "2026-01-01T00:10:00Z",
        "step": 480,
        "recoveries": 2,
    }
    operator.traces.ended({}, over, "2026-01-01T00:00:00Z")
    operator.traces.ended(over, over, "2026-01-01T00:00:00Z")
    found = operator.spans.one("job")
    assert (found.context, found.parent, found.error) == (of_job(UID), None, "")
    assert found.ended - found.began == 600
    assert found.attributes["springtide.step"] == 480
    assert found.attributes["springtide.job"] == "digits"


def test_failed_job_says_why() -> None:
    operator = Operator()
    condition = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "7 times"}
    over = {
        "state": reasons.STATE_FAILED,
        "completionTime": "2026-01-01T00:10:00Z",
        "conditions": [condition],
    }
    operator.traces.ended({}, over, "2026-01-01T00:00:00Z")
    assert operator.spans.one("job").error == "BackoffLimitExceeded: 7 times"


def test_nothing_is_kept_where_nobody_records() -> None:
    operator = Operator(enabled=False)
    operator.look(worker(0), worker(1))
    operator.look(worker(0))
    operator.look(worker(0), worker(1, 1))
    operator.traces.ended({}, {"completionTime": "2026-01-01T00:10:00Z"}, "2026-01-01T00:00:00Z")
    operator.now += PATIENCE_SECONDS
    operator.look(worker(0), worker(1, 1))
    assert not operator.spans.spans
