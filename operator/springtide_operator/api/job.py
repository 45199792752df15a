"""A TrainingJob read from the API server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from springtide_operator.api import names, reasons
from springtide_operator.api.model import TrainingJobSpec


class InvalidJob(Exception):
    """The spec cannot be read; the message names the fields. (The API server refuses such a job.)"""


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

    @classmethod
    def parse(cls, obj: dict[str, Any]) -> Job:
        """Raise InvalidJob."""
        meta = obj["metadata"]
        if names.UNREADABLE in obj:
            raise InvalidJob(str(obj[names.UNREADABLE]))
        try:
            spec = TrainingJobSpec.model_validate(obj.get("spec") or {})
        except ValidationError as error:
            lines = [
                f"spec.{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
                for item in error.errors()[:5]
            ]
            raise InvalidJob("; ".join(lines)) from error
        return cls(
            name=meta["name"],
            namespace=meta["namespace"],
            uid=meta["uid"],
            generation=int(meta.get("generation", 1)),
            spec=spec,
            status=obj.get("status") or {},
            deleting="deletionTimestamp" in meta,
            resource_version=meta.get("resourceVersion", ""),
            labels=meta.get("labels") or {},
        )

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
