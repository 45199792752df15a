"""The dimensions of a pod's mesh, places of its processes, and the cut of batches and tensors for them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.data.batch import Batch, Micro
from springtide.data.cursor import Cursor
from springtide.data.loop import plan_loop
from springtide.data.partition import pieces, pieces_together
from springtide.pods.dims import MeshShape, mesh_shape
from springtide.pods.evaluation import added, forward_passes
from springtide.pods.grid import grid_of
from springtide.pods.tensors import make_runs


def test_mesh_of_one_dimension_has_all_processes() -> None:
    shape = mesh_shape("dp_shard", None, 4)
    assert (shape.names, shape.sizes, shape.data_degree) == (("dp_shard",), (4,), 4)
    assert [shape.data_index(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert all(shape.counts(rank) for rank in range(4))


def test_tensor_parallel_processes_take_the_same_samples() -> None:
    shape = mesh_shape(("dp_shard", "tp"), (2, 2), 4)
    assert [shape.data_index(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [shape.counts(rank) for rank in range(4)] == [True, False, True, False]
    assert shape.coordinate(3) == {"dp_shard": 1, "tp": 1}
    shape = mesh_shape(("dp_replicate", "dp_shard", "tp"), (2, 2, 3), 12)
    assert [shape.data_index(rank) for rank in (0, 3, 6, 9, 11)] == [0, 1, 2, 3, 3]
    assert sum(shape.counts(rank) for rank in range(12)) == shape.data_degree == 4


@pytest.mark.parametrize(
    ("names", "sizes", "problem"),
    [
        ("pp", None, "dimensions are named dp, dp_replicate, dp_shard, tp"),
        (("tp", "tp"), (2, 2), "each once"),
        ((), None, "dimensions are named"),
        (("dp", "dp_shard"), (2, 2), "dp stands alone"),
        (("dp_shard", "tp"), None, "needs the sizes too"),
        (("dp_shard", "tp"), (2, 3), "whose product is the 4 processes"),
        (("dp_shard", "tp"), (4,), "must be 2 numbers"),
        ("tp", 0, "must be 1 numbers"),
        ("dp_replicate", 4, "dp_replicate alone divides nothing"),
    ],
)
def test_impossible_mesh_is_refused(names: str | tuple[str, ...], sizes: int | None, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        mesh_shape(names, sizes, 4)


@dataclass
class Member:
    pod_uid: str
    local_rank: int

    @property
    def pod_name(self) -> str:
        return f"pod-{self.pod_uid}"


def test_row_has_the_processes_of_one_local_rank() -> None:
    # Two pods of one slot are ranked by local rank first, so that their processes alternate.
    members = [Member("b", 0), Member("a", 0), Member("b", 1), Member("a", 1), Member("c", 0), Member("c", 1)]
    assert grid_of(members, 3, 2).row == (2, 3, 5)
    assert (grid_of(members, 3, 2).pod, grid_of(members, 4, 2).pods) == (1, 3)
    with pytest.raises(ValueError, match=r"pod-c trains as one, and its processes \[1\] \(of 2\)"):
        grid_of(members[:5], 0, 2)


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 60),
    pods=st.integers(1, 4),
    wanted=st.integers(1, 4),
    limit=st.one_of(st.none(), st.integers(3, 9)),
    mesh=st.sampled_from([(("dp_shard",), (2,)), (("dp_shard", "tp"), (2, 2)), (("tp",), (3,))]),
)
def test_each_sample_counts_once_and_pods_run_equally_often(
    samples: int, pods: int, wanted: int, limit: int | None, mesh: tuple[tuple[str, ...], tuple[int, ...]]
) -> None:
    shape = MeshShape(*mesh)
    plan = plan_loop(torch.arange(samples), batch_size=samples, micro_batch=limit, min_part=2)
    counted: list[int] = []
    weight = 0.0
    for pod in range(pods):
        counts = set()
        for local in range(shape.processes):
            first = pod * shape.data_degree
            batch = plan.batch(
                Cursor(),
                first + shape.data_index(local),
                pods * shape.data_degree,
                together=range(first, first + shape.data_degree),
                is_counted=shape.counts(local),
            )
            micros = 0
            for micro in batch.split(wanted):
                batch.micro.contribute()
                assert len(micro.data)  # also one that counts nothing has something to compute on
                assert micro.samples or micro.standin
                assert (batch.micro.scale == 0.0) == (micro.samples == 0)
                micros += 1
            counts.add(micros)
            assert batch.micro.remaining_samples == 0
            counted += batch.micro.contributed_ids.tolist()
            weight += batch.micro.contributed_weight
        assert len(counts) == 1
    assert sorted(counted) == list(range(samples))
    assert weight == samples


def test_empty_micro_batch_weighs_nothing() -> None:
    ids = torch.arange(1)
    batch = Batch(Micro(ids, 3), ids, lambda ids: ids, together=[1, 2], empty_ids=torch.arange(2))
    seen = []
    for micro in batch.split(2):
        micro.weight(5)  # of the second one's, which count elsewhere
        seen.append((micro.samples, micro.standin, micro.data.tolist(), batch.micro.current_weight))
    assert seen == [(1, False, [0], 5.0), (0, True, [0, 1], 0.0)]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4))
def test_pieces_together_are_those_of_the_largest_part(size: int, wanted: int, least: int) -> None:
    parts = [size, size - 1, 0]
    cuts = [pieces_together(n, parts, wanted, None, least) for n in parts]
    alone = max(len(pieces(n, wanted, None, least)) for n in parts if n)
    assert {len(cut) for cut in cuts} == {alone}
    assert [sum(part.size for part in cut) for cut in cuts] == parts


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_cut_finds_what_pieces_and_parts_have_in_common(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 60))
    chosen = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1)))
    breaks = [at for at, (a, b) in enumerate(itertools.pairwise(chosen), start=1) if b != a + 1]
    runs = np.split(np.array(chosen, dtype=np.int64), breaks)
    starts, stops = np.array([r[0] for r in runs]), np.array([r[-1] + 1 for r in runs])
    cut = make_runs((size,), (len(chosen),), starts, stops)
    whole, part = torch.arange(size), torch.full((len(chosen),), -1)
    # Written in stretches of the part, read from pieces of the whole that others have cut elsewhere.
    shares = data.draw(st.integers(1, 4))
    written = torch.full((size,), -1)
    for share in range(shares):
        begin, end = len(chosen) * share // shares, len(chosen) * (share + 1) // shares
        for start, stop, at in cut.stretch(begin, end):
            written[start:stop] = whole[chosen][at : at + stop - start]
    assert written[chosen].tolist() == chosen
    assert int((written >= 0).sum()) == len(chosen)
    points = sorted({0, size, *data.draw(st.lists(st.integers(0, size)))})
    for begin, end in itertools.pairwise(points):
        for start, stop, at in cut.common_runs(begin, end):
            part[at : at + stop - start] = whole[start:stop]
    assert part.tolist() == chosen


@given(
    st.sampled_from([(("dp_shard",), (3,)), (("dp_shard", "tp"), (2, 2)), (("tp",), (2,))]),
    st.integers(0, 20),
    st.integers(1, 30),
    st.integers(1, 4),
)
def test_pod_evaluates_each_sample_once(
    form: tuple[tuple[str, ...], tuple[int, ...]], start: int, count: int, unit: int
) -> None:
    shape, stop = MeshShape(*form), start + count
    shared = [list(forward_passes(start, stop, unit, shape, rank)) for rank in range(shape.processes)]
    assert len({len(own) for own in shared}) == 1  # equally many forward passes
    counted: list[int] = []
    for rank, own in enumerate(shared):
        for forward in own:
            assert 0 < len(forward.ids) <= unit
            assert set(forward.ids) <= set(range(start, stop))
            assert forward.weight == (
                len(forward.ids) if shape.counts(rank) and not forward.is_standin else 0
            )
            counted += forward.ids if forward.weight else []
    assert sorted(counted) == list(range(start, stop))
    # Those that compute together do so on the same samples.
    by_index = {shape.data_index(rank): [t.ids for t in own] for rank, own in enumerate(shared)}
    assert all(by_index[shape.data_index(rank)] == [t.ids for t in own] for rank, own in enumerate(shared))


def test_sums_of_processes_are_added_by_name() -> None:
    assert added([{"a": 1.0, "b": 2.0}, {}, {"a": 0.5}]) == {"a": 1.5, "b": 2.0}
