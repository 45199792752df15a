"""Values of a range that are sent before it is pushed: when they are used, and who sees them."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, wait
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from ps_loose import Loose, undisturbed, until
from ps_members import Store, together
from ps_servers import TOKEN, names, servers
from ps_snapshots import states_on

from springtide.ps.backend import PsBackend
from springtide.ps.connections import ServerError
from springtide_ps.params.applied import AppliedBatches
from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.server import speculative_batches
from springtide_ps.server.server import Server
from springtide_ps.server.shard import LockedShard, Shard
from springtide_ps.server.step_protocol import StepProtocolError
from springtide_ps.wire.client import RefusedError
from springtide_ps.wire.frames import Frame, Kind
from springtide_ps.wire.stream import connect, parse_address

torch.set_num_threads(1)


def early_of(loose: Loose) -> list[Future[Any]]:
    """Return the pulls of speculative values that the open body has under way."""
    assert loose.exchange.speculative is not None
    return list(loose.exchange.speculative.under_way)


def record_asks(exchange: PsBackend, wanted: Kind) -> list[Future[Any]]:
    """The answers to all requests of a kind that are made from now on."""
    ask, found = exchange.connections.ask, list[Future[Any]]()

    def recorded(server: str, kind: Kind, *args: Any, **named: Any) -> Future[Any]:
        answer = ask(server, kind, *args, **named)
        if kind is wanted:
            found.append(answer)
        return answer

    exchange.connections.ask = recorded  # type: ignore[method-assign]
    return found


def offered(loose: Loose) -> list[Future[Any]]:
    """A body whose gradients, and what was asked for early, are answered for."""
    loose.body()
    early = early_of(loose)
    wait(early, 60.0)
    return early


def test_values_arrive_before_push_and_count_from_commit_on() -> None:
    wanted = [undisturbed(bodies, "None") for bodies in range(5)]
    with servers(2) as running:
        loose = Loose(running, early=True)
        loose.begin()
        for body in range(4):
            before, states = loose.values(), states_on(loose.exchange) if body else {}
            early = offered(loose)
            assert len(early) == (len(loose.exchange.chunks) if body else 0)
            assert all(future.result().meta["applied"] == body + 1 for future in early)
            assert torch.equal(loose.values(), before)
            assert body == 0 or loose.applied_batches() == {(0, body)}
            after = states_on(loose.exchange) if body else {}
            assert all(torch.equal(after[k][n], states[k][n]) for k in states for n in states[k])
            loose.exchange.commit((1.0,), ())
            assert torch.equal(loose.values(), wanted[body + 1])
        assert torch.equal(loose.held(), wanted[4])
        assert loose.applied_batches() == {(0, 4)}
        loose.exchange.close()


def bytes_out(server: Server) -> int:
    """Return the bytes sent by the server, once all its answers are counted.

    A client may have an answer before the server has counted it.
    """
    until(lambda: all(c.send_queue.unsent == 0 for c in server.connections), "the last count")
    return server.counters.bytes_out


def test_values_travel_once() -> None:
    with servers(1) as running:
        loose = Loose(running, early=True)
        loose.begin()
        loose.body()
        loose.exchange.commit((1.0,), ())
        loose.values()
        sent = bytes_out(running[0])
        for _ in range(3):
            loose.body()
            loose.exchange.commit((1.0,), ())
            loose.values()
        assert bytes_out(running[0]) - sent == 3 * sum(c.nbytes for c in loose.exchange.chunks)
        loose.exchange.close()


def test_another_workers_range_in_between_is_in_the_next_values() -> None:
    with servers(2) as running:
        first, second = (Loose(running, early=True, name=name) for name in ("m0", "m1"))
        begin_together(first, second)
        for loose in (first, second):
            loose.body()
            loose.exchange.commit((1.0,), ())
            loose.values()
        both = first.held()
        assert torch.equal(second.held(), both)
        assert offered(first)
        second.body()
        second.exchange.commit((1.0,), ())
        second.exchange.settle()
        first.batches.staleness(), second.batches.staleness()
        first.exchange.commit((1.0,), ())
        own = first.values()
        assert first.batches.staleness() == 1.0
        assert all(offer.applied == 3 for offer in first.batches.rescue.pulled.values())
        newest = first.held()
        assert torch.equal(second.held(), newest)
        assert not torch.equal(own, newest), "the other one's range is not in what came early"
        assert first.applied_batches() == {(0, 4)}
        assert {applied_batches.applied for applied_batches in first.batches.applied_batches().values()} == {
            4
        }
        for loose in (first, second):
            loose.exchange.close()


def begin_together(*workers: Loose) -> None:
    """The first generation of several; the first one leads."""
    store, members = Store(), [loose.member.name for loose in workers]
    for loose in workers:
        loose.store = store
    together(
        *(
            lambda loose=loose, number=number: loose.member.begin(
                1, members, loose.running, store, fresh=True, holds=number == 0
            )
            for number, loose in enumerate(workers)
        )
    )
    together(*(loose.exchange.resolve for loose in workers))


def test_with_a_bound_on_staleness_nothing_comes_early() -> None:
    with servers(1) as running:
        loose = Loose(running, early=True, bound=4)
        loose.begin()
        for _ in range(3):
            assert not offered(loose)
            loose.exchange.commit((1.0,), ())
        assert torch.equal(loose.values(), undisturbed(3, "None"))
        loose.exchange.close()


def test_batch_counted_otherwise_brings_values_and_next_rests() -> None:
    scales, asked = (1.0, 1.0, 0.5, 0.5, 0.5, 0.5), []
    with servers(1) as running, servers(1) as others:
        loose, plain = Loose(running, early=True), Loose(others)
        loose.begin()
        plain.begin()
        for scale in scales:
            asked.append(bool(offered(loose)))
            plain.body()
            for one in (loose, plain):
                one.exchange.commit((scale,), ())
            assert torch.equal(loose.values(), plain.values())
        loose.exchange.close()
        plain.exchange.close()
    #               first  as before  missed  rests  as before
    assert asked == [False, True, True, False, True, True]


def test_options_of_now_are_foreseen() -> None:
    with servers(1) as running, servers(1) as others:
        loose, plain = Loose(running, early=True), Loose(others)
        loose.begin()
        plain.begin()
        for body in range(4):
            for one in (loose, plain):
                one.member.optimizer.param_groups[0]["lr"] *= 0.7
                one.body()
            assert bool(early_of(loose)) is (body > 0)
            for one in (loose, plain):
                one.exchange.commit((1.0,), ())
            assert torch.equal(loose.values(), plain.values())
        loose.exchange.close()
        plain.exchange.close()


def test_without_room_for_copies_values_come_after_the_push() -> None:
    with servers(1) as running:
        loose = Loose(running, early=True)
        loose.begin()
        loose.body()
        loose.exchange.commit((1.0,), ())
        loose.values()
        running[0].sync_handler.memory_limit = int(1.5 * running[0].sync_handler.store.held_bytes)
        for body in range(1, 4):
            early = offered(loose)
            refused = [future for future in early if future.exception() is not None]
            assert all(isinstance(future.exception(), RefusedError) for future in refused)
            assert all(future.result().meta["late"] for future in early if future not in refused)
            assert 0 < len(refused) < len(early)
            loose.exchange.commit((1.0,), ())
            assert torch.equal(loose.values(), undisturbed(body + 1, "None"))
        assert loose.applied_batches() == {(0, 4)}
        loose.exchange.close()


def test_who_looks_for_room_holds_no_chunk_that_others_wait_for() -> None:
    """A handler that checks for free memory holds no chunk locked.

    The check reads all chunks, so a lock on one of them would stop the whole server.
    """
    with servers(1) as running:
        loose = Loose(running, early=True)
        loose.begin()
        loose.body()
        loose.exchange.commit((1.0,), ())
        loose.values()
        steps, shards = running[0].sync_handler, running[0].sync_handler.store
        steps.memory_limit = 1 << 40
        look, token = steps.has_room_twice, shards.token

        def look_at_all() -> None:
            for key in shards.keys:
                with shards.locked(token, key):
                    pass

        def while_another_one_looks(besides: int) -> bool:
            other = threading.Thread(target=look_at_all, daemon=True)
            other.start()
            other.join(10)
            if other.is_alive():
                raise StepProtocolError("a chunk is held")
            return look(besides)

        steps.has_room_twice = while_another_one_looks  # type: ignore[method-assign]
        early = offered(loose)
        assert early
        assert all(future.result(0).meta["applied"] == 2 for future in early)
        loose.exchange.commit((1.0,), ())
        loose.exchange.close()


def test_a_lost_server_is_made_again_from_values_that_came_early() -> None:
    with servers(2) as running:
        loose = Loose(running, early=True)
        loose.begin()
        for _ in range(3):
            loose.body()
            loose.exchange.commit((1.0,), ())
        loose.exchange.settle(range(len(list(loose.member.model.parameters()))))
        assert loose.batches.speculative is not None
        assert not loose.batches.speculative.open
        running[0].close(30.0)
        loose.running = running[1:]
        loose.begin()
        assert torch.equal(loose.values(), undisturbed(3, "None"))
        assert loose.applied_batches() == {(0, 3)}
        loose.exchange.close()


def test_gradients_stay_until_push_has_left_though_values_came() -> None:
    """A connection breaks between early values and the pushes, which leave in the next generation."""
    with servers(2) as running:
        loose = Loose(running, early=True)
        exchange, batches = loose.exchange, loose.batches
        loose.begin()
        loose.body()
        exchange.commit((1.0,), ())
        loose.values()
        assert offered(loose)
        [other] = [server for server in running if f"s{server.port}" != batches.lease_server]
        for client in other.connections:
            client.stream.abort()
        until(lambda: exchange.connections[f"s{other.port}"].broken is not None, "the connection's end")
        leases = record_asks(exchange, Kind.LEASE)
        exchange.commit((1.0,), ())
        gradients = list(batches.gradients.values())
        [next_lease] = leases
        wait([next_lease], 60.0)
        assert batches.lease(0, 100).number == 2
        exchange.settle(range(len(list(loose.member.model.parameters()))))  # its forward pass
        with contextlib.suppress(ServerError):
            exchange.make_way()
            for gradient in gradients:
                gradient.fill_(7.0)  # the next body's, in the same memory
        with pytest.raises(ServerError):
            exchange.make_way()
        loose.begin()
        assert loose.applied_batches() == {(0, 2)}
        assert torch.equal(loose.held(), undisturbed(2, "None"))
        exchange.close()


def test_an_early_offer_without_a_number_is_refused() -> None:
    with servers(1) as running:
        loose = Loose(running, early=True)
        loose.begin()
        chunk = loose.exchange.chunks[0]
        stream, _ = connect(parse_address(names(running)[0]), TOKEN, 30.0)
        try:
            about = {"t": [1, 0, 1], "me": "m0", "k": chunk.key, "o": 1, "d": "float32", "r": 0}
            payload = memoryview(bytes(chunk.nbytes))
            stream.send(Frame(Kind.SPECULATIVE_PUSH, 0, {**about, "recipe": {}}, chunk.nbytes), payload)
            header, _ = stream.receive()
            assert header.kind == Kind.REFUSED
        finally:
            stream.close()
        loose.exchange.close()


# ---- the second copy

GROUPS = ({"lr": 0.1},)
STEP_SPECS = (StepSpec(1.0, False, GROUPS), StepSpec(0.5, False, GROUPS), StepSpec(1.0, True, GROUPS))


class Ranges(RuleBasedStateMachine):
    """Offers and pushes of two workers on one chunk, in any order, with another optimizer that only gets the
    pushes: the chunk always has its bits, and what is sent early is what it would have with the range.
    """

    owners, step_specs = st.sampled_from(["a", "b"]), st.sampled_from(STEP_SPECS)

    def __init__(self) -> None:
        super().__init__()
        self.held, self.reference = Shard(chunk=self.make()), self.make()
        self.offers: dict[str, tuple[int, int, StepSpec, torch.Tensor]] = {}
        self.number = 0

    @staticmethod
    def make() -> Chunk:
        values = torch.arange(6, dtype=torch.float32)
        chunk = Chunk(values, [(0, 0, 0, 4), (1, 0, 4, 6)], "adam", GROUPS)
        chunk.applied_batches = AppliedBatches()
        return chunk

    @rule(owner=owners, of_batch=st.integers(0, 40), step_spec=step_specs)
    def offer(self, owner: str, of_batch: int, step_spec: StepSpec) -> None:
        self.number += 1
        gradient = torch.full((6,), float(self.number % 7) - 2.5)
        applied_batches = self.reference.applied_batches
        assert applied_batches is not None
        made = speculative_batches.speculate(
            LockedShard(self.held), self.number, of_batch, step_spec, lambda chunk: gradient
        )
        assert torch.equal(gradient, torch.full((6,), float(self.number % 7) - 2.5))
        assert (made is None) is (of_batch in applied_batches.intervals)
        if made is not None:
            would = self.reference.again(*self.reference.dump())
            would.apply(gradient.clone(), step_spec)
            assert torch.equal(made[1], would.values)
            assert (made[0].applied, len(made[0].intervals)) == (
                applied_batches.applied + 1,
                len(applied_batches.intervals) + 1,
            )
        self.offers[owner] = self.number, of_batch, step_spec, gradient

    @rule(owner=owners, step_spec=st.one_of(st.none(), step_specs))
    def push(self, owner: str, step_spec: StepSpec | None) -> None:
        if owner not in self.offers:
            return
        number, of_batch, foreseen, gradient = self.offers.pop(owner)
        step_spec = step_spec or foreseen
        chunk, applied_batches = self.held.chunk, self.reference.applied_batches
        assert chunk is not None
        assert chunk.applied_batches is not None
        assert applied_batches is not None
        before = chunk.applied_batches.applied
        fresh = chunk.applied_batches.enter(of_batch, step_spec.skip)
        assert fresh is applied_batches.enter(of_batch, step_spec.skip)
        if fresh:
            self.reference.apply(gradient.clone(), step_spec)
            speculative_batches.apply(LockedShard(self.held), number, before, step_spec, gradient)

    @rule(owner=owners)
    def leave(self, owner: str) -> None:
        self.offers.pop(owner, None)

    @rule()
    def generation(self) -> None:
        self.held.speculative.forget()
        self.offers = {}

    @invariant()
    def same_bits(self) -> None:
        chunk = self.held.chunk
        assert isinstance(chunk, Chunk)
        assert torch.equal(chunk.values, self.reference.values)
        assert chunk.applied_batches is not None
        assert self.reference.applied_batches is not None
        assert chunk.applied_batches.to_json() == self.reference.applied_batches.to_json()
        for piece in range(2):
            mine, wanted = chunk.state_of(piece), self.reference.state_of(piece)
            assert mine.keys() == wanted.keys()
            assert all(torch.equal(mine[name], wanted[name]) for name in wanted)


TestRanges = Ranges.TestCase
TestRanges.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_second_copy_takes_chunks_place_if_nothing_came_between() -> None:
    held, step_spec = Shard(chunk=Ranges.make()), STEP_SPECS[0]
    for number in range(1, 4):
        gradient = torch.full((6,), float(number))
        speculative_batches.speculate(
            LockedShard(held), number, number, step_spec, lambda chunk, g=gradient: g
        )
        second, chunk = held.speculative.chunk, held.chunk
        assert isinstance(chunk, Chunk)
        assert chunk.applied_batches is not None
        before = chunk.applied_batches.applied
        chunk.applied_batches.enter(number)
        speculative_batches.apply(LockedShard(held), number, before, step_spec, gradient)
        assert held.chunk is second
        assert held.speculative.chunk is chunk
