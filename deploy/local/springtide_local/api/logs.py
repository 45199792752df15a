"""The log subresource: options of `kubectl logs`, handed to whoever runs the containers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from springtide_local.api import errors
from springtide_local.api.objects import parse_timestamp
from springtide_local.api.requests import flag, number
from springtide_local.ports import Object


@dataclass(frozen=True, slots=True)
class LogOptions:
    """`tail_lines`, `limit_bytes`: None is all. `since` is in seconds since the epoch."""

    container: str
    follow: bool = False
    previous: bool = False
    timestamps: bool = False
    tail_lines: int | None = None
    since: float | None = None
    limit_bytes: int | None = None


# Called with the pod and the options; yields raw bytes, and with `follow` goes on until the container ends.
# It raises ApiError (400 for a container that has not started) before the first bytes.
LogProvider = Callable[[Object, LogOptions], AsyncIterator[bytes]]


def log_options(pod: Object, query: Mapping[str, str], now: float) -> LogOptions:
    """Read the options of a request for logs.

    Args:
        pod: the Pod.
        query: parameters of the URL.
        now: in unix seconds, for `sinceSeconds`.

    Raises:
        ApiError: 400: a container is not named or not there, or a time cannot be read; 422: a number is out
            of range.
    """
    containers = [
        container["name"]
        for part in ("initContainers", "containers", "ephemeralContainers")
        for container in pod["spec"].get(part) or ()
    ]
    name = query.get("container", "")
    pod_name = pod["metadata"]["name"]
    if not name:
        plain = [container["name"] for container in pod["spec"]["containers"]]
        if len(containers) > 1:
            listed = " ".join(plain)
            raise errors.bad_request(
                f"a container name must be specified for pod {pod_name}, choose one of: [{listed}]"
            )
        name = plain[0]
    if name not in containers:
        raise errors.bad_request(f"container {name} is not valid for pod {pod_name}")
    since: float | None = None
    seconds = number(query, "sinceSeconds")
    if seconds is not None:
        since = now - seconds
    if query.get("sinceTime"):
        try:
            since = parse_timestamp(query["sinceTime"])
        except ValueError:
            raise errors.bad_request(f"sinceTime {query['sinceTime']!r} is no RFC 3339 time") from None
    tail, limit = number(query, "tailLines"), number(query, "limitBytes")
    if tail is not None and tail < 0:
        found = [errors.field_invalid("tailLines", tail, "must be greater than or equal to 0")]
        raise errors.invalid("", "PodLogOptions", pod_name, found)
    return LogOptions(
        name, flag(query, "follow"), flag(query, "previous"), flag(query, "timestamps"), tail, since, limit
    )
