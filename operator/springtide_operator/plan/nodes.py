"""Nodes that are lost, cordoned or gone, and pods that stay Terminating on them.

A worker on a lost node has ended as soon as the coordinator does not hear of it either, and is replaced at
once under the next attempt. A worker that is connected to the coordinator lives, whatever its node's kubelet
says, and whether or not there still is a Node object. Without the coordinator's word nobody is lost: one that
does not answer gets a successor (`sight`), whose word it is then. While so many nodes look lost that what
looks is likelier at fault (`sight.Brake`), nobody is lost but by Kubernetes' own eviction. On a node that is
about to go the replacement starts elsewhere first, and the worker leaves when that one can take over; on one
that is cordoned, where the job asks for that. Where a standby is ready elsewhere, it is the replacement: the
worker leaves at once, and both happen at one boundary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from springtide_operator.api import names, reasons
from springtide_operator.api.job import Job
from springtide_operator.plan import restarts, sight, sizing, standby
from springtide_operator.plan.actions import Action, CreateWorker, DeletePod, Event
from springtide_operator.plan.coordinator import LEARNING_SECONDS
from springtide_operator.plan.coordinator_sync import UNREACHABLE_LOST_SECONDS, going_since, held_for_gone_at
from springtide_operator.plan.ledger import Ledger, Slot
from springtide_operator.plan.observation import (
    CoordinatorPod,
    End,
    MemberReport,
    Node,
    Observation,
    Problem,
    Report,
    ServerPod,
    WorkerPod,
)
from springtide_operator.plan.retry import held_back

AnyPod = WorkerPod | ServerPod | CoordinatorPod

SETTLE_SECONDS = 5.0  # a kubelet that starts again is not Ready for a moment
GONE_SECONDS = 40.0  # after a Node object was deleted: it may be registered anew (as Kubernetes' PodGC waits)
LOOK_SECONDS = 2.0  # between two looks at pods on nodes that are not ready
SILENT_SECONDS = 3.0  # a coordinator on such a node that does not answer for so long is lost


def with_node_health(observation: Observation, now: float) -> Observation:
    """Return what is observed, with what follows from nodes: pods on lost ones have ended, and coordinators
    that were given up are lost.

    Args:
        observation: of the job.
        now: in unix seconds.
    """
    brake = _brake(observation)
    return replace(
        observation,
        workers=tuple(_judged_worker(pod, observation, brake, now) for pod in observation.workers),
        servers=tuple(_judged_server(pod, observation, brake, now) for pod in observation.servers),
        coordinators=tuple(_judged_coordinator(pod, observation, now) for pod in observation.coordinators),
    )


def _brake(observation: Observation) -> sight.Brake:
    """Count lost nodes only where a pod is on one: there may be thousands."""
    touched = (_node_of(pod, observation) for pod in _all(observation))
    return sight.brake(observation) if any(node and not node.ready for node in touched) else sight.Brake()


def problem(observation: Observation, now: float) -> Problem | None:
    """Say that pods of this job stay as they are, since too many nodes look lost, or since the operator hears
    too few coordinators to believe in the silence of this one.

    Args:
        observation: of the job.
        now: in unix seconds.
    """
    brake = _brake(observation)
    for pod in _all(observation):
        node = _node_of(pod, observation)
        settled = node is not None and observation.seen_for(node.since, now) >= SETTLE_SECONDS
        if node is not None and settled and not (node.ready or node.gone) and (why := brake.holds(node)):
            text = f"{why}: nothing is deleted and nothing is started for it, until they are heard of again"
            return Problem(reasons.TOO_MANY_NODES_UNKNOWN, text)
    quiet = [pod for pod in observation.coordinators if _silence(pod, observation, now) >= SILENT_SECONDS]
    if quiet and not any(pod.lost for pod in quiet) and (why := sight.deaf(observation)):
        text = f"{why}: nothing is deleted and nothing is started for it, until it hears them again"
        return Problem(reasons.TOO_MANY_NODES_UNKNOWN, text)
    return None


def _judged_worker(pod: WorkerPod, observation: Observation, brake: sight.Brake, now: float) -> WorkerPod:
    node = _node_of(pod, observation)
    if node is None or pod.end is not None or not _worker_lost(pod, node, observation, brake, now):
        return pod
    return replace(pod, end=End(reasons.END_PREEMPTED, reasons.DELETE_NODE_LOST, _trouble(node)))


def _judged_server(pod: ServerPod, observation: Observation, brake: sight.Brake, now: float) -> ServerPod:
    node = _node_of(pod, observation)
    if node is None or pod.phase in ("Succeeded", "Failed"):
        return pod
    return replace(pod, lost=_worker_lost(pod, node, observation, brake, now))


def _worker_lost(
    pod: WorkerPod | ServerPod, node: Node, observation: Observation, brake: sight.Brake, now: float
) -> bool:
    """Return whether a worker or parameter server on a node is lost: both are connected to the coordinator as
    long as they live.
    """
    settle = GONE_SECONDS if node.gone else SETTLE_SECONDS
    if node.ready or observation.seen_for(node.since, now) < settle or brake.holds(node):
        return False
    report = _usable_report(observation, now)
    return report is not None and not _connected(report, pod) and not sight.lives(pod.uid, observation, now)


def _judged_coordinator(pod: CoordinatorPod, observation: Observation, now: float) -> CoordinatorPod:
    node = _node_of(pod, observation)
    settled = node is not None and observation.seen_for(node.since, now) >= SETTLE_SECONDS
    silent = _silence(pod, observation, now) >= SILENT_SECONDS
    if node is not None and settled and not node.ready and silent and not sight.held(pod, observation):
        return replace(pod, lost=True, why_lost=f"{pod.name} does not answer, and {_trouble(node)}")
    why = sight.why_given_up(pod, observation, now)
    return replace(pod, lost=bool(why), why_lost=why)


def _silence(pod: CoordinatorPod, observation: Observation, now: float) -> float:
    """Seconds without an answer; 0 while it answers."""
    seen, since = observation.sight, observation.unreachable_since
    if seen is not None and seen.coordinator == pod.uid:
        return seen.silence
    return now - since if since is not None and observation.steady is None else 0.0


def _usable_report(observation: Observation, now: float) -> Report | None:
    """The coordinator's word on who is connected, while it can be relied on: not when it began just now."""
    report = observation.report
    if report is None or observation.unreachable_since is not None or report.reason == "Reconnecting":
        return None
    began = (sight.running_from(c) for c in observation.coordinators if c.incarnation == report.incarnation)
    ran = observation.seen_for(next(began, math.inf), now)
    learns = report.generation is None and ran < LEARNING_SECONDS
    return None if learns else report


