"""The script's own collectives: who runs a block again, and what a process alone makes of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_alone import Script, library
from worker_groups import addresses, together, wired_stores

import springtide
from springtide.comm.process_group import Group, form
from springtide.comm.torch_group import Handle
from springtide.elastic.consistency import Consistencies
from springtide.elastic.retry import RetryBlocks
from springtide.elastic.retry_position import RetryPosition, RetryVerdict, agree
from springtide.elastic.trainer_access import TrainerAccess
from springtide.elastic.training_state import TrainingState
from springtide.errors import UsageError
from springtide.settings import Settings

FIRST, SECOND = (0, 5, 0), (0, 5, 1)


def test_members_of_a_block_run_it_again_together() -> None:
    inside, outside = RetryPosition(FIRST), RetryPosition()
    assert agree([inside, RetryPosition(FIRST, ready=True)], 1) == RetryVerdict(False, None)
    assert [agree([inside, outside, inside], rank) for rank in range(3)] == [
        RetryVerdict(False, (0, 2)),
        RetryVerdict(False, (1,)),
        RetryVerdict(False, (0, 2)),
    ]
    assert agree([outside, outside], 0) == RetryVerdict(False, None)
    assert agree([RetryPosition(SECOND), inside], 0) == RetryVerdict(False, (0,))


def test_member_past_the_block_proves_it_complete() -> None:
    ready, past = RetryPosition(FIRST, ready=True), RetryPosition(None, past=FIRST)
    assert agree([ready, past, ready], 0) == RetryVerdict(True, (0,))
    assert agree([ready, past, ready], 1) == RetryVerdict(False, (1,))
    assert agree([ready, RetryPosition(SECOND, past=FIRST)], 0).done
    assert not agree([ready, RetryPosition(None, past=(0, 4, 0))], 0).done


KEYS = st.sampled_from([None, FIRST, SECOND])


@settings(deadline=None)
@given(st.lists(st.builds(RetryPosition, KEYS, st.booleans(), KEYS), min_size=1, max_size=5))
def test_members_of_one_block_agree(positions: list[RetryPosition]) -> None:
    assert [RetryPosition.from_json(position.to_json()) for position in positions] == positions
    verdicts = [agree(positions, rank) for rank in range(len(positions))]
    for one, other in itertools.combinations(range(len(positions)), 2):
        again = [not verdicts[rank].done and positions[rank].at is not None for rank in (one, other)]
        if all(again) and positions[one].at == positions[other].at:
            assert verdicts[one] == verdicts[other]
    for rank, verdict in enumerate(verdicts):
        assert verdict.companions is None or rank in verdict.companions


@settings(deadline=None)
@given(
    past=st.lists(st.booleans(), min_size=1, max_size=5),
    ready=st.lists(st.booleans(), min_size=5, max_size=5),
    dead=st.sets(st.integers(0, 4)),
    joiners=st.integers(0, 2),
)
def test_block_counts_for_all_members_or_for_none(
    past: list[bool], ready: list[bool], dead: set[int], joiners: int
) -> None:
    """A retry block counts for all members or for none, also when some of them die.

    A member that passed the block's last reduction proves that all had come to it.
    """
    members = [
        RetryPosition(None, past=FIRST) if passed else RetryPosition(FIRST, ready=any(past) or ready[number])
        for number, passed in enumerate(past)
    ]
    alive = [position for number, position in enumerate(members) if number not in dead]
    positions = [*alive, *[RetryPosition()] * joiners]
    verdicts = [agree(positions, rank) for rank in range(len(positions))]
    inside = [rank for rank, position in enumerate(positions) if position.at == FIRST]
    counts = any(position.past == FIRST for position in positions)
    for rank in inside:
        assert verdicts[rank].done == counts
        if not counts:
            assert verdicts[rank].companions == (None if len(inside) == len(positions) else tuple(inside))


def test_closed_handle_is_forgotten_by_torch() -> None:
    stores, places = wired_stores(2), addresses(2)
    groups = together(
        [
            lambda rank=rank: form(
                stores[rank], rank, 2, places[rank], connect_seconds=20.0, collective_seconds=60.0
            )
            for rank in range(2)
        ]
    )
    handles = [Handle(group, 60.0) for group in groups]

    def work(rank: int) -> tuple[object, ...]:
        group = handles[rank].group
        summed, copied = torch.ones(2) * (rank + 1), torch.ones(1) * rank
        dist.all_reduce(summed, group=group)
        dist.broadcast(copied, src=1, group=group)
        names: list[object] = [None, None]
        dist.all_gather_object(names, f"rank {rank}", group=group)
        dist.barrier(group=group)
        return summed.tolist(), copied.item(), names, (group.rank(), group.size())

    try:
        assert together([lambda rank=rank: work(rank) for rank in range(2)]) == [
            ([3.0, 3.0], 1.0, ["rank 0", "rank 1"], (rank, 2)) for rank in range(2)
        ]
    finally:
        for handle, group in zip(handles, groups, strict=True):
            handle.close()
            group.release()
    with pytest.raises((RuntimeError, ValueError)):
        dist.broadcast(torch.ones(1), src=1, group=handles[0].group)


def in_block(call: Callable[[], object]) -> None:
    for attempt in springtide.retry():
        with attempt:
            call()


def test_block_alone_runs_once_and_lets_errors_out() -> None:
    with library() as runtime:
        script = Script()
        runs = 0
        for attempt in springtide.retry():
            with attempt:
                runs += 1
                value = torch.tensor([3.0])
                dist.all_reduce(value, group=springtide.process_group())
                assert value.item() == 3.0
        assert runs == 1
        with pytest.raises(KeyError, match="mine"):
            in_block(lambda: {}["mine"])
        for batch in script.batches():
            with springtide.step():
                loss = script.loss(batch)
                loss.backward()
                total = loss.detach().clone()
                dist.all_reduce(total, group=springtide.process_group())
                assert total == loss
                with pytest.raises(UsageError, match="inside of a step"):
                    next(iter(springtide.retry()))
                script.finish()
            for attempt in springtide.retry():
                with attempt:
                    dist.barrier(group=springtide.process_group())
        assert runtime.position.cursor.step == 3


def test_wrong_use_of_retry_raises_usage_errors() -> None:
    with library():
        with pytest.raises(UsageError, match="Python runs a with block once"), springtide.retry():
            pass
        with pytest.raises(UsageError, match="without its block"):
            list(springtide.retry())
        with pytest.raises(UsageError, match="inside of another"):
            in_block(lambda: next(iter(springtide.retry())))
        with pytest.raises(UsageError, match="name the ranks"):
            springtide.on_ranks()
        with pytest.raises(UsageError, match="numbers from 0"):
            springtide.on_ranks(-1)


def fail(error: BaseException) -> None:
    raise error


def test_no_group_between_two_generations() -> None:
    member = SimpleNamespace(generation=None, over="")
    state, trainers = TrainingState(Group(None, 0, 1, 60.0)), TrainerAccess()
    kinds = Consistencies(Settings(), state, None)
    blocks = RetryBlocks(Settings(), state, trainers, member, kinds, fail, lambda: False)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="before the first training loop"):
        blocks.process_group()
    with pytest.raises(UsageError, match="before the first training loop"):
        next(blocks.attempts())
    member.generation = object()
    blocks.process_group()
    member.over = "worker-1 is lost"
    with pytest.raises(springtide.GenerationChanged, match="worker-1 is lost"):
        blocks.process_group()
    member.over = ""
    state.group.shut()
    with pytest.raises(springtide.GenerationChanged, match="a reduction failed"):
        blocks.process_group()
    # An error of the script's own is not taken for a change, whatever its class.
    for attempt in blocks.attempts():
        with pytest.raises(RuntimeError, match="mine"), attempt:
            raise RuntimeError("mine")
        break
    blocks.leave()


def test_functions_for_some_ranks_run_there_alone() -> None:
    with pytest.raises(UsageError, match=r"before springtide.init\(\)"):
        springtide.rank_zero_only(lambda: 1)()
    with library(local_rank=1, local_world_size=4):
        assert springtide.rank_zero_only(lambda x, y: x + y)(1, y=2) == 3
        assert springtide.on_ranks(1, 2)(lambda: 5)() is None
        assert springtide.on_ranks(0, 1)(lambda: 5)() == 5
        assert (springtide.local_rank(), springtide.local_world_size()) == (1, 4)
