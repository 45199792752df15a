"""How large a generation may be, by what its members can carry. PURE.

Each member of a generation has connections to all others, and so descriptors, of which its container allows
only so many. A generation that is too large for one of its members fails there each time that it is formed.
So none is made: members say what the largest is that they have room for, and the largest one is made that all
of its members have room for. It may leave out processes with low limits for the sake of more others.
"""

from __future__ import annotations

from collections.abc import Sequence

from springtide_coordinator.membership.members import Record

SHOWN = 3


def largest(pool: Sequence[Record]) -> int:
    """Return how many processes the largest generation has that all of its members have room for.

    Args:
        pool: records of all that may take part.
    """
    if not any(record.largest_group for record in pool):
        return len(pool)
    limits = sorted((record.largest_group or len(pool) for record in pool), reverse=True)
    return sum(limit > index for index, limit in enumerate(limits))


def choose_members(
    pool: Sequence[Record], holders: Sequence[Record] = (), most: int = 0
) -> tuple[Record, ...]:
    """Return the largest part of a pool in which each member has room for all others.

    Args:
        pool: records of all that may take part, those to be preferred first.
        holders: of the pool, those of which one must take part, since it has what the others lack; empty:
            nobody must.
        most: processes that it may have; 0: any number.

    Returns:
        Records in the pool's order; empty for an empty pool.
    """
    size = min(largest(pool), most or len(pool))
    if holders:
        size = min(size, max(record.largest_group or len(pool) for record in holders))
    able = [record for record in pool if not record.largest_group or record.largest_group >= size]
    chosen = able[:size]
    needed = {record.info.id for record in holders}
    if needed and not any(record.info.id in needed for record in chosen):
        chosen[-1] = next(record for record in able if record.info.id in needed)
    return tuple(chosen)


def choose_parts(
    staying: Sequence[Record], leaving: Sequence[Record], holders: Sequence[Record], most: int
) -> list[Record]:
    """Return who takes part in a generation: those that stay first, and leavers as far as there is room.

    Args:
        staying: records of those that stay, those to be preferred first.
        leaving: of those that are to leave, and are there to hand over what they have.
        holders: of both, those of which one must take part; empty: nobody must.
        most: processes that stay; 0: any number.
    """
    needed = {record.info.id for record in holders}
    chosen = choose_members(staying, [r for r in staying if r.info.id in needed], most)
    pool = [*chosen, *leaving]
    return list(choose_members(pool, [r for r in pool if r.info.id in needed]))


def why_smaller(pool: Sequence[Record], most: int = 0) -> str:
    """Return which processes keep a generation of all of a pool from being made, and what to do; "" for none.

    Args:
        pool: records of all that could take part otherwise.
        most: processes that it may have; 0: any number.
    """
    wanted = min(len(pool), most or len(pool))
    if largest(pool) >= wanted:
        return ""
    limited = sorted(
        (record for record in pool if record.largest_group and record.largest_group < wanted),
        key=lambda record: (record.largest_group, record.info.rank_key),
    )
    named = [f"{record.info.label} for generations of {record.largest_group}" for record in limited[:SHOWN]]
    others = " and others" if len(limited) > SHOWN else ""
    return (
        "not all processes can train together, since some may not open enough files for a connection to each"
        f" other one (RLIMIT_NOFILE): there is room on {', '.join(named)}{others}. Others wait outside. Raise"
        " the container runtime's limit on their nodes to what these workers' logs say, or let the job want"
        " fewer processes"
    )
