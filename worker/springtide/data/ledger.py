"""The proof that each sample counted once per epoch: a count and a hash that add up over workers and steps.

Each step's commit vote sums, over the workers, (count, low half, high half) of the ids whose gradients
really went in. The sums go into the ledger with the commit, so the ledger describes exactly the parameters
that it travels with; it is not derived from the cursor. At an epoch's end count and hash are compared with
those of the whole dataset.

The hash of (id, stage, epoch) is mix(id) * odd(stage, epoch) mod 2^64, with mix a bijection: sums of
different multisets of ids agree by chance only (about 2^-64), an id of another epoch counts differently, and
the expected sum of an epoch is one multiplication once the sum of mix(id) over the dataset is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from springtide.data.cursor import Cursor
from springtide.data.mixing import MASK_64, mix, mixed_sum

IDS_AT_ONCE = 1 << 20
_HALF = (1 << 32) - 1


class Contribution(NamedTuple):
    """One worker's contribution to the commit vote; each number is an integer below 2^32, so exact in
    float64.

    A float64 sum of them stays exact (below 2^53) for up to 2^20 workers.
    """

    samples: int
    hash_lo: int
    hash_hi: int


def split_halves(value: int) -> tuple[int, int]:
    """(low, high) 32 bits of a number mod 2^64."""
    return value & _HALF, (value >> 32) & _HALF


def join_halves(lo: float, hi: float) -> int:
    """Return the sum mod 2^64 from the summed halves.

    Args:
        lo: sum of the low 32 bits of hashes, a whole number; it may exceed 32 bits.
        hi: sum of the high 32 bits, likewise.

    Raises:
        ValueError: a half is no whole number from 0 to 2^53.
    """
    for name, half in (("low", lo), ("high", hi)):
        if not 0 <= half <= 2**53 or half != int(half):
            raise ValueError(f"the {name} half of a hash sum must be an integer in 0..2^53, got {half!r}")
    return (int(lo) + (int(hi) << 32)) & MASK_64


def _factor(stage: int, epoch: int) -> int:
    return mix(stage, epoch) | 1


def contribution(ids: torch.Tensor, stage: int, epoch: int) -> Contribution:
    """Return count and hash of the samples in this stage and epoch.

    Args:
        ids: the ledger's numbers of the samples: int64, shape (n,), on the CPU; n may be 0.
        stage: of the running loop, from 0.
        epoch: of the running loop, from 0.

    Raises:
        ValueError: `ids` has another dtype, or is not one-dimensional.
    """
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(f"ids must be int64 of shape (n,), got {ids.dtype} of shape {tuple(ids.shape)}")
    lo, hi = split_halves(mixed_sum(ids) * _factor(stage, epoch))
    return Contribution(ids.numel(), lo, hi)


class DatasetSum:
    """The sum of mix(id) over the ids 0..n-1, made little by little.

    An epoch of n samples needs it at its end; made there at once, it would hold up all workers (10 s for 10^9
    samples). So each step makes a part of it that is in proportion to the step. Used by the script's thread.
    """

    def __init__(self, n: int) -> None:
        """Args: n: ids of the dataset, at least 0."""
        self._n = n
        self._sum = 0
        self.done = 0
        """How many ids are in the sum so far."""

    def advance(self, samples: int, left: int) -> None:
        """Keep pace with an epoch, by a part of the sum that is in proportion to its step.

        Args:
            samples: of the step that was just made.
            left: samples that the epoch still had to come before the step.
        """
        missing = self._n - self.done
        self._go_on(missing if samples >= left else -(-missing * samples // left))

    def total(self) -> int:
        """Return the whole sum mod 2^64; what is missing of it is made now (1 s for 10^8 ids)."""
        self._go_on(self._n - self.done)
        return self._sum

    def _go_on(self, count: int) -> None:
        stop = self.done + count
        while self.done < stop:
            end = min(stop, self.done + IDS_AT_ONCE)
            self._sum = (self._sum + mixed_sum(torch.arange(self.done, end))) & MASK_64
            self.done = end


@lru_cache(maxsize=8)
def dataset_sum(n: int) -> DatasetSum:
    """Return the sum for datasets of n samples: one object, which stages and epochs share."""
    return DatasetSum(n)


def expected_hash(n: int, stage: int, epoch: int) -> int:
    """Return the hash of an epoch that takes each of the ids 0..n-1 once; makes what `dataset_sum` lacks.

    Args:
        n: samples of the epoch.
        stage: of the epoch.
        epoch: its number in the stage, from 0.

    Returns:
        The hash, mod 2^64.
    """
    return (dataset_sum(n).total() * _factor(stage, epoch)) & MASK_64


@dataclass(frozen=True, slots=True)
class Ledger:
    """Account of the samples that the surviving parameters have seen.

    All numbers are over the job, but for the running epoch's.

    stage, epoch: the running epoch (epochs completed in this stage). expected: samples of one epoch of the
    running stage; 0 before the first commit, and where nobody knows. count, hash: of the ids that went in
    during the running epoch. total_seen: samples that went in. skipped: steps skipped because a gradient was
    not finite (their samples count as seen). repeated, lost: found at the ends of epochs, or at each step
    where nobody knows an epoch's length; a lower bound when both happened in one.
    """

    stage: int = 0
    epoch: int = 0
    expected: int = 0
    count: int = 0
    hash: int = 0
    total_seen: int = 0
    skipped: int = 0
    repeated: int = 0
    lost: int = 0

    def commit(
        self,
        before: Cursor,
        after: Cursor,
        dataset_size: int,
        count: float,
        hash_lo: float,
        hash_hi: float,
        *,
        skipped: bool = False,
    ) -> Ledger:
        """Return the ledger after a committed step.

        A loop that the script left before its epoch's end is not counted as lost.

        Args:
            before: the cursor that the step started from.
            after: the cursor behind it; the epoch is compared when this lies in another one.
            dataset_size: samples of one epoch.
            count: samples of the step, summed over all workers by a float64 reduction.
            hash_lo: low halves of the workers' hashes, summed likewise.
            hash_hi: high halves.
            skipped: the step changed no parameter, since a gradient was not finite.

        Raises:
            ValueError: the step does not belong to the running epoch, or a sum is no exact integer.
        """
        ledger = self._in_pass(before)._with_samples(
            count, hash_lo, hash_hi, skipped=skipped, expected=dataset_size
        )
        dataset_sum(dataset_size).advance(int(count), dataset_size - before.position)
        if (after.stage, after.epoch) == (ledger.stage, ledger.epoch):
            return ledger
        return ledger._close(after)

    def commit_dealt(
        self,
        before: Cursor,
        after: Cursor,
        ids: torch.Tensor,
        count: float,
        hash_lo: float,
        hash_hi: float,
        *,
        skipped: bool = False,
    ) -> Ledger:
        """Return the ledger after a committed step of a pass whose length nobody knows.

        The samples that went in are compared with those that were dealt at once, not at the pass's end.
        Positions move over those that were dealt and no others, so the steps of a pass together have taken
        each sample behind them once.

        Args:
            before: the cursor that the step started from.
            after: the cursor behind it.
            ids: the ledger's numbers of the global batch, int64 (n,).
            count: as for `commit`.
            hash_lo: as for `commit`.
            hash_hi: as for `commit`.
            skipped: as for `commit`.

        Raises:
            ValueError: as for `commit`.
        """
        dealt = contribution(ids, before.stage, before.epoch)
        went_in = self._in_pass(before)._with_samples(count, hash_lo, hash_hi, skipped=skipped, expected=0)
        repeated, lost = max(0, int(count) - dealt.samples), max(0, dealt.samples - int(count))
        if not repeated and not lost and join_halves(hash_lo, hash_hi) != join_halves(*dealt[1:]):
            repeated = lost = 1
        is_over = (after.stage, after.epoch) != (before.stage, before.epoch)
        return dataclasses.replace(
            went_in,
            stage=after.stage,
            epoch=after.epoch,
            expected=0,
            count=0 if is_over else went_in.count,
            hash=0 if is_over else went_in.hash,
            repeated=self.repeated + repeated,
            lost=self.lost + lost,
        )

    def _in_pass(self, before: Cursor) -> Ledger:
        """Return the ledger in the pass of a step. Raise ValueError when it stands in another one."""
        ledger = self
        if before.stage > self.stage:
            ledger = dataclasses.replace(self, stage=before.stage, epoch=before.epoch, count=0, hash=0)
        if (before.stage, before.epoch) != (ledger.stage, ledger.epoch):
            raise ValueError(
                f"the step belongs to stage {before.stage}, epoch {before.epoch}, "
                f"but the ledger stands in stage {ledger.stage}, epoch {ledger.epoch}"
            )
        return ledger

    def _with_samples(
        self, count: float, hash_lo: float, hash_hi: float, *, skipped: bool, expected: int
    ) -> Ledger:
        """Return the ledger with a step's samples. Raise ValueError when a sum is no exact integer."""
        if count < 0 or count != int(count):
            raise ValueError(f"the number of samples of a step must be an integer >= 0, got {count!r}")
        samples = int(count)
        return Ledger(  # each step makes one: `dataclasses.replace` takes three times as long
            self.stage,
            self.epoch,
            expected,
            self.count + samples,
            (self.hash + join_halves(hash_lo, hash_hi)) & MASK_64,
            self.total_seen + samples,
            self.skipped + skipped,
            self.repeated,
            self.lost,
        )

    def _close(self, after: Cursor) -> Ledger:
        repeated, lost = max(0, self.count - self.expected), max(0, self.expected - self.count)
        if not repeated and not lost and self.hash != expected_hash(self.expected, self.stage, self.epoch):
            # The same number of samples, but not the same samples: at least one of each.
            repeated = lost = 1
        return dataclasses.replace(
            self,
            stage=after.stage,
            epoch=after.epoch,
            count=0,
            hash=0,
            repeated=self.repeated + repeated,
            lost=self.lost + lost,
        )

    def audit(self) -> dict[str, int]:
        """The numbers under the names that the job's status and a worker's outcome use."""
        return {
            "stage": self.stage,
            "epoch": self.epoch,
            "seen": self.count,
            "expected": self.expected,
            "repeated": self.repeated,
            "lost": self.lost,
            "skipped": self.skipped,
            "totalSeen": self.total_seen,
        }

    def to_json(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Ledger:
        """Raise ValueError when a field is missing, unknown or no integer in its range."""
        names = {field.name for field in dataclasses.fields(cls)}
        if set(value) != names:
            raise ValueError(f"ledger: expected the fields {sorted(names)}, got {sorted(value)}")
        for name in names:
            if type(value[name]) is not int or not 0 <= value[name] <= MASK_64:
                raise ValueError(f"ledger: {name} must be an integer in 0..2^64-1, got {value[name]!r}")
        return cls(**value)
