"""Memory of a model: state against that of real optimizers, storages that count once, and the limit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from springtide.coordination.membership import Membership
from springtide.coordination.metrics import Metrics
from springtide.errors import MemoryLimitError, SpringtideError
from springtide.memory.mapped import FileMappings
from springtide.memory.model import count, limit_of
from springtide.memory.optimizer_state import COPIES, known_state_bytes, measured_state_bytes
from springtide.memory.report import MemoryReport
from springtide.settings import Settings
from springtide.sharding.pieces import ELEMENTWISE
from springtide.train_step.options import TrainerOptions
from springtide.train_step.trainer import Trainer
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.memory import CONTAINER

CPU = torch.device("cpu")
OPTIONS: dict[type[torch.optim.Optimizer], list[dict[str, Any]]] = {
    torch.optim.SGD: [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}],
    torch.optim.Adam: [{}, {"amsgrad": True}],
    torch.optim.AdamW: [{}, {"amsgrad": True}],
    torch.optim.RMSprop: [{}, {"momentum": 0.5}, {"centered": True}, {"centered": True, "momentum": 0.5}],
}


class Counting(torch.optim.Adam):
    """A class of the script's own."""

    elementwise = True


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((7, 30), (40,), (3, 2, 5))]


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: str(kind.__name__))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_known_state_is_what_real_optimizers_keep(
    kind: Callable[..., torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    assert kind in COPIES
    for options in OPTIONS.get(cast("type[torch.optim.Optimizer]", kind), [{}]):
        first, *rest = parameters(dtype)
        optimizer = kind([{"params": [first]}, {"params": rest, "lr": 0.25}], lr=0.5, **options)
        known = known_state_bytes(optimizer)
        for parameter in (first, *rest):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.step()
        assert known == measured_state_bytes(optimizer), (kind, options)


def test_masters_are_state_and_the_rest_is_float32_then() -> None:
    half, whole = parameters(torch.bfloat16)[0], parameters()[1]
    optimizer = torch.optim.AdamW([half, whole])
    assert known_state_bytes(optimizer, masters=True) == 12 * half.numel() + 8 * whole.numel()


def test_other_optimizers_are_not_known() -> None:
    assert known_state_bytes(Counting(parameters())) is None
    assert known_state_bytes(torch.optim.Adafactor(parameters())) is None


def trainer_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, bucket_bytes: int = 1 << 20
) -> Trainer:
    return Trainer([model], [optimizer], {}, TrainerOptions(bucket_bytes=bucket_bytes))


def test_shared_and_frozen_parameters_and_buffers_count_once(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 10, bias=False))
    model[1].weight = model[0].weight
    model.add_module("frozen", torch.nn.Linear(5, 4, bias=False))
    model.frozen.weight.requires_grad_(False)
    model.register_buffer("mask", torch.zeros(6))
    torch.save(torch.zeros(1000), tmp_path / "mapped")
    model.register_buffer("mapped", torch.load(tmp_path / "mapped", mmap=True))
    optimizer = torch.optim.Adam([model[0].weight])
    trainer = trainer_of(model, optimizer)
    found = count([model], [optimizer], trainer.buckets.layout, CPU, shard="None", steps_here=True)
    assert found.parameters == 4 * (100 + 20 + 6)
    assert found.state == 2 * 400
    assert found.gradients == sum(trainer.buckets.layout.sizes) * 4
    assert (found.bucket, found.limit, found.limited_by) == (found.gradients, 0, CONTAINER)
    on_servers = count([model], [optimizer], trainer.buckets.layout, CPU, shard="None", steps_here=False)
    assert on_servers.state == 0
    trainer.close()


def test_mappings_of_files_are_told_from_memory() -> None:
    text = (
        "00400000-00452000 r-xp 00000000 08:02 173521  /usr/bin/some thing\n"
        "7f00-7f80 rw-p 00000000 00:00 0\n"
        "7f80-7fa0 rw-p 00000000 00:00 0   [heap]\n"
        "7fb0-7fc0 rw-s 00000000 00:01 12  /dev/shm/torch_1\n"
        "7fd0-7fe0 rw-s 00000000 00:01 12  /memfd:x (deleted)\n"
        "8000-9000 r--p 00000000 08:02 99  /data/model.pt\n"
    )
    found = FileMappings(text)
    assert [
        address
        for address in (0x400000, 0x452000, 0x7F00, 0x7F90, 0x7FB8, 0x7FD1, 0x8000, 0x8FFF)
        if found.has(address)
    ] == [0x400000, 0x8000, 0x8FFF]
    assert not FileMappings("").has(1)


