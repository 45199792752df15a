"""Have members send the state to a process that is about to join, while they train."""

from __future__ import annotations

import ipaddress
from typing import Final

from springtide_coordinator.membership.events import Effect, Send
from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.messages import Feed, Feeding, Follow, Standing
from springtide_coordinator.membership.seats import most
from springtide_coordinator.membership.state import Membership
from springtide_protocol.versions import FOLLOW

MAX_FEEDS: Final = 8
"""Most members that send to one follower: more would not be faster than its link."""
MAX_FOLLOWERS: Final = 2
"""Most processes that follow at once: each takes room on the links that gradients need. Others get the state
when they are members."""


def on_follow(m: Membership, record: Record, message: Follow) -> list[Effect]:
    """Tell members that train to send their shares of the state to a process that is not ready yet.

    Args:
        m: facts of the membership.
        record: of that process; it is changed.
        message: of that process.

    Returns:
        A Feed for each of those members, and the answer: how many they are.
    """
    if record.session is None:
        return []
    members = feeding_members(m, record)
    record.follows = bool(members)
    effects: list[Effect] = []
    for index, (session, member) in enumerate(members):
        address = _endpoint(record.info.address, message.port)
        feed = Feed(record.info.id, address, message.secret, index, len(members))
        effects.append(Send(session, member, feed))
    return [*effects, Send(record.session, record.info.id, Feeding(len(members)))]


def feeding_members(m: Membership, follower: Record) -> list[tuple[int, str]]:
    """Return the members that can send the state to a process now, as (session, member).

    There are none where values are on servers, while a generation forms or ends, when the process is one of
    its members or has parked, when it is going to stand by, or while as many others as may follow at once do.
    Nor where a pod has several processes: each would take the state over the pod's link, which as members
    they pass on among themselves.

    Args:
        m: facts of the membership.
        follower: the process.
    """
    current = m.current
    if current is None or not current.complete or current.closing or current.consistency is not None:
        return []
    if m.superseded or m.processes_per_pod > 1:
        return []
    if m.in_current(follower.info.id) or follower.standing is not Standing.STARTING:
        return []
    others = [
        record
        for record in m.connected()
        if record.follows and record.standing is Standing.STARTING and record is not follower
    ]
    if len(others) >= MAX_FOLLOWERS or not follower.info.address:
        return []
    records = [m.members[member] for member in current.order if member in m.members]
    staying = sum(not record.leaving for record in records)
    if most(m) and staying + len(others) >= most(m):
        return []
    found = []
    for member in current.order:
        record = m.members.get(member)
        if (
            record is not None
            and record.session is not None
            and record.standing is Standing.ACTIVE
            and not record.leaving
            and FOLLOW in record.speaks.capabilities
        ):
            found.append((record.session, member))
    return found[:MAX_FEEDS]


def _endpoint(address: str, port: int) -> str:
    try:
        six = ipaddress.ip_address(address).version == 6
    except ValueError:
        six = False
    return f"[{address}]:{port}" if six else f"{address}:{port}"
