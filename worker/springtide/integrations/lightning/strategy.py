"""`SpringtideStrategy`: Lightning's Trainer in a job whose workers come and go.

A strategy has no hold on the loop. So its launcher, through which Trainer calls all its entry points, puts
`ElasticFitLoop` in the place of the Trainer's loop before the first one begins; see `loops`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import springtide
from springtide import api
from springtide.errors import UsageError
from springtide.integrations.dataloader import check_shuffle_buffer
from springtide.integrations.lightning.arguments import CALLBACKS, HOOKS, refusals
from springtide.integrations.lightning.files import use_one_version
from springtide.integrations.lightning.loops import ElasticEvaluationLoop, ElasticFitLoop
from springtide.integrations.together import (
    agreed,
    check_count,
    impossible_settings,
    in_training,
    once,
    own_rank,
    runs_loops,
    steps_elsewhere,
    the_runtime,
)

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import _PATH

log = logging.getLogger(__name__)


class SpringtideStrategy(Strategy):
    """Train a LightningModule in a job, or alone in this process.

    The global batch is batch_size x accumulate_grad_batches x reference_workers samples, whatever the number
    of workers, and so are schedules, the number of steps, and what is counted.
    """

    strategy_name = "springtide"

    def __init__(
        self, reference_workers: int = 1, seed: int | None = None, shuffle_buffer: int = 0, **named: Any
    ) -> None:
        """Make it; call `springtide.init()` if nobody has.

        Args:
            reference_workers: number of processes for which the batch size and the learning rate were chosen:
                devices x num_nodes of the Trainer that there was. It is not the number of workers that the
                job has.
            seed: of the samples' order and of random numbers in a step; None: that of `seed_everything`, or
                0. The same on all workers.
            shuffle_buffer: of a stream: samples that are mixed at a time, over all workers; 0: they come in
                the order of their shards.
            named: `accelerator`, `checkpoint_io` and `precision_plugin`, as Lightning's strategies have them.

        Raises:
            ValueError: an argument is out of its range.
        """
        check_count("SpringtideStrategy", "reference_workers", reference_workers)
        check_shuffle_buffer("SpringtideStrategy", shuffle_buffer)
        super().__init__(**named)
        self.reference_workers, self.shuffle_buffer = reference_workers, shuffle_buffer
        self._seed = seed
        self._layer_sync: TorchSyncBatchNorm | None = None
        self._fitted = False
        self._rank: int | None = None
        self._clips: dict[int, tuple[Any, Any]] = {}
        if api.active_runtime is None:
            springtide.init()
        runs_loops()
        self.show_rank()

    # ---- who this process is

    @property
    def seed(self) -> int:
        """Return the seed of the order and of random numbers in a step."""
        return int(os.environ.get("PL_GLOBAL_SEED") or 0) if self._seed is None else self._seed

    @property
    def root_device(self) -> torch.device:
        """Return the device of this process."""
        if isinstance(self.accelerator, CUDAAccelerator):
            return torch.device("cuda", the_runtime().settings.local_rank)
        return torch.device("cpu")

    @property
    def local_rank(self) -> int:
        """Return the number of this process in its pod, which says who prepares data there."""
        return the_runtime().settings.local_rank

    @property
    def global_rank(self) -> int:
        """Return the number of this process among the members; not 0 before it is one, in a job."""
        return 0 if self._rank is None else self._rank

    @property
    def is_global_zero(self) -> bool:
        """Return whether this process writes and logs."""
        return self.global_rank == 0

    def show_rank(self, rank: int | None = None) -> None:
        """Take up the rank that this process has now, which says who writes and logs.

        Args:
            rank: to show in the place of its own.
        """
        if rank is None:
            rank = own_rank()
        self._rank = rank
        rank_zero_only.rank = rank

    # ---- the training

    def _configure_launcher(self) -> None:
        self._launcher = ElasticLauncher(self)

    def setup(self, trainer: pl.Trainer) -> None:
        """Put the model on its device, and make the optimizers. Raise UsageError for those that cannot be."""
        if self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.lightning_module)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            _refuse(_impossible_optimizers(trainer))

    def model_to_device(self) -> None:
        """Move the model."""
        assert self.model is not None
        self.model.to(self.root_device)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Step an optimizer, after its closure has computed the gradients.

        Args:
            optimizer: of the script.
            closure: computes loss and gradients; Lightning's own that does nothing, in manual optimization.
            model: unused.
            kwargs: of `optimizer.step`.

        Returns:
            The closure's result.
        """
        if closure is do_nothing_closure:
            return optimizer.step(**kwargs)
        if isinstance(optimizer, torch.optim.LBFGS):
            return optimizer.step(closure, **kwargs)  # type: ignore[no-untyped-call]
        found = closure()
        optimizer.step(**kwargs)
        return found

    def clip_norm(self, trainer: pl.Trainer) -> float | None:
        """Return the norm to which the library clips gradients; None where Lightning's code does."""
        value = trainer.gradient_clip_val
        return float(value) if value and not _clips_itself(trainer) else None

    def before_step(self, trainer: pl.Trainer, optimizer: torch.optim.Optimizer) -> None:
        """Call the hooks before an optimizer's step, whose gradients are those of all workers.

        Args:
            trainer: whose hooks they are.
            optimizer: that steps.
        """
        if (clip := self._clips.pop(id(optimizer), None)) is not None:
            self.precision_plugin.clip_gradients(optimizer, *clip)
        call._call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
        call._call_lightning_module_hook(trainer, "on_before_optimizer_step", optimizer)
        if _clips_itself(trainer):
            self.precision_plugin._clip_gradients(
                trainer.lightning_module,
                optimizer,
                trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            )

    def clip_later(self, optimizer: Any, value: Any, algorithm: Any) -> None:
        """Keep a manual `clip_gradients()` for the optimizer's step, where gradients are summed.

        Args:
            optimizer: of the script, or Lightning's around it.
            value: to which gradients are clipped.
            algorithm: "norm" or "value".
        """
        self._clips[id(getattr(optimizer, "optimizer", optimizer))] = (value, algorithm)

    # ---- what strategies of several processes do

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the value itself: what is logged is over all workers' samples already.

        Args:
            tensor: the value.
            group: unused.
            reduce_op: unused.
        """
        return tensor

    def barrier(self, name: str | None = None) -> None:
        """Do nothing: nobody waits for a worker that may be lost."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return a number as one of the workers has it; anything else is the same on all of them.

        Args:
            obj: the number.
            src: unused.
        """
        if in_training() and isinstance(obj, bool | int | float):
            return type(obj)(agreed({"broadcast": float(obj)})["broadcast"])
        return obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return the decision of one of the workers.

        Args:
            decision: this one's.
            all: unused.
        """
        return bool(self.broadcast(bool(decision)))

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensor: in evaluations each worker has all samples.

        Args:
            tensor: of this worker.
            group: unused.
            sync_grads: unused.

        Raises:
            UsageError: it is called in a step.
        """
        if the_runtime().trainers.in_body:
            raise UsageError(
                "all_gather() in a training step: the number of workers changes, and a step may run again. "
                "Log means (self.log), which are over all workers"
            )
        return tensor

    # ---- files

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any = None
    ) -> None:
        """Write a checkpoint: one worker does, and the others wait for it.

        Args:
            checkpoint: what Lightning puts in.
            filepath: on a volume that all workers mount.
            storage_options: of the checkpoint plugin.
        """
        self._once(
            lambda: self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        )

    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Remove a checkpoint, as `save_checkpoint` writes one."""
        self._once(lambda: self.checkpoint_io.remove_checkpoint(filepath))

    def _once(self, work: Callable[[], object]) -> None:
        if not in_training():
            if self.is_global_zero:
                work()
            return
        once(work, self.show_rank)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the optimizer's state for a checkpoint; none where workers or servers have parts of it."""
        trainer = the_runtime().trainer
        if trainer is not None and (trainer.shards is not None or trainer.servers is not None):
            return {}
        found: dict[str, Any] = super().optimizer_state(optimizer)
        return found

    def teardown(self) -> None:
        """End without moving the model to the CPU, where the library would not find it."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ---- before training

    def prepare(self, trainer: pl.Trainer, ckpt_path: Any) -> None:
        """Put the elastic loops in the place of the Trainer's, before its first entry point runs.

        Args:
            trainer: of this strategy.
            ckpt_path: argument of `fit`.

        Raises:
            UsageError: something cannot be in an elastic job; each of it is named.
        """
        self.show_rank()
        if not isinstance(trainer.validate_loop, ElasticEvaluationLoop):
            for name in ("validate", "test"):
                before = getattr(trainer, f"{name}_loop")
                loop = ElasticEvaluationLoop(
                    trainer, before._trainer_fn, before._stage, before.verbose, before.inference_mode
                )
                setattr(trainer, f"{name}_loop", loop)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self._fitted or the_runtime().trainer is not None:
            raise UsageError(
                "Trainer.fit() was called already: a job trains one model once. Put further training into "
                "another job, or raise max_epochs"
            )
        _refuse(_impossible(trainer))
        if ckpt_path and not the_runtime().saver.checkpoints.able:
            raise UsageError(
                f"Trainer.fit(ckpt_path={ckpt_path!r}): its counts and position are those of another run. "
                "Set spec.checkpoint in the manifest: a job goes on from its own newest checkpoint by "
                "itself; to begin from weights alone, use load_from_checkpoint()"
            )
        if ckpt_path:
            log.info("the job's own checkpoints count, not ckpt_path=%r", ckpt_path)
        self._fitted = True
        settings = the_runtime().settings
        if not settings.alone:
            use_one_version(trainer, settings.checkpoint.folder or settings.job)
        trainer.fit_loop = ElasticFitLoop(trainer, self)
        if not trainer.lightning_module.automatic_optimization:
            vars(trainer.lightning_module)["clip_gradients"] = self.clip_later_for

    def clip_later_for(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Stand in for a LightningModule's `clip_gradients` in manual optimization.

        Args:
            optimizer: as the script has it.
            gradient_clip_val: to which gradients are clipped.
            gradient_clip_algorithm: "norm", unless it is "value".
        """
        if gradient_clip_val:
            self.clip_later(optimizer, gradient_clip_val, gradient_clip_algorithm or "norm")


