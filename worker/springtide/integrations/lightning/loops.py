"""Lightning's training loop over `springtide.batches()`, and its evaluation loops with agreed metrics.

[Note: what is replaced] The loop over a DataLoader, and the optimization of one batch: a step of ours is one
global batch, in as many micro-batches as the worker's part needs. Hooks, schedulers, validation, logs and
counters are Lightning's own methods, called as its loop calls them, so what a script overrides counts.

[Note: counters] Lightning counts batches of one process, `accumulate_grad_batches` of which make a step. Here
a step moves those counters by as many, whatever the worker computes; so `batch_idx`, `val_check_interval` and
progress are those of a run by plain Lightning with `reference_workers` processes.

[Note: where hooks run] A step's body may run again, and hooks of the forward and backward pass run in it as
often. `on_train_batch_start` comes before it, once for each step, so the first samples are read before it,
with random numbers of their own. `on_before_optimizer_step` comes where the gradients of all workers are
summed and the step is certain. All else comes after the commit, between two steps, where no state is
transferred or saved.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch.loggers.utilities import _log_hyperparams
from lightning.pytorch.loops import _EvaluationLoop, _FitLoop, _TrainingEpochLoop
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.utilities import _is_max_limit_reached
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader

import springtide
from springtide.data.batch import Batch
from springtide.errors import UsageError
from springtide.integrations.dataloader import TrainingData, order_options, read_loader, smallest_part
from springtide.integrations.lightning.arguments import Schedule, schedule
from springtide.integrations.lightning.carried import Progress
from springtide.integrations.lightning.files import keep_earlier_rows
from springtide.integrations.lightning.logged import StepLog, Sums
from springtide.integrations.lightning.metrics import Whole, as_buffers
from springtide.integrations.together import agreed, in_training, the_runtime
from springtide.train_step.randomness import isolated

if TYPE_CHECKING:
    import lightning.pytorch as pl


class Guide(Protocol):
    """The strategy, as far as the loops ask it.

    Attributes:
        reference_workers: number of processes for which batch size and learning rate were chosen.
        shuffle_buffer: samples of a stream that are mixed at a time.
        optimizers: of the module.
        lr_scheduler_configs: of the module.
    """

    reference_workers: int
    shuffle_buffer: int
    optimizers: list[torch.optim.Optimizer]
    lr_scheduler_configs: list[Any]

    @property
    def seed(self) -> int: ...

    @property
    def is_global_zero(self) -> bool: ...

    def clip_norm(self, trainer: pl.Trainer) -> float | None: ...

    @property
    def before_step(self) -> Callable[[pl.Trainer, torch.optim.Optimizer], None]: ...

    def show_rank(self, rank: int | None = None) -> None: ...


class ElasticFitLoop(_FitLoop):
    """Train over the batches that the library deals, and end where all workers decide so."""

    epoch_loop: ElasticEpochLoop

    def __init__(self, trainer: pl.Trainer, strategy: Guide) -> None:
        """Stand in for the loop that a Trainer has.

        Args:
            trainer: whose loop is taken over, with its limits.
            strategy: of the trainer.
        """
        before = trainer.fit_loop
        super().__init__(trainer, min_epochs=before.min_epochs, max_epochs=before.max_epochs)
        limits = before.epoch_loop.min_steps, before.epoch_loop.max_steps
        self.epoch_loop = ElasticEpochLoop(trainer, *limits)
        self.epoch_loop.val_loop = ElasticEvaluationLoop(
            trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False, inference_mode=False
        )
        self._strategy = strategy
        self._data: TrainingData | None = None
        self._schedule: Schedule | None = None
        self._progress: Progress | None = None
        self._began = False
        self._wrote = False
        self._epoch_begun = self._step_begun = -1

    def setup_data(self) -> None:
        """Read the data set, sizes and order from the training DataLoader. Raise UsageError for what cannot
        be."""
        trainer = self.trainer
        if self._data is not None or trainer.limit_train_batches == 0:
            return
        loader: Any = _request_dataloader(self._data_source)
        if isinstance(loader, CombinedLoader) and len(loader.flattened) == 1:
            loader = loader.flattened[0]
        self._combined_loader = CombinedLoader(loader, "max_size_cycle")
        self._data = data = read_loader(loader, "Trainer.fit(): the training DataLoader")
        try:
            self._schedule = schedule(
                data.samples,
                batch_size=data.batch_size,
                accumulation=trainer.accumulate_grad_batches,
                reference_workers=self._strategy.reference_workers,
                drop_last=data.drop_last,
                limit=trainer.limit_train_batches,
                max_steps=self.max_steps,
                max_epochs=-1 if self.max_epochs is None else self.max_epochs,
                steps_per_optimizer_step=trainer.lightning_module.automatic_optimization,
                is_certain=not data.is_stream,
            )
        except ValueError as error:
            raise UsageError(f"Trainer.fit(): {error}") from None
        self.max_batches = self._schedule.batches
        self._check_validation()

    def _check_validation(self) -> None:
        """Set after how many batches validation comes. Raise UsageError where no step ends there."""
        trainer, every = self.trainer, self.trainer.val_check_interval
        if isinstance(every, int):
            trainer.val_check_batch = every
        elif self.max_batches == math.inf:
            if every != 1.0:
                raise UsageError(
                    f"Trainer(val_check_interval={every!r}): it is a share of a stream, which does not say "
                    "how many samples it has: give a number of batches, or 1.0 for the end of a pass"
                )
            trainer.val_check_batch = math.inf
        else:
            trainer.val_check_batch = max(1, int(self.max_batches * every))
        if every == 1.0 and not isinstance(every, int):
            return
        if trainer.val_check_batch > self.max_batches and trainer.check_val_every_n_epoch is not None:
            raise UsageError(
                f"Trainer(val_check_interval={every!r}): an epoch has {self.max_batches} batches: give as "
                "many at most, or check_val_every_n_epoch=None"
            )
        if trainer.val_check_batch % trainer.accumulate_grad_batches and trainer.limit_val_batches:
            raise UsageError(
                f"Trainer(val_check_interval={every!r}): validation after {trainer.val_check_batch} batches "
                f"is in the middle of a step of accumulate_grad_batches={trainer.accumulate_grad_batches}: "
                "give a multiple of it"
            )

    def run(self) -> None:
        """Train until all workers are at the end."""
        # Lightning would end the script at SIGTERM; the library leaves when the others can go on.
        self.trainer._signal_connector.teardown()
        self.setup_data()
        if self.skip:
            return
        data, counts = self._data, self._schedule
        assert data is not None
        assert counts is not None
        torch.set_grad_enabled(True)
        module = self.trainer.lightning_module
        self._distribute(module)
        if counts.known:
            springtide.set_total_steps(counts.known)
        at_once = data.batch_size if module.automatic_optimization else None
        for batch in springtide.batches(
            data.dataset,
            batch_size=counts.global_batch,
            micro_batch=at_once,
            min_part=smallest_part([module], at_once),
            epochs=counts.epochs,
            seed=self._strategy.seed,
            collate_fn=data.collate_fn,
            loader_workers=data.loader_workers,
            until=self._is_over,
            **order_options(data, self._strategy.shuffle_buffer, "SpringtideStrategy"),
        ):
            self._take_rank()
            if not self._began:
                self._begin()
            self._train(batch)
        self._take_rank()
        if not self._began:  # it came when all was done
            self._begin()
        _ = self.done  # says why
        self.on_run_end()

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return the loop's counts for a file, without the place of the script's loader, which stays."""
        loader, self._combined_loader = self._combined_loader, None
        try:
            found: dict[str, Any] = super().on_save_checkpoint()
        finally:
            self._combined_loader = loader
        return found

    def _distribute(self, module: pl.LightningModule) -> None:
        """Give the module, its optimizers and schedulers to the library."""
        trainer, strategy = self.trainer, self._strategy
        rules = as_buffers(module)
        self.epoch_loop.use(Whole(module))
        tracked = {
            f"scheduler_{number}": config.scheduler
            for number, config in enumerate(strategy.lr_scheduler_configs)
        }
        optimizers: Any = list(strategy.optimizers)
        if module.automatic_optimization:
            (optimizers,) = optimizers
        self._progress = Progress(trainer, the_runtime().evaluations)
        self._progress.check()
        springtide.distribute(
            module,
            optimizers,
            clip_norm=strategy.clip_norm(trainer),
            buffers=rules,
            **tracked,
            progress=self._progress,
        )
        for optimizer in strategy.optimizers:
            # Behind the library's own hook: gradients are summed and clipped, and the step is certain.
            optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with self.epoch_loop.alike():
            self._strategy.before_step(self.trainer, optimizer)

    def _take_rank(self) -> None:
        """Tell Lightning who writes and logs: rank 0, which another process may be now."""
        self._strategy.show_rank()
        if self._wrote or not self._strategy.is_global_zero or the_runtime().settings.alone:
            return
        self._wrote = True
        for logger in self.trainer.loggers:
            keep_earlier_rows(logger, self.epoch_loop._batches_that_stepped)
        if self.trainer.enable_autolog_hparams:
            _log_hyperparams(self.trainer)

    def _begin(self) -> None:
        """Begin training in this process, which is a member and has the job's state."""
        self._began = True
        with self._unmoved(has_begun=self.epoch_progress.total.ready > 0):
            super().on_run_start()

    @contextlib.contextmanager
    def _unmoved(self, *, has_begun: bool) -> Iterator[None]:
        """Hold hooks of a begin, which move no count of a job where that begin was before this process came.

        Args:
            has_begun: it was.
        """
        assert self._progress is not None
        before = self._progress.state_dict() if has_begun else None
        yield
        if before is not None:
            self._progress.load_state_dict(before)

    def _is_over(self) -> bool:
        """Return whether the run ends here; alike in all workers that hold the same state."""
        return bool(
            _is_max_limit_reached(self.epoch_loop.global_step, self.max_steps)
            or _is_max_limit_reached(
                self.epoch_progress.current.processed, -1 if self.max_epochs is None else self.max_epochs
            )
            or (self.trainer.should_stop and self._can_stop_early)
        )

    def _train(self, batch: Batch) -> None:
        """Take one dealt batch through its step, and do what follows when it is committed."""
        runtime, loop, counts, read = the_runtime(), self.epoch_loop, self._schedule, self._data
        assert counts is not None
        assert read is not None
        before = runtime.position.cursor
        self._open_epoch(before.epoch)
        own = math.ceil(batch.micro.global_samples / (read.batch_size * self._strategy.reference_workers))
        loop.stand_before(counts.batches, own, ends_pass=runtime.steps.ends_pass)
        pieces = batch.split() if self.trainer.lightning_module.automatic_optimization else iter([batch])
        first = next(pieces)
        chosen = int(first.ids[0]) if first.samples else -1
        with isolated(self._strategy.seed, before.step, chosen + 1):
            data = loop.prepared(first)
        is_new, self._step_begun = before.step != self._step_begun, before.step
        if is_new:
            loop.announce(data)
        loop.begin_body(is_new=is_new)
        with springtide.step():
            loop.run_body(first, data, pieces)
        loop.end_body()
        if runtime.position.cursor.step == before.step:
            return  # dropped, or the first parts of an exact step
        loop.committed(ends_pass=runtime.position.cursor.epoch != before.epoch)
        if loop.done or loop.batch_progress.is_last_batch:
            super().on_advance_end()

    def _open_epoch(self, epoch: int) -> None:
        """Begin the epoch in the job, if this is its first step, and in this process."""
        progress = self.epoch_progress
        if not (has_begun := progress.current.ready > progress.current.completed):
            self.epoch_loop.begin_epoch()
            progress.increment_ready()
        if self._epoch_begun != epoch:
            self._epoch_begun = epoch
            with self._unmoved(has_begun=has_begun):
                call._call_callback_hooks(self.trainer, "on_train_epoch_start")
                call._call_lightning_module_hook(self.trainer, "on_train_epoch_start")
        if progress.current.started < progress.current.ready:
            progress.increment_started()


