"""The cost of a step against native DistributedDataParallel, in the same two processes, by turns.

    python -m benchmarks.steady_state [--quick] [--json FILE] [--device cuda]

Three models, two bucket sizes each; then one model each of the kinds that cost something else: a head that no
loss uses (DDP with find_unused_parameters), 600 small tensors, BatchNorm behind every layer, and sequences
that a collate_fn of the script's pads, with a process that reads ahead (DDP with a DataLoader). A step is:
deal the batch, forward, backward, optimizer step; both sides read the same samples with the same optimizer
over gloo on loopback. A turn is ten steps, of which the first does not count: a job's steps follow each
other, while one that comes after another trainer's step finds the processor's caches full of that, which
costs either side a tenth of its step, and ours a little more. Each worker takes its own times; a pair's
figure is the slower worker's, as a job waits for it. With `--device cuda` both processes share the first
device.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORKERS = 2
TURN = 10  # steps
WARM_UP = 2  # turns
MODELS = ("mlp", "convolution", "transformer")
BUCKETS_MIB = (1, 25)
KINDS = {
    "unused": "unused_parameter_ratio",
    "many": "many_parameters_ratio",
    "batchnorm": "batchnorm_ratio",
    "collate": "collate_ratio",
}
_ROOT = Path(__file__).resolve().parents[1]


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

    labels = torch.randint(10, (1024,))
    if name == "unused":
        layers = [layer for _ in range(4) for layer in (nn.Linear(768, 768), nn.ReLU())]
        return WithHead(nn.Sequential(*layers, nn.Linear(768, 10))), torch.randn(1024, 768), labels, 128
    if name == "many":
        small = [layer for _ in range(299) for layer in (nn.Linear(32, 32), nn.Tanh())]
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


def work(name: str, bucket_mib: int, steps: int, rank: int, port: int, device: str) -> None:
    """One worker: turns of ours and of native steps; prints both lists of seconds as JSON, turn by turn."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel

    import springtide

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORKERS)
    native_model, samples, labels, batch_size = build(name)
    native_model.to(device)

    def end_step() -> float:
        """Return the time at which all that was queued on the device has ended."""
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    # Whole passes are made, so there are no more samples than the steps need.
    samples, labels = samples[: steps * batch_size], labels[: steps * batch_size]
    native = DistributedDataParallel(
        native_model,
        bucket_cap_mb=bucket_mib,
        find_unused_parameters=name == "unused",
        gradient_as_bucket_view=name in KINDS,
    )
    native_optimizer = torch.optim.SGD(native.parameters(), lr=0.01, momentum=0.9)

    springtide.init()
    model, *_ = build(name)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = springtide.distribute(model, optimizer)

    ours: list[float] = []
    theirs: list[float] = []
    epochs = -(-steps * batch_size // len(samples)) + 1
    arguments: dict[str, Any] = {"batch_size": batch_size, "epochs": epochs, "seed": 0}
    data: Any = (samples, labels)
    reads = None
    if name == "collate":
        data = list(zip(samples, labels, strict=True))
        reads = native_reads(data, arguments, rank)
        arguments |= {"collate_fn": pad, "loader_workers": 1}

    def native_turn(turn: list[Any]) -> list[float]:
        """Return the seconds of native steps over the samples that our turn had."""
        seconds = []
        dist.barrier()
        started = time.perf_counter()
        for ids in turn:
            x, y = (
                next(reads)
                if reads is not None
                else (samples.index_select(0, ids), labels.index_select(0, ids))
            )
            x, y = x.to(device), y.to(device)
            F.cross_entropy(native(x), y).backward()
            native_optimizer.step()
            native_optimizer.zero_grad()
            del x, y
            ended = end_step()
            seconds.append(ended - started)
            started = ended
        return seconds

    turn: list[Any] = []
    started = time.perf_counter()
    for batch in springtide.batches(data, **arguments):
        with springtide.step():
            x, y = (item.to(device) for item in batch)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            del x, y  # each side pays for giving back its own samples
        turn.append(batch.ids)
        ended = end_step()
        ours.append(ended - started)
        started = ended
        if len(turn) == TURN:
            theirs += native_turn(turn)
            turn = []
            dist.barrier()
            started = time.perf_counter()
    ours = ours[: len(theirs)]
    print(json.dumps({"ours": ours, "theirs": theirs}))
    dist.destroy_process_group()


def native_reads(data: Any, arguments: dict[str, Any], rank: int) -> Any:
    """A DataLoader over the same samples as those of `batches`, collated by `pad`; an iterator."""
    from torch.utils.data import DataLoader

    from springtide.data.cursor import Cursor
    from springtide.data.loop import plan_loop

    plan, cursor, ids = plan_loop(data, **arguments), Cursor(), []
    while not plan.ended(cursor):
        ids.append(plan.batch(cursor, rank, WORKERS).ids.tolist())
        cursor = plan.advance(cursor)
    return iter(DataLoader(data, batch_sampler=ids, collate_fn=pad, num_workers=1))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(name: str, bucket_mib: int, steps: int, device: str = "cpu") -> dict[str, float]:
    """Run one model with one bucket size in a job of its own, on a type of device."""
    token, coordinator_port, native_port = "benchmark", free_port(), free_port()
    common = os.environ | {
        "SPRINGTIDE_JOB": "steady-state",
        "SPRINGTIDE_NAMESPACE": "benchmark",
        "SPRINGTIDE_TOKEN": token,
        "SPRINGTIDE_METRICS_PORT": "0",
        "SPRINGTIDE_BACKEND": "Gloo",  # NCCL refuses two ranks on one device
        "SPRINGTIDE_BIND": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        coordinator = subprocess.Popen(
            [sys.executable, "-m", "springtide_coordinator"],
            env=common
            | {
                "SPRINGTIDE_PORT": str(coordinator_port),
                "SPRINGTIDE_INCARNATION": "1",
                "SPRINGTIDE_STATE_DIR": folder,
                "SPRINGTIDE_TARGET": str(WORKERS),
                "SPRINGTIDE_MINIMUM": str(WORKERS),
                "SPRINGTIDE_MAXIMUM": str(WORKERS),
            },
            stderr=subprocess.DEVNULL,
        )
        workers: list[subprocess.Popen[str]] = []
        try:
            for rank in range(WORKERS):
                environment = common | {
                    "SPRINGTIDE_ROLE": "worker",
                    "SPRINGTIDE_COORDINATOR": f"127.0.0.1:{coordinator_port}",
                    "SPRINGTIDE_POD_NAME": f"steady-state-worker-{rank}-0",
                    "SPRINGTIDE_POD_UID": f"uid-{rank}",
                    "SPRINGTIDE_POD_IP": "127.0.0.1",
                    "SPRINGTIDE_SLOT": str(rank),
                    "SPRINGTIDE_ATTEMPT": "0",
                    "SPRINGTIDE_BUCKET_MIB": str(bucket_mib),
                    "SPRINGTIDE_TERMINATION_LOG": str(Path(folder) / f"end-{rank}"),
                }
                arguments = ["--worker", name, str(bucket_mib), str(steps), str(rank), str(native_port)]
                command = [sys.executable, "-m", "benchmarks.steady_state", "--device", device, *arguments]
                workers.append(
                    subprocess.Popen(
                        command,
                        env=environment,
                        cwd=_ROOT,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
            results = []
            for rank, worker in enumerate(workers):
                out, err = worker.communicate(timeout=600)
                if worker.returncode:
                    raise RuntimeError(
                        f"worker {rank} of {name} ended with {worker.returncode}:\n{err[-2000:]}"
                    )
                results.append(json.loads(out.strip().splitlines()[-1]))
        finally:
            processes: list[subprocess.Popen[Any]] = [*workers, coordinator]
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
    ours, theirs = (
        steady([max(pair) for pair in zip(*(result[side] for result in results), strict=True)])
        for side in ("ours", "theirs")
    )
    return {
        "springtide_step_seconds": statistics.median(ours),
        "ddp_step_seconds": statistics.median(theirs),
        "ratio_to_ddp": statistics.median(ours) / statistics.median(theirs),
        "steps": len(ours),
    }


def steady(seconds: list[float]) -> list[float]:
    """Return the steps that count: those after the warm-up that follow a step of the same side. PURE."""
    return [one for number, one in enumerate(seconds) if number >= WARM_UP * TURN and number % TURN]


def measure_all(steps: int, device: str = "cpu") -> dict[str, Any]:
    """All that is written. Null with a reason where a case did not run to its end."""
    cases: dict[str, dict[str, float]] = {}
    result: dict[str, Any] = {"ratio_to_ddp": None, "ratio_to_ddp_worst": None, "cases": cases}
    for name in MODELS:
        for bucket_mib in BUCKETS_MIB:
            try:
                case = cases[f"{name}_{bucket_mib}MiB"] = measure(name, bucket_mib, steps, device)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                print(f"{name} with {bucket_mib} MiB did not end: {error}", flush=True)
                return result | {"reason": f"{name}, {bucket_mib} MiB: {error}"}
            print(
                f"{name:12} {bucket_mib:3} MiB  springtide {case['springtide_step_seconds'] * 1e3:7.2f} ms"
                f"  DDP {case['ddp_step_seconds'] * 1e3:7.2f} ms  ratio {case['ratio_to_ddp']:.3f}",
                flush=True,
            )
    ratios = [case["ratio_to_ddp"] for case in cases.values()]
    result |= measure_kinds(steps, device)
    return result | {"ratio_to_ddp": statistics.median(ratios), "ratio_to_ddp_worst": max(ratios)}


def measure_kinds(steps: int, device: str) -> dict[str, Any]:
    """The ratios of KINDS, and their cases; null with a reason where one did not run to its end."""
    result: dict[str, Any] = {"kinds": {}}
    for name, key in KINDS.items():
        try:
            case = result["kinds"][name] = measure(name, BUCKETS_MIB[-1], steps, device)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{name} did not end: {error}", flush=True)
            result |= {key: None, f"{key}_reason": str(error)}
            continue
        result[key] = case["ratio_to_ddp"]
        print(
            f"{name:12} springtide {case['springtide_step_seconds'] * 1e3:7.2f} ms"
            f"  DDP {case['ddp_step_seconds'] * 1e3:7.2f} ms  ratio {case['ratio_to_ddp']:.3f}",
            flush=True,
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where models are")
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        name, *numbers = arguments.worker
        bucket_mib, wanted, rank, port = (int(number) for number in numbers)
        work(name, bucket_mib, wanted, rank, port, arguments.device)
        return
    steps = (90 if arguments.quick else 300) + WARM_UP * TURN
    result = measure_all(steps, arguments.device)
    print(f"ratio_to_ddp {result['ratio_to_ddp']}, worst {result['ratio_to_ddp_worst']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
