"""One operator acts: a Lease (coordination.k8s.io) that its holder renews.

The rules are those of Kubernetes' own leader election: another holder is believed for its whole lease
duration since this process saw its last change (clocks of two machines are never compared); a holder that
could not renew within the deadline, which is shorter, stops acting by itself. Between the two nobody acts:
time for the one that stands by to look at everything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from springtide_kube.errors import ApiError
from springtide_operator.cluster import Cluster, is_gone
from springtide_operator.releases import LEASE as NAME

DURATION = 8.0
DEADLINE = 5.0
RETRY = 2.0
SILENT = (
    DEADLINE + 0.5
)  # since the last renewal was seen: the holder has stopped, its last requests are through
STANDBY_RETRY = 1.0  # a renewal is seen so much late at most, and believed for so much longer

log = logging.getLogger("springtide.operator.lease")

Renewal = tuple[object, object]  # who, when by the holder's clock


class Lease:
    """`held` is true while this process may act."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        identity: str,
        on_change: Callable[[bool], None] = lambda held: None,
        on_silence: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        notes: Mapping[str, str] | None = None,
        obstacle: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Make a lease that is not held.

        Args:
            cluster: where it is.
            namespace: the operator's own.
            identity: of this process.
            on_change: called when this process begins to hold it, and when it ceases.
            on_silence: called when the other holder has stopped acting.
            clock: seconds that never jump.
            notes: annotations by which other releases know what this one runs.
            obstacle: why this process must not take the lease now, though nobody holds it; None: it may.
        """
        self._notes = dict(notes or {})
        self._obstacle = obstacle
        self._cluster = cluster
        self._namespace = namespace
        self._identity = identity
        self._on_change = on_change
        self._on_silence = on_silence
        self._clock = clock
        self._renewed_at = float("-inf")
        self._was_held = False
        self._written: dict[str, Any] | None = None  # as this process renewed it last
        self._seen: Renewal | None = None
        self._announced: Renewal | None = None  # the silence after which was told
        self._seen_at = 0.0
        self._free_at = float("-inf")  # when the holder is believed no more
        self.trouble: str | None = "has not asked for the lease yet"

    @property
    def held(self) -> bool:
        return self._clock() - self._renewed_at < DEADLINE

    @property
    def last_of_another(self) -> Renewal | None:
        """The newest renewal by another that this process has seen; None before it saw one."""
        return self._seen

    @property
    def silent(self) -> bool:
        """The other holder has stopped acting by itself, whether it lives or not."""
        return self._seen is not None and not self.held and self._clock() - self._seen_at >= SILENT

    async def run(self) -> None:
        """Try and renew for ever."""
        while True:
            await self.step()
            await asyncio.sleep(self.pause)

    @property
    def pause(self) -> float:
        """Seconds until the next try: not later than the lease of another, unless it is renewed, is over."""
        over = self._free_at - self._clock()
        return min(STANDBY_RETRY, over + 0.01) if over > 0 else RETRY

    async def step(self) -> None:
        """One try."""
        began = self._clock()
        try:
            async with asyncio.timeout(DEADLINE - 1.0):
                renewed = await self._try()
            if renewed:
                self._renewed_at = began
                self.trouble = None
        except TimeoutError:
            self.trouble = "the API server does not answer"
        except ApiError as error:
            self.trouble = str(error)
            if is_gone(error):
                self.trouble = (
                    f"the namespace {self._namespace!r} does not exist: install the operator's manifest"
                )
        held = self.held
        if held != self._was_held:
            self._was_held = held
            log.info("acts from now on" if held else f"acts no more: {self.trouble}")
            self._on_change(held)

    async def release(self) -> None:
        """Let another take over at once."""
        if not self.held:
            return
        self._renewed_at, self._written = float("-inf"), None
        try:
            lease = await self._cluster.get_lease(self._namespace, NAME)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                await self._cluster.replace_lease(lease)
        except ApiError as error:
            log.warning("the lease could not be given back: %s", error)

    async def _try(self) -> bool:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if self._written is not None:
            if not self.held and self._is_held_up():
                return False
            if await self._renew(self._written, now):
                return True
        try:
            lease = await self._cluster.get_lease(self._namespace, NAME)
        except ApiError as error:
            if not is_gone(error):
                raise
            if self._is_held_up():
                return False
            self._written = await self._cluster.create_lease(self._new(now))
            return True
        spec: dict[str, Any] = lease.setdefault("spec", {})
        holder = spec.get("holderIdentity") or ""
        if holder and holder != self._identity:
            seen = (holder, spec.get("renewTime"))
            if seen != self._seen:
                self._seen, self._seen_at = seen, self._clock()
            self._free_at = self._seen_at + float(spec.get("leaseDurationSeconds") or DURATION)
            if self._clock() < self._free_at:
                if self.silent and self._announced != seen:
                    self._announced = seen
                    self._on_silence()
                self.trouble = f"stands by: {holder} holds the lease"
                return False
        if not self.held and self._is_held_up():
            return False
        if holder != self._identity:
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
            spec["acquireTime"] = now
        meta = lease["metadata"]
        meta["annotations"] = {**(meta.get("annotations") or {}), **self._notes}
        spec |= {"holderIdentity": self._identity, "renewTime": now, "leaseDurationSeconds": int(DURATION)}
        return await self._renew(lease, now)

    async def _renew(self, lease: dict[str, Any], now: str) -> bool:
        """Write a lease of this process's; False where somebody else has written it since it was read.

        Args:
            lease: as this process wrote or read it last.
            now: time by this machine's clock.

        Raises:
            ApiError: the API server refuses.
        """
        try:
            spec = {**lease["spec"], "renewTime": now}
            self._written = await self._cluster.replace_lease({**lease, "spec": spec})
        except ApiError as error:
            if error.code in (404, 409):
                self._written = None
                return False
            raise
        return True

    def _is_held_up(self) -> bool:
        why = self._obstacle()
        if why is not None:
            self.trouble = why
        return why is not None

    def _new(self, now: str) -> dict[str, Any]:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": NAME, "namespace": self._namespace, "annotations": self._notes},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": int(DURATION),
                "acquireTime": now,
                "renewTime": now,
                "leaseTransitions": 0,
            },
        }
