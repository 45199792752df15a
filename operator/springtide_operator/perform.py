"""Carry out the actions of one job's plan, and remember what came of them until the next round sees it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from springtide_operator import workloads
from springtide_operator.api import names
from springtide_operator.api.job import Job
from springtide_operator.cache import Cache, Key
from springtide_operator.cluster import Cluster, is_gone
from springtide_operator.kube import ApiError
from springtide_operator.manifests.coordinator import coordinator_pod, secret, service
from springtide_operator.manifests.defaults import PodDefaults, with_defaults
from springtide_operator.manifests.gang import gang_scheduler, pod_group
from springtide_operator.manifests.protection import Doors, network_policy, server_disruption_budget
from springtide_operator.manifests.server import CONTAINER as SERVER_CONTAINER
from springtide_operator.manifests.server import server_pod
from springtide_operator.manifests.worker import TemplateError, main_container_name, worker_pod
from springtide_operator.plan import observe
from springtide_operator.plan.actions import (
    Action,
    ApplyNetworkPolicy,
    ApplyPodGroup,
    ApplyServerBudget,
    ApplyService,
    CreateCoordinator,
    CreateServer,
    CreateWorker,
    CreateWorkload,
    DeleteJob,
    DeletePod,
    DeletePodGroup,
    DeleteService,
    DeleteWorkload,
    EnsureSecret,
    ReportWorkload,
    UpdateWorkload,
)
from springtide_operator.plan.observation import Refusal, ServiceSeen
from springtide_operator.plan.refused import refuse, room_was_made
from springtide_operator.queues import Queues

log = logging.getLogger("springtide.operator")

_WORKLOAD = (CreateWorkload, UpdateWorkload, ReportWorkload, DeleteWorkload)
_FIRST = (
    EnsureSecret,
    ApplyNetworkPolicy,
    *_WORKLOAD,
    ApplyPodGroup,
    ApplyServerBudget,
    ApplyService,
    CreateCoordinator,
    CreateServer,
)
PARALLEL = 32  # requests of one job at a time


@dataclass
class Memory:
    """What this process knows of a job beyond pods and status. Losing it costs a few requests, nothing
    else.
    """

    service: ServiceSeen | None = None
    service_gone: bool = False
    secret_made: bool = False
    secret_made_at: float = 0.0
    policy_applied: bool = False
    server_budget: int | None = None
    pod_group: str = ""
    pod_group_gone: bool = False
    refusals: dict[str, Refusal] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)


class Performer:
    """For one job."""

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        key: Key,
        token: str,
        coordinator_image: str,
        may_act: Callable[[], bool],
        on_action: Callable[[str], None] = lambda kind: None,
        clock: Callable[[], float] = time.time,
        pod_defaults: PodDefaults | None = None,
        coordinator_pull_policy: str = "IfNotPresent",
        doors: Doors | None = None,
        queues: Queues | None = None,
        server_image: str = names.PARAMETER_SERVER_IMAGE,
        certificate: tuple[str, str] | None = None,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._key = key
        self._token = token
        self._image = coordinator_image
        self._pull_policy = coordinator_pull_policy
        self._doors = doors
        self._queues = queues
        self._server_image = server_image
        self._certificate = certificate
        self._defaults = pod_defaults or PodDefaults()
        self._may_act = may_act
        self._on_action = on_action
        self._clock = clock
        self.memory = Memory()

    @property
    def policy_missing(self) -> bool:
        """A NetworkPolicy is wanted, and this process has not applied it yet."""
        return self._doors is not None and not self.memory.policy_applied

    async def perform(self, job: Job, actions: Sequence[Action]) -> int:
        """What pods need and the coordinator first, then deletions, then workers in growing batches.

        Returns how many were carried out. Refusals are remembered for the next plan, they are no errors here.
        """
        first = [a for a in actions if isinstance(a, _FIRST)]
        deletions: list[Action] = [a for a in actions if isinstance(a, DeletePod)]
        deletions += [a for a in actions if isinstance(a, DeleteJob | DeleteService | DeletePodGroup)]
        creations = [a for a in actions if isinstance(a, CreateWorker)]
        if not any(isinstance(action, DeletePod) for action in deletions):
            self.memory.refusals.pop("deletion", None)  # what could not be deleted has gone by itself
        done = 0
        for action in first:
            if not self._may_act():
                return done
            done += await self._one(job, action)
        for start in range(0, len(deletions), PARALLEL):
            if not self._may_act():
                return done
            batch = deletions[start : start + PARALLEL]
            done += sum(await asyncio.gather(*(self._one(job, action) for action in batch)))
        # A quota refuses all of a hundred creations: find out with one, then two, four, ...
        start, size = 0, 1 if "worker" in self.memory.refusals else 4
        while start < len(creations):
            if not self._may_act():
                return done
            batch_of = creations[start : start + size]
            carried = sum(await asyncio.gather(*(self._one(job, action) for action in batch_of)))
            done += carried
            if carried < len(batch_of):
                break
            start, size = start + size, min(PARALLEL, size * 2)
        return done

    async def _one(self, job: Job, action: Action) -> bool:
        role = _role(action)
        try:
            await self._do(job, action)
        except ApiError as error:
            if isinstance(action, DeleteJob):
                if error.code not in (404, 409):
                    log.warning("deleting the job: %s", error, extra=_fields(job))
                return False
            if isinstance(action, DeletePod) and error.code == 404:
                self.memory.refusals.pop(role, None)
                return False
            if isinstance(action, DeletePod) and error.code == 409:
                return False  # the pod changed since it was seen; the next round looks again
            self._refused(job, role, error.code, error.message, "NamespaceTerminating" in error.causes)
            return False
        except TemplateError as error:
            self._refused(job, role, 422, str(error))
            return False
        self._on_action(action.kind)
        self.memory.refusals.pop(role, None)
        if isinstance(action, DeletePod):
            self.memory.refusals = room_was_made(self.memory.refusals, self._clock())
        log.info("%s: %s", _what(job, action), action.reason, extra=_fields(job))
        return True

    async def _do(self, job: Job, action: Action) -> None:
        if isinstance(action, EnsureSecret):
            try:
                await self._cluster.create_secret(secret(job, self._token, self._certificate))
            except ApiError as error:
                if error.code != 409:
                    raise
            self.memory.secret_made, self.memory.secret_made_at = True, self._clock()
        elif isinstance(action, ApplyNetworkPolicy):
            if self._doors is not None:
                await self._cluster.apply_network_policy(network_policy(job, self._doors))
            self.memory.policy_applied = True
        elif isinstance(action, ApplyService):
            await self._apply_service(job, action)
        elif isinstance(action, _WORKLOAD):
            await self._perform_workload(job, action)
        elif isinstance(action, ApplyPodGroup):
            await self._apply_pod_group(job, action)
        elif isinstance(action, DeletePodGroup):
            try:
                await self._cluster.delete_pod_group(action.api_version, job.namespace, action.name)
            except ApiError as error:
                if not is_gone(error):
                    raise
            self.memory.pod_group, self.memory.pod_group_gone = "", True
        elif isinstance(action, CreateCoordinator):
            await self._create(job, self._coordinator_pod(job, action.incarnation))
        elif isinstance(action, CreateServer):
            await self._create(job, self._server_pod(job, action.slot, action.attempt, action.address))
        elif isinstance(action, ApplyServerBudget):
            await self._cluster.apply_disruption_budget(server_disruption_budget(job, action.servers))
            self.memory.server_budget = action.servers
        elif isinstance(action, CreateWorker):
            pod = self._worker_pod(job, action.slot, action.attempt, action.address, action.avoid)
            await self._create(job, pod)
        elif isinstance(action, DeleteJob):
            await self._cluster.delete_job(job.namespace, job.name, job.uid)
        elif isinstance(action, DeleteService):
            await self._delete_service(job)
        else:
            try:
                answer = await self._cluster.delete_pod(
                    job.namespace,
                    action.name,
                    action.uid,
                    action.because,
                    0 if action.force else action.grace_seconds,
                )
            except ApiError as error:
                if is_gone(error):
                    self._cache.drop_pod_uid(self._key, action.uid)
                raise
            if answer.get("kind") == "Pod" and "deletionTimestamp" in answer.get("metadata", {}):
                self._cache.put_pod(answer)

    def _coordinator_pod(self, job: Job, incarnation: int) -> dict[str, Any]:
        pod = coordinator_pod(job, incarnation, self._image, self._pull_policy)
        return with_defaults(pod, self._defaults, names.ROLE_COORDINATOR)

    def _worker_pod(
        self, job: Job, slot: int, attempt: int, address: str, avoid: str | None = None
    ) -> dict[str, Any]:
        pod = worker_pod(job, slot, attempt, address, avoid)
        return with_defaults(pod, self._defaults, main_container_name(job.spec.workers.template))

    async def _perform_workload(self, job: Job, action: workloads.WorkloadAction) -> None:
        def pods(bare: Job) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]:
            server = self._server_pod(bare, 0, 0, "") if bare.spec.servers else None
            return self._worker_pod(bare, 0, 0, ""), self._coordinator_pod(bare, 1), server

        if self._queues is not None:
            await workloads.perform(self._cluster, self._queues, job, action, pods, self._clock)

    def _server_pod(self, job: Job, slot: int, attempt: int, address: str) -> dict[str, Any]:
        pod = server_pod(job, slot, attempt, address, self._server_image, self._pull_policy)
        return with_defaults(pod, self._defaults, SERVER_CONTAINER)

    async def _apply_pod_group(self, job: Job, action: ApplyPodGroup) -> None:
        scheduler = gang_scheduler(job)
        if scheduler is not None:
            pods = [
                (self._worker_pod(job, 0, 0, ""), job.spec.workers.min_replicas),
                (self._coordinator_pod(job, 1), 1),
            ]
            if job.spec.servers:
                pods.append((self._server_pod(job, 0, 0, ""), job.spec.servers))
            await self._cluster.apply_pod_group(pod_group(job, scheduler, action.min_member, pods))
        self.memory.pod_group, self.memory.pod_group_gone = action.version, False

    async def _create(self, job: Job, pod: dict[str, Any]) -> None:
        """POST; where the name is taken by this job's own pod, an earlier try had succeeded."""
        name = pod["metadata"]["name"]
        try:
            created = await self._cluster.create_pod(pod)
        except ApiError as error:
            if error.reason != "AlreadyExists":  # a quota that others change at the same time says Conflict
                raise
            created = await self._cluster.get_pod(job.namespace, name)
            if not observe.owned_by(created, job.uid):
                self.memory.taken.add(name)
                return
        self._cache.put_pod(created)

    async def _apply_service(self, job: Job, action: ApplyService) -> None:
        wanted = service(job, action.incarnation, action.cluster_ip)
        name = wanted["metadata"]["name"]
        try:
            found = await self._cluster.get_service(job.namespace, name)
        except ApiError as error:
            if not is_gone(error):
                raise
        else:
            if not observe.owned_by(found, job.uid):
                raise ApiError(
                    409,
                    "Conflict",
                    f"a Service {name!r} exists that this job does not control: delete it, or wait until"
                    " Kubernetes has collected it if it belonged to a deleted job of the same name",
                )
        try:
            applied = await self._cluster.apply_service(wanted)
        except ApiError as error:
            if error.code != 422 or action.cluster_ip is None:
                raise
            # The address is somebody else's now; workers made before keep training, but find no coordinator.
            applied = await self._cluster.apply_service(service(job, action.incarnation))
        ip = (applied.get("spec") or {}).get("clusterIP") or ""
        if not ip or ip == "None":
            raise ApiError(0, "NoAddress", f"the Service {name!r} has no cluster IP yet")
        host = f"[{ip}]" if ":" in ip else ip
        self.memory.service = ServiceSeen(
            f"{host}:{names.COORDINATOR_PORT}", action.incarnation, self._clock()
        )

    async def _delete_service(self, job: Job) -> None:
        """One of that name that another job controls is none of ours: then ours is gone."""
        name = names.service_name(job.name)
        try:
            found = await self._cluster.get_service(job.namespace, name)
            if observe.owned_by(found, job.uid):
                await self._cluster.delete_service(job.namespace, name, found["metadata"]["uid"])
        except ApiError as error:
            if not is_gone(error):
                raise
        self.memory.service, self.memory.service_gone = None, True

    def _refused(self, job: Job, role: str, code: int, message: str, terminating: bool = False) -> None:
        before = self.memory.refusals.get(role)
        self.memory.refusals[role] = refuse(before, code, message, self._clock(), terminating, job.generation)
        if before is None or before.message != message:
            log.warning("refused by the API server: %s: %s (%s)", role, message, code, extra=_fields(job))


