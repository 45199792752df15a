"""Values that servers send before a step is decided: when they count, and when they do not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from ps_members import Member, Store, build, gradients_of, members, together
from ps_servers import servers
from ps_snapshots import states_on

from springtide.ps.compression import GradientCompression
from springtide.ps.connections import ServerError
from springtide_ps.params.chunk import Chunk, StepSpec
from springtide_ps.server.speculation import ExpectedStep
from springtide_ps.server.speculative_copy import SpeculativeCopy
from springtide_ps.wire.client import RefusedError

torch.set_num_threads(1)

GROUPS = ({"lr": 0.1, "momentum": 0.9},)


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def asked_early(member: Member) -> list[Any]:
    """Return the member's pulls of speculative values that are under way in the running body."""
    speculative = member.exchange.speculative
    assert speculative is not None
    return list(speculative.under_way)


def came_early(member: Member) -> int:
    """How many chunks have values of the committed step that were asked for early."""
    speculative = member.exchange.sync_backend.speculative
    assert speculative is not None
    return len(speculative.awaited)


class Job:
    """Two members, and what one process makes of the same steps."""

    def __init__(self, running: Any, a: Member, b: Member) -> None:
        self.running, self.both = running, (a, b)
        store, names = Store(), ["m0", "m1"]
        together(
            lambda: a.begin(1, names, running, store, fresh=True),
            lambda: b.begin(1, names, running, store, fresh=True, holds=False),
        )
        together(a.exchange.resolve, b.exchange.resolve)
        self.reference = build(seed=sum(map(ord, "m0")))
        self.optimizer = adam(self.reference)

    def prepare(self) -> None:
        a, b = self.both
        together(lambda: a.push(0, 2), lambda: b.push(1, 2))

    def commit(self, scale: float = 1.0) -> None:
        for member in self.both:
            member.commit(scale)
        gradients_of(self.reference, self.both[0].step, 0, 1)
        for parameter in self.reference.parameters():
            assert parameter.grad is not None
            parameter.grad *= scale
        self.optimizer.step()

    def step(self, scale: float = 1.0) -> None:
        self.prepare()
        self.commit(scale)

    def check(self) -> None:
        a, b = self.both
        for mine, theirs, expected in zip(a.values(), b.values(), self.reference.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            torch.testing.assert_close(mine, expected.detach(), rtol=1e-4, atol=5e-5)

    @property
    def early(self) -> list[Any]:
        """Return the first member's speculative pulls that it has not taken yet."""
        return asked_early(self.both[0])


def test_values_arrive_before_commit_and_count_only_from_then() -> None:
    with servers(2) as running, members(2, adam, early=True) as (a, b):
        job = Job(running, a, b)
        job.step()
        assert not job.early, "how the first step will be made, nobody knows"
        job.check()
        for _ in range(3):
            before = a.values()
            job.prepare()
            early = job.early
            assert len(early) == len(a.exchange.chunks)
            wait(early, 60.0)
            assert all(torch.equal(x, y) for x, y in zip(a.model.parameters(), before, strict=True))
            job.commit()
            assert came_early(a) == len(a.exchange.chunks)
            job.check()


def test_step_made_otherwise_is_fetched_and_the_next_one_rests() -> None:
    with servers(2) as running, members(2, adam, early=True) as (a, b):
        job = Job(running, a, b)
        asked = []
        for scale in (1.0, 1.0, 0.5, 0.5, 2.0, 2.0, 2.0, 2.0, 2.0):
            job.prepare()
            asked.append(bool(job.early))
            wait(job.early, 60.0)
            job.commit(scale)
            job.check()
        #       first  as before  missed  rests  missed  three rest           as before
        assert asked == [False, True, True, False, True, False, False, False, True]


def test_a_schedule_between_two_steps_is_foreseen() -> None:
    with servers(1) as running, members(2, adam, early=True) as (a, b):
        job = Job(running, a, b)
        for step in range(5):
            job.step()
            assert bool(came_early(a)) is (step > 0)
            for optimizer in (a.optimizer, b.optimizer, job.optimizer):
                optimizer.param_groups[0]["lr"] *= 0.7
            job.check()


def test_members_that_foresee_different_steps_get_nothing_early() -> None:
    with servers(1) as running, members(2, adam, early=True) as (a, b):
        job = Job(running, a, b)
        job.step()
        job.check()
        backend = b.exchange.sync_backend
        assert backend.step_spec is not None
        backend.step_spec = replace(backend.step_spec, scale=3.0)
        a.send(0, 2)
        b.send(1, 2)
        asked = [job.early, asked_early(b)]
        together(a.exchange.prepare, b.exchange.prepare)
        refused = []
        for early in asked:
            wait(early, 60.0)
            refused.append(all(isinstance(future.exception(), RefusedError) for future in early))
        assert any(refused), "who speaks first may have some, the other one has none"
        job.commit()
        job.check()


def test_step_nobody_committed_leaves_chunks_as_they_were() -> None:
    with servers(2) as running, members(2, adam, early=True) as (a, b):
        job = Job(running, a, b)
        job.step()
        job.step()
        job.check()
        before, states = a.values(), states_on(a.exchange)
        job.prepare()
        wait(job.early, 60.0)
        assert states_equal(states_on(a.exchange), states), "the early copy is seen by nobody"
        store, names = Store(), ["m0", "m1"]
        together(
            lambda: a.begin(2, names, running, store, step=2),
            lambda: b.begin(2, names, running, store, step=2),
        )
        together(a.exchange.resolve, b.exchange.resolve)
        assert all(torch.equal(x, y) for x, y in zip(a.values(), before, strict=True))
        assert states_equal(states_on(a.exchange), states)
        for _ in range(2):
            job.step()
            job.check()


def states_equal(some: Any, others: Any) -> bool:
    return all(
        torch.equal(value, others[key][name]) for key, state in some.items() for name, value in state.items()
    )


def test_early_values_of_a_lost_server_come_from_the_copy() -> None:
    with servers(2) as running, members(2, adam, early=True, replication=2) as (a, b):
        job = Job(running, a, b)
        for _ in range(3):
            job.step()
            job.check()
        job.prepare()
        job.commit()
        running[0].close(30.0)
        job.check()


def test_gradient_waits_until_last_step_is_made_everywhere() -> None:
    """A member may have early values while another one has not committed."""
    with servers(1) as running, members(2, adam, early=True) as (a, b):
        job = Job(running, a, b)
        job.step()
        job.check()
        job.prepare()
        wait(job.early, 60.0)
        a.commit()
        a.exchange.settle(range(len(list(a.model.parameters()))))
        a.exchange.begin_step()
        a.exchange.connections.answer_seconds = 0.3
        with pytest.raises(ServerError, match="the last step's commit"):
            a.exchange.push(a.flats[0], 0)
        with pytest.raises(ServerError, match="the last step's commit"):
            a.values()
        a.exchange.connections.answer_seconds = 20.0
        b.commit()
        for bucket, flat in enumerate(a.flats):
            a.exchange.push(flat, bucket)
        b.send(1, 2)
        assert len(job.early) == len(a.exchange.chunks)
        assert all(future.exception(30.0) is None for future in job.early)


def test_without_room_for_a_second_copy_values_come_as_before() -> None:
    with servers(1) as running, members(2, adam, early=True) as (a, b):
        job = Job(running, a, b)
        job.step()
        job.check()
        running[0].sync_handler.memory_limit = int(1.5 * running[0].sync_handler.store.held_bytes)
        for _ in range(2):
            job.prepare()
            early = job.early
            wait(early, 60.0)
            assert early
            assert all(isinstance(future.exception(), RefusedError) for future in early)
            job.commit()
            job.check()


# ---- the second copy


def chunk() -> Chunk:
    values = torch.arange(6, dtype=torch.float32)
    return Chunk(values, [(0, 0, 0, 4), (1, 0, 4, 6)], "sgd", GROUPS)


@pytest.mark.parametrize("kind", ["BF16", "TopK"])
def test_compressed_gradients_are_answered_early_too(kind: str) -> None:
    wire = partial(GradientCompression, kind, 0.2)
    with servers(2) as running, members(2, adam, early=True, compression=wire) as (a, b):
        job = Job(running, a, b)
        job.step()
        for _ in range(3):
            job.prepare()
            early = job.early
            assert len(early) == len(a.exchange.chunks)
            assert all(future.exception(60.0) is None for future in early)
            job.commit()
            foreseen = a.values()
            a.exchange.fetch_again()
            assert all(torch.equal(x, y) for x, y in zip(a.values(), foreseen, strict=True))


def test_optimizer_changing_gradients_leaves_a_kept_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    def stepper(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        def step() -> None:
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    assert tensor.grad is not None
                    tensor.grad.zero_()

        return step

    monkeypatch.setattr("springtide_ps.params.chunk.stepper", stepper)
    groups = ({"lr": 0.1, "weight_decay": 0.1, "maximize": True},)
    one = Chunk(torch.ones(6), [(0, 0, 0, 6)], "rmsprop", groups)
    total = torch.arange(6, dtype=torch.float32)
    for scale in (1.0, 0.5):
        one.apply(total, StepSpec(scale, False, groups), keep=True)
        assert torch.equal(total, torch.arange(6, dtype=torch.float32))


def test_what_members_foresee_holds_while_all_foresee_the_same() -> None:
    step_spec, other = StepSpec(1.0, False, GROUPS), StepSpec(0.5, False, GROUPS)
    first = ExpectedStep(-1, None).with_another(3, step_spec)
    assert first.with_another(3, step_spec).step_spec == step_spec
    split = first.with_another(3, other)
    assert split.step_spec is None
    assert split.with_another(3, step_spec).step_spec is None
    assert split.with_another(4, step_spec).step_spec == step_spec


def test_second_copy_makes_same_bits_and_leaves_the_chunk() -> None:
    step_spec, early = StepSpec(0.5, False, GROUPS), SpeculativeCopy()
    one, expected = chunk(), chunk()
    for step in range(1, 5):
        total = torch.full((6,), float(step))
        before = one.values.clone()
        made = early.make(one, total, step, step_spec)
        assert torch.equal(total, torch.full((6,), float(step)))
        assert torch.equal(one.values, before)
        expected.apply(total.clone(), step_spec)
        assert torch.equal(made.values, expected.values)
        assert early.holds(step, step_spec)
        assert not early.holds(step, StepSpec(1.0, False, GROUPS))
        assert not early.holds(step + 1, step_spec)
        one = early.swap(one)
        assert torch.equal(one.values, expected.values)
        assert not early.holds(step, step_spec)


def test_a_chunk_becomes_another_only_in_its_own_form() -> None:
    one, other = chunk(), chunk()
    assert one.become(other)
    other.apply(torch.ones(6), StepSpec(1.0, False, GROUPS))
    assert not one.become(other), "it has no memory for the momentum"
    again = one.again(*other.dump())
    other.apply(torch.ones(6), StepSpec(1.0, False, GROUPS))
    assert again.become(other)
    assert torch.equal(again.values, other.values)
    assert torch.equal(again.state_of(1)["momentum_buffer"], other.state_of(1)["momentum_buffer"])
    assert again.values.data_ptr() != other.values.data_ptr()
