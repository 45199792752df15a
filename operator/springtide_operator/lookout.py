"""Looks beyond a coordinator that does not answer: asks the job's pods themselves, and reads nodes' leases.

Only while there is doubt, so healthy jobs cost nothing: no lease is watched, and no pod is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from weakref import WeakSet

import aiohttp

from springtide_kube.errors import ApiError
from springtide_operator.cluster import Cluster
from springtide_operator.plan.observation import (
    CoordinatorPod,
    LeaseSeen,
    Observation,
    ServerPod,
    Sight,
    Testimony,
    WorkerPod,
)

log = logging.getLogger("springtide.operator")

LOOK_SECONDS = 1.0
ASK_SECONDS = 1.0
MOST_ASKED = 12
MOST_BYTES = 1 << 20
LEASE_SECONDS = 1.5
"""Least time between two looks at the same node's lease, whichever job asks."""
FORGET_SECONDS = 30.0
UNASKED_SECONDS = 2.0
UNANSWERED_SECONDS = 3.0
"""An answer takes milliseconds: a coordinator that owes one for so long is not heard."""
FORGET_HEARD_SECONDS = 60.0
"""Time without an answer after which the operator listens anew."""
LEASES_NAMESPACE = "kube-node-lease"

_SILENT = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)
_MISSING = re.compile(rb"^springtide_worker_coordinator_missing_seconds(\{[^}]*\}) (\S+)$", re.MULTILINE)
_IDLE = re.compile(rb"^springtide_worker_since_commit_seconds(\{[^}]*\}) (\S+)$", re.MULTILINE)

Pod = WorkerPod | ServerPod
Ask = Callable[[tuple[str, int]], Awaitable[bytes | None]]


async def ask(address: tuple[str, int]) -> bytes | None:
    """Read the metrics of a pod; b"" where it says anything else, or refuses; None where nothing answers."""
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"http://{host}:{address[1]}/metrics", allow_redirects=False) as answer,
        ):
            return await answer.content.read(MOST_BYTES) if answer.status == 200 else b""
    except TimeoutError:
        return None
    except aiohttp.ClientConnectorError as error:
        return None if error.os_error.errno in _SILENT else b""
    except (aiohttp.ClientError, ValueError):
        return b""


def read(page: bytes, namespace: str, job: str) -> tuple[float | None, float | None]:
    """Return what a page of metrics says, of the process that has least of each.

    Args:
        page: in Prometheus' text format.
        namespace: of the job.
        job: its name.

    Returns:
        Seconds without the coordinator, and seconds since the newest commit; None where the page does not
        say, or speaks of another job.
    """
    ours = (f'training_job="{job}"'.encode(), f'job_namespace="{namespace}"'.encode())

    def least(pattern: re.Pattern[bytes]) -> float | None:
        found = []
        for labels, text in pattern.findall(page):
            with contextlib.suppress(ValueError):
                value = float(text)
                if all(label in labels for label in ours) and value >= 0:
                    found.append(value)
        return min(found, default=None)

    return least(_MISSING), least(_IDLE)


