"""How fast a joiner gets the state, beside a plain socket, and what host memory that takes.

    python -m benchmarks.transfer [--quick] [--json FILE]

A real coordinator and real workers train a model with AdamW on loopback, whose state is about 1 GiB. Again
and again one worker is killed and another one joins, first with one worker left that holds the state, then
with two. Just before each join, while the job stands still, one process sends as many bytes to another
through a plain TCP socket, twice. For `ratio_to_plain_socket` a third of the receiver's memory, as much as
the parameters are, has been written before, and the rest is new, since the optimizer's state has to be
somewhere; to take new pages costs more than to bring the bytes, which is why a joiner takes its own
beforehand. For the other one all of it has been written before (`ratio_to_plain_socket_into_used_memory`).

Joiners do not follow beside training here: all of the state is sent while the generation begins, as it is
where nobody can follow (shards, float32 masters, optimizers of a script's own).

Seconds are those of the joiner, from when the generation's group stands to when the state is there, so that
headers, comparing and checksums count. Memory is what `VmHWM` of /proc/self/status, set back just before
(/proc/self/clear_refs), has risen above `VmRSS`, without the optimizer's state that a joiner did not have:
that is the state itself. It is divided by the bytes of the parameters alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import recovery

WIDTH, DEPTH, BATCH = 2732, 12, 2
"""Sizes of the model: 342 MiB of parameters, three times as much with AdamW's state."""
PARAMETER_BYTES = 4 * (WIDTH * WIDTH * DEPTH + WIDTH)
GIB = 1 << 30
NAMES = (
    "ratio_to_plain_socket",
    "ratio_to_plain_socket_into_used_memory",
    "seconds_per_gib",
    "plain_socket_seconds_per_gib",
    "extra_host_bytes_per_parameter_byte",
)
_HOLD_SECONDS = 300
_NEVER_MIB = "1000000"
"""Size of a state from which on a joiner would follow: none does, so that all of it is sent at once."""
_RECORDS = "BENCHMARK_TRANSFERS"


# ---- a worker


