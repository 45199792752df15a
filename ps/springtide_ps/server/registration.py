"""How the job knows of a parameter server: the stream that it keeps to the coordinator.

Only with SPRINGTIDE_COORDINATOR in the environment; without it a server is told to its clients by hand.
"""

from __future__ import annotations

import logging
import math
import signal
import time
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from springtide_protocol.coordinator_pb2 import Server
from springtide_protocol.heartbeat import LIMIT as HEARTBEAT_LIMIT
from springtide_protocol.serve_client import ServeClient
from springtide_protocol.tls import read_authority

log = logging.getLogger("springtide.ps")

ALONE_SECONDS = 6.0
"""A server that is to end does not wait longer for a coordinator that is not there.

A drain may take both: then the next coordinator is there after a few seconds, and has what the server holds
saved or handed over. In a job that is deleted nobody comes.
"""


@dataclass(frozen=True)
class Settings:
    """coordinator: `host:port`. leave_seconds: how long it serves on at most once it is told to end.

    keepalive: seconds until a coordinator that gives no sign of life is left, at most. authority: the
    certificate, in PEM, that the coordinator must have; empty: no TLS.
    """

    coordinator: str
    token: str
    server: Server
    leave_seconds: float
    keepalive: float = HEARTBEAT_LIMIT
    authority: str = ""


def read(environment: Mapping[str, str], port: int) -> Settings | None:
    """Return how the pod names this process.

    Args:
        environment: its variables.
        port: on which it serves.

    Returns:
        None: it is outside of a job.

    Raises:
        ValueError: a variable cannot be; it says which, and what it must hold.
    """
    coordinator = environment.get("SPRINGTIDE_COORDINATOR", "")
    if not coordinator:
        return None

    def number(name: str, default: str) -> int:
        text = environment.get(name) or default
        if not text.isdigit():
            raise ValueError(f"environment variable {name}: {text!r} is no whole number")
        return int(text)

    def seconds(name: str, default: float) -> float:
        text = environment.get(name) or str(default)
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < math.inf:
            raise ValueError(f"environment variable {name}: {text!r} is no positive number of seconds")
        return value

    ip = environment.get("SPRINGTIDE_POD_IP") or environment.get("SPRINGTIDE_BIND", "")
    if not ip:
        raise ValueError("environment variable SPRINGTIDE_POD_IP: not set; workers reach the server there")
    host = f"[{ip}]" if ":" in ip else ip
    server = Server(
        id=uuid.uuid4().hex,
        pod_uid=environment.get("SPRINGTIDE_POD_UID", ""),
        pod_name=environment.get("SPRINGTIDE_POD_NAME", ""),
        slot=number("SPRINGTIDE_SLOT", ""),
        attempt=number("SPRINGTIDE_ATTEMPT", "0"),
        address=f"{host}:{port}",
    )
    leave, keepalive = (
        seconds("SPRINGTIDE_PS_LEAVE_SECONDS", 20.0),
        seconds("SPRINGTIDE_KEEPALIVE_SECONDS", HEARTBEAT_LIMIT),
    )
    token, authority = environment.get("SPRINGTIDE_TOKEN", ""), read_authority(environment)
    return Settings(coordinator, token, server, leave, keepalive, authority)


class Registration:
    """The server is known to the coordinator from here on; `close` ends that."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._end: tuple[str, bool] | None = None
        self._client = ServeClient(
            settings.coordinator,
            settings.token,
            settings.server,
            self._over,
            keepalive=settings.keepalive,
            authority=settings.authority,
        )
        self._client.start()

    def _over(self, reason: str, well: bool) -> None:
        self._end = (reason, well)

    def wait(self, signals: Collection[signal.Signals]) -> tuple[str, bool]:
        """Wait until the process is to end: why, and whether that is as it should be.

        `signals` must be blocked. After one of them the server is needed until the coordinator lets it go, or
        until nobody can say so any more; a second one ends it at once.
        """
        told = alone = 0.0
        while self._end is None:
            came = signal.sigtimedwait(signals, 0.1)
            now = time.monotonic()
            # A process that was stopped and goes on can be told of signal 0.
            if came is not None and came.si_signo in signals:
                name = signal.Signals(came.si_signo).name
                if told:
                    return f"{name} for the second time", True
                told = alone = now
                self._client.leave(name)
                log.info("%s: it serves on until the coordinator lets it go", name)
            if not told:
                continue
            if self._client.connected:
                alone = now
            if now - alone >= ALONE_SECONDS:
                return f"the coordinator is not there: {self._client.last_error}", True
            if now - told >= self._settings.leave_seconds:
                return f"it was not let go within {self._settings.leave_seconds:g} s", True
        return self._end

    def close(self) -> None:
        self._client.close()
