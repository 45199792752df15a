"""The worker pod: the user's template, filled in where it is silent and never overridden where it speaks.

A field that would have to be overridden is refused (`owned`).
"""

from __future__ import annotations

import copy
import hashlib
import json
from decimal import Decimal
from typing import Any

from springtide_operator.api import names
from springtide_operator.api.all_reduce import Shard
from springtide_operator.api.elasticity import Balance
from springtide_operator.api.job import Job, JobKey
from springtide_operator.api.model import StrategyType
from springtide_operator.api.quantities import quantity
from springtide_operator.manifests import gang, kueue, owned
from springtide_operator.manifests.errors import TemplateError as TemplateError
from springtide_operator.manifests.init_process import with_init
from springtide_operator.manifests.shape import check_template

GRACE_SECONDS = 120
COLLECTIVE_SECONDS = 1800  # the workers' own default
SHM_VOLUME = "springtide-shm"
SHM_PATH = "/dev/shm"

Object = dict[str, Any]


def template_hash(job: Job) -> str:
    """12 hex digits; workers of another hash were made from an older template."""
    return hash_of(job.spec.workers.template)


def hash_of(template: Object) -> str:
    """12 hex digits."""
    text = json.dumps(template, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def worker_pod(
    job: Job, slot: int, attempt: int, coordinator_address: str, avoid: str | None = None
) -> Object:
    """Return the pod of one worker.

    Args:
        job: the TrainingJob.
        slot: which of the wanted workers it is, from 0.
        attempt: number of the pod among those of the slot, from 0.
        coordinator_address: of the coordinator's Service.
        avoid: a node that it must not be on; None: any.

    Raises:
        TemplateError: no pod can be made of the template; the place is named.
    """
    check_template("spec.workers.template", job.spec.workers.template)
    template = copy.deepcopy(job.spec.workers.template)
    spec = _typed(template, "spec", dict, "spec")
    meta = _typed(template, "metadata", dict, "metadata")
    container = _main_container(spec)
    labels, annotations = _strings(meta, "labels"), _strings(meta, "annotations")
    owned.check_metadata("spec.workers.template.metadata", labels, annotations, {names.ANNOTATION_INIT})
    more = job.spec.pod_metadata
    owned.check_metadata("spec.podMetadata", more.labels, more.annotations)
    policy = spec.get("restartPolicy", "Never")
    if policy != "Never":
        raise TemplateError(
            f"spec.workers.template.spec.restartPolicy is {policy!r}: leave it out or say Never;"
            " the operator replaces workers that fail"
        )
    spec["restartPolicy"] = "Never"
    spec.setdefault("terminationGracePeriodSeconds", GRACE_SECONDS)
    spec.setdefault("enableServiceLinks", False)
    if "serviceAccountName" not in spec and "serviceAccount" not in spec:
        spec.setdefault("automountServiceAccountToken", False)
    _typed(spec, "securityContext", dict, "spec.securityContext").setdefault(
        "seccompProfile", {"type": "RuntimeDefault"}
    )
    before = _typed(spec, "initContainers", list, "spec.initContainers") if "initContainers" in spec else []
    for one in (container, *before):
        if isinstance(one, dict):
            one.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    termination_log = container.setdefault("terminationMessagePath", names.TERMINATION_LOG)
    _shared_memory(spec, container)
    _metrics_port(spec, container)
    if avoid is not None:
        avoid_node(spec, avoid)
    _launcher(job.spec.workers.processes_per_pod, container)
    with_init(container, annotations)
    grace = spec["terminationGracePeriodSeconds"]
    container["env"] = _environment(
        job, container, slot, attempt, coordinator_address, termination_log, str(grace)
    )
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": names.worker_name(job.name, slot, attempt),
            "namespace": job.namespace,
            "labels": {
                **names.labels(job.name, names.ROLE_WORKER),
                **more.labels,
                **labels,
                names.LABEL_SLOT: str(slot),
                names.LABEL_ATTEMPT: str(attempt),
            },
            "annotations": {
                names.ANNOTATION_SAFE_TO_EVICT: "true",
                names.ANNOTATION_DEFAULT_CONTAINER: str(container["name"]),
                **more.annotations,
                **annotations,
                names.ANNOTATION_TEMPLATE: template_hash(job),
                names.ANNOTATION_KEY: job.keys[0].name,
            },
            "ownerReferences": [job.owner_reference],
        },
        "spec": spec,
    }
    gang.mark(job, pod)
    kueue.place(job, pod, kueue.WORKERS)
    return pod


def main_container_name(template: Object) -> str:
    """Name of the container that runs the script: 'worker', or else the first. Raises TemplateError."""
    return str(_main_container(copy.deepcopy(_typed(template, "spec", dict, "spec")))["name"])