def train() -> None:
    """Train until killed; write down each transfer."""
    import torch

    import springtide

    torch.set_num_threads(1)
    _watch_transfers(Path(os.environ[_RECORDS]))
    springtide.init()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=at == 0) for at in range(DEPTH)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = springtide.distribute(model, optimizer)
    data = torch.randn(4096, WIDTH), torch.zeros(4096)
    for inputs, _ in springtide.batches(data, batch_size=BATCH * 4, epochs=10_000, seed=0):
        with springtide.step():
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def _watch_transfers(records: Path) -> None:
    """Append a line of JSON for each transfer of this process: seconds, bytes, and rise of memory."""
    from springtide.elastic.state_transfer import StateTransfer

    inner = StateTransfer.run

    def run(self: StateTransfer, order: Any, group: Any, sides: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")
        ready = self._trainers.require("batches()").state.ready
        at_hand, before, began = ready.nbytes, _status("VmRSS"), time.monotonic()
        moved, tree = inner(self, order, group, sides)
        seconds = time.monotonic() - began
        made = 0
        if tree is not None:
            made = sum(
                value.numel() * value.element_size()
                for state in tree["optimizer"]["state"]
                for value in state.values()
            )
        line = {
            "receives": tree is not None,
            "bytes": moved,
            "seconds": seconds,
            "rise": _status("VmHWM") - before - made + (at_hand - ready.nbytes),
            "at": time.time(),
        }
        with records.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return moved, tree

    StateTransfer.run = run  # type: ignore[method-assign]


def _status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


# ---- the plain socket


def plain_seconds(size: int, used: int) -> float:
    """Send bytes from one process to another.

    Args:
        size: bytes.
        used: of the receiver's memory, bytes that have been written before.

    Returns:
        The receiver's seconds.
    """
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        address = server.getsockname()
        answer, write = os.pipe()
        receiver = _fork(lambda: _plain_receiver(server, size, used, write))
        sender = _fork(lambda: _plain_sender(address, size))
        os.close(write)
        with os.fdopen(answer) as file:
            text = file.read()
        for pid in (receiver, sender):
            os.waitpid(pid, 0)
    return float(text)


def _fork(call: Any) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            call()
            code = 0
        finally:
            os._exit(code)
    return pid


def _memory(size: int, used: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for start in range(0, used, mmap.PAGESIZE):
        memory[start] = 1
    return memory


def _plain_sender(address: Any, size: int) -> None:
    memory = _memory(size, size)
    with socket.create_connection(address) as connection, memoryview(memory) as view:
        connection.recv(1)
        connection.sendall(view)
        connection.recv(1)


def _plain_receiver(server: socket.socket, size: int, used: int, write: int) -> None:
    memory = _memory(size, used)
    connection, _ = server.accept()
    with connection, memoryview(memory) as view:
        began = time.monotonic()
        connection.sendall(b"x")
        done = 0
        while done < size:
            done += connection.recv_into(view[done:])
        seconds = time.monotonic() - began
    os.write(write, str(seconds).encode())


# ---- the job


class Job(recovery.Job):
    """A job whose workers stand still while a file is there."""

    script = "benchmarks.transfer"

    def __init__(self, folder: Path, workers: int) -> None:
        self._hold = folder / "hold"
        common = {"SPRINGTIDE_FAULT": f"body:*:hold={self._hold}", "SPRINGTIDE_FOLLOW_MIB": _NEVER_MIB}
        super().__init__(folder, workers, common)
        self.folder = folder

    def add(self, **environment: str) -> str:
        name = f"{len(list(self._hold.parent.glob('*.started')))}"
        (self._hold.parent / f"{name}.started").touch()
        return super().add(**environment, **{_RECORDS: str(self._hold.parent / f"{name}.transfers")})

    def hold(self) -> None:
        """Have all stand still before their next step."""
        self._hold.write_text(str(_HOLD_SECONDS))

    def go(self) -> None:
        self._hold.unlink(missing_ok=True)

    def records(self, since: float) -> list[dict[str, Any]]:
        """Return the transfers that have ended since then, in unix seconds."""
        lines = [line for path in self.folder.glob("*.transfers") for line in path.read_text().splitlines()]
        found = [json.loads(line) for line in lines]
        return [item for item in found if item["at"] > since]

    def until_members(self, count: int, since: float) -> None:
        """Wait until a step that began after `since` was committed by this number of workers."""

        def together() -> bool:
            newest = self.history.newest()
            return newest is not None and newest.unix_time > since and len(self.history.active()) == count

        self.until(together, f"a step of {count} workers", 60.0)


@dataclass(slots=True)
class Seen:
    """Seconds by byte of joiners and, measured before each, of plain sockets; and all transfers.

    plain: of those into memory like a joiner's. used: of those into memory that was written before.
    """

    ours: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    used: list[float] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)


def joins(job: Job, repeats: int) -> Seen:
    """Have a worker killed and replaced again and again."""
    seen = Seen()
    job.until_members(job.workers, 0.0)
    size = 3 * PARAMETER_BYTES
    for _ in range(repeats):
        job.hold()
        time.sleep(1.0)  # the last step ends
        seen.used.append(plain_seconds(size, size) / size)
        seen.plain.append(plain_seconds(size, size // 3) / size)
        victim, at = max(job.pids, key=lambda name: int(name.rpartition("-")[2])), time.time()
        job.signal(victim, signal.SIGKILL)
        job.go()
        job.bury(victim)
        job.until_members(job.workers - 1, at)
        at = time.time()
        job.add()
        job.until_members(job.workers, at)
        records = [item for item in job.records(at) if item["bytes"] > size // 20]
        received = [item for item in records if item["receives"]]
        if len(received) != 1:
            raise RuntimeError(f"one transfer to a joiner was expected: {records}")
        seen.ours.append(received[0]["seconds"] / received[0]["bytes"])
        seen.records += records
        seconds = ", ".join(f"{values[-1] * GIB:.2f}" for values in (seen.ours, seen.plain, seen.used))
        print(
            f"{job.workers - 1} holders: {seconds} s by GiB (joiner, plain socket, into used memory)",
            flush=True,
        )
    return seen


def measure(holders: int, repeats: int) -> dict[str, Any]:
    """Return the figures with so many holders; nulls with a reason where they could not be measured."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), holders + 1)
        try:
            seen = joins(job, repeats)
        except (TimeoutError, RuntimeError, OSError) as error:
            logs = [path.read_text()[-500:] for path in sorted(Path(folder).glob("worker-*.log"))]
            print(f"{holders} holders: cut short: {error}", *logs, sep="\n", flush=True)
            return dict.fromkeys(NAMES) | {"repeats": 0, "reason": str(error)[:500]}
        finally:
            job.close()
    return figures(seen) | {"repeats": len(seen.ours)}


def figures(seen: Seen) -> dict[str, float]:
    """Return what is written of some joins."""
    values = (
        statistics.median(b / a for a, b in zip(seen.ours, seen.plain, strict=True)),
        statistics.median(b / a for a, b in zip(seen.ours, seen.used, strict=True)),
        statistics.median(seen.ours) * GIB,
        statistics.median(seen.plain) * GIB,
        max(max(0, item["rise"]) for item in seen.records) / PARAMETER_BYTES,
    )
    return dict(zip(NAMES, values, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--zygote", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.zygote:
        recovery.zygote(train)
        return
    repeats = 3 if arguments.quick else 10
    result = measure(1, repeats)
    result |= {"state_bytes": 3 * PARAMETER_BYTES, "two_holders": measure(2, repeats)}
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
