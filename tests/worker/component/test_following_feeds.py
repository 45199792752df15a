"""Feeds and a follower over real sockets: equal bits in any order, and an end for all that goes wrong."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from springtide.following import feed as feed_module
from springtide.following import follower as follower_module
from springtide.following import frames, shares
from springtide.following.feed import FeedOrder, Feeds
from springtide.following.follower import Follower, Script
from springtide.memory.ready import ReadyMemory, missing_state

LAYOUT = "layout"
LONG_SECONDS = 20.0  # of a wait that ends sooner


class Trained:
    """A model with Adam, as a member or a joiner has it; parameters of 12 KB, 4 KB and some bytes."""

    made: ClassVar[list[Trained]] = []

    def __init__(self, seed: int, layout: str = LAYOUT) -> None:
        self.made.append(self)
        torch.manual_seed(seed)
        self.parameters = [
            torch.nn.Parameter(torch.randn(shape)) for shape in ((64, 48), (1024,), (3,), (2, 2), (1,))
        ]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.01)
        self.feeds = Feeds(self.parameters, self.optimizer, layout)
        self.steps = 0

    def step(self, unused: int | None = None) -> None:
        """Make a step as the trainer does."""
        self.optimizer.param_groups[0]["lr"] *= 0.99
        for number, parameter in enumerate(self.parameters):
            parameter.grad = None if number == unused else torch.randn(parameter.shape)
        self.feeds.before_step()
        self.optimizer.step()
        self.feeds.after_step()
        self.skip()

    def skip(self) -> None:
        """Commit a step without one of the optimizer's."""
        self.steps += 1
        self.feeds.committed(self.steps)

    def feed(self, follower: Follower, index: int = 0, count: int = 1) -> None:
        address = f"127.0.0.1:{follower.port}"
        order = FeedOrder(
            follower="joiner", address=address, secret=follower.secret, index=index, count=count
        )
        self.feeds.begin(order)


def same(one: Trained, other: Trained) -> list[bool]:
    """Return by parameter whether it and its state are equal bit for bit."""
    found = []
    for mine, theirs in zip(one.parameters, other.parameters, strict=True):
        states = one.optimizer.state.get(mine, {}), other.optimizer.state.get(theirs, {})
        equal = torch.equal(mine, theirs) and states[0].keys() == states[1].keys()
        found.append(equal and all(torch.equal(value, states[1][key]) for key, value in states[0].items()))
    return found


Made = tuple[Trained, Follower]


@pytest.fixture(autouse=True)
def small_bunches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shares, "MOST_BUNCH_BYTES", 4096)
    yield
    for member in Trained.made:
        member.feeds.stop("the test is over")
    Trained.made.clear()
    until(no_feed, "the end of all feeds")


@contextlib.contextmanager
def following(overwritten: list[int] | None = None) -> Iterator[Made]:
    joiner = Trained(9)
    ready = ReadyMemory()
    ready.make(missing_state([joiner.optimizer]))
    script = Script(parameters=joiner.parameters, optimizer=joiner.optimizer, layout_hash=LAYOUT, ready=ready)
    noted = [] if overwritten is None else overwritten
    follower = Follower(script, "127.0.0.1", 5.0, lambda size: None, lambda: noted.append(1))
    try:
        yield joiner, follower
    finally:
        follower.end(None, 0.0)


@pytest.fixture
def made() -> Iterator[Made]:
    with following() as found:
        yield found


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LONG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)


def no_threads(*names: str) -> bool:
    """Return whether no thread of a feed or a follower runs, or none of these names."""
    chosen = names or ("springtide-feed", "springtide-follow", "springtide-followed")
    return not any(thread.name in chosen for thread in threading.enumerate())


def no_feed() -> bool:
    return no_threads("springtide-feed")


STEPS = st.one_of(st.integers(0, 4), st.none(), st.just("skip"), st.just("wait"))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(1, 3), before=st.integers(0, 2), steps=st.lists(STEPS, max_size=6))
def test_followers_have_equal_bits_whatever_the_order(count: int, before: int, steps: list[Any]) -> None:
    """Steps of the members come between any two bunches; parameters are left out, and whole steps."""
    member, overwritten = Trained(1), list[int]()
    with following(overwritten) as (joiner, follower), pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_module, "KEPT_STEPS", 100)  # nobody waits here as long as a step takes
        for _ in range(before):
            member.step()
        for index in range(count):
            member.feed(follower, index, count)
        follower.expect(count)
        for one in steps:
            if one == "wait":
                follower.wait(0.01)
            elif one == "skip":
                member.skip()
            else:
                member.step(one)
                until(lambda: follower.wait(0.0) or follower.received, "bytes")
        assert follower.wait(LONG_SECONDS)
        member.step()
        member.feeds.finish(["joiner"])
        ended = follower.end(member.steps, LONG_SECONDS)
        assert ended == []
        assert all(same(member, joiner)), same(member, joiner)
        assert list(joiner.optimizer.state) == [
            item for item in joiner.parameters if item in joiner.optimizer.state
        ], "as the optimizer's own step would have it"
        assert overwritten
    until(no_threads, "the end of all threads")


