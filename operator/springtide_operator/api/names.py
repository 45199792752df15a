"""Names that the API server, users and other programs know. Every name is built here and nowhere else."""

from __future__ import annotations

import re

GROUP = "springtide.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "TrainingJob"
PLURAL = "trainingjobs"
SINGULAR = "trainingjob"
SHORT_NAME = "stj"
TEMPLATE_KIND = "TrainingTemplate"
TEMPLATE_PLURAL = "trainingtemplates"
TEMPLATE_SHORT_NAME = "stt"
CLUSTER_TEMPLATE_KIND = "ClusterTrainingTemplate"
CLUSTER_TEMPLATE_PLURAL = "clustertrainingtemplates"
CLUSTER_TEMPLATE_SHORT_NAME = "cstt"
DEFAULT_CLASS = f"{GROUP}/operator"  # of jobs without spec.managedBy

PROGRAM_VERSION = "0.1.0"
USER_AGENT = f"springtide-operator/{PROGRAM_VERSION}"
OPERATOR_IMAGE = f"springtide/operator:{PROGRAM_VERSION}"
PARAMETER_SERVER_IMAGE = f"springtide/ps:{PROGRAM_VERSION}"

# A class of jobs: a name, with a domain before it where it is not one's own (Job of Kubernetes has the same).
CLASS_PATTERN = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"

MAX_JOB_NAME = 40
MAX_WORKERS = 1000

LABEL_NAME = "app.kubernetes.io/name"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_JOB = f"{GROUP}/job"
LABEL_ROLE = f"{GROUP}/role"
LABEL_SLOT = f"{GROUP}/slot"
LABEL_ATTEMPT = f"{GROUP}/attempt"
LABEL_INCARNATION = f"{GROUP}/incarnation"
MANAGER = "springtide-operator"  # of what it writes; also the beginning of its User-Agent
APP = "springtide"
OURS = LABEL_JOB  # whatever carries it: labels without our prefix are the user's to choose

UNREADABLE = f"{GROUP}/unreadable"  # key of an object that the operator could not read: why; never sent
ANNOTATION_DELETED_BECAUSE = f"{GROUP}/deleted-because"
ANNOTATION_TEMPLATE = f"{GROUP}/template-hash"
# Of a pod: the name of the key that it was made with; of a coordinator: of all that it knows, newest first.
ANNOTATION_KEY = f"{GROUP}/key"
ANNOTATION_KEY_TURN = f"{GROUP}/key-turn"  # of a job, for its user: another word, and it gets another key
ANNOTATION_INIT = f"{GROUP}/init"  # in a worker template: `none` leaves the command without an init process
# The cluster autoscaler spares nodes whose pods have an emptyDir or an owner unknown to it, unless told.
ANNOTATION_SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"
# `kubectl logs` and `exec` mean this one, wherever webhooks put containers of theirs.
ANNOTATION_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"

# APIs that a cluster may have: gang schedulers, Kueue.
VOLCANO_API = "scheduling.volcano.sh/v1beta1"
COSCHEDULING_API = "scheduling.x-k8s.io/v1alpha1"
# PodGroups of Kubernetes itself: 1.36 has v1alpha2, 1.37 the others. The first that is served is used.
POD_GROUP_GROUP = "scheduling.k8s.io"
POD_GROUP_V1ALPHA2 = f"{POD_GROUP_GROUP}/v1alpha2"
POD_GROUP_APIS = (f"{POD_GROUP_GROUP}/v1beta1", f"{POD_GROUP_GROUP}/v1alpha3", POD_GROUP_V1ALPHA2)
KUEUE_GROUP = "kueue.x-k8s.io"
KUEUE_V1BETA2 = f"{KUEUE_GROUP}/v1beta2"
KUEUE_V1BETA1 = f"{KUEUE_GROUP}/v1beta1"
KUEUE_APIS = (KUEUE_V1BETA2, KUEUE_V1BETA1)  # the first that is served is used
OPTIONAL_APIS = {  # with the resource that counts
    VOLCANO_API: "podgroups",
    COSCHEDULING_API: "podgroups",
    **dict.fromkeys(POD_GROUP_APIS, "podgroups"),  # up to 1.21 v1beta1 had priority classes only
    **dict.fromkeys(KUEUE_APIS, "workloads"),
}

KUEUE_GATE = "kueue.x-k8s.io/admission"  # scheduling gate of pods that Kueue admits one by one
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
LABEL_QUEUE_PRIORITY = "kueue.x-k8s.io/priority-class"
PREBUILT_WORKLOAD = "kueue.x-k8s.io/prebuilt-workload-name"  # label or annotation of a job
MULTIKUEUE_CLASS = "kueue.x-k8s.io/multikueue"  # spec.managedBy of jobs that run in other clusters
LABEL_QUEUE_JOB_UID = "kueue.x-k8s.io/job-uid"
ANNOTATION_WORKLOAD_VERSION = f"{GROUP}/workload-version"
# Kueue's words for a job that may grow while it is admitted: on the job, and on the Workloads of its sizes.
ANNOTATION_ELASTIC = f"{KUEUE_GROUP}/elastic-job"
ANNOTATION_SLICE_OF = f"{KUEUE_GROUP}/workload-slice-name"
ANNOTATION_REPLACES = f"{KUEUE_GROUP}/workload-slice-replacement-for"

