"""The sample's manifest, and the one thing that the demo adds to it: a step log per worker. Pure."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Object = dict[str, Any]

VOLUME = "step-logs"
MOUNT = "/var/log/springtide-steps"


@dataclass(frozen=True)
class Sample:
    """A TrainingJob, and what its workers run. `env` holds the literal values only."""

    job: Object
    name: str
    command: list[str]
    env: dict[str, str]


def read_sample(documents: list[Object]) -> Sample:
    """Take the one TrainingJob out of a manifest. Raises ValueError for none, several, or no command."""
    jobs = [document for document in documents if document.get("kind") == "TrainingJob"]
    if len(jobs) != 1:
        raise ValueError(f"the sample must hold one TrainingJob, not {len(jobs)}")
    container = _container(jobs[0])
    command = [*(container.get("command") or []), *(container.get("args") or [])]
    if not command:
        raise ValueError("the sample's container has no command")
    env = {entry["name"]: str(entry["value"]) for entry in container.get("env") or [] if "value" in entry}
    return Sample(jobs[0], jobs[0]["metadata"]["name"], command, env)


def with_step_logs(job: Object, folder: Path) -> Object:
    """Return a copy of a job whose workers write one line per commit to `folder/POD.jsonl`.

    Args:
        job: the TrainingJob; it stays as it is.
        folder: on the host; it is made when it is missing.
    """
    job = copy.deepcopy(job)
    spec = job["spec"]["workers"]["template"]["spec"]
    container = _container(job)
    container.setdefault("env", []).append(
        {"name": "SPRINGTIDE_STEP_LOG", "value": f"{MOUNT}/$(SPRINGTIDE_POD_NAME).jsonl"}
    )
    container.setdefault("volumeMounts", []).append({"name": VOLUME, "mountPath": MOUNT})
    spec.setdefault("volumes", []).append(
        {"name": VOLUME, "hostPath": {"path": str(folder), "type": "DirectoryOrCreate"}}
    )
    return job


def _container(job: Object) -> Object:
    container: Object = job["spec"]["workers"]["template"]["spec"]["containers"][0]
    return container
