"""kopf without its own memory of objects.

kopf keeps what it last handled of an object, and how far its handlers got, in annotations; to find changes it
copies and cleans every object of every event. Handlers of plain events need none of this, and with thousands
of pods it costs more than all that the operator does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import kopf


class NoDifferences(kopf.DiffBaseStorage):
    """No object is ever seen to differ from what was handled."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Keep nothing."""


class NoProgress(kopf.ProgressStorage):
    """Event handlers run once: there is no progress to remember."""

    def fetch(self, *, key: Any, body: kopf.Body) -> Any:
        return None

    def store(self, *, key: Any, record: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        """Keep nothing."""

    def purge(self, *, key: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        """Remove nothing, since nothing is kept."""

    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: str | None) -> None:
        """Objects are never marked."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence
