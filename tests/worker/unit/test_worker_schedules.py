"""Learning rates, chunks and bodies of workers that do not step together: the parts without processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from springtide.errors import UsageError
from springtide.ps.applied_batches import newest_copies, rescue
from springtide.train_step.lr_schedulers import Schedules
from springtide.train_step.scheduler_count import count_of, count_steps
from springtide_ps.params.applied import AppliedBatches, IntervalSet

KINDS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.5),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 20),
    "warm-up": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 20)], [3]
    ),
    "chained": lambda optimizer: ChainedScheduler(
        [ExponentialLR(optimizer, 0.5), ConstantLR(optimizer, 0.1, 4)]
    ),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "chain of warm-up": lambda optimizer: ChainedScheduler(
        [KINDS["warm-up"](optimizer), ExponentialLR(optimizer, 0.9)]
    ),
}


class Handing(LRScheduler):
    """A warm-up that hands over to a schedule of the script, which counts nothing of the second one."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int, after: LRScheduler) -> None:
        self.steps, self.after = steps, after
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [rate * min(1.0, (1 + self.last_epoch) / (1 + self.steps)) for rate in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch < self.steps:
            super().step(epoch)
        else:
            self.after.step()
            self._last_lr = self.after.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "after": self.after.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]
        self.after.load_state_dict(state_dict["after"])


class Ending(ExponentialLR):
    """Rests at its end."""

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch < 5:
            super().step(epoch)


KINDS["handing over"] = lambda optimizer: Handing(optimizer, 3, ExponentialLR(optimizer, 0.5))
KINDS["ending"] = lambda optimizer: Ending(optimizer, 0.5)
KINDS["chain of handing over"] = lambda optimizer: ChainedScheduler(
    [KINDS["handing over"](optimizer), ExponentialLR(optimizer, 0.9)]
)


def scheduler(kind: str = "exponential") -> tuple[torch.optim.Optimizer, LRScheduler]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return optimizer, KINDS[kind](optimizer)


def rates(kind: str, steps: int, each: int = 1) -> list[float]:
    """Return the learning rate of each step in one process."""
    optimizer, item = scheduler(kind)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        for _ in range(each):
            item.step()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("each", [0, 1, 2])
def test_a_range_is_computed_with_its_own_rate(kind: str, each: int) -> None:
    alone = rates(kind, 12, each)
    optimizer, item = scheduler(kind)
    schedules = Schedules({"scheduler": item})
    found = {}
    for number in (0, 1, 4, 5, 11):
        schedules.go_to(number)
        found[number] = optimizer.param_groups[0]["lr"]
        optimizer.step()
        for _ in range(each):
            item.step()
        schedules.stepped()
    assert found == pytest.approx({number: alone[number] for number in found})


def meet(*members: Schedules, stop: int) -> None:
    """Bring the members' schedules to the same step, the way the end of an epoch does."""
    sums = [sum(values) for values in zip(*(member.report_steps() for member in members), strict=True)]
    for member in members:
        member.take_reports(sums)
        member.go_to(stop)
        member.begin()


def test_idle_worker_learns_steps_per_body_from_the_others() -> None:
    theirs, two_in_a_body = scheduler()
    known = Schedules({"a": two_in_a_body, "b": scheduler()[1]})
    optimizer, item = scheduler()
    unknown = Schedules({"a": item, "b": scheduler()[1]})
    known.go_to(0)
    theirs.step()
    two_in_a_body.step()
    two_in_a_body.step()
    known.stepped()
    assert optimizer.param_groups[0]["lr"] == 1.0
    meet(known, unknown, stop=3)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5**6)
    assert two_in_a_body.get_last_lr() == pytest.approx([0.5**6])


PER_EPOCH = 4


def at_the_end(number: int) -> bool:
    return number % PER_EPOCH == PER_EPOCH - 1


def warming_up(number: int) -> bool:
    return number < 2