def _connected(report: Report, pod: WorkerPod | ServerPod) -> bool:
    connected = {member.pod_uid for member in report.members if member.connected}
    connected |= {server.pod_uid for server in report.servers if server.connected}
    return pod.uid in connected


def _node_of(pod: AnyPod, observation: Observation) -> Node | None:
    return observation.nodes.get(pod.node) if observation.nodes and pod.node else None


def _trouble(node: Node) -> str:
    if node.gone:
        return f"node {node.name} was deleted"
    return (
        f"node {node.name} is not ready" if node.ready is False else f"nothing is heard of node {node.name}"
    )


def _all(observation: Observation) -> tuple[AnyPod, ...]:
    return (*observation.workers, *observation.servers, *observation.coordinators)


def move(
    job: Job, observation: Observation, ledger: Ledger, planned: Sequence[Action], now: float
) -> list[Action]:
    """Start replacements of workers on nodes that are about to go, or cordoned where the job asks for it; let
    those go whose replacement can take over.

    Both together never exceed maxReplicas (and the standbys): where there is no room for one more, the worker
    stays until it is evicted.

    Args:
        job: with its status.
        observation: of the job.
        ledger: attempts are raised in it.
        planned: actions of this round so far.
        now: in unix seconds.

    Returns:
        Creations and deletions.
    """
    newest = observation.newest_pods
    most = job.spec.workers.maximum + standby.size(job)
    leave = {pod.uid for pod in _may_leave(job, observation, ledger, newest)}
    moving = [pod for pod in observation.workers if pod.live and _moves(pod, ledger)]
    coming = sum(isinstance(action, CreateWorker) for action in planned)
    going = {action.uid for action in planned if isinstance(action, DeletePod)}
    count = coming + sum(pod.live and pod.uid not in going | leave for pod in observation.workers)
    for pod in moving:
        if count <= most:
            break
        if pod.uid not in leave:
            leave.add(pod.uid)
            count -= 1
    actions: list[Action] = []
    for pod in moving:
        if pod.uid not in leave:
            continue
        entry = ledger.slots[pod.slot]
        ledger.slots[pod.slot] = replace(entry, moves=None)
        successor = names.worker_name(job.name, pod.slot, entry.attempt)
        why = f"{successor} has taken over from node {pod.node}"
        actions.append(DeletePod(pod.name, pod.uid, reasons.DELETE_NODE_CORDONED, why))
    if standby.size(job):
        return actions + _swap(job, observation, ledger, going)
    return actions + _begin(job, observation, ledger, newest, going, max(0, most - count), now)


