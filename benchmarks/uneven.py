"""One worker of three at half speed: what a job makes of the speed that all of them have together.

    python -m benchmarks.uneven [--quick] [--json FILE]

Three workers with a small model on loopback. A worker's computing is held to SAMPLE_SECONDS for each sample,
as by a device that the host waits for, so that three of them are as quick on two cores as on many; the third
one takes twice as long (in the sides that say so). Jobs with parts by speed and with even ones, native
DistributedDataParallel and torchft, both on gloo, make a few steps each by turns; a step is from its begin to
the begin of the next one, of the worker that takes longest, the median over all.

* `fraction_of_sum_of_speeds`: samples per second of the job with parts by speed, over the sum of what the
  three workers could compute by themselves. `even_...`: the same job with `elasticity.balance: Even`;
  `ddp_...`: DistributedDataParallel. `torchft_...`: three replica groups of one; null with a reason where the
  extra `peers` is not installed.
* `even_cost`: with three equal workers, a step with parts by speed over one with even parts, less one.
* `exact_hash_equal`: in exact mode, whether the parameters after as many steps are equal bit for bit with
  parts by speed and with even ones; `exact_fraction_of_sum_of_speeds` of the former.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import recovery
from benchmarks.support.sides import Command, Side, Turn, by_turns, running
from benchmarks.support.turns import Player
from benchmarks.support.zygote import Zygote

WORKERS, SLOW = 3, 2
"""How many, and which one is slow in uneven sides."""
BATCH, WIDTH, LOGICAL_WORKERS = 60, 32, 15
SAMPLE_SECONDS = 0.008
SPEED, EVEN, EQUAL_SPEED, EQUAL_EVEN = "speed", "even", "equal_speed", "equal_even"
EXACT_SPEED, EXACT_EVEN, DDP, TORCHFT = "exact_speed", "exact_even", "ddp", "torchft"
PEERS = {
    DDP: ("benchmarks.peers.uneven_ddp",),
    TORCHFT: ("benchmarks.peers.torchft", "--turns"),
}
"""Module and arguments, by name."""
WARM_UP, STEPS = 12, 4
"""Steps of the first turn, in which parts settle, and of each that is counted besides its first one."""
KEYS = (
    "fraction_of_sum_of_speeds",
    "even_fraction_of_sum_of_speeds",
    "exact_fraction_of_sum_of_speeds",
    "ddp_fraction_of_sum_of_speeds",
    "torchft_fraction_of_sum_of_speeds",
    "even_cost",
    "exact_hash_equal",
)
_TURNS, _SIDE, _UNEVEN = "BENCHMARK_TURNS", "BENCHMARK_SIDE", "BENCHMARK_UNEVEN"
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Kind:
    """Describe a side of ours.

    Attributes:
        balance: `elasticity.balance`.
        uneven: Whether one worker is slow.
        exact: Whether sums are.
    """

    balance: str
    uneven: bool = True
    exact: bool = False

    def environment(self) -> dict[str, str]:
        """Return what its workers have besides what all have."""
        exact = {"SPRINGTIDE_LOGICAL_WORKERS": str(LOGICAL_WORKERS)} if self.exact else {}
        return {"SPRINGTIDE_BALANCE": self.balance, _UNEVEN: "1" if self.uneven else "", **exact}


SIDES = {
    SPEED: Kind("Speed"),
    EVEN: Kind("Even"),
    EQUAL_SPEED: Kind("Speed", uneven=False),
    EQUAL_EVEN: Kind("Even", uneven=False),
    EXACT_SPEED: Kind("Speed", exact=True),
    EXACT_EVEN: Kind("Even", exact=True),
}


def build() -> tuple[Any, Any]:
    """Return a small model and its optimizer; the same on every call."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10))
    return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def samples() -> tuple[Any, Any]:
    """Return inputs [BATCH * 16, WIDTH] of float32 and their labels; the same on every call."""
    import torch

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * 16, WIDTH, generator=generator)
    return inputs, torch.randint(10, (len(inputs),), generator=generator)


def hold(began: float, count: int, worker: int, uneven: bool) -> None:
    """Wait until a worker's device would have computed some samples.

    Args:
        began: When it began with them; as `time.perf_counter`.
        count: Samples.
        worker: Number of the worker, from 0.
        uneven: Whether the last one is slow.
    """
    seconds = count * SAMPLE_SECONDS * (2 if uneven and worker == SLOW else 1)
    time.sleep(max(0.0, began + seconds - time.perf_counter()))


def digest(model: Any) -> float:
    """Return 48 bits of a hash of all parameters, as a number that JSON carries exactly."""
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().numpy().tobytes())
    return float(int.from_bytes(total.digest()[:6], "big"))


