"""States of torchmetrics' metrics as buffers of the module, so that they belong to the committed state.

A metric keeps its state in plain attributes of the process. As buffers they are put back when a step is
dropped, combined over the workers in the step, given to workers that join, and saved in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from springtide.errors import UsageError

_RULES = {dim_zero_sum: "sum", dim_zero_min: "min", dim_zero_max: "max", dim_zero_mean: "mean"}
"""Rules of `distribute(buffers=)` by how a metric combines a state over processes."""


def as_buffers(module: torch.nn.Module) -> dict[str, str]:
    """Make the states of all metrics of a module its buffers, and return how each is combined, by name.

    States that are lists, or that a metric combines in a way of its own, stay as they are: see `Whole`.

    Args:
        module: with metrics among its submodules.
    """
    rules = {}
    for prefix, metric in module.named_modules():
        if not isinstance(metric, Metric) or not _is_carried(metric):
            continue
        for name, reduction in metric._reductions.items():
            value = getattr(metric, name)
            if name not in metric._buffers:
                delattr(metric, name)
                metric.register_buffer(name, value, persistent=False)
            rules[f"{prefix}.{name}" if prefix else name] = _RULES[reduction]
    return rules


def _is_carried(metric: Metric) -> bool:
    for name, reduction in metric._reductions.items():
        value = getattr(metric, name)
        if not isinstance(value, torch.Tensor) or reduction not in _RULES:
            return False
        if reduction is dim_zero_mean and not value.is_floating_point():
            return False
    return True


class Whole:
    """Watch the metrics that look at all samples at once, which cannot be updated in a training step."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Find them among the submodules of `module`."""
        self._metrics: Mapping[str, Metric] = {
            name: item
            for name, item in module.named_modules()
            if isinstance(item, Metric) and not _is_carried(item)
        }
        self._counts: dict[str, int] = {}

    def begin(self) -> None:
        """Begin a training step."""
        self._counts = {name: metric.update_count for name, metric in self._metrics.items()}

    def check(self) -> None:
        """Raise UsageError when one of them was updated in the step."""
        for name, metric in self._metrics.items():
            if metric.update_count != self._counts[name]:
                raise UsageError(
                    f"{name} ({type(metric).__name__}) was updated in a training step: it keeps all samples "
                    "of the process, which other workers and those to come do not have. Use one with sums "
                    "(thresholds=, say) there, or this one in validation"
                )