def _swap(job: Job, observation: Observation, ledger: Ledger, going: set[str]) -> list[Action]:
    """Have standbys take over from workers on nodes that are about to go: as many leave as standbys are ready
    elsewhere, and theirs are made anew. Standbys on such nodes are made anew at once.
    """
    report = observation.report_of(ledger.incarnation)
    if report is None or report.phase != "RUNNING" or observation.unreachable_since is not None:
        return []
    live = [pod for pod in observation.live_pods if pod.uid not in going]
    standing = standby.pods(live, ledger)
    leaving = [pod for pod in live if _leaves(_node_of(pod, observation), job) and pod.running]
    per_pod = job.spec.workers.processes_per_pod
    ready = [pod for pod in standing if pod not in leaving and standby.is_ready(pod, report, per_pod)]
    active = {member.pod_uid for member in report.members if member.active}
    lacking = sizing.target(job) - sum(pod.uid in active for pod in live)
    free = iter(ready[max(0, lacking) :])
    actions: list[Action] = []
    for pod in leaving:
        if pod.uid not in active and pod not in standing:
            continue  # it is about to train, and then a standby is there for it
        why = f"{pod.name} stands by on node {pod.node}, which takes no more pods"
        if pod not in standing:
            successor = next(free, None)
            if successor is None:
                continue
            why = f"standby {successor.name} takes over from node {pod.node}"
        ledger.end(pod.slot, reasons.END_SCALED_DOWN)
        actions.append(DeletePod(pod.name, pod.uid, reasons.DELETE_NODE_CORDONED, why))
    return actions


def _leaves(node: Node | None, job: Job) -> bool:
    """Return whether workers are to leave a node that still lives."""
    if node is None or node.gone:
        return False
    return node.leaving or (node.cordoned and job.spec.elasticity.move_on_cordon)


def _begin(
    job: Job,
    observation: Observation,
    ledger: Ledger,
    newest: Mapping[int, WorkerPod],
    going: set[str],
    room: int,
    now: float,
) -> list[Action]:
    service = observation.service
    if service is None or not observation.secret_made or held_back(observation, "worker", now):
        return []
    if observation.report is None or observation.report.phase in ("ENDING", "AFTER_LOOP"):
        return []
    actions: list[Action] = []
    for slot in sizing.wanted_slots(job, observation):
        pod, entry = newest.get(slot), ledger.slots.get(slot)
        if pod is None or entry is None or pod.uid in going or len(actions) >= room:
            continue
        node = _node_of(pod, observation)
        if node is None or node.gone or not (pod.live and pod.running):
            continue
        leaves = _leaves(node, job)
        first = leaves and entry.uid == pod.uid and entry.ended is None and entry.moves is None
        # Its replacement was never made, or has ended before it could take over.
        unmade = entry.moves == pod.uid and entry.uid is None
        again = entry.moves == pod.uid and entry.ended is not None and not restarts.waits(ledger, slot, now)
        if not (first or unmade or again):
            continue
        attempt = entry.attempt if unmade else max(pod.attempt, entry.attempt) + 1
        while names.worker_name(job.name, slot, attempt) in observation.taken:
            attempt += 1
        ledger.slots[slot] = Slot(attempt, moves=pod.uid)
        why = f"{pod.name} is on node {node.name}, which takes no more pods"
        actions.append(CreateWorker(slot, attempt, service.address, why))
    return actions


def _moves(pod: WorkerPod, ledger: Ledger) -> bool:
    entry = ledger.slots.get(pod.slot)
    return entry is not None and entry.moves == pod.uid


