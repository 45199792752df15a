"""Parameter servers: one pod in each slot wanted, replaced under the next attempt when it is deleted, lost or
evicted, and given back when no generation has it any more.

A server whose container ends comes back in place, without us. A pod that is being deleted is replaced at
once: it serves on until its successor has taken over, so a drain costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from springtide_operator.api import names, reasons
from springtide_operator.api.job import Job
from springtide_operator.manifests.server import server_template_hash
from springtide_operator.plan import images, keys
from springtide_operator.plan.actions import (
    Action,
    ApplyServerBudget,
    CreateServer,
    DeletePod,
    Event,
)
from springtide_operator.plan.ledger import Ledger, Slot
from springtide_operator.plan.observation import Observation, Problem, Report, ServerPod
from springtide_operator.plan.retry import QUICK_SECONDS, held_back

ROLE = "server"
MUTE_SECONDS = 60.0  # a server that has run for so long serves
BUDGET = "serverbudget"

# Deletions by the operator itself that ask for a successor.
_REPLACED = (
    reasons.DELETE_NODE_LOST,
    reasons.DELETE_STUCK,
    reasons.DELETE_REPLACED,
    reasons.DELETE_KEY,
)


def wanted(job: Job) -> int:
    """Server pods that are to exist."""
    return 0 if job.halted else job.spec.servers


def newest(observation: Observation) -> dict[int, ServerPod]:
    """The pod with the highest attempt of each slot."""
    result: dict[int, ServerPod] = {}
    for pod in sorted(observation.servers, key=lambda pod: pod.attempt):
        result[pod.slot] = pod
    return result


def live(observation: Observation) -> list[ServerPod]:
    """One per slot: pods that nobody has asked to go, in order of their slots."""
    return sorted((pod for pod in newest(observation).values() if pod.live), key=lambda pod: pod.slot)


def record_exits(observation: Observation, ledger: Ledger, now: float) -> list[Event]:
    """Write down which pod has each slot and how the last one ended, once.

    Args:
        observation: of the job.
        ledger: is changed in place.
        now: in unix seconds.

    Returns:
        Events that tell of the ends.
    """
    events: list[Event] = []
    pods = newest(observation)
    for slot, pod in sorted(pods.items()):
        entry = ledger.servers.get(slot)
        if entry is None or pod.attempt > entry.attempt or _is_new(pod, entry):
            ledger.servers[slot] = Slot(pod.attempt, pod.uid, replaces=entry is not None and entry.replaces)
    for slot, entry in sorted(ledger.servers.items()):
        if entry.uid is None or entry.ended is not None:
            continue
        found = pods.get(slot)
        pod_of_entry = found if found is not None and found.uid == entry.uid else None
        end = how_it_ended(pod_of_entry)
        if end is None:
            continue
        kind, why = end
        ledger.servers[slot] = replace(entry, ended=kind)
        if kind in (reasons.END_SCALED_DOWN, reasons.END_OUTDATED):
            continue
        if pod_of_entry is not None and _ended_soon(pod_of_entry, now):
            ledger.raise_backoff(ROLE, now)
        name = pod_of_entry.name if pod_of_entry is not None else f"of slot {slot}"
        text = f"parameter server {name}: {why}; another pod takes its place"
        # One that was asked to go, by a drain or by hand, hands over before it does: that is ordinary life.
        asked = pod_of_entry is not None and _leaves(pod_of_entry)
        events.append(Event(reasons.EVENT_SERVER_REPLACED, text, warning=not asked))
    return events


def _leaves(pod: ServerPod) -> bool:
    """Whether somebody asked a pod to go whose process and node live."""
    return pod.deleting and pod.running and not pod.unreachable


def _is_new(pod: ServerPod, entry: Slot) -> bool:
    """Whether the pod is seen for the first time, or was to go since its template was edited, and did not:
    that is decided anew.
    """
    stays = entry.ended == reasons.END_OUTDATED and pod.live
    return pod.attempt == entry.attempt and (not entry.uid or stays)


def _ended_soon(pod: ServerPod, now: float) -> bool:
    """Whether it ended by itself shortly after it was made."""
    return not pod.deleting and 0 <= now - pod.created_at < QUICK_SECONDS


def how_it_ended(pod: ServerPod | None) -> tuple[str, str] | None:
    """(kind, in words); None while the pod is to stay."""
    if pod is None:
        return reasons.END_PREEMPTED, "its pod is gone"
    if pod.deleting and pod.deleted_because is not None:
        kind = reasons.END_PREEMPTED if pod.deleted_because in _REPLACED else reasons.END_SCALED_DOWN
        if pod.deleted_because == reasons.DELETE_OUTDATED:
            kind = reasons.END_OUTDATED
        return kind, f"deleted by the operator ({pod.deleted_because})"
    if pod.deleting:
        return reasons.END_PREEMPTED, pod.disruption or "the pod was deleted"
    if pod.lost:
        return reasons.END_PREEMPTED, f"node {pod.node} is lost"
    if pod.phase in ("Succeeded", "Failed"):
        return reasons.END_PREEMPTED, pod.disruption or f"the pod ended ({pod.phase})"
    return None


def decide(job: Job, observation: Observation, ledger: Ledger, now: float) -> list[Action]:
    """Decide which servers are made and deleted, and whether their disruption budget is applied.

    Args:
        job: with its status.
        observation: of the job.
        ledger: attempts are raised in it.
        now: in unix seconds.
    """
    actions: list[Action] = []
    if job.spec.servers and not job.halted:
        actions += _budget(job, observation, now)
    actions += _give_back(job, observation, ledger)
    actions += _tidy(observation)
    address = observation.service.address if observation.service is not None else None
    if address is None or not observation.secret_made or held_back(observation, ROLE, now):
        return actions
    if now < ledger.backoff(ROLE).until:
        return actions
    have = {pod.slot for pod in live(observation)}
    for slot in range(wanted(job)):
        if slot in have:
            continue
        before = ledger.servers.get(slot)
        attempt = 0
        if before is not None:
            attempt = before.attempt + 1 if before.ended is not None else before.attempt
        while names.server_name(job.name, slot, attempt) in observation.taken:
            attempt += 1
        why = f"{wanted(job)} parameter servers are wanted"
        if before is not None and before.ended is not None:
            why = f"the last pod of slot {slot} ended: {before.ended}"
        edited = before is not None and before.edited
        ledger.servers[slot] = Slot(attempt, replaces=_lost(before), edited=edited)
        ledger.server_image = images.of_server(observation, ledger)
        actions.append(CreateServer(slot, attempt, address, why, ledger.server_image))
    return actions


def renew(job: Job, observation: Observation, ledger: Ledger) -> list[Action]:
    """Delete one server whose key was replaced or certificate renewed, where all are at work: it hands over
    what it holds, and the next one follows when its successor serves.

    Args:
        job: with its keys.
        observation: of the job.
        ledger: with the coordinator's incarnation.
    """
    present, report = live(observation), observation.report_of(ledger.incarnation)
    if report is None or not report.servers_settled or observation.unreachable_since is not None:
        return []
    settled = len(present) >= wanted(job) and all(pod.ready for pod in present)
    if not settled or any(pod.deleting for pod in observation.servers):
        return []
    old = [pod for pod in present if keys.outdated_server(job, pod)]
    why = "the job has a newer key or certificate; a successor with it takes over what it holds"
    return [DeletePod(pod.name, pod.uid, reasons.DELETE_KEY, why) for pod in old[:1]]


def _lost(entry: Slot | None) -> bool:
    """Whether a slot had a server that was not given back."""
    if entry is None:
        return False
    if entry.ended in (None, reasons.END_OUTDATED):
        return entry.replaces
    return entry.ended != reasons.END_SCALED_DOWN


def _budget(job: Job, observation: Observation, now: float) -> list[Action]:
    count = job.spec.servers
    if observation.server_budget == count or held_back(observation, BUDGET, now):
        return []
    return [ApplyServerBudget(count, f"one of {count} parameter servers may be evicted at a time")]


def _give_back(job: Job, observation: Observation, ledger: Ledger) -> list[Action]:
    """Servers beyond the number wanted, once they serve no more; all of a halted job after its workers."""
    excess = [pod for pod in live(observation) if pod.slot >= wanted(job)]
    if not excess:
        return []
    if job.halted:
        if any(pod.end is None for pod in observation.workers):
            return []
        because, text = reasons.DELETE_SUSPENDED, "the job is suspended and no worker is left"
    else:
        report = observation.report_of(ledger.incarnation)
        if report is None:
            return []
        serving = {server.pod_uid for server in report.servers if server.serving}
        if report.generation is not None and not report.servers_settled:
            return []
        excess = [pod for pod in excess if pod.uid not in serving]
        because, text = reasons.DELETE_SCALE_DOWN, f"{wanted(job)} parameter servers are wanted"
    for pod in excess:
        ledger.servers[pod.slot] = replace(ledger.servers[pod.slot], ended=reasons.END_SCALED_DOWN)
    return [DeletePod(pod.name, pod.uid, because, text) for pod in excess]


def _tidy(observation: Observation) -> list[Action]:
    """Pods that have ended, or whose slot another one has."""
    result: list[Action] = []
    pods = newest(observation)
    for pod in observation.servers:
        if pod.deleting:
            continue
        if pod.lost:
            why = f"node {pod.node} is lost"
            result.append(DeletePod(pod.name, pod.uid, reasons.DELETE_NODE_LOST, why))
        elif not pod.live:
            result.append(DeletePod(pod.name, pod.uid, reasons.DELETE_REPLACED, "it ended"))
        elif pod.attempt < pods[pod.slot].attempt:
            why = f"{pods[pod.slot].name} took its slot"
            result.append(DeletePod(pod.name, pod.uid, reasons.DELETE_SUPERSEDED, why))
    return result


def put_away(observation: Observation, because: str, why: str) -> list[Action]:
    """Delete all parameter servers: the job needs them no more.

    Args:
        observation: of the job.
        because: one word, which is written on the pods.
        why: in words.

    Returns:
        One deletion for each that is not being deleted.
    """
    return [DeletePod(pod.name, pod.uid, because, why) for pod in observation.servers if not pod.deleting]


def problems(job: Job, observation: Observation, ledger: Ledger, now: float) -> list[Problem]:
    """Return the problems that keep servers from running; for a job that has trained, which server is
    missing; and why the workers do not follow the manifest's consistency.

    Args:
        job: with its servers.
        observation: of their pods.
        ledger: of their attempts.
        now: unix seconds.
    """
    return [*_missing(job, observation, ledger, now), *_refused(job, observation, ledger)]


def _refused(job: Job, observation: Observation, ledger: Ledger) -> list[Problem]:
    report, asked = observation.report_of(ledger.incarnation), job.spec.strategy.consistency
    # The coordinator may not have heard of the last edit yet.
    if report is None or not report.consistency_refused or asked is None or asked == report.consistency:
        return []
    text = f"the job stays in consistency {report.consistency}, {asked} is refused: "
    return [Problem(reasons.CONSISTENCY_REFUSED, text + report.consistency_refused)]


def _missing(job: Job, observation: Observation, ledger: Ledger, now: float) -> list[Problem]:
    result = [Problem(pod.problem.reason, pod.problem.message) for pod in live(observation) if pod.problem]
    report = observation.report_of(ledger.incarnation)
    trained = job.status.get("generation") or (report is not None and report.generation)
    if result or not trained:
        return result
    ready = {pod.slot for pod in live(observation) if pod.ready}
    if report is not None and report.training:
        ready |= {
            pod.slot for pod in observation.servers if _leaves(pod) and pod.ready
        }  # it serves on until then
    awaited = (slot for slot in range(wanted(job)) if slot not in ready)
    missing = [slot for slot in awaited if _served(slot, observation, ledger)]
    mute = [slot for slot in _mute(observation, report, now) if slot < wanted(job) and slot not in missing]
    texts = []
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        texts.append(f"{_numbered(missing)} {verb} being replaced")
    if mute:
        verb = "does" if len(mute) == 1 else "do"
        texts.append(f"{_numbered(mute)} {verb} not answer, or cannot be reached")
    if texts and report is not None and not report.training:
        texts.append("training goes on when all are there")
    # One that was replaced has an event of its own, which is a warning where nobody asked it to go.
    pods = newest(observation)
    failing = mute or [slot for slot in missing if slot in pods and pods[slot].restarts > 0]
    reason = reasons.SERVER_FAILING if failing else reasons.SERVER_MISSING
    return [Problem(reason, "; ".join(texts))] if texts else []


def _numbered(slots: list[int]) -> str:
    plural = "" if len(slots) == 1 else "s"
    return f"parameter server{plural} {', '.join(map(str, slots))}"


def _mute(observation: Observation, report: Report | None, now: float) -> list[int]:
    """Slots whose pods have run for long enough to serve, and do not."""
    serving = {server.pod_uid for server in report.servers if server.serving} if report is not None else None
    return [
        pod.slot
        for pod in live(observation)
        if pod.running and pod.started_at is not None and now - pod.started_at >= MUTE_SECONDS
        if not pod.ready or (serving and pod.uid not in serving)
    ]


def _served(slot: int, observation: Observation, ledger: Ledger) -> bool:
    """Whether the slot had a server before that was not given back: one that is new is only awaited."""
    pod = newest(observation).get(slot)
    return _lost(ledger.servers.get(slot)) or (pod is not None and pod.restarts > 0)


def status(job: Job, observation: Observation, ledger: Ledger, over: bool = False) -> dict[str, object]:
    """Return `status.parameterServers`.

    Args:
        job: with its status.
        observation: of the job.
        ledger: of this round.
        over: the job has ended.
    """
    pods = live(observation)
    ready = sum(pod.ready for pod in pods)
    want = 0 if over else wanted(job)
    hashed = server_template_hash(job)
    counts = {
        "desired": want,
        "replicas": len(pods),
        "ready": ready,
        "outdated": sum(pod.template is not None and pod.template != hashed for pod in pods),
        "summary": f"{ready}/{want}",
    }
    noted = {"image": ledger.server_image} if ledger.server_image else {}
    return counts | noted | in_force(job.status, observation, ledger)


def in_force(old: Mapping[str, Any], observation: Observation, ledger: Ledger) -> dict[str, object]:
    """Return the consistency in which the workers train, as far as the coordinator has reported it.

    Args:
        old: status before the plan.
        observation: with the report.
        ledger: with the incarnation that is believed.
    """
    report = observation.report_of(ledger.incarnation)
    if report is None or not report.consistency:
        before = old.get("parameterServers") or {}
        kept = ("consistency", "staleness", "consistencyPending")
        return {key: before[key] for key in kept if before.get(key)}
    bound = {"staleness": report.staleness} if report.staleness else {}
    pending = {"consistencyPending": report.consistency_pending} if report.consistency_pending else {}
    return {"consistency": report.consistency, **bound, **pending}


def switched(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    """Return the events of a running job's change of consistency.

    Args:
        old: status as it was.
        new: status as it is to be.
    """
    shown = [status.get("parameterServers") or {} for status in (old, new)]
    was_pending, pending = (status.get("consistencyPending") for status in shown)
    events = []
    if pending and pending != was_pending:
        events.append(Event(reasons.EVENT_CONSISTENCY_PENDING, pending))
    before, after = (_in_words(status) for status in shown)
    if before and after and before != after:
        events.append(Event(reasons.EVENT_CONSISTENCY, f"from {before} to {after}"))
    return events


def _in_words(status: Mapping[str, Any]) -> str:
    bound = f" ({status['staleness']} steps)" if status.get("staleness") else ""
    return f"{status.get('consistency', '')}{bound}"
