"""Gradients that are set aside until their range is pushed: by themselves, and through real servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from ps_servers import TOKEN, names, servers

from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.params.sparse_gradient import SparseGradient, pack
from springtide_ps.server.gradient_stash import GradientStash, StashedGradient
from springtide_ps.server.server import Server
from springtide_ps.wire.client import RefusedError, ServerClient
from springtide_ps.wire.frames import Frame, Kind
from springtide_ps.wire.stream import connect, parse_address

FIRST, SECOND = (1, 0, 1), (1, 0, 2)
STEP_SPEC = StepSpec(1.0, False, ({"lr": 1.0},)).to_json()


def stashed(number: int, size: int = 4, answers: dict[str, Any] | None = None) -> StashedGradient:
    return StashedGradient(number, {"d": "float32"}, torch.zeros(size, dtype=torch.uint8), 0, answers or {})


class Connection(RuleBasedStateMachine):
    """Bodies that begin, are left and committed, in generations that follow each other; what a push is given
    is what its own body has set aside, or nothing.
    """

    owners, keys = st.sampled_from(["", "a"]), st.sampled_from(["x", "y"])

    def __init__(self) -> None:
        super().__init__()
        self.stash = GradientStash()
        self.generation = self.body = 1
        self.mine: dict[tuple[str, str], StashedGradient] = {}
        self.here: dict[tuple[str, str], int] = {}

    @property
    def token(self) -> tuple[int, int, int]:
        return (1, 0, self.generation)

    @rule(owner=owners, key=keys, size=st.integers(0, 9))
    def set_aside(self, owner: str, key: str, size: int) -> None:
        self.mine[owner, key] = stashed(self.body, size)
        self.stash.put(self.token, owner, key, self.mine[owner, key])
        self.here[owner, key] = size

    @rule(owner=owners, key=keys)
    def pushed(self, owner: str, key: str) -> None:
        found = self.stash.take(self.token, owner, key, self.body)
        assert found is self.mine.pop((owner, key), None)
        self.here.pop((owner, key), None)

    @rule()
    def body_is_left(self) -> None:
        self.body, self.mine = self.body + 1, {}

    @rule(owner=owners, key=keys)
    def generation_ends(self, owner: str, key: str) -> None:
        self.generation += 1
        self.mine = {}
        self.stash.put(self.token, owner, key, stashed(0, 1))
        self.here = {(owner, key): 1}  # nothing of the one before

    @invariant()
    def memory_is_bounded(self) -> None:
        assert self.stash.nbytes == sum(self.here.values())


Connection.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
TestConnection = Connection.TestCase


def test_a_copy_counts_as_told_when_it_has_said_so() -> None:
    there, refused, silent = Future[None](), Future[None](), Future[None]()
    there.set_result(None)
    refused.set_exception(RefusedError("no room"))
    passed = stashed(1, answers={"a": there, "b": refused, "c": silent})
    assert passed.at(["a", "b", "c", "d"]) == {"a"}
    assert passed.at(["b", "c"]) == set()


# ---- servers


class Client:
    """A worker's words in short. One chunk, "k", of so many zeros; lr 1."""

    def __init__(self, server: Server, me: str = "a", size: int = 2) -> None:
        self.me, self.server, self.size = me, server, size
        self.link = ServerClient(parse_address(f"127.0.0.1:{server.port}"), TOKEN)

    def enter(self, token: tuple[int, int, int] = FIRST) -> Client:
        about = {"me": self.me, "members": ["a", "b"], "s": 0, "lineage": "one", "books": True, "skipped": 0}
        self.link.ask_step(Kind.ENTER, token, about).result(60)
        return self

    def load(self, optimizer: str = "sgd") -> Client:
        chunk = Chunk(torch.zeros(self.size), [(0, 0, 0, self.size)], optimizer, [{"lr": 1.0}])
        meta, payload = chunk.dump()
        self.link.ask_step(Kind.LOAD, FIRST, {**meta, "k": "k", "s": 0}, payload).result(60)
        return self

    def push_early(
        self, number: int, gradient: list[float] | torch.Tensor, token: Any = FIRST, **more: Any
    ) -> None:
        sent = gradient if isinstance(gradient, torch.Tensor) else torch.tensor(gradient)
        self.link.push_early(token, self.me, "k", number, {"d": "float32", **more}, sent)

    def push(self, number: int, of_batch: int, token: Any = FIRST) -> tuple[list[float], dict[str, Any]]:
        """(values, what the server says) of a push that names the early push of that number."""
        about = {"k": "k", "r": of_batch, "recipe": STEP_SPEC, "o": number, "me": self.me}
        out = torch.full((self.size,), -9.0)
        said = self.link.ask_step(Kind.PUSH_BATCH, token, about, out=out).result(60).meta
        return out.tolist(), said

    def pull(self, token: Any = FIRST) -> list[float]:
        out = torch.zeros(self.size)
        self.link.ask_step(Kind.PULL_CHUNK, token, {"k": "k"}, out=out).result(60)
        return out.tolist()

    def close(self) -> None:
        self.link.close()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)


