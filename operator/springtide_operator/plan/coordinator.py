"""The coordinator's pod and Service: one live pod, of the number in status, which is raised before each new
pod.

A number is never used for a second pod: it cannot be known whether an earlier one of that number has spoken.

Its image stays the one of the operator that made the job's first one, whatever operator makes the next:
workers bring the library of their own image. It becomes the present operator's at a boundary
(`images.of_coordinator`).
"""

from __future__ import annotations

from dataclasses import replace

from springtide_operator.api import reasons
from springtide_operator.plan import images, sight
from springtide_operator.plan.actions import (
    Action,
    ApplyService,
    CreateCoordinator,
    DeletePod,
    EnsureSecret,
    Event,
)
from springtide_operator.plan.ledger import Ledger
from springtide_operator.plan.observation import CoordinatorPod, Observation
from springtide_operator.plan.retry import QUICK_SECONDS, held_back

ROLE = "coordinator"
MIN_LIFE_SECONDS = 2.0  # between two pods, so that a node that evicts at once gets no flood
SERVICE_CHECK_SECONDS = 30.0
SECRET_CHECK_SECONDS = 10.0
UNREACHABLE_SECONDS = 5.0
LEARNING_SECONDS = 10.0
HELLO_SECONDS = 15.0  # a worker that runs for longer without a word may not find the coordinator


def current(observation: Observation, ledger: Ledger) -> CoordinatorPod | None:
    """Return the live pod of the number in status; None where there is none.

    Args:
        observation: of the job.
        ledger: with the incarnation in status.
    """
    return next((c for c in observation.coordinators if c.live and c.incarnation == ledger.incarnation), None)


def without_hasty_report(observation: Observation, ledger: Ledger, now: float) -> Observation:
    """Leave out the report of a coordinator that began a moment ago and has not heard all members yet.

    They train on while it learns of them: what it says of them so early is no news of the job.

    Args:
        observation: of the job.
        ledger: with the incarnation in status.
        now: in unix seconds.

    Returns:
        The observation, without the report or as it is.
    """
    report, pod = observation.report_of(ledger.incarnation), current(observation, ledger)
    if report is None or pod is None or pod.running_since is None:
        return observation
    learns = report.generation is None or report.reason == "Reconnecting"
    # By what this process has seen: the pod's time is another machine's.
    if not learns or observation.seen_for(sight.running_from(pod), now) >= LEARNING_SECONDS:
        return observation
    return replace(observation, report=None)


def decide(
    observation: Observation, ledger: Ledger, now: float, outdated: str = ""
) -> tuple[list[Action], list[Event]]:
    """Decide what becomes of the coordinator's pod, Service and Secret.

    Args:
        observation: of the job.
        ledger: its incarnation is raised where a new pod is needed.
        now: in unix seconds.
        outdated: why the present one is to have a successor; "": it stays.

    Returns:
        Actions, and events that tell of them.
    """
    actions: list[Action] = []
    events: list[Event] = []
    live = [c for c in observation.coordinators if c.live]
    newest_live = max((c.incarnation for c in live), default=0)
    ledger.incarnation = max(ledger.incarnation, newest_live)
    if not held_back(observation, "secret", now):
        actions += _secret(observation, now)
    if current(observation, ledger) is None or outdated:
        replaced = next((c for c in observation.coordinators if c.incarnation == ledger.incarnation), None)
        if not outdated:
            _count_end(replaced, ledger, now)
        youngest = max((c.created_at for c in observation.coordinators), default=float("-inf"))
        soon = 0.0 <= now - youngest < MIN_LIFE_SECONDS or now < ledger.backoff(ROLE).until
        if not soon and not held_back(observation, "coordinator", now):
            image, moved = images.of_coordinator(observation, ledger), ""
            if ledger.coordinator_image not in ("", image):
                moved = f", with the image {image} in the place of {ledger.coordinator_image}"
            ledger.coordinator_image = image
            ledger.incarnation = 1 + max(
                [ledger.incarnation, *(c.incarnation for c in observation.coordinators)],
            )
            why = "the job has no coordinator"
            if outdated:
                why = outdated
            elif replaced is not None:
                state = "being deleted" if replaced.deleting else replaced.phase
                why = replaced.why_lost or f"{replaced.name} is {state}"
            elif ledger.incarnation > 1:
                why = "the coordinator's pod is gone"
            avoid = sight.to_avoid(observation)
            actions.append(CreateCoordinator(ledger.incarnation, why, avoid, image))
            alive = [worker for worker in observation.workers if worker.live]
            # Not where the one before was refused, or put away with its workers.
            ended = {slot.ended for slot in ledger.slots.values()} & {
                reasons.END_FAILED,
                reasons.END_PREEMPTED,
            }
            if ledger.incarnation > 1 and (replaced is not None or alive or ended):
                meanwhile = "; workers train on meanwhile" if any(w.running for w in alive) else ""
                text = f"coordinator {ledger.incarnation} takes over{moved}: {why}{meanwhile}"
                events.append(Event(reasons.EVENT_COORDINATOR_STARTED, text))
    actions += _service(observation, ledger, now)
    for pod in observation.coordinators:
        if not pod.deleting and pod.incarnation < ledger.incarnation:
            text = f"coordinator {ledger.incarnation} takes its place"
            actions.append(DeletePod(pod.name, pod.uid, reasons.DELETE_SUPERSEDED, text))
    return actions, events


