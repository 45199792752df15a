"""Every argument of Lightning's `Trainer`, what becomes of it in an elastic job, and the steps of a run.

PURE: imports no lightning. A Trainer does not keep its arguments: what of it tells their values is looked at
when training begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from springtide.integrations.treatment import Field, Treatment, irrelevant, refused, supported

PRECISIONS: Final = ("32-true", "bf16-mixed", "bf16-true", "64-true")
"""Values of `Trainer(precision=)` that need no loss scale."""

_SAME = "as in Lightning"
_ALONE = "a worker has one device, its own"

ARGUMENTS: Final[Mapping[str, Field]] = {
    # ---- devices
    "accelerator": refused(
        "a model lies on the CPU or a GPU: leave it out, or say cpu, gpu or cuda", "cpu", "cuda"
    ),
    "strategy": supported("`SpringtideStrategy()`"),
    "devices": irrelevant(_ALONE),
    "num_nodes": irrelevant("the job has as many pods as its manifest says"),
    "precision": refused(
        "its loss scale belongs to one process, or it was not tried: use bf16-mixed", *PRECISIONS
    ),
    "plugins": supported("precision and checkpoint plugins; a cluster environment means nothing"),
    "sync_batchnorm": supported("statistics over the samples of all workers"),
    "use_distributed_sampler": irrelevant("samples are dealt by the library"),
    # ---- size of a run
    "max_epochs": supported(_SAME),
    "min_epochs": supported(_SAME),
    "max_steps": supported(_SAME),
    "min_steps": supported(_SAME),
    "max_time": refused("each worker has a clock of its own: use max_steps or max_epochs"),
    "accumulate_grad_batches": supported(
        "a factor of the global batch; a worker makes as many micro-batches as its part needs"
    ),
    "limit_train_batches": supported(
        "in a run of one epoch (or fast_dev_run): with more, give a data set of that size"
    ),
    "overfit_batches": refused("give a data set of that size (torch.utils.data.Subset)"),
    "fast_dev_run": supported(_SAME),
    "reload_dataloaders_every_n_epochs": refused(
        "the order of an epoch is dealt by the library, whose data set stays: leave it 0"
    ),
    # ---- gradients
    "gradient_clip_val": supported("of the sum of all workers' gradients"),
    "gradient_clip_algorithm": supported("`value` with strategy AllReduce without shard"),
    "detect_anomaly": supported(_SAME),
    # ---- evaluation
    "limit_val_batches": supported(_SAME),
    "limit_test_batches": supported(_SAME),
    "limit_predict_batches": supported(_SAME),
    "val_check_interval": supported(
        "by batches, in multiples of accumulate_grad_batches; by time it is refused: each worker has a clock "
        "of its own"
    ),
    "check_val_every_n_epoch": supported(_SAME),
    "num_sanity_val_steps": supported("by each worker before it joins"),
    "inference_mode": supported(_SAME),
    # ---- what is written
    "logger": supported("rank 0 logs, and the next rank 0 goes on in the same place"),
    "log_every_n_steps": supported("values are means over the whole global batch"),
    "callbacks": supported("each hook once for each committed step; see the table"),
    "enable_checkpointing": supported("one worker writes, the others wait for it"),
    "enable_progress_bar": supported("without a job; workers of a job have none"),
    "enable_model_summary": supported("without a job; workers of a job have none"),
    "enable_autolog_hparams": supported(_SAME),
    "default_root_dir": supported("on a volume that all workers mount"),
    "barebones": supported(_SAME),
    "profiler": supported("of this process"),
    "model_registry": refused("a checkpoint of another job begins no run: load its weights yourself"),
    # ---- kernels
    "deterministic": supported(
        "in one process; for the same bits at any number of workers use `strategy.allReduce.exact`"
    ),
    "benchmark": supported(_SAME),
}
"""Arguments of Trainer by name, each with how `SpringtideStrategy` treats it."""

CALLBACKS: Final[Mapping[str, str]] = {
    "BaseFinetuning": "it changes which parameters train while training runs: freeze them before, or make a "
    "job for each phase",
    "BatchSizeFinder": "it trains once more in each worker: set the batch size to what fits, it bounds what "
    "is computed at once",
    "GradientAccumulationScheduler": "the global batch would change while training runs",
    "LearningRateFinder": "it trains once more in each worker: find the learning rate in a run without a job",
    "ModelPruning": "it changes parameters while training runs",
    "OnExceptionCheckpoint": "the job's own checkpoints (spec.checkpoint) are always whole: leave it out",
    "SpikeDetection": "it looks at a worker's own batches: look at the logged losses in on_train_batch_end()",
    "StochasticWeightAveraging": "the average would be each worker's own: average by a torch.optim.swa_utils."
    "AveragedModel in the module",
    "Timer": "each worker has a clock of its own: use max_steps or max_epochs",
    "WeightAveraging": "the average would be each worker's own: average by a torch.optim.swa_utils."
    "AveragedModel in the module",
}
"""Lightning's callbacks that cannot be, with those derived from them, and why."""

