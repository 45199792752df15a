"""What a chunk is with one range more, before the range is pushed.

A worker that does not step together with others offers a chunk's gradient during backward and says how its
push will count it. The range is made on the chunk's second copy (`speculative_copy`), whose values the worker
gets while it still computes. Nothing else sees them: a body that is left leaves no trace, and the push makes
the range on the chunk as it is then. Where no other range has come in between, the second copy takes the
chunk's place instead: the same operations on the same numbers. All functions are called in the chunk's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from springtide_ps.params.applied import Book
from springtide_ps.params.chunk import Chunk, Recipe
from springtide_ps.server.shard import LockedShard

log = logging.getLogger("springtide.ps")


def make_early(
    locked: LockedShard, offer: int, of_range: int, recipe: Recipe, gradient: Callable[[Chunk], torch.Tensor]
) -> tuple[Book, torch.Tensor] | None:
    """(book, values) that the chunk would have with this range; the values are a copy. None: it cannot be
    said, or the range is in the chunk already.

    offer: its number on this server, above 0. gradient: flat, like the values; its memory stays as it is.
    Raise ChunkError for a recipe of another optimizer.
    """
    chunk, early = locked.chunk, locked.shard.speculative
    if not isinstance(chunk, Chunk):
        return None
    chunk.check(recipe)
    book = Book() if chunk.book is None else chunk.book.copy()
    before = book.applied
    if not book.enter(of_range, recipe.skip):
        return None
    early.offer = 0
    try:
        made = early.make(chunk, gradient(chunk), before, recipe)
    except RuntimeError as error:  # the push itself will say what is wrong
        log.warning("range %d cannot be made early: %r", of_range, error)
        return None
    early.offer = offer
    return book, made.values.clone()


def apply(locked: LockedShard, offer: int, before: int, recipe: Recipe, gradient: torch.Tensor) -> None:
    """Make a range, which the chunk's book has, on the chunk. before: how many were applied until then.

    offer: number of what was offered of it with its recipe; 0: nothing was. The gradient is used up. Raise as
    `Chunk.apply`.
    """
    chunk, early = locked.chunk, locked.shard.speculative
    if isinstance(chunk, Chunk) and offer and early.offer == offer and early.holds(before, recipe):
        now = early.swap(chunk)
        now.book, locked.shard.chunk = chunk.book, now
        return
    chunk.apply(gradient, recipe)
