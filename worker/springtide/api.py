"""The functions that a training script calls."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist

from springtide import faults
from springtide.comm.flight_recorder import record_no_flights
from springtide.comm.layout import most_bucket_bytes
from springtide.comm.nccl import take_gpu, tame_nccl
from springtide.data.batch import Batch
from springtide.data.loop import DEFAULT_SHUFFLE_BUFFER, plan_loop
from springtide.data.shards import ShardedDataset
from springtide.elastic.evaluation import Evaluation
from springtide.elastic.retry import RetryAttempt
from springtide.elastic.runtime import Runtime
from springtide.elastic.warm_up import MAX_BODIES
from springtide.errors import UsageError
from springtide.exact.settings import check_gpu, on_gpu, prepare
from springtide.integrations.sources import given
from springtide.loading.device_copies import copier_for, with_copies
from springtide.loading.marking import check_count
from springtide.loading.marking import read_marks as read_marks_of
from springtide.loading.prefetch import Loader, make_loader
from springtide.loading.streams import StreamLoader, make_stream_loader
from springtide.loggers.logger import Logger
from springtide.loggers.tracking import check_config, check_loggers, facts_of
from springtide.memory.allocator import keep_freed_memory
from springtide.pods.checks import check_model, check_settings, check_steps
from springtide.pods.dims import mesh_shape
from springtide.ps.backend import backend_for
from springtide.ps.sharding import bucket_bytes
from springtide.settings import read_settings
from springtide.sharding.backend import shards_for
from springtide.train_step.options import TrainerOptions
from springtide.train_step.scheduler_count import count_steps
from springtide.train_step.trainer import Trainer
from springtide.train_step.validation import declare

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh  # takes a second to import

Models = TypeVar("Models", bound=torch.nn.Module | Sequence[torch.nn.Module])
Optimizers = TypeVar("Optimizers", bound=torch.optim.Optimizer | Sequence[torch.optim.Optimizer])

active_runtime: Runtime | None = None
"""The runtime that `init()` has made; None before it."""


def init(*, loggers: Sequence[Logger] = (), config: Mapping[str, object] | None = None) -> None:
    """Begin: read the environment and, in a job, say Hello to its coordinator. Call it first, once.

    In a job it returns when the coordinator has answered, or after 2 s without an answer.

    Args:
        loggers: experiment trackers, such as `[springtide.loggers.TensorBoard("/runs")]`, which get the
            values of `report()` from one process of the job: of each committed step, and of none that was
            dropped. The same on all workers.
        config: hyperparameters by name that trackers show with the run. Mappings in it become dotted names.

    Raises:
        UsageError: it is called a second time, or an argument cannot be.
        SpringtideError: the environment cannot be right, or a tracker's library is missing.
    """
    global active_runtime
    if active_runtime is not None:
        raise UsageError("springtide.init() was called already: call it once, at the script's begin")
    check_loggers(loggers)
    check_config(config, loggers)
    settings = read_settings()
    faults.arm(settings.fault)
    _log_to_stderr()
    if not settings.alone:
        tame_nccl()
        record_no_flights()
        keep_freed_memory()
    take_gpu(settings.local_rank, settings.local_world_size)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if settings.logical_workers:
        prepare(settings)
    active_runtime = Runtime(settings, loggers, config)
    # A SIGTERM that comes early is heard already.
    active_runtime.exit.install()
    active_runtime.begin()


def mesh(dims: str | Sequence[str] = "dp_shard", sizes: int | Sequence[int] | None = None) -> DeviceMesh:
    """Return the mesh of the processes of this pod, for `fully_shard` and tensor parallelism.

    All processes of the pod call it, between `init()` and `distribute()`. From then on they train one model
    together: they commit each step in all of them or in none, and they come and go with the pod
    (spec.workers.processesPerPod says how many there are). Equal ranks of the pods sum their gradients.

    Args:
        dims: names of the mesh's dimensions. Along dp, dp_replicate and dp_shard processes take different
            samples, along tp the same ones.
        sizes: of the dimensions, whose product is the number of processes; None: one dimension of all.

    Returns:
        torch's DeviceMesh, the same in each call.

    Raises:
        UsageError: it comes too late, its arguments cannot be, or the job's strategy does not go with it.
        SpringtideError: a process of the pod did not call it in time; it is named.
    """
    runtime = _get("mesh()")
    if runtime.trainer is not None:
        raise UsageError("mesh() after distribute(): call it before the model is divided and distributed")
    try:
        shape = mesh_shape(dims, sizes, runtime.settings.local_world_size)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if runtime.pod is not None:
        if runtime.pod.shape != shape:
            raise UsageError(
                f"mesh() was called for {runtime.pod.shape} before: a pod has one mesh, got {shape}"
            )
    else:
        check_settings(runtime.settings)
        runtime.form_pod(shape)
    assert runtime.pod is not None
    found: DeviceMesh = runtime.pod.mesh
    return found


def distribute(
    model: Models,
    optimizer: Optimizers,
    *,
    clip_norm: float | None = None,
    buffers: Mapping[str, str] | None = None,
    master_weights: bool = False,
    **tracked: Any,
) -> tuple[Models, Optimizers]:
    """Make the model and its optimizer part of the job; the same objects are returned, instrumented.

    It calls `init()` where the script has not: call that yourself, at the script's begin, where loading takes
    minutes, with `mesh()`, or for its arguments.

    Args:
        model: a module, or a list of them.
        optimizer: one over the model's parameters, or a list. With a list (of one, too) a body may make
            several optimizer steps and step(closure), which costs a copy of what they change.
        clip_norm: clip the gradients to this global norm, taken over the average of all workers (with several
            optimizers: each one's by themselves); None: no clipping.
        buffers: what becomes of a buffer of the model that workers have changed, by its name or the end of
            it: "mean" by samples, "first" (the first worker's), "sum" of the changes, "min", "max" (by
            element), or "local" (each worker keeps its own); otherwise running statistics of norm layers are
            averaged, and of all else the first worker's count.
        master_weights: whether the optimizer steps float32 copies of bfloat16 and float16 parameters, with
            float32 state, and the parameters are their roundings; in shards with
            `strategy.allReduce.shard`. With strategy.type AllReduce, and one optimizer.
        tracked: objects with state_dict and load_state_dict (learning-rate schedulers, averages of weights, a
            GradScaler) that are committed, put back and transferred along.

    Returns:
        The model and the optimizer, as they were given.

    Raises:
        UsageError: something cannot be distributed; the message says what to do.
    """
    if active_runtime is None:
        init()
    runtime = _get("distribute()")
    if runtime.trainer is not None:
        raise UsageError(
            "distribute() was called already: give all models and optimizers in one call, as lists"
        )
    settings = runtime.settings
    exact = bool(settings.logical_workers)
    strategy = "" if settings.alone else settings.strategy
    on_servers = strategy == "ParameterServer"
    in_shards = bool(strategy) and settings.shard != "None"
    check = partial(
        declare,
        model,
        optimizer,
        clip_norm,
        tracked,
        buffers=buffers,
        in_job=not settings.alone,
        exact=exact,
        compression=settings.compression,
        strategy=strategy,
        shard="None" if settings.alone else settings.shard,
        master_weights=master_weights,
        has_mesh=runtime.pod is not None,
    )
    declared = check()
    if runtime.pod is not None:
        check_steps(tracked, declared.multi_step, master_weights)
        check_model(declared.models, runtime.pod.shape)
    count_steps(tracked.values())
    if exact and declared.device.type == "cuda":
        check_gpu(on_gpu(settings.cublas_workspace))
    options = TrainerOptions(
        multi_step=declared.multi_step,
        clip_norm=clip_norm,
        rules=declared.rules,
        bucket_bytes=min(
            int(settings.bucket_mib * (1 << 20)),
            bucket_bytes(declared.nbytes)
            if on_servers or in_shards
            else most_bucket_bytes(declared.trained_nbytes, declared.device.type),
        ),
        logical_workers=runtime.settings.logical_workers,
        backend=runtime.settings.backend,
        compression=settings.sum_compression,
        make_servers=backend_for(settings) if strategy in ("ParameterServer", "Hybrid") else None,
        make_shards=shards_for(settings, master_weights) if in_shards else None,
        keeps_gradients=not in_shards or settings.shard == "Optimizer",
        masters=master_weights,
    )
    trainer = Trainer(declared.models, declared.optimizers, tracked, options, runtime.pod)
    runtime.install(trainer, declared.models, declared.optimizers, tracked, check)
    return model, optimizer


@overload
def batches(
    dataset: Any,
    *,
    batch_size: int,
    epochs: int = 1,
    seed: int = 0,
    micro_batch: int | None = None,
    min_part: int = 2,
    shuffle: bool = True,
    drop_last: bool = False,
    weights: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    loader_workers: int = 0,
    to_device: bool = False,
    rehearsals: int = 0,
    verify_samples: int = 8,
    until: Callable[[], bool] | None = None,
    shuffle_buffer: int = DEFAULT_SHUFFLE_BUFFER,
    streams: int | None = None,
    train: Literal[True] = True,
) -> Iterator[Batch]: ...


@overload
def batches(
    dataset: Any,
    *,
    batch_size: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    to_device: bool = False,
    train: Literal[False],
) -> Evaluation: ...


def batches(
    dataset: Any,
    *,
    batch_size: int,
    epochs: int = 1,
    seed: int = 0,
    micro_batch: int | None = None,
    min_part: int = 2,
    shuffle: bool = True,
    drop_last: bool = False,
    weights: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    loader_workers: int = 0,
    to_device: bool = False,
    rehearsals: int = 0,
    verify_samples: int = 8,
    until: Callable[[], bool] | None = None,
    shuffle_buffer: int = DEFAULT_SHUFFLE_BUFFER,
    streams: int | None = None,
    train: bool = True,
) -> Iterator[Batch] | Evaluation:
    """Iterate over this worker's parts of the global batches.

    Every batch needs one `with springtide.step():`. A worker that joins later gets one batch of each loop
    that the job has ended, whose step commits nothing, so that the code behind the loop works there.

    With train=False: evaluate, between two steps or after a training loop. The workers share the samples out,
    each once; of data in shards they share the shards. Values of `report()` in the loop are averaged over all
    samples, whoever dies meanwhile; after the loop the mean is in `values` of the returned iterator, on all
    workers.

    Args:
        dataset: a map-style dataset, TensorDataset, tensors, an IterableDataset with `__len__()` and
            `read_range(start, stop)` (with shuffle=False), or data in shards (`springtide.data.Shards`,
            Hugging Face's streaming data sets, WebDataset, MDS; see docs/data.md).
        batch_size: samples of the global batch over all workers; with train=False, samples that one worker
            computes at once.
        epochs: passes over the data.
        seed: of the order and of random numbers in a step.
        micro_batch: most samples that one worker computes at once; then use `for micro in batch.split():`.
        min_part: fewest samples that a worker computes at once.
        shuffle: whether each epoch has an order of its own; False: the dataset's order.
        drop_last: leave an epoch's short last batch out.
        weights: chances of the samples, which are then drawn with replacement.
        collate_fn: makes a batch's data of a list of samples, as torch's DataLoader has it.
        loader_workers: processes that read ahead, as torch's DataLoader has them.
        to_device: whether a batch's tensors are on the model's device. With `loader_workers` the next
            micro-batch is copied to a GPU while this one is computed, and has to fit beside it. False: they
            are where `collate_fn` leaves them, in the memory of the host.
        rehearsals: how often a worker that joins a running job tries the body out before it is admitted (to
            compile, say); what the script does between the bodies happens then, too.
        verify_samples: how many samples, at most 32, each worker reads twice before the loop to compare them
            with the others', which finds lists of files in another order; 0: none.
        until: asked before each step; where it returns True the loop ends, in the middle of a pass too. It
            has to return the same on all workers: decide by tracked objects and by means over all workers.
        shuffle_buffer: of data in shards, with shuffle=True: samples that are mixed at a time, over all
            workers.
        streams: of data in shards: into how many streams the shards are dealt, which workers read; it stays
            for the job's life. None: as many as there are shards, at most 64.
        train: False: evaluate.

    Raises:
        ValueError: an argument is out of its range.
        TypeError: an argument is of the wrong kind.
        UsageError: it is called before `distribute()`, inside of a step, or before the last loop has ended.
    """
    runtime = _get("batches()")
    runtime.trainers.require("batches()")
    if runtime.pod is not None and runtime.pod.processes > 1:
        _check_pod_loop(rehearsals)
    if not isinstance(to_device, bool):
        raise ValueError(f"batches(): to_device must be True or False, got {to_device!r}")
    if until is not None and not callable(until):
        raise TypeError(f"batches(): until must be a function without arguments, got {until!r}")
    device = None if runtime.trainer is None else runtime.trainer.device
    copier = copier_for(device) if to_device else None
    found = given(dataset, collate_fn, shuffle)
    dataset, collate_fn, shuffle = found.dataset, found.collate_fn, found.shuffle
    if not train:
        if isinstance(dataset, ShardedDataset):
            _check_no_mesh(runtime)
        return runtime.evaluations.evaluate(dataset, batch_size, epochs, collate_fn, copier)
    plan = plan_loop(
        dataset,
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
        micro_batch=micro_batch,
        min_part=min_part,
        shuffle=shuffle,
        drop_last=drop_last,
        weights=weights,
        collate_fn=collate_fn,
        shuffle_buffer=shuffle_buffer,
        streams=streams,
    )
    if isinstance(rehearsals, bool) or not isinstance(rehearsals, int) or not 0 <= rehearsals <= MAX_BODIES:
        raise ValueError(
            f"batches(): rehearsals must be an integer from 0 to {MAX_BODIES}, got {rehearsals!r}"
        )
    count = check_count(verify_samples) * (not runtime.settings.alone)
    loader: Loader | StreamLoader | None
    if plan.streams is not None:
        _check_no_mesh(runtime)
        if rehearsals:
            raise UsageError(
                "batches(rehearsals=) tries a body out before the worker knows where the job is in its "
                "shards: leave it out"
            )
        loader = make_stream_loader(plan, loader_workers, collate_fn=collate_fn, copier=copier)
        source, count = loader.source, 0  # members compare the names of the shards
    else:
        exact = bool(runtime.settings.logical_workers)
        loader = make_loader(plan, loader_workers, exact=exact, device=device, copier=copier)
        source = with_copies(plan.source, copier)
    if runtime.accounting.tracking is not None:
        runtime.accounting.tracking.describe(
            facts_of(runtime.settings, batch_size=batch_size, epochs=epochs, seed=seed)
        )
    source = replace(source, fetch=runtime.accounting.timing.timed(source.fetch))
    read_marks = partial(read_marks_of, plan.source, count, in_child=loader is not None)
    return runtime.loops.batches(replace(plan, source=source), loader, rehearsals, read_marks, until)


def _check_no_mesh(runtime: Runtime) -> None:
    """Raise UsageError for data in shards in a pod with a mesh."""
    if runtime.pod is not None:
        raise UsageError(
            "batches(): data in shards do not go with mesh() yet: give a data set with __len__ and "
            "__getitem__"
        )


def _check_pod_loop(rehearsals: int) -> None:
    """Raise UsageError for a loop that the processes of a pod with a mesh cannot run together."""
    if rehearsals:
        raise UsageError(
            "batches(rehearsals=) tries a body out in one process, and the processes of a pod with mesh() "
            "compute together: leave it out"
        )


class step:
    """`with springtide.step():` holds one whole step: forward, backward and optimizer.step() of one batch.

    Its end is the commit. When the members of the job change in between, the body is left, everything in it
    is put back, and the loop goes on with the same samples.
    """

    def __enter__(self) -> None:
        _get("step()").steps.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return _get("step()").steps.leave(error)


def report(**values: float | torch.Tensor) -> None:
    """Show numbers in the job's status and metrics. In a step: averaged over the samples of all workers,
    before optimizer.step(); elsewhere: this worker's, the last one counts. Raise UsageError for what is no
    number."""
    _get("report()").report(values)


def set_total_steps(steps: int) -> None:
    """Say how many steps the job has at its end, over all its training loops, for the progress in its status.

    A script of one loop need not call this. In one of several loops, say `batches(..., epochs=1)` once for
    each epoch, nobody else knows how many come; without a call its progress is shown in the first loop alone.
    Call it where you like, on all workers, and again when the end moves. Training does not depend on it.

    Args:
        steps: of the whole job, counted from its first one: what `status.step` is at the end.

    Raises:
        ValueError: it is no integer of 1 or more.
        UsageError: it is called before `init()`.
    """
    runtime = _get("set_total_steps()")
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 2**63:
        raise ValueError(f"set_total_steps(): steps must be an integer of 1 or more, got {steps!r}")
    runtime.state.expect_steps(steps)


def rank() -> int:
    """Number of this process in the present generation, from 0; it changes when members come and go.

    In a block of `retry()`: among the members that run the block.
    """
    return _get("rank()").retry_blocks.scope.rank


def world_size() -> int:
    """Number of processes in the present generation; 1 before the first one and without a job.

    In a block of `retry()`: of the members that run the block.
    """
    return _get("world_size()").retry_blocks.scope.size


def local_rank() -> int:
    """Number of this process in its pod, from 0."""
    return _get("local_rank()").settings.local_rank


def local_world_size() -> int:
    """Number of processes in its pod, as `springtide launch` started them."""
    return _get("local_world_size()").settings.local_world_size


def process_group() -> dist.ProcessGroup:
    """The members of the present generation as a group for functions of torch.distributed (`group=`).

    It is for CPU tensors; those of a GPU go through the host. Ask for it anew for each use, since members
    come and go; use it in a block of `retry()`, or in a step before `optimizer.step()`, at the same place on
    all workers. Alone it is a group of one. Raise GenerationChanged when the members have just changed,
    UsageError before the first training loop.
    """
    return _get("process_group()").retry_blocks.process_group()


class retry:
    """`for attempt in springtide.retry(): with attempt: ...` holds collectives of the script's own.

    When members come, go or fail in the block, what it raises for that is swallowed and it runs again among
    those that are left; `rank()` and `world_size()` are theirs. It is complete for all or for none. Between
    steps or after a loop, not in a step. The block must give a right result for any number of members, and
    have no other effects that a second run would spoil.
    """

    def __iter__(self) -> Iterator[RetryAttempt]:
        return _get("retry()").retry_blocks.attempts()

    def __enter__(self) -> None:
        raise UsageError(
            "with springtide.retry(): Python runs a with block once; say `for attempt in springtide.retry():`"
            " and below it `with attempt:`"
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Never reached: the block is not entered."""


def _get(call: str) -> Runtime:
    if active_runtime is None:
        raise UsageError(
            f"springtide.{call} before springtide.init(): call springtide.init() at the script's begin"
        )
    return active_runtime


def _log_to_stderr() -> None:
    log = logging.getLogger("springtide")
    if log.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s springtide %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


__all__ = [
    "Trainer",
    "batches",
    "distribute",
    "init",
    "local_rank",
    "local_world_size",
    "mesh",
    "process_group",
    "rank",
    "report",
    "retry",
    "set_total_steps",
    "step",
    "world_size",
]
