"""Figures that the benchmark of uneven workers computes from its observations."""

from __future__ import annotations

import time

import pytest

from benchmarks import uneven
from benchmarks.support import sides
from benchmarks.support.sides import Side, Turn
from benchmarks.support.turns import Report
from benchmarks.uneven import DDP, EXACT_EVEN, EXACT_SPEED, PEERS, SIDES, SPEED, TORCHFT


class Played:
    """Turns of processes that are only said to train."""

    def __init__(self, failing: str = "", digest: float = 7.0) -> None:
        self.order: list[str] = []
        self._failing, self._digest = failing, digest

    def take(self, side: str, steps: int, look: bool) -> list[Report]:
        self.order.append(side)
        if side == self._failing:
            raise RuntimeError(f"a process of {side} ended")
        seconds = {SPEED: 0.2, EXACT_SPEED: 0.24, "equal_speed": 0.161, "equal_even": 0.16}.get(side, 0.32)
        figures = (
            {"digest": self._digest if side == EXACT_EVEN else 7.0} if look and side not in PEERS else {}
        )
        return [Report([9.0] + [seconds - 0.01 * worker] * (steps - 1), figures) for worker in range(3)]


def play(played: Played, rounds: int) -> tuple[dict[str, Side], dict[str, str]]:
    reasons = dict.fromkeys(PEERS, "")
    turn = Turn(uneven.WARM_UP, uneven.STEPS, rounds)
    return sides.by_turns(played.take, (*SIDES, *PEERS), reasons, turn), reasons


def test_fractions_are_of_what_all_workers_could_do() -> None:
    assert uneven.fraction([0.192]) == pytest.approx(1.0)
    assert uneven.fraction([0.16], uneven=False) == pytest.approx(1.0)
    found = uneven.figures(*play(Played(), 3))
    assert set(uneven.KEYS) <= found.keys()
    assert found["fraction_of_sum_of_speeds"] == pytest.approx(0.96)
    assert found["ddp_fraction_of_sum_of_speeds"] == pytest.approx(0.6)
    assert found["torchft_fraction_of_sum_of_speeds"] == pytest.approx(0.6)
    assert found["even_cost"] == pytest.approx(0.00625)
    assert found["exact_hash_equal"] is True
    assert found["steps"] == 3 * uneven.STEPS
    assert not [key for key in found if key.endswith("reason")]


def test_other_bits_and_a_missing_peer_are_told() -> None:
    for peer, other in ((DDP, TORCHFT), (TORCHFT, DDP)):
        found = uneven.figures(*play(Played(peer, 8.0), 2))
        assert found["exact_hash_equal"] is False
        assert found[f"{peer}_fraction_of_sum_of_speeds"] is None
        assert found[f"{peer}_reason"] == f"a process of {peer} ended"
        assert found[f"{other}_fraction_of_sum_of_speeds"] == pytest.approx(0.6)
    with pytest.raises(RuntimeError, match="a process of even ended"):
        play(Played("even"), 2)


def test_held_back_worker_takes_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: 10.05)
    monkeypatch.setattr(time, "sleep", slept.append)
    for worker, held in ((0, True), (2, True), (2, False)):
        uneven.hold(10.0, 10, worker, held)
    uneven.hold(9.0, 1, 0, True)
    assert slept == pytest.approx([0.03, 0.11, 0.03, 0.0])


def test_digest_is_exact_as_a_number() -> None:
    model, _ = uneven.build()
    assert uneven.digest(model) == uneven.digest(uneven.build()[0])
    assert uneven.digest(model) < 2**48
