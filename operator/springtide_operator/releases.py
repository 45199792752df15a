"""Several releases in one cluster: a class of jobs has one that runs it.

Each release keeps a Lease in its own namespace, which says what it runs: `spec.managedBy` of its jobs, and
the namespaces that it watches. A release looks at the Leases of the others before it takes its own, and again
while it acts. Two that would run the same jobs have two root keys, and would end each other's pods: the one
that comes later ends itself. A Lease counts as live once it was seen to be renewed: clocks of two machines
are never compared.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from springtide_kube.errors import ApiError
from springtide_operator.api import names
from springtide_operator.cluster import Cluster, is_gone

log = logging.getLogger("springtide.operator")

Object = dict[str, Any]

LEASE = "springtide-operator"
CLASS = f"{names.GROUP}/managed-by"
WATCHED = f"{names.GROUP}/watch-namespaces"
RELEASE = f"{names.GROUP}/release"

GONE_SECONDS = 30.0  # without a renewal: longer than its own standby needs to take over
LOOK_SECONDS = 30.0
DOUBT_SECONDS = 1.0  # between two looks at a Lease of which it is not known yet whether it is live


@dataclass(frozen=True)
class Claim:
    """Jobs that a release runs: those of one class, in these namespaces (empty: in all)."""

    namespace: str
    release: str
    managed_by: str = names.DEFAULT_CLASS
    watched: tuple[str, ...] = ()

    @property
    def notes(self) -> dict[str, str]:
        """The annotations of its Lease."""
        return {CLASS: self.managed_by, WATCHED: ",".join(self.watched), RELEASE: self.release}

    def shares_jobs_with(self, other: Claim) -> bool:
        """Return whether there could be a job that both run."""
        if self.managed_by != other.managed_by:
            return False
        return not self.watched or not other.watched or bool({*self.watched} & {*other.watched})


@dataclass(frozen=True)
class Holding:
    """A release's Lease as it was read.

    Attributes:
        claim: what its release runs; `release` is "" where an older version wrote it.
        holder: of the Lease; "" for nobody.
        renewed: when, by the holder's clock, which is only compared with itself.
        created: when the Lease was made, by the API server's clock, and its uid.
        unchanged: seconds for which this process has looked at it and seen no renewal.
        live: this process has seen a renewal since it looks.
    """

    claim: Claim
    holder: str
    renewed: str
    created: tuple[str, str]
    unchanged: float = 0.0
    live: bool = False


class Answer(Enum):
    """Whether this release may act."""

    FREE = "free"
    WAIT = "wait"
    REFUSE = "refuse"


def claim_of(lease: Object) -> Claim:
    """Return what the release of a Lease runs: without annotations, as older versions did, everything."""
    meta = lease["metadata"]
    notes = meta.get("annotations") or {}
    watched = tuple(name for name in str(notes.get(WATCHED) or "").split(",") if name)
    managed_by = str(notes.get(CLASS) or names.DEFAULT_CLASS)
    return Claim(str(meta["namespace"]), str(notes.get(RELEASE) or ""), managed_by, watched)


def decide(own: Claim, acts: bool, found: Iterable[Holding]) -> tuple[Answer, str]:
    """Decide whether this release may act beside the others, and say why not.

    The one that acts keeps its jobs. Where two act, as after two installations at one time, both see both
    Leases, and the one whose Lease was made first keeps them.

    Args:
        own: of this release.
        acts: whether this process holds its Lease; another of its release may, too.
        found: the Leases of all releases that can be read, its own among them.
    """
    found = list(found)
    mine = next((one for one in found if one.claim.namespace == own.namespace), None)
    acts = acts or (mine is not None and mine.live and mine.claim.release == own.release)
    answer, why = Answer.FREE, ""
    for one in found:
        if not one.holder or not _is_rival(own, one.claim):
            continue
        if acts and one.claim.namespace != own.namespace and (mine is None or mine.created < one.created):
            continue  # that one ends itself
        if one.live:
            return Answer.REFUSE, _refusal(own, one)
        if one.unchanged < GONE_SECONDS:
            answer = Answer.WAIT
            why = f"looks whether {_described(one)} is live"
    return answer, why


def _is_rival(own: Claim, other: Claim) -> bool:
    if other.namespace == own.namespace:  # one Lease and one root key
        return other.release not in ("", own.release)
    return own.shares_jobs_with(other)


def _described(one: Holding) -> str:
    release = f"the release {one.claim.release!r}" if one.claim.release else "a release"
    return f"{release}, whose Lease is {one.claim.namespace}/{LEASE}, held by {one.holder},"


def _refusal(own: Claim, one: Holding) -> str:
    if one.claim.namespace == own.namespace:
        return (
            f"{_described(one)} runs in the same namespace as this one, {own.release!r}, and a namespace has"
            " one Lease and one root key: install this one in another namespace"
        )
    where = "all namespaces" if not one.claim.watched else f"the namespaces {', '.join(one.claim.watched)}"
    return (
        f"{_described(one)} runs the jobs of the class {own.managed_by!r} in {where}, and so would this one,"
        f" {own.release!r} in {own.namespace}: uninstall one of them, or give this one another class (chart"
        " value jobs.managedBy, SPRINGTIDE_MANAGED_BY) or other namespaces (watchNamespaces)"
    )


class Releases:
    """Looks at the Leases of the releases in this cluster.

    Without the right to list Leases everywhere only that of its own namespace is seen.

    Tasks: used in the operator's event loop alone; `trouble` and `refused` are read by other tasks.
    """

    def __init__(self, cluster: Cluster, own: Claim, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster = cluster
        self._own = own
        self._clock = clock
        # By namespace: the renewal seen last, since when, and whether it was seen to change.
        self._seen: dict[str, tuple[tuple[str, str], float, bool]] = {}
        self._may_list = True
        self.trouble: str | None = "has not looked for other releases yet"
        self.refused = ""

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        return LOOK_SECONDS if self.trouble is None else DOUBT_SECONDS

    async def look(self, acts: bool) -> bool:
        """Look once. Return whether this release may go on; `refused` says why not, `trouble` what it waits
        for. A look that fails changes nothing.

        Args:
            acts: whether this process holds the Lease of its release.
        """
        try:
            leases = await self._leases()
        except ApiError as error:
            if self.trouble is not None:
                self.trouble = f"cannot look for other releases: {error}"
            return True
        answer, why = decide(self._own, acts, self._holdings(leases))
        if answer is Answer.REFUSE:
            self.refused = why
            return False
        self.trouble = why or None
        return True

    async def _leases(self) -> list[Object]:
        if self._may_list:
            try:
                return (await self._cluster.list_leases(LEASE)).items
            except ApiError as error:
                if error.code != 403:
                    raise
                self._may_list = False
                log.warning("whether other releases run the same jobs cannot be seen: %s", error)
        try:
            return [await self._cluster.get_lease(self._own.namespace, LEASE)]
        except ApiError as error:
            if not is_gone(error):
                raise
            return []

    def _holdings(self, leases: Iterable[Object]) -> list[Holding]:
        now = self._clock()
        found = [_holding(lease) for lease in leases]
        seen = {}
        for one in found:
            name, renewal = one.claim.namespace, (one.holder, one.renewed)
            before = self._seen.get(name)
            if before is None or before[0] != renewal:
                seen[name] = renewal, now, before is not None
            else:
                live = before[2] and now - before[1] < GONE_SECONDS
                seen[name] = renewal, before[1], live
        self._seen = seen
        return [
            Holding(one.claim, one.holder, one.renewed, one.created, now - seen[at][1], seen[at][2])
            for one in found
            for at in (one.claim.namespace,)
        ]


def _holding(lease: Object) -> Holding:
    meta: Mapping[str, Any] = lease["metadata"]
    spec = lease.get("spec") or {}
    created = (str(meta.get("creationTimestamp") or ""), str(meta.get("uid") or ""))
    return Holding(
        claim_of(lease), str(spec.get("holderIdentity") or ""), str(spec.get("renewTime") or ""), created
    )
