"""Versions of lists that must grow: one that is lower than what was known before shows that the cluster's
store was restored from a backup.

A list asks for what is there now, so its version is at least that of all that was heard before it was sent
for. After a restore it is lower. Known objects then seem newer than the truth, and objects that were deleted
since the backup are there again.

Tasks: used in the operator's event loop alone, without locks.
"""

from __future__ import annotations

from collections import Counter


class ListVersions:
    """The highest version known of each kind, and what it was when each list began.

    Kinds are told apart: each may have a store of its own.
    """

    def __init__(self) -> None:
        self._newest: Counter[str] = Counter()  # by plural
        self._floors: dict[tuple[str, str], int] = {}  # by plural and namespace

    def note(self, plural: str, version: str | None) -> None:
        """Learn of an object.

        Args:
            plural: what objects of that kind are called in URLs.
            version: its resourceVersion.
        """
        self._newest[plural] = max(self._newest[plural], _number(version))

    def begins(self, plural: str, namespace: str) -> None:
        """Learn that a list is sent for.

        Args:
            plural: what objects of that kind are called in URLs.
            namespace: which is listed; "": all of them.
        """
        self._floors[plural, namespace] = self._newest[plural]

    def went_back(self, plural: str, namespace: str, version: str) -> bool:
        """Take in the version of a list that is whole; return whether it is lower than what was known when
        the list began. Then all versions of the kind are forgotten.

        Args:
            plural: what objects of that kind are called in URLs.
            namespace: which was listed; "": all of them.
            version: of the list.
        """
        if _number(version) >= self._floors.pop((plural, namespace), 0):
            self.note(plural, version)
            return False
        del self._newest[plural]
        for key in [key for key in self._floors if key[0] == plural]:
            del self._floors[key]
        return True


def _number(version: str | None) -> int:
    return int(version) if version is not None and version.isdigit() else 0
