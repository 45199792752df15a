"""Push, update and pull of 64 MiB against a parameter server, beside plain sockets, torch RPC and gRPC.

    python -m benchmarks.ps_throughput [--quick] [--json FILE]

One worker and one server, two processes on loopback, 4 MiB chunks, one torch thread each. Every way does
the same work: all chunks go to the server, which makes an SGD step with momentum on each, and come back,
over TCP as between two machines (torch RPC would take shared memory here). The ways take turns, so that a
noisy machine is noisy for all. Both directions count: 128 MiB a round. More workers and servers are
recorded without a judgement. The plain sockets have the options of our streams; `congestion_control` says
what these have and what the machine's is, which torch RPC and gRPC have.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.support.ports import free_port

CHUNK_BYTES = 4 * 1024 * 1024
CHUNKS = 16
OPTIONS = {"lr": 0.01, "momentum": 0.9}
WAYS = ("springtide", "raw_tcp", "torch_rpc", "grpc")
TOKEN = "benchmark"
SERVED_SECONDS = 300.0
"""Longest life of a server of torch RPC, should nobody be left to kill it."""
_ROOT = Path(__file__).resolve().parents[1]
_GRPC_LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]

Round = Callable[[], None]


def steps(elements: int) -> tuple[list[Any], list[Callable[[Any], None]]]:
    """(values, update) of each chunk: what every server here holds."""
    import torch

    from springtide_ps.params.optim import Update

    values = [torch.zeros(elements) for _ in range(CHUNKS)]
    return values, [Update("sgd", OPTIONS).bind(chunk) for chunk in values]


# ---- servers, each in a process of its own


def serve_raw_tcp(port: int, elements: int) -> None:
    """Plain sockets, full duplex: one thread receives and updates, one sends back."""
    import torch

    from springtide_ps.wire.frames import memory

    values, update = steps(elements)
    listener = socket.create_server(("127.0.0.1", port))
    connection, _ = listener.accept()
    tune(connection)
    ready: queue.Queue[int] = queue.Queue()

    def send() -> None:
        while True:
            connection.sendall(memory(values[ready.get()]))

    threading.Thread(target=send, daemon=True).start()
    gradient = torch.empty(elements)
    while True:
        for chunk in range(CHUNKS):
            if not receive(connection, memory(gradient)):
                return
            update[chunk](gradient)
            ready.put(chunk)


_rpc_state: list[Any] = []


def rpc_step(chunk: int, gradient: Any) -> Any:
    """Runs on the server of torch RPC."""
    values, update = _rpc_state
    update[chunk](gradient)
    return values[chunk]


def serve_torch_rpc(port: int, elements: int) -> None:
    from torch.distributed import rpc

    _rpc_state[:] = steps(elements)
    options = rpc.TensorPipeRpcBackendOptions(
        _transports=["uv"], _channels=["basic"], init_method=f"tcp://127.0.0.1:{port}"
    )
    rpc.init_rpc("server", rank=0, world_size=2, rpc_backend_options=options)
    time.sleep(SERVED_SECONDS)  # it holds the rendezvous: whoever ends both sides kills it last


def serve_grpc(port: int, elements: int) -> None:
    """Raw bytes over a bidirectional stream, without protobuf."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc
    import torch

    values, update = steps(elements)

    def exchange(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
        for number, raw in enumerate(requests):
            chunk = number % CHUNKS
            update[chunk](torch.frombuffer(bytearray(raw), dtype=torch.float32))
            yield values[chunk].numpy().tobytes()

    handler = grpc.method_handlers_generic_handler(
        "raw", {"x": grpc.stream_stream_rpc_method_handler(exchange)}
    )
    server = grpc.server(ThreadPoolExecutor(4), handlers=[handler], options=_GRPC_LIMITS)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


# ---- workers


def raw_tcp(stack: ExitStack, port: int, elements: int) -> Round:
    import torch

    from springtide_ps.wire.frames import memory

    connection = stack.enter_context(connected(port))
    tune(connection)
    gradient, values = torch.ones(CHUNKS * elements), torch.empty(CHUNKS * elements)

    def one() -> None:
        sender = threading.Thread(target=lambda: connection.sendall(memory(gradient)))
        sender.start()
        if not receive(connection, memory(values)):
            raise ConnectionError("the server of plain sockets closed the connection")
        sender.join()

    return one


def torch_rpc(stack: ExitStack, port: int, elements: int) -> Round:
    import torch
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(
        _transports=["uv"], _channels=["basic"], init_method=f"tcp://127.0.0.1:{port}"
    )
    rpc.init_rpc("worker", rank=1, world_size=2, rpc_backend_options=options)
    stack.callback(rpc.shutdown, graceful=False)  # a graceful one races with the end of the rendezvous
    gradient, values = torch.ones(CHUNKS, elements), torch.empty(CHUNKS, elements)

    def one() -> None:
        waiting = [rpc.rpc_async("server", rpc_step, args=(i, gradient[i])) for i in range(CHUNKS)]
        for chunk, future in enumerate(waiting):
            values[chunk].copy_(future.wait())

    return one


def grpc_stream(stack: ExitStack, port: int, elements: int) -> Round:
    import grpc
    import torch

    channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options=_GRPC_LIMITS))
    outbox: queue.Queue[bytes | None] = queue.Queue()
    exchange: Any = channel.stream_stream("/raw/x")
    answers: Iterator[bytes] = exchange(iter(outbox.get, None), wait_for_ready=True)
    stack.callback(outbox.put, None)
    gradient, values = torch.ones(CHUNKS, elements), torch.empty(CHUNKS, elements)

    def one() -> None:
        for chunk in range(CHUNKS):
            outbox.put(gradient[chunk].numpy().tobytes())
        for chunk in range(CHUNKS):
            values[chunk].copy_(torch.frombuffer(bytearray(next(answers)), dtype=torch.float32))

    return one


