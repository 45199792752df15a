"""Fields that a template may not set, since the operator sets them: refused by name, never overridden
silently.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from springtide_operator.api import names
from springtide_operator.manifests.errors import TemplateError

Object = dict[str, Any]

_PREFIX = f"{names.GROUP}/"

# Variables of workers that the operator writes in some jobs, and what says the same in the manifest. They are
# refused in all jobs: a job does what its manifest's fields say.
_WORKERS_FIELDS = {
    "SPRINGTIDE_TLS_CA": "spec.security.tls",
    "SPRINGTIDE_STRATEGY": "spec.strategy.type",
    "SPRINGTIDE_REPLICATION": "spec.strategy.parameterServer.replication",
    "SPRINGTIDE_CONSISTENCY": "spec.strategy.parameterServer.consistency",
    "SPRINGTIDE_STALENESS": "spec.strategy.parameterServer.staleness",
    "SPRINGTIDE_GROUP_SIZE": "spec.workers.groupSize",
    "SPRINGTIDE_BACKEND": "spec.strategy.allReduce.backend",
    "SPRINGTIDE_BUCKET_MIB": "spec.strategy.allReduce.bucketMiB",
    "SPRINGTIDE_COMPRESSION": "spec.strategy.allReduce.compression or .parameterServer.compression",
    "SPRINGTIDE_ROWS_COMPRESSION": "spec.strategy.parameterServer.compression",
    "SPRINGTIDE_TOP_K_RATIO": "spec.strategy.parameterServer.topKRatio",
    "SPRINGTIDE_EARLY_VALUES": "spec.strategy.parameterServer.earlyValues",
    "SPRINGTIDE_SHARD": "spec.strategy.allReduce.shard",
    "SPRINGTIDE_BALANCE": "spec.elasticity.balance",
    "SPRINGTIDE_LOGICAL_WORKERS": "spec.strategy.allReduce.logicalWorkers",
    "SPRINGTIDE_PROCESSES": "spec.workers.processesPerPod",
    "SPRINGTIDE_CHECKPOINT_URI": "spec.checkpoint.uri",
    "SPRINGTIDE_CHECKPOINT_SECONDS": "spec.checkpoint.intervalSeconds",
    "SPRINGTIDE_CHECKPOINT_KEEP": "spec.checkpoint.keep",
    "SPRINGTIDE_RESTORE_FROM": "spec.checkpoint.restoreFrom",
}
# Written in some jobs; a template may set them in the others.
_INSTEAD = {
    **_WORKERS_FIELDS,
    "SPRINGTIDE_TERMINATION_LOG": "terminationMessagePath of the container",
    "SPRINGTIDE_GRACE_SECONDS": "terminationGracePeriodSeconds of the template",
    "SPRINGTIDE_COLLECTIVE_SECONDS": "spec.failurePolicy.hangTimeoutSeconds",
    "SPRINGTIDE_PS_LEAVE_SECONDS": "terminationGracePeriodSeconds of the template",
    "MKL_CBWR": "spec.strategy.allReduce.exact",
    "CUBLAS_WORKSPACE_CONFIG": "spec.strategy.allReduce.exact",
}


def check_worker_environment(container: Object, own: Sequence[Object]) -> None:
    """Refuse a worker's container with a variable that is the operator's, or that a field of the manifest is
    for.

    Args:
        container: the main one of the template.
        own: the operator's entries for this job.

    Raises:
        TemplateError: the variable is named, and the field.
    """
    written = {entry["name"] for entry in own}
    _check_environment("spec.workers", container, written | _WORKERS_FIELDS.keys())


def check_server_environment(container: Object, own: Sequence[Object]) -> None:
    """Raise TemplateError where a parameter server's container sets variables that the operator sets.

    Args:
        container: of the template.
        own: the operator's entries.
    """
    _check_environment("spec.parameterServers", container, {entry["name"] for entry in own})


def _check_environment(role: str, container: Object, ours: set[str]) -> None:
    where = f"{role}.template.spec.containers: env of {container['name']!r}"
    for entry in container.get("env") or []:
        if not isinstance(entry, dict) or not entry.get("name"):
            raise TemplateError(f"{where} has an entry without a name")
        name = entry["name"]
        if name in ours:
            instead = f"; {_INSTEAD[name]} is for that" if name in _INSTEAD else ""
            raise TemplateError(f"{where} has {name}, which the operator sets itself: take it out{instead}")


def check_metadata(
    where: str, labels: Mapping[str, Any], annotations: Mapping[str, Any], theirs: Collection[str] = ()
) -> None:
    """Refuse labels and annotations by which the operator knows its pods.

    All others are free, `app.kubernetes.io/name` too: nothing selects by them.

    Args:
        where: place in the manifest, for errors.
        labels: as they are given.
        annotations: as they are given.
        theirs: names of ours that are for users.

    Raises:
        TemplateError: the label or annotation is named.
    """
    for kind, given in (("labels", labels), ("annotations", annotations)):
        for key in given:
            if key.startswith(_PREFIX) and key not in theirs:
                raise TemplateError(
                    f"{where}.{kind} has {key}: names that begin with {_PREFIX} are the operator's own;"
                    " take it out or call it otherwise"
                )
