"""The estimate of a process's memory: its table, the fewest processes with room, and the words for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import MalformedError, memory_from_proto, memory_to_proto
from springtide_protocol.limits import MAX_COUNT, MAX_PROCESSES
from springtide_protocol.memory import (
    CONTAINER,
    DEVICE,
    SHARDS,
    ModelMemory,
    fewest,
    fits,
    in_words,
    need,
    why_too_small,
)

GIB = 1 << 30
AMOUNTS = st.integers(0, 1 << 40)
MODELS = st.builds(
    ModelMemory,
    parameters=st.integers(1, 1 << 40),
    gradients=AMOUNTS,
    bucket=AMOUNTS,
    state=AMOUNTS,
    shard=st.sampled_from(SHARDS),
    limit=AMOUNTS,
    limited_by=st.sampled_from([CONTAINER, DEVICE]),
)


def billion(shard: str, limit: int = 0) -> ModelMemory:
    """A billion parameters in float32 with Adam, in GB instead of bytes."""
    return ModelMemory(4, 4, 0, 8, shard, limit)


@pytest.mark.parametrize(
    ("processes", "totals"), [(1, (16, 16, 16)), (2, (16, 16, 16)), (4, (16, 12, 10)), (8, (16, 10, 7))]
)
def test_needs_are_those_of_the_documented_table(processes: int, totals: tuple[int, ...]) -> None:
    assert tuple(need(billion(shard), processes).total for shard in SHARDS) == totals


@given(MODELS, st.integers(1, 2000))
def test_more_processes_never_need_more_each(model: ModelMemory, size: int) -> None:
    here, there = need(model, size), need(model, size + 1)
    assert there.total <= here.total
    assert (here.parameters, there.parameters) == (model.parameters, model.parameters)
    # All copies together are there at least: two of each part, or one of the whole.
    copies = size if model.shard == "None" else min(2, size)
    assert size * here.state >= copies * model.state
    if size <= 2 or model.shard == "None":
        assert here.total == model.parameters + model.gradients + model.state


@given(MODELS)
def test_fewest_is_the_first_size_with_room(model: ModelMemory) -> None:
    enough = fewest(model)
    if enough is None:
        assert not fits(model, MAX_PROCESSES)
        assert need(model, MAX_PROCESSES).total > model.limit
        return
    assert fits(model, enough)
    assert enough == 1 or not fits(model, enough - 1)


@given(MODELS)
def test_the_reason_is_empty_where_there_is_room(model: ModelMemory) -> None:
    assert bool(why_too_small(model, 3, 1, can_share=True)) == (not fits(model, 3))


def test_reason_names_need_limit_and_what_to_do() -> None:
    model = ModelMemory(4 * GIB, 4 * GIB, 0, 8 * GIB, "Optimizer", 13 * GIB)
    said = why_too_small(model, 1, 1, can_share=False)
    assert "with 1 worker, as few as workers.minReplicas allows, each needs 16 GiB and has 13 GiB" in said
    assert "8 GiB for the optimizer's state" in said
    assert said.endswith("Set workers.minReplicas to 4, or raise the limit")
    two = why_too_small(model, 2, 2, can_share=False)  # one pod of two processes
    assert "with 1 worker," in two
    assert "minReplicas to 2" in two
    assert "for each of its 2 processes" in two


def test_reason_says_when_more_workers_do_not_help() -> None:
    whole = ModelMemory(4 * GIB, 4 * GIB, 0, 8 * GIB, "None", 10 * GIB)
    assert "strategy.allReduce.shard to Gradients, with workers.minReplicas 4 or more" in why_too_small(
        whole, 8, 1, can_share=True
    )
    assert why_too_small(whole, 8, 1, can_share=False).endswith("More workers do not help: raise the limit")
    device = ModelMemory(4 * GIB, shard="Gradients", limit=2 * GIB, limited_by=DEVICE)
    assert why_too_small(device, 8, 1, can_share=False).endswith("use devices with more memory")


@given(MODELS)
def test_messages_bring_the_same_figures(model: ModelMemory) -> None:
    assert memory_from_proto(memory_to_proto(model)) == model


def test_odd_messages_are_refused_or_read_as_nothing() -> None:
    assert memory_from_proto(pb.Memory()) is None
    later = memory_from_proto(pb.Memory(parameter_bytes=1, shard="Parameters", limited_by="tape"))
    assert later == ModelMemory(1)
    with pytest.raises(MalformedError, match="bytes of Memory"):
        memory_from_proto(pb.Memory(parameter_bytes=1, limit_bytes=MAX_COUNT + 1))


def test_amounts_have_three_digits() -> None:
    assert [in_words(n) for n in (0, 999, 1 << 20, 1_600_000_000, 1023 * GIB)] == [
        "0 bytes",
        "999 bytes",
        "1 MiB",
        "1.49 GiB",
        "0.999 TiB",
    ]