class ElasticLauncher(_Launcher):
    """Run an entry point of a Trainer in this process, after its loops are the elastic ones."""

    def __init__(self, strategy: SpringtideStrategy) -> None:
        """Make it for one strategy."""
        self._strategy = strategy

    @property
    def is_interactive_compatible(self) -> bool:
        """Return whether it runs in a notebook: there is no other process."""
        return True

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Run `function`.

        Args:
            function: one of the Trainer's own, `_fit_impl` or another.
            args: of it. The fifth of `_fit_impl` is ckpt_path: a job goes on from its own checkpoints.
            trainer: whose entry point it is.
            kwargs: of it.

        Returns:
            The result of `function`.
        """
        assert trainer is not None
        if trainer.state.fn == TrainerFn.FITTING:
            model, train, val, datamodule, ckpt_path, *rest = args
            self._strategy.prepare(trainer, ckpt_path)
            return function(model, train, val, datamodule, None, *rest, **kwargs)
        self._strategy.prepare(trainer, None)
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Do nothing: there is no other process."""


def _refuse(problems: list[str]) -> None:
    if problems:
        raise UsageError("SpringtideStrategy: " + "; ".join(problems))


def _clips_itself(trainer: pl.Trainer) -> bool:
    """Return whether gradients are clipped by Lightning's own code, in the hook before the step."""
    return trainer.lightning_module.automatic_optimization and not steps_elsewhere()


