"""Help tests of adapters for other trainers: plain runs, lost jobs, faults from seeds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos_seeds import Seed
from halt import Halt
from worker_cluster import Worker, WorkerCluster, Zygote

from springtide.coordination import outcome

POINTS = ("backward", "body", "committed", "stepping", "stepped", "evaluation", "reduced", "prepared")
"""Points of a step at which random faults come; what they mean to a seed does not change."""
DEEDS = ("kill", "kill", "term")


def events(path: Path) -> list[dict[str, Any]]:
    """Read the whole lines of a file that a script writes as it trains."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def events_of(worker: Worker) -> list[dict[str, Any]]:
    return events(worker.folder / f"{worker.name}.events")


class PlainRuns:
    """Run a script without a job: `runs(OPTIONS, plain=True)` with the library's own trainer, each once."""

    def __init__(
        self,
        zygote: Zygote,
        script: Path,
        folders: pytest.TempPathFactory,
        more: Callable[[Path], dict[str, Any]] = lambda folder: {},
    ) -> None:
        """Make it.

        Args:
            zygote: that has imported the library.
            script: which writes plain.json and plain.events, or alone.json and alone.events.
            folders: makes one for each run.
            more: reads what else a run has left in its folder.
        """
        self._zygote, self._script, self._folders, self._more = zygote, script, folders, more
        self._known: dict[str, dict[str, Any]] = {}

    def __call__(self, options: dict[str, Any], *, plain: bool = True) -> dict[str, Any]:
        key = json.dumps([options, plain])
        if key not in self._known:
            folder = self._folders.mktemp("plain")
            argv = [str(self._script), str(folder), json.dumps(options | {"plain": plain})]
            code = self._zygote.wait(self._zygote.fork({}, argv, folder / "log"), 120.0)
            assert code == 0, (folder / "log").read_text()
            name = "plain" if plain else "alone"
            found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
            more = {} if "refused" in options else self._more(folder)
            self._known[key] = found | {"events": events(folder / f"{name}.events"), "folder": folder} | more
        return self._known[key]


def lose_all_at(cluster: WorkerCluster, step: int, folder: Path) -> list[Worker]:
    """Start a job of two, lose both in a step when there is a checkpoint, and start two others to the end.

    Args:
        cluster: whose environment has `checkpoints_in(folder)`.
        step: in which they are lost.
        folder: of the test.

    Returns:
        The two others.
    """
    halt = Halt(folder)
    lost = cluster.start(2, faults={0: halt.at(f"body:{step}", 0), 1: halt.at(f"body:{step}", 1)})
    cluster.until(lambda: halt.reached(0) and halt.reached(1), f"step {step}")
    cluster.until(lambda: any((folder / "saved").rglob("manifest*.json")), "a checkpoint")
    for worker in lost:
        worker.kill()
    cluster.until(lambda: not any(worker.running for worker in lost), "the loss of all")
    again = [cluster.add(), cluster.add()]
    cluster.until_done(*again)
    assert any("restored" in worker.log() for worker in again), cluster.logs()
    return again


def checkpoints_in(folder: Path) -> dict[str, str]:
    """Return the environment of workers whose job saves into a folder as often as it can."""
    (folder / "saved").mkdir()
    return {"SPRINGTIDE_CHECKPOINT_URI": str(folder / "saved"), "SPRINGTIDE_CHECKPOINT_SECONDS": "0.01"}


def lose_the_writer(cluster: WorkerCluster, step: int, folder: Path) -> Worker:
    """Start a job of two, the first of which is lost as it saves behind a step; return the other one."""
    halt = Halt(folder)
    first, second = cluster.start(2, faults={0: f"evaluation:{step}:kill", 1: halt.at(f"committed:{step}")})
    cluster.until(lambda: not first.running, "the death of the one that saves")
    halt.go()
    cluster.until_done(second)
    return second


def survive(cluster: WorkerCluster, seed: Seed, last: int, check: Callable[[Worker], None]) -> str:
    """Have two of four workers die or leave at random points, and others join; return what happened.

    Args:
        cluster: of a job that has not begun; it is closed.
        seed: of the faults.
        last: step of the job.
        check: looks at each worker that has come to the end.
    """
    drawn = random.Random(seed.number)
    faults = {
        number: f"{drawn.choice(POINTS)}:{drawn.randint(1, last)}:{drawn.choice(DEEDS)}"
        for number in drawn.sample(range(4), 2)
    }
    try:
        workers = cluster.start(4, faults=faults)
        cluster.until_step(drawn.randint(1, last - 1), workers[min({0, 1, 2} - set(faults))])
        workers += [cluster.add() for _ in range(drawn.randint(1, 2))]
        cluster.until_done()
        finished = [worker for worker in workers if worker.result() is not None]
        for worker in workers:  # those that leave have no result
            assert worker.code in ((0, -9) if worker.slot in faults else (0,)), cluster.logs()
        assert len(finished) >= 2, cluster.logs()
        for worker in finished:
            check(worker)
    finally:
        cluster.close()
    return f"{faults}, {len(finished)} finished"


def join_at_the_last_evaluation(cluster: WorkerCluster, go: Path) -> list[Worker]:
    """Start a job of two, and add a worker when both stand in the last evaluation; it has nothing to do.

    Args:
        cluster: whose script's option `held_until` is `go`.
        go: file for which the two wait until the third has asked to join.

    Returns:
        The two, at their end.
    """
    workers = cluster.start(2)
    held = [worker.folder / f"{worker.name}.held" for worker in workers]
    cluster.until(lambda: all(path.exists() for path in held), "the last evaluation")
    joiner = cluster.add(hold=False)
    asked = "waiting for the next generation"
    cluster.until(lambda: asked in joiner.log() or not joiner.running, "the joiner")
    go.touch()
    cluster.until_done()
    end = joiner.outcome()
    assert joiner.code == 0, cluster.logs()
    assert isinstance(end, outcome.Left), cluster.logs()
    assert end.finished, cluster.logs()
    return workers
