"""kopf's lists, made anew when the operator asks for them.

kopf lists a kind of objects, then watches it from there, and lists again when the server says that it does
not know the version any more (410 Gone). So an operator that must see everything as it is now has kopf told
just that, and waits until a list has come that was asked for later. Nothing is listed beside kopf.

Tasks: everything runs in the operator's event loop, without locks. kopf's session (`guarded_http`) tells of
requests as they begin, come and fail, and the operator's task waits in `anew`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from springtide_kube.errors import ApiError
from springtide_operator.records import plural_of

SILENT_SECONDS = 30.0
"""Longest silence of kopf about a kind that it is to list, pages of a long list not counted."""


class Lists(Protocol):
    """Has everything of a kind listed anew."""

    async def anew(self, plural: str) -> None:
        """Return when a list has been taken in that was asked for after this call.

        Args:
            plural: what objects of that kind are called in URLs.

        Raises:
            ApiError: the server refuses the list, or none comes (code 0).
        """
        ...


@dataclass
class Kind:
    """Lists and watches of one kind, as far as they are known.

    Attributes:
        asked: how often `anew` was called.
        begun: by path of a list: the value of `asked` when it was last sent for.
        whole: by namespace ("": all of them): that value of the last list that came as a whole.
        watches: open ones, by path: ends it so that kopf lists anew.
        refusal: why the last list or watch was refused; None after one that was not.
        moved: is set at each of these, and replaced.
    """

    asked: int = 0
    begun: dict[str, int] = field(default_factory=dict)
    whole: dict[str, int] = field(default_factory=dict)
    watches: dict[str, Callable[[], None]] = field(default_factory=dict)
    refusal: ApiError | None = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def move(self) -> None:
        """Wake those that wait for anything."""
        self.moved.set()
        self.moved = asyncio.Event()


class KopfLists:
    """`Lists` of kopf's; the session's responses call all but `anew`."""

    def __init__(self, namespaces: tuple[str, ...] = ()) -> None:
        """
        Args:
            namespaces: those that kopf lists in, one by one; empty: all at once.
        """
        self._namespaces = namespaces or ("",)
        self._kinds: dict[str, Kind] = {}

    def _kind(self, plural: str) -> Kind:
        return self._kinds.setdefault(plural, Kind())

    async def anew(self, plural: str) -> None:
        """Have kopf list a kind, in all namespaces of this operator, and return when that has been taken in.

        Args:
            plural: what objects of that kind are called in URLs.

        Raises:
            ApiError: the server refuses the list, or kopf is silent for too long (code 0).
        """
        kind = self._kind(plural)
        kind.asked += 1
        wanted = kind.asked
        for end in list(kind.watches.values()):
            end()
        # kopf may have given up a kind that it was refused: then nothing more will come.
        if kind.refusal is not None and not kind.watches and not kind.begun:
            raise kind.refusal
        while missing := [name for name in self._namespaces if kind.whole.get(name, -1) < wanted]:
            moved = kind.moved
            try:
                async with asyncio.timeout(SILENT_SECONDS):
                    await moved.wait()
            except TimeoutError:
                where = f" in {', '.join(missing)}" if missing != [""] else ""
                raise ApiError(
                    0,
                    "NoList",
                    f"{plural}{where} have not been listed for {SILENT_SECONDS:.0f} s: is the API server in"
                    " reach, and are the CRDs of Springtide installed?",
                ) from None
            if kind.refusal is not None:
                raise kind.refusal

    # ---- what kopf does

    def began(self, path: str, is_first: bool) -> None:
        """Learn that a page of a list was sent for.

        Args:
            path: of the list's URL.
            is_first: a list begins with it.
        """
        kind = self._kind(plural_of(path))
        if is_first:
            kind.begun[path] = kind.asked
        kind.move()

    def refused(self, path: str, error: ApiError) -> None:
        """Learn that the server refused a list or a watch.

        Args:
            path: of its URL.
            error: what it said.
        """
        kind = self._kind(plural_of(path))
        kind.begun.pop(path, None)
        kind.refusal = error
        kind.move()

    def listed(self, path: str, namespace: str) -> None:
        """Learn that a whole list was taken in.

        Args:
            path: of its URL.
            namespace: which was listed; "": all of them.
        """
        kind = self._kind(plural_of(path))
        kind.refusal = None
        kind.whole[namespace] = kind.begun.pop(path, -1)
        kind.move()

    def opened(self, path: str, namespace: str, end: Callable[[], None]) -> None:
        """Learn that a watch began; one that goes on from a list that is too old ends at once.

        Args:
            path: of its URL.
            namespace: which is watched; "": all of them.
            end: ends it, so that kopf lists anew.
        """
        kind = self._kind(plural_of(path))
        kind.refusal = None
        kind.watches[path] = end
        if kind.whole.get(namespace, -1) < kind.asked:
            end()

    def closed(self, path: str, end: Callable[[], None]) -> None:
        """Learn that a watch has ended.

        Args:
            path: of its URL.
            end: as it was given to `opened`.
        """
        watches = self._kind(plural_of(path)).watches
        if watches.get(path) is end:
            del watches[path]
