"""Steps of a model on a device, on a make-believe one: the sums of the CPU, and a host that waits once."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
from fake_device import DEVICE, Accelerator, There
from torch.nn import functional as F
from worker_ranks import Rank, on_ranks, seeded

from springtide.comm.nccl import DeviceSums

STEPS = 6
FIRST = 2
"""The step from which on it is known what moves, and how often a script calls backward."""


class FarBackend:
    """Sums of the make-believe device, as NCCL takes them: where they lie, of any type."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.sums: list[tuple[torch.dtype, int]] = []

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        assert all(isinstance(tensor, There) for tensor in tensors)
        self.sums.append((tensors[0].dtype, tensors[0].numel()))
        return self._backend.allreduce([tensor.here for tensor in tensors], options)


class Waited:
    """Counts how often the host waits for what is queued."""

    def __init__(self) -> None:
        self.times = 0

    def record(self, device: torch.device) -> Waited:
        self.times += 1
        return self

    def query(self) -> bool:
        return True


@dataclass
class Outcome:
    """Parameters and buffers; and of the later steps: where the host read from the device, how often it
    waited for sums, and what was summed there.
    """

    values: list[torch.Tensor]
    reads: list[str]
    waits: int
    sums: list[tuple[torch.dtype, int]]


def train(rank: Rank, device: torch.device, clip_norm: float | None) -> Outcome:
    """Train a model with BatchNorm."""
    with Accelerator() as accelerator:
        with seeded(1):
            x = torch.randn(16 * STEPS, 6)
            blocks = [layer for _ in range(3) for layer in (torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6))]
        model = torch.nn.Sequential(*blocks)
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(parameter.detach().to(device)))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        rank.distribute(model, optimizer, clip_norm=clip_norm)
        backend, waited = FarBackend(rank.runtime.group.backend), Waited()
        if device == DEVICE:
            rank.runtime.group.use_device(DeviceSums(backend, timedelta(seconds=30), None, waited.record))
        batches = rank.batches((x, x[:, :3].argmax(1)), batch_size=16, epochs=1, seed=3)
        for number, batch in enumerate(batches):
            if number == FIRST:
                accelerator.syncs.clear()
                backend.sums.clear()
                waited.times = 0
            with rank.step():
                inputs, labels = batch
                F.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
                optimizer.step()
                optimizer.zero_grad()
        reads = list(accelerator.syncs)
        values = [item.here if isinstance(item, There) else item.detach() for item in state_of(model)]
        return Outcome(values, reads, waited.times, backend.sums)


def state_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_steps_on_a_device_are_the_cpu_s_without_reads(
    clip_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients, buffers and the clipping coefficient stay there."""
    # The make-believe device is of a type that is refused otherwise.
    monkeypatch.setattr("springtide.train_step.validation.check_parameters", lambda *_, **__: None)
    near = on_ranks(2, lambda rank: train(rank, torch.device("cpu"), clip_norm))
    far = on_ranks(2, lambda rank: train(rank, DEVICE, clip_norm))
    for one, other in zip(near, far, strict=True):
        torch.testing.assert_close(other.values, one.values, rtol=1e-5, atol=1e-6)
        assert other.reads == []
        later = STEPS - FIRST
        # The bucket, running means and variances together, and the counts of batches.
        assert other.sums == [(torch.float32, 288), (torch.float32, 36), (torch.int64, 3)] * later
        assert other.waits <= 2 * later, "a second look at what is past, not a wait for each sum"
