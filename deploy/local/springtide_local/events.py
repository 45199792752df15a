"""Events: what happened, for `kubectl describe` and `kubectl events`. The same event again only raises its
count.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal

from springtide_local.clock import timestamp
from springtide_local.ports import ApiError, StorePort

Object = dict[str, Any]
_log = logging.getLogger(__name__)
_REMEMBERED = 4096


class EventRecorder:
    """Writes core/v1 Events for one component, such as `kubelet` on a node or `default-scheduler`."""

    def __init__(
        self, store: StorePort, component: str, host: str = "", now: Callable[[], float] | None = None
    ) -> None:
        self._store = store
        self._source = {"component": component, **({"host": host} if host else {})}
        self._component = component
        self._host = host
        self._now = now or time.time
        self._seen: OrderedDict[tuple[str, str, str, str], tuple[str, str]] = OrderedDict()

    def normal(self, obj: Object, reason: str, message: str, field_path: str = "") -> None:
        """Record an event that is as it should be.

        Args:
            obj: the object that the event is about.
            reason: one word in CamelCase.
            message: in words.
            field_path: part of the object, as `spec.containers{main}`; "" for all of it.
        """
        self._record(obj, "Normal", reason, message, field_path)

    def warning(self, obj: Object, reason: str, message: str, field_path: str = "") -> None:
        """Record an event that somebody should look at.

        Args:
            obj: the object that the event is about.
            reason: one word in CamelCase.
            message: in words.
            field_path: part of the object, as `spec.containers{main}`; "" for all of it.
        """
        self._record(obj, "Warning", reason, message, field_path)

    def _record(
        self, obj: Object, kind: Literal["Normal", "Warning"], reason: str, message: str, field_path: str
    ) -> None:
        metadata = obj["metadata"]
        namespace = metadata.get("namespace") or "default"
        message = message if len(message) <= 1024 else message[:1021] + "..."
        key = (str(metadata.get("uid")), reason, message, field_path)
        now = timestamp(self._now())
        try:
            known = self._seen.get(key)
            if known is not None and self._count(known, now):
                return
            name = f"{metadata['name'][:200]}.{secrets.token_hex(8)}"
            involved = {
                "apiVersion": obj.get("apiVersion", "v1"),
                "kind": obj.get("kind", "Pod"),
                "name": metadata["name"],
                "uid": metadata.get("uid", ""),
                "resourceVersion": metadata.get("resourceVersion", ""),
            }
            if involved["kind"] == "Node":
                # Kubelets say the name here, and `kubectl describe node` looks for it.
                involved["uid"] = metadata["name"]
            if metadata.get("namespace"):
                involved["namespace"] = namespace
            if field_path:
                involved["fieldPath"] = field_path
            self._store.create(
                "events",
                {
                    "apiVersion": "v1",
                    "kind": "Event",
                    "metadata": {"name": name, "namespace": namespace},
                    "involvedObject": involved,
                    "type": kind,
                    "reason": reason,
                    "message": message,
                    "count": 1,
                    "firstTimestamp": now,
                    "lastTimestamp": now,
                    "source": dict(self._source),
                    "reportingComponent": self._component,
                    "reportingInstance": self._host,
                },
                namespace,
            )
        except ApiError as error:
            # A namespace that is being deleted takes no events; nothing depends on them.
            _log.debug(
                "event %s of %s/%s was refused: %s", reason, namespace, metadata["name"], error.message
            )
            return
        self._seen[key] = (namespace, name)
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)

    def _count(self, known: tuple[str, str], now: str) -> bool:
        def change(event: Object) -> None:
            event["count"] = int(event.get("count") or 1) + 1
            event["lastTimestamp"] = now

        try:
            self._store.mutate("events", known[1], known[0], change)
        except ApiError as error:
            if error.code == 404:
                return False
            raise
        return True
