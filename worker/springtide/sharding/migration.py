"""Shards on their way to new holders, while a generation forms or before members leave.

All members know what each holds and is to hold, so all make the same list of moves. A move takes all
of a shard from one of its holders: the optimizer's state, and the values of parameters, which are given as a
part of it. So one that has got a shard can give it to others at once.
First the members tell each other how each shard's state looks, then the bytes go in rounds of bounded size.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from springtide.comm.codec import as_bytes
from springtide.comm.gather import gather_bytes
from springtide.comm.process_group import Group
from springtide.sharding.pieces import ShardPart, State, Stretch, is_by_element
from springtide.sharding.shard_map import ShardMap

ROUND_BYTES = 16 << 20
"""That one member sends another in one exchange, at most."""


@dataclass(frozen=True, slots=True)
class Move:
    """One shard from one member to another, by rank."""

    shard: int
    sender: int
    receiver: int


def moves(held: Sequence[Collection[int]], assigned: ShardMap) -> list[Move]:
    """Return what has to be sent so that each member holds what it is assigned. PURE.

    Of the members that hold a shard, the one with fewest to send so far sends it.

    Args:
        held: The shards of each member, by rank.
        assigned: The holders that each shard is to have.
    """
    holders: dict[int, list[int]] = {}
    for rank, own in enumerate(held):
        for shard in own:
            holders.setdefault(shard, []).append(rank)
    sends = [0] * len(held)
    found = []
    for shard in range(len(assigned.owners)):
        for receiver in assigned.holders(shard):
            if receiver in holders[shard]:
                continue
            sender = min(holders[shard], key=lambda rank: (sends[rank], rank))
            sends[sender] += 1
            found.append(Move(shard, sender, receiver))
    return found


def migrate(
    group: Group,
    planned: Sequence[Move],
    shard_parts: Callable[[int], list[ShardPart]],
    on_round: Callable[[int], object],
) -> dict[Stretch, State]:
    """Carry out the moves.

    Args:
        group: Of the generation; all members call this, with the same moves.
        planned: Of `moves`.
        shard_parts: Returns the parts of a shard that is held here.
        on_round: Called after each round, with the bytes that have come to this member in it.

    Returns:
        The state that has come to this member.

    Raises:
        RuntimeError: The group's, when a member is lost meanwhile.
    """
    if not planned:
        return {}
    rank = group.rank
    outgoing: dict[int, list[torch.Tensor]] = {}
    described: dict[str, Any] = {}
    for receiver in range(group.size):
        for move in planned:
            if (move.sender, move.receiver) != (rank, receiver):
                continue
            for part in shard_parts(move.shard):
                rows, tensors = _describe(part)
                outgoing.setdefault(receiver, []).extend(tensors)
                described.setdefault(str(receiver), []).append(rows)
    told = [json.loads(text) for text in gather_bytes(group, json.dumps(described).encode())]
    incoming: dict[int, list[torch.Tensor]] = {}
    found: dict[Stretch, State] = {}
    for sender, said in enumerate(told):
        for row in said.get(str(rank), ()):
            stretch, state, tensors = _expect(row)
            incoming.setdefault(sender, []).extend(tensors)
            found[stretch] = state
    rounds = max((_portion_count(row) for said in told for row in _totals(said)), default=0)
    _send_all(group, outgoing, incoming, rounds, on_round)
    return found


def _describe(part: ShardPart) -> tuple[list[Any], list[torch.Tensor]]:
    """Return what a stretch's state looks like (JSON-able), and the tensors whose bytes follow."""
    entries: list[Any] = []
    tensors = []
    for name, value in part.state.items():
        if is_by_element(value, part.stretch):
            entries.append([name, str(value.dtype).removeprefix("torch."), str(value.device), None])
            tensors.append(value)
        elif isinstance(value, torch.Tensor):
            raw = base64.b64encode(as_bytes(value.detach().cpu().contiguous()).numpy().tobytes()).decode()
            shape = list(value.shape)
            entries.append([name, str(value.dtype).removeprefix("torch."), str(value.device), [shape, raw]])
        else:
            entries.append([name, "", "", value])
    stretch = part.stretch
    return [stretch.index, stretch.start, stretch.stop, entries], tensors


def _expect(row: Sequence[Any]) -> tuple[Stretch, State, list[torch.Tensor]]:
    """Return a stretch, its state, and that part of the state whose bytes are still to come."""
    index, start, stop, entries = row
    stretch, state = Stretch(index, start, stop), State()
    tensors = []
    for name, dtype, device, value in entries:
        if not dtype:
            state[name] = value
        elif value is None:
            state[name] = torch.empty(stop - start, dtype=getattr(torch, dtype), device=_here(device))
            tensors.append(state[name])
        else:
            shape, raw = value
            number = torch.frombuffer(bytearray(base64.b64decode(raw)), dtype=getattr(torch, dtype))
            state[name] = number.view(shape).to(_here(device))
    return stretch, state, tensors


def _here(device: str) -> torch.device:
    """Return the device of this process that is of the sender's kind: its current one."""
    return torch.device(device.partition(":")[0])


def _totals(said: Mapping[str, Sequence[Any]]) -> Iterator[int]:
    """Yield the bytes that a member sends each other, as it has described them."""
    for rows in said.values():
        yield sum(
            (stop - start) * getattr(torch, dtype).itemsize
            for _, start, stop, entries in rows
            for _, dtype, _, value in entries
            if dtype and value is None
        )


def _portion_count(total: int) -> int:
    return math.ceil(total / ROUND_BYTES)


def _send_all(
    group: Group,
    outgoing: Mapping[int, Sequence[torch.Tensor]],
    incoming: Mapping[int, Sequence[torch.Tensor]],
    rounds: int,
    on_round: Callable[[int], object],
) -> None:
    out = {rank: _portions(tensors) for rank, tensors in outgoing.items()}
    into = {rank: _portions(tensors) for rank, tensors in incoming.items()}
    members = range(group.size)
    for _ in range(rounds):
        leaving = {rank: next(out[rank], []) for rank in members if rank in out}
        coming = {rank: next(into[rank], []) for rank in members if rank in into}
        sent = _flat(itertools.chain.from_iterable(leaving.values()))
        sizes = [sum(part.numel() for part in leaving.get(rank, ())) for rank in members]
        room = [sum(part.numel() for part in coming.get(rank, ())) for rank in members]
        received = torch.empty(sum(room), dtype=torch.uint8)
        group.start_exchange(received, sent, room, sizes).wait()
        at = 0
        for part in itertools.chain.from_iterable(coming.values()):
            part.copy_(received[at : at + part.numel()])
            at += part.numel()
        on_round(at)


def _portions(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors' bytes in lists of ROUND_BYTES, but for the last."""
    portion: list[torch.Tensor] = []
    room = ROUND_BYTES
    for tensor in tensors:
        raw = tensor.view(torch.uint8)
        while raw.numel() > room:
            portion.append(raw[:room])
            yield portion
            raw, portion, room = raw[room:], [], ROUND_BYTES
        if raw.numel():
            portion.append(raw)
            room -= raw.numel()
    if portion:
        yield portion


def _flat(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the bytes in one tensor on the host."""
    on_host = [part.cpu() for part in parts]
    return torch.cat(on_host) if on_host else torch.empty(0, dtype=torch.uint8)
