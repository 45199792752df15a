"""Trace how this process comes into each generation: until it is made, its group, its state, its first step.

The coordinator names the span that all this is a part of with the generation, so everything before it (the
process's start, the wait) is described afterwards. Steps are not looked at: the first one of a generation is
found in the commit log, by the thread that reports it.

Threads and locks: the script's thread begins, goes on and fails; the reporting thread looks for the first
step. `_lock` guards what one hands to the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from springtide.coordination.progress import CommitLog
from springtide_protocol.names import GenerationName
from springtide_protocol.tracing import Attributes, AttributeValue, Span, TraceContext, Tracer, of_job, parse

_MOST_TEXT = 500


@dataclass(slots=True)
class _Entry:
    """Hold one try to come into a generation; times are unix seconds.

    Attributes:
        began: when it did.
        upto: up to when its parts are described.
        parts: (name, begin, end, attributes).
        context: the coordinator's span of the change; None before it is known.
    """

    began: float
    upto: float
    parts: list[tuple[str, float, float, Attributes]] = field(default_factory=list)
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    generation: GenerationName | None = None
    context: TraceContext | None = None


class RecoverySpans:
    """Describe the generations of this process."""

    def __init__(
        self,
        tracer: Tracer,
        job_uid: str,
        commits: CommitLog,
        process_began: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin outside of all generations.

        Args:
            tracer: takes the spans.
            job_uid: of the TrainingJob.
            commits: of this process.
            process_began: when it did, in unix seconds.
            clock: unix seconds.
        """
        self._tracer, self._job_uid, self._commits, self._clock = tracer, job_uid, commits, clock
        self._process_began: float | None = process_began
        self._entry: _Entry | None = None  # the script's thread's
        self._lock = threading.Lock()
        self._formed: _Entry | None = None  # waits for its first step

    # ---- the script's thread

    def begin(self, why: str) -> None:
        """Note that this process waits for another generation.

        Args:
            why: it does, in words.
        """
        if not self._tracer.enabled:
            return
        self._end_formed("the generation was over before this process had made a step in it")
        now, began = self._clock(), self._process_began
        entry = self._entry = _Entry(now if began is None else min(began, now), now)
        entry.attributes = {
            "springtide.reason": why[:_MOST_TEXT],
            "springtide.new_process": began is not None,
        }
        if began is not None:
            entry.parts.append(("start process", entry.began, now, {}))
        self._process_began = None

    def started(
        self, generation: GenerationName, traceparent: str, rank: int, size: int, *, stood_by: bool
    ) -> None:
        """Note that the coordinator has made the generation.

        Args:
            generation: its name.
            traceparent: the coordinator's span; "" where it has none.
            rank: of this process.
            size: processes of the generation.
            stood_by: this process had nothing to do until then, so that its wait belongs to no change.
        """
        entry = self._entry
        if entry is None:
            return
        now = self._clock()
        if stood_by:
            entry.attributes["springtide.stood_by_seconds"] = round(now - entry.upto, 3)
            entry.began, entry.upto, entry.parts = now, now, []
        else:
            self.part("wait for generation")
        entry.generation = generation
        entry.context = parse(traceparent) or self._tracer.begin(of_job(self._job_uid))
        entry.attributes |= {
            "springtide.generation": str(generation),
            "springtide.rank": rank,
            "springtide.members": size,
        }

    def part(self, name: str, **attributes: AttributeValue) -> None:
        """Note that a part is over, which began when the part before it ended.

        Args:
            name: of the part.
            attributes: of it; `springtide.` comes before their names.
        """
        entry = self._entry
        if entry is None:
            return
        now = self._clock()
        described = {f"springtide.{key}": value for key, value in attributes.items()}
        entry.parts.append((name, entry.upto, now, described))
        entry.upto = now

    def formed(self) -> None:
        """Note that this process is in the generation; its first step follows."""
        entry, self._entry = self._entry, None
        with self._lock:
            self._formed = entry

    def failed(self, error: BaseException) -> None:
        """Record that this process did not come into the generation.

        Args:
            error: why.
        """
        entry, self._entry = self._entry, None
        if entry is not None:
            self._end(entry, self._clock(), f"{type(error).__name__}: {error}"[:_MOST_TEXT])

    def left(self, reason: str) -> None:
        """Record that the coordinator lets this process go, while it waited for a generation.

        Args:
            reason: in words.
        """
        entry, self._entry = self._entry, None
        if entry is None:
            return
        job = self._tracer.begin(of_job(self._job_uid))
        said: Attributes = {"springtide.reason": reason[:_MOST_TEXT]}
        self._tracer.record(Span("leave", self._tracer.child_of(job), entry.upto, self._clock(), job, said))

    # ---- the reporting thread

    def look(self) -> None:
        """Record the generation that this process has come into, once its first step is committed."""
        with self._lock:
            entry = self._formed
            commit = None
            if entry is not None and entry.generation is not None:
                commit = self._commits.first_of(entry.generation)
            if entry is None or commit is None:
                return
            self._formed = None
        ended = max(commit.unix_time, entry.upto)
        step: Attributes = {"springtide.step": commit.state.step}
        entry.parts.append(("first step", entry.upto, ended, step))
        self._end(entry, ended, "")

    # ---- any thread

    def close(self) -> None:
        """Record what is open, since the process ends."""
        self.look()
        self._end_formed("")
        entry, self._entry = self._entry, None
        if entry is not None:
            self._end(entry, self._clock(), "the process ended before it was in a generation")

    def _end_formed(self, error: str) -> None:
        self.look()
        with self._lock:
            entry, self._formed = self._formed, None
        if entry is not None:
            self._end(entry, entry.upto, error)

    def _end(self, entry: _Entry, ended: float, error: str) -> None:
        tracer = self._tracer
        parent = entry.context or tracer.begin(of_job(self._job_uid))
        whole = tracer.child_of(parent)
        for name, began, over, attributes in entry.parts:
            tracer.record(Span(name, tracer.child_of(whole), began, over, whole, attributes))
        tracer.record(
            Span("enter generation", whole, entry.began, ended, parent, entry.attributes, error=error)
        )
