"""A TrainingJob read from the API server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from springtide_operator.api import names, reasons
from springtide_operator.api.effective_spec import InvalidJob, effective_spec
from springtide_operator.api.model import TrainingJobSpec

__all__ = ["InvalidJob", "Job", "JobKey"]

_KEY_NAME = re.compile(r"(?P<id>[0-9a-f]{6})(-(?P<ends>[0-9]{1,11}))?")
_MOST_KEYS = 16
_MOST_TURN = 64  # characters of the annotation that count


@dataclass(frozen=True)
class JobKey:
    """One key of a job: `id` of the key, "" of before keys had names; certificate_ends: unix seconds, 0
    without TLS.
    """

    id: str = ""
    certificate_ends: int = 0

    @classmethod
    def parse(cls, name: str) -> JobKey:
        """Return the key of a name; that of before keys had names for what is none."""
        found = _KEY_NAME.fullmatch(name)
        return cls(found["id"], int(found["ends"] or 0)) if found else cls()

    @property
    def name(self) -> str:
        """The key with its certificate, as pods and Secrets are marked with it."""
        return f"{self.id}-{self.certificate_ends}" if self.certificate_ends else self.id


def _unix(text: object) -> int:
    """Return a time of status in unix seconds; 0 for none, or nonsense."""
    try:
        return max(0, int(datetime.fromisoformat(str(text)).timestamp()))
    except (ValueError, OverflowError):
        return 0


@dataclass(frozen=True)
class Job:
    """A TrainingJob as policies and manifests need it."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: TrainingJobSpec
    status: dict[str, Any]
    deleting: bool = False
    resource_version: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, obj: dict[str, Any]) -> Job:
        """Raise InvalidJob."""
        meta = obj["metadata"]
        if names.UNREADABLE in obj:
            raise InvalidJob(str(obj[names.UNREADABLE]))
        return cls(
            name=meta["name"],
            namespace=meta["namespace"],
            uid=meta["uid"],
            generation=int(meta.get("generation", 1)),
            spec=effective_spec(obj),
            status=obj.get("status") or {},
            deleting="deletionTimestamp" in meta,
            resource_version=meta.get("resourceVersion", ""),
            labels=meta.get("labels") or {},
            annotations=meta.get("annotations") or {},
        )

    @property
    def key_turn(self) -> str:
        """The word by which the user asks for another key; "" at first."""
        return str(self.annotations.get(names.ANNOTATION_KEY_TURN, ""))[:_MOST_TURN]

    @property
    def keys(self) -> tuple[JobKey, ...]:
        """The keys that count, by status, the newest first; at least one."""
        listed = self.status.get("keys")
        entries = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        found = []
        for one in entries[:_MOST_KEYS]:
            found.append(JobKey(JobKey.parse(str(one.get("id"))).id, _unix(one.get("certificateEnds"))))
        return tuple(found) or (JobKey(),)

    @property
    def tls(self) -> bool:
        """Whether its coordinator and parameter servers speak TLS: by its own field, else as status says."""
        asked = self.spec.security.tls
        return asked if asked is not None else self.status.get("tls") is True

    @property
    def halted(self) -> str:
        """Why the job is to have no pods; "" while it is to have them."""
        if self.spec.suspend:
            return "spec.suspend is true"
        queue = self.status.get("queue")
        if queue and not queue.get("admitted"):
            return f"it waits in the queue {queue.get('name')}: {queue.get('message')}"
        return ""

    @property
    def halt_reason(self) -> str:
        """The same as the reason of the condition Suspended."""
        if self.spec.suspend:
            return reasons.JOB_SUSPENDED
        evicted = (self.status.get("queue") or {}).get("reason") == reasons.EVICTED
        return reasons.EVICTED if evicted else reasons.QUEUED

    @property
    def owner_reference(self) -> dict[str, Any]:
        """`controller: true`, not blocking: Kubernetes collects the children, with or without us."""
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }
