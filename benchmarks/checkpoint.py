"""The cost of a checkpoint of a large state to a step, against torch.save of the same state; and the way
back.

    python -m benchmarks.checkpoint [--quick] [--json FILE] [--folder FOLDER]

Two workers train a model of which parameters and Adam's state are a bit more than 1 GiB, with checkpoints one
right after the other. The stall of a checkpoint is how much longer the script waits for its next batch than
without one, on the slower worker. The baseline is what scripts do by hand: the first worker saves model and
optimizer with torch.save between two steps, to the same folder. Then jobs of other sizes go on from the last
checkpoint: seconds from the group's formation until all members hold the state. At last the same model with
its parameters and Adam's state on a parameter server (`on_servers`), against the same torch.save.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WORKERS = 2
RESTORED_BY = (1, 3)
WIDTH, LAYERS = 4096, 6  # 6 x 64 MiB, three times with Adam
WAIT_SECONDS = 300
_ROOT = Path(__file__).resolve().parents[1]
_FORMED = re.compile(r"generation .* rank \d+ of \d+, .*transfer ([\d.]+) s")


def build(width: int) -> tuple[Any, Any]:
    """(model, optimizer)."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    return model, torch.optim.Adam(model.parameters(), lr=1e-6)


def work(folder: str, baseline: int, width: int) -> None:
    """One worker: a line of JSON for each wait between two bodies, and for each torch.save."""
    import torch

    import springtide
    from springtide import api

    torch.set_num_threads(1)
    springtide.init()
    model, optimizer = build(width)
    model, optimizer = springtide.distribute(model, optimizer)
    samples = torch.randn(64, width)
    runtime = api.active_runtime
    assert runtime is not None
    saved, ended, before = None, 0.0, 0.0
    for batch in springtide.batches(samples, batch_size=4, epochs=100_000, seed=0):
        began = time.perf_counter()
        taken = runtime.saver.checkpoints.last_taken
        if ended:
            line = {"wait": began - ended, "taken": taken != saved, "busy": runtime.saver.checkpoints.busy}
            print(json.dumps(line | {"step": before}), flush=True)
        saved = taken
        with springtide.step():
            model(batch[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ended = time.perf_counter()
        before = ended - began
        if springtide.rank() == 0 and baseline > 0 and not runtime.saver.checkpoints.busy:
            baseline -= 1
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            started = time.perf_counter()
            torch.save(state, Path(folder) / "baseline.pt")
            print(json.dumps({"torch_save": time.perf_counter() - started}), flush=True)
            ended = 0.0


class Job:
    """A coordinator and workers on this machine, and parameter servers if any.

    run: a number of its own; the state's folder is the same for all.
    """

    def __init__(
        self, folder: Path, count: int, run: int, baseline: int = 0, servers: int = 0, width: int = WIDTH
    ) -> None:
        self.folder, self.run, self.count = folder, run, count
        self._closing = threading.Event()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        common = os.environ | {
            "SPRINGTIDE_JOB": "checkpoint",
            "SPRINGTIDE_NAMESPACE": "benchmark",
            "SPRINGTIDE_JOB_UID": "benchmark",
            "SPRINGTIDE_TOKEN": "benchmark",
            "SPRINGTIDE_METRICS_PORT": "0",
            "SPRINGTIDE_BIND": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }
        sizes = {f"SPRINGTIDE_{name}": str(count) for name in ("TARGET", "MINIMUM", "MAXIMUM")}
        state = folder / f"coordinator-{run}"
        coordinator = {
            "SPRINGTIDE_PORT": str(port),
            "SPRINGTIDE_INCARNATION": str(run),
            "SPRINGTIDE_STATE_DIR": str(state),
            "SPRINGTIDE_SERVERS": str(servers),
        }
        strategy = {"SPRINGTIDE_STRATEGY": "ParameterServer"} if servers else {}
        self._servers = [f"server-{run}-{slot}" for slot in range(servers)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "springtide_coordinator"],
                env=common | sizes | coordinator,
                stderr=subprocess.DEVNULL,
            )
        ]
        for rank in range(count):
            environment = (
                common
                | strategy
                | {
                    "SPRINGTIDE_COORDINATOR": f"127.0.0.1:{port}",
                    "SPRINGTIDE_POD_NAME": f"worker-{rank}",
                    "SPRINGTIDE_POD_UID": f"uid-{run}-{rank}",
                    "SPRINGTIDE_POD_IP": "127.0.0.1",
                    "SPRINGTIDE_SLOT": str(rank),
                    "SPRINGTIDE_TERMINATION_LOG": str(folder / f"end-{run}-{rank}"),
                    "SPRINGTIDE_CHECKPOINT_URI": str(folder),
                    "SPRINGTIDE_CHECKPOINT_SECONDS": "1",
                    "SPRINGTIDE_CHECKPOINT_KEEP": "1",
                }
            )
            with self._log(rank, "out").open("w") as out, self._log(rank, "err").open("w") as err:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.checkpoint",
                    "--worker",
                    str(folder),
                    str(baseline),
                    str(width),
                ]
                self.processes.append(
                    subprocess.Popen(command, env=environment, cwd=_ROOT, stdout=out, stderr=err)
                )

        self._helpers = [
            subprocess.Popen(
                [sys.executable, "-m", "springtide_ps"],
                env=common
                | {
                    "SPRINGTIDE_COORDINATOR": f"127.0.0.1:{port}",
                    "SPRINGTIDE_POD_NAME": uid,
                    "SPRINGTIDE_POD_UID": uid,
                    "SPRINGTIDE_POD_IP": "127.0.0.1",
                    "SPRINGTIDE_SLOT": str(slot),
                    "SPRINGTIDE_ATTEMPT": "0",
                    "SPRINGTIDE_PS_PORT": "0",
                },
                stderr=subprocess.DEVNULL,
            )
            for slot, uid in enumerate(self._servers)
        ]
        self._operator = threading.Thread(target=self._sync, args=(port,), daemon=True)
        self._operator.start()

    def _sync(self, port: int) -> None:
        """The operator's part: only its word lets a coordinator restore or begin anew."""
        import grpc

        from springtide_protocol import coordinator_pb2 as pb
        from springtide_protocol import coordinator_pb2_grpc as pb_grpc

        uids = [f"uid-{self.run}-{rank}" for rank in range(self.count)]
        request = pb.SyncRequest(
            target=self.count,
            minimum=self.count,
            maximum=self.count,
            living=[pb.Pod(uid=uid, name=uid, started=True) for uid in uids],
            servers=len(self._servers),
            living_servers=[
                pb.Pod(uid=uid, name=uid, slot=slot, started=True) for slot, uid in enumerate(self._servers)
            ],
            observed=True,
        )
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = pb_grpc.CoordinatorStub(channel)
            while not self._closing.wait(0.2):
                with contextlib.suppress(grpc.RpcError):  # it is not there yet
                    stub.Sync(request, metadata=(("authorization", "Bearer benchmark"),), timeout=1.0)

    def _log(self, rank: int, kind: str) -> Path:
        return self.folder / f"{self.run}-{rank}.{kind}"

    def lines(self, rank: int) -> list[dict[str, Any]]:
        """Return what a worker has written so far."""
        text = self._log(rank, "out").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def log(self, rank: int) -> str:
        return self._log(rank, "err").read_text()

    def until(self, what: str, condition: Any) -> None:
        """Raise RuntimeError with a log when a worker ends early or the condition does not hold in time."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            dead = [rank for rank, process in enumerate(self.processes[1:]) if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                rank = dead[0] if dead else 0
                raise RuntimeError(f"no {what}; worker {rank} said:\n{self.log(rank)[-3000:]}")
            time.sleep(0.1)

    def close(self) -> None:
        self._closing.set()
        self._operator.join(5)
        for process in [*reversed(self.processes), *self._helpers]:
            process.kill()
            process.wait()


def measure(
    folder: Path, checkpoints: int, saves: int, run: int = 1, servers: int = 0, width: int = WIDTH
) -> dict[str, Any]:
    """Stalls, throughput, and torch.save if it is to be made."""
    job = Job(folder, WORKERS, run, saves, servers, width)

    def taken_by(rank: int) -> int:
        return sum(line.get("taken", False) for line in job.lines(rank))

    try:
        job.until("checkpoints", lambda: min(map(taken_by, range(WORKERS))) >= checkpoints + 1)
        ranks = [job.lines(rank) for rank in range(WORKERS)]
        written = re.findall(r"checkpoint step-\S+: (\d+) bytes in ([\d.]+) s", job.log(0))
    finally:
        job.close()
    waits = [[line for line in lines if "wait" in line] for lines in ranks]
    plain = statistics.median(line["wait"] for lines in waits for line in lines if not line["taken"])
    taken = [[line["wait"] - plain for line in lines if line["taken"]] for lines in waits]
    # The first one also takes the memory.
    stalls = [max(pair) for pair in zip(*taken, strict=False)][1 : checkpoints + 1]
    saved = [line["torch_save"] for line in ranks[0] if "torch_save" in line]
    quiet = [line["step"] for line in waits[0] if not line["busy"] and not line["taken"]]
    busy = [line["step"] for line in waits[0] if line["busy"]]
    stall = statistics.median(stalls)
    by_hand = {"torch_save_seconds_p50": statistics.median(saved)} if saved else {}
    return {
        "state_bytes": int(written[-1][0]),
        "step_stall_seconds_p50": stall,
        "step_stall_seconds_max": max(stalls),
        **by_hand,
        "stall_ratio_to_torch_save": stall / by_hand["torch_save_seconds_p50"] if by_hand else None,
        "bytes_per_second": statistics.median(int(size) / float(seconds) for size, seconds in written),
        "checkpoints": len(stalls),
        "step_seconds_p50": statistics.median(quiet) if quiet else None,
        "step_seconds_while_writing_p50": statistics.median(busy) if busy else None,
    }


def restore(folder: Path, count: int, run: int, width: int = WIDTH) -> float:
    """Seconds until all of `count` workers hold the state."""
    job = Job(folder, count, run, width=width)
    try:
        found: list[str] = []

        def formed() -> bool:
            found[:] = [m.group(1) for rank in range(count) if (m := _FORMED.search(job.log(rank)))]
            return len(found) == count

        job.until(f"generation of {count}", formed)
        if "restored " not in job.log(0):
            raise RuntimeError(f"nothing was restored:\n{job.log(0)[-3000:]}")
        return max(float(seconds) for seconds in found)
    finally:
        job.close()


def measure_all(folder: Path, checkpoints: int, saves: int) -> dict[str, Any]:
    """All that is written. Null with a reason for what did not run to its end."""
    names = "state_bytes", "step_stall_seconds_p50", "stall_ratio_to_torch_save", "bytes_per_second"
    restored: dict[str, float | None] = {str(count): None for count in RESTORED_BY}
    result: dict[str, Any] = dict.fromkeys(names) | {"restore_seconds": restored, "on_servers": None}
    (folder / "servers").mkdir(exist_ok=True)
    try:
        result |= measure(folder, checkpoints, saves)
        print(
            f"state {result['state_bytes'] / 2**30:.2f} GiB: a step stalls for"
            f" {result['step_stall_seconds_p50']:.3f} s, torch.save takes"
            f" {result['torch_save_seconds_p50']:.3f} s (ratio {result['stall_ratio_to_torch_save']:.3f});"
            f" {result['bytes_per_second'] / 2**20:.0f} MiB/s",
            flush=True,
        )
        for run, count in enumerate(RESTORED_BY, start=2):
            restored[str(count)] = restore(folder, count, run)
            print(f"restored by {count} workers in {restored[str(count)]:.2f} s", flush=True)
        on_servers = measure(folder / "servers", checkpoints, 0, len(RESTORED_BY) + 2, 1)
        ratio = on_servers["step_stall_seconds_p50"] / result["torch_save_seconds_p50"]
        result["on_servers"] = on_servers | {"stall_ratio_to_torch_save": ratio}
        print(
            f"on a parameter server: {on_servers['state_bytes'] / 2**30:.2f} GiB, a step stalls for"
            f" {on_servers['step_stall_seconds_p50']:.3f} s (ratio {ratio:.3f}) and takes"
            f" {on_servers['step_seconds_p50']} s, while one is written"
            f" {on_servers['step_seconds_while_writing_p50']} s",
            flush=True,
        )
    except RuntimeError as error:
        result["reason"] = str(error)
        print(f"cut short: {error}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer checkpoints")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--folder", type=Path, help="write checkpoints below this folder; default: a new one")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        folder, baseline, width = arguments.worker
        work(folder, int(baseline), int(width))
        return
    folder = Path(tempfile.mkdtemp(prefix="springtide-checkpoint-", dir=arguments.folder))
    try:
        result = measure_all(folder, 4 if arguments.quick else 12, 2 if arguments.quick else 4)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
