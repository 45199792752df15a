"""Chunks whose update has failed, and what is said to those who ask for them."""

from __future__ import annotations

from typing import Final

from springtide_ps.server.step_protocol import RoundError

_TOLD: Final = 3
_TEXT_LIMIT: Final = 400


class StepFailedError(RoundError):
    """The optimizer's step on a chunk failed, and the chunk is held no more."""


class FailedShards:
    """By chunk. Half of an update may be in it, so it counts as held nowhere here until it is loaded anew."""

    def __init__(self) -> None:
        self._why: dict[str, StepFailedError] = {}

    def add(self, key: str, why: Exception) -> StepFailedError:
        """Return what is said of it from now on."""
        text = f"{type(why).__name__}: {why}"[:_TEXT_LIMIT]
        self._why[key] = StepFailedError(
            f"chunk {key!r} is lost, since the optimizer's step on it failed there: {text}; its log has more"
        )
        return self._why[key]

    def forget(self, key: str) -> None:
        """It is here again."""
        self._why.pop(key, None)

    def has(self, key: str) -> bool:
        """Whether the chunk was held here, and its update failed."""
        return key in self._why

    def of(self, key: str) -> RoundError:
        """What is said to who asks for a chunk that is not here."""
        return self._why.get(key) or RoundError(f"chunk {key!r} is not held here")

    @property
    def told(self) -> dict[str, str]:
        """Of a few of them, by chunk."""
        return {key: str(self._why[key]) for key in sorted(self._why)[:_TOLD]}
