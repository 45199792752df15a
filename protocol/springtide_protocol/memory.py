"""Estimate the memory that a worker's process needs for its model, at any number of processes. PURE.

The estimate is what cannot be done without: parameters and buffers, gradients, the optimizer's state.
Activations, what libraries take and what is copied on the way come on top, so a need above the limit is a
certain failure, and one below it is no promise. `docs/sharding.md` has the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from springtide_protocol.limits import MAX_PROCESSES

SHARDS: Final = ("None", "Optimizer", "Gradients")
"""The values of `strategy.allReduce.shard`."""
CONTAINER: Final = "container"
"""Limited by: the memory limit of the pod's container, or the machine's memory."""
DEVICE: Final = "device"
"""Limited by: the memory of the device that parameters are on."""


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Count what the model of one process takes in the memory that its trained parameters are in, in bytes.

    Attributes:
        parameters: Of parameters and buffers.
        gradients: Of all gradients, as buckets hold them.
        bucket: Of the largest bucket.
        state: Of the optimizer's whole state; 0 while it is not known.
        shard: How workers share it out: one of `SHARDS`.
        limit: Of the process; 0: not known.
        limited_by: `CONTAINER` or `DEVICE`.
    """

    parameters: int
    gradients: int = 0
    bucket: int = 0
    state: int = 0
    shard: str = "None"
    limit: int = 0
    limited_by: str = CONTAINER


@dataclass(frozen=True, slots=True)
class Need:
    """Tell what a process needs, in bytes."""

    parameters: int
    gradients: int
    state: int

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.parameters + self.gradients + self.state


def need(model: ModelMemory, size: int) -> Need:
    """Return what each process needs in a generation.

    Each shard is at two of them, so a process holds two parts of n.

    Args:
        model: As a whole.
        size: How many processes the generation has.
    """
    gradients, state = model.gradients, model.state
    if model.shard != "None":
        state = _part(state, size)
    if model.shard == "Gradients":
        gradients = min(gradients, _part(gradients, size) + model.bucket)
    return Need(model.parameters, gradients, state)


def _part(whole: int, size: int) -> int:
    return whole if size <= 2 else -(-2 * whole // size)


def fits(model: ModelMemory, size: int) -> bool:
    """Return whether the limit, if one is known, holds what a process needs in a generation of that size.

    Args:
        model: With its limit.
        size: How many processes the generation has.
    """
    return not model.limit or need(model, size).total <= model.limit


def fewest(model: ModelMemory) -> int | None:
    """Return the smallest generation in which a process has room; None where no size is enough."""
    if fits(model, 1):
        return 1
    if not fits(model, MAX_PROCESSES):
        return None
    too_few, enough = 1, MAX_PROCESSES
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fits(model, middle):
            enough = middle
        else:
            too_few = middle
    return enough


def in_words(nbytes: int) -> str:
    """Write an amount of memory for people, in three digits: `14.9 GiB`."""
    value, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{nbytes} bytes" if units[0] == "bytes" else f"{value:.3g} {units[0]}"


def why_too_small(model: ModelMemory, minimum: int, per_pod: int, can_share: bool) -> str:
    """Return why a job that may go on with so few processes cannot, and what to do; "" where it can.

    Args:
        model: With its limit.
        minimum: The fewest processes that a generation may have.
        per_pod: Processes of a pod.
        can_share: Whether the job's strategy has workers that could share out more than they do.
    """
    minimum = max(1, minimum)
    if fits(model, minimum):
        return ""
    wanted, pods = need(model, minimum), -(-minimum // per_pod)
    whose = "its memory limit" if model.limited_by == CONTAINER else "its device"
    each = "each" if per_pod == 1 else "each process"
    also = "" if model.limited_by == DEVICE or per_pod == 1 else f" for each of its {per_pod} processes"
    text = (
        f"with {_count(pods)}, as few as workers.minReplicas allows, {each} needs "
        f"{in_words(wanted.total)} and has {in_words(model.limit)} by {whose}{also}: "
        f"{in_words(wanted.parameters)} for parameters and buffers, {in_words(wanted.gradients)} for "
        f"gradients, {in_words(wanted.state)} for the optimizer's state, and activations come on top. "
    )
    raised = "raise the limit" if model.limited_by == CONTAINER else "use devices with more memory"
    if (enough := fewest(model)) is not None:
        return text + f"Set workers.minReplicas to {-(-enough // per_pod)}, or {raised}"
    enough = fewest(replace(model, shard="Gradients")) if can_share else None
    if enough is not None:
        return text + (
            f"More workers do not help as it is: set strategy.allReduce.shard to Gradients, with "
            f"workers.minReplicas {-(-enough // per_pod)} or more, or {raised}"
        )
    return text + f"More workers do not help: {raised}"


def _count(pods: int) -> str:
    return "1 worker" if pods == 1 else f"{pods} workers"
