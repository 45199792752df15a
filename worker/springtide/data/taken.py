"""Tell what the committed steps of a pass have taken from shards, in few words. PURE.

A pass takes its shards in an order; a shard's place in it is told, from 0. Places do not depend on how many
shards there are, so a source that never ends has them, too; without shuffling a place is the shard's number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from springtide.data.cursor import Cursor
from springtide.data.streams import StreamPosition

MAX_TEXT = 800
"""Characters of what is told of shards; the rest is only counted."""
_REST = 40
"""Characters for the number of what is left out."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Say what lies before the positions of the streams of the running pass.

    Attributes:
        step: after which this holds.
        samples: of the running pass; they were counted as they were dealt.
        shards: places of the shards that were taken whole, as `0-41,43`.
        begun: by the places of other shards, how many samples were taken from their begin on, as
            `42:512,44:14`. Where samples are mixed some of them may be of the stream's next shard.
    """

    step: int
    samples: int
    shards: str
    begun: str

    def to_json(self) -> dict[str, int | str]:
        """Return it under the names that the job's status uses."""
        return {"step": self.step, "samples": self.samples, "shards": self.shards, "begun": self.begun}


def taken(cursor: Cursor) -> Taken | None:
    """Return what the committed steps have taken of the running pass; None outside of a pass over shards.

    Args:
        cursor: committed, where the next step starts.
    """
    if cursor.streams is None:
        return None
    begun = [
        f"{_place(cursor.streams, stream)}:{position.offset + position.taken}"
        for stream, position in enumerate(cursor.streams)
        if position.offset + position.taken
    ]
    return Taken(cursor.step, cursor.position, _whole(cursor.streams), _bounded(begun))


def _place(positions: Sequence[StreamPosition], stream: int) -> int:
    """Return the place in the pass's order of the shard in which a stream stands."""
    return stream + positions[stream].shard * len(positions)


def _whole(positions: Sequence[StreamPosition]) -> str:
    """Return the places of the shards that were taken whole, as intervals.

    All places before the row in which the last stream stands are among them. Behind it there is a gap in each
    row, so that no more rows are looked at than there is room to tell of, however long the pass is.
    """
    count = len(positions)
    rows = [position.shard for position in positions]
    first = min(rows)
    beyond = (
        stream + row * count
        for row in range(first, max(rows))
        for stream, shard in enumerate(rows)
        if row < shard
    )
    shown, told, room = list[str](), 0, MAX_TEXT - _REST
    for start, stop in _joined(first * count, beyond):
        part = str(start) if start == stop - 1 else f"{start}-{stop - 1}"
        room -= len(part) + 1
        if room < 0:
            return f"{','.join(shown)} and {sum(rows) - told} more"
        shown.append(part)
        told += stop - start
    return ",".join(shown)


def _joined(common: int, beyond: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield intervals (start, stop) of the numbers 0..common-1 and of others behind them, in order."""
    start, stop = 0, common
    for place in beyond:
        if place != stop:
            if start != stop:
                yield start, stop
            start = place
        stop = place + 1
    if start != stop:
        yield start, stop


def _bounded(parts: Sequence[str]) -> str:
    """Return the parts with commas between them, and how many are left out where they are too long."""
    text = ",".join(parts)
    if len(text) <= MAX_TEXT:
        return text
    shown = text[: MAX_TEXT - _REST].rpartition(",")[0]
    return f"{shown} and {len(parts) - shown.count(',') - 1} more"