def springtide_kv(stack: ExitStack, ports: list[int], elements: int, key: str = "w") -> Round:
    import torch

    from springtide import kv

    servers = [f"127.0.0.1:{port}" for port in ports]
    store = stack.enter_context(kv.connect(servers, TOKEN, chunk_bytes=4 * elements))
    gradient, values = torch.ones(CHUNKS * elements), torch.zeros(CHUNKS * elements)
    store.init(key, values)
    return lambda: store.push_pull(key, gradient, values).wait()


# ---- parts


def tune(connection: socket.socket) -> None:
    """The options of our own streams."""
    from springtide_ps.wire import congestion

    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    congestion.choose(connection)


def congestion_control() -> dict[str, str]:
    from springtide_ps.wire import congestion

    name = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as connection,
    ):
        return {"streams": congestion.choose(connection), "machine": name.read_text().strip()}


def receive(connection: socket.socket, memory: memoryview) -> bool:
    """Fill the memory; False at the end of the stream."""
    got = 0
    while got < len(memory):
        count = connection.recv_into(memory[got:])
        if not count:
            return False
        got += count
    return True


@contextmanager
def connected(port: int, seconds: float = 60.0) -> Iterator[socket.socket]:
    """Wait for the server to listen. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody listens on port {port} after {seconds:g} s") from error
            time.sleep(0.05)
    with connection:
        yield connection


def start(stack: ExitStack, way: str, port: int, elements: int = 0) -> None:
    """Start the server of one way; it is killed at the end.

    elements: of a chunk, for those whose workers do not say it.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if way == "springtide":
        command = [sys.executable, "-m", "springtide_ps"]
        environment |= {
            "SPRINGTIDE_TOKEN": TOKEN,
            "SPRINGTIDE_BIND": "127.0.0.1",
            "SPRINGTIDE_PS_PORT": str(port),
            "SPRINGTIDE_METRICS_PORT": str(free_port()),
            "SPRINGTIDE_PS_THREADS": "1",
        }
    else:
        command = [sys.executable, "-m", "benchmarks.ps_throughput", "--serve", way]
        command += [str(port), str(elements)]
    process = subprocess.Popen(command, env=environment, cwd=_ROOT, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)


def start_springtide(stack: ExitStack, count: int) -> list[int]:
    ports = [free_port() for _ in range(count)]
    for port in ports:
        start(stack, "springtide", port)
    for port in ports:
        with connected(port):
            pass
    return ports


