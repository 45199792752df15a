"""Every field of `TrainingArguments` and what becomes of it in an elastic job. PURE: imports no transformers.

A field is supported, without meaning there, or refused unless it has one of a few values. One that this
release does not know is refused unless it has its default. So no argument is ignored without a word.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from springtide.integrations.treatment import Field, Treatment, irrelevant, refused, supported


def _plain_accelerator(config: Any) -> bool:
    """Return whether an AcceleratorConfig asks for nothing that the Trainer's defaults do not."""
    if config is None:
        return True
    values = config if isinstance(config, Mapping) else config.to_dict()
    plain = {
        "split_batches": False,
        "dispatch_batches": None,
        "even_batches": True,
        "use_seedable_sampler": True,
        "gradient_accumulation_kwargs": None,
        "use_configured_state": False,
    }
    return all(values.get(name, value) == value for name, value in plain.items())


OPTIMIZERS: Final = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")
"""Names of `TrainingArguments.optim` whose steps are plain steps of a torch optimizer."""

_SAME = "as in Trainer"
_TRACKER = "for the tracker, on rank 0"
_HUB = "without `push_to_hub` it means nothing"
_DDP = "there is no DistributedDataParallel; the manifest's `strategy` says how gradients are summed"
_PRECISION = "the model that is trained would be cast: evaluate in the precision of training (`bf16`)"

