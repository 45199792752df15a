"""Named points at which tests break a worker. Without SPRINGTIDE_FAULT nothing happens here.

SPRINGTIDE_FAULT=POINT:STEP:ACTION[;...]. STEP is the number of the step that would be committed, from 1; `*`
means any, and each fault happens once. ACTION: kill (SIGKILL), stop (SIGSTOP), term (SIGTERM), raise
(RuntimeError), sleep=SECONDS, hold=PATH (each time, wait as long as that file exists, at most the seconds
that it holds; from the step on that it holds after them, if any), mark=PATH (each time, write the step into
that file).

Points: body (a step's body begins), backward (half of the gradients are there), gradients (all are there,
before the reductions are awaited), pushed (they are on their way to the parameter servers), prepared (those
of all members have come there), reduced (all reductions done, not yet stepping), stepping (before the
optimizer changes parameters), stepped (after it), committed, formed (the group of a generation stands),
transfer (before a piece of the state is sent, or when it has come; at the end of a transfer in which nothing
had to travel), filling (a round of shards has come to where they go, between steps or in one), gathering
(values of a step are about to be waited for), sending and receiving (as transfer, in the middle of a state),
feeding (a part of the state is about to be sent to a process that follows), following (one is about to be
received by it; with the step after the newest that it has made, or 1),
ended (at a loop's end), evaluation (before a batch of batches(train=False); its step is the one committed
last). Of a checkpoint,
with the step that it holds: staged (the share is copied), collecting (what servers hold of it is
about to be read), share (half of it is written), shared (all of it), manifest
(before the manifest is), saved (after it), pruned (an old one is deleted); restore (before one is
read, with the step before which the process stands).

In a body with several backward passes: the first one has the names above, the later ones round-gradients,
round-pushed, round-prepared, round-reduced and round-stepped; seen (values that the body has made on
parameter servers are asked for).

At a generation's end: asked (the coordinator wants all to stop; on the stream's thread, before the script's
learns of it; with the step after the newest that this member knows of). Where workers do not step together:
pushing (half of what a range's push is made of has been sent), leasing (a range is asked for, before the
answer is awaited, or its worker group's first member; with the epoch's first step) and meeting (all of
an epoch is done, before the others are met; with the step after its last one).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

POINTS = frozenset(
    [
        "body",
        "backward",
        "gradients",
        "pushed",
        "prepared",
        "reduced",
        "stepping",
        "stepped",
        "committed",
        "formed",
        "transfer",
        "ended",
        "evaluation",
    ]
)
TRANSFER_POINTS = frozenset(["sending", "receiving", "filling", "gathering", "feeding", "following"])
CHECKPOINT_POINTS = frozenset(["staged", "share", "shared", "manifest", "saved", "pruned", "restore"])
FROZEN_POINTS = frozenset(["frozen"])
COLLECTING_POINTS = frozenset(["collecting"])
WAITING_POINTS = frozenset(["asked", "leasing", "meeting"])
PUSH_POINTS = frozenset(["pushing"])
BACKWARD_PASS_POINTS = frozenset(
    ["round-gradients", "round-pushed", "round-prepared", "round-reduced", "round-stepped", "seen"]
)
_EACH_TIME = ("hold=", "mark=")
_KNOWN = (
    POINTS | TRANSFER_POINTS | CHECKPOINT_POINTS | COLLECTING_POINTS | WAITING_POINTS | BACKWARD_PASS_POINTS
)
_KNOWN |= PUSH_POINTS | FROZEN_POINTS


@dataclass(slots=True)
class Fault:
    point: str
    step: int | None
    action: str
    done: bool = False


def parse(text: str) -> list[Fault]:
    """Raise ValueError for an unknown point or action."""
    faults = []
    for entry in filter(None, text.split(";")):
        point, step, action = [*entry.split(":"), "", ""][:3]
        known = action in ("kill", "stop", "term", "raise") or action.startswith(("sleep=", *_EACH_TIME))
        if point not in _KNOWN or not known or not (step == "*" or step.isdigit()):
            raise ValueError(
                f"SPRINGTIDE_FAULT: expected POINT:STEP:ACTION with a point of "
                f"{sorted(_KNOWN)}, got {entry!r}"
            )
        faults.append(Fault(point, None if step == "*" else int(step), action))
    return faults


_faults: list[Fault] = []


def arm(text: str) -> None:
    """Replace the faults by those of `text`. Raise ValueError for an unknown point or action."""
    _faults[:] = parse(text)


def reach(point: str, step: int) -> None:
    """Note that the worker has come to a point, and do what SPRINGTIDE_FAULT asks for there.

    Args:
        point: one of the names that the library gives its points.
        step: number that the running step would be committed under, from 1.

    Raises:
        RuntimeError: the fault's action is `raise`.
    """
    for fault in _faults:
        if not fault.done and fault.point == point and fault.step in (None, step):
            fault.done = not fault.action.startswith(_EACH_TIME)
            _act(fault.action, point, step)


def reach_in(pass_number: int, point: str, step: int) -> None:
    """Reach a fault point in a backward pass of the body; see `reach`.

    Args:
        pass_number: the backward pass, from 0.
        point: its name.
        step: from 1.
    """
    reach(f"round-{point}" if pass_number else point, step)


def _act(action: str, point: str, step: int) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        # One to the process would be taken by the main thread, and this one might go on for a moment.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif action == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif action == "raise":
        raise RuntimeError(f"fault at {point} of step {step}")
    elif action.startswith("hold="):
        _hold(action.removeprefix("hold="), step)
    elif action.startswith("mark="):
        Path(action.removeprefix("mark=")).write_text(str(step))
    else:
        time.sleep(float(action.removeprefix("sleep=")))


def _hold(path: str, step: int) -> None:
    began = time.monotonic()
    with contextlib.suppress(FileNotFoundError):
        while True:
            seconds, *first = Path(path).read_text().split()
            if time.monotonic() - began >= float(seconds) or (first and step < int(first[0])):
                return
            time.sleep(0.005)
