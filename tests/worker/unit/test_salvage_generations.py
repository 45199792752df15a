"""Members that keep what they have computed, through generations of any members.

Whatever is kept, lost and dealt anew: what goes into a committed step is each sample of its batch once, with
a gradient that was computed from the very state that the step begins with.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.comm.process_group import Group
from springtide.data.batch import Batch
from springtide.data.loop import LoopPlan, plan_loop
from springtide.elastic.salvage import Salvage
from springtide.elastic.training_state import TrainingState
from springtide.train_step.salvaged import Salvaged

SAMPLES, BATCH = 20, 12

State = tuple[int, int]
"""Name of a state: the generation that made it, and its step."""


class Member:
    """A worker's part in it: which state it holds, and what it keeps."""

    def __init__(self, state: State | None = None) -> None:
        self.training = TrainingState(Group(None, 0, 1, 1.0))
        self.membership: Any = SimpleNamespace(state=state)
        buckets = SimpleNamespace(keeps_what_leaves=True, copying_seconds=0.0)
        self.trainer: Any = SimpleNamespace(salvages=True, buckets=buckets, device=torch.device("cpu"))
        trainers: Any = SimpleNamespace(require=lambda call: self.trainer)
        self.salvage = Salvage("Auto", self.training, trainers, MagicMock(), self.membership)

    @property
    def state(self) -> State | None:
        found: State | None = self.membership.state
        return found

    def receive(self, other: Member) -> None:
        """Take the state that another one holds."""
        self.membership.state = other.state
        self.training.adopt(other.training.position)

    def begin(self, plan: LoopPlan, rank: int, size: int) -> Batch:
        """Return this member's part of the next step."""
        assert self.salvage.begin_step()
        cursor = self.training.position.cursor
        rest, kept = self.salvage.rest(plan, cursor), self.salvage.salvaged
        carried = None if kept is None else kept.account
        return plan.batch(cursor, rank, size, rest=rest, carried=carried)

    def compute(self, batch: Batch, pieces: int, most: int, meaning: torch.Tensor) -> torch.Tensor:
        """Return the gradients of so many micro-batches, and of what was kept: float64 [2, SAMPLES].

        Args:
            batch: of this member.
            pieces: that it is split into.
            most: micro-batches that are computed.
            meaning: float64 [2, 1], what the gradient of a sample is.
        """
        kept = self.salvage.salvaged
        found = torch.zeros(2, SAMPLES, dtype=torch.float64) if kept is None else kept.sums[0].clone()
        for _, piece in zip(range(most), batch.split(pieces), strict=False):
            batch.micro.contribute()
            found[:, piece.ids] += meaning
        return found

    def commit(self, plan: LoopPlan, batch: Batch, state: State) -> None:
        body: Any = SimpleNamespace(carried_samples=0, assignment=SimpleNamespace(batch=batch))
        position = self.training.position
        cursor, ledger = plan.commit(position.ledger, position.cursor, BATCH, 0.0, 0.0)
        self.training.commit(cursor, ledger, 0.0)
        self.membership.state = state
        self.salvage.committed(body, self.trainer, 0.0)

    def drop(self, batch: Batch, gradients: torch.Tensor) -> None:
        computed = batch.micro.part_samples > batch.micro.remaining_samples
        kept = Salvaged(batch.micro.to_carry(), [gradients], [True], {}, {}, 0.0)
        self.salvage.dropped(kept if computed else None, is_void=False)


def form(members: list[Member]) -> State:
    """Begin a generation from the newest state that one of these members holds; return its name."""
    claims = [member.salvage.own() for member in members]
    source = max((member for member in members if member.state), key=lambda member: member.state or (0, 0))
    for rank, member in enumerate(members):
        member.salvage.begin_generation(claims, rank)
        if member.state != source.state:
            member.receive(source)
    assert source.state is not None
    return source.state


@settings(max_examples=100)
@given(st.data())
def test_a_committed_step_has_each_sample_once(data: st.DataObject) -> None:
    plan = plan_loop(torch.arange(SAMPLES), batch_size=BATCH, epochs=9, seed=3)
    draw = data.draw
    members = [Member((0, 0)), *(Member() for _ in range(draw(st.integers(0, 3))))]
    number = 0
    for generation in range(1, draw(st.integers(2, 7))):
        holders = [member for member in members if member.state]
        if not holders:
            return
        # Some may be away for now, and come back with what they had.
        chosen = [draw(st.sampled_from(holders))]
        chosen += [member for member in members if member is not chosen[0] and draw(st.booleans())]
        state = form(chosen)
        for _ in range(draw(st.integers(0, 2))):
            number += 1
            batches = [member.begin(plan, rank, len(chosen)) for rank, member in enumerate(chosen)]
            meaning = torch.tensor([[1.0], [state[0] * 100.0 + state[1]]], dtype=torch.float64)
            pieces = draw(st.integers(1, 3))
            lost = draw(st.booleans())  # a member, before all have computed what they had to
            shares = [draw(st.integers(0, pieces)) if lost else pieces for _ in chosen]
            gradients = [
                member.compute(batch, pieces, share, meaning)
                for member, batch, share in zip(chosen, batches, shares, strict=True)
            ]
            cursor = chosen[0].training.position.cursor
            if not lost:
                expected = torch.zeros(2, SAMPLES, dtype=torch.float64)
                expected[:, plan.global_ids(cursor)] = meaning
                assert torch.equal(torch.stack(gradients).sum(0), expected)
            # All have heard the result of the vote, or some of them, and the others drop the step.
            hearing = [not lost and draw(st.booleans()) for _ in chosen]
            following = generation, state[1] + 1
            for member, batch, own, hears in zip(chosen, batches, gradients, hearing, strict=True):
                if hears:
                    member.commit(plan, batch, following)
                else:
                    member.drop(batch, own)
            if not all(hearing):
                break
            state = following
        members = [member for member in members if draw(st.integers(0, 3))]
        members += [Member() for _ in range(draw(st.integers(0, 1)))]


def test_what_others_have_committed_is_kept_by_nobody() -> None:
    """A member that has not heard the vote's result gets the state, and the next generation makes no step."""
    plan = plan_loop(torch.arange(SAMPLES), batch_size=BATCH, epochs=9, seed=3)
    members = [Member((0, 0)), Member()]
    form(members)
    batches = [member.begin(plan, rank, 2) for rank, member in enumerate(members)]
    gradients = [
        member.compute(batch, 1, 1, torch.ones(2, 1)) for member, batch in zip(members, batches, strict=True)
    ]
    members[0].commit(plan, batches[0], (1, 1))
    members[1].drop(batches[1], gradients[1])
    assert members[1].salvage.own().places == batches[1].micro.places
    assert form(members) == (1, 1)
    assert not members[1].salvage.own().places
    form(members)
    again = [member.begin(plan, rank, 2) for rank, member in enumerate(members)]
    assert sum(batch.samples for batch in again) == SAMPLES - BATCH
    assert members[1].salvage.salvaged is None