def test_the_pods_limit_is_shared_by_its_processes() -> None:
    assert limit_of(CPU, 1000, 4) == 250
    alone = limit_of(CPU, 0, 1)
    assert alone > 0
    assert limit_of(CPU, 0, 2) == alone // 2


class Told:
    """Keep what a membership is told."""

    def __init__(self) -> None:
        self.messages: list[pb.Memory] = []

    def report_memory(self, message: pb.Memory) -> None:
        self.messages.append(message)


def report(told: Told, limit: int, shard: str = "None") -> MemoryReport:
    settings = Settings(memory_bytes=limit, shard=shard)
    return MemoryReport(settings, Metrics("job", "space"), cast(Membership, told))


def begun(limit: int, make: Any = torch.optim.Adam) -> tuple[MemoryReport, Told, Trainer, Any]:
    """A model of 4,000 bytes, with as many of gradients and twice as many of state."""
    model = torch.nn.Linear(1000, 1, bias=False)
    optimizer = make(model.parameters())
    trainer, told = trainer_of(model, optimizer), Told()
    found = report(told, limit)
    found.begin(trainer, [model], [optimizer])
    return found, told, trainer, optimizer


def start(size: int, minimum: int = 1, **fields: Any) -> pb.Start:
    return pb.Start(members=[pb.Member(id=str(number)) for number in range(size)], minimum=minimum, **fields)


def test_job_that_cannot_shrink_to_its_minimum_does_not_begin() -> None:
    found, told, trainer, _ = begun(limit=15_000)
    assert (told.messages[0].parameter_bytes, told.messages[0].state_bytes) == (4000, 8000)
    with pytest.raises(MemoryLimitError, match=r"as few as workers.minReplicas allows.*Gradients"):
        found.check(start(8, minimum=1, fresh=True), holds_state=False)
    trainer.close()


def test_job_that_trains_is_not_ended_by_its_minimum() -> None:
    found, _, trainer, _ = begun(limit=15_000)
    for message in (start(8), start(8, fresh=True, had_state=True)):
        with pytest.raises(SpringtideError, match="this worker has no room") as raised:
            found.check(message, holds_state=False)
        assert not isinstance(raised.value, MemoryLimitError)
    found.check(start(8), holds_state=True)  # what it holds would be lost with it
    trainer.close()


def test_enough_memory_and_unknown_minimum_begin() -> None:
    for limit in (17_000, 0):
        found, _, trainer, _ = begun(limit)
        found.check(start(1, fresh=True), holds_state=False)
        trainer.close()
    found, _, trainer, _ = begun(limit=15_000)
    found.check(start(8, minimum=0, fresh=True), holds_state=True)
    trainer.close()


def test_unknown_optimizer_is_measured_after_its_first_step() -> None:
    found, told, trainer, optimizer = begun(15_000, Counting)
    assert told.messages[0].state_bytes == 0
    found.check(start(3, fresh=True), holds_state=False)  # nothing is known against it yet
    for parameter in optimizer.param_groups[0]["params"]:
        state = optimizer.state[parameter]
        state["step"] = torch.tensor(1.0)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros(1, 1000), torch.zeros(1, 1000)
    found.committed(trainer)
    found.committed(trainer)
    assert [message.state_bytes for message in told.messages] == [0, 8000]
    trainer.close()


def test_alone_nothing_is_counted() -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = trainer_of(model, optimizer)
    found = MemoryReport(Settings(memory_bytes=1), Metrics("", ""), None)
    found.begin(trainer, [model], [copy.copy(optimizer)])
    found.committed(trainer)
    found.check(start(1, fresh=True), holds_state=False)
    trainer.close()
