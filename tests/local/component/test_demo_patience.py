"""Patience counts seconds of a machine of our own; what others take of it is measured."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from springtide_demo.machine import Load, Machine, Reading, load, own_ticks, reading
from springtide_demo.main import until
from springtide_demo.patience import Patience
from springtide_demo.story import StoryError
from springtide_kube.errors import ApiRefusal

SPIN = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass\n"


def over(patience: Patience, *looks: tuple[object, float, float]) -> list[bool]:
    return [patience.look([mark], now, others) for mark, now, others in looks]


def test_patience_ends_when_nothing_moves() -> None:
    patience = Patience(10.0)
    assert over(patience, ("a", 100, 0), ("a", 109, 0), ("a", 111, 0)) == [False, False, True]
    assert patience.since(111) == 11


def test_patience_lasts_while_something_is_new() -> None:
    assert not any(over(Patience(10.0), *((step, 9.0 * step, 0.0) for step in range(100))))


def test_what_was_there_before_is_no_movement() -> None:
    turns = over(Patience(10.0), *(("ab"[now % 2], float(now), 0.0) for now in range(14)))
    assert turns == [False] * 12 + [True] * 2


def test_patience_counts_what_others_leave() -> None:
    assert over(Patience(10.0), ("a", 0, 0.75), ("a", 39, 0.75), ("a", 41, 0.75)) == [False, False, True]


def test_patience_ends_when_another_keeps_the_machine_busy() -> None:
    assert over(Patience(1.0), ("a", 0, 1.0), ("a", 19, 1.0), ("a", 21, 1.0)) == [False, False, True]


def test_load_is_what_is_neither_ours_nor_idle() -> None:
    seen = load(Reading(0, 100, 50, 10), Reading(10, 120, 51, 14))
    assert (round(seen.others, 3), round(seen.idle, 3), seen.busy) == (0.75, 0.05, True)
    assert not load(Reading(0, 0, 0, 0), Reading(10, 0, 0, 0)).busy  # nothing can be read
    assert not Load(others=0.5, idle=0.3).busy  # there is room for us


def test_readings_around_a_while_are_taken() -> None:
    made = iter(
        Reading(float(at), 2.0 * at, 0.0 if at < 30 else 2.0 * (at - 30), 0.0) for at in range(0, 60, 10)
    )
    machine = Machine(lambda: next(made), every=0.0)
    for _ in range(5):
        machine.sample()
    assert machine.between(12, 18).others == 1.0
    assert machine.between(41, 48).idle == 1.0
    assert machine.between(500, 600) == Load()


def test_own_time_counts_processes_below_also_when_they_ended() -> None:
    second = os.sysconf("SC_CLK_TCK")
    before = own_ticks(os.getpid())
    inner = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SPIN.format(0.3)!r}])\n"
    subprocess.run([sys.executable, "-c", inner + SPIN.format(0.2)], check=True, timeout=60)
    assert own_ticks(os.getpid()) - before >= 0.4 * second


def test_a_loop_beside_us_is_others_and_ours_is_not() -> None:
    begin = reading()
    with subprocess.Popen([sys.executable, "-c", SPIN.format(0.5)]) as ours:
        ours.wait(60)
    taken = reading()
    assert taken.ours - begin.ours >= 0.4
    assert taken.total > begin.total
    assert abs(taken.at - time.time()) < 60


def test_a_wait_in_which_nothing_moves_names_it_and_the_refusal() -> None:
    def refused() -> bool:
        raise ApiRefusal(503, "ServiceUnavailable", "the server is not ready")

    with pytest.raises(StoryError) as ended:
        until(refused, "deploy/crd to be accepted", Machine(), seconds=0.2)
    assert "waited for deploy/crd to be accepted, and nothing has moved for" in str(ended.value)
    assert "the server is not ready (503 ServiceUnavailable)" in str(ended.value)


def test_a_wait_goes_on_while_something_moves() -> None:
    looks = iter(range(6))
    last = [0]

    def ready() -> bool:
        last[0] = next(looks)
        return last[0] == 5

    assert until(ready, "the fifth look", Machine(), marks=lambda: [last[0]], seconds=0.15)
