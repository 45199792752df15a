"""The figures that `make gpu` reports. On the CPU the same code runs with little to do, and nobody looks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_capabilities import cuda_param, needs_cuda, record_figure
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from worker_alone import library
from worker_groups import form_groups, together

import springtide
from benchmarks import steady_state
from benchmarks.support.sides import Turn
from benchmarks.support.zygote import Zygote
from springtide.comm import codec
from springtide.comm.state_transfer import Destination, Landing, Reception, receive_state, roles, send_state
from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.ps.host_memory import CudaCopier
from springtide.train_step.buffers import Buffers
from springtide.train_step.state import Position, State

Record = Callable[[str, object], None]
DEVICES = ["cpu", cuda_param("figures")]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.fixture
def native_group(request: pytest.FixtureRequest) -> Iterator[None]:
    """torch's default group, of one rank; NCCL's on a device."""
    backend = "nccl" if request.node.callspec.params["device"] == "cuda" else "gloo"
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layers(width: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    made = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*made, nn.Linear(width, 10)).to(device)


@pytest.mark.usefixtures("native_group")
@pytest.mark.parametrize("device", DEVICES)
def test_step_of_one_process_against_ddp(device: str, record_property: Record) -> None:
    """Step by step in turn, on the same samples."""
    width, batch_size, steps = (2048, 256, 60) if device == "cuda" else (8, 4, 3)
    x, y = torch.randn(steps * batch_size, width), torch.randint(10, (steps * batch_size,))
    native = DistributedDataParallel(layers(width, device))
    native_optimizer = torch.optim.SGD(native.parameters(), lr=0.01, momentum=0.9)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    with library():
        model = layers(width, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        springtide.distribute(model, optimizer)
        began = time.perf_counter()
        for batch in springtide.batches((x, y), batch_size=batch_size):
            with springtide.step():
                inputs, labels = (item.to(device) for item in batch)
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            synchronize(device)
            seconds["ours"].append(time.perf_counter() - began)
            began = time.perf_counter()
            inputs, labels = x[batch.ids].to(device), y[batch.ids].to(device)
            F.cross_entropy(native(inputs), labels).backward()
            native_optimizer.step()
            native_optimizer.zero_grad()
            synchronize(device)
            seconds["theirs"].append(time.perf_counter() - began)
            began = time.perf_counter()
    for mine, same in zip(model.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(mine, same, rtol=1e-3, atol=1e-4)
    ours, theirs = (statistics.median(seconds[side][steps // 3 :]) for side in ("ours", "theirs"))
    record_figure(record_property, "step_ratio_one_process", ours / theirs)


@needs_cuda("figures")
def test_step_of_two_processes_against_ddp(record_property: Record) -> None:
    with Zygote(steady_state.Job.script) as zygote:
        found = steady_state.measure("mlp", 25, Turn(20, 10, 2), zygote, "cuda", starts=1)
    record_figure(record_property, "step_ratio_two_processes", found["ratio_to_ddp"])


@needs_cuda("figures")
def test_copies_beside_compute(record_property: Record) -> None:
    """Gradients down and values up, alone, and beside as much compute as that takes."""
    device = torch.device("cuda", 0)
    copier, size = CudaCopier(device), 64 << 20
    leaves, comes = (torch.zeros(size, device=device) for _ in range(2))
    down, up = (copier.host(size, torch.float32) for _ in range(2))
    matrix = torch.full((4096, 4096), 1 / 4096, device=device)

    def copies(between: int = 0) -> None:
        copier.to_host(leaves, down)
        copier.mark()
        compute(between)
        copier.to_device(up, comes)

    def compute(count: int) -> None:
        product = matrix
        for _ in range(count):
            product = product @ matrix

    def seconds(call: Callable[[], None]) -> float:
        """Return the shortest of three."""
        measured = []
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            measured.append(time.perf_counter() - began)
        return min(measured)

    copying, one = seconds(copies), seconds(lambda: compute(20)) / 20
    count = max(1, round(copying / one))
    computing, both = seconds(lambda: compute(count)), seconds(lambda: copies(count))
    record_figure(record_property, "copy_overlap", (copying + computing - both) / min(copying, computing))


@pytest.mark.parametrize("device", DEVICES)
def test_state_goes_from_device_to_device(device: str, record_property: Record) -> None:
    """Through the host of both, over loopback, until it lies on the other's device."""
    size = (256 << 20) if device == "cuda" else 4096  # of float32
    groups = form_groups(2)
    scripts = [torch.nn.Module() for _ in groups]
    for rank, module in enumerate(scripts):
        for number in range(8):
            values = torch.randn(size // 8, device=device) + rank
            module.register_parameter(f"p{number}", torch.nn.Parameter(values))
    states = [State(dict(module.named_parameters()), Buffers(module), [], {}) for module in scripts]
    position, who = Position(Cursor(), Ledger()), roles([1], 2)

    def send() -> int:
        return send_state(
            groups[0], who, codec.flatten_in_place(states[0].read(position, {})), lambda _: True
        )

    def prepare(outline: Any) -> Destination:
        return Destination(states[1].places(outline), in_place=True)

    def receive() -> None:
        tree, _ = receive_state(groups[1], who, Reception(prepare, 2 << 30, lambda: None, Landing()))
        states[1].write(tree, give=True)
        synchronize(device)

    synchronize(device)
    began = time.perf_counter()
    together([send, receive], 80.0)
    seconds = time.perf_counter() - began
    for sent, arrived in zip(*(module.parameters() for module in scripts), strict=True):
        assert torch.equal(arrived, sent)
    assert all(group.release() for group in groups)
    record_figure(record_property, "transfer_seconds_per_gib", seconds / (4 * size / 2**30))
