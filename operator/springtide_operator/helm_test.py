"""`python -m springtide_operator.helm_test`: train a tiny job to its end, then remove it (for `helm test`).

SPRINGTIDE_TEST_JOB holds the TrainingJob as JSON. Ends with 0 when it succeeded and nothing of it is left,
with 1 and its conditions and events when not, with 2 when it was not even asked properly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

from springtide_kube.errors import ApiError
from springtide_operator.api import names, reasons
from springtide_operator.kube import Kube
from springtide_operator.manifests.worker import GRACE_SECONDS

Object = dict[str, Any]
Say = Callable[[str], None]

POLL_SECONDS = 1.0
RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0)
CLEAN_UP_SECONDS = GRACE_SECONDS + 30.0  # a worker that is loading when it is told to go has its grace period
EVENTS_SHOWN = 20


class TestError(Exception):
    """The test failed; the text says of what."""

    __test__ = False


@dataclass(frozen=True)
class Verdict:
    """Result of one look at the job."""

    outcome: Literal["succeeded", "failed", "goes on"]
    line: str


def judge(job: Object) -> Verdict:
    """Pure: read the outcome from the conditions, and the line that people should see."""
    status = job.get("status") or {}
    for condition in status.get("conditions") or []:
        if condition.get("status") != "True":
            continue
        text = f"{condition['type']}: {condition.get('reason', '')}: {condition.get('message', '')}"
        if condition["type"] == reasons.SUCCEEDED:
            return Verdict("succeeded", text)
        if condition["type"] == reasons.FAILED:
            return Verdict("failed", text)
    if not status:
        return Verdict("goes on", "no status yet: the operator has not seen the job")
    return Verdict("goes on", f"{status.get('state', '')}: {status.get('message', '')}")


def read_job(text: str | None) -> Object:
    """The TrainingJob of SPRINGTIDE_TEST_JOB. Raises ValueError that says what is wrong with it."""
    if not text:
        raise ValueError(
            "SPRINGTIDE_TEST_JOB is not set: it must hold a TrainingJob as JSON (the chart sets it)"
        )
    try:
        job = json.loads(text)
    except ValueError as error:
        raise ValueError(f"SPRINGTIDE_TEST_JOB is not JSON: {error}") from error
    meta = job.get("metadata") if isinstance(job, dict) else None
    if (
        not isinstance(meta, dict)
        or job.get("kind") != names.KIND
        or not meta.get("name")
        or not meta.get("namespace")
    ):
        raise ValueError(f"SPRINGTIDE_TEST_JOB must be a {names.KIND} with a name and a namespace")
    return dict(job)


class JobTest:
    """One run. Times in seconds."""

    def __init__(self, kube: Kube, job: Object, timeout: float, say: Say = print) -> None:
        self._kube = kube
        self._job = job
        self._timeout = timeout
        self._say = say
        self._name: str = job["metadata"]["name"]
        self._namespace: str = job["metadata"]["namespace"]
        self._path = f"/apis/{names.API_VERSION}/namespaces/{self._namespace}/{names.PLURAL}"

    async def run(self) -> None:
        """Raise TestError or ApiError; whatever happens, the job is removed."""
        await self._remove("a job of an earlier test")
        try:
            await self._request("POST", self._path, self._job)
        except ApiError as error:
            if error.code == 404:
                raise TestError(
                    f"the API server knows no {names.KIND} ({error.message}): install the CRD, or name an"
                    f" existing namespace instead of {self._namespace!r}"
                ) from error
            raise
        self._say(f"created {self._namespace}/{self._name}")
        failure: TestError | ApiError | None = None
        try:
            await self._until_over()
        except (TestError, ApiError) as error:
            failure = error
            await self._print_events()
        finally:
            try:
                await self._remove("the job")
            except (TestError, ApiError) as error:
                # What failed first is the cause: what is left over does not hide it.
                if failure is None:
                    raise
                self._say(str(error))
        if failure is not None:
            raise failure

    async def _request(
        self, method: str, path: str, body: Object | None = None, query: dict[str, str] | None = None
    ) -> Object:
        """An API server that is away for a moment (a new leader, a rolling upgrade) fails no test."""
        for pause in RETRY_SECONDS:
            try:
                return await self._kube.request(method, path, body, query=query)
            except ApiError as error:
                if 0 < error.code < 500:
                    raise
            await asyncio.sleep(pause)
        return await self._kube.request(method, path, body, query=query)

    async def _until_over(self) -> None:
        deadline = time.monotonic() + self._timeout
        told = ""
        while True:
            verdict = judge(await self._request("GET", f"{self._path}/{self._name}"))
            if verdict.line != told:
                self._say(verdict.line)
                told = verdict.line
            if verdict.outcome == "succeeded":
                return
            if verdict.outcome == "failed":
                raise TestError(f"the job failed: {verdict.line}")
            if time.monotonic() > deadline:
                raise TestError(f"the job is not over after {self._timeout:.0f} s: {verdict.line}")
            await asyncio.sleep(POLL_SECONDS)

    async def _remove(self, what: str) -> None:
        """Delete the job where it exists; wait until it and its pods are gone."""
        try:
            await self._request("DELETE", f"{self._path}/{self._name}")
        except ApiError as error:
            if error.code != 404:
                raise
            return
        deadline = time.monotonic() + CLEAN_UP_SECONDS
        while left := [*await self._existing_job(), *await self._pods()]:
            if time.monotonic() > deadline:
                still = ", ".join(left)
                raise TestError(
                    f"{what} was deleted, but after {CLEAN_UP_SECONDS:.0f} s there is still {still}"
                )
            await asyncio.sleep(POLL_SECONDS)
        self._say(f"{what} is gone, and so are its pods")

    async def _existing_job(self) -> list[str]:
        try:
            await self._request("GET", f"{self._path}/{self._name}")
        except ApiError as error:
            if error.code != 404:
                raise
            return []
        return [f"trainingjob/{self._name}"]

    async def _pods(self) -> list[str]:
        query = {"labelSelector": f"{names.LABEL_JOB}={self._name}"}
        answer = await self._request("GET", f"/api/v1/namespaces/{self._namespace}/pods", query=query)
        return [f"pod/{item['metadata']['name']}" for item in answer.get("items") or []]

    async def _print_events(self) -> None:
        """Print the events of the job and its pods; where even those cannot be read, why."""
        try:
            answer = await self._request("GET", f"/api/v1/namespaces/{self._namespace}/events")
        except ApiError as error:
            self._say(f"events cannot be read: {error}")
            return
        ours = [
            e
            for e in answer.get("items") or []
            if str(e["involvedObject"].get("name", "")).startswith(self._name)
        ]
        ours.sort(
            key=lambda event: str(
                event.get("lastTimestamp") or event["metadata"].get("creationTimestamp") or ""
            )
        )
        for event in ours[-EVENTS_SHOWN:]:
            where = f"{event['involvedObject'].get('kind', '').lower()}/{event['involvedObject']['name']}"
            self._say(f"event {where} {event.get('reason', '')}: {event.get('message', '')}")


async def _guarded(work: Callable[[], Awaitable[None]]) -> None:
    """Run it so that SIGTERM and SIGINT cancel it, and its `finally` still cleans up."""
    task = asyncio.ensure_future(work())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    await task


async def _main(job: Object, timeout: float) -> int:
    async with Kube() as kube:
        try:
            await _guarded(JobTest(kube, job, timeout).run)
        except (TestError, ApiError) as error:
            print(f"failed: {error}", file=sys.stderr)
            return 1
        except asyncio.CancelledError:
            print("interrupted; the job was removed", file=sys.stderr)
            return 1
    print("passed")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Parse and run; the exit code."""
    parser = argparse.ArgumentParser(prog="springtide_operator.helm_test", description=__doc__)
    parser.add_argument("--timeout-seconds", type=float, default=300.0)
    options = parser.parse_args(arguments)
    try:
        job = read_job(os.environ.get("SPRINGTIDE_TEST_JOB"))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return asyncio.run(_main(job, options.timeout_seconds))


if __name__ == "__main__":
    sys.exit(main())
