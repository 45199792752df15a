"""The coordinator's pod and Service: one live pod, of the number in status, which is raised before each new
pod.

A number is never used for a second pod: it cannot be known whether an earlier one of that number has spoken.
"""

from __future__ import annotations

from springtide_operator.api import reasons
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
from springtide_operator.plan.refused import held_back

MIN_LIFE_SECONDS = 2.0  # between two pods, so that a node that evicts at once gets no flood
SERVICE_CHECK_SECONDS = 30.0
UNREACHABLE_SECONDS = 5.0


def current(observation: Observation, ledger: Ledger) -> CoordinatorPod | None:
    """The live pod of the number in status."""
    return next((c for c in observation.coordinators if c.live and c.incarnation == ledger.incarnation), None)


def decide(observation: Observation, ledger: Ledger, now: float) -> tuple[list[Action], list[Event]]:
    """Raises ledger.incarnation where a new pod is needed."""
    actions: list[Action] = []
    events: list[Event] = []
    live = [c for c in observation.coordinators if c.live]
    newest_live = max((c.incarnation for c in live), default=0)
    ledger.incarnation = max(ledger.incarnation, newest_live)
    if not observation.secret_made and not held_back(observation, "secret", now):
        actions.append(EnsureSecret("the job's pods take their token from it"))
    if current(observation, ledger) is None:
        replaced = next((c for c in observation.coordinators if c.incarnation == ledger.incarnation), None)
        youngest = max((c.created_at for c in observation.coordinators), default=float("-inf"))
        soon = 0.0 <= now - youngest < MIN_LIFE_SECONDS
        if not soon and not held_back(observation, "coordinator", now):
            ledger.incarnation = 1 + max(
                [ledger.incarnation, *(c.incarnation for c in observation.coordinators)],
            )
            why = "the job has no coordinator"
            if replaced is not None:
                state = "being deleted" if replaced.deleting else replaced.phase
                why = f"{replaced.name} is {state}"
            elif ledger.incarnation > 1:
                why = "the coordinator's pod is gone"
            actions.append(CreateCoordinator(ledger.incarnation, why))
            if ledger.incarnation > 1:
                text = f"coordinator {ledger.incarnation} takes over: {why}; workers train on meanwhile"
                events.append(Event(reasons.EVENT_COORDINATOR_STARTED, text))
    actions += _service(observation, ledger, now)
    for pod in observation.coordinators:
        if not pod.deleting and pod.incarnation < ledger.incarnation:
            text = f"coordinator {ledger.incarnation} takes its place"
            actions.append(DeletePod(pod.name, pod.uid, reasons.DELETE_SUPERSEDED, text))
    return actions, events


def _service(observation: Observation, ledger: Ledger, now: float) -> list[Action]:
    if held_back(observation, "service", now):
        return []
    seen = observation.service
    ip = ledger.address.rsplit(":", 1)[0] or None
    if seen is None:
        return [ApplyService(ledger.incarnation, ip, "workers reach the coordinator through it")]
    if seen.incarnation != ledger.incarnation:
        return [ApplyService(ledger.incarnation, ip, f"it selects coordinator {ledger.incarnation}")]
    lost = (
        observation.unreachable_since is not None
        and now - observation.unreachable_since > UNREACHABLE_SECONDS
        and now - seen.applied_at > SERVICE_CHECK_SECONDS
    )
    return [ApplyService(ledger.incarnation, ip, "the coordinator is unreachable")] if lost else []
