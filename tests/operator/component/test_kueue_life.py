"""Jobs in a queue of Kueue through anything: no pod without an admission, the right number when all is calm.

And the operator's process over a cluster that has Kueue.
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import kueue_standin as kueue
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kueue_worlds import FLAVOR, admit, evict, queued_world
from operator_cluster import FakeCluster
from operator_running import operator, until

from springtide_kube.errors import ApiError
from springtide_operator.api import names
from springtide_operator.cache import Cache
from springtide_operator.plan.actions import CreateCoordinator, CreateWorker
from springtide_operator.queues import Queues

Object = dict[str, Any]
PODS = (CreateWorker, CreateCoordinator)


class Life(RuleBasedStateMachine):
    """Kueue, the user and accidents in any order; the operator may die between any two of its steps."""

    @initialize(replicas=st.integers(2, 5))
    def begin(self, replicas: int) -> None:
        self.world = queued_world(replicas)

    @rule(steps=st.sampled_from([0, 1, 2, 3, 5, 99]))
    def operate(self, steps: int) -> None:
        self.world.round(steps)
        if steps < 99:
            self.world.die()

    @rule(listed=st.booleans())
    def see(self, listed: bool) -> None:
        self.world.workloads_listed = listed

    @rule()
    def kubelets(self) -> None:
        self.world.kubelet()
        self.world.now += 2

    @precondition(lambda self: self.world.workload is not None)
    @rule(short=st.booleans())
    def kueue_admits(self, short: bool) -> None:
        found = self.world.workload
        if (
            kueue.condition(found, "QuotaReserved").get("status") == "True"
            or found["spec"].get("active") is False
        ):
            return
        admit(self.world, found["spec"]["podSets"][1].get("minCount") if short else None)

    @precondition(lambda self: self.world.workload is not None)
    @rule()
    def kueue_evicts(self) -> None:
        if kueue.condition(self.world.workload, "Admitted").get("status") == "True":
            evict(self.world)

    @rule()
    def somebody_deletes_the_workload(self) -> None:
        self.world.workload = None

    @rule(replicas=st.integers(2, 6))
    def scale(self, replicas: int) -> None:
        self.world.scale(replicas)

    @rule(value=st.booleans())
    def suspend(self, value: bool) -> None:
        self.world.job["spec"]["suspend"] = value

    @invariant()
    def no_more_pods_than_kueue_has_ever_allowed(self) -> None:
        if not hasattr(self, "world"):
            return
        queue = self.world.status.get("queue") or {}
        if queue.get("admitted"):
            return
        made = [a for a in self.world.plan().actions if isinstance(a, PODS)]
        found = self.world.workload
        if found is None or kueue.condition(found, "Admitted").get("status") != "True":
            assert not made

    def teardown(self) -> None:
        """Check that the job, when all is calm, has the admitted workers or none."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.workloads_listed, world.job["spec"]["suspend"] = True, False
        for _ in range(60):
            world.round()
            world.kubelet()
            world.now += 10
        assert world.workload is not None
        told = kueue.condition(world.workload, "Admitted").get("status") == "True"
        evicted = kueue.condition(world.workload, "Evicted").get("status") == "True"
        if not told or evicted:
            assert world.pods == {}
            admit(world)
        for _ in range(60):
            world.round()
            world.kubelet()
            world.now += 10
        granted = kueue.quota(world.workload)["workers"]
        asked = world.job["spec"]["workers"]["replicas"]
        assert granted <= asked, "what is not needed was given back"
        assert len(world.workers()) == granted
        assert world.status["restarts"]["failures"] == 0


TestLife = pytest.mark.slow(Life.TestCase)
TestLife.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


