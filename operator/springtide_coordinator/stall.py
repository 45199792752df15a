"""Stalls: since when no step is committed, and whom the others wait for.

A member that is stuck commits nothing, so it tells without a commit what it has been doing for a while. The
clock runs from the last commit of the running generation, or from the moment when that generation formed; it
stands still while members are waited for, a generation is made, or the script runs after its loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from springtide_coordinator.membership import Membership, Phase
from springtide_coordinator.membership.generation import Generation
from springtide_coordinator.membership.members import Record
from springtide_coordinator.membership.messages import Standing
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.names import StateName

WHERE_LIMIT = 300  # characters


@dataclass(frozen=True, slots=True)
class Activity:
    """A member's activity since unix time `since`, in step number `step`; it was reported at
    `reported_at`.
    """

    step: int
    doing: pb.Doing
    since: float
    where: str = ""
    reported_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Late:
    """A member that others wait for; `activity`: None when nothing was heard of the step waited for."""

    member: str
    activity: Activity | None


@dataclass(frozen=True, slots=True)
class Stall:
    """`step`: the one waited for; 0: the end of the loop. `waiting`: members in pods without a late one."""

    since: float
    step: int
    late: tuple[Late, ...]
    waiting: int


@dataclass(slots=True)
class Motion:
    """The moment when the job last moved. Times are unix seconds."""

    moved_at: float | None = None
    activities: dict[str, Activity] = field(default_factory=dict)  # by member id

    def look(self, phase: Phase, now: float) -> None:
        """Update the clock after an event; it runs only while a generation trains.

        Args:
            phase: of the job after the event.
            now: unix seconds.
        """
        if phase not in (Phase.RUNNING, Phase.ENDING):
            self.moved_at = None
        elif self.moved_at is None:
            self.moved_at = now

    def moved(self, now: float) -> None:
        """A step of the running generation was committed."""
        if self.moved_at is not None:
            self.moved_at = now

    def note_report(self, member: str, activity: pb.Activity, now: float) -> None:
        """Take in what a member has been doing for a while.

        Args:
            member: its id.
            activity: step, doing and seconds.
            now: in unix seconds.
        """
        seconds = activity.seconds if 0 <= activity.seconds < 1e9 else 0.0
        self.activities[member] = Activity(
            activity.step, activity.doing, now - seconds, activity.where[:WHERE_LIMIT], now
        )

    def keep(self, members: set[str]) -> None:
        """Forget all but these."""
        for member in set(self.activities) - members:
            del self.activities[member]

    def stall(self, m: Membership, known: StateName | None, limit: float, now: float) -> Stall | None:
        """Return since when nothing was committed, and whom the others wait for.

        Args:
            m: the state machine.
            known: the newest commit.
            limit: seconds of standing still from which it counts; 0: never.
            now: unix seconds.

        Returns:
            None while the job moves, or where it cannot be known.
        """
        current = m.current
        if limit <= 0 or self.moved_at is None or now - self.moved_at < limit or current is None:
            return None
        records = [m.members[member] for member in current.order if member in m.members]
        if any(record.opaque for record in records):
            return None  # scripts that commit no steps of ours
        ending = any(record.standing is Standing.ENDED for record in records)
        step = 0 if ending else _awaited(current, known)
        late = []
        for record in records:
            if not record.connected or self._waits(record, step):
                continue
            activity = self.activities.get(record.info.id)
            late.append(Late(record.info.id, activity if self._holds(activity, step) else None))
        late_pods = {m.members[one.member].info.pod_uid for one in late}
        waiting = sum(record.connected and record.info.pod_uid not in late_pods for record in records)
        return Stall(self.moved_at, step, tuple(late), waiting)

    def _holds(self, activity: Activity | None, step: int) -> bool:
        """Whether it is what keeps the member from `step`. That may be the end of the step before: the others
        left that one with its reductions, in which this member took part.
        """
        if activity is None or self.moved_at is None:
            return False
        behind = activity.step == step - 1 and activity.doing not in (pb.DOING_REDUCING, pb.DOING_ASKING)
        return activity.step >= step or (behind and activity.reported_at >= self.moved_at)

    def _waits(self, record: Record, step: int) -> bool:
        if record.standing is not Standing.ACTIVE:
            return True
        activity = self.activities.get(record.info.id)
        return (
            step > 0
            and activity is not None
            and activity.doing in (pb.DOING_REDUCING, pb.DOING_ASKING)
            and activity.step >= step
        )


def _awaited(current: Generation, known: StateName | None) -> int:
    """Number of the step after the newest commit of this generation, or after the state it began from."""
    steps = [known.step] if known is not None and known.generation == current.name else []
    steps += [base.step for base in (current.base, current.start.state if current.start else None) if base]
    return 1 + max(steps, default=known.step if known is not None else 0)


def to_proto(stall: Stall, m: Membership, now: float) -> pb.Stall:
    """Return the stall as the operator gets it.

    Args:
        stall: to convert.
        m: the state machine, for the members' pods.
        now: unix seconds.
    """
    result = pb.Stall(
        seconds=now - stall.since, since_unix=stall.since, step=stall.step, waiting=stall.waiting
    )
    for late in stall.late:
        info = m.members[late.member].info
        entry = result.late.add(pod_uid=info.pod_uid, pod_name=info.label)
        if late.activity is not None:
            entry.since_unix = late.activity.since
            entry.activity.CopyFrom(
                pb.Activity(
                    step=late.activity.step,
                    doing=late.activity.doing,
                    seconds=now - late.activity.since,
                    where=late.activity.where,
                )
            )
    return result
