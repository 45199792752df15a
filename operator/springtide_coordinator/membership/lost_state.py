"""States that the parameter servers have lost.

A worker holds the parameters of its state, but not what belongs to them on the servers (the optimizer's
state, tables): when the servers of a generation do not hold the state that its Start named, nobody can go on
from it, nor from an older one. Where there are checkpoints, processes that held it go back to the newest one
and stay; one that cannot says so. A process that trained cannot go back to its initial values, so without
checkpoints all that held the state leave, and processes that never trained begin anew.
"""

from __future__ import annotations

from springtide_coordinator.membership.generation import Generation
from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.messages import Parked
from springtide_coordinator.membership.state import Membership
from springtide_protocol.names import StateName


def hold(m: Membership, record: Record, state: StateName | None) -> None:
    """Write down which state a process holds."""
    record.state = state
    if state is not None and m.void is not None and state <= m.void:
        record.state, record.voided = None, not record.can_go_back
    record.voided = record.voided or record.stuck


def void(m: Membership, generation: Generation, said: Parked) -> None:
    """The servers of the generation lack the state that it begins from: nobody holds it, or an older one."""
    state = generation.start.state if generation.start is not None else said.state
    if state is None or not m.rules.void_is_none or (m.void is not None and state <= m.void):
        return
    who = ", ".join(dict.fromkeys(m.lost_servers))
    m.void_reason = (
        f"StateLost: parameter server {who} took its parameters with it"
        if who
        else f"StateLost: the parameter servers do not hold {state}"
        + (f": {said.detail}" if said.detail else "")
    )
    m.void, m.void_found_by = state, generation.name
    for record in m.members.values():
        hold(m, record, record.state)
