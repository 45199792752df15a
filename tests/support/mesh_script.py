"""The script of the tests of models that are divided in a pod. argv: RESULT_FOLDER JSON_OPTIONS.

Writes RESULT_FOLDER/POD.LOCAL_RANK.json at its end: the whole parameters, and what the optimizer holds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import springtide
import springtide.api


class Block(nn.Module):
    """Two layers beside a residual connection; 7 features do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(7)
        self.up, self.down = nn.Linear(7, 12), nn.Linear(12, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A batch norm sees the input, and nobody sees what it makes of it: parts have statistics of their own.

    The mean over samples is that of the whole batch, however it is cut.
    """

    def __init__(self) -> None:
        super().__init__()
        # It adds nothing: what is wrong there stays wrong, and spoils nothing else.
        self.idle = nn.Parameter(torch.ones(64))
        self.seen = nn.BatchNorm1d(1, affine=False)
        self.begin, self.end = nn.Linear(5, 7), nn.Linear(7, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen(x[:, None])
        x = self.begin(x + 0.0 * self.idle.sum())
        for block in self.blocks:
            x = block(x)
        return self.end(x)


def divide(model: Net, options: dict[str, Any]) -> None:
    """Divide the model as the options say."""
    mesh = springtide.mesh(*options.get("mesh", ["dp_shard"]))
    if options.get("alone"):
        return
    names = mesh.mesh_dim_names
    if "tp" in names:
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    data = tuple(name for name in names if name != "tp")
    if data:
        part = mesh[data] if len(names) > len(data) else mesh
        for block in model.blocks:
            fully_shard(block, mesh=part)
        fully_shard(model, mesh=part)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def whole(tensor: torch.Tensor) -> list[float]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return [float(number) for number in full.detach().flatten()]


def evaluate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """Return the means over all samples: the loss, and the samples' numbers, of which none is left out."""
    evaluation = springtide.batches((x, y, torch.arange(float(len(x)))), batch_size=2, train=False)
    model.eval()
    for features, classes, numbers in evaluation:
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(features), classes)
        springtide.report(held_out=loss, number=numbers.mean())
    model.train()
    return evaluation.values


def say_refusals() -> None:
    """Make calls that are refused, and print the reasons."""

    def refused(call: Callable[[], object]) -> None:
        try:
            call()
        except springtide.UsageError as error:
            print(f"refused: {error}", flush=True)

    refused(lambda: springtide.mesh("dp_shard", 3))
    mesh = springtide.mesh()
    refused(lambda: springtide.mesh("tp"))
    model = Net()
    fully_shard(model.blocks[0], mesh=mesh)
    refused(lambda: springtide.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused(lambda: springtide.distribute(model, [optimizer]))
    springtide.distribute(model, optimizer)
    data = torch.zeros(4, 5), torch.zeros(4)
    refused(lambda: springtide.batches(data, batch_size=2, rehearsals=1))
    refused(springtide.mesh)


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    options |= options.get("only", {}).get(os.environ.get("SPRINGTIDE_POD_NAME"), {})
    # Of one process of the pod alone.
    if fault := options.get("faults", {}).get(os.environ.get("LOCAL_RANK", "0")):
        os.environ["SPRINGTIDE_FAULT"] = f"{os.environ.get('SPRINGTIDE_FAULT', '')};{fault}".strip(";")
    springtide.init()
    if options.get("calls"):
        say_refusals()
        return
    torch.manual_seed(7)
    model = Net()
    device = springtide.mesh(*options.get("mesh", ["dp_shard"])).device_type
    model.to(device)
    divide(model, options)
    optimizer = make_optimizer(options.get("optimizer", "adamw"), model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    springtide.distribute(model, optimizer, scheduler=scheduler, clip_norm=options.get("clip_norm"))
    generator = torch.Generator().manual_seed(3)
    samples = options.get("samples", 45)
    x = torch.randn(samples, 5, generator=generator)
    y = torch.randint(3, (samples,), generator=generator)
    loops = springtide.batches(
        (x, y),
        batch_size=options.get("batch", 10),
        epochs=options.get("epochs", 4),
        seed=1,
        min_part=1,
        micro_batch=options.get("micro_batch"),
    )
    pieces = options.get("pieces", 1)
    runtime = springtide.api.active_runtime
    assert runtime is not None
    evaluated: dict[int, dict[str, float]] = {}
    for batch in loops:
        with springtide.step():
            optimizer.zero_grad()
            for micro in batch.split(pieces):
                features, classes = (part.to(device) for part in micro)
                loss = nn.functional.cross_entropy(model(features), classes)
                loss.backward()
                springtide.report(loss=loss.item())
            optimizer.step()
            scheduler.step()
        time.sleep(options.get("pace", 0.0))
        step = runtime.position.cursor.step
        if [step, springtide.local_rank()] == options.get("spoilt"):
            with torch.no_grad():
                model.idle.to_local().add_(1.0)  # type: ignore[attr-defined]
        if step in options.get("evaluate", []):
            evaluated[step] = evaluate(model, x, y)
    trained = {name: whole(parameter) for name, parameter in model.named_parameters()}
    held = {
        name: {key: whole(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
    }
    name = f"{runtime.settings.pod_name or 'alone'}.{springtide.local_rank()}.json"
    buffers = {name: whole(buffer) for name, buffer in model.named_buffers()}
    found = {"parameters": trained, "optimizer": held, "buffers": buffers, "evaluated": evaluated}
    (folder / name).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
