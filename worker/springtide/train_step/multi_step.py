"""Limits of bodies with several optimizer steps, where sums or new values come too late for a step."""

from __future__ import annotations

from springtide.errors import UsageError


def check_backward(exact: bool) -> None:
    """Raise UsageError if a body that has been summed may have no further backward pass. exact: in exact
    mode.
    """
    if exact:
        raise UsageError(
            "exact mode takes one backward of each sample and optimizer steps after it: a second "
            "backward() in the same body needs strategy.allReduce.exact: false"
        )


def check_closure(exact: bool, low_rank: bool = False) -> None:
    """Raise UsageError if optimizer.step(closure) is impossible here.

    Args:
        exact: sums are exact.
        low_rank: sums leave something out.
    """
    if exact:
        raise UsageError("exact mode takes no optimizer.step(closure): set strategy.allReduce.exact to false")
    if low_rank:
        raise UsageError(
            "compression PowerSGD takes no optimizer.step(closure): which of the closure's gradients change "
            "the parameters is not known. Call backward() before step(), or use compression BF16"
        )
