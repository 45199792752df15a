"""Scripts that call backward() more than once for a micro-batch before they step.

DCGAN's discriminator, losses of several tasks, penalties of a gradient every few steps: their gradients add
up, as in plain PyTorch. A bucket may only leave when the last of them is in. How many there will be is not
known, so the first body of a process sends nothing before `optimizer.step()`, and shows it: where each
micro-batch has one backward, later bodies send during backward. A script that repeats later all the same
loses that step, which is done again, and no other.

[Note: no first look] Where workers keep the sums of their shards alone (`shard: Gradients`), a model may only
just fit, and not with all of its gradients at once. So there the first body sends during backward, too. The
first member that sees the script repeat has the step done again, and the others learn it from that member
when the next generation begins, as those do that join later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from springtide.comm.buckets import Buckets
from springtide.ps.lazy_values import looking


class Agreed(Protocol):
    """Knowledge that the members of a generation have alike."""

    repeats_backward: bool
    """Whether a member has seen more than one backward() for a micro-batch."""


class BeforeGradient:
    """Have `call` made when backward() is about to accumulate a gradient in the leaf.

    By a hook of the leaf's node: one of the tensor would be called by torch.autograd.grad() too, which
    accumulates nothing. The node lives as long as this object, or until the leaf is gone.
    """

    def __init__(self, parameter: torch.Tensor, call: Callable[[], None]) -> None:
        self._node = get_gradient_edge(parameter).node
        self._handle = self._node.register_prehook(lambda _: call())

    def remove(self) -> None:
        self._handle.remove()


class RepeatedBackward:
    """Used from the script's thread and from autograd's, which never run at the same time."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        buckets: Buckets,
        hooked: bool,
        always: bool,
        agreed: Agreed | None = None,
        again: Callable[[int], object] = lambda index: None,
    ) -> None:
        """Know nothing of the script.

        Args:
            parameters: Those that are trained, in the order of the buckets' views.
            buckets: Of the model.
            hooked: `before` is called by hooks of the caller's, which stay.
            always: Buckets have to wait anyhow.
            agreed: Tells members what one has seen, so that there is no first look; see the note.
            again: Called with the number of a parameter before its gradient comes, where buckets do not wait
                and there was no first look.
        """
        self._parameters, self._buckets, self._hooked = parameters, buckets, hooked
        self._agreed, self._again = agreed, again
        self._known = False  # whether a body has shown how many there are
        self._repeats = always
        self._handles: dict[int, BeforeGradient] = {}

    def begin(self) -> None:
        """A body begins."""
        if self._agreed is not None:
            self._repeats |= self._agreed.repeats_backward
        self._buckets.patient = self._repeats or not (self._known or self._agreed is not None)
        if self._hooked or not (self._buckets.patient or self._agreed is not None):
            return
        with looking():  # the node alone is of interest, not values that may be on their way
            for index, parameter in enumerate(self._parameters):
                # One that rests for now has no gradient, and no node that a hook could be at.
                if parameter.requires_grad and index not in self._handles:
                    self._handles[index] = BeforeGradient(parameter, partial(self.before, index))

    def before(self, index: int) -> None:
        """Make room for a gradient that autograd is about to add to the parameter's.

        The sum of the body's earlier backward passes stays as it is: the new gradient is put in by itself.
        """
        parameter = self._parameters[index]
        if not self._buckets.patient:
            self._again(index)
        elif parameter.grad is self._buckets.views[index]:
            parameter.grad = None

    def found(self) -> None:
        """The body has had a second gradient of one micro-batch for a parameter."""
        self._repeats = True
        if self._agreed is not None:
            self._agreed.repeats_backward = True

    def end(self) -> None:
        """A body has made its step."""
        self._known = True
        if not self._repeats and self._agreed is None:
            self.close()

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles.values():
            handle.remove()
        self._handles = {}