@pytest.fixture
def server() -> Iterator[Server]:
    with servers(1) as running:
        yield running[0]


@contextlib.contextmanager
def client_of(server: Server, me: str = "a", size: int = 2) -> Iterator[Client]:
    client = Client(server, me, size)
    try:
        yield client
    finally:
        client.close()


def test_early_push_changes_nothing_until_a_push_names_it(server: Server) -> None:
    with client_of(server) as client:
        client.enter().load().push_early(1, [1.0, 2.0])
        assert client.pull() == [0.0, 0.0]
        assert server.stashed_bytes == 8  # the answer to the pull came after the early push
        received = server.counters.bytes_in
        values, said = client.push(1, 5)
        assert (values, said["ranges"], said["already"]) == ([-1.0, -2.0], [5, 6], False)
        assert (server.stashed_bytes, server.counters.bytes_in) == (0, received)


def test_a_push_is_told_to_bring_what_is_not_there(server: Server) -> None:
    with client_of(server) as client:
        client.enter().load()
        missing = ([-9.0, -9.0], {"whole": True})
        assert client.push(1, 0) == missing  # never pushed early
        client.push_early(1, [1.0, 1.0])
        assert client.push(2, 0) == missing  # of another body
        client.push_early(2, [1.0, 1.0])
        assert client.push(2, 0)[0] == [-1.0, -1.0]
        assert client.push(2, 1) == missing  # used
        assert client.pull() == [-1.0, -1.0]
        client.push_early(3, [1.0, 1.0])
        client.enter(SECOND)
        assert client.push(3, 1, SECOND) == missing  # of the generation before
        with client_of(server) as other:
            client.push_early(4, [1.0, 1.0], SECOND)
            assert client.pull(SECOND) == [-1.0, -1.0]
            assert other.push(4, 1, SECOND) == missing  # of another connection
        assert client.push(4, 1, SECOND)[0] == [-2.0, -2.0]


def test_range_that_the_chunk_has_only_uses_up_its_early_push(server: Server) -> None:
    with client_of(server) as client:
        client.enter().load().push_early(1, [1.0, 0.0])
        client.push(1, 0)
        client.push_early(2, [5.0, 5.0])
        values, said = client.push(2, 0)
        assert (values, said["already"], server.stashed_bytes) == ([-1.0, 0.0], True, 0)
        assert client.push(2, 1)[1] == {"whole": True}


def test_a_worker_that_is_gone_leaves_nothing_behind(server: Server) -> None:
    with client_of(server) as steady:
        steady.enter().load()
        with client_of(server, "b") as gone:
            gone.push_early(1, [1.0, 1.0])
            gone.pull()
            assert server.stashed_bytes == 8
        until(lambda: server.stashed_bytes == 0, "the connection's end")
        assert steady.pull() == [0.0, 0.0]


def test_client_has_one_offer_per_chunk_within_the_memory() -> None:
    # 64 bytes are what a chunk of 32 takes on its way, with its table of pieces.
    with servers(1, memory_limit=64) as (server,), client_of(server, size=8) as client:
        client.enter().load()
        for number in range(50):
            client.push_early(number, [number + 1.0] * 8)
        client.pull()
        assert server.stashed_bytes == 32
        assert client.push(0, 0)[0] == [-1.0] * 8
        assert "does not fit" in client.link.refusal
        assert client.push(49, 1)[1] == {"whole": True}
        assert server.stashed_bytes == 0


