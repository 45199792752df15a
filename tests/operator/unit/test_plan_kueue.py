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
from springtide_operator.manifests.errors import TemplateError
from springtide_operator.manifests.kueue import place, released, workload_version
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


@pytest.mark.parametrize(("served", "pods"), [(False, 4), (None, 0)])
def test_without_kueue_label_means_nothing_once_known(served: bool | None, pods: int) -> None:
    world = queued_world(served=served)
    for _ in range(5):
        world.round()
        world.kubelet()
    assert len(world.workers()) == pods
    assert world.workload is None
    assert "queue" not in world.status
    if served is False:
        assert condition(world, "Degraded")["reason"] == "QueueUnavailable"
        assert "team-a" in condition(world, "Degraded")["message"]


def test_operator_that_does_not_know_yet_halts_no_running_job() -> None:
    for world in (running_world(), queued_world(served=False)):
        world.settle()
        before = {pod["metadata"]["uid"] for pod in world.workers()}
        world.die()
        world.apis, world.workloads_listed = {}, False
        world.settle()
        assert {pod["metadata"]["uid"] for pod in world.workers()} == before


def test_job_stays_as_kueue_left_it_when_its_api_goes() -> None:
    for world, pods in ((running_world(), 4), (waiting_world(), 0)):
        world.apis[names.KUEUE_API] = False
        world.settle()
        assert len(world.workers()) == pods
        assert condition(world, "Degraded")["reason"] == "QueueUnavailable"


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
    assert world.workload["status"]["admission"] is None
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
