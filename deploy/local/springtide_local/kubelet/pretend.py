"""Pods that are only said to run: for measuring what watches them, with thousands of pods on one machine.

Scheduling, deletion with its grace and the API's rules are the real ones; no process is started, so nothing
is mounted, probed or logged. All pods have one address, where somebody may answer for them.

Tasks: one event loop; informers' callbacks note pods and set `_changed`, and one task writes their statuses.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from springtide_local.kubelet.pod import PodWorker
from springtide_local.kubelet.services import NodeServices
from springtide_local.kubelet.state import Running, Terminated
from springtide_local.ports import ApiError

Object = dict[str, Any]


class OneAddress:
    """`Addresses` of a node whose pods share one."""

    def __init__(self, address: str) -> None:
        self._address = address

    def take(self) -> str:
        return self._address

    def give_back(self, address: str) -> None:
        """Do nothing: the one address is never used up."""


class PretendedPod(PodWorker):
    """Running and ready from the moment it is bound; ends with exit code 0 when it is deleted."""

    def __init__(self, pod: Object, node: NodeServices) -> None:
        super().__init__(pod, node)
        self._changed = asyncio.Event()

    def update(self, pod: Object) -> None:
        self.pod = pod
        self._changed.set()

    def removed(self) -> None:
        self._removed = True
        self._changed.set()

    def wake(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        await self._node.running.wait()
        now = time.time()
        for name, record in self.records.items():
            record.state, record.starts = Running(f"pretended://{self.uid}/{name}", now), 1
            record.ready = record.passed_startup = True
        self._write_status(now)
        while not self._removed:
            await self._changed.wait()
            self._changed.clear()
            await self._node.running.wait()
            if self.pod["metadata"].get("deletionTimestamp") and not self._removed:
                self._end()

    def _end(self) -> None:
        now, metadata = time.time(), self.pod["metadata"]
        for record in self.records.values():
            started = record.state.started_at if isinstance(record.state, Running) else now
            record.state = Terminated(0, "Completed", started, now)
            record.ready = False
        self._write_status(now, ending=True)
        try:
            self._node.store.delete(
                "pods", metadata["name"], metadata["namespace"], grace_period_seconds=0, uid=self.uid
            )
        except ApiError as error:
            if error.code not in (404, 409):
                raise
        self._removed = True