class Lab:
    """The operator's process over a cluster in memory that has Kueue."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.cluster.apis |= {names.KUEUE_V1BETA2}
        self.cluster.objects["resourceflavors", "", "spot"] = copy.deepcopy(FLAVOR)
        job = self.cluster.add_job(replicas=3)
        job["metadata"]["labels"] = {names.LABEL_QUEUE: "team-a", names.LABEL_QUEUE_PRIORITY: "urgent"}
        job["spec"]["workers"]["minReplicas"] = 1
        self.cluster.put("trainingjobs", job)

    def workload(self) -> Object | None:
        found = [o for (plural, _, _), o in self.cluster.objects.items() if plural == "workloads"]
        return found[0] if found else None

    def condition(self, kind: str) -> str:
        found = self.workload()
        return str(kueue.condition(found, kind).get("status")) if found else ""

    def degraded(self) -> str:
        conditions = (self.cluster.job().get("status") or {}).get("conditions") or []
        return next((str(c["message"]) for c in conditions if c["type"] == "Degraded"), "")


def test_operator_lists_reads_and_writes_what_kueue_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("springtide_operator.queues.LIST_SECONDS", 0.05)
    lab = Lab()

    async def story() -> None:
        cluster = lab.cluster
        async with operator(cluster):
            await until(
                lambda: "priority class does not exist" in lab.degraded(), "the missing class to be told"
            )
            assert cluster.pods() == []
            key = ("kueue.x-k8s.io/workloadpriorityclass", "", "urgent")
            cluster.objects[key] = {"value": 1000, "metadata": {"name": "urgent"}}
            await until(lambda: lab.workload() is not None, "the Workload", 30)
            spec = lab.workload()["spec"]  # type: ignore[index]
            assert (spec["priorityClassRef"]["name"], spec["priority"]) == ("urgent", 1000)
            cluster.put("workloads", kueue.admitted(lab.workload(), 2, "spot"))  # type: ignore[arg-type]
            await until(lambda: len(cluster.pods()) == 2, "the admitted workers", 30)
            assert all(pod["spec"]["nodeSelector"]["pool"] == "spot" for pod in cluster.pods())
            cluster.put("workloads", kueue.evicted(lab.workload()))  # type: ignore[arg-type]
            await until(
                lambda: all("deletionTimestamp" in p["metadata"] for p in cluster.pods()), "leaving", 30
            )
            for pod in [*cluster.pods(), *cluster.pods(names.ROLE_COORDINATOR)]:
                cluster.remove("pods", "default", pod["metadata"]["name"])
            for _ in range(200):
                for pod in cluster.pods(names.ROLE_COORDINATOR):
                    cluster.remove("pods", "default", pod["metadata"]["name"])
                if lab.condition("QuotaReserved") == "False":
                    break
                await asyncio.sleep(0.05)
            assert lab.condition("QuotaReserved") == "False"
            assert lab.workload()["status"].get("admission") is None  # type: ignore[index]
            before = cluster.calls["get_flavor"]
            job = cluster.job()
            job["spec"]["suspend"] = True
            cluster.put("trainingjobs", job)
            await until(lambda: lab.workload() is None, "the Workload to go", 30)
            assert cluster.calls["get_flavor"] == before == 1  # read once

    asyncio.run(story())


def test_refused_list_is_reported_and_forgotten_when_it_works() -> None:
    lab = Lab()
    lab.cluster.objects["kueue.x-k8s.io/workloadpriorityclass", "", "urgent"] = {
        "value": 1,
        "metadata": {"name": "urgent"},
    }
    allowed = False

    def refuse(method: str, name: str) -> None:
        if method == "list_workloads" and not allowed:
            raise ApiError(403, "Forbidden", "workloads.kueue.x-k8s.io is forbidden")

    lab.cluster.before = refuse

    async def story() -> None:
        nonlocal allowed
        async with operator(lab.cluster):
            await until(lambda: "cannot be listed: workloads" in lab.degraded(), "the refusal to be told", 30)
            assert lab.cluster.pods() == []
            assert lab.workload() is None
            allowed = True
            await until(lambda: lab.workload() is not None, "the Workload", 30)
            await until(lambda: "cannot be listed" not in lab.degraded(), "the trouble to be over", 30)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("springtide_operator.queues.LIST_SECONDS", 0.05)
        asyncio.run(story())


def test_what_was_listed_long_ago_is_not_believed() -> None:
    lab = Lab()
    cache = Cache()
    cache.put_job(lab.cluster.job())
    ready = True
    queues = Queues(lab.cluster, cache, lambda key: None, lambda: names.KUEUE_V1BETA2 if ready else "")
    asyncio.run(queues.look())
    assert queues.listed
    ready = False  # Kueue is being upgraded, or another operator acts
    asyncio.run(queues.look())
    assert not queues.listed


def test_without_jobs_in_queues_kueue_is_not_asked_for_anything() -> None:
    cluster = FakeCluster()
    cluster.apis |= {names.KUEUE_V1BETA2}
    cluster.add_job()

    async def story() -> None:
        async with operator(cluster):
            await until(lambda: len(cluster.pods()) == 2, "the job's workers")
            assert cluster.calls["serves"] == cluster.calls["list_workloads"] == 0

    asyncio.run(story())


def multikueue_lab(label: str = "team-a") -> Lab:
    """A manager cluster of MultiKueue: the job runs elsewhere."""
    lab = Lab()
    job = lab.cluster.job()
    job["metadata"]["labels"] = {names.LABEL_QUEUE: label} if label else {}
    job["spec"]["managedBy"] = names.MULTIKUEUE_CLASS
    lab.cluster.put("trainingjobs", job)
    return lab


async def test_job_of_multikueue_has_a_workload_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide_operator.queues.LIST_SECONDS", 0.05)
    lab = multikueue_lab()
    cluster = lab.cluster
    async with operator(cluster):
        await until(lambda: lab.workload() is not None, "the Workload")
        made = lab.workload()
        assert made is not None
        assert [one["count"] for one in made["spec"]["podSets"]] == [1, 3]
        assert made["metadata"]["ownerReferences"][0]["kind"] == names.KIND
        cluster.put("workloads", kueue.admitted(made))
        status = {"state": "Running", "coordinator": {"address": "10.9.9.9:7070"}}  # another cluster's
        cluster.put("trainingjobs", {**cluster.job(), "status": status})
        await until(lambda: cluster.calls["watch_workloads"], "a watch")
        cluster.put("workloads", kueue.evicted(lab.workload()))  # type: ignore[arg-type]
        await until(lambda: lab.condition("QuotaReserved") == "False", "the reservation to end")
        job = cluster.job()
        job["spec"]["suspend"] = True
        cluster.put("trainingjobs", job)
        await until(lambda: lab.workload() is None, "the Workload to go with a suspended job")
        assert cluster.job()["status"] == status
        assert cluster.pods() == cluster.pods(names.ROLE_COORDINATOR) == []
        assert not [key for key in cluster.objects if key[0] in ("services", "networkpolicies", "secrets")]


async def test_job_of_multikueue_asks_for_what_its_template_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide_operator.queues.LIST_SECONDS", 0.05)
    monkeypatch.setattr("springtide_operator.multikueue.RETRY_SECONDS", 0.2)
    lab = multikueue_lab()
    cluster, job = lab.cluster, lab.cluster.job()
    pod = job["spec"]["workers"].pop("template")
    job["spec"]["templateRef"] = {"kind": names.TEMPLATE_KIND, "name": "gpu"}
    cluster.put("trainingjobs", job)
    async with operator(cluster):
        await until(lambda: cluster.calls["get_template"], "the template to be asked for")
        assert lab.workload() is None
        pod["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "3"}}
        meta = {"name": "gpu", "namespace": "default", "uid": "t", "generation": 1}
        spec = {"defaults": {"workers": {"template": pod}}}
        cluster.put(names.TEMPLATE_PLURAL, {"metadata": meta, "spec": spec})
        await until(lambda: lab.workload() is not None, "the Workload")
        made = lab.workload()
        assert made is not None
        container = made["spec"]["podSets"][1]["template"]["spec"]["containers"][0]
        assert container["resources"]["requests"] == {"cpu": "3"}
        assert "template" not in (cluster.job().get("status") or {})  # another cluster's to write


async def test_job_copied_by_multikueue_takes_the_workload_it_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker cluster of MultiKueue, which has copied the Workload first, without its owner."""
    monkeypatch.setattr("springtide_operator.queues.LIST_SECONDS", 0.05)
    lab = multikueue_lab()
    async with operator(lab.cluster):
        await until(lambda: lab.workload() is not None, "the manager's Workload")
    copied = copy.deepcopy(lab.workload())
    assert copied is not None

    there = Lab()
    job = there.cluster.job()
    job["metadata"]["labels"] = {
        names.LABEL_QUEUE: "team-a",
        names.PREBUILT_WORKLOAD: copied["metadata"]["name"],
    }
    there.cluster.put("trainingjobs", job)
    async with operator(there.cluster):
        await until(lambda: "and there is none" in there.degraded(), "the missing one to be told", 30)
        meta = {key: copied["metadata"][key] for key in ("name", "namespace", "annotations")}
        meta["labels"] = {names.LABEL_JOB: "digits", "kueue.x-k8s.io/multikueue-origin": "manager"}
        meta["uid"] = "remote-uid"
        there.cluster.put("workloads", {**copied, "metadata": meta, "status": {}})

        def owned() -> bool:
            found = there.workload()
            owners = (found or {}).get("metadata", {}).get("ownerReferences") or []
            return bool(owners) and owners[0]["uid"] == job["metadata"]["uid"]

        await until(owned, "the job to take it", 30)
        there.cluster.put("workloads", kueue.admitted(there.workload()))  # type: ignore[arg-type]
        await until(lambda: len(there.cluster.pods()) == 3, "the workers", 30)
        assert there.cluster.calls["create_workload"] == 0
        assert there.workload()["spec"] == copied["spec"]  # type: ignore[index]
