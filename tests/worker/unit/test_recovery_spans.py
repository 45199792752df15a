"""A worker's way into a generation, as spans: also when it fails, and when no step follows."""

from __future__ import annotations

from recorded_spans import RecordedSpans

from springtide.coordination.progress import Commit, CommitLog
from springtide.elastic.recovery_spans import RecoverySpans
from springtide_protocol.names import GenerationName, StateName
from springtide_protocol.tracing import OFF, TraceContext, of_job

CHANGE = TraceContext(0xABC, 0xDEF)


def name(number: int) -> GenerationName:
    return GenerationName.of(1, 0, number)


class Worker:
    """The spans of one process, with a clock."""

    def __init__(self, enabled: bool = True) -> None:
        self.now = 1000.0
        self.spans = RecordedSpans(enabled=enabled)
        self.commits = CommitLog()
        self.recovery = RecoverySpans(self.spans, "uid", self.commits, 990.0, lambda: self.now)

    def begin(self, why: str = "a member is lost") -> None:
        self.recovery.begin(why)
        self.now += 2

    def start(self, number: int, change: TraceContext | None = CHANGE, stood_by: bool = False) -> None:
        traceparent = "" if change is None else str(change)
        self.recovery.started(name(number), traceparent, 1, 2, stood_by=stood_by)
        self.now += 1

    def form(self) -> None:
        self.recovery.part("form group", members=2)
        self.now += 1
        self.recovery.part("transfer state", bytes=7)
        self.recovery.formed()

    def commit(self, number: int, step: int) -> None:
        self.now += 0.5
        self.commits.add(Commit(StateName(name(number), step), self.now, 0.5, 0.0, 1, {}))

    def enters(self, number: int) -> None:
        self.begin()
        self.start(number)
        self.form()
        self.commit(number, number)
        self.recovery.look()


def test_new_process_tells_all_from_its_start_to_its_first_step() -> None:
    worker = Worker()
    worker.enters(1)
    whole = worker.spans.one("enter generation")
    assert whole.parent == CHANGE
    assert whole.context.trace_id == CHANGE.trace_id
    assert (whole.began, whole.ended) == (990.0, 1004.5)
    assert worker.spans.parts(whole) == [
        "start process",
        "wait for generation",
        "form group",
        "transfer state",
        "first step",
    ]
    ends = [(span.began, span.ended) for span in worker.spans.spans[:-1]]
    assert [end for _, end in ends[:-1]] == [begin for begin, _ in ends[1:]], "no time is left out"
    assert worker.spans.one("transfer state").attributes == {"springtide.bytes": 7}
    assert whole.attributes["springtide.new_process"] is True
    assert whole.attributes["springtide.generation"] == "1.0/1"


def test_survivor_tells_from_the_failure_on() -> None:
    worker = Worker()
    worker.enters(1)
    worker.now += 60
    began = worker.now
    worker.enters(2)
    _, whole = worker.spans.named("enter generation")
    assert whole.began == began
    assert whole.attributes["springtide.new_process"] is False
    assert "start process" not in worker.spans.parts(whole)


def test_first_step_of_the_generation_is_found_late_too() -> None:
    worker = Worker()
    worker.begin()
    worker.start(1)
    worker.form()
    for step in range(5):
        worker.commit(1, step)
    worker.recovery.look()
    worker.recovery.look()
    assert worker.spans.one("first step").attributes == {"springtide.step": 0}


def test_commits_of_the_generation_before_are_no_first_step() -> None:
    worker = Worker()
    worker.enters(1)
    worker.begin()
    worker.start(2)
    worker.form()
    worker.recovery.look()
    assert len(worker.spans.named("first step")) == 1


def test_generation_without_a_step_is_an_error_in_the_end() -> None:
    worker = Worker()
    worker.begin()
    worker.start(1)
    worker.form()
    worker.begin()
    whole = worker.spans.one("enter generation")
    assert "over before this process had made a step" in whole.error
    assert "first step" not in worker.spans.parts(whole)


def test_failed_formation_is_an_error_with_its_text() -> None:
    worker = Worker()
    worker.begin()
    worker.start(1)
    worker.recovery.failed(RuntimeError("connection reset by peer"))
    whole = worker.spans.one("enter generation")
    assert whole.error == "RuntimeError: connection reset by peer"
    assert worker.spans.parts(whole) == ["start process", "wait for generation"]
    worker.enters(2)
    assert worker.spans.named("enter generation")[1].error == ""


def test_standby_begins_with_its_generation() -> None:
    worker = Worker()
    worker.begin()
    worker.now += 3600
    worker.start(1, stood_by=True)
    worker.form()
    worker.commit(1, 1)
    worker.recovery.look()
    whole = worker.spans.one("enter generation")
    assert whole.ended - whole.began == 2.5
    assert whole.attributes["springtide.stood_by_seconds"] == 3602.0
    assert worker.spans.parts(whole) == ["form group", "transfer state", "first step"]


def test_coordinator_without_traces_leaves_the_jobs_own() -> None:
    worker = Worker()
    worker.begin()
    worker.start(1, change=None)
    worker.form()
    worker.recovery.close()
    assert worker.spans.one("enter generation").parent == of_job("uid")


def test_worker_that_is_let_go_leaves_without_an_error() -> None:
    worker = Worker()
    worker.begin()
    worker.recovery.left("the job needs fewer")
    worker.recovery.close()
    [found] = worker.spans.spans
    assert (found.name, found.parent, found.error) == ("leave", of_job("uid"), "")
    assert (found.began, found.ended) == (1000.0, 1002.0)
    assert found.attributes == {"springtide.reason": "the job needs fewer"}


def test_end_of_the_process_records_where_it_stood() -> None:
    worker = Worker()
    worker.begin()
    worker.recovery.close()
    assert "ended before it was in a generation" in worker.spans.one("enter generation").error
    formed = Worker()
    formed.begin()
    formed.start(1)
    formed.form()
    formed.recovery.close()
    assert formed.spans.one("enter generation").error == ""


def test_nothing_is_kept_where_nobody_records() -> None:
    worker = Worker(enabled=False)
    worker.enters(1)
    worker.recovery.failed(ValueError("no"))
    worker.recovery.close()
    assert not worker.spans.spans
    RecoverySpans(OFF, "uid", CommitLog(), 0.0).begin("why")


def test_first_commit_is_that_of_the_newest_generation_only() -> None:
    worker = Worker()
    worker.commit(1, 4)
    worker.commit(1, 5)
    worker.commit(2, 6)
    assert worker.commits.first_of(name(1)) is None
    found = worker.commits.first_of(name(2))
    assert found is not None
    assert found.state.step == 6
    assert CommitLog().first_of(name(1)) is None
