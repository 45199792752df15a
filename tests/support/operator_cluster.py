"""The operator's port to Kubernetes in memory, with outages; and a coordinator that answers what a test
says.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import kueue_standin
from operator_world import job_object

from springtide_kube.errors import ApiError
from springtide_local.api.patch import merge_patch as merged
from springtide_operator.api import names
from springtide_operator.cluster import Listing
from springtide_operator.plan.ledger import timestamp
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.sync_client import SyncError

Object = dict[str, Any]


class FakeCluster:
    """Objects by (plural, namespace, name). `watchers` hear of pods and jobs as from a watch.

    `down`: no call is answered. `before`: called with (method, name) before each call, may raise ApiError.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.version = 0
        self.created = 0  # objects, also those that a restored backup does not have
        self.down = False
        self.apis: set[str] = set()  # optional ones that are served
        self.unknown_to_crd: set[str] = set()  # fields of a job's status that the CRD does not know
        self.before: Callable[[str, str], None] = lambda method, name: None
        self.calls: Counter[str] = Counter()
        self.events: dict[str, Object] = {}  # by name
        self.watchers: list[Callable[[str, str, Object], None]] = []
        self._shown: dict[tuple[str, str, str], Object] = {}  # of kinds whose specs are counted

    async def _call(self, method: str, name: str = "") -> None:
        await asyncio.sleep(0)
        self.calls[method] += 1
        if self.down:
            raise ApiError(0, "Unreachable", "the API server does not answer")
        self.before(method, name)

    def put(self, plural: str, obj: Object, kind: str = "MODIFIED") -> Object:
        """Write as somebody else."""
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        meta = obj["metadata"]
        if plural in ("networkpolicies", "poddisruptionbudgets"):
            before = self._shown.get((plural, meta["namespace"], meta["name"]), {})
            same = before.get("metadata", {}).get("uid") == meta.get("uid")
            number = before["metadata"]["generation"] if same else 0
            meta["generation"] = number + (not same or before.get("spec") != obj.get("spec"))
            self._shown[plural, meta["namespace"], meta["name"]] = copy.deepcopy(obj)
        self.objects[plural, meta["namespace"], meta["name"]] = obj
        for hear in self.watchers:
            hear(plural, kind, copy.deepcopy(obj))
        return copy.deepcopy(obj)

    def remove(self, plural: str, namespace: str, name: str) -> None:
        gone = self.objects.pop((plural, namespace, name))
        self.version += 1
        gone["metadata"]["resourceVersion"] = str(self.version)
        for hear in self.watchers:
            hear(plural, "DELETED", copy.deepcopy(gone))

    def add_job(self, name: str = "digits", replicas: int = 2) -> Object:
        job = job_object(replicas)
        job["metadata"] |= {"name": name, "uid": f"uid-of-{name}-{self.version}"}
        return self.put("trainingjobs", job, "ADDED")

    def job(self, name: str = "digits") -> Object:
        return self.objects["trainingjobs", "default", name]

    def pods(self, role: str = names.ROLE_WORKER) -> list[Object]:
        found = [o for (plural, _, _), o in self.objects.items() if plural == "pods"]
        return [o for o in found if o["metadata"]["labels"][names.LABEL_ROLE] == role]

    def run_pods(self) -> None:
        """A kubelet's work: what is pending runs."""
        for number, pod in enumerate([*self.pods(), *self.pods(names.ROLE_COORDINATOR)]):
            if pod["status"]["phase"] == "Pending":
                pod["status"] = {
                    "phase": "Running",
                    "podIP": f"127.9.9.{number + 1}",
                    "containerStatuses": [
                        {
                            "name": pod["spec"]["containers"][0]["name"],
                            "state": {"running": {"startedAt": timestamp(time.time())}},
                        }
                    ],
                }
                self.put("pods", pod)

    def _get(self, plural: str, namespace: str, name: str) -> Object:
        try:
            return self.objects[plural, namespace, name]
        except KeyError:
            raise ApiError(404, "NotFound", f'{plural} "{name}" not found') from None

    def _create(self, plural: str, obj: Object) -> Object:
        meta = obj["metadata"]
        if (plural, meta["namespace"], meta["name"]) in self.objects:
            raise ApiError(409, "AlreadyExists", f'{plural} "{meta["name"]}" already exists')
        obj = copy.deepcopy(obj)
        self.created += 1
        obj["metadata"] |= {"uid": f"uid-{self.created}", "creationTimestamp": timestamp(time.time())}
        return self.put(plural, obj, "ADDED")

    def _list(self, plural: str) -> Listing:
        items = [copy.deepcopy(o) for (kind, _, _), o in self.objects.items() if kind == plural]
        return Listing(items, str(self.version))

    async def list_of(self, plural: str) -> Listing:
        """All objects of a kind, which the operator has listed by kopf."""
        await self._call({"trainingjobs": "list_jobs"}.get(plural, f"list_{plural}"))
        return self._list(plural)

    async def list_waiting_pods(self) -> Listing:
        await self._call("list_waiting_pods")
        found = self._list("pods")
        return found._replace(items=[pod for pod in found.items if not pod["spec"].get("nodeName")])

    async def get_job(self, namespace: str, name: str) -> Object:
        await self._call("get_job", name)
        return copy.deepcopy(self._get("trainingjobs", namespace, name))

    async def get_template(self, kind: str, namespace: str, name: str) -> Object:
        await self._call("get_template", name)
        plural, where = names.TEMPLATE_PLURAL, namespace
        if kind == names.CLUSTER_TEMPLATE_KIND:
            plural, where = names.CLUSTER_TEMPLATE_PLURAL, ""
        return copy.deepcopy(self._get(plural, where, name))

    async def get_pod(self, namespace: str, name: str) -> Object:
        await self._call("get_pod", name)
        return copy.deepcopy(self._get("pods", namespace, name))

    async def create_pod(self, pod: Object) -> Object:
        await self._call("create_pod", pod["metadata"]["name"])
        return self._create("pods", {**pod, "status": {"phase": "Pending"}})

    async def delete_pod(
        self, namespace: str, name: str, uid: str, because: str, grace: int | None = None
    ) -> Object:
        await self._call("delete_pod", name)
        pod = self._get("pods", namespace, name)
        if pod["metadata"]["uid"] != uid:
            raise ApiError(409, "Conflict", "uid")
        if grace == 0:
            self.remove("pods", namespace, name)
            return {"kind": "Pod", **pod}
        pod["metadata"].setdefault("annotations", {})[names.ANNOTATION_DELETED_BECAUSE] = because
        pod["metadata"] |= {
            "deletionTimestamp": timestamp(time.time() + 30),
            "deletionGracePeriodSeconds": 30,
        }
        return {"kind": "Pod", **self.put("pods", pod)}

    async def delete_job(self, namespace: str, name: str, uid: str) -> None:
        await self._call("delete_job", name)
        if self._get("trainingjobs", namespace, name)["metadata"]["uid"] != uid:
            raise ApiError(409, "Conflict", "the uid is another one")
        self.remove("trainingjobs", namespace, name)

    async def create_secret(self, secret: Object) -> None:
        await self._call("create_secret", secret["metadata"]["name"])
        self._create("secrets", secret)

    async def get_secret(self, namespace: str, name: str) -> Object:
        await self._call("get_secret", name)
        return copy.deepcopy(self._get("secrets", namespace, name))

    async def get_service(self, namespace: str, name: str) -> Object:
        await self._call("get_service", name)
        return copy.deepcopy(self._get("services", namespace, name))

    def _apply(self, plural: str, obj: Object) -> Object:
        """Apply by the API server's rules: POST for an object without a uid, else a change of exactly that
        object.
        """
        obj, meta = copy.deepcopy(obj), obj["metadata"]
        if "uid" not in meta:
            return self._create(plural, obj)
        live = self._get(plural, meta["namespace"], meta["name"])
        if live["metadata"]["uid"] != meta["uid"]:
            raise ApiError(409, "Conflict", "the uid is another one")
        return self.put(plural, obj)

    def _delete(self, plural: str, namespace: str, name: str, uid: str) -> None:
        if self._get(plural, namespace, name)["metadata"]["uid"] != uid:
            raise ApiError(409, "Conflict", "the uid is another one")
        self.remove(plural, namespace, name)

    async def apply_service(self, service: Object) -> Object:
        await self._call("apply_service", service["metadata"]["name"])
        service = copy.deepcopy(service)
        service["spec"].setdefault("clusterIP", "10.7.7.7")
        return self._apply("services", service)

    async def delete_service(self, namespace: str, name: str, uid: str) -> None:
        await self._call("delete_service", name)
        if self._get("services", namespace, name)["metadata"]["uid"] != uid:
            raise ApiError(409, "Conflict", "the uid is another one")
        self.remove("services", namespace, name)

    async def get_network_policy(self, namespace: str, name: str) -> Object:
        await self._call("get_network_policy", name)
        return copy.deepcopy(self._get("networkpolicies", namespace, name))

    async def apply_network_policy(self, obj: Object) -> Object:
        await self._call("apply_network_policy", obj["metadata"]["name"])
        return self._apply("networkpolicies", obj)

    async def delete_network_policy(self, namespace: str, name: str, uid: str) -> None:
        await self._call("delete_network_policy", name)
        self._delete("networkpolicies", namespace, name, uid)

    async def serves(self, api: str) -> bool:
        await self._call("serves", api)
        return api in self.apis

    async def get_pod_group(self, api_version: str, namespace: str, name: str) -> Object:
        await self._call("get_pod_group", name)
        return copy.deepcopy(self._get("podgroups", namespace, name))

    async def apply_pod_group(self, obj: Object) -> Object:
        await self._call("apply_pod_group", obj["metadata"]["name"])
        return self._apply("podgroups", obj)

    async def patch_pod_group(self, group: Object, patch: Object) -> Object:
        meta = group["metadata"]
        await self._call("patch_pod_group", meta["name"])
        found = self._get("podgroups", meta["namespace"], meta["name"])
        if found["metadata"]["uid"] != meta["uid"]:
            raise ApiError(409, "Conflict", "uid")
        return self.put("podgroups", merged(found, patch))

    async def delete_pod_group(self, api_version: str, namespace: str, name: str, uid: str) -> None:
        await self._call("delete_pod_group", name)
        self._delete("podgroups", namespace, name, uid)

    async def list_workloads(self, api: str) -> Listing:
        await self._call("list_workloads", api)
        self._found(api)
        return self._list("workloads")

    async def watch_workloads(self, api: str, since: str, hear: Callable[[str, Object], None]) -> None:
        """Call `hear` for what has changed, until it is cancelled."""
        await self._call("watch_workloads", api)
        self._found(api)

        def heard(plural: str, kind: str, obj: Object) -> None:
            if plural == "workloads":
                hear(kind, obj)

        for obj in self._list("workloads").items:
            if int(obj["metadata"]["resourceVersion"]) > int(since):
                hear("MODIFIED", obj)
        self.watchers.append(heard)
        try:
            await asyncio.Event().wait()
        finally:
            self.watchers.remove(heard)

    async def create_workload(self, workload: Object) -> Object:
        await self._call("create_workload", workload["metadata"]["name"])
        self._found(workload["apiVersion"])
        self._as_kueue(lambda: kueue_standin.check_spec(workload))
        return self._create("workloads", workload)

    def _found(self, api: str) -> None:
        if api not in self.apis:
            raise ApiError(404, "NotFound", "the server could not find the requested resource")

    def _as_kueue(self, check: Callable[[], None]) -> None:
        try:
            check()
        except kueue_standin.RefusedWorkloadError as error:
            raise ApiError(422, "Invalid", f"admission webhook vworkload.kb.io denied: {error}") from error

    async def patch_workload(
        self, api: str, namespace: str, name: str, patch: Object, status: bool = False
    ) -> Object:
        await self._call("patch_workload_status" if status else "patch_workload", name)
        self._found(api)
        old = self._get("workloads", namespace, name)
        for key in ("uid", "resourceVersion"):
            if old["metadata"][key] != patch["metadata"][key]:
                raise ApiError(409, "Conflict", f"the {key} is another one")
        kept = {key: patch[key] for key in (("status",) if status else ("metadata", "spec")) if key in patch}
        new = {**merged(copy.deepcopy(old), kept), "apiVersion": api}
        self._as_kueue(lambda: kueue_standin.check_update(old, new))
        return self.put("workloads", new)

    async def delete_workload(self, api: str, namespace: str, name: str, uid: str) -> None:
        await self._call("delete_workload", name)
        self._found(api)
        if self._get("workloads", namespace, name)["metadata"]["uid"] != uid:
            raise ApiError(409, "Conflict", "the uid is another one")
        self.remove("workloads", namespace, name)

    async def get_flavor(self, api: str, name: str) -> Object:
        await self._call("get_flavor", name)
        self._found(api)
        return copy.deepcopy(self._get("resourceflavors", "", name))

    async def get_priority(self, api: str, source: str, name: str) -> int:
        await self._call("get_priority", name)
        return int(self._get(source, "", name)["value"])

    async def get_disruption_budget(self, namespace: str, name: str) -> Object:
        await self._call("get_disruption_budget", name)
        return copy.deepcopy(self._get("poddisruptionbudgets", namespace, name))

    async def apply_disruption_budget(self, obj: Object) -> Object:
        await self._call("apply_disruption_budget", obj["metadata"]["name"])
        return self._apply("poddisruptionbudgets", obj)

    async def delete_disruption_budget(self, namespace: str, name: str, uid: str) -> None:
        await self._call("delete_disruption_budget", name)
        self._delete("poddisruptionbudgets", namespace, name, uid)

    async def patch_status(
        self, namespace: str, name: str, uid: str, resource_version: str, status: Object
    ) -> Object:
        await self._call("patch_status", name)
        job = copy.deepcopy(self._get("trainingjobs", namespace, name))
        if job["metadata"]["resourceVersion"] != resource_version or job["metadata"]["uid"] != uid:
            raise ApiError(409, "Conflict", "the object has been modified")
        job["status"] = merged(job.get("status") or {}, status)
        for name in self.unknown_to_crd:  # pruned without a word
            job["status"].pop(name, None)
        return self.put("trainingjobs", job)

    async def create_event(self, event: Object) -> None:
        await self._call("create_event", event["reason"])
        self.events[event["metadata"]["name"]] = event

    async def count_event(self, namespace: str, name: str, count: int, at: str) -> None:
        await self._call("count_event", name)
        if name not in self.events:
            raise ApiError(404, "NotFound", f"the event {name} is gone")
        self.events[name] |= {"count": count, "lastTimestamp": at}

    async def get_lease(self, namespace: str, name: str) -> Object:
        await self._call("get_lease", name)
        return copy.deepcopy(self._get("leases", namespace, name))

    async def list_leases(self, name: str) -> Listing:
        await self._call("list_leases", name)
        found = self._list("leases")
        return Listing(
            [one for one in found.items if one["metadata"]["name"] == name], found.resource_version
        )

    async def create_lease(self, lease: Object) -> Object:
        await self._call("create_lease")
        return self._create("leases", lease)

    async def replace_lease(self, lease: Object) -> Object:
        await self._call("replace_lease")
        meta = lease["metadata"]
        now = self._get("leases", meta["namespace"], meta["name"])
        if now["metadata"]["resourceVersion"] != meta["resourceVersion"]:
            raise ApiError(409, "Conflict", "the object has been modified")
        return self.put("leases", copy.deepcopy(lease))


class FakeCoordinator:
    """Fake of `SyncClient` for a `CoordinatorConnection`: remembers the calls and their times, answers
    `reply` or fails.
    """

    def __init__(self) -> None:
        self.told: list[tuple[float, str, pb.SyncRequest]] = []  # monotonic seconds, address
        self.reply = pb.SyncReply(phase=pb.WAITING)
        self.error: str | None = None
        self.open = 0

    def connect(self, address: str, token: str, authority: str = "", operator_token: str = "") -> _Call:
        self.open += 1
        return _Call(self, address)


class _Call:
    def __init__(self, coordinator: FakeCoordinator, address: str) -> None:
        self._coordinator = coordinator
        self._address = address

    async def sync(self, request: pb.SyncRequest, timeout: float = 2.0) -> pb.SyncReply:
        await asyncio.sleep(0)
        coordinator = self._coordinator
        coordinator.told.append((time.monotonic(), self._address, request))
        if coordinator.error is not None:
            raise SyncError(coordinator.error, retry=True)
        reply = pb.SyncReply()
        reply.CopyFrom(coordinator.reply)
        if not reply.incarnation.number:
            reply.incarnation.number = request.incarnation_number
        return reply

    async def close(self) -> None:
        self._coordinator.open -= 1
