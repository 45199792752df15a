"""`ElasticAccelerator`: a script's own loop with Accelerate, in a job whose workers come and go.

[Note: steps] A step of ours is one global batch. A prepared loader deals its micro-batches; the
`accumulate()` block of the first one opens the step, that of the last one commits it. If it is dropped, the
block is left, `sync_gradients` is False behind it, and the loader deals the samples anew.

[Note: workers that join] They run the script from its beginning. Loops that the job is past give them one
batch, whose step commits nothing. Behind such a loop they are *behind*: evaluations give one batch, nothing
is saved or logged, and what the script's objects make of it is undone before the next loop. Where the others
are between the same two loops, a joiner does what they do.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import send_to_device
from torch.utils.data import DataLoader

import springtide
from springtide import api
from springtide.errors import UsageError
from springtide.integrations.accelerate.arguments import refusals
from springtide.integrations.accelerate.carried import Progress, Unmoved
from springtide.integrations.accelerate.loader import ElasticLoader, TrainingSteps
from springtide.integrations.dataloader import (
    TrainingData,
    check_shuffle_buffer,
    order_options,
    read_loader,
    smallest_part,
)
from springtide.integrations.together import (
    check_count,
    impossible_settings,
    in_training,
    once,
    own_rank,
    steps_elsewhere,
    the_runtime,
)
from springtide.integrations.transformers.alone import hide_local_rank, show_rank

log = logging.getLogger(__name__)
hide_local_rank(os.environ)  # before an Accelerator is made, which would form a group of its own


class ElasticAccelerator(Accelerator):
    """Do as `accelerate.Accelerator` does, in a job whose workers come and go.

    The global batch is batch_size x gradient_accumulation_steps x reference_workers samples, whatever the
    number of workers, and so are the length of a prepared loader and the schedule.
    """

    def __init__(
        self,
        *arguments: Any,
        reference_workers: int = 1,
        max_train_steps: int | None = None,
        clip_norm: float | None = None,
        seed: int = 0,
        shuffle_buffer: int = 0,
        **named: Any,
    ) -> None:
        """Make it with the arguments of `accelerate.Accelerator`; call `springtide.init()` if nobody has.

        Args:
            arguments: of the Accelerator.
            reference_workers: number of processes for which the batch size and the learning rate were chosen:
                what `accelerate launch --num_processes` was. It is not the number of the job's workers.
            max_train_steps: steps of the whole run, where the script leaves its loop after so many.
            clip_norm: norm to which the library clips the gradients, with parameter servers or shards, where
                `clip_grad_norm_()` cannot.
            seed: of the samples' order and of random numbers in a step.
            shuffle_buffer: of a stream: samples that are mixed at a time, over all workers; 0: they come in
                the order of their shards.
            named: of the Accelerator.

        Raises:
            UsageError: an argument cannot be in an elastic job; each of them is named.
            ValueError: a number is out of its range.
        """
        check_count("ElasticAccelerator", "reference_workers", reference_workers)
        check_shuffle_buffer("ElasticAccelerator", shuffle_buffer)
        if max_train_steps is not None:
            check_count("ElasticAccelerator", "max_train_steps", max_train_steps)
        bound = inspect.signature(Accelerator.__init__).bind_partial(self, *arguments, **named).arguments
        given = {name: value for name, value in bound.items() if name != "self"}
        _refuse(refusals(given))
        if api.active_runtime is None:
            springtide.init()
        super().__init__(*arguments, **named)
        _refuse([*refusals({"mixed_precision": self.mixed_precision}), *impossible_settings("scripts")])
        self.reference_workers, self._shuffle_buffer = reference_workers, shuffle_buffer
        self._max_train_steps, self._clip_norm, self._seed = max_train_steps, clip_norm, seed
        settings = the_runtime().settings
        if self.device.type == "cuda" and settings.local_world_size > 1:
            own = torch.device("cuda", settings.local_rank)
            torch.cuda.set_device(own)
            PartialState().device = self.state.device = own
        # Prepared schedulers step once for each process that the script was written for.
        AcceleratorState._shared_state["num_processes"] = self.state.num_processes = reference_workers
        self._optimizers: list[Any]
        self._progress = Progress(the_runtime().evaluations)
        self._tracked: dict[str, Any] = {}
        self._distributed = False
        self._index = 0
        """Training loops that this process has begun."""
        self._steps: TrainingSteps | None = None
        self._step: springtide.step | None = None
        self._before = 0
        self._behind: Unmoved | None = None
        self._waiting_trackers: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._show_rank()

    # ---- who this process is

    def _show_rank(self, rank: int | None = None) -> None:
        """Tell accelerate who writes and logs: rank 0, which another process may be now.

        Args:
            rank: to show in the place of its own.
        """
        if rank is None:
            rank = own_rank() if self._behind is None else 1
        show_rank(rank)
        self.state.process_index = self.state.local_process_index = rank

    @property
    def step_values(self) -> dict[str, float]:
        """Return the means over all workers of what was reported in the newest step: `loss`, and values of
        `springtide.report()`."""
        return dict(the_runtime().steps.committed_values)

    @property
    def completed_steps(self) -> int:
        """Return the committed steps of the job, whenever this process came."""
        return the_runtime().position.cursor.step

    # ---- preparing

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Bring a model to the device, under autocast if that is asked for; the library sums gradients.

        Args:
            model: of the script.
            device_placement: whether it is brought there.
            evaluation_mode: unused.
        """
        self._check_early("prepare()")
        prepared: torch.nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepared

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Return a loader whose samples are dealt to the workers.

        Args:
            data_loader: of the script.
            device_placement: whether samples are brought to the device; None: as the accelerator does.
            slice_fn_for_dispatch: unused.

        Raises:
            UsageError: its samples cannot be dealt.
        """
        if isinstance(data_loader, ElasticLoader):
            return data_loader
        data = read_loader(data_loader, "ElasticAccelerator.prepare()")
        at_once, size = data.batch_size * self.reference_workers, data.samples
        length = None
        if size is not None:
            length = size // at_once if data.drop_last else -(-size // at_once)
        placed = self.device_placement if device_placement is None else device_placement
        return ElasticLoader(data_loader, length, lambda loader: self._begin_loop(loader, data, placed))

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Wrap an optimizer as Accelerate does.

        Args:
            optimizer: of the script.
            device_placement: as in Accelerate.
        """
        self._check_early("prepare()")
        prepared: torch.optim.Optimizer = super().prepare_optimizer(optimizer, device_placement)
        return prepared

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Make objects a part of the job's state: workers that join have them, and so have restored jobs.

        Args:
            objects: with state_dict and load_state_dict.
        """
        self._check_early("register_for_checkpointing()")
        super().register_for_checkpointing(*objects)

    def _check_early(self, call: str) -> None:
        if self._distributed:
            raise UsageError(f"{call} after the first training loop has begun: call it before")

    def _distribute(self) -> None:
        """Give models, optimizer, schedulers and registered objects to the library."""
        self._distributed = True
        models, optimizers = self._models, [item.optimizer for item in self._optimizers]
        if not models or len(optimizers) != 1:
            raise UsageError(
                f"ElasticAccelerator: prepare() was given {len(models)} models and {len(optimizers)} "
                "optimizers: give it the model, or all of them, and one optimizer; several are for a loop "
                "over springtide.batches()"
            )
        schedulers = {f"scheduler_{n}": item.scheduler for n, item in enumerate(self._schedulers)}
        self._tracked = schedulers | {f"registered_{n}": item for n, item in enumerate(self._custom_objects)}
        springtide.distribute(
            models[0] if len(models) == 1 else list(models),
            optimizers[0],
            clip_norm=self._clip_norm,
            **self._tracked,
            progress=self._progress,
        )
        if self._max_train_steps is not None:
            springtide.set_total_steps(self._max_train_steps)

    # ---- loops

    def _begin_loop(self, loader: ElasticLoader, data: TrainingData, placed: bool) -> Iterator[Any]:
        """Begin a loop over a prepared loader: of training, if a prepared model is in training mode."""
        self._finish_loop()
        place = (lambda value: send_to_device(value, self.device)) if placed else (lambda value: value)
        trains = torch.is_grad_enabled() and any(model.training for model in self._models)
        if not trains or not self._optimizers:
            return self._evaluate(loader.loader, place)
        return self._train(data, place)

    def _evaluate(self, loader: DataLoader[Any], place: Callable[[Any], Any]) -> Iterator[Any]:
        """Yield all samples: each worker evaluates by itself, for its metrics would be lost with it."""
        for batch in loader:
            yield place(batch)
            if self._behind is not None:
                return

    def _train(self, data: TrainingData, place: Callable[[Any], Any]) -> Iterator[Any]:
        """Yield micro-batches until the loop has ended for all workers."""
        if not self._distributed:
            self._distribute()
        if self._behind is not None:
            self._behind.put_back()
            self._behind = None
        self._index += 1
        progress = self._progress
        progress.opened, progress.is_left = max(progress.opened, self._index), False
        batches = springtide.batches(
            data.dataset,
            batch_size=data.batch_size * self.gradient_accumulation_steps * self.reference_workers,
            micro_batch=data.batch_size,
            min_part=smallest_part(self._models, data.batch_size),
            seed=self._seed * 1_000_003 + self._index,  # each epoch has an order of its own
            collate_fn=data.collate_fn,
            loader_workers=data.loader_workers,
            until=self._is_over,
            **order_options(data, self._shuffle_buffer, "ElasticAccelerator"),
        )
        steps = self._steps = TrainingSteps(batches, data, self._seed, place, self._begin_batch, self._leave)
        for inputs in steps:
            yield inputs
            if self._step is None and steps.is_waiting:
                raise UsageError(
                    "a micro-batch was not trained: put the code of the training loop into `with "
                    "accelerator.accumulate(model):`; before an evaluation call model.eval()"
                )
        self._end_loop(steps)

    def _end_loop(self, steps: TrainingSteps) -> None:
        self._steps = None
        self.gradient_state._set_sync_gradients(True)
        # One that is no member yet knows nothing of the job's progress, but that it is past this loop.
        is_past = the_runtime().catching_up.is_outside or self._progress.opened > self._index
        if not steps.any_dealt and is_past:
            own = [item.optimizer for item in self._optimizers]
            self._behind = Unmoved(self._tracked, own)
        self._show_rank()

    def _is_over(self) -> bool:
        """Return whether the loop ends here; alike in all workers that hold the same state."""
        most = self._max_train_steps
        return self._progress.is_left or (most is not None and self.completed_steps >= most)

    def _begin_batch(self) -> int:
        self._show_rank()
        return self.completed_steps

    def _finish_loop(self) -> None:
        """End a loop that the script has left by `break`, as all workers do at the same step."""
        steps = self._steps
        if steps is None:
            return
        if self._step is not None:
            raise UsageError(
                "the training loop was left in the middle of a step: leave it where "
                "accelerator.sync_gradients is True"
            )
        self._progress.is_left = True
        if not steps.finish():
            raise UsageError(
                "the training loop was left by `break`, and goes on in other workers: decide by what all "
                "have alike (accelerator.completed_steps, registered objects), or give max_train_steps"
            )
        self._end_loop(steps)

    # ---- the step

    @contextlib.contextmanager
    def accumulate(self, *models: torch.nn.Module) -> Iterator[None]:
        """Hold the code of one micro-batch; the last one's block commits the step of all workers.

        Behind it, `sync_gradients` says whether a step was committed.

        Args:
            models: unused.

        Raises:
            UsageError: it is outside of a loop over a prepared DataLoader.
        """
        steps = self._steps
        if steps is None:
            raise UsageError(
                "accumulate() outside of a training loop: iterate over a DataLoader that was prepared, with "
                "the model in training mode (model.train())"
            )
        if self._step is None:
            self._before = self.completed_steps
            self._step = springtide.step()
            self._step.__enter__()
        steps.is_waiting = False
        self.gradient_state._set_sync_gradients(steps.is_last)
        try:
            yield
        except BaseException as error:
            if not self._leave(error):
                raise
            return
        if self._step is not None and steps.is_last:
            self._leave(None)

    def _leave(self, error: BaseException | None) -> bool:
        """Leave the open step; return whether the error is swallowed, since the step is done again."""
        step, self._step = self._step, None
        if step is None:
            return False
        if self._steps is not None:
            self._steps.leave_batch()
        self.gradient_state._set_sync_gradients(False)
        trace = None if error is None else error.__traceback__
        swallowed = bool(step.__exit__(None if error is None else type(error), error, trace))
        self.gradient_state._set_sync_gradients(self.completed_steps > self._before)
        return swallowed

    def _check_step(self, call: str) -> None:
        if self._step is None:
            raise UsageError(f"{call} outside of `with accelerator.accumulate(model):`")

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of the mean loss of a micro-batch; the library weighs and sums them.

        Args:
            loss: of the micro-batch.
            kwargs: of `Tensor.backward`.
        """
        self._check_step("backward()")
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        springtide.report(loss=loss.detach())

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip the gradients of all workers, and return their norm before.

        Args:
            parameters: whose gradients are clipped.
            max_norm: to which.
            norm_type: of the norm.

        Returns:
            The norm; 0 in a micro-batch that is not the last one of its step.

        Raises:
            UsageError: gradients are not in one place.
        """
        if not self._summed("clip_grad_norm_()"):
            return torch.zeros(())
        return torch.nn.utils.clip_grad_norm_(list(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip the values of the gradients of all workers.

        Args:
            parameters: whose gradients are clipped.
            clip_value: to which.

        Raises:
            UsageError: gradients are not in one place.
        """
        if self._summed("clip_grad_value_()"):
            torch.nn.utils.clip_grad_value_(list(parameters), clip_value)

    def _summed(self, call: str) -> bool:
        """Wait for the sums of gradients; return False where more micro-batches come."""
        self._check_step(call)
        if steps_elsewhere():
            raise UsageError(
                f"{call}: with parameter servers or shards gradients are not in one place: give "
                "ElasticAccelerator(clip_norm=...), and leave it out"
            )
        if self._steps is None or not self._steps.is_last:
            return False
        trainer = the_runtime().trainer
        assert trainer is not None
        trainer.sum_gradients(call)
        return True

    def no_sync(self, model: torch.nn.Module) -> Any:
        """Raise UsageError: micro-batches are those of `accumulate()`."""
        raise UsageError(
            "no_sync(): use `with accelerator.accumulate(model):`, which knows the last micro-batch"
        )

    # ---- what processes tell each other

    def _outside(self, call: str) -> None:
        if the_runtime().trainers.in_body:
            raise UsageError(
                f"{call} in a training step: the number of workers changes, and a step may run again. The "
                "mean loss is accelerator.step_values['loss'] behind the step, and so are values of "
                "springtide.report()"
            )

    def gather(self, tensor: Any) -> Any:
        """Return the value: outside of steps each worker has all samples. Raise UsageError in a step."""
        self._outside("gather()")
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the value: in an evaluation each worker has all samples.

        Args:
            input_data: of this worker.
            use_gather_object: unused.

        Raises:
            UsageError: it is called in a step.
        """
        self._outside("gather_for_metrics()")
        return input_data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the value: outside of steps each worker has all samples.

        Args:
            tensor: of this worker.
            reduction: unused.
            scale: unused.

        Raises:
            UsageError: it is called in a step.
        """
        self._outside("reduce()")
        return tensor

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Return the value: there is nothing to fit.

        Args:
            tensor: of this worker.
            dim: unused.
            pad_index: unused.
            pad_first: unused.
        """
        self._outside("pad_across_processes()")
        return tensor

    def set_trigger(self) -> None:
        """Raise UsageError: one worker's flag does not end the others' loops."""
        raise UsageError(
            "set_trigger(): decide by what all workers have alike: accelerator.step_values, metrics of an "
            "evaluation, registered objects"
        )

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Any:
        """Raise UsageError: workers come and go.

        Args:
            inputs: of the script.
            apply_padding: unused.
        """
        raise UsageError("split_between_processes(): workers come and go: use a prepared DataLoader")

    def wait_for_everyone(self) -> None:
        """End a loop that was left; nobody waits for a worker that may be lost."""
        self._finish_loop()

    # ---- files and trackers

    def save_state(self, output_dir: str | None = None, **named: Any) -> Any:
        """Write models, optimizer and schedulers into a folder: one worker does, the others wait for it.

        Args:
            output_dir: on a volume that all workers mount.
            named: of `Accelerator.save_state`.
        """
        self.project_configuration.iteration = self._progress.saves
        optimizers = self._optimizers
        trainer = the_runtime().trainer
        if trainer is not None and (trainer.shards is not None or trainer.servers is not None):
            self._optimizers = []  # workers or servers have parts of it
        try:
            self._once(lambda: super(ElasticAccelerator, self).save_state(output_dir, **named))
        finally:
            self._optimizers = optimizers
        if self._behind is None:
            self._progress.saves += 1
        return output_dir

    def save_model(self, model: torch.nn.Module, save_directory: Any, *args: Any, **named: Any) -> None:
        """Write a model's weights: one worker does, the others wait for it.

        Args:
            model: of the script.
            save_directory: on a volume that all workers mount.
            args: of `Accelerator.save_model`.
            named: of it.
        """
        self._once(lambda: super(ElasticAccelerator, self).save_model(model, save_directory, *args, **named))

    def _once(self, work: Callable[[], object]) -> None:
        self._finish_loop()
        if self._behind is not None:
            return
        if not in_training():
            if self.is_main_process:
                work()
            return
        once(work, self._show_rank)

    def load_state(self, input_dir: str | None = None, **named: Any) -> None:
        """Do nothing where the job has checkpoints, from which it goes on by itself.

        Args:
            input_dir: of a state that was saved.
            named: of `Accelerator.load_state`.

        Raises:
            UsageError: the job has no checkpoints.
        """
        if not the_runtime().saver.checkpoints.able:
            raise UsageError(
                f"load_state({input_dir!r}): the position in the data would be another one. Set "
                "spec.checkpoint in the manifest: a job goes on from its own newest checkpoint by itself; to "
                "begin from weights alone, load them before prepare()"
            )
        log.info("the job's own checkpoints count, not load_state(%r)", input_dir)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the loader: a job goes on where it was by itself.

        Args:
            dataloader: prepared.
            num_batches: unused.
        """
        return dataloader

    def unwrap_model(self, model: torch.nn.Module, *args: Any, **named: Any) -> torch.nn.Module:
        """Return the script's model.

        Args:
            model: prepared.
            args: of `Accelerator.unwrap_model`.
            named: of it.
        """
        self._finish_loop()
        found: torch.nn.Module = super().unwrap_model(model, *args, **named)
        return found

    def init_trackers(self, *args: Any, **named: Any) -> None:
        """Begin trackers in the process that logs, when it does so for the first time.

        Args:
            args: of `Accelerator.init_trackers`.
            named: of it.
        """
        self._waiting_trackers = args, named
        if the_runtime().settings.alone:
            self._begin_trackers()

    def _begin_trackers(self) -> None:
        if self._waiting_trackers is not None:
            args, named = self._waiting_trackers
            self._waiting_trackers = None
            super().init_trackers(*args, **named)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Give values to the trackers, on rank 0.

        Args:
            values: by name.
            step: of the job; `completed_steps` counts it in all workers alike.
            log_kwargs: of `Accelerator.log`.
        """
        if self.is_main_process:
            self._begin_trackers()
            super().log(values, step=step, log_kwargs=log_kwargs or {})

    def end_training(self) -> None:
        """End a loop that was left, and the trackers."""
        self._finish_loop()
        super().end_training()


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UsageError("ElasticAccelerator(): " + "; ".join(problems))
