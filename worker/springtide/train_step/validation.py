"""Checks the arguments of `distribute()`; an error says what to do about the impossible ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from springtide.comm.combine import Rule
from springtide.embedding.handle import handle_of
from springtide.errors import UsageError
from springtide.pods.tensors import is_dtensor
from springtide.sharding.pieces import check_elementwise
from springtide.train_step.grad_scaler import enabled_among
from springtide.train_step.sync_batch_norm import GenerationBatchNorm


@dataclass(frozen=True, slots=True)
class TrainerArguments:
    """multi_step: a body may make more than one optimizer step, or step(closure). rules: for buffers."""

    models: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]
    multi_step: bool
    rules: dict[str, Rule] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters that are trained."""
        return next(item.device for item in _named(self.models).values() if item.requires_grad)

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of all parameters together."""
        return sum(item.nbytes for item in _named(self.models).values())

    @property
    def trained_nbytes(self) -> int:
        """Return the bytes of the parameters that are trained, and of their gradients."""
        return sum(item.nbytes for item in _named(self.models).values() if item.requires_grad)


def declare(
    model: Any,
    optimizer: Any,
    clip_norm: Any,
    tracked: Mapping[str, Any],
    *,
    buffers: Mapping[str, str] | None = None,
    in_job: bool,
    exact: bool,
    compression: str = "None",
    strategy: str = "",
    consistency: str = "Synchronous",
    shard: str = "None",
    master_weights: Any = False,
    has_mesh: bool = False,
) -> TrainerArguments:
    """Check the arguments of `distribute()`.

    Args:
        model: a module, or a list of them.
        optimizer: one, or a list.
        clip_norm: as the script gave it.
        tracked: objects by name.
        buffers: rules for some of them, by name.
        in_job: there are other workers.
        exact: sums are to be exact.
        compression: how dense gradients travel.
        strategy: of the job; "" without one.
        consistency: of the job's servers.
        shard: what workers hold a part of only.
        master_weights: as the script gave it.
        has_mesh: the script has called `mesh()`, so that parameters may lie in parts in the processes of the
            pod.

    Returns:
        Models and optimizers as lists, and the rules of buffers.

    Raises:
        UsageError: something cannot be distributed; the text says what to do.
    """
    models = list(model) if isinstance(model, list | tuple) else [model]
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    _check_models(models)
    _check_optimizers(optimizers, models)
    _check_tracked(tracked, clip_norm)
    check_parameters(_named(models), in_job=in_job, exact=exact, has_mesh=has_mesh)
    if exact and compression != "None":
        raise UsageError(
            f"distribute(): exact sums and compression {compression} exclude each other: set "
            "strategy.allReduce.compression to None, or exact to false"
        )
    multi_step = isinstance(optimizer, list | tuple | torch.optim.LBFGS)
    _check_batch_norm(models, exact, consistency)
    _check_compression(compression, strategy, optimizers, tracked)
    if strategy == "ParameterServer":
        _check_types(_named(models))
    tables = _check_tables(models, strategy, exact)
    if tables and strategy == "Hybrid" and consistency != "Synchronous":
        raise UsageError(
            "distribute(): strategy.type Hybrid sums dense gradients by all-reduce, in common steps: use "
            "strategy.parameterServer.consistency Synchronous, or strategy.type ParameterServer"
        )
    _check_masters(master_weights, strategy, multi_step)
    if shard != "None":
        _check_shard(optimizers, multi_step, compression, bool(tables))
    rules = _rules(buffers, exact, consistency)
    _spread_out(models)
    return TrainerArguments(models, optimizers, multi_step, rules)


def _check_masters(wanted: Any, strategy: str, multi_step: bool) -> None:
    """Raise UsageError for float32 masters that nobody could step."""
    if not isinstance(wanted, bool):
        raise UsageError(f"distribute(): master_weights must be True or False, got {wanted!r}")
    if wanted and strategy in ("ParameterServer", "Hybrid"):
        raise UsageError(
            f"distribute(): strategy.type {strategy} has no float32 masters of 16-bit parameters: use "
            "strategy.type AllReduce, or leave master_weights out and train float32 parameters under autocast"
        )
    if wanted and multi_step:
        raise UsageError(
            "distribute(): with master_weights a body makes one optimizer step: give distribute() one "
            "optimizer, not a list (and no step(closure)), or leave master_weights out"
        )


def _check_shard(
    optimizers: Sequence[torch.optim.Optimizer],
    multi_step: bool,
    compression: str,
    tables: bool,
) -> None:
    """Raise UsageError for what cannot be together with `strategy.allReduce.shard`."""
    check_elementwise(optimizers)
    never = "distribute(): with strategy.allReduce.shard "
    if multi_step:
        raise UsageError(
            f"{never}a body makes one optimizer step: give distribute() one optimizer, not a list (and no "
            "step(closure)), or set shard to None"
        )
    if compression != "None":
        raise UsageError(f"{never}sums are not compressed yet: set compression to None")
    if tables:
        raise UsageError(f"{never}tables of springtide.embedding have no place: set shard to None")


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether some of its elements may be one place in memory, as after `expand`.

    Such a tensor can be read and not be written to, so it could be neither put back nor received.
    """
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return tensor.numel() > 0
            extent += stride * (size - 1)
    return False


