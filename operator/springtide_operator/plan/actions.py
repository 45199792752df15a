"""Actions that a plan asks for, each with its reason. All of them may be carried out twice without harm.

An action has a title for people, a role under which refusals are filed, a turn, and the method of an
`Executor` that carries it out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Protocol

from springtide_operator.api import names
from springtide_operator.api.job import Job


class Turn(IntEnum):
    """The order in which the actions of one plan are carried out."""

    TOGETHER = 0  # none of these needs another, and all of them come before the first pod
    FIRST = 1  # one after another, as the plan has them
    DELETION = 2
    WORKER = 3  # in growing batches


class Executor(Protocol):
    """The shell's side of each action.

    All of them raise ApiError where the API server refuses, and TemplateError for a template of which no pod
    can be made; they return whether it was carried out.
    """

    async def make_secret(self, job: Job) -> bool:
        """POST the job's Secret; AlreadyExists is as good."""
        ...

    async def apply_network_policy(self, job: Job) -> bool:
        """Server-side apply of the job's NetworkPolicy."""
        ...

    async def apply_service(self, job: Job, incarnation: int, cluster_ip: str | None) -> bool:
        """Apply the coordinator's Service server-side, selecting one incarnation.

        Args:
            job: as the plan saw it.
            incarnation: number of the coordinator.
            cluster_ip: the address that workers were given; None: any.

        Returns:
            Whether it was carried out.
        """
        ...

    async def delete_service(self, job: Job) -> bool:
        """DELETE the coordinator's Service, if it is this job's."""
        ...

    async def apply_pod_group(self, job: Job, min_member: int, version: str) -> bool:
        """Apply the job's PodGroup server-side.

        Args:
            job: as the plan saw it.
            min_member: pods that are to be started together.
            version: of the group as it is wanted.

        Returns:
            Whether it was carried out.
        """
        ...

    async def delete_pod_group(self, job: Job, api_version: str, name: str) -> bool:
        """Delete the job's PodGroup; that it is gone already is as good.

        Args:
            job: as the plan saw it.
            api_version: of the scheduler's API.
            name: of the object.

        Returns:
            Whether it was carried out.
        """
        ...

    async def write_workload(self, job: Job, wanted: CreateWorkload | UpdateWorkload) -> bool:
        """POST a Workload of the job, or write its spec anew, unless somebody else has changed it.

        Args:
            job: as the plan saw it.
            wanted: which, and how many pods it asks for.

        Returns:
            Whether it was carried out.
        """
        ...

    async def report_workload(self, job: Job, report: ReportWorkload) -> bool:
        """Write the Workload's status.

        Args:
            job: as the plan saw it.
            report: what the status is to say.

        Returns:
            Whether it was carried out.
        """
        ...

    async def delete_workload(self, job: Job, name: str, uid: str) -> bool:
        """Delete the job's Workload, with its uid as precondition.

        Args:
            job: as the plan saw it.
            name: of the object.
            uid: of this very object.

        Returns:
            Whether it was carried out.
        """
        ...

    async def create_coordinator(self, job: Job, action: CreateCoordinator) -> bool:
        """Make the coordinator's pod.

        Args:
            job: as the plan saw it.
            action: with its number, its image and the node that it must not be on.

        Returns:
            Whether it was carried out.
        """
        ...

    async def create_worker(self, job: Job, action: CreateWorker) -> bool:
        """Make a worker's pod.

        Args:
            job: as the plan saw it.
            action: with its slot, attempt and address.

        Returns:
            Whether it was carried out.
        """
        ...

    async def create_server(self, job: Job, action: CreateServer) -> bool:
        """Make a parameter server's pod.

        Args:
            job: as the plan saw it.
            action: with its slot and attempt, the coordinator's address, and its image.

        Returns:
            Whether it was carried out.
        """
        ...

    async def apply_server_budget(self, job: Job, servers: int) -> bool:
        """Apply the disruption budget of the job's servers server-side.

        Args:
            job: as the plan saw it.
            servers: how many there are to be.

        Returns:
            Whether it was carried out.
        """
        ...

    async def delete_pod(self, job: Job, action: DeletePod) -> bool:
        """Write the reason on a pod, then delete it with its uid as precondition.

        Args:
            job: as the plan saw it.
            action: with the pod and the reason.

        Returns:
            Whether it was carried out.
        """
        ...

    async def delete_job(self, job: Job) -> bool:
        """DELETE the job itself with its uid as precondition."""
        ...


