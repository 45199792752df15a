"""Order in which an epoch takes the samples, and the numbers by which the ledger proves that it did."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.data.mixing import mix, mix_tensor, signed
from springtide.data.permutation import TABLE_SIZE, shuffled


class Weights:
    """Chances of the samples; compared by identity, so that what follows from them can be kept."""

    def __init__(self, values: torch.Tensor) -> None:
        """values: float64, shape (n,), finite, not negative, not all 0."""
        self.sums = values.cumsum(0)
        self.digest = zlib.crc32(values.numpy().tobytes())

    def __len__(self) -> int:
        return self.sums.numel()


@dataclass(frozen=True, slots=True)
class Order:
    """One pass: `size` samples out of `samples`. Weighted: drawn with replacement; else each once."""

    samples: int
    size: int
    shuffle: bool = True
    weights: Weights | None = None

    def ids(self, seed: int, epoch: int, start: int, stop: int) -> torch.Tensor:
        """Return the samples at places start..stop-1 of a pass.

        Args:
            seed: of the loop.
            epoch: number of the pass, from 0: each has an order of its own.
            start: first place, from 0.
            stop: behind the last place; what lies beyond the pass is left out.

        Returns:
            int64 [n] on the CPU.
        """
        if self.weights is not None:
            return _drawn(self.weights, seed, epoch, torch.arange(start, min(stop, self.size)))
        if not self.shuffle:
            return torch.arange(start, min(stop, self.size))
        return shuffled(self.samples, seed, epoch, start, min(stop, self.size))

    def batch_ids(self, seed: int, cursor: Cursor, batch_size: int) -> torch.Tensor:
        """Return the samples of the step at the cursor: int64, shape (1..batch_size,).

        Args:
            seed: of the loop.
            cursor: where the step starts.
            batch_size: samples of the global batch.
        """
        return self.ids(seed, cursor.epoch, cursor.position, cursor.position + batch_size)

    def account(self, ids: torch.Tensor, cursor: Cursor) -> torch.Tensor:
        """Return the numbers that the ledger counts for the global batch of a step.

        They are the ids themselves where a pass takes each of them once; else their places in the pass.

        Args:
            ids: samples in the order of the pass, int64 [n].
            cursor: where the step starts.

        Returns:
            int64 [n].
        """
        if self.weights is None and self.size == self.samples:
            return ids
        return torch.arange(cursor.position, cursor.position + ids.numel())

    def advance(self, cursor: Cursor, batch_size: int, found: Sequence[float] = ()) -> Cursor:
        """Return the cursor after the step that starts here.

        Args:
            cursor: where the step starts.
            batch_size: samples of the global batch.
            found: nothing, since all is known.
        """
        return cursor.advance(batch_size, self.size)

    def commit(
        self,
        ledger: Ledger,
        before: Cursor,
        after: Cursor,
        ids: Callable[[], torch.Tensor],
        sums: Sequence[float],
        skipped: bool,
    ) -> Ledger:
        """Return the ledger after a committed step.

        Args:
            ledger: before it.
            before: the cursor that it started from.
            after: the cursor behind it.
            ids: not asked for: an epoch is compared at its end.
            sums: over all workers: samples whose gradients went in, low and high halves of their hashes.
            skipped: the step changed no parameter.
        """
        count, hash_lo, hash_hi = sums
        return ledger.commit(before, after, self.size, count, hash_lo, hash_hi, skipped=skipped)

    def is_known(self, cursor: Cursor, batch_size: int) -> bool:
        """Return whether the batch at the cursor can be dealt, which it always can.

        Args:
            cursor: where the step starts.
            batch_size: samples of the global batch.
        """
        return True

    def whole(self, batch_size: int) -> int:
        """Return the samples of a batch that is not the last one."""
        return min(batch_size, self.size)

    def steps(self, batch_size: int) -> int:
        """Return the steps of a pass, whose last batch may be short."""
        return -(-self.size // batch_size)

    def describe(self, seed: int, cursor: Cursor, batch_size: int) -> str:
        """Return which samples the step at the cursor takes, in words.

        Args:
            seed: of the loop.
            cursor: where the step starts.
            batch_size: samples of the global batch.
        """
        last = min(cursor.position + batch_size, self.size) - 1
        order = f" in the order of seed {seed}" if self.shuffle else ""
        return f"samples {cursor.position} to {last} of pass {cursor.epoch + 1}{order}"

    def fingerprint(self) -> dict[str, int]:
        """Return what has to be equal on all workers, besides the sizes; empty for a plain pass by a small
        table.
        """
        named: dict[str, int] = {}
        if self.shuffle and self.weights is None and self.samples > TABLE_SIZE:
            named["keyed_permutation"] = 1
        if not self.shuffle:
            named["shuffle"] = 0
        if self.size != self.samples:
            named["drop_last"] = 1
        if self.weights is not None:
            named["weights"] = self.weights.digest
        return named


def make_order(samples: int, batch_size: int, shuffle: Any, drop_last: Any, weights: Any) -> Order:
    """Check the arguments of `batches`, and make the order of an epoch.

    Args:
        samples: of the whole data set, at least 1.
        batch_size: samples of the global batch.
        shuffle: a bool: each epoch has an order of its own.
        drop_last: a bool: leave out the samples that do not fill a batch.
        weights: chances, one number for each sample, finite and not negative; None: each sample once.

    Raises:
        ValueError: a value is of another kind, nothing is left of the data set, or weights are given without
            shuffling.
    """
    for name, value in (("shuffle", shuffle), ("drop_last", drop_last)):
        if not isinstance(value, bool):
            raise ValueError(f"batches(): {name} must be True or False, got {value!r}")
    size = samples - samples % batch_size if drop_last else samples
    if size == 0:
        raise ValueError(
            f"batches(): drop_last=True leaves nothing of {samples} samples in batches of {batch_size}"
        )
    if weights is None:
        return Order(samples, size, shuffle)
    if not shuffle:
        raise ValueError("batches(): weights= draws at random: leave shuffle=False out")
    values = torch.as_tensor(weights, dtype=torch.float64, device="cpu")
    if values.shape != (samples,):
        raise ValueError(f"batches(): weights must be {samples} numbers, got shape {tuple(values.shape)}")
    if not bool(values.isfinite().all()) or bool((values < 0).any()) or float(values.sum()) <= 0:
        raise ValueError("batches(): weights must be finite, not negative, and not all 0")
    return Order(samples, size, True, Weights(values.contiguous()))


def _drawn(weights: Weights, seed: int, epoch: int, places: torch.Tensor) -> torch.Tensor:
    """Return the samples drawn, with replacement, at these places of an epoch: the same on every worker.

    Each place has a number of its own, evenly spread over 0..1 in steps of 2^-53, so any can be drawn alone.
    """
    mixed = mix_tensor(places ^ signed(mix(seed, epoch)))
    chances = ((mixed >> 11) & ((1 << 53) - 1)).double() * 2.0**-53 * weights.sums[-1]
    return torch.searchsorted(weights.sums, chances, right=True).clamp(max=len(weights) - 1)
