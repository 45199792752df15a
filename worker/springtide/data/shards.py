"""Shards of samples: what the library asks of data that have no numbers and, maybe, no end."""

from __future__ import annotations

import inspect
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

MAX_STREAMS = 1024
DEFAULT_STREAMS = 64
"""Streams where the script does not say how many; fewer where there are fewer shards."""
UNKNOWN_COUNT = -1


@runtime_checkable
class ShardedDataset(Protocol):
    """Be data that `springtide.batches()` reads shard by shard.

    Attributes:
        shards: names of the shards: a sequence, or any iterable that begins anew each time it is iterated
            and gives the same ones then. It need not end.
    """

    shards: Iterable[Any]

    def read_shard(self, shard: Any, start: int) -> Iterable[Any]:
        """Return the samples of a shard from number `start` on: the same ones in the same order each time.

        Args:
            shard: one of `shards`.
            start: number of the first sample, from 0.
        """


class Shards:
    """Make a data set of shards and a function that reads one.

    `springtide.batches(springtide.data.Shards(sorted(paths), read), batch_size=256)` deals each sample once
    in a pass, at any number of workers, whoever dies. The function is called for a shard and yields its
    samples, always the same ones in the same order.
    """

    def __init__(self, shards: Iterable[Any], read: Callable[..., Iterable[Any]]) -> None:
        """Take names and the function.

        Args:
            shards: names of the shards, as in `ShardedDataset`.
            read: `read(shard)` yields the samples of a shard. With a second parameter, `read(shard, start)`
                yields those from number `start` on, which saves reading the ones before when a worker takes
                a shard over.

        Raises:
            TypeError: `shards` can be iterated once only, or `read` is no such function.
        """
        _check_iterable(shards)
        self.shards = shards
        self._read, self._seeks = read, _parameters(read) > 1

    def read_shard(self, shard: Any, start: int) -> Iterable[Any]:
        """Return the samples of a shard; see `ShardedDataset`.

        Args:
            shard: one of `shards`.
            start: number of the first sample, from 0.
        """
        if self._seeks:
            return self._read(shard, start)
        return skipped(self._read(shard), shard, start)

    def map(self, function: Callable[[Any], Any]) -> Shards:
        """Return the same shards with a function called on each sample, as it is read."""

        def read(shard: Any, start: int) -> Iterator[Any]:
            return map(function, self.read_shard(shard, start))

        return Shards(self.shards, read)


def skipped(samples: Iterable[Any], shard: Any, start: int) -> Iterator[Any]:
    """Return an iterator that stands behind the first samples of a shard.

    Args:
        samples: of the shard.
        shard: its name, for an error.
        start: how many are left out.

    Raises:
        ValueError: there are not so many, so the shard is not what it was.
    """
    iterator = iter(samples)
    left_out = sum(1 for _ in itertools.islice(iterator, start))
    if left_out < start:
        raise ValueError(
            f"dataset: shard {shard!r} has {left_out} samples now, and {start} of it were trained: a shard "
            "has to give the same samples in the same order each time it is read"
        )
    return iterator


class ShardList:
    """Give the shards of a source by number, and what all members must agree on of them.

    Of an iterable without a length, as much is kept as has been asked for.
    """

    def __init__(self, dataset: ShardedDataset) -> None:
        """Look at a data set.

        Args:
            dataset: has the shards.

        Raises:
            TypeError: its shards can be iterated once only.
            ValueError: it has none.
        """
        _check_iterable(dataset.shards)
        self.read = dataset.read_shard
        sized = dataset.shards if isinstance(dataset.shards, Sequence) else None
        self._iterator = None if sized is not None else iter(dataset.shards)
        self._found: Sequence[Any] | list[Any] = [] if sized is None else sized
        self.count = UNKNOWN_COUNT if sized is None else len(sized)
        """How many there are; UNKNOWN_COUNT: nobody knows."""
        if not self.has(0):
            raise ValueError("dataset: it has no shards; check the path or the pattern that they come from")
        self.digest = 0 if sized is None else _digest(sized)
        """A number that differs where shards have other names, or another order; folders do not count."""

    def has(self, number: int) -> bool:
        """Return whether there is a shard of this number."""
        if self._iterator is not None and number >= len(self._found):
            assert isinstance(self._found, list)
            self._found += itertools.islice(self._iterator, number + 1 - len(self._found))
        return number < len(self._found)

    def name(self, number: int) -> Any:
        """Return the name of a shard. Raise IndexError when there is none of this number."""
        if not self.has(number):
            raise IndexError(f"there is no shard {number}")
        return self._found[number]


def _check_iterable(shards: Any) -> None:
    if isinstance(shards, Iterator):
        raise TypeError(
            f"dataset: its shards are an iterator ({type(shards).__name__}), which can be read once: give a "
            "list, or an object whose __iter__ begins anew each time, so that workers that come later see "
            "the same shards"
        )
    if isinstance(shards, str | bytes) or not isinstance(shards, Iterable):
        raise TypeError(
            f"dataset: its shards must be a list or another iterable, got {type(shards).__name__}"
        )


def _parameters(read: Callable[..., Any]) -> int:
    """Return how many values a function takes by place. Raise TypeError when it takes none."""
    if not callable(read):
        raise TypeError(f"Shards(): read must be a function of a shard, got {type(read).__name__}")
    try:
        parameters = list(inspect.signature(read).parameters.values())
    except ValueError:  # of a function in C, as `iter` or `open`
        return 1
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # The first one takes the shard whether it has a default or not: that of `list` has one.
    required = [
        item
        for number, item in enumerate(item for item in parameters if item.kind in by_place)
        if number == 0 or item.default is item.empty or item.name == "start"
    ]
    if any(item.kind is item.VAR_POSITIONAL for item in parameters) and not required:
        return 1
    if not 1 <= len(required) <= 2:
        raise TypeError(
            "Shards(): read must be a function of a shard, or of a shard and the number of its first sample"
        )
    return len(required)


def _digest(shards: Sequence[Any]) -> int:
    """Return a number for names and order; 0 where the text of names may differ from process to process."""
    total = zlib.crc32(str(len(shards)).encode())
    for shard in shards:
        text = _text(shard)
        if text is None:
            return 0
        total = zlib.crc32(text.encode("utf-8", "surrogatepass"), total)
    return total


def _text(shard: Any) -> str | None:
    if isinstance(shard, int | float | bytes | type(None)):
        return repr(shard)
    if isinstance(shard, str) or hasattr(shard, "__fspath__"):
        return str(shard).rpartition("/")[2]  # the same file may lie below another folder
    if isinstance(shard, tuple | list):
        parts = [_text(part) for part in shard]
        return None if None in parts else repr(parts)
    return None