class BaseAction(ABC):
    """The base of all actions.

    kind: of the metric that counts them. role: what a refusal is filed under. title: what it does, in words.
    """

    kind: ClassVar[str]
    role: ClassVar[str]
    turn: ClassVar[Turn]
    title: ClassVar[str]

    def describe(self, job: str) -> str:
        """Say what it does for the job of this name."""
        return self.title

    @abstractmethod
    async def execute(self, on: Executor, job: Job) -> bool:
        """Carry the action out.

        Args:
            on: carries it out.
            job: as the plan saw it.

        Returns:
            Whether that was done.

        Raises:
            ApiError: the API server refuses.
            TemplateError: no pod can be made of a template.
        """


@dataclass(frozen=True)
class EnsureSecret(BaseAction):
    """POST the job's Secret; AlreadyExists is as good."""

    reason: str
    kind: ClassVar[str] = "ensure_secret"
    role: ClassVar[str] = "secret"
    turn: ClassVar[Turn] = Turn.TOGETHER
    title: ClassVar[str] = "makes the Secret"

    async def execute(self, on: Executor, job: Job) -> bool:
        """Make the Secret.

        Args:
            on: carries it out.
            job: as the plan saw it.

        Returns:
            Whether it was carried out.
        """
        return await on.make_secret(job)


@dataclass(frozen=True)
class ApplyNetworkPolicy(BaseAction):
    """Server-side apply of the job's NetworkPolicy."""

    reason: str
    kind: ClassVar[str] = "apply_network_policy"
    role: ClassVar[str] = "networkpolicy"
    turn: ClassVar[Turn] = Turn.TOGETHER
    title: ClassVar[str] = "applies the NetworkPolicy"

    async def execute(self, on: Executor, job: Job) -> bool:
        """Apply the NetworkPolicy.

        Args:
            on: carries it out.
            job: as the plan saw it.

        Returns:
            Whether it was carried out.
        """
        return await on.apply_network_policy(job)


@dataclass(frozen=True)
class ApplyService(BaseAction):
    """Server-side apply of the coordinator's Service, selecting one incarnation."""

    incarnation: int
    cluster_ip: str | None
    reason: str
    kind: ClassVar[str] = "apply_service"
    role: ClassVar[str] = "service"
    turn: ClassVar[Turn] = Turn.TOGETHER
    title: ClassVar[str] = "applies the Service"

    async def execute(self, on: Executor, job: Job) -> bool:
        """Apply the Service.

        Args:
            on: carries it out.
            job: as the plan saw it.

        Returns:
            Whether it was carried out.
        """
        return await on.apply_service(job, self.incarnation, self.cluster_ip)


@dataclass(frozen=True)
class DeleteService(BaseAction):
    """DELETE the coordinator's Service, if it is this job's; its address is free for others then."""

    reason: str
    kind: ClassVar[str] = "delete_service"
    role: ClassVar[str] = "service"
    turn: ClassVar[Turn] = Turn.DELETION
    title: ClassVar[str] = "deletes the coordinator's Service"

    async def execute(self, on: Executor, job: Job) -> bool:
        """Delete the Service.

        Args:
            on: carries it out.
            job: as the plan saw it.

        Returns:
            Whether it was carried out.
        """
        return await on.delete_service(job)


@dataclass(frozen=True)
class ApplyPodGroup(BaseAction):
    """Server-side apply of the job's PodGroup."""

    min_member: int
    version: str  # what the next observation calls it, once it is applied
    reason: str
    kind: ClassVar[str] = "apply_pod_group"
    role: ClassVar[str] = "podgroup"
    turn: ClassVar[Turn] = Turn.FIRST
    title: ClassVar[str] = "applies the PodGroup"

    async def execute(self, on: Executor, job: Job) -> bool:
        """Apply the PodGroup.

        Args:
            on: carries it out.
            job: as the plan saw it.

        Returns:
            Whether it was carried out.
        """
        return await on.apply_pod_group(job, self.min_member, self.version)


