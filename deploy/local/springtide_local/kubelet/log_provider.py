"""`kubectl logs`: finds the file of a container's latest start, or of the one before, among the kubelets of
this process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

from springtide_local.kubelet.logs import read_log
from springtide_local.kubelet.node import Kubelet
from springtide_local.kubelet.state import Waiting
from springtide_local.ports import ApiError

Object = dict[str, Any]


class Wanted(Protocol):
    """The options of the log subresource; `since` in seconds since 1970, None for what is not limited."""

    @property
    def container(self) -> str: ...
    @property
    def follow(self) -> bool: ...
    @property
    def previous(self) -> bool: ...
    @property
    def timestamps(self) -> bool: ...
    @property
    def tail_lines(self) -> int | None: ...
    @property
    def since(self) -> float | None: ...
    @property
    def limit_bytes(self) -> int | None: ...


class LogProvider:
    def __init__(self, kubelets: Iterable[Kubelet]) -> None:
        self._kubelets = list(kubelets)

    async def __call__(self, pod: Object, wanted: Wanted) -> AsyncIterator[bytes]:
        """Raise ApiError 400 when the container has not (or not twice) been started, 503 when its node is
        down.
        """
        uid, name = pod["metadata"]["uid"], wanted.container
        where = f'container "{name}" in pod "{pod["metadata"]["name"]}"'
        kubelet = next((k for k in self._kubelets if uid in k.workers), None)
        if kubelet is None:
            raise ApiError(
                400,
                "BadRequest",
                f"{where} is not available: the pod is not on a node, or its files are gone",
            )
        if kubelet.down:
            node = kubelet.shape.name
            raise ApiError(
                503,
                "ServiceUnavailable",
                f"the kubelet of node {node} does not answer: the node is {kubelet.down}",
            )
        worker = kubelet.workers[uid]
        record = worker.records[name]
        attempt = record.starts - 1
        live = worker.live.get(name)
        if wanted.previous:
            if record.restarts == 0:
                raise ApiError(
                    400,
                    "BadRequest",
                    f"previous terminated {where.replace(' in pod', ' in pod', 1)} not found",
                )
            # A container that waits for its restart has ended already: its latest start is the previous one.
            attempt = attempt if isinstance(record.state, Waiting) else attempt - 1
            live = None
        if attempt < 0:
            reason = record.state.reason if isinstance(record.state, Waiting) else "not started"
            raise ApiError(400, "BadRequest", f"{where} is waiting to start: {reason}")
        path = worker.log_path(name, attempt)
        log = live.launch.log if live is not None else None
        async for data in read_log(
            path,
            log,
            follow=wanted.follow,
            tail_lines=wanted.tail_lines,
            since=wanted.since,
            timestamps=wanted.timestamps,
            limit_bytes=wanted.limit_bytes,
        ):
            yield data