FIELDS: Final[Mapping[str, Field]] = {
    "output_dir": supported(
        "one worker writes there and the others wait for it; use a volume that all workers mount"
    ),
    # ---- size of a step
    "per_device_train_batch_size": supported(
        "samples that a worker computes at once; times `gradient_accumulation_steps` and `reference_workers` "
        "it is the global batch"
    ),
    "gradient_accumulation_steps": supported(
        "a factor of the global batch; a worker makes as many micro-batches as its part needs"
    ),
    "num_train_epochs": supported(_SAME),
    "max_steps": supported("as in Trainer; a stream that does not say how long it is needs it"),
    "auto_find_batch_size": refused(
        "one worker would begin the loop again with a batch size of its own: set per_device_train_batch_size "
        "to what fits, it bounds what is computed at once"
    ),
    "average_tokens_across_devices": refused(
        "the loss would be another one for each number of workers: leave it True", True
    ),
    # ---- optimizer, schedule, loss
    "learning_rate": supported(_SAME),
    "lr_scheduler_type": supported(_SAME),
    "lr_scheduler_kwargs": supported(_SAME),
    "warmup_steps": supported(_SAME),
    "optim": refused(
        "it steps inside of backward(), keeps its state in another form, or needs a library that was not "
        "tried: use one of the plain ones, or give your own by optimizers= or optimizer_cls_and_kwargs=",
        *OPTIMIZERS,
    ),
    "optim_args": supported(_SAME),
    "optim_target_modules": refused("it belongs to optimizers that are refused"),
    "weight_decay": supported(_SAME),
    "adam_beta1": supported(_SAME),
    "adam_beta2": supported(_SAME),
    "adam_epsilon": supported(_SAME),
    "max_grad_norm": supported("clips the sum of all workers' gradients, whose norm is logged"),
    "label_smoothing_factor": supported(_SAME),
    "neftune_noise_alpha": supported(_SAME),
    # ---- precision, memory, kernels
    "bf16": supported("autocast, as in Trainer"),
    "fp16": refused("its loss scale belongs to one process of accelerate's: use bf16"),
    "bf16_full_eval": refused(_PRECISION),
    "fp16_full_eval": refused(_PRECISION),
    "tf32": supported(_SAME),
    "activation_checkpointing": supported(_SAME),
    "activation_checkpointing_kwargs": supported(_SAME),
    "gradient_checkpointing": supported(_SAME),
    "gradient_checkpointing_kwargs": supported(_SAME),
    "torch_compile": refused(
        "a worker that joins would compile while all others wait for it, and it was not tried: compile parts "
        "of the model yourself (torch.compile(model.layer))"
    ),
    "torch_compile_backend": refused("see torch_compile"),
    "torch_compile_mode": refused("see torch_compile"),
    "use_liger_kernel": refused("it was not tried: apply the kernels to the model before ElasticTrainer"),
    "liger_kernel_config": irrelevant("without `use_liger_kernel` it means nothing"),
    "use_cache": supported(_SAME),
    "torch_empty_cache_steps": supported(_SAME),
    "use_cpu": supported(_SAME),
    # ---- logs
    "logging_strategy": supported("losses are means over the whole global batch"),
    "logging_steps": supported(_SAME),
    "logging_first_step": supported(_SAME),
    "logging_nan_inf_filter": supported("by step"),
    "log_on_each_node": irrelevant("rank 0 logs"),
    "log_level": supported(_SAME),
    "log_level_replica": irrelevant("ranks change while the script runs: `log_level` holds everywhere"),
    "disable_tqdm": supported("the bar is rank 0's"),
    "report_to": supported("rank 0 reports, and the next rank 0 goes on when that one is lost"),
    "run_name": supported(_TRACKER),
    "project": supported(_TRACKER),
    "trackio_space_id": supported(_TRACKER),
    "trackio_bucket_id": supported(_TRACKER),
    "trackio_static_space_id": supported(_TRACKER),
    "include_num_input_tokens_seen": supported("over all workers"),
    "skip_memory_metrics": supported("of this process"),
    # ---- evaluation
    "eval_strategy": supported("each sample once over all workers; all get the same metrics"),
    "eval_steps": supported(_SAME),
    "eval_delay": supported(_SAME),
    "eval_on_start": supported(_SAME),
    "per_device_eval_batch_size": supported(_SAME),
    "prediction_loss_only": supported("then workers share the samples out, with `compute_metrics` too"),
    "eval_do_concat_batches": supported(_SAME),
    "eval_accumulation_steps": supported(_SAME),
    "eval_use_gather_object": irrelevant("nothing is gathered: with metrics each worker predicts everything"),
    "include_for_metrics": supported(_SAME),
    "batch_eval_metrics": supported(_SAME),
    # ---- checkpoints
    "save_strategy": supported(
        "folders `checkpoint-N` with the weights in Hugging Face's format; what a job goes on from are its "
        "own checkpoints (`spec.checkpoint`)"
    ),
    "save_steps": supported(_SAME),
    "save_total_limit": supported(_SAME),
    "save_only_model": irrelevant(
        "`checkpoint-N` has weights and `trainer_state.json`; the optimizer's state is in the job's own "
        "checkpoints"
    ),
    "save_on_each_node": refused("one worker writes for all: give output_dir on a volume of all workers"),
    "enable_jit_checkpoint": refused(
        "the library handles SIGTERM: set spec.checkpoint, and a job that is suspended saves before it leaves"
    ),
    "load_best_model_at_end": supported("all workers read it, so `output_dir` is a volume of all workers"),
    "metric_for_best_model": supported(_SAME),
    "greater_is_better": supported(_SAME),
    "resume_from_checkpoint": irrelevant("a field for scripts; `train(resume_from_checkpoint=)` counts"),
    "ignore_data_skip": irrelevant("the position in the data is a part of the job's state"),
    "restore_callback_states_from_checkpoint": irrelevant(
        "states of callbacks (`ExportableState`) are always a part of the job's state"
    ),
    "push_to_hub": refused(
        "uploads from a worker that may be lost: upload output_dir when the job has ended"
    ),
    "hub_token": irrelevant(_HUB),
    "hub_private_repo": irrelevant(_HUB),
    "hub_model_id": irrelevant(_HUB),
    "hub_strategy": irrelevant(_HUB),
    "hub_always_push": irrelevant(_HUB),
    "hub_revision": irrelevant(_HUB),
    # ---- random numbers
    "seed": supported("random numbers in a step belong to (seed, step, part of the batch)"),
    "data_seed": supported("of the order; `seed` where it is left out"),
    "full_determinism": supported(
        "in one process; for the same bits at any number of workers use `strategy.allReduce.exact`"
    ),
    # ---- data
    "dataloader_drop_last": supported("leaves an epoch's last short global batch out; refused for streams"),
    "dataloader_num_workers": supported("processes of each worker that read ahead"),
    "dataloader_pin_memory": irrelevant("what is read ahead for a GPU is pinned"),
    "dataloader_persistent_workers": irrelevant("they live as long as the training loop"),
    "dataloader_prefetch_factor": irrelevant("the library reads ahead by steps"),
    "dataloader_multiprocessing_context": refused(
        "processes that read are forked: leave it out", None, "fork"
    ),
    "dataloader_in_order": irrelevant("samples are dealt by their numbers"),
    "remove_unused_columns": supported(_SAME),
    "label_names": supported(_SAME),
    "train_sampling_strategy": refused(
        "a sampler of one process knows nothing of members that come and go: sort or pack the data set by "
        "length beforehand",
        "random",
        "sequential",
    ),
    "length_column_name": irrelevant("it belongs to samplers that are refused"),
    # ---- other ways to use several processes
    "accelerator_config": Field(
        Treatment.REFUSED,
        "batches are dealt by the library: leave split_batches, dispatch_batches, even_batches, "
        "use_seedable_sampler, gradient_accumulation_kwargs and use_configured_state as they are",
        _plain_accelerator,
        "the defaults",
    ),
    "parallelism_config": refused(
        "tensor, context and sequence parallelism are not elastic: run Trainer by `springtide launch "
        "--torchrun-env`"
    ),
    "fsdp": refused(
        "use strategy.allReduce.shard in the manifest, or Trainer by `springtide launch --torchrun-env`"
    ),
    "fsdp_config": irrelevant("without `fsdp` it means nothing"),
    "deepspeed": refused(
        "use strategy.allReduce.shard in the manifest, or Trainer by `springtide launch --torchrun-env`"
    ),
    "ddp_backend": refused("strategy.allReduce.backend in the manifest says it: leave it out", None),
    "ddp_find_unused_parameters": irrelevant(_DDP),
    "ddp_bucket_cap_mb": irrelevant(_DDP),
    "ddp_broadcast_buffers": irrelevant(_DDP),
    "ddp_static_graph": irrelevant(_DDP),
    "ddp_timeout": irrelevant(_DDP),
    "local_rank": irrelevant("the library knows it"),
    # ---- the script's own
    "do_train": irrelevant("a field for scripts"),
    "do_eval": irrelevant("a field for scripts"),
    "do_predict": irrelevant("a field for scripts"),
    "debug": Field(
        Treatment.REFUSED,
        "it belongs to another kind of device",
        lambda value: all(getattr(item, "value", item) == "underflow_overflow" for item in value or ()),
        "`underflow_overflow`",
    ),
}
"""Fields of TrainingArguments by name, each with how ElasticTrainer treats it."""