class Leases:
    """The leases of nodes that somebody doubts; shared by all jobs."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float] = time.monotonic) -> None:
        self._cluster, self._clock = cluster, clock
        self._seen: dict[str, _Lease] = {}
        self._refused = False

    async def look(self, nodes: Iterable[str]) -> None:
        """Read the leases of these nodes, each at most every 1.5 s. Those of others are forgotten in time."""
        now = self._clock()
        for name in [name for name, lease in self._seen.items() if now - lease.looked_at > FORGET_SECONDS]:
            del self._seen[name]
        due = [n for n in nodes if n not in self._seen or now - self._seen[n].looked_at >= LEASE_SECONDS]
        await asyncio.gather(*(self._look_at(name) for name in due))

    def seen(self, nodes: Iterable[str]) -> dict[str, LeaseSeen]:
        """Return the facts about these nodes' leases; those that could not be read are left out."""
        now = self._clock()
        return {
            name: LeaseSeen(now - lease.since, lease.renewed)
            for name in nodes
            if (lease := self._seen.get(name)) is not None and lease.renewal
        }

    async def _look_at(self, name: str) -> None:
        lease = self._seen.setdefault(name, _Lease(since=self._clock()))
        lease.looked_at = self._clock()
        try:
            async with asyncio.timeout(ASK_SECONDS):
                found = await self._cluster.get_lease(LEASES_NAMESPACE, name)
        except TimeoutError:
            return
        except ApiError as error:
            if error.code == 403 and not self._refused:
                self._refused = True
                log.warning(
                    "leases of nodes cannot be read, so coordinators on lost nodes are replaced later"
                )
            return
        renewal = str((found.get("spec") or {}).get("renewTime") or "")
        if renewal != lease.renewal:
            lease.renewed = lease.renewal != ""
            lease.renewal, lease.since = renewal, self._clock()


@dataclass
class _Lease:
    since: float
    renewal: str = ""
    renewed: bool = False
    looked_at: float = field(default=float("-inf"))


class Hearing:
    """Whether coordinators answer the operator, over all jobs: it may be the operator that hears nobody."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lookouts: WeakSet[Lookout] = WeakSet()
        self._tallied_at = float("-inf")
        self._tallied: tuple[dict[str, int], int] = {}, 0

    def add(self, lookout: Lookout) -> None:
        """Count this job's coordinator, too, for as long as its lookout is in use."""
        self._lookouts.add(lookout)

    def tally(self) -> tuple[dict[str, int], int]:
        """Return how many coordinators owe an answer for three seconds, by node, and how many have answered
        within them. Counted once a second, whoever asks.
        """
        now = self._clock()
        if now - self._tallied_at >= LOOK_SECONDS:
            silent = Counter(
                one.node for one in self._lookouts if one.owes and one.silence >= UNANSWERED_SECONDS
            )
            heard = sum(one.answered_for < UNANSWERED_SECONDS for one in self._lookouts)
            self._tallied_at, self._tallied = now, (dict(silent), heard)
        return self._tallied


