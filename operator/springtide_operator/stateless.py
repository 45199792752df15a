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
        """Return the same nothing for every object.

        Args:
            body: of the object.
            extra_fields: that handlers ask for; there are none.
        """
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Keep nothing.

        Args:
            body: of the object.
            patch: that would be written.
            essence: made by `build`.
        """


class NoProgress(kopf.ProgressStorage):
    """Event handlers run once: there is no progress to remember."""

    def fetch(self, *, key: Any, body: kopf.Body) -> Any:
        """Return None: there is no progress.

        Args:
            key: of a handler.
            body: of the object.
        """
        return None

    def store(self, *, key: Any, record: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        """Keep nothing.

        Args:
            key: of a handler.
            record: progress of a handler.
            body: of the object.
            patch: that would be written.
        """

    def purge(self, *, key: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        """Remove nothing, since nothing is kept.

        Args:
            key: of a handler.
            body: of the object.
            patch: that would be written.
        """

    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: str | None) -> None:
        """Leave no mark on an object.

        Args:
            body: of the object.
            patch: that would be written.
            value: of the mark.
        """

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence
