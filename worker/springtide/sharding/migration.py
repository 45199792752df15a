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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from springtide.comm.codec import as_bytes
from springtide.comm.gather import gather_bytes
from springtide.comm.process_group import Group
from springtide.sharding.pieces import ShardPart, State, Stretch, is_by_element
from springtide.sharding.shard_map import ShardMap

ROUND_BYTES = 16 << 20
"""Most bytes that one member sends another in one exchange."""

VALUES: Final = "values of the parameter"
"""Key of a parameter's values beside the optimizer's state, in a shard on its way to another member."""

Form = Sequence[Any]
"""How the state of a stretch looks: [parameter, start, stop, [[name, dtype, device, rest], ...]].

The rest is None where there is a value by element, whose bytes follow; [shape, base64] of another tensor; and
the value itself where the dtype is "".
"""


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


def forms_of(
    group: Group, planned: Sequence[Move], shard_parts: Callable[[int], list[ShardPart]]
) -> dict[Move, list[Form]]:
    """Have all members know how the state of each shard looks that is to move.

    Args:
        group: Of the generation; all members call this, with the same moves.
        planned: Of `moves`.
        shard_parts: Returns the parts of a shard that is held here.

    Raises:
        RuntimeError: The group's, when a member is lost meanwhile.
    """
    if not planned:
        return {}
    own = {
        str(number): [form_of(part) for part in shard_parts(move.shard)]
        for number, move in enumerate(planned)
        if move.sender == group.rank
    }
    told = [json.loads(text) for text in gather_bytes(group, json.dumps(own).encode())]
    return {move: told[move.sender][str(number)] for number, move in enumerate(planned)}


def migrate(
    group: Group,
    planned: Mapping[Move, Sequence[Form]],
    shard_parts: Callable[[int], list[ShardPart]],
    on_round: Callable[[int], object],
) -> dict[Stretch, State]:
    """Carry out moves.

    Args:
        group: Of the generation; all members call this, with the same moves.
        planned: Of `forms_of`.
        shard_parts: Returns the parts of a shard that is held here.
        on_round: Called after each round, with the bytes that have come to this member in it.

    Returns:
        The state that has come to this member.

    Raises:
        RuntimeError: The group's, when a member is lost meanwhile.
    """
    outgoing: dict[int, list[torch.Tensor]] = {}
    incoming: dict[int, list[torch.Tensor]] = {}
    found: dict[Stretch, State] = {}
    totals: Counter[tuple[int, int]] = Counter()
    for move, forms in planned.items():
        totals[move.sender, move.receiver] += sum(map(cut_bytes, forms))
        if move.sender == group.rank:
            outgoing.setdefault(move.receiver, []).extend(
                value
                for part in shard_parts(move.shard)
                for value in part.state.values()
                if is_by_element(value, part.stretch)
            )
        if move.receiver == group.rank:
            for form in forms:
                stretch, state, tensors = expect(form)
                incoming.setdefault(move.sender, []).extend(tensors)
                found[stretch] = state
    rounds = max(map(portion_count, totals.values()), default=0)
    send_rounds(group, outgoing, incoming, rounds, on_round)
    return found


def form_of(part: ShardPart) -> Form:
    """Return how a stretch's state looks (JSON-able), with all that is not by element."""
    entries: list[Any] = []
    for name, value in part.state.items():
        if is_by_element(value, part.stretch):
            entries.append([name, str(value.dtype).removeprefix("torch."), str(value.device), None])
        elif isinstance(value, torch.Tensor):
            raw = base64.b64encode(as_bytes(value.detach().cpu().contiguous()).numpy().tobytes()).decode()
            shape = list(value.shape)
            entries.append([name, str(value.dtype).removeprefix("torch."), str(value.device), [shape, raw]])
        else:
            entries.append([name, "", "", value])
    stretch = part.stretch
    return [stretch.index, stretch.start, stretch.stop, entries]


def expect(form: Form) -> tuple[Stretch, State, list[torch.Tensor]]:
    """Return a stretch, its state, and that part of the state whose bytes are still to come.

    Args:
        form: Of `form_of`, at the member that sends it.
    """
    index, start, stop, entries = form
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


def cut_bytes(form: Form) -> int:
    """Return the bytes of what a stretch's state has by element. PURE."""
    _, start, stop, entries = form
    return sum(
        (stop - start) * getattr(torch, dtype).itemsize
        for _, dtype, _, value in entries
        if dtype and value is None
    )


def portion_count(total: int) -> int:
    """Return in how many rounds so many bytes go from one member to another. PURE."""
    return math.ceil(total / ROUND_BYTES)


def send_rounds(
    group: Group,
    outgoing: Mapping[int, Sequence[torch.Tensor]],
    incoming: Mapping[int, Sequence[torch.Tensor]],
    rounds: int,
    on_round: Callable[[int], object],
) -> None:
    """Send tensors from all members to all, in rounds of bounded size.

    Args:
        group: All its members call this.
        outgoing: By rank: the tensors that it gets from here.
        incoming: By rank: those that it sends here, in the same order and of the same sizes.
        rounds: The same number at all members: the largest `portion_count` of any pair.
        on_round: Called after each round, with the bytes that have come.

    Raises:
        RuntimeError: The group's, when a member is lost meanwhile.
    """
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
