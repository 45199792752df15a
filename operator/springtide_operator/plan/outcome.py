"""How a worker's process ended, read from its pod."""

from __future__ import annotations

import json
import re
from typing import Any

from springtide_operator.api import reasons
from springtide_operator.plan.observation import End, Finished, TakenReport
from springtide_operator.plan.values import parse_time, real, whole

Object = dict[str, Any]

# Pod status reasons with which the kubelet or the node's loss ends a pod; the script has no part in them.
_NOT_THE_SCRIPT = {
    "Evicted",
    "NodeAffinity",
    "NodeLost",
    "NodeShutdown",
    "Preempting",
    "Shutdown",
    "Terminated",
    "TerminationByKubelet",
    "TopologyAffinityError",
    "UnexpectedAdmissionError",
}
_REJECTED = "Pod was rejected"  # how newer kubelets begin, whatever keeps them from taking a pod
# How the kubelet says that a pod has used more storage than it may: evicted, and its own doing.
_OWN_LIMIT = re.compile(r"exceed(s|ed) (the|its) .*limit")
# Reasons of a container whose runtime or kubelet came back without it: the machine was started again.
_LOST_FROM_SIGHT = ("ContainerStatusUnknown", "Unknown")
_SAID_REASONS = ("OOMKilled", "NotFinished")
_FROM_OUTSIDE = (9, 15)  # SIGKILL, SIGTERM: the end of the log says nothing about why
_LAST_SIGNAL = 64  # a script that ends with 255 chose that itself
_MESSAGE_LIMIT = 1500
_NAMES, _NAME_LIMIT = 64, 128  # reported names
_RAISED = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?::|$)")


def read_end(pod: Object, container: Object | None) -> End | None:
    """Read how a pod ended; None while a process may run.

    Args:
        pod: as the API server has it.
        container: the status of the container that runs the script.
    """
    status = pod.get("status") or {}
    phase = status.get("phase", "Pending")
    terminated = ((container or {}).get("state") or {}).get("terminated")
    if terminated is None and phase not in ("Succeeded", "Failed"):
        return None
    message = (terminated or {}).get("message") or ""
    said = _said(message)
    at = parse_time((terminated or {}).get("finishedAt"))
    code = int((terminated or {}).get("exitCode", 0))
    if said is not None and said.get("outcome") == "Finished":
        number = _signal(terminated, code)
        if number or code == 0:
            # The script was through when this was said: a library that crashes afterwards undoes nothing.
            text = f", and its process was killed by signal {number} when it was to end" if number else ""
            return End(reasons.END_FINISHED, "Finished", f"the script ended{text}", code, at, _finished(said))
    disrupted = disruption(status)
    if disrupted is not None:
        return End(reasons.END_PREEMPTED, disrupted[0], disrupted[1], code, at)
    if _used_too_much(status):
        text = f"it used more storage than it may: {status['message']}"
        return End(reasons.END_FAILED, "Evicted", text[:_MESSAGE_LIMIT], code, at)
    if said is not None and said.get("outcome") == "Left" and said.get("finished") is True:
        return End(reasons.END_SURPLUS, "Left", "it came when the job had finished", code, at)
    if said is not None and said.get("outcome") == "Left":
        text = f"it left: {said.get('reason') or 'asked'}"
        return End(reasons.END_LEFT, "Left", text[:_MESSAGE_LIMIT], code, at)
    if said is not None and said.get("outcome") == "Failed":
        exception = str(said.get("exception") or "")[:_MESSAGE_LIMIT] or None
        # Of a pod with several processes the launcher says why one of them ended.
        reason = said.get("reason") if said.get("reason") in _SAID_REASONS else "Error"
        return End(reasons.END_FAILED, str(reason), _failure_text(said), code, at, exception=exception)
    lost = (terminated or {}).get("reason") or ""
    if code and lost in _LOST_FROM_SIGHT and not status.get("reason"):
        text = "its node lost sight of it, as after a restart of the machine"
        return End(reasons.END_PREEMPTED, lost, text, code, at)
    return _failed_without_words(status, terminated, message, code, at)


def _failed_without_words(
    status: Object, terminated: Object | None, message: str, code: int, at: float | None
) -> End:
    if terminated is None:
        for init in status.get("initContainerStatuses") or []:
            ended = (init.get("state") or {}).get("terminated")
            if ended and ended.get("exitCode"):
                text = f"init container {init.get('name')!r} exited with code {ended['exitCode']}"
                return End(
                    reasons.END_FAILED,
                    "InitContainerFailed",
                    _join(text, _last_lines(ended.get("message") or "")),
                    int(ended["exitCode"]),
                    parse_time(ended.get("finishedAt")),
                )
        reason = status.get("reason") or "PodFailed"
        return End(reasons.END_FAILED, reason, status.get("message") or f"the pod failed: {reason}", code, at)
    if code == 0:
        text = (
            "exited with code 0 without finishing: the script must call springtide.init(), run its"
            " training loop to the end, and return (os._exit() leaves nothing said)"
        )
        return End(reasons.END_FAILED, "NotFinished", _join(text, _last_lines(message)), code, at)
    reason = terminated.get("reason") or "Error"
    text = f"exited with code {code}"
    if reason == "OOMKilled":
        text = "out of memory: raise the container's memory limit, or bound what one worker computes at once"
    elif number := _signal(terminated, code):
        text = f"killed by signal {number}"
        if number in _FROM_OUTSIDE:
            message = ""
    if reason in ("StartError", "ContainerCannotRun"):
        text = "its command cannot be started"
    return End(
        reasons.END_FAILED, reason, _join(text, _last_lines(message)), code, at, exception=raised(message)
    )


