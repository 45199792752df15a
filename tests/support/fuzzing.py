"""Hostile inputs, seeded: each case is made from (seed, number) alone, so that one can be run again.

SPRINGTIDE_FUZZ_SECONDS: for how long each suite goes on (`make fuzz`); without it, it makes a fixed number of
cases, and stops early on a slow machine. SPRINGTIDE_FUZZ_SEED: other cases. SPRINGTIDE_FUZZ_CASE: that one
alone.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

SEED = os.environ.get("SPRINGTIDE_FUZZ_SEED", "2026")
SECONDS = float(os.environ.get("SPRINGTIDE_FUZZ_SECONDS", "0"))
ONLY = os.environ.get("SPRINGTIDE_FUZZ_CASE", "")
QUICK_SECONDS = 12.0
"""Most time of one suite in an ordinary run of the tests: all of them together stay below 90 s."""

NASTY_NUMBERS = (0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**400, -(2**63))
NASTY_FLOATS = (0.5, -0.5, 1e308, -1e308, 1e-320, math.inf, -math.inf, math.nan)
NASTY_TEXTS = (
    "",
    "\0",
    "\ud800",
    "../../..",
    "a" * 70_000,
    "\u202e\n\r",
    "1e999999",
    "None",
    "__class__",
    "%s%n{0}",
    "𝔘" * 300,
)


class Found(AssertionError):
    """An input that does what it must not; the text says how to run it again."""


def cases(count: int) -> Iterator[tuple[int, Random]]:
    """Give (number, its source of chance) of each case, until the time is over."""
    if ONLY:
        yield int(ONLY), Random(f"{SEED}/{ONLY}")
        return
    end = time.monotonic() + (SECONDS or QUICK_SECONDS)
    number = 0
    while time.monotonic() < end and (SECONDS or number < count):
        yield number, Random(f"{SEED}/{number}")
        number += 1


def run(
    name: str,
    seeds: Sequence[Any],
    make: Callable[[Random], Any],
    check: Callable[[Any], None],
    count: int,
    show: Callable[[Any], str] = repr,
) -> int:
    """Check every seed, then what `make` makes; return how many inputs there were.

    Raises:
        Found: `check` raised something; with the input and how to run it again.
    """
    total = 0
    if not ONLY:
        for number, seed in enumerate(seeds):
            _check(check, seed, show, f"seed {number} of {name}", "")
            total += 1
    for number, chance in cases(count):
        again = f"SPRINGTIDE_FUZZ_SEED={SEED} SPRINGTIDE_FUZZ_CASE={number} "
        _check(check, make(chance), show, f"case {number} of {name}", again)
        total += 1
    return total


def _check(
    check: Callable[[Any], None], given: Any, show: Callable[[Any], str], what: str, again: str
) -> None:
    try:
        check(given)
    except Exception as error:
        text = show(given)
        shown = text if len(text) <= 4000 else f"{text[:4000]}... ({len(text)} characters)"
        raise Found(
            f"{what}: {type(error).__name__}: {error}\ninput: {shown}\n"
            f"again: {again}python -m pytest tests/fuzz -k {what.rsplit(' ', 1)[-1]}"
        ) from error


def value(chance: Random, depth: int = 3) -> Any:
    """Make some JSON value, often an odd one."""
    kind = chance.randrange(8 if depth else 6)
    if kind == 0:
        return chance.choice(NASTY_NUMBERS)
    if kind == 1:
        return chance.choice(NASTY_FLOATS)
    if kind == 2:
        return chance.choice(NASTY_TEXTS)
    if kind == 3:
        return chance.choice((None, True, False))
    if kind == 4:
        return chance.randrange(-3, 300)
    if kind == 5:
        return "".join(chance.choice("abck.0/-") for _ in range(chance.randrange(12)))
    if kind == 6:
        return [value(chance, depth - 1) for _ in range(chance.randrange(5))]
    return {str(value(chance, 0))[:80]: value(chance, depth - 1) for _ in range(chance.randrange(5))}


def mutated(chance: Random, given: Any, changes: int = 2) -> Any:
    """Copy a JSON value with a few places replaced, removed or doubled."""
    for _ in range(chance.randrange(1, changes + 1)):
        given = _changed(chance, given)
    return given


def _changed(chance: Random, given: Any) -> Any:
    if isinstance(given, dict) and given and chance.random() < 0.8:
        key = chance.choice(sorted(given, key=str))
        rest = {name: inner for name, inner in given.items() if name != key}
        roll = chance.random()
        if roll < 0.15:
            return rest
        if roll < 0.25:
            return {**given, str(value(chance, 0))[:80]: value(chance)}
        return {**given, key: _changed(chance, given[key])}
    if isinstance(given, list) and given and chance.random() < 0.8:
        at = chance.randrange(len(given))
        roll = chance.random()
        if roll < 0.2:
            return given[:at] + given[at + 1 :]
        if roll < 0.4:
            return given + given
        return [*given[:at], _changed(chance, given[at]), *given[at + 1 :]]
    return value(chance)


def damaged(chance: Random, given: bytes) -> bytes:
    """Copy bytes with some flipped, cut, doubled or put in."""
    data = bytearray(given)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(data)) if data else 0
        match chance.randrange(5):
            case 0 if data:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = chance.randbytes(chance.randrange(1, 40))
            case 3:
                data[at : at + 8] = chance.choice((b"\xff" * 8, b"\0" * 8, b"\x7f" * 8))
            case 4:
                data += data[: chance.randrange(1, 200)]
    return bytes(data)
