"""The failure table, third part: the coordinator, parameter servers, and objects beside pods.

Each row has an event, the operator's actions and its words, through the real plan().
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from operator_failure_table import Day, Object, live_through, refused, server, worker
from operator_world import World


def waits(pod: Object, reason: str, message: str = "") -> None:
    """Have a container wait that cannot start."""
    name = pod["spec"]["containers"][0]["name"]
    state = {"waiting": {"reason": reason, "message": message}}
    pod["status"] = {
        "phase": "Pending",
        "containerStatuses": [{"name": name, "image": "img", "state": state}],
    }


def unschedulable(pod: Object) -> None:
    pod["spec"].pop("nodeName", None)
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    pod["status"] = {"phase": "Pending", "conditions": [condition]}


def stuck(world: World, pod: Object) -> None:
    """Deleted, and still there a minute after its grace period; the operator has seen to its successor."""
    world.ask_deletion(pod, grace=30)
    for _ in range(3):
        world.round()
        world.now += 10
        for made in world.pods.values():
            if made["status"]["phase"] == "Pending":
                world.run(made)
    world.now += 61
    world.reports()


def node_silent(world: World, pod: Object, *, reachable: bool) -> None:
    """Leave a pod's node silent for a minute; the coordinator is reachable or not."""
    world.node(pod["spec"]["nodeName"], ready=None)
    world.now += 60
    world.reports()
    if not reachable:
        world.unreachable_since = world.now - 10


def server_unheard(world: World) -> None:
    """Disconnect a parameter server on a silent node; the worker beside it stays connected."""
    node_silent(world, server(world, 1), reachable=True)
    assert world.report is not None
    gone = server(world, 1)["metadata"]["uid"]
    told = tuple(replace(s, connected=s.pod_uid != gone) for s in world.report.servers)
    world.report = replace(world.report, servers=told)


def again(world: World, forget: str) -> None:
    """The operator is another process, which knows of no Service or policy yet."""
    setattr(world, forget, None)


COORDINATOR = [
    Day(
        "coordinator deleted",
        lambda w: w.ask_deletion(w.coordinators()[0]),
        "+c2",
        event="CoordinatorStarted",
    ),
    Day(
        "coordinator evicted",
        lambda w: w.evict(w.coordinators()[0]),
        "+c2 -c1:Superseded",
        event="CoordinatorStarted",
    ),
    Day(
        "coordinator gone without a trace",
        lambda w: w.vanish(w.coordinators()[0]),
        "+c2",
        event="CoordinatorStarted",
    ),
    Day(
        "coordinator out of reach",
        lambda w: setattr(w, "unreachable_since", w.now - 60),
        "",
        ("Degraded", "CoordinatorUnreachable", "workers train on meanwhile"),
    ),
    Day(
        "coordinator terminating for ever on a node that lives",
        lambda w: stuck(w, w.coordinators()[0]),
    ),
    Day(
        "coordinator's node silent, and nobody reaches it",
        lambda w: node_silent(w, w.coordinators()[0], reachable=False),
        "+c2 -c1:Superseded",
        nodes=True,
        event="CoordinatorStarted",
    ),
    Day(
        "coordinator's node silent, and it answers",
        lambda w: node_silent(w, w.coordinators()[0], reachable=True),
        nodes=True,
    ),
    Day(
        "coordinator's image cannot be pulled",
        lambda w: waits(w.coordinators()[0], "ImagePullBackOff"),
        "",
        ("Degraded", "ImagePullFailed", "the coordinator digits-coordinator-1"),
    ),
    Day(
        "coordinator's container ends again and again",
        lambda w: waits(w.coordinators()[0], "CrashLoopBackOff"),
        "",
        ("Degraded", "CoordinatorFailing", "the coordinator digits-coordinator-1"),
    ),
    Day(
        "no node has room for the coordinator",
        lambda w: unschedulable(w.coordinators()[0]),
        "",
        ("Degraded", "Unschedulable", "the coordinator digits-coordinator-1"),
    ),
]

SERVERS = [
    Day(
        "no node has room for a parameter server",
        lambda w: unschedulable(server(w, 1)),
        "",
        ("Degraded", "Unschedulable", "parameter server digits-ps-1-0"),
        servers=2,
    ),
    Day(
        "a ConfigMap of a parameter server is missing",
        lambda w: waits(server(w), "CreateContainerConfigError", 'configmap "x" not found'),
        "",
        ("Degraded", "ContainerConfigError", 'configmap "x" not found'),
        servers=1,
    ),
    Day(
        "a parameter server terminating for ever on a node that lives",
        lambda w: stuck(w, server(w)),
        servers=2,
    ),
    Day(
        "a parameter server's node silent, and it is not heard of",
        server_unheard,
        "+s1-1 -s1-0:NodeLost",
        ("Degraded", "ParameterServerMissing", "parameter server 1"),
        nodes=True,
        servers=2,
    ),
    Day(
        "a parameter server's node silent, and it is heard of",
        lambda w: node_silent(w, server(w, 1), reachable=True),
        nodes=True,
        servers=2,
    ),
]

BESIDE = [
    Day(
        "the Service is refused",
        lambda w: (again(w, "service"), refused(w, 403, "exceeded quota: services", role="service")),
        "",
        ("Degraded", "ServiceRefused", "the coordinator's Service: exceeded quota: services"),
    ),
    Day(
        "the Secret is refused, and a worker is to be made",
        lambda w: (
            setattr(w, "secret_made", False),
            refused(w, 403, "exceeded quota: secrets", role="secret"),
            w.vanish(worker(w)),
        ),
        "",
        ("Degraded", "PodCreationRefused", "the job's Secret: exceeded quota: secrets"),
        (0, 1),
    ),
    Day(
        "the NetworkPolicy is refused",
        lambda w: refused(w, 403, "networkpolicies is forbidden", role="networkpolicy"),
        "",
        ("Degraded", "NetworkPolicyRefused", "networkpolicies is forbidden"),
    ),
    Day(
        "the servers' disruption budget is refused",
        lambda w: refused(w, 403, "poddisruptionbudgets is forbidden", role="serverbudget"),
        "",
        ("Degraded", "DisruptionBudgetRefused", "poddisruptionbudgets is forbidden"),
        servers=2,
    ),
]

DAYS = [*COORDINATOR, *SERVERS, *BESIDE]


@pytest.mark.parametrize("day", DAYS, ids=lambda day: day.name)
def test_bad_day_of_the_coordinator_and_servers(day: Day) -> None:
    live_through(day)
