"""Seats: with standbys, a generation has as many pods as the operator wants, and all others wait. PURE.

Every pod is like every other one: a standby is one that has come to its first step while all seats are taken.
It is parked as any process is that wants in, so a member that is lost or leaves is followed by it in the same
generation that goes on without that member: no message, and no second stop, is needed for that.

Pods of several processes take their seats whole. One of which a process is down, and is started again in it,
keeps its seat.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.state import Membership


def seats(m: Membership) -> int:
    """Return how many pods a generation may have, leavers not counted; 0 for any number.

    Args:
        m: facts of the membership.
    """
    if not m.standby or not m.target:
        return 0
    return max(1, -(-m.target // m.processes_per_pod))


def most(m: Membership) -> int:
    """Return how many processes a generation may have, leavers not counted; 0 for any number.

    Args:
        m: facts of the membership.
    """
    limit = seats(m) * m.processes_per_pod
    return min(limit, m.maximum or limit) if limit else m.maximum


def seated(m: Membership, staying: Sequence[Record], holders: Collection[str] = ()) -> list[Record]:
    """Return those of the processes that have a seat, in their order; without standbys all of them.

    A pod that is not in the generation takes a seat when all its processes wait. It takes one sooner when it
    holds the state, or when there is no generation yet, and seats are free.

    Args:
        m: facts of the membership.
        staying: records of the processes that could take part and do not leave, the preferred ones first.
        holders: ids of those that hold the state to begin from.
    """
    limit = seats(m)
    if not limit:
        return list(staying)
    pods: dict[str, list[Record]] = {}
    for record in staying:
        pods.setdefault(pod_of(record), []).append(record)

    def ready(records: Sequence[Record]) -> bool:
        if len(records) >= m.processes_per_pod:
            return True
        return any(m.in_current(record.info.id) or record.info.id in holders for record in records)

    first = [pod for pod, records in pods.items() if ready(records)]
    later = [pod for pod in pods if pod not in first] if m.current is None else []
    taken = set([*first, *later][:limit])
    return [record for record in staying if pod_of(record) in taken]


def waiting(m: Membership) -> list[Record]:
    """Return the standbys: processes that wait outside of the generation, and could take part at once.

    Args:
        m: facts of the membership.
    """
    if not m.standby or m.current is None:
        return []
    return [r for r in m.connected() if r.parked and not r.leaving and not m.in_current(r.info.id)]


def who_steps_in(m: Membership, participants: Sequence[Record]) -> str:
    """Return which standbys take the places of members that are gone, in words; "" where none does.

    Args:
        m: facts of the membership, with the generation that is over.
        participants: records of the next generation's members.
    """
    current = m.current
    if not m.standby or current is None:
        return ""
    following = {record.info.id for record in participants}
    new = [record.info.label for record in participants if not m.in_current(record.info.id)]
    gone = [info.label for info in current.members if info.id not in following]
    new, gone = list(dict.fromkeys(new)), list(dict.fromkeys(gone))
    if not new or not gone:
        return ""
    plural = len(new) > 1
    return (
        f"standby{'s' if plural else ''} {', '.join(new)} {'take' if plural else 'takes'} the place of"
        f" {', '.join(gone)}"
    )


MOST_FORMER = 64
"""Most pods that are remembered as former members: an operator asks every few seconds."""


def former_after(m: Membership, participants: Sequence[Record]) -> tuple[str, ...]:
    """Return the uids of pods that have been members and are none in the next generation, the newest last.

    Args:
        m: facts of the membership, with the generation that is over.
        participants: records of the next generation's members.
    """
    if not m.standby or m.current is None:
        return ()
    following = {record.info.pod_uid for record in participants}
    gone = [info.pod_uid for info in m.current.members if info.pod_uid and info.pod_uid not in following]
    known = dict.fromkeys(uid for uid in m.former if uid not in following and uid not in gone)
    return (*known, *dict.fromkeys(gone))[-MOST_FORMER:]


def former_members(m: Membership) -> tuple[str, ...]:
    """Return the uids of pods that a generation had and that are not in the current one, or in it and not
    connected; () while no standbys are wanted.

    An operator counts the end of such a pod as a worker's, also when it was let in and ended before anybody
    could say that it trained.

    Args:
        m: facts of the membership.
    """
    if not m.standby or m.current is None:
        return ()
    connected = {record.info.pod_uid for record in m.connected()}
    away = [info.pod_uid for info in m.current.members if info.pod_uid and info.pod_uid not in connected]
    return tuple(dict.fromkeys([*m.former, *away]))


def pod_of(record: Record) -> str:
    """Return what identifies the pod of a process; a process without one is a pod of its own."""
    return record.info.pod_uid or record.info.id