def work(way: str, port: int, rounds: int, elements: int) -> None:
    """The worker of one way; prints the seconds of its rounds as JSON."""
    with ExitStack() as stack:
        if way == "springtide":
            from springtide import kv

            with connected(port):
                pass
            with kv.connect([f"127.0.0.1:{port}"], TOKEN) as store:
                store.set_update("sgd", **OPTIONS)
            one = springtide_kv(stack, [port], elements)
        else:
            ways = {"raw_tcp": raw_tcp, "torch_rpc": torch_rpc, "grpc": grpc_stream}
            one = ways[way](stack, port, elements)
        seconds = []
        for _ in range(rounds + 2):
            began = time.perf_counter()
            one()
            seconds.append(time.perf_counter() - began)
        print(json.dumps(seconds[2:]), flush=True)


def measure_block(way: str, rounds: int, chunk_bytes: int = CHUNK_BYTES) -> list[float]:
    """Seconds of `rounds` rounds of one way, in two fresh processes. Raises RuntimeError: what went wrong."""
    with ExitStack() as stack:
        port = free_port()
        elements = chunk_bytes // 4
        start(stack, way, port, elements)
        arguments = ["--work", way, str(port), str(rounds), str(elements)]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.ps_throughput", *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    seconds: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return seconds


def measure_ways(rounds: int, blocks: int) -> dict[str, Any]:
    """GB/s of every way; a way that does not run is null with a reason.

    Blocks of rounds take turns, each alone on the machine: an idle torch RPC polls and slows its neighbours.
    """
    results: dict[str, Any] = {}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(blocks):
        for way in times:
            if f"{way}_reason" in results:
                continue
            try:
                times[way] += measure_block(way, rounds)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                results[f"{way}_reason"] = str(error)
    for way, seconds in times.items():
        usable = seconds and f"{way}_reason" not in results
        results[f"{way}_gb_per_s"] = gb_per_s(seconds) if usable else None
    for peer in ("raw_tcp", "torch_rpc", "grpc"):
        ours, theirs = results["springtide_gb_per_s"], results[f"{peer}_gb_per_s"]
        results[f"ratio_to_{peer}"] = ours / theirs if ours and theirs else None
    return results


def gb_per_s(seconds: list[float], chunk_bytes: int = CHUNK_BYTES) -> float:
    return 2 * CHUNKS * chunk_bytes / statistics.median(seconds) / 1e9


def measure_size(workers: int, servers: int, rounds: int, chunk_bytes: int = CHUNK_BYTES) -> float:
    """GB/s of all workers together, each with a tensor of its own, one thread of this process for each."""
    with ExitStack() as stack:
        ports = start_springtide(stack, servers)
        runs = [springtide_kv(stack, ports, chunk_bytes // 4, f"w{worker}") for worker in range(workers)]
        seconds = []
        for number in range(rounds + 1):
            threads = [threading.Thread(target=one) for one in runs]
            began = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if number:
                seconds.append(time.perf_counter() - began)
    return workers * gb_per_s(seconds, chunk_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    if arguments.serve:
        way, *numbers = arguments.serve
        serve = {"raw_tcp": serve_raw_tcp, "torch_rpc": serve_torch_rpc, "grpc": serve_grpc}[way]
        serve(*(int(number) for number in numbers))
        return
    if arguments.work:
        way, *numbers = arguments.work
        work(way, *(int(number) for number in numbers))
        return
    rounds = 20 if arguments.quick else 40
    result = measure_ways(rounds, 3 if arguments.quick else 7)
    for way in WAYS:
        figure = result[f"{way}_gb_per_s"]
        print(
            f"{way:12} {figure:6.2f} GB/s" if figure else f"{way:12} did not run: {result[f'{way}_reason']}"
        )
    for peer in ("raw_tcp", "torch_rpc", "grpc"):
        if result[f"ratio_to_{peer}"]:
            print(f"ratio_to_{peer} {result[f'ratio_to_{peer}']:.2f}")
    result["congestion_control"] = congestion_control()
    print("congestion control: {streams} (the machine's: {machine})".format(**result["congestion_control"]))
    result["sizes"] = {}
    for workers, servers in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (4, 4)):
        figure = measure_size(workers, servers, max(3, rounds // 10))
        result["sizes"][f"{workers}_workers_{servers}_servers_gb_per_s"] = figure
        print(f"{workers} workers, {servers} servers (assign): {figure:.2f} GB/s", flush=True)
    result["ps_lite_gb_per_s"] = None
    result["ps_lite_reason"] = "ps-lite has no package that pip installs"
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
