"""`springtide audit`: what a job can prove about its samples, from the ledger beside its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from springtide_cli.errors import FAILED, REFUSED, SUCCEEDED
from springtide_cli.kube import KubePort
from springtide_cli.run import Options, Progress, execute, on_cluster, read_job
from springtide_cli.screen import Screen
from springtide_cli.story import Line, Tone

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Audit:
    """lines: the account. code: 0 proved, 1 disproved, 2 nothing to prove yet."""

    lines: tuple[Line, ...]
    code: int


def audit(job: Mapping[str, Any], samples: int | None = None) -> Audit:
    """Return what a job proves about its samples. PURE.

    Args:
        job: the TrainingJob with its status.
        samples: of one pass, if known: then the sums over all closed passes are compared, too.
    """
    status = job.get("status") or {}
    name, state = job["metadata"]["name"], status.get("state", "Pending")
    data = status.get("data")
    if not data:
        return Audit(
            (Line(f"{name} ({state}): no step has been committed, so there is nothing to prove"),), REFUSED
        )
    epoch, seen, total = (int(data.get(field, 0)) for field in ("epoch", "seen", "totalSeen"))
    repeated, lost, skipped = (int(data.get(field, 0)) for field in ("repeated", "lost", "skipped"))
    lines = [
        Line(f"{name} ({state}), step {status.get('step', 0)}"),
        Line(f"samples whose gradients are in the parameters: {total}"),
        Line(f"passes closed in the present loop: {epoch}; samples of the running pass: {seen}"),
        Line(f"counted more than once: {repeated}"),
        Line(f"not counted: {lost}"),
        Line(f"steps skipped because a gradient was not finite (their samples count): {skipped}"),
    ]
    shards = _Shards.read(data)
    lines += shards.lines()
    problems = []
    if shards.samples not in (None, seen):
        problems.append(
            f"{shards.samples} samples lie before the positions of the running pass, and {seen} of it were "
            "counted"
        )
    if repeated or lost:
        problems.append(f"{repeated} samples were repeated and {lost} lost")
    if samples is not None and total != epoch * samples + seen:
        problems.append(
            f"{epoch} passes of {samples} samples and {seen} more are {epoch * samples + seen}, not {total}"
        )
    if problems:
        return Audit((*lines, Line(f"NOT exactly once: {'; '.join(problems)}", Tone.BAD)), FAILED)
    if shards.samples:
        proof = (
            f"exactly once, up to step {shards.step}: in each step, count and hash of the ids were those of "
            "what was dealt, and what was dealt is what lies before the positions"
        )
        return Audit((*lines, Line(proof, Tone.GOOD)), SUCCEEDED)
    if not epoch and not (state == "Succeeded" and total):
        return Audit((*lines, Line("no pass is closed yet: ids are compared when one is")), REFUSED)
    proof = (
        "exactly once: in each closed pass, count and hash of the ids are those of the whole pass (of data "
        "in shards: in each step, those of what was dealt)"
    )
    return Audit((*lines, Line(proof, Tone.GOOD)), SUCCEEDED)


@dataclass(frozen=True, slots=True)
class _Shards:
    """Hold the account that status gives of a pass over data in shards.

    Attributes:
        step: after which it holds.
        samples: of the running pass before its positions; None: nobody tells, or it is old.
        whole: shards that were taken whole.
        begun: others, and how many samples of each.
        is_old: what is told belongs to another state than the counts.
    """

    step: int = 0
    samples: int | None = None
    whole: str = ""
    begun: str = ""
    is_old: bool = False

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> _Shards:
        """Read it from status.data, where releases without the field leave what was there before them."""
        taken = data.get("taken")
        if not isinstance(taken, Mapping):
            return cls()
        step = int(taken.get("step", 0))
        if int(taken.get("totalSeen", -1)) != int(data.get("totalSeen", 0)):
            return cls(step, is_old=True)
        whole, begun = str(taken.get("shards", "")), str(taken.get("begun", ""))
        return cls(step, int(taken.get("samples", 0)), whole, begun)

    def lines(self) -> list[Line]:
        """Return the account of the shards."""
        if self.is_old:
            return [Line(f"taken of the shards: not known; it was last told after step {self.step}")]
        if self.samples is None:
            return []
        return [
            Line(f"samples before the positions of the running pass, after step {self.step}: {self.samples}"),
            Line(f"shards taken whole, by their place in the pass: {self.whole or 'none'}"),
            Line(f"samples taken of shards that were begun: {self.begun or 'none'}"),
        ]


async def audit_job(kube: KubePort, name: str, namespace: str, samples: int | None) -> Audit:
    """Read a job, and return what it proves about its samples.

    Args:
        kube: the cluster.
        name: of the job.
        namespace: of the job.
        samples: of one pass, if known: then the sums over all closed passes are compared, too.

    Raises:
        Refused: there is no such job.
    """
    return audit(await read_job(kube, namespace, name), samples)


def run(name: str, samples: int | None, options: Options, console: Console) -> int:
    """Print what a job proves about its samples.

    Args:
        name: of the job.
        samples: of one pass, if known: then the sums over all closed passes are compared, too.
        options: of the command line.
        console: prints.

    Returns:
        The exit code: 0 proved, 1 disproved, 2 nothing to prove yet, or refused.
    """

    async def work(screen: Screen, progress: Progress) -> int:
        async with on_cluster(options) as kube:
            found = await audit_job(kube, name, options.namespace or kube.namespace, samples)
        for line in found.lines:
            screen.say(line)
        return found.code

    return execute(options, console, work)
