"""Teams that take ranges, by hand: what becomes of a range whose group loses the member that pushes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ps_loose import batches_of
from ps_members import Member, Store, together
from ps_servers import servers
from worker_groups import addresses, form_groups
from worker_groups import together as on_groups

from springtide.ps.async_backend import AsyncBackend
from springtide.ps.batch_sharing import clocks_of_groups
from springtide.ps.compression import GradientCompression
from springtide.ps.connections import ServerError
from springtide.ps.context import GroupSettings
from springtide.ps.group_rows import gather
from springtide.ps.lease import Lease, decode, encode, encode_nothing
from springtide.train_step.grad_scaler import agree
from springtide_ps.params.sparse_gradient import SparseGradient
from springtide_ps.server.server import Server

torch.set_num_threads(1)


class Device:
    """Memory beside the host's, from which nothing is copied before somebody waits for it."""

    class Copy:
        def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
            self._source, self._target = source, target

        def synchronize(self) -> None:
            self._target.copy_(self._source)

    def host(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Copy:
        return self.Copy(source, target)

    def mark(self) -> None: ...

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)


class GroupMember(Member):
    """A member of worker groups of two, whose waits all end with the test."""

    def __init__(self, name: str, address: str, compression: str, device: Device | None = None) -> None:
        super().__init__(
            name,
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            asynchronous=True,
            group=GroupSettings(2, address, 60.0),
            compression=lambda: GradientCompression(compression, 0.2),
            copier=device,
        )

    @property
    def own(self) -> AsyncBackend:
        return batches_of(self)

    def body(self) -> int:
        """Take a range with the others of the group, and have its part of the gradients on their way."""
        lease = self.own.lease(0, 100)
        assert lease.number is not None
        self.step = lease.number
        group = self.own.group
        assert group is not None
        self.push(group.rank, group.size)
        return lease.number


class Job:
    """Members by name on two servers, generation after generation."""

    def __init__(self, running: list[Server], compression: str = "None", device: bool = False) -> None:
        self.running, self.generation = running, 0
        # Of each its own, or one would take another's listening socket for its own.
        places = zip("abc", addresses(3), strict=True)
        self.members = {
            name: GroupMember(name, address, compression, Device() if device else None)
            for name, address in places
        }

    def begin(self, *names: str, bound: int | None = None) -> None:
        """The next generation, of these members."""
        self.generation += 1
        store, fresh = Store(), self.generation == 1
        chosen = [self.members[name] for name in names]
        together(
            *(
                lambda member=member: member.begin(
                    self.generation,
                    list(names),
                    self.running,
                    store,
                    fresh=fresh,
                    holds=not fresh,
                    bound=bound,
                )
                for member in chosen
            )
        )
        together(*(member.exchange.resolve for member in chosen))

    def bodies(self, *names: str) -> set[int]:
        return set(together(*(self.members[name].body for name in names)))

    def commit(self, *names: str) -> None:
        for name in names:
            self.members[name].commit()

    def applied_batches(self) -> set[tuple[tuple[int, ...], int]]:
        applied_of = self.members["b"].own.applied_batches().values()
        return {
            (tuple(applied_batches.intervals.to_json()), applied_batches.applied)
            for applied_batches in applied_of
        }

    def break_off(self, name: str) -> None:
        """Have the member lose a server before it has sent all pushes of its range, but after some."""
        member, exchange = self.members[name].own, self.members[name].exchange
        homes, connections = exchange.context.generation.homes, exchange.connections
        [other] = {home[0] for home in homes.values()} - {member.lease_server}
        ask = connections.ask

        def refuse(server: str, *args: Any, **named: Any) -> Any:
            if server == other:
                raise ServerError("the connection is broken")
            return ask(server, *args, **named)

        connections.ask = refuse  # type: ignore[method-assign]
        self.members[name].commit()
        connections.ask = ask  # type: ignore[method-assign]
        assert 0 < len(member.under_way) < len(exchange.chunks)
        until(lambda: all(asked.done() for asked, _ in member.under_way.values()), "answers")

    @property
    def applied(self) -> int:
        return sum(server.counters.batches for server in self.running)

    @property
    def repeated(self) -> int:
        return sum(server.counters.repeated for server in self.running)

    def values(self, name: str) -> torch.Tensor:
        return torch.cat([value.flatten() for value in self.members[name].values()])


@contextmanager
def job(compression: str = "None", device: bool = False) -> Iterator[Job]:
    with servers(2) as running:
        made = Job(running, compression, device)
        try:
            yield made
        finally:
            for member in made.members.values():
                member.exchange.close()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)


