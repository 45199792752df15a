"""Jobs and their pods as last heard of: from watches, from lists, from the answers to own writes; the
newest wins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from springtide_operator.api import names
from springtide_operator.plan import observe
from springtide_operator.plan.observation import CoordinatorPod, Node, ServerPod, WorkerPod

Object = dict[str, Any]
Key = tuple[str, str]  # namespace, name of the job

TOMBSTONES = 4096


class View(NamedTuple):
    """The pods that one job controls, and the names of those that carry its name and are another's."""

    workers: tuple[WorkerPod, ...] = ()
    coordinators: tuple[CoordinatorPod, ...] = ()
    servers: tuple[ServerPod, ...] = ()
    foreign: frozenset[str] = frozenset()


class Pods:
    """The pods that carry one job's name."""

    def __init__(self) -> None:
        self.raw: dict[str, Object] = {}  # by uid
        self.workers: dict[str, WorkerPod] = {}
        self.coordinators: dict[str, CoordinatorPod] = {}
        self.servers: dict[str, ServerPod] = {}
        self._views: dict[str, View] = {}

    def changed(self) -> None:
        """After every change: what was seen before holds no more."""
        self._views.clear()

    def view(self, job_uid: str) -> View:
        """As a job of this uid sees them; asked for far more often than anything changes."""
        if job_uid not in self._views:
            own = {uid for uid, raw in self.raw.items() if observe.owned_by(raw, job_uid)}
            self._views[job_uid] = View(
                tuple(pod for uid, pod in self.workers.items() if uid in own),
                tuple(pod for uid, pod in self.coordinators.items() if uid in own),
                tuple(pod for uid, pod in self.servers.items() if uid in own),
                frozenset(raw["metadata"]["name"] for uid, raw in self.raw.items() if uid not in own),
            )
        return self._views[job_uid]

    def nodes(self) -> set[str | None]:
        found = {pod.node for pod in self.workers.values()}
        found |= {pod.node for pod in self.coordinators.values()}
        return found | {pod.node for pod in self.servers.values()}


