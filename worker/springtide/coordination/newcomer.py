"""Decide what a process does next that comes to a running job and has not been a member. PURE.

Its script begins at the first training loop, and the job may be many loops further. Nothing stays of what the
process computes in loops that the job has ended, so it goes through them while the others train without it,
and asks to be admitted in the loop where the job is. When the next one begins while it waits, it goes through
that one, too, and waits on: its wish stands, and when a generation begins with it in the meantime, it comes
as soon as the body that it is in has ended. It never goes past the loop that the job is in, even when that
has ended: it may be the last one, and behind it members alone have the values that the job has found.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Move(Enum):
    """Name the next move of such a process."""

    PASS = "go through the loop: the job has ended it"
    ASK = "ask to be admitted in the loop"
    WAIT = "wait in the loop to be admitted"
    ENTER = "take the answer: form the generation that has begun with it, or leave"


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Say where such a process is.

    stage: ordinal of the training loop that its script is at, from 0. running_loop: that the job is in, as
    far as the coordinator has told; None: it has not. asked: to be admitted, and not answered. answered: a
    generation has begun with it, which it has not formed, or it is to leave.
    """

    stage: int
    running_loop: int | None = None
    asked: bool = False
    answered: bool = False


def next_move(newcomer: Newcomer) -> Move:
    """Return what a process does next.

    Others wait for one with which a generation has begun, so that comes first. Without word of the job's
    loops (a coordinator of an earlier release, or none that can be reached) it asks where it stands, and
    goes through what is left as a member.

    Args:
        newcomer: where it is.
    """
    if newcomer.answered:
        return Move.ENTER
    if newcomer.running_loop is not None and newcomer.running_loop > newcomer.stage:
        return Move.PASS
    return Move.WAIT if newcomer.asked else Move.ASK
