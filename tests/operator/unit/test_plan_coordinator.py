"""The coordinator's pod, its number, and its Service."""

from __future__ import annotations

from dataclasses import replace

from operator_world import World, job_object

from springtide_operator.api import reasons
from springtide_operator.plan.actions import (
    ApplyService,
    CreateCoordinator,
    CreateWorker,
    DeletePod,
    EnsureSecret,
)
from springtide_operator.plan.coordinator import LEARNING_SECONDS, SECRET_CHECK_SECONDS
from springtide_operator.plan.observation import MemberReport, Refusal
from springtide_operator.plan.values import timestamp
from springtide_protocol.versions import PROTOCOL_VERSION


def started() -> World:
    world = World(job=job_object(2))
    world.settle()
    return world


def test_its_number_stands_in_status_before_it_is_made() -> None:
    world = World(job=job_object(1))
    world.round(1)  # dies after the status write
    assert world.status["coordinator"]["incarnation"] == 1
    assert world.coordinators() == []
    world.die()
    world.settle()
    assert world.incarnations_made == [2]  # nobody can know whether 1 was used


def test_pod_being_deleted_is_replaced_at_once_workers_stay() -> None:
    world = started()
    workers = {p["metadata"]["uid"] for p in world.workers()}
    world.ask_deletion(world.coordinators()[0], 5)
    world.round()
    assert [p["metadata"]["name"] for p in world.coordinators()] == ["digits-coordinator-2"]
    assert world.service is not None
    assert world.service.incarnation == 2
    assert {p["metadata"]["uid"] for p in world.workers()} == workers


def test_a_restart_in_place_changes_nothing() -> None:
    world = started()
    world.run(world.coordinators()[0])
    assert world.plan().actions == ()


def test_a_failed_pod_is_replaced_and_removed() -> None:
    world = started()
    old = world.coordinators()[0]
    world.end(old, 1)
    decided = world.round()
    assert [a.incarnation for a in decided.actions if isinstance(a, CreateCoordinator)] == [2]
    assert [a.name for a in decided.actions if isinstance(a, DeletePod)] == ["digits-coordinator-1"]


def test_two_pods_are_never_made_within_two_seconds() -> None:
    world = World(job=job_object(1))
    world.round()
    world.end(world.coordinators()[0], 1)
    assert not any(isinstance(a, CreateCoordinator) for a in world.plan().actions)
    world.now += 2
    assert any(isinstance(a, CreateCoordinator) for a in world.plan().actions)


def test_a_refused_pod_does_not_raise_the_number_again_and_again() -> None:
    world = World(job=job_object(1))
    world.refusals["coordinator"] = Refusal(403, "exceeded quota", world.now + 5, world.now)
    world.round()
    assert world.status["coordinator"]["incarnation"] == 0
    degraded = next(c for c in world.status["conditions"] if c["type"] == "Degraded")
    assert "exceeded quota" in degraded["message"]
    assert "coordinator" in degraded["message"]
    assert world.plan().wake_at == world.now + 5


def test_unreachable_coordinator_is_a_condition_costs_no_worker() -> None:
    world = started()
    world.reports()
    world.round()
    world.now += 300
    world.unreachable_since = world.now - 60
    decided = world.round()
    assert not any(isinstance(a, DeletePod | CreateCoordinator) for a in decided.actions)
    conditions = {c["type"]: c for c in world.status["conditions"]}
    assert conditions["Degraded"]["reason"] == "CoordinatorUnreachable"
    assert conditions["Running"]["status"] == "True"
    # Its Service may have been deleted: it is applied again, with the address that workers know.
    assert [a.cluster_ip for a in decided.actions if isinstance(a, ApplyService)] == ["10.0.0.1"]


def degraded(world: World) -> dict[str, str]:
    return next(c for c in world.status["conditions"] if c["type"] == "Degraded")


def silent() -> World:
    """A coordinator whose process runs, and which nobody has reached yet."""
    world = started()
    world.run(world.coordinators()[0])
    world.now += 30
    world.unreachable_since = world.now - 30
    world.round()
    return world


def test_silence_of_a_starting_coordinator_is_no_news() -> None:
    world = silent()
    assert degraded(world)["status"] == "False"
    world.now += 60
    world.round()
    assert degraded(world)["reason"] == "CoordinatorUnreachable"
    assert "digits-coordinator-1 runs, and has not begun to answer within 60 s" in degraded(world)["message"]


