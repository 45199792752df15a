"""Follow the logs of a job's worker pods, each from its start to its end, over broken connections."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

from springtide_cli import watch
from springtide_cli.kube import KubePort
from springtide_kube.errors import ApiRefusal, Unreachable

Object = dict[str, Any]

AGAIN_SECONDS = 0.5
# Runtimes write the time in their machine's zone, most of them in UTC.
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)) ?")


def container(pod: Object) -> str:
    """The container that runs the script: the one named worker, or else the first."""
    names = [str(c.get("name", "")) for c in pod["spec"]["containers"]]
    return "worker" if "worker" in names else names[0]


def has_started(pod: Object) -> bool:
    """Whether there is a log to read."""
    for status in (pod.get("status") or {}).get("containerStatuses") or []:
        if status.get("name") == container(pod):
            state = status.get("state") or {}
            return "running" in state or "terminated" in state or bool(status.get("restartCount"))
    return False


def has_ended(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def split_stamp(line: str) -> tuple[str, str]:
    """(time, text) of a line that was asked for with timestamps."""
    found = _STAMP.match(line)
    return (found[1], line[found.end() :]) if found else ("", line)


class Reading:
    """One log that is read over several connections, each of which begins with lines that came before.

    Lines may share their time: how many had the last one is counted. After that nothing is left out, since a
    machine's clock may go back.
    """

    def __init__(self) -> None:
        self.since = ""
        """The time of the last line so far; "" before the first one."""
        self._same = 0
        self._skips: tuple[str, int] | None = None

    def connected(self) -> None:
        self._skips = (self.since, self._same) if self.since else None

    def is_new(self, stamp: str) -> bool:
        """Whether the next line of this connection, which has this time, did not come before."""
        if not stamp:
            return True
        if self._skips is not None:
            until, left = self._skips
            if stamp < until:
                return False
            if stamp == until and left:
                self._skips = (until, left - 1)
                return False
            self._skips = None
        self._same = self._same + 1 if stamp == self.since else 1
        self.since = stamp
        return True


class PodLogs:
    """Give it what the watch of the worker pods says; it calls `write(pod name, line)`."""

    def __init__(self, kube: KubePort, write: Callable[[str, str], None]) -> None:
        self._kube = kube
        self._write = write
        self._pods: dict[str, Object] = {}
        self._tails: dict[str, asyncio.Task[None]] = {}

    def news(self, news: watch.News) -> None:
        if not isinstance(news, watch.Seen):
            return
        uid = news.object["metadata"]["uid"]
        self._pods[uid] = news.object
        if news.change == "DELETED":
            self._pods[uid] = {**news.object, "status": {"phase": "Failed"}}
        elif uid not in self._tails and has_started(news.object):
            self._tails[uid] = asyncio.create_task(
                self._tail(uid), name=f"log of {news.object['metadata']['name']}"
            )

    async def finish(self, seconds: float) -> None:
        """Let the tails reach the ends of their logs, for at most so long, and stop them."""
        tails = list(self._tails.values())
        if tails:
            await asyncio.wait(tails, timeout=seconds)
        for task in tails:
            task.cancel()
        await asyncio.gather(*tails, return_exceptions=True)

    async def _tail(self, uid: str) -> None:
        meta = self._pods[uid]["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/log"
        reading = Reading()
        while True:
            ended = has_ended(self._pods[uid])
            query = {"follow": "true", "timestamps": "true", "container": container(self._pods[uid])}
            if reading.since:
                query["sinceTime"] = reading.since  # which has whole seconds
            reading.connected()
            try:
                async for line in self._kube.lines(path, query):
                    stamp, text = split_stamp(line)
                    if reading.is_new(stamp):
                        self._write(meta["name"], text)
            except ApiRefusal as error:
                if error.code == 404 or ended:
                    return
            except Unreachable:
                pass  # told by the watch of the job
            if ended:
                return
            await asyncio.sleep(AGAIN_SECONDS)
