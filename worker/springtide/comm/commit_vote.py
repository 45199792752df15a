"""The commit vote: one small float64 sum per step for everything that members must know of each other.

Fields are sums over members. Where members must agree, each puts in a value and its square: the values are
equal exactly when size * sum of squares = (sum)^2.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

MOST_VALUES = 16
_DIGITS = 1 << 20
_SCALARS = 15  # step x2, weight, count, lo, hi, change, seconds, names low x2, high x2, save, digest x2
_OPTIONS = 9  # members that are no newcomers; by hash: of all x2, of those x2


@dataclass(frozen=True, slots=True)
class Contribution:
    """One member's contribution to the commit vote of a step.

    step: number of the step that it is about to commit. weight: denominator of its gradients' mean. count,
    hash_lo, hash_hi: of the ids that went in. change: it wants a new generation after this step. seconds:
    that the step has taken so far. used: by parameter. changed: by buffer. values: reported means with the
    weight they count with (0 for a stand-in). save: its wish for a checkpoint after this step
    (`checkpoint.schedule`). options: two hashes below 2^20 of its optimizers' options. newcomer: it was given
    the state, and has made no step with these members yet. extra: whatever else is summed, equally long on
    all.
    """

    step: int
    weight: float
    count: int
    hash_lo: int
    hash_hi: int
    change: bool
    seconds: float
    used: Sequence[bool]
    changed: Sequence[bool]
    values: Mapping[str, float] = field(default_factory=dict)
    values_weight: float = 0.0
    save: float = 0.0
    options: tuple[int, int] = (0, 0)
    newcomer: bool = False
    extra: Sequence[float] = ()
    digest: int = 0
    """A hash below 2^20 of a piece of its parameters; 0 where the step has none."""
    copies: int = 0
    """Hashes of the shards that it owns, less those of shards that it has as a buddy; 0 without shards.
    0 in sum where all copies are equal; never in a step with a `digest`."""
    late: Sequence[bool] = ()
    """Whether the gradient of each parameter expected to be unused came after its bucket had left."""
    figures: Sequence[float] = ()
    """Figures for the cut by speed, by rank and then by figure, whole numbers below 2^53: its own, and zeros
    in the others' places. Adding zeros is exact, so all members read the same."""
    found: Sequence[float] = ()
    """Findings in streams of shards: whole numbers below 2^53 in the places of the streams in which it reads
    ahead, and zeros in all others'; none where data are not in shards."""


@dataclass(frozen=True, slots=True)
class Result:
    """The sums (the mean of seconds), equal on all members. values: None if the names differed.

    options_fit: one of the two hashes is the others'. Alone not equal on all: a newcomer that differs from
    those who agree is the one that does not fit.
    """

    same_step: bool
    weight: float
    count: float
    hash_lo: float
    hash_hi: float
    change: bool
    seconds: float
    used: list[bool]
    changed: list[bool]
    values: dict[str, float] | None
    save: float
    extra: list[float]
    options_fit: bool = True
    replicas_agree: bool = True
    late: list[bool] = field(default_factory=list)
    figures: list[int] = field(default_factory=list)
    found: list[float] = field(default_factory=list)


def encode(part: Contribution) -> torch.Tensor:
    """float64 of shape (15 + 9 + 17 + parameters + buffers + late + figures + found + extra,).

    Raise ValueError for more than 16 values.
    """
    if len(part.values) > MOST_VALUES:
        raise ValueError(f"report(): at most {MOST_VALUES} values per step, got {len(part.values)}")
    names = _names_hash(part.values)
    step, low, high = part.step % _DIGITS, names % _DIGITS, names // _DIGITS
    values = [
        part.values[name] * part.values_weight if part.values_weight else 0.0 for name in sorted(part.values)
    ]
    vector = [
        *(step, step * step, part.weight, part.count, part.hash_lo, part.hash_hi, part.change, part.seconds),
        *(low, low * low, high, high * high, part.save, part.digest or part.copies, part.digest**2),
        *_of_options(part),
        *(part.values_weight, *values, *[0.0] * (MOST_VALUES - len(values))),
    ]
    # Bytes: one number for each parameter of the model costs more than all the rest.
    flags = np.frombuffer(bytes((*part.used, *part.changed, *part.late)), dtype=np.uint8)
    return torch.from_numpy(
        np.concatenate((vector, flags, part.figures, part.found, part.extra), dtype=np.float64)
    )


def decode(total: torch.Tensor, part: Contribution, size: int) -> Result:
    """Read the sum over the members.

    Args:
        total: float64 [n], the sum of what the members' `encode` returned.
        part: what this member put in: its names and the lengths.
        size: of the group.
    """
    after = _SCALARS + _OPTIONS
    begin = after + 1 + MOST_VALUES
    used, changed, late = len(part.used), len(part.changed), len(part.late)
    told_at = begin + used + changed + late
    sums = total.numpy()
    numbers: list[float] = sums[:begin].tolist()
    flags: list[bool] = (sums[begin:told_at] > 0).tolist()
    rest: list[float] = sums[told_at:].tolist()
    found_at = len(part.figures)
    extra_at = found_at + len(part.found)
    step, step2, weight, count, lo, hi, change, seconds, *told = numbers[:_SCALARS]
    low, low2, high, high2, save, digest, digest2 = told
    values_weight, *values = numbers[after:]
    agreed: dict[str, float] | None = None
    if _equal(low, low2, size) and _equal(high, high2, size):
        divisor = values_weight or float("nan")
        agreed = {name: value / divisor for name, value in zip(sorted(part.values), values, strict=False)}
    return Result(
        same_step=_equal(step, step2, size),
        weight=weight,
        count=count,
        hash_lo=lo,
        hash_hi=hi,
        change=change > 0,
        seconds=seconds / size,
        used=flags[:used],
        changed=flags[used : used + changed],
        values=agreed,
        save=save,
        late=flags[used + changed :],
        figures=[int(number) for number in rest[:found_at]],
        found=rest[found_at:extra_at],
        extra=rest[extra_at:],
        replicas_agree=_equal(digest, digest2, size),
        options_fit=_fit(numbers[_SCALARS:after], part, size),
    )


def _of_options(part: Contribution) -> list[float]:
    known = 0.0 if part.newcomer else 1.0
    sums = [known]
    for number in part.options:
        sums += [number, number**2, known * number, known * number**2]
    return sums


def _fit(sums: Sequence[float], part: Contribution, size: int) -> bool:
    known, *rest = sums
    for mine, (total, squares, old, old_squares) in zip(part.options, (rest[:4], rest[4:]), strict=True):
        if known and _equal(old, old_squares, int(known)):
            fits = not part.newcomer or mine * known == old
        else:
            fits = _equal(total, squares, size)
        if fits:
            return True
    return False


def _equal(total: float, squares: float, size: int) -> bool:
    return size * int(squares) == int(total) ** 2


def _names_hash(values: Mapping[str, float]) -> int:
    return zlib.crc32("\n".join(sorted(values)).encode()) if values else 0