def test_what_is_no_offer_is_refused_and_the_client_goes_on(server: Server) -> None:
    block = pack(SparseGradient(torch.tensor([1], dtype=torch.int32), torch.tensor([2.0])))
    with client_of(server) as client:
        client.enter().load()
        stranger = Client(server, "stranger")
        stranger.push_early(1, [1.0, 1.0])
        for number, gradient, more in (
            (1, [1.0], {}),
            (2, [1.0, 1.0, 1.0], {}),
            (3, block[:-1].clone(), {"sel": True}),
            (4, block, {"sel": True, "d": "float16"}),
        ):
            client.push_early(number, gradient, **more)
            assert client.push(number, number)[1] == {"whole": True}
            assert client.link.refusal
        with pytest.raises(RefusedError, match="is over"):
            client.push(1, 1, (1, 0, 0))
        stranger.pull()
        assert "no member" in stranger.link.refusal
        assert server.stashed_bytes == 0
        stranger.close()
        client.push_early(5, block, sel=True)
        assert client.push(5, 5)[0] == [0.0, -2.0]
        wrong = Client(server)
        about = {"k": "k", "r": 6, "recipe": STEP_SPEC, "o": 1, "me": "a"}
        with pytest.raises(RefusedError, match="brings no tensor"):  # one that names an offer has no gradient
            wrong.link.ask_step(Kind.PUSH_BATCH, FIRST, about, torch.zeros(2)).result(60)
        wrong.close()
        assert client.pull() == [0.0, -2.0]


def test_a_refused_push_uses_the_offer_up_and_changes_nothing(server: Server) -> None:
    with client_of(server) as client:
        client.enter().load().push_early(1, [1.0, 1.0])
        about = {"k": "k", "r": 0, "recipe": StepSpec(1.0, False, ({}, {})).to_json(), "o": 1, "me": "a"}
        with pytest.raises(RefusedError, match="2 parameter groups"):
            client.link.ask_step(Kind.PUSH_BATCH, FIRST, about).result(60)
        assert (client.pull(), server.stashed_bytes) == ([0.0, 0.0], 0)


VALID: dict[Kind, dict[str, Any]] = {
    Kind.EARLY_PUSH: {"t": list(FIRST), "me": "a", "k": "k", "o": 1, "d": "float32"},
    Kind.COPY_EARLY_PUSH: {"t": list(FIRST), "me": "b", "k": "k", "o": 1, "d": "float32"},
    Kind.PUSH_BATCH: {"t": list(FIRST), "me": "a", "k": "k", "o": 1, "r": 1, "recipe": STEP_SPEC},
    Kind.COPY_BATCH: {"t": list(FIRST), "me": "b", "k": "k", "o": 1, "r": 2, "recipe": STEP_SPEC},
    Kind.FINISHED: {"t": list(FIRST), "me": "a", "done": [1]},
    Kind.LEASE: {"t": list(FIRST), "me": "a", "first": 0, "stop": 4, "sent": [1]},
}
RUBBISH: list[Any] = [None, -1, 1 << 70, 0.5, "x", "", [], [1], {}, {"k": 1}, True, [[[]]], "k" * 5000]


def test_random_frames_of_ranges_delay_nobody_and_leave_nothing(server: Server) -> None:
    """Words that lack something, or have something else; with tensors of any size."""
    random = Random(7)
    with client_of(server) as steady:
        steady.enter().load()
        for number in range(60):
            stream, _ = connect(("127.0.0.1", server.port), TOKEN, 30)
            with contextlib.closing(stream):
                for request in range(1, 9):
                    kind = random.choice(list(VALID))
                    meta = dict(VALID[kind])
                    for name in random.sample(sorted(meta), random.randint(0, 2)):
                        meta[name] = random.choice(RUBBISH)
                        if random.random() < 0.3:
                            del meta[name]
                    size = random.choice([0, 8, 8, 7, 4096]) if random.random() < 0.8 else 8
                    frame = Frame(kind, random.choice([0, request]), meta, size)
                    with contextlib.suppress(OSError):  # it may have ended the connection already
                        stream.send(frame, memoryview(bytes(size)))
                assert server.stashed_bytes <= 3 * 8  # one of its own, and one for each member
                steady.push_early(number, [0.0, 0.0])
                assert steady.push(number, 1000 + number)[1]["already"] is False
                stream.abort()
            until(lambda: server.clients == 1, "the connection's end")
            assert server.stashed_bytes == 0


