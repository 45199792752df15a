"""Jobs and their pods as last heard of: from watches, from lists, from the answers to own writes; the newest
wins.

Tasks: used in the operator's event loop alone, without locks; no method awaits, so readers see each object
whole.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from springtide_operator import records
from springtide_operator.api import names
from springtide_operator.plan import observe
from springtide_operator.plan.observation import CoordinatorPod, Node, ServerPod, WorkerPod

Object = dict[str, Any]
Key = tuple[str, str]  # namespace, name of the job
AnyPod = WorkerPod | CoordinatorPod | ServerPod

TOMBSTONES = 4096
UNCLAIMED = 256  # pods kept in full until their job is heard of


class View(NamedTuple):
    """The pods that one job controls, and the names of those that carry its name and are another's."""

    workers: tuple[WorkerPod, ...] = ()
    coordinators: tuple[CoordinatorPod, ...] = ()
    servers: tuple[ServerPod, ...] = ()
    foreign: frozenset[str] = frozenset()
    unreadable: tuple[str, ...] = ()


class Known(NamedTuple):
    """A pod, whatever its role: which one, how new, and the uid of the job that controls it."""

    name: str
    version: int
    owner: str
    stranger: bool = False  # its controller is no job that is known, so nothing else is kept of it


class Protecting(NamedTuple):
    """A NetworkPolicy or disruption budget, of which only matters whether it is as it was applied."""

    uid: str
    generation: int | None  # of its spec


class Pods:
    """The pods that carry one job's name, and that some job controls."""

    def __init__(self) -> None:
        self.known: dict[str, Known] = {}  # by uid
        self.workers: dict[str, WorkerPod] = {}
        self.coordinators: dict[str, CoordinatorPod] = {}
        self.servers: dict[str, ServerPod] = {}
        self.unreadable: dict[str, str] = {}  # why a pod cannot be observed
        self.asked_to_go: dict[str, tuple[float, object]] = {}  # by uid: since when, with which grace
        # Of coordinators, by uid: when the start of their container was first seen, and which start that was.
        self.runs: dict[str, tuple[float, float | None]] = {}
        self._views: dict[str, View] = {}

    def changed(self) -> None:
        """Drop the views that were made, since one of the pods changed."""
        self._views.clear()

    def view(self, job_uid: str) -> View:
        """Return the pods as a job of this uid sees them.

        Views are kept: they are asked for far more often than anything changes.
        """
        if job_uid not in self._views:
            own = {uid for uid, pod in self.known.items() if pod.owner == job_uid}
            self._views[job_uid] = View(
                tuple(pod for uid, pod in self.workers.items() if uid in own),
                tuple(pod for uid, pod in self.coordinators.items() if uid in own),
                tuple(pod for uid, pod in self.servers.items() if uid in own),
                frozenset(pod.name for uid, pod in self.known.items() if uid not in own),
                tuple(text for uid, text in self.unreadable.items() if uid in own),
            )
        return self._views[job_uid]

    def observe(self, uid: str, pod: Object, now: float) -> None:
        """Take the pod as it is now. One that cannot be read is told of, and is the job's to bear.

        Args:
            uid: of the pod.
            pod: as the API server gives it, cut to what is read.
            now: by the clock from which it is counted for how long the pod has been going.
        """
        role = observe.role_of(pod)
        self.unreadable.pop(uid, None)
        if names.UNREADABLE in pod:
            self.unreadable[uid] = f"the pod {pod['metadata']['name']}: {pod[names.UNREADABLE]}"
            return
        try:
            if role == names.ROLE_WORKER and (worker := observe.worker_pod(pod)) is not None:
                self.workers[uid] = replace(worker, going_since=self._going_since(pod, now))
            elif role == names.ROLE_COORDINATOR and (found := observe.coordinator_pod(pod)) is not None:
                seen = self._running_seen_at(uid, found.running_since, now)
                self.coordinators[uid] = replace(
                    found, going_since=self._going_since(pod, now), running_seen_at=seen
                )
            elif role == names.ROLE_PARAMETER_SERVER and (server := observe.server_pod(pod)) is not None:
                self.servers[uid] = replace(server, going_since=self._going_since(pod, now))
        except Exception as error:  # what nobody foresaw in one pod must not hide all others
            text = f"{type(error).__name__}: {str(error)[:200]}"
            self.unreadable[uid] = f"the pod {pod['metadata']['name']} cannot be read ({text})"

    def _going_since(self, pod: Object, now: float) -> float | None:
        """Return when it was first seen that the pod is to go within its present grace period; None while it
        may stay.
        """
        meta = pod["metadata"]
        if "deletionTimestamp" not in meta:
            return None
        asked = meta["deletionTimestamp"], meta.get("deletionGracePeriodSeconds")
        if self.asked_to_go.get(meta["uid"], (0.0, None))[1] != asked:
            self.asked_to_go[meta["uid"]] = now, asked
        return self.asked_to_go[meta["uid"]][0]

    def _running_seen_at(self, uid: str, since: float | None, now: float) -> float | None:
        """Return when a coordinator's container was first seen to run since its present start; None while it
        does not run.
        """
        if since is None:
            return None
        if self.runs.get(uid, (0.0, None))[1] != since:
            self.runs[uid] = now, since
        return self.runs[uid][0]

    def forget(self, uid: str) -> None:
        """The pod is gone."""
        self.known.pop(uid, None)
        self.forget_facts(uid)

    def forget_facts(self, uid: str) -> None:
        """The pod is nobody's whose job is known: only its name matters."""
        self.runs.pop(uid, None)
        self.asked_to_go.pop(uid, None)
        self.unreadable.pop(uid, None)
        self.workers.pop(uid, None)
        self.coordinators.pop(uid, None)
        self.servers.pop(uid, None)

    def nodes(self) -> set[str | None]:
        found = {pod.node for pod in self.workers.values()}
        found |= {pod.node for pod in self.coordinators.values()}
        return found | {pod.node for pod in self.servers.values()}