@pytest.mark.parametrize(
    ("steps", "taken"),
    [
        (at_the_end, [0, 0, 0, 0]),
        (at_the_end, [0, 1, 0, 1]),
        (at_the_end, [0, 1, 2, 0]),
        (at_the_end, [1, 0, 0, 2]),
        (warming_up, [0, 0, 0, 0]),
        (warming_up, [0, 0, 1, 2]),
    ],
)
def test_steps_in_some_bodies_only_are_those_of_one_process(
    steps: Callable[[int], bool], taken: list[int]
) -> None:
    """taken: by place in the epoch, which of three workers computes it."""
    alone, plain = scheduler()
    found = [scheduler() for _ in range(3)]
    members = [Schedules({"schedule": item}) for _, item in found]
    for member in members:
        member.begin_once()
    for number in range(3 * PER_EPOCH):
        place = number % PER_EPOCH
        who = taken[place]
        members[who].go_to(number)
        if set(taken) == {0}:
            assert found[0][0].param_groups[0]["lr"] == alone.param_groups[0]["lr"]
        for optimizer, item in ((alone, plain), found[who]):
            optimizer.step()
            if steps(number):
                item.step()
        members[who].stepped()
        if at_the_end(number):
            meet(*members, stop=number + 1)
            assert [item.get_last_lr() for _, item in found] == [plain.get_last_lr()] * 3


def test_steps_are_counted_once_for_a_team_and_once_for_all() -> None:
    found = [scheduler() for _ in range(4)]
    members = [Schedules({"schedule": item}) for _, item in found]
    for number in range(PER_EPOCH):
        team = (0, 1) if number % 2 else (2, 3)
        for who in team:
            if number == 0:
                members[who].begin_once()
            members[who].go_to(number)
            found[who][0].step()
            if at_the_end(number):
                found[who][1].step()
            members[who].stepped(counts=who == team[0])
    meet(*members, stop=PER_EPOCH)  # two of them were not there when the epoch began
    assert [item.get_last_lr() for _, item in found] == [[0.5]] * 4


def test_what_was_restored_has_not_made_the_steps_since() -> None:
    optimizer, item = scheduler()
    member = Schedules({"schedule": item})
    member.begin_once()
    before = item.state_dict()
    for number in range(PER_EPOCH):
        member.go_to(number)
        optimizer.step()
        if number:
            item.step()
        member.stepped()
    item.load_state_dict(before)
    meet(member, stop=PER_EPOCH)
    assert item.last_epoch == 0


def test_a_rate_never_goes_back() -> None:
    optimizer, item = scheduler()
    schedules = Schedules({"scheduler": item})
    for number in (0, 5):
        schedules.go_to(number)
        optimizer.step()
        item.step()
        schedules.stepped()
    schedules.go_to(2)  # taken over from a worker that died
    assert optimizer.param_groups[0]["lr"] == 0.5**6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("each", [0, 1, 2])
def test_a_range_that_is_taken_over_late_moves_no_rate(kind: str, each: int) -> None:
    """A batch that is taken over late moves no rate: the worker counted its steps when it went past it."""
    alone = rates(kind, 12, each)
    optimizer, item = scheduler(kind)
    schedules = Schedules({"scheduler": item})
    seen = type(item)
    found = {}
    for number in (0, 1, 4, 2, 3, 5, 11, 10):
        schedules.go_to(number)
        found[number] = optimizer.param_groups[0]["lr"]
        optimizer.step()
        for _ in range(each):
            item.step()
        schedules.stepped()
        assert type(item) is seen
    on_time = (0, 1, 4, 5, 11)
    assert [found[number] for number in on_time] == pytest.approx([alone[number] for number in on_time])
    meet(schedules, stop=12)
    assert count_of(item) == 1 + 12 * each


class Registered(ExponentialLR):
    """Asks something of classes that are derived from it."""

    def __init_subclass__(cls, *, title: str) -> None:
        super().__init_subclass__()


def test_late_batch_derives_no_class_of_a_schedulers_type() -> None:
    optimizer, _ = scheduler()
    item = Registered(optimizer, 0.5)
    schedules = Schedules({"scheduler": item})
    for number in (0, 3, 1):
        schedules.go_to(number)
        optimizer.step()
        item.step()
        schedules.stepped()
    assert (type(item), item.last_epoch) == (Registered, 4)


def test_schedule_of_the_jobs_steps_is_not_stepped_beyond_end() -> None:
    optimizer, _ = scheduler()
    item = OneCycleLR(optimizer, 1.0, total_steps=4)
    schedules = Schedules({"scheduler": item})
    for number in (0, 3, 1, 2):
        schedules.go_to(number)
        optimizer.step()
        item.step()
        schedules.stepped()
    meet(schedules, stop=4)
    assert item.last_epoch == 4


