"""Gang start: the PodGroup comes before the pods, counts what must start together, and goes with them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_cluster import FakeCluster
from operator_world import World, finished_message, job_object

from springtide_kube.errors import ApiError
from springtide_operator.api import names
from springtide_operator.api.job import InvalidJob, Job
from springtide_operator.manifests.coordinator import coordinator_pod
from springtide_operator.manifests.gang import (
    COSCHEDULING,
    KUBERNETES,
    VOLCANO,
    gang_schedulers,
    pod_group,
)
from springtide_operator.manifests.resources import quantity, sum_of_requests, written
from springtide_operator.manifests.worker import worker_pod
from springtide_operator.optional_apis import ABSENT_SECONDS, PRESENT_SECONDS, OptionalApis
from springtide_operator.plan.actions import ApplyPodGroup, CreateCoordinator, CreateWorker, DeletePodGroup
from springtide_operator.plan.retry import refuse

GROUP = "digits-job-uid-"


def gang_world(served: bool | None = True, scheduler: str = "volcano", **workers: Any) -> World:
    world = World(job=job_object(4, minReplicas=3, **workers))
    world.job["spec"]["workers"]["template"]["spec"]["schedulerName"] = scheduler
    if served is not None:
        world.apis = {names.VOLCANO_API: served, names.COSCHEDULING_API: served}
    return world


def condition(world: World, kind: str) -> dict[str, Any]:
    return next(c for c in world.status["conditions"] if c["type"] == kind)


@pytest.mark.parametrize(
    ("scheduler", "chosen", "expected"),
    [
        ("volcano", "Auto", VOLCANO),
        ("scheduler-plugins-scheduler", "Auto", COSCHEDULING),
        ("coscheduling", "Auto", COSCHEDULING),
        ("default-scheduler", "Auto", None),
        ("", "Auto", None),
        ("our-own-name", "Volcano", VOLCANO),
        ("", "Coscheduling", COSCHEDULING),
        ("volcano", "Coscheduling", COSCHEDULING),
        ("volcano", "None", None),
    ],
)
def test_the_scheduler_is_known_by_its_name_or_by_the_users_word(
    scheduler: str, chosen: str, expected: object
) -> None:
    world = gang_world(scheduler=scheduler)
    world.job["spec"]["gangScheduling"] = chosen
    found = gang_schedulers(world.parsed())
    assert found == ((expected,) if expected is not None else ())


def test_a_template_with_a_pod_group_of_its_own_is_left_alone() -> None:
    world = gang_world()
    template = world.job["spec"]["workers"]["template"]
    template["metadata"] = {"annotations": {VOLCANO.key: "mine"}}
    world.settle()
    assert "gang" not in world.status
    assert world.workers()[0]["metadata"]["annotations"][VOLCANO.key] == "mine"


BETA, ALPHA3, ALPHA2 = names.POD_GROUP_APIS


def native_world(**served: bool) -> World:
    """A job that Kubernetes' own scheduler is to start together."""
    world = World(job=job_object(4, minReplicas=3))
    world.job["spec"]["gangScheduling"] = "Kubernetes"
    world.apis = {f"scheduling.k8s.io/{version}": there for version, there in served.items()}
    return world


@pytest.mark.parametrize(
    ("served", "api"),
    [
        ({"v1beta1": True}, BETA),
        ({"v1beta1": False, "v1alpha3": True}, ALPHA3),
        ({"v1beta1": False, "v1alpha3": False, "v1alpha2": True}, ALPHA2),
    ],
)
def test_kubernetes_own_group_is_named_in_the_spec_of_pods(served: dict[str, bool], api: str) -> None:
    world = native_world(**served)
    decided = world.round()
    assert [a.version.split()[0] for a in decided.actions if isinstance(a, ApplyPodGroup)] == [api]
    assert not any(isinstance(a, CreateWorker | CreateCoordinator) for a in decided.actions)
    world.settle()
    assert (world.status["gang"]["apiVersion"], world.status["gang"]["scheduler"]) == (api, "Kubernetes")
    pods = [*world.workers(), *world.coordinators()]
    assert len(pods) == 5
    assert [pod["spec"]["schedulingGroup"] for pod in pods] == [{"podGroupName": GROUP}] * 5
    scheduler = next(one for one in KUBERNETES if one.api == api)
    made = pod_group(world.parsed(), scheduler, 4, [])
    assert made["apiVersion"] == api
    assert made["spec"] == {"schedulingPolicy": {"gang": {"minCount": 4}}}