@dataclass(frozen=True)
class DeletePodGroup(BaseAction):
    """DELETE; that it is gone already is as good."""

    api_version: str
    name: str
    reason: str
    kind: ClassVar[str] = "delete_pod_group"
    role: ClassVar[str] = "podgroup"
    turn: ClassVar[Turn] = Turn.DELETION
    title: ClassVar[str] = "deletes the PodGroup"

    async def execute(self, on: Executor, job: Job) -> bool:
        """Delete the PodGroup.

        Args:
            on: carries it out.
            job: as the plan saw it.

        Returns:
            Whether it was carried out.
        """
        return await on.delete_pod_group(job, self.api_version, self.name)


@dataclass(frozen=True)
class CreateWorkload(BaseAction):
    """POST a Workload of the job; AlreadyExists is as good.

    `replaces`: the Workload whose place it takes once it is admitted, because the job is to grow. `counts`:
    pods by pod set, where they are not those of the spec.
    """

    version: str
    reason: str
    name: str = ""  # "": the job's first
    replaces: str = ""
    counts: tuple[tuple[str, int], ...] = ()
    kind: ClassVar[str] = "create_workload"
    role: ClassVar[str] = "workload"
    turn: ClassVar[Turn] = Turn.FIRST
    title: ClassVar[str] = "creates the Workload"

    async def execute(self, on: Executor, job: Job) -> bool:
        """Make the Workload.

        Args:
            on: carries it out.
            job: as the plan saw it.

        Returns:
            Whether it was carried out.
        """
        return await on.write_workload(job, self)


@dataclass(frozen=True)
class UpdateWorkload(BaseAction):
    """Write a Workload's spec anew, unless somebody else has changed it (see `CreateWorkload`)."""

    version: str
    reason: str
    name: str = ""
    replaces: str = ""
    counts: tuple[tuple[str, int], ...] = ()
    kind: ClassVar[str] = "update_workload"
    role: ClassVar[str] = "workload"
    turn: ClassVar[Turn] = Turn.FIRST
    title: ClassVar[str] = "updates the Workload"

    async def execute(self, on: Executor, job: Job) -> bool:
        """Write the Workload's spec anew.

        Args:
            on: carries it out.
            job: as the plan saw it.

        Returns:
            Whether it was carried out.
        """
        return await on.write_workload(job, self)


@dataclass(frozen=True)
class ReportWorkload(BaseAction):
    """Write a Workload's status: Finished, PodsReady, Released (no pod of an evicted job is left), or
    Reclaimed (the job needs fewer pods from now on).
    """

    what: str
    reason: str
    name: str = ""
    succeeded: bool = False
    evicted: str = ""  # with Released: Kueue's reason of the eviction
    message: str = ""
    counts: tuple[tuple[str, int], ...] = ()  # with Reclaimed: pods that are needed no more, by pod set
    kind: ClassVar[str] = "report_workload"
    role: ClassVar[str] = "workload"
    turn: ClassVar[Turn] = Turn.FIRST
    title: ClassVar[str] = "reports the Workload"

    async def execute(self, on: Executor, job: Job) -> bool:
        """Write the Workload's status.

        Args:
            on: carries it out.
            job: as the plan saw it.

        Returns:
            Whether it was carried out.
        """
        return await on.report_workload(job, self)


@dataclass(frozen=True)
class DeleteWorkload(BaseAction):
    """DELETE with its uid as precondition."""

    name: str
    uid: str
    reason: str
    kind: ClassVar[str] = "delete_workload"
    role: ClassVar[str] = "workload"
    turn: ClassVar[Turn] = Turn.FIRST
    title: ClassVar[str] = "deletes the Workload"

    async def execute(self, on: Executor, job: Job) -> bool:
        """Delete the Workload.

        Args:
            on: carries it out.
            job: as the plan saw it.

        Returns:
            Whether it was carried out.
        """
        return await on.delete_workload(job, self.name, self.uid)


@dataclass(frozen=True)
class CreateCoordinator(BaseAction):
    """POST. The number stands in status before this is carried out. avoid: a node that it must not be on."""

    incarnation: int
    reason: str
    avoid: str | None = None
    image: str = ""  # unless the manifest names one; "": the operator's own
    kind: ClassVar[str] = "create_coordinator"
    role: ClassVar[str] = "coordinator"
    turn: ClassVar[Turn] = Turn.FIRST

    def describe(self, job: str) -> str:
        return f"creates {names.coordinator_name(job, self.incarnation)}"

    async def execute(self, on: Executor, job: Job) -> bool:
        """Make the coordinator's pod.

        Args:
            on: carries it out.
            job: as the plan saw it.

        Returns:
            Whether it was carried out.
        """
        return await on.create_coordinator(job, self)


