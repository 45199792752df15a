"""The findings' attacks on ports: on a real coordinator and a real parameter server.

    python -m benchmarks.hostile_ports [--quick] [--json FILE]

`benchmarks.hostile` runs them and adds their figures to its own: `coordinator_alive`, `coordinator_peak_mib`
(resident, at most), `server_alive`, `server_extra_mib` (resident, beyond what it had before) and tracebacks.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import torch

from springtide import kv
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol import coordinator_pb2_grpc as pb_grpc
from springtide_protocol.channel import client_options, token_metadata
from springtide_protocol.lobby import raise_descriptor_limit

ROOT = Path(__file__).resolve().parents[1]
TOKEN = "t" * 64
OWN = "o" * 64
MIB = 1 << 20


class Process:
    """One of our servers, started as in a pod; `ports` are found in what it logs."""

    def __init__(self, folder: Path, module: str, pattern: str, **env: str) -> None:
        self.log = folder / f"{module}.log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SPRINGTIDE_")}
        settings = {"SPRINGTIDE_TOKEN": TOKEN, "SPRINGTIDE_BIND": "127.0.0.1", "SPRINGTIDE_METRICS_PORT": "0"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module], env=clean | settings | env, cwd=ROOT, stderr=log
            )
        end = time.monotonic() + 120
        while (found := re.search(pattern, self.log.read_text(), re.DOTALL)) is None:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{module} does not serve: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)
        self.port, self.metrics = int(found[1]), int(found[2])

    def mib(self, what: str = "VmRSS") -> float:
        """Resident memory now, or (VmHWM) at most."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(rf"^{what}:\s+(\d+) kB", text, re.MULTILINE)[0]) / 1024

    def surprises(self) -> int:
        """Tracebacks in its log."""
        return self.log.read_text(errors="replace").count("Traceback")

    def end(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


@contextlib.contextmanager
def connections(port: int, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open a number of connections that send something, then stay silent and read nothing."""
    opened: list[socket.socket] = []
    try:
        for _ in range(count):
            with contextlib.suppress(OSError):
                sock = socket.create_connection(("127.0.0.1", port), timeout=5)
                opened.append(sock)
                sock.sendall(sent)
        yield opened
    finally:
        for sock in opened:
            sock.close()


def page(port: int, path: str) -> str:
    """Raise OSError."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return str(answer.read(1 << 20).decode())


def many(count: int, work: Callable[[], None]) -> None:
    """Do something in so many threads, and wait for all."""
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def coordinator_under_attack(folder: Path) -> dict[str, Any]:
    """Findings 7, 9, 10, 14, 19 and 20."""
    server = Process(
        folder,
        "springtide_coordinator",
        r" port=(\d+).*metrics_port=(\d+)",
        SPRINGTIDE_STATE_DIR=str(folder),
        SPRINGTIDE_PORT="0",
        SPRINGTIDE_OPERATOR_DIGEST=hashlib.sha256(OWN.encode()).hexdigest(),
    )
    address, problems = f"127.0.0.1:{server.port}", list[str]()

    def sync(request: pb.SyncRequest | None = None, own: str = OWN) -> str:
        with grpc.insecure_channel(address, options=client_options(10)) as channel:
            try:
                pb_grpc.CoordinatorStub(channel).Sync(
                    request or pb.SyncRequest(target=1), metadata=token_metadata(TOKEN, own), timeout=2
                )
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"

    def check(what: str) -> None:
        began, answer = time.monotonic(), sync()
        seconds = time.monotonic() - began
        print(f"coordinator, {what}: Sync {answer} in {seconds:.2f} s, {server.mib():.0f} MiB", flush=True)
        if answer != "OK" or server.process.poll() is not None:
            problems.append(f"{what}: {answer}")

    def megabytes() -> None:
        options = [*client_options(10), ("grpc.max_send_message_length", 8 * MIB)]
        with grpc.insecure_channel(address, options=options) as channel:
            ask: Callable[..., bytes] = channel.unary_unary("/springtide.coordinator.v1.Coordinator/Sync")
            for _ in range(8):
                with contextlib.suppress(grpc.RpcError):
                    ask(bytes(4 * MIB - 100), timeout=5)

    def names() -> Iterator[pb.WorkerMessage]:
        member = pb.Member(id="w0", pod_uid="w0")
        yield pb.WorkerMessage(hello=pb.Hello(protocol_version=1, member=member, standing=pb.STARTING))
        for first in range(0, 150_000, 10_000):
            values = {f"loss_{number}": 1.0 for number in range(first, first + 10_000)}
            yield pb.WorkerMessage(values=pb.Values(values=values))

    def history() -> Iterator[pb.WorkerMessage]:
        member = pb.Member(id="w1", pod_uid="w1")
        yield pb.WorkerMessage(hello=pb.Hello(protocol_version=1, member=member, standing=pb.STARTING))
        name = pb.GenerationName(incarnation=pb.Incarnation(number=1), number=1)
        for first in range(1, 20_001, 1000):
            commits = [
                pb.Commit(
                    state=pb.StateName(generation=name, step=step),
                    unix_time=time.time(),
                    step_seconds=0.1,
                    samples=64,
                    values={"loss": 1.0, "accuracy": 0.5},
                )
                for step in range(first, first + 1000)
            ]
            yield pb.WorkerMessage(progress=pb.Progress(commits=commits))

    def say(messages: Iterator[pb.WorkerMessage]) -> None:
        with grpc.insecure_channel(address, options=client_options(10)) as channel:
            call = pb_grpc.CoordinatorStub(channel).Session(
                messages, metadata=token_metadata(TOKEN), timeout=10
            )
            with contextlib.suppress(grpc.RpcError):
                list(call)

    try:
        check("before")
        say(history())
        check("20,000 commits of history")
        many(64, megabytes)
        check("64 callers without a token, 4 MiB each")
        bearer = f"GET /timeline HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        for what, sent in (("without", b"GET /timeline HTTP/1.1\r\n\r\n"), ("with", bearer)):
            with connections(server.metrics, 300, sent):
                check(f"300 readers of /timeline that do not read, {what} the token")
        with connections(server.metrics, 300, b"GET /metrics HTTP/1.1\r\n"):
            check("300 requests for metrics without an end")
            page(server.metrics, "/healthz")
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
        with connections(server.port, 1_500), connections(server.port, 1_500, preface):
            check("3,000 silent connections")
        for request in (pb.SyncRequest(servers=2147483647), pb.SyncRequest(target=4294967295)):
            if sync(request) != "INVALID_ARGUMENT":
                problems.append("a count beyond every job was taken")
        if sync(own="") != "PERMISSION_DENIED":
            problems.append("a worker spoke as the operator")
        say(names())
        check("150,000 reported names")
        page(server.metrics, "/metrics")
    except (OSError, RuntimeError) as error:
        problems.append(repr(error))
    result = {
        "coordinator_alive": not problems and server.process.poll() is None,
        "coordinator_peak_mib": round(server.mib("VmHWM"), 1) if server.process.poll() is None else None,
        "coordinator_problems": problems,
        "coordinator_surprises": server.surprises(),
    }
    server.end()
    return result


def server_under_attack(folder: Path, rounds: int) -> dict[str, Any]:
    """Findings 8, 9, 16, 17 and 18."""
    server = Process(folder, "springtide_ps", r"on port (\d+), metrics on port (\d+)", SPRINGTIDE_PS_PORT="0")
    problems = list[str]()

    def check(what: str) -> None:
        began = time.monotonic()
        try:
            with kv.connect([f"127.0.0.1:{server.port}"], TOKEN, timeout=10) as store:
                store.init("w", torch.zeros(1000))
                store.push("w", torch.ones(1000)).wait()
        except (OSError, ValueError) as error:
            problems.append(f"{what}: {error}")
        seconds = time.monotonic() - began
        print(f"server, {what}: a client in {seconds:.2f} s, {server.mib():.0f} MiB", flush=True)

    def head(meta: int, payload: int = 0) -> bytes:
        return struct.pack("<4sBBHQIQQ", b"STPS", 1, 2, 0, 0, meta, payload, 0)

    try:
        check("before")
        before = server.mib()
        with connections(server.port, 1_100):
            check("1,100 silent connections")
        with connections(server.port, 1_040, head(900)) as dripping:
            for _ in range(rounds):
                for sock in dripping:
                    with contextlib.suppress(OSError):
                        sock.send(b" ")
                check("1,040 handshakes that drip")
        for sent in (
            head(60_000) + b"[" * 60_000,
            head(18) + b'{"nonce":"\\ud800"}',
            head(18) + b'{"proof":"\\ud800"}',
            head(2, 1 << 40) + b"{}",
            os.urandom(300),
        ):
            with connections(server.port, 200, sent):
                pass
        check("1,000 odd handshakes")
        with connections(server.metrics, 400, b"GET /metrics HTTP/1.1\r\n"):
            check("400 requests for metrics without an end")
            page(server.metrics, "/metrics")
    except (OSError, RuntimeError) as error:
        problems.append(repr(error))
        before = 0.0
    alive = server.process.poll() is None
    result = {
        "server_alive": not problems and alive,
        "server_extra_mib": round(server.mib("VmHWM") - before, 1) if alive else None,
        "server_problems": problems,
        "server_surprises": server.surprises(),
    }
    server.end()
    return result


def ports_under_attack(folder: Path, quick: bool = True) -> dict[str, Any]:
    """Attack both, one after the other; return their figures."""
    raise_descriptor_limit()
    return coordinator_under_attack(folder) | server_under_attack(folder, 3 if quick else 30)


def main() -> None:
    """Attack both, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds of dripping handshakes instead of 30")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = ports_under_attack(Path(temporary), arguments.quick)
    for key, value in result.items():
        print(f"{key} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