def _may_leave(
    job: Job, observation: Observation, ledger: Ledger, newest: Mapping[int, WorkerPod]
) -> list[WorkerPod]:
    wanted = set(sizing.wanted_slots(job, observation))
    report = observation.report_of(ledger.incarnation)
    members = report.members if report is not None else ()

    def over(pod: WorkerPod) -> bool:
        successor = newest[pod.slot]
        if pod.slot not in wanted or ledger.slots[pod.slot].ended == reasons.END_SCALED_DOWN:
            return True
        if report is None or successor.uid == pod.uid or not (successor.live and successor.running):
            return False
        if standby.wanted(job) and standby.is_ready(successor, report, job.spec.workers.processes_per_pod):
            return True  # it takes part when this one has left
        return all(_training(members, successor) or [False]) or not any(_training(members, pod))

    return [pod for pod in observation.workers if pod.live and _moves(pod, ledger) and over(pod)]


def _training(members: Sequence[MemberReport], pod: WorkerPod) -> list[bool]:
    """Return, for each process of the pod that the coordinator knows, whether it trains."""
    return [member.active and member.connected for member in members if member.pod_uid == pod.uid]


def force(job: Job, observation: Observation, now: float) -> list[Action]:
    """Delete by force what is Terminating on a lost node for 15 s, or on a node that is no more.

    On a node that lives nothing is forced unless the job asks for it: its process may hold a device or a
    volume until its kubelet says that it is gone. The job does not wait for it
    (`coordinator_sync.held_for_gone_at`).

    Args:
        job: says whether it asks for it.
        observation: of the job.
        now: in unix seconds.

    Returns:
        One deletion for each.
    """
    result: list[Action] = []
    brake = _brake(observation)
    for pod in _all(observation):
        if observation.seen_for(_forced_at(pod, job, observation, brake), now) < 0:
            continue
        node = _node_of(pod, observation)
        said = None if isinstance(pod, CoordinatorPod) else pod.deleted_because
        because = said or reasons.DELETE_STUCK
        why = _trouble(node) if node is not None and not node.ready else "its node was lost"
        if node.ready if node is not None else not pod.unreachable:
            limit = job.spec.failure_policy.force_delete_after_seconds
            why = f"it is Terminating for more than {limit} s after its grace period"
        result.append(DeletePod(pod.name, pod.uid, because, why, force=True))
    return result


def events(actions: Sequence[Action]) -> list[Event]:
    """Return events about workers that leave a cordoned node, and about pods that are deleted by force."""
    result: list[Event] = []
    for action in actions:
        if not isinstance(action, DeletePod):
            continue
        if action.force:
            text = f"pod {action.name} is deleted by force: {action.reason}"
            result.append(Event(reasons.EVENT_POD_FORCED, text, warning=True))
        elif action.because == reasons.DELETE_NODE_CORDONED:
            text = f"worker {action.name} leaves: {action.reason}, which takes no more pods"
            result.append(Event(reasons.EVENT_WORKER_MOVED, text))
    return result


def _forced_at(pod: AnyPod, job: Job, observation: Observation, brake: sight.Brake) -> float:
    """Return when a pod is to be deleted by force, by the steady clock; infinite where nobody asked it to go,
    and where force was used already.
    """
    if pod.gone_by is None or pod.deletion_asked_at is None or pod.gone_by == pod.deletion_asked_at:
        return math.inf
    node = _node_of(pod, observation)
    after = job.spec.failure_policy.force_delete_after_seconds
    asked_for = math.inf if after is None else going_since(pod) + pod.gone_by - pod.deletion_asked_at + after
    if node is None:  # nodes cannot be read: Kubernetes' eviction by the taint of a lost node tells
        return held_for_gone_at(pod) if pod.unreachable else asked_for
    if node.ready:
        return asked_for
    if brake.holds(node):
        return math.inf
    lost = pod.end is not None if isinstance(pod, WorkerPod) else pod.lost
    if not lost:
        return held_for_gone_at(pod) if isinstance(pod, CoordinatorPod) else math.inf
    return 0.0 if node.gone else min(held_for_gone_at(pod), going_since(pod) + UNREACHABLE_LOST_SECONDS)


def later(job: Job, observation: Observation, now: float) -> list[float]:
    """Return when to look again, in unix seconds: a force that gets due, a node that may turn out to be lost.

    Args:
        job: the TrainingJob.
        observation: of the job.
        now: in unix seconds.
    """
    pods, brake = _all(observation), _brake(observation)
    waits = (-observation.seen_for(_forced_at(pod, job, observation, brake), now) for pod in pods)
    result = [now + wait for wait in waits if 0 < wait < math.inf]
    for pod in pods:
        node = _node_of(pod, observation)
        if node is not None and not node.ready and pod.live:
            result.append(now + LOOK_SECONDS)
    return result
