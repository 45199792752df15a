"""Keep what a LightningModule logs in a step until that is committed, as means over all workers.

[Note: logged values] `self.log()` in a step's body writes into a collection of ours, since the step may be
dropped, and since a worker has a part of the batch only. In automatic optimization values are reported to the
library with the micro-batch that they belong to, so their means travel with the gradients. In manual
optimization they may come after the last optimizer's step: there they are summed when the body ends, which
can be dropped until then. When the step is committed, the means are logged into Lightning's own collection,
once, with the number of samples of the global batch.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from torchmetrics import Metric

from springtide.errors import UsageError

_MOST_LATE = 64
"""Values that a body of manual optimization may log."""


@dataclass
class _Entry:
    """Remember one name that was logged.

    Attributes:
        arguments: of `_ResultCollection.log`, but the value.
        value: of a Metric, or of a number that is the same on all workers; None where it has to be averaged.
        kind: "mean" or "sum".
        sized: the script gave a batch size of its own.
    """

    arguments: dict[str, Any]
    value: Any = None
    kind: str = "mean"
    sized: bool = False


@dataclass
class Sums:
    """Add up the values of a body, each with its weight."""

    totals: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    def add(self, values: Mapping[str, float], weight: float) -> None:
        """Take values of a micro-batch.

        Args:
            values: means over its samples, by name.
            weight: number of its samples.
        """
        for name, value in values.items():
            self.totals[name] = self.totals.get(name, 0.0) + (value * weight if weight else 0.0)
            self.weights[name] = self.weights.get(name, 0.0) + weight

    def over_all(self, total: Callable[[torch.Tensor], None]) -> dict[str, float] | None:
        """Return the means over all workers.

        Args:
            total: replaces a tensor by its sum over them.

        Returns:
            The means by name; None when workers have logged different names.

        Raises:
            UsageError: there are too many names.
        """
        names = sorted(self.totals)
        if len(names) > _MOST_LATE:
            raise UsageError(f"self.log(): at most {_MOST_LATE} values in a training step, got {names}")
        mark = float(zlib.crc32("\n".join(names).encode()) >> 6)  # its square is exact
        pairs = [number for name in names for number in (self.totals[name], self.weights[name])]
        sums = torch.tensor(
            [1.0, mark, mark**2, *pairs, *[0.0] * (2 * _MOST_LATE - len(pairs))], dtype=torch.float64
        )
        total(sums)
        size, marks, squares, *found = sums.tolist()
        if int(size) * int(squares) != int(marks) ** 2:
            return None
        return {
            name: found[2 * number] / (found[2 * number + 1] or math.nan) for number, name in enumerate(names)
        }


class StepLog(_ResultCollection):
    """Stand in for Lightning's collection of results while a body runs."""

    def __init__(self, report: Callable[[dict[str, float]], None], weight: Callable[[], float]) -> None:
        """Make it for the bodies of one process.

        Args:
            report: takes values of the micro-batch that the body is at.
            weight: returns the samples of that micro-batch.
        """
        super().__init__(training=True)
        self._report, self._weight = report, weight
        self._entries: dict[tuple[str, str], _Entry] = {}
        self.alike = False
        """Whether values that come now are the same on all workers, since gradients are summed."""

    def begin(self) -> None:
        """Begin a body."""
        self._entries, self.alike = {}, False

    @property
    def names(self) -> set[str]:
        """Return the names logged in this body."""
        return {name for _, name in self._entries}

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Do nothing: values of a body are not added up here.

        Args:
            metrics: unused.
            fx: unused.
        """

    def log(self, fx: str, name: str, value: Any, **arguments: Any) -> None:
        """Keep a value that the script logs.

        Args:
            fx: hook in which it does.
            name: of the value.
            value: a number, a tensor with one, or a Metric.
            arguments: of `_ResultCollection.log`.

        Raises:
            UsageError: the value cannot be averaged.
        """
        entry = _Entry({"fx": fx, "name": name, **arguments})
        shown = arguments.get("reduce_fx", torch.mean)
        entry.kind = shown if isinstance(shown, str) else getattr(shown, "__name__", str(shown))
        entry.kind = {"avg": "mean"}.get(entry.kind.lower(), entry.kind.lower())
        entry.sized = arguments.get("batch_size") is not None
        self._entries[fx, name] = entry
        if isinstance(value, Metric):
            entry.value = value
            if arguments.get("on_step") and isinstance(value._forward_cache, torch.Tensor):
                self._report({_batch_value(name): float(value._forward_cache)})
            return
        if self.alike:
            entry.value = float(value)
            return
        if entry.kind not in ("mean", "sum"):
            raise UsageError(
                f"self.log({name!r}, reduce_fx={entry.kind!r}) in a training step: a step's samples are "
                "spread over the workers, and values are averaged or added up: log a mean or a sum, or a "
                "torchmetrics.MaxMetric"
            )
        samples, number = self._weight(), float(value)
        if not samples:
            self._report({name: number} | ({_size(name): 1.0} if entry.sized else {}))
        elif entry.kind == "sum":
            self._report({name: number / samples})
        elif entry.sized:
            share = float(arguments["batch_size"]) / samples
            self._report({name: number * share, _size(name): share})
        else:
            self._report({name: number})

    def replay(self, results: _ResultCollection, means: Mapping[str, float] | None, samples: float) -> None:
        """Log what the committed step has logged, once.

        Args:
            results: Lightning's own collection.
            means: over all workers, by name; None where their names differed, so that values are left out.
            samples: of the global batch.
        """
        for (_, name), entry in self._entries.items():
            arguments = entry.arguments | {"reduce_fx": entry.kind}
            if isinstance(entry.value, Metric):
                entry.value._computed = None
                if means is not None and (at_step := means.get(_batch_value(name))) is not None:
                    entry.value._forward_cache = torch.tensor(at_step)
                results.log(value=entry.value, **arguments)
                continue
            value, weight = entry.value, samples
            if value is None:
                if means is None or name not in means:
                    continue
                value = means[name]
                if entry.kind == "sum":
                    value *= samples
                elif entry.sized:
                    weight = means.get(_size(name), 1.0) * samples
                    value *= samples / weight
            arguments["batch_size"] = max(1, round(weight))
            results.log(value=torch.tensor(value, dtype=torch.float32), **arguments)


def _size(name: str) -> str:
    return f"{name} (batch size)"


def _batch_value(name: str) -> str:
    return f"{name} (batch)"


_META = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)


def results_state(results: _ResultCollection) -> list[Any]:
    """Return the sums of an epoch so far, as plain numbers.

    Args:
        results: of the training loop.
    """
    found = []
    for key, metric in results.items():
        meta = {name: getattr(metric.meta, name) for name in _META}
        sync = metric.meta.sync
        sums = [float(metric.value), str(metric.value.dtype)] if metric.is_tensor else None
        counted = (
            int(metric.cumulated_batch_size) if metric.is_tensor and metric.meta.is_mean_reduction else 0
        )
        found.append(
            {
                "key": key,
                "meta": meta,
                "reduce_fx": metric.meta.reduce_fx.__name__,
                "sync": [sync.should, sync.rank_zero_only],
                "sums": sums,
                "counted": counted,
                "has_reset": metric.has_reset,
                "updates": metric.update_count,
            }
        )
    return found


def load_results(results: _ResultCollection, state: list[Any], module: Any) -> None:
    """Take the sums of another worker, or those from before a dropped step.

    Args:
        results: of the training loop.
        state: of `results_state`.
        module: the LightningModule, whose attributes logged Metrics are.
    """
    known = {entry["key"] for entry in state}
    for key in [key for key in results if key not in known]:
        del results[key]
    for entry in state:
        if entry["key"] not in results:
            results[entry["key"]] = _made(entry, module.trainer.strategy.reduce)
        metric, sums = results[entry["key"]], entry["sums"]
        if sums is None:
            metric.value = module.get_submodule(entry["meta"]["metric_attribute"])
        else:
            metric.value = torch.tensor(sums[0], dtype=getattr(torch, sums[1].removeprefix("torch.")))
            if metric.meta.is_mean_reduction:
                metric.cumulated_batch_size = torch.tensor(entry["counted"])
        metric.has_reset, metric._update_count, metric._computed = entry["has_reset"], entry["updates"], None


def _made(entry: dict[str, Any], reduce: Callable[..., Any]) -> _ResultMetric:
    """Return an empty result as Lightning makes it when a name is logged for the first time."""
    meta = _Metadata(**entry["meta"], reduce_fx=entry["reduce_fx"])
    should, rank_zero_only = entry["sync"]
    meta.sync = _Sync(_should=should, fn=reduce, rank_zero_only=rank_zero_only)
    return _ResultMetric(meta, entry["sums"] is not None)
