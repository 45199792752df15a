"""Carry out single actions for one job on the cluster, and remember what came of them until it is seen."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from springtide_kube.errors import ApiError
from springtide_operator import workloads
from springtide_operator.api import names
from springtide_operator.api.job import Job
from springtide_operator.cache import Cache, Key, Protecting
from springtide_operator.cluster import Cluster, is_gone
from springtide_operator.manifests.coordinator import service
from springtide_operator.manifests.gang import gang_scheduler, no_longer_asked_for, pod_group
from springtide_operator.manifests.kueue import JobPods
from springtide_operator.manifests.maker import ManifestMaker
from springtide_operator.manifests.protection import server_disruption_budget
from springtide_operator.plan import keys, observe
from springtide_operator.plan.actions import (
    CreateCoordinator,
    CreateServer,
    CreateWorker,
    CreateWorkload,
    DeletePod,
    ReportWorkload,
    UpdateWorkload,
)
from springtide_operator.plan.observation import Refusal, ServiceSeen
from springtide_operator.plan.retry import room_was_made
from springtide_operator.queues import Queues

log = logging.getLogger("springtide.operator")

Object = dict[str, Any]
Getter = Callable[[str, str], Awaitable[Object]]
Applier = Callable[[Object], Awaitable[Object]]
Deleter = Callable[[str, str, str], Awaitable[None]]


WATCH_LAG_SECONDS = 2.0  # after a write or a look, until a watch that says otherwise is believed


def _protecting(obj: Object | None) -> Protecting | None:
    """Return what a watch tells of an object that was read; None for none."""
    if obj is None:
        return None
    return Protecting(str(obj["metadata"].get("uid")), obj["metadata"].get("generation"))


@dataclass
class Memory:
    """Facts about a job beyond pods and status. Losing them costs a few requests, nothing else."""

    service: ServiceSeen | None = None
    service_gone: bool = False
    secret_made: bool = False
    secret_made_at: float = 0.0
    secret_version: str = ""  # which one: that of the newest key
    policy_applied: bool = False
    policy_spec: Object | None = None  # as the API server gave it back
    budget_spec: Object | None = None
    policy_seen: Protecting | None = None
    budget_seen: Protecting | None = None
    protection_seen_at: float = 0.0  # unix seconds
    former_names_gone: set[str] = field(default_factory=set)  # of an older version: seen to
    server_budget: int | None = None
    pod_group: str = ""
    pod_group_gone: bool = False
    refusals: dict[str, Refusal] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)


class ClusterExecutor:
    """Implements `plan.actions.Executor`, which says what each method does."""

    def __init__(
        self,
        cluster: Cluster,
        cache: Cache,
        key: Key,
        make: ManifestMaker,
        queues: Queues | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._cache = cache
        self._key = key
        self._make = make
        self._queues = queues
        self._clock = clock
        self.memory = Memory()

    @property
    def coordinator_image(self) -> str:
        """Return the image of coordinators for which neither manifest nor status names one."""
        return self._make.coordinator_image

    @property
    def server_image(self) -> str:
        """Return the image of parameter servers for which neither manifest nor status names one."""
        return self._make.server_image

    @property
    def policy_missing(self) -> bool:
        """A NetworkPolicy is wanted, and this process has not applied it yet."""
        return self._make.doors is not None and not self.memory.policy_applied

    async def make_secret(self, job: Job) -> bool:
        try:
            await self._cluster.create_secret(self._make.secret(job))
        except ApiError as error:
            if error.code != 409:
                raise
        self.memory.secret_made, self.memory.secret_made_at = True, self._clock()
        self.memory.secret_version = keys.version(job)
        return True

    async def apply_network_policy(self, job: Job) -> bool:
        cluster, memory = self._cluster, self.memory
        wanted = self._make.network_policy(job)
        if wanted is not None:
            get, apply = cluster.get_network_policy, cluster.apply_network_policy
            applied = await self._apply_own(job, wanted, get, apply)
            memory.policy_spec, memory.protection_seen_at = applied.get("spec"), self._clock()
            memory.policy_seen = _protecting(applied)
        memory.policy_applied = True
        return True

    async def apply_service(self, job: Job, incarnation: int, cluster_ip: str | None) -> bool:
        """Apply the coordinator's Service.

        Args:
            job: as the plan saw it.
            incarnation: whose pod it selects.
            cluster_ip: the address that workers were given; None: any. Where it is somebody else's now,
                another one is taken.

        Returns:
            Whether it was carried out.

        Raises:
            ApiError: the API server refuses, or the Service has no address yet.
        """
        cluster = self._cluster
        wanted = service(job, incarnation, cluster_ip)
        name = wanted["metadata"]["name"]
        try:
            applied = await self._apply_own(job, wanted, cluster.get_service, cluster.apply_service)
        except ApiError as error:
            if error.code != 422 or cluster_ip is None:
                raise
            # The address is somebody else's now; workers made before keep training, but find no coordinator.
            wanted = service(job, incarnation)
            applied = await self._apply_own(job, wanted, cluster.get_service, cluster.apply_service)
        ip = (applied.get("spec") or {}).get("clusterIP") or ""
        if not ip or ip == "None":
            raise ApiError(0, "NoAddress", f"the Service {name!r} has no cluster IP yet")
        host = f"[{ip}]" if ":" in ip else ip
        address = f"{host}:{names.COORDINATOR_PORT}"
        self.memory.service = ServiceSeen(address, incarnation, self._clock())
        return True

    async def delete_service(self, job: Job) -> bool:
        name = names.service_name(job.name)
        await self._delete_own(job, name, self._cluster.get_service, self._cluster.delete_service)
        self.memory.service, self.memory.service_gone = None, True
        return True

    async def apply_pod_group(self, job: Job, min_member: int, version: str) -> bool:
        """Apply the job's PodGroup.

        Args:
            job: as the plan saw it.
            min_member: pods that are to be started together.
            version: of the group as it is wanted, remembered until it changes.

        Returns:
            Whether it was carried out.

        Raises:
            ApiError: the API server refuses.
            TemplateError: no pod can be made of a template.
        """
        scheduler = gang_scheduler(job)
        if scheduler is not None:
            make = self._make
            pods = [
                (make.worker(job, 0, 0, ""), job.spec.workers.min_replicas),
                (make.coordinator(job, 1), 1),
            ]
            if job.spec.servers:
                pods.append((make.server(job, 0, 0, ""), job.spec.servers))
            wanted = pod_group(job, scheduler, min_member, pods)
            get = functools.partial(self._cluster.get_pod_group, scheduler.api)
            applied = await self._apply_own(job, wanted, get, self._cluster.apply_pod_group)
            # It was made by POST, whose fields a later server-side apply does not take away.
            if left := no_longer_asked_for(wanted, applied):
                await self._cluster.patch_pod_group(applied, {"spec": {"minResources": left}})
        self.memory.pod_group, self.memory.pod_group_gone = version, False
        return True

    async def delete_pod_group(self, job: Job, api_version: str, name: str) -> bool:
        """Delete the job's PodGroup, if it is this job's.

        Args:
            job: as the plan saw it.
            api_version: of the scheduler's API.
            name: of the group.

        Returns:
            Whether it was carried out.

        Raises:
            ApiError: the API server refuses.
        """
        get = functools.partial(self._cluster.get_pod_group, api_version)
        delete = functools.partial(self._cluster.delete_pod_group, api_version)
        await self._delete_own(job, name, get, delete)
        self.memory.pod_group, self.memory.pod_group_gone = "", True
        return True

    async def write_workload(self, job: Job, wanted: CreateWorkload | UpdateWorkload) -> bool:
        """Make a Workload of the job, or write its spec anew.

        Args:
            job: as the plan saw it.
            wanted: which one, and for how many pods.

        Returns:
            Whether it was carried out.

        Raises:
            ApiError: the API server refuses.
            TemplateError: no pod can be made of a template.
        """

        def pods(bare: Job) -> JobPods:
            server = self._make.server(bare, 0, 0, "") if bare.spec.servers else None
            return JobPods(self._make.worker(bare, 0, 0, ""), self._make.coordinator(bare, 1), server)

        if self._queues is not None:
            await workloads.write(self._cluster, self._queues, job, wanted, pods)
        return True

    async def report_workload(self, job: Job, report: ReportWorkload) -> bool:
        """Write the Workload's status.

        Args:
            job: as the plan saw it.
            report: what it is to say.

        Returns:
            Whether it was carried out.

        Raises:
            ApiError: the API server refuses.
        """
        if self._queues is not None:
            await workloads.report(self._cluster, self._queues, job, report, self._clock())
        return True

    async def delete_workload(self, job: Job, name: str, uid: str) -> bool:
        """Delete the job's Workload.

        Args:
            job: as the plan saw it.
            name: of the Workload.
            uid: of this very one.

        Returns:
            Whether it was carried out.

        Raises:
            ApiError: the API server refuses.
        """
        if self._queues is not None:
            await workloads.delete(self._cluster, self._queues, job, name, uid)
        return True

    async def create_coordinator(self, job: Job, action: CreateCoordinator) -> bool:
        """Make the coordinator's pod.

        Args:
            job: as the plan saw it.
            action: with its number, its image and the node that it must not be on.

        Returns:
            Whether it was made.

        Raises:
            ApiError: the API server refuses.
        """
        return await self._create(
            job, self._make.coordinator(job, action.incarnation, action.avoid, action.image)
        )

    async def create_worker(self, job: Job, action: CreateWorker) -> bool:
        """Make a worker's pod.

        Args:
            job: as the plan saw it.
            action: with its names and numbers.

        Returns:
            Whether it was made.

        Raises:
            ApiError: the API server refuses.
            TemplateError: no pod can be made of the template.
        """
        pod = self._make.worker(job, action.slot, action.attempt, action.address, action.avoid)
        return await self._create(job, pod)

    async def create_server(self, job: Job, action: CreateServer) -> bool:
        """Make a parameter server's pod.

        Args:
            job: as the plan saw it.
            action: with its slot and attempt, the coordinator's address, and its image.

        Returns:
            Whether it was made.

        Raises:
            ApiError: the API server refuses.
            TemplateError: no pod can be made of the template.
        """
        return await self._create(
            job, self._make.server(job, action.slot, action.attempt, action.address, action.image)
        )

    async def apply_server_budget(self, job: Job, servers: int) -> bool:
        """Apply the disruption budget of the job's servers.

        Args:
            job: as the plan saw it.
            servers: how many there are to be.

        Returns:
            Whether it was carried out.

        Raises:
            ApiError: the API server refuses.
        """
        cluster, memory = self._cluster, self.memory
        wanted = server_disruption_budget(job, servers)
        get, apply = cluster.get_disruption_budget, cluster.apply_disruption_budget
        applied = await self._apply_own(job, wanted, get, apply)
        memory.budget_spec, memory.protection_seen_at = applied.get("spec"), self._clock()
        memory.budget_seen = _protecting(applied)
        # At once: no pod with two budgets can be evicted, so that its node could not be drained.
        await self._delete_former_budget(job)
        memory.server_budget = servers
        return True

    async def delete_pod(self, job: Job, action: DeletePod) -> bool:
        """Delete a pod, with the reason written on it.

        Args:
            job: as the plan saw it.
            action: with its names and numbers.

        Returns:
            Whether it was deleted; False when it is gone, or has changed since it was seen.

        Raises:
            ApiError: the API server refuses.
        """
        grace = 0 if action.force else action.grace_seconds
        try:
            answer = await self._cluster.delete_pod(
                job.namespace, action.name, action.uid, action.because, grace
            )
        except ApiError as error:
            if is_gone(error):
                self._cache.drop_pod_uid(self._key, action.uid)
            if error.code == 404:
                self.memory.refusals.pop(action.role, None)
            if error.code in (404, 409):  # 409: the pod changed since it was seen; the next round looks again
                return False
            raise
        if answer.get("kind") == "Pod" and "deletionTimestamp" in answer.get("metadata", {}):
            self._cache.put_pod(answer)
        self.memory.refusals = room_was_made(self.memory.refusals, self._clock())
        return True

    async def delete_job(self, job: Job) -> bool:
        try:
            await self._cluster.delete_job(job.namespace, job.name, job.uid)
        except ApiError as error:
            if error.code not in (404, 409):
                log.warning("deleting the job: %s", error, extra=fields(job))
            return False
        return True

    async def look_after(self, job: Job, seconds: float) -> bool:
        """See whether what protects the job is still as it was applied: soon after a watch tells of a
        change, and where it is not watched, if nobody has looked for so long.

        Args:
            job: as the plan saw it.
            seconds: between two looks at what is not watched.

        Returns:
            Whether something is to be applied again.

        Raises:
            ApiError: the API server refuses.
        """
        memory, now = self.memory, self._clock()
        wait = self.protection_due(job, seconds)
        if wait is None or wait > 0:
            return False
        memory.protection_seen_at = now
        await self._delete_former_policy(job)
        await self._delete_former_budget(job)
        before = (memory.policy_applied, memory.server_budget)
        if memory.policy_applied and memory.policy_spec is not None:
            name = names.network_policy_name(job.name, job.uid)
            found = await self._seen(job, name, self._cluster.get_network_policy)
            memory.policy_applied = found is not None and found.get("spec") == memory.policy_spec
            memory.policy_seen = _protecting(found)
        if memory.server_budget is not None and memory.budget_spec is not None:
            name = names.server_budget_name(job.name, job.uid)
            found = await self._seen(job, name, self._cluster.get_disruption_budget)
            memory.budget_seen = _protecting(found)
            if found is None or found.get("spec") != memory.budget_spec:
                memory.server_budget = None
        return before != (memory.policy_applied, memory.server_budget)

    def protection_due(self, job: Job, seconds: float) -> float | None:
        """Return in how many seconds somebody should look at what protects the job; None: a watch will tell.

        Args:
            job: as the plan saw it.
            seconds: between two looks at what is not watched.
        """
        memory = self.memory
        since = self._clock() - memory.protection_seen_at
        kinds = {"poddisruptionbudgets"} | ({"networkpolicies"} if self._make.doors is not None else set())
        if not kinds <= self._cache.protection_listed:
            return max(0.0, seconds - since)
        there = self._cache.protection(self._key)
        watched = {
            ("networkpolicies", names.network_policy_name(job.name, job.uid)): (
                memory.policy_seen if memory.policy_applied and memory.policy_spec is not None else None
            ),
            ("poddisruptionbudgets", names.server_budget_name(job.name, job.uid)): (
                memory.budget_seen if memory.server_budget is not None else None
            ),
        }
        changed = any(seen is not None and there.get(where) != seen for where, seen in watched.items())
        former = {
            ("networkpolicies", names.former_network_policy_name(job.name)),
            ("poddisruptionbudgets", names.former_server_budget_name(job.name)),
        }
        left = any(where in there and where[1] not in memory.former_names_gone for where in former)
        return max(0.0, WATCH_LAG_SECONDS - since) if changed or left else None

    async def _create(self, job: Job, pod: dict[str, Any]) -> bool:
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
                return True
        self._cache.put_pod(created)
        return True

    async def _delete_former_policy(self, job: Job) -> None:
        """Delete the policy of an older version, once its successor has been there for a while."""
        name, cluster = names.former_network_policy_name(job.name), self._cluster
        if self.memory.policy_spec is not None:
            await self._delete_former(job, name, cluster.get_network_policy, cluster.delete_network_policy)

    async def _delete_former_budget(self, job: Job) -> None:
        name, cluster = names.former_server_budget_name(job.name), self._cluster
        if self.memory.budget_spec is not None:
            get, delete = cluster.get_disruption_budget, cluster.delete_disruption_budget
            await self._delete_former(job, name, get, delete)

    async def _seen(self, job: Job, name: str, get: Getter) -> Object | None:
        """An object of the job's; None where there is none."""
        try:
            found = await get(job.namespace, name)
        except ApiError as error:
            if not is_gone(error):
                raise
            return None
        return found if observe.owned_by(found, job.uid) else None

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
            claims = found["metadata"].get("managedFields") or []
            writers = {entry.get("manager") for entry in claims if not entry.get("subresource")}
            if observe.owned_by(found, job.uid) and writers <= {names.MANAGER}:
                await delete(job.namespace, name, found["metadata"]["uid"])
        except ApiError as error:
            if not is_gone(error):
                log.warning("%s, of an older version, stays for now: %s", name, error, extra=fields(job))
                return
        self.memory.former_names_gone.add(name)


def fields(job: Job) -> dict[str, Any]:
    """Return what log lines about a job carry."""
    return {"fields": {"job": f"{job.namespace}/{job.name}"}}
