"""Seed after seed, those first that once found something.

SPRINGTIDE_CHAOS_SECONDS: how long to go on. SPRINGTIDE_CHAOS_SEED: the first seed, in the
place of those that are kept.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

ENDLESS = "SPRINGTIDE_CHAOS_SECONDS" in os.environ


def seconds(default: float) -> float:
    return float(os.environ.get("SPRINGTIDE_CHAOS_SECONDS") or default)


def kept(path: Path) -> list[int]:
    """One seed in each line of the file; the rest of the line says what it found."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [int(line.split("#")[0]) for line in lines if line.split("#")[0].strip()]


def keep(path: Path, seed: int) -> None:
    if seed not in kept(path):
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{seed}\n")


def each_seed(path: Path, limit: float, survive: Callable[[int], str]) -> None:
    """Call `survive`, which says what happened, with the kept seeds and then others for `limit` seconds.

    A seed with which it fails is kept.
    """
    given = os.environ.get("SPRINGTIDE_CHAOS_SEED")
    fresh = random.SystemRandom().randrange(1_000_000) if ENDLESS else 1
    first = int(given) if given else fresh
    end = time.monotonic() + limit
    seeds = [] if given else kept(path)
    known = set(seeds)
    while True:
        if seeds:
            seed = seeds.pop(0)
        else:
            seed = next(number for number in itertools.count(first) if number not in known)
            first = seed + 1
        try:
            print(f"seed {seed}: {survive(seed)}", flush=True)
        except AssertionError:
            keep(path, seed)
            print(f"seed {seed} failed; it is kept in {path.name}", flush=True)
            raise
        if time.monotonic() > end and not seeds:
            return
