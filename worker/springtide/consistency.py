"""In which consistency a generation trains: the coordinator's word, which is one for all of its members.

The pod's environment says what the manifest said when the pod was made, so it counts for a coordinator that
names none, and before the first generation. A script that cannot train without common steps says why, so that
its job is never asked to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from springtide.environment import Settings
from springtide.errors import UsageError
from springtide.leasing import Leasing
from springtide.ps.backend import PsBackend
from springtide_coordinator import coordinator_pb2 as pb

if TYPE_CHECKING:
    from springtide.runtime import Runtime

log = logging.getLogger("springtide")

SYNCHRONOUS = "Synchronous"


class Consistencies:
    """Both kinds of training of one script. leasing: without common steps; None where it cannot, and
    `problem` says why.
    """

    def __init__(self, runtime: Runtime, leasing: Leasing | None, problem: str) -> None:
        self._runtime, self._leasing, self._problem = runtime, leasing, problem
        if runtime.settings.asynchronous:
            runtime.leasing = leasing
        if runtime.membership is not None:
            runtime.membership.bind_to_steps(problem)
            if leasing is not None:
                runtime.membership.on_epochs_end = leasing.stop_at_the_end

    def enter(self, told: pb.Consistency) -> bool | None:
        """A generation of this consistency begins; whether its members do not step together.

        None: nothing is told, so they do as before. Raise UsageError for a script that cannot.
        """
        if not told.mode:
            if self._runtime.settings.asynchronous and self._leasing is None:
                raise UsageError(self._problem)
            return None
        loose = told.mode != SYNCHRONOUS
        if loose and self._leasing is None:
            raise UsageError(self._problem)
        before, self._runtime.leasing = self._runtime.leasing, self._leasing if loose else None
        if self._leasing is not None:
            self._leasing.stops_at_the_end = False  # that was said to another generation
        if loose is (before is None):
            log.info("training goes on with consistency %s", told.mode)
            if self._leasing is not None:
                self._leasing.begin_anew()
        return loose

    def needs_steps(self, call: str) -> None:
        """The script calls in a training loop what there is only where all members are at the same step."""
        if not self._problem and self._leasing is not None and self._runtime.membership is not None:
            self._problem = f"the script calls {call} inside of a training loop"
            self._runtime.membership.bind_to_steps(self._problem)


def consistencies_of(
    runtime: Runtime,
    servers: PsBackend | None,
    tracked: Mapping[str, Any],
    check: Callable[..., object],
) -> Consistencies:
    """What the script can train in. check: of what `distribute()` was given, for a `consistency`."""
    leasing, problem = None, ""
    try:
        check(consistency="Asynchronous")
        if servers is not None and servers.async_backend is not None:
            leasing = Leasing(runtime, servers.async_backend, tracked)
        else:
            problem = "training without common steps takes strategy.type ParameterServer"
    except UsageError as error:
        problem = str(error)
    consistencies = Consistencies(runtime, leasing, problem)
    if servers is not None:
        servers.call_when_bound_to_steps(consistencies.needs_steps)
    return consistencies


def staleness_bound(told: pb.Consistency, settings: Settings) -> int | None:
    """How many steps the fastest worker may be ahead of the slowest; None: any number. told: by Start."""
    if not told.mode:
        return settings.staleness if settings.consistency == "BoundedStaleness" else None
    return max(1, told.staleness) if told.mode == "BoundedStaleness" else None
