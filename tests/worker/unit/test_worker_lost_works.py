"""Works that the backend has lost are given up soon after their group was shut."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from springtide.comm import process_group as groups_module
from springtide.comm.process_group import Group
from springtide.comm.work import is_lost


class Clock:
    """A stand-in for the module `time`, in which nothing but a sleep takes time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Lost:
    """A collective of the backend's that never ends."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta) -> bool:
        self._clock.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")


class Backend:
    """A backend that loses all exchanges."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def alltoall_base(self, *given: Any) -> Lost:
        return Lost(self._clock)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(groups_module, "time", made)
    return made


@pytest.fixture
def group(clock: Clock) -> Group:
    return Group(Backend(clock), 0, 2, 600.0)


def exchange(group: Group) -> Any:
    return group.start_exchange(torch.zeros(4), torch.zeros(4), [0, 4], [0, 4])


def test_lost_exchange_that_nobody_awaits_is_set_aside(group: Group, clock: Clock) -> None:
    exchange(group)
    group.shut()
    began = clock.now
    assert not group.release()
    assert clock.now - began < 0.3


def test_exchange_lost_long_before_release_holds_nobody_up(group: Group, clock: Clock) -> None:
    """A process may park between the two."""
    exchange(group)
    group.shut()
    clock.now += 1.0
    began = clock.now
    assert not group.release()
    assert clock.now == began


def test_wait_for_lost_exchange_ends_soon_after_shut(group: Group, clock: Clock) -> None:
    work = exchange(group)
    group.shut()
    began = clock.now
    with pytest.raises(RuntimeError, match="the group was shut while a collective was under way"):
        work.wait()
    assert clock.now - began < 0.35
    assert not group.release()


@pytest.mark.parametrize(
    ("seconds", "disconnected", "lost"),
    [
        (None, True, False),
        (0.01, True, False),  # what fails may not have been told yet
        (0.15, True, True),
        (0.15, False, False),
        (0.3, False, True),
    ],
)
def test_work_is_lost_by_time_and_by_closed_connections(
    seconds: float | None, disconnected: bool, lost: bool
) -> None:
    assert is_lost(seconds, lambda: disconnected) is lost
