"""The coordinator's spans: one trace of a loss and of what makes it good, whatever happens in between."""

from __future__ import annotations

from typing import Any

from coordinator_room import generation, info, server
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from recorded_spans import RecordedSpans

from springtide_coordinator.change_traces import MOST_ANNOUNCED, ChangeTraces
from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.events import Made, MemberLost, Send
from springtide_coordinator.membership.generation import Generation
from springtide_protocol.names import Incarnation, StateName
from springtide_protocol.tracing import of_coordinator, of_job

UID = "uid-of-the-job"


def start(number: int, *members: str, servers: tuple[str, ...] = (), reason: str = "why") -> say.Start:
    name = generation(number)
    return say.Start(
        name,
        tuple(info(member) for member in members),
        StateName(name, 0),
        (),
        False,
        reason,
        tuple(server(one) for one in servers),
    )


def made(number: int, cause: str, *members: str, **options: Any) -> Made:
    return Made(start(number, *members, **options), cause, state_lost=False)


class Story:
    """A coordinator's traces, with a clock."""

    def __init__(self, incarnation: tuple[int, int] = (1, 0), enabled: bool = True) -> None:
        self.spans = RecordedSpans(enabled=enabled)
        self.traces = ChangeTraces(self.spans, UID, Incarnation(*incarnation), began=90.0)
        self.now = 100.0

    def made(self, number: int, cause: str, *members: str, wanted: int = 2, **options: Any) -> None:
        self.traces.see([made(number, cause, *members, **options)], wanted, self.now)

    def lost(self, member: str) -> None:
        lost = MemberLost(member, f"{member} is lost")
        prepare = Send(1, "w1", say.Prepare(generation(1), f"{member} is lost"))
        self.traces.see([lost, prepare], 2, self.now)

    def formed(self, number: int, *members: str) -> None:
        found = Generation(
            generation(number), tuple(info(m) for m in members), self.now, None, start(number, *members)
        )
        found.formed.update(members)
        self.traces.formed(found, self.now)

    def committed(self, number: int) -> None:
        self.traces.committed(generation(number), self.now)

    def begins(self) -> None:
        """Have two members train."""
        self.made(1, "start", "w1", "w2")
        self.formed(1, "w1", "w2")
        self.now += 1
        self.committed(1)
        self.now += 10


def test_start_is_a_part_of_the_job() -> None:
    story = Story()
    story.begins()
    found = story.spans.one("start")
    assert found.parent == of_job(UID)
    assert (found.began, found.ended) == (90.0, 101.0)
    assert story.spans.parts(found) == ["wait for members", "form generation", "first step"]


def test_failure_begins_a_trace_when_the_stream_broke() -> None:
    story = Story()
    story.begins()
    story.traces.broke("w2", story.now)
    story.now += 0.4
    story.lost("w2")
    story.now += 0.1
    story.made(2, "failure", "w1")
    story.now += 0.2
    story.formed(2, "w1")
    story.now += 0.3
    story.committed(2)
    found = story.spans.one("recovery")
    assert found.parent is None
    assert found.context.trace_id != of_job(UID).trace_id
    assert found.linked == (of_job(UID),)
    assert (found.began, found.ended) == (111.0, 112.0)
    assert [event.name for event in found.events] == ["stream broke", "member lost", "members asked to stop"]
    assert found.attributes["springtide.lost_pods"] == ["w2"]
    assert story.spans.parts(found) == ["stop members", "form generation", "first step"]
    assert str(found.context) == story.traces.traceparent
    assert story.traces.announced[-1].lost_pods == ("w2",)


def test_stream_that_came_back_is_no_notice() -> None:
    story = Story()
    story.begins()
    story.traces.broke("w2", story.now)
    story.traces.came("w2")
    story.now += 50
    story.lost("w2")
    story.made(2, "failure", "w1")
    story.committed(2)
    assert story.spans.one("recovery").began == 161.0


def test_successor_of_a_lost_worker_joins_in_its_trace() -> None:
    story = Story()
    story.begins()
    story.lost("w2")
    story.made(2, "failure", "w1")
    story.committed(2)
    story.now += 30
    successor = say.MemberInfo("later", pod_uid="another", pod_name="pod", slot=2)
    begin = start(3, "w1")
    begin = say.Start(begin.generation, (*begin.members, successor), begin.state, (), False, "it joins")
    story.traces.see([Made(begin, "join", state_lost=False)], 2, story.now)
    story.now += 1
    story.committed(3)
    recovery, join = story.spans.one("recovery"), story.spans.one("join")
    assert join.parent == recovery.context
    assert join.linked == (of_job(UID),)


def test_successor_of_a_lost_server_joins_in_its_trace() -> None:
    story = Story()
    story.made(1, "start", "w1", servers=("s1", "s2"), wanted=1)
    story.committed(1)
    story.lost("s2")
    story.made(2, "failure", "w1", servers=("s1",), wanted=1)
    story.committed(2)
    begin = start(3, "w1", servers=("s1",))
    servers = (*begin.servers, server("s2", attempt=1, pod="new"))
    begin = say.Start(begin.generation, begin.members, begin.state, (), False, "it joins", servers)
    story.traces.see([Made(begin, "join", state_lost=False)], 1, story.now)
    story.committed(3)
    assert story.spans.one("join").parent == story.spans.one("recovery").context


def test_worker_beyond_those_before_begins_a_trace_of_its_own() -> None:
    story = Story()
    story.begins()
    story.made(2, "join", "w1", "w2", "w3", wanted=3)
    story.committed(2)
    assert story.spans.one("join").parent is None


def test_worker_that_left_a_smaller_job_has_no_successor() -> None:
    story = Story()
    story.begins()
    story.made(2, "leave", "w1", wanted=1)
    story.committed(2)
    story.made(3, "join", "w1", "w2", wanted=2)
    story.committed(3)
    assert story.spans.one("join").parent is None


