"""A parameter server's spans: its start, each generation once, copies together."""

from __future__ import annotations

import pytest
from recorded_spans import RecordedSpans

from springtide_protocol.tracing import TraceContext, of_job
from springtide_ps.server.generation_spans import GenerationSpans

CHANGE = TraceContext(0xABC, 0xDEF)
FIRST, SECOND = (1, 0, 1), (1, 0, 2)


class Server:
    """The spans of a server, with a clock."""

    def __init__(self, enabled: bool = True) -> None:
        self.now = 1000.0
        self.spans = RecordedSpans(enabled=enabled)
        self.generations = GenerationSpans(self.spans, "uid", 990.0, lambda: self.now)

    def enter(self, token: tuple[int, int, int], change: str = str(CHANGE), whole: bool = False) -> None:
        self.generations.entered(token, change, self.now, whole=whole)
        self.now += 1


def test_server_starts_and_enters_in_the_change_members_name() -> None:
    server = Server()
    server.generations.ready()
    server.now += 10
    server.enter(FIRST)
    server.generations.arranged(FIRST)
    server.now += 1
    server.generations.resolved(FIRST)
    started, entered = server.spans.spans
    assert (started.name, started.parent, started.began, started.ended) == ("start server", CHANGE, 990, 1000)
    assert (entered.name, entered.parent, entered.began, entered.ended) == (
        "enter generation",
        CHANGE,
        1010,
        1012,
    )
    assert [(event.name, event.at) for event in entered.events] == [("copies arranged", 1011)]
    assert entered.attributes["springtide.generation"] == "1.0/1"


def test_word_of_every_member_counts_once() -> None:
    server = Server()
    for _ in range(3):
        server.enter(FIRST)
    for _ in range(3):
        server.generations.resolved(FIRST)
    assert len(server.spans.named("enter generation")) == 1


def test_late_words_of_the_generation_before_are_ignored() -> None:
    server = Server()
    server.enter(SECOND)
    server.enter(FIRST)
    server.generations.arranged(FIRST)
    server.generations.resolved(FIRST)
    assert not server.spans.named("enter generation")
    server.generations.resolved(SECOND)
    assert server.spans.one("enter generation").events == ()


def test_members_that_do_not_step_together_are_not_waited_for() -> None:
    server = Server()
    server.enter(FIRST, whole=True)
    assert server.spans.one("enter generation").parent == CHANGE


@pytest.mark.parametrize("said", ["", "none"])
def test_members_without_a_trace_leave_the_jobs_own(said: str) -> None:
    server = Server()
    server.enter(FIRST, said, whole=True)
    assert server.spans.one("enter generation").parent == of_job("uid")


def test_copies_are_one_span_and_a_failed_one_is_its_error() -> None:
    server = Server()
    server.enter(FIRST, whole=True)
    server.now = 1100.0
    server.generations.copied(2.0, 100, "", False)
    server.now = 1101.0
    server.generations.copied(1.0, 50, "no answer for 60 s", False)
    server.now = 1102.0
    server.generations.copied(1.0, 10, "", True)
    found = server.spans.one("copy shards")
    assert (found.began, found.ended, found.parent) == (1098.0, 1102.0, CHANGE)
    assert found.attributes["springtide.shards"] == 2
    assert found.attributes["springtide.bytes"] == 110
    assert found.error == "no answer for 60 s"
    server.generations.copied(0.5, 10, "", True)
    assert server.spans.named("copy shards")[1].error == ""


def test_copy_before_any_generation_is_nobodys() -> None:
    server = Server()
    server.generations.copied(1.0, 10, "", True)
    assert not server.spans.spans


def test_nothing_is_kept_where_nobody_records() -> None:
    server = Server(enabled=False)
    server.enter(FIRST, whole=True)
    server.generations.arranged(FIRST)
    server.generations.resolved(FIRST)
    server.generations.copied(1.0, 10, "", True)
    assert not server.spans.spans