@dataclass(frozen=True)
class CreateWorker(BaseAction):
    """POST. Slot and attempt stand in status before this is carried out."""

    slot: int
    attempt: int
    address: str
    reason: str
    avoid: str | None = None  # name of a node that it must not be on
    kind: ClassVar[str] = "create_worker"
    role: ClassVar[str] = "worker"
    turn: ClassVar[Turn] = Turn.WORKER

    def describe(self, job: str) -> str:
        return f"creates {names.worker_name(job, self.slot, self.attempt)}"

    async def execute(self, on: Executor, job: Job) -> bool:
        """Make the worker's pod.

        Args:
            on: carries it out.
            job: as the plan saw it.

        Returns:
            Whether it was carried out.
        """
        return await on.create_worker(job, self)


@dataclass(frozen=True)
class CreateStandby(CreateWorker):
    """POST of a worker's pod that is to stand by; that it is refused holds up no other worker's."""

    role: ClassVar[str] = "standby"


@dataclass(frozen=True)
class CreateServer(BaseAction):
    """POST of a parameter server's pod. Slot and attempt stand in status before this is carried out."""

    slot: int
    attempt: int
    address: str  # of the coordinator
    reason: str
    image: str = ""  # unless the manifest names one; "": the operator's own
    kind: ClassVar[str] = "create_server"
    role: ClassVar[str] = "server"
    turn: ClassVar[Turn] = Turn.FIRST

    def describe(self, job: str) -> str:
        return f"creates {names.server_name(job, self.slot, self.attempt)}"

    async def execute(self, on: Executor, job: Job) -> bool:
        """Make the parameter server's pod.

        Args:
            on: carries it out.
            job: as the plan saw it.

        Returns:
            Whether it was carried out.
        """
        return await on.create_server(job, self)


@dataclass(frozen=True)
class ApplyServerBudget(BaseAction):
    """Server-side apply of the disruption budget of so many parameter servers."""

    servers: int
    reason: str
    kind: ClassVar[str] = "apply_server_budget"
    role: ClassVar[str] = "serverbudget"
    turn: ClassVar[Turn] = Turn.FIRST
    title: ClassVar[str] = "applies the disruption budget of the parameter servers"

    async def execute(self, on: Executor, job: Job) -> bool:
        """Apply the disruption budget.

        Args:
            on: carries it out.
            job: as the plan saw it.

        Returns:
            Whether it was carried out.
        """
        return await on.apply_server_budget(job, self.servers)


@dataclass(frozen=True)
class DeletePod(BaseAction):
    """Write the reason on the pod, then DELETE with its uid as precondition."""

    name: str
    uid: str
    because: str  # a DELETE_ constant, written on the pod
    reason: str
    force: bool = False  # do not wait for its node's word
    grace_seconds: int | None = None  # None: as its template says
    kind: ClassVar[str] = "delete_pod"
    role: ClassVar[str] = "deletion"
    turn: ClassVar[Turn] = Turn.DELETION

    def describe(self, job: str) -> str:
        return f"deletes {self.name}{' by force' if self.force else ''} ({self.because})"

    async def execute(self, on: Executor, job: Job) -> bool:
        """Delete the pod.

        Args:
            on: carries it out.
            job: as the plan saw it.

        Returns:
            Whether it was carried out.
        """
        return await on.delete_pod(job, self)


@dataclass(frozen=True)
class DeleteJob(BaseAction):
    """DELETE the job itself with its uid as precondition; Kubernetes collects what it made."""

    reason: str
    kind: ClassVar[str] = "delete_job"
    role: ClassVar[str] = "job"
    turn: ClassVar[Turn] = Turn.DELETION
    title: ClassVar[str] = "deletes the job"

    async def execute(self, on: Executor, job: Job) -> bool:
        """Delete the job.

        Args:
            on: carries it out.
            job: as the plan saw it.

        Returns:
            Whether it was carried out.
        """
        return await on.delete_job(job)


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
