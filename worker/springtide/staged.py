"""Optimizer steps of a body that may have several, where parameters are on servers."""

from __future__ import annotations

import torch

from springtide.gradients import Gradients
from springtide.reduction import Reduced
from springtide.scaling import Scalings
from springtide.servers.exchange import ServerExchange


class StagedSteps:
    """The script's optimizers find no gradients; what they would do is noted, and the servers do it.

    clip_norm: of each optimizer's own gradients.
    """

    def __init__(self, servers: ServerExchange, gradients: Gradients, clip_norm: float | None) -> None:
        self._servers, self._gradients, self._clip_norm = servers, gradients, clip_norm

    def stage(self, optimizer: torch.optim.Optimizer, reduced: Reduced, scalings: Scalings) -> None:
        """The script makes this optimizer's step. Raise UsageError where it cannot be made."""
        inverse = scalings.inverse(optimizer)
        self._servers.optimizers.stage(optimizer, self._clip_norm, reduced.correction, inverse)
        scalings.stepped(optimizer)
        self._gradients.forget()

    def broken(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a sum of its gradients is not finite; only if the norm was asked for."""
        return not self._servers.optimizers.finite(optimizer)

    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """A GradScaler leaves its step out."""
        self._servers.optimizers.skip(optimizer)

    @property
    def all_skipped(self) -> bool:
        """Whether no step is left that the body's end would make."""
        return not self._servers.optimizers.any_staged
