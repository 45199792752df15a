"""The cost of a step against native DistributedDataParallel, by turns.

    python -m benchmarks.steady_state [--quick] [--json FILE] [--device cuda]

Three models, two bucket sizes each; then one model each of the kinds that cost something else: a head that no
loss uses (DDP with find_unused_parameters), 600 small tensors, BatchNorm behind every layer, and sequences
that a collate_fn of the script's pads, with a process that reads ahead (DDP with a DataLoader). A step is:
deal the batch, forward, backward, optimizer step; both sides read as many samples with the same optimizer
over gloo on loopback, in two processes each.

Each side is a job by itself, as users have it, and the two make steps by turns. Turns are short, since the
machine's own speed changes within a second. A turn's first step does not count: it finds the processor's
caches full of the other side's. A step takes as long as the slower worker's. Where memory happens to lie
makes one start of the same job slower than the next, so each case is started STARTS times. Its ratio is the
median over the pairs of turns of all starts. With `--device cuda` both processes share the first device.

Workers are forked from one process, which has imported torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import recovery
from benchmarks.support.sides import PORT, RANK, Forked, Side, Turn, by_turns, ratios_by_turns, running
from benchmarks.support.turns import Player
from benchmarks.support.zygote import Zygote

WORKERS = 2
FULL, QUICK = Turn(20, 4, 30), Turn(10, 2, 10)
"""Turns of each side of a case, in one start. A worker's first steps cost more than all that follow: so many
do not count."""
STARTS = {FULL: 3, QUICK: 2}
"""Times that both sides of a case are started."""
QUICK_ROUNDS = {
    "convolution": 6,
    "transformer": 20,
    "unused": 20,
    "batchnorm": 20,
    "collate": 20,
}
"""Rounds of cases that need others than the rest: those that are as fast as DDP and whose pairs differ most
(many calls of short operations, four busy processes on two cores) more, those that are far from it fewer."""
MODELS = ("mlp", "convolution", "transformer")
BUCKETS_MIB = (1, 25)
KINDS = {
    "unused": "unused_parameter_ratio",
    "many": "many_parameters_ratio",
    "batchnorm": "batchnorm_ratio",
    "collate": "collate_ratio",
}
OURS, DDP = "springtide", "ddp"
TICK_SECONDS = 2.0
"""Pause of the operator between two looks at a job that trains, unless an event wakes it."""
_MODEL, _SIDE, _TURNS, _STEPS = "BENCHMARK_MODEL", "BENCHMARK_SIDE", "BENCHMARK_TURNS", "BENCHMARK_STEPS"
_DEVICE = "BENCHMARK_DEVICE"


def pad(samples: list[Any]) -> tuple[Any, Any]:
    """A collate_fn: sequences [L, 64] of different lengths as one tensor [n, longest, 64], and labels [n]."""
    import torch

    sequences, labels = zip(*samples, strict=True)
    return torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True), torch.stack(labels)


def build(name: str) -> tuple[Any, Any, Any, int]:
    """(model, samples, labels, global batch size) of one of MODELS or KINDS; the same on every call."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "mlp":
        layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        return (
            nn.Sequential(*layers, nn.Linear(1024, 10)),
            torch.randn(4096, 1024),
            torch.randint(10, (4096,)),
            128,
        )
    if name == "convolution":
        blocks = [
            layer
            for i in range(4)
            for layer in (nn.Conv2d(3 if i == 0 else 64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
        ]
        model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        return model, torch.randn(1024, 3, 16, 16), torch.randint(10, (1024,)), 32
    if name in KINDS:
        return _build_kind(name)
    layer = nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = nn.Sequential(encoder, nn.Flatten(), nn.Linear(256 * 16, 10))
    return model, torch.randn(1024, 16, 256), torch.randint(10, (1024,)), 32


def _build_kind(name: str) -> tuple[Any, Any, Any, int]:
    import torch
    from torch import nn

    class WithHead(nn.Module):
        """A head that no loss uses. Registered last, so that its bucket is the first one."""

        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body, self.head = body, nn.Linear(768, 768)

        def forward(self, x: torch.Tensor) -> Any:
            return self.body(x)

    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(1)

    class Residual(nn.Module):
        """Gradients keep their size through any number of these; plain layers make them denormal."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.layer(x))

    labels = torch.randint(10, (1024,))
    if name == "unused":
        layers = [layer for _ in range(4) for layer in (nn.Linear(768, 768), nn.ReLU())]
        return WithHead(nn.Sequential(*layers, nn.Linear(768, 10))), torch.randn(1024, 768), labels, 128
    if name == "many":
        small = [Residual() for _ in range(299)]
        return nn.Sequential(*small, nn.Linear(32, 10)), torch.randn(1024, 32), labels, 256
    if name == "batchnorm":
        blocks = [
            layer
            for _ in range(30)
            for layer in (nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        ]
        model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
        return model, torch.randn(1024, 16, 12, 12), labels, 32
    sequences = [torch.randn(100 + 3 * (number % 50), 64) for number in range(1024)]
    first = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    return nn.Sequential(first, Mean(), nn.Linear(256, 10)), sequences, labels, 64


# ---- a worker


def run() -> None:
    """Run the process that the environment describes, until it is killed."""
    import torch

    torch.set_num_threads(1)
    name, device = os.environ[_MODEL], os.environ[_DEVICE]
    if os.environ[_SIDE] == OURS:
        train(name, device)
    else:
        train_ddp(name, device)


def loop_arguments(batch_size: int) -> dict[str, Any]:
    """Return what both sides' loops have in common.

    Args:
        batch_size: Samples of all workers together.
    """
    return {"batch_size": batch_size, "epochs": 10_000, "seed": 0}


def end_step(device: str) -> None:
    """Return when all that was queued on the device has ended."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def train(name: str, device: str) -> None:
    """Train with the library."""
    import torch
    from torch.nn import functional as F

    import springtide

    springtide.init()
    model, samples, labels, batch_size = build(name)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = springtide.distribute(model, optimizer)
    data: Any = (samples, labels)
    arguments = loop_arguments(batch_size)
    if name == "collate":
        data = list(zip(samples, labels, strict=True))
        arguments |= {"collate_fn": pad, "loader_workers": 1}
    player = None
    for batch in springtide.batches(data, **arguments):
        if player is None:
            player = Player(os.environ[_TURNS], OURS, dict)
        with springtide.step():
            x, y = (item.to(device) for item in batch)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            del x, y  # each side pays for giving back its own samples
        end_step(device)
        player.step_ended()


def train_ddp(name: str, device: str) -> None:
    """Train with DistributedDataParallel."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel

    rank, port = int(os.environ[RANK]), int(os.environ[PORT])
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORKERS)
    built, samples, labels, batch_size = build(name)
    model = DistributedDataParallel(
        built.to(device),
        bucket_cap_mb=int(os.environ["SPRINGTIDE_BUCKET_MIB"]),
        find_unused_parameters=name == "unused",
        gradient_as_bucket_view=name in KINDS,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    dealt = ids_of(samples, batch_size, rank, int(os.environ[_STEPS]))
    reads: Iterator[Any]
    if name == "collate":
        from torch.utils.data import DataLoader

        data: Any = list(zip(samples, labels, strict=True))
        batches = [ids.tolist() for ids in dealt]
        reads = iter(DataLoader(data, batch_sampler=batches, collate_fn=pad, num_workers=1))
    else:
        reads = ((samples.index_select(0, ids), labels.index_select(0, ids)) for ids in dealt)
    player = Player(os.environ[_TURNS], DDP, dict)
    for batch in reads:
        x, y = (item.to(device) for item in batch)
        del batch
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        del x, y
        end_step(device)
        player.step_ended()


def ids_of(samples: Any, batch_size: int, rank: int, steps: int) -> list[Any]:
    """Return the samples that a worker of ours would get, for so many steps.

    Args:
        samples: The data set.
        batch_size: Samples of all workers together.
        rank: Of the worker.
        steps: How many.

    Returns:
        By step: int64 [n].
    """
    from springtide.data.cursor import Cursor
    from springtide.data.loop import plan_loop

    plan, cursor, dealt = plan_loop(samples, **loop_arguments(batch_size)), Cursor(), []
    for _ in range(steps):
        dealt.append(plan.batch(cursor, rank, WORKERS).ids)
        cursor = plan.advance(cursor)
    return dealt


# ---- all of it


class Job(recovery.Job):
    """A job of ours."""

    script = "benchmarks.steady_state"

    def __init__(self, folder: Path, zygote: Zygote, environment: Mapping[str, str]) -> None:
        """Start it.

        Args:
            folder: Its own; it is made.
            zygote: That its workers are forked from.
            environment: Of them all.
        """
        folder.mkdir()
        # Others write no line for each step either. NCCL refuses two ranks on one device.
        own = {"SPRINGTIDE_STEP_LOG": "", "SPRINGTIDE_BACKEND": "Gloo"}
        super().__init__(folder, WORKERS, {**environment, **own}, zygote)

    def pause(self) -> float:
        """Return the seconds until the operator looks at the job again: its own while a job only trains."""
        trains = self.reply is not None and self.reply.HasField("state") and self.reply.state.step > 0
        return TICK_SECONDS if trains else super().pause()


def measure(
    name: str, bucket_mib: int, turn: Turn, zygote: Zygote, device: str = "cpu", starts: int | None = None
) -> dict[str, Any]:
    """Return the figures of one case.

    Args:
        name: One of MODELS or KINDS.
        bucket_mib: Size of both sides' buckets.
        turn: Sizes of their turns.
        zygote: That workers are forked from.
        device: Type of device of the models.
        starts: Times that both sides are started; None: as often as STARTS says.

    Raises:
        RuntimeError: A side ends.
        TimeoutError: One does not begin.
    """
    times = STARTS[turn] if starts is None else starts
    if turn is QUICK:
        turn = dataclasses.replace(turn, rounds=QUICK_ROUNDS.get(name, turn.rounds))
    return case_figures([_start(name, bucket_mib, turn, zygote, device) for _ in range(times)])


def _start(name: str, bucket_mib: int, turn: Turn, zygote: Zygote, device: str) -> dict[str, Side]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        common = {
            _TURNS: str(folder / "turns"),
            _MODEL: name,
            _DEVICE: device,
            _STEPS: str(turn.warm_up + turn.rounds * (1 + turn.steps) + 1),
            "SPRINGTIDE_BUCKET_MIB": str(bucket_mib),
        }
        ours = functools.partial(Job, folder / OURS, zygote, common | {_SIDE: OURS})
        ddp = functools.partial(Forked, folder / DDP, WORKERS, zygote, common | {_SIDE: DDP})
        with running(folder, WORKERS, {OURS: ours}, {DDP: ddp}) as (turns, reasons):
            sides = by_turns(turns.take, (OURS, DDP), reasons, turn)
        if reasons[DDP]:
            raise RuntimeError(f"{name} with DDP: {reasons[DDP]}")
        return sides


def case_figures(starts: list[dict[str, Side]]) -> dict[str, Any]:
    """Return the figures of one case. PURE.

    Args:
        starts: The observations of both sides, by start.
    """
    medians = [{name: statistics.median(side.seconds) for name, side in sides.items()} for sides in starts]
    pairs = [ratios_by_turns(sides[OURS], sides[DDP]) for sides in starts]
    return {
        "springtide_step_seconds": statistics.median(each[OURS] for each in medians),
        "ddp_step_seconds": statistics.median(each[DDP] for each in medians),
        "ratio_to_ddp": statistics.median(ratio for start in pairs for ratio in start),
        "ratios_by_start": [statistics.median(start) for start in pairs],
        "steps": sum(len(sides[OURS].seconds) for sides in starts),
    }


def measure_all(turn: Turn, zygote: Zygote, device: str = "cpu") -> dict[str, Any]:
    """Return all that is written; null with a reason where a case did not run to its end.

    Args:
        turn: Sizes of the sides' turns.
        zygote: That workers are forked from.
        device: Type of device of the models.
    """
    result: dict[str, Any] = {"ratio_to_ddp": None, "ratio_to_ddp_worst": None, "cases": {}, "kinds": {}}
    reasons: dict[str, str] = {}
    for name in MODELS:
        for bucket_mib in BUCKETS_MIB:
            case = f"{name}_{bucket_mib}MiB"
            found = _tried(case, reasons, name, bucket_mib, turn, zygote, device)
            if found:
                result["cases"][case] = found
    for name, key in KINDS.items():
        found = _tried(name, reasons, name, BUCKETS_MIB[-1], turn, zygote, device)
        result[key] = found.get("ratio_to_ddp")
        if found:
            result["kinds"][name] = found
        else:
            result[f"{key}_reason"] = reasons.pop(name)
    if reasons:
        return result | {"reason": "; ".join(f"{case}: {text}" for case, text in reasons.items())}
    ratios = [case["ratio_to_ddp"] for case in result["cases"].values()]
    return result | {"ratio_to_ddp": statistics.median(ratios), "ratio_to_ddp_worst": max(ratios)}


def _tried(case: str, reasons: dict[str, str], *arguments: Any) -> dict[str, Any]:
    """Return the figures of a case, or note why it has none and return nothing."""
    try:
        found = measure(*arguments)
    except (RuntimeError, TimeoutError, OSError) as error:
        print(f"{case} did not end: {error}", flush=True)
        reasons[case] = str(error)
        return {}
    print(
        f"{case:18}  springtide {found['springtide_step_seconds'] * 1e3:7.2f} ms"
        f"  DDP {found['ddp_step_seconds'] * 1e3:7.2f} ms  ratio {found['ratio_to_ddp']:.3f}",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where models are")
    parser.add_argument("--zygote", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.zygote:
        import torch.nn.parallel
        import torch.utils.data  # noqa: F401 - for the peer

        recovery.zygote(run)
        return
    with Zygote(Job.script) as zygote:
        result = measure_all(QUICK if arguments.quick else FULL, zygote, arguments.device)
    print(f"ratio_to_ddp {result['ratio_to_ddp']}, worst {result['ratio_to_ddp_worst']}")
    print(", ".join(f"{key} {result[key]}" for key in KINDS.values()))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
