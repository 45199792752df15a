"""PURE: the one outcome of a pod, from those of its processes."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Sequence

from springtide.coordination.outcome import Failed, Finished, Left, Outcome
from springtide.launch.supervision import End, Supervisor

OUT_OF_MEMORY = "OOMKilled"
NOT_FINISHED = "NotFinished"

_RAISED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?::|$)")
_MESSAGE_LINES = 20


def merged(supervisor: Supervisor) -> tuple[Outcome | None, int]:
    """(outcome, exit code) of the pod once all its processes have ended.

    One process that Finished is enough, as one worker is for the job; of several the one with the greatest
    state speaks. Otherwise the end that made the pod give up, or the first failure. None: there is nothing to
    say beyond the exit code and the log (a single process that ended without a word).
    """
    ends = [process.end for process in supervisor.processes]
    finished = [end.outcome for end in ends if end and end.well and isinstance(end.outcome, Finished)]
    if finished:
        best = max(finished, key=lambda f: (f.incarnation, f.generation, f.step))
        report = {**best.report, "processRestarts": float(sum(supervisor.restarts))}
        return (dataclasses.replace(best, report=report) if sum(supervisor.restarts) else best), 0
    rank = supervisor.gave_up
    if rank is None:
        rank = next((r for r, end in enumerate(ends) if end is not None and _failed(end, supervisor)), None)
    if rank is None:
        left = next((end.outcome for end in ends if end is not None and isinstance(end.outcome, Left)), None)
        return left or Left(supervisor.stopping or "all processes of the pod left"), 0
    end = ends[rank]
    assert end is not None
    told = failure(rank, end, supervisor.count, sum(supervisor.restarts))
    return told, end.exit_code or 1


def _failed(end: End, supervisor: Supervisor) -> bool:
    """A process that the launcher's own signal ended before it could say anything did not fail."""
    if end.well:
        return False
    # A shell, or a process that cannot die of it, says 128 + n for signal n.
    by_signal = end.exit_code - 128 in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    return not (supervisor.stopping and end.outcome is None and by_signal)


def failure(rank: int, end: End, count: int, restarts: int) -> Failed | None:
    """Describe a process that failed; None for a single one whose own log says it better.

    Args:
        rank: of the process.
        end: its code and last lines.
        count: of processes in the pod.
        restarts: of processes in this pod so far.
    """
    who = f"process {rank}" if count > 1 else "the process"
    after = f" (after {restarts} restarts of processes in this pod)" if restarts else ""
    if end.out_of_memory:
        text = (
            f"{who} was killed: out of memory: raise the container's memory limit, or bound what one worker"
            f" computes at once{after}"
        )
        return Failed("", text, reason=OUT_OF_MEMORY)
    if isinstance(end.outcome, Failed):
        message = f"{end.outcome.message} ({who}){after}" if count > 1 else end.outcome.message + after
        return dataclasses.replace(end.outcome, message=message)
    if count == 1:
        return None
    if end.code < 0:
        return Failed("", f"{who} was killed by signal {-end.code}{after}")
    if end.code == 0:
        text = (
            f"{who} exited with code 0 without finishing: the script must call springtide.init(), run its"
            f" training loop to the end, and return (os._exit() leaves nothing said){after}"
        )
        return Failed("", text, reason=NOT_FINISHED)
    lines = [line for line in end.tail.splitlines() if line.strip()][-_MESSAGE_LINES:]
    error = error_line(lines)
    found = _RAISED.match(error)
    said = f": {error or (lines[-1].strip() if lines else 'it wrote nothing')}"
    return Failed(found[1] if found else "", f"{who} exited with code {end.code}{said}{after}")


def error_line(lines: Sequence[str]) -> str:
    """Return Python's message below the last frame of a traceback, which is not indented; "" without one."""
    frames = [number for number, line in enumerate(lines) if line.strip().startswith('File "')]
    after = (line for line in lines[frames[-1] + 1 :] if not line[0].isspace()) if frames else iter(())
    return next(after, "").strip()