def _spread_out(models: Sequence[torch.nn.Module]) -> None:
    """Give buffers, and parameters that do not train, an element in memory for each of theirs.

    Raise UsageError for a parameter that trains: torch's optimizers cannot step it.
    """
    for name, parameter in _named(models).items():
        if is_dtensor(parameter):
            continue
        if parameter.layout is torch.strided and overlaps_itself(parameter):
            if parameter.requires_grad:
                raise UsageError(
                    f"distribute(): some elements of parameter {name} are one place in memory (expand, "
                    "as_strided), so no optimizer can step it: make it of tensor.clone()"
                )
            parameter.data = parameter.data.contiguous()
    spread: dict[int, torch.Tensor] = {}  # a buffer may stand in several places
    for model in models:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.layout is torch.strided and overlaps_itself(buffer):
                    module._buffers[name] = spread.setdefault(id(buffer), buffer.contiguous())


def _named(models: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    return dict((models[0] if len(models) == 1 else torch.nn.ModuleList(models)).named_parameters())


def _check_models(models: Sequence[Any]) -> None:
    if not models:
        raise UsageError("distribute(): the list of models is empty")
    for model in models:
        if not isinstance(model, torch.nn.Module):
            raise UsageError(
                f"distribute(): model must be a torch.nn.Module or a list of them, got {type(model).__name__}"
            )
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise UsageError(
                "distribute(): give the model itself, not DistributedDataParallel(model): springtide reduces "
                "gradients"
            )


def _check_optimizers(optimizers: Sequence[Any], models: Sequence[torch.nn.Module]) -> None:
    if not optimizers:
        raise UsageError("distribute(): the list of optimizers is empty")
    known = {id(parameter) for model in models for parameter in model.parameters()}
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(
                "distribute(): optimizer must be a torch.optim.Optimizer or a list of them, got "
                f"{type(optimizer).__name__}"
            )
        for group in optimizer.param_groups:
            if any(id(parameter) not in known for parameter in group["params"]):
                raise UsageError(
                    "distribute(): an optimizer holds a parameter that is not in the model, so its gradient "
                    "would not be reduced; make it a parameter of the model, or give all models as a list"
                )


def _check_tracked(tracked: Mapping[str, Any], clip_norm: Any) -> None:
    if clip_norm is not None and not (isinstance(clip_norm, int | float) and clip_norm > 0):
        raise UsageError(f"distribute(): clip_norm must be a positive number, got {clip_norm!r}")
    for name, item in tracked.items():
        if isinstance(item, torch.optim.Optimizer):
            raise UsageError(
                f"distribute(): {name} is another optimizer: give all of them as a list, "
                "distribute(model, [optimizer, ...])"
            )
        if not (
            callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))
        ):
            raise UsageError(
                f"distribute(): {name} has no state_dict() and load_state_dict(), so it cannot be put back "
                "or transferred"
            )


def _rules(buffers: Any, exact: bool, consistency: str) -> dict[str, Rule]:
    if buffers is not None and not isinstance(buffers, Mapping):
        raise UsageError(f"distribute(buffers=): expected a dict of names and rules, got {buffers!r}")
    rules = {}
    for name, rule in (buffers or {}).items():
        if not isinstance(name, str) or rule not in list(Rule):
            raise UsageError(
                f"distribute(buffers=): {name!r}: {rule!r} is no rule; there are {', '.join(Rule)}"
            )
        rules[name] = Rule(rule)
        if exact and rules[name] is Rule.LOCAL:
            raise UsageError(
                f"distribute(buffers=): {name!r} cannot be local in exact mode, where numbers do not depend "
                "on who computed what: use first, or set strategy.allReduce.exact to false"
            )
        if consistency != "Synchronous" and rules[name] is Rule.SUM:
            raise UsageError(
                f"distribute(buffers=): the changes of {name!r} cannot be added up with consistency "
                f"{consistency}, where workers make no common steps: use another rule, or Synchronous"
            )
    return rules


