"""`ElasticTrainer`: Hugging Face's Trainer, whose training loop is a loop over `springtide.batches()`.

[Note: what is replaced] The loop alone, and saving and evaluating, which all workers do together. Batches,
losses, optimizer, schedule, logs and callbacks are the Trainer's own methods, so what a script overrides of
them counts. accelerate is left in the belief that this process is alone: the library sums the gradients.

[Note: where callbacks run] A step's body may run again, so nothing that a callback sees happens in it before
the sums are made. From there on the step cannot be dropped: `on_pre_optimizer_step` and `on_optimizer_step`
come there, with the summed gradients. All else comes after the commit, between two steps, where no state is
transferred or saved: so what callbacks decide is in the state before anybody else has it. It is the same on
all workers, since all values are (losses are means over the global batch, metrics are agreed on), and it
travels as `Progress`.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers import ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.optimization import GreedyLR
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import EvalLoopOutput, TrainOutput, rotate_checkpoints

import springtide
from springtide import api
from springtide.data.batch import Batch
from springtide.data.cursor import Cursor
from springtide.errors import UsageError
from springtide.integrations.dataloader import (
    TrainingData,
    as_stream,
    check_shuffle_buffer,
    has_numbers,
    length_of,
    order_options,
    refuse_drop_last,
    smallest_part,
    tell_reading,
)
from springtide.integrations.together import (
    agreed,
    check_count,
    impossible_settings,
    in_training,
    once,
    runs_loops,
    the_runtime,
)
from springtide.integrations.transformers.alone import hide_local_rank, show_rank, use_own_device
from springtide.integrations.transformers.arguments import Schedule, refusals, schedule
from springtide.integrations.transformers.carried import Progress

log = logging.getLogger(__name__)
hide_local_rank(os.environ)  # before TrainingArguments are made, which ask accelerate for the device

_BY_METRIC = (ReduceLROnPlateau, GreedyLR)
"""Schedulers that the Trainer steps after an evaluation."""


class ElasticTrainer(Trainer):
    """Train as `transformers.Trainer` does, in a job whose workers come and go.

    The global batch is per_device_train_batch_size x gradient_accumulation_steps x reference_workers samples,
    whatever the number of workers, and so are the learning-rate schedule and the number of steps. A worker
    computes per_device_train_batch_size samples at once, in as many micro-batches as its part needs.
    """

    # Of the Trainer.
    control: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool

    def __init__(
        self, *arguments: Any, reference_workers: int = 1, shuffle_buffer: int = 0, **named: Any
    ) -> None:
        """Make it with the arguments of `transformers.Trainer`; call `springtide.init()` if nobody has.

        Args:
            arguments: of the Trainer.
            reference_workers: number of processes for which the batch size and the learning rate were chosen:
                what `torchrun --nproc-per-node` (times nodes) was. It is not the number of workers that the
                job has.
            shuffle_buffer: of a stream: samples that are mixed at a time, over all workers; 0: they come in
                the order of their shards.
            named: of the Trainer.

        Raises:
            UsageError: an argument cannot be in an elastic job; each of them is named.
            ValueError: a number is out of its range.
        """
        check_count("ElasticTrainer", "reference_workers", reference_workers)
        check_shuffle_buffer("ElasticTrainer", shuffle_buffer)
        self.reference_workers, self._shuffle_buffer = reference_workers, shuffle_buffer
        if api.active_runtime is None:
            springtide.init()
        runs_loops()
        self._trained = False
        self._learning_rate: float | None = None
        self._tr_loss = torch.zeros((), dtype=torch.float64)  # sum of losses since the last log
        self._total_loss_scalar = 0.0
        self._globalstep_last_logged = 0
        super().__init__(*arguments, **named)
        self._progress = Progress(self, the_runtime().evaluations)
        _refuse(_impossible(self))
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(_ProgressBar)

    def create_accelerator_and_postprocess(self) -> None:
        """Make accelerate's part for arguments that can be. Raise UsageError for those that cannot."""
        _refuse(refusals(self.args, TrainingArguments))
        use_own_device(self.args, the_runtime().settings)
        super().create_accelerator_and_postprocess()

    def add_callback(self, callback: Any) -> None:
        """Add a callback. Raise UsageError for one that counts micro-batches."""
        super().add_callback(callback)
        _refuse(_impossible_callbacks(self.callback_handler.callbacks))

    def hyperparameter_search(self, *arguments: Any, **named: Any) -> Any:
        """Raise UsageError: a job has one training run."""
        raise UsageError(
            "ElasticTrainer.hyperparameter_search(): a job has one training run, and all its workers take "
            "part in it: make a TrainingJob for each trial"
        )

    # ---- training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, and return when the last step is committed.

        Args:
            resume_from_checkpoint: a job goes on from its own newest checkpoint by itself; any true value
                says no more than that it shall have checkpoints.
            trial: None.
            ignore_keys_for_eval: keys of the model's output that evaluations leave out.

        Returns:
            The number of steps, the mean loss and the metrics of the whole job.

        Raises:
            UsageError: it was called before in this process, or the job has no checkpoints to resume from.
        """
        if trial is not None:
            self.hyperparameter_search()
        if self._trained or the_runtime().trainer is not None:
            raise UsageError(
                "ElasticTrainer.train() was called already: a job trains one model once. Put further "
                "training into another job, or raise num_train_epochs"
            )
        if resume_from_checkpoint and not the_runtime().saver.checkpoints.able:
            raise UsageError(
                f"train(resume_from_checkpoint={resume_from_checkpoint!r}): checkpoint-N folders have no "
                "optimizer state here. Set spec.checkpoint in the manifest: a job goes on from its own "
                "newest checkpoint by itself; to begin from weights alone, use from_pretrained()"
            )
        self._trained = True
        if resume_from_checkpoint:
            log.info("the job's own checkpoints count, not resume_from_checkpoint=%r", resume_from_checkpoint)
        output: TrainOutput = super().train(ignore_keys_for_eval=ignore_keys_for_eval)
        return output

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        loader, runtime = self.get_train_dataloader(), the_runtime()
        data = self._read_data(loader)
        counts = schedule(
            data.samples,
            per_device=self.args.per_device_train_batch_size,
            accumulation=self.args.gradient_accumulation_steps,
            reference_workers=self.reference_workers,
            max_steps=self.args.max_steps,
            num_epochs=self.args.num_train_epochs,
            drop_last=data.drop_last,
        )
        model = self._distribute(counts, loader)
        micro_batch = self.args.per_device_train_batch_size
        epoch_begun = step_begun = -1
        for batch in springtide.batches(
            data.dataset,
            batch_size=counts.global_batch,
            micro_batch=micro_batch,
            min_part=smallest_part([model], micro_batch),
            epochs=counts.epochs,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            collate_fn=data.collate_fn,
            loader_workers=data.loader_workers,
            until=lambda: self.control.should_training_stop,
            **order_options(data, self._shuffle_buffer, "ElasticTrainer"),
        ):
            self._show_rank()
            before = runtime.position.cursor
            if epoch_begun < 0:
                self._begin(ignore_keys_for_eval)
            if before.epoch != epoch_begun:
                epoch_begun = before.epoch
                self._event("on_epoch_begin")
            if before.step != step_begun:  # not again for a step that was dropped
                step_begun = before.step
                self._event("on_step_begin")
            self._step(model, batch)
            after = runtime.position.cursor
            if after.step > before.step:
                self._committed(
                    model, counts, before, ends_epoch=after.epoch != before.epoch, keys=ignore_keys_for_eval
                )
        self._show_rank()
        if epoch_begun < 0:  # it came when all was done
            self._begin(ignore_keys_for_eval)
        samples = counts.max_steps * counts.global_batch
        if self.args.max_steps <= 0 and data.samples is not None:
            samples = int(data.samples * self.args.num_train_epochs)
        output: TrainOutput = self._finalize_training(None, samples, self._began)
        return output

    def _read_data(self, loader: DataLoader[Any]) -> TrainingData:
        """Return what the library deals: the Trainer's data set and collator, in the wanted order."""
        dataset: Any = loader.dataset
        drop_last = self.args.dataloader_drop_last
        stream = as_stream(dataset, "ElasticTrainer.train(): train_dataset")
        if stream is not None:
            refuse_drop_last("ElasticTrainer.train(): train_dataset", drop_last=drop_last)
            tell_reading(stream)
        return TrainingData(
            dataset if stream is None else stream,
            self.args.per_device_train_batch_size,
            loader.collate_fn,
            self.args.train_sampling_strategy != "sequential",
            None,
            drop_last,
            self.args.dataloader_num_workers,
            length_of(dataset),
            stream is not None,
        )

    def _distribute(self, counts: Schedule, loader: DataLoader[Any]) -> torch.nn.Module:
        """Make optimizer and schedule, give them to the library, and return the model as it is called."""
        self.create_optimizer()
        model: torch.nn.Module = self.accelerator.prepare_model(self.model, evaluation_mode=True)  # autocast
        self.model_wrapped = model
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_scheduler(num_training_steps=counts.max_steps)
        self.state = TrainerState()
        self.state.compute_steps(self.args, counts.max_steps)
        self.state.init_training_references(self, counts.max_steps, counts.epochs, None)
        self.state.train_batch_size = self.args.per_device_train_batch_size
        # The whole job's, whenever this process came.
        self._initial_global_step = self._initial_num_input_tokens_seen = 0
        most = self.args.max_grad_norm
        springtide.distribute(
            self.model,
            self.optimizer,
            clip_norm=most if most and most > 0 else math.inf,  # for the norm, which is logged
            schedule=self.lr_scheduler,
            progress=self._progress,
        )
        springtide.set_total_steps(counts.max_steps)
        # Behind the library's own hook: gradients are summed and clipped, and the step is certain.
        self.optimizer.register_step_pre_hook(lambda *_: self._event("on_pre_optimizer_step"))
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader
        return model

    def _begin(self, ignore_keys_for_eval: list[str] | None) -> None:
        """Begin training in this process, which is a member and has the job's state."""
        self._event("on_train_begin")
        if self.args.eval_on_start and not self._progress.begun:
            self._evaluate(None, ignore_keys_for_eval, skip_scheduler=True)
        self._progress.begun = True

    def _step(self, model: torch.nn.Module, batch: Batch) -> None:
        """Run the body of one step, which may be dropped."""
        with springtide.step():
            for micro in batch.split():
                self._compute(model, micro)
            self.optimizer.step()
            self._event("on_optimizer_step")
            self._learning_rate = self._get_learning_rate()
            if not isinstance(self.lr_scheduler, _BY_METRIC):
                self.lr_scheduler.step()
            model.zero_grad()

    def _compute(self, model: torch.nn.Module, micro: Batch) -> None:
        """Compute the gradients of a micro-batch, which counts by its items (tokens, say) or its samples."""
        inputs, weight = micro.data, float(micro.samples)
        items = self._get_num_items_in_batch([inputs], self.args.device)
        if items is not None and self.loss_is_scaled_for_ga is not False:
            weight = float(items) if micro.samples else 0.0
            micro.weight(weight)
        flos, tokens = float(self.floating_point_ops(inputs)), self._count_tokens(inputs)
        self.current_gradient_accumulation_steps = 1  # the library makes the mean over micro-batches
        loss = self.training_step(model, inputs, items)
        # Means by weight; times the sum of all weights they are sums again.
        sums = {"flos": flos} if tokens is None else {"flos": flos, "input_tokens": float(tokens)}
        springtide.report(loss=loss, **{name: weight and value / weight for name, value in sums.items()})

    def _count_tokens(self, inputs: Any) -> int | None:
        """Return the input tokens of a micro-batch; None where they are not asked for."""
        if self.args.include_num_input_tokens_seen == "no":
            return None
        seen = self.state.num_input_tokens_seen
        self._track_num_input_tokens(inputs)
        counted: int = self.state.num_input_tokens_seen - seen
        self.state.num_input_tokens_seen = seen  # it counts when the step is committed
        return counted

    def _committed(
        self,
        model: torch.nn.Module,
        counts: Schedule,
        before: Cursor,
        *,
        ends_epoch: bool,
        keys: list[str] | None,
    ) -> None:
        """Count a committed step, and run what belongs behind it: callbacks, logs, evaluation, saving.

        Args:
            model: as it is called.
            counts: of the run.
            before: where the step began.
            ends_epoch: it was the last one of its epoch.
            keys: of the model's output that evaluations leave out.

        Raises:
            UsageError: a callback wants to leave the epoch.
        """
        runtime, state = the_runtime(), self.state
        assert runtime.trainer is not None
        values, weight = runtime.steps.committed_values, runtime.trainer.total_weight
        loss = values.get("loss", math.nan)
        if self.args.logging_nan_inf_filter and not math.isfinite(loss):
            loss = float(self._tr_loss) / (1 + state.global_step - self._globalstep_last_logged)
        self._tr_loss += loss
        state.total_flos += values.get("flos", 0.0) * weight
        state.num_input_tokens_seen += round(values.get("input_tokens", 0.0) * weight)
        state.global_step += 1
        done = before.position // counts.global_batch + 1
        state.epoch = before.epoch + done / counts.steps_per_epoch
        norm = runtime.trainer.gradient_norm

        def follow(event: str) -> None:
            self._event(event)
            self._maybe_log_save_evaluate(
                self._tr_loss,
                norm,
                model,
                None,
                before.epoch,
                keys,
                self._began,
                learning_rate=self._learning_rate,
            )

        follow("on_step_end")
        if self.control.should_epoch_stop and not self.control.should_training_stop:
            raise UsageError(
                "a callback has set control.should_epoch_stop: an epoch goes to its end here, for each of "
                "its samples counts once. Set control.should_training_stop, which ends the training"
            )
        if ends_epoch or self.control.should_training_stop:
            follow("on_epoch_end")

    @property
    def _began(self) -> float:
        """Unix seconds at which the job's first step began; now, before it is committed."""
        return the_runtime().position.began_unix or time.time()

    def _event(self, name: str) -> None:
        self.control = getattr(self.callback_handler, name)(self.args, self.state, self.control)

    def _show_rank(self, rank: int | None = None) -> None:
        """Tell the Trainer's parts who writes and logs: rank 0, which another process may be now.

        Args:
            rank: to show in the place of its own, while a work lasts.
        """
        if rank is not None:
            show_rank(rank)
            return
        show_rank(springtide.rank())
        self.state.is_world_process_zero = self.state.is_local_process_zero = springtide.rank() == 0

    # ---- evaluation

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate, with the same metrics on all workers.

        The workers share the samples out where the loss alone is wanted. Predictions are of all samples, so
        each worker makes all of them: what another one has made would be lost with it. Before training begins
        a worker evaluates by itself.

        Args:
            dataloader: of the samples.
            description: for the log.
            prediction_loss_only: whether predictions are not wanted; None: as the arguments say.
            ignore_keys: keys of the model's output that are left out.
            metric_key_prefix: of the metrics' names.

        Returns:
            Predictions, labels and metrics.
        """
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        shared = in_training() and prediction_loss_only and has_numbers(dataloader.dataset)
        if shared:
            return self._evaluate_together(dataloader, metric_key_prefix, ignore_keys)
        output: EvalLoopOutput = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        if in_training():
            output.metrics.update(_agreed(output.metrics))
        return output

    def _evaluate_together(
        self, dataloader: DataLoader[Any], prefix: str, ignore_keys: list[str] | None
    ) -> EvalLoopOutput:
        """Return the mean loss over samples that the workers share out."""
        dataset: Any = dataloader.dataset
        model = self.model_wrapped
        model.eval()
        self.callback_handler.eval_dataloader = dataloader
        evaluation = springtide.batches(
            dataset, batch_size=self.args.eval_batch_size, collate_fn=dataloader.collate_fn, train=False
        )
        for batch in evaluation:
            loss, _, _ = self.prediction_step(model, batch.data, True, ignore_keys=ignore_keys)
            number = math.nan if loss is None else float(loss)
            if loss is not None and (math.isfinite(number) or not self.args.logging_nan_inf_filter):
                springtide.report(**{f"{prefix}_loss": number})
            self._event("on_prediction_step")
        return EvalLoopOutput(None, None, evaluation.values, len(dataset))

    # ---- saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model in Hugging Face's format: one worker writes, and the others wait for it.

        If it is lost meanwhile, another one writes. Call it on all workers.

        Args:
            output_dir: folder, on a volume that all workers mount; None: the arguments' one.
            _internal_call: it is a part of another save.
        """
        if _internal_call or not in_training():
            super().save_model(output_dir, _internal_call)
            return
        once(lambda: super(ElasticTrainer, self).save_model(output_dir, _internal_call), self._show_rank)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write the folder `checkpoint-N` with the weights and the Trainer's state, whole or not at all."""
        runs = Path(self.args.output_dir)
        folder = runs / f"checkpoint-{self.state.global_step}"
        if self.state.best_global_step:
            self.state.best_model_checkpoint = str(runs / f"checkpoint-{self.state.best_global_step}")
        self._progress.show_callbacks()

        def save() -> None:
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            self.save_model(str(partial), _internal_call=True)
            self.state.save_to_json(str(partial / TRAINER_STATE_NAME))
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            rotate_checkpoints(
                output_dir=str(runs),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

        once(save, self._show_rank)


class _ProgressBar(ProgressCallback):
    """The Trainer's bar, for a rank 0 that was not always one."""

    training_bar: Any

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.is_world_process_zero and self.training_bar is None:
            self.on_train_begin(args, state, control, **named)
        super().on_step_end(args, state, control, **named)

    def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None


def _agreed(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers among the metrics as one of the workers has them."""
    numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
    return {name: type(metrics[name])(value) for name, value in agreed(numbers).items()}


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UsageError("ElasticTrainer(): " + "; ".join(problems))


def _impossible(trainer: ElasticTrainer) -> list[str]:
    """Return a sentence for each thing besides the arguments that cannot be in an elastic job."""
    kind = type(trainer)
    problems = [
        f"{kind.__name__}.{name}() is overridden, and samples are dealt by the library: give a data set in "
        "the wanted order and train_sampling_strategy='sequential'"
        for name in ("get_train_dataloader", "_get_train_sampler", "_get_dataloader")
        if getattr(kind, name) is not getattr(Trainer, name)
    ]
    if kind._inner_training_loop is not ElasticTrainer._inner_training_loop:
        problems.append(
            f"{kind.__name__}._inner_training_loop() is overridden: override training_step() instead"
        )
    problems += _impossible_data(trainer)
    problems += impossible_settings("logs and callbacks")
    if trainer.is_model_parallel:
        problems.append(
            "the model lies on several devices (device_map): a worker has one, leave device_map out"
        )
    return problems + _impossible_callbacks(trainer.callback_handler.callbacks)


def _impossible_data(trainer: ElasticTrainer) -> list[str]:
    """Return a sentence where samples of the training data cannot be accounted for."""
    if (dataset := trainer.train_dataset) is None:
        return []
    try:
        if as_stream(dataset, "train_dataset") is not None:
            refuse_drop_last("dataloader_drop_last=True", drop_last=trainer.args.dataloader_drop_last)
    except UsageError as error:
        return [str(error)]
    return []


def _impossible_callbacks(callbacks: list[TrainerCallback]) -> list[str]:
    return [
        f"callback {type(callback).__name__} has on_substep_end(): the number of micro-batches is that of "
        "the worker's part, and a step may run again; use on_step_end()"
        for callback in callbacks
        if type(callback).on_substep_end is not TrainerCallback.on_substep_end
    ]