class ElasticEpochLoop(_TrainingEpochLoop):
    """Run the body of a step, and what Lightning does behind it."""

    _results: Any

    def __init__(self, trainer: pl.Trainer, min_steps: int | None, max_steps: int) -> None:
        super().__init__(trainer, min_steps=min_steps, max_steps=max_steps)
        self.automatic_optimization: PartsOptimization = PartsOptimization(trainer)
        self._own_results = self._results
        self._sums = Sums()
        self._samples = 0.0
        self._log = StepLog(self._report, lambda: self._samples)
        self._whole: Whole | None = None
        self._trained: list[tuple[torch.nn.Parameter, bool]] = []
        self._is_new = False
        self._outputs: Any = None
        self._batch: Any = None
        self._means: dict[str, float] | None = {}

    def use(self, whole: Whole) -> None:
        """Take the metrics that cannot be updated in a step."""
        self._whole = whole

    def begin_epoch(self) -> None:
        """Set the counters back that count in an epoch."""
        self.batch_progress.reset_on_run()
        self.scheduler_progress.reset_on_run()
        self.automatic_optimization.optim_progress.reset_on_run()
        self.val_loop.batch_progress.total.reset()

    def stand_before(self, batches: float, own: int, *, ends_pass: bool) -> None:
        """Set the counters to the step that begins, which may have begun before.

        Args:
            batches: of an epoch; infinite where nobody knows.
            own: batches of which this step's samples are.
            ends_pass: the step is known to be the last one of its pass.
        """
        current, total = self.batch_progress.current, self.batch_progress.total
        more = int(min(self.trainer.accumulate_grad_batches, batches - current.completed, own))
        for counter in (current, total):
            counter.ready = counter.started = counter.completed + more
            counter.processed = counter.completed
        self.batch_progress.is_last_batch = ends_pass or current.ready >= batches
        self.trainer._logger_connector._first_loop_iter = current.completed == 0

    # ---- the body

    def begin_body(self, *, is_new: bool) -> None:
        """Begin a body.

        Args:
            is_new: this process begins the step for the first time.
        """
        self._is_new = is_new
        module = self.trainer.lightning_module
        self._trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        self._own_results, self._results = self._results, self._log
        self._log.begin()
        self._sums = Sums()
        if self._whole is not None:
            self._whole.begin()

    def end_body(self) -> None:
        """End a body, committed or dropped: what an exception has left half done is put right."""
        self._results = self._own_results
        module = self.trainer.lightning_module
        module._current_fx_name = None
        module._param_requires_grad_state = {}
        for parameter, requires_grad in self._trained:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)

    @contextlib.contextmanager
    def alike(self) -> Iterator[None]:
        """Hold what is logged the same by all workers, as in the hook before an optimizer's step."""
        self._log.alike = True
        try:
            yield
        finally:
            self._log.alike = self.trainer.lightning_module.automatic_optimization

    def run_body(self, first: Batch, data: Any, others: Iterator[Batch]) -> None:
        """Compute one worker's part of the global batch, and step the optimizers. It may be dropped.

        Args:
            first: micro-batch.
            data: its samples, as `prepared` gives them.
            others: micro-batches of the part.
        """
        module = self.trainer.lightning_module
        self._means = None

        def parts() -> Iterator[Any]:
            self._batch, self._samples = data, float(first.samples)
            yield data
            for micro in others:
                self._batch, self._samples = self.prepared(micro), float(micro.samples)
                yield self._batch

        with self.trainer.profiler.profile("run_training_batch"):
            if module.automatic_optimization:
                optimizer = self.trainer.optimizers[0]
                self._outputs = self.automatic_optimization.run_parts(
                    optimizer, self.batch_idx, parts(), self._is_new, self._computed
                )
                return
            for inputs in parts():
                kwargs = self._build_kwargs(OrderedDict(), inputs, self.batch_idx)
                self._outputs = self.manual_optimization.run(kwargs)
                self._computed(self._outputs.get("loss"))
            trainer = the_runtime().trainer
            assert trainer is not None
            self._means = self._sums.over_all(trainer.reduction.total)

    def prepared(self, micro: Batch) -> Any:
        """Return the samples of a micro-batch where the module wants them."""
        trainer = self.trainer
        data = trainer.precision_plugin.convert_input(micro.data)
        data = trainer.lightning_module._on_before_batch_transfer(data, dataloader_idx=0)
        return call._call_strategy_hook(trainer, "batch_to_device", data, dataloader_idx=0)

    def announce(self, data: Any) -> None:
        """Call the hooks before a step.

        Args:
            data: samples of the first micro-batch.

        Raises:
            UsageError: the module wants to leave the epoch.
        """
        trainer = self.trainer
        call._call_callback_hooks(trainer, "on_train_batch_start", data, self.batch_idx)
        said = call._call_lightning_module_hook(trainer, "on_train_batch_start", data, self.batch_idx)
        if said == -1:
            raise UsageError(
                "on_train_batch_start() has returned -1: an epoch goes to its end here, for each of its "
                "samples counts once. Set trainer.should_stop, which ends the training"
            )
        call._call_strategy_hook(trainer, "on_train_batch_start", data, self.batch_idx)

    def _computed(self, loss: Any) -> None:
        """Take the loss of a micro-batch, unless the script logs one of this name."""
        if self._whole is not None:
            self._whole.check()
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and "loss" not in self._log.names:
            self._report({"loss": float(loss)})

    def _report(self, values: dict[str, float]) -> None:
        if self.trainer.lightning_module.automatic_optimization:
            springtide.report(**values)
        else:
            self._sums.add(values, self._samples)

    # ---- behind the commit

    def committed(self, *, ends_pass: bool) -> None:
        """Count the step, and run what belongs behind it: schedulers, hooks, logs, validation.

        Args:
            ends_pass: the pass over the data ended with it, which may turn out in the step only.
        """
        self.batch_progress.is_last_batch |= ends_pass
        trainer, runtime = self.trainer, the_runtime()
        connector, module = trainer._logger_connector, trainer.lightning_module
        automatic = module.automatic_optimization
        means = runtime.steps.committed_values if automatic else self._means
        assert runtime.trainer is not None
        if not automatic and means and self._is_writer():
            springtide.report(**dict(sorted(means.items())[:64]))
        self._results.batch, self._results.batch_size, self._results.dataloader_idx = self._batch, None, None
        for counter in (self.batch_progress.current, self.batch_progress.total):
            counter.processed = counter.ready
        self._log.replay(self._results, means, runtime.trainer.total_weight)
        outputs = self._outputs
        if outputs and "loss" in outputs and means and "loss" in means:
            outputs = {**outputs, "loss": torch.tensor(means["loss"])}
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        batch, self._batch, self._outputs = self._batch, None, None
        call._call_callback_hooks(trainer, "on_train_batch_end", outputs, batch, self.batch_idx)
        call._call_lightning_module_hook(trainer, "on_train_batch_end", outputs, batch, self.batch_idx)
        connector.on_batch_end()
        for counter in (self.batch_progress.current, self.batch_progress.total):
            counter.completed = counter.ready
        connector.update_train_step_metrics()
        self.on_advance_end(None)  # it looks at the class of the fetcher alone

    def _is_writer(self) -> bool:
        return springtide.rank() == 0


