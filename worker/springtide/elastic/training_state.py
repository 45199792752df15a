"""Hold where a process stands in its training: position, loop, group, boundary, reported values, outcome.

The fields have no writers but the methods of `TrainingState`. They take no lock, because one thread writes:

* The script's thread (the main thread; signal handlers and exception hooks run in it) may call everything.
* The thread of the coordinator's stream and the one that reports to it may read properties. Each property is
  one reference, replaced as a whole and never changed in place: a reader sees the old value or the new one.
  Two properties read one after the other may belong to two steps.
* `values` is the exception: it is changed in place, and only the script's thread may read it.

This module imports none of those that use it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from springtide.comm.process_group import Group
from springtide.coordination.outcome import Outcome
from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.data.loop import LoopPlan
from springtide.train_step.state import Position


class TrainingState:
    """Keep what the parts of the library share about the training of this process."""

    def __init__(self, group: Group) -> None:
        # Where the committed state stands.
        self._position = Position(Cursor(), Ledger())
        # The training loops of the script, which run one after another.
        self._plan: LoopPlan | None = None
        self._last_plan: LoopPlan | None = None
        self._opened_loops = 0
        self._ended_loops = 0
        self._job_steps = 0
        # The generation that this process is a member of.
        self._group = group
        self._generations = 0
        self._boundary = False
        self._warming_up = False
        # What the process ends with.
        self._values: dict[str, float] = {}
        self._untracked: dict[str, float] = {}  # reported since trackers were told
        self._outcome: Outcome | None = None
        self._failed_outside = False

    # ---- the position

    @property
    def position(self) -> Position:
        """Return the cursor, the ledger and the times of the committed state."""
        return self._position

    def adopt(self, position: Position) -> None:
        """Take the position of a state that was received or restored."""
        self._position = position

    def commit(self, cursor: Cursor, ledger: Ledger, seconds: float) -> None:
        """Go to the position behind a step that took so many seconds.

        Args:
            cursor: where the next step begins.
            ledger: the samples trained so far, with those of the step.
            seconds: from the begin of the step's body until now.
        """
        self._position = self._with_time(seconds, cursor, ledger)

    def advance(self, cursor: Cursor, ledger: Ledger) -> None:
        """Go to another cursor and ledger, and leave the times as they are.

        Args:
            cursor: where the next step begins.
            ledger: the samples trained so far.
        """
        self._position = replace(self._position, cursor=cursor, ledger=ledger)

    def add_productive_time(self, seconds: float) -> None:
        """Count the seconds of a committed step, and note when the first one began."""
        self._position = self._with_time(seconds, self._position.cursor, self._position.ledger)

    def skip_to_loop(self, stage: int) -> None:
        """Move the cursor to the begin of loop `stage` if it stands before that."""
        cursor = self._position.cursor
        if cursor.stage >= stage:
            return
        while cursor.stage < stage:
            cursor = cursor.next_stage()
        self._position = replace(self._position, cursor=cursor)

    def _with_time(self, seconds: float, cursor: Cursor, ledger: Ledger) -> Position:
        position = self._position
        return Position(
            cursor,
            ledger,
            position.productive_seconds + seconds,
            position.began_unix or time.time() - seconds,
        )

    # ---- loops

    @property
    def plan(self) -> LoopPlan | None:
        """Return the plan of the running training loop; None outside of one."""
        return self._plan

    @property
    def opened_loops(self) -> int:
        """Return how many training loops the script has begun."""
        return self._opened_loops

    @property
    def ended_loops(self) -> int:
        """Return how many training loops have ended for all members."""
        return self._ended_loops

    @property
    def job_steps(self) -> int:
        """Return how many steps the job has at its end, over all loops; 0 where the script has not said."""
        return self._job_steps

    def expect_steps(self, job_steps: int) -> None:
        """Take the script's word for the steps that the job has at its end, over all loops."""
        self._job_steps = job_steps

    def open_loop(self, plan: LoopPlan) -> int:
        """Begin a training loop; return its ordinal, from 0."""
        self._plan = self._last_plan = plan
        self._opened_loops += 1
        return self._opened_loops - 1

    def close_loop(self, stage: int) -> None:
        """End loop `stage`."""
        self._ended_loops = stage + 1
        self._plan = None

    @contextmanager
    def last_loop_reopened(self) -> Iterator[None]:
        """Be in the last loop again for a while, to join a generation after it has ended."""
        self._plan = self._last_plan
        try:
            yield
        finally:
            self._plan = None

    # ---- the generation

    @property
    def group(self) -> Group:
        """Return the group of the present generation; before the first one, of this process alone."""
        return self._group

    @property
    def generations(self) -> int:
        """Return how many generations this process has been a member of."""
        return self._generations

    @property
    def boundary(self) -> bool:
        """Return whether this process stops before its next step, because members come or go."""
        return self._boundary

    @property
    def warming_up(self) -> bool:
        """Return whether the running bodies are a warm-up, of which nothing stays."""
        return self._warming_up

    def use_group(self, group: Group) -> None:
        """Take the group of a new generation for the present one."""
        self._group = group

    def count_generation(self) -> None:
        """Count a generation that was formed with this process."""
        self._generations += 1

    def stop_at_boundary(self) -> None:
        """Have this process stop before its next step, for the next generation."""
        self._boundary = True

    def clear_boundary(self) -> None:
        """Let the steps of the next generation go on."""
        self._boundary = False

    @contextmanager
    def warm_up(self, group: Group) -> Iterator[None]:
        """Run bodies in a group that stands for the one that this process would join."""
        own = self._group
        self._warming_up, self._group = True, group
        try:
            yield
        finally:
            self._warming_up, self._group = False, own

    # ---- the end

    @property
    def values(self) -> Mapping[str, float]:
        """Return the values that were last reported outside of steps, by name. The script's thread only."""
        return self._values

    @property
    def outcome(self) -> Outcome | None:
        """Return how the process ends; None while that is not decided."""
        return self._outcome

    @property
    def failed_outside(self) -> bool:
        """Return whether the process ends by a failure of its surroundings, which may be over next time."""
        return self._failed_outside

    def report(self, values: Mapping[str, float]) -> None:
        """Keep the newest reported values."""
        self._values.update(values)
        self._untracked.update(values)

    def take_reported(self) -> dict[str, float]:
        """Return the values that were reported since this was called last, for trackers."""
        if not self._untracked:
            return {}
        values, self._untracked = self._untracked, {}
        return values

    def end_with(self, outcome: Outcome, *, failed_outside: bool = False) -> None:
        """Decide how the process ends.

        Args:
            outcome: what is written and told.
            failed_outside: the failure is one of the surroundings (files, network, memory), so the samples of
                the running step are not suspected.
        """
        self._outcome, self._failed_outside = outcome, failed_outside
