"""The failure table, second part: pods that wait, refusals, nodes, hangs.

Each row has an event, the operator's actions and its words, through the real plan().
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import kueue_standin
import pytest
from operator_failure_table import (
    ALL_GO,
    Day,
    Object,
    live_through,
    refused,
    server,
    stalled,
    unschedulable,
    waits,
    worker,
)
from operator_world import World

from springtide_operator.api import names
from springtide_operator.plan.actions import CreateWorkload
from springtide_operator.plan.retry import refuse
from springtide_operator.plan.values import timestamp

REFUSAL = ("Degraded", "PodCreationRefused")
FORBIDDEN = 'pods "digits-worker-3-0" is forbidden: '


WEBHOOK_DOWN = (
    'Internal error occurred: failed calling webhook "validate.policy": failed to call webhook:'
    ' Post "https://policy.policies.svc:443/validate": dial tcp 10.0.0.9:443: connect: connection refused'
)


def later_refused(world: World, seconds: float, said: str = "etcdserver: no leader") -> None:
    """Refused again, so many seconds after the last time; one look at it if nothing is to be said."""
    world.now += seconds
    world.reports()
    world.refusals["worker"] = refuse(world.refusals["worker"], 500, "etcdserver: no leader", world.now)
    if not said:
        degraded = next(c for c in world.plan().status["conditions"] if c["type"] == "Degraded")
        assert degraded["status"] == "False"


def creating(world: World, pod: Object, seconds: float, **init: Object) -> None:
    """Show a pod that its node took so many seconds ago, without a word about its containers."""
    waiting = {"waiting": {"reason": "ContainerCreating"}}
    pod["status"] = {
        "phase": "Pending",
        "conditions": [
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(world.now)}
        ],
        "containerStatuses": [{"name": pod["spec"]["containers"][0]["name"], "state": waiting}],
    }
    if init:
        pod["status"]["initContainerStatuses"] = [{"name": "fetch", "state": init["init"]}]
    later(world, seconds)


def later(world: World, seconds: float) -> None:
    world.now += seconds
    world.reports()


WAITING = [
    Day(
        "image pull error",
        lambda w: waits(w, 0, "ErrImagePull"),
        "",
        ("Degraded", "ImagePullFailed", "'img'"),
    ),
    Day(
        "missing ConfigMap",
        lambda w: waits(w, 1, "CreateContainerConfigError", 'configmap "x" not found'),
        "",
        ("Degraded", "ContainerConfigError", 'configmap "x" not found'),
    ),
    Day("no node has room", lambda w: unschedulable(w, 2), "", ("Degraded", "Unschedulable", "0/3 nodes")),
    Day(
        "a volume that cannot be mounted",
        lambda w: creating(w, worker(w, 2), 120),
        "",
        (
            "Degraded",
            "ContainersNotStarted",
            "worker digits-worker-2-0 on node node-2 has begun within 120 s",
        ),
    ),
    Day("containers that are made for some time", lambda w: creating(w, worker(w, 2), 119)),
    Day(
        "two volumes that cannot be mounted",
        lambda w: (creating(w, worker(w, 1), 60), creating(w, worker(w, 2), 60), later(w, 60)),
        "",
        (
            "Degraded",
            "ContainersNotStarted",
            "digits-worker-1-0 on node node-1 has begun within 120 s (and 1",
        ),
    ),
    Day(
        "an init container takes its time",
        lambda w: creating(w, worker(w, 2), 900, init={"running": {"startedAt": "2027-01-15T08:01:00Z"}}),
    ),
    Day(
        "the coordinator's containers do not begin",
        lambda w: creating(w, w.coordinators()[0], 120),
        "",
        ("Degraded", "ContainersNotStarted", "the coordinator digits-coordinator-1 on node node-0"),
    ),
    Day(
        "a parameter server's containers do not begin",
        lambda w: creating(w, server(w, 1), 120),
        "",
        ("Degraded", "ContainersNotStarted", "parameter server digits-ps-1-0 on node node-1"),
        servers=2,
    ),
    Day(
        "a helper container loops",
        lambda w: waits(w, 0, "CrashLoopBackOff"),
        "",
        ("Degraded", "CrashLoop", "worker digits-worker-0-0"),
    ),
]

REFUSED = [
    Day(
        "quota",
        lambda w: refused(w, 403, FORBIDDEN + "exceeded quota: small"),
        "",
        (*REFUSAL, "exceeded quota: small"),
    ),
    Day(
        "limit range",
        lambda w: refused(w, 403, FORBIDDEN + "maximum cpu usage per Container is 1"),
        "",
        (*REFUSAL, "maximum cpu usage"),
    ),
    Day(
        "pod security",
        lambda w: refused(w, 403, FORBIDDEN + 'violates PodSecurity "restricted:latest"'),
        "",
        (*REFUSAL, "violates PodSecurity"),
    ),
    Day(
        "webhook",
        lambda w: refused(w, 400, 'admission webhook "policy.example" denied the request: no'),
        "",
        (*REFUSAL, "admission webhook"),
    ),
    Day(
        "webhook that says 422",
        lambda w: refused(w, 422, 'admission webhook "policy.example" denied the request'),
        "",
        (*REFUSAL, "admission webhook"),
    ),
    Day(
        "a policy of the API server itself, that says 422",
        lambda w: refused(
            w, 422, FORBIDDEN + "ValidatingAdmissionPolicy 'team' with binding 'all' denied request: no owner"
        ),
        "",
        (*REFUSAL, "denied request: no owner"),
    ),
    Day(
        "webhook that does not answer",
        lambda w: refused(w, 500, WEBHOOK_DOWN),
        "",
        (*REFUSAL, "the API server fails to make worker pods: Internal error occurred: failed calling"),
    ),
    Day(
        "unknown runtime class",
        lambda w: refused(w, 403, FORBIDDEN + 'pod rejected: RuntimeClass "gvisor" not found'),
        "",
        (*REFUSAL, "RuntimeClass"),
    ),
    Day(
        "a parameter server is refused",
        lambda w: (refused(w, 403, "exceeded quota: small", role="server"), w.vanish(server(w))),
        "",
        (*REFUSAL, "parameter servers' pods: exceeded quota: small"),
        servers=2,
    ),
    Day(
        "a parameter server is refused as invalid",
        lambda w: (refused(w, 422, "spec.volumes[0]: Invalid value", role="server"), w.vanish(server(w))),
        "-0-0:JobOver -1-0:JobOver -2-0:JobOver",
        ("Failed", "InvalidTemplate", "the parameter server's pod as invalid: spec.volumes[0]"),
        servers=2,
    ),
    Day(
        "unknown priority class",
        lambda w: refused(w, 403, FORBIDDEN + "no PriorityClass with name high was found"),
        "",
        (*REFUSAL, "PriorityClass"),
    ),
    Day(
        "unknown service account",
        lambda w: refused(w, 403, FORBIDDEN + "error looking up service account default/x"),
        "",
        (*REFUSAL, "service account"),
    ),
    Day(
        "too many requests",
        lambda w: refused(w, 429, "too many requests, please try again later"),
        "",
    ),
    Day(
        "quota changed by others at the same time",
        lambda w: refused(w, 409, "Operation cannot be fulfilled on resourcequotas"),
        "",
        (*REFUSAL, "resourcequotas"),
    ),
    Day("the API server breaks down", lambda w: refused(w, 500, "etcdserver: leader changed"), ""),
    Day(
        "the API server breaks down for long",
        lambda w: (refused(w, 500, "etcdserver: no leader"), later_refused(w, 29, ""), later_refused(w, 1)),
        "",
        (*REFUSAL, "the API server fails to make worker pods: etcdserver: no leader"),
    ),
    Day(
        "invalid template",
        lambda w: refused(w, 422, "spec.containers[0].name: Invalid value"),
        ALL_GO,
        ("Failed", "InvalidTemplate", "spec.containers[0].name"),
    ),
    Day(
        "template that is no pod",
        lambda w: refused(w, 400, "Pod in version v1 cannot be handled"),
        ALL_GO,
        ("Failed", "InvalidTemplate", "cannot be handled"),
    ),
    Day(
        "the namespace is being deleted",
        lambda w: (refused(w, 403, "being terminated", True), w.fail(worker(w))),
        "",
        ("Degraded", "NamespaceTerminating", "namespace default"),
        (1, 0),
    ),
    Day(
        "the namespace is being deleted, and the coordinator's creation told",
        lambda w: (refused(w, 403, "being terminated", True, role="coordinator"), w.fail(worker(w))),
        "",
        ("Degraded", "NamespaceTerminating", "namespace default"),
        (1, 0),
    ),
    Day(
        "refused, and not wanted any more",
        lambda w: (refused(w, 403, FORBIDDEN + "exceeded quota"), w.scale(3)),
        "",
    ),
    Day(
        "the coordinator is refused",
        lambda w: (
            refused(w, 403, "exceeded quota: small", role="coordinator"),
            w.vanish(w.coordinators()[0]),
        ),
        "",
        (*REFUSAL, "the coordinator's pod"),
    ),
]


def unheard(world: World, *slots: int, **node: object) -> None:
    """Something happens to node-1; a minute later the coordinator does not hear of the workers there."""
    world.node("node-1", **node)
    world.now += 60
    world.reports()
    assert world.report is not None
    silent = {worker(world, slot)["metadata"]["uid"] for slot in slots}
    members = (replace(m, connected=m.pod_uid not in silent) for m in world.report.members)
    world.reports(members=tuple(members))


def blackout(world: World) -> None:
    """No node is heard of any more; the coordinator hears one of the workers."""
    for name in list(world.nodes):
        world.node(name, ready=None)
    unheard(world, 0, 1, ready=None)


def coordinators_node_deleted(world: World) -> None:
    world.lose_node("node-0")
    world.unreachable_since = world.now
    world.now += 6


def stuck(world: World, lost: bool = False) -> None:
    pod = worker(world, 1)
    world.ask_deletion(pod, grace=30)
    if lost:
        pod["status"]["conditions"] = [
            {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"},
            {"type": "Ready", "status": "False"},
        ]
    world.round()
    world.now += 30 + 61
    world.reports()


def cordoned_to_move(world: World) -> None:
    world.job["spec"]["elasticity"] = {"moveOnCordon": True}
    world.node("node-1", cordoned=True)


def full(world: World) -> None:
    world.job["spec"]["workers"]["maxReplicas"] = 3
    cordoned_to_move(world)


LOST, NODE_LOST = "+1-1 -1-0:NodeLost", {"counts": (0, 1), "event": "WorkerPreempted", "nodes": True}
NODES = [
    Day("node not ready, its worker heard of", lambda w: unheard(w, ready=False), nodes=True),
    Day("node not ready, its worker silent", lambda w: unheard(w, 1, ready=False), LOST, **NODE_LOST),
    Day("node unknown, its worker silent", lambda w: unheard(w, 1, ready=None), LOST, **NODE_LOST),
    Day("worker silent, its node ready", lambda w: unheard(w, 1), nodes=True),
    Day("node deleted, its worker heard of", lambda w: unheard(w, ready=None, gone=True), nodes=True),
    Day("node deleted, its worker silent", lambda w: unheard(w, 1, ready=None, gone=True), LOST, **NODE_LOST),
    Day("the coordinator's node deleted, and it answers", lambda w: w.lose_node("node-0"), nodes=True),
    Day("the coordinator's node deleted, and nobody reaches it",
        coordinators_node_deleted,
        "+c2 -c1:Superseded", nodes=True),
    Day("every node silent, and so are two workers", lambda w: blackout(w),
        says=("Degraded", "TooManyNodesUnknown", "all 3 nodes look lost"), nodes=True,
        event="TooManyNodesUnknown"),
    Day("node cordoned", lambda w: w.node("node-1", cordoned=True), nodes=True),
    Day("node cordoned, and the job moves on a cordon", cordoned_to_move, "+1-1", nodes=True),
    Day("node with a taint that says that it goes",
        lambda w: w.node("node-1", cordoned=True, leaving=True), "+1-1", nodes=True),
    Day("node cordoned, no room for one more", full, nodes=True),
    Day("worker terminating for ever on a node that lives", stuck, counts=(0, 1), nodes=True),
    Day("worker terminating for ever, nodes not readable", stuck, counts=(0, 1)),
    Day("worker driven out of a lost node, nodes not readable", lambda w: stuck(w, lost=True),
        "-1-0:StuckTerminating", counts=(0, 1)),
]  # fmt: skip


def gang(world: World, served: bool, *refusal: object) -> None:
    """The job names a gang scheduler; one more worker is wanted."""
    world.job["spec"]["gangScheduling"] = "Volcano"
    world.job["spec"]["workers"]["replicas"] = 4
    world.apis[names.VOLCANO_API] = served
    if refusal:
        refused(world, *refusal, role="podgroup")


def queued(world: World, served: bool, then: Callable[[Object], Object] | None = None) -> None:
    """The job names a queue; one more worker is wanted. `then`: what Kueue does after admitting it."""
    world.job["metadata"]["labels"] = {names.LABEL_QUEUE: "team-a"}
    world.apis |= dict.fromkeys(names.KUEUE_APIS, served)
    if then is None:
        world.job["spec"]["workers"]["replicas"] = 4
        return
    world.act_on_workload(CreateWorkload("", ""))
    assert world.workload is not None
    world.workload = then(kueue_standin.admitted(world.workload))


SCHEDULERS = [
    Day(
        "gang scheduler's API missing",
        lambda w: gang(w, False),
        "+3-0",
        ("Degraded", "GangSchedulingUnavailable", names.VOLCANO_API),
    ),
    Day(
        "Kueue's API missing",
        lambda w: queued(w, False),
        "-0-0:Suspended -1-0:Suspended -2-0:Suspended",
        ("Degraded", "QueueUnavailable", "team-a"),
    ),
    Day(
        "Kueue installed under a job that runs",
        lambda w: queued(w, True),
        "-0-0:Suspended -1-0:Suspended -2-0:Suspended",
        ("Suspended", "Queued", "team-a"),
    ),
    Day(
        "evicted by Kueue",
        lambda w: queued(w, True, kueue_standin.evicted),
        "-0-0:Suspended -1-0:Suspended -2-0:Suspended",
        ("Suspended", "EvictedFromQueue", "Preempted"),
        event="EvictedFromQueue",
    ),
    Day(
        "Workload refused",
        lambda w: (queued(w, True), refused(w, 403, "workloads is forbidden", role="workload")),
        "-0-0:Suspended -1-0:Suspended -2-0:Suspended",
        ("Degraded", "WorkloadRefused", "workloads is forbidden"),
    ),
    Day("gang scheduler there, its PodGroup not yet", lambda w: gang(w, True), event="GangRequested"),
    Day(
        "PodGroup refused",
        lambda w: gang(w, True, 403, "podgroups is forbidden"),
        "",
        ("Degraded", "PodGroupRefused", "podgroups is forbidden"),
    ),
]


def silent_one(world: World) -> None:
    stalled(world, 1, doing="")


HUNG, REPLACE = ("Degraded", "Hung"), {"onHang": "Replace"}
HANGS = [
    Day(
        "a worker hangs",
        lambda w: stalled(w, 1),
        "",
        (*HUNG, "step 11 waits for worker digits-worker-1-0 on node node-1, fetching samples since"),
        event="Hung",
    ),
    Day("a worker hangs, not for long enough", lambda w: stalled(w, 1, seconds=599.0)),
    Day("a worker hangs, a longer limit", lambda w: stalled(w, 1), policy={"hangTimeoutSeconds": 601}),
    Day("a worker hangs without a word", silent_one, "", (*HUNG, "of which nothing was heard in this step")),
    Day("all wait for each other", stalled, "", (*HUNG, "each worker waits for the others' gradients")),
    Day("a worker does not come to the loop's end", lambda w: stalled(w, 2, step=0), "",
        (*HUNG, "the end of the loop waits for worker digits-worker-2-0")),
    Day("a worker hangs and is replaced", lambda w: stalled(w, 1), "+1-1 -1-0:Hung",
        counts=(1, 0), policy=REPLACE, event="WorkerFailed"),
    Day("two workers hang and are replaced", lambda w: stalled(w, 0, 1), "+0-1 +1-1 -0-0:Hung -1-0:Hung",
        counts=(1, 0), policy=REPLACE),
    Day("all workers hang, none is replaced", lambda w: stalled(w, 0, 1, 2), "",
        (*HUNG, "none is replaced, since nobody would hold the job's state"), policy=REPLACE),
    Day("all wait for each other, none is replaced", stalled, "",
        (*HUNG, "it cannot be told who is late"), policy=REPLACE),
    Day("a worker hangs once too often", lambda w: stalled(w, 1), "-0-0:JobOver -1-0:JobOver -2-0:JobOver",
        ("Failed", "BackoffLimitExceeded", "(train.py:31 in load)"), (1, 0), {**REPLACE, "backoffLimit": 0}),
    Day("rule: hangs count against nothing", lambda w: stalled(w, 1), "+1-1 -1-0:Hung",
        policy={**REPLACE, "rules": [{"action": "Ignore", "reasons": ["Hung"]}]}, event="WorkerEndIgnored"),
    Day("a worker hangs, the job fails", lambda w: stalled(w, 1), ALL_GO,
        ("Failed", "Hung", "worker digits-worker-1-0 on node node-1"), policy={"onHang": "FailJob"}),
    Day("a worker hangs, nobody reaches the coordinator",
        lambda w: (stalled(w, 1), setattr(w, "unreachable_since", w.now - 1)), policy={"onHang": "FailJob"}),
]  # fmt: skip

DAYS = [*SCHEDULERS, *WAITING, *REFUSED, *NODES, *HANGS]


@pytest.mark.slow
@pytest.mark.parametrize("day", DAYS, ids=lambda day: day.name)
def test_bad_day_around(day: Day) -> None:
    live_through(day)


def test_the_table_says_each_thing_once() -> None:
    assert len({day.name for day in DAYS}) == len(DAYS)
