"""What a plan asks the shell to do, each with its reason. All of them may be carried out twice without
harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class EnsureSecret:
    """POST the job's Secret; AlreadyExists is as good."""

    reason: str
    kind: ClassVar[str] = "ensure_secret"


@dataclass(frozen=True)
class ApplyNetworkPolicy:
    """Server-side apply of the job's NetworkPolicy."""

    reason: str
    kind: ClassVar[str] = "apply_network_policy"


@dataclass(frozen=True)
class ApplyService:
    """Server-side apply of the coordinator's Service, selecting one incarnation."""

    incarnation: int
    cluster_ip: str | None
    reason: str
    kind: ClassVar[str] = "apply_service"


@dataclass(frozen=True)
class DeleteService:
    """DELETE the coordinator's Service, if it is this job's; its address is free for others then."""

    reason: str
    kind: ClassVar[str] = "delete_service"


@dataclass(frozen=True)
class ApplyPodGroup:
    """Server-side apply of the job's PodGroup."""

    min_member: int
    version: str  # what the next observation calls it, once it is applied
    reason: str
    kind: ClassVar[str] = "apply_pod_group"


@dataclass(frozen=True)
class DeletePodGroup:
    """DELETE; that it is gone already is as good."""

    api_version: str
    name: str
    reason: str
    kind: ClassVar[str] = "delete_pod_group"


@dataclass(frozen=True)
class CreateWorkload:
    """POST the job's Workload; AlreadyExists is as good."""

    version: str
    reason: str
    kind: ClassVar[str] = "create_workload"


@dataclass(frozen=True)
class UpdateWorkload:
    """Write the Workload's spec anew, unless somebody else has changed it."""

    version: str
    reason: str
    kind: ClassVar[str] = "update_workload"


@dataclass(frozen=True)
class ReportWorkload:
    """Write the Workload's status: Finished, PodsReady, or Released (no pod of an evicted job is left)."""

    what: str
    reason: str
    succeeded: bool = False
    evicted: str = ""  # with Released: Kueue's reason of the eviction
    message: str = ""
    kind: ClassVar[str] = "report_workload"


@dataclass(frozen=True)
class DeleteWorkload:
    """DELETE with its uid as precondition."""

    name: str
    uid: str
    reason: str
    kind: ClassVar[str] = "delete_workload"


@dataclass(frozen=True)
class CreateCoordinator:
    """POST. The number stands in status before this is carried out. avoid: a node that it must not be on."""

    incarnation: int
    reason: str
    avoid: str | None = None
    kind: ClassVar[str] = "create_coordinator"


@dataclass(frozen=True)
class CreateWorker:
    """POST. Slot and attempt stand in status before this is carried out."""

    slot: int
    attempt: int
    address: str
    reason: str
    avoid: str | None = None  # name of a node that it must not be on
    kind: ClassVar[str] = "create_worker"


@dataclass(frozen=True)
class CreateServer:
    """POST of a parameter server's pod. Slot and attempt stand in status before this is carried out."""

    slot: int
    attempt: int
    address: str  # of the coordinator
    reason: str
    kind: ClassVar[str] = "create_server"


@dataclass(frozen=True)
class ApplyServerBudget:
    """Server-side apply of the disruption budget of so many parameter servers."""

    servers: int
    reason: str
    kind: ClassVar[str] = "apply_server_budget"


@dataclass(frozen=True)
class DeletePod:
    """Write the reason on the pod, then DELETE with its uid as precondition."""

    name: str
    uid: str
    because: str  # a DELETE_ constant, written on the pod
    reason: str
    force: bool = False  # do not wait for its node's word
    grace_seconds: int | None = None  # None: as its template says
    kind: ClassVar[str] = "delete_pod"


@dataclass(frozen=True)
class DeleteJob:
    """DELETE the job itself with its uid as precondition; Kubernetes collects what it made."""

    reason: str
    kind: ClassVar[str] = "delete_job"


Action = (
    EnsureSecret
    | ApplyNetworkPolicy
    | ApplyService
    | DeleteService
    | ApplyPodGroup
    | DeletePodGroup
    | CreateWorkload
    | UpdateWorkload
    | ReportWorkload
    | DeleteWorkload
    | CreateCoordinator
    | CreateWorker
    | CreateServer
    | ApplyServerBudget
    | DeletePod
    | DeleteJob
)


@dataclass(frozen=True)
class Event:
    """Posted after status was written."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True)
class Plan:
    """`status` is complete: what it lacks is removed. `wake_at`: unix seconds by which to plan again."""

    status: dict[str, Any]
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    wake_at: float | None = None
