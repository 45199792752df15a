"""What a body with several optimizer steps cannot do where sums or new values come too late for it."""

from __future__ import annotations

from springtide.errors import UsageError


def check_backward(exact: bool, elsewhere: bool) -> None:
    """Before another backward pass of a body that has been summed.

    exact: sums are. elsewhere: the parameters are on servers. Raise UsageError.
    """
    if exact:
        raise UsageError(
            "exact mode takes one backward of each sample and optimizer steps after it: a second "
            "backward() in the same body needs strategy.allReduce.exact: false"
        )
    if elsewhere:
        raise UsageError(
            "a second backward() in the same body needs the values that optimizer.step() has made, but with "
            "parameters on servers they come with the body's end: make all optimizer steps after one "
            "backward(), or use strategy.type AllReduce"
        )


def check_closure(exact: bool, elsewhere: bool) -> None:
    """Before optimizer.step(closure); as `check_backward`."""
    if exact:
        raise UsageError("exact mode takes no optimizer.step(closure): set strategy.allReduce.exact to false")
    if elsewhere:
        raise UsageError(
            "optimizer.step(closure) needs new values within the body, but with parameters on servers they "
            "come with its end: use strategy.type AllReduce"
        )
