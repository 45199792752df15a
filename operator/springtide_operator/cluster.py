"""The port to Kubernetes: every call that the operator makes, and no other. The verbs are those of its
role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

from springtide_kube.content_types import APPLY_PATCH, MERGE_PATCH
from springtide_kube.errors import ApiError, ApiRefusal
from springtide_operator import records
from springtide_operator.api import names
from springtide_operator.kube import Kube
from springtide_operator.manifests.kueue import POD_PRIORITY_SOURCE

Object = dict[str, Any]

FIELD_MANAGER = names.MANAGER
PAGE = 250


class Listing(NamedTuple):
    """Objects, and the resourceVersion at which the list was true."""

    items: list[Object]
    resource_version: str


class Cluster(Protocol):
    """Every call raises ApiError, also for no answer in time (code 0)."""

    async def list_waiting_pods(self) -> Listing:
        """Pods of anybody's that no node has taken."""
        ...

    async def get_job(self, namespace: str, name: str) -> Object:
        """Read a TrainingJob.

        Args:
            namespace: of the object.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        ...

    async def get_template(self, kind: str, namespace: str, name: str) -> Object:
        """Read a TrainingTemplate or ClusterTrainingTemplate.

        Args:
            kind: which of the two.
            namespace: of the job that names it.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        ...

    async def get_pod(self, namespace: str, name: str) -> Object:
        """Read a pod.

        Args:
            namespace: of the object.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        ...

    async def create_pod(self, pod: Object) -> Object:
        """A field that the API server does not know is refused (400): elsewhere it would be dropped."""
        ...

    async def delete_pod(
        self, namespace: str, name: str, uid: str, because: str, grace: int | None = None
    ) -> Object:
        """Write the reason on the pod, then delete exactly what was annotated.

        Args:
            namespace: of the object.
            name: of the object.
            uid: of this very object.
            because: one word, which is written on the pod.
            grace: seconds; None: as the pod says; 0: by force, without waiting for its node's word.

        Returns:
            The server's answer: the pod, or a Status.

        Raises:
            ApiError: 409: the pod changed in between, or is another one.
        """
        ...

    async def delete_job(self, namespace: str, name: str, uid: str) -> None:
        """Delete exactly this job, and in the background what it made.

        Args:
            namespace: of the object.
            name: of the object.
            uid: of this very object.

        Raises:
            ApiError: 409: the object is another one now.
        """
        ...

    async def create_secret(self, secret: Object) -> None: ...

    async def get_service(self, namespace: str, name: str) -> Object:
        """Read a Service.

        Args:
            namespace: of the object.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        ...

    async def apply_service(self, service: Object) -> Object:
        """Change what has the uid in its metadata; without one, make it, and 409 where there is one. The
        same holds for all that is applied.
        """
        ...

    async def delete_service(self, namespace: str, name: str, uid: str) -> None:
        """Delete exactly this Service.

        Args:
            namespace: of the object.
            name: of the object.
            uid: of this very object.

        Raises:
            ApiError: 409: the object is another one now.
        """
        ...

    async def get_network_policy(self, namespace: str, name: str) -> Object:
        """Read a NetworkPolicy.

        Args:
            namespace: of the object.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        ...

    async def apply_network_policy(self, policy: Object) -> Object: ...

    async def delete_network_policy(self, namespace: str, name: str, uid: str) -> None:
        """Delete exactly this NetworkPolicy.

        Args:
            namespace: of the object.
            name: of the object.
            uid: of this very object.

        Raises:
            ApiError: 409: the object is another one now.
        """
        ...

    async def serves(self, api: str) -> bool:
        """Whether the cluster has one of `names.OPTIONAL_APIS`."""
        ...

    async def get_pod_group(self, api_version: str, namespace: str, name: str) -> Object:
        """Read a PodGroup.

        Args:
            api_version: of the scheduler's API.
            namespace: of the object.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        ...

    async def apply_pod_group(self, group: Object) -> Object: ...

    async def patch_pod_group(self, group: Object, patch: Object) -> Object:
        """Merge a patch into this very PodGroup: what is null in it goes.

        Args:
            group: as it was read.
            patch: without metadata.

        Returns:
            The object as it is now.

        Raises:
            ApiError: 409: the object is another one now.
        """
        ...

    async def delete_pod_group(self, api_version: str, namespace: str, name: str, uid: str) -> None:
        """Delete exactly this PodGroup.

        Args:
            api_version: of the scheduler's API.
            namespace: of the object.
            name: of the object.
            uid: of this very object.

        Raises:
            ApiError: 409: the object is another one now.
        """
        ...

    async def list_workloads(self, api: str) -> Listing:
        """Kueue's, those that the operator made, in a version of Kueue's API."""
        ...

    async def watch_workloads(self, api: str, since: str, hear: Callable[[str, Object], None]) -> None:
        """Call `hear(kind, workload)` for each change, until a watch ends.

        Args:
            api: version of Kueue's API.
            since: resourceVersion of the list before.
            hear: is called for ADDED, MODIFIED and DELETED.
        """
        ...

    async def create_workload(self, workload: Object) -> Object: ...

    async def patch_workload(
        self, api: str, namespace: str, name: str, patch: Object, status: bool = False
    ) -> Object:
        """Merge a patch into a Workload.

        Args:
            api: version of Kueue's API.
            namespace: of the object.
            name: of the object.
            patch: carries uid and resourceVersion.
            status: into its status subresource.

        Returns:
            The object as it is now.

        Raises:
            ApiError: 409: it was changed since.
        """
        ...

    async def delete_workload(self, api: str, namespace: str, name: str, uid: str) -> None:
        """Delete exactly this Workload.

        Args:
            api: version of Kueue's API.
            namespace: of the object.
            name: of the object.
            uid: of this very object.

        Raises:
            ApiError: 409: the object is another one now.
        """
        ...

    async def get_flavor(self, api: str, name: str) -> Object:
        """Return a ResourceFlavor of Kueue.

        Args:
            api: version of Kueue's API.
            name: of the flavor.
        """
        ...

    async def get_priority(self, api: str, source: str, name: str) -> int:
        """Return the value of a priority class of pods, or of Kueue's own kind.

        Args:
            api: version of Kueue's API.
            source: whose class it is, as Kueue names it.
            name: of the class.

        Raises:
            ApiError: 404: there is none.
        """
        ...

    async def get_disruption_budget(self, namespace: str, name: str) -> Object:
        """Read a PodDisruptionBudget.

        Args:
            namespace: of the object.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        ...

    async def apply_disruption_budget(self, budget: Object) -> Object: ...

    async def delete_disruption_budget(self, namespace: str, name: str, uid: str) -> None:
        """Delete exactly this PodDisruptionBudget.

        Args:
            namespace: of the object.
            name: of the object.
            uid: of this very object.

        Raises:
            ApiError: 409: the object is another one now.
        """
        ...

    async def patch_status(
        self, namespace: str, name: str, uid: str, resource_version: str, status: Object
    ) -> Object:
        """Merge into the status of a job.

        Args:
            namespace: of the object.
            name: of the object.
            uid: of this very object.
            resource_version: of the job as it was read.
            status: merged into the object's.

        Returns:
            The object as it is now.

        Raises:
            ApiError: 409: the job was changed since `resource_version`.
        """
        ...

    async def create_event(self, event: Object) -> None: ...

    async def count_event(self, namespace: str, name: str, count: int, at: str) -> None:
        """Say that an event has happened again.

        Args:
            namespace: of the Event.
            name: of the Event.
            count: how often it has happened.
            at: when it did last, as an Event says it.

        Raises:
            ApiError: 404: it is there no more.
        """
        ...

    async def get_lease(self, namespace: str, name: str) -> Object:
        """Read a Lease.

        Args:
            namespace: of the object.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        ...

    async def list_leases(self, name: str) -> Listing:
        """List the Leases of one name in all namespaces."""
        ...

    async def create_lease(self, lease: Object) -> Object: ...

    async def replace_lease(self, lease: Object) -> Object:
        """409 Conflict when somebody else wrote it."""
        ...

    async def get_secret(self, namespace: str, name: str) -> Object:
        """Read a Secret; used for the operator's own root key alone.

        Args:
            namespace: of the object.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        ...


class KubeCluster:
    """`Cluster` over HTTP. `namespaces`: those to list in; empty: all at once."""

    def __init__(self, kube: Kube, namespaces: tuple[str, ...] = ()) -> None:
        self._kube = kube
        self._namespaces = namespaces

    async def list_waiting_pods(self) -> Listing:
        query = {"fieldSelector": "spec.nodeName=,status.phase=Pending"}
        return await self._list_all("/api/v1", "pods", query, records.waiting_pod)

    async def _list_all(
        self, prefix: str, plural: str, query: dict[str, str], reader: records.Reader | None
    ) -> Listing:
        """List in all namespaces watched, one after the other; the lowest of their versions holds for all."""
        if not self._namespaces:
            return await self._list(f"{prefix}/{plural}", query, reader)
        found = [
            await self._list(f"{prefix}/namespaces/{_part(name)}/{plural}", query, reader)
            for name in self._namespaces
        ]
        items = [item for listing in found for item in listing.items]
        return Listing(items, min((listing.resource_version for listing in found), key=int))

    async def _list(self, path: str, query: dict[str, str], reader: records.Reader | None) -> Listing:
        """List page by page."""
        query, items = {**query, "limit": str(PAGE)}, list[Object]()
        while True:
            page = await self._kube.page(path, query, reader)
            items += page.items
            meta = page.around.get("metadata") or {}
            if not meta.get("continue"):
                return Listing(items, str(meta.get("resourceVersion") or "0"))
            query = {**query, "continue": meta["continue"]}

    async def get_job(self, namespace: str, name: str) -> Object:
        """Read a TrainingJob.

        Args:
            namespace: of the object.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        return await self._kube.request("GET", _job(namespace, name))

    async def get_template(self, kind: str, namespace: str, name: str) -> Object:
        """Read a TrainingTemplate or ClusterTrainingTemplate.

        Args:
            kind: which of the two.
            namespace: of the job that names it.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        if kind == names.CLUSTER_TEMPLATE_KIND:
            path = f"/apis/{names.API_VERSION}/{names.CLUSTER_TEMPLATE_PLURAL}/{_part(name)}"
        else:
            path = _custom(names.API_VERSION, namespace, names.TEMPLATE_PLURAL, name)
        return await self._kube.request("GET", path)

    async def get_pod(self, namespace: str, name: str) -> Object:
        """Read a pod.

        Args:
            namespace: of the object.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        return await self._kube.request("GET", _core(namespace, "pods", name))

    async def create_pod(self, pod: Object) -> Object:
        path = _core(pod["metadata"]["namespace"], "pods")
        return await self._kube.request("POST", path, pod, query={"fieldValidation": "Strict"})

    async def delete_pod(
        self, namespace: str, name: str, uid: str, because: str, grace: int | None = None
    ) -> Object:
        """Write the reason on the pod, then delete exactly what was annotated.

        Args:
            namespace: of the object.
            name: of the object.
            uid: of this very object.
            because: one word, which is written on the pod.
            grace: seconds; None: as the pod says; 0: by force, without waiting for its node's word.

        Returns:
            The server's answer: the pod, or a Status.

        Raises:
            ApiError: 409: the pod changed in between, or is another one.
        """
        path = _core(namespace, "pods", name)
        note = {"metadata": {"uid": uid, "annotations": {names.ANNOTATION_DELETED_BECAUSE: because}}}
        noted = await self._kube.request("PATCH", path, note, MERGE_PATCH)
        preconditions = {"uid": uid, "resourceVersion": noted["metadata"]["resourceVersion"]}
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": preconditions}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        return await self._kube.request("DELETE", path, body)

    async def delete_job(self, namespace: str, name: str, uid: str) -> None:
        """Delete exactly this job, and in the background what it made.

        Args:
            namespace: of the object.
            name: of the object.
            uid: of this very object.

        Raises:
            ApiError: 409: the object is another one now.
        """
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        await self._kube.request("DELETE", _job(namespace, name), body)

    async def create_secret(self, secret: Object) -> None:
        await self._kube.request("POST", _core(secret["metadata"]["namespace"], "secrets"), secret)

    async def get_service(self, namespace: str, name: str) -> Object:
        """Read a Service.

        Args:
            namespace: of the object.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        return await self._kube.request("GET", _core(namespace, "services", name))

    async def apply_service(self, service: Object) -> Object:
        return await self._apply(_core(service["metadata"]["namespace"], "services"), service)

    async def delete_service(self, namespace: str, name: str, uid: str) -> None:
        """Delete exactly this Service.

        Args:
            namespace: of the object.
            name: of the object.
            uid: of this very object.

        Raises:
            ApiError: 409: the object is another one now.
        """
        await self._delete(_core(namespace, "services", name), uid)

    async def get_network_policy(self, namespace: str, name: str) -> Object:
        """Read a NetworkPolicy.

        Args:
            namespace: of the object.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        return await self._kube.request("GET", _policies(namespace, name))

    async def apply_network_policy(self, policy: Object) -> Object:
        return await self._apply(_policies(policy["metadata"]["namespace"]), policy)

    async def delete_network_policy(self, namespace: str, name: str, uid: str) -> None:
        """Delete exactly this NetworkPolicy.

        Args:
            namespace: of the object.
            name: of the object.
            uid: of this very object.

        Raises:
            ApiError: 409: the object is another one now.
        """
        await self._delete(_policies(namespace, name), uid)

    async def serves(self, api: str) -> bool:
        try:
            found = await self._kube.request("GET", f"/apis/{api}")
        except ApiError as error:
            if is_gone(error):
                return False
            raise
        return names.OPTIONAL_APIS[api] in {entry["name"] for entry in found.get("resources") or []}

    async def get_pod_group(self, api_version: str, namespace: str, name: str) -> Object:
        """Read a PodGroup.

        Args:
            api_version: of the scheduler's API.
            namespace: of the object.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        return await self._kube.request("GET", _custom(api_version, namespace, "podgroups", name))

    async def apply_pod_group(self, group: Object) -> Object:
        path = _custom(group["apiVersion"], group["metadata"]["namespace"], "podgroups")
        return await self._apply(path, group)

    async def patch_pod_group(self, group: Object, patch: Object) -> Object:
        """Merge a patch into this very PodGroup: what is null in it goes.

        Args:
            group: as it was read.
            patch: without metadata.

        Returns:
            The object as it is now.

        Raises:
            ApiError: 409: the object is another one now.
        """
        meta = group["metadata"]
        path = _custom(group["apiVersion"], meta["namespace"], "podgroups", meta["name"])
        return await self._kube.request(
            "PATCH", path, {"metadata": {"uid": meta["uid"]}, **patch}, MERGE_PATCH
        )

    async def delete_pod_group(self, api_version: str, namespace: str, name: str, uid: str) -> None:
        """Delete exactly this PodGroup.

        Args:
            api_version: of the scheduler's API.
            namespace: of the object.
            name: of the object.
            uid: of this very object.

        Raises:
            ApiError: 409: the object is another one now.
        """
        await self._delete(_custom(api_version, namespace, "podgroups", name), uid)

    async def list_workloads(self, api: str) -> Listing:
        return await self._list_all(f"/apis/{api}", "workloads", {"labelSelector": names.OURS}, None)

    async def watch_workloads(self, api: str, since: str, hear: Callable[[str, Object], None]) -> None:
        """Call `hear(kind, workload)` for each change, until a watch ends.

        Args:
            api: version of Kueue's API.
            since: resourceVersion of the list before.
            hear: is called for ADDED, MODIFIED and DELETED.

        Raises:
            ApiError: the API server refuses, or breaks a watch off.
        """
        query = {"labelSelector": names.OURS, "resourceVersion": since}
        prefix = f"/apis/{api}"
        paths = [f"{prefix}/namespaces/{_part(name)}/workloads" for name in self._namespaces]
        watches = [
            asyncio.ensure_future(self._kube.watch(path, query, hear))
            for path in paths or [f"{prefix}/workloads"]
        ]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            for watch in done:
                watch.result()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def create_workload(self, workload: Object) -> Object:
        path = _custom(workload["apiVersion"], workload["metadata"]["namespace"], "workloads")
        return await self._kube.request("POST", path, workload)

    async def patch_workload(
        self, api: str, namespace: str, name: str, patch: Object, status: bool = False
    ) -> Object:
        """Merge a patch into a Workload.

        Args:
            api: version of Kueue's API.
            namespace: of the object.
            name: of the object.
            patch: carries uid and resourceVersion.
            status: into its status subresource.

        Returns:
            The object as it is now.

        Raises:
            ApiError: 409: it was changed since.
        """
        path = _custom(api, namespace, "workloads", name) + ("/status" if status else "")
        return await self._kube.request("PATCH", path, patch, MERGE_PATCH)

    async def delete_workload(self, api: str, namespace: str, name: str, uid: str) -> None:
        """Delete exactly this Workload.

        Args:
            api: version of Kueue's API.
            namespace: of the object.
            name: of the object.
            uid: of this very object.

        Raises:
            ApiError: 409: the object is another one now.
        """
        await self._delete(_custom(api, namespace, "workloads", name), uid)

    async def get_flavor(self, api: str, name: str) -> Object:
        """Return a ResourceFlavor of Kueue.

        Args:
            api: version of Kueue's API.
            name: of the flavor.

        Raises:
            ApiError: it cannot be read.
        """
        return await self._kube.request("GET", f"/apis/{api}/resourceflavors/{_part(name)}")

    async def get_priority(self, api: str, source: str, name: str) -> int:
        """Return the value of a priority class of pods, or of Kueue's own kind.

        Args:
            api: version of Kueue's API.
            source: whose class it is, as Kueue names it.
            name: of the class.

        Raises:
            ApiError: 404: there is none.
        """
        kind = f"/apis/{api}/workloadpriorityclasses"
        if source == POD_PRIORITY_SOURCE:
            kind = "/apis/scheduling.k8s.io/v1/priorityclasses"
        found = await self._kube.request("GET", f"{kind}/{_part(name)}")
        return int(found.get("value") or 0)

    async def get_disruption_budget(self, namespace: str, name: str) -> Object:
        """Read a PodDisruptionBudget.

        Args:
            namespace: of the object.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        return await self._kube.request("GET", _budgets(namespace, name))

    async def apply_disruption_budget(self, budget: Object) -> Object:
        return await self._apply(_budgets(budget["metadata"]["namespace"]), budget)

    async def delete_disruption_budget(self, namespace: str, name: str, uid: str) -> None:
        """Delete exactly this PodDisruptionBudget.

        Args:
            namespace: of the object.
            name: of the object.
            uid: of this very object.

        Raises:
            ApiError: 409: the object is another one now.
        """
        await self._delete(_budgets(namespace, name), uid)

    async def _apply(self, path: str, obj: Object) -> Object:
        """Change an object that is there by server-side apply, and only while it has the uid that was seen;
        make one that is not there by POST, which takes nothing over.
        """
        query = {"fieldManager": FIELD_MANAGER}
        if "uid" not in obj["metadata"]:
            return await self._kube.request("POST", path, obj, query=query)
        path += _last(obj["metadata"]["name"])
        return await self._kube.request("PATCH", path, obj, APPLY_PATCH, {**query, "force": "true"})

    async def _delete(self, path: str, uid: str) -> None:
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        await self._kube.request("DELETE", path, body)

    async def patch_status(
        self, namespace: str, name: str, uid: str, resource_version: str, status: Object
    ) -> Object:
        """Merge into the status of a job.

        Args:
            namespace: of the object.
            name: of the object.
            uid: of this very object.
            resource_version: of the job as it was read.
            status: merged into the object's.

        Returns:
            The object as it is now.

        Raises:
            ApiError: 409: the job was changed since `resource_version`.
        """
        body = {"metadata": {"uid": uid, "resourceVersion": resource_version}, "status": status}
        return await self._kube.request("PATCH", _job(namespace, name) + "/status", body, MERGE_PATCH)

    async def create_event(self, event: Object) -> None:
        await self._kube.request("POST", _core(event["metadata"]["namespace"], "events"), event)

    async def count_event(self, namespace: str, name: str, count: int, at: str) -> None:
        """Say that an event has happened again.

        Args:
            namespace: of the Event.
            name: of the Event.
            count: how often it has happened.
            at: when it did last, as an Event says it.

        Raises:
            ApiError: 404: it is there no more.
        """
        body = {"count": count, "lastTimestamp": at}
        await self._kube.request("PATCH", _core(namespace, "events", name), body, MERGE_PATCH)

    async def get_lease(self, namespace: str, name: str) -> Object:
        """Read a Lease.

        Args:
            namespace: of the object.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        return await self._kube.request("GET", _lease(namespace, name), urgent=True)

    async def list_leases(self, name: str) -> Listing:
        # A right to list may be given for one name, which the selector then has to say.
        query = {"fieldSelector": f"metadata.name={name}"}
        return await self._list(f"/apis/{_LEASES}/leases", query, None)

    async def create_lease(self, lease: Object) -> Object:
        return await self._kube.request("POST", _lease(lease["metadata"]["namespace"]), lease, urgent=True)

    async def replace_lease(self, lease: Object) -> Object:
        meta = lease["metadata"]
        return await self._kube.request("PUT", _lease(meta["namespace"], meta["name"]), lease, urgent=True)

    async def get_secret(self, namespace: str, name: str) -> Object:
        """Read a Secret; used for the operator's own root key alone.

        Args:
            namespace: of the object.
            name: of the object.

        Raises:
            ApiError: 404: there is none.
        """
        return await self._kube.request("GET", _core(namespace, "secrets", name))


def _part(text: str) -> str:
    """One segment of a path, whatever is in it: `..` and `/` must not lead to another object.

    Raises ApiError (404) for what no object can be called.
    """
    if text in ("", ".", ".."):
        raise ApiRefusal(404, "NotFound", f"{text!r} is no name of an object")
    return quote(text, safe="")


def _core(namespace: str, plural: str, name: str | None = None) -> str:
    return f"/api/v1/namespaces/{_part(namespace)}/{plural}" + _last(name)


def _custom(api_version: str, namespace: str, plural: str, name: str | None = None) -> str:
    """`api_version` is a constant of ours, never what an object says."""
    return f"/apis/{api_version}/namespaces/{_part(namespace)}/{plural}" + _last(name)


def _job(namespace: str, name: str) -> str:
    return _custom(names.API_VERSION, namespace, names.PLURAL, name)


_LEASES = "coordination.k8s.io/v1"


def _lease(namespace: str, name: str | None = None) -> str:
    return _custom(_LEASES, namespace, "leases", name)


def _policies(namespace: str, name: str | None = None) -> str:
    return _custom("networking.k8s.io/v1", namespace, "networkpolicies", name)


def _budgets(namespace: str, name: str | None = None) -> str:
    return _custom("policy/v1", namespace, "poddisruptionbudgets", name)


def _last(name: str | None) -> str:
    return "" if name is None else f"/{_part(name)}"


def is_gone(error: ApiError) -> bool:
    return error.code == 404


def merge_patch(old: Object, new: Object) -> Object:
    """Return the RFC 7386 patch that turns one object into another; empty when they are equal.

    Args:
        old: the object as it is.
        new: as it is to be.
    """
    patch: Object = {key: None for key in old if key not in new}
    for key, value in new.items():
        if key not in old:
            patch[key] = value
        elif isinstance(value, dict) and isinstance(old[key], dict):
            inner = merge_patch(old[key], value)
            if inner:
                patch[key] = inner
        elif old[key] != value:
            patch[key] = value
    return patch
