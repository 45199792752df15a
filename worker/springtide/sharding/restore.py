"""Restore the optimizer's state in shards: no member ever has more of it than its share and its own shards.

Each member reads its share of the files, as with all else of a checkpoint. Then every stretch of a shard goes
to the two members that are to hold it, which all know from the same plan. So a state that has no room in one
worker comes back from storage, and storage is read once.
"""

from __future__ import annotations

import base64
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from springtide.checkpoint import files, shares
from springtide.checkpoint.manifest import CorruptError, Part
from springtide.checkpoint.restore import assign, read_header
from springtide.checkpoint.storage import Storage, StorageError
from springtide.comm import codec
from springtide.comm.gather import gather_bytes
from springtide.comm.layout import Layout
from springtide.comm.process_group import Group
from springtide.sharding.migration import portion_count, send_rounds
from springtide.sharding.pieces import Cells, State, Stretch
from springtide.sharding.shard_map import Shard, ShardMap, plan
from springtide.train_step.master_weights import check_wanted

log = logging.getLogger(__name__)

_Stretches = dict[int, list[tuple[Stretch, tuple[int, ...]]]]
"""Stretches of each parameter, ascending, each with the ranks that are to hold it."""


@dataclass(frozen=True, slots=True)
class Target:
    """The shards that a state is restored into.

    Attributes:
        shards: Of the layout.
        layout: Of the parameters.
        cells: The parameters in each bucket.
        node: Name of this process's node.
        device: Returns where a tensor of a parameter's state goes: (parameter's number, name, by element).
        masters: The script has float32 masters.
    """

    shards: Sequence[Shard]
    layout: Layout
    cells: Cells
    node: str
    device: Callable[[int, str, bool], torch.device]
    masters: bool


@dataclass(frozen=True, slots=True)
class _Saved:
    """One tensor of a checkpoint, or its part in this process's memory.

    Attributes:
        index: Number of the parameter whose state it is part of.
        name: In that state.
        by_element: It has an element for each of the parameter's.
    """

    index: int
    name: str
    by_element: bool


