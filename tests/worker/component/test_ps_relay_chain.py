"""Teams: one member fetches the values, and the others get them from it; what servers send, and who fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ps_members import Store
from ps_servers import TOKEN, names, servers
from torch.optim.swa_utils import AveragedModel
from worker_groups import form_groups, together
from worker_ranks import Rank, on_ranks, seeded

from springtide.ps.value_chain import RelayChain
from springtide.ps.worker_groups import GroupRoute

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(32, 3, generator=torch.Generator().manual_seed(2))
STEPS = 8


def build() -> torch.nn.Module:
    with seeded(2):
        return torch.nn.Sequential(torch.nn.Linear(6, 400), torch.nn.Tanh(), torch.nn.Linear(400, 3))


def chain(size: int, steps: int, pieces: int, fetch: Callable[[int, int], None]) -> list[list[Any]]:
    """Pass values along a relay chain.

    Returns:
        for each member and step, the values of each piece, or the error that came instead.
    """
    groups = form_groups(size)
    passings = [RelayChain(group) for group in groups]

    def member(rank: int) -> list[list[Any]]:
        found = []
        for step in range(steps):
            memory = [torch.full((3,), -1.0) for _ in range(pieces)]

            def first(key: str, memory: list[torch.Tensor] = memory, step: int = step) -> None:
                fetch(step, int(key))
                memory[int(key)].fill_(100 * step + int(key))

            arrived = passings[rank].begin({str(n): own for n, own in enumerate(memory)}, first)
            values: list[Any] = []
            for number, future in enumerate(arrived.values()):
                error = future.exception(60)
                if error is not None:
                    # Whoever fails ends the generation for all.
                    for group in groups:
                        group.shut()
                values.append(str(error) if error is not None else memory[number].tolist())
            found.append(values)
        return found

    try:
        return together([lambda rank=rank: member(rank) for rank in range(size)])
    finally:
        for chain, group in zip(passings, groups, strict=True):
            chain.end()
            assert chain.ended
            group.release()


@pytest.mark.parametrize("size", [2, 4])
def test_all_have_what_the_first_has_fetched(size: int) -> None:
    found = chain(size, 3, 20, lambda step, key: None)
    expected = [[[100.0 * step + key] * 3 for key in range(20)] for step in range(3)]
    assert found == [expected] * size


def in_parts(size: int, parts: list[str], fetch: Callable[[str], None]) -> list[dict[str, Any]]:
    """Pass the values of one step along a relay chain, in several parts.

    Args:
        parts: the names of each part's pieces, in the order in which the first member fetches them.

    Returns:
        for each member, the values of each piece, or the error.
    """
    groups = form_groups(size)
    passings = [RelayChain(group) for group in groups]

    def member(rank: int) -> dict[str, Any]:
        memory = {key: torch.full((3,), -1.0) for key in sorted("".join(parts))}

        def first(key: str) -> None:
            fetch(key)
            memory[key].fill_(ord(key))

        arrived: dict[str, Any] = {}
        for part in [""] if rank else parts:
            found = passings[rank].begin(memory, first, part, in_parts=True)
            arrived |= {key: future for key, future in found.items() if rank or key in part}
        errors = {key: future.exception(60) for key, future in arrived.items()}
        return {key: str(error) if (error := errors[key]) else own.tolist() for key, own in memory.items()}

    try:
        return together([lambda rank=rank: member(rank) for rank in range(size)])
    finally:
        for chain, group in zip(passings, groups, strict=True):
            chain.end()
            assert chain.ended
            group.release()


@pytest.mark.parametrize("size", [2, 4])
def test_what_the_first_chooses_part_by_part_comes_to_all(size: int) -> None:
    parts = ["d", "acfgh", "be"]
    assert in_parts(size, parts, lambda key: None) == [{key: [ord(key)] * 3 for key in "abcdefgh"}] * size


def test_when_a_later_part_cannot_be_fetched_all_hear_of_it() -> None:
    def fetch(key: str) -> None:
        if key == "c":
            raise RuntimeError("the server is lost")

    for found in in_parts(3, ["ab", "cd"], fetch):
        assert "a group passes values on" in found["d"]


def test_when_the_first_cannot_fetch_all_hear_of_it() -> None:
    def fetch(step: int, key: int) -> None:
        if key == 12:
            raise RuntimeError("the server is lost")

    for values in chain(3, 1, 20, fetch):
        failed = [value for value in values[0] if isinstance(value, str)]
        # What had gone on before may have come to the others, or been cut off.
        assert values[0][-1] in failed
        assert all("a group passes values on" in value for value in failed)
        assert all(value == [float(key)] * 3 for key, value in enumerate(values[0]) if value not in failed)


def test_what_the_first_has_not_chosen_does_not_come() -> None:
    groups = form_groups(3)
    passings, fetched = [RelayChain(group) for group in groups], list[str]()
    wanted = [frozenset({"1", "3"}), frozenset({"0", "1"}), frozenset[str]()]
    memory = [[torch.full((2,), -1.0) for _ in range(4)] for _ in groups]

    def member(rank: int) -> list[bool]:
        def first(key: str) -> None:
            fetched.append(key)
            memory[0][int(key)].fill_(float(key))

        pieces = {str(n): own for n, own in enumerate(memory[rank])}
        came = [future.result(60) for future in passings[rank].begin(pieces, first, wanted[rank]).values()]
        passings[rank].finish()
        return came

    try:
        assert (
            together([lambda rank=rank: member(rank) for rank in range(3)])
            == [[False, True, False, True]] * 3
        )
        assert fetched == ["1", "3"]
        assert [[own.tolist() for own in all_of_them] for all_of_them in memory] == [
            [[-1, -1], [1, 1], [-1, -1], [3, 3]]
        ] * 3
    finally:
        for chain, group in zip(passings, groups, strict=True):
            chain.end()
            group.release()


def train(size: int, group_size: int) -> tuple[torch.Tensor, int]:
    """(values, bytes of tensors that servers have sent)."""
    store = Store()

    def script(rank: Rank) -> torch.Tensor:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        rank.distribute(model, optimizer)
        rank.enter_servers(names(running), store)
        for x, y in rank.batches((X, Y), batch_size=16, epochs=STEPS // 2, seed=0):
            with rank.step():
                (model(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        exchange = rank.trainer.servers
        if group_size > 1:
            assert exchange is not None
            # A boundary cuts nothing off.
            exchange.rest()
            assert exchange.context.values.held_keys == {chunk.key for chunk in exchange.chunks}
            assert isinstance(exchange.route, GroupRoute)
            assert exchange.route.relayed
        rank.runtime.settle(None)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    with servers(2) as running:
        how = {"strategy": "ParameterServer", "token": TOKEN, "group_size": group_size}
        results = on_ranks(size, script, **how)
    assert all(torch.equal(values, results[0]) for values in results)
    # The servers have ended, so that everything is counted.
    return results[0], sum(server.counters.bytes_out for server in running)


def test_servers_send_one_copy_for_a_group() -> None:
    alone, each = train(4, 1)
    found: dict[int, int] = {}
    for size in (2, 4):
        values, found[size] = train(4, size)
        torch.testing.assert_close(values, alone, rtol=0, atol=1e-5)
    # At the beginning, the three that hold nothing fetch for themselves.
    copy = each / (3 + 4 * STEPS)
    assert copy == int(copy)
    assert copy >= 4 * len(alone)
    assert found[2] == (3 + 2 * STEPS) * copy
    assert found[4] == (3 + 1 * STEPS) * copy


@pytest.mark.parametrize("reader", [0, 1])
def test_committed_member_gets_values_after_its_groups_end(reader: int) -> None:
    """A body reads what its step has made, when the other member of its group does not commit that step."""
    has_read, store = threading.Event(), Store()

    def script(rank: Rank) -> torch.Tensor:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        average = AveragedModel(build())
        rank.distribute(model, optimizer, average=average)
        rank.enter_servers(names(running), store)
        exchange, found = rank.trainer.servers, torch.zeros(0)
        assert exchange is not None
        commit = exchange.commit

        def over() -> None:
            """Shut the group and end the connections' waits, the way the end of a generation does."""
            assert exchange is not None
            assert exchange.route.group is not None
            exchange.route.group.shut()
            exchange.connections.over("the other member is dead")

        def early(*arguments: Any) -> None:
            commit(*arguments)
            over()

        def late(*arguments: Any) -> None:
            """Commit only once the other member has read its values, like a member that dies at this
            moment.
            """
            assert has_read.wait(60)
            commit(*arguments)
            over()

        exchange.commit = early if rank.rank == reader else late  # type: ignore[method-assign]
        for x, y in rank.batches((X, Y), batch_size=32, epochs=1, seed=0, shuffle=False):
            with rank.step():
                (model(x) - y).square().mean().backward()
                optimizer.step()
                if rank.rank == reader:
                    average.update_parameters(model)
                    found = torch.cat([p.detach().reshape(-1) for p in average.module.parameters()])
                    has_read.set()
        return found

    with servers(2) as running:
        how = {"strategy": "ParameterServer", "token": TOKEN, "group_size": 2}
        found = on_ranks(2, script, **how)[reader]
    model = build()
    (model(X) - Y).square().mean().backward()
    expected = torch.cat([(p - 0.5 * p.grad).detach().reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
