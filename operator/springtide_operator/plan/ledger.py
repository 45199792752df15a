"""Facts that must survive the operator: attempts, counts and incarnation, kept in status and raised there
before use.

Workers that end together for one cause are one restart decision: an incident. It begins with the first of
them and takes in, for ten seconds, every other slot that ends for the same cause. A slot that ends again
begins the next one: a crash loop counts each time, two hundred workers that lose their data at once count
once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from springtide_operator.api import reasons
from springtide_operator.plan.retry import Backoff
from springtide_operator.plan.values import parse_time, timestamp

TOGETHER_SECONDS = 10.0
KEPT_INCIDENTS = 8


@dataclass(frozen=True)
class Incident:
    """`time`: unix seconds of its beginning. `slots`: those that it has taken in."""

    cause: str
    time: float
    slots: frozenset[int]

    @classmethod
    def from_status(cls, entry: dict[str, Any]) -> Incident:
        return cls(
            entry.get("cause", ""), parse_time(entry.get("time")) or 0.0, frozenset(entry.get("slots") or [])
        )

    def to_status(self) -> dict[str, Any]:
        return {"cause": self.cause, "time": timestamp(self.time), "slots": sorted(self.slots)}

    def is_open(self, now: float) -> bool:
        return 0.0 <= now - self.time < TOGETHER_SECONDS


@dataclass(frozen=True)
class Slot:
    """The newest pod of one slot. `avoid`: the node that its next pod, or this one, must not be on.

    `moves`: uid of the pod before it, which goes on until this one can take over (its node is cordoned).
    `healthy`: it takes part in training; of one that ended: its end was no part of a loop.
    `replaces`: a parameter server in the place of one that was not given back. `edited`: its pod is still to
    be made, after one that had not begun when its template was edited. `standby`: it waits, or is made to
    wait, beyond the workers wanted; of one that ended: it did so until then.
    """

    attempt: int
    uid: str | None = None
    ended: str | None = None
    avoid: str | None = None
    moves: str | None = None
    healthy: bool = False
    replaces: bool = False
    edited: bool = False
    standby: bool = False

    def to_status(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"attempt": self.attempt}
        if self.uid:
            entry["uid"] = self.uid
        if self.ended:
            entry["ended"] = self.ended
        if self.avoid:
            entry["avoid"] = self.avoid
        if self.moves:
            entry["moves"] = self.moves
        if self.healthy:
            entry["healthy"] = True
        if self.replaces:
            entry["replaces"] = True
        if self.edited:
            entry["edited"] = True
        if self.standby:
            entry["standby"] = True
        return entry

    @classmethod
    def from_status(cls, entry: dict[str, Any]) -> Slot:
        return cls(
            entry.get("attempt", 0),
            entry.get("uid"),
            entry.get("ended"),
            entry.get("avoid"),
            entry.get("moves"),
            entry.get("healthy", False),
            entry.get("replaces", False),
            entry.get("edited", False),
            entry.get("standby", False),
        )


@dataclass
class Counts:
    """Restarts. The first three count decisions: workers that end together for one cause are one."""

    failures: int = 0
    preemptions: int = 0
    ignored: int = 0
    failed_workers: int = 0
    preempted_workers: int = 0

    @classmethod
    def from_status(cls, entry: dict[str, Any]) -> Counts:
        return cls(
            failures=entry.get("failures", 0),
            preemptions=entry.get("preemptions", 0),
            ignored=entry.get("ignored", 0),
            failed_workers=entry.get("failedWorkers", 0),
            preempted_workers=entry.get("preemptedWorkers", 0),
        )

    def to_status(self) -> dict[str, Any]:
        return {
            "failures": self.failures,
            "preemptions": self.preemptions,
            "ignored": self.ignored,
            "failedWorkers": self.failed_workers,
            "preemptedWorkers": self.preempted_workers,
            "total": self.failures + self.preemptions + self.ignored,
        }


@dataclass
class Ledger:
    """Changed in place by the policies of one round, in their order; written to status before any action."""

    slots: dict[int, Slot] = field(default_factory=dict)
    servers: dict[int, Slot] = field(default_factory=dict)  # of parameter servers
    counts: Counts = field(default_factory=Counts)
    incidents: dict[str, Incident] = field(default_factory=dict)  # by cause
    backoffs: dict[str, Backoff] = field(default_factory=dict)  # by role
    last_failure: dict[str, Any] | None = None
    incarnation: int = 0
    coordinator_ended: int = 0  # the highest incarnation whose end is in the backoff
    address: str = ""
    coordinator_image: str = ""  # of its pods, unless the manifest names one; "": none was made yet
    server_image: str = ""  # the same, of parameter servers
    fatal: str | None = None  # an end of a worker with which the job fails; the same round ends it
    fatal_reason: str = reasons.FAILURE_RULE
    standby_end: str = ""  # how the last standby ended, in words; "": well, or none has

    @classmethod
    def from_status(cls, status: dict[str, Any]) -> Ledger:
        restarts = status.get("restarts") or {}
        coordinator = status.get("coordinator") or {}
        incidents = [Incident.from_status(entry) for entry in restarts.get("incidents") or []]
        return cls(
            slots={
                int(number): Slot.from_status(entry) for number, entry in (status.get("slots") or {}).items()
            },
            servers={
                int(number): Slot.from_status(entry)
                for number, entry in (status.get("serverSlots") or {}).items()
            },
            counts=Counts.from_status(restarts),
            incidents={incident.cause: incident for incident in incidents},
            backoffs={
                role: Backoff.from_status(entry) for role, entry in (status.get("backoff") or {}).items()
            },
            last_failure=status.get("lastFailure"),
            incarnation=coordinator.get("incarnation", 0),
            coordinator_ended=coordinator.get("ended", 0),
            address=coordinator.get("address", ""),
            coordinator_image=coordinator.get("image", ""),
            server_image=(status.get("parameterServers") or {}).get("image", ""),
            standby_end=(status.get("standby") or {}).get("lastEnd", ""),
        )

    def to_status(self) -> dict[str, Any]:
        """The keys of status that this ledger owns."""
        restarts = self.counts.to_status()
        if self.incidents:
            restarts["incidents"] = [incident.to_status() for incident in self.incidents.values()]
        result: dict[str, Any] = {
            "slots": {str(number): self.slots[number].to_status() for number in sorted(self.slots)},
            "restarts": restarts,
        }
        if self.servers:
            result["serverSlots"] = {
                str(number): self.servers[number].to_status() for number in sorted(self.servers)
            }
        if self.backoffs:
            result["backoff"] = {role: self.backoffs[role].to_status() for role in sorted(self.backoffs)}
        if self.last_failure:
            result["lastFailure"] = self.last_failure
        return result

    def backoff(self, role: str) -> Backoff:
        return self.backoffs.get(role, Backoff())

    def raise_backoff(self, role: str, now: float) -> None:
        """Note a bad end: the next pod of the role waits longer.

        Args:
            role: of the pods.
            now: in unix seconds.
        """
        self.backoffs[role] = self.backoff(role).raised(now)

    def ease_backoff(self, role: str, now: float) -> None:
        """Note a healthy end: one bad end less counts.

        Args:
            role: of the pods.
            now: in unix seconds.
        """
        if self.backoff(role).count:
            self.backoffs[role] = self.backoff(role).eased(now)

    def end(self, slot: int, kind: str, avoid: str | None = None, healthy: bool = False) -> None:
        """Note how the pod of a slot ended.

        Args:
            slot: number of the worker.
            kind: of the end.
            avoid: a node that the next pod must not be on; None: any.
            healthy: the end was no part of a loop, so that the next pod need not wait.
        """
        self.slots[slot] = replace(self.slots[slot], ended=kind, avoid=avoid, healthy=healthy)


def open_ones(incidents: dict[str, Incident], now: float) -> dict[str, Incident]:
    """Return the incidents that still take in further ends.

    Args:
        incidents: by cause.
        now: unix seconds.
    """
    return {cause: incident for cause, incident in incidents.items() if incident.is_open(now)}


def take_in(
    incidents: dict[str, Incident], cause: str, slots: Iterable[int], now: float
) -> tuple[dict[str, Incident], bool]:
    """Put ends that have one cause into an incident.

    Args:
        incidents: by cause.
        cause: of the ends, in words.
        slots: whose workers ended.
        now: in unix seconds.

    Returns:
        The incidents afterwards, and whether these ends are a new decision.
    """
    slots = frozenset(slots)
    incidents = open_ones(incidents, now)
    known = incidents.get(cause)
    if known is not None and not slots & known.slots:
        return {**incidents, cause: Incident(cause, known.time, known.slots | slots)}, False
    others = [item for item in incidents.items() if item[0] != cause][-(KEPT_INCIDENTS - 1) :]
    return {**dict(others), cause: Incident(cause, now, slots)}, True
