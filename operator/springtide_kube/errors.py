"""Errors of requests to the Kubernetes API."""

from __future__ import annotations

import os
import ssl

import aiohttp

from springtide_kube import wire_json

MAX_TEXT = 500  # characters of an answer that is no Status
MAX_STATUS_BYTES = 64 * 1024


class CredentialsError(Exception):
    """No credentials can be read: the text says what was looked for, and where."""


class ApiError(Exception):
    """The base of the two below: `code` is the HTTP status, 0 where no answer came; `reason` its CamelCase
    word; `causes` the words of its details.
    """

    def __init__(self, code: int, reason: str, message: str, causes: tuple[str, ...] = ()) -> None:
        super().__init__(f"{message} ({code} {reason})" if code else message)
        self.causes = causes
        self.code = code
        self.reason = reason
        self.message = message


class ApiRefusal(ApiError):
    """The API server answered, and said no."""


class Unreachable(ApiError):
    """No answer came: the message says from where and why."""

    def __init__(self, message: str, reason: str = "Unreachable") -> None:
        super().__init__(0, reason, message)


def refusal(code: int, reason: str, body: bytes) -> ApiRefusal:
    """Return the error of an answer, read from its body: a Status where an API server made it.

    Args:
        code: HTTP status of the answer.
        reason: the words beside it, for a body that has none.
        body: JSON or anything else.
    """
    text = body[:MAX_STATUS_BYTES].decode(errors="replace").strip()[:MAX_TEXT]
    try:
        status = wire_json.loads(body)
        details = status.get("details") or {}
        causes = tuple(str(cause.get("reason") or "") for cause in details.get("causes") or [])
        message = str(status.get("message") or text or f"HTTP {code}")
        return ApiRefusal(code, str(status.get("reason") or reason), message, causes)
    except (ValueError, AttributeError):
        return ApiRefusal(code, reason, text or reason or f"HTTP {code}")


def explain(error: BaseException) -> str:
    """Return a network error in one clause."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is not accepted ({error.certificate_error})"
    if isinstance(error, ssl.SSLError | aiohttp.ClientSSLError):
        return f"TLS failed ({error})"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno  # asyncio's own texts only repeat the address
        return os.strerror(number) if number and number > 0 else str(error.os_error) or "no connection"
    return str(error) or type(error).__name__