def test_without_kubernetes_own_groups_pods_know_no_such_field() -> None:
    world = native_world(v1beta1=False, v1alpha3=False)
    world.round()
    assert world.pods == {}, "it is not known yet"
    world.apis[ALPHA2] = False
    world.settle()
    assert len(world.workers()) == 4
    assert all("schedulingGroup" not in pod["spec"] for pod in world.pods.values())
    assert condition(world, "Degraded")["reason"] == "GangSchedulingUnavailable"
    assert f"{BETA} or {ALPHA3} or {ALPHA2}" in condition(world, "Degraded")["message"]


@pytest.mark.parametrize(
    ("served", "grows"),
    [({"v1beta1": True}, 5), ({"v1beta1": False, "v1alpha3": False, "v1alpha2": True}, 4)],
)
def test_size_of_a_group_changes_where_its_version_allows_it(served: dict[str, bool], grows: int) -> None:
    world = native_world(**served)
    world.settle()
    assert world.pod_groups == {GROUP: 4}
    world.job["spec"]["workers"]["minReplicas"] = 4
    world.settle()
    assert world.pod_groups == {GROUP: grows}
    assert world.status["gang"]["minMember"] == grows


def test_group_moves_to_a_newer_version_of_the_api() -> None:
    world = native_world(v1beta1=False, v1alpha3=True)
    world.settle()
    world.apis = {BETA: True}
    decided = world.round()
    assert [a.version.split()[0] for a in decided.actions if isinstance(a, ApplyPodGroup)] == [BETA]
    assert not any(isinstance(a, DeletePodGroup) for a in decided.actions)
    world.job["spec"]["suspend"] = True
    world.settle()
    assert world.pod_groups == {}


def test_pods_of_a_template_with_kubernetes_group_are_left_alone() -> None:
    world = native_world(v1beta1=True)
    world.job["spec"]["workers"]["template"]["spec"]["schedulingGroup"] = {"podGroupName": "mine"}
    world.settle()
    assert "gang" not in world.status
    assert world.workers()[0]["spec"]["schedulingGroup"] == {"podGroupName": "mine"}


def test_another_value_is_refused_by_name() -> None:
    world = gang_world()
    world.job["spec"]["gangScheduling"] = "Yunikorn"
    with pytest.raises(InvalidJob, match="gangScheduling"):
        world.parsed()


@pytest.mark.parametrize(
    ("scheduler", "part", "key"),
    [
        ("volcano", "annotations", "scheduling.k8s.io/group-name"),
        ("coscheduling", "labels", "scheduling.x-k8s.io/pod-group"),
    ],
)
def test_group_exists_before_any_pod_and_pods_carry_its_name(scheduler: str, part: str, key: str) -> None:
    world = gang_world(scheduler=scheduler)
    decided = world.round()
    applied = [a for a in decided.actions if isinstance(a, ApplyPodGroup)]
    assert [a.min_member for a in applied] == [4]  # three workers and the coordinator
    assert not any(isinstance(a, CreateWorker | CreateCoordinator) for a in decided.actions)
    assert "GangRequested" in [e.reason for e in decided.events]
    world.settle()
    assert world.status["gang"]["podGroup"] == GROUP
    assert world.status["gang"]["minMember"] == 4
    pods = [*world.workers(), *world.coordinators()]
    assert len(pods) == 5
    assert {pod["metadata"][part][key] for pod in pods} == {GROUP}


def test_parameter_servers_start_with_the_others() -> None:
    world = gang_world()
    world.job["spec"] |= {"strategy": {"type": "ParameterServer"}, "parameterServers": {"replicas": 2}}
    decided = world.round()
    assert [a.min_member for a in decided.actions if isinstance(a, ApplyPodGroup)] == [6]
    world.settle()
    assert len(world.servers()) == 2
    assert {pod["metadata"]["annotations"][VOLCANO.key] for pod in world.servers()} == {GROUP}


