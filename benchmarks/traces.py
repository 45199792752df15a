"""The cost of traces: the same steps in a job that exports spans by OTLP and in one that does not, by turns.

    python -m benchmarks.traces [--quick] [--json FILE]

Two jobs of two workers with a coordinator each train the perceptron of `benchmarks.steady_state` and take a
checkpoint about every second; the workers of one export their spans (of its start and of each checkpoint) to
a collector in the benchmark's process. They make a few steps each by turns; a step is from its begin to the
begin of the next one, of the worker that takes longer. `traced_ratio` is the median over pairs of turns of
the one's mean step over the other's. Null with a reason where OpenTelemetry's exporter is not installed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import importlib.util
import json
import os
import statistics
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import recovery
from benchmarks.steady_state import build
from benchmarks.support.sides import Side, Turn, by_turns, ratios_by_turns, running
from benchmarks.support.turns import Player
from benchmarks.support.zygote import Zygote

WORKERS = 2
ON, OFF = "on", "off"
WARM_UP, STEPS = 20, 25
"""Steps of the first turn, and of each that is counted besides its first one."""
_TURNS, _SIDE = "BENCHMARK_TURNS", "BENCHMARK_SIDE"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


def train() -> None:
    """Train by turns until the benchmark ends."""
    import torch
    from torch.nn import functional as F

    import springtide

    torch.set_num_threads(1)
    springtide.init()
    model, samples, labels, batch_size = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = springtide.distribute(model, optimizer)
    player = None
    for x, y in springtide.batches((samples, labels), batch_size=batch_size, epochs=1_000_000, seed=0):
        if player is None:
            player = Player(os.environ[_TURNS], os.environ[_SIDE], dict)
        else:
            player.step_ended()
        with springtide.step():
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()


class Job(recovery.Job):
    """A job of one side."""

    script = "benchmarks.traces"

    def __init__(self, folder: Path, side: str, turns: Path, zygote: Zygote, endpoint: str) -> None:
        """Start it.

        Args:
            folder: Its own; it is made.
            side: ON or OFF.
            turns: Socket of turns.
            zygote: That its workers are forked from.
            endpoint: Of the collector, for the side with traces.
        """
        storage = folder / "storage"
        storage.mkdir(parents=True)
        environment = {
            _SIDE: side,
            _TURNS: str(turns),
            "SPRINGTIDE_CHECKPOINT_URI": str(storage),
            "SPRINGTIDE_CHECKPOINT_SECONDS": "1",
        }
        if side == ON:
            environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
        super().__init__(folder, WORKERS, environment, zygote)


class Collector:
    """Takes spans by OTLP over HTTP and counts the requests."""

    def __init__(self) -> None:
        """Listen on a free port."""
        self.requests = 0
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests += 1
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that is closed at the end."""
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()


def figures(sides: Mapping[str, Side], requests: int) -> dict[str, Any]:
    """Return all that is written. PURE.

    Args:
        sides: Observations by side: as many turns of STEPS steps each.
        requests: That came to the collector.
    """
    return {
        "traced_ratio": statistics.median(ratios_by_turns(sides[ON], sides[OFF])),
        "step_seconds_on": statistics.median(sides[ON].seconds),
        "step_seconds_off": statistics.median(sides[OFF].seconds),
        "pairs": len(sides[ON].turns),
        "requests": requests,
    }


def measure(rounds: int) -> dict[str, Any]:
    """Run both jobs; null with a reason where they did not run to their end.

    Args:
        rounds: Turns of each side that count.
    """
    keys = ("traced_ratio", "step_seconds_on", "step_seconds_off", "pairs", "requests")
    if importlib.util.find_spec("opentelemetry") is None or importlib.util.find_spec(_EXPORTER) is None:
        return dict.fromkeys(keys) | {"reason": "springtide[otel] is not installed"}
    try:
        with tempfile.TemporaryDirectory() as name, Zygote(Job.script) as zygote, collecting() as collector:
            folder = Path(name)
            path = folder / "turns"
            jobs = {
                side: functools.partial(Job, folder / side, side, path, zygote, collector.endpoint)
                for side in (ON, OFF)
            }
            with running(folder, WORKERS, jobs, {}) as (turns, reasons):
                sides = by_turns(turns.take, (ON, OFF), reasons, Turn(WARM_UP, STEPS, rounds))
            return figures(sides, collector.requests)
    except (RuntimeError, TimeoutError, OSError) as error:
        return dict.fromkeys(keys) | {"reason": str(error)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--zygote", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.zygote:
        recovery.zygote(train)
        return
    result = measure(16 if chosen.quick else 60)
    for key, value in result.items():
        print(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