def unclassified(arguments: Any) -> list[str]:
    """Return the fields of an installed TrainingArguments, the class or an object, that `FIELDS` lacks."""
    return [field.name for field in dataclasses.fields(arguments) if field.name not in FIELDS]


def refusals(arguments: Any, base: type) -> list[str]:
    """Return a sentence for each argument that cannot be, which says why and what to do.

    Args:
        arguments: a TrainingArguments, or an object of a class below it, whose further fields are the
            script's own.
        base: the class TrainingArguments.
    """
    found = []
    for field in dataclasses.fields(base):
        value = getattr(arguments, field.name)
        known = FIELDS.get(field.name)
        shown = getattr(value, "value", value)
        if known is None:
            if value != _default(field):
                found.append(
                    f"{field.name}={shown!r}: this release of springtide does not know what becomes of it in "
                    "an elastic job: leave it out"
                )
        elif known.treatment is Treatment.REFUSED and not known.is_allowed(value):
            found.append(f"{field.name}={shown!r}: {known.note}")
    return found


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


@dataclass(frozen=True, slots=True)
class Schedule:
    """Count the steps of a training run; none of it depends on the number of workers.

    Attributes:
        global_batch: samples of one step.
        steps_per_epoch: steps of one pass over the data.
        max_steps: steps of the run.
        epochs: passes that it begins.
    """

    global_batch: int
    steps_per_epoch: int
    max_steps: int
    epochs: int


_ENDLESS: Final = 1 << 30
"""Passes of a run over a stream whose length nobody knows, which ends after `max_steps`."""


def schedule(
    samples: int | None,
    *,
    per_device: int,
    accumulation: int,
    reference_workers: int,
    max_steps: int,
    num_epochs: float,
    drop_last: bool,
) -> Schedule:
    """Return the steps of a run.

    Args:
        samples: of the data set; None: of a stream that does not say how many it has, of which passes follow
            each other until `max_steps`, each as long as it turns out. The Trainer counts the whole run as
            one epoch's steps then.
        per_device: `per_device_train_batch_size`.
        accumulation: `gradient_accumulation_steps`.
        reference_workers: number of processes for which these two were chosen.
        max_steps: of the run; not above 0: as many as the epochs have.
        num_epochs: passes over the data, which may be a part of one.
        drop_last: an epoch's short last global batch is left out.

    Raises:
        ValueError: there would be no step.
    """
    global_batch = per_device * accumulation * reference_workers
    if samples is None:
        if max_steps <= 0:
            raise ValueError(
                "train_dataset does not say how many samples it has, so the number of steps is not known: "
                "give TrainingArguments(max_steps=...)"
            )
        return Schedule(global_batch, max_steps, max_steps, _ENDLESS)
    steps = samples // global_batch if drop_last else -(-samples // global_batch)
    if not steps:
        raise ValueError(
            f"the data set has {samples} samples, and the global batch {global_batch}: with "
            "dataloader_drop_last there is no step in an epoch"
        )
    if max_steps <= 0:
        max_steps = math.ceil(num_epochs * steps)
    return Schedule(global_batch, steps, max_steps, -(-max_steps // steps))
