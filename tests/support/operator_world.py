"""A cluster in memory for the operator's plan: pods as the API server shows them, disturbances, operators
that die.

Time is a number of seconds and moves only when a test says so.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import kueue_standin

from springtide_local.api.patch import merge_patch as merged
from springtide_operator.api import names
from springtide_operator.api.job import Job
from springtide_operator.manifests import kueue
from springtide_operator.manifests.coordinator import coordinator_pod, secret
from springtide_operator.manifests.server import server_pod
from springtide_operator.manifests.worker import worker_pod
from springtide_operator.plan import keys, observe
from springtide_operator.plan.actions import (
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
    Plan,
    ReportWorkload,
    UpdateWorkload,
)
from springtide_operator.plan.decide import plan
from springtide_operator.plan.kueue import limited
from springtide_operator.plan.ledger import timestamp
from springtide_operator.plan.observation import (
    MemberReport,
    Node,
    Observation,
    Refusal,
    Report,
    ServerReport,
    ServiceSeen,
    newest_served,
)
from springtide_operator.plan.retry import refuse
from springtide_operator.plan.workload import job_workload_seen

Object = dict[str, Any]


def copied(thing: Object) -> Object:
    """Return a copy of an object of the API and of all that it holds, in a third of copy.deepcopy's time:
    random histories have thousands of rounds, and each copies the status."""
    copy: Object = pickle.loads(pickle.dumps(thing, pickle.HIGHEST_PROTOCOL))
    return copy


def job_object(replicas: int = 3, **workers: Any) -> Object:
    """A TrainingJob as the API server gives it back."""
    template = {"spec": {"containers": [{"name": "worker", "image": "img", "command": ["python", "t.py"]}]}}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {
            "name": "digits",
            "namespace": "default",
            "uid": "job-uid-1234",
            "generation": 1,
            "resourceVersion": "1",
        },
        "spec": {
            "workers": {"replicas": replicas, "template": template, **workers},
            "failurePolicy": {"backoffLimit": 6},
        },
    }


def avoided(pod: Object) -> set[str]:
    """Names of the nodes that a pod must not be on."""
    affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    fields = [f for term in required.get("nodeSelectorTerms") or [] for f in term.get("matchFields") or []]
    return {name for found in fields if found["operator"] == "NotIn" for name in found["values"]}


def finished_message(incarnation: int) -> str:
    return json.dumps(
        {
            "outcome": "Finished",
            "incarnation": [incarnation, 0],
            "generation": 7,
            "step": 2400,
            "data": {"epoch": 300, "seen": 0, "repeated": 0, "lost": 0, "skipped": 0, "totalSeen": 431100},
            "values": {"test_accuracy": 0.978},
        }
    )


@dataclass
class World:
    """`round()` is one round of an operator; `memory` is what dies with it."""

    job: Object = field(default_factory=job_object)
    now: float = 1_800_000_000.0
    pods: dict[str, Object] = field(default_factory=dict)  # by uid
    service: ServiceSeen | None = None
    service_gone: bool = False
    report: Report | None = None
    coordinator_image: str = ""  # of the operator that acts
    server_image: str = ""  # the same
    apis: dict[str, bool] = field(default_factory=dict)  # optional ones: served or not
    pod_group: str = ""  # the version that was applied
    pod_group_gone: bool = False
    pod_groups: dict[str, int] = field(default_factory=dict)  # minMember by name
    workload: Object | None = None  # Kueue's: the job's first, or that which has taken its place
    successor: Object | None = None  # that is to take its place
    workloads_listed: bool = True
    flavors: dict[str, Object | str] = field(default_factory=dict)
    secret_made: bool = False
    secret_made_at: float = 0.0
    secret_version: str = ""
    key: str = ""  # id of the newest key; "": keys are not looked after
    certificate_seconds: float = 90 * 86_400.0
    secrets: set[str] = field(default_factory=set)  # names of those that were made
    refusals: dict[str, Refusal] = field(default_factory=dict)
    refuse_workers: tuple[int, str] | None = None  # code, message
    server_budget: int | None = None
    refuse_servers: tuple[int, str] | None = None  # code, message
    names_used: dict[str, str] = field(default_factory=dict)  # name: uid of its last holder
    recorded: set[str] = field(default_factory=set)  # uids that were in status
    incarnations_made: list[int] = field(default_factory=list)
    failed_by_themselves: set[str] = field(default_factory=set)
    counter: int = 0
    deleted: bool = False  # the operator has deleted the job
    unreachable_since: float | None = None
    nodes: dict[str, Node] = field(default_factory=dict)  # empty: they cannot be read, and do not matter

    # ---- the operator ----

    def parsed(self) -> Job:
        return Job.parse(self.job)

    def observe_job(self) -> Job:
        """Return the job as the operator's loop reads it, with the sizes that its queue admitted."""
        return limited(self.parsed())

    @property
    def status(self) -> Object:
        return dict(self.job.get("status") or {})

    def shown(self) -> Iterable[Object]:
        """The pods that the operator knows of."""
        return self.pods.values()

    def observe(self) -> Observation:
        workers, coordinators, servers = [], [], []
        for pod in self.shown():
            if observe.role_of(pod) == names.ROLE_WORKER:
                workers.append(observe.worker_pod(pod))
            elif observe.role_of(pod) == names.ROLE_PARAMETER_SERVER:
                servers.append(observe.server_pod(pod))
            else:
                coordinators.append(observe.coordinator_pod(pod))
        return Observation(
            workers=tuple(w for w in workers if w is not None),
            coordinators=tuple(c for c in coordinators if c is not None),
            servers=tuple(s for s in servers if s is not None),
            server_budget=self.server_budget,
            service=self.service,
            service_gone=self.service_gone,
            secret_made=self.secret_made,
            apis=dict(self.apis),
            workload=job_workload_seen(filter(None, (self.workload, self.successor)), self.flavors),
            workloads_listed=self.workloads_listed,
            pod_group=self.pod_group,
            pod_group_gone=self.pod_group_gone,
            secret_made_at=self.secret_made_at,
            secret_version=self.secret_version,
            key=self.key,
            certificate_seconds=self.certificate_seconds,
            report=self.report,
            coordinator_image=self.coordinator_image,
            server_image=self.server_image,
            refusals=dict(self.refusals),
            unreachable_since=self.unreachable_since,
            nodes=dict(self.nodes) or None,
        )

    def plan(self) -> Plan:
        return plan(self.parsed(), self.observe(), self.now)

    def round(self, stop_after: int | None = None) -> Plan:
        """Plan, write status, act. `stop_after`: the operator dies after that many of these steps."""
        decided = self.plan()
        left = stop_after if stop_after is not None else 1 + len(decided.actions)
        if left <= 0:
            return decided
        self.write(decided.status)
        for action in decided.actions[: left - 1]:
            self.act(action)
        return decided

    def round_until(self, condition: Callable[[], object], what: str, seconds: float = 3600.0) -> None:
        """Let half a second pass and the operator decide again, until it holds.

        Args:
            condition: to wait for.
            what: it is, for the message.
            seconds: of the world's time.

        Raises:
            AssertionError: it does not come within these.
        """
        began = self.now
        while not condition():
            assert self.now < began + seconds, f"{what} does not come within {seconds:g} s: {self.status}"
            self.now += 0.5
            self.round()

    def write(self, status: Object) -> None:
        self.job["status"] = copied(status)
        slots = [*status["slots"].values(), *(status.get("serverSlots") or {}).values()]
        self.recorded |= {slot["uid"] for slot in slots if "uid" in slot}

    def die(self) -> None:
        """The operator's process ends; the next one knows only what the cluster knows."""
        self.secret_made = False
        self.service, self.service_gone = None, False
        self.server_budget = None
        self.pod_group, self.pod_group_gone = "", False
        self.report = None
        self.refusals.clear()

    def act(self, action: object) -> None:
        job = self.parsed()
        if isinstance(action, EnsureSecret):
            self.secret_made, self.secret_made_at = True, self.now
            self.secret_version = keys.version(job)
            self.secrets.add(secret(job, {})["metadata"]["name"])
        elif isinstance(action, ApplyService):
            self.service = ServiceSeen("10.0.0.1:7070", action.incarnation, self.now)
        elif isinstance(action, CreateCoordinator):
            assert action.incarnation not in self.incarnations_made, "an incarnation is used once"
            assert self.status["coordinator"]["incarnation"] == action.incarnation, "raised before it is used"
            self.incarnations_made.append(action.incarnation)
            self.add(coordinator_pod(job, action.incarnation, action.image or names.OPERATOR_IMAGE))
        elif isinstance(action, CreateWorker):
            assert self.status["slots"][str(action.slot)]["attempt"] == action.attempt, (
                "raised before it is used"
            )
            if self.refuse_workers is not None:
                code, message = self.refuse_workers
                before = self.refusals.get("worker")
                self.refusals["worker"] = refuse(before, code, message, self.now)
                return
            self.refusals.pop("worker", None)
            name = names.worker_name(job.name, action.slot, action.attempt)
            if not any(pod["metadata"]["name"] == name for pod in self.pods.values()):
                self.add(worker_pod(job, action.slot, action.attempt, action.address, action.avoid))
        elif isinstance(action, CreateServer):
            assert self.status["serverSlots"][str(action.slot)]["attempt"] == action.attempt, (
                "raised before it is used"
            )
            if self.refuse_servers is not None:
                code, message = self.refuse_servers
                self.refusals["server"] = refuse(self.refusals.get("server"), code, message, self.now)
                return
            self.refusals.pop("server", None)
            name = names.server_name(job.name, action.slot, action.attempt)
            if not any(pod["metadata"]["name"] == name for pod in self.pods.values()):
                image = action.image or names.PARAMETER_SERVER_IMAGE
                self.add(server_pod(job, action.slot, action.attempt, action.address, image))
        elif isinstance(action, ApplyServerBudget):
            self.server_budget = action.servers
        elif isinstance(action, DeleteJob):
            self.deleted = True
        elif isinstance(action, ApplyPodGroup):
            self.pod_group, self.pod_group_gone = action.version, False
            self.pod_groups[self.status["gang"]["podGroup"]] = action.min_member
        elif isinstance(action, DeletePodGroup):
            self.pod_group, self.pod_group_gone = "", True
            self.pod_groups.pop(action.name, None)
        elif isinstance(action, CreateWorkload | UpdateWorkload | ReportWorkload | DeleteWorkload):
            self.act_on_workload(action)
        elif isinstance(action, DeleteService):
            self.service, self.service_gone = None, True
        elif isinstance(action, DeletePod):
            pod = self.pods.get(action.uid)
            if pod is not None and action.force:
                self.vanish(pod)
            elif pod is not None:
                pod["metadata"].setdefault("annotations", {})[names.ANNOTATION_DELETED_BECAUSE] = (
                    action.because
                )
                self.ask_deletion(pod)

    def act_on_workload(
        self, action: CreateWorkload | UpdateWorkload | ReportWorkload | DeleteWorkload
    ) -> None:
        """Carry out as `workloads` does, and refuse what Kueue's webhook and the rules of its CRD refuse."""
        job, now = kueue.unplaced(self.parsed()), timestamp(self.now)
        if isinstance(action, CreateWorkload | UpdateWorkload):
            server = server_pod(job, 0, 0, "") if job.spec.servers else None
            pods = kueue.JobPods(worker_pod(job, 0, 0, ""), coordinator_pod(job, 1), server)
            api = newest_served(self.apis, names.KUEUE_APIS) or names.KUEUE_V1BETA2
            ask = kueue.Ask(api, None, action.name, action.replaces, dict(action.counts))
            made = kueue.workload(job, pods, ask)
            kueue_standin.check_spec(made)
        if isinstance(action, CreateWorkload):
            self.counter += 1
            made["metadata"] |= {"uid": f"uid-{self.counter}", "resourceVersion": "1"}
            if self.workload is None:
                self.workload = made
            else:
                assert self.successor is None, "one Workload at a time asks for more"
                self.successor = made
            return
        old = self.workload
        if self.successor is not None and action.name == self.successor["metadata"]["name"]:
            old = self.successor
        assert old is not None
        if isinstance(action, DeleteWorkload):
            assert action.uid == old["metadata"]["uid"]
            if old is self.workload:
                self.workload, self.successor = self.successor, None
            else:
                self.successor = None
            return
        before = copied(old)
        if isinstance(action, UpdateWorkload):
            assert action.name == old["metadata"]["name"]
            old["metadata"]["annotations"] = made["metadata"]["annotations"]
            old["spec"] = made["spec"]
        elif action.what == "Finished":
            old["status"].update(kueue.finished(old, action.succeeded, action.message, now))
        elif action.what == "PodsReady":
            old["status"].update(kueue.pods_ready(old, now))
        elif action.what == "Reclaimed":
            old["status"].update(kueue.reclaimed(old, dict(action.counts)))
        else:
            old["status"] = merged(old["status"], kueue.released(old, action.evicted, action.message, now))
        kueue_standin.check_update(before, old)

    def add(self, pod: Object) -> Object:
        self.counter += 1
        pod = copied(pod)
        name = pod["metadata"]["name"]
        assert self.names_used.get(name) not in self.recorded, f"{name} is used again"
        pod["metadata"]["uid"] = f"uid-{self.counter}"
        self.names_used[name] = pod["metadata"]["uid"]
        pod["metadata"]["creationTimestamp"] = timestamp(self.now)
        pod["status"] = {"phase": "Pending"}
        self.pods[pod["metadata"]["uid"]] = pod
        return pod

    def settle(self, rounds: int = 400, seconds: float = 10.0) -> None:
        """Whole rounds, kubelets at work in between, until nothing is left to do."""
        for _ in range(rounds):
            self.kubelet()
            before = copied(self.status)
            decided = self.round()
            busy = bool(decided.actions) or before != self.status
            # Certificates are renewed in weeks.
            waiting = decided.wake_at is not None and 0 < decided.wake_at - self.now < 86_400
            self.now += seconds
            if not busy and not waiting and not any(self.deleting(pod) for pod in self.pods.values()):
                return
        raise AssertionError(f"not settled: {self.status}")

    # ---- kubelets, users, accidents ----

    def workers(self, live: bool = True) -> list[Object]:
        found = [pod for pod in self.pods.values() if observe.role_of(pod) == names.ROLE_WORKER]
        return [pod for pod in found if not live or self.alive(pod)]

    def coordinators(self) -> list[Object]:
        found = [pod for pod in self.pods.values() if observe.role_of(pod) == names.ROLE_COORDINATOR]
        return [pod for pod in found if self.alive(pod)]

    def servers(self, live: bool = True) -> list[Object]:
        """Pods of parameter servers, by name."""
        found = [p for p in self.pods.values() if observe.role_of(p) == names.ROLE_PARAMETER_SERVER]
        return sorted((p for p in found if not live or self.alive(p)), key=lambda p: p["metadata"]["name"])

    def alive(self, pod: Object) -> bool:
        return not self.deleting(pod) and pod["status"]["phase"] not in ("Succeeded", "Failed")

    @staticmethod
    def deleting(pod: Object) -> bool:
        return "deletionTimestamp" in pod["metadata"]

    def kubelet(self) -> None:
        """Pending pods get a node and run; pods asked to go are gone. Nothing happens on nodes that are not
        ready.
        """
        for uid, pod in list(self.pods.items()):
            self.bind(pod)
            node = self.nodes.get(pod["spec"].get("nodeName", ""))
            if self.nodes and (node is None or not node.ready):
                if node is None and self.deleting(pod):  # never bound
                    del self.pods[uid]
                continue
            if self.deleting(pod):
                del self.pods[uid]
            elif pod["status"]["phase"] == "Pending":
                self.run(pod)

    def bind(self, pod: Object) -> None:
        """The scheduler: the ready node with the fewest pods that takes this one."""
        if pod["spec"].get("nodeName") or self.deleting(pod):
            return
        used = [other["spec"].get("nodeName") for other in self.pods.values()]
        takes = [n for n in self.nodes.values() if n.ready and not n.cordoned and n.name not in avoided(pod)]
        if takes:
            pod["spec"]["nodeName"] = min(takes, key=lambda node: (used.count(node.name), node.name)).name

    def node(self, name: str, **changes: Any) -> None:
        """A node's state changes now."""
        self.nodes[name] = replace(self.nodes.get(name, Node(name)), since=self.now, **changes)

    def lose_node(self, name: str) -> None:
        """The Node object is deleted; pod garbage collection has not looked yet."""
        self.node(name, ready=None, gone=True)

    def run(self, pod: Object) -> None:
        pod["status"] = {
            "phase": "Running",
            "podIP": "127.1.0.1",
            "containerStatuses": [
                {
                    "name": pod["spec"]["containers"][0]["name"],
                    "state": {"running": {"startedAt": timestamp(self.now)}},
                }
            ],
        }

    def end(self, pod: Object, code: int, message: str = "", reason: str | None = None) -> None:
        """The process ends by itself."""
        terminated = {
            "exitCode": code,
            "message": message,
            "reason": reason or ("Completed" if code == 0 else "Error"),
            "startedAt": pod["metadata"]["creationTimestamp"],
            "finishedAt": timestamp(self.now),
        }
        pod["status"] = {
            "phase": "Succeeded" if code == 0 else "Failed",
            "containerStatuses": [
                {"name": pod["spec"]["containers"][0]["name"], "state": {"terminated": terminated}}
            ],
        }

    def fail(self, pod: Object, message: str = "") -> None:
        """The script's own failure."""
        self.end(
            pod, 1, message or json.dumps({"outcome": "Failed", "exception": "ValueError", "message": "x"})
        )
        self.count_failure(pod)

    def count_failure(self, pod: Object) -> None:
        """Expect it in status, unless the pod was already to be given back."""
        slot = (self.status.get("slots") or {}).get(pod["metadata"]["labels"][names.LABEL_SLOT], {})
        if slot.get("uid") != pod["metadata"]["uid"] or slot.get("ended") != "ScaledDown":
            self.failed_by_themselves.add(pod["metadata"]["uid"])

    def evict(self, pod: Object) -> None:
        self.end(pod, 137)
        pod["status"] |= {
            "reason": "Evicted",
            "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}],
        }

    def ask_deletion(self, pod: Object, grace: int = 30) -> None:
        if not self.deleting(pod):
            pod["metadata"]["deletionTimestamp"] = timestamp(self.now + grace)
            pod["metadata"]["deletionGracePeriodSeconds"] = grace

    def vanish(self, pod: Object) -> None:
        """Deleted by force: no trace."""
        del self.pods[pod["metadata"]["uid"]]

    def scale(self, replicas: int) -> None:
        self.job["spec"]["workers"]["replicas"] = replicas
        self.job["metadata"]["generation"] += 1

    def reports(self, **changes: Any) -> None:
        """The coordinator says that all running workers train."""
        members = tuple(
            MemberReport(pod["metadata"]["uid"], True, True, False)
            for pod in self.workers()
            if pod["status"]["phase"] == "Running"
        )
        serving = tuple(
            ServerReport(pod["metadata"]["uid"], True, True)
            for pod in self.servers()
            if pod["status"]["phase"] == "Running"
        )
        values: dict[str, Any] = {
            "incarnation": self.status["coordinator"]["incarnation"],
            "restart": 0,
            "at": self.now,
            "phase": "RUNNING",
            "generation": 1,
            "step": 10,
            "members": members,
            "servers": serving,
            "servers_settled": True,
            "last_commit_at": self.now,
        }
        self.report = Report(**{**values, **changes})
