"""One bad day of a job: what happens, what the operator is to do about it, and what it is to say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from operator_world import World, job_object

from springtide_operator.api import names
from springtide_operator.plan.actions import CreateCoordinator, CreateServer, CreateWorker, DeletePod, Plan
from springtide_operator.plan.observation import LateReport, Node, StallReport
from springtide_operator.plan.retry import refuse

Object = dict[str, Any]

ALL_GO, OTHERS_GO = "-0-0:JobOver -1-0:JobOver -2-0:JobOver", "-1-0:JobOver -2-0:JobOver"
EXCEEDED, RULED = "BackoffLimitExceeded", "FailureRuleMatched"
RAISED = '{"outcome": "Failed", "exception": "%s", "message": "boom", "frame": "train.py:31 in main"}'
TRACEBACK = """step 12
Traceback (most recent call last):
  File "/springtide/train.py", line 7, in <module>
    data = load()
FileNotFoundError: no data in /nowhere
"""


@dataclass(frozen=True)
class Day:
    """`happens` to a job of three running workers; one round later the operator does `does` (and nothing
    else), and says `says`: (condition type, reason, part of the message).

    does: "+0-1" makes worker 0-1, "-0-0:BECAUSE" deletes one, "+c2" and "-c1:BECAUSE" are coordinators,
    "+s0-1" and "-s0-0:BECAUSE" parameter servers.
    counts: failures, preemptions.
    """

    name: str
    happens: Callable[[World], object]
    does: str = ""
    says: tuple[str, str, str] = ("Degraded", "Healthy", "")
    counts: tuple[int, int] = (0, 0)
    policy: Object = field(default_factory=dict)
    event: str | None = None  # reason of one of the round's events
    nodes: bool = False  # whether the operator can read them
    servers: int = 0  # with so many parameter servers

    def world(self) -> World:
        world = World(job=job_object(3))
        world.job["spec"]["failurePolicy"].update(self.policy)
        if self.servers:
            world.job["spec"] |= {
                "strategy": {"type": "ParameterServer"},
                "parameterServers": {"replicas": self.servers},
            }
        world.settle()
        for number, pod in enumerate(world.workers()):
            pod["spec"]["nodeName"] = f"node-{number}"
            if self.nodes:
                world.nodes[f"node-{number}"] = Node(f"node-{number}")
        for number, pod in enumerate(world.servers()):
            pod["spec"]["nodeName"] = f"node-{number}"
        world.coordinators()[0]["spec"]["nodeName"] = "node-0"
        world.now += 100
        world.reports()
        return world


def live_through(day: Day) -> None:
    """Check one row of the table, and that a second look counts nothing twice."""
    world = day.world()
    day.happens(world)
    decided = world.round()
    assert done(decided) == set(day.does.split())
    kind, reason, text = day.says
    said = {c["type"]: c for c in world.status["conditions"]}
    assert said[kind]["reason"] == reason, said
    assert text in said[kind]["message"]
    restarts = world.status["restarts"]
    assert (restarts["failures"], restarts["preemptions"]) == day.counts
    if day.event is not None:
        assert day.event in [event.reason for event in decided.events]
    if kind == "Failed":
        assert decided.events[-1].reason == "Failed"
    again = world.plan().status["restarts"]
    assert (again["failures"], again["preemptions"]) == day.counts, "counted twice"


def done(decided: Plan) -> set[str]:
    """The pods that a plan makes and deletes, in the form of `Day.does`."""
    result = set()
    for action in decided.actions:
        if isinstance(action, CreateWorker):
            result.add(f"+{action.slot}-{action.attempt}")
        elif isinstance(action, CreateServer):
            result.add(f"+s{action.slot}-{action.attempt}")
        elif isinstance(action, CreateCoordinator):
            result.add(f"+c{action.incarnation}")
        elif isinstance(action, DeletePod):
            worker, serving = names.parse_worker_name(action.name), names.parse_server_name(action.name)
            pod = f"c{action.name.rpartition('-')[2]}"
            if worker is not None:
                pod = f"{worker[0]}-{worker[1]}"
            elif serving is not None:
                pod = f"s{serving[0]}-{serving[1]}"
            result.add(f"-{pod}:{action.because}")
    return result


def worker(world: World, slot: int = 0) -> Object:
    """The live worker of a slot."""
    return next(pod for pod in world.workers() if pod["metadata"]["labels"][names.LABEL_SLOT] == str(slot))


def server(world: World, slot: int = 0) -> Object:
    """The live parameter server of a slot."""
    return next(p for p in world.servers() if p["metadata"]["labels"][names.LABEL_SLOT] == str(slot))


def waits(world: World, slot: int, reason: str, message: str = "") -> None:
    """The container of a worker cannot start."""
    pod = worker(world, slot)
    name = pod["spec"]["containers"][0]["name"]
    state = {"waiting": {"reason": reason, "message": message}}
    pod["status"] = {
        "phase": "Pending",
        "containerStatuses": [{"name": name, "image": "img", "state": state}],
    }


def unschedulable(world: World, slot: int = 0, message: str = "0/3 nodes are available") -> None:
    """No node takes a worker."""
    pod = worker(world, slot)
    pod["spec"].pop("nodeName", None)
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    pod["status"] = {"phase": "Pending", "conditions": [condition]}


def disrupted(world: World, slot: int, reason: str, deleted: bool = True) -> None:
    """Somebody else ends a worker and says so."""
    pod = worker(world, slot)
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": f"by {reason}"}
    pod["status"]["conditions"] = [condition]
    if deleted:
        world.ask_deletion(pod)


def ended_by_the_node(world: World, slot: int, reason: str) -> None:
    """The kubelet, or the loss of the node, ends a worker."""
    pod = worker(world, slot)
    world.end(pod, 137)
    pod["status"] |= {"reason": reason, "message": f"the node says {reason}"}


def stalled(
    world: World, *late: int, seconds: float = 600.0, step: int = 11, doing: str = "fetching samples"
) -> None:
    """No step was committed for so long; the others wait for the workers of these slots."""
    world.reports()
    everybody = len(world.workers())
    said = [
        LateReport(
            pod["metadata"]["uid"], pod["metadata"]["name"], doing, "train.py:31 in load", world.now - 598
        )
        for pod in (worker(world, slot) for slot in late)
    ]
    found = StallReport(seconds, world.now - seconds, step, tuple(said), everybody - len(late))
    world.reports(stall=found, phase="RUNNING" if step else "ENDING")


def refused(world: World, code: int, message: str, terminating: bool = False, role: str = "worker") -> None:
    """The API server refuses to create a role's pods; for workers one is asked for."""
    if role == "worker":
        world.job["spec"]["workers"]["replicas"] = 4
    world.refusals[role] = refuse(None, code, message, world.now, terminating)
