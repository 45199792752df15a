"""Seed after seed, those first that once found something.

A seed is written as VERSION:NUMBER; one without a version is of the first (`chaos_points`).
SPRINGTIDE_CHAOS_SECONDS: how long to go on. SPRINGTIDE_CHAOS_SEED: the first seed, in the
place of those that are kept; of the newest version unless it says otherwise.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chaos_points import NEWEST

FRESH = 4
ENDLESS = "SPRINGTIDE_CHAOS_SECONDS" in os.environ


def seconds(default: float) -> float:
    return float(os.environ.get("SPRINGTIDE_CHAOS_SECONDS") or default)


@dataclass(frozen=True, slots=True)
class Seed:
    """number: of the random generator. version: of what its numbers mean."""

    number: int
    version: int = NEWEST

    def __str__(self) -> str:
        return f"{self.version}:{self.number}"


def parse(text: str, version: int) -> Seed:
    """version: unless the text says otherwise. Raise ValueError."""
    before, _, number = text.strip().rpartition(":")
    return Seed(int(number), int(before) if before else version)


def kept(path: Path) -> list[Seed]:
    """One seed in each line of the file; the rest of the line says what it found."""
    lines = (line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [parse(line, 1) for line in lines if line]


def keep(path: Path, seed: Seed) -> None:
    if seed not in kept(path):
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{seed}\n")


def each_seed(path: Path, limit: float, survive: Callable[[Seed], str]) -> None:
    """Call `survive`, which says what happened, with the kept seeds and then others for `limit` seconds.

    Unless somebody asked for so many seconds, there are at most FRESH others: a faster machine comes to none
    that was never tried. A seed with which it fails is kept.
    """
    given = os.environ.get("SPRINGTIDE_CHAOS_SEED")
    fresh = Seed(random.SystemRandom().randrange(1_000_000) if ENDLESS else 1)
    first = parse(given, NEWEST) if given else fresh
    end = time.monotonic() + limit
    seeds = [] if given else kept(path)
    known = set(seeds)
    numbers = itertools.count(first.number)
    others = (seed for number in numbers if (seed := Seed(number, first.version)) not in known)
    for seed in itertools.chain(seeds, others if ENDLESS else itertools.islice(others, FRESH)):
        try:
            print(f"seed {seed}: {survive(seed)}", flush=True)
        except AssertionError:
            keep(path, seed)
            print(f"seed {seed} failed; it is kept in {path.name}", flush=True)
            raise
        if time.monotonic() > end and seed not in seeds[:-1]:
            return
