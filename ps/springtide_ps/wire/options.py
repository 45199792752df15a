"""The options of parameter groups on a connection: sent once, and named by a number afterwards. PURE.

A step is made with the options of all parameter groups, and each push of a batch says so. A script may have a
group for each parameter, and a schedule that changes one option of all of them: so a set of options travels
by itself, before the first request that is made with it, and what the next set has in common with it stays
unsaid. A number counts on its connection only: the other end of another one learns the options from whoever
sends them there.

Threads and locks: one thread at a time describes steps on a connection (the client sees to it), and one
thread reads from it, so that `SentOptions` and `ReceivedOptions` have no lock. `SharedOptions` is for the
reading threads of all connections: `_lock` guards the sets that it knows.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from springtide_ps.params.chunk import GROUPS_LIMIT, SUBSTEPS_LIMIT, ChunkError, Groups, StepSpec
from springtide_ps.wire.keys import STEP_SPEC_KEY

OPTIONS_BYTES: Final = 32 * 1024 * 1024
"""Limit of the JSON of one set of options."""
KEPT_LIMIT: Final = SUBSTEPS_LIMIT + 8
"""Sets that a connection remembers: as many as the substeps of a step can have, and some more."""
_MOST_KNOWN: Final = 8
_SHARED: Final = 16


class SentOptions:
    """The sets of options that the other end of a connection knows; for one thread at a time."""

    def __init__(self) -> None:
        self._known: dict[int, Groups] = {}  # the one that was needed last is the last
        self._next = 1

    def describe(self, spec: StepSpec) -> tuple[dict[str, Any], list[tuple[dict[str, Any], bytes]]]:
        """Return a step in JSON's types, and what the other end has to be sent before it.

        Args:
            spec: The step.

        Returns:
            The step with a number in place of its groups' options, and (JSON, text) of each OPTIONS frame, in
            order.
        """
        frames: list[tuple[dict[str, Any], bytes]] = []
        dropped = self._forget([part.groups for part in spec.substeps])

        def number_of(groups: Groups) -> int:
            number = self._number_of(groups)
            if number is None:
                number = self._next
                self._next += 1
                about, text = self._difference(groups)
                drop = {"drop": dropped} if dropped and not frames else {}
                frames.append(({"n": number, **about, **drop}, text))
                self._known[number] = groups
            return number

        return spec.to_json(number_of), frames

    def _number_of(self, groups: Groups) -> int | None:
        for number, known in reversed(self._known.items()):
            if known is groups or known == groups:
                return number
        return None

    def _difference(self, groups: Groups) -> tuple[dict[str, Any], bytes]:
        """Return how a set is told, in JSON and in text: what differs from the newest one, if that is so."""
        number, base = next(reversed(self._known.items()), (0, None))
        if base is None or len(base) != len(groups):
            return {}, json.dumps([dict(group) for group in groups]).encode()
        changed: dict[int, dict[str, Any]] = {}
        for index, (group, old) in enumerate(zip(groups, base, strict=True)):
            if group is old or group == old:
                continue
            if not old.keys() <= group.keys():
                return {}, json.dumps([dict(group) for group in groups]).encode()
            changed[index] = {name: v for name, v in group.items() if name not in old or old[name] != v}
        return {"base": number}, json.dumps(changed).encode()

    def _forget(self, needed: Sequence[Groups]) -> list[int]:
        """Forget the sets that nothing has needed for longest, if another one has to be sent.

        Args:
            needed: The sets that are needed now, which stay where they are known.

        Returns:
            The numbers of those that are forgotten.
        """
        numbers = [self._number_of(groups) for groups in needed]
        for number in numbers:
            if number is not None:
                self._known[number] = self._known.pop(number)  # the last one to go
        kept = len({number for number in numbers if number is not None})
        if None not in numbers:
            return []
        dropped = list(self._known)[: max(0, len(self._known) - kept - _MOST_KNOWN)]
        for number in dropped:
            del self._known[number]
        return dropped


class SharedOptions:
    """Sets of options that several connections have: equal ones are one object, which is quick to compare."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[Groups] = deque(maxlen=_SHARED)

    def shared(self, groups: Groups) -> Groups:
        """Return an equal set that is known already, or this one. Any thread."""
        with self._lock:
            for known in self._recent:
                if known == groups:
                    return known
            self._recent.appendleft(groups)
        return groups


class ReceivedOptions:
    """The sets of options that have come over one connection; for the thread that reads it."""

    def __init__(self, shared: SharedOptions) -> None:
        self._shared = shared
        self._known: dict[int, Groups] = {}

    def take(self, meta: Mapping[str, Any], text: bytes) -> None:
        """Take in an OPTIONS frame.

        Args:
            meta: Its JSON.
            text: Its payload.

        Raises:
            ChunkError: It says nothing that can be understood.
        """
        try:
            number, drop = int(meta["n"]), meta.get("drop", [])
            for old in drop:
                self._known.pop(int(old), None)
            said = json.loads(text)
            groups = self._of_base(int(meta["base"]), said) if "base" in meta else _whole(said)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, ChunkError):
                raise
            raise ChunkError(f"options of parameter groups cannot be read: {error!r}") from None
        if len(self._known) >= KEPT_LIMIT or not 0 < len(groups) <= GROUPS_LIMIT:
            raise ChunkError(f"{len(groups)} parameter groups after {len(self._known)} sets of options")
        self._known[number] = self._shared.shared(groups)

    def _of_base(self, number: int, changed: Mapping[str, Any]) -> Groups:
        base = self._known.get(number)
        if base is None:
            raise ChunkError(f"options that differ from set {number}, which was not sent here")
        groups = list(base)
        for index, options in changed.items():
            if not 0 <= int(index) < len(groups):
                raise ChunkError(f"options of group {index}, and there are {len(groups)}")
            groups[int(index)] = {**groups[int(index)], **options}
        return tuple(groups)

    def read(self, value: Any) -> StepSpec:
        """Return the step that `SentOptions.describe` was asked for, or whose options stand in it.

        Raises:
            ChunkError: It is none, or its options were not sent here.
        """
        return StepSpec.from_json(value, self._groups)

    def _groups(self, number: Any) -> Groups:
        groups = self._known.get(number) if type(number) is int else None
        if groups is None:
            raise ChunkError(f"options {str(number)[:32]} of parameter groups were not sent here")
        return groups


def _whole(said: Any) -> Groups:
    if not isinstance(said, list):
        raise ChunkError("options are a list of those of each parameter group")
    return tuple(dict(group) for group in said)


def spec_in(meta: Mapping[str, Any]) -> StepSpec:
    """Return the step that a request names.

    Raises:
        ChunkError: It names none.
    """
    spec = meta.get(STEP_SPEC_KEY)
    return spec if isinstance(spec, StepSpec) else StepSpec.from_json(spec)
