"""Kueue: pods only while the Workload is admitted, as many and where it says; the end is reported."""

from __future__ import annotations

import copy
from typing import Any

import kueue_standin as kueue
import pytest
from kueue_worlds import FLAVOR, admit, evict, queued_world, running_world, waiting_world
from operator_world import World, finished_message

from springtide_operator.api import names
from springtide_operator.job_loop import calm
from springtide_operator.manifests.coordinator import coordinator_pod
from springtide_operator.manifests.errors import TemplateError
from springtide_operator.manifests.kueue import (
    Ask,
    JobPods,
    fields_to_clear,
    place,
    released,
    workload,
    workload_version,
)
from springtide_operator.manifests.worker import worker_pod
from springtide_operator.plan.actions import (
    CreateCoordinator,
    CreateWorker,
    CreateWorkload,
    DeletePod,
    DeleteWorkload,
    Plan,
    ReportWorkload,
    UpdateWorkload,
)
from springtide_operator.plan.coordinator_sync import make_sync
from springtide_operator.plan.observation import newest_served
from springtide_operator.plan.workload import workload_seen

Object = dict[str, Any]


def condition(world: World, kind: str) -> Object:
    return next((c for c in world.status["conditions"] if c["type"] == kind), {})


def kinds(decided: Plan, *wanted: type) -> list[str]:
    return [type(a).__name__ for a in decided.actions if isinstance(a, wanted)]


PODS = (CreateWorker, CreateCoordinator)


def test_no_pod_is_made_before_kueue_has_admitted_the_job() -> None:
    world = queued_world()
    decided = world.round()
    assert kinds(decided, CreateWorkload) == ["CreateWorkload"]
    assert [e.reason for e in decided.events] == ["Queued"]
    world.settle()
    assert world.pods == {}
    assert world.status["state"] == "Queued"
    assert "startTime" not in world.status
    assert world.workload is not None
    world.workload = kueue.pending(world.workload, "couldn't assign flavors: insufficient quota for cpu")
    world.settle()
    assert "insufficient quota" in world.status["message"]
    assert condition(world, "Suspended")["reason"] == "Queued"
    admit(world)
    decided = world.round()
    assert "Admitted" in [e.reason for e in decided.events]
    world.settle()
    assert len(world.workers()) == 4
    assert condition(world, "Suspended") | {"lastTransitionTime": ""} == {
        "type": "Suspended",
        "status": "False",
        "reason": "Admitted",
        "message": "lab admitted 4 workers",
        "lastTransitionTime": "",
        "observedGeneration": 1,
    }


