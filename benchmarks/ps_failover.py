"""The cost of a killed parameter server, and of a change of their number.

    python -m benchmarks.ps_failover [--quick] [--json FILE]

Two workers train a model of 26 MB on three servers over loopback; each server in turn is killed with SIGKILL
and comes back as a process that has to start from nothing. A pause is the longest time between two commits
around it. An update is lost when a step was committed and had to be made again. With `replication: 2` the
copy takes over; with 1 the workers go back to the newest checkpoint (every two seconds here) when another
server is there, whose start is part of the pause. Last, the number of servers is changed 1 -> 4 -> 2 and back
in training.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.recovery import TOKEN, Job
from benchmarks.support.zygote import Zygote

WORKERS = 2
_ROOT = Path(__file__).resolve().parents[1]


class ServerJob(Job):
    """A job with servers."""

    def __init__(
        self,
        folder: Path,
        servers: int,
        environment: Mapping[str, str],
        workers: int = WORKERS,
        zygote: Zygote | None = None,
    ) -> None:
        """Start it.

        Args:
            folder: for logs and state.
            servers: how many.
            environment: of the workers, besides their own.
            workers: how many.
            zygote: that workers are forked from; None: one of its own.
        """
        self.wanted = servers
        self.servers: dict[str, tuple[int, subprocess.Popen[bytes]]] = {}
        self._made = itertools.count()
        super().__init__(folder, workers, {"SPRINGTIDE_STRATEGY": "ParameterServer", **environment}, zygote)
        for slot in range(servers):
            self.add_server(slot)

    def add_server(self, slot: int) -> None:
        """Start a server in a new pod of that slot."""
        number = next(self._made)
        name, address = f"ps-{slot}-{number}", f"{self._host}.{250 - number % 100}"
        environment = os.environ | {
            "SPRINGTIDE_COORDINATOR": f"{self._host}.1:7070",
            "SPRINGTIDE_TOKEN": TOKEN,
            "SPRINGTIDE_POD_NAME": name,
            "SPRINGTIDE_POD_UID": name,
            "SPRINGTIDE_POD_IP": address,
            "SPRINGTIDE_BIND": address,
            "SPRINGTIDE_SLOT": str(slot),
            "SPRINGTIDE_ATTEMPT": str(number),
            "SPRINGTIDE_METRICS_PORT": "0",
            "OMP_NUM_THREADS": "1",
        }
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "springtide_ps"], env=environment, cwd=_ROOT, stdout=log, stderr=log
            )
        self.servers[name] = slot, process

    def kill_server(self, slot: int) -> None:
        name = next(name for name, (there, _) in self.servers.items() if there == slot)
        _, process = self.servers.pop(name)
        process.kill()
        process.wait()

    def until_settled(self) -> None:
        """All servers wanted serve, and all copies are made."""
        time.sleep(0.3)  # for the operator's next word
        self.until(lambda: self.reply is not None and self.reply.servers_settled, "settled servers", 120)

    def replace_the_dead(self) -> None:
        """Start a new worker in place of each that has ended, the way the operator makes a new pod."""
        for name, pid in list(self.pids.items()):
            if not Path(f"/proc/{pid}").exists():
                del self.pids[name]
                self.add()

    def close(self) -> None:
        super().close()
        for _, process in self.servers.values():
            process.kill()
            process.wait()

    def request(self) -> Any:
        from springtide_protocol import coordinator_pb2 as pb

        request = super().request()
        request.servers = self.wanted
        for name, (slot, process) in list(self.servers.items()):
            if process.poll() is None:
                request.living_servers.append(pb.Pod(uid=name, name=name, slot=slot, started=True))
        return request

    def of_coordinator(self) -> dict[str, str]:
        return {"SPRINGTIDE_SERVERS": str(self.wanted)}


def longest_gap(job: ServerJob, since: float) -> float:
    """Seconds between two commits of the job, whoever made them, from just before `since` on."""
    times = sorted(commit.unix_time for commit in job.history.recent(time.time() - since + 1.0))
    before = max((at for at in times if at <= since), default=since)
    return max(
        later - earlier for earlier, later in itertools.pairwise([before, *(t for t in times if t > since)])
    )


def kill_each(folder: Path, replication: int, repeats: int) -> dict[str, Any]:
    """Kill the servers in turn."""
    environment = {"SPRINGTIDE_REPLICATION": str(replication)}
    if replication == 1:
        (folder / "volume").mkdir()
        environment |= {
            "SPRINGTIDE_CHECKPOINT_URI": str(folder / "volume"),
            "SPRINGTIDE_CHECKPOINT_SECONDS": "2",
        }
    job = ServerJob(folder, 3, environment)
    pauses, lost = [], 0
    try:
        for number in range(repeats):
            job.until_calm()
            job.until_settled()
            if replication == 1:
                time.sleep(2.5)  # so that there is a checkpoint
            job.read()
            slot, at = number % 3, time.time()
            highest = max(commit.step for commit in job.history.curve())
            job.kill_server(slot)
            job.add_server(slot)
            first_after: list[int] = []

            def again(moment: float = at, top: int = highest, found: list[int] = first_after) -> bool:
                job.replace_the_dead()
                later = [commit for commit in job.history.recent(1e6) if commit.unix_time > moment + 0.05]
                found[:] = [min((commit.step for commit in later), default=top)]
                return any(commit.step > top + 3 for commit in later)

            job.until(again, "steps after the kill", 180)
            pauses.append(longest_gap(job, at))
            lost += max(0, highest + 1 - first_after[0])
            print(f"replication {replication}, server {slot}: {pauses[-1]:.3f} s", flush=True)
    finally:
        job.close()
    return {
        "updates_lost": lost,
        "pause_seconds_p50": statistics.median(pauses),
        "pause_seconds_max": max(pauses),
        "repeats": len(pauses),
    }


def rescale(folder: Path, rounds: int) -> dict[str, Any]:
    """1 -> 4 -> 2 -> 1 servers while training goes on."""
    job = ServerJob(folder, 1, {})
    pauses = []
    try:
        job.until_calm()
        for wanted in [4, 2, 1] * rounds:
            job.until_settled()
            at = time.time()
            for slot in range(wanted):
                if slot not in {there for there, _ in job.servers.values()}:
                    job.add_server(slot)
            job.wanted = wanted
            job.until_settled()
            job.until(lambda: True, "the last commits")
            pauses.append(longest_gap(job, at))
            for slot in {there for there, _ in job.servers.values()} - set(range(wanted)):
                job.kill_server(slot)
            print(f"{wanted} servers: {pauses[-1]:.3f} s", flush=True)
        curve = [commit.step for commit in job.history.curve()]
    finally:
        job.close()
    return {
        "updates_lost": len(curve) - len(set(curve)),
        "pause_seconds_p50": statistics.median(pauses),
        "pause_seconds_max": max(pauses),
        "repeats": len(pauses),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    repeats = 4 if arguments.quick else 20
    result: dict[str, Any] = {}
    for name, measure in (
        ("replication_2", lambda folder: kill_each(folder, 2, repeats)),
        ("rescale", lambda folder: rescale(folder, 1 if arguments.quick else 5)),
        (
            "replication_1",
            lambda folder: kill_each(folder, 1, max(2, repeats // 2) if arguments.quick else repeats),
        ),
    ):
        with tempfile.TemporaryDirectory() as folder:
            result[name] = measure(Path(folder))
        print(name, {key: round(value, 3) for key, value in result[name].items()}, flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        main()
