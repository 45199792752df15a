"""Errors of the client. Each text is one sentence or two that a person can act on.

ClientError: base.
    SourceError: the function, script or arguments cannot be sent; nothing was asked of the cluster.
    ClusterRefused: the API server said no, or there is none.
        JobNotFound: there is no such job.
    JobFailed: the job ended without success, or went.
    JobTimeout: the job did not get there in time.
"""

from __future__ import annotations


class ClientError(Exception):
    """Base of all errors of the client."""


class SourceError(ClientError, ValueError):
    """The function, script, folder or arguments cannot be sent as they are; nothing was sent."""


class ClusterRefused(ClientError):
    """The API server refused, or there is none: `code` is the HTTP status (0 without an answer), `reason`
    its word.
    """

    def __init__(self, message: str, code: int = 0, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


class JobNotFound(ClusterRefused):
    """The namespace has no such job (any more)."""


class JobFailed(ClientError):
    """The job failed or was deleted: `reason` and `message` are its condition's, `log` the last lines of the
    pod that failed.
    """

    def __init__(self, name: str, reason: str, message: str, pod: str = "", log: str = "") -> None:
        where = f"\nThe end of the log of {pod}:\n{log}" if log else ""
        super().__init__(f"job {name} failed ({reason}): {message}{where}")
        self.reason = reason
        self.message = message
        self.pod = pod
        self.log = log


class JobTimeout(ClientError, TimeoutError):
    """A wait ended before the job was there; the job goes on."""
