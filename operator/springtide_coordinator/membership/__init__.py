"""Membership generations as a pure state machine: events in, effects out, each decision with its reason.

Nothing here reads a clock, a socket or the environment; time is an argument. `machine.take_in` and
`machine.decide` are the only ways in.
"""

from springtide_coordinator.membership.events import (
    Connected,
    Disconnected,
    Effect,
    Event,
    FellSilent,
    ProcessEnded,
    Received,
    ServerConnected,
    StoodStill,
    Synced,
    Tick,
)
from springtide_coordinator.membership.machine import Phase, decide, describe, is_due, take_in
from springtide_coordinator.membership.settings import Settings
from springtide_coordinator.membership.state import Membership, Status

__all__ = [
    "Connected",
    "Disconnected",
    "Effect",
    "Event",
    "FellSilent",
    "Membership",
    "Phase",
    "ProcessEnded",
    "Received",
    "ServerConnected",
    "Settings",
    "Status",
    "StoodStill",
    "Synced",
    "Tick",
    "decide",
    "describe",
    "is_due",
    "take_in",
]
