"""Standbys as the operator sees them: made last, given back first, counted nowhere, made again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_failure_table import done, worker
from operator_world import World, job_object

from springtide_operator.api import names
from springtide_operator.plan import decide
from springtide_operator.plan.actions import CreateStandby, DeletePod, Plan
from springtide_operator.plan.coordinator_sync import make_sync
from springtide_operator.plan.observation import FailureReport, MemberReport, Node, Refusal

Object = dict[str, Any]


@dataclass
class Job(World):
    """A world whose coordinator has seats: who takes part stays, and those who run and wait step in."""

    active: list[str] = field(default_factory=list)  # uids
    generation: int = 1
    crowd: tuple[str, ...] = ()  # pods of others that no node takes

    def coordinate(self, **changes: Any) -> None:
        """The coordinator decides and reports; every pod that runs is ready."""
        running = [pod["metadata"]["uid"] for pod in self.workers() if pod["status"]["phase"] == "Running"]
        before = list(self.active)
        wanted = self.job["spec"]["workers"]["replicas"]
        self.active = [uid for uid in self.active if uid in running]
        self.active += [uid for uid in running if uid not in self.active][: max(0, wanted - len(self.active))]
        self.generation += before != self.active
        members = tuple(
            MemberReport(uid, uid in self.active, True, False, waiting=uid not in self.active)
            for uid in running
        )
        self.reports(**{"members": members, "generation": self.generation, "seats": True, **changes})

    def go_on(self, rounds: int = 6, seconds: float = 1.0, **changes: Any) -> list[Plan]:
        """Kubelets, coordinator and operator do what is due, again and again."""
        plans = []
        for _ in range(rounds):
            self.kubelet()
            self.coordinate(**changes)
            plans.append(self.round())
            self.now += seconds
        return plans

    def plan(self) -> Plan:
        observation = replace(self.observe(), crowd=self.crowd)
        return decide.plan(self.parsed(), observation, self.now)

    @property
    def standby(self) -> Object:
        """Return what status says of standbys."""
        return dict(self.status.get("standby") or {})

    def pod(self, uid: str) -> Object:
        """Return a pod that lives."""
        return next(pod for pod in self.workers() if pod["metadata"]["uid"] == uid)

    def idle(self) -> list[Object]:
        """Return the pods that live and do not train."""
        return [pod for pod in self.workers() if pod["metadata"]["uid"] not in self.active]


def trained(replicas: int = 3, standby: int = 1, nodes: int = 0, **workers: Any) -> Job:
    """Return a job that has trained for some rounds, on so many nodes; 0: nodes cannot be read."""
    job = Job(job=job_object(replicas, standby=standby, **workers))
    job.nodes = {f"n{number}": Node(f"n{number}") for number in range(nodes)}
    job.settle()
    job.go_on()
    return job


def events(plans: list[Plan]) -> list[tuple[str, str]]:
    return [(event.reason, event.message) for one in plans for event in one.events]


def test_standbys_are_made_once_all_workers_train() -> None:
    job = Job(job=job_object(3, standby=2))
    job.settle()
    assert len(job.workers()) == 3
    assert job.standby["message"] == "standbys are made when all workers wanted train"
    decided = job.go_on(1)[0]
    assert done(decided) == {"+3-0", "+4-0"}
    assert all(isinstance(action, CreateStandby) for action in decided.actions)
    job.go_on(3)
    assert (job.standby["summary"], job.standby["replicas"], job.standby["ready"]) == ("2/2", 2, 2)
    assert job.standby["reason"] == "AllMade"
    assert {key: job.status["workers"][key] for key in ("desired", "replicas", "ready", "active")} == {
        "desired": 3, "replicas": 3, "ready": 3, "active": 3,
    }  # fmt: skip
    assert job.status["state"] == "Running"
    assert done(job.plan()) == set()


def test_older_coordinator_gets_no_standbys() -> None:
    job = Job(job=job_object(3, standby=1))
    job.settle()
    job.go_on(seats=False)
    assert len(job.workers()) == 3
    assert job.standby["reason"] == "NotSupported"
    assert "suspended and resumed" in job.standby["message"]


def test_coordinator_is_told_how_many_wait() -> None:
    job = trained(processesPerPod=2)
    sync = make_sync(job.parsed(), job.observe(), 1, job.now)
    assert (sync.target, sync.standby) == (6, 2)
    job.job["spec"]["suspend"] = True
    assert make_sync(job.parsed(), job.observe(), 1, job.now).standby == 0


def test_lost_worker_is_followed_and_another_standby_made() -> None:
    job = trained()
    standby = job.idle()[0]
    lost = worker(job, 1)
    job.fail(lost)
    job.coordinate(steps_in="standby digits-worker-3-0 takes the place of digits-worker-1-0")
    first = job.round()
    assert standby["metadata"]["uid"] in job.active
    assert done(first) == {"+1-1"}
    assert isinstance(first.actions[0], CreateStandby)
    told = [event for event in events([first]) if event[0] == "StandbySteppedIn"]
    assert told == [("StandbySteppedIn", "standby digits-worker-3-0 takes the place of digits-worker-1-0")]
    again = job.go_on(steps_in="standby digits-worker-3-0 takes the place of digits-worker-1-0")
    assert not [event for event in events(again) if event[0] == "StandbySteppedIn"], "it is told once"
    assert job.status["restarts"]["failures"] == 1, "it was a worker"
    assert job.standby["ready"] == 1


def test_end_of_a_standby_counts_nowhere() -> None:
    job = trained()
    job.job["spec"]["failurePolicy"] = {"backoffLimit": 0, "preemptionLimit": 0}
    for end in (job.fail, job.evict, job.ask_deletion, job.vanish):
        end(job.idle()[0])
        plans = job.go_on(12, seconds=10.0)
        assert [text for reason, text in events(plans) if reason == "StandbyEnded"]
        assert job.status["restarts"]["total"] == 0
        assert job.status["state"] == "Running"
        assert job.standby["ready"] == 1, end


@pytest.mark.parametrize("end", ["fail", "vanish"])
def test_standby_that_was_let_in_and_ended_at_once_counts(end: str) -> None:
    job = trained()
    standby = job.idle()[0]
    name, uid = standby["metadata"]["name"], standby["metadata"]["uid"]
    getattr(job, end)(standby)
    told = FailureReport(2, 3, 0.1, f"{name} is lost: its stream broke")
    said = {"failures": (told,), "steps_in": f"standby {name} takes the place of digits-worker-1-0"}
    job.coordinate(former_members=frozenset({"another"}), **said)
    assert job.plan().status["restarts"]["total"] == 0, "sentences decide nothing"
    job.coordinate(former_members=frozenset({"another", uid}))
    job.round()
    assert job.status["restarts"]["total"] == 1


def test_standbys_that_crash_come_ever_more_seldom() -> None:
    job = trained()
    made = 0
    for _ in range(120):
        for pod in job.idle():
            if pod["status"]["phase"] == "Pending":
                made += 1
            job.fail(pod, '{"outcome": "Failed", "exception": "ValueError", "message": "no data"}')
        job.coordinate()
        job.round()
        job.now += 1.0
    assert 5 <= made <= 9, "at 0, 1, 2, 4, ... seconds"
    assert "standbys end soon after they begin" in job.standby["trouble"]
    assert "no data" in job.standby["lastEnd"]
    assert job.status["state"] == "Running"
    assert job.status["conditions"][2]["status"] == "False", "a job without its standbys is not degraded"


def test_crashing_standbys_hold_up_no_worker() -> None:
    job = trained()
    for _ in range(20):
        for pod in job.idle():
            job.fail(pod)
        job.coordinate()
        job.round()
        job.now += 1.0
    job.failed_by_themselves.clear()
    job.fail(worker(job, 0))
    job.coordinate()
    job.round()
    assert len(job.workers()) == 3, "one is made at once, or the pod that was to stand by is a worker's then"


def test_refused_standby_holds_up_no_worker() -> None:
    job = trained(standby=2)
    for pod in job.idle():
        job.vanish(pod)
    job.refusals["standby"] = Refusal(403, "exceeded quota: pods", job.now + 60.0, job.now - 60.0)
    job.coordinate()
    decided = job.round()
    assert done(decided) == set()
    assert "the API server refuses more pods: exceeded quota" in job.standby["message"]
    assert job.status["conditions"][2]["status"] == "False"
    job.fail(worker(job, 0))
    job.coordinate()
    assert done(job.round()) == {"+0-1"}


def test_standby_that_no_node_takes_is_given_back() -> None:
    job = Job(job=job_object(3, standby=1))
    job.settle()
    job.coordinate()
    job.round()
    unschedulable(job.idle()[0])
    job.coordinate()
    job.round()
    assert job.status["conditions"][2]["status"] == "False"
    job.now += 31
    assert done(job.round()) == {"-3-0:ScaledDown"}
    assert job.standby["reason"] == "NoRoom"
    assert "no node took 1 of the standbys within 30 s" in job.standby["message"]
    job.kubelet()
    assert done(job.round()) == set()
    job.now += 61
    job.coordinate()
    assert done(job.round()) == {"+3-1"}


def unschedulable(pod: Object) -> None:
    pod["status"] = {
        "phase": "Pending",
        "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
        ],
    }


def test_standby_gives_way_to_a_pod_of_others() -> None:
    job = trained()
    standby = job.idle()[0]["metadata"]["name"]
    job.crowd = ("default/other-worker-0-0",)
    decided = job.round()
    assert [(a.name, a.because) for a in decided.actions if isinstance(a, DeletePod)] == [
        (standby, "ScaledDown")
    ]
    assert job.standby["reason"] == "OthersWait"
    job.go_on(3)
    assert len(job.workers()) == 3


def test_standby_goes_before_extra_workers() -> None:
    job = Job(job=job_object(2, standby=1, maxReplicas=3))
    job.job["spec"]["elasticity"] = {"policy": "Capacity"}
    job.settle()

    def coordinate_all() -> None:
        job.job["spec"]["workers"]["replicas"] = 3  # the coordinator lets the extra worker train
        job.coordinate()
        job.job["spec"]["workers"]["replicas"] = 2

    for _ in range(6):
        job.kubelet()
        coordinate_all()
        job.round()
        job.now += 1
    assert len(job.workers()) == 4
    assert job.status["workers"]["desired"] == 3
    job.crowd = ("default/other-worker-0-0",)
    deleted = [a.name for a in job.round().actions if isinstance(a, DeletePod)]
    assert deleted == ["digits-worker-3-0"]
    assert job.status["elasticity"]["extra"] == 1


def test_stuck_worker_takes_the_place_of_a_standby() -> None:
    """Pods are alike: with nodes for three of four, three train, and none is kept for a standby."""
    job = trained()
    lost = worker(job, 0)
    job.fail(lost)
    job.coordinate()
    job.round()
    unschedulable(job.idle()[0])
    job.coordinate()
    job.now += 31
    job.round()
    job.now += 31
    job.round()
    assert len(job.workers()) == 3
    assert {pod["metadata"]["uid"] for pod in job.workers()} == set(job.active)
    assert job.status["workers"]["active"] == 3


def test_larger_size_takes_standbys_first() -> None:
    job = trained(standby=2)
    job.scale(4)
    decided = job.go_on(1)[0]
    assert len(job.active) == 4
    assert done(decided) == {"+5-0"}
    assert isinstance(decided.actions[0], CreateStandby)


def test_smaller_size_keeps_the_standby() -> None:
    job = trained()
    standby = job.idle()[0]["metadata"]["name"]
    job.scale(2)
    decided = job.round()
    assert done(decided) == {"-2-0:ScaledDown"}
    job.go_on(3)
    assert [pod["metadata"]["name"] for pod in job.idle()] == [standby]
    assert len(job.active) == 2


def test_fewer_standbys_are_given_back_without_a_worker() -> None:
    job = trained(standby=2)
    job.job["spec"]["workers"]["standby"] = 0
    decided = job.round()
    assert done(decided) == {"-3-0:ScaledDown", "-4-0:ScaledDown"}
    assert "standby" not in job.status
    job.kubelet()
    job.coordinate()
    job.round()
    assert not any(slot.get("standby") and "ended" not in slot for slot in job.status["slots"].values())


def test_smaller_size_and_more_standbys_leave_no_worker_too_many() -> None:
    job = trained()
    job.job["spec"]["workers"]["standby"] = 2
    job.scale(2)
    assert done(job.round()) == {"-2-0:ScaledDown"}
    job.go_on()
    assert (len(job.active), len(job.idle())) == (2, 2)


def test_suspended_job_keeps_no_standby() -> None:
    job = trained()
    job.job["spec"]["suspend"] = True
    job.report = replace(job.report, members=(), put_away=True, all_saved=True)  # type: ignore[type-var]
    for _ in range(4):
        job.round()
        job.kubelet()
        job.now += 5
    assert job.workers() == []
    assert "standby" not in job.status


def moving(nodes: int = 5) -> Job:
    """Return a job with its pods on n0, n1, n2 and the standby on n3, whose workers leave cordoned nodes."""
    job = trained(nodes=nodes)
    job.job["spec"]["elasticity"] = {"moveOnCordon": True}
    for pod in job.workers():
        pod["spec"]["nodeName"] = f"n{pod['metadata']['labels'][names.LABEL_SLOT]}"
    job.coordinators()[0]["spec"]["nodeName"] = "n4"
    job.coordinate()
    return job


def test_worker_on_a_cordoned_node_is_replaced_by_the_standby() -> None:
    job = moving()
    job.node("n1", cordoned=True)
    decided = job.round()
    assert done(decided) == {"-1-0:NodeCordoned"}
    text = "worker digits-worker-1-0 leaves: standby digits-worker-3-0 takes over from node n1"
    assert ("WorkerMoved", f"{text}, which takes no more pods") in events([decided])
    job.go_on()
    assert worker(job, 3)["metadata"]["uid"] in job.active
    assert len(job.active) == 3
    assert worker(job, 1)["spec"]["nodeName"] != "n1"
    assert job.status["restarts"]["total"] == 0
    assert job.standby["ready"] == 1


def test_cordoned_workers_leave_as_standbys_get_ready() -> None:
    job = moving(nodes=6)
    job.node("n1", cordoned=True)
    job.node("n2", cordoned=True)
    assert done(job.round()) == {"-1-0:NodeCordoned"}
    job.go_on(8)
    places = {pod["spec"]["nodeName"] for pod in job.workers()}
    assert not places & {"n1", "n2"}
    assert len(job.active) == 3


def test_standby_on_a_cordoned_node_is_made_anew_elsewhere() -> None:
    job = moving()
    job.node("n3", cordoned=True)
    assert done(job.round()) == {"-3-0:NodeCordoned"}
    job.go_on()
    assert worker(job, 3)["spec"]["nodeName"] != "n3"
    assert len(job.idle()) == 1


def test_cordoned_worker_moves_itself_where_no_standby_has_room() -> None:
    job = moving()
    job.crowd = ("default/other-worker-0-0",)
    job.round()
    job.kubelet()
    job.coordinate()
    job.node("n1", cordoned=True)
    assert "+1-1" in done(job.round())
    job.go_on()
    assert worker(job, 1)["spec"]["nodeName"] != "n1"
    assert len(job.active) == 3


def test_problem_of_a_standby_is_no_problem_of_the_job() -> None:
    job = trained()
    pod = job.idle()[0]
    pod["status"] = {
        "phase": "Pending",
        "containerStatuses": [
            {
                "name": "worker",
                "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
            }
        ],
    }
    job.coordinate()
    job.round()
    assert job.status["conditions"][2]["status"] == "False"
    assert "cannot be pulled" in job.standby["trouble"]


@pytest.mark.parametrize(("sizes", "says"), [({"standby": -1}, "standby"), ({"standby": 1001}, "standby")])
def test_numbers_that_cannot_be_are_refused(sizes: dict[str, int], says: str) -> None:
    job = Job(job=job_object(3, **sizes))
    with pytest.raises(Exception, match=says):
        job.parsed()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "fail",
                "evict",
                "delete",
                "vanish",
                "scale",
                "standby",
                "crowd",
                "round",
                "refuse",
                "die",
                "wait",
            ]
        ),
        st.integers(0, 5),
    ),
    max_size=25,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(replicas=st.integers(1, 3), standby=st.integers(0, 2), steps=STEPS)
def test_any_history_ends_with_all_workers_and_standbys(
    replicas: int, standby: int, steps: list[tuple[str, int]]
) -> None:
    job = trained(replicas, standby)
    job.job["spec"]["failurePolicy"] = {"backoffLimit": 10_000}
    for kind, number in steps:
        before = {"fail": job.fail, "evict": job.evict, "delete": job.ask_deletion, "vanish": job.vanish}
        pods = job.workers()
        if kind in before and pods:
            pod = pods[number % len(pods)]
            idle = pod["metadata"]["uid"] not in job.active
            slot = job.status["slots"][pod["metadata"]["labels"][names.LABEL_SLOT]]
            total = job.status["restarts"]["total"]
            before[kind](pod)
            job.coordinate()
            job.round()
            if idle and slot.get("standby"):
                assert job.status["restarts"]["total"] == total, "a standby counts in no budget"
        elif kind == "scale":
            job.scale(1 + number % 3)
        elif kind == "standby":
            job.job["spec"]["workers"]["standby"] = number % 3
        elif kind == "crowd":
            job.crowd = ("default/other",) if number % 2 else ()
        elif kind == "refuse":
            job.refuse_workers = (403, "exceeded quota") if number % 2 else None
        elif kind == "die":
            job.die()
        elif kind == "wait":
            job.now += 10.0**number
        workers_before = {pod["metadata"]["uid"] for pod in job.workers()}
        training, wanted = set(job.active) & workers_before, job.job["spec"]["workers"]["replicas"]
        decided = job.round()
        gone = {action.uid for action in decided.actions if isinstance(action, DeletePod)}
        if job.report is not None and len(training) <= wanted:
            assert not gone & training, "no worker that trains goes for a standby's sake"
        job.kubelet()
        job.coordinate()
        assert len(job.active) <= max(wanted, len(training))
    job.crowd, job.refuse_workers = (), None
    job.refusals.clear()
    for _ in range(40):
        job.go_on(4, seconds=20.0)
    wanted, beyond = job.job["spec"]["workers"]["replicas"], job.job["spec"]["workers"]["standby"]
    assert len(job.active) == wanted
    assert len(job.idle()) == beyond
    assert job.standby.get("ready", 0) == beyond
