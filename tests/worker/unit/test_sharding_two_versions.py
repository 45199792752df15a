"""Histories of members with sharded optimizers, that are lost at any call, leave and come: nobody ever has a
mixture of two steps, and no step is lost while each shard has one of its two holders.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from fake_groups import FakeGroup
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sharding_world import PLAIN, Death, Member, Variant, World

from springtide.sharding import collectives
from springtide.sharding.filling import AT_ONCE

NODES = st.sampled_from(["a", "b", "c"])
# A step makes 23 calls here (the vote is awaited in the 19th), and forming a generation about as many; in
# worlds whose buckets leave in several chunks 64 (the 59th).
DEATHS = st.lists(st.builds(Death, st.integers(0, 4), st.integers(0, 40) | st.integers(0, 75)), max_size=2)
MOST_MEMBERS = 5


@pytest.fixture(scope="module", autouse=True)
def _values_in_several_windows() -> Iterator[None]:
    """Models are small here: so that not all values are on their way at once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(collectives, "VALUES_FACTOR", 1)
        patched.setattr(collectives, "WINDOW", 4)
        yield


class Histories(RuleBasedStateMachine):
    """Trains, loses members, has others come; each rule ends when a generation stands."""

    def __init__(self) -> None:
        super().__init__()
        self.world: Any = None

    @initialize(
        nodes=st.lists(NODES, min_size=1, max_size=4),
        seed=st.integers(0, 1000),
        variant=st.builds(
            Variant,
            masters=st.booleans(),
            exact=st.booleans(),
            reads=st.booleans(),
            at_once=st.sampled_from([AT_ONCE, 0, 5000]),
            norm=st.booleans(),
            whole_sums=st.sampled_from(["all", "some", "none"]),
        ),
    )
    def begin(self, nodes: list[str], seed: int, variant: Variant) -> None:
        self.world = World(nodes, seed, variant)
        self.world.form()

    @rule(
        steps=st.integers(1, 3),
        unused=st.lists(st.integers(0, 6), max_size=2, unique=True),
        deaths=DEATHS,
        forming=st.lists(DEATHS, max_size=2),
        skip=st.booleans(),
    )
    def train(
        self, steps: int, unused: list[int], deaths: list[Death], forming: list[list[Death]], skip: bool
    ) -> None:
        if not self.world.train(steps, unused, deaths, skip):
            self.go_on(forming)

    @precondition(lambda self: len(self.world.members) < MOST_MEMBERS)
    @rule(nodes=st.lists(NODES, min_size=1, max_size=2), forming=st.lists(DEATHS, max_size=2))
    def join(self, nodes: list[str], forming: list[list[Death]]) -> None:
        for node in nodes:
            self.world.join(node)
        self.go_on(forming)

    @precondition(lambda self: len(self.world.members) > 1)
    @rule(data=st.data(), deaths=DEATHS, forming=st.lists(DEATHS, max_size=2))
    def leave(self, data: st.DataObject, deaths: list[Death], forming: list[list[Death]]) -> None:
        count = len(self.world.members)
        leavers = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=count - 1))
        self.world.leave([self.world.members[number] for number in leavers], deaths)
        self.go_on(forming)

    @precondition(lambda self: len(self.world.members) > 1)
    @rule(number=st.integers(0, 4), forming=st.lists(DEATHS, max_size=2))
    def lose(self, number: int, forming: list[list[Death]]) -> None:
        self.world.lose([self.world.members[number % len(self.world.members)]])
        self.go_on(forming)

    def go_on(self, forming: list[list[Death]]) -> None:
        self.world.form(forming)
        if not self.world.members:
            self.world.join("a")
            self.world.form()

    @invariant()
    def all_have_the_truth(self) -> None:
        if self.world is not None:
            self.world.check()


TestHistories = pytest.mark.slow(Histories.TestCase)
TestHistories.settings = hypothesis.settings(max_examples=15, stateful_step_count=10)


