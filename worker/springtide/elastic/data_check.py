"""Compare what the members of a generation read, before the first step that they make together in a loop."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import torch

from springtide.comm.process_group import Group
from springtide.data.loop import LoopPlan
from springtide.data.marks import Row, differing, reference
from springtide.errors import SpringtideError

log = logging.getLogger(__name__)

ROW_BYTES = 4096


class DataCheck:
    """Compare arguments and marks once in each generation and loop. Only the script's thread uses it.

    All members do so at the same place: one that waits for the others' rows has made no step in the loop with
    this group, and neither have they.
    """

    def __init__(self) -> None:
        self._done: tuple[Group, int] | None = None

    def is_done(self, group: Group, stage: int) -> bool:
        """Return whether nothing is to be exchanged any more, as in all steps but a generation's first.

        Args:
            group: of the generation.
            stage: the loop's number, from 0.
        """
        return group.size == 1 or self._done == (group, stage)

    def agree(self, group: Group, row: Row, plan: LoopPlan, labels: Sequence[str]) -> None:
        """Exchange rows with all members, unless that is done.

        Args:
            group: of the generation.
            row: this member's.
            plan: of its loop.
            labels: names of the members, by rank.

        Raises:
            RuntimeError: the group failed.
            SpringtideError: this member's data or arguments are not those of the others.
        """
        if self.is_done(group, row.stage):
            return
        rows = exchange(group, row)
        self._done = group, row.stage
        first = reference(rows)
        for rank, other in enumerate(rows):
            if other.stage != row.stage or rows[first].stage != row.stage:
                continue
            who, right = labels[rank], labels[first]
            wrong = differing(other.marks, rows[first].marks)
            if not other.fits(rows[first]):
                said = _why(who, right, plan if rank == group.rank else None, wrong, rows[first])
                if rank == group.rank:
                    raise SpringtideError(said)
                log.error("%s", said)
            elif wrong and group.rank in (rank, first):
                log.warning(
                    "%s reads other data than %s for the samples %s, and the same for the other samples that "
                    "were compared: is the data set random, or a file another one?",
                    who, right, _listed(wrong),
                )  # fmt: skip


def exchange(group: Group, row: Row) -> list[Row]:
    """Return the rows of all members, by rank; one collective call of all of them.

    Args:
        group: of the generation.
        row: this member's; its marks are left out where the text would exceed ROW_BYTES.

    Raises:
        RuntimeError: the group's, when a member is lost meanwhile.
    """
    sent = torch.zeros((group.size, ROW_BYTES), dtype=torch.uint8)
    text = _text(row, row.marks)
    if len(text) > ROW_BYTES:  # an unusual plan; members compare the marks that both have
        text = _text(row, {})
    sent[group.rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    group.start_sum(sent).wait()
    return [Row(*json.loads(line.numpy().tobytes().rstrip(b"\0"))) for line in sent]


def own_row(plan: LoopPlan, stage: int, *, held: bool) -> Row:
    """Return what this member says.

    Args:
        plan: of its loop.
        stage: the loop's number, from 0.
        held: it held the job's state when the generation began.
    """
    return Row(stage, held, plan.arguments(), plan.marks)


def _text(row: Row, marks: object) -> bytes:
    return json.dumps([row.stage, row.held, row.plan, marks], separators=(",", ":")).encode()


def _why(who: str, right: str, plan: LoopPlan | None, wrong: Sequence[int], other: Row) -> str:
    """Say what is wrong with a member's data. plan: its own, when it is this process."""
    if plan is not None:
        try:
            plan.check_same(other.plan)
        except ValueError as error:
            return str(error)
    if not wrong:
        return f"batches(): {who} has other arguments, or other data, than {right}"
    return (
        f"batches(): {who} reads other data than {right} for the samples {_listed(wrong)}: every worker must "
        "read the same dataset in the same order. If it is made of a list of files, sort it (os.listdir and "
        "glob give them in another order on each node); if what is read is meant to differ, say "
        "verify_samples=0"
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