def _signal(terminated: Object | None, code: int) -> int:
    """The signal that killed a process; 0: it ended by itself."""
    number = int((terminated or {}).get("signal") or code - 128)
    return number if 0 < number <= _LAST_SIGNAL else 0


def disruption(status: Object) -> tuple[str, str] | None:
    """(reason, message) when the pod was ended from outside and that is no failure of the script's."""
    for condition in status.get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            reason = condition.get("reason") or "DisruptionTarget"
            return reason, condition.get("message") or f"disrupted: {reason}"
    if _used_too_much(status):
        return None
    reason = status.get("reason") or ""
    rejected = reason and str(status.get("message") or "").startswith(_REJECTED)
    if rejected or reason in _NOT_THE_SCRIPT or reason.startswith("OutOf"):
        return reason, status.get("message") or reason
    return None


def _used_too_much(status: Object) -> bool:
    """Evicted for a limit of its own (of an emptyDir or of ephemeral storage), not for its node's sake: the
    kubelet marks the latter alone with DisruptionTarget.
    """
    marked = any(c.get("type") == "DisruptionTarget" for c in status.get("conditions") or [])
    evicted = status.get("reason") == "Evicted" and not marked
    return evicted and _OWN_LIMIT.search(str(status.get("message") or "")) is not None


def _said(message: str) -> Object | None:
    """The worker library's JSON, or None (a log's end, nothing, another program's text)."""
    text = message.strip()
    if not text.startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # the script may write what it likes
        return None
    return value if isinstance(value, dict) and isinstance(value.get("outcome"), str) else None


def _finished(said: Object) -> Finished:
    incarnation = said.get("incarnation")
    number = incarnation[0] if isinstance(incarnation, list) and incarnation else incarnation
    data = said.get("data") if isinstance(said.get("data"), dict) else {}
    values = said.get("values") if isinstance(said.get("values"), dict) else {}
    numbers = ((str(key)[:_NAME_LIMIT], whole(value)) for key, value in [*(data or {}).items()][:_NAMES])
    floats = ((str(key)[:_NAME_LIMIT], real(value)) for key, value in [*(values or {}).items()][:_NAMES])
    return Finished(
        incarnation=whole(number),
        generation=whole(said.get("generation")),
        step=whole(said.get("step")),
        data={key: value for key, value in numbers if value is not None},
        values={key: value for key, value in floats if value is not None},
        taken=_taken(said.get("taken")),
    )


def _taken(said: object) -> TakenReport | None:
    """Return what was taken of shards; None where nothing is told, or nonsense."""
    if not isinstance(said, dict):
        return None
    step, samples = whole(said.get("step")), whole(said.get("samples"))
    if step is None or samples is None:
        return None
    return TakenReport(step, samples, str(said.get("shards") or ""), str(said.get("begun") or ""))


def _failure_text(said: Object) -> str:
    text = ": ".join(str(said[key]) for key in ("exception", "message") if said.get(key)) or "Error"
    if said.get("frame"):
        text += f" ({said['frame']})"
    return text[:_MESSAGE_LIMIT]


def _last_lines(text: str) -> str:
    """The error with which a traceback ends, and the frame it came from; without one, the last line."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    frame = next((line for line in reversed(lines) if line.startswith('File "')), None)
    result = _error_line(text) or lines[-1]
    if frame is not None and frame != result:
        result += f" ({frame})"
    return result[:_MESSAGE_LIMIT]


def _error_line(log: str) -> str:
    """Return Python's message below the last frame of a log's last traceback."""
    # The source and the marks below it are indented.
    lines = [line for line in log.strip().splitlines() if line.strip()]
    frames = [number for number, line in enumerate(lines) if line.strip().startswith('File "')]
    after = (line for line in lines[frames[-1] + 1 :] if not line[0].isspace()) if frames else iter(())
    return next(after, "").strip()


def raised(log: str) -> str | None:
    """Class of the exception whose traceback ends a log; None where the log does not end with one."""
    found = _RAISED.match(_error_line(log))
    return found[1] if found else None


def _join(text: str, detail: str) -> str:
    return f"{text}: {detail}" if detail else text