def test_silence_of_a_coordinator_that_is_up_is_news() -> None:
    world = silent()
    up = {"type": "Ready", "status": "True", "lastTransitionTime": timestamp(world.now)}
    world.coordinators()[0]["status"]["conditions"] = [up]
    world.round()
    assert degraded(world)["status"] == "False"
    world.now += 6
    world.round()
    assert "cannot reach digits-coordinator-1" in degraded(world)["message"]
    assert "workers wait for it" in degraded(world)["message"]


def test_without_the_coordinators_word_running_stays_what_it_was() -> None:
    world = started()
    world.reports()
    world.round()
    world.die()
    world.round()
    conditions = {c["type"]: c for c in world.status["conditions"]}
    assert conditions["Running"]["status"] == "True"
    assert world.status["generation"] == 1


def test_lost_status_adopts_the_pod_that_lives() -> None:
    world = started()
    world.ask_deletion(world.coordinators()[0], 5)
    world.settle()
    world.job["status"] = {}
    world.die()
    world.settle()
    assert world.status["coordinator"]["incarnation"] == 2
    assert world.incarnations_made == [1, 2]


def test_deleted_secret_is_made_again_for_the_pod_lacking_it() -> None:
    world = started()
    world.now += 100
    waiting = {"reason": "CreateContainerConfigError", "message": 'secret "digits-token" not found'}
    world.coordinators()[0]["status"]["containerStatuses"] = [{"name": "c", "state": {"waiting": waiting}}]
    decided = world.round()
    assert [a.reason for a in decided.actions if isinstance(a, EnsureSecret)] == [
        "digits-coordinator-1 cannot be started; the Secret may have been deleted"
    ]
    world.now += SECRET_CHECK_SECONDS - 1
    assert not any(isinstance(a, EnsureSecret) for a in world.plan().actions)
    world.now += 1
    assert any(isinstance(a, EnsureSecret) for a in world.plan().actions)


def test_deleted_service_is_applied_again_at_a_cut_off_member() -> None:
    for lost in ("member", "newcomer"):
        world = started()
        for pod in world.workers():
            world.run(pod)
        world.reports()
        world.now += 100
        assert world.report is not None
        assert not any(isinstance(a, ApplyService) for a in world.plan().actions)
        first, *others = world.report.members
        if lost == "member":
            world.report = replace(world.report, members=(replace(first, connected=False), *others))
        else:
            world.report = replace(world.report, members=tuple(others), silent=frozenset({first.pod_uid}))
        decided = world.round()
        assert [a.reason for a in decided.actions if isinstance(a, ApplyService)] == [
            "digits-worker-0-0 is not connected to the coordinator"
        ]
        assert not any(isinstance(a, ApplyService) for a in world.plan().actions), "once in a while only"


def test_coordinator_still_learning_who_trains_is_no_news_yet() -> None:
    world = started()
    world.reports()
    world.round()
    world.ask_deletion(world.coordinators()[0], 5)
    world.settle(seconds=0.5)
    assert [p["metadata"]["name"] for p in world.coordinators()] == ["digits-coordinator-2"]
    world.reports(phase="WAITING", generation=None, members=(), reason="WaitingForReports")
    world.round()
    assert (world.status["state"], world.status["workers"]["summary"]) == ("Running", "2/2")
    world.now += LEARNING_SECONDS
    world.round()
    assert (world.status["state"], world.status["workers"]["summary"]) == ("Recovering", "0/2")


def test_workers_known_to_the_last_coordinator_are_not_silent() -> None:
    world = started()
    world.reports()
    world.round()
    world.now += 300
    world.ask_deletion(world.coordinators()[0], 5)
    world.settle(seconds=0.5)
    silent = frozenset(pod["metadata"]["uid"] for pod in world.workers())
    world.reports(phase="WAITING", generation=None, members=(), silent=silent)
    world.now += 50
    world.round()
    degraded = next(c for c in world.status["conditions"] if c["type"] == "Degraded")
    assert degraded["status"] == "False"
    world.now += 10
    world.round()
    degraded = next(c for c in world.status["conditions"] if c["type"] == "Degraded")
    assert degraded["reason"] == reasons.WORKER_SILENT
    assert "digits-coordinator-2 cannot be reached from there" in degraded["message"]


def test_takeover_event_says_workers_train_only_if_they_do() -> None:
    world = started()
    world.ask_deletion(world.coordinators()[0], 5)
    said = [e.message for e in world.round().events]
    assert said == [
        "coordinator 2 takes over: digits-coordinator-1 is being deleted; workers train on meanwhile"
    ]
    for pod in [*world.workers(), *world.coordinators()]:
        world.vanish(pod)
    world.now += 10
    said = [e.message for e in world.round().events if e.reason == reasons.EVENT_COORDINATOR_STARTED]
    assert said == ["coordinator 3 takes over: the coordinator's pod is gone"]


