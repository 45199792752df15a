"""Output of the demo: a live panel on a terminal, plain lines without one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from springtide_demo.report import Promise

PLAIN_STATUS_SECONDS = 5.0
_SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class WorkerRow:
    pod: str
    node: str
    pid: int | None
    standing: str


@dataclass(frozen=True)
class Snapshot:
    """The training at one moment."""

    state: str = "starting"
    step: int = 0
    total_steps: int = 0
    generation: int = 0
    samples_per_second: float = 0.0
    loss: float | None = None
    waiting: str = ""
    workers: Sequence[WorkerRow] = field(default_factory=list)
    rates: Sequence[float] = field(default_factory=list)

    def line(self) -> str:
        """Return it as one plain line."""
        active = sum(row.standing == "training" for row in self.workers)
        loss = "-" if self.loss is None else f"{self.loss:.4f}"
        return (
            f"step {self.step}/{self.total_steps or '?'}  generation {self.generation}"
            f"  workers {active}/{len(self.workers)}  {self.samples_per_second:,.0f} samples/s  loss {loss}"
            f"  ({self.waiting or self.state})"
        )


def sparkline(values: Sequence[float]) -> str:
    """Return the values as a row of bars, scaled to their maximum."""
    top = max(values, default=0.0)
    if top <= 0:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[min(len(_SPARKS) - 1, int(value / top * len(_SPARKS)))] for value in values)


def panel(snapshot: Snapshot, seconds: float) -> RenderableType:
    """Return the live panel.

    Args:
        snapshot: the job as it is now.
        seconds: since the demo began.
    """
    table = Table(box=None, pad_edge=False, expand=True)
    for title in ("worker", "node", "process", ""):
        table.add_column(title, style="dim" if title == "process" else "")
    colours = {"training": "green", "starting": "yellow", "leaving": "magenta", "ended": "dim"}
    for row in snapshot.workers:
        colour = colours.get(row.standing, "white")
        table.add_row(row.pod, row.node, str(row.pid or "-"), Text(row.standing, style=colour))
    loss = "-" if snapshot.loss is None else f"{snapshot.loss:.4f}"
    head = Text.assemble(
        ("step ", "dim"), f"{snapshot.step}/{snapshot.total_steps or '?'}   ",
        ("generation ", "dim"), f"{snapshot.generation}   ",
        ("samples/s ", "dim"), f"{snapshot.samples_per_second:,.0f} {sparkline(snapshot.rates[-40:])}   ",
        ("loss ", "dim"), loss,
    )  # fmt: skip
    foot = Text(f"{seconds:.0f} s   {snapshot.state}   {snapshot.waiting}", style="dim")
    return Panel(Group(head, table, foot), title="Springtide: digits", border_style="cyan")


class View:
    """A running display. Lines stay above the panel."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._began = time.monotonic()
        self._live: Live | None = None
        self._last_plain = float("-inf")
        self._snapshot = Snapshot()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._render)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def seconds(self) -> float:
        """Seconds since the view was made."""
        return time.monotonic() - self._began

    def _render(self) -> RenderableType:
        return panel(self._snapshot, self.seconds)

    def say(self, text: str, style: str = "") -> None:
        """Print a line with the time.

        Args:
            text: the line.
            style: of rich; "" for none.
        """
        self._console.print(Text.assemble((f"{self.seconds:6.1f} s  ", "dim"), (text, style)), soft_wrap=True)

    def update(self, snapshot: Snapshot) -> None:
        """Show the training's state: at once on a terminal, every few seconds without one."""
        self._snapshot = snapshot
        if self._live is None and self.seconds - self._last_plain >= PLAIN_STATUS_SECONDS:
            self._last_plain = self.seconds
            self.say(snapshot.line(), "dim")

    def verdict(self, promises: Sequence[Promise], files: Sequence[str]) -> None:
        """Print the report: a line per promise.

        Args:
            promises: what was promised, and what was measured.
            files: that the demo has written.
        """
        table = Table(title="What was promised, and what was measured", title_justify="left", box=None)
        for title in ("", "promise", "measured"):
            table.add_column(title)
        for promise in promises:
            if promise.holds:
                mark = Text("yes", style="green")
            elif not promise.judged:
                mark = Text("busy", style="bold yellow")
            elif not promise.broken:
                mark = Text("slow", style="bold yellow")
            else:
                mark = Text("NO", style="bold red")
            table.add_row(mark, promise.text, promise.measured)
        self._console.print(table)
        for path in files:
            self._console.print(f"written: {path}", soft_wrap=True)
