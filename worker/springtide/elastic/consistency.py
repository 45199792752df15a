"""Choose in which consistency a generation trains; the coordinator decides it for all of its members.

The pod's environment says what the manifest said when the pod was made, so it counts for a coordinator that
names none, and before the first generation. A script that cannot train without common steps says why, so that
its job is never asked to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from springtide.coordination.membership import Membership
from springtide.elastic.async_loop import AsyncLoop, AsyncLoopParts
from springtide.elastic.training_state import TrainingState
from springtide.errors import UsageError
from springtide.ps.backend import PsBackend
from springtide.settings import Settings
from springtide_protocol import coordinator_pb2 as pb

log = logging.getLogger(__name__)

SYNCHRONOUS = "Synchronous"


class Consistencies:
    """Choose between both ways of training one script: in common steps, or without them.

    The script's thread uses it; any may read `async_loop`.
    """

    def __init__(self, settings: Settings, state: TrainingState, membership: Membership | None) -> None:
        """Begin with common steps, until `use` says what the script can do.

        Args:
            settings: of the process; they say what counts before a coordinator names a consistency.
            state: of the process.
            membership: to tell what the script cannot do; None without a job.
        """
        self._asynchronous, self._state, self._membership = settings.asynchronous, state, membership
        self._loop_declared = False
        self._async_loop: AsyncLoop | None = None
        self._active: AsyncLoop | None = None
        self._problem = ""

    @property
    def async_loop(self) -> AsyncLoop | None:
        """Return the loop of the present generation if its members do not step together, else None."""
        return self._active

    def use(self, async_loop: AsyncLoop | None, problem: str) -> None:
        """Declare what the script can do.

        Args:
            async_loop: trains it without common steps; None where that cannot be.
            problem: why it cannot be.
        """
        self._loop_declared, self._async_loop, self._problem = True, async_loop, problem
        if self._asynchronous:
            self._active = async_loop
        if self._membership is not None:
            self._membership.bind_to_steps(problem)
            if async_loop is not None:
                self._membership.call_at_epochs_end(async_loop.stop_at_the_end)

    def enter(self, announced: pb.Consistency) -> bool | None:
        """Begin a generation of this consistency; return whether its members do without common steps.

        Return None when nothing is told, so that they go on as before. Raise UsageError for a script that
        cannot.
        """
        if not self._loop_declared:
            return None
        if not announced.mode:
            if self._asynchronous and self._async_loop is None:
                raise UsageError(self._problem)
            return None
        loose = announced.mode != SYNCHRONOUS
        if loose and self._async_loop is None:
            raise UsageError(self._problem)
        before, self._active = self._active, self._async_loop if loose else None
        if self._async_loop is not None:
            self._async_loop.go_on_at_the_end()
        if loose is (before is None):
            log.info("training goes on with consistency %s", announced.mode)
            if self._async_loop is not None:
                self._async_loop.begin_anew()
        return loose

    def needs_steps(self, call: str) -> None:
        """Note that the script calls, in a training loop, what needs all members at the same step."""
        if not self._problem and self._async_loop is not None and self._membership is not None:
            self._problem = f"the script calls {call} inside of a training loop"
            self._membership.bind_to_steps(self._problem)

    def check_together(self, call: str) -> None:
        """Raise UsageError in a loop in which the workers are at different steps."""
        if self._state.plan is None:
            return
        self.needs_steps(call)
        if self._active is not None:
            raise UsageError(
                f"{call} inside of a training loop needs strategy.parameterServer.consistency Synchronous: "
                "the workers are at different steps. Call it after the loop"
            )


def declare_consistencies(
    consistencies: Consistencies,
    parts: AsyncLoopParts,
    servers: PsBackend | None,
    tracked: Mapping[str, Any],
    check: Callable[..., object],
) -> None:
    """Find out in which consistencies the script can train.

    Args:
        consistencies: are told.
        parts: of the process, for a loop without common steps.
        servers: of the trainer.
        tracked: objects of the script that are committed along, by name.
        check: of what `distribute()` was given, for a `consistency`.
    """
    async_loop, problem = None, ""
    try:
        check(consistency="Asynchronous")
        if servers is not None and servers.async_backend is not None:
            async_loop = AsyncLoop(parts, servers.async_backend, tracked)
        else:
            problem = "training without common steps takes strategy.type ParameterServer"
    except UsageError as error:
        problem = str(error)
    consistencies.use(async_loop, problem)
    if servers is not None:
        servers.call_when_bound_to_steps(consistencies.needs_steps)


def staleness_bound(announced: pb.Consistency, settings: Settings) -> int | None:
    """Return how many steps the fastest worker may be ahead of the slowest; None for any number.

    Args:
        announced: the consistency that Start names.
        settings: of the process, which count when it names none.
    """
    if not announced.mode:
        return settings.staleness if settings.consistency == "BoundedStaleness" else None
    return max(1, announced.staleness) if announced.mode == "BoundedStaleness" else None