class Cache:
    """`on_change(key)` is called for the job whose facts changed. resourceVersions compare as numbers."""

    def __init__(self, on_change: Callable[[Key], None] = lambda key: None) -> None:
        self._on_change = on_change
        self._jobs: dict[Key, Object] = {}
        self._pods: dict[Key, Pods] = {}
        self._nodes: dict[str, Node] = {}
        self._node_versions: dict[str, int] = {}
        self.nodes_listed = False
        self._stuck: dict[Key, set[str]] = {}  # uids of pods that no node takes
        self.stuck_version = 0  # grows with every change of that
        self._gone: OrderedDict[str, None] = OrderedDict()  # uids, so that a late answer revives nothing

    def job_keys(self) -> list[Key]:
        return list(self._jobs)

    def job(self, key: Key) -> Object | None:
        return self._jobs.get(key)

    def put_job(self, job: Object) -> bool:
        """False if it is older than what is known."""
        meta = job["metadata"]
        key = (meta["namespace"], meta["name"])
        known = self._jobs.get(key)
        if meta["uid"] in self._gone or not _newer(job, known):
            return False
        self._jobs[key] = job
        self._on_change(key)
        return True

    def drop_job(self, job: Object) -> None:
        meta = job["metadata"]
        key = (meta["namespace"], meta["name"])
        self._bury(meta["uid"])
        known = self._jobs.get(key)
        if known is not None and known["metadata"]["uid"] == meta["uid"]:
            del self._jobs[key]
            self._on_change(key)

    def pods(self, key: Key, job_uid: str) -> tuple[tuple[WorkerPod, ...], tuple[CoordinatorPod, ...]]:
        """Those that this very job controls."""
        found = self._pods.get(key)
        view = found.view(job_uid) if found is not None else View()
        return view.workers, view.coordinators

    def servers(self, key: Key, job_uid: str) -> tuple[ServerPod, ...]:
        """The parameter servers that this very job controls."""
        found = self._pods.get(key)
        return found.view(job_uid).servers if found is not None else ()

    def crowded_jobs(self) -> list[Key]:
        """Those with a pod that no node takes."""
        return list(self._stuck)

    def foreign_names(self, key: Key, job_uid: str) -> frozenset[str]:
        """Names of pods that carry the job's name and belong to another, such as an earlier job of that
        name.
        """
        found = self._pods.get(key)
        return found.view(job_uid).foreign if found is not None else frozenset()

    def put_pod(self, pod: Object) -> bool:
        """False if it is older than what is known, or none of ours."""
        key = _job_of(pod)
        uid = pod["metadata"]["uid"]
        if key is None or uid in self._gone:
            return False
        pods = self._pods.setdefault(key, Pods())
        if not _newer(pod, pods.raw.get(uid)):
            return False
        pods.raw[uid] = pod
        role = observe.role_of(pod)
        if role == names.ROLE_WORKER and (worker := observe.worker_pod(pod)) is not None:
            pods.workers[uid] = worker
        elif role == names.ROLE_COORDINATOR and (coordinator := observe.coordinator_pod(pod)) is not None:
            pods.coordinators[uid] = coordinator
        elif role == names.ROLE_PARAMETER_SERVER and (server := observe.server_pod(pod)) is not None:
            pods.servers[uid] = server
        self._mark_stuck(key, uid, observe.unplaced(pod) is not None)
        pods.changed()
        self._on_change(key)
        return True

    def drop_pod(self, pod: Object) -> None:
        self._forget(_job_of(pod), pod["metadata"]["uid"])

    def drop_pod_uid(self, key: Key, uid: str) -> None:
        self._forget(key, uid)

    def replace_jobs(self, items: Iterable[Object], resource_version: str) -> None:
        """Take a whole list: what it lacks is gone, unless it is newer than the list."""
        items = list(items)
        listed = {item["metadata"]["uid"] for item in items}
        for job in list(self._jobs.values()):
            if job["metadata"]["uid"] not in listed and _version(job) <= int(resource_version):
                self.drop_job(job)
        for item in items:
            self.put_job(item)

    def replace_pods(self, items: Iterable[Object], resource_version: str) -> None:
        items = list(items)
        listed = {item["metadata"]["uid"] for item in items}
        for pods in list(self._pods.values()):
            for pod in list(pods.raw.values()):
                if pod["metadata"]["uid"] not in listed and _version(pod) <= int(resource_version):
                    self.drop_pod(pod)
        for item in items:
            self.put_pod(item)

    def nodes(self) -> Mapping[str, Node] | None:
        """By name, also those that were deleted; None where they cannot be read."""
        return self._nodes if self.nodes_listed else None

    def put_node(self, obj: Object) -> None:
        if _version(obj) > self._node_versions.get(obj["metadata"]["name"], -1):
            self._set_node(_version(obj), observe.node(obj))

    def drop_node(self, obj: Object) -> None:
        self._set_node(_version(obj), Node(obj["metadata"]["name"], ready=None, gone=True))

    def replace_nodes(self, items: Iterable[Object], resource_version: str) -> None:
        """Take a whole list. Nodes that are gone are remembered while pods are said to be on them."""
        items = list(items)
        self.nodes_listed = True
        listed = {item["metadata"]["name"] for item in items}
        for name, node in list(self._nodes.items()):
            if name in listed or self._node_versions[name] > int(resource_version):
                continue
            if not node.gone:
                self._set_node(int(resource_version), Node(name, ready=None, gone=True))
            if not self._jobs_on(name):
                del self._nodes[name], self._node_versions[name]
        for item in items:
            self.put_node(item)

    def _set_node(self, version: int, node: Node) -> None:
        """Tell the jobs that have pods there, if it is news."""
        known = self._nodes.get(node.name)
        self._nodes[node.name], self._node_versions[node.name] = node, version
        if known != node:
            for key in self._jobs_on(node.name):
                self._on_change(key)

    def _jobs_on(self, node: str) -> list[Key]:
        return [key for key, pods in self._pods.items() if node in pods.nodes()]

    def _forget(self, key: Key | None, uid: str) -> None:
        self._bury(uid)
        pods = self._pods.get(key) if key is not None else None
        if key is None or pods is None or uid not in pods.raw:
            return
        pods.raw.pop(uid)
        self._mark_stuck(key, uid, False)
        pods.workers.pop(uid, None)
        pods.coordinators.pop(uid, None)
        pods.servers.pop(uid, None)
        pods.changed()
        if not pods.raw:
            del self._pods[key]
        self._on_change(key)

    def _mark_stuck(self, key: Key, uid: str, stuck: bool) -> None:
        known = self._stuck.get(key, set())
        if stuck == (uid in known):
            return
        self.stuck_version += 1
        if stuck:
            self._stuck.setdefault(key, set()).add(uid)
        else:
            known.discard(uid)
            if not known:
                del self._stuck[key]

    def _bury(self, uid: str) -> None:
        self._gone[uid] = None
        while len(self._gone) > TOMBSTONES:
            self._gone.popitem(last=False)


def _job_of(pod: Object) -> Key | None:
    meta = pod["metadata"]
    job = (meta.get("labels") or {}).get(names.LABEL_JOB)
    return (meta["namespace"], job) if job else None


def _version(obj: Object) -> int:
    text = obj["metadata"].get("resourceVersion", "0")
    return int(text) if text.isdigit() else 0


def _newer(obj: Object, known: Object | None) -> bool:
    return known is None or _version(obj) > _version(known)
