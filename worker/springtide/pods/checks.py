"""Refuse whatever cannot be together with `springtide.mesh()`, in one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from springtide.errors import UsageError
from springtide.pods.dims import DATA, MeshShape
from springtide.pods.tensors import is_dtensor, lies_along
from springtide.settings import Settings


def check_settings(settings: Settings) -> None:
    """Check that the job is one in which pods can train as one.

    Args:
        settings: of the process.

    Raises:
        UsageError: it is not.
    """
    if settings.alone and settings.local_world_size > 1:
        raise UsageError(
            f"mesh(): without a job there is one process, and this is one of {settings.local_world_size}: "
            "start the script by itself, or in a TrainingJob with spec.workers.processesPerPod"
        )
    if settings.alone:
        return
    if settings.strategy != "AllReduce":
        raise UsageError(
            f"mesh(): strategy.type {settings.strategy} keeps parameters on servers, and a mesh divides them "
            "among the processes of a pod: use strategy.type AllReduce"
        )
    if settings.shard != "None":
        raise UsageError(
            f"mesh(): strategy.allReduce.shard {settings.shard} divides state among workers, and a mesh "
            "among the processes of a pod: set shard to None"
        )
    if settings.logical_workers:
        raise UsageError(
            "mesh(): fully_shard and tensor parallelism sum in an order of their own, so sums are not exact: "
            "set strategy.allReduce.exact to false"
        )
    if settings.compression == "PowerSGD":
        raise UsageError(
            "mesh(): compression PowerSGD needs whole gradients, and a process has parts: use BF16 or FP16"
        )


def check_model(models: Sequence[torch.nn.Module], shape: MeshShape) -> None:
    """Check the models that a script distributes after it has called `mesh()`.

    Args:
        models: of the script.
        shape: of the mesh.

    Raises:
        UsageError: a parameter would not be summed over the pod, or a module needs sums of its own.
    """
    wanted = [name for name, size in zip(shape.names, shape.sizes, strict=True) if name in DATA and size > 1]
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and (missing := set(wanted) - set(lies_along(parameter))):
                dims = ", ".join(sorted(missing))
                raise UsageError(
                    f"distribute(): the gradient of {name} would not be summed over {dims} of the mesh: call "
                    "fully_shard(model, mesh=...) on the whole model, too"
                )
        for name, buffer in model.named_buffers():
            if is_dtensor(buffer):
                raise UsageError(
                    f"distribute(): the buffer {name} is divided among the processes of the pod, which only "
                    "parameters can be"
                )
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.SyncBatchNorm):
                raise UsageError(
                    f"distribute(): {name} is a SyncBatchNorm, whose sums over the pods cannot stop in the "
                    "middle of a forward pass of fully_shard: use another norm, or springtide without mesh()"
                )


def check_steps(tracked: Mapping[str, Any], multi_step: bool, masters: bool) -> None:
    """Check what a script makes its steps of.

    Args:
        tracked: objects that are committed along, by name.
        multi_step: a body may make more than one optimizer step.
        masters: the script asks for float32 copies of 16-bit parameters.

    Raises:
        UsageError: one of them cannot be together with a mesh.
    """
    if multi_step:
        raise UsageError(
            "distribute(): with mesh() a body makes one optimizer step: give one optimizer, not a list (and "
            "no step(closure))"
        )
    if masters:
        raise UsageError(
            "distribute(): master_weights copies parameters, which mesh() divides: keep them in float32, and "
            "have fully_shard compute in bfloat16 (mp_policy=MixedPrecisionPolicy(param_dtype=...))"
        )
    for name, item in tracked.items():
        if isinstance(item, torch.amp.GradScaler) and item.is_enabled():
            raise UsageError(
                f"distribute(): {name} is a GradScaler, which would look at this process's part of the "
                "gradients alone: train in bfloat16 (MixedPrecisionPolicy of fully_shard), which needs none"
            )
        if not isinstance(item, torch.optim.lr_scheduler.LRScheduler) and _holds_divided(item.state_dict()):
            raise UsageError(
                f"distribute(): {name} holds tensors that are divided among the processes of the pod, which "
                "only the model and its optimizer can"
            )


def _holds_divided(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_divided(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_divided(item) for item in value)
    return is_dtensor(value)
