"""`springtide top`: all jobs at a glance, again and again, without Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live

from springtide_cli import topview
from springtide_cli.apply import JOBS
from springtide_cli.errors import Refused
from springtide_cli.kube import KubePort
from springtide_kube.errors import ApiRefusal, Unreachable, explain

Object = dict[str, Any]

METRICS_SECONDS = 2.0
COORDINATORS = "springtide.dev/role=coordinator"
PORT = 9401


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the cluster."""

    rows: list[topview.Row]
    events: list[str]


class Top:
    """namespace: None for all. now: for the age of events."""

    def __init__(
        self,
        kube: KubePort,
        namespace: str | None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._kube = kube
        self._place = f"/namespaces/{namespace}" if namespace else ""
        self._now = now

    async def look(self) -> Look:
        """Raise Refused where jobs may not be listed, Unreachable where nobody answers."""
        try:
            jobs = (await self._kube.request("GET", f"{JOBS}{self._place}/trainingjobs"))["items"]
        except ApiRefusal as error:
            hint = "" if self._place else " (name a namespace with -n)" if error.code == 403 else ""
            raise Refused(f"jobs cannot be listed: {error.message}{hint}") from error
        pods, events = await asyncio.gather(self._pods(), self._events())
        found = await asyncio.gather(*(self._numbers(pod) for pod in pods.values()))
        return Look(
            topview.rows(jobs, dict(zip(pods, found, strict=True)), self._now()),
            topview.event_lines(events, self._now()),
        )

    async def _pods(self) -> dict[str, Object]:
        """{uid of the job: its running coordinator}; none where pods may not be listed."""
        try:
            answer = await self._kube.request(
                "GET", f"/api/v1{self._place}/pods", query={"labelSelector": COORDINATORS}
            )
        except ApiRefusal:
            return {}
        return {
            owner["uid"]: pod
            for pod in answer["items"]
            for owner in pod["metadata"].get("ownerReferences") or []
            if (pod.get("status") or {}).get("phase") == "Running"
            and "deletionTimestamp" not in pod["metadata"]
        }

    async def _events(self) -> list[Object]:
        try:
            query = {"fieldSelector": "involvedObject.kind=TrainingJob"}
            events: list[Object] = (
                await self._kube.request("GET", f"/api/v1{self._place}/events", query=query)
            )["items"]
        except ApiRefusal:
            return []
        return events

    async def _numbers(self, pod: Object) -> topview.Numbers | str:
        """Read the coordinator's /metrics, through the API server or directly on this machine; return why not
        otherwise.
        """
        address = str(pod["status"].get("podIP") or "")
        try:
            async with asyncio.timeout(METRICS_SECONDS):
                text = await (
                    _direct(address) if address.startswith("127.") else self._through_api(pod["metadata"])
                )
            return topview.numbers(parse(text))
        except TimeoutError:
            return f"its coordinator does not answer within {METRICS_SECONDS:.0f} s"
        except ApiRefusal as error:
            return error.message
        except Unreachable as error:
            return str(error)
        except (aiohttp.ClientError, OSError) as error:
            return f"its coordinator does not answer: {explain(error)}"
        except ValueError as error:
            return f"its coordinator's metrics cannot be read: {error}"

    async def _through_api(self, meta: Mapping[str, Any]) -> str:
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}:{PORT}/proxy/metrics"
        return "\n".join([line async for line in self._kube.lines(path, {})]) + "\n"


def parse(text: str) -> dict[str, float]:
    """{name: value} of series without labels of their own. Raise ValueError."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if set(sample.labels) <= {"training_job", "job_namespace"}
    }


async def _direct(address: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}:{PORT}/metrics") as answer:
        answer.raise_for_status()
        return await answer.text()


async def show(
    kube: KubePort, namespace: str | None, console: Console, *, seconds: float, once: bool, live: bool
) -> None:
    """Look at all jobs and draw them, again and again.

    Args:
        kube: the cluster.
        namespace: whose jobs are shown; None: of all.
        console: prints.
        seconds: between two looks.
        once: look once and end.
        live: draw over the last picture; False: plain lines.

    Raises:
        Refused: the first look fails.
    """
    top = Top(kube, namespace)
    try:
        look = await top.look()
    except Unreachable as error:
        raise Refused(str(error)) from error
    if once or not live:
        while True:
            for line in topview.plain(look.rows, look.events):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            if once:
                return
            console.print()
            await asyncio.sleep(seconds)
            look = await _again(top, look)
    with Live(
        topview.screen(look.rows, look.events), console=console, screen=True, auto_refresh=False
    ) as display:
        while True:
            await asyncio.sleep(seconds)
            look = await _again(top, look)
            display.update(topview.screen(look.rows, look.events), refresh=True)


async def _again(top: Top, before: Look) -> Look:
    """The next look; while the API server is away, the last one with a line that says so."""
    try:
        return await top.look()
    except Unreachable as error:
        return Look(before.rows, [*before.events[-topview.EVENTS_SHOWN + 1 :], f"no news: {error}"])
