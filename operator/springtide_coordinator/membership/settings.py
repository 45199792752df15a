"""Tunable limits of the state machine: its patience in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Seconds, if not said otherwise."""

    grace: float = 0.5  # a broken stream may come back within it; a part of the heartbeat limit
    standstill: float = 0.5  # a tick that is later than this shows that this process stood still
    return_after_standstill: float = 4.0  # after that nobody's stream counts as broken for so long
    server_return: float = 10.0  # so long no other process takes the slot of a server whose stream broke
    first_start: float = 10.0  # from `minimum` reached until starting without the missing ones
    joiners: float = 1.0  # a joiner waits this long for others that are starting
    complaint: float = 0.3  # a failed reduction with all streams alive
    parking: float = 30.0  # a member told to park that does not answer is cut off
    after_script: float = 10.0  # beyond the time that its script may take to end, where that is longer
    operator_silence: float = 15.0  # after it the operator counts as unreachable
    save_margin: float = 10.0  # beyond leave_margin, for a checkpoint; and three times what the last one took
    leave_margin: float = 5.0  # a leaver that alone holds the state goes this long before its pod is killed
    assumed_grace_period: float = 25.0  # of a leaver whose end nobody named (SIGTERM only)
    finish: float = 30.0  # the operator takes a Finished within it, or never
    complaints: int = 3  # generations in a row with a complaint until a member is cut off
    healthy_generation: float = 30.0  # a generation that lived longer ends a row of complaints