def test_coordinators_that_were_refused_are_no_take_over() -> None:
    world = World(job=job_object(2))
    for _ in range(3):
        decided = world.round(1)
        for action in decided.actions:
            if not isinstance(action, CreateCoordinator | CreateWorker):  # pods are refused
                world.act(action)
        assert any(isinstance(action, CreateCoordinator) for action in decided.actions)
        assert decided.events == ()
        world.now += 10
    assert set(world.status["slots"]) == {"0", "1"}
    world.settle()
    assert world.incarnations_made == [4]


def test_a_resumed_job_has_a_new_coordinator_and_no_take_over() -> None:
    world = started()
    world.reports()
    for suspend in (True, False):
        world.job["spec"]["suspend"] = suspend
        world.job["metadata"]["generation"] += 1
        told = []
        for _ in range(8):
            told += [event.reason for event in world.round().events]
            world.kubelet()
            world.now += 2
        assert told == [reasons.JOB_RESUMED] or suspend, told
    assert [p["metadata"]["name"] for p in world.coordinators()] == ["digits-coordinator-2"]


def pinned(replicas: int = 2) -> World:
    """A job whose first coordinator an operator of release 1 has made; release 2 acts now."""
    world = World(job=job_object(replicas), coordinator_image="springtide/operator:1")
    world.settle()
    world.reports()
    world.round()
    world.coordinator_image = "springtide/operator:2"
    return world


def images(world: World) -> list[str]:
    return [pod["spec"]["containers"][0]["image"][-1] for pod in world.coordinators()]


def members(world: World, protocol: int) -> tuple[MemberReport, ...]:
    assert world.report is not None
    return tuple(replace(member, protocol=protocol) for member in world.report.members)


def test_image_stands_in_status_before_the_first_pod() -> None:
    world = World(job=job_object(1), coordinator_image="springtide/operator:1")
    world.round(1)  # dies after the status write
    assert world.status["coordinator"]["image"] == "springtide/operator:1"
    assert world.coordinators() == []


def test_another_operator_alone_replaces_no_coordinator() -> None:
    world = pinned()
    assert world.plan().actions == ()
    world.die()
    world.settle()
    assert images(world) == ["1"]


def test_successor_among_unknown_workers_keeps_the_image() -> None:
    world = pinned()
    world.die()  # the new operator has not heard the coordinator
    world.ask_deletion(world.coordinators()[0], 5)
    world.round()
    assert world.status["coordinator"]["image"] == "springtide/operator:1"
    assert images(world) == ["1"]


def test_successor_among_older_workers_keeps_the_image() -> None:
    world = pinned()
    world.reports(members=members(world, PROTOCOL_VERSION - 1))
    world.ask_deletion(world.coordinators()[0], 5)
    decided = world.round()
    assert images(world) == ["1"]
    assert not any("springtide/operator" in event.message for event in decided.events)


def test_one_worker_that_is_away_keeps_the_image() -> None:
    world = pinned()
    first, *others = members(world, PROTOCOL_VERSION)
    world.reports(members=(replace(first, connected=False), *others))
    world.ask_deletion(world.coordinators()[0], 5)
    world.round()
    assert images(world) == ["1"]


def test_successor_among_workers_of_its_release_is_new() -> None:
    world = pinned()
    world.ask_deletion(world.coordinators()[0], 5)
    decided = world.round()
    assert world.status["coordinator"]["image"] == "springtide/operator:2"
    assert images(world) == ["2"]
    [told] = [event.message for event in decided.events if "takes over" in event.message]
    assert "with the image springtide/operator:2 in the place of springtide/operator:1" in told


def test_start_from_suspension_takes_the_new_image() -> None:
    world = pinned()
    world.report = None
    world.job["spec"]["suspend"] = True
    world.settle()
    for pod in [*world.coordinators(), *world.workers()]:
        world.vanish(pod)
    world.settle()
    assert world.status["coordinator"]["image"] == "springtide/operator:1"
    world.job["spec"]["suspend"] = False
    world.settle()
    assert images(world) == ["2"]


def test_image_of_the_manifest_comes_before_the_noted_one() -> None:
    world = World(job=job_object(1), coordinator_image="springtide/operator:1")
    world.job["spec"]["coordinator"] = {"image": "mine:7"}
    world.settle()
    assert images(world) == ["7"]
