"""Optimizer state and gradients in shards: what a worker holds, what a step costs, and what a kill does.

    python -m benchmarks.sharding [--quick] [--json FILE]

Three workers with AdamW on loopback, models of 26 MB and 67 MB (CASES has the figures of each, and at the
top is the worse one of both). Jobs without shards, with `shard: Optimizer` and with `shard: Gradients`, and
torch's `fully_shard` (FSDP2, which shards parameters too) on gloo, make a few steps each by turns; a step is
from its begin to the begin of the next one, of the worker that takes longest, the median over all.

* `optimizer_bytes_ratio`, `gradient_bytes_ratio` (of `Gradients`): the most that a worker has over what one
  without shards has. Gradients are all tensors that stay allocated between steps and are neither parameters,
  state nor samples: memory that is only kept to be used again, for what is on its way, counts.
  `tensor_bytes_ratio` (of `Optimizer`) and `gradients_tensor_bytes_ratio`: all of that, and the parameters.
* `gradient_peak_bytes_ratio` (of `Gradients`): the same where it is most, when backward has just made a
  gradient and nothing was done with it yet; in a step that is not a process's first one. Without shards that
  is a gradient more than between steps.
* `step_ratio_to_unsharded`, `step_ratio_to_fsdp2`: of `Optimizer`; `gradients_step_ratio_to_unsharded`.
* `exposed_reduce_seconds`, `exposed_gather_seconds`: per step, the wait for sums after backward and for
  values in the next forward, the mean of the workers.
* `kill_gap_seconds_p50`: kill -9 of a worker of the smaller model to the survivors' next commit
  (benchmarks.recovery says how that is counted), with checkpoints each few seconds that nobody may need:
  `checkpoints_read`. `steps_lost` were committed and had to be made again. `join_gap_seconds`: the same when
  another worker comes in its place, which gets its shards and the parameters before the next step.
* `transfer_seconds`, by model: from the meeting of those that are left after a kill to their next step, in
  which state travels between them, the median; `transfer_at_once_seconds`: the same where each shard has two
  holders again before that step (`SPRINGTIDE_SHARDS_AT_ONCE_MIB`). Without --quick also of 67 and 196 MB.
* `torchrun_fsdp2_...`: the same kill under torchrun with `fully_shard` and a checkpoint each 20 steps;
  cut after 60 s (20 with --quick) and counted as those, and as the steps since the checkpoint.

Workers are forked from one process, which has imported torch.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import random
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import recovery
from benchmarks.support.sides import PORT, RANK, Forked, Side, Turn, by_turns, running
from benchmarks.support.turns import Player
from benchmarks.support.zygote import Zygote

WORKERS = 3
DEPTH, BATCH, SAMPLES = 4, 96, 960
MODELS = {"26MB": 1280, "67MB": 2048}
"""Width of the layers, by name."""
KILLED_MODEL = "26MB"
TRANSFER_MODELS = MODELS | {"196MB": 3500}
UNSHARDED, OPTIMIZER, GRADIENTS, PEER = "unsharded", "optimizer", "gradients", "fsdp2"
SHARDS = {UNSHARDED: "None", OPTIMIZER: "Optimizer", GRADIENTS: "Gradients"}
"""`strategy.allReduce.shard`, by side."""
PEAK_STEP = 2
"""Number of the step in which the most memory is looked for: one of the first turn, and not a process's first
one.
"""
TURNS = {"26MB": Turn(4, 4, 40), "67MB": Turn(4, 4, 20)}
QUICK_TURNS = {"26MB": Turn(3, 4, 6), "67MB": Turn(3, 3, 2)}
"""Turns of each side, by model."""
SAVE_SECONDS = 5.0
CASE_KEYS = (
    "optimizer_bytes_ratio",
    "gradient_bytes_ratio",
    "gradient_peak_bytes_ratio",
    "tensor_bytes_ratio",
    "gradients_tensor_bytes_ratio",
    "step_ratio_to_unsharded",
    "step_ratio_to_fsdp2",
    "gradients_step_ratio_to_unsharded",
    "exposed_reduce_seconds",
    "exposed_gather_seconds",
)
KILL_KEYS = (
    "kill_gap_seconds_p50",
    "unsharded_kill_gap_seconds_p50",
    "kill_gap_ratio",
    "join_gap_seconds",
    "unsharded_join_gap_seconds",
    "steps_lost",
    "samples_lost",
    "samples_repeated",
    "checkpoints_read",
)
AT_ONCE = {"SPRINGTIDE_SHARDS_AT_ONCE_MIB": "1000000"}
_BYTES = ("optimizer_bytes", "gradient_bytes", "gradient_peak_bytes", "tensor_bytes")
_WIDTH, _TURNS, _SIDE = "BENCHMARK_WIDTH", "BENCHMARK_TURNS", "BENCHMARK_SIDE"
_ROOT = Path(__file__).resolve().parents[1]


def build(width: int) -> Any:
    """Return DEPTH square layers and a small one; the same on every call.

    Args:
        width: Of the layers.
    """
    import torch

    torch.manual_seed(0)
    layers: list[Any] = []
    for _ in range(DEPTH):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))


def samples(width: int) -> tuple[Any, Any]:
    """Return inputs [SAMPLES, width] of float32 and their labels; the same on every call.

    Args:
        width: Of an input.
    """
    import torch

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, width, generator=generator)
    return inputs, torch.randint(10, (SAMPLES,), generator=generator)


# ---- a worker


def run() -> None:
    """Run the process that the environment describes, until it is killed."""
    from benchmarks.peers import fsdp2

    if os.environ[_SIDE] != PEER:
        train()
        return
    rank, port = int(os.environ[RANK]), int(os.environ[PORT])
    fsdp2.train_by_turns(os.environ[_TURNS], int(os.environ[_WIDTH]), rank, port)


def train() -> None:
    """Train, by turns where the environment names a socket of them."""
    import torch
    from torch.nn import functional as F

    import springtide

    torch.set_num_threads(1)
    springtide.init()
    width = int(os.environ[_WIDTH])
    model = build(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    peak = Peak(model, optimizer)  # its hooks come before the library's
    model, optimizer = springtide.distribute(model, optimizer)
    data = samples(width)
    player = None
    for inputs, labels in springtide.batches(data, batch_size=BATCH, epochs=10_000, seed=0):
        if player is None and _TURNS in os.environ:

            def looked() -> dict[str, float]:
                peak.close()  # it has seen the steps of the first turn, which do not count
                return look(model, optimizer, data) | {"gradient_peak_bytes": peak.nbytes}

            player = Player(os.environ[_TURNS], os.environ[_SIDE], looked)
            peak.known = data
        elif player is not None:
            player.step_ended()
        with springtide.step():
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()


class Peak:
    """Looks at the tensors of this process whenever backward has made the gradient of a layer, in one step.

    To look takes longer than to make the gradient.

    Attributes:
        known: Tensors that do not count, besides parameters and the optimizer's state.
        nbytes: The most that all others have had.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        """Begin.

        Args:
            model: Trained.
            optimizer: Its.
        """
        self.known: Collection[Any] = ()
        self.nbytes = 0
        self._model, self._optimizer = model, optimizer
        self._steps: Counter[int] = Counter()
        layers = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        self._handles = [layer.register_post_accumulate_grad_hook(self._look) for layer in layers]

    def _look(self, layer: Any) -> None:
        self._steps[id(layer)] += 1
        if self._steps[id(layer)] != PEAK_STEP:
            return
        gradients = [item.grad for item in self._model.parameters()]  # Python knows those it was asked for
        known = [*self._model.parameters(), *state_of(self._optimizer), *self.known]
        self.nbytes = max(self.nbytes, other_bytes(known))
        del gradients

    def close(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()


def state_of(optimizer: Any) -> list[Any]:
    """Return the tensors of the optimizer's state, which shards may hold.

    Args:
        optimizer: Of the script.
    """
    from springtide import api

    runtime = api.active_runtime
    assert runtime is not None
    assert runtime.trainer is not None
    shards = runtime.trainer.shards
    states = optimizer.state.values() if shards is None else [piece.state for piece in shards.held.pieces]
    return [value for state in states for value in state.values() if hasattr(value, "nbytes")]


def look(model: Any, optimizer: Any, data: Collection[Any]) -> dict[str, float]:
    """Return what this worker holds in bytes, and what it has waited since it began.

    Args:
        model: Trained.
        optimizer: Its.
        data: The samples.
    """
    from springtide import api

    runtime = api.active_runtime
    assert runtime is not None
    tensors = state_of(optimizer)
    metrics = runtime.accounting.metrics.registry.collect()
    readings = [reading for metric in metrics for reading in metric.samples]
    measured = {reading.name: reading.value for reading in readings if "le" not in reading.labels}
    parameters, state_bytes = list(model.parameters()), sum(tensor.nbytes for tensor in tensors)
    gradient_bytes = other_bytes([*parameters, *tensors, *data])
    return {
        "optimizer_bytes": state_bytes,
        "gradient_bytes": gradient_bytes,
        "tensor_bytes": sum(item.nbytes for item in parameters) + state_bytes + gradient_bytes,
        "steps": measured["springtide_worker_step_seconds_count"],
        "reduce_seconds": measured["springtide_worker_exposed_communication_seconds_sum"],
        "gather_seconds": measured["springtide_worker_values_seconds_sum"],
    }


def every_object() -> list[Any]:
    """Return all objects that the garbage collector knows, those too that a worker has set aside from it."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    found = gc.get_objects()
    if is_frozen:
        gc.freeze()
    return found


def other_bytes(known: Iterable[Any], objects: Iterable[Any] | None = None) -> int:
    """Return the bytes of all of this process's memory for tensors but those of the known ones.

    Args:
        known: Tensors.
        objects: Those to look at; None: all that the garbage collector knows.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.nn.parameter import is_lazy

    counted = {tensor.untyped_storage().data_ptr() for tensor in known}
    total = 0
    for item in every_object() if objects is None else objects:
        # Not isinstance: some objects import modules when they are asked for their class.
        if not issubclass(type(item), torch.Tensor) or is_lazy(item):
            continue  # a parameter without a shape has no memory yet
        if item.device.type != "cpu":
            continue
        if item.layout is not torch.strided or issubclass(type(item), FakeTensor):
            continue  # sparse tensors of nothing stand for zeros, and compilers trace with fake ones
        storage = item.untyped_storage()
        try:
            address = storage.data_ptr()
        except RuntimeError:
            continue  # other tensors without memory, which a compiler has
        if address not in counted:
            counted.add(address)
            total += storage.nbytes()
    return total


# ---- jobs


class Job(recovery.Job):
    """A job of one side."""

    script = "benchmarks.sharding"

    def __init__(
        self, folder: Path, side: str, width: int, zygote: Zygote, more: Mapping[str, str] | None = None
    ) -> None:
        """Start it.

        Args:
            folder: Its own; it is made.
            side: One of SHARDS.
            width: Of the model's layers.
            zygote: That its workers are forked from.
            more: Of the workers' environment.
        """
        folder.mkdir()
        (folder / "volume").mkdir()
        environment = {"SPRINGTIDE_SHARD": SHARDS[side], _WIDTH: str(width), _SIDE: side, **(more or {})}
        super().__init__(folder, WORKERS, environment, zygote)

    def until_saved(self) -> None:
        """Wait for the first checkpoint."""
        volume = self._folder / "volume"
        self.until(lambda: any(volume.rglob("manifest.json")), "a checkpoint")

    def checkpoints_read(self) -> int:
        """Return how often a worker has read one."""
        return sum(len(_RESTORED.findall(text)) for text in self._logs())

    def until_copied(self) -> None:
        """Wait until all shards are at two workers: another kill before that may lose one."""
        paths = [self._folder / f"{name}.log" for name in self.pids]
        self.until(lambda: all(is_copied(path.read_text()) for path in paths), "second copies of all shards")

    def transfers(self) -> list[float]:
        """Return the seconds that each worker took, after each kill, from the meeting to the next step."""
        return [float(seconds) for text in self._logs() for seconds in _TRANSFER.findall(text)]

    def _logs(self) -> list[str]:
        return [path.read_text() for path in self._folder.glob("worker-*.log")]

    def made(self) -> list[tuple[int, Any]]:
        """Return (step, generation) of all that was committed, by any worker."""
        from springtide_demo.commits import parse_line

        lines = [
            parse_line(line, path.stem)
            for path in self._folder.glob("*.steps")
            for line in path.read_text().split("\n")[:-1]
        ]
        return [(commit.step, commit.generation) for commit in lines]


_RESTORED = re.compile(r"\brestored \S+ \(step \d+\)")
_TRANSFER = re.compile(rf"\bgeneration \S+: rank \d+ of {WORKERS - 1}, .*, transfer ([\d.]+) s")
"""The line of a generation with one worker less."""


def is_copied(log: str) -> bool:
    """Return whether all shards are at two workers, by what one of them has logged. PURE."""
    return log.rfind("all shards are at two workers again") >= log.rfind("get their second copy while")


def steps_lost(made: Iterable[tuple[int, Any]]) -> int:
    """Return how many steps were committed and then again by a later generation. PURE.

    Args:
        made: (step, generation) of all that was committed.
    """
    generations: dict[int, set[Any]] = {}
    for step, generation in made:
        generations.setdefault(step, set()).add(generation)
    return sum(len(found) - 1 for found in generations.values())


# ---- steps by turns


def most(side: Side, name: str) -> float:
    """Return the largest of a figure after the last turn. PURE.

    Args:
        side: Observations.
        name: Of the figure.
    """
    return max(figures[name] for figures in side.last)


def per_step(side: Side, name: str) -> float:
    """Return by how much a figure grew in a step, the mean of the workers. PURE.

    Args:
        side: Observations.
        name: Of the figure.
    """
    grown = [
        (last[name] - first[name]) / (last["steps"] - first["steps"])
        for first, last in zip(side.first, side.last, strict=True)
    ]
    return statistics.fmean(grown)


def case_figures(sides: Mapping[str, Side], reason: str = "") -> dict[str, Any]:
    """Return the figures of one model. PURE.

    Args:
        sides: Observations by side.
        reason: Why the peer has none; "" if it has.
    """
    plain, optimizer, gradients, peer = (sides[name] for name in (*SHARDS, PEER))
    step = {name: statistics.median(side.seconds) for name, side in sides.items() if side.seconds}
    has_peer = not reason and bool(peer.seconds)
    result = {
        "optimizer_bytes_ratio": most(optimizer, "optimizer_bytes") / most(plain, "optimizer_bytes"),
        "gradient_bytes_ratio": most(gradients, "gradient_bytes") / most(plain, "gradient_bytes"),
        "gradient_peak_bytes_ratio": most(gradients, "gradient_peak_bytes")
        / most(plain, "gradient_peak_bytes"),
        "tensor_bytes_ratio": most(optimizer, "tensor_bytes") / most(plain, "tensor_bytes"),
        "gradients_tensor_bytes_ratio": most(gradients, "tensor_bytes") / most(plain, "tensor_bytes"),
        "step_ratio_to_unsharded": step[OPTIMIZER] / step[UNSHARDED],
        "step_ratio_to_fsdp2": step[OPTIMIZER] / step[PEER] if has_peer else None,
        "gradients_step_ratio_to_unsharded": step[GRADIENTS] / step[UNSHARDED],
        "exposed_reduce_seconds": per_step(optimizer, "reduce_seconds"),
        "exposed_gather_seconds": per_step(optimizer, "gather_seconds"),
        "sides": {
            name: {
                "step_seconds": step.get(name),
                "steps": len(side.seconds),
                **{key: most(side, key) for key in _BYTES if _has(side, key)},
                **{
                    f"exposed_{key}": per_step(side, key)
                    for key in ("reduce_seconds", "gather_seconds")
                    if _has(side, key)
                },
            }
            for name, side in sides.items()
        },
    }
    return result if has_peer else result | {"step_ratio_to_fsdp2_reason": reason}


def _has(side: Side, name: str) -> bool:
    return bool(side.last) and name in side.last[0] and name in side.first[0]


def measure_steps(width: int, turn: Turn, zygote: Zygote) -> dict[str, Any]:
    """Run one model on all sides.

    Args:
        width: Of its layers.
        turn: Sizes of the sides' turns.
        zygote: That workers are forked from.

    Raises:
        RuntimeError: A side of ours fails.
        TimeoutError: One does not begin.
    """

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        more = {_TURNS: str(folder / "turns")}
        jobs = {side: functools.partial(Job, folder / side, side, width, zygote, more) for side in SHARDS}
        environment = more | {_SIDE: PEER, _WIDTH: str(width)}
        peers = {PEER: functools.partial(Forked, folder / PEER, WORKERS, zygote, environment)}
        with running(folder, WORKERS, jobs, peers) as (turns, reasons):
            sides = by_turns(turns.take, (*SHARDS, PEER), reasons, turn)
            return case_figures(sides, reasons[PEER])


# ---- kills


@dataclass(slots=True)
class Kills:
    """The kills in jobs of one side.

    Attributes:
        gaps: In seconds, of each.
        joins: The same when another worker comes in its place.
        lost: Steps that were committed and had to be made again.
        samples_repeated: By the ledger.
        samples_lost: By the ledger.
        read: Checkpoints that a worker has read.
        transfers: Seconds from the meeting of those that are left to their next step, of each worker.
    """

    gaps: list[float] = field(default_factory=list)
    joins: list[float] = field(default_factory=list)
    lost: int = 0
    samples_repeated: int = 0
    samples_lost: int = 0
    read: int = 0
    transfers: list[float] = field(default_factory=list)


def kill(side: str, repeats: int, chooser: random.Random, seen: Kills, zygote: Zygote) -> None:
    """Kill workers of a new job, one after the other, each with another one in its place.

    Args:
        side: One of SHARDS.
        repeats: How many.
        chooser: Of the victims.
        seen: Where it is noted.
        zygote: That workers are forked from.

    Raises:
        TimeoutError: The job does not go on.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / side
        saving = {
            "SPRINGTIDE_CHECKPOINT_URI": str(folder / "volume"),
            "SPRINGTIDE_CHECKPOINT_SECONDS": f"{SAVE_SECONDS:g}",
        }
        job = Job(folder, side, MODELS[KILLED_MODEL], zygote, saving)
        try:
            job.until_saved()
            for _ in range(repeats):
                job.until_copied()
                found = recovery.strike(job, "kill_worker", chooser)
                seen.gaps.append(found["kill_worker"][0])
                seen.joins.append(found["join"][0])
            job.until_calm()
            job.until(lambda: job.reply is not None and job.reply.data.total_seen > 0, "the ledger")
            _, repeated, lost = job.tally()
            seen.samples_repeated += repeated
            seen.samples_lost += lost
        finally:
            job.close()
            seen.read += job.checkpoints_read()
            seen.lost += steps_lost(job.made())
            seen.transfers += job.transfers()


def measure_kills(rounds: int, repeats: int, zygote: Zygote) -> dict[str, Any]:
    """Kill workers of jobs with shards and without, by turns.

    Args:
        rounds: Jobs of each side.
        repeats: Kills in each job.
        zygote: That workers are forked from.
    """
    seen = {OPTIMIZER: Kills(), UNSHARDED: Kills()}
    reason = ""
    try:
        for number in range(rounds):
            for side, own in seen.items():
                kill(side, repeats, random.Random(number), own, zygote)
                for kind, gaps in (("kill", own.gaps), ("join", own.joins)):
                    print(f"{kind}, {side}: {[round(gap, 3) for gap in gaps]} s", flush=True)
    except (TimeoutError, RuntimeError, ValueError) as error:
        reason = str(error)
        print(f"cut short: {reason}", flush=True)
    return kill_figures(seen, reason)


def kill_figures(seen: Mapping[str, Kills], reason: str) -> dict[str, Any]:
    """Return the figures of all kills; what was seen before it was cut short counts. PURE.

    Args:
        seen: By side.
        reason: Why there were no more; "" if all were made.
    """
    ours, plain = seen[OPTIMIZER], seen[UNSHARDED]
    if not ours.gaps or not plain.gaps:
        return dict.fromkeys(KILL_KEYS) | {"kills_reason": reason}
    gap, other = statistics.median(ours.gaps), statistics.median(plain.gaps)
    joins = statistics.median(ours.joins), statistics.median(plain.joins)
    values = gap, other, gap / other, *joins, ours.lost, ours.samples_lost, ours.samples_repeated, ours.read
    result: dict[str, Any] = dict(zip(KILL_KEYS, values, strict=True)) | {"kills": len(ours.gaps)}
    if ours.transfers:
        result["transfer_seconds"] = {KILLED_MODEL: statistics.median(ours.transfers)}
    return result | ({"kills_reason": reason} if reason else {})


def measure_transfers(repeats: int, zygote: Zygote) -> dict[str, dict[str, float]]:
    """Return the seconds from the meeting after a kill to the next step, by model.

    Args:
        repeats: Kills of each model, in one job.
        zygote: That workers are forked from.

    Raises:
        TimeoutError: A job does not go on.
    """
    result: dict[str, dict[str, float]] = {}
    for key, more in (("transfer_seconds", {}), ("transfer_at_once_seconds", AT_ONCE)):
        for model, width in TRANSFER_MODELS.items():
            with tempfile.TemporaryDirectory() as name:
                job = Job(Path(name) / OPTIMIZER, OPTIMIZER, width, zygote, more)
                try:
                    chooser = random.Random(0)
                    for _ in range(repeats):
                        job.until_copied()
                        recovery.strike(job, "kill_worker", chooser)
                    result.setdefault(key, {})[model] = statistics.median(job.transfers())
                finally:
                    job.close()
    return result


# ---- all of it


def worst(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return of each figure the largest over the models; None where one of them has none. PURE.

    Args:
        cases: Figures by model; those of one that did not end are missing.
    """
    result: dict[str, Any] = {}
    for key in CASE_KEYS:
        found = [cases.get(name, {}).get(key) for name in MODELS]
        result[key] = None if None in found else max(value for value in found if value is not None)
    return result


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of repeats of a run.

    Attributes:
        turns: Of each side, by model.
        kills: (jobs of each side, kills in each).
        transfers: Kills of each of TRANSFER_MODELS.
        restarts: (kills under torchrun, seconds that are waited after each at most).
    """

    turns: Mapping[str, Turn]
    kills: tuple[int, int]
    transfers: int
    restarts: tuple[int, float]


FULL = Sizes(TURNS, (4, 5), 5, (5, 60.0))
QUICK = Sizes(QUICK_TURNS, (1, 4), 0, (1, 20.0))


def measure(sizes: Sizes) -> dict[str, Any]:
    """Return all that is written; null with a reason where something did not run to its end.

    Args:
        sizes: Of the run.
    """
    from benchmarks.peers import fsdp2

    with Zygote(Job.script) as zygote:
        result = measure_cases(sizes, zygote) | measure_kills(*sizes.kills, zygote)
        print(", ".join(shown(key, result[key]) for key in KILL_KEYS), flush=True)
        if sizes.transfers:
            result |= measure_transfers(sizes.transfers, zygote)
        print(f"transfer_seconds {result.get('transfer_seconds')}", flush=True)
    peer = fsdp2.measure_kills(MODELS[KILLED_MODEL], *sizes.restarts)
    print(", ".join(shown(key, value) for key, value in peer.items()), flush=True)
    return result | peer


def measure_cases(sizes: Sizes, zygote: Zygote) -> dict[str, Any]:
    """Return the figures of all models, and at the top the worst of each.

    Args:
        sizes: Of the run.
        zygote: That workers are forked from.
    """
    cases: dict[str, dict[str, Any]] = {}
    reasons: dict[str, str] = {}
    for name, width in MODELS.items():
        try:
            case = cases[name] = measure_steps(width, sizes.turns[name], zygote)
        except (RuntimeError, TimeoutError, OSError) as error:
            print(f"{name} did not end: {error}", flush=True)
            reasons[name] = str(error)
            continue
        print(f"{name}: " + ", ".join(shown(key, case[key]) for key in CASE_KEYS), flush=True)
        for side, own in case["sides"].items():
            print(f"  {side:10} " + ", ".join(shown(key, own[key]) for key in own), flush=True)
        if reason := case.get("step_ratio_to_fsdp2_reason"):
            reasons[f"{name}, {PEER}"] = reason
            print(f"  {reason}", flush=True)
    result: dict[str, Any] = worst(cases) | {"cases": cases}
    return result | (
        {"reason": "; ".join(f"{key}: {text}" for key, text in reasons.items())} if reasons else {}
    )


def shown(key: str, value: Any) -> str:
    """Return a figure in words."""
    return f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--zygote", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.zygote:
        import torch.distributed.fsdp  # noqa: F401 - for the peer

        recovery.zygote(run)
        return
    result = measure(QUICK if chosen.quick else FULL)
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
