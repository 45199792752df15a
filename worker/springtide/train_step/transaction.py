"""The step as a transaction: *open -> stepping -> stepped*, and committed, or *open -> dropped*.

Where values come from other workers and the script reads them in the same body, a step whose values do not
come is undone: it goes from *stepping* to *dropped*.

In exact mode a worker runs several bodies for one step: those before the last one are *open -> set aside*.
Where the processes of a pod train one model together, a step is *open -> voted* before it is stepping or
dropped, as all of them decide.

A step whose gradients can be kept goes *open -> finishing -> dropped*: it cannot be committed any more, and
the micro-batch that runs is computed to its end, because it would have to be computed again otherwise.

The lock is held for decisions only. Two threads use it: the script's thread moves the step on, the thread of
the coordinator's stream may drop it as long as it is open. A step that has begun to step is finished and
committed, never left: from then on its parameters are changing.
"""

from __future__ import annotations

import enum
import threading

from springtide.errors import Dropped, PartDone, UsageError


class Phase(enum.Enum):
    IDLE = "idle"
    OPEN = "open"
    FINISHING = "finishing"
    VOTED = "voted"
    STEPPING = "stepping"
    STEPPED = "stepped"
    DROPPED = "dropped"
    SET_ASIDE = "set aside"
    BROKEN = "broken"


class Transaction:
    """State of the running step. `broken` is final: a body was left by an exception of the script's own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phase = Phase.IDLE
        self._reason = ""
        self._drop_next = ""
        self._finishes = False

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def stepped(self) -> bool:
        """Whether the running body's step can only be committed: it is stepping, or has stepped."""
        return self._phase in (Phase.STEPPING, Phase.STEPPED)

    @property
    def reason(self) -> str:
        """Why the step was dropped, or broken."""
        return self._reason

    def begin(self, finishes: bool = False) -> None:
        """Open a step.

        If a drop came since the last one ended, it is open as dropped: its first library call leaves it.

        Args:
            finishes: a drop lets the running micro-batch be computed to its end.
        """
        with self._lock:
            if self._phase is Phase.BROKEN:
                raise UsageError(self._reason)
            if self._phase is not Phase.IDLE:
                raise UsageError(
                    "`with springtide.step():` inside another one: a body holds one whole step "
                    "(micro-batches by batch.split())"
                )
            self._phase = Phase.DROPPED if self._drop_next else Phase.OPEN
            self._reason = self._drop_next
            self._finishes = finishes

    def drop(self, reason: str) -> bool:
        """Drop the step if it is open, or the next one if there is none.

        False: it steps already, and will be committed.
        """
        with self._lock:
            if self._phase is Phase.OPEN:
                self._phase = Phase.FINISHING if self._finishes else Phase.DROPPED
                self._reason = reason
            if self._phase in (Phase.IDLE, Phase.SET_ASIDE):
                self._drop_next = reason
            # One that has voted follows the pod's decision, whatever becomes of its generation.
            return self._phase in (Phase.FINISHING, Phase.DROPPED, Phase.IDLE, Phase.SET_ASIDE)

    def finish(self) -> None:
        """Drop a step that is finishing, of which nothing more is computed. Any other phase stays."""
        with self._lock:
            if self._phase is Phase.FINISHING:
                self._phase = Phase.DROPPED

    def allow(self) -> None:
        """A new generation has begun: steps may be opened again."""
        with self._lock:
            self._drop_next = ""

    def check_alive(self) -> None:
        """Raise Dropped in the body of a dropped step, PartDone in that of a part that is over."""
        if self._phase is Phase.DROPPED:
            raise Dropped(self._reason)
        if self._phase is Phase.SET_ASIDE:
            raise PartDone

    def require_open(self, call: str, finishing: bool = False) -> None:
        """Raise Dropped or PartDone, or UsageError when `call` does not belong here.

        Args:
            call: of the script, in words.
            finishing: the call belongs to the micro-batch that a step which is finishing computes.
        """
        phase = self._phase
        if phase is Phase.OPEN or (finishing and phase is Phase.FINISHING):
            return
        self.finish()
        self.check_alive()
        if phase is Phase.BROKEN:
            raise UsageError(self._reason)
        if phase is Phase.IDLE:
            raise UsageError(
                f"{call} outside of a step: put the training code of each batch into `with "
                "springtide.step():`"
            )
        raise UsageError(
            f"{call} after optimizer.step() in the same body: a body holds one optimizer step; use "
            "batch.split() for micro-batches, and one `with springtide.step():` per batch. Several steps are "
            "declared as lists: distribute([model, ...], [optimizer, ...])"
        )

    def vote(self) -> None:
        """All reductions succeeded here: what the processes of the pod decide is what becomes of the step.

        Raise Dropped if it has been dropped.
        """
        with self._lock:
            self._check_not_dropped()
            self._phase = Phase.VOTED

    def decide(self, agreed: bool, reason: str) -> None:
        """Commit or drop the step, as all processes of the pod have decided.

        Args:
            agreed: all its processes commit.
            reason: why the step is dropped otherwise.
        """
        with self._lock:
            self._phase, self._reason = (Phase.STEPPING, "") if agreed else (Phase.DROPPED, reason)

    def start_stepping(self) -> None:
        """All reductions succeeded: only `fall_back` drops the step now. Raise Dropped if it has been."""
        with self._lock:
            self._check_not_dropped()
            self._phase = Phase.STEPPING

    def fall_back(self, reason: str) -> None:
        """The step that was made has been undone, before anybody saw it: it is dropped after all."""
        with self._lock:
            if self._phase is Phase.STEPPING:
                self._phase, self._reason = Phase.DROPPED, reason

    def set_aside(self) -> None:
        """A part's body is over, its step goes on in another body. Raise Dropped if it was dropped."""
        with self._lock:
            self._check_not_dropped()
            self._phase = Phase.SET_ASIDE

    def _check_not_dropped(self) -> None:
        if self._phase is Phase.FINISHING:
            self._phase = Phase.DROPPED
        if self._phase is Phase.DROPPED:
            raise Dropped(self._reason)

    def finish_stepping(self) -> None:
        with self._lock:
            if self._phase is Phase.STEPPING:
                self._phase = Phase.STEPPED

    def end(self) -> None:
        """The body has ended, committed or put back."""
        with self._lock:
            self._phase = Phase.IDLE

    def break_off(self, reason: str) -> None:
        """The body was left by an exception of the script's: nothing may go on in this process."""
        with self._lock:
            self._phase, self._reason = Phase.BROKEN, reason
