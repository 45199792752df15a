"""Shards whose update has failed, and the errors for those who ask for them."""

from __future__ import annotations

from typing import Final

from springtide_ps.server.step_protocol import StepProtocolError

_MAX_REASONS: Final = 3
_TEXT_LIMIT: Final = 400


class StepFailedError(StepProtocolError):
    """The optimizer's step on a chunk failed, and the chunk is held no more."""


class FailedShards:
    """Remember by key why shards are held no more, until they are loaded anew.

    Half of an update may be in such a shard, so this server counts as one that does not hold it.
    """

    def __init__(self) -> None:
        self._why: dict[str, StepFailedError] = {}

    def add(self, key: str, why: Exception) -> StepFailedError:
        """Remember a failure.

        Args:
            key: the shard's.
            why: error of the step.

        Returns:
            The error for all who ask for the shard from now on.
        """
        text = f"{type(why).__name__}: {why}"[:_TEXT_LIMIT]
        self._why[key] = StepFailedError(
            f"chunk {key!r} is lost, since the optimizer's step on it failed there: {text}; its log has more"
        )
        return self._why[key]

    def forget(self, key: str) -> None:
        """Forget a failure, since the shard is here again."""
        self._why.pop(key, None)

    def has(self, key: str) -> bool:
        """Return whether the shard was held here and its update failed."""
        return key in self._why

    def error_for(self, key: str) -> StepProtocolError:
        """Return the error for a request about a shard that this server does not hold."""
        return self._why.get(key) or StepProtocolError(f"chunk {key!r} is not held here")

    @property
    def reasons(self) -> dict[str, str]:
        """Return the reasons by key, of a few shards."""
        return {key: str(self._why[key]) for key in sorted(self._why)[:_MAX_REASONS]}