def test_state_is_received_where_it_stays(made: Made) -> None:
    joiner, follower = made
    member, places = Trained(1), [item.data_ptr() for item in joiner.parameters]
    member.step()
    member.feed(follower)
    follower.expect(1)
    assert follower.wait(LONG_SECONDS)
    follower.end(None, 0.0)
    assert [item.data_ptr() for item in joiner.parameters] == places
    assert all(same(member, joiner))


def test_a_share_of_a_lost_member_is_the_only_one_missing(made: Made) -> None:
    joiner, follower = made
    first, second = Trained(1), Trained(1)
    for index, member in enumerate((first, second)):
        torch.manual_seed(3)
        member.step()
        member.feed(follower, index, 2)
    follower.expect(2)
    assert follower.wait(LONG_SECONDS)
    second.feeds.stop("this member has another state")
    torch.manual_seed(4)
    first.step()
    torch.manual_seed(4)
    second.step()
    first.feeds.finish(["joiner"])
    ended = follower.end(2, LONG_SECONDS)
    assert len(ended) == 1
    found, of_first = same(first, joiner), set()
    for bunch in shares.bunches([item.nbytes for item in joiner.parameters], 0, 2):
        of_first |= set(bunch)
    assert [number in of_first for number in range(5)] == found


def test_one_that_is_behind_is_left() -> None:
    """A follower that reads nothing: the member never waits for it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        member = Trained(1)
        secret = bytes(32)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        member.feeds.begin(FeedOrder(follower="j", address=address, secret=secret, index=0, count=1))
        taken, _ = listener.accept()
        with taken:
            began = time.monotonic()
            for _ in range(3000):
                member.step()
                if no_threads():
                    break
            assert time.monotonic() - began < LONG_SECONDS
            until(no_threads, "the end of the feed")


@pytest.mark.parametrize("why", ["scaled", "options"])
def test_steps_that_need_more_than_gradients_end_a_feed(made: Made, why: str) -> None:
    joiner, follower = made
    member = Trained(1)
    member.feed(follower)
    follower.expect(1)
    assert follower.wait(LONG_SECONDS)
    if why == "scaled":
        member.optimizer.param_groups[0]["fused"] = True
        member.optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
        member.optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    else:
        member.optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
    member.step()
    until(no_feed, "the end of the feed")
    assert len(follower.end(1, LONG_SECONDS)) == 1
    assert not all(same(member, joiner))


def test_member_that_trains_something_else_writes_nothing(made: Made) -> None:
    overwritten: list[int] = []
    with following(overwritten) as (joiner, follower):
        before = [item.detach().clone() for item in joiner.parameters]
        member = Trained(1, layout="another")
        member.feed(follower)
        follower.expect(1)
        assert follower.wait(LONG_SECONDS), "a feed that is over is not waited for"
        assert len(follower.end(1, 0.1)) == 1
        assert all(torch.equal(a, b) for a, b in zip(before, joiner.parameters, strict=True))
        assert overwritten == []


def test_stranger_without_the_secret_is_refused(made: Made) -> None:
    joiner, follower = made
    before = [item.detach().clone() for item in joiner.parameters]
    with socket.create_connection(("127.0.0.1", follower.port)) as stranger:
        stranger.sendall(bytes(32))
        stranger.settimeout(LONG_SECONDS)
        assert stranger.recv(1) == b""
    member = Trained(1)
    member.feed(follower)
    follower.expect(1)
    assert follower.wait(LONG_SECONDS), "one that knows it is still taken"
    assert not all(torch.equal(a, b) for a, b in zip(before, joiner.parameters, strict=True))


HEAD = struct.Struct("!IQ")


def frame(header: object, payload: bytes = b"", size: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return HEAD.pack(len(text), len(payload) if size is None else size) + text + payload


BEGIN = frame({"kind": "begin", "layout": LAYOUT})
WHOLE: dict[str, Any] = {"kind": "whole", "entries": [{"number": 4, "state": []}]}


@pytest.mark.parametrize(
    "sent",
    [
        frame({"kind": "whole", "entries": []}),
        BEGIN + frame({"kind": "who knows"}),
        BEGIN + frame(["no header"]),
        BEGIN + HEAD.pack(3, 0) + b"{[}",
        BEGIN + HEAD.pack(1 << 31, 0),
        BEGIN + frame({"kind": "whole", "entries": [{"number": 5, "state": []}]}, bytes(4)),
        BEGIN + frame({"kind": "whole", "entries": [{"number": -1, "state": []}]}, bytes(4)),
        BEGIN + frame({"kind": "whole", "entries": [{"number": "0", "state": []}]}, bytes(4)),
        BEGIN + frame({"kind": "whole", "entries": "x"}),
        BEGIN + frame(WHOLE, bytes(8)),
        BEGIN + frame(WHOLE | {"entries": [{"number": 4, "state": [{"key": "x", "dtype": "?"}]}]}),
        BEGIN + frame({"kind": "gradients", "entries": [[4, 0]]}, bytes(4)),
        BEGIN + frame(WHOLE, bytes(4)) + frame({"kind": "gradients", "entries": [[4, 0]]}, bytes(4)),
        BEGIN + frame(WHOLE, bytes(4)) + frame({"kind": "gradients", "entries": [[4, 0]]}, bytes(3)),
        BEGIN + frame({"kind": "committed", "step": "x"}),
    ],
)
def test_what_no_member_sends_ends_its_connection(made: Made, sent: bytes) -> None:
    joiner, follower = made
    before = [item.detach().clone() for item in joiner.parameters[:4]]
    with socket.create_connection(("127.0.0.1", follower.port)) as member:
        member.sendall(follower.secret + sent)
        follower.expect(1)
        assert follower.wait(LONG_SECONDS)
        member.settimeout(LONG_SECONDS)
        with contextlib.suppress(ConnectionResetError):  # not all was read
            assert member.recv(1) == b""
    assert len(follower.end(1, LONG_SECONDS)) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, joiner.parameters, strict=False))


def test_part_of_a_bunch_leaves_no_state(made: Made) -> None:
    """The connection breaks in the middle of a parameter: it is compared and sent anew."""
    joiner, follower = made
    header = {"kind": "whole", "entries": [{"number": 1, "state": []}]}
    with socket.create_connection(("127.0.0.1", follower.port)) as member:
        member.sendall(follower.secret + BEGIN + frame(header, bytes(100), 4096))
    follower.expect(1)
    assert follower.wait(LONG_SECONDS)
    assert len(follower.end(1, LONG_SECONDS)) == 1
    assert len(joiner.optimizer.state) == 0


def test_nobody_to_wait_for_is_no_wait(made: Made) -> None:
    _, follower = made
    follower.expect(0)
    assert follower.wait(0.0)
    assert follower.end(5, 0.1) == []


def test_one_that_is_never_admitted_follows_no_more(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "MAX_LATE_SECONDS", 0.0)
    _, follower = made
    member = Trained(1)
    member.feed(follower)
    follower.expect(1)
    assert follower.wait(LONG_SECONDS)

    def over() -> bool:
        member.step()
        time.sleep(0.002)
        return no_feed()

    until(over, "the end of the feed")
    assert member.steps > follower_module.MAX_LATE_STEPS


def test_no_more_than_some_are_fed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_FEEDS", 1)
    member = Trained(1)
    with following() as (_, first), following() as (_, second):
        member.feed(first)
        first.expect(1)
        assert first.wait(LONG_SECONDS)
        member.feed(second)
        second.expect(1)
        assert not second.wait(0.1)


def test_nobody_listens_is_no_trouble_for_a_member() -> None:
    member = Trained(1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for address in (f"127.0.0.1:{port}", "nonsense"):
        member.feeds.begin(FeedOrder(follower="j", address=address, secret=bytes(32), index=0, count=1))
    until(no_threads, "the end of both feeds")
    member.step()


def test_fed_state_needs_the_secret_of_its_length() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LONG_SECONDS)
        with socket.create_connection(listener.getsockname()) as short:
            short.sendall(b"x")
            short.shutdown(socket.SHUT_WR)
            assert frames.accept(listener, bytes(32), 5.0) is None
