"""The state machine as the coordinator uses it: events are taken in, and decisions follow if due."""

from __future__ import annotations

from springtide_coordinator.membership import Event, Membership, decide, describe, is_due, take_in
from springtide_coordinator.membership.events import Effect


def handle(m: Membership, event: Event, now: float, put_off: bool = False) -> list[Effect]:
    """Take an event in, and take all decisions if any is due.

    Where none is due, `decide` must have nothing to say: the process does not call it then.

    Args:
        m: facts of the membership, which are changed.
        event: that happened.
        now: in unix seconds; must not go backwards.
        put_off: decisions wait for a later event, as they do for the others of one turn of the loop.
    """
    effects = take_in(m, event, now)
    if is_due(m):
        return effects if put_off else effects + decide(m, now)
    before = describe(m, now)
    late = decide(m, now)
    if late or describe(m, now) != before:
        raise AssertionError(f"no decision was due after {event}, and there was one: {late}")
    return effects