def test_nothing_is_made_before_it_is_known_if_api_is_served() -> None:
    world = gang_world(served=None)
    for _ in range(3):
        world.round()
    assert world.pods == {}
    assert "gang" not in world.status


def test_without_api_pods_start_singly_and_condition_says_so() -> None:
    world = gang_world(served=False)
    reasons = [e.reason for _ in range(4) for e in world.round().events]
    assert reasons.count("GangSchedulingUnavailable") == 1
    world.settle()
    assert len(world.workers()) == 4
    assert VOLCANO.key not in world.workers()[0]["metadata"]["annotations"]
    degraded = condition(world, "Degraded")
    assert degraded["reason"] == "GangSchedulingUnavailable"
    assert names.VOLCANO_API in degraded["message"]
    world.apis[names.VOLCANO_API] = True  # it is installed
    world.settle()
    assert world.pod_groups == {GROUP: 4}
    assert condition(world, "Degraded")["status"] == "False"


def test_vanished_api_takes_group_out_of_status_and_no_pod() -> None:
    world = gang_world()
    world.settle()
    world.apis[names.VOLCANO_API] = False
    world.settle()
    assert "gang" not in world.status
    assert len(world.workers()) == 4


def test_group_follows_min_replicas_applied_once_per_operator() -> None:
    world = gang_world()
    world.settle()
    assert not world.plan().actions
    world.job["spec"]["workers"]["minReplicas"] = 1
    decided = world.round()
    assert [a.min_member for a in decided.actions if isinstance(a, ApplyPodGroup)] == [2]
    assert not world.round().actions
    world.die()
    assert [a.min_member for a in world.round().actions if isinstance(a, ApplyPodGroup)] == [2]
    assert not any(isinstance(a, ApplyPodGroup) for a in world.round().actions)


def test_a_refused_group_is_shown_and_holds_pods_back() -> None:
    world = gang_world()
    world.refusals["podgroup"] = refuse(None, 403, "podgroups is forbidden", world.now)
    world.round()
    world.round()
    assert world.pods == {}
    degraded = condition(world, "Degraded")
    assert degraded["reason"] == "PodGroupRefused"
    assert "podgroups is forbidden" in degraded["message"]
    world.refusals.clear()
    world.settle()
    assert len(world.workers()) == 4


@pytest.mark.parametrize("way", ["suspended", "ended", "switched off"])
def test_the_group_goes_after_the_pods_and_comes_back_with_them(way: str) -> None:
    world = gang_world()
    world.settle()
    if way == "suspended":
        world.job["spec"]["suspend"] = True
    elif way == "ended":
        world.job["spec"]["podCleanup"] = "None"
        for pod in world.workers():
            world.end(pod, 0, finished_message(1))
    else:
        world.job["spec"]["gangScheduling"] = "None"
    decided = world.round()
    if way != "switched off":
        assert not any(isinstance(a, DeletePodGroup) for a in decided.actions)
        assert world.status["gang"]["podGroup"] == GROUP
    world.settle()
    assert world.pod_groups == {}
    assert "gang" not in world.status
    world.die()
    assert not any(isinstance(a, ApplyPodGroup | DeletePodGroup) for a in world.plan().actions)
    if way == "suspended":
        world.job["spec"]["suspend"] = False
        world.settle()
        assert world.pod_groups == {GROUP: 4}
        assert len(world.workers()) == 4


