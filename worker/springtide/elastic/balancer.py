"""Keep the cut of global batches for one process, in step with the other members.

The script's thread alone uses it, except for `share`, which is one reference that any thread may read.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Sequence

from springtide.data.balance import (
    EVEN,
    EVEN_PERMILLE,
    NO_BOUND,
    Figure,
    OwnShare,
    Proportions,
    SpeedMeter,
    next_proportions,
)
from springtide.data.loop import LoopPlan
from springtide.data.partition import partition
from springtide.exact.parts import samples_by_rank

log = logging.getLogger(__name__)

ROOM_PERMILLE = 2 * EVEN_PERMILLE
"""Room of a process on a CPU whose script has given no `micro_batch`: its memory was tried with even parts.
"""


class Balancer:
    """Follow the members' figures from one committed step to the next."""

    def __init__(self, by_speed: bool, logical_workers: int) -> None:
        """Begin with even parts.

        Args:
            by_speed: what the job wants.
            logical_workers: parts of a batch in exact mode; 0: none.
        """
        self._by_speed, self._logical_workers = by_speed, logical_workers
        self._meter = SpeedMeter()
        self._room = NO_BOUND
        self._proportions: Proportions | None = None
        self.share = OwnShare()
        self._share_of: tuple[Proportions | None, LoopPlan, int, int] | None = None

    @property
    def proportions(self) -> Proportions | None:
        """Return the cut of the next step; None: even parts."""
        return self._proportions

    def own(self) -> Figure:
        """Return this member's figures for a vote, or for the others at the begin of a generation."""
        return Figure(self._meter.sample_time, self._room) if self._by_speed else Figure(EVEN, self._room)

    def open_loop(self, plan: LoopPlan, on_cpu: bool) -> None:
        """Note how much this process may be given in a loop.

        Args:
            plan: of the loop.
            on_cpu: whether its model is there. The memory of an accelerator ends where it ends, so no part
                is made larger there than even ones, unless it is computed in pieces.
        """
        bound = ROOM_PERMILLE if on_cpu else EVEN_PERMILLE
        in_pieces = plan.micro_batch is not None or self._logical_workers > 0
        self._room = NO_BOUND if in_pieces else bound

    def begin_generation(self, figures: Sequence[Figure]) -> None:
        """Take the figures that all members have told each other, by rank."""
        self._meter.begin_generation()
        self._proportions = next_proportions(None, figures)

    def committed(self, figures: Sequence[Figure], seconds: float, samples: int) -> None:
        """Go on to the next step.

        Args:
            figures: of all members, from the vote of the committed one.
            seconds: that this member computed in it.
            samples: that it computed on.
        """
        self._meter.measured(seconds, samples)
        self._proportions = next_proportions(self._proportions, figures)

    def announce(self, plan: LoopPlan, rank: int, size: int) -> OwnShare:
        """Return this member's share of the loop's batches from now on, and log a change of the cut.

        Args:
            plan: of the loop.
            rank: of this member.
            size: members.
        """
        now = self._proportions, plan, rank, size
        if self._share_of is not None and all(map(operator.is_, now, self._share_of)):
            known = self.share  # not by replace(), which takes ten times as long
            self.share = OwnShare(known.samples, known.part, self._meter.seconds, known.balanced)
            return self.share
        sizes, self._share_of = self._sizes(plan, size), now
        balanced = self._proportions is not None
        before, total = self.share, sum(sizes)
        self.share = OwnShare(sizes[rank], sizes[rank] / total, self._meter.seconds, balanced)
        if (balanced or before.balanced) and before.samples != self.share.samples:
            log.info(
                "parts by speed: this worker has %d of %d samples now (%.3g s per sample; parts by rank: %s)",
                self.share.samples,
                total,
                self._meter.seconds,
                ", ".join(map(str, sizes[:32])) + (" ..." if len(sizes) > 32 else ""),
            )
        return self.share

    def _sizes(self, plan: LoopPlan, size: int) -> list[int]:
        whole = plan.whole_batch
        if self._logical_workers:
            return samples_by_rank(whole, plan.min_part, size, self._logical_workers, self._proportions)
        return [part.size for part in partition(whole, size, plan.min_part, self._proportions)]