def memory_limit(job: Job) -> Decimal | None:
    """Return the memory limit, in bytes, of the container that runs the script; None without a readable
    one.
    """
    template = copy.deepcopy(job.spec.workers.template)
    try:
        container = _main_container(_typed(template, "spec", dict, "spec"))
        limits = _typed(
            _typed(container, "resources", dict, "spec.containers[].resources"),
            "limits",
            dict,
            "spec.containers[].resources.limits",
        )
        return quantity(limits["memory"]) if "memory" in limits else None
    except (TemplateError, ValueError):
        return None  # the pods' own check says so


def _main_container(spec: Object) -> Object:
    containers = spec.get("containers")
    where = "spec.workers.template.spec.containers"
    if not isinstance(containers, list) or not containers:
        raise TemplateError(f"{where}: name at least one container, the one that runs the training script")
    for index, container in enumerate(containers):
        if not isinstance(container, dict):
            raise TemplateError(f"{where}[{index}]: must be an object")
    if not containers[0].get("name"):
        containers[0]["name"] = "worker"
    main: Object = next((c for c in containers if c.get("name") == "worker"), containers[0])
    if not main.get("image"):
        raise TemplateError(f"{where}: container {main['name']!r} has no image")
    return main


def avoid_node(spec: Object, node: str) -> None:
    """Keep a pod off one node, in addition to what its node affinity asks for.

    By the node's own name: its hostname label may be another. Terms are alternatives, so each one gets it;
    one that is empty matches no node, and is left so.

    Args:
        spec: of the pod; it is changed in place.
        node: its name.

    Raises:
        TemplateError: the template's affinity has a part of a wrong type.
    """
    where = "spec.affinity.nodeAffinity"
    affinity = _typed(spec, "affinity", dict, "spec.affinity")
    node_affinity = _typed(affinity, "nodeAffinity", dict, where)
    kind = "requiredDuringSchedulingIgnoredDuringExecution"
    required = _typed(node_affinity, kind, dict, f"{where}.{kind}")
    terms = _typed(required, "nodeSelectorTerms", list, f"{where}.{kind}.nodeSelectorTerms")
    own: Object = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [node]}]}
    if not terms:
        terms.append(own)
        return
    for term in terms:
        if not isinstance(term, dict):
            raise TemplateError(
                f"spec.workers.template.{where}.{kind}.nodeSelectorTerms: each must be an object"
            )
        if term:
            fields = _typed(term, "matchFields", list, f"{where}.{kind}.nodeSelectorTerms[].matchFields")
            fields += own["matchFields"]


def _shared_memory(spec: Object, container: Object) -> None:
    mounts = _typed(container, "volumeMounts", list, "spec.containers[].volumeMounts")
    if any(isinstance(m, dict) and str(m.get("mountPath", "")).rstrip("/") == SHM_PATH for m in mounts):
        return
    volumes = _typed(spec, "volumes", list, "spec.volumes")
    if any(isinstance(volume, dict) and volume.get("name") == SHM_VOLUME for volume in volumes):
        raise TemplateError(
            f"spec.workers.template.spec.volumes: the name {SHM_VOLUME!r} is taken by Springtide;"
            f" rename the volume, or mount it at {SHM_PATH}"
        )
    # No sizeLimit: its pages count as the container's memory, whose limit bounds them, and the kubelet makes
    # it no larger than that. Without such a limit the heap has none either, and a guess would end loaders.
    volumes.append({"name": SHM_VOLUME, "emptyDir": {"medium": "Memory"}})
    mounts.append({"name": SHM_VOLUME, "mountPath": SHM_PATH})


def _metrics_port(spec: Object, container: Object) -> None:
    ports = _typed(container, "ports", list, "spec.containers[].ports")
    taken = any(
        isinstance(port, dict)
        and (port.get("containerPort") == names.WORKER_METRICS_PORT or port.get("name") == "metrics")
        for port in ports
    )
    # With hostNetwork a containerPort is a claim on the node: two workers could not share one.
    if not taken and not spec.get("hostNetwork"):
        ports.append({"name": "metrics", "containerPort": names.WORKER_METRICS_PORT})
    if not ports:
        del container["ports"]


def _launcher(processes: int, container: Object) -> None:
    """Put the launcher before the container's command if the pod has several processes, unless it is one
    already.
    """
    if processes == 1:
        return
    command = _typed(container, "command", list, "spec.containers[].command")
    if not command:
        raise TemplateError(
            f"spec.workers.template.spec.containers: container {container['name']!r} has no command, and"
            f" workers.processesPerPod is {processes}: name the command, so that it can be run once for each"
            " process (an image's own entry point cannot be seen from here)"
        )
    words = [str(word) for word in command]
    own = words[0].rsplit("/", 1)[-1] == "springtide" and words[1:2] == ["launch"]
    if not own and "springtide.launch" not in words[:4]:
        container["command"] = ["springtide", "launch", "--processes", str(processes), "--", *command]