def _count_end(pod: CoordinatorPod | None, ledger: Ledger, now: float) -> None:
    """Raise the backoff once for each coordinator that lived shortly."""
    if pod is None or ledger.coordinator_ended >= pod.incarnation:
        return
    ledger.coordinator_ended = pod.incarnation
    if 0.0 <= now - pod.created_at < QUICK_SECONDS:
        ledger.raise_backoff(ROLE, now)


def _secret(observation: Observation, now: float) -> list[Action]:
    """Secrets are not watched (the operator may only create them): a pod that lacks its Secret says so."""
    if not observation.secret_made:
        return [EnsureSecret("the job's pods take their token from it")]
    problems = [(pod.name, pod.problem) for pod in observation.coordinators]
    problems += [(pod.name, pod.problem) for pod in observation.workers]
    problems += [(pod.name, pod.problem) for pod in observation.servers]
    stuck = [name for name, said in problems if said and said.reason == reasons.CONTAINER_CONFIG_ERROR]
    if not stuck or 0 <= now - observation.secret_made_at < SECRET_CHECK_SECONDS:
        return []
    return [EnsureSecret(f"{stuck[0]} cannot be started; the Secret may have been deleted")]


def _service(observation: Observation, ledger: Ledger, now: float) -> list[Action]:
    if held_back(observation, "service", now):
        return []
    seen = observation.service
    ip = ledger.address.rsplit(":", 1)[0] or None
    if seen is None:
        return [ApplyService(ledger.incarnation, ip, "workers reach the coordinator through it")]
    if seen.incarnation != ledger.incarnation:
        return [ApplyService(ledger.incarnation, ip, f"it selects coordinator {ledger.incarnation}")]
    if 0 <= now - seen.applied_at <= SERVICE_CHECK_SECONDS:
        return []
    lost = _lost_from_sight(observation, ledger, now)
    return [ApplyService(ledger.incarnation, ip, lost)] if lost else []


def _lost_from_sight(observation: Observation, ledger: Ledger, now: float) -> str:
    """Name the side that cannot reach the coordinator, as far as can be seen; "" when all can. Services are
    not watched.
    """
    since = observation.unreachable_since
    if since is not None and now - since > UNREACHABLE_SECONDS:
        return "the coordinator is unreachable"
    report = observation.report_of(ledger.incarnation)
    if report is None:
        return ""
    away = {member.pod_uid for member in report.members if member.active and not member.connected}
    for pod in sorted(observation.workers, key=lambda pod: (pod.slot, pod.attempt)):
        quiet = pod.uid in report.silent and pod.running and now - (pod.started_at or now) > HELLO_SECONDS
        if pod.live and (quiet or pod.uid in away):
            return f"{pod.name} is not connected to the coordinator"
    return ""
