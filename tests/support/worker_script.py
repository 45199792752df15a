"""The training script of the worker's integration tests. argv: RESULT_FOLDER JSON_OPTIONS.

Writes RESULT_FOLDER/POD.json at its end: a digest of parameters and of buffers, their values, the sequence of
learning rates by step, and the ledger's audit.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import springtide
import springtide.comm.codec


class Moody(torch.nn.Module):
    """Passes its input through; one buffer moves always, one in some steps and then not on every worker."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("rare", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if float(x.detach()[0, 0]) > 0.3:
            self.rare += x.detach()[0, :2]
        return x


class Wide(torch.nn.Module):
    """Embedding tables of any int64, of bags with weights and of a plain lookup, beside dense layers.

    One of them is used in every second step only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wide = springtide.EmbeddingBag(None, 3, mode="sum", seed=1, scale=0.1, slices=3)
        self.deep = springtide.Embedding(None, 4, seed=2, scale=0.3, slices=4)
        self.rare = springtide.Embedding(50, 3, padding_idx=0, seed=3, slices=2)
        self.layers = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x * 3).round().long()
        ids[:, 0] += 2**60
        out = self.wide(ids[:, :4], per_sample_weights=x[:, :4])
        out = out + self.layers(torch.cat((self.deep(ids[:, 4:8]).flatten(1), x[:, 4:8]), 1))
        # Of the batch alone, whoever computes it and when.
        if springtide.api.active_runtime.trainer.batch_number % 2 == 0:
            out = out + self.rare(ids[:, 9].abs() % 50)
        return out


class Sums(torch.nn.Module):
    """Linear in its parameters; with a loss that is linear, too, gradients are those of the data alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(12, 33) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(
            (
                number * layer(x).view(len(x), -1, 3).sum(1)
                for number, layer in enumerate(self.layers, start=1)
            ),
            start=x.new_zeros(len(x), 3),
        )


class SumsOfRows(Sums):
    """The same with tables, in whose rows it is linear, too."""

    def __init__(self) -> None:
        super().__init__()
        self.some = springtide.EmbeddingBag(None, 3, mode="sum", seed=1, scale=0.1, slices=3)
        self.few = springtide.Embedding(50, 3, seed=2, scale=0.3, slices=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x * 3).round().long()
        ids[:, 0] += 2**60
        out = super().forward(x) + self.some(ids[:, :4], per_sample_weights=x[:, :4])
        return out + 3 * self.few(ids[:, 9].abs() % 50)


class Own(torch.optim.Adam):
    """An optimizer of the script's own."""

    elementwise = True


def make_model(kind: str, hidden: int = 32) -> torch.nn.Module:
    if kind == "tables":
        return Wide()
    if kind == "sums":
        return Sums()
    if kind == "rows":
        return SumsOfRows()
    layers: list[torch.nn.Module] = [torch.nn.Linear(12, hidden)]
    if kind == "norm":
        layers += [torch.nn.BatchNorm1d(hidden), Moody()]
    layers += [torch.nn.ReLU(), torch.nn.Linear(hidden, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 3)]
    return torch.nn.Sequential(*layers)


def make_data(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 12, generator=generator)
    y = (x[:, :3] + 0.3 * torch.randn(samples, 3, generator=generator)).argmax(1)
    return x, y


