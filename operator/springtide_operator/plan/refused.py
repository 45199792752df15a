"""Refused creations (quota, PodSecurity, webhooks, throttling): shown, retried ever more slowly, never a
failure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from springtide_operator.plan.observation import Observation, Refusal

NOT_PODS = ("secret", "service", "networkpolicy", "podgroup", "workload")
PODS = ("worker", "coordinator", "server")
RETRY_LIMIT_SECONDS = 60.0
TRANSIENT_LIMIT_SECONDS = 5.0


def refuse(
    previous: Refusal | None,
    code: int,
    message: str,
    now: float,
    terminating: bool = False,
    generation: int = 0,
) -> Refusal:
    """The refusal after one more no: waits 1, 2, 4, ... 60 s (at most 5 s when the server did not get to an
    answer; for ever when the namespace is being deleted, which is never taken back).
    """
    if terminating:
        return Refusal(code, message, math.inf, now, terminating=True, generation=generation)
    since = previous.since if previous is not None else now
    waited = max(0.0, now - since)
    limit = TRANSIENT_LIMIT_SECONDS if code == 0 or code >= 500 else RETRY_LIMIT_SECONDS
    return Refusal(code, message, now + min(limit, max(1.0, waited)), since, generation=generation)


def room_was_made(refusals: Mapping[str, Refusal], now: float) -> dict[str, Refusal]:
    """After a pod was deleted: a quota may have room soon, so pods are asked for again before long."""
    return {
        role: replace(refusal, retry_at=min(refusal.retry_at, now + 1.0))
        if role in PODS and not refusal.terminating
        else refusal
        for role, refusal in refusals.items()
    }


def answers_to(refusals: Mapping[str, Refusal], generation: int) -> dict[str, Refusal]:
    """Those that hold for the job as it is: what was invalid before an edit may be right now, and is asked
    for at once.
    """
    return {
        role: refusal
        for role, refusal in refusals.items()
        if not refusal.invalid or refusal.generation in (0, generation)
    }


def held_back(observation: Observation, role: str, now: float) -> bool:
    """True while the next try of this role's creation has to wait."""
    if namespace_goes(observation) or (observation.pods_wait and role not in NOT_PODS):
        return True
    refusal = observation.refusals.get(role)
    return refusal is not None and now < refusal.retry_at


def namespace_goes(observation: Observation) -> bool:
    """The API server has said that the namespace is being deleted."""
    return any(refusal.terminating for refusal in observation.refusals.values())