def after_three_steps(nodes: list[str], seed: int = 0, variant: Variant = PLAIN) -> World:
    world = World(nodes, seed, variant)
    world.form()
    assert world.train(3)
    return world


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "chunks", "least"),
    [
        (PLAIN, 0, 10),
        (Variant(whole_sums="some"), 0, 15),
        (Variant(whole_sums="none"), 2, 40),
        (Variant(masters=True, reads=True), 0, 8),
        (Variant(masters=True, reads=True, whole_sums="some"), 0, 12),
        (Variant(masters=True, reads=True, whole_sums="none"), 2, 25),
        (Variant(exact=True), 0, 12),
    ],
)
def test_death_at_each_call_of_a_step_loses_nothing(variant: Variant, chunks: int, least: int) -> None:
    """Whichever call it is, the others go on from the step before it or from that step, all from the same.

    Between the chunks of a bucket, too.
    """
    ends = set()
    for points in range(0, 99, 1 if variant.reads else 1 + chunks // 2):
        world = after_three_steps(["a", "b", "c"], 4 * points + chunks + points // 2 % 2, variant)
        stands = world.train(1, unused=[1], deaths=[Death(points, points)])
        if stands:  # the step has fewer calls
            break
        world.form()
        world.check()
        assert not world.restored
        ends.add(world.reference.step)
    # Where a step waits for all values, nobody has made it before all have sent the last of them.
    assert ends == ({3} if chunks and variant.reads else {3, 4})
    assert least < points < 98


@pytest.mark.slow
def test_death_at_each_call_of_forming_loses_nothing() -> None:
    for points in range(80):
        world = after_three_steps(["a", "b", "c"], seed=points)
        world.join("d")
        world.form([[Death(points, points)]])
        world.check()
        assert (world.restored, world.reference.step) == (0, 3)
        if len(world.members) == 4:  # forming takes fewer calls
            break
    assert 10 < points < 79


def test_two_deaths_in_a_row_need_one_forming_between() -> None:
    """A shard whose owner is lost is at two members again as soon as a generation stands."""
    world = after_three_steps(["a", "b", "c", "d"])
    while len(world.members) > 1:
        world.lose(world.members[:1])
        world.form()
        assert world.train(1)
        world.check()
    assert (world.restored, world.reference.step) == (0, 6)


def test_owner_and_buddy_lost_goes_back_to_the_checkpoint() -> None:
    world = after_three_steps(["a", "b", "c"])
    world.lose(world.members[:2])
    world.form()
    world.check()
    assert world.restored == 1


def test_both_holders_leave_and_nothing_is_lost() -> None:
    world = after_three_steps(["a", "b", "c", "d"])
    world.leave(world.members[:3])
    world.form()
    world.check()
    assert world.restored == 0


@pytest.mark.slow
@pytest.mark.parametrize("skip", [False, True])
def test_step_committed_by_one_is_made_by_all_others(skip: bool) -> None:
    """The sums were at all; one member heard so, and its death afterwards changes nothing.

    A step that changes nothing changes nothing there, either.
    """
    made = 0
    for seed in range(24):
        world = after_three_steps(["a", "b", "c", "d"], seed)
        # The vote has begun.
        world.train(1, deaths=[Death(seed, 19 if seed % 4 < 2 else 59)], skip=skip)
        states = {member.step for member in world.members}
        world.form()
        world.check()
        made += states == {3, 4}
    assert made >= 3


@pytest.mark.slow
def test_step_whose_values_do_not_come_is_taken_back() -> None:
    """One dies as values are awaited: some have them all and go on from the step, others make it anew."""
    ends = set()
    for seed in range(0, 24, 3):
        world = after_three_steps(["a", "b", "c", "d"], seed, Variant(reads=True))
        world.train(1, deaths=[Death(seed, 21 if seed % 4 < 2 else 61)])
        states = tuple(sorted(member.step for member in world.members))
        world.form()
        world.check()
        assert (world.restored, world.reference.step) == (0, max(states))
        ends.add(states)
    assert {(3, 3, 3), (3, 3, 4), (3, 4, 4), (4, 4, 4)} <= ends


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [
        Variant(at_once=0),
        Variant(at_once=0, masters=True, reads=True),
        Variant(at_once=0, exact=True),
        Variant(at_once=5000),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_second_copies_are_made_while_training_goes_on(variant: Variant, seed: int) -> None:
    """The next step begins with shards at one member; each step makes copies, until there are two of all.

    From then on each of both may be lost.
    """
    world = after_three_steps(["a", "b", "c", "d"], seed, variant)
    world.lose(world.members[:1])
    world.form()
    singles = [world.members[0].home.single]
    while singles[-1]:
        assert world.train(1, unused=[len(singles) % 7])
        world.check()
        singles.append(world.members[0].home.single)
    assert singles[1] < singles[0], "the first ones are made beside the first step"
    assert singles == sorted(singles, reverse=True)
    assert world.train(1)
    world.lose([world.members[seed % 3]])
    world.form()
    assert world.train(2)
    world.check()
    assert not world.restored


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [0, 2])
def test_death_at_each_call_while_copies_are_made(chunks: int) -> None:
    """The job goes back to a checkpoint where a shard's one holder is lost; nobody has a mixture ever."""
    restored = set()
    for points in range(0, 99, 2):
        world = after_three_steps(["a", "b", "c", "d"], 4 * points + chunks, Variant(at_once=0))
        world.lose(world.members[:1])
        world.form()
        if world.train(1, deaths=[Death(points, points)]):
            break
        world.form()
        world.check()
        restored.add(world.restored)
    assert restored == {0, 1}


@pytest.mark.parametrize("variant", [Variant(norm=True), Variant(norm=True, exact=True)])
@pytest.mark.parametrize("seed", range(2))
def test_norm_is_that_of_all_gradients(variant: Variant, seed: int) -> None:
    """Each shard counts once, whoever has its sums."""
    world = after_three_steps(["a", "b", "c"], seed, variant)
    assert world.train(2, unused=[1, 4])
    world.lose(world.members[:2])
    world.form()
    assert world.train(1)


def test_values_are_waited_for_layer_by_layer() -> None:
    """A wait for a parameter of the bucket that is needed first leaves other values on their way."""
    world = after_three_steps(["a", "b", "c"], 1)
    truth = world.reference.parameters
    last = len(truth) - 1
    behind = []

    def look(member: Member, group: FakeGroup) -> None:
        own = list(member.parameters.values())
        member.home.settle([last])
        assert torch.equal(own[last], truth[last])
        behind.append(any(not torch.equal(mine, value) for mine, value in zip(own, truth, strict=True)))
        member.home.settle(None)
        assert all(torch.equal(mine, value) for mine, value in zip(own, truth, strict=True))

    world.each(look)
    assert any(behind)


class GrowsLater(torch.optim.Adam):
    """Adam that has something more in its state from its fourth step on."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        found = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", torch.tensor(0.0)) + 1.0
                if state["count"] >= 4:
                    state.setdefault("late", torch.full_like(parameter, 7.0))
        return found


def test_state_that_grows_has_a_step_done_again() -> None:
    """Second copies are on their way when the optimizer makes new state: one step is done again for it."""
    world = after_three_steps(["a", "b", "c", "d"], 2, Variant(lambda p: GrowsLater(p, lr=0.125), at_once=0))
    world.lose(world.members[:1])
    world.form()
    assert world.members[0].home.single
    again = 0
    while world.members[0].home.single:
        if not world.train(1):
            again += 1
            world.form()
        world.check()
    assert again == 1
    assert world.reference.step > 4
