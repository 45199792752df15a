"""The pod of one parameter server."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

from springtide_operator.api import names
from springtide_operator.api.job import Job
from springtide_operator.manifests import gang, kueue, owned
from springtide_operator.manifests.coordinator import certificate_environment, heartbeat_environment
from springtide_operator.manifests.placement import follow_workers
from springtide_operator.manifests.shape import check_template
from springtide_operator.manifests.startup import startup_probe
from springtide_operator.manifests.worker import (
    TemplateError,
    authority_entry,
    common_environment,
    former_keys_environment,
    from_secret,
    hash_of,
)

Object = dict[str, Any]

CONTAINER = "server"
# A server that leaves is let go when its successor has what it holds, which may first have to pull its image
# and import torch; a drain shall still end within a minute.
GRACE_SECONDS = 50
GRACE_MARGIN_SECONDS = 5
START_SECONDS = 125  # from its process to its answer: it imports torch first


def server_template_hash(job: Job) -> str:
    """12 hex digits; servers of another hash were made from an older template, or took other things from the
    workers'.
    """
    asked = job.spec.parameter_servers
    template = copy.deepcopy(asked.template or {}) if asked is not None else {}
    with contextlib.suppress(TemplateError):  # of which no pod can be made
        _from_workers(job, _object(template, "spec", "spec"))
    return hash_of(template)


def server_pod(
    job: Job,
    slot: int,
    attempt: int,
    coordinator_address: str,
    image: str = names.PARAMETER_SERVER_IMAGE,
    pull_policy: str = "IfNotPresent",
) -> Object:
    """Return the pod of one parameter server.

    It meets PodSecurity `restricted` where the template is silent, and carries no API token.

    Args:
        job: the TrainingJob.
        slot: which of the wanted servers it is, from 0.
        attempt: number of the pod among those of the slot, from 0.
        coordinator_address: of the coordinator's Service.
        image: where the template names none.
        pull_policy: of that image.

    Raises:
        TemplateError: with the place in `spec.parameterServers.template`.
    """
    asked = job.spec.parameter_servers
    template = copy.deepcopy(asked.template or {}) if asked is not None else {}
    check_template("spec.parameterServers.template", template)
    spec, meta = _object(template, "spec", "spec"), _object(template, "metadata", "metadata")
    if spec.get("restartPolicy", "Always") != "Always":
        raise TemplateError(
            f"spec.parameterServers.template.spec.restartPolicy is {spec['restartPolicy']!r}: leave it out or"
            " say Always; a server that ends comes back in place"
        )
    owned.check_metadata(
        "spec.parameterServers.template.metadata",
        _object(meta, "labels", "metadata.labels"),
        _object(meta, "annotations", "metadata.annotations"),
    )
    _from_workers(job, spec)
    container = _container(spec)
    container.setdefault("image", image)
    container.setdefault("imagePullPolicy", pull_policy)
    container.setdefault("command", ["python", "-m", "springtide_ps"])
    container["env"] = _environment(job, container, slot, attempt, coordinator_address, _leave_seconds(spec))
    container.setdefault("ports", []).extend(
        port
        for port in (
            {"name": "parameters", "containerPort": names.PARAMETER_SERVER_PORT},
            {"name": "metrics", "containerPort": names.PARAMETER_SERVER_METRICS_PORT},
        )
        if port["name"] not in [one.get("name") for one in container["ports"] if isinstance(one, dict)]
    )
    _defaults(job, spec, container)
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": names.server_name(job.name, slot, attempt),
            "namespace": job.namespace,
            "labels": {
                **names.labels(job.name, names.ROLE_PARAMETER_SERVER),
                **job.spec.pod_metadata.labels,
                **_object(meta, "labels", "metadata.labels"),
                names.LABEL_SLOT: str(slot),
                names.LABEL_ATTEMPT: str(attempt),
            },
            # The disruption budget and the way a server leaves see to it that nothing is lost.
            "annotations": {
                names.ANNOTATION_SAFE_TO_EVICT: "true",
                names.ANNOTATION_DEFAULT_CONTAINER: str(container["name"]),
                **job.spec.pod_metadata.annotations,
                **_object(meta, "annotations", "metadata.annotations"),
                names.ANNOTATION_TEMPLATE: server_template_hash(job),
                names.ANNOTATION_KEY: job.keys[0].name,
            },
            "ownerReferences": [job.owner_reference],
        },
        "spec": spec,
    }
    gang.mark(job, pod)
    kueue.place(job, pod, kueue.SERVERS)
    return pod


def _from_workers(job: Job, spec: Object) -> None:
    if not isinstance(spec.get("tolerations", []), list):
        raise TemplateError("spec.parameterServers.template.spec.tolerations: must be a list")
    workers = job.spec.workers.template.get("spec")
    follow_workers(workers if isinstance(workers, dict) else {}, spec)  # the worker's own check says so


def _container(spec: Object) -> Object:
    where = "spec.parameterServers.template.spec.containers"
    containers = spec.setdefault("containers", [])
    if not isinstance(containers, list) or not all(isinstance(one, dict) for one in containers):
        raise TemplateError(f"{where}: must be a list of containers")
    if not containers:
        containers.append({"name": CONTAINER})
    containers[0].setdefault("name", CONTAINER)
    main: Object = next((one for one in containers if one.get("name") == CONTAINER), containers[0])
    for key, kind in (("env", list), ("ports", list), ("resources", dict), ("securityContext", dict)):
        if not isinstance(main.get(key) or kind(), kind):
            raise TemplateError(f"{where}: {key} of {main['name']!r} must be {_A[kind]}")
    return main


_A = {list: "a list", dict: "an object"}


def _leave_seconds(spec: Object) -> int:
    """How long a server that is told to end may wait to be let go, before it is killed."""
    grace = spec.setdefault("terminationGracePeriodSeconds", GRACE_SECONDS)
    if not isinstance(grace, int) or grace < 0:
        raise TemplateError(
            "spec.parameterServers.template.spec.terminationGracePeriodSeconds: must be a number of seconds"
        )
    return max(1, grace - GRACE_MARGIN_SECONDS)


def _environment(
    job: Job, container: Object, slot: int, attempt: int, address: str, leave_seconds: int
) -> list[Object]:
    values = {
        "SPRINGTIDE_COORDINATOR": address,
        "SPRINGTIDE_SLOT": slot,
        "SPRINGTIDE_ATTEMPT": attempt,
        "SPRINGTIDE_PS_PORT": names.PARAMETER_SERVER_PORT,
        "SPRINGTIDE_METRICS_PORT": names.PARAMETER_SERVER_METRICS_PORT,
        "SPRINGTIDE_PS_LEAVE_SECONDS": leave_seconds,
    }
    key = job.keys[0]
    own = common_environment(job, names.ROLE_PARAMETER_SERVER, key)
    own += [{"name": key, "value": str(value)} for key, value in values.items()]
    own += [*certificate_environment(job, key), *heartbeat_environment(job)]
    if job.tls:
        own.append(from_secret(job, "SPRINGTIDE_TLS_CA", authority_entry(key), key))
    own += former_keys_environment(job, "token", "ca.crt", "tls.crt", "tls.key")
    owned.check_server_environment(container, own)
    return [*own, *(container.get("env") or [])]


def _defaults(job: Job, spec: Object, container: Object) -> None:
    """Fill in fields where the template is silent."""
    spec["restartPolicy"] = "Always"
    spec.setdefault("enableServiceLinks", False)
    if "serviceAccountName" not in spec and "serviceAccount" not in spec:
        spec.setdefault("automountServiceAccountToken", False)
    security = _object(spec, "securityContext", "spec.securityContext")
    # As the image's own user, or the one that the cluster assigns.
    security.setdefault("runAsNonRoot", True)
    security.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    own = container.setdefault("securityContext", {})
    own.setdefault("allowPrivilegeEscalation", False)
    own.setdefault("capabilities", {"drop": ["ALL"]})
    labels = {names.LABEL_JOB: job.name, names.LABEL_ROLE: names.ROLE_PARAMETER_SERVER}
    spec.setdefault(
        "topologySpreadConstraints",
        [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels},
            }
        ],
    )
    probe = {"httpGet": {"path": "/metrics", "port": "metrics"}, "timeoutSeconds": 5}
    startup = startup_probe(names.PARAMETER_SERVER_METRICS_PORT, "/metrics", START_SECONDS)
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    container.setdefault("startupProbe", startup)
    container.setdefault("livenessProbe", {**probe, "periodSeconds": 10, "failureThreshold": 6})
    container.setdefault("resources", {"requests": {"cpu": "100m", "memory": "256Mi"}})


def _object(parent: Object, key: str, where: str) -> Object:
    """parent[key], made where absent. Raises TemplateError where it is no object."""
    value = parent.get(key)
    if value is None:
        value = parent[key] = {}
    if not isinstance(value, dict):
        raise TemplateError(f"spec.parameterServers.template.{where}: must be an object")
    return value