def test_group_asks_what_its_pods_request_in_queue_and_priority() -> None:
    obj = job_object(4, minReplicas=3)
    template = obj["spec"]["workers"]["template"]
    template["spec"] |= {"schedulerName": "volcano", "priorityClassName": "high"}
    template["spec"]["containers"][0]["resources"] = {
        "requests": {"cpu": "500m"},
        "limits": {"cpu": "2", "nvidia.com/gpu": 1},
    }
    template["metadata"] = {"annotations": {"scheduling.volcano.sh/queue-name": "research"}}
    job = Job.parse(obj)
    pods = [(worker_pod(job, 0, 0, ""), 3), (coordinator_pod(job, 1), 1)]
    made = pod_group(job, VOLCANO, 4, pods)
    assert made["spec"] == {
        "minMember": 4,
        "minResources": {"cpu": "1550m", "memory": str(96 * 2**20), "nvidia.com/gpu": "3"},
        "priorityClassName": "high",
        "queue": "research",
    }
    assert made["metadata"]["ownerReferences"][0]["uid"] == job.uid
    assert set(pod_group(job, COSCHEDULING, 4, pods)["spec"]) == {"minMember", "minResources"}


@given(st.integers(0, 10**15), st.sampled_from(["n", "u", "m", "", "k", "M", "Ki", "Mi", "Gi"]))
def test_quantities_are_never_written_smaller_than_they_are(number: int, suffix: str) -> None:
    value = quantity(f"{number}{suffix}")
    again = quantity(written(value))
    assert value <= again < value + quantity("1m")


def test_quantities_in_all_notations_with_init_containers() -> None:
    assert [written(quantity(text)) for text in ("1.5", "2e3", "1E3", "1Ki", "100u", "1E")] == [
        "1500m",
        "2000",
        "1000",
        "1024",
        "1m",
        str(10**18),
    ]
    for wrong in ("", "abc", "1.2.3", "--1", "1 Gi"):
        with pytest.raises(ValueError, match="is no quantity"):
            quantity(wrong)

    def container(cpu: str, **more: str) -> dict[str, Any]:
        return {"resources": {"requests": {"cpu": cpu}}, **more}

    spec = {
        "containers": [container("1"), container("250m"), {}],
        "initContainers": [container("3"), container("500m", restartPolicy="Always")],
    }
    assert sum_of_requests([({"spec": spec}, 2)]) == {"cpu": "6"}
    spec["initContainers"] = [container("500m", restartPolicy="Always")]
    assert sum_of_requests([({"spec": spec}, 2)]) == {"cpu": "3500m"}
    assert sum_of_requests([({"spec": {"containers": [container("lots")]}}, 1)]) == {}


class Served:
    """Discovery, and time."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.now = 0.0
        self.news = 0
        self.apis = OptionalApis(self.cluster, self._changed, lambda: self.now)

    def _changed(self) -> None:
        self.news += 1

    def look(self) -> float | None:
        return asyncio.run(self.apis.look())


def test_api_is_looked_for_when_a_job_needs_it_and_at_times() -> None:
    served = Served()
    assert served.look() is None
    assert served.apis.known([names.VOLCANO_API]) == {}
    assert served.look() == ABSENT_SECONDS
    assert served.apis.known([names.VOLCANO_API]) == {names.VOLCANO_API: False}
    served.look()
    assert served.cluster.calls["serves"] == 1  # not yet again
    served.cluster.apis.add(names.VOLCANO_API)
    served.now += ABSENT_SECONDS
    assert served.look() == PRESENT_SECONDS
    assert served.apis.known([names.VOLCANO_API]) == {names.VOLCANO_API: True}
    assert served.apis.newest([names.VOLCANO_API]) == names.VOLCANO_API
    assert served.news == 2
    served.cluster.apis.clear()
    served.now += PRESENT_SECONDS
    served.look()
    assert served.apis.known([names.VOLCANO_API]) == {names.VOLCANO_API: False}


def test_unanswering_api_server_changes_nothing_that_is_known() -> None:
    served = Served()
    served.cluster.apis.add(names.VOLCANO_API)
    served.apis.known([names.VOLCANO_API])
    served.look()

    def fail(method: str, name: str) -> None:
        raise ApiError(503, "ServiceUnavailable", "the API is overloaded")

    served.cluster.before = fail
    served.now += PRESENT_SECONDS
    pause = served.look()
    assert pause is not None
    assert 0 < pause < ABSENT_SECONDS
    assert served.apis.known([names.VOLCANO_API]) == {names.VOLCANO_API: True}