def _environment(
    job: Job,
    container: Object,
    slot: int,
    attempt: int,
    coordinator_address: str,
    termination_log: str,
    grace_seconds: str,
) -> list[Object]:
    key = job.keys[0]
    own = [
        *common_environment(job, names.ROLE_WORKER, key),
        {"name": "SPRINGTIDE_COORDINATOR", "value": coordinator_address},
        *([from_secret(job, "SPRINGTIDE_TLS_CA", authority_entry(key), key)] if job.tls else []),
        *(former_keys_environment(job, "token", "ca.crt") if job.spec.servers else []),
        {"name": "SPRINGTIDE_SLOT", "value": str(slot)},
        {"name": "SPRINGTIDE_ATTEMPT", "value": str(attempt)},
        {"name": "SPRINGTIDE_BACKEND", "value": job.spec.strategy.all_reduce.backend.value},
        {"name": "SPRINGTIDE_BUCKET_MIB", "value": str(job.spec.strategy.all_reduce.bucket_mib)},
        *_compression(job),
        *_strategy(job),
        *_shard(job),
        *_balance(job),
        *_exact(job),
        *_checkpoint(job),
        *_collectives(job),
        {"name": "SPRINGTIDE_TERMINATION_LOG", "value": termination_log},
        {"name": "SPRINGTIDE_GRACE_SECONDS", "value": grace_seconds},
        {"name": "SPRINGTIDE_METRICS_PORT", "value": str(names.WORKER_METRICS_PORT)},
        *_processes(job),
    ]
    users = _typed(container, "env", list, "spec.containers[].env")
    owned.check_worker_environment(container, own)
    threads = _threads(container, job.spec.workers.processes_per_pod)
    if threads is None and job.spec.strategy.all_reduce.exact:
        threads = 1  # one number on all nodes, whatever their size
    if threads is not None and not any(entry["name"] == "OMP_NUM_THREADS" for entry in users):
        own.append({"name": "OMP_NUM_THREADS", "value": str(threads)})
    return [*own, *users]


def _compression(job: Job) -> list[Object]:
    strategy = job.spec.strategy
    servers = strategy.type is StrategyType.PARAMETER_SERVER
    pushes = strategy.parameter_server.compression.value
    kinds = {"SPRINGTIDE_COMPRESSION": pushes if servers else strategy.all_reduce.compression.value}
    if strategy.type is StrategyType.HYBRID:
        kinds["SPRINGTIDE_ROWS_COMPRESSION"] = pushes
    own: list[Object] = [{"name": name, "value": kind} for name, kind in kinds.items() if kind != "None"]
    if servers and pushes == "TopK":
        own.append({"name": "SPRINGTIDE_TOP_K_RATIO", "value": str(strategy.parameter_server.top_k_ratio)})
    return own


def _shard(job: Job) -> list[Object]:
    kind = job.spec.strategy.all_reduce.shard
    if kind is Shard.NONE:
        return []
    node = {"fieldRef": {"fieldPath": "spec.nodeName"}}  # the two copies of a shard are on two of them
    return [
        {"name": "SPRINGTIDE_SHARD", "value": kind.value},
        {"name": "SPRINGTIDE_NODE", "valueFrom": node},
    ]


def _balance(job: Job) -> list[Object]:
    kind = job.spec.elasticity.balance
    return [] if kind is Balance.EVEN else [{"name": "SPRINGTIDE_BALANCE", "value": kind.value}]


def _processes(job: Job) -> list[Object]:
    count = job.spec.workers.processes_per_pod
    return [] if count == 1 else [{"name": "SPRINGTIDE_PROCESSES", "value": str(count)}]


def _collectives(job: Job) -> list[Object]:
    """A collective must not give up before a hang is noticed: that would blame whoever waits."""
    limit = 2 * job.spec.failure_policy.hang_timeout_seconds
    if limit <= COLLECTIVE_SECONDS:
        return []
    return [{"name": "SPRINGTIDE_COLLECTIVE_SECONDS", "value": str(limit)}]


def _strategy(job: Job) -> list[Object]:
    values = {"SPRINGTIDE_STRATEGY": job.spec.strategy.type.value}
    if job.spec.servers:
        servers = job.spec.strategy.parameter_server
        values["SPRINGTIDE_REPLICATION"] = str(servers.replication)
        values["SPRINGTIDE_CONSISTENCY"] = servers.consistency.value
        values["SPRINGTIDE_STALENESS"] = str(servers.staleness)
        if not servers.early_values:
            values["SPRINGTIDE_EARLY_VALUES"] = "0"
        if job.spec.workers.group_size > 1:
            values["SPRINGTIDE_GROUP_SIZE"] = str(job.spec.workers.group_size)
    return [{"name": key, "value": value} for key, value in values.items()]