class Rows(torch.utils.data.IterableDataset[Any]):
    """Samples that are read in ranges."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._x)

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def read_range(self, start: int, stop: int) -> Iterator[Any]:
        yield from zip(self._x[start:stop], self._y[start:stop], strict=True)


def deal(stage: int, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """Another dataset for each loop, with its arguments of batches()."""
    if stage == 0:
        return (x, y), {"weights": 1 + torch.arange(len(x)) % 3}
    if stage == 1:
        return Rows(x[:100], y[:100]), {"shuffle": False}
    return torch.utils.data.TensorDataset(x[40:], y[40:]), {"drop_last": True}


def in_shards(options: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """The samples in shards, which are read from their begin, with arguments of batches()."""
    lengths = options["shards"]
    firsts = [sum(lengths[:shard]) for shard in range(len(lengths))]

    def read(shard: int) -> Iterator[Any]:
        for number in range(firsts[shard], firsts[shard] + lengths[shard]):
            if noise := options.get("noise"):  # as augmentation draws it
                yield x[number] + noise * torch.randn(12), y[number]
            else:
                yield x[number], y[number]

    names = range(len(lengths))
    return springtide.data.Shards(names, read), dict(options.get("dealing", {}))


def note_samples(folder: Path, batch: Any) -> None:
    """Write which samples go into the gradients of a step, and in which generation."""
    runtime = springtide.api.active_runtime
    generation = None if runtime.membership is None else runtime.membership.generation
    line = {
        "step": runtime.trainer.batch_number,
        "generation": "" if generation is None else str(generation),
        "ids": batch.ids.tolist(),
    }
    name = os.environ.get("SPRINGTIDE_POD_NAME", "alone")
    with open(folder / f"{name}.samples", "a") as file:
        file.write(json.dumps(line) + "\n")


def make_loggers(folders: dict[str, str]) -> list[Any]:
    """Trackers by name, each in its folder."""
    from springtide.loggers import MLflow, TensorBoard, WandB

    make = {
        "tensorboard": TensorBoard,
        "mlflow": lambda folder: MLflow("test", tracking_uri=f"file://{folder}"),
        "wandb": lambda folder: WandB("test", folder=folder, mode="offline"),
    }
    warnings.simplefilter("default")  # their libraries' own
    return [make[name](folder) for name, folder in folders.items()]


def digest(tensors: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name, tensor in tensors.items():
        total.update(name.encode() + tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def fork_child(folder: Path) -> None:
    """Have a child, as a DataLoader has, which keeps this process's connections open when it is killed."""
    if child := os.fork():
        # At once, since who waits for the file kills this process.
        written = folder / "child.new"
        written.write_text(str(child))
        written.rename(folder / "child")
    else:
        time.sleep(3600)


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    x, y = make_data(options["samples"])
    # Members that have not received the first member's state must be seen to differ.
    slot = int(os.environ.get("SPRINGTIDE_SLOT", "0"))
    torch.manual_seed(0 if options.get("same_start") else slot)
    device = options.get("device", "cpu")
    if device == "cuda by slot":  # and not the current one
        device = f"cuda:{int(os.environ.get('SPRINGTIDE_SLOT', '0')) % torch.cuda.device_count()}"
    if device != "cpu":
        warnings.simplefilter("default")  # drivers and compilers warn of what nobody has seen here
    model = make_model(options.get("model", "plain"), options.get("hidden", 32)).to(device)
    dtype = torch.bfloat16 if "masters" in options else torch.float32
    model = model.to(dtype)
    if "expanded" in options:
        model.register_buffer("mask", torch.full((1, 1), 2.0).expand(4, 4))
    if slot in options.get("no_memory", []):

        def fail(header: bytes, limit_bytes: int) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nDetails follow.")

        springtide.comm.codec.specs = fail  # where a state that comes is looked at first
    criterion = F.nll_loss if options.get("model") in ("sums", "rows") else F.cross_entropy
    kinds = {"adam": torch.optim.Adam, "own": Own, "fused": partial(torch.optim.AdamW, eps=1e-3, fused=True)}
    kind: Any = kinds.get(options.get("optimizer", ""), torch.optim.SGD)
    arguments: dict[str, Any] = {"momentum": options.get("momentum", 0.9)} if kind is torch.optim.SGD else {}
    for parameter in list(model.parameters())[: options.get("frozen", 0)]:
        parameter.requires_grad_(False)
    own, rest = [p for p in model.parameters() if p.requires_grad], list[torch.nn.Parameter]()
    if "two" in options:  # optimizers, each with its own parameters
        own, rest = own[:3], own[3:]
    optimizer = kind(own, lr=options.get("lr", 0.1), **arguments)
    others = [torch.optim.Adam(rest, lr=0.01)] if rest else []
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, options.get("decay", 0.995))
    if "trackers" in options:
        springtide.init(loggers=make_loggers(options["trackers"]), config={"lr": options.get("lr", 0.1)})
    else:
        springtide.init()
    # Powers of two: scaled gradients have the bits of plain ones. Small enough, so that nothing overflows.
    scaler = torch.amp.GradScaler(
        device.partition(":")[0], 256.0, growth_interval=9, enabled="scaler" in options
    )
    if "infinite" in options:
        # torch warns where a worker's first step is skipped: the schedule goes on all the same.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
    compute = torch.compile(model, backend=options["compile"]) if "compile" in options else model
    lists = "lists" in options or bool(others)
    tracked: dict[str, Any] = {}
    if "average" in options:
        # Reads the parameters in each body after the optimizer's step.
        tracked["average"] = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    springtide.distribute(
        [model] if lists else model,
        [optimizer, *others] if lists else optimizer,
        scheduler=scheduler,
        scaler=scaler,
        clip_norm=options.get("clip_norm"),
        master_weights="masters" in options,
        **tracked,
    )
    rates: dict[int, float] = {}
    for stage in range(options.get("loops", 1)):
        dataset, dealing = deal(stage, x, y) if "datasets" in options else ((x, y), {})
        if "shards" in options:
            dataset, dealing = in_shards(options, x, y)
        if [stage, slot] in options.get("other_order", []):  # as `os.listdir` on another node
            dataset = (x.flip(0), y.flip(0))
        for batch in springtide.batches(
            dataset,
            **dealing,
            batch_size=options["batch"],
            epochs=options["epochs"],
            seed=5 + stage,
            loader_workers=options.get("loader_workers", 0),
            rehearsals=options.get("rehearsals", 0),
            verify_samples=options.get("verify_samples", 8),
        ):
            with springtide.step():
                is_past = springtide.api.active_runtime.steps.is_past
                if "shards" in options and not is_past:
                    note_samples(folder, batch)
                # One sample of the first two epochs overflows.
                broken = springtide.api.active_runtime.position.cursor.epoch < 2 and bool(
                    (batch.ids == options.get("infinite", -1)).any()
                )
                for micro in batch.split(options.get("split", 1)):
                    inputs, labels = (item.to(device) for item in micro)
                    scheduler_before = optimizer.param_groups[0]["lr"]
                    loss = criterion(compute(inputs.to(dtype)).float(), labels)
                    for rest in reversed(range(options.get("backwards", 1))):  # each of a part of the loss
                        part = loss / options.get("backwards", 1) if "backwards" in options else loss
                        scaler.scale(part * float("inf") if broken else part).backward(
                            retain_graph=bool(rest)
                        )
                    springtide.report(loss=loss)
                # As a device that takes so long for each sample, and more where it is held back.
                each = options.get("sample_seconds", {}).get(str(slot), 0.0)
                if pause := options.get("pace", 0.0) + each * batch.samples:
                    time.sleep(pause)
                if "rate_by_count" in options:  # of this process: a worker that joins begins anew
                    optimizer.param_groups[0]["lr"] = options["rate_by_count"] / (1 + len(rates))
                scaler.step(optimizer)
                if "rounds" in options:  # another backward, through what the first step has made
                    for average in tracked.values():
                        average.update_parameters(model)
                    model.zero_grad()
                    for inputs, labels in batch.split(options.get("split", 1)):
                        scaler.scale(0.5 * F.cross_entropy(model(inputs), labels)).backward()
                for other in others:
                    scaler.step(other)
                scaler.update()
                scheduler.step()
                for average in tracked.values():
                    average.update_parameters(model)
                model.zero_grad()
                if not is_past:
                    rates[springtide.api.active_runtime.trainer.batch_number] = scheduler_before
            if [springtide.api.active_runtime.position.cursor.step, slot] == options.get("forks"):
                fork_child(folder)
            if [springtide.api.active_runtime.position.cursor.step, slot] in options.get("spoilt", []):
                with torch.no_grad():  # as memory that flips bits
                    for parameter in model.parameters():
                        parameter.data.mul_(1.0 + 2**-20)
            if [springtide.api.active_runtime.position.cursor.step, slot] in options.get(
                "spoilt_buffers", []
            ):
                for buffer in model.buffers():
                    buffer.add_(1)
            if [springtide.api.active_runtime.position.cursor.step, slot] in options.get("spoilt_state", []):
                for piece in springtide.api.active_runtime.trainer.shards.held.pieces:
                    piece.state["exp_avg"].mul_(1.0 + 2**-20)
            if springtide.api.active_runtime.position.cursor.step == options.get("stop_at"):
                return
    springtide.report(final=1.0)
    runtime = springtide.api.active_runtime
    assert runtime is not None
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name, module in model.named_modules():
        if isinstance(module, springtide.Embedding | springtide.EmbeddingBag):
            ids, rows = module.export()
            parameters |= {f"{name}.ids": (ids % 1000).float(), f"{name}.rows": rows}
    for average in tracked.values():
        parameters |= {f"average.{name}": item for name, item in average.named_parameters()}
    result = {
        "parameters": digest(dict(parameters)),
        "buffers": digest(buffers),
        "values": torch.cat([p.detach().reshape(-1) for p in parameters.values()]).tolist(),
        "buffer_values": [b.reshape(-1).tolist() for b in buffers.values()],
        "rates": rates,
        "rate_at_end": optimizer.param_groups[0]["lr"],
        "audit": runtime.position.ledger.audit(),
        "step": runtime.position.cursor.step,
        "pid": os.getpid(),
        "world": springtide.world_size(),
    }
    name = os.environ.get("SPRINGTIDE_POD_NAME", "alone")
    (folder / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