HOOKS: Final = ("on_before_backward", "on_after_backward")
"""Hooks of callbacks that count micro-batches, of which each worker has another number."""


def unclassified(parameters: Mapping[str, Any]) -> list[str]:
    """Return the parameters of an installed Trainer's constructor that `ARGUMENTS` lacks."""
    return [name for name in parameters if name not in ARGUMENTS and name != "self"]


def refusals(values: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each argument that cannot be, which says why and what to do.

    Args:
        values: of the refused arguments, by name, as the Trainer shows them.
    """
    return [
        f"Trainer({name}={value!r}): {ARGUMENTS[name].note}"
        for name, value in values.items()
        if ARGUMENTS[name].treatment is Treatment.REFUSED and not ARGUMENTS[name].is_allowed(value)
    ]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Count the steps of a run; none of it depends on the number of workers.

    Attributes:
        global_batch: samples of one step.
        batches: of an epoch, as Lightning counts them in one of the reference processes; infinite where
            nobody knows how many samples a stream has.
        steps: of an epoch; 0 where nobody knows.
        epochs: passes that are dealt at most.
        known: steps of the whole run; 0 where nobody knows it before.
    """

    global_batch: int
    batches: float
    steps: int
    epochs: int
    known: int


_ENDLESS: Final = 1 << 30
"""Passes of a run that ends by a decision alone."""


def schedule(
    samples: int | None,
    *,
    batch_size: int,
    accumulation: int,
    reference_workers: int,
    drop_last: bool,
    limit: float,
    max_steps: int,
    max_epochs: int,
    steps_per_optimizer_step: bool = True,
    is_certain: bool = True,
) -> Schedule:
    """Return the steps of a run.

    Args:
        samples: of the data set; None: of a stream that does not say how many it has.
        batch_size: of the DataLoader.
        accumulation: `accumulate_grad_batches`.
        reference_workers: number of processes for which these two were chosen.
        drop_last: an epoch's short last global batch is left out.
        limit: `limit_train_batches`: a number of batches if it is an int, else a share of them.
        max_steps: of the Trainer; -1: none.
        max_epochs: of the Trainer; -1: none.
        steps_per_optimizer_step: whether `max_steps` counts these steps; not in manual optimization.
        is_certain: a pass has that many samples; a stream has as many as it turns out to have.

    Raises:
        ValueError: there would be no step, or the limit cannot be.
    """
    global_batch = batch_size * accumulation * reference_workers
    batches: float
    if samples is None:
        batches, steps = math.inf, 0
        if not isinstance(limit, int) and limit != 1.0:
            raise ValueError(
                f"limit_train_batches={limit!r} is a share of a stream, which does not say how many samples "
                "it has: give a number of batches"
            )
    else:
        steps = samples // global_batch if drop_last else -(-samples // global_batch)
        batches = steps * accumulation if drop_last else -(-samples // (batch_size * reference_workers))
        if not steps:
            raise ValueError(
                f"the data set has {samples} samples, and the global batch {global_batch}: with drop_last "
                "there is no step in an epoch"
            )
    limited = batches if limit == 1.0 and not isinstance(limit, int) else _limited(batches, limit)
    if limited < batches:
        reached = max_steps != -1 and steps_per_optimizer_step and max_steps <= limited // accumulation
        if not reached and max_epochs != 1:
            raise ValueError(
                f"limit_train_batches={limit!r} in more than one epoch: samples are dealt by passes over the "
                "data set, so give one of that size (torch.utils.data.Subset), or max_epochs=1"
            )
        if limited % accumulation:
            raise ValueError(
                f"limit_train_batches={limit!r} are {limited} batches, which is no multiple of "
                f"accumulate_grad_batches={accumulation}"
            )
        if not limited:
            raise ValueError(f"limit_train_batches={limit!r} leaves no batch of {batches}")
        batches, steps = limited, int(limited // accumulation)
    epochs = _ENDLESS if max_epochs == -1 else max_epochs
    known = 0 if max_epochs == -1 else steps * max_epochs
    if max_steps != -1 and steps_per_optimizer_step:
        known = min(known or max_steps, max_steps)
        if steps and is_certain:
            epochs = min(epochs, max(1, math.ceil(max_steps / steps)))
    return Schedule(global_batch, batches, steps, epochs, known)


def _limited(batches: float, limit: float) -> float:
    """Return how many batches of an epoch are taken: a number of them, or a share."""
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)
