"""Count what a model takes, before it is trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from springtide.comm.layout import Layout
from springtide.launch.cgroup import memory_limit
from springtide.memory.mapped import FileMappings
from springtide.memory.optimizer_state import known_state_bytes
from springtide.pods.tensors import local_shard
from springtide_protocol.memory import CONTAINER, DEVICE, ModelMemory


def count(
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    layout: Layout,
    device: torch.device,
    *,
    shard: str,
    steps_here: bool,
    masters: bool = False,
) -> ModelMemory:
    """Return what the script's model takes in the memory of a device, without a limit.

    Args:
        models: Of the script.
        optimizers: Of the script; the state of those that are not known counts as nothing yet.
        layout: Of the gradients.
        device: That trained parameters are on.
        shard: The part of it that workers share out.
        steps_here: Workers keep the optimizer's state, and not servers.
        masters: Parameters of 16 bits have float32 copies, which the optimizers step.
    """
    buckets = [size * dtype.itemsize for size, dtype in zip(layout.sizes, layout.dtypes, strict=True)]
    tensors = [item for model in models for item in (*model.parameters(), *model.buffers())]
    known = [known_state_bytes(optimizer, masters) or 0 for optimizer in optimizers]
    state = sum(known) if steps_here else 0
    return ModelMemory(
        parameters=max(1, _storage_bytes(tensors, device)),
        gradients=sum(buckets),
        bucket=max(buckets, default=0),
        state=state,
        shard=shard,
        limited_by=CONTAINER if device.type == "cpu" else DEVICE,
    )


def _storage_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Return the bytes of the memory that tensors lie in; shared memory counts once, and of a divided tensor
    the part that is here.

    Memory that is mapped from a file is left out: the machine can drop it and read it again.
    """
    mapped = FileMappings.of_this_process() if device.type == "cpu" else FileMappings("")
    found: dict[int, int] = {}
    for tensor in map(local_shard, tensors):
        if tensor.device != device:
            continue
        storage = tensor.untyped_storage()
        if not mapped.has(storage.data_ptr()):
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def limit_of(device: torch.device, told: int, processes: int) -> int:
    """Return the bytes that one process may take; 0 where that is not known.

    Args:
        device: That trained parameters are on.
        told: For all processes of a pod together, where somebody says so; 0 otherwise.
        processes: Of the pod.
    """
    if told:
        return told // processes
    if device.type == "cpu":
        return (memory_limit() or 0) // processes
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(device).total_memory)
    return 0
