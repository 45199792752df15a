"""The one decision: what exists and what was said -> what to do, what to write, and why."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from springtide_operator.api import names, reasons
from springtide_operator.api.all_reduce import Shard
from springtide_operator.api.job import Job
from springtide_operator.manifests.worker import template_hash
from springtide_operator.plan import (
    cleanup,
    completion,
    conditions,
    elasticity,
    gang,
    hangs,
    keys,
    kueue,
    memory,
    nodes,
    outdated,
    problems,
    progress,
    readiness,
    remaining,
    restarts,
    rules,
    security,
    servers,
    sizing,
    standby,
    store_size,
    suspend,
    template,
    training_template,
)
from springtide_operator.plan import coordinator as coordinator_policy
from springtide_operator.plan.actions import Event, Plan
from springtide_operator.plan.completion import Outcome
from springtide_operator.plan.conditions import Truth
from springtide_operator.plan.ledger import Ledger
from springtide_operator.plan.observation import Observation
from springtide_operator.plan.only_said import only_said
from springtide_operator.plan.values import parse_time, timestamp

Status = dict[str, Any]

_CARRIED = ("queue", "gang", security.STATUS, keys.STATUS, training_template.STATUS)
LAST_REPORT_LOOK = 0.1  # between two looks for the answer of a coordinator whose job has ended


def plan(job: Job, observation: Observation, now: float) -> Plan:
    """Decide what to do, what to write, and why.

    Actions are to be carried out after `status` is written, events posted after that.

    Args:
        job: its status must be the newest one written.
        observation: may be older or newer than the status.
        now: in unix seconds.
    """
    old = job.status
    if job.deleting:
        return Plan(old)
    ended = _ended(old)
    if ended is not None:
        return _after_the_end(job, observation, ended, now)
    ledger = Ledger.from_status(old)
    observation = hangs.with_hung_workers(job, nodes.with_node_health(observation, now))
    job = keys.with_keys(security.with_encryption(job, observation), observation, now)
    observation = keys.with_secret(job, observation)
    asked, job = job, gang.with_gang(kueue.with_queue_state(job, observation), observation)
    heard = observation
    waits = kueue.waits(job, observation) or gang.waits(job, observation)
    observation = template.with_template_problems(job, replace(observation, pods_wait=waits))
    if conditions.is_true(old, reasons.RUNNING):
        observation = coordinator_policy.without_hasty_report(observation, ledger, now)
    events = _doubts(asked)
    events += restarts.record_exits(job, observation, ledger, now)
    events += servers.record_exits(observation, ledger, now)
    outcome = completion.decide(job, observation, ledger, now)
    if outcome is not None and completion.awaits_last_report(outcome, heard, ledger, now):
        return Plan(old, wake_at=now + LAST_REPORT_LOOK)
    if outcome is not None:
        return _end(job, observation, ledger, outcome, events, now)
    sized = _size(job, observation, ledger, now)
    job = sized.job
    events += sized.events
    actions = kueue.decide(job, asked, observation, now)
    actions += gang.decide(job, observation, now)
    actions += suspend.stragglers(job, observation, ledger)
    if suspend.waits(job, observation, ledger, now):
        suspend.let_leave(observation, ledger)
    elif job.halted:
        actions += sizing.decide(job, observation, ledger, now)
        actions += servers.decide(job, observation, ledger, now)
        actions += nodes.move(job, observation, ledger, actions, now)
        actions += suspend.put_away(observation)
    else:
        actions += security.decide(observation, now)
        present = coordinator_policy.current(observation, ledger)
        old_key = keys.outdated_coordinator(job, observation, present)
        made, said = coordinator_policy.decide(observation, ledger, now, old_key)
        actions += made
        events += said
        actions += servers.decide(job, observation, ledger, now)
        actions += sizing.decide(job, observation, ledger, now)
        if observation.secret_made:  # successors read it
            actions += servers.renew(job, observation, ledger)
        replaced, told = outdated.decide(job, observation, ledger, now)
        actions += replaced
        events += told
        actions += nodes.move(job, observation, ledger, actions, now)
        actions += restarts.give_up(observation, ledger)
    actions += cleanup.ended_pods(observation, ledger)
    actions += nodes.force(job, observation, now)
    events += nodes.events(actions)
    truths = readiness.with_readiness(_truths(job, observation, ledger, now), observation)
    status = _status(job, observation, ledger, truths, now)
    events += _changes(job, old, status, observation)
    later = [refusal.retry_at for refusal in observation.refusals.values()]
    later += [backoff.until for backoff in ledger.backoffs.values()]
    later += completion.wakes(job)
    later += suspend.wakes(job, observation, now)
    later += nodes.later(job, observation, now)
    later += conditions.wakes(old, observation, ledger, now)
    later += sized.wakes
    later += keys.wakes(job, observation)
    wake_at = min((at for at in later if now < at < math.inf), default=None)
    return Plan(progress.throttle(old, status, now), tuple(actions), tuple(events), wake_at)


def _doubts(job: Job) -> list[Event]:
    """Return events about likely errors of the manifest, once for each version of the spec."""
    if job.status.get("observedGeneration") == job.generation:
        return []
    found = rules.doubts(job.spec.failure_policy.rules)
    events = [Event(reasons.EVENT_REASON_UNKNOWN, text, warning=True) for text in found]
    if text := store_size.doubt(job):
        events.append(Event(reasons.EVENT_TOO_MANY_PROCESSES, text, warning=True))
    return events


def invalid(
    status: Status, generation: int, text: str, now: float, reason: str = reasons.INVALID_SPEC
) -> Plan:
    """Return the plan for a job whose spec cannot be read, or that the operator cannot work with: it only
    says so.

    Args:
        status: the old one.
        generation: of the object.
        text: the error.
        now: unix seconds.
        reason: of the conditions.
    """
    text = text[:4096]
    truths = {reasons.DEGRADED: Truth(True, reason, text), **readiness.stalled(reason, text)}
    return only_said(status, generation, truths, now)


def _size(job: Job, observation: Observation, ledger: Ledger, now: float) -> elasticity.Sized:
    live = observation.live_pods
    held_back = any(restarts.waits(ledger, slot, now) for slot in sizing.missing_slots(job, observation))
    sized = elasticity.decide(job, live, observation, held_back, now)
    idle = sizing.missing_standbys(sized.job, observation)
    waits = any(restarts.waits_as_standby(ledger, slot, now) for slot in idle)
    beyond = standby.decide(sized.job, live, observation, waits, now)
    return elasticity.Sized(beyond.job, sized.events, (*sized.wakes, *beyond.wakes))


def _truths(job: Job, observation: Observation, ledger: Ledger, now: float) -> dict[str, Truth]:
    old = job.status
    running = conditions.running(job, observation, ledger, old, now)
    started = running.true or bool(old.get("generation"))
    if job.halted:
        problem = problems.summary(problems.of_halted(job, observation, now))
        saving = suspend.waits(job, observation, ledger, now)
        saved = progress.checkpoint(observation.report_of(ledger.incarnation), old)
        return suspend.truths(job, observation, problem, saving, saved)
    problem = problems.summary(problems.find(job, observation, ledger, now))
    return {
        **suspend.over(job, old),
        reasons.RUNNING: running,
        reasons.RESCALING: conditions.rescaling(job, observation, ledger, started),
        reasons.DEGRADED: conditions.degraded(problem),
    }


def _status(
    job: Job, observation: Observation, ledger: Ledger, truths: dict[str, Truth], now: float
) -> Status:
    old = job.status
    report = observation.report_of(ledger.incarnation)
    numbers = progress.numbers(report, old, {pod.name: pod.node for pod in observation.workers})
    if not truths[reasons.RUNNING].true and "samplesPerSecond" in numbers:
        numbers["samplesPerSecond"] = "0"
    numbers = remaining.with_estimate(numbers, report, old, now, trains=truths[reasons.RUNNING].true)
    started = truths[reasons.RUNNING].true or bool(old.get("generation"))
    active = {} if job.halted else {"startTime": old.get("startTime") or timestamp(now)}
    sized = {key: job.status[key] for key in (elasticity.STATUS,) if key in job.status}
    return {
        **numbers,
        **active,
        **sized,
        **ledger.to_status(),
        **_carried_over(old),
        **_memory(job, observation, ledger),
        "state": conditions.state(truths, observation, started),
        "message": conditions.message(truths),
        "observedGeneration": job.generation,
        "conditions": conditions.write(truths, old, job.generation, now),
        "workers": _workers(job, observation, ledger, unknown=_is_unknown(truths)),
        **_servers(job, observation, ledger),
        **_standby(job, observation, ledger, now),
        "coordinator": _coordinator(observation, ledger, numbers, old),
    }


def _standby(job: Job, observation: Observation, ledger: Ledger, now: float) -> Status:
    found = standby.status(job, observation.live_pods, observation, ledger, now)
    return {standby.STATUS: found} if found else {}


def _memory(job: Job, observation: Observation, ledger: Ledger) -> Status:
    known = memory.status(job, observation.report_of(ledger.incarnation), job.status)
    return {} if known is None else {memory.STATUS: known}


def _is_unknown(truths: dict[str, Truth]) -> bool:
    running = truths[reasons.RUNNING]
    return not running.true and running.reason == reasons.COORDINATOR_UNREACHABLE


def _servers(job: Job, observation: Observation, ledger: Ledger, over: bool = False) -> Status:
    if not job.spec.servers:
        return {}
    return {"parameterServers": servers.status(job, observation, ledger, over)}


def _carried_over(status: Status) -> Status:
    """Return the fields of status that are kept as they are: requests to other schedulers, one-time
    decisions, and the template.
    """
    return {key: status[key] for key in _CARRIED if key in status}


def _workers(
    job: Job, observation: Observation, ledger: Ledger, over: bool = False, unknown: bool = False
) -> Status:
    """unknown: the coordinator does not say who trains; then nobody counts as training."""
    live = observation.live_pods
    standing = standby.pods(live, ledger)
    report = observation.report_of(ledger.incarnation)
    before = (job.status.get("workers") or {}).get("active", 0)
    active = conditions.active_workers(report) if report is not None else min(before, len(live))
    if over or unknown or (job.halted and all(pod.end is not None for pod in observation.workers)):
        active = 0
    shares = progress.shares(report, job.status) if active else {}
    hashed = template_hash(job)
    want = sizing.expected(job, observation)
    return {
        "desired": want,
        "replicas": len(live) - len(standing),
        "ready": sum(pod.running for pod in live if pod not in standing),
        "active": active,
        "outdated": sum(pod.template is not None and pod.template != hashed for pod in live),
        "selector": names.worker_selector(job.name),
        "summary": f"{active}/{want}",
        **shares,
    }


def _coordinator(observation: Observation, ledger: Ledger, numbers: Status, old: Status) -> Status:
    before = old.get("coordinator") or {}
    report = observation.report_of(ledger.incarnation)
    address = observation.service.address if observation.service is not None else ledger.address
    result: Status = {
        "incarnation": ledger.incarnation,
        "address": address,
        "reachable": report is not None and observation.unreachable_since is None,
    }
    if ledger.coordinator_image:
        result["image"] = ledger.coordinator_image
    if ledger.coordinator_ended:
        result["ended"] = ledger.coordinator_ended
    if report is not None:
        result |= {
            "restart": report.restart,
            "recoveries": report.recoveries,
            "statesLost": report.states_lost,
            "lostSeconds": {cause: f"{value:.3f}" for cause, value in sorted(report.lost_seconds.items())},
        }
    elif before.get("incarnation") == ledger.incarnation:
        result |= {
            key: before[key]
            for key in ("restart", "recoveries", "statesLost", "lostSeconds")
            if key in before
        }
    return result


def _changes(job: Job, old: Status, new: Status, observation: Observation) -> list[Event]:
    """Events of what changed in status."""
    events = []
    if conditions.is_true(new, reasons.RUNNING) and not conditions.is_true(old, reasons.RUNNING):
        events.append(Event(reasons.TRAINING, conditions.message_of(new, reasons.RUNNING)))
    reason = conditions.reason_of(new, reasons.DEGRADED)
    if conditions.is_true(new, reasons.DEGRADED) and (
        not conditions.is_true(old, reasons.DEGRADED) or reason != conditions.reason_of(old, reasons.DEGRADED)
    ):
        # Why a server goes is told by the event of that, as a warning where nobody asked for it.
        ordinary = reason == reasons.SERVER_MISSING
        text = conditions.message_of(new, reasons.DEGRADED)
        events.append(Event(reason or reasons.DEGRADED, text, warning=not ordinary))
    events += suspend.events(old, new)
    events += gang.events(old, new)
    events += standby.events(old, new)
    before, want = ((status.get("workers") or {}).get("desired") for status in (old, new))
    policed = elasticity.STATUS in old and elasticity.STATUS in new  # then the policy tells of it
    if before and want and before != want and not policed:
        events.append(Event(reasons.EVENT_SCALED, f"from {before} to {want} workers"))
    before, want = ((status.get("parameterServers") or {}).get("desired") for status in (old, new))
    if before and want and before != want:
        text = f"from {before} to {want} parameter servers"
        events.append(Event(reasons.EVENT_SERVERS_SCALED, text))
    return events + _reported(job, old, new, observation)


def _reported(job: Job, old: Status, new: Status, observation: Observation) -> list[Event]:
    """Events of what the coordinator told of the training; its last word is told of with the end."""
    events = suspend.events_of_saving(old, new, observation) + servers.switched(old, new)
    events += progress.recovered(observation.report_of(new["coordinator"]["incarnation"]), old)
    if new.get("statesLost", 0) > old.get("statesLost", 0):
        who = "no worker with the job's state survived"
        if "parameterServers" in new:
            who = "a parameter server took the job's state with it, or no worker with it survived"
        elif job.spec.strategy.all_reduce.shard is not Shard.NONE:
            who = "shards of the optimizer's state are at no worker any more: all that held them are lost"
        text = f"{who}: training goes back to a checkpoint, or begins again"
        events.append(Event(reasons.STATE_LOST, text, warning=True))
    return events


def _trained_unseen(old: Status, new: Status) -> list[Event]:
    """The event of a training that began after the last look and is over: no condition has shown it."""
    again = new.get("generation") != old.get("generation") and conditions.is_true(new, reasons.SUCCEEDED)
    if conditions.is_true(old, reasons.RUNNING) or not (again or new.get("step", 0) > old.get("step", 0)):
        return []
    upto = f", up to step {new['step']}" if "step" in new else ""
    return [Event(reasons.TRAINING, f"the workers have trained in generation {new.get('generation')}{upto}")]


def _ended(status: Status) -> bool | None:
    """True: succeeded; False: failed; None: goes on."""
    if conditions.is_true(status, reasons.SUCCEEDED):
        return True
    return False if conditions.is_true(status, reasons.FAILED) else None


def _end(
    job: Job, observation: Observation, ledger: Ledger, outcome: Outcome, events: list[Event], now: float
) -> Plan:
    """The round in which the job ends: status says so first; clean-up begins with it."""
    old = job.status
    truths = readiness.with_readiness(conditions.at_the_end(outcome), observation)
    report = observation.report_of(ledger.incarnation)
    numbers = progress.numbers(report, old)
    if outcome.finished is not None:
        numbers = progress.final(outcome.finished, numbers)
    numbers = remaining.at_the_end(numbers, outcome.succeeded)
    final = reasons.SUCCEEDED if outcome.succeeded else reasons.FAILED
    status = {
        **numbers,
        **ledger.to_status(),
        **_carried_over(old),
        **_memory(job, observation, ledger),
        "state": conditions.state(truths, observation, True),
        "message": conditions.message(truths),
        "observedGeneration": job.generation,
        "startTime": old.get("startTime") or timestamp(now),
        "completionTime": timestamp(now),
        "conditions": conditions.write(truths, old, job.generation, now),
        "workers": _workers(job, observation, ledger, over=True),
        **_servers(job, observation, ledger, over=True),
        "coordinator": _coordinator(observation, ledger, numbers, old),
        "progressTime": timestamp(now),
    }
    events += _reported(job, old, status, observation)
    events += _trained_unseen(old, status)
    events = [*events, Event(final, outcome.message, warning=not outcome.succeeded)]
    actions, wake_at = cleanup.after_the_end(job, observation, outcome.succeeded, now, now)
    if job.spec.ttl_seconds_after_finished is not None:
        wake_at = min(wake_at or math.inf, now + job.spec.ttl_seconds_after_finished)
    return Plan(status, tuple(actions), tuple(events), wake_at)


def _after_the_end(job: Job, observation: Observation, succeeded: bool, now: float) -> Plan:
    old = job.status
    ended_at = parse_time(old.get("completionTime")) or now
    actions, wake_at = cleanup.after_the_end(job, observation, succeeded, ended_at, now)
    actions += nodes.force(job, observation, now)
    events = tuple(nodes.events(actions))
    expired, expires_at = cleanup.expire(job, ended_at, now)
    actions += expired
    wake_at = min((at for at in (wake_at, expires_at) if at is not None), default=None)
    wake_at = min(
        (at for at in (wake_at, *nodes.later(job, observation, now)) if at is not None), default=None
    )
    ledger = Ledger.from_status(old)
    job = gang.with_gang(job, observation, over=True)
    actions += gang.decide(job, observation, now, over=True)
    actions += kueue.finish(job, observation, succeeded, now)
    status = {
        **job.status,
        "observedGeneration": job.generation,
        "workers": _workers(job, observation, ledger, over=True),
        **_servers(job, observation, ledger, over=True),
    }
    if not any(pod.live for pod in observation.coordinators):
        status["coordinator"] = {**(old.get("coordinator") or {}), "reachable": False}
        if observation.service_gone:
            status["coordinator"]["address"] = ""
    return Plan(status, tuple(actions), events, wake_at)