def test_the_workload_tells_kueue_what_there_is_to_admit() -> None:
    world = queued_world(replicas=4)
    template = world.job["spec"]["workers"]["template"]["spec"]
    template |= {"priorityClassName": "high", "nodeSelector": {"gpu": "yes"}}
    template["containers"][0]["resources"] = {"requests": {"cpu": "2"}}
    world.settle()
    assert world.workload is not None
    made = world.workload
    assert made["metadata"]["name"] == "digits-job-uid-"
    assert made["metadata"]["labels"][names.LABEL_QUEUE_JOB_UID] == "job-uid-1234"
    assert made["spec"]["queueName"] == "team-a"
    coordinator, workers = made["spec"]["podSets"]
    assert (coordinator["name"], coordinator["count"]) == ("coordinator", 1)
    assert coordinator["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "50m"
    assert (workers["name"], workers["count"], workers["minCount"]) == ("workers", 4, 2)
    assert workers["template"]["spec"]["nodeSelector"] == {"gpu": "yes"}
    assert workers["template"]["spec"]["containers"] == [
        {"name": "worker", "image": "img", "resources": {"requests": {"cpu": "2"}}}
    ]
    assert set(workers["template"]["metadata"]) == {"labels"}


def test_without_room_for_fewer_there_is_no_min_count() -> None:
    world = waiting_world(minReplicas=4)
    assert world.workload is not None
    assert "minCount" not in world.workload["spec"]["podSets"][1]


@pytest.mark.parametrize("served", [False, None])
def test_job_with_queue_does_not_start_without_kueue(served: bool | None) -> None:
    world = queued_world(served=served)
    for _ in range(5):
        world.round()
        world.kubelet()
    assert world.pods == {}
    assert world.workload is None
    if served is False:
        assert condition(world, "Degraded")["reason"] == "QueueUnavailable"
        assert "team-a" in condition(world, "Degraded")["message"]
        assert "take the label kueue.x-k8s.io/queue-name off" in condition(world, "Degraded")["message"]
        assert condition(world, "Suspended")["reason"] == "Queued"
        assert world.status["state"] == "Queued"


def test_job_waits_for_kueue_and_is_then_admitted() -> None:
    world = queued_world(served=False)
    world.settle()
    world.apis = dict.fromkeys(names.KUEUE_APIS, True)
    world.settle()
    assert world.workload is not None
    admit(world)
    world.settle()
    assert len(world.workers()) == 4
    assert condition(world, "Degraded")["status"] == "False"


def test_label_taken_off_lets_job_start_without_kueue() -> None:
    world = queued_world(served=False)
    world.settle()
    del world.job["metadata"]["labels"][names.LABEL_QUEUE]
    world.settle()
    assert len(world.workers()) == 4
    assert "queue" not in world.status


def test_operator_that_does_not_know_yet_halts_no_running_job() -> None:
    world = running_world()
    world.settle()
    before = {pod["metadata"]["uid"] for pod in world.workers()}
    world.die()
    world.apis, world.workloads_listed = {}, False
    world.settle()
    assert {pod["metadata"]["uid"] for pod in world.workers()} == before


def test_job_stays_as_kueue_left_it_when_its_api_goes() -> None:
    for world, pods in ((running_world(), 4), (waiting_world(), 0)):
        world.apis = dict.fromkeys(names.KUEUE_APIS, False)
        world.settle()
        assert len(world.workers()) == pods
        assert condition(world, "Degraded")["reason"] == "QueueUnavailable"


def test_job_keeps_its_admission_and_no_more_while_kueue_is_away() -> None:
    world = running_world()
    world.apis = dict.fromkeys(names.KUEUE_APIS, False)
    world.scale(6)
    world.settle()
    assert len(world.workers()) == 4
    world.vanish(world.workers()[0])  # and one that is lost comes back
    world.settle()
    assert len(world.workers()) == 4
    assert "gets no more" in condition(world, "Degraded")["message"]


def test_job_resumed_while_kueue_is_away_is_not_admitted() -> None:
    world = running_world()
    world.apis = dict.fromkeys(names.KUEUE_APIS, False)
    world.job["spec"]["suspend"] = True
    world.settle()
    world.job["spec"]["suspend"] = False
    world.settle()
    assert world.pods == {}
    world.apis = dict.fromkeys(names.KUEUE_APIS, True)  # its reservation was never given back
    world.settle()
    assert len(world.workers()) == 4


def test_newest_served_version_is_used_once_all_newer_are_known() -> None:
    old, new = names.KUEUE_V1BETA1, names.KUEUE_V1BETA2
    for known, api in (
        ({}, None),
        ({old: True}, None),
        ({new: True}, new),
        ({new: True, old: True}, new),
        ({new: False}, None),
        ({new: False, old: True}, old),
        ({new: False, old: False}, ""),
    ):
        assert newest_served(known, names.KUEUE_APIS) == api
        world = queued_world(served=None)
        world.apis = known
        world.round()
        assert (world.workload or {}).get("apiVersion") == (api or None)
        assert world.pods == {}


@pytest.mark.parametrize(
    ("label", "api", "named"),
    [
        (
            "urgent",
            names.KUEUE_V1BETA2,
            {
                "priorityClassRef": {
                    "group": "kueue.x-k8s.io",
                    "kind": "WorkloadPriorityClass",
                    "name": "urgent",
                }
            },
        ),
        (
            "",
            names.KUEUE_V1BETA2,
            {"priorityClassRef": {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": "high"}},
        ),
        (
            "urgent",
            names.KUEUE_V1BETA1,
            {
                "priorityClassName": "urgent",
                "priorityClassSource": "kueue.x-k8s.io/workloadpriorityclass",
            },
        ),
        (
            "",
            names.KUEUE_V1BETA1,
            {"priorityClassName": "high", "priorityClassSource": "scheduling.k8s.io/priorityclass"},
        ),
    ],
)
def test_priority_class_is_named_in_the_words_of_the_version(label: str, api: str, named: Object) -> None:
    world = queued_world()
    world.job["spec"]["workers"]["template"]["spec"]["priorityClassName"] = "high"
    world.job["metadata"]["labels"][names.LABEL_QUEUE_PRIORITY] = label
    job = world.parsed()
    made = workload(job, JobPods(worker_pod(job, 0, 0, ""), coordinator_pod(job, 1)), Ask(api, 7))
    kueue.check_spec(made)
    assert made["apiVersion"] == api
    assert {key: made["spec"][key] for key in made["spec"] if key not in ("podSets", "queueName")} == {
        **named,
        "priority": 7,
    }
    assert set(named) | {"priority"} == set(fields_to_clear(api))


def test_claims_of_devices_are_counted() -> None:
    world = queued_world()
    template = world.job["spec"]["workers"]["template"]["spec"]
    template["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    template["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
    world.settle()
    assert world.workload is not None
    asked = world.workload["spec"]["podSets"][1]["template"]["spec"]
    assert asked["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    assert asked["containers"][0]["resources"]["claims"] == [{"name": "gpu"}]
    assert "resourceClaims" not in world.workload["spec"]["podSets"][0]["template"]["spec"]


def test_workload_of_older_operator_is_written_anew_as_it_waits() -> None:
    world = waiting_world()
    assert world.workload is not None
    world.workload["metadata"]["annotations"][names.ANNOTATION_WORKLOAD_VERSION] = "older"
    assert kinds(world.round(), UpdateWorkload) == ["UpdateWorkload"]
    assert not kinds(world.round(), UpdateWorkload)


def test_fewer_workers_may_be_admitted_and_all_hear_of_it() -> None:
    world = running_world(workers=3)
    assert len(world.workers()) == 3
    assert world.status["workers"]["desired"] == 3
    said = make_sync(world.observe_job(), world.observe(), 1, world.now)
    assert (said.target, said.minimum, said.maximum) == (3, 2, 3)
    degraded = condition(world, "Degraded")
    assert degraded["reason"] == "QueueLimitsSize"
    assert "3 of 4 workers" in degraded["message"]
    assert calm(world.status, world.plan(), world.now)  # only an event changes that
    world.scale(6)  # more than was admitted
    world.settle()
    assert len(world.workers()) == 3
    assert "3 of 6 workers" in condition(world, "Degraded")["message"]
    assert not kinds(world.plan(), UpdateWorkload)
    world.scale(2)
    world.settle()
    assert len(world.workers()) == 2
    assert condition(world, "Degraded")["status"] == "False"


def test_quota_of_smaller_job_is_given_back_when_pods_are_gone() -> None:
    world = running_world()
    world.scale(2)
    decided = world.round()
    assert len(kinds(decided, DeletePod)) == 2
    assert not kinds(decided, ReportWorkload), "they still use it"
    assert world.workload is not None
    assert kueue.quota(world.workload) == {"coordinator": 1, "workers": 4}
    world.settle()
    assert kueue.quota(world.workload) == {"coordinator": 1, "workers": 2}
    assert world.status["queue"]["workers"] == 2
    world.scale(3)
    world.settle()
    assert len(world.workers()) == 2, "what was given back is another job's"
    assert "2 of 3 workers" in condition(world, "Degraded")["message"]
    assert names.ANNOTATION_ELASTIC in condition(world, "Degraded")["message"]
    evict(world)
    world.settle()
    assert "reclaimablePods" not in world.workload["status"]
    admit(world)
    world.settle()
    assert len(world.workers()) == 3


def test_partly_admitted_job_gives_back_from_all_it_asked_for() -> None:
    world = running_world(workers=3)
    world.scale(2)
    world.settle()
    assert world.workload is not None
    assert world.workload["status"]["reclaimablePods"] == [{"name": "workers", "count": 2}]
    assert kueue.quota(world.workload)["workers"] == 2


def test_quota_that_capacity_may_use_is_kept() -> None:
    world = running_world()
    world.job["spec"]["elasticity"] = {"policy": "Capacity"}
    world.job["spec"]["workers"]["maxReplicas"] = 8
    world.scale(2)
    world.settle()
    assert world.workload is not None
    assert kueue.quota(world.workload)["workers"] == 4


def test_standbys_are_asked_for_and_can_be_left_out() -> None:
    world = waiting_world(minReplicas=4, standby=2)
    assert world.workload is not None
    asked = world.workload["spec"]["podSets"][1]
    assert (asked["count"], asked["minCount"]) == (6, 4)
    admit(world, 5)
    world.settle()
    assert len(world.workers()) == 4, "workers come first"
    world.reports(seats=True)
    world.round()
    assert len(world.workers()) == 5
    assert (world.status["standby"]["wanted"], world.status["workers"]["desired"]) == (1, 4)
    assert condition(world, "Degraded")["status"] == "False"


def test_admission_without_standbys_gets_all_workers() -> None:
    world = waiting_world(minReplicas=4, standby=2)
    admit(world, 4)
    world.settle()
    world.reports(seats=True)
    world.settle()
    assert len(world.workers()) == 4
    assert world.workload is not None
    assert kueue.quota(world.workload)["workers"] == 4


def test_elastic_job_asks_for_its_standbys_when_it_is_admitted() -> None:
    world = elastic_world(standby=1)
    assert world.workload is not None
    assert world.workload["spec"]["podSets"][1]["count"] == 4
    assert world.successor is not None
    assert world.successor["spec"]["podSets"][1]["count"] == 5
    take_over(world)
    for _ in range(3):
        world.round()
        world.kubelet()
    assert len(world.workers()) == 5


def elastic_world(**workers: int) -> World:
    """Runs with 4 workers, and may grow while it does."""
    world = queued_world(**workers)
    world.job["metadata"]["annotations"] = {names.ANNOTATION_ELASTIC: "true"}
    world.settle()
    admit(world)
    world.settle()
    world.reports(seats=True)
    world.round()
    world.round()
    return world


def take_over(world: World) -> None:
    """Kueue admits the Workload that asks for more, and finishes the one before."""
    assert world.workload is not None
    assert world.successor is not None
    world.workload = kueue.replaced(world.workload)
    world.successor = kueue.admitted(world.successor)


def test_elastic_job_grows_by_a_second_workload() -> None:
    world = elastic_world()
    assert world.workload is not None
    assert "minCount" not in world.workload["spec"]["podSets"][1]
    first, before = world.workload["metadata"], {pod["metadata"]["uid"] for pod in world.workers()}
    assert first["annotations"][names.ANNOTATION_ELASTIC] == "true"
    world.scale(6)
    world.settle()
    assert len(world.workers()) == 4
    assert world.successor is not None
    made = world.successor
    assert made["metadata"]["name"] == f"{first['name']}-slice-1"
    assert made["metadata"]["annotations"][names.ANNOTATION_REPLACES] == f"default/{first['name']}"
    assert made["metadata"]["annotations"][names.ANNOTATION_SLICE_OF] == first["name"]
    assert [one["count"] for one in made["spec"]["podSets"]] == [1, 6]
    assert "asks for more" in condition(world, "Degraded")["message"]
    take_over(world)
    world.settle()
    assert len(world.workers()) == 6
    assert before < {pod["metadata"]["uid"] for pod in world.workers()}, "nobody left for it"
    assert world.workload is made or world.workload["metadata"]["name"] == made["metadata"]["name"]
    assert world.successor is None, "the one before was deleted"
    assert condition(world, "Degraded")["status"] == "False"
    world.scale(7)
    world.settle()
    assert world.successor["metadata"]["name"] == f"{first['name']}-slice-2"


def test_elastic_job_trains_on_between_the_two_workloads() -> None:
    """The first is finished before the admission checks of the second are done."""
    world = elastic_world()
    world.scale(6)
    world.settle()
    assert world.workload is not None
    assert world.successor is not None
    world.workload = kueue.replaced(world.workload)
    world.settle()
    assert len(world.workers()) == 0, "finished, and nothing reserved for the other: no quota at all"

    world = elastic_world()
    world.scale(6)
    world.settle()
    world.workload = kueue.replaced(world.workload)
    world.successor = kueue.admitted(world.successor, checks_ready=False)
    world.settle()
    assert len(world.workers()) == 4
    world.successor = kueue.admitted(world.successor)
    world.settle()
    assert len(world.workers()) == 6


def test_what_is_asked_for_more_follows_the_job() -> None:
    world = elastic_world()
    world.scale(6)
    world.settle()
    world.scale(8)
    world.settle()
    assert world.successor is not None
    assert world.successor["spec"]["podSets"][1]["count"] == 8
    world.scale(4)
    world.settle()
    assert world.successor is None
    assert len(world.workers()) == 4
    world.scale(3)
    world.settle()
    assert world.workload is not None
    assert kueue.quota(world.workload)["workers"] == 3
    world.scale(5)
    world.settle()
    assert world.successor["spec"]["podSets"][1]["count"] == 5


@pytest.mark.parametrize("how", ["evict", "suspend", "end"])
def test_second_workload_goes_with_the_admission_of_the_first(how: str) -> None:
    world = elastic_world()
    world.scale(6)
    world.settle()
    assert world.successor is not None
    if how == "evict":
        evict(world)
    elif how == "suspend":
        world.job["spec"]["suspend"] = True
    else:
        for worker in world.workers():
            world.end(worker, 0, finished_message(1))
    for _ in range(40):
        world.round()
        world.kubelet()
        world.now += 10
    assert world.successor is None
    assert (world.workload is None) == (how == "suspend")
    if how == "evict":
        assert world.workload is not None
        assert world.workload["spec"]["podSets"][1]["count"] == 6, "asked for anew"


def test_old_workload_is_deleted_where_kueue_does_not_finish_it() -> None:
    """Two Workloads of one job are admitted without the feature, each with quota of its own."""
    world = elastic_world()
    world.scale(6)
    world.settle()
    assert world.successor is not None
    world.successor = kueue.admitted(world.successor)
    world.settle()
    assert len(world.workers()) == 6
    assert world.workload is not None
    assert world.workload["metadata"]["name"].endswith("-slice-1")
    assert world.successor is None


def test_servers_are_an_own_pod_set_and_no_more_than_admitted() -> None:
    world = queued_world()
    world.job["spec"] |= {
        "strategy": {"type": "ParameterServer"},
        "parameterServers": {"replicas": 2},
    }
    world.settle()
    assert world.workload is not None
    servers = world.workload["spec"]["podSets"][2]
    assert (servers["name"], servers["count"]) == ("parameter-servers", 2)
    assert "minCount" not in servers
    assert servers["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert world.servers() == []
    admit(world, flavor="spot")
    world.settle()
    assert len(world.servers()) == 2
    assert world.servers()[0]["spec"]["nodeSelector"] == {"pool": "spot"}
    world.job["spec"]["parameterServers"]["replicas"] = 4
    world.settle()
    assert len(world.servers()) == 2
    assert "2 of 4 parameter servers" in condition(world, "Degraded")["message"]
    evict(world)
    world.settle()
    assert world.pods == {}
    assert world.workload["spec"]["podSets"][2]["count"] == 4  # asked for anew


def test_min_replicas_above_what_was_admitted_is_named() -> None:
    world = running_world(workers=2)
    world.job["spec"]["workers"]["minReplicas"] = 3
    world.settle()
    assert "training cannot start" in condition(world, "Degraded")["message"]


def test_pods_go_where_the_admission_sends_them() -> None:
    world = waiting_world()
    world.job["spec"]["workers"]["template"]["spec"]["nodeSelector"] = {"zone": "a"}
    admit(world, flavor="spot")
    assert world.workload is not None
    world.workload["status"]["admissionChecks"] = [
        {
            "name": "provisioning",
            "state": "Ready",
            "podSetUpdates": [
                {
                    "name": "workers",
                    "annotations": {"consume": "request-1"},
                    "labels": {"placed": "yes"},
                    "nodeSelector": {"group": "7"},
                    "tolerations": [{"key": "new", "operator": "Exists"}],
                }
            ],
        },
        {"name": "late", "state": "Pending", "podSetUpdates": [{"name": "workers", "labels": {"no": "no"}}]},
    ]
    world.settle()
    worker, coordinator = world.workers()[0], world.coordinators()[0]
    assert worker["spec"]["nodeSelector"] == {"zone": "a", "pool": "spot", "group": "7"}
    assert [t["key"] for t in worker["spec"]["tolerations"]] == ["spot", "new"]
    assert worker["metadata"]["annotations"]["consume"] == "request-1"
    assert worker["metadata"]["labels"]["placed"] == "yes"
    assert "no" not in worker["metadata"]["labels"]
    assert coordinator["spec"]["nodeSelector"] == {"zone": "a", "pool": "spot"}
    assert "placed" not in coordinator["metadata"]["labels"]
    assert "pool" not in str(world.workload["spec"])  # what is asked for does not repeat what was given


def test_template_contradicting_admission_fails_with_both() -> None:
    world = waiting_world()
    world.job["spec"]["workers"]["template"]["spec"]["nodeSelector"] = {"pool": "on-demand"}
    admit(world, flavor="spot")
    world.round()
    failed = condition(world, "Failed")
    assert failed["reason"] == "InvalidTemplate"
    assert "'on-demand'" in failed["message"]
    assert "'spot'" in failed["message"]
    with pytest.raises(TemplateError):
        worker_pod(world.parsed(), 0, 0, "")


def test_admission_with_unreadable_flavor_starts_nothing() -> None:
    world = waiting_world()
    world.flavors = {"spot": "the ResourceFlavor spot cannot be read: forbidden (403 Forbidden)"}
    admit(world, flavor="spot")
    world.settle()
    assert world.pods == {}
    assert "cannot be read: forbidden" in world.status["message"]
    world.flavors = {"spot": FLAVOR}
    world.settle()
    assert len(world.workers()) == 4
    world.flavors = {}  # a new operator has not read it yet: what status says holds
    world.settle()
    assert world.status["queue"]["podSets"]["workers"]["nodeSelector"] == {"pool": "spot"}


def test_evicted_job_leaves_at_boundary_then_frees_its_quota() -> None:
    world = running_world()
    evict(world)
    decided = world.round()
    gone = [a for a in decided.actions if isinstance(a, DeletePod)]
    assert len(gone) == 4
    assert {a.because for a in gone} == {"Suspended"}
    assert ("EvictedFromQueue", True) in [(e.reason, e.warning) for e in decided.events]
    assert not kinds(decided, ReportWorkload)
    assert len(world.coordinators()) == 1  # leaving workers still talk to it
    world.settle()
    assert world.pods == {}
    assert world.workload is not None
    assert "admission" not in world.workload["status"]
    assert kueue.condition(world.workload, "QuotaReserved")["status"] == "False"
    assert kueue.condition(world.workload, "Admitted")["status"] == "False"
    assert kueue.condition(world.workload, "PodsReady")["status"] == "False"
    requeued = kueue.condition(world.workload, "Requeued")
    assert (requeued["status"], requeued["reason"]) == ("True", "Preempted")
    assert world.status["restarts"]["total"] == 0
    assert condition(world, "Suspended")["reason"] == "EvictedFromQueue"
    admit(world)
    world.settle()
    assert sorted(pod["metadata"]["name"] for pod in world.workers()) == [
        f"digits-worker-{slot}-1" for slot in range(4)
    ]


@pytest.mark.parametrize(
    ("reason", "requeued"), [("Preempted", "True"), ("PodsReadyTimeout", "False"), ("Deactivated", "False")]
)
def test_who_may_be_queued_again_at_once_is_kueues_own_rule(reason: str, requeued: str) -> None:
    raw = kueue.admitted({"metadata": {}, "spec": {"podSets": []}})
    told = released(raw, reason, "why", "2027-01-01T00:00:00Z")
    found = {c["type"]: c["status"] for c in told["conditions"]}
    assert found == {"QuotaReserved": "False", "Admitted": "False", "Requeued": requeued}


def test_a_deactivated_workload_says_how_to_go_on() -> None:
    world = running_world()
    assert world.workload is not None
    world.workload["spec"]["active"] = False
    evict(world, "Deactivated")
    world.settle()
    assert "set spec.active of the Workload" in world.status["message"]


def test_deleted_workload_takes_pods_along_and_is_made_again() -> None:
    world = running_world()
    world.workload = None
    decided = world.round()
    assert kinds(decided, CreateWorkload) == ["CreateWorkload"]
    assert len(kinds(decided, DeletePod)) == 4
    world.settle()
    assert world.pods == {}
    admit(world)
    world.settle()
    assert len(world.workers()) == 4


def test_a_change_while_it_waits_changes_what_is_asked_for() -> None:
    world = waiting_world()
    world.scale(6)
    assert kinds(world.round(), UpdateWorkload) == ["UpdateWorkload"]
    assert world.workload is not None
    assert world.workload["spec"]["podSets"][1]["count"] == 6
    assert not kinds(world.round(), UpdateWorkload)
    world.job["metadata"]["labels"][names.LABEL_QUEUE] = "team-b"
    world.settle()
    assert world.workload["spec"]["queueName"] == "team-b"


def test_another_queue_is_asked_when_the_job_has_left_the_first() -> None:
    world = running_world()
    world.job["metadata"]["labels"][names.LABEL_QUEUE] = "team-b"
    decided = world.round()
    assert len(kinds(decided, DeletePod)) == 4
    assert not kinds(decided, DeleteWorkload)
    world.settle()
    assert world.workload is not None
    assert world.workload["spec"]["queueName"] == "team-b"
    assert world.pods == {}


def test_suspended_job_frees_quota_after_pods_queues_at_resume() -> None:
    world = running_world()
    world.job["spec"]["suspend"] = True
    assert not kinds(world.round(), DeleteWorkload)
    world.settle()
    assert world.workload is None
    assert world.status["state"] == "Suspended"
    world.job["spec"]["suspend"] = False
    world.settle()
    assert world.status["state"] == "Queued"
    assert world.pods == {}
    admit(world)
    world.settle()
    assert len(world.workers()) == 4


def test_job_that_lost_its_label_runs_on_without_a_queue() -> None:
    world = running_world(workers=3)
    del world.job["metadata"]["labels"][names.LABEL_QUEUE]
    world.settle()
    assert world.workload is None
    assert "queue" not in world.status
    assert len(world.workers()) == 4


def test_kueue_hears_that_training_has_started_once() -> None:
    world = running_world()
    assert world.workload is not None
    assert kueue.condition(world.workload, "PodsReady")["status"] == "True"
    assert not kinds(world.plan(), ReportWorkload)


@pytest.mark.parametrize(("cleanup", "succeeds"), [("Running", True), ("None", True), ("Running", False)])
def test_kueue_hears_of_the_end(cleanup: str, succeeds: bool) -> None:
    world = running_world()
    world.job["spec"] |= {"podCleanup": cleanup, "failurePolicy": {"backoffLimit": 0}}
    if succeeds:
        world.end(world.workers()[0], 0, finished_message(1))
    else:
        world.fail(world.workers()[0])
    assert not kinds(world.round(), ReportWorkload)  # status tells of the end first
    for _ in range(20):
        world.round()
        world.kubelet()
        world.now += 10
    assert world.workload is not None
    told = kueue.condition(world.workload, "Finished")
    assert (told["status"], told["reason"]) == ("True", "Succeeded" if succeeds else "Failed")
    world.die()
    assert not kinds(world.plan(), ReportWorkload)


def test_quota_is_not_given_back_while_a_worker_still_saves() -> None:
    world = running_world()
    world.end(world.workers()[0], 0, finished_message(1))
    world.round()
    assert not kinds(world.plan(), ReportWorkload)


def test_time_in_the_queue_is_not_time_at_work() -> None:
    world = queued_world()
    world.job["spec"]["activeDeadlineSeconds"] = 60
    for _ in range(50):
        world.round()
        world.now += 10
    assert world.status["state"] == "Queued"


def test_a_refused_workload_is_shown_while_the_job_waits() -> None:
    from springtide_operator.plan.retry import refuse

    world = queued_world()
    world.refusals["workload"] = refuse(None, 403, "workloads.kueue.x-k8s.io is forbidden", world.now)
    world.round()
    degraded = condition(world, "Degraded")
    assert (degraded["reason"], degraded["status"]) == ("WorkloadRefused", "True")
    assert "is forbidden" in degraded["message"]
    assert world.pods == {}


def test_versions_differ_with_what_kueue_must_know_and_only_then() -> None:
    job = queued_world().parsed()
    first = workload_version(job)
    for change in (
        {"replicas": 5},
        {"minReplicas": 1},
        {"template": {"spec": {"containers": [{"image": "other"}]}}},
    ):
        world = queued_world()
        world.job["spec"]["workers"] |= change
        assert workload_version(world.parsed()) != first
    world = queued_world()
    world.job["metadata"]["labels"][names.LABEL_QUEUE_PRIORITY] = "urgent"
    assert workload_version(world.parsed()) != first
    world = queued_world()
    world.job["spec"]["failurePolicy"]["backoffLimit"] = 3
    assert workload_version(world.parsed()) == first


def test_what_kueue_says_is_read() -> None:
    raw = kueue.admitted(
        {
            "metadata": {"name": "w", "uid": "u"},
            "spec": {"queueName": "q", "podSets": [{"name": "workers", "count": 3}]},
        }
    )
    seen = workload_seen(raw, {})
    assert (seen.admitted, seen.reserved, seen.evicted, dict(seen.counts)) == (
        True,
        True,
        None,
        {"workers": 3},
    )
    raw["status"]["admissionChecks"] = [{"name": "prov", "state": "Pending", "message": "no node yet"}]
    assert workload_seen(raw, {}).message == "waits for admission checks: prov: no node yet"
    seen = workload_seen(kueue.evicted(raw, "Preempted", "go"), {})
    assert (seen.evicted, seen.reserved) == ("Preempted", True)


def test_a_placement_changes_nothing_that_the_pod_says() -> None:
    world = running_world(flavor="spot")
    pod: Object = {"metadata": {"labels": {}, "annotations": {}}, "spec": {"tolerations": []}}
    job = world.parsed()
    place(job, pod, "workers")
    again = copy.deepcopy(pod)
    place(job, again, "workers")
    assert again == pod
    place(job, pod, "servers")  # not among the pod sets
    assert again == pod
