"""A handle of one TrainingJob: waits, logs, values, sizes, and its end.

Threads: as `Session` says. `logs(follow=True)` reads in the thread of the event loop, and its iterator hands
the lines over by a queue.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Literal, overload

from springtide_cli import watch
from springtide_cli.follow import Follower
from springtide_cli.jobview import JobView, view
from springtide_cli.podlogs import PodLogs, container, has_started
from springtide_client.errors import ClientError, ClusterRefused, JobFailed, JobNotFound, JobTimeout
from springtide_client.manifest import Workers, sizes
from springtide_client.screens import Relay, screen_for
from springtide_client.session import Session, translated
from springtide_kube.content_types import MERGE_PATCH
from springtide_kube.errors import ApiError
from springtide_operator.api import names

Object = dict[str, Any]
JobStatus = JobView
"""The public name of a status."""
Until = str | Callable[[JobStatus], object]

ENDED = "Succeeded"
LAST_LINES = 20
LAST_SECONDS = 3.0  # for what is still to be shown once the job has ended
_SHOW_SECONDS = 0.1  # for how the job is, where a wait ends at once
_LOG_SECONDS = 30.0  # for the ends of logs
_GONE_POLL_SECONDS = 0.1
_END = object()


class TrainingJob:
    """One job in a cluster, which goes on without this object. `TrainingClient` makes it."""

    def __init__(self, session: Session, job: Object) -> None:
        """Take a job as the API server stores it.

        Args:
            session: connection to its cluster.
            job: the object.
        """
        self._session = session
        self.name: str = job["metadata"]["name"]
        self.namespace: str = job["metadata"]["namespace"]
        self.uid: str = job["metadata"]["uid"]

    def __repr__(self) -> str:
        return f"TrainingJob({self.namespace}/{self.name})"

    @property
    def status(self) -> JobView:
        """The job's state, conditions, numbers and values as they are now.

        Raises:
            JobNotFound: it is gone.
        """
        return view(self._read())

    @property
    def values(self) -> dict[str, float]:
        """The numbers that the script reported last, by `springtide.report`.

        Raises:
            JobNotFound: it is gone.
        """
        return {name: float(value) for name, value in self.status.values.items()}

    @property
    def object(self) -> Object:
        """The whole TrainingJob as JSON, with spec and status.

        Raises:
            JobNotFound: it is gone.
        """
        return self._read()

    def wait(self, timeout: float | None = None, *, until: Until = ENDED, progress: bool = True) -> JobView:
        """Wait until the job has succeeded, or is where `until` says, and show how it goes.

        Args:
            timeout: in seconds; None: as long as it takes.
            until: a condition (Running, Suspended, ...), or a function of the status whose answer is true
                once the wait is to end.
            progress: show the job meanwhile: live in a terminal and in a notebook, else as lines.

        Returns:
            The status then.

        Raises:
            JobFailed: it failed, ended before it was there, or was deleted.
            JobTimeout: it was not there in time; the job goes on.
            ClusterRefused: it may not be watched.
        """
        relay = Relay()
        work = self._wait(timeout, until, relay if progress else None)
        return self._session.shown(work, relay, screen_for(progress))

    @overload
    def logs(
        self, *, follow: Literal[False] = ..., worker: int | str | None = ..., tail: int | None = ...
    ) -> str: ...

    @overload
    def logs(
        self, *, follow: Literal[True], worker: int | str | None = ..., tail: int | None = ...
    ) -> Iterator[str]: ...

    def logs(
        self, *, follow: bool = False, worker: int | str | None = None, tail: int | None = None
    ) -> str | Iterator[str]:
        """Return what the workers have printed, or follow it until the job ends.

        Lines of several pods begin with the name of theirs.

        Args:
            follow: return an iterator of lines that ends with the job.
            worker: number of one worker, or name of one pod; None: all.
            tail: only so many last lines of each pod; without `follow`.

        Raises:
            ClusterRefused: they may not be read.
        """
        if follow:
            if tail is not None:
                raise ClientError("logs: tail= goes without follow=True, which begins at the beginning")
            return self._follow_logs(worker)
        parts = []
        pods = self._pods(worker)
        for pod in pods:
            text = self._session.run(self._log(pod, tail)) if has_started(pod) else ""
            start = f"{pod['metadata']['name']} | " if len(pods) > 1 else ""
            parts += [f"{start}{line}" for line in text.splitlines()]
        return "\n".join(parts)

    def scale(self, workers: Workers) -> None:
        """Change how many workers there are to be; training goes on meanwhile.

        Args:
            workers: how many; or (the fewest, the most), of which the most are wanted.

        Raises:
            SourceError: they are no such numbers.
            ClusterRefused: they are outside of the job's limits.
        """
        fields = sizes(workers)
        if len(fields) == 1:
            self._session.request("PATCH", f"{self._path}/scale", {"spec": fields}, MERGE_PATCH)
        else:
            self._patch({"workers": fields})

    def suspend(self) -> None:
        """Let the job save its state and give back its pods, until `resume`. Raise ClusterRefused."""
        self._patch({"suspend": True})

    def resume(self) -> None:
        """Go on after `suspend`. Raise ClusterRefused."""
        self._patch({"suspend": False})

    def delete(self, *, timeout: float = 60.0) -> None:
        """Delete the job with its pods and its code, and wait until it is gone.

        A job that is gone already is no error.

        Args:
            timeout: in seconds; 0: do not wait.

        Raises:
            JobTimeout: it is still there.
            ClusterRefused: it may not be deleted.
        """
        options = {"propagationPolicy": "Background", "preconditions": {"uid": self.uid}}
        try:
            self._session.request("DELETE", self._path, options)
        except JobNotFound:
            return
        except ClusterRefused as error:
            if error.code == 409:  # another job has its name by now
                return
            raise
        deadline = time.monotonic() + timeout
        while timeout > 0:
            try:
                if self._session.request("GET", self._path)["metadata"]["uid"] != self.uid:
                    return
            except JobNotFound:
                return
            if time.monotonic() > deadline:
                raise JobTimeout(f"job {self.name} is still there {timeout:g} s after it was deleted")
            time.sleep(_GONE_POLL_SECONDS)

    # ---- inside

    @property
    def _path(self) -> str:
        return self._session.path(self.name, self.namespace)

    def _read(self) -> Object:
        job = self._session.request("GET", self._path)
        if job["metadata"]["uid"] != self.uid:
            raise JobNotFound(f"job {self.name} is gone; another one has its name now", 404, "NotFound")
        return job

    def _patch(self, spec: Object) -> None:
        self._session.request("PATCH", self._path, {"spec": spec}, MERGE_PATCH)

    async def _wait(self, timeout: float | None, until: Until, relay: Relay | None) -> JobView:
        last: list[JobView] = []
        showing: list[asyncio.Task[int]] = []
        if relay is not None:
            follower = Follower(self._session.kube, relay)
            showing.append(asyncio.create_task(follower.follow(self.namespace, self.name, self.uid)))
        try:
            async with asyncio.timeout(timeout):
                job = await self._until(until, last)
            if showing:
                await asyncio.wait(showing, timeout=LAST_SECONDS if _has_ended(job) else _SHOW_SECONDS)
            return job
        except JobFailed:
            if showing:
                await asyncio.wait(showing, timeout=LAST_SECONDS)
            raise
        except TimeoutError:
            raise JobTimeout(_late(self.name, timeout, until, last)) from None
        finally:
            for task in showing:
                task.cancel()
            await asyncio.gather(*showing, return_exceptions=True)

    async def _until(self, until: Until, last: list[JobView]) -> JobView:
        query = {"fieldSelector": f"metadata.name={self.name}"}
        found = False
        async for news in watch.follow(self._session.kube, self._session.path("", self.namespace), query):
            if not isinstance(news, watch.Seen) or news.object["metadata"]["uid"] != self.uid:
                if isinstance(news, watch.Seen) and not found:
                    break  # another job under this name
                continue
            found = True
            job = view(news.object)
            last[:] = [job]
            if news.change == "DELETED":
                break
            if job.is_true(until) if isinstance(until, str) else until(job):
                return job
            if _has_ended(job):
                raise await self._failure(job, until)
        raise JobFailed(self.name, "Deleted", "it was deleted before it ended")

    async def _failure(self, job: JobView, until: Until) -> JobFailed:
        if job.is_true("Succeeded"):
            text = f"it succeeded before it was {_named(until)}"
            return JobFailed(job.name, job.conditions["Succeeded"].reason, text)
        condition = job.conditions["Failed"]
        message = condition.message
        if job.failed_message and job.failed_message not in message:
            message += f"; last failure, in {job.failed_pod}: {job.failed_message}"
        log = await self._last_lines(job.failed_pod) if job.failed_pod else ""
        return JobFailed(job.name, condition.reason, message, job.failed_pod, log)

    async def _last_lines(self, name: str) -> str:
        """Return the end of a pod's log; nothing when the pod is gone, whose last words the job has."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        try:
            async with asyncio.timeout(LAST_SECONDS):
                return await self._log(await self._session.kube.request("GET", path), LAST_LINES)
        except (ApiError, TimeoutError):
            return ""

    async def _log(self, pod: Object, tail: int | None) -> str:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}/log"
        query = {"container": container(pod)} | ({} if tail is None else {"tailLines": str(tail)})
        return "\n".join([line async for line in self._session.kube.lines(path, query)])

    def _selector(self, worker: int | str | None) -> dict[str, str]:
        labels = f"{names.LABEL_JOB}={self.name},{names.LABEL_ROLE}=worker"
        if isinstance(worker, int):
            labels += f",{names.LABEL_SLOT}={worker}"
        query = {"labelSelector": labels}
        return query | ({"fieldSelector": f"metadata.name={worker}"} if isinstance(worker, str) else {})

    def _pods(self, worker: int | str | None) -> list[Object]:
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        found: list[Object] = self._session.request("GET", path, **self._selector(worker))["items"]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def _follow_logs(self, worker: int | str | None) -> Iterator[str]:
        lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        single = worker is not None

        def write(pod: str, line: str) -> None:
            lines.put(line if single else f"{pod} | {line}")

        future: Future[None] = self._session.thread.start(self._read_logs(worker, write))
        future.add_done_callback(lambda _: lines.put(_END))
        try:
            while (line := lines.get()) is not _END:
                yield line
            with translated():
                future.result()
        finally:
            future.cancel()

    async def _read_logs(self, worker: int | str | None, write: Callable[[str, str], None]) -> None:
        logs = PodLogs(self._session.kube, write)
        path = f"/api/v1/namespaces/{self.namespace}/pods"

        async def read() -> None:
            async for news in watch.follow(self._session.kube, path, self._selector(worker)):
                logs.news(news)

        reading = asyncio.create_task(read())
        ending = asyncio.create_task(self._until(_has_ended, []))
        try:
            await asyncio.wait([reading, ending], return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
            if isinstance(error := ending.exception() if ending.done() else None, ApiError):
                raise error
            # The job may have ended before the watch has told of its pods.
            listed = await self._session.kube.request("GET", path, query=self._selector(worker))
            for pod in listed["items"]:
                logs.news(watch.Seen("MODIFIED", pod))
            await logs.finish(_LOG_SECONDS)
        finally:
            for task in (reading, ending):
                task.cancel()
            await asyncio.gather(reading, ending, return_exceptions=True)
            await logs.finish(0)


def _has_ended(job: JobView) -> bool:
    return job.is_true("Succeeded") or job.is_true("Failed")


def _named(until: Until) -> str:
    return until if isinstance(until, str) else getattr(until, "__name__", "what is waited for")


def _late(name: str, timeout: float | None, until: Until, last: list[JobView]) -> str:
    now = "the API server has not told of it"
    if last:
        job = last[0]
        now = f"it is {job.state or 'not taken up by an operator'}"
        now += f": {job.message}" if job.message else ""
    return f"job {name} was not {_named(until)} within {timeout:g} s; {now}"
