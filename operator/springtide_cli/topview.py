"""The table of `springtide top`: jobs, their fresh numbers, and what happened last. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from springtide_cli.jobview import JobView, view

Object = dict[str, Any]

HEADINGS = (
    "NAMESPACE",
    "JOB",
    "STATE",
    "WORKERS",
    "PS",
    "GEN",
    "STEP",
    "DONE",
    "LEFT",
    "STEP TIME",
    "SAMPLES/S",
    "GOODPUT",
    "RESTARTS",
)
EVENTS_SHOWN = 8
SHARES_SHOWN = 3
PREFIX = "springtide_coordinator_"
ORDER = (
    *("Running", "Rescaling", "Recovering", "Starting", "Pending"),
    *("Queued", "Suspended", "Failed", "Succeeded"),
)


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of a job's coordinator, seconds old at most; None for those that it does not serve."""

    generation: int | None = None
    members: int | None = None
    step: int | None = None
    step_seconds: float | None = None
    samples_per_second: float | None = None
    goodput: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A job, with numbers where its coordinator was reached; `trouble` says why not. left: until its end, as
    it is estimated, for people.
    """

    job: JobView
    numbers: Numbers | None = None
    trouble: str = ""
    left: str = ""


def numbers(values: Mapping[str, float]) -> Numbers:
    """Return the numbers in a coordinator's metrics, {name: value}."""

    def whole(name: str) -> int | None:
        value = values.get(PREFIX + name)
        return None if value is None else int(value)

    return Numbers(
        generation=whole("generation"),
        members=whole("generation_members"),
        step=whole("step"),
        step_seconds=values.get(PREFIX + "step_seconds") or None,
        samples_per_second=values.get(PREFIX + "samples_per_second"),
        goodput=values.get(PREFIX + "goodput_ratio"),
    )


def rows(
    jobs: Sequence[Object], found: Mapping[str, Numbers | str], now: datetime | None = None
) -> list[Row]:
    """Return a row for each job: running ones first, then by namespace and name.

    Args:
        jobs: the TrainingJobs.
        found: by uid: numbers, or why there are none.
        now: with a time zone; None: by the clock.
    """
    result = []
    now = now or datetime.now(UTC)
    for job in map(view, jobs):
        answer = found.get(job.uid)
        left = "" if job.ends_at is None else _age((job.ends_at - now).total_seconds())
        if isinstance(answer, Numbers):
            result.append(Row(job, answer, left=left))
        else:
            result.append(Row(job, trouble=answer or "", left=left))
    rank = {state: number for number, state in enumerate(ORDER)}
    return sorted(result, key=lambda r: (rank.get(r.job.state, len(ORDER)), r.job.namespace, r.job.name))


def cells(row: Row) -> tuple[str, ...]:
    """Return a job's line of the table, in the order of HEADINGS; `-` for unknown values."""
    job, fresh = row.job, row.numbers or Numbers()
    samples = (
        job.samples_per_second if fresh.samples_per_second is None else f"{fresh.samples_per_second:.0f}"
    )
    return tuple(
        text or "-"
        for text in (
            job.namespace,
            job.name,
            "Ending" if job.deleting else job.state,
            _workers(job, fresh),
            job.servers,
            _text(fresh.generation if fresh.generation is not None else job.generation),
            _text(fresh.step if fresh.step is not None else job.step),
            "" if job.percent is None else f"{job.percent} %",
            row.left,
            _duration(fresh.step_seconds),
            samples,
            job.goodput if fresh.goodput is None else f"{fresh.goodput:.3f}",
            str(job.restarts),
        )
    )


def event_lines(events: Sequence[Object], now: datetime) -> list[str]:
    """Return the newest events of jobs, newest last, with their age.

    Args:
        events: of any objects.
        now: with a time zone.
    """
    ours = [e for e in events if (e.get("involvedObject") or {}).get("kind") == "TrainingJob"]
    dated = sorted(((_when(e), e) for e in ours), key=lambda pair: pair[0])[-EVENTS_SHOWN:]
    return [
        f"{_age((now - when).total_seconds()):>4} ago  {e['involvedObject'].get('namespace', '')}/"
        f"{e['involvedObject'].get('name', '')}  {e.get('reason', '')}: {e.get('message', '')}"
        for when, e in dated
    ]


def plain(found: Sequence[Row], events: Sequence[str]) -> list[str]:
    """Return the table as lines with aligned columns.

    Args:
        found: its rows.
        events: lines of `event_lines`.
    """
    if not found:
        return ["no training jobs"]
    table = [HEADINGS, *(cells(row) for row in found)]
    widths = [max(len(line[column]) for line in table) for column in range(len(HEADINGS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    return [*lines, *notes(found), *events]


def notes(found: Sequence[Row]) -> list[str]:
    """Say which numbers are as old as the job's status, and why; what keeps standbys from being ready; and
    the parts of the slowest workers, where a job's parts follow speed.
    """
    lines = []
    for row in found:
        name = f"{row.job.namespace}/{row.job.name}"
        if row.trouble:
            lines.append(f"{name}: numbers from its status: {row.trouble}")
        if row.job.standby_trouble:
            lines.append(f"{name}: standbys: {row.job.standby_trouble}")
        if row.job.balance and row.job.state == "Running":
            lines.append(f"{name}: parts by speed: {', '.join(row.job.balance[:SHARES_SHOWN])}")
    return lines


def screen(found: Sequence[Row], events: Sequence[str]) -> RenderableType:
    """Lay out the whole table for a terminal.

    Args:
        found: one row a job.
        events: lines to show below it.
    """
    if not found:
        return Text("no training jobs", style="bright_black")
    table = Table(box=box.SIMPLE, header_style="bold", expand=False)
    for heading in HEADINGS:
        right = heading in HEADINGS[4:]
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for row in found:
        state = row.job.state
        style = {"Running": "green", "Failed": "red", "Succeeded": "bright_black"}.get(state, "yellow")
        one, two, three, *rest = cells(row)
        table.add_row(one, two, Text(three, style=style), *rest)
    small = [Text(line, style="bright_black") for line in [*notes(found), *events]]
    return Group(table, *small)


def _workers(job: JobView, fresh: Numbers) -> str:
    """Return those that train and those wanted, and behind a + the standbys that are ready."""
    waiting = f"+{job.standbys.partition('/')[0]}" if job.standbys else ""
    if fresh.members is None or "/" not in job.workers:
        return job.workers + waiting
    return f"{fresh.members}/{job.workers.partition('/')[2]}{waiting}"


def _text(value: int | None) -> str:
    return "" if value is None else str(value)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def _when(event: Object) -> datetime:
    text = (
        event.get("lastTimestamp")
        or event.get("eventTime")
        or (event.get("metadata") or {}).get("creationTimestamp")
    )
    try:
        when = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
    return when if when.tzinfo else when.replace(tzinfo=UTC)
