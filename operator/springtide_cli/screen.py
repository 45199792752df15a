"""Outputs for lines: a live panel below scrolling lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from springtide_cli.jobview import JobView, done
from springtide_cli.story import Line, Tone

STYLES = {Tone.PLAIN: "", Tone.GOOD: "green", Tone.BAD: "red", Tone.QUIET: "bright_black"}


class Screen(Protocol):
    """Show a job's lines and its present state, between enter and exit; most have nothing to begin or end."""

    def say(self, line: Line) -> None:
        """Print a line for good."""
        ...

    def show(self, job: JobView | None) -> None:
        """Show the job's present state, where the output can be overwritten."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def stamped(line: Line, unix_time: float) -> list[str]:
    """Return the rows of a line, each behind the time of day.

    Args:
        line: of one row or of several.
        unix_time: when it was said.
    """
    stamp = time.strftime("%H:%M:%S", time.localtime(unix_time))
    return [f"{stamp}  {part}" for part in line.text.splitlines() or [""]]


class PlainScreen(Screen):
    def __init__(self, console: Console, clock: Callable[[], float] = time.time) -> None:
        self._console = console
        self._clock = clock

    def say(self, line: Line) -> None:
        for row in stamped(line, self._clock()):
            self._console.print(row, markup=False, highlight=False, soft_wrap=True)

    def show(self, job: JobView | None) -> None:
        """Changes are told as lines; there is nothing to overwrite."""


class LiveScreen(Screen):
    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._job: JobView | None = None
        self._live = Live(
            get_renderable=self._render,
            console=console,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=False,
        )

    def say(self, line: Line) -> None:
        self._live.console.print(Text(line.text, style=STYLES[line.tone]), soft_wrap=True)

    def show(self, job: JobView | None) -> None:
        self._job = job

    def _render(self) -> Panel:
        return panel(self._job, self._clock() - self._start)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def panel(job: JobView | None, seconds: float) -> Panel:
    """Return the live view.

    Args:
        job: as it was last seen; None: not yet.
        seconds: since following began.
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bright_black", justify="right")
    grid.add_column(ratio=1)
    title = "TrainingJob"
    if job is not None:
        title = f"{job.namespace}/{job.name}"
        for name, value in facts(job):
            grid.add_row(name, Text(value))
    grid.add_row("followed", f"{int(seconds) // 60}:{int(seconds) % 60:02}")
    return Panel(grid, title=title, title_align="left", border_style=_border(job))


def _border(job: JobView | None) -> str:
    if job is None or not job.taken_up:
        return "bright_black"
    if job.is_true("Failed") or job.is_true("Degraded"):
        return "red"
    return "green" if job.is_true("Running") or job.is_true("Succeeded") else "yellow"


def facts(job: JobView) -> list[tuple[str, str]]:
    """Name and value of what is known, in the order of the panel."""
    step = "" if job.step is None else f"{job.step}"
    if step and job.epoch:
        step += f"  (epoch {job.epoch})"
    recovery = f"{job.last_recovery} s" if job.last_recovery else ""
    rows = [
        ("state", job.state or "waiting for the operator"),
        ("workers", _workers(job)),
        ("servers", f"{job.servers} ready" if job.servers else ""),
        ("step", step),
        ("", done(job)),
        ("generation", "" if job.generation is None else str(job.generation)),
        ("samples/s", job.samples_per_second),
        ("goodput", job.goodput),
        ("restarts", str(job.restarts) if job.restarts else ""),
        ("last recovery", recovery),
        ("", job.message),
    ]
    return [(name, value) for name, value in rows if value]


def _workers(job: JobView) -> str:
    if not job.workers:
        return ""
    return f"{job.workers} train, {job.ready} ready, {job.replicas} pods"


def make_screen(console: Console, *, plain: bool = False) -> Screen:
    """Return a live screen for a terminal, and a plain one elsewhere.

    Args:
        console: prints.
        plain: plain lines in any case.
    """
    return PlainScreen(console) if plain or not console.is_terminal else LiveScreen(console)