# ---- a worker


def train() -> None:
    """Train by turns until the benchmark ends."""
    import torch
    from torch.nn import functional as F

    import springtide
    from springtide import api

    torch.set_num_threads(1)
    springtide.init()
    model, optimizer = build()
    model, optimizer = springtide.distribute(model, optimizer)
    worker, uneven = int(os.environ["SPRINGTIDE_SLOT"]), bool(os.environ[_UNEVEN])
    player, step = None, 0
    for batch in springtide.batches(samples(), batch_size=BATCH, epochs=10_000, seed=0):
        runtime = api.active_runtime
        assert runtime is not None
        if player is None:
            player = Player(os.environ[_TURNS], os.environ[_SIDE], lambda: {"digest": digest(model)})
        elif runtime.position.cursor.step != step:  # with exact sums a step has several bodies
            player.step_ended()
        step = runtime.position.cursor.step
        with springtide.step():
            began = time.perf_counter()
            inputs, labels = batch
            loss = F.cross_entropy(model(inputs), labels)
            hold(began, batch.samples, worker, uneven)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


# ---- jobs


class Job(recovery.Job):
    """A job of one side."""

    script = "benchmarks.uneven"

    def __init__(self, folder: Path, side: str, turns: Path, zygote: Zygote) -> None:
        """Start it.

        Args:
            folder: Its own; it is made.
            side: One of SIDES.
            turns: Socket of turns.
            zygote: That its workers are forked from.
        """
        folder.mkdir()
        environment = {_SIDE: side, _TURNS: str(turns), **SIDES[side].environment()}
        super().__init__(folder, WORKERS, environment, zygote)


def fraction(seconds: Sequence[float], uneven: bool = True) -> float:
    """Return the samples per second of a job over the sum of its workers' speeds. PURE.

    Args:
        seconds: Of its steps.
        uneven: Whether one of its workers is slow.
    """
    together = (WORKERS - 0.5 if uneven else WORKERS) / SAMPLE_SECONDS
    return BATCH / statistics.median(seconds) / together


def figures(sides: Mapping[str, Side], reasons: Mapping[str, str]) -> dict[str, Any]:
    """Return all that is written. PURE.

    Args:
        sides: Observations by side.
        reasons: Why a peer has none, by peer; "" if it has.
    """
    digests = {each["digest"] for name in (EXACT_SPEED, EXACT_EVEN) for each in sides[name].last}
    step = {name: statistics.median(side.seconds) for name, side in sides.items() if side.seconds}
    missing = {name: reasons[name] for name in PEERS if reasons[name] or name not in step}
    result: dict[str, Any] = {
        "fraction_of_sum_of_speeds": fraction(sides[SPEED].seconds),
        "even_fraction_of_sum_of_speeds": fraction(sides[EVEN].seconds),
        "exact_fraction_of_sum_of_speeds": fraction(sides[EXACT_SPEED].seconds),
        **{
            f"{name}_fraction_of_sum_of_speeds": None if name in missing else fraction(sides[name].seconds)
            for name in PEERS
        },
        "even_cost": step[EQUAL_SPEED] / step[EQUAL_EVEN] - 1.0,
        "exact_hash_equal": len(digests) == 1,
        "step_seconds": step,
        "steps": len(sides[SPEED].seconds),
    }
    return result | {f"{name}_reason": reason for name, reason in missing.items()}


def measure(rounds: int) -> dict[str, Any]:
    """Run all sides; null with a reason where one of ours did not run to its end.

    Args:
        rounds: Turns of each side that count.
    """
    try:
        with tempfile.TemporaryDirectory() as name, Zygote(Job.script) as zygote:
            folder = Path(name)
            path = folder / "turns"
            jobs = {side: functools.partial(Job, folder / side, side, path, zygote) for side in SIDES}
            peers = {
                peer: functools.partial(Command, folder, peer, (*command, str(path)))
                for peer, command in PEERS.items()
            }
            with running(folder, WORKERS, jobs, peers) as (turns, reasons):
                turn = Turn(WARM_UP, STEPS, rounds)
                return figures(by_turns(turns.take, (*SIDES, *PEERS), reasons, turn), reasons)
    except (RuntimeError, TimeoutError, OSError) as error:
        return dict.fromkeys(KEYS) | {"reason": str(error)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--zygote", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    os.environ["MKL_CBWR"] = "AVX2,STRICT"  # which exact mode asks for, before torch is imported
    if chosen.zygote:
        recovery.zygote(train)
        return
    result = measure(6 if chosen.quick else 30)
    for key, value in result.items():
        print(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
