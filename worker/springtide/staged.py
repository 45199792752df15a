"""Optimizer steps of a body that may have several, where parameters are on servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch

from springtide.errors import UsageError
from springtide.exchange.buckets import Buckets
from springtide.gradients import Gradients
from springtide.optimizers import parameters_of, scale_of
from springtide.reduction import Reduced, Reduction
from springtide.scaling import Scalings
from springtide.servers.exchange import ServerExchange
from springtide.several import check_backward
from springtide.tables.step import StepHome


class HereSteps:
    """Steps of several optimizers whose dense parameters are in this process. home: of their tables, if any.

    tables: numbers of the parameters that stand for them.
    """

    def __init__(self, home: StepHome | None, tables: Collection[int], gradients: Gradients) -> None:
        self._home, self._tables, self._gradients = home, tables, gradients

    def stage(self, optimizer: torch.optim.Optimizer, reduced: Reduced, scalings: Scalings) -> None:
        """The optimizer makes its step: clip its gradients, and have its tables make theirs."""
        own, scale = parameters_of(optimizer), scale_of(optimizer)
        if self._home is None:
            self._gradients.clip(own, scale)
            return
        inverse = scalings.inverse(optimizer)
        norm = self._home.norm_of(optimizer) * abs(reduced.correction) * inverse * scale
        factor = self._gradients.clip(own, scale, norm) * inverse
        unused = [index for index, used in enumerate(reduced.result.used) if not used]
        self._home.stage_tables(optimizer, reduced.correction, factor, unused)
        scalings.stepped(optimizer)

    def begin_round(self) -> None:
        """Another backward of the body begins. Raise UsageError where there are tables."""
        if self._tables:
            raise UsageError(
                "a second backward() in the same body, and tables of springtide.Embedding: that can be with "
                "strategy.type ParameterServer, not with Hybrid or without a job so far"
            )


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

    def begin_round(self, reduced: Reduced, reduction: Reduction) -> None:
        """Another backward of the body begins. Raise UsageError where it cannot be."""
        check_backward(exact=False, together=self._servers.rounds)
        left = self._gradients.left()
        self._servers.begin_round()
        reduction.begin_round({index: self._gradients.factor(index) for index in left})
        self._buckets.begin(reduction.start_gradients)
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

    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler leaves its step out."""
        self._servers.optimizers.skip(optimizer)