class ShardsRestore:
    """One restore of the optimizer's state, by the members of a group."""

    def __init__(
        self,
        group: Group,
        target: Target,
        positions: Mapping[int, int],
        keep: Callable[[Sequence[int], Mapping[Stretch, State]], object],
    ) -> None:
        """Make it for one generation.

        Args:
            group: Of the generation.
            target: The shards that it is restored into.
            positions: By parameter: the place of its state in the checkpoint's tree.
            keep: Called with the shards that this member is to hold, and the state of their stretches.
        """
        self._group, self._target, self._keep = group, target, keep
        self._index_at = {position: index for index, position in positions.items()}

    def bytes_here(self, part: Part) -> int:
        """Return how many bytes of a part this member has at the most."""
        total = sum(file.bytes for file in part.files)
        return total * min(3, self._group.size) // self._group.size

    def read(self, storage: Storage | None, name: str, part: Part) -> str:
        """Read the part of the checkpoint that has the state, and keep the own shards of it.

        All members call this together.

        Args:
            storage: Where the checkpoint lies.
            name: Its folder.
            part: Of its manifest.

        Returns:
            The reason why it cannot be restored so, the same at all members; "": it is here.

        Raises:
            SpringtideError: It has masters, and the script does not.
            RuntimeError: A member is lost meanwhile.
        """
        specs: list[codec.TensorSpec] = []
        saved: dict[int, _Saved] = {}
        plain: dict[int, State] = {}
        memory: dict[shares.Piece, torch.Tensor] = {}
        problem = "storage cannot be reached"
        if storage is not None:
            try:
                header, specs = read_header(storage, name, part)
                saved, plain = self._understood(header, specs)
                own = assign([file.bytes for file in part.files], self._group.size)[self._group.rank]
                for number in own:
                    memory |= _read(storage, name, part, number, specs)
                problem = ""
            except (CorruptError, StorageError, ValueError, MemoryError) as error:
                problem = str(error)
        told = {
            "problem": problem,
            "node": self._target.node,
            "pieces": [[piece.tensor, piece.start, piece.stop] for piece in memory],
            "ones": {
                str(piece.tensor): base64.b64encode(raw.numpy().tobytes()).decode()
                for piece, raw in memory.items()
                if not problem and not saved[piece.tensor].by_element
            },
        }
        heard = [json.loads(text) for text in gather_bytes(self._group, json.dumps(told).encode())]
        for rank, said in enumerate(heard):
            if said["problem"]:
                return f"rank {rank}: {said['problem']}"
        pieces = [[shares.Piece(*piece) for piece in said["pieces"]] for said in heard]
        if problem := shares.missing(specs, [piece for found in pieces for piece in found]):
            return problem  # all have heard the same
        shards = self._target.shards
        everything = [range(len(shards))] * self._group.size
        assigned = plan(shards, [said["node"] for said in heard], everything)
        ones = {
            int(number): torch.frombuffer(bytearray(base64.b64decode(raw)), dtype=specs[int(number)].dtype)
            for said in heard
            for number, raw in said["ones"].items()
        }
        stretches = self._stretches(assigned)
        states = self._expected(stretches, specs, saved, plain, ones)
        self._exchange(stretches, specs, saved, pieces, memory, states)
        mine = assigned.held_by(self._group.rank)
        log.info(
            "of checkpoint %s, %d bytes of optimizer state were read here, and %d of %d shards are kept",
            name,
            sum(raw.numel() for raw in memory.values()),
            len(mine),
            len(shards),
        )
        self._keep(mine, states)
        return ""

    def _understood(
        self, header: bytes, specs: Sequence[codec.TensorSpec]
    ) -> tuple[dict[int, _Saved], dict[int, State]]:
        """Return what each tensor is, and the rest of each parameter's state.

        Raise ValueError where it does not fit this script, SpringtideError where only masters do not.
        """
        outlines = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs]
        numbers = {id(outline): number for number, outline in enumerate(outlines)}
        tree = codec.unflatten(header, outlines)
        if tree["tables"]:
            raise ValueError("it has tables, which no shards have")
        check_wanted(tree["optimizer"].values(), self._target.masters)
        saved: dict[int, _Saved] = {}
        plain: dict[int, State] = {}
        for position, state in tree["optimizer"].items():
            if (index := self._index_at.get(position)) is None:
                raise ValueError(f"it has state of parameter {position}, which is not trained here")
            shape = tuple(self._target.layout.fields[index].shape)
            for name, value in state.items():
                if not isinstance(value, torch.Tensor):
                    plain.setdefault(index, {})[name] = value
                    continue
                by_element = bool(value.dim() or not (shape or name == "step"))
                if by_element and tuple(value.shape) != shape:
                    raise ValueError(
                        f"the state {name!r} of parameter {position} has the shape {tuple(value.shape)}, the "
                        f"parameter {shape}"
                    )
                saved[numbers[id(value)]] = _Saved(index, name, by_element)
        return saved, plain

    def _stretches(self, assigned: ShardMap) -> _Stretches:
        """Return by parameter all stretches of shards, ascending, with their holders."""
        found: _Stretches = {}
        for number, shard in enumerate(self._target.shards):
            for _, _, stretch in self._target.cells.between(shard.bucket, (shard.start, shard.stop)):
                if stretch is not None:
                    found.setdefault(stretch.index, []).append((stretch, assigned.holders(number)))
        for own in found.values():
            own.sort(key=lambda item: item[0].start)
        return found

    def _expected(
        self,
        stretches: _Stretches,
        specs: Sequence[codec.TensorSpec],
        saved: Mapping[int, _Saved],
        plain: Mapping[int, State],
        ones: Mapping[int, torch.Tensor],
    ) -> dict[Stretch, State]:
        """Return the state of what this member is to hold, with memory for what is to come."""
        by_index: dict[int, list[int]] = {}
        for number, what in sorted(saved.items()):
            by_index.setdefault(what.index, []).append(number)
        states: dict[Stretch, State] = {}
        for index, own in stretches.items():
            for stretch, holders in own:
                if self._group.rank not in holders:
                    continue
                state = states[stretch] = State()
                for number in by_index.get(index, ()):
                    what, dtype = saved[number], specs[number].dtype
                    device = self._target.device(index, what.name, what.by_element)
                    if what.by_element:
                        size = stretch.stop - stretch.start
                        state[what.name] = torch.empty(size, dtype=dtype, device=device)
                    else:
                        state[what.name] = ones[number].view(()).to(device, copy=True)
                state.update(plain.get(index, {}))
        return states

    def _exchange(
        self,
        stretches: _Stretches,
        specs: Sequence[codec.TensorSpec],
        saved: Mapping[int, _Saved],
        pieces: Sequence[Sequence[shares.Piece]],
        memory: Mapping[shares.Piece, torch.Tensor],
        states: Mapping[Stretch, State],
    ) -> None:
        """Bring every element that was read to those that are to hold it. Raise RuntimeError."""
        rank = self._group.rank
        outgoing: dict[int, list[torch.Tensor]] = {}
        incoming: dict[int, list[torch.Tensor]] = {}
        totals: Counter[tuple[int, int]] = Counter()
        for sender, found in enumerate(pieces):
            for piece in found:
                if not (what := saved[piece.tensor]).by_element:
                    continue
                size = specs[piece.tensor].dtype.itemsize
                for start, stop, stretch, holders in _overlaps(piece, stretches[what.index]):
                    for receiver in holders:
                        nbytes = (stop - start) * size
                        if receiver != sender:
                            totals[sender, receiver] += nbytes
                        source = target = None
                        if sender == rank:
                            first = (start - piece.start) * size
                            source = memory[piece][first : first + nbytes]
                        if receiver == rank:
                            whole = codec.as_bytes(states[stretch][what.name])
                            first = (start - stretch.start) * size
                            target = whole[first : first + nbytes]
                        if source is not None and target is not None:
                            target.copy_(source)
                        elif source is not None:
                            outgoing.setdefault(receiver, []).append(source)
                        elif target is not None:
                            incoming.setdefault(sender, []).append(target)
        rounds = max(map(portion_count, totals.values()), default=0)
        send_rounds(self._group, outgoing, incoming, rounds, lambda count: None)


