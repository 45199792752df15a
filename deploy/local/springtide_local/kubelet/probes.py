"""Startup, readiness and liveness probes: httpGet, tcpSocket, exec and grpc, with the thresholds of the
pod's specification.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp

from springtide_local.kubelet.runtime import ExecResult

Object = dict[str, Any]


class Verdict(NamedTuple):
    """Whether one probe succeeded, and what it saw."""

    ok: bool
    output: str


@dataclass
class Thresholds:
    """Counts verdicts in a row. `add` returns True when the probe has just come to succeed, False at each
    full count of failures, else None.
    """

    success: int
    failure: int
    state: bool
    successes: int = 0
    failures: int = 0

    def add(self, ok: bool) -> bool | None:
        self.successes = self.successes + 1 if ok else 0
        self.failures = 0 if ok else self.failures + 1
        if ok and not self.state and self.successes >= self.success:
            self.state = True
            return True
        if not ok and self.failures >= self.failure:
            self.state = False
            self.failures = 0
            return False
        return None


async def keep_probing(
    probe: Object,
    state: bool,
    check: Callable[[Object, float], Awaitable[Verdict]],
    report: Callable[[bool | None, Verdict], None],
    until_success: bool = False,
) -> None:
    """Probe until cancelled, or until the probe succeeds where that is all it is for.

    Args:
        probe: of the container's spec.
        state: that the thresholds begin with.
        check: carries one probe out, within so many seconds.
        report: gets what `Thresholds.add` said, and the verdict.
        until_success: end when the probe has come to succeed, as a startup probe does.
    """
    timeout = float(probe.get("timeoutSeconds") or 1)
    counts = Thresholds(
        int(probe.get("successThreshold") or 1), int(probe.get("failureThreshold") or 3), state
    )
    await asyncio.sleep(float(probe.get("initialDelaySeconds") or 0))
    while True:
        verdict = await check(probe, timeout)
        turned = counts.add(verdict.ok)
        report(turned, verdict)
        if turned and until_success:
            return
        await asyncio.sleep(float(probe.get("periodSeconds") or 10))


class Prober:
    """Carries out single probes against one container."""

    def __init__(
        self,
        address: str,
        ports: dict[str, int],
        execute: Callable[[list[str], float], Awaitable[ExecResult]],
    ) -> None:
        self._address = address
        self._ports = ports
        self._execute = execute

    async def check(self, probe: Object, timeout: float) -> Verdict:
        """Carry one probe out; every failure is a verdict, never an exception.

        Args:
            probe: of the container's spec.
            timeout: in seconds.
        """
        try:
            if action := probe.get("httpGet"):
                async with asyncio.timeout(timeout):
                    return await self._http(action)
            if action := probe.get("tcpSocket"):
                async with asyncio.timeout(timeout):
                    return await self._tcp(action)
            if action := probe.get("grpc"):
                async with asyncio.timeout(timeout + 0.5):
                    return await self._grpc(action, timeout)
            if action := probe.get("exec"):
                result = await self._execute(list(action["command"]), timeout)
                if result.code is None:
                    return Verdict(False, f"command {action['command']} timed out after {timeout:g}s")
                return Verdict(result.code == 0, result.output)
        except TimeoutError:
            return Verdict(False, f"context deadline exceeded: no answer within {timeout:g}s")
        except (OSError, aiohttp.ClientError, ValueError) as error:
            return Verdict(False, str(error) or type(error).__name__)
        return Verdict(False, "the probe names no action: give httpGet, tcpSocket, exec or grpc")

    def _port(self, port: int | str) -> int:
        if isinstance(port, str) and not port.isdigit():
            if port not in self._ports:
                raise ValueError(f"couldn't find port {port!r} among the container's ports")
            return self._ports[port]
        return int(port)

    async def _http(self, action: Object) -> Verdict:
        scheme = str(action.get("scheme") or "HTTP").lower()
        host = action.get("host") or self._address
        url = f"{scheme}://{host}:{self._port(action['port'])}/{str(action.get('path') or '/').lstrip('/')}"
        headers = {header["name"]: header["value"] for header in action.get("httpHeaders") or []}
        verify = scheme != "https"
        async with (
            aiohttp.ClientSession() as session,
            session.get(url, headers={"User-Agent": "kube-probe/1.32", **headers}, ssl=verify) as response,
        ):
            body = (await response.content.read(10 * 1024)).decode(errors="replace")
            if 200 <= response.status < 400:
                return Verdict(True, body)
            return Verdict(False, f"HTTP probe failed with statuscode: {response.status}")

    async def _tcp(self, action: Object) -> Verdict:
        host, port = action.get("host") or self._address, self._port(action["port"])
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
        await writer.wait_closed()
        return Verdict(True, "")

    async def _grpc(self, action: Object, timeout: float) -> Verdict:
        """`grpc.health.v1.Health/Check`; its two messages have one field each, so they are written and read
        by hand.
        """
        import grpc

        name = str(action.get("service") or "").encode()
        request = b"\x0a" + bytes([len(name)]) + name if name else b""
        async with grpc.aio.insecure_channel(f"{self._address}:{self._port(action['port'])}") as channel:
            call: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
            try:
                answer = await call(request, timeout=timeout)
            except grpc.aio.AioRpcError as error:
                return Verdict(False, f"error: health rpc failed: {error.code().name}: {error.details()}")
        if answer == b"\x08\x01":
            return Verdict(True, "")
        return Verdict(
            False, f'service unhealthy (responded with "{"UNKNOWN" if not answer else "NOT_SERVING"}")'
        )