def _role(action: Action) -> str:
    return {
        "ensure_secret": "secret",
        "apply_network_policy": "networkpolicy",
        "apply_pod_group": "podgroup",
        "delete_pod_group": "podgroup",
        "create_workload": "workload",
        "update_workload": "workload",
        "report_workload": "workload",
        "delete_workload": "workload",
        "apply_service": "service",
        "delete_service": "service",
        "create_coordinator": "coordinator",
        "create_server": "server",
        "apply_server_budget": "serverbudget",
        "delete_pod": "deletion",
    }.get(action.kind, "worker")


def _what(job: Job, action: Action) -> str:
    if isinstance(action, CreateWorker):
        return f"creates {names.worker_name(job.name, action.slot, action.attempt)}"
    if isinstance(action, CreateServer):
        return f"creates {names.server_name(job.name, action.slot, action.attempt)}"
    if isinstance(action, ApplyServerBudget):
        return "applies the disruption budget of the parameter servers"
    if isinstance(action, CreateCoordinator):
        return f"creates {names.coordinator_name(job.name, action.incarnation)}"
    if isinstance(action, DeletePod):
        return f"deletes {action.name}{' by force' if action.force else ''} ({action.because})"
    if isinstance(action, DeleteJob):
        return "deletes the job"
    if isinstance(action, DeleteService):
        return "deletes the coordinator's Service"
    if isinstance(action, _WORKLOAD):
        return f"{action.kind.partition('_')[0]}s the Workload"
    if isinstance(action, ApplyPodGroup):
        return "applies the PodGroup"
    if isinstance(action, DeletePodGroup):
        return "deletes the PodGroup"
    if isinstance(action, ApplyNetworkPolicy):
        return "applies the NetworkPolicy"
    return "applies the Service" if isinstance(action, ApplyService) else "makes the Secret"


def _fields(job: Job) -> dict[str, Any]:
    return {"fields": {"job": f"{job.namespace}/{job.name}"}}