# ---- copies


@pytest.fixture
def pair() -> Iterator[tuple[Client, Client]]:
    """Clients of the chunk's first server and of the one with its copy."""
    with servers(2) as running, client_of(running[0]) as first, client_of(running[1]) as copy:
        for client in (first, copy):
            client.enter().load("adam")
        arranged = {"forward": {"k": [names(running)[1]]}, "fill": {}, "drop": []}
        first.link.ask_step(Kind.ARRANGE, FIRST, arranged).result(60)
        yield first, copy


def test_copy_has_the_offer_before_and_the_values_after_the_push(
    pair: tuple[Client, Client],
) -> None:
    first, copy = pair
    for number in range(1, 6):
        first.push_early(number, [1.0 * number, -2.0])
        until(lambda: copy.server.stashed_bytes == 8, "the offer at the copy")
        # It has said so, and the first server has heard it, when a push to another chunk would be answered.
        until(lambda: all_heard(first.server), "the copy's word")
        received = copy.server.counters.bytes_in
        values, said = first.push(number, number)
        assert said["already"] is False
        assert copy.pull() == values
        assert copy.server.counters.bytes_in == received  # the gradient came with the offer
        assert copy.server.stashed_bytes == 0


def all_heard(server: Server) -> bool:
    clients = server.connections
    held = [offer for client in clients for offer in list(client.stash.stashed.values())]
    return all(answer.done() for offer in held for answer in offer.passed.values())


def test_copy_that_has_not_confirmed_the_offer_gets_the_gradient(
    pair: tuple[Client, Client],
) -> None:
    first, copy = pair
    with copy.server.sync_handler.store.paused():  # it can take nothing in, so it says nothing
        first.push_early(1, [1.0, 2.0])
        until(lambda: first.server.stashed_bytes == 8, "the offer")
        about = {"k": "k", "r": 0, "recipe": STEP_SPEC, "o": 1, "me": "a"}
        out = torch.zeros(2)
        asked = first.link.ask_step(Kind.PUSH_BATCH, FIRST, about, out=out)
        until(lambda: first.server.counters.batches == 1, "the update")
        assert not asked.done()
    asked.result(60)
    assert copy.pull() == out.tolist()


def test_offers_of_several_workers_lie_side_by_side_at_a_copy(pair: tuple[Client, Client]) -> None:
    first, copy = pair
    with client_of(first.server, "b") as other:
        first.push_early(1, [1.0, 2.0])
        other.push_early(1, [-3.0, 4.0])
        until(lambda: first.server.stashed_bytes == 16 and all_heard(first.server), "the copy's word")
        assert copy.server.stashed_bytes == 16
        received = copy.server.counters.bytes_in
        assert first.push(1, 0)[1]["already"] is False
        values, _ = other.push(1, 1)
        assert copy.pull() == values
        assert copy.server.counters.bytes_in == received


def test_copy_without_room_early_gets_gradients_in_pushes() -> None:
    with contextlib.ExitStack() as stack:
        [one], [small] = (stack.enter_context(servers(1, limit)) for limit in (0, 96))
        first, copy = (stack.enter_context(client_of(server, size=16)) for server in (one, small))
        for client in (first, copy):
            client.enter().load()
        arranged = {"forward": {"k": names([small])}, "fill": {}, "drop": []}
        first.link.ask_step(Kind.ARRANGE, FIRST, arranged).result(60)
        first.push_early(1, [1.0] * 16)
        until(lambda: one.stashed_bytes == 64 and all_heard(one), "the copy's refusal")
        assert first.push(1, 0)[0] == copy.pull() == [-1.0] * 16


def test_copy_made_between_offer_and_push_has_the_update() -> None:
    with servers(2) as running, client_of(running[0]) as first, client_of(running[1]) as copy:
        for client in (first, copy):
            client.enter()
        first.load().push_early(1, [1.0, 2.0])
        fill = {"forward": {}, "fill": {"k": [names(running)[1]]}, "drop": []}
        first.link.ask_step(Kind.ARRANGE, FIRST, fill).result(60)
        held = running[0].sync_handler.store.shard("k")
        until(lambda: bool(held.forward), "the copy")
        values, _ = first.push(1, 0)
        assert copy.pull() == values == [-1.0, -2.0]
