"""Optimizer steps of a body that may have several, where parameters are on servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import torch

from springtide.comm.buckets import Buckets
from springtide.embedding.handle import Handle
from springtide.errors import UsageError
from springtide.ps.backend import ParameterBackend, PsBackend
from springtide.train_step.grad_scaler import Scalings
from springtide.train_step.gradients import Gradients
from springtide.train_step.optimizers import parameters_of, scale_of
from springtide.train_step.reduction import Reduced, Reduction


def check_carried(carried: float, correction: float) -> None:
    """Check that gradients of two backward passes can be added up.

    Args:
        carried: correction of gradients that were added to those of this pass; 0: there are none.
        correction: of this pass.

    Raises:
        UsageError: their samples have other weights.
    """
    if carried and not math.isclose(carried, correction, rel_tol=1e-6):
        raise UsageError(
            "gradients of two backward() of a body are added up whose samples have other weights "
            "(batch.weight()): call optimizer.zero_grad() between them, or use strategy.type AllReduce"
        )


class HereSteps:
    """Steps of several optimizers whose dense parameters are in this process. home: of their tables, if any.

    tables: by the number of the parameter that stands for each.
    """

    def __init__(
        self,
        home: ParameterBackend | None,
        tables: Mapping[int, Handle],
        gradients: Gradients,
        buckets: Buckets,
    ) -> None:
        self._home, self._tables, self._gradients, self._buckets = home, tables, gradients, buckets
        self.begin()

    def begin(self) -> None:
        """A body begins."""
        self._carried = 0.0
        # What steps of this round have multiplied the gradients of a parameter by.
        self._factors: dict[torch.Tensor, float] = {}

    def begin_backward_pass(self, reduced: Reduced, reduction: Reduction) -> None:
        """Begin another backward pass of the body.

        Args:
            reduced: sums of the backward pass that is over.
            reduction: makes the next ones.
        """
        left = self._left()
        self._buckets.begin_backward_pass(reduction.start_sum, self._gradients.set_aside())
        if self._home is not None:
            self._home.begin_backward_pass()
            reduction.begin_backward_pass(left)
            for index in left:
                self._buckets.carry(index, self._tables[index].weight.detach())
        self._carried = reduced.correction if left else 0.0
        self._factors = {}

    def _left(self) -> dict[int, float]:
        """Tables whose gradients the script has not taken away, and what steps have multiplied them by."""
        left = {}
        for index, handle in self._tables.items():
            if self._gradients.stands(index):
                left[index] = self._factors.get(handle.weight, 1.0)
        return left

    def placed(self, reduced: Reduced) -> None:
        """The sums of the round are there. Raise UsageError."""
        check_carried(self._carried, reduced.correction)

    def stage(self, optimizer: torch.optim.Optimizer, reduced: Reduced, scalings: Scalings) -> None:
        """Clip the gradients of an optimizer that makes its step, and have its tables make theirs.

        Args:
            optimizer: of the script.
            reduced: sums of the backward pass.
            scalings: of GradScalers.
        """
        own, scale = parameters_of(optimizer), scale_of(optimizer)
        self._buckets.take(self._gradients.present(own))
        if self._home is None:
            self._gradients.clip_here(own, scale)
            return
        inverse = scalings.inverse(optimizer)
        # An earlier step of the round has left them so.
        factor = self._factors.get(own[0], 1.0) * inverse
        norm = self._home.norm_of(optimizer) * abs(reduced.correction * factor) * scale
        factor *= self._gradients.clip(own, scale, norm)
        self._factors |= dict.fromkeys(own, factor)
        unused = [index for index, used in enumerate(reduced.result.used) if not used]
        self._home.stage_tables(optimizer, reduced.correction, factor, unused)
        scalings.stepped(optimizer)


class StagedSteps:
    """The script's optimizers find no gradients; what they would do is noted, and the servers do it.

    clip_norm: of each optimizer's own gradients.
    """

    def __init__(
        self, servers: PsBackend, gradients: Gradients, buckets: Buckets, clip_norm: float | None
    ) -> None:
        self._servers, self._gradients, self._buckets = servers, gradients, buckets
        self._clip_norm = clip_norm
        self.begin()

    def begin(self) -> None:
        """A body begins."""
        self._carried = 0.0
        self._inverses: dict[int, float] = {}  # by id() of an optimizer that has stepped in this round

    def begin_backward_pass(self, reduced: Reduced, reduction: Reduction) -> None:
        """Begin another backward pass of the body.

        Args:
            reduced: sums of the backward pass that is over.
            reduction: makes the next ones.

        Raises:
            ServerError: servers fail.
            UsageError: something that was left cannot be carried over.
        """
        self._inverses = {}
        left = self._gradients.left()
        factors = {index: self._gradients.factor(index) for index in left}
        carried = {index: self._servers.carried(index, left[index], factors[index]) for index in left}
        self._servers.begin_backward_pass()
        reduction.begin_backward_pass(factors)
        self._buckets.begin_backward_pass(reduction.start_gradients, carried)
        for index, gradient in carried.items():
            self._buckets.carry(index, gradient)
        self._carried = reduced.correction if left else 0.0

    def placed(self, reduced: Reduced) -> None:
        """The sums of the round are on the servers. Raise UsageError."""
        check_carried(self._carried, reduced.correction)
        # What may still have to leave must not be zeroed by the script.
        self._gradients.show(reduced.result.used, copied=not self._servers.keeps_sums)

    def stage(self, optimizer: torch.optim.Optimizer, reduced: Reduced, scalings: Scalings) -> None:
        """Have the servers make an optimizer's step.

        Args:
            optimizer: of the script.
            reduced: sums of the backward pass.
            scalings: of GradScalers.

        Raises:
            UsageError: it cannot be made.
        """
        indices = self._servers.optimizers.parameters_of(optimizer)
        # A second step with the same gradients finds them unscaled.
        inverse = scalings.inverse(optimizer) * self._inverses.get(id(optimizer), 1.0)
        self._inverses[id(optimizer)] = inverse
        unused = [index for index, used in enumerate(reduced.result.used) if not used]
        resting = self._gradients.hide(indices)
        factor = self._servers.stage(optimizer, self._clip_norm, reduced.correction, inverse, unused, resting)
        scalings.stepped(optimizer)
        self._after: Callable[[], None] = lambda: self._gradients.show_again(
            [index for index in indices if index not in resting], factor
        )

    def stepped(self, optimizer: torch.optim.Optimizer) -> Collection[int]:
        """The optimizer's own step, which has found nothing to do, is over. Return whose values it makes."""
        self._after()
        return self._servers.optimizers.parameters_of(optimizer)

    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler leaves its step out."""
        self._servers.optimizers.skip(optimizer)
