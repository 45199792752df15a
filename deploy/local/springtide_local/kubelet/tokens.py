"""A pod's tokens: bound to the pod, kept while they are fresh, and replaced well before they end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from springtide_local.ports import Object

DEFAULT_SECONDS = 3600
_LEFT = 0.2  # of its life, when a token is replaced
_OLDEST = 24 * 3600.0  # seconds, after which it is replaced however long it lives


class Issued(NamedTuple):
    """A token and when it ends (seconds since 1970)."""

    token: str
    expires: float


class TokenIssuer(Protocol):
    """Asks the API server for a bearer token of a pod's service account."""

    def __call__(self, pod: Object, audience: str, seconds: int) -> Issued:
        """Return a token that is bound to the pod. Raise ApiError when its account is not there.

        Args:
            pod: The pod, as it is in the API.
            audience: For whom it is; empty: for the API server.
            seconds: How long it shall be good; it may be less.
        """
        ...


class _Held(NamedTuple):
    token: str
    renew_at: float


class PodTokens:
    """The tokens of one pod. Times are seconds since 1970."""

    def __init__(self, issue: TokenIssuer, clock: Callable[[], float] = time.time) -> None:
        self._issue = issue
        self._clock = clock
        self._held: dict[tuple[str, int], _Held] = {}

    def get(self, pod: Object, source: Object) -> str:
        """Return the token for a `serviceAccountToken` source: the one from before while it is fresh.

        Args:
            pod: the Pod.
            source: the `serviceAccountToken`: audience and seconds.

        Raises:
            ApiError: None is issued.
        """
        audience, seconds = str(source.get("audience") or ""), int(source.get("expirationSeconds") or 0)
        key = (audience, seconds or DEFAULT_SECONDS)
        held, now = self._held.get(key), self._clock()
        if held is None or now >= held.renew_at:
            issued = self._issue(pod, *key)
            life = issued.expires - now
            held = self._held[key] = _Held(issued.token, now + min(life * (1 - _LEFT), _OLDEST))
        return held.token

    @property
    def renew_at(self) -> float | None:
        """Return when the next one is due, or None while there are none."""
        return min((held.renew_at for held in self._held.values()), default=None)