class Lookout:
    """Observations of one job that the operator makes itself.

    Attributes:
        heard_at: when the coordinator last said of each pod (uid) that it is connected.
        listening_since: when it first answered this process, without longer gaps since; None before.
        node: of the coordinator that is asked; "" before.
        owes: it has not answered the last question, and is to.
    """

    def __init__(
        self,
        namespace: str,
        job: str,
        leases: Leases | None = None,
        how: Ask = ask,
        clock: Callable[[], float] = time.monotonic,
        hearing: Hearing | None = None,
    ) -> None:
        self.heard_at: dict[str, float] = {}
        self.listening_since: float | None = None
        self.node = ""
        self.owes = False
        self._hearing = hearing or Hearing(clock)
        self._hearing.add(self)
        self._names, self._leases, self._ask, self._clock = (namespace, job), leases, how, clock
        self._coordinator: tuple[str, float | None] = "", None
        self._answered_at = self._clock()
        self._asked_at: float | None = None  # for the first time since the last answer
        self._answered = False
        self._reported: dict[str, Testimony] = {}
        self._silent_since: dict[str, float] = {}
        self._nodes: set[str] = set()
        self._looking = False

    @property
    def answered_for(self) -> float:
        """Seconds since the last answer; infinite where there was none."""
        return self._clock() - self._answered_at if self._answered else math.inf

    @property
    def silence(self) -> float:
        """Seconds since the last answer; two of them at most are from before the first call that got none."""
        if self._asked_at is None:
            return 0.0
        return self._clock() - max(self._answered_at, self._asked_at - UNASKED_SECONDS)

    def asks(self, pod: CoordinatorPod) -> bool:
        """Note that the coordinator in this pod is about to be asked. Another one, or another start of its
        container, is asked for the first time.

        Returns:
            Whether it owes an answer: it has given one before, or its kubelet says that it serves.
        """
        if self._coordinator != (pod.uid, pod.running_since):
            self._answered = self._answered and self._coordinator[0] == pod.uid
            self._coordinator, self._answered_at = (pod.uid, pod.running_since), self._clock()
            self._asked_at = None
        if self._asked_at is None:
            self._asked_at = self._clock()
        self.node, self.owes = pod.node or "", self._answered or pod.ready_since is not None
        return self.owes

    def answered(self, connected: Iterable[str] = ()) -> None:
        """Note that it has answered, and which pods (uids) are connected to it."""
        now = self._clock()
        if self.listening_since is None or now - self._answered_at > FORGET_HEARD_SECONDS:
            self.listening_since = now
        self._answered_at, self._asked_at, self._answered, self.owes = now, None, True, False
        kept = {uid: at for uid, at in self.heard_at.items() if now - at <= FORGET_HEARD_SECONDS}
        self.heard_at = kept | dict.fromkeys(connected, now)

    def seen(self) -> Sight | None:
        """Return the observations up to now; None while nobody looks."""
        if not self._looking:
            return None
        leases = self._leases.seen(self._nodes) if self._leases is not None else {}
        testimonies = tuple(self._reported[uid] for uid in sorted(self._reported))
        unanswered, answering = self._hearing.tally()
        return Sight(
            self._coordinator[0], self.silence, self._answered, testimonies, leases, unanswered, answering
        )

    def rest(self) -> None:
        """Stop looking, since there is no doubt any more."""
        self._looking, self._nodes = False, set()
        self._reported, self._silent_since = {}, {}

    async def look(self, observation: Observation) -> None:
        """Ask the pods that tell most, and look at the leases of the nodes in doubt; takes a second or so."""
        self._looking = True
        suspect = next((p.node for p in observation.coordinators if p.uid == self._coordinator[0]), None)
        pods = chosen(observation, suspect)
        self._nodes = {node for node in (suspect, *(pod.node for pod in pods)) if node is not None}
        asked = asyncio.gather(*(self._ask_one(pod) for pod in pods))
        if self._leases is not None:
            doubtful = {pod.node for pod in pods if pod.uid in self._silent_since} | {suspect}
            await self._leases.look(sorted(node for node in doubtful if node is not None))
        told = await asked
        self._reported = {one.uid: one for one in told}
        self._silent_since = {uid: at for uid, at in self._silent_since.items() if uid in self._reported}

    async def _ask_one(self, pod: Pod) -> Testimony:
        began = self._clock()
        page = await self._ask(pod.address) if pod.address is not None else b""
        if page is None:
            since = self._silent_since.setdefault(pod.uid, began)
            return Testimony(pod.uid, pod.name, reached=False, silent=self._clock() - since)
        self._silent_since.pop(pod.uid, None)
        missing, idle = read(page, *self._names) if isinstance(pod, WorkerPod) else (None, None)
        return Testimony(pod.uid, pod.name, reached=bool(page), missing=missing, idle=idle)


def chosen(observation: Observation, suspect: str | None) -> list[Pod]:
    """Return the pods to ask: half of them on the suspected node, the others spread over other nodes.

    Args:
        observation: of the job.
        suspect: name of the suspected node; None: none is.
    """
    pods: list[Pod] = [pod for pod in observation.workers if pod.running and pod.end is None]
    pods += [pod for pod in observation.servers if pod.running]
    pods = [pod for pod in pods if pod.address is not None]
    there = [pod for pod in pods if pod.node == suspect]
    rank: Mapping[str, int] = {
        pod.uid: sum(other.node == pod.node for other in pods[:index]) for index, pod in enumerate(pods)
    }
    elsewhere = sorted((pod for pod in pods if pod.node != suspect), key=lambda pod: rank[pod.uid])
    first = there[: MOST_ASKED // 2]
    return first + elsewhere[: MOST_ASKED - len(first)]
