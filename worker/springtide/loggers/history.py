"""Decide which values a tracker still lacks, whoever wrote before and whatever was dropped since. PURE.

A *line* is the sequence of steps that the job has, as opposed to those that it had made and lost: a commit
that reached the dead first member alone, or steps behind the checkpoint that the job went back to. It is told
by the states that generations began from. A commit of a generation is of the line up to the first state that
a later generation began from.

Each process keeps its own last commits and the line, which a process that joins is given by a member. So any
of them can go on where the last writer stopped, by what the tracker says that it has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from springtide.loggers.logger import OWN_PREFIX, Generation, Record, Recorded
from springtide_protocol.names import GenerationName

WORKERS: Final = f"{OWN_PREFIX}workers"
"""Value that comes with the first step of each generation: its worker processes."""
OUTSIDE: Final = "outside/"
"""Begins the name of a value that was reported between two steps, if the step itself reported that name."""
MAX_BEGINNINGS: Final = 64
"""Beginnings that a line keeps."""
_NAME = re.compile(r"(\d+)\.(\d+)/(\d+)")


@dataclass(frozen=True, slots=True)
class Beginning:
    """Say from which step a generation began, with how many processes and why."""

    generation: GenerationName
    step: int
    size: int = 0  # 0: this process was no member of it
    reason: str = ""

    @property
    def annotation(self) -> Generation:
        """Return it as trackers show it."""
        return Generation(str(self.generation), self.size, self.reason)


Line = tuple[Beginning, ...]
"""Beginnings in the order of their generations. The steps increase: an earlier one that is not behind a later
one says nothing that the later one does not."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Keep what one commit, or reports between two commits, have for a tracker."""

    beginning: Beginning  # of the generation that the commit belongs to
    step: int
    unix_time: float
    values: Mapping[str, float]
    first: bool = False  # commit of the generation in this process
    outside: bool = False  # of the step: reported behind it


def with_beginning(line: Line, beginning: Beginning) -> Line:
    """Return a line that goes on with another generation.

    Args:
        line: until now.
        beginning: of the generation, which is later than all of the line.
    """
    kept = [one for one in line if one.step < beginning.step and one.generation < beginning.generation]
    kept.append(beginning)
    if len(kept) > MAX_BEGINNINGS:
        # For a tracker that knows none of the first two generations the smaller step counts.
        first, second = kept[:2]
        kept[:2] = [replace(second, step=first.step)]
    return tuple(kept)


def merged(line: Line, other: Line) -> Line:
    """Return the line of a job of which two processes know these parts.

    Args:
        line: of this process, which knows more of the generations that it was a member of.
        other: of another one.
    """
    known: dict[GenerationName, Beginning] = {}
    for one in (*line, *other):
        before = known.setdefault(one.generation, one)
        known[one.generation] = replace(before, step=min(before.step, one.step))
    result: Line = ()
    for name in sorted(known):
        result = with_beginning(result, known[name])
    return result


def back_to(line: Line, recorded: GenerationName | None) -> int | None:
    """Return the step behind which a tracker's steps are of no line any more; None where all of them are.

    Args:
        line: of the job.
        recorded: the newest generation that the tracker knows; None if it knows none.
    """
    steps = [one.step for one in line if recorded is None or one.generation > recorded]
    return min(steps, default=None)


def on_the_line(entry: Entry, line: Line) -> bool:
    """Return whether the job still has that step.

    Args:
        entry: of the step.
        line: of the job.
    """
    return all(entry.step <= one.step for one in line if one.generation > entry.beginning.generation)


def lacking(entries: Iterable[Entry], line: Line, recorded: Recorded) -> list[Record]:
    """Return what the tracker has not got of these entries, in their order.

    Args:
        entries: in the order of their commits.
        line: of the job, with the generations of all entries.
        recorded: what the tracker has, after it went `back_to` the line.
    """
    newest = read_generation(recorded.generation)
    records: list[Record] = []
    for entry in entries:
        if not on_the_line(entry, line):
            continue
        values = dict(entry.values)
        generation = entry.beginning.generation
        if later := newest is None or generation > newest:
            newest = generation
        if entry.first or later:
            values[WORKERS] = float(entry.beginning.size)
        values = {name: value for name, value in values.items() if not recorded.has(name, entry.step)}
        if values or later:
            annotation = entry.beginning.annotation if later or WORKERS in values else None
            record = Record(entry.step, entry.unix_time, values, annotation)
            recorded = recorded.with_records((record,))
            records.append(record)
    return records


def named_outside(values: Mapping[str, float], of_the_step: Mapping[str, float]) -> dict[str, float]:
    """Return values that were reported behind a step, none under a name that the step has itself.

    Args:
        values: reported since the step.
        of_the_step: its own.
    """
    return {f"{OUTSIDE}{name}" if name in of_the_step else name: value for name, value in values.items()}


def read_generation(text: str) -> GenerationName | None:
    """Return the generation of that name; None if it is none."""
    match = _NAME.fullmatch(text)
    return GenerationName.of(*(int(number) for number in match.groups())) if match else None


# ---- from member to member


NO_LINE: Final = b"[]"
"""Line of a member that has no tracker, as it gives it to those that join."""


def line_to_json(line: Line) -> bytes:
    """Return a line as a member gives it to those that join."""
    return json.dumps([[*one.generation.key, one.step] for one in line]).encode()


def line_from_json(text: bytes) -> Line:
    """Return the line that a member has given."""
    return tuple(Beginning(GenerationName.of(*key), step) for *key, step in json.loads(text))


# ---- for people


def flattened(config: Mapping[str, object], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Return hyperparameters of any depth as numbers and texts by dotted names.

    Args:
        config: of the script. Mappings in it become names with a dot; what is no number and no text its text.
        prefix: of the names.
    """
    flat: dict[str, str | int | float | bool] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{name}.")
        else:
            flat[name] = value if isinstance(value, str | int | float) else str(value)
    return flat


def gap(entries: Sequence[Entry], line: Line, recorded: Recorded) -> range:
    """Return the steps that a tracker may lack and that this process does not know.

    Args:
        entries: of this process, in the order of their commits.
        line: of the job.
        recorded: what the tracker has.
    """
    first = next((one.step for one in entries if not one.outside and on_the_line(one, line)), None)
    return range(0) if first is None else range(recorded.newest + 1, first)
