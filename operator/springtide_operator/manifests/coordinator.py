"""The coordinator's pod and Service, and the job's Secret."""

from __future__ import annotations

import base64
import copy
import hashlib
from collections.abc import Mapping
from typing import Any

from springtide_operator.api import names
from springtide_operator.api.job import Job, JobKey
from springtide_operator.manifests import gang, kueue
from springtide_operator.manifests.placement import follow_workers
from springtide_operator.manifests.startup import startup_probe
from springtide_operator.manifests.worker import (
    avoid_node,
    common_environment,
    former_keys_environment,
    from_secret,
    hash_of,
)

STATE_DIR = "/var/run/springtide"
_SMALL_JOB = 32
"""Processes that the least requests are enough for."""
_MOST_MILLICORES = 2000
START_SECONDS = 65  # from its process to its answer, on a machine with other work; then it is started again

Object = dict[str, Any]


def secret(job: Job, data: Mapping[str, str]) -> Object:
    """Return the Secret of the job's newest key, from which its pods take SPRINGTIDE_TOKEN.

    Args:
        job: the TrainingJob.
        data: `token`; with TLS also `ca.crt`, `tls.crt` and `tls.key`, in PEM.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {
            "name": names.secret_name(job.name, job.uid, job.keys[0].name),
            "namespace": job.namespace,
            "labels": names.labels(job.name),
            "ownerReferences": [job.owner_reference],
        },
        "data": {key: base64.b64encode(value.encode()).decode() for key, value in data.items()},
    }


def service(job: Job, incarnation: int, cluster_ip: str | None = None) -> Object:
    """Return the address of the coordinator, for life: the Service selects the pod of one incarnation, ready
    or not.

    Args:
        job: the TrainingJob.
        incarnation: number of the coordinator.
        cluster_ip: the address that workers were given, where the Service has to be made again; None: any.
    """
    spec: Object = {
        "type": "ClusterIP",
        "publishNotReadyAddresses": True,
        "selector": {
            names.LABEL_JOB: job.name,
            names.LABEL_ROLE: names.ROLE_COORDINATOR,
            names.LABEL_INCARNATION: str(incarnation),
        },
        "ports": [
            {
                "name": "grpc",
                "port": names.COORDINATOR_PORT,
                "targetPort": names.COORDINATOR_PORT,
                "protocol": "TCP",
            }
        ],
    }
    if cluster_ip:
        spec["clusterIP"] = cluster_ip
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": names.service_name(job.name),
            "namespace": job.namespace,
            "labels": names.labels(job.name, names.ROLE_COORDINATOR),
            "ownerReferences": [job.owner_reference],
        },
        "spec": spec,
    }


def certificate_environment(job: Job, key: JobKey) -> list[Object]:
    """Return a serving process's variables for the job's certificate and its key; empty where the job has no
    TLS.

    Args:
        job: the TrainingJob.
        key: that the pod is made with.
    """
    if not job.tls:
        return []
    return [
        from_secret(job, "SPRINGTIDE_TLS_CERTIFICATE", "tls.crt", key),
        from_secret(job, "SPRINGTIDE_TLS_KEY", "tls.key", key),
    ]


def heartbeat_environment(job: Job) -> list[Object]:
    """Return the variable of a process that watches others, where the manifest says a heartbeat limit."""
    seconds = job.spec.failure_policy.heartbeat_seconds
    return [] if seconds is None else [{"name": "SPRINGTIDE_KEEPALIVE_SECONDS", "value": str(seconds)}]


def coordinator_template_hash(job: Job) -> str:
    """12 hex digits of what its pod is made of: where it may be placed, its image and its resources."""
    asked = job.spec.coordinator
    made_of = {
        name: value for name, value in (("image", asked.image), ("resources", asked.resources)) if value
    }
    return hash_of(_placement(job) | made_of)


def _placement(job: Job) -> Object:
    """Return where its pod may be placed: as `spec.coordinator` says, else as the workers' are."""
    asked = job.spec.coordinator
    fields: Object = {
        "nodeSelector": asked.node_selector,
        "tolerations": asked.tolerations,
        "affinity": asked.affinity,
        "priorityClassName": asked.priority_class_name,
    }
    spec = {name: copy.deepcopy(value) for name, value in fields.items() if value is not None}
    follow_workers(job.spec.workers.template.get("spec") or {}, spec)
    return spec


def resources(job: Job) -> Object:
    """Return the container's resources: what is asked for, and the rest by the number of processes.

    Measured with `python -m benchmarks.coordinator_scale`; docs/install.md has the table.

    Args:
        job: the TrainingJob.
    """
    beyond = max(0, job.spec.workers.processes_connected - _SMALL_JOB)
    asked = job.spec.coordinator.resources or {}
    requests = {"cpu": f"{min(50 + beyond, _MOST_MILLICORES)}m", "memory": f"{96 + beyond // 4}Mi"}
    limits = {"memory": f"{512 + beyond}Mi"}
    # A limit alone is the request, too, as Kubernetes takes it.
    for name in set(asked.get("limits") or {}) - set(asked.get("requests") or {}):
        requests.pop(name, None)
    for name in set(asked.get("requests") or {}) - set(asked.get("limits") or {}):
        limits.pop(name, None)  # one below the request would be refused
    return asked | {
        "requests": requests | (asked.get("requests") or {}),
        "limits": limits | (asked.get("limits") or {}),
    }


