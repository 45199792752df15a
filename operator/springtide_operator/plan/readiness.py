"""The conditions that tools know which roll manifests out: Ready, Reconciling and Stalled. PURE.

They follow from the other conditions by the rules of kstatus (Flux, kpt, `cli-utils`): Reconciling while the
job is not yet what its spec asks for, Stalled when it will not get there by itself. Ready says that the job
trains, has succeeded, or is suspended as it was asked to be.
"""

from __future__ import annotations

from springtide_operator.api import reasons
from springtide_operator.plan import conditions
from springtide_operator.plan.conditions import Truth
from springtide_operator.plan.observation import Observation


def with_readiness(truths: dict[str, Truth], observation: Observation) -> dict[str, Truth]:
    """Return all conditions of a job.

    Args:
        truths: conditions by type, without these three.
        observation: of the job: its pods.
    """
    return {**truths, **_readiness(truths, observation)}


def stalled(reason: str, message: str) -> dict[str, Truth]:
    """Return the three of a job that does not go on unless somebody changes it.

    Args:
        reason: why, in one CamelCase word.
        message: why, in a sentence.
    """
    no = Truth(False, reason, message)
    return {reasons.READY: no, reasons.RECONCILING: no, reasons.STALLED: Truth(True, reason, message)}


def _readiness(truths: dict[str, Truth], observation: Observation) -> dict[str, Truth]:
    if reasons.FAILED in truths:
        return stalled(truths[reasons.FAILED].reason, truths[reasons.FAILED].message)
    if reasons.SUCCEEDED in truths:
        return _settled(truths[reasons.SUCCEEDED])
    if conditions.is_suspended(truths):
        halted = truths[reasons.SUSPENDED]
        if halted.reason == reasons.JOB_SUSPENDED and not _has_pods(observation):
            return _settled(halted)
        return _reconciling(halted, ready=False)
    running, rescaling = truths[reasons.RUNNING], truths[reasons.RESCALING]
    if not running.true:
        return _reconciling(Truth(True, running.reason, conditions.message(truths)), ready=False)
    if rescaling.true:
        trouble = truths[reasons.DEGRADED]
        text = f"{rescaling.message}; {trouble.message}" if trouble.true else rescaling.message
        return _reconciling(Truth(True, rescaling.reason, text), ready=True)
    return _settled(running)


def _settled(why: Truth) -> dict[str, Truth]:
    no = Truth(False, why.reason, "the job is what its spec asks for")
    return {
        reasons.READY: Truth(True, why.reason, why.message),
        reasons.RECONCILING: no,
        reasons.STALLED: no,
    }


def _reconciling(why: Truth, *, ready: bool) -> dict[str, Truth]:
    return {
        reasons.READY: Truth(ready, why.reason, why.message),
        reasons.RECONCILING: Truth(True, why.reason, why.message),
        reasons.STALLED: Truth(False, why.reason, "the job goes on by itself"),
    }


def _has_pods(observation: Observation) -> bool:
    workers = any(pod.end is None for pod in observation.workers)
    phases = [pod.phase for pod in observation.coordinators] + [pod.phase for pod in observation.servers]
    return workers or any(phase not in ("Succeeded", "Failed") for phase in phases)
