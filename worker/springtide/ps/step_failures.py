"""Steps that fail on the parameter servers: when a worker gives up trying them again. PURE.

A failed step costs its chunk, and the job goes on from a copy, from what workers have pulled, or from the
newest checkpoint. A step that fails again before anybody got further fails for a reason that lasts: the
worker ends then, as by an exception of its own optimizer, and the job's budget for failures decides.
"""

from __future__ import annotations

from typing import Final

MOST: Final = 2
"""Failures without progress that end a worker."""


class StepFailures:
    """Counts one worker's failures without progress."""

    def __init__(self) -> None:
        self._furthest = -1
        self._count = 0
        self._refused = False
        self._last = ""

    def failed(self, step: int, what: str, *, lost: bool, can_go_back: bool = True) -> bool:
        """Count a failed step, and return whether to give up.

        Args:
            step: The last one that this worker has committed.
            what: Which step failed, where and why.
            lost: No server holds the chunk any more, which is found out a generation after its server has
                refused to give it, if somebody asked.
            can_go_back: There may be a checkpoint.
        """
        if step > self._furthest:
            self._furthest, self._count, self._refused = step, 0, False
        if not (lost and self._refused):
            self._count += 1
        self._refused, self._last = not lost, what
        return self._count >= MOST or (lost and not can_go_back)

    def last(self, step: int) -> str:
        """Return what failed last; empty when the worker has got past it. step: as for `failed`."""
        return self._last if step <= self._furthest else ""


def describe(failed: str, step: int) -> str:
    """Return the words of a worker that gives up.

    Args:
        failed: Which steps have failed, where and why.
        step: The last one that this worker has committed.
    """
    return (
        f"after step {step} the parameter servers could not make the optimizer's step: {failed}. If that is"
        " memory, raise the limit in parameterServers.template, take more servers, or set"
        " strategy.parameterServer.earlyValues to false; the server's log has the traceback"
    )
