"""Follow one job until it ends: the shell around `story`.

Tasks: one event loop. The tasks of the job, its events, its pods and the clock change the story between two
awaits, so no lock is needed; the first of them to end the command sets `_ended`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from springtide_cli import story as stories
from springtide_cli import watch
from springtide_cli.apply import JOBS
from springtide_cli.errors import CliError
from springtide_cli.kube import KubePort
from springtide_cli.podlogs import PodLogs
from springtide_cli.screen import Screen
from springtide_cli.story import Line, Story, Tone
from springtide_kube.errors import ApiRefusal

Object = dict[str, Any]

TICK_SECONDS = 1.0
LAST_EVENTS_SECONDS = 1.0  # events are posted after the status that ends the job
LAST_LOGS_SECONDS = 5.0


class Follower:
    def __init__(
        self,
        kube: KubePort,
        screen: Screen,
        *,
        logs: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._screen = screen
        self._clock = clock
        self._story = Story(since=clock())
        self._ended = asyncio.Event()
        self._logs = PodLogs(kube, self._log) if logs else None

    async def follow(self, namespace: str, name: str, uid: str) -> int:
        """Show a job until it has ended.

        Args:
            namespace: of the job.
            name: of the job.
            uid: of this very job; events of another one are not shown.

        Returns:
            The exit code.

        Raises:
            CliError: it may not be watched.
        """
        job = asyncio.create_task(self._job(namespace, name))
        others = [asyncio.create_task(self._events(namespace, uid)), asyncio.create_task(self._ticks())]
        if self._logs is not None:
            others.append(asyncio.create_task(self._pods(namespace, name, self._logs)))
        ended: asyncio.Task[Any] = asyncio.create_task(self._ended.wait())
        try:
            pending: set[asyncio.Task[Any]] = {ended, job, *others}
            while not ended.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            await asyncio.wait(others, timeout=LAST_EVENTS_SECONDS)
            if self._logs is not None:
                await self._logs.finish(LAST_LOGS_SECONDS)
        finally:
            for task in (job, ended, *others):
                task.cancel()
            await asyncio.gather(job, ended, *others, return_exceptions=True)
            if self._logs is not None:
                await self._logs.finish(0)
        assert self._story.ending is not None
        for line in self._story.ending.lines:
            self._screen.say(line)
        return self._story.ending.code

    async def _job(self, namespace: str, name: str) -> None:
        path = f"{JOBS}/namespaces/{namespace}/trainingjobs"
        try:
            async for news in watch.follow(self._kube, path, {"fieldSelector": f"metadata.name={name}"}):
                self._announce(*stories.job_news(self._story, news))
        except ApiRefusal as error:
            raise CliError(f"TrainingJob {name} cannot be watched: {error.message}") from error

    async def _events(self, namespace: str, uid: str) -> None:
        selector = {"fieldSelector": f"involvedObject.uid={uid}"}
        try:
            async for news in watch.follow(self._kube, f"/api/v1/namespaces/{namespace}/events", selector):
                if isinstance(news, watch.Seen) and news.change != "DELETED":
                    self._announce(*stories.event_news(self._story, news.object, time.time()))
        except ApiRefusal as error:
            self._screen.say(Line(f"events cannot be read: {error.message}", Tone.BAD))

    async def _pods(self, namespace: str, name: str, logs: PodLogs) -> None:
        selector = {"labelSelector": f"springtide.dev/job={name},springtide.dev/role=worker"}
        try:
            async for news in watch.follow(self._kube, f"/api/v1/namespaces/{namespace}/pods", selector):
                logs.news(news)
        except ApiRefusal as error:
            self._screen.say(Line(f"worker logs cannot be read: {error.message}", Tone.BAD))

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._announce(*stories.tick(self._story, self._clock()))

    def _announce(self, story: Story, lines: list[Line]) -> None:
        self._story = story
        for line in lines:
            self._screen.say(line)
        self._screen.show(story.job)
        if story.ending is not None:
            self._ended.set()

    def _log(self, pod: str, text: str) -> None:
        self._screen.say(Line(f"{pod} | {text}", Tone.QUIET))
