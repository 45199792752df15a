"""Optimizer steps of a body that may have several, where parameters are on servers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from springtide.errors import UsageError
from springtide.exchange.buckets import Buckets, StartSum
from springtide.gradients import Gradients
from springtide.reduction import Reduced
from springtide.scaling import Scalings
from springtide.servers.exchange import ServerExchange
from springtide.several import check_backward


class StagedSteps:
    """The script's optimizers find no gradients; what they would do is noted, and the servers do it.

    clip_norm: of each optimizer's own gradients.
    """

    def __init__(
        self, servers: ServerExchange, gradients: Gradients, buckets: Buckets, clip_norm: float | None
    ) -> None:
        self._servers, self._gradients, self._buckets = servers, gradients, buckets
        self._clip_norm = clip_norm
        self._carried = 0.0

    def begin(self) -> None:
        """A body begins."""
        self._carried = 0.0

    def begin_round(self, reduced: Reduced, start_sum: StartSum) -> None:
        """Another backward of the body begins. Raise UsageError where it cannot be."""
        check_backward(exact=False, together=self._servers.rounds)
        left = self._gradients.left()
        self._servers.begin_round()
        self._buckets.begin(start_sum)
        for index, gradient in left.items():
            self._buckets.carry(index, gradient)
        self._carried = reduced.correction if left else 0.0

    def placed(self, reduced: Reduced) -> None:
        """The sums of the round are on the servers. Raise UsageError."""
        if self._carried and not math.isclose(self._carried, reduced.correction, rel_tol=1e-6):
            raise UsageError(
                "gradients of two backward() of a body are added up whose samples have other weights "
                "(batch.weight()): call optimizer.zero_grad() between them, or use strategy.type AllReduce"
            )
        if self._servers.rounds:
            self._gradients.show(reduced.result.used)

    def stage(self, optimizer: torch.optim.Optimizer, reduced: Reduced, scalings: Scalings) -> None:
        """The script makes this optimizer's step. Raise UsageError where it cannot be made."""
        indices, inverse = self._servers.optimizers.parameters_of(optimizer), scalings.inverse(optimizer)
        unused = [index for index, used in enumerate(reduced.result.used) if not used]
        resting = set[int]()
        if self._servers.rounds:
            resting = self._gradients.hide(indices)
        else:
            self._gradients.forget()  # what is in them may still have to leave
        factor = self._servers.stage(optimizer, self._clip_norm, reduced.correction, inverse, unused, resting)
        scalings.stepped(optimizer)
        self._after: Callable[[], None] = lambda: self._gradients.show_again(
            [index for index in indices if index not in resting], factor
        )

    def stepped(self) -> None:
        """The optimizer's own step, which has found nothing to do, is over."""
        self._after()

    def broken(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a sum of its gradients is not finite; only if the norm was asked for."""
        return not self._servers.optimizers.finite(optimizer)

    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler leaves its step out."""
        self._servers.optimizers.skip(optimizer)

    @property
    def all_skipped(self) -> bool:
        """Whether no step is left that the body's end would make."""
        return not self._servers.optimizers.staged
