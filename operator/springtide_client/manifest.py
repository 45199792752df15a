"""The objects of a job that the client makes: a ConfigMap with what it runs, and the TrainingJob. Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from springtide_client.errors import SourceError
from springtide_client.packing import Payload
from springtide_operator.api import names
from springtide_operator.api.effective_spec import parse_reference

Object = dict[str, Any]
Workers = int | tuple[int, int]

IMAGE = f"springtide/worker:{names.PROGRAM_VERSION}"
LABEL_CODE_OF = f"{names.GROUP}/code-of"
FOLDER = "/springtide-client/code"
WORK = "/springtide-client/work"
_SUFFIX = 6  # characters behind a name that is made


@dataclass(frozen=True)
class JobOptions:
    """The wishes for a job.

    Attributes:
        workers: how many; or the fewest with which it goes on, and how many are wanted.
        image: of the workers; None: the template's, or without one the project's own.
        resources: of each worker: quantities, which are request and limit; or `requests` and `limits`.
        strategy: its type, or the fields of `spec.strategy`; None: the template's, or AllReduce.
        standby: pods that stand by; None: as many as the template says, or none.
        template: NAME of a ClusterTrainingTemplate, or KIND/NAME; "" for none.
        env: environment variables.
        pod: fields of the pod template's spec, merged into what the client makes.
        spec: fields of the job's spec, merged likewise.
    """

    workers: Workers = 1
    image: str | None = None
    resources: Mapping[str, Any] = field(default_factory=dict)
    strategy: str | Mapping[str, Any] | None = None
    standby: int | None = None
    template: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    pod: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)


def job_name(base: str, suffix: str) -> str:
    """Return a name for a job that nobody named.

    Args:
        base: name of the function or script.
        suffix: hexadecimal digits that tell it from others.
    """
    clean = re.sub(r"[^a-z0-9]+", "-", base.lower()).strip("-")
    if not clean or not clean[0].isalpha():
        clean = f"job-{clean}".strip("-")
    return f"{clean[: names.MAX_JOB_NAME - _SUFFIX - 1].rstrip('-')}-{suffix[:_SUFFIX]}"


def sizes(workers: Workers) -> Object:
    """Return the fields of `spec.workers` for a number, or for a range.

    Args:
        workers: how many; or (the fewest, the most), of which the most are wanted.

    Raises:
        SourceError: they are not numbers in order.
    """
    numbers = workers if isinstance(workers, tuple | list) else (workers,)
    whole = all(isinstance(one, int) and not isinstance(one, bool) and one >= 1 for one in numbers)
    if not whole or len(numbers) not in (1, 2) or list(numbers) != sorted(numbers):
        raise SourceError(
            f"workers is a number from 1 on, or (the fewest, the most) such as (1, 8), not {workers!r}"
        )
    if len(numbers) == 1:
        return {"replicas": numbers[0]}
    return {"replicas": numbers[1], "minReplicas": numbers[0], "maxReplicas": numbers[1]}


def config_map(name: str, job: str, payload: Payload) -> Object:
    """Return the ConfigMap of a job.

    Args:
        name: of the ConfigMap.
        job: name of the job.
        payload: the content.
    """
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": {LABEL_CODE_OF: job}},
        "immutable": True,
        **payload.fields(),
    }


def owned_by(job: Object) -> Object:
    """Return a merge patch that lets the garbage collector delete an object with a job.

    Args:
        job: as the API server stores it.
    """
    meta = job["metadata"]
    owner = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": meta["name"], "uid": meta["uid"]}
    return {"metadata": {"ownerReferences": [owner]}}


def training_job(name: str, code: str, options: JobOptions) -> Object:
    """Return the TrainingJob.

    Args:
        name: of the job.
        code: name of its ConfigMap.
        options: what it is to have.

    Raises:
        SourceError: the workers are no numbers in order, or the template or the standbys are none.
    """
    image = options.image or ("" if options.template else IMAGE)
    container: Object = {
        "name": "worker",
        **({"image": image} if image else {}),
        "command": ["python", f"{FOLDER}/boot.py", FOLDER, WORK],
        "env": [
            {"name": key, "value": str(value)}
            for key, value in {"PYTHONUNBUFFERED": "1", **options.env}.items()
        ],
        "volumeMounts": [
            {"name": "springtide-code", "mountPath": FOLDER, "readOnly": True},
            {"name": "springtide-work", "mountPath": WORK},
        ],
    }
    if options.resources:
        full = options.resources
        if not {"requests", "limits"} & set(full):
            quantities = {key: str(value) for key, value in full.items()}
            full = {"requests": quantities, "limits": quantities}
        container["resources"] = copy.deepcopy(dict(full))
    pod: Object = {
        "containers": [container],
        "volumes": [
            {"name": "springtide-code", "configMap": {"name": code}},
            {"name": "springtide-work", "emptyDir": {}},
        ],
    }
    if image == IMAGE:
        # What PodSecurity `restricted` asks for, which our image can do; another one may need to be root.
        pod["securityContext"] = {"runAsNonRoot": True}
        container["securityContext"] = {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        }
    workers = {**sizes(options.workers), **_standby(options.standby)}
    spec: Object = {
        **_template(options.template),
        **_strategy(options),
        "workers": {**workers, "template": {"spec": merged(pod, options.pod)}},
    }
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": merged(spec, options.spec),
    }


def _template(text: str) -> Object:
    if not text:
        return {}
    try:
        named = parse_reference(text)
    except ValueError as error:
        raise SourceError(f"template: {error}") from None
    return {"templateRef": {"kind": named.kind, "name": named.name}}


def _strategy(options: JobOptions) -> Object:
    if options.strategy is None:
        return {} if options.template else {"strategy": {"type": "AllReduce"}}
    if isinstance(options.strategy, str):
        return {"strategy": {"type": options.strategy}}
    return {"strategy": dict(options.strategy)}


def _standby(number: int | None) -> Object:
    if number is None:
        return {}
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise SourceError(f"standby is how many pods stand by, a number from 0 on, not {number!r}")
    return {"standby": number}


def merged(ours: Any, theirs: Any) -> Any:
    """Return ours with theirs over it: mappings by key, lists of named things by name, all else replaced.

    Args:
        ours: plain JSON.
        theirs: plain JSON.
    """
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return {
            **ours,
            **{key: merged(ours[key], value) if key in ours else value for key, value in theirs.items()},
        }
    if _is_named(ours) and _is_named(theirs):
        by_name = {one["name"]: one for one in ours}
        for one in theirs:
            by_name[one["name"]] = merged(by_name.get(one["name"], {}), one)
        return list(by_name.values())
    return copy.deepcopy(theirs)


def _is_named(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, Mapping) and "name" in one for one in value)
