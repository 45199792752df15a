"""Keep commits on their way out: the log that a new coordinator is told from, and the step log.

Threads and locks: the commit log's lock guards its entries and where the next report begins. The script's
thread adds commits; the stream's thread rewinds after a Welcome; the reporting thread takes. The step log is
written by the script's thread alone.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

import torch

from springtide.data.ledger import Ledger
from springtide.data.taken import Taken
from springtide.errors import SpringtideError, UsageError
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.codec import state_to_proto
from springtide_protocol.names import GenerationName, StateName

MAX_COMMITS = 4096
_MAX_IN_MESSAGE = 512


@dataclass(frozen=True, slots=True)
class Commit:
    """Describe one committed step.

    unix_time in s; seconds: from the body's begin to here; values: means over the samples of all members.
    """

    state: StateName
    unix_time: float
    seconds: float
    exposed_seconds: float
    samples: int
    values: dict[str, float]
    data_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    skipped: bool = False

    def to_proto(self) -> pb.Commit:
        """Return the commit as a message."""
        return pb.Commit(
            state=state_to_proto(self.state),
            unix_time=self.unix_time,
            step_seconds=self.seconds,
            exposed_communication_seconds=self.exposed_seconds,
            samples=self.samples,
            values=self.values,
            data_seconds=self.data_seconds,
            checkpoint_seconds=self.checkpoint_seconds,
            skipped=self.skipped,
        )


class CommitLog:
    """Keep the last commits of this process, so that a coordinator that lost them can be told again.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._commits: deque[Commit] = deque(maxlen=MAX_COMMITS)
        self._sent: StateName | None = None
        self._lock = threading.Lock()

    def add(self, commit: Commit) -> None:
        """Add the newest commit."""
        with self._lock:
            self._commits.append(commit)

    def rewind(self, known: StateName | None) -> None:
        """Send again what the coordinator does not know: on a new stream, in a new generation."""
        with self._lock:
            self._sent = known

    @property
    def newest(self) -> StateName | None:
        """Return the state of the newest commit that is remembered; None for none."""
        with self._lock:
            return self._commits[-1].state if self._commits else None

    def first_of(self, generation: GenerationName) -> Commit | None:
        """Return the first commit of a generation; None unless the newest commit is of it."""
        with self._lock:
            found = None
            for commit in reversed(self._commits):
                if commit.state.generation != generation:
                    break
                found = commit
            return found

    def take(self) -> list[Commit]:
        """Return the commits to send now, oldest first, at most 512; they count as sent."""
        with self._lock:
            fresh: list[Commit] = []
            for commit in reversed(self._commits):
                if self._sent is not None and commit.state <= self._sent:
                    break
                fresh.append(commit)
            fresh = fresh[: -_MAX_IN_MESSAGE - 1 : -1]
            if fresh:
                self._sent = fresh[-1].state
            return fresh


def data_message(ledger: Ledger, taken: Taken | None) -> pb.Data:
    """Return the ledger's counts as a message.

    Args:
        ledger: of a committed state.
        taken: what the positions of the same state say of shards; None: nothing.
    """
    audit = ledger.audit()
    return pb.Data(
        epoch=audit["epoch"],
        seen=audit["seen"],
        expected=audit["expected"],
        repeated=audit["repeated"],
        lost=audit["lost"],
        skipped=audit["skipped"],
        total_seen=audit["totalSeen"],
        stage=audit["stage"],
        taken=None if taken is None else _taken_message(taken),
    )


def _taken_message(taken: Taken) -> pb.Taken:
    return pb.Taken(step=taken.step, samples=taken.samples, shards=taken.shards, begun=taken.begun)


class StepLog:
    """Append one JSON line per commit of this process to a file; do nothing without a path."""

    def __init__(self, path: str, member: str) -> None:
        self._member = json.dumps(member)
        self._file: IO[str] | None = None
        if path:
            try:
                self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (lives as long as the process)
            except OSError as error:
                raise SpringtideError(
                    f"environment variable SPRINGTIDE_STEP_LOG: cannot append to {path!r}: "
                    f"{error.strerror}; name a writable file"
                ) from None

    def write(self, commit: Commit) -> None:
        """Append a commit."""
        if self._file is None:
            return
        generation = commit.state.generation
        # Numbers by hand: json takes as long as all other accounts of a step.
        self._file.write(
            f'{{"step": {commit.state.step}, "generation": {generation.number}, "incarnation":'
            f" [{generation.incarnation.number}, {generation.incarnation.restart}],"
            f' "time": {commit.unix_time!r}, "step_seconds": {commit.seconds!r},'
            f' "samples": {commit.samples}, "values": {json.dumps(commit.values) if commit.values else "{}"},'
            f' "member": {self._member}}}\n'
        )

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def as_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return reported values as numbers. Raise UsageError for what is no number."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        try:
            numbers[name] = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(
                f"report({name}=...): expected a number or a tensor of one element, got "
                f"{type(value).__name__}"
            ) from None
    return numbers
