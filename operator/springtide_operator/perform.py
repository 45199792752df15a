"""Carry out the actions of one job's plan, and remember what came of them until the next round sees it."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
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
from springtide_operator.manifests.gang import gang_scheduler, no_longer_asked_for, pod_group
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

Object = dict[str, Any]
Getter = Callable[[str, str], Awaitable[Object]]
Applier = Callable[[Object], Awaitable[Object]]
Deleter = Callable[[str, str, str], Awaitable[None]]

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
MOST_CREATIONS = 64  # workers made in one turn: what is left comes when others have had theirs


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
    policy_spec: Object | None = None  # as the API server gave it back
    budget_spec: Object | None = None
    protection_seen_at: float = 0.0  # unix seconds
    former_names_gone: set[str] = field(default_factory=set)  # of an older version: seen to
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
        certificate: Callable[[], tuple[str, str]] | None = None,
        operator_token: str = "",
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
        self._operator_token = operator_token
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
        creations = [a for a in actions if isinstance(a, CreateWorker)][:MOST_CREATIONS]
        if not any(isinstance(action, DeletePod) for action in deletions):
            self.memory.refusals.pop("deletion", None)  # what could not be deleted has gone by itself
        done = 0
        # None of these needs another, and all of them come before the first pod.
        together = [a for a in first if isinstance(a, EnsureSecret | ApplyNetworkPolicy | ApplyService)]
        if together and self._may_act():
            done += sum(await asyncio.gather(*(self._one(job, action) for action in together)))
        for action in first:
            if action in together:
                continue
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
                certificate = self._certificate() if self._certificate is not None and job.tls else None
                await self._cluster.create_secret(secret(job, self._token, certificate))
            except ApiError as error:
                if error.code != 409:
                    raise
            self.memory.secret_made, self.memory.secret_made_at = True, self._clock()
        elif isinstance(action, ApplyNetworkPolicy):
            if self._doors is not None:
                await self._apply_policy(job, self._doors)
            self.memory.policy_applied = True
        elif isinstance(action, ApplyService):
            await self._apply_service(job, action)
        elif isinstance(action, _WORKLOAD):
            await self._perform_workload(job, action)
        elif isinstance(action, ApplyPodGroup):
            await self._apply_pod_group(job, action)
        elif isinstance(action, DeletePodGroup):
            await self._delete_own(
                job,
                action.name,
                functools.partial(self._cluster.get_pod_group, action.api_version),
                functools.partial(self._cluster.delete_pod_group, action.api_version),
            )
            self.memory.pod_group, self.memory.pod_group_gone = "", True
        elif isinstance(action, CreateCoordinator):
            await self._create(job, self._coordinator_pod(job, action.incarnation, action.avoid))
        elif isinstance(action, CreateServer):
            await self._create(job, self._server_pod(job, action.slot, action.attempt, action.address))
        elif isinstance(action, ApplyServerBudget):
            await self._apply_budget(job, action.servers)
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

    def _coordinator_pod(self, job: Job, incarnation: int, avoid: str | None = None) -> dict[str, Any]:
        own = self._operator_token
        pod = coordinator_pod(job, incarnation, self._image, self._pull_policy, avoid, own)
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
            wanted = pod_group(job, scheduler, action.min_member, pods)
            get = functools.partial(self._cluster.get_pod_group, scheduler.api)
            applied = await self._apply_own(job, wanted, get, self._cluster.apply_pod_group)
            # It was made by POST, whose fields a later server-side apply does not take away.
            if left := no_longer_asked_for(wanted, applied):
                await self._cluster.patch_pod_group(applied, {"spec": {"minResources": left}})
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
        cluster = self._cluster
        wanted = service(job, action.incarnation, action.cluster_ip)
        name = wanted["metadata"]["name"]
        try:
            applied = await self._apply_own(job, wanted, cluster.get_service, cluster.apply_service)
        except ApiError as error:
            if error.code != 422 or action.cluster_ip is None:
                raise
            # The address is somebody else's now; workers made before keep training, but find no coordinator.
            wanted = service(job, action.incarnation)
            applied = await self._apply_own(job, wanted, cluster.get_service, cluster.apply_service)
        ip = (applied.get("spec") or {}).get("clusterIP") or ""
        if not ip or ip == "None":
            raise ApiError(0, "NoAddress", f"the Service {name!r} has no cluster IP yet")
        host = f"[{ip}]" if ":" in ip else ip
        self.memory.service = ServiceSeen(
            f"{host}:{names.COORDINATOR_PORT}", action.incarnation, self._clock()
        )

    async def _delete_service(self, job: Job) -> None:
        name = names.service_name(job.name)
        await self._delete_own(job, name, self._cluster.get_service, self._cluster.delete_service)
        self.memory.service, self.memory.service_gone = None, True

    async def _apply_policy(self, job: Job, doors: Doors) -> None:
        cluster = self._cluster
        wanted = network_policy(job, doors)
        applied = await self._apply_own(job, wanted, cluster.get_network_policy, cluster.apply_network_policy)
        self.memory.policy_spec, self.memory.protection_seen_at = applied.get("spec"), self._clock()

    async def _apply_budget(self, job: Job, servers: int) -> None:
        cluster = self._cluster
        wanted = server_disruption_budget(job, servers)
        applied = await self._apply_own(
            job, wanted, cluster.get_disruption_budget, cluster.apply_disruption_budget
        )
        self.memory.budget_spec, self.memory.protection_seen_at = applied.get("spec"), self._clock()
        # At once: no pod with two budgets can be evicted, so that its node could not be drained.
        await self._delete_former_budget(job)

    async def look_after(self, job: Job, seconds: float) -> bool:
        """See whether what protects the job is still as it was applied, if nobody has looked for so long.

        Returns whether something is to be applied again. Raises ApiError.
        """
        memory, now = self.memory, self._clock()
        if now - memory.protection_seen_at < seconds or not self._may_act():
            return False
        memory.protection_seen_at = now
        await self._delete_former_policy(job)
        await self._delete_former_budget(job)
        before = (memory.policy_applied, memory.server_budget)
        if memory.policy_applied and memory.policy_spec is not None:
            name = names.network_policy_name(job.name, job.uid)
            found = await self._seen(job, name, self._cluster.get_network_policy)
            memory.policy_applied = found == memory.policy_spec
        if memory.server_budget is not None and memory.budget_spec is not None:
            name = names.server_budget_name(job.name, job.uid)
            if await self._seen(job, name, self._cluster.get_disruption_budget) != memory.budget_spec:
                memory.server_budget = None
        return before != (memory.policy_applied, memory.server_budget)

    async def _delete_former_policy(self, job: Job) -> None:
        """Of an older version, once what replaces it has been there for a while."""
        name, cluster = names.former_network_policy_name(job.name), self._cluster
        if self.memory.policy_spec is not None:
            await self._delete_former(job, name, cluster.get_network_policy, cluster.delete_network_policy)

    async def _delete_former_budget(self, job: Job) -> None:
        name, cluster = names.former_server_budget_name(job.name), self._cluster
        if self.memory.budget_spec is not None:
            get, delete = cluster.get_disruption_budget, cluster.delete_disruption_budget
            await self._delete_former(job, name, get, delete)

    async def _seen(self, job: Job, name: str, get: Getter) -> Object | None:
        """The spec of an object of the job's; None where there is none."""
        try:
            found = await get(job.namespace, name)
        except ApiError as error:
            if not is_gone(error):
                raise
            return None
        return dict(found.get("spec") or {}) if observe.owned_by(found, job.uid) else None

    async def _apply_own(self, job: Job, wanted: Object, get: Getter, apply: Applier) -> Object:
        """Make an object or change it, if this job controls it. Raises ApiError: 409 for somebody else's."""
        meta = wanted["metadata"]
        try:
            found = await get(job.namespace, meta["name"])
        except ApiError as error:
            if not is_gone(error):
                raise
            return await apply(wanted)  # nobody's, and refused where it is somebody's meanwhile
        if not observe.owned_by(found, job.uid):
            raise ApiError(
                409,
                "Conflict",
                f"a {wanted['kind']} {meta['name']!r} exists that this job does not control: delete it, or"
                " wait until Kubernetes has collected it if it belonged to a deleted job of the same name",
            )
        return await apply({**wanted, "metadata": {**meta, "uid": found["metadata"]["uid"]}})

    async def _delete_own(self, job: Job, name: str, get: Getter, delete: Deleter) -> None:
        """Delete an object, if this job controls it; then, and where there is none, ours is gone."""
        try:
            found = await get(job.namespace, name)
            if observe.owned_by(found, job.uid):
                await delete(job.namespace, name, found["metadata"]["uid"])
        except ApiError as error:
            if not is_gone(error):
                raise

    async def _delete_former(self, job: Job, name: str, get: Getter, delete: Deleter) -> None:
        """Delete what an older version made under a name without the uid, unless others have written to it:
        that version took over what it found. Kubernetes itself writes status, which is nobody's claim.
        """
        if name in self.memory.former_names_gone:
            return
        try:
            found = await get(job.namespace, name)
            fields = found["metadata"].get("managedFields") or []
            writers = {entry.get("manager") for entry in fields if not entry.get("subresource")}
            if observe.owned_by(found, job.uid) and writers <= {names.MANAGER}:
                await delete(job.namespace, name, found["metadata"]["uid"])
        except ApiError as error:
            if not is_gone(error):
                log.warning("%s, of an older version, stays for now: %s", name, error, extra=_fields(job))
                return
        self.memory.former_names_gone.add(name)

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
