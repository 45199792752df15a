"""Pods that wait to begin and were made before the template was edited: made anew, since the edit is mostly
what shall let them begin (another image, a smaller request, the right node selector).

Pods that have begun stay as they are: an edit restarts none. Of each kind one pod goes at a time, and the
next one when its successor was accepted, so that a template that cannot be used takes no other pod with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from springtide_operator.api import reasons
from springtide_operator.api.job import Job
from springtide_operator.manifests.coordinator import coordinator_template_hash
from springtide_operator.manifests.server import server_template_hash
from springtide_operator.manifests.worker import template_hash
from springtide_operator.plan import coordinator, servers, sizing
from springtide_operator.plan.actions import Action, DeletePod, Event
from springtide_operator.plan.ledger import Ledger, Slot
from springtide_operator.plan.observation import CoordinatorPod, Observation, ServerPod, WorkerPod
from springtide_operator.plan.retry import held_back

_WHY = "it has not begun, and the template that it was made from was edited"

Pod = TypeVar("Pod", WorkerPod, ServerPod, CoordinatorPod)


def decide(
    job: Job, observation: Observation, ledger: Ledger, now: float
) -> tuple[list[Action], list[Event]]:
    """Return at most one deletion of each kind, written down in the ledger as an end that counts as nothing.

    Args:
        job: with its template.
        observation: of its pods.
        ledger: is changed in place.
        now: unix seconds.
    """
    if observation.service is None or observation.service.address is None or not observation.secret_made:
        return [], []
    gone: list[WorkerPod | ServerPod | CoordinatorPod] = []
    if not held_back(observation, "worker", now) and not sizing.missing_slots(job, observation):
        known = [pod for pod in observation.live_pods if _has(ledger.slots, pod)]
        for worker in _waiting(known, template_hash, job):
            ledger.slots[worker.slot] = _ended(ledger.slots[worker.slot])
            gone.append(worker)
    if job.spec.servers and not held_back(observation, servers.ROLE, now) and not _lacks(job, observation):
        serving = [pod for pod in servers.live(observation) if _has(ledger.servers, pod)]
        for server in _waiting(serving, server_template_hash, job):
            ledger.servers[server.slot] = _ended(ledger.servers[server.slot])
            gone.append(server)
    present = coordinator.current(observation, ledger)
    if present is not None and not held_back(observation, coordinator.ROLE, now):
        gone += _waiting([present], coordinator_template_hash, job)
    deleted: list[Action] = [DeletePod(pod.name, pod.uid, reasons.DELETE_OUTDATED, _WHY) for pod in gone]
    told = [Event(reasons.EVENT_OUTDATED, f"pod {pod.name} is made anew: {_WHY}") for pod in gone]
    return deleted, told


def _ended(entry: Slot) -> Slot:
    return replace(entry, ended=reasons.END_OUTDATED, edited=True)


def _has(slots: Mapping[int, Slot], pod: WorkerPod | ServerPod) -> bool:
    """Whether the pod has its slot, and is to stay so far."""
    entry = slots.get(pod.slot)
    return entry is not None and entry.uid == pod.uid and entry.ended is None


def _lacks(job: Job, observation: Observation) -> bool:
    """Whether a server's pod is still to be made."""
    return not {pod.slot for pod in servers.live(observation)} >= set(range(servers.wanted(job)))


def _waiting(pods: Iterable[Pod], hashed: Callable[[Job], str], job: Job) -> list[Pod]:
    """The first one of another template that waits to begin."""
    waiting = [pod for pod in pods if pod.template is not None and pod.phase == "Pending" and _waits(pod)]
    if not waiting:
        return []
    now = hashed(job)
    return [pod for pod in waiting if pod.template != now][:1]


def _waits(pod: WorkerPod | ServerPod | CoordinatorPod) -> bool:
    """No node has it, or none of its containers has begun; or our own has not, and something stands in its
    way (its image cannot be pulled, say) while sidecars run. An init container at work is let be.
    """
    if pod.node is None or pod.starting_since is not None:
        return True
    began = pod.running_since if isinstance(pod, CoordinatorPod) else pod.started_at
    return pod.problem is not None and began is None