def test_batch_of_a_pusher_dying_between_pushes_is_completed() -> None:
    with job() as one:
        one.begin("a", "b", "c")
        assert one.bodies("a", "b") == {0}
        one.break_off("a")
        one.commit("b")
        chunks = len(one.members["b"].exchange.chunks)
        there = one.applied
        assert 0 < there < chunks
        one.members["a"].exchange.close()
        one.begin("b", "c")
        assert one.bodies("b", "c") == {0}
        one.commit("b", "c")
        together(*(one.members[name].exchange.settle for name in ("b", "c")))
        assert one.applied_batches() == {((0, 1), 1)}
        assert (one.applied, one.repeated) == (chunks, there)
        assert torch.equal(one.values("b"), one.values("c"))


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["None", "BF16", "TopK"])
@pytest.mark.parametrize("order", ["abc", "bac", "cab"])
def test_pusher_sends_the_rest_in_any_role_of_next_generation(order: str, compression: str) -> None:
    """A push that broke off is sent to its end by the pusher in whatever role it has in the next generation.

    The values equal those of a run in which nothing broke.
    """
    found = []
    for broken in (False, True):
        with job(compression) as one:
            one.begin("a", "b", "c")
            assert one.bodies("a", "b") == {0}
            if broken:
                one.break_off("a")
            else:
                one.commit("a")
            one.commit("b")
            if not broken:
                together(*(one.members[name].exchange.settle for name in ("a", "b")))
            one.begin(*order)
            chunks = len(one.members["b"].exchange.chunks)
            # It is in all chunks before ranges are given out.
            assert one.applied_batches() == {((0, 1), 1)}
            first = order[:2]
            assert one.bodies(*first) == {1}
            one.commit(*first)
            together(*(one.members[name].exchange.settle for name in first))
            assert one.applied_batches() == {((0, 2), 2)}
            assert one.applied == 2 * chunks
            found.append(one.values(first[0]))
            assert torch.equal(one.values(first[1]), found[-1])
            # Who only receives knows not which ranges are in its values, and offers none for lost chunks.
            assert [len(one.members[name].own.rescue.pulled) for name in first] == [chunks, 0]
    assert torch.equal(*found)


def test_first_members_word_ends_what_the_others_wait_for() -> None:
    with job() as one:
        one.begin("a", "b", "c")
        a, b = one.members["a"].own, one.members["b"].own
        b.interrupt()  # it waits for nothing but the other's word
        said = together(lambda: a.lease(0, 100, stopping=True), lambda: b.lease(0, 100))
        assert said == [Lease(None), Lease(None)]
        together(a.part, b.part)

        def refuse(*args: Any, **named: Any) -> Any:
            raise ServerError("the connection is broken")

        def fails() -> None:
            with pytest.raises(ServerError, match="the connection is broken"):
                a.lease(0, 100)

        def hears() -> None:
            with pytest.raises(RuntimeError):
                b.lease(0, 100)

        one.members["a"].exchange.connections.ask = refuse  # type: ignore[method-assign]
        together(fails, hears)
        a.part()  # nobody is there any more
        b.part()


def test_a_group_with_a_device_makes_the_numbers_of_one_without() -> None:
    found = []
    for device in (False, True):
        with job(device=device) as one:
            one.begin("a", "b")
            for number in range(3):
                assert one.bodies("a", "b") == {number}
                one.commit("a", "b")
            together(*(one.members[name].exchange.settle for name in "ab"))
            assert one.applied_batches() == {((0, 3), 3)}
            found += [one.values(name) for name in "ab"]
    assert all(torch.equal(values, found[0]) for values in found)


def owed(member: GroupMember) -> dict[str, torch.Tensor]:
    residuals = member.exchange.compression.residuals
    assert residuals is not None
    owed = {chunk.key: residuals.residual(chunk.key) for chunk in member.exchange.chunks}
    return {key: rest.clone() for key, rest in owed.items() if rest is not None}


def test_debt_of_a_member_goes_with_a_sum_that_another_pushes() -> None:
    with job("TopK") as one:
        a, b = one.members["a"], one.members["b"]
        one.begin("a", "b")
        one.bodies("a", "b")
        one.commit("a", "b")
        together(a.own.settle, b.own.settle)
        before = owed(a)
        assert before
        assert not owed(b)
        one.begin("b", "a")
        one.bodies("b", "a")
        one.begin("b", "a")  # the body is left
        assert owed(a).keys() == before.keys()
        assert all(torch.equal(rest, before[key]) for key, rest in owed(a).items())
        # Without gradients of this range's own there is nothing but what is owed.
        for member in (a, b):
            member.gradients = nothing
        one.bodies("b", "a")
        sent = dict(b.own.outgoing)
        one.commit("b", "a")
        together(a.own.settle, b.own.settle)
        assert not owed(a)
        left = owed(b)
        for key, rest in before.items():
            outgoing = sent[key]
            if isinstance(outgoing, SparseGradient):
                whole = left[key].clone()
                whole[outgoing.indices.long()] += outgoing.values
            else:
                whole = outgoing
            assert torch.equal(whole, rest)


def nothing(model: torch.nn.Module, *where: int) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)