def _environment(job: Job, incarnation: int, operators_token: str) -> list[Object]:
    """Return the variables of the coordinator's container.

    Args:
        job: the TrainingJob.
        incarnation: number of the coordinator.
        operators_token: by which it knows the operator; it gets the hash alone. "" for none.
    """
    workers = job.spec.workers
    values = {
        "SPRINGTIDE_PORT": names.COORDINATOR_PORT,
        "SPRINGTIDE_METRICS_PORT": names.COORDINATOR_METRICS_PORT,
        "SPRINGTIDE_INCARNATION": incarnation,
        "SPRINGTIDE_STATE_DIR": STATE_DIR,
        **(
            {"SPRINGTIDE_OPERATOR_DIGEST": hashlib.sha256(operators_token.encode()).hexdigest()}
            if operators_token
            else {}
        ),
        "SPRINGTIDE_TARGET": workers.replicas * workers.processes_per_pod,
        "SPRINGTIDE_MINIMUM": workers.min_replicas * workers.processes_per_pod,
        "SPRINGTIDE_MAXIMUM": workers.maximum * workers.processes_per_pod,
        "SPRINGTIDE_STANDBY": workers.standby * workers.processes_per_pod,
        "SPRINGTIDE_SERVERS": job.spec.servers,
    }
    if job.spec.strategy.consistency is not None:
        # Until the operator's first call: what is edited meanwhile comes with that.
        values["SPRINGTIDE_CONSISTENCY"] = job.spec.strategy.consistency.value
        values["SPRINGTIDE_STALENESS"] = job.spec.strategy.parameter_server.staleness
    if job.spec.checkpoint is not None:
        values["SPRINGTIDE_CHECKPOINT_SECONDS"] = job.spec.checkpoint.interval_seconds
    return [
        *common_environment(job, names.ROLE_COORDINATOR, job.keys[0]),
        *certificate_environment(job, job.keys[0]),
        *former_keys_environment(job, "token", "tls.crt", "tls.key"),
        *heartbeat_environment(job),
        *({"name": key, "value": str(value)} for key, value in values.items()),
    ]


def _container(job: Job, image: str, pull_policy: str, environment: list[Object]) -> Object:
    """Return the coordinator's container, which may write to its state's volume alone.

    Args:
        job: the TrainingJob.
        image: of the coordinator, where the manifest names none.
        pull_policy: of the image.
        environment: its variables.
    """
    probe = {"httpGet": {"path": "/healthz", "port": names.COORDINATOR_METRICS_PORT}, "timeoutSeconds": 5}
    return {
        "name": "coordinator",
        "image": job.spec.coordinator.image or image,
        "imagePullPolicy": pull_policy,
        "command": ["python", "-m", "springtide_coordinator"],
        "env": environment,
        "ports": [
            {"name": "grpc", "containerPort": names.COORDINATOR_PORT},
            {"name": "metrics", "containerPort": names.COORDINATOR_METRICS_PORT},
        ],
        "volumeMounts": [{"name": "state", "mountPath": STATE_DIR}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "startupProbe": startup_probe(names.COORDINATOR_METRICS_PORT, "/healthz", START_SECONDS),
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
        "resources": resources(job),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def coordinator_pod(
    job: Job,
    incarnation: int,
    image: str = names.OPERATOR_IMAGE,
    pull_policy: str = "IfNotPresent",
    avoid: str | None = None,
    operators_token: str = "",
) -> Object:
    """Return the coordinator's pod.

    It meets PodSecurity `restricted`, carries no API token, and comes back in place when its process ends.

    Args:
        job: the TrainingJob.
        incarnation: number of the coordinator.
        image: of the coordinator.
        pull_policy: of the image.
        avoid: a node that it must not be on; None: any.
        operators_token: by which it knows the operator; the pod gets its hash alone. "" for none.
    """
    spec = _placement(job)
    if avoid is not None:
        avoid_node(spec, avoid)
    spec |= {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 5,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,  # as the image's own user, or the one that the cluster assigns
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [{"name": "state", "emptyDir": {}}],
        "containers": [_container(job, image, pull_policy, _environment(job, incarnation, operators_token))],
    }
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": names.coordinator_name(job.name, incarnation),
            "namespace": job.namespace,
            "labels": {
                **names.labels(job.name, names.ROLE_COORDINATOR),
                **job.spec.pod_metadata.labels,
                names.LABEL_INCARNATION: str(incarnation),
            },
            # Losing it costs nothing: no node has to stay up for its sake.
            "annotations": {
                names.ANNOTATION_SAFE_TO_EVICT: "true",
                names.ANNOTATION_DEFAULT_CONTAINER: names.ROLE_COORDINATOR,
                **job.spec.pod_metadata.annotations,
                names.ANNOTATION_TEMPLATE: coordinator_template_hash(job),
                names.ANNOTATION_KEY: ",".join(key.name for key in job.keys),
            },
            "ownerReferences": [job.owner_reference],
        },
        "spec": spec,
    }
    gang.mark(job, pod)
    kueue.place(job, pod, kueue.COORDINATOR)
    return pod
