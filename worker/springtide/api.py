"""The functions that a training script calls."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

import torch

from springtide import ending, faults
from springtide.data.batch import Batch
from springtide.data.loop import plan_loop
from springtide.environment import read_settings
from springtide.errors import UsageError
from springtide.exact.settings import prepare
from springtide.exchange.device import tame_nccl
from springtide.loop import deal_batches
from springtide.runtime import Runtime
from springtide.servers.wiring import exchange_for, wait_in_forward
from springtide.training import Trainer
from springtide_ps.placement import CHUNK_BYTES

Model = TypeVar("Model", bound=torch.nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

_runtime: Runtime | None = None


def init() -> None:
    """Begin: read the environment and, in a job, say Hello to its coordinator. Call it first, once.

    Raise UsageError on a second call, SpringtideError for an environment that cannot be right.
    """
    global _runtime
    if _runtime is not None:
        raise UsageError("springtide.init() was called already: call it once, at the script's begin")
    settings = read_settings()
    faults.arm(settings.fault)
    _log_to_stderr()
    if not settings.alone:
        tame_nccl()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if settings.logical_workers:
        prepare(settings)
    _runtime = Runtime(settings)
    # A SIGTERM that comes early is heard already.
    ending.install(_runtime)
    _runtime.begin()


def distribute(
    model: Model, optimizer: Optimizer, *, clip_norm: float | None = None, **tracked: Any
) -> tuple[Model, Optimizer]:
    """Make the model and its optimizer part of the job; the same objects are returned, instrumented.

    clip_norm: clip the gradients to this global norm, taken over the average of all workers. tracked: objects
    with state_dict and load_state_dict (learning-rate schedulers, averages of weights) that are committed,
    put back and transferred along. Raise UsageError for what cannot be distributed; the message says what to
    do.
    """
    runtime = _get("distribute()")
    if runtime.trainer is not None:
        raise UsageError("distribute() was called already: one model and one optimizer per script so far")
    settings = runtime.settings
    exact = bool(settings.logical_workers)
    _check(model, optimizer, clip_norm, tracked, in_job=not settings.alone, exact=exact)
    on_servers = settings.strategy == "ParameterServer" and not settings.alone
    if on_servers:
        _check_on_servers(model)
    runtime.trainer = Trainer(
        model,
        optimizer,
        tracked,
        clip_norm=clip_norm,
        bucket_bytes=min(int(settings.bucket_mib * (1 << 20)), CHUNK_BYTES if on_servers else 1 << 62),
        logical_workers=runtime.settings.logical_workers,
        backend=runtime.settings.backend,
        make_servers=exchange_for(settings) if on_servers else None,
    )
    if on_servers:
        wait_in_forward(model, runtime.settle)
    runtime.trainer.on_save_wish(lambda rank: runtime.checkpoints.wish(rank == 0))
    if runtime.membership is not None:
        runtime.membership.layout_hash = runtime.trainer.layout_hash
    return model, optimizer


def batches(
    dataset: Any,
    *,
    batch_size: int,
    epochs: int = 1,
    seed: int = 0,
    micro_batch: int | None = None,
    min_part: int = 2,
    train: bool = True,
) -> Iterator[Batch]:
    """Iterate over this worker's parts of the global batches.

    dataset: map-style dataset, TensorDataset, or tensors. batch_size: samples of the global batch over all
    workers. epochs: passes over the data. seed: of the order and of random numbers in a step. micro_batch:
    most samples that one worker computes at once; then use `for micro in batch.split():`. min_part: fewest
    samples that a worker computes at once. Every batch needs one `with springtide.step():`. A worker that
    joins later skips loops that the job has ended. Raise ValueError, TypeError or NotImplementedError for bad
    arguments, UsageError for a wrong place.
    """
    runtime = _get("batches()")
    runtime.ready("batches()")
    plan = plan_loop(
        dataset,
        batch_size=batch_size,
        epochs=epochs,
        seed=seed,
        micro_batch=micro_batch,
        min_part=min_part,
        train=train,
    )
    source = replace(plan.source, fetch=runtime.timing.timed(plan.source.fetch))
    return deal_batches(runtime, replace(plan, source=source))


class step:
    """`with springtide.step():` holds one whole step: forward, backward and optimizer.step() of one batch.

    Its end is the commit. When the members of the job change in between, the body is left, everything in it
    is put back, and the loop goes on with the same samples.
    """

    def __enter__(self) -> None:
        _get("step()").enter_body()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return _get("step()").leave_body(error)


def report(**values: float | torch.Tensor) -> None:
    """Show numbers in the job's status and metrics. In a step: averaged over the samples of all workers,
    before optimizer.step(); elsewhere: this worker's, the last one counts. Raise UsageError for what is no
    number."""
    _get("report()").report(values)


def rank() -> int:
    """Number of this process in the present generation, from 0; it changes when members come and go."""
    return _get("rank()").group.rank


def world_size() -> int:
    """Number of processes in the present generation; 1 before the first one and without a job."""
    return _get("world_size()").group.size


def local_rank() -> int:
    """Number of this process in its pod, from 0."""
    return _get("local_rank()").settings.local_rank


def _get(call: str) -> Runtime:
    if _runtime is None:
        raise UsageError(
            f"springtide.{call} before springtide.init(): call springtide.init() at the script's begin"
        )
    return _runtime


def _check(
    model: Any, optimizer: Any, clip_norm: Any, tracked: dict[str, Any], in_job: bool, exact: bool
) -> None:
    if isinstance(model, list | tuple | dict) or isinstance(optimizer, list | tuple | dict):
        raise UsageError(
            "distribute(): one model and one optimizer so far; put several models into one "
            "torch.nn.ModuleDict"
        )
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"distribute(): model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise UsageError(
            "distribute(): give the model itself, not DistributedDataParallel(model): springtide reduces "
            "gradients"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"distribute(): optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "distribute(): LBFGS evaluates the model several times per step, which is not supported"
        )
    if clip_norm is not None and not (isinstance(clip_norm, int | float) and clip_norm > 0):
        raise UsageError(f"distribute(): clip_norm must be a positive number, got {clip_norm!r}")
    for name, item in tracked.items():
        if isinstance(item, torch.amp.GradScaler):
            raise UsageError(
                f"distribute(): {name} is a GradScaler, which is not supported yet: train in float32 or "
                "bfloat16, without a scaler"
            )
        if isinstance(item, torch.optim.Optimizer):
            raise UsageError(f"distribute(): {name} is a second optimizer; one optimizer per script so far")
        if not (
            callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))
        ):
            raise UsageError(
                f"distribute(): {name} has no state_dict() and load_state_dict(), so it cannot be put back "
                "or transferred"
            )
    parameters = dict(model.named_parameters())
    known = {id(parameter) for parameter in parameters.values()}
    for group in optimizer.param_groups:
        if any(id(parameter) not in known for parameter in group["params"]):
            raise UsageError(
                "distribute(): the optimizer holds a parameter that is not in the model, so its gradient "
                "would not be reduced; make it a parameter of the model"
            )
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UsageError("distribute(): no parameter of the model requires a gradient")
    for name, parameter in parameters.items():
        if type(parameter.data) is not torch.Tensor or parameter.layout != torch.strided:
            raise UsageError(
                f"distribute(): parameter {name} is a {type(parameter).__name__}, not a plain dense tensor"
            )
    devices = {parameter.device: name for name, parameter in parameters.items()}
    if exact and {device.type for device in devices} - {"cpu"}:
        raise UsageError(
            "distribute(): exact mode sums on the CPU so far: leave the model there, or set "
            "strategy.allReduce.exact to false"
        )
    if in_job and (len(devices) > 1 or {device.type for device in devices} - {"cpu", "cuda"}):
        places = ", ".join(f"{name} is on {device}" for device, name in devices.items())
        raise UsageError(
            f"distribute(): {places}: a model lies on one device, the CPU or a GPU, and each worker has one; "
            "ask for one GPU for each worker"
        )


def _check_on_servers(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise UsageError(
                f"distribute(): parameter {name} is on {parameter.device}: strategy.type ParameterServer "
                "trains on the CPU so far; use strategy.type AllReduce for GPUs"
            )


def _log_to_stderr() -> None:
    log = logging.getLogger("springtide")
    if log.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s springtide %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


__all__ = ["Trainer", "batches", "distribute", "init", "local_rank", "rank", "report", "step", "world_size"]