class PartsOptimization(_AutomaticOptimization):
    """Run the closure of automatic optimization over the micro-batches of a worker's part."""

    def run_parts(
        self,
        optimizer: torch.optim.Optimizer,
        batch_idx: int,
        parts: Iterator[Any],
        is_new: bool,
        computed: Callable[[Any], None],
    ) -> dict[str, Any]:
        """Compute all parts, and step the optimizer.

        Args:
            optimizer: the module's only one.
            batch_idx: of Lightning's batch in which the step is.
            parts: samples of the micro-batches, where the module wants them.
            is_new: this process begins the step for the first time.
            computed: takes the loss of each micro-batch.

        Returns:
            The output of the module's `training_step` for the last one.

        Raises:
            UsageError: the module computed no loss, or its `optimizer_step` is no plain step.
        """
        closure = PartsClosure(self, optimizer, batch_idx, parts, is_new, computed)
        self._optimizer_step(batch_idx, closure)
        if closure.result is None:
            raise UsageError(
                "LightningModule.optimizer_step() has not called its optimizer_closure: each batch makes a "
                "step here; call optimizer.step(closure=optimizer_closure)"
            )
        found: dict[str, Any] = closure.result.asdict()
        return found

    def closure_parts(
        self, kwargs: OrderedDict[str, Any]
    ) -> tuple[ClosureResult, Callable[[torch.Tensor], None] | None]:
        """Return what `training_step` gives, with the whole loss, and what runs its backward pass."""
        output = call._call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        # The library makes the mean over micro-batches.
        result = ClosureResult.from_training_step_output(output, 1)
        return result, self._make_backward_fn(self.trainer.optimizers[0])

    def zero_grad(self, optimizer: torch.optim.Optimizer, batch_idx: int, *, is_new: bool) -> None:
        """Zero the gradients before the first backward pass of a body.

        Args:
            optimizer: whose they are.
            batch_idx: of Lightning's batch in which the step is.
            is_new: this process begins the step for the first time.
        """
        if is_new:
            self._on_before_zero_grad(optimizer)
        self._optimizer_zero_grad(batch_idx, optimizer)