def check_parameters(
    parameters: Mapping[str, torch.nn.Parameter], *, in_job: bool, exact: bool, has_mesh: bool = False
) -> None:
    """Check the parameters of the models.

    Args:
        parameters: by name.
        in_job: there are other workers.
        exact: sums are to be exact.
        has_mesh: parameters may lie in parts in the processes of the pod.

    Raises:
        UsageError: one of them cannot be trained in a job; it is named.
    """
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UsageError("distribute(): no parameter of the model requires a gradient")
    for name, parameter in parameters.items():
        if is_lazy(parameter):
            raise UsageError(
                f"distribute(): parameter {name} has no shape yet: run one batch through the model before "
                "distribute()"
            )
        if is_dtensor(parameter):
            if has_mesh:
                continue
            raise UsageError(
                f"distribute(): parameter {name} is divided among processes: call fully_shard and "
                "parallelize_module with mesh=springtide.mesh()"
            )
        if type(parameter.data) is not torch.Tensor or parameter.layout != torch.strided:
            raise UsageError(
                f"distribute(): parameter {name} is a {type(parameter).__name__}, not a plain dense tensor"
            )
    devices = {parameter.device: name for name, parameter in parameters.items()}
    if (in_job or exact) and (len(devices) > 1 or {device.type for device in devices} - {"cpu", "cuda"}):
        places = ", ".join(f"{name} is on {device}" for device, name in devices.items())
        raise UsageError(
            f"distribute(): {places}: a model lies on one device, the CPU or a GPU, and each worker has one; "
            "ask for one GPU for each worker"
        )


def _check_types(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise UsageError for a parameter of a type that parameter servers do not have."""
    known = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for name, parameter in parameters.items():
        if parameter.requires_grad and parameter.dtype not in known:
            raise UsageError(
                f"distribute(): parameter {name} is {parameter.dtype}, which parameter servers do not have: "
                "use real floating-point numbers, or strategy.type AllReduce"
            )


def _check_batch_norm(models: Sequence[torch.nn.Module], exact: bool, consistency: str) -> None:
    synchronised = {
        name: item
        for model in models
        for name, item in model.named_modules()
        if isinstance(item, torch.nn.SyncBatchNorm)
    }
    if not synchronised:
        return
    for name, item in synchronised.items():
        if type(item) not in (torch.nn.SyncBatchNorm, GenerationBatchNorm):
            raise UsageError(
                f"distribute(): {name} is a {type(item).__name__}, a SyncBatchNorm of the script's own, "
                "whose sums would find no default group: use torch.nn.SyncBatchNorm"
            )
    first = next(iter(synchronised))
    if exact:
        raise UsageError(
            f"distribute(): {first} is a SyncBatchNorm, and exact mode computes the parts of a "
            "batch one after the other: use BatchNorm, whose statistics are those of a logical part there"
        )
    if consistency != "Synchronous":
        raise UsageError(
            f"distribute(): {first} is a SyncBatchNorm, and with consistency {consistency} workers "
            "make no common steps: use BatchNorm, or strategy.parameterServer.consistency Synchronous"
        )


def _is_synchronised(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.SyncBatchNorm)


def _check_compression(
    compression: str, strategy: str, optimizers: Sequence[Any], tracked: Mapping[str, Any]
) -> None:
    on_servers = strategy == "ParameterServer"
    if compression == ("PowerSGD" if on_servers else "TopK"):
        raise UsageError(
            f"distribute(): compression {compression} is not for strategy.type {strategy or 'AllReduce'}: "
            f"use BF16, FP16 or {'TopK' if on_servers else 'PowerSGD'}"
        )
    if compression not in ("PowerSGD", "TopK"):
        return
    if compression == "PowerSGD" and any(isinstance(item, torch.optim.LBFGS) for item in optimizers):
        raise UsageError(
            "distribute(): compression PowerSGD does not go with LBFGS, which compares a batch's gradients "
            "with each other: use compression BF16"
        )
    scalers = enabled_among(tracked)
    if compression == "PowerSGD" and scalers:
        raise UsageError(
            f"distribute(): {scalers[0]} is a GradScaler, whose scale PowerSGD's residuals cannot follow: "
            "train in bfloat16 without it, or use compression FP16 or BF16"
        )
    if len(scalers) > 1:
        raise UsageError(
            f"distribute(): {' and '.join(scalers)} are GradScalers, and compression TopK takes one: it "
            "keeps what is left out without its scale"
        )


def _check_tables(models: Sequence[torch.nn.Module], strategy: str, exact: bool) -> list[str]:
    parameters = _named(models)
    tables = [name for name, item in parameters.items() if handle_of(item) is not None and item.requires_grad]
    if strategy == "Hybrid" and not tables:
        raise UsageError(
            "distribute(): strategy.type Hybrid keeps embedding tables on servers, and the model has none: "
            "use springtide.Embedding or EmbeddingBag, or strategy.type AllReduce"
        )
    if not tables:
        return tables
    if strategy == "AllReduce" or exact:
        raise UsageError(
            f"distribute(): {tables[0]} is a table of springtide.Embedding, which lies on parameter servers: "
            "use strategy.type Hybrid, or torch.nn.Embedding"
        )
    return tables