ROLE_COORDINATOR = "coordinator"
ROLE_WORKER = "worker"
ROLE_PARAMETER_SERVER = "parameter-server"

COORDINATOR_PORT = 7070
COORDINATOR_METRICS_PORT = 9401
WORKER_METRICS_PORT = 9400
PARAMETER_SERVER_PORT = 7080
PARAMETER_SERVER_METRICS_PORT = 9402
OPERATOR_METRICS_PORT = 9402
TERMINATION_LOG = "/dev/termination-log"
TOKEN = "SPRINGTIDE_TOKEN"  # variable of the process that belongs to the job, in each of its pods

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_WORKER = re.compile(r"-worker-(\d{1,9})-(\d{1,9})$")
_SLICE = re.compile(r"-slice-(\d{1,9})$")
_SERVER = re.compile(r"-ps-(\d{1,9})-(\d{1,9})$")


def is_name(text: str) -> bool:
    """Whether an object of the API server may be called that (a DNS-1123 subdomain)."""
    return _NAME.fullmatch(text) is not None


def labels(job: str, role: str | None = None) -> dict[str, str]:
    """Return the labels of everything made for a job.

    On pods the user's own values for those without our prefix win.

    Args:
        job: its name.
        role: of a pod; None: of another object.
    """
    result = {LABEL_NAME: APP, LABEL_MANAGED_BY: MANAGER, LABEL_JOB: job}
    if role is not None:
        result[LABEL_ROLE] = role
    return result


def worker_name(job: str, slot: int, attempt: int) -> str:
    """Return the name of a worker's pod.

    Args:
        job: its name.
        slot: which of the wanted pods it is, from 0.
        attempt: number of the pod among those of the slot, from 0.
    """
    return f"{job}-worker-{slot}-{attempt}"


def parse_worker_name(name: str) -> tuple[int, int] | None:
    """(slot, attempt) of a worker pod's name; None where the name is not one."""
    found = _WORKER.search(name)
    return (int(found[1]), int(found[2])) if found else None


def server_name(job: str, slot: int, attempt: int) -> str:
    """Return the name of a parameter server's pod.

    Args:
        job: its name.
        slot: which of the wanted pods it is, from 0.
        attempt: number of the pod among those of the slot, from 0.
    """
    return f"{job}-ps-{slot}-{attempt}"


def parse_server_name(name: str) -> tuple[int, int] | None:
    """(slot, attempt) of a parameter server's pod; None where the name is not one."""
    found = _SERVER.search(name)
    return (int(found[1]), int(found[2])) if found else None


def coordinator_name(job: str, incarnation: int) -> str:
    """Return the name of a coordinator's pod.

    Args:
        job: its name.
        incarnation: the number that was raised before the pod.
    """
    return f"{job}-coordinator-{incarnation}"


def service_name(job: str) -> str:
    return f"{job}-coordinator"


def network_policy_name(job: str, uid: str) -> str:
    """Return the name of a job's NetworkPolicy.

    It has the uid in it, so that another owner's policy is never taken for this job's.

    Args:
        job: its name.
        uid: of the job.
    """
    return f"{job}-pods-{uid[:8]}"


def server_budget_name(job: str, uid: str) -> str:
    """Return the name of a job's disruption budget for servers, with the uid (see `network_policy_name`).

    Args:
        job: its name.
        uid: of the job.
    """
    return f"{job}-servers-{uid[:8]}"


def former_network_policy_name(job: str) -> str:
    """How policies were called before they carried the uid."""
    return f"{job}-pods"


def former_server_budget_name(job: str) -> str:
    """How budgets were called before they carried the uid."""
    return f"{job}-servers"


def pod_group_name(job: str, uid: str) -> str:
    """Return the name of a job's PodGroup.

    It has the uid in it, so that another owner's PodGroup is never taken for this job's.

    Args:
        job: its name.
        uid: of the job.
    """
    return f"{job}-{uid[:8]}"


def workload_name(job: str, uid: str, number: int = 0) -> str:
    """Return the name of Kueue's Workload of a job, with the uid as in `pod_group_name`.

    Args:
        job: its name.
        uid: of the job.
        number: how many Workloads were replaced before it, because the job grew.
    """
    return f"{job}-{uid[:8]}" + (f"-slice-{number}" if number else "")


def parse_workload_number(name: str) -> int:
    """How many Workloads were replaced before the one of that name; 0 for the first."""
    found = _SLICE.search(name)
    return int(found[1]) if found else 0


def secret_name(job: str, uid: str, key: str = "") -> str:
    """Return the name of a job's Secret.

    It has the uid in it: a Secret left by an earlier job of the same name is never taken for this job's.

    Args:
        job: its name.
        uid: of the job.
        key: the name of the key that it holds; "" in jobs of before keys had names.
    """
    return f"{job}-token-{uid[:8]}" + (f"-{key}" if key else "")


def worker_selector(job: str) -> str:
    """Return the selector that `kubectl scale`, an HPA and `status.workers.selector` use: workers only."""
    return f"{LABEL_JOB}={job},{LABEL_ROLE}={ROLE_WORKER}"