def _clips_by_norm(trainer: pl.Trainer) -> bool:
    """Return whether the library can clip gradients in Lightning's place."""
    by_value = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm == "value"
    return not (by_value or is_overridden("configure_gradient_clipping", trainer.lightning_module))


def _impossible(trainer: pl.Trainer) -> list[str]:
    """Return a sentence for each thing that cannot be in an elastic job."""
    module = trainer.lightning_module
    kinds = {CPUAccelerator: "cpu", CUDAAccelerator: "cuda"}
    problems = refusals(
        {
            "accelerator": kinds.get(type(trainer.accelerator), type(trainer.accelerator).__name__),
            "precision": str(trainer.precision),
            "max_time": any(_is_a(callback, "Timer") for callback in trainer.callbacks),
            "overfit_batches": trainer.overfit_batches,
            "reload_dataloaders_every_n_epochs": trainer.reload_dataloaders_every_n_epochs,
            "model_registry": trainer._model_registry,
        }
    )
    if trainer._val_check_time_interval is not None:
        problems.append(
            "Trainer(val_check_interval=...) by time: each worker has a clock of its own; give a number of "
            "batches"
        )
    problems += [
        f"callback {type(callback).__name__}: {why}"
        for callback in trainer.callbacks
        for name, why in CALLBACKS.items()
        if name != "Timer" and _is_a(callback, name)
    ]
    problems += [
        f"callback {type(callback).__name__} has {hook}(): the number of micro-batches is that of the "
        "worker's part, and a step may run again; use on_before_optimizer_step() or on_train_batch_end()"
        for callback in trainer.callbacks
        for hook in HOOKS
        if getattr(type(callback), hook) is not getattr(Callback, hook)
    ]
    if is_overridden("on_after_backward", module):
        problems.append(
            f"{type(module).__name__}.on_after_backward(): gradients are not summed there; use "
            "on_before_optimizer_step(), where they are those of all workers"
        )
    problems += impossible_settings("logs and callbacks")
    automatic = module.automatic_optimization
    if steps_elsewhere() and automatic and not _clips_by_norm(trainer):
        problems.append(
            "gradients are clipped by the module or by value: with parameter servers or shards they are not "
            "in one place; use gradient_clip_val with the algorithm norm"
        )
    if the_runtime().settings.logical_workers and not automatic:
        problems.append("manual optimization in exact mode was not tried: use automatic optimization")
    return problems


def _impossible_optimizers(trainer: pl.Trainer) -> list[str]:
    """Return a sentence for each optimizer or scheduler that cannot be."""
    problems = []
    if not trainer.optimizers or not all(hasattr(item, "param_groups") for item in trainer.optimizers):
        problems.append("configure_optimizers() gives no optimizer: a job trains a model")
    automatic = trainer.lightning_module.automatic_optimization
    if automatic and any(isinstance(item, torch.optim.LBFGS) for item in trainer.optimizers):
        problems.append(
            "LBFGS calls the closure several times for a step: use manual optimization, with "
            "optimizer.step(closure)"
        )
    return problems


def _is_a(callback: object, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(callback).__mro__)
