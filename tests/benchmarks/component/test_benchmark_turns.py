"""Turns over a real socket: nobody makes a step unasked, and one that ends is named."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from benchmarks.support.turns import Player, Turns


@pytest.fixture
def turns(tmp_path: Path) -> Iterator[Turns]:
    made = Turns(tmp_path / "turns")
    yield made
    made.close()


def join(path: Path, side: str, made: list[str], steps: int) -> threading.Thread:
    """Have a thread make so many steps, as it is asked for them, and end then, or with the benchmark."""

    def play() -> None:
        with (
            suppress(SystemExit),
            closing(Player(str(path), side, lambda: {"made": float(len(made))})) as player,
        ):
            for _ in range(steps):
                made.append(side)
                player.step_ended()

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    return thread


def test_steps_are_made_by_turns_alone(turns: Turns, tmp_path: Path) -> None:
    made: list[str] = []
    threads = [join(tmp_path / "turns", side, made, 5) for side in ("a", "b", "b")]
    turns.until_there("b", 2, 30.0, lambda: None)
    turns.until_there("a", 1, 30.0, lambda: None)
    assert made == []
    (report,) = turns.take("a", 3)
    assert (made, len(report.seconds), report.figures) == (["a"] * 3, 3, {})
    reports = turns.take("b", 2, look=True)
    assert made == ["a"] * 3 + ["b"] * 4
    assert len(reports) == 2
    assert max(report.figures["made"] for report in reports) == 7
    (report,) = turns.take("a", 2)
    assert len(report.seconds) == 2
    turns.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_process_that_does_not_come_or_ends_is_an_error(turns: Turns, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="0 of 2 processes of b came"):
        turns.until_there("b", 2, 0.1, lambda: None)

    def check() -> None:
        raise RuntimeError("worker-0 ended")

    with pytest.raises(RuntimeError, match="worker-0 ended"):
        turns.until_there("b", 1, 30.0, check)
    gone = join(tmp_path / "turns", "a", [], 2)
    turns.until_there("a", 1, 30.0, lambda: None)
    with pytest.raises(RuntimeError, match="a process of a ended"):
        turns.take("a", 9)
    gone.join(30)