def _read(
    storage: Storage, name: str, part: Part, number: int, specs: Sequence[codec.TensorSpec]
) -> dict[shares.Piece, torch.Tensor]:
    """Return the pieces of one file, uint8. Raise CorruptError, StorageError."""
    file = part.files[number]
    found: dict[shares.Piece, torch.Tensor] = {}

    def place(piece: shares.Piece) -> torch.Tensor:
        nbytes = (piece.stop - piece.start) * specs[piece.tensor].dtype.itemsize
        found[piece] = torch.empty(nbytes, dtype=torch.uint8)
        return found[piece]

    try:
        with storage.open(f"{file.folder or name}/{file.path}") as stream:
            files.read(stream, file, specs, place)
    except FileNotFoundError:
        raise CorruptError(f"{file.path} is missing") from None
    return found


def _overlaps(
    piece: shares.Piece, stretches: Sequence[tuple[Stretch, tuple[int, ...]]]
) -> Iterator[tuple[int, int, Stretch, tuple[int, ...]]]:
    """Yield (start, stop, stretch, holders) of what a piece has in common with stretches. PURE."""
    for stretch, holders in stretches:
        start, stop = max(piece.start, stretch.start), min(piece.stop, stretch.stop)
        if start < stop:
            yield start, stop, stretch, holders
