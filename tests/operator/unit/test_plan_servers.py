"""Parameter servers in the plan: made, replaced, given back; a second look does nothing twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_failure_table import Day, done, live_through, server, worker
from operator_world import World, finished_message, job_object

from springtide_operator.api import names
from springtide_operator.api.job import Job
from springtide_operator.coordinator_connection import news, to_report, to_request
from springtide_operator.plan.actions import (
    Action,
    ApplyServerBudget,
    CreateServer,
    CreateWorker,
    DeletePod,
    Plan,
)
from springtide_operator.plan.coordinator_sync import make_sync
from springtide_operator.plan.observation import ServerReport
from springtide_operator.plan.servers import MUTE_SECONDS
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.versions import PROTOCOL_VERSION


def serving_job(servers: int = 2, replicas: int = 2) -> dict[str, Any]:
    job = job_object(replicas)
    job["spec"] |= {"strategy": {"type": "ParameterServer"}, "parameterServers": {"replicas": servers}}
    return job


def trains(servers: int = 2, replicas: int = 2) -> World:
    """A job that has trained for a while with all its servers."""
    world = World(job=serving_job(servers, replicas))
    world.settle()
    world.now += 100
    world.reports()
    world.round()
    return world


def scale_servers(world: World, replicas: int) -> None:
    world.job["spec"]["parameterServers"]["replicas"] = replicas
    world.job["metadata"]["generation"] += 1


def of(decided: Plan, kind: type[Action]) -> list[Action]:
    return [action for action in decided.actions if isinstance(action, kind)]


def named(world: World) -> list[str]:
    return [pod["metadata"]["name"] for pod in world.servers()]


def condition(world: World, kind: str = "Degraded") -> dict[str, Any]:
    return next(c for c in world.status["conditions"] if c["type"] == kind)


def test_servers_are_made_with_their_budget_and_shown() -> None:
    world = World(job=serving_job())
    world.settle()
    assert named(world) == ["digits-ps-0-0", "digits-ps-1-0"]
    assert world.server_budget == 2
    counts = {"desired": 2, "replicas": 2, "ready": 2, "outdated": 0, "summary": "2/2"}
    assert world.status["parameterServers"] == counts
    assert sorted(world.status["serverSlots"]) == ["0", "1"]
    before = dict(world.status)
    assert not world.round().actions
    assert world.status == before


def test_job_without_the_strategy_has_and_mentions_no_servers() -> None:
    world = World()
    world.settle()
    assert not world.servers(live=False)
    assert world.server_budget is None
    assert not {"parameterServers", "serverSlots"} & set(world.status)


def test_the_coordinator_is_told_of_pods_that_may_live() -> None:
    world = trains(3)
    gone, going, _ = world.servers()
    world.vanish(gone)
    world.ask_deletion(going, 30)
    told = make_sync(world.parsed(), world.observe(), 1, world.now)
    assert told.servers == 3
    assert [(pod.name, pod.leave_by > 0) for pod in told.living_servers] == [
        ("digits-ps-1-0", True),
        ("digits-ps-2-0", False),
    ]


def test_more_servers_are_made_at_once_and_the_budget_follows() -> None:
    world = trains()
    scale_servers(world, 4)
    decided = world.round()
    assert [(a.slot, a.attempt) for a in of(decided, CreateServer) if isinstance(a, CreateServer)] == [
        (2, 0),
        (3, 0),
    ]
    assert of(decided, ApplyServerBudget)
    assert "ParameterServersScaled" in [event.reason for event in decided.events]
    assert condition(world)["status"] == "False"  # a server that is new is not missing


def test_servers_of_an_older_template_are_counted() -> None:
    world = trains(2)
    limits = {"containers": [{"name": "server", "resources": {"limits": {"memory": "3Gi"}}}]}
    world.job["spec"]["parameterServers"]["template"] = {"spec": limits}
    world.job["metadata"]["generation"] += 1
    world.round()
    assert world.status["parameterServers"]["outdated"] == 2
    for slot, left in ((0, 1), (1, 0)):
        world.vanish(server(world, slot))
        world.settle()
        assert world.status["parameterServers"]["outdated"] == left
    assert world.status["workers"]["outdated"] == 0


def test_fewer_wanted_rest_goes_when_a_generation_runs_without() -> None:
    world = trains(3)
    scale_servers(world, 1)
    world.reports(servers_settled=False)
    assert not of(world.round(), DeletePod)
    serving = tuple(
        ServerReport(pod["metadata"]["uid"], True, number == 0) for number, pod in enumerate(world.servers())
    )
    world.reports(servers=serving)
    assert done(world.round()) == {"-s1-0:ScaledDown", "-s2-0:ScaledDown"}
    world.kubelet()
    assert not world.round().actions
    assert world.status["parameterServers"]["summary"] == "1/1"
    scale_servers(world, 2)
    world.reports()
    assert done(world.round()) == {"+s1-1"}
    world.round()
    assert condition(world)["reason"] == "Healthy"  # it is new, as the first one of its slot was


def test_nobody_is_given_back_without_the_coordinators_word() -> None:
    world = trains(2)
    scale_servers(world, 1)
    world.report = None
    assert not of(world.round(), DeletePod)


def test_before_the_first_generation_servers_too_many_go_at_once() -> None:
    world = World(job=serving_job(3))
    world.settle()
    scale_servers(world, 2)
    world.reports(phase="WAITING", generation=None, members=(), servers=(), servers_settled=False)
    assert done(world.round()) == {"-s2-0:ScaledDown"}


def test_evicted_server_is_replaced_at_once_and_only_once() -> None:
    world = trains()
    world.ask_deletion(server(world, 1))
    decided = world.round()
    assert done(decided) == {"+s1-1"}
    # It serves on until its successor has what it holds: a drain is no trouble, and no Warning.
    assert [(event.reason, event.warning) for event in decided.events] == [("ParameterServerReplaced", False)]
    assert condition(world)["reason"] == "Healthy"
    world.reports(phase="WAITING", reason="WaitingForServers")
    world.round()
    assert condition(world)["message"].endswith("being replaced; training goes on when all are there")
    again = world.plan()
    assert not again.actions
    assert "ParameterServerReplaced" not in [event.reason for event in again.events]
    world.kubelet()
    world.reports()
    world.round()
    assert condition(world)["reason"] == "Healthy"


def pinned() -> World:
    """A job whose first servers an operator of release 1 has made; release 2 acts now."""
    world = World(job=serving_job(), server_image="springtide/ps:1")
    world.settle()
    world.now += 100
    world.reports()
    world.round()
    world.server_image = "springtide/ps:2"
    return world


def images(world: World) -> list[str]:
    return [pod["spec"]["containers"][0]["image"][-1] for pod in world.servers()]


def test_image_of_servers_stands_in_status_before_the_first() -> None:
    world = World(job=serving_job(), server_image="springtide/ps:1")
    for _ in range(20):
        if of(world.plan(), CreateServer):
            break
        world.round()
        world.kubelet()
    else:
        pytest.fail(f"no server is made in 20 rounds: {world.status}")
    world.round(1)  # dies after the status write
    assert world.status["parameterServers"]["image"] == "springtide/ps:1"
    assert world.servers() == []


def test_another_operator_alone_replaces_no_server() -> None:
    world = pinned()
    assert world.plan().actions == ()
    world.die()
    world.settle()
    assert images(world) == ["1", "1"]


@pytest.mark.parametrize("older", ["member", "server", "coordinator", "nobody"])
def test_successor_of_a_server_is_new_where_nobody_is_older(older: str) -> None:
    world = pinned()
    before = PROTOCOL_VERSION - 1
    assert world.report is not None
    members, servers = list(world.report.members), list(world.report.servers)
    if older == "member":
        members[0] = replace(members[0], protocol=before)
    if older == "server":
        servers[1] = replace(servers[1], protocol=before)
    protocol = before if older == "coordinator" else PROTOCOL_VERSION
    world.reports(members=tuple(members), servers=tuple(servers), protocol=protocol)
    world.ask_deletion(server(world, 1))
    world.round()
    image = "2" if older == "nobody" else "1"
    assert images(world) == ["1", image]
    assert world.status["parameterServers"]["image"] == f"springtide/ps:{image}"


def test_successor_of_a_server_nobody_heard_keeps_the_image() -> None:
    world = pinned()
    world.die()
    world.ask_deletion(server(world, 0))
    world.settle()
    assert images(world) == ["1", "1"]


def test_servers_of_a_resumed_job_are_of_the_new_image() -> None:
    world = pinned()
    world.report = None
    world.job["spec"]["suspend"] = True
    world.settle()
    for pod in [*world.coordinators(), *world.workers(), *world.servers()]:
        world.vanish(pod)
    world.settle()
    assert world.status["parameterServers"]["image"] == "springtide/ps:1"
    world.job["spec"]["suspend"] = False
    world.settle()
    assert images(world) == ["2", "2"]


def test_image_of_the_servers_template_comes_first() -> None:
    world = World(job=serving_job(), server_image="springtide/ps:1")
    template = {"spec": {"containers": [{"name": "server", "image": "mine:7"}]}}
    world.job["spec"]["parameterServers"]["template"] = template
    world.settle()
    assert images(world) == ["7", "7"]


def test_a_server_that_runs_and_does_not_serve_is_named() -> None:
    world = trains()
    serving = tuple(ServerReport(pod["metadata"]["uid"], True, True) for pod in world.servers())
    world.now += MUTE_SECONDS
    world.reports(servers=serving)
    world.round()
    assert condition(world)["reason"] == "Healthy"
    world.reports(servers=(serving[0], replace(serving[1], connected=False, serving=False)))
    decided = world.round()
    assert condition(world)["message"] == "parameter server 1 does not answer, or cannot be reached"
    assert [(event.reason, event.warning) for event in decided.events] == [("ParameterServerFailing", True)]
    assert not decided.actions
    world.reports(servers=serving)
    world.round()
    assert condition(world)["reason"] == "Healthy"
    server(world, 0)["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.round()
    assert condition(world)["message"] == "parameter server 0 does not answer, or cannot be reached"


def test_drained_server_that_is_not_there_again_is_no_warning() -> None:
    """Drain the coordinator along with the server, so that nobody says that it serves on."""
    world = trains()
    world.ask_deletion(server(world, 0))
    events = list(world.round().events)
    world.report = None
    world.vanish(server(world, 0))
    events += world.round().events
    assert condition(world)["message"].startswith("parameter server 0 is being replaced")
    assert {event.reason for event in events} >= {"ParameterServerReplaced", "ParameterServerMissing"}
    assert [event for event in events if event.warning] == []


def test_a_server_that_has_just_begun_is_awaited() -> None:
    world = trains()
    serving = tuple(ServerReport(pod["metadata"]["uid"], True, True) for pod in world.servers())
    world.reports(servers=serving)
    scale_servers(world, 3)
    world.settle()
    assert condition(world)["reason"] == "Healthy"
    world.now += MUTE_SECONDS
    world.round()
    assert condition(world)["message"] == "parameter server 2 does not answer, or cannot be reached"


def test_server_lost_again_before_it_was_there_is_missing() -> None:
    world = trains()
    for attempt in (1, 2):
        world.vanish(server(world, 1))
        assert done(world.round()) == {f"+s1-{attempt}"}
        world.die()
        world.round()
        assert condition(world)["message"] == "parameter server 1 is being replaced"


def test_nothing_is_said_of_training_while_coordinator_is_silent() -> None:
    """Workers train on without it."""
    world = trains()
    world.vanish(server(world, 1))
    world.report = None
    world.round()
    assert condition(world)["message"].startswith("parameter server 1 is being replaced")
    assert "training goes on when" not in condition(world)["message"]


def test_operator_dying_before_creation_uses_no_name_twice() -> None:
    world = trains()
    world.vanish(server(world, 0))
    world.round(stop_after=1)
    world.die()
    world.settle()
    assert named(world) == ["digits-ps-0-1", "digits-ps-1-0"]


def test_a_refused_server_is_shown_and_asked_for_again() -> None:
    world = World(job=serving_job())
    world.refuse_servers = (403, 'pods "digits-ps-0-0" is forbidden: exceeded quota: small')
    for _ in range(4):
        world.round()
        world.kubelet()
    assert condition(world)["reason"] == "PodCreationRefused"
    assert "parameter servers' pods" in condition(world)["message"]
    world.refuse_servers = None
    world.settle()
    assert named(world) == ["digits-ps-0-0", "digits-ps-1-0"]


def test_suspending_deletes_servers_after_workers_until_resume() -> None:
    world = trains()
    world.job["spec"]["suspend"] = True
    assert done(world.round()) == {"-0-0:Suspended", "-1-0:Suspended"}
    assert {a.name for a in of(world.plan(), DeletePod) if isinstance(a, DeletePod)} == set()
    world.kubelet()
    assert done(world.round()) == {"-s0-0:Suspended", "-s1-0:Suspended", "-c1:Suspended"}
    world.kubelet()
    world.round()
    counts = {"desired": 0, "replicas": 0, "ready": 0, "outdated": 0, "summary": "0/0"}
    assert world.status["parameterServers"] == counts
    world.job["spec"]["suspend"] = False
    world.reports(phase="WAITING", reason="WaitingForServers")
    world.round()
    assert condition(world)["reason"] != "ParameterServerMissing"
    world.settle()
    assert named(world) == ["digits-ps-0-1", "digits-ps-1-1"]


def test_a_state_that_a_server_took_with_it_is_an_event() -> None:
    world = trains()
    world.reports(states_lost=1)
    found = [event for event in world.round().events if event.reason == "StateLost"]
    assert "a parameter server took the job's state with it" in found[0].message
    assert not [event for event in world.round().events if event.reason == "StateLost"]


def test_end_of_job_ends_its_servers_with_the_coordinator() -> None:
    world = trains(replicas=1)
    world.end(world.workers()[0], 0, finished_message(1))
    assert done(world.round()) == {"-s0-0:JobOver", "-s1-0:JobOver", "-c1:JobOver"}
    world.settle()
    assert not world.servers(live=False)
    assert world.status["state"] == "Succeeded"
    assert world.status["parameterServers"]["summary"] == "0/0"


@pytest.mark.parametrize(
    "day",
    [
        Day(
            "evicted by the node",
            lambda w: w.evict(server(w)),
            "+s0-1 -s0-0:Replaced",
            ("Degraded", "ParameterServerMissing", "parameter server 0 is being replaced"),
            servers=2,
        ),
        Day(
            "deleted by force",
            lambda w: w.vanish(server(w, 1)),
            "+s1-1",
            ("Degraded", "ParameterServerMissing", "parameter server 1"),
            event="ParameterServerReplaced",
            servers=2,
        ),
        Day(
            "its node is deleted",
            lambda w: node_deleted(w),
            "+s1-1 -s1-0:NodeLost +1-1 -1-0:NodeLost",
            ("Degraded", "ParameterServerMissing", ""),
            counts=(0, 1),
            nodes=True,
            servers=2,
        ),
        Day(
            "its image cannot be pulled",
            lambda w: cannot_start(w, "ErrImagePull"),
            "",
            ("Degraded", "ImagePullFailed", "parameter server digits-ps-0-0"),
            servers=1,
        ),
        Day(
            "its container ends again and again",
            lambda w: cannot_start(w, "CrashLoopBackOff"),
            "",
            ("Degraded", "CrashLoop", "parameter server digits-ps-0-0 fails again and again"),
            servers=1,
        ),
        Day(
            "its container was restarted in place and is not ready yet",
            lambda w: restarted(w),
            "",
            ("Degraded", "ParameterServerFailing", "parameter server 0"),
            servers=1,
        ),
    ],
    ids=lambda day: day.name,
)
def test_bad_days_of_servers(day: Day) -> None:
    live_through(day)


def node_deleted(world: World) -> None:
    """The object of node-1 is gone, and so is what was on it."""
    world.lose_node("node-1")
    world.now += 41
    assert world.report is not None
    gone = {server(world, 1)["metadata"]["uid"], worker(world, 1)["metadata"]["uid"]}
    members = tuple(replace(m, connected=m.pod_uid not in gone) for m in world.report.members)
    servers = tuple(replace(s, connected=s.pod_uid not in gone) for s in world.report.servers)
    world.report = replace(world.report, members=members, servers=servers)


def cannot_start(world: World, reason: str) -> None:
    pod = server(world)
    state = {"waiting": {"reason": reason, "message": reason}}
    pod["status"] = {
        "phase": "Pending",
        "containerStatuses": [{"name": "server", "image": "springtide/ps:0.1.0", "state": state}],
    }


def restarted(world: World) -> None:
    status = server(world)["status"]
    status["containerStatuses"][0]["restartCount"] = 1
    status["conditions"] = [{"type": "Ready", "status": "False"}]


# One flat choice, each followed by a round: nested ones seldom reach two events that matter.
STEPS = st.tuples(
    st.sampled_from(["kubelet", "die", "report", "cut", "delete", "evict", "vanish", "scale", "wait"]),
    st.integers(0, 6),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, min_size=5, max_size=25))
def test_each_slot_gets_its_server_with_no_name_used_twice(
    history: list[tuple[str, int]],
) -> None:
    """`World.add` and `World.act` check names and attempts."""
    world = World(job=serving_job(2, 1))
    world.settle()
    for kind, number in history:
        pods = world.servers()
        if kind == "cut":
            world.round(stop_after=number)
            world.die()
        elif kind == "kubelet":
            world.kubelet()
        elif kind == "die":
            world.die()
        elif kind == "report":
            world.reports()
        elif kind == "scale":
            scale_servers(world, 1 + number % 4)
        elif kind == "wait":
            world.now += (0.5, 20.0, 400.0)[number % 3]
        elif pods:
            {"delete": world.ask_deletion, "evict": world.evict, "vanish": world.vanish}[kind](
                pods[number % len(pods)]
            )
        world.round()
    for _ in range(3):  # servers too many go once the coordinator says that they do not serve
        world.settle()
        wanted = world.job["spec"]["parameterServers"]["replicas"]
        serving = tuple(
            ServerReport(p["metadata"]["uid"], True, int(p["metadata"]["labels"][names.LABEL_SLOT]) < wanted)
            for p in world.servers()
        )
        world.reports(servers=serving)
    world.settle()
    slots = [int(pod["metadata"]["labels"][names.LABEL_SLOT]) for pod in world.servers()]
    assert slots == list(range(wanted))
    assert not of(world.plan(), CreateWorker)


def test_edit_of_consistency_goes_to_coordinator_not_to_pods() -> None:
    world = World(job=serving_job())
    wanted = world.job["spec"]["strategy"].setdefault("parameterServer", {})
    wanted |= {"consistency": "BoundedStaleness", "staleness": 3}
    world.settle()
    world.now += 100
    world.reports(consistency="BoundedStaleness", staleness=3)
    world.round()
    shown = world.status["parameterServers"]
    assert (shown["consistency"], shown["staleness"]) == ("BoundedStaleness", 3)
    wanted |= {"consistency": "Asynchronous"}
    world.job["metadata"]["generation"] += 1
    decided = world.round()
    assert not decided.actions
    job = Job.parse(world.job)
    said = make_sync(job, world.observe(), 1, world.now)
    assert (said.consistency, said.staleness) == ("Asynchronous", 0)
    asked = to_request(said)
    assert (asked.consistency.mode, asked.consistency.staleness) == ("Asynchronous", 0)
    assert world.status["parameterServers"]["consistency"] == "BoundedStaleness"  # until it is in force
    world.reports(consistency="Asynchronous", staleness=0)
    events = [event for event in world.round().events if event.reason == "ConsistencyChanged"]
    assert [event.message for event in events] == ["from BoundedStaleness (3 steps) to Asynchronous"]
    assert "staleness" not in world.status["parameterServers"]
    world.reports(consistency="", staleness=0)  # a coordinator that has just begun
    assert not [event for event in world.round().events if event.reason == "ConsistencyChanged"]
    assert world.status["parameterServers"]["consistency"] == "Asynchronous"


def test_edit_the_script_cannot_follow_is_told_until_taken_back() -> None:
    world = World(job=serving_job())
    wanted = world.job["spec"]["strategy"].setdefault("parameterServer", {})
    wanted |= {"consistency": "Asynchronous"}
    world.settle()
    world.now += 100
    world.reports(consistency="Synchronous", consistency_refused="on-servers-worker-0: average")
    decided = world.round()
    assert not decided.actions
    text = "the job stays in consistency Synchronous, Asynchronous is refused: on-servers-worker-0: average"
    assert (condition(world)["reason"], condition(world)["message"]) == ("ConsistencyRefused", text)
    assert text in [event.message for event in decided.events if event.reason == "ConsistencyRefused"]
    assert world.status["parameterServers"]["consistency"] == "Synchronous"
    wanted |= {"consistency": "Synchronous"}  # of which the coordinator has not heard yet
    world.round()
    assert condition(world)["status"] == "False"


def test_edit_awaiting_the_epoch_end_is_told_until_in_force() -> None:
    world = World(job=serving_job())
    wanted = world.job["spec"]["strategy"].setdefault("parameterServer", {})
    wanted |= {"consistency": "Synchronous"}
    world.settle()
    world.now += 100
    text = "consistency Asynchronous becomes Synchronous at the end of the epoch"
    world.reports(consistency="Asynchronous", consistency_pending=text)
    pending = [event.message for event in world.round().events if event.reason == "ConsistencyPending"]
    assert pending == [text]
    assert world.status["parameterServers"]["consistencyPending"] == text
    world.reports(consistency="", consistency_pending="")  # a coordinator that has just begun
    assert not [event for event in world.round().events if event.reason.startswith("Consistency")]
    assert world.status["parameterServers"]["consistencyPending"] == text
    world.reports(consistency="Synchronous", consistency_pending="")
    changed = [event.message for event in world.round().events if event.reason.startswith("Consistency")]
    assert changed == ["from Asynchronous to Synchronous"]
    assert "consistencyPending" not in world.status["parameterServers"]


def test_the_coordinators_answer_tells_the_consistency() -> None:
    told = pb.Consistency(mode="BoundedStaleness", staleness=5)
    said = pb.SyncReply(consistency=told, consistency_refused="why", consistency_pending="when")
    report = to_report(said, 1.0)
    assert report.consistency_pending == "when"
    assert (report.consistency, report.staleness) == ("BoundedStaleness", 5)
    assert report.consistency_refused == "why"
    assert news(report, to_report(pb.SyncReply(), 1.0))