@pytest.mark.parametrize("who", ["a", "b"])
def test_script_with_changed_values_and_its_group_get_servers(who: str) -> None:
    with job() as one:
        one.begin("a", "b")
        a, b = one.members["a"].own, one.members["b"].own
        before = one.values("a")
        changed = one.members[who]
        for parameter in changed.model.parameters():
            parameter.data += 1
        changed.own.fetch_again()
        assert torch.equal(one.values(who), before)
        leases = together(lambda: a.lease(0, 100), lambda: b.lease(0, 100))
        assert leases == [Lease(0, waited=who == "a")] * 2  # the first one has passed on what it had
        if who == "a":
            together(a.refresh, b.refresh)
        assert torch.equal(one.values("b"), before)
        assert one.bodies("a", "b") == {0}  # what it holds already it gets again
        one.commit("a", "b")
        together(a.settle, b.settle)
        assert torch.equal(one.values("a"), one.values("b"))
        assert not torch.equal(one.values("a"), before)


def test_a_group_waits_for_the_slowest_group() -> None:
    with job() as one:
        one.begin("a", "b", "c", bound=1)
        c = one.members["c"]
        assert c.body() == 0
        one.commit("c")
        lease_server = next(server for server in one.running if f"s{server.port}" == c.own.lease_server)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(c.own.lease, 0, 100)
            until(lambda: lease_server.async_handler.waiting == 1, "the question that has to wait")
            assert one.bodies("a", "b") == {1}
            assert not asked.done()
            one.commit("a", "b")
            together(*(one.members[name].exchange.settle for name in "ab"))
            lease = asked.result(60)
        assert (lease.number, lease.waited) == (3, True)
        one.bodies("a", "b")
        # Both go on from there, should they come to be in other groups.
        assert [one.members[name].own.clock for name in "abc"] == [1, 1, 1]


@pytest.mark.parametrize(
    ("reported", "size", "expected"),
    [
        ([3, 4, 5], 2, {0: 3, 2: 5}),
        ([None, 4, None, None], 2, {0: 4, 2: None}),
        ([7], 4, {0: 7}),
        ([2, 1, 0, 3, 9], 3, {0: 0, 3: 3}),
    ],
)
def test_a_group_is_as_far_as_its_last_member(
    reported: list[int | None], size: int, expected: dict[int, int | None]
) -> None:
    assert clocks_of_groups(reported, size) == expected


@settings(deadline=None, max_examples=50)
@given(
    st.none() | st.integers(0, 2**53 - 2),
    st.booleans(),
    st.integers(0, 2**53),
    st.booleans(),
    st.integers(0, 2**53),
)
def test_what_is_told_is_heard(
    number: int | None, over: bool, finished: int, waited: bool, clock: int
) -> None:
    lease = Lease(number, over, finished, waited)
    assert decode(encode(lease, clock) + encode_nothing() + encode_nothing()) == (lease, clock)


def test_the_first_member_gets_the_rows_of_all() -> None:
    class Table:
        dim, has_counts = 2, False

    own = [
        {0: (torch.tensor([5, 7]), torch.full((2, 2), 1.0)), 3: (torch.tensor([1]), torch.ones(1, 2))},
        {
            0: (torch.tensor([7]), torch.full((1, 2), 2.0)),
            3: (torch.empty(0, dtype=torch.int64), torch.empty(0, 2)),
        },
        {0: (torch.tensor([9]), torch.full((1, 2), 3.0)), 3: (torch.tensor([2]), torch.full((1, 2), 4.0))},
    ]
    tables: Any = {3: Table(), 0: Table()}
    groups = form_groups(3)
    try:
        found = on_groups([lambda g=group: gather(g, own[g.rank], tables) for group in groups])
    finally:
        for group in groups:
            group.release()
    assert found[1:] == [{}, {}]
    assert [ids.tolist() for ids, _ in found[0][0]] == [[5, 7], [7], [9]]
    assert [ids.tolist() for ids, _ in found[0][3]] == [[1], [2]]
    assert torch.cat([sums for _, sums in found[0][0]])[:, 0].tolist() == [1.0, 1.0, 2.0, 3.0]
    assert torch.cat([sums for _, sums in found[0][3]])[:, 1].tolist() == [1.0, 4.0]


def test_a_group_has_the_scale_of_its_first_member() -> None:
    scalers = [torch.amp.GradScaler("cpu", scale, growth_interval=9) for scale in (64.0, 2.0**-20, 8.0)]
    for count, scaler in enumerate(scalers):
        scaler.scale(torch.ones(1))
        scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": count})
    unused = torch.amp.GradScaler("cpu", 4.0, enabled=False)
    later = torch.amp.GradScaler("cpu", 4.0)  # has scaled nothing yet
    groups = form_groups(3)
    try:
        on_groups([lambda g=group: agree([scalers[g.rank], unused], g) for group in groups])
        assert [scaler.get_scale() for scaler in scalers] == [64.0] * 3
        assert [scaler.state_dict()["_growth_tracker"] for scaler in scalers] == [0] * 3
        chosen = [scalers[0], later, scalers[2]]
        on_groups([lambda g=group: agree([chosen[g.rank]], g) for group in groups])
        assert float(later.scale(torch.ones(1))) == 64.0
    finally:
        for group in groups:
            group.release()