class PartsClosure:
    """Compute the loss and the gradients of a worker's part, as `optimizer_closure` of a module's hook."""

    def __init__(
        self,
        optimization: PartsOptimization,
        optimizer: torch.optim.Optimizer,
        batch_idx: int,
        parts: Iterator[Any],
        is_new: bool,
        computed: Callable[[Any], None],
    ) -> None:
        """Make it; see `PartsOptimization.run_parts`."""
        self._optimization, self._optimizer, self._batch_idx = optimization, optimizer, batch_idx
        self._parts, self._is_new, self._computed = parts, is_new, computed
        self.result: ClosureResult | None = None

    @torch.enable_grad()
    def __call__(self) -> torch.Tensor | None:
        """Compute all micro-batches; return the last one's loss. Raise UsageError when it is called again."""
        if self.result is not None:
            raise UsageError(
                "the optimizer_closure was called a second time: a step computes its samples once"
            )
        loop = self._optimization.trainer.fit_loop.epoch_loop
        for inputs in self._parts:
            kwargs = loop._build_kwargs(OrderedDict(), inputs, self._batch_idx)
            first, (self.result, backward) = self.result is None, self._optimization.closure_parts(kwargs)
            loss = self.result.closure_loss
            if loss is None:
                raise UsageError(
                    "training_step() has returned None: each sample counts in a step; return a loss of 0 "
                    "that depends on the parameters for a batch that shall not count"
                )
            if first:
                self._optimization.zero_grad(self._optimizer, self._batch_idx, is_new=self._is_new)
            if backward is not None:
                backward(loss)
            self._computed(self.result.loss)
        return None if self.result is None else self.result.loss


class ElasticEvaluationLoop(_EvaluationLoop):
    """Evaluate all samples in each worker, and have the same metrics in all.

    Metrics and outputs of a module live in the process, and would be lost with it.
    """

    def run(self) -> Any:
        """Evaluate; a SIGTERM is the library's affair."""
        if in_training():
            self.trainer._signal_connector.teardown()
        return super().run()

    def _on_evaluation_end(self, *args: Any, **kwargs: Any) -> None:
        if in_training() and not self.trainer.sanity_checking:
            self._agree()
        super()._on_evaluation_end(*args, **kwargs)

    def _agree(self) -> None:
        """Give the values that hooks and callbacks look at the bits of one worker's."""
        connector = self.trainer._logger_connector
        values = connector.callback_metrics
        found = agreed({name: float(value) for name, value in values.items()})
        for name, number in found.items():
            values[name] = torch.full_like(values[name], number)
        results: Any = self.trainer._results
        for _, metric in results.valid_items():
            for name in results._forked_name(metric, on_step=False):
                if name in found and metric._computed is not None:
                    metric._computed = torch.full_like(metric._computed, found[name])