def _checkpoint(job: Job) -> list[Object]:
    """Return the variables that name the storage of checkpoints; the worker makes the job's own folder below
    it.
    """
    checkpoint = job.spec.checkpoint
    if checkpoint is None:
        return []
    values = {
        "SPRINGTIDE_CHECKPOINT_URI": checkpoint.uri,
        "SPRINGTIDE_CHECKPOINT_SECONDS": checkpoint.interval_seconds,
        "SPRINGTIDE_CHECKPOINT_KEEP": checkpoint.keep,
        "SPRINGTIDE_RESTORE_FROM": checkpoint.restore_from,
    }
    return [{"name": name, "value": str(value)} for name, value in values.items() if value is not None]


def _exact(job: Job) -> list[Object]:
    """Return the variables that equal bits need before torch is imported; empty without exact sums."""
    if not job.spec.strategy.all_reduce.exact:
        return []
    return [
        {"name": "SPRINGTIDE_LOGICAL_WORKERS", "value": str(job.spec.strategy.all_reduce.logical_workers)},
        {"name": "MKL_CBWR", "value": "AVX2,STRICT"},
        {"name": "CUBLAS_WORKSPACE_CONFIG", "value": ":4096:8"},
    ]


def from_secret(job: Job, name: str, entry: str, key: JobKey) -> Object:
    """Return a variable that is an entry of one of the job's Secrets.

    Args:
        job: the TrainingJob.
        name: of the variable.
        entry: in the Secret.
        key: whose Secret it is.
    """
    reference = {"name": names.secret_name(job.name, job.uid, key.name), "key": entry}
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}


def authority_entry(key: JobKey) -> str:
    """Return where a Secret holds what clients trust: once the certificate itself, which had no end."""
    return "ca.crt" if key.certificate_ends else "tls.crt"


_FORMER = {"token": "TOKEN", "ca.crt": "CA", "tls.crt": "CERTIFICATE", "tls.key": "KEY"}


def former_keys_environment(job: Job, *entries: str) -> list[Object]:
    """Return the variables for keys that other pods of the job were made with.

    A Secret that somebody deleted keeps no pod from starting.

    Args:
        job: with its keys.
        entries: of the Secrets, as they are called there; all but the token are for jobs with TLS.
    """
    found = []
    for number, key in enumerate(job.keys[1:], 1):
        for entry in entries:
            if entry == "token" or job.tls:
                at = authority_entry(key) if entry == "ca.crt" else entry
                found.append(from_secret(job, f"SPRINGTIDE_FORMER_{_FORMER[entry]}_{number}", at, key))
    for variable in found:
        variable["valueFrom"]["secretKeyRef"]["optional"] = True
    return found


def common_environment(job: Job, role: str, key: JobKey) -> list[Object]:
    """Return the variables of every pod of a job.

    Args:
        job: the pod's.
        role: of the pod.
        key: that the pod is made with.
    """

    def field(name: str, path: str) -> Object:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    return [
        {"name": "SPRINGTIDE_JOB", "value": job.name},
        {"name": "SPRINGTIDE_NAMESPACE", "value": job.namespace},
        {"name": "SPRINGTIDE_JOB_UID", "value": job.uid},
        {"name": "SPRINGTIDE_ROLE", "value": role},
        from_secret(job, names.TOKEN, "token", key),
        field("SPRINGTIDE_POD_NAME", "metadata.name"),
        field("SPRINGTIDE_POD_UID", "metadata.uid"),
        field("SPRINGTIDE_POD_IP", "status.podIP"),
        field("SPRINGTIDE_NODE_NAME", "spec.nodeName"),
    ]


def _threads(container: Object, processes: int) -> int | None:
    """Whole CPUs of the container's limit for each process, at least 1; None without one."""
    resources = _typed(container, "resources", dict, "spec.containers[].resources")
    limits = _typed(resources, "limits", dict, "spec.containers[].resources.limits")
    if not limits:
        del resources["limits"]
    if not resources:
        del container["resources"]
    cpu = str(limits.get("cpu", ""))
    if not cpu:
        return None
    try:
        return max(1, int(quantity(cpu) / processes))
    except ValueError:
        return None  # `check_template` has said so


def _typed(parent: Object, key: str, kind: type, where: str) -> Any:
    """parent[key], made where absent. Raises TemplateError where it has another type."""
    value = parent.get(key)
    if value is None:
        value = parent[key] = kind()
    if not isinstance(value, kind):
        expected = "an object" if kind is dict else "a list"
        raise TemplateError(f"spec.workers.template.{where}: must be {expected}, not {type(value).__name__}")
    return value


def _strings(meta: Object, key: str) -> dict[str, str]:
    return {str(k): str(v) for k, v in _typed(meta, key, dict, f"metadata.{key}").items()}
