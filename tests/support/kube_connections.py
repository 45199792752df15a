"""Ways to an API server in plain HTTP, for tests of what asks it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from springtide_kube.connection import Connection, at


def to(url: str, token: str | Callable[[], str] | None = None) -> Callable[[], Awaitable[Connection]]:
    """Return a function that reads the credentials for a server.

    Args:
        url: of the server.
        token: of the caller, or what reads it; None: nobody in particular.
    """

    async def read() -> Connection:
        return at(url, token() if callable(token) else token)

    return read
