"""The story of a job, told as it happens: changes become lines, the end becomes an exit code. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any

from springtide_cli import watch
from springtide_cli.errors import FAILED, SUCCEEDED
from springtide_cli.jobview import Condition, JobView, progress, view
from springtide_operator.api import reasons

Object = dict[str, Any]

# s without a status after which the operator itself is in question
OPERATOR_PATIENCE = 15.0
# s after which an event is told with its age: it happened before following began
OLD_SECONDS = 30.0


class Tone(Enum):
    PLAIN = "plain"
    GOOD = "good"
    BAD = "bad"
    QUIET = "quiet"


@dataclass(frozen=True, slots=True)
class Line:
    text: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True, slots=True)
class Ending:
    """code: exit code of the command. lines: the summary."""

    code: int
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Story:
    """since: when following began, in s of the caller's clock. announced: events by uid, with their counts.

    messages: of events that came before the status with the same words.
    """

    since: float
    job: JobView | None = None
    announced: dict[str, int] = field(default_factory=dict)
    messages: frozenset[str] = frozenset()
    reachable: bool = True
    complained: bool = False
    ending: Ending | None = None


def job_news(story: Story, news: watch.News) -> tuple[Story, list[Line]]:
    """Return the story and its new lines after news from the watch of the job itself.

    Args:
        story: so far.
        news: an object that was seen, or that the API server is lost or back.
    """
    match news:
        case watch.Disconnected(message):
            return dataclasses.replace(story, reachable=False), [
                Line(f"{message}; the job goes on without it, still trying", Tone.BAD)
            ]
        case watch.Back():
            return dataclasses.replace(story, reachable=True), [
                Line("the API server answers again", Tone.GOOD)
            ]
        case watch.Seen(change, obj):
            now = view(obj)
            if story.job is not None and now.uid != story.job.uid:
                return story, []  # another job under the same name is not ours to follow
            if change == "DELETED":
                text = f"{now.name} was deleted before it ended"
                ending = story.ending or Ending(FAILED, (Line(text, Tone.BAD),))
                return dataclasses.replace(story, job=now, ending=ending), []
            lines = _changes(story.job, now, story.messages)
            messages = story.messages - {condition.message for condition in now.conditions.values()}
            end = story.ending or _ending(now)
            return dataclasses.replace(story, job=now, ending=end, messages=messages), lines


def event_news(story: Story, event: Object, unix_now: float) -> tuple[Story, list[Line]]:
    """Return the story and its new lines after one of the job's events.

    An event is shown once, and again when its count grows.

    Args:
        story: so far.
        event: a core/v1 Event.
        unix_now: unix time in seconds, for events without a time of their own.
    """
    uid, count = event["metadata"]["uid"], event.get("count") or 1
    if story.announced.get(uid, 0) >= count:
        return story, []
    message = str(event.get("message") or "").strip()
    announced = {**story.announced, uid: count}
    conditions = story.job.conditions.values() if story.job else ()
    if message and any(message == condition.message for condition in conditions):
        return dataclasses.replace(story, announced=announced), []  # told as a change of the condition
    text = f"{event.get('reason') or 'Event'}: {message}"
    if count > 1:
        text += f" (x{count})"
    tone = Tone.BAD if event.get("type") == "Warning" else Tone.PLAIN
    age = _age(event, unix_now)
    if age > OLD_SECONDS:
        text, tone = f"{_ago(age)}: {text}", Tone.QUIET
    return dataclasses.replace(story, announced=announced, messages=story.messages | {message}), [
        Line(text, tone)
    ]


def _age(event: Object, unix_now: float) -> float:
    stamp = event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp")
    try:
        return unix_now - datetime.fromisoformat(str(stamp)).timestamp()
    except ValueError:
        return 0.0


def _ago(seconds: float) -> str:
    for length, name in ((3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {name} ago"
    return f"{seconds:.0f} s ago"


def tick(story: Story, now: float) -> tuple[Story, list[Line]]:
    """Note that time has passed: say once that nobody takes the job up.

    Args:
        story: so far.
        now: monotonic time in seconds.

    Returns:
        The story from now on, and the lines to show.
    """
    waiting = story.job is not None and not story.job.taken_up and story.reachable
    if not waiting or story.complained or now - story.since < OPERATOR_PATIENCE:
        return story, []
    text = (
        f"no operator has taken up the job for {OPERATOR_PATIENCE:.0f} s: is Springtide's operator installed "
        "and running? (kubectl get pods -A -l app.kubernetes.io/name=springtide)"
    )
    return dataclasses.replace(story, complained=True), [Line(text, Tone.BAD)]


_BAD = {"Degraded", "Failed"}


def _changes(before: JobView | None, now: JobView, announced: frozenset[str]) -> list[Line]:
    lines = []
    old_conditions = before.conditions if before else {}
    for name, condition in now.conditions.items():
        if name in reasons.READINESS:
            continue  # said by the others already
        line = _condition(name, old_conditions.get(name), condition)
        if line is not None and condition.message not in announced:
            lines.append(line)
    if now.deleting and not (before and before.deleting):
        lines.append(Line(f"{now.name} is being deleted", Tone.BAD))
    if now.memory and now.memory != (before.memory if before else ""):
        lines.append(Line(now.memory, Tone.QUIET))
    numbers = progress(now)
    moved = before is None or numbers != progress(before)
    if _ending(now) is not None and before is not None:
        moved = now.step != before.step  # the workers going is no progress
    if numbers and moved:
        lines.append(Line(numbers, Tone.QUIET))
    return lines


def _condition(name: str, before: Condition | None, now: Condition) -> Line | None:
    if before == now:
        return None
    if not now.true and (before is None or not before.true):
        # Not true and was not: news only while the job waits to run, where the message says for what.
        waits = name == "Running" and now.message and (before is None or before.message != now.message)
        return Line(f"waiting: {now.message} ({now.reason})") if waits else None
    text = (
        f"{name}: {now.message or now.reason}"
        if now.true
        else f"no longer {name}: {now.message or now.reason}"
    )
    if name in _BAD:
        return Line(text, Tone.BAD if now.true else Tone.GOOD)
    if name in ("Running", "Succeeded"):
        return Line(text, Tone.GOOD if now.true else Tone.BAD)
    return Line(text)


def _ending(job: JobView) -> Ending | None:
    if job.is_true("Failed"):
        lines = [Line(f"{job.name} failed: {job.conditions['Failed'].message}", Tone.BAD)]
        if job.failed_message and job.failed_message not in lines[0].text:
            lines.append(Line(f"last failure, in {job.failed_pod}: {job.failed_message}", Tone.BAD))
        if job.failed_pod:
            lines.append(Line(f"its log: kubectl logs -n {job.namespace} {job.failed_pod}"))
        return Ending(FAILED, tuple(lines))
    if job.is_true("Succeeded"):
        return Ending(SUCCEEDED, _success(job))
    return None


def _success(job: JobView) -> tuple[Line, ...]:
    lines = [Line(f"{job.name} succeeded" + (f" after {job.step} steps" if job.step else ""), Tone.GOOD)]
    if job.data:
        counts = ", ".join(f"{job.data.get(key, 0)} {word}" for key, word in _COUNTS)
        exact = not job.data.get("repeated") and not job.data.get("lost")
        lines.append(Line(f"samples: {counts}", Tone.GOOD if exact else Tone.BAD))
    if job.values:
        lines.append(Line("reported: " + ", ".join(f"{k} {v}" for k, v in sorted(job.values.items()))))
    return tuple(lines)


_COUNTS = (("totalSeen", "seen"), ("repeated", "repeated"), ("lost", "lost"))
