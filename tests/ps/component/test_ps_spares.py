"""A gradient comes straight into the memory of the sum that it is the first part of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ps_servers import TOKEN, servers

from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.params.sparse_gradient import SparseGradient
from springtide_ps.server.server import Server
from springtide_ps.wire.client import RefusedError, ServerClient
from springtide_ps.wire.frames import Kind

KEY, SIZE = "0.0", 1000
GROUPS = ({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},)
STEP_SPEC = StepSpec(0.5, False, GROUPS)


def chunk() -> Chunk:
    return Chunk(torch.zeros(SIZE), [(0, 0, 0, SIZE)], "sgd", GROUPS)


def gradient(step: int, member: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * step + member))


class Job:
    """Two members with a connection each, and what their chunk must become."""

    def __init__(self, server: Server) -> None:
        self.server, self.token, self.expected = server, (1, 0, 1), chunk()
        self.links = [ServerClient(("127.0.0.1", server.port), TOKEN) for _ in range(2)]
        self.enter(0)
        about, payload = chunk().dump()
        self.ask(0, Kind.LOAD, {**about, "k": KEY, "s": 0}, payload)

    def enter(self, step: int) -> None:
        self.ask(0, Kind.ENTER, {"me": "m0", "members": ["m0", "m1"], "s": step, "lineage": "one"})
        self.ask(0, Kind.RESOLVE, {"recipe": STEP_SPEC.to_json()})

    def ask(
        self, member: int, kind: Kind, about: dict[str, Any], payload: Any = None, out: Any = None
    ) -> Any:
        return self.links[member].ask_step(kind, self.token, about, payload, out).result(30)

    def stage(self, step: int, member: int, gradient: torch.Tensor | SparseGradient) -> None:
        """Return when it is there."""
        self.links[member].stage(self.token, step, f"m{member}", KEY, gradient)
        self.links[member].status().result(30)

    def finish(self, step: int, total: torch.Tensor) -> None:
        about = [{"s": step, "me": f"m{member}"} for member in range(2)]
        for kind, more in (
            (Kind.PREPARE, {"count": 1, "norm": False}),
            (Kind.COMMIT, {"recipe": STEP_SPEC.to_json()}),
        ):
            asked = [
                link.ask_step(kind, self.token, {**what, **more})
                for link, what in zip(self.links, about, strict=True)
            ]
            for future in asked:
                future.result(30)
        self.expected.apply(total, STEP_SPEC)
        self.check(step)

    def check(self, step: int) -> None:
        out = torch.empty(SIZE)
        self.ask(0, Kind.FETCH, {"s": step, "k": KEY}, out=out)
        assert torch.equal(out, self.expected.values)

    def step(self, step: int, order: tuple[int, int] = (0, 1)) -> None:
        for member in order:
            self.stage(step, member, gradient(step, member))
        self.finish(step, gradient(step, order[0]) + gradient(step, order[1]))

    @property
    def held(self) -> Any:
        return self.server.sync_handler.store.shard(KEY)


@pytest.fixture
def job() -> Iterator[Job]:
    with servers(1) as [server]:
        made = Job(server)
        try:
            yield made
        finally:
            for link in made.links:
                link.close()


def test_sums_are_made_in_one_piece_of_memory(job: Job) -> None:
    job.step(1)
    where = job.held.spare.data_ptr()
    for step in range(2, 6):
        job.stage(step, 0, gradient(step, 0))
        assert job.held.spare is None
        assert job.held.sums[step, 0].data_ptr() == where
        job.stage(step, 1, gradient(step, 1))
        job.finish(step, gradient(step, 0) + gradient(step, 1))
        assert job.held.spare.data_ptr() == where


def test_two_gradients_on_their_way_both_count(job: Job) -> None:
    """The one that takes the memory may be the second one to be whole."""
    job.step(1)
    shards = job.server.sync_handler.store
    taken = shards.take_spare(KEY, 4 * SIZE, torch.float32)
    assert taken is not None
    job.stage(2, 0, gradient(2, 0))
    late = taken.view(torch.float32).copy_(gradient(2, 1))
    shards.stage(job.token, 2, "m1", KEY, late, own=True)
    assert job.held.sums[2, 0].data_ptr() != late.data_ptr()
    assert job.held.spare.data_ptr() == late.data_ptr()
    job.finish(2, gradient(2, 0) + gradient(2, 1))
    for step in (3, 4):
        job.step(step)


def test_memory_that_does_not_fit_is_not_taken(job: Job) -> None:
    shards = job.server.sync_handler.store
    assert shards.take_spare(KEY, 4 * SIZE, torch.float32) is None
    job.step(1)
    for key, nbytes, dtype in (
        ("1.0", 4 * SIZE, torch.float32),
        (KEY, 2 * SIZE, torch.bfloat16),
        (KEY, 4 * SIZE - 4, torch.float32),
        (KEY, 4 * SIZE, torch.int32),
    ):
        assert shards.take_spare(key, nbytes, dtype) is None
    assert shards.take_spare(KEY, 4 * SIZE, None) is not None
    assert shards.take_spare(KEY, 4 * SIZE, None) is None


def test_gradients_of_other_forms_come_beside_it(job: Job) -> None:
    job.step(1)
    small = [gradient(2, member).to(torch.bfloat16) for member in range(2)]
    for member in range(2):
        job.stage(2, member, small[member])
    job.finish(2, small[0].float() + small[1])
    job.stage(3, 1, gradient(3, 1))
    some = SparseGradient(torch.tensor([3, 700], dtype=torch.int32), torch.tensor([1.0, -2.0]))
    job.stage(3, 0, some)
    job.finish(3, some.add_to(gradient(3, 1)))
    job.step(4, (1, 0))


def test_refused_or_partial_gradient_costs_its_memory_only(job: Job) -> None:
    job.step(1)
    job.stage(5, 0, gradient(5, 0))  # of no step that can be
    assert "step" in job.links[0].refusal
    assert job.held.spare is None
    job.step(2)
    other = ServerClient(("127.0.0.1", job.server.port), TOKEN)
    future = other.stage_speculative(job.token, 9, "m0", KEY, gradient(9, 0), torch.empty(SIZE), 0)
    with pytest.raises(RefusedError, match="step"):
        future.result(30)
    other.close()
    job.step(3)
    job.token = (1, 0, 2)
    job.enter(3)
    job.step(4)


def test_a_chunk_that_comes_anew_has_memory_of_its_own(job: Job) -> None:
    job.step(1)
    about, payload = job.expected.dump()
    job.ask(0, Kind.LOAD, {**about, "k": KEY, "s": 1}, payload)
    assert job.held.spare is None
    job.step(2)
