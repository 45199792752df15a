"""torch.nn.SyncBatchNorm over the members of a step: the statistics of the whole global batch.

The statistics of one micro-batch are those of all members' micro-batches of the same number. So they, and
with them the numbers of the training, do not depend on how many workers share a batch that is computed at
once.

[Note: order of sums] A group's sums have to be started in the same order by all members, and these are
started where the script's forward and backward come to a layer. So buckets of gradients wait for the end of
backward in such models (`Buckets.patient`).

The gradient: with s_i the factor of member i's gradients (its samples over all), what counts is the
derivative of sum_i s_i loss_i. So each member puts s_i times its sums in, and divides by s_i what is its own,
since its gradients are multiplied by that later. See Ioffe and Szegedy, "Batch Normalization" (2015), for the
formulas.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from springtide.errors import UsageError
from springtide.train_step.reduction import Reduction
from springtide.train_step.transaction import Phase, Transaction


class BatchStatistics:
    """Sums over the members of the running body, for the layers of one model. Called by forward and backward.

    reduction: of the model's steps.
    """

    def __init__(self, reduction: Reduction, transaction: Transaction) -> None:
        self._reduction, self._transaction = reduction, transaction
        self._checked: object | None = None

    @property
    def shared(self) -> bool:
        """Whether there are members to ask: in the body of a step that is no rehearsal."""
        body = self._reduction.running
        return self._transaction.phase is Phase.OPEN and body is not None and not body.assignment.is_warm_up

    @property
    def scale(self) -> float:
        """The factor that the gradients of the current micro-batch are multiplied by; 0 for a stand-in."""
        body = self._reduction.running
        return 1.0 if body is None else body.assignment.batch.micro.scale

    @property
    def counts(self) -> bool:
        """Whether this member's samples count, and are not those of another one that it stands in for."""
        body = self._reduction.running
        return body is None or not body.assignment.batch.standin

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        """The sums over the members. Raise Dropped when that fails."""
        self._transaction.check_alive()
        self._reduction.total(sums)
        return sums

    def check_micro_batches(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum a body's first statistics over the members; raise UsageError unless all split into as many
        parts.
        """
        body = self._reduction.running
        assert body is not None
        if self._checked is body:
            return self.total(sums)
        self._checked = body
        count = body.assignment.batch.micro.count
        told = self.total(torch.cat((sums, sums.new_tensor([count, count**2]))))
        all_counts, squares = told[-2:].tolist()
        if body.assignment.group.size * squares != all_counts**2:
            raise UsageError(
                f"SyncBatchNorm: this worker has cut its part of the batch into {count} micro-batches, and "
                "others into another number, so their statistics cannot be put together: choose a batch_size "
                "that all workers can cut alike, leave batch.split() and micro_batch= out, or use BatchNorm"
            )
        return told[:-2]


_statistics: weakref.WeakKeyDictionary[torch.nn.Module, BatchStatistics] = weakref.WeakKeyDictionary()
"""Statistics by layer; a copy of a layer (an average of weights, say) has none and looks at nobody."""


class GenerationBatchNorm(torch.nn.SyncBatchNorm):
    """The form that `distribute()` gives a SyncBatchNorm: its group is the generation's."""

    @_disable_dynamo  # at its first call: a script's start does not import the compiler
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        statistics = _statistics.get(self)
        if not self.training or statistics is None or not statistics.shared:
            return _BatchNorm.forward(self, input)
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        apply: Callable[..., tuple[torch.Tensor, ...]] = _Normalize.apply
        result, mean, variance, count = apply(input, self.weight, self.bias, self.eps, statistics)
        self._update(mean, variance, float(count))
        out: torch.Tensor = result
        return out

    def _update(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        if not self.training or not self.track_running_stats or self.running_mean is None:
            return
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            unbiased = variance * (count / max(count - 1.0, 1.0))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _Normalize(torch.autograd.Function):
    """(normalized, mean [C], variance [C], elements per channel) over the members' inputs [N, C, ...]."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        statistics: BatchStatistics,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        dims = [0, *range(2, input.dim())]
        wide = input if input.dtype == torch.float64 else input.float()
        variance, mean = torch.var_mean(wide, dims, correction=0)
        number = input.numel() // input.size(1) if statistics.counts else 0
        mean, variance = mean.double(), variance.double()
        # In float64 the difference of the squares below loses nothing that the inputs had.
        own = torch.cat((mean, variance + mean.square())) * number
        if not number:
            own.zero_()  # whatever stand-ins hold
        told = statistics.check_micro_batches(torch.cat((own, own.new_tensor([number]))))
        count = told[-1]
        mean, square = (told[:-1] / count).chunk(2)
        variance = (square - mean.square()).clamp_min(0.0)
        inverse = (variance + eps).rsqrt().to(wide.dtype)
        shape = [1, -1, *[1] * (input.dim() - 2)]
        normal = (wide - mean.to(wide.dtype).view(shape)) * inverse.view(shape)
        ctx.save_for_backward(normal, inverse, weight)
        ctx.statistics, ctx.count, ctx.dims, ctx.shape = statistics, float(count), dims, shape
        result = normal if weight is None else normal * weight.to(wide.dtype).view(shape)
        if bias is not None:
            result = result + bias.to(wide.dtype).view(shape)
        elif weight is None:
            result = result.clone()
        result = result.to(input.dtype)
        ctx.mark_non_differentiable(mean, variance, count)
        return result, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        normal, inverse, weight = ctx.saved_tensors
        statistics, dims, shape = ctx.statistics, ctx.dims, ctx.shape
        wide = gradients[0].to(normal.dtype)
        of_bias, of_weight = wide.sum(dims), (wide * normal).sum(dims)
        scale = statistics.scale
        factor = inverse if weight is None else inverse * weight.to(normal.dtype)
        told = statistics.total(torch.cat((of_bias, of_weight)).double() * scale)
        if scale == 0.0:
            of_input = torch.zeros_like(wide)
        else:
            mean, slope = (told / (ctx.count * scale)).to(normal.dtype).chunk(2)
            of_input = (wide - mean.view(shape) - normal * slope.view(shape)) * factor.view(shape)
        needs = ctx.needs_input_grad
        return (
            of_input.to(gradients[0].dtype),
            of_weight.to(weight.dtype) if weight is not None and needs[1] else None,
            of_bias.to(weight.dtype) if weight is not None and needs[2] else None,
            None,
            None,
        )


def use_generation(model: torch.nn.Module, make: Callable[[], BatchStatistics]) -> bool:
    """Have the model's SyncBatchNorm layers ask the members of each step; return whether there are any.

    Args:
        model: whose layers are changed.
        make: makes the statistics that all of them share; called only if there is one.
    """
    layers = [module for module in model.modules() if isinstance(module, torch.nn.SyncBatchNorm)]
    if layers:
        statistics = make()
        for layer in layers:
            layer.__class__ = GenerationBatchNorm
            _statistics[layer] = statistics
    return bool(layers)