def test_a_late_body_that_is_left_leaves_its_scheduler_as_it_was() -> None:
    optimizer, item = scheduler()
    schedules = Schedules({"scheduler": item})
    for number in (0, 5, 2):
        schedules.go_to(number)
        optimizer.step()
        item.step()
        if number != 2:
            schedules.stepped()
    state = item.state_dict()
    schedules.go_to(6)
    item.step()
    schedules.stepped()
    assert item.last_epoch == state["last_epoch"] + 1 == 7


@pytest.mark.parametrize("kind", ["handing over", "ending", "chain of handing over"])
def test_how_often_a_scheduler_was_stepped_is_part_of_its_state(kind: str) -> None:
    alone = rates(kind, 12)
    optimizer, item = scheduler(kind)
    count_steps([item])
    for _ in range(6):
        optimizer.step()
        item.step()
    other, newcomer = scheduler(kind)
    count_steps([newcomer])
    newcomer.load_state_dict(item.state_dict())
    other.load_state_dict(optimizer.state_dict())
    schedules = Schedules({"scheduler": newcomer})
    assert count_of(newcomer) == 7
    schedules.go_to(6)
    other.step()
    newcomer.step()
    schedules.stepped()
    schedules.go_to(10)
    assert other.param_groups[0]["lr"] == pytest.approx(alone[10])


def test_a_state_without_a_count_has_torch_s() -> None:
    """A checkpoint of an earlier build."""
    _, older = scheduler("ending")
    for _ in range(3):
        older.optimizer.step()
        older.step()
    _, item = scheduler("ending")
    count_steps([item])
    item.load_state_dict(older.state_dict())
    assert count_of(item) == 4


def test_a_scheduler_that_is_counted_stays_what_the_script_sees() -> None:
    _, item = scheduler("ending")
    plain = set(item.state_dict())
    count_steps([item, item])
    assert isinstance(item, Ending)
    assert type(item).__name__ == "Ending"
    assert set(item.state_dict()) == plain | {"springtide_steps"}
    _, of_torch = scheduler()
    count_steps([of_torch])
    assert type(of_torch) is ExponentialLR
    assert "springtide_steps" not in of_torch.state_dict()


def test_fractions_of_an_epoch_are_refused() -> None:
    optimizer, item = scheduler("restarts")
    schedules = Schedules({"scheduler": item})
    assert isinstance(item, CosineAnnealingWarmRestarts)
    schedules.go_to(0)
    optimizer.step()
    item.step(1)
    schedules.stepped()
    schedules.go_to(1)
    item.step(1.25)
    with pytest.raises(UsageError, match="fractions of an epoch"):
        schedules.stepped()


class Uncounted(LRScheduler):
    def __init__(self) -> None: ...


def test_what_would_differ_from_worker_to_worker_is_refused() -> None:
    optimizer, _ = scheduler()
    with pytest.raises(UsageError, match="plateau is a ReduceLROnPlateau"):
        Schedules({"plateau": ReduceLROnPlateau(optimizer)})
    with pytest.raises(UsageError, match="Uncounted does not count its steps"):
        Schedules({"schedule": Uncounted()})
    with pytest.raises(UsageError, match="average is a AveragedModel"):
        Schedules({"average": torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))})


def applied_batches(applied: int) -> AppliedBatches:
    return AppliedBatches(IntervalSet([(0, applied)]) if applied else IntervalSet(), applied)


def test_a_copy_that_lags_behind_does_not_count() -> None:
    books = {
        "a": {"x": applied_batches(3), "y": applied_batches(1)},
        "b": {"x": applied_batches(2), "y": applied_batches(1)},
    }
    assert newest_copies({"x": ["a", "b"], "y": ["a", "b"], "z": []}, books) == {
        "x": ["a"],
        "y": ["a", "b"],
        "z": [],
    }


def test_what_no_server_holds_comes_from_the_newest_pull() -> None:
    offers = {0: {"x": [True, 5], "y": [False, 9]}, 1: {"x": [True, 7], "y": [True, 2]}, 2: {}}
    chosen = rescue(offers, {"x": 10, "y": 10, "z": 10}, {"a": 15, "b": 0})
    assert {key: giver for key, (giver, _) in chosen.items()} == {"x": 1, "y": 1}
    assert sorted(server for _, server in chosen.values()) == ["b", "b"]
    assert rescue(offers, {"x": 1}, {}) == {}