class Cache:
    """Cache of the cluster's objects, by job.

    resourceVersions compare as numbers, until `distrust` says that those of a kind count no more.

    Of a pod whose controller is not the job of its label's name, only the name is kept, since no pod may get
    it. News of a pod may come before those of its job, so the latest few are kept for that.

    Jobs of another class are another release's: as if they did not exist.
    """

    def __init__(
        self,
        on_change: Callable[[Key], None] = lambda key: None,
        clock: Callable[[], float] = time.monotonic,
        managed_by: str = names.DEFAULT_CLASS,
        on_lack: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            on_change: is called for the job whose facts changed.
            clock: seconds that never jump. Times that may cost a pod its life are counted from when a fact
                was first seen here.
            on_lack: is called when a job has pods of which nothing is known any more, so that all pods are to
                be listed.
        """
        self._on_change = on_change
        self._managed_by = managed_by
        self._on_lack = on_lack
        self.clock = clock
        self._jobs: dict[Key, Object] = {}
        self._job_versions: dict[Key, int] = {}
        self._pods: dict[Key, Pods] = {}
        self._job_of_pod: dict[str, Key] = {}  # by uid
        self._unclaimed: OrderedDict[str, Object] = OrderedDict()  # pods by uid, the latest last
        self._nodes: dict[str, Node] = {}
        self._node_versions: dict[str, tuple[int, str]] = {}  # by name: version, uid
        self.nodes_listed = False
        self.protection_listed: set[str] = set()  # plurals of what is watched of what protects jobs
        self._protection: dict[Key, dict[tuple[str, str], Protecting]] = {}  # by plural and name
        self._protection_versions: dict[str, tuple[int, Key, tuple[str, str]]] = {}  # by uid
        self._stuck: dict[Key, set[str]] = {}  # uids of pods that no node takes
        self.stuck_version = 0  # grows with every change of that
        self._gone: OrderedDict[str, None] = OrderedDict()  # uids, so that a late answer revives nothing

    def job_keys(self) -> list[Key]:
        return list(self._jobs)

    def job(self, key: Key) -> Object | None:
        return self._jobs.get(key)

    def put_job(self, job: Object) -> bool:
        """False if it is older than what is known, or another release's."""
        if records.job_class(job) != self._managed_by:
            return False
        meta = job["metadata"]
        key = (meta["namespace"], meta["name"])
        known = self._jobs.get(key)
        if meta["uid"] in self._gone or (known is not None and _version(job) <= self._job_versions[key]):
            return False
        self._jobs[key] = records.read(job, records.job)
        self._job_versions[key] = _version(job)
        if known is None or known["metadata"]["uid"] != meta["uid"]:
            self._adopt(key, meta["uid"])
        self._on_change(key)
        return True

    def put_job_again(self, job: Object, before: Object) -> None:
        """Take a job that was read again, since a write was refused that rested on what was read before.

        Where it is the older of the two, the API server has gone back, and everything is to be listed.

        Args:
            job: as it is now.
            before: the same as it was read before.
        """
        if not self.put_job(job) and _version(job) < _version(before):
            self._on_lack()

    def distrust(self, plural: str) -> None:
        """Take whatever comes next of a kind for newer than what is known, since the API server has gone
        back. All known objects stay until then, and those that the next list lacks go; deleted ones may be
        there again.

        Args:
            plural: what objects of that kind are called in URLs.
        """
        self._gone.clear()
        if plural == names.PLURAL:
            self._job_versions = dict.fromkeys(self._job_versions, -1)
        elif plural == "pods":
            for pods in self._pods.values():
                pods.known = {uid: known._replace(version=-1) for uid, known in pods.known.items()}
        elif plural == "nodes":
            self._node_versions = {name: (-1, uid) for name, (_, uid) in self._node_versions.items()}
        else:
            for uid, (_, key, where) in self._protection_versions.items():
                if where[0] == plural:
                    self._protection_versions[uid] = -1, key, where

    def _adopt(self, key: Key, job_uid: str) -> None:
        """Observe the pods that came before their job."""
        pods, lacking = self._pods.get(key), False
        for uid, known in list(pods.known.items()) if pods is not None else []:
            if known.stranger and known.owner == job_uid:
                found = self._unclaimed.pop(uid, None)
                lacking = lacking or found is None
                self._forget(key, uid, for_ever=False)
                if found is not None:
                    self.put_pod(found)
        if lacking:
            self._on_lack()

    def drop_job(self, job: Object) -> None:
        meta = job["metadata"]
        key = (meta["namespace"], meta["name"])
        self._bury(meta["uid"])
        known = self._jobs.get(key)
        if known is not None and known["metadata"]["uid"] == meta["uid"]:
            del self._jobs[key], self._job_versions[key]
            self._on_change(key)

    def pods(self, key: Key, job_uid: str) -> tuple[tuple[WorkerPod, ...], tuple[CoordinatorPod, ...]]:
        """Return the worker and coordinator pods that this very job controls.

        Args:
            key: namespace and name of the job.
            job_uid: its uid.
        """
        found = self._pods.get(key)
        view = found.view(job_uid) if found is not None else View()
        return view.workers, view.coordinators

    def servers(self, key: Key, job_uid: str) -> tuple[ServerPod, ...]:
        """Return the parameter servers that this very job controls.

        Args:
            key: namespace and name of the job.
            job_uid: of this very job; pods of an earlier one of its name do not count.
        """
        found = self._pods.get(key)
        return found.view(job_uid).servers if found is not None else ()

    def crowded_jobs(self) -> list[Key]:
        """Return the jobs with a pod that no node takes."""
        return list(self._stuck)

    def foreign_names(self, key: Key, job_uid: str) -> frozenset[str]:
        """Return the names of pods that carry the job's name and belong to another, such as an earlier job of
        that name.

        Args:
            key: namespace and name of the job.
            job_uid: of this very job; pods of an earlier one of its name do not count.
        """
        found = self._pods.get(key)
        return found.view(job_uid).foreign if found is not None else frozenset()

    def put_pod(self, pod: Object) -> bool:
        """False if it is older than what is known, or none of ours."""
        key = _job_of(pod)
        uid, owner = pod["metadata"]["uid"], records.controller(pod)
        before = self._job_of_pod.get(uid)
        if before is not None and (before != key or owner is None):  # its label or controller was taken away
            self._forget(before, uid, for_ever=False)
        if key is None or owner is None or uid in self._gone:
            return False
        pods = self._pods.setdefault(key, Pods())
        known, version = pods.known.get(uid), _version(pod)
        if known is not None and version <= known.version:
            return False
        pod = records.read(pod, records.pod)
        job = self._jobs.get(key)
        stranger = job is None or job["metadata"]["uid"] != owner
        name = pod["metadata"]["name"]
        pods.known[uid] = Known(name, version, sys.intern(owner), stranger)
        self._job_of_pod[uid] = key
        if stranger:
            pods.forget_facts(uid)
            self._keep_stranger(uid, pod)
        else:
            pods.observe(uid, pod, self.clock())
        stuck = not stranger and uid not in pods.unreadable and observe.unplaced(pod) is not None
        self._mark_stuck(key, uid, stuck)
        pods.changed()
        self._on_change(key)
        return True

    def _keep_stranger(self, uid: str, pod: Object) -> None:
        self._unclaimed[uid] = pod
        self._unclaimed.move_to_end(uid)
        while len(self._unclaimed) > UNCLAIMED:
            self._unclaimed.popitem(last=False)

    def unreadable(self, key: Key, job_uid: str) -> tuple[str, ...]:
        """Return why pods that this very job controls cannot be observed.

        Args:
            key: namespace and name of the job.
            job_uid: of this very job; pods of an earlier one of its name do not count.
        """
        found = self._pods.get(key)
        return found.view(job_uid).unreadable if found is not None else ()

    def drop_pod(self, pod: Object) -> None:
        self._forget(_job_of(pod), pod["metadata"]["uid"])

    def drop_pod_uid(self, key: Key, uid: str) -> None:
        """Forget a pod that is gone.

        Args:
            key: namespace and name of the job.
            uid: of the pod.
        """
        self._forget(key, uid)

    def keep_jobs(self, uids: set[str], resource_version: str, namespace: str = "") -> None:
        """Learn which jobs there are: any other is gone, unless it is newer than the list.

        Args:
            uids: of all jobs that were listed.
            resource_version: of the list, a whole number as text.
            namespace: which was listed; "": all of them.
        """
        for key, job in list(self._jobs.items()):
            gone = job["metadata"]["uid"] not in uids and self._job_versions[key] <= int(resource_version)
            if gone and namespace in ("", key[0]):
                self.drop_job(job)

    def keep_pods(self, uids: set[str], resource_version: str, namespace: str = "") -> None:
        """Learn which pods there are: any other is gone, unless it is newer than the list.

        Args:
            uids: of all pods that were listed.
            resource_version: of the list, a whole number as text.
            namespace: which was listed; "": all of them.
        """
        for key, pods in list(self._pods.items()):
            if namespace in ("", key[0]):
                for uid, known in list(pods.known.items()):
                    if uid not in uids and known.version <= int(resource_version):
                        self._forget(key, uid)

    def protection(self, key: Key) -> Mapping[tuple[str, str], Protecting]:
        """Return by plural and name the NetworkPolicies and disruption budgets that carry a job's name."""
        return self._protection.get(key, {})

    def put_protection(self, plural: str, obj: Object) -> None:
        """Take a NetworkPolicy or a disruption budget as it is now.

        Args:
            plural: what objects of that kind are called in URLs.
            obj: the object.
        """
        key, meta, version = _job_of(obj), obj["metadata"], _version(obj)
        uid, where = meta["uid"], (plural, meta["name"])
        known = self._protection_versions.get(uid)
        if key is None or uid in self._gone or (known is not None and version <= known[0]):
            return
        self._protection_versions[uid] = version, key, where
        seen = Protecting(uid, meta.get("generation"))
        of_job = self._protection.setdefault(key, {})
        if of_job.get(where) != seen:  # status is nobody's news here
            of_job[where] = seen
            self._on_change(key)

    def drop_protection(self, obj: Object) -> None:
        """Forget a NetworkPolicy or a disruption budget that was deleted."""
        uid = obj["metadata"]["uid"]
        self._bury(uid)
        _, key, where = self._protection_versions.pop(uid, (0, ("", ""), ("", "")))
        of_job = self._protection.get(key, {})
        if where in of_job and of_job[where].uid == uid:
            del of_job[where]
            if not of_job:
                del self._protection[key]
            self._on_change(key)

    def keep_protection(
        self, plural: str, uids: set[str], resource_version: str, namespace: str = ""
    ) -> None:
        """Learn which objects of a kind there are: any other is gone, unless it is newer than the list.

        Args:
            plural: what objects of that kind are called in URLs.
            uids: of all objects that were listed.
            resource_version: of the list, a whole number as text.
            namespace: which was listed; "": all of them.
        """
        self.protection_listed.add(plural)
        for uid, (version, key, where) in list(self._protection_versions.items()):
            gone = uid not in uids and version <= int(resource_version) and where[0] == plural
            if gone and namespace in ("", key[0]):
                self.drop_protection({"metadata": {"uid": uid}})

    def nodes(self) -> Mapping[str, Node] | None:
        """Return the nodes by name, also those that were deleted; None where they cannot be read."""
        return self._nodes if self.nodes_listed else None

    def put_node(self, obj: Object) -> None:
        if _version(obj) > self._node_version(obj["metadata"]["name"]):
            self._set_node(obj, observe.node(obj))

    def drop_node(self, obj: Object) -> None:
        self._set_node(obj, Node(obj["metadata"]["name"], ready=None, gone=True))

    def keep_nodes(self, uids: set[str], resource_version: str) -> None:
        """Learn which nodes there are. Those that are gone are remembered while pods are said to be on them.

        Args:
            uids: of all nodes that were listed.
            resource_version: of the list, a whole number as text.
        """
        self.nodes_listed = True
        for name, node in list(self._nodes.items()):
            version, uid = self._node_versions[name]
            if (uid in uids and not node.gone) or version > int(resource_version):
                continue
            if not node.gone:
                meta = {"name": name, "uid": uid, "resourceVersion": resource_version}
                self._set_node({"metadata": meta}, Node(name, ready=None, gone=True))
            if not self._jobs_on(name):
                del self._nodes[name], self._node_versions[name]

    def _node_version(self, name: str) -> int:
        return self._node_versions.get(name, (-2, ""))[0]

    def _set_node(self, obj: Object, node: Node) -> None:
        """Tell the jobs that have pods there, if it is news."""
        known = self._nodes.get(node.name)
        same = known is not None and (known.ready, known.gone) == (node.ready, node.gone)
        node = replace(node, since=known.since if known is not None and same else self.clock())
        self._nodes[node.name] = node
        self._node_versions[node.name] = _version(obj), str(obj["metadata"].get("uid"))
        if known != node:
            for key in self._jobs_on(node.name):
                self._on_change(key)

    def _jobs_on(self, node: str) -> list[Key]:
        return [key for key, pods in self._pods.items() if node in pods.nodes()]

    def _forget(self, key: Key | None, uid: str, for_ever: bool = True) -> None:
        if for_ever:
            self._bury(uid)
        self._job_of_pod.pop(uid, None)
        self._unclaimed.pop(uid, None)
        pods = self._pods.get(key) if key is not None else None
        if key is None or pods is None or uid not in pods.known:
            return
        self._mark_stuck(key, uid, False)
        pods.forget(uid)
        pods.changed()
        if not pods.known:
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
