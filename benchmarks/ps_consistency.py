"""Loss against time of the three consistencies of parameter servers, with one slow worker.

    python -m benchmarks.ps_consistency [--quick] [--json FILE] [--plot FILE]

Three workers and two servers train the digits model. A body takes as long as its samples do: computing is
waiting here, so that three workers have a machine each; one worker takes three times as long. Once it does
so always (`steady`), once in every second stretch of two seconds (`now_and_then`). The time counts from the
first commit. Losses are those that the workers reported, averaged over half a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ps_failover import ServerJob
from benchmarks.recovery import zygote

MODES = ("Synchronous", "BoundedStaleness", "Asynchronous")
COLOURS = {"Synchronous": "#2b6cb0", "BoundedStaleness": "#b4540a", "Asynchronous": "#2f855a"}
STALENESS = 4
BATCH = 96
SECONDS_PER_SAMPLE = 0.0004
SLOWNESS = 3.0
STRETCH_SECONDS = 2.0
BIN_SECONDS = 0.5
LOSS = 0.3


def train() -> None:
    """The script of a worker, until it is killed."""
    import torch
    from sklearn.datasets import load_digits
    from torch.nn import functional as F

    import springtide

    torch.set_num_threads(1)
    slow = os.environ.get("BENCHMARK_SLOW", "")
    springtide.init()
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    model, optimizer = springtide.distribute(model, optimizer)
    for x, y in springtide.batches((images, labels), batch_size=BATCH, epochs=10_000, seed=0):
        with springtide.step():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            springtide.report(loss=loss.item())
            is_slow = slow == "steady" or (
                slow != "" and time.time() % (2 * STRETCH_SECONDS) < STRETCH_SECONDS
            )
            time.sleep(len(x) * SECONDS_PER_SAMPLE * (SLOWNESS if is_slow else 1.0))
            optimizer.step()
            optimizer.zero_grad()


class SlowJob(ServerJob):
    """A job whose first worker is slow."""

    script = "benchmarks.ps_consistency"

    def __init__(self, folder: Path, mode: str, slow: str) -> None:
        self._slow: str | None = slow
        environment = {"SPRINGTIDE_CONSISTENCY": mode, "SPRINGTIDE_STALENESS": str(STALENESS)}
        super().__init__(folder, 2, environment, workers=3)

    def add(self, **environment: str) -> str:
        slow, self._slow = self._slow, None
        return super().add(**environment, **({"BENCHMARK_SLOW": slow} if slow else {}))


def run(mode: str, slow: str, seconds: float) -> dict[str, Any]:
    """Train for so long, and read what was committed."""
    with tempfile.TemporaryDirectory() as folder:
        job = SlowJob(Path(folder), mode, slow)
        try:
            job.until(lambda: job.history.newest() is not None, "the first commit", 120)
            time.sleep(seconds)
        finally:
            job.close()
        commits = [
            json.loads(line)
            for path in Path(folder).glob("*.steps")
            for line in path.read_text().splitlines()
        ]
    first = min(commit["time"] for commit in commits)
    commits = [commit for commit in commits if commit["time"] < first + seconds]
    points = binned([(commit["time"] - first, commit["values"]["loss"]) for commit in commits])
    updates = len({commit["step"] for commit in commits})
    return {
        "updates_per_second": updates / seconds,
        "seconds_to_loss": next((at for at, loss in points if loss <= LOSS), None),
        "final_loss": points[-1][1],
        "curve": points,
    }


def binned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Means over half seconds."""
    bins: dict[int, list[float]] = {}
    for at, value in points:
        bins.setdefault(int(at / BIN_SECONDS), []).append(value)
    return [
        (round((number + 0.5) * BIN_SECONDS, 2), round(sum(values) / len(values), 4))
        for number, values in sorted(bins.items())
    ]


def plot(result: Mapping[str, Mapping[str, Any]], seconds: float) -> str:
    """Two panels as an SVG document, losses on a common linear scale."""
    from springtide_demo.svg import GRID, INK, ticks

    width, height, left, top = 430, 240, 52, 56
    titles = {"steady": "one worker always slow", "now_and_then": "one worker slow now and then"}
    highest = max(loss for runs in result.values() for run in runs.values() for _, loss in run["curve"])
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1060 350" width="1060" height="350" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}" role="img" '
        'aria-label="Loss against time of three consistencies with one slow worker">',
        '<rect width="1060" height="350" fill="#ffffff"/>',
        '<text x="52" y="22" font-size="16" font-weight="600">Loss against time</text>',
    ]
    for panel, (name, runs) in enumerate(result.items()):
        x0 = left + panel * (width + 90)
        parts.append(f'<text x="{x0}" y="44" font-weight="600">{titles[name]}</text>')
        for tick in ticks(0.0, highest, 5):
            y = top + height * (1 - tick / highest)
            parts.append(f'<line x1="{x0}" y1="{y:.1f}" x2="{x0 + width}" y2="{y:.1f}" stroke="{GRID}"/>')
            parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
        for tick in ticks(0.0, seconds, 6):
            x = x0 + width * tick / seconds
            parts.append(f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{tick:g} s</text>')
        for number, (mode, measured) in enumerate(runs.items()):
            line = " ".join(
                f"{x0 + width * at / seconds:.1f},{top + height * (1 - loss / highest):.1f}"
                for at, loss in measured["curve"]
            )
            colour, y = COLOURS[mode], top + 14 + 18 * number
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts.append(
                f'<text x="{x0 + width - 8}" y="{y}" text-anchor="end" fill="{colour}">{mode}</text>'
            )
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--plot", type=Path, help="draw the curves into this SVG file")
    parser.add_argument("--zygote", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.zygote:
        import sklearn.datasets  # noqa: F401 (once for all workers)

        zygote(train)
        return
    seconds = 14.0 if arguments.quick else 40.0
    result: dict[str, dict[str, Any]] = {}
    for slow in ("steady", "now_and_then"):
        result[slow] = {}
        for mode in MODES:
            result[slow][mode] = found = run(mode, slow, seconds)
            print(
                f"{slow:12} {mode:16} {found['updates_per_second']:6.1f} updates/s, loss {LOSS} after "
                f"{found['seconds_to_loss']} s, at the end {found['final_loss']:.4f}",
                flush=True,
            )
        base = result[slow]["Synchronous"]["updates_per_second"]
        for mode in MODES:
            result[slow][mode]["ratio_to_synchronous"] = result[slow][mode]["updates_per_second"] / base
    if arguments.plot:
        arguments.plot.write_text(plot(result, seconds))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        main()