def test_failure_before_the_first_step_is_the_same_trace() -> None:
    story = Story()
    story.begins()
    story.lost("w2")
    story.made(2, "failure", "w1", "w3")
    told = story.traces.traceparent
    story.now += 5
    story.lost("w3")
    story.made(3, "leave", "w1")
    assert story.traces.traceparent == told
    story.committed(2)  # a late word about the one before
    assert not story.spans.named("recovery")
    story.now += 1
    story.committed(3)
    found = story.spans.one("recovery")
    assert found.attributes["springtide.cause"] == "failure"
    assert found.attributes["springtide.lost_pods"] == ["w2", "w3"]
    assert found.ended - found.began == 6


def test_failure_before_the_starts_first_step_has_its_own_trace() -> None:
    story = Story()
    story.made(1, "start", "w1", "w2")
    story.now += 3
    story.lost("w2")
    story.now += 1
    story.made(2, "failure", "w1")
    story.committed(2)
    begun, recovery = story.spans.one("start"), story.spans.one("recovery")
    assert begun.ended == recovery.began == 103.0
    assert "before a step of it was known" in begun.error
    assert recovery.parent is None
    assert recovery.error == ""


def test_generations_are_parts_of_the_job_and_link_their_change() -> None:
    story = Story()
    story.begins()
    story.lost("w2")
    story.made(2, "failure", "w1")
    story.committed(2)
    story.now += 7
    story.traces.close(story.now, "it ends")
    first, second = story.spans.named("generation")
    assert first.ended == second.began
    assert second.ended == story.now
    assert {first.parent, second.parent} == {of_job(UID)}
    assert second.linked == (story.spans.one("recovery").context,)


def test_change_without_a_step_is_an_error_in_the_end() -> None:
    story = Story()
    story.begins()
    story.lost("w2")
    story.made(2, "failure", "w1")
    story.traces.close(story.now, "it ends")
    assert story.spans.one("recovery").error == "it ends"


def test_successor_of_a_coordinator_says_that_it_took_over() -> None:
    story = Story(incarnation=(2, 0))
    adopted = Generation(generation(4), (info("w1"),), 50.0, None)
    story.traces.adopted(adopted, story.now)
    story.traces.adopted(adopted, story.now + 1)
    found = story.spans.one("take over")
    assert found.parent == of_coordinator(UID, 2, 0)
    assert (found.began, found.ended) == (90.0, 100.0)
    story.traces.close(110.0, "it ends")
    assert story.spans.one("generation").attributes["springtide.cause"] == "adopted"


def test_container_that_restarted_begins_the_trace_itself() -> None:
    story = Story(incarnation=(1, 1))
    story.made(5, "failure", "w1")
    found = story.spans.one("take over")
    assert (found.context, found.parent) == (of_coordinator(UID, 1, 1), None)


def test_nothing_is_kept_or_told_where_nobody_records() -> None:
    story = Story(enabled=False)
    story.begins()
    story.lost("w2")
    story.made(2, "failure", "w1")
    story.committed(2)
    story.traces.close(story.now, "it ends")
    assert not story.spans.spans
    assert story.traces.traceparent == ""
    assert not story.traces.announced


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
@settings(max_examples=30)
def test_changes_that_are_told_are_the_last_ones(sizes: list[int]) -> None:
    story = Story()
    for number, size in enumerate(sizes, 1):
        story.made(number, "failure", *(f"w{slot}" for slot in range(size)), wanted=100)
        story.committed(number)
    changes = [span.context for span in story.spans.spans if "springtide.reason" in span.attributes]
    assert [told.context for told in story.traces.announced] == changes[-MOST_ANNOUNCED:]


class Histories(RuleBasedStateMachine):
    """Members are lost, come and commit in any order: every change and generation is recorded once, and
    whatever is a part has its whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.story = Story()
        self.members: list[str] = []
        self.number = self.known = 0
        self.next = 1

    @rule(count=st.integers(1, 3), cause=st.sampled_from(["failure", "join", "leave"]))
    def make(self, count: int, cause: str) -> None:
        self.number += 1
        cause = "start" if self.number == 1 else cause
        while len(self.members) < count:
            self.members.append(f"w{self.next % 5}")
            self.members = list(dict.fromkeys(self.members))
            self.next += 1
        self.story.made(self.number, cause, *self.members, wanted=3)

    @precondition(lambda self: self.members)
    @rule()
    def lose(self) -> None:
        lost = self.members.pop()
        self.story.traces.broke(lost, self.story.now)
        self.story.now += 0.5
        self.story.lost(lost)

    @precondition(lambda self: self.number)
    @rule(back=st.integers(0, 2))
    def commit(self, back: int) -> None:
        self.story.committed(max(1, self.number - back))

    @precondition(lambda self: self.members and self.number)
    @rule()
    def form(self) -> None:
        self.story.formed(self.number, *self.members)

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.story.now += seconds

    @invariant()
    def times_are_in_order(self) -> None:
        assert all(span.began <= span.ended for span in self.story.spans.spans)

    def teardown(self) -> None:
        self.story.traces.close(self.story.now, "the end")
        spans = self.story.spans.spans
        known = {span.context for span in spans} | {of_job(UID)}
        assert len({span.context for span in spans}) == len(spans), "a span is recorded once"
        assert all(span.parent is None or span.parent in known for span in spans)
        assert all(set(span.linked) <= known for span in spans)
        assert len(self.story.spans.named("generation")) == self.number
        changes = [span for span in spans if "springtide.reason" in span.attributes]
        told = {told.context for told in self.story.traces.announced}
        assert told <= {span.context for span in changes}


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
