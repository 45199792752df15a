"""Journal of one job's pods from a watch: their lives, their ends, and forbidden events."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from required import require_tool

from springtide_operator.api import names

Object = dict[str, Any]

YOUNG_SECONDS = 5.0
# Ends that the operator itself brought about, and counts nowhere.
OWN = {"ScaledDown", "Superseded", "Replaced", "JobOver", "NodeCordoned", "Suspended"}


@dataclass
class Seen:
    """One pod's life. `end`: died (its process ended badly), left, finished, deleted, vanished, or the
    operator's own reason.
    """

    name: str
    began: float
    slot: str
    end: str | None = None
    ended: float = 0.0
    also: set[str] = field(default_factory=set)  # the operator's own reasons, whenever they were written


@dataclass
class Journal:
    """Feed it every event of a watch, in order. `broken`: sentences about what must never be.
    `disturbed`: when an operator was killed or stopped (monotonic seconds).
    """

    maximum: int
    pods: dict[str, Seen] = field(default_factory=dict)  # workers by uid
    coordinators: dict[str, Seen] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    disturbed: list[float] = field(default_factory=list)

    def take(self, kind: str, pod: Object, now: float) -> None:
        meta = pod["metadata"]
        role = meta["labels"].get(names.LABEL_ROLE)
        where = self.pods if role == names.ROLE_WORKER else self.coordinators
        seen = where.setdefault(
            meta["uid"], Seen(meta["name"], now, meta["labels"].get(names.LABEL_SLOT, ""))
        )
        because = (meta.get("annotations") or {}).get(names.ANNOTATION_DELETED_BECAUSE)
        if because is not None:
            seen.also.add(because)
        if seen.end is None:
            seen.end = how(kind, pod)
            seen.ended = now
        self._check(now)

    def knows(self, pods: Iterable[Object]) -> bool:
        """Whether it has been told of all of them, and of the ends of all other workers.

        A coordinator's container is started again in its pod, so its pod has not ended when one of them has.
        """
        there = {pod["metadata"]["uid"]: pod for pod in pods}
        alive = {uid for uid, pod in there.items() if uid in self.pods and how("MODIFIED", pod) is None}
        return there.keys() <= {*self.pods, *self.coordinators} and alive == {
            uid for uid, one in self.pods.items() if one.end is None
        }

    def live(self) -> list[Seen]:
        return [seen for seen in self.pods.values() if seen.end is None]

    def _check(self, now: float) -> None:
        live = self.live()
        if len(live) > self.maximum:
            self.broken.append(f"{len(live)} live workers, at most {self.maximum}: {sorted(map(str, live))}")
        for slot in {seen.slot for seen in live}:
            both = [seen.name for seen in live if seen.slot == slot]
            if len(both) > 2:
                self.broken.append(f"slot {slot} has {sorted(both)}")
        coordinators = [seen.name for seen in self.coordinators.values() if seen.end is None]
        if len(coordinators) > 2:
            self.broken.append(f"several coordinators: {sorted(coordinators)}")

    def early(self) -> tuple[int, int]:
        """(at least, at most) how many workers ended early by what the operator has to count.

        It may count nothing for a worker that it had already decided to give back, nor for one that was gone
        before it was seen.
        """
        most = [seen for seen in self.pods.values() if seen.end not in (None, "finished", *OWN)]
        sure = [s for s in most if not s.also & OWN - {"Replaced"} and self._was_seen(s)]
        return len(sure), len(most)

    def _was_seen(self, pod: Seen) -> bool:
        """Whether the operator has surely written the pod down while it lived."""
        since = pod.began + YOUNG_SECONDS
        return pod.ended > since and not any(pod.began < at < since for at in self.disturbed)

    def died(self) -> int:
        return sum(seen.end == "died" for seen in self.pods.values())


def how(kind: str, pod: Object) -> str | None:
    """How a pod ended by one look at it; None while it lives."""
    meta, status = pod["metadata"], pod.get("status") or {}
    because = (meta.get("annotations") or {}).get(names.ANNOTATION_DELETED_BECAUSE)
    terminated = next(
        (
            state["terminated"]
            for state in ((c.get("state") or {}) for c in status.get("containerStatuses") or [])
            if state.get("terminated")
        ),
        None,
    )
    if "deletionTimestamp" in meta:
        return because or "deleted"
    if terminated is not None or status.get("phase") in ("Failed", "Succeeded"):
        if status.get("reason") or any(
            c["type"] == "DisruptionTarget" and c["status"] == "True" for c in status.get("conditions") or []
        ):
            return "disrupted"
        said = (terminated or {}).get("message") or ""
        if '"Left"' in said:
            return "left"
        return "finished" if '"Finished"' in said else "died"
    return "vanished" if kind == "DELETED" else None


class Watcher:
    """Feeds a journal from `kubectl get --watch` in a thread of its own. Use as `with`."""

    def __init__(self, kubeconfig: str, namespace: str, job: str, journal: Journal) -> None:
        self.journal = journal
        self.trouble = ""
        self._command = [
            require_tool("kubectl"), "--kubeconfig", kubeconfig, "get", "pods", "-n", namespace,
            "-l", f"{names.LABEL_JOB}={job}", "--watch", "--output-watch-events", "-o", "json",
        ]  # fmt: skip
        self._thread = threading.Thread(target=self._read, name="watch of pods", daemon=True)

    def __enter__(self) -> Self:
        self._kubectl = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        ended = self._kubectl.poll()
        self._kubectl.terminate()
        said = self._kubectl.communicate(timeout=30)[1] if ended is not None else ""
        self._thread.join(timeout=30)
        self._kubectl.wait(timeout=30)
        for pipe in (self._kubectl.stdout, self._kubectl.stderr):
            if pipe is not None:
                pipe.close()
        assert ended is None, f"the watch of pods ended by itself: {said}"
        assert not self.trouble, self.trouble

    def _read(self) -> None:
        assert self._kubectl.stdout is not None
        lines: list[str] = []
        for line in self._kubectl.stdout:
            lines.append(line)
            if line != "}\n" and not line.startswith('{"'):  # some print an event in one line, some in many
                continue
            event, lines = json.loads("".join(lines)), []
            try:
                self.journal.take(event["type"], event["object"], time.monotonic())
            except (KeyError, TypeError) as error:
                self.trouble = f"{error!r} in {event}"
