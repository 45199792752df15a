"""The optimizer's state as far as a worker holds it, stepped by the script's own optimizer.

A piece is a stretch of one parameter that lies in shards of this worker: a view of the parameter's memory,
with a gradient that is a view of the bucket. For the time of a step the optimizer has pieces in its groups
instead of parameters; it cannot tell, since all it does is by element. So a step is torch's own code with the
script's options, whichever optimizer of those named below it is (and any whose class says
`elementwise = True`).

Outside of a step the optimizer has its parameters, and no state. The state of a piece is kept here, and cut
by shards when those go to other workers. With masters (`train_step.master_weights`) the optimizer steps a
16-bit piece's float32 copy, which is a part of that state.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, Final

import torch

from springtide.comm.layout import Layout
from springtide.errors import SpringtideError, UsageError
from springtide.ps.lazy_values import only_looks
from springtide.sharding.collectives import Interval, Sums, merged
from springtide.sharding.shard_map import Shard, ShardMap
from springtide.train_step.master_weights import LOW_PRECISION, MASTER, take_master

ELEMENTWISE: Final = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
)

State = dict[str, Any]
"""State of one piece or parameter as torch's optimizers keep it: tensors of its size, and numbers."""


def check_elementwise(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise UsageError unless each optimizer computes an element from its own gradient and state alone.

    Args:
        optimizers: Of the script.
    """
    for optimizer in optimizers:
        kind = type(optimizer)
        if kind in ELEMENTWISE or getattr(kind, "elementwise", False) is True:
            continue
        names = ", ".join(known.__name__ for known in ELEMENTWISE)
        raise UsageError(
            f"distribute(): strategy.allReduce.shard cuts the optimizer's state anywhere in a parameter, and "
            f"{kind.__name__} is not known to step each element by itself: use one of {names}, set shard to "
            f"None, or, if that is so, write `elementwise = True` into the class of your optimizer"
        )


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements start..stop-1 of a parameter, in the order of its gradient."""

    index: int
    start: int
    stop: int


class Cells:
    """Which parameters lie where in each bucket, gaps included."""

    def __init__(self, layout: Layout) -> None:
        self._cells: list[list[tuple[int, int, int]]] = []
        for bucket, size in enumerate(layout.sizes):
            cells, at = [], 0
            for index in sorted(layout.members[bucket], key=lambda index: layout.slots[index].offset):
                start = layout.slots[index].offset
                if start > at:
                    cells.append((at, start, -1))
                at = start + layout.fields[index].numel
                if at > start:
                    cells.append((start, at, index))
            if size > at:
                cells.append((at, size, -1))
            self._cells.append(cells)

    def between(self, bucket: int, interval: Interval) -> Iterator[tuple[int, int, Stretch | None]]:
        """Yield (start, stop, stretch) of what an interval of a bucket consists of; None is a gap.

        Args:
            bucket: Its number.
            interval: In the bucket's elements.
        """
        for start, stop, index in self._cells[bucket]:
            first, last = max(start, interval[0]), min(stop, interval[1])
            if first < last:
                yield first, last, None if index < 0 else Stretch(index, first - start, last - start)


@dataclass(slots=True)
class Piece:
    """A stretch of a parameter that this worker holds.

    Attributes:
        bucket: In which its gradient lies.
        offset: Of its first element in the bucket.
        values: The parameter's memory there, one-dimensional.
        state: The optimizer's.
        stepped: The tensor that the optimizer has in its groups while it steps: the values, or their master.
    """

    stretch: Stretch
    bucket: int
    offset: int
    values: torch.Tensor
    state: State = field(default_factory=dict)
    stepped: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Have the optimizer step the values, until it is told otherwise."""
        self.stepped = self.values

    @property
    def size(self) -> int:
        """Return its elements."""
        return self.stretch.stop - self.stretch.start


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The part of a shard that lies in one parameter, and the optimizer's state of it."""

    stretch: Stretch
    state: State


class Values:
    """The parameters' memory, flat and in the order of their gradients."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self.flat: list[torch.Tensor] = []
        self._apart: dict[int, torch.Tensor] = {}
        for index, parameter in enumerate(parameters):
            if parameter.is_contiguous():
                # Of a version of its own: what is written here is no change of the script's.
                self.flat.append(parameter.data.view(-1))
                continue
            # It lies in memory in another order (channels_last), so that a stretch of it is no view.
            self._apart[index] = parameter.data.reshape(-1).clone()
            self.flat.append(self._apart[index])

    def of(self, stretch: Stretch) -> torch.Tensor:
        """Return the memory of a stretch, one-dimensional."""
        return self.flat[stretch.index][stretch.start : stretch.stop]

    def take_in(self) -> None:
        """Note the values that the parameters have now, where these have no flat memory."""
        for index, apart in self._apart.items():
            apart.copy_(self._parameters[index].data.reshape(-1))

    def put_out(self, indices: Collection[int]) -> None:
        """Give parameters that have no flat memory the values that came."""
        for index in self._apart.keys() & set(indices):
            data = self._parameters[index].data
            data.copy_(self._apart[index].view(data.shape))


class HeldPieces:
    """The pieces of this worker, and how the script's optimizers step them."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        layout: Layout,
        optimizers: Sequence[torch.optim.Optimizer],
        masters: bool = False,
    ) -> None:
        """Hold nothing yet.

        Args:
            parameters: The trained ones, by index.
            layout: Of their gradients.
            optimizers: Of the script.
            masters: Those of 16 bits have float32 masters.
        """
        self._parameters, self._optimizers = parameters, optimizers
        self._masters = masters
        self.cuts_at_shards = False
        """Whether each shard has pieces of its own, so that no cut depends on who holds it."""
        self._versions: dict[int, int] = {}
        """Version of each parameter when its masters were last compared with it."""
        self._names = [spec.name for spec in layout.fields]
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        self.cells = Cells(layout)
        self.values = Values(parameters)
        self._pieces: list[Piece] = []
        self._by_parameter: dict[int, list[Piece]] = {}
        self._intervals: dict[int, tuple[Interval, ...]] = {}
        self._copies: list[tuple[Piece, torch.Tensor, State]] = []
        """Values and state that pieces had before a step that may be taken back."""
        self._stepping: list[tuple[dict[str, Any], list[torch.nn.Parameter]]] = []
        self._states: list[tuple[torch.optim.Optimizer, Any]] = []

    @property
    def pieces(self) -> Sequence[Piece]:
        """Return all pieces, in the order of the buckets."""
        return self._pieces

    def state_bytes(self) -> int:
        """Return the bytes of the optimizer's state that is held here."""
        return sum(
            value.nbytes for piece in self._pieces for value in piece.state.values() if _is_tensor(value)
        )

    # ---- holding

    def intervals(self, bucket: int) -> tuple[Interval, ...]:
        """Return the elements of a bucket that are held here, ascending, with neighbours merged."""
        return self._intervals.get(bucket, ())

    def hold(
        self,
        shards: Sequence[Shard],
        numbers: Sequence[int],
        states: Mapping[Stretch, State],
        assigned: ShardMap | None = None,
    ) -> None:
        """Hold these shards and no others.

        A piece has shards of one pair of holders, so that both have the same pieces: on the CPU, torch
        computes the last elements of a tensor, or of a thread's part of it, by other instructions than those
        before, which would make copies differ in a last bit (SGD and RMSprop in bfloat16, some fused ones).
        With `cuts_at_shards` it has one shard, so that bits do not depend on the number of members, either.

        Args:
            shards: All of the layout.
            numbers: Those to hold, ascending.
            states: The state of each stretch that one of them covers (`shard_parts`): its tensors are copied,
                but for those of a piece that stays as it is.
            assigned: The holders of all; None: nobody steps before `hold` is called again.
        """
        by_bucket: dict[int, list[Interval]] = {}
        runs: list[tuple[int, Interval]] = []
        last = None
        for number in numbers:
            shard = shards[number]
            by_bucket.setdefault(shard.bucket, []).append((shard.start, shard.stop))
            holders = None if assigned is None else frozenset(assigned.holders(number))
            if runs and last == (shard.bucket, shard.start, holders) and not self.cuts_at_shards:
                runs[-1] = shard.bucket, (runs[-1][1][0], shard.stop)
            else:
                runs.append((shard.bucket, (shard.start, shard.stop)))
            last = shard.bucket, shard.stop, holders
        by_index: dict[int, list[tuple[Stretch, State]]] = {}
        for known, state in states.items():
            by_index.setdefault(known.index, []).append((known, state))
        for parts in by_index.values():
            parts.sort(key=lambda part: part[0].start)
        before = {piece.stretch: piece.state for piece in self._pieces}
        self._pieces, self._by_parameter = [], {}
        self._intervals = {bucket: merged(intervals) for bucket, intervals in by_bucket.items()}
        for bucket, interval in runs:
            for start, _, stretch in self.cells.between(bucket, interval):
                if stretch is not None:
                    piece = Piece(stretch, bucket, start, self.values.of(stretch))
                    parts, own = by_index.get(stretch.index, []), before.get(stretch, {})
                    piece.state = own if own and is_made_of(own, stretch, parts) else joined(stretch, parts)
                    self._pieces.append(piece)
                    self._by_parameter.setdefault(stretch.index, []).append(piece)

    def hold_more(
        self,
        shards: Sequence[Shard],
        runs: Sequence[Sequence[int]],
        coming: Collection[int],
        states: Mapping[Stretch, State],
    ) -> None:
        """Hold some shards more, and have pieces of their own for those and some that were held here alone.

        As in `hold`, both holders of a shard have the same pieces of it.

        Args:
            shards: All of the layout.
            runs: Shards that have the same holders from here on, ascending: each is put into pieces together.
            coming: Those of them that were not held here.
            states: The state of each stretch that one of those covers.
        """
        by_index: dict[int, list[tuple[Stretch, State]]] = {}
        for known in sorted(states, key=lambda stretch: stretch.start):
            by_index.setdefault(known.index, []).append((known, states[known]))
        intervals = {bucket: list(own) for bucket, own in self._intervals.items()}
        for number in coming:
            shard = shards[number]
            intervals.setdefault(shard.bucket, []).append((shard.start, shard.stop))
        self._intervals = {bucket: merged(sorted(own)) for bucket, own in intervals.items()}
        new = frozenset(coming)
        for run in runs:
            groups = [[number] for number in run] if self.cuts_at_shards else in_buckets(shards, run)
            for group in groups:
                first, last = shards[group[0]], shards[group[-1]]
                for offset, _, stretch in self.cells.between(first.bucket, (first.start, last.stop)):
                    if stretch is None:
                        continue
                    own = self._by_parameter.setdefault(stretch.index, [])
                    if group[0] in new:
                        piece = Piece(stretch, first.bucket, offset, self.values.of(stretch))
                        piece.state = joined(stretch, by_index.get(stretch.index, []))
                        own.append(piece)
                    else:
                        around = self._covering(stretch)
                        own[:] = [piece for piece in own if piece is not around] + self._split(
                            around, stretch
                        )
                    own.sort(key=lambda piece: piece.stretch.start)
        pieces = [piece for own in self._by_parameter.values() for piece in own]
        self._pieces = sorted(pieces, key=lambda piece: (piece.bucket, piece.offset))

    def _split(self, piece: Piece, stretch: Stretch) -> list[Piece]:
        """Return pieces that a piece consists of, one of which is the stretch; they share its memory."""
        edges = sorted({piece.stretch.start, stretch.start, stretch.stop, piece.stretch.stop})
        found = []
        for start, stop in pairwise(edges):
            own = Stretch(stretch.index, start, stop)
            offset = piece.offset + start - piece.stretch.start
            part = Piece(own, piece.bucket, offset, self.values.of(own))
            state = part_of(piece, own, self._names[own.index])
            # A number is counted up by the step of each piece.
            part.state = {
                name: value if is_by_element(value, own) else _copied(value) for name, value in state.items()
            }
            found.append(part)
        return found

    def shard_parts(self, shards: Sequence[Shard], number: int) -> list[ShardPart]:
        """Return what a shard consists of, with views of the state that is held here of it.

        Args:
            shards: All of the layout.
            number: The shard, which is held here.
        """
        shard = shards[number]
        found = []
        for _, _, stretch in self.cells.between(shard.bucket, (shard.start, shard.stop)):
            if stretch is None:
                continue
            piece = self._covering(stretch)
            found.append(ShardPart(stretch, part_of(piece, stretch, self._names[stretch.index])))
        return found

    def _covering(self, stretch: Stretch) -> Piece:
        for piece in self._by_parameter[stretch.index]:
            if piece.stretch.start <= stretch.start and stretch.stop <= piece.stretch.stop:
                return piece
        raise KeyError(stretch)

    def take_from_optimizers(self, shards: Sequence[Shard], numbers: Sequence[int]) -> dict[Stretch, State]:
        """Return the state that the optimizers have of whole parameters, cut by shards.

        Args:
            shards: All of the layout.
            numbers: The shards that are wanted.
        """
        found: dict[Stretch, State] = {}
        states = {
            self._index[id(parameter)]: state
            for optimizer in self._optimizers
            for parameter, state in optimizer.state.items()
            if isinstance(parameter, torch.Tensor) and id(parameter) in self._index
        }
        for number in numbers:
            shard = shards[number]
            for _, _, stretch in self.cells.between(shard.bucket, (shard.start, shard.stop)):
                if stretch is not None:
                    whole = states.get(stretch.index, {})
                    found[stretch] = {
                        name: self._part_of_whole(name, value, stretch) for name, value in whole.items()
                    }
        return found

    def _part_of_whole(self, name: str, value: Any, stretch: Stretch) -> Any:
        like = self._parameters[stretch.index]
        # A parameter of one number has state of that form; a count of steps is never cut.
        if not _is_tensor(value) or (value.dim() == 0 and (like.dim() or name == "step")):
            return value
        if value.shape != like.shape:
            raise SpringtideError(
                f"the optimizer's state {name!r} of {self._names[stretch.index]} has the shape "
                f"{tuple(value.shape)} and the parameter {tuple(like.shape)}: it cannot be cut by elements"
            )
        return value.reshape(-1)[stretch.start : stretch.stop]

    def forget_in_optimizers(self) -> None:
        """Take the state of whole parameters out of the optimizers: it is held in pieces."""
        for optimizer in self._optimizers:
            for parameter in [item for item in optimizer.state if id(item) in self._index]:
                del optimizer.state[parameter]

    # ---- stepping

    def options(self) -> list[dict[str, Any]]:
        """Return copies of the options of all groups, in their order."""
        return [
            {name: _copied(value) for name, value in group.items() if name != "params"}
            for group in self._groups()
        ]

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def begin_step(
        self,
        flats: Sequence[Sums],
        factors: Sequence[float],
        unused: Collection[int],
        keep: bool = False,
    ) -> None:
        """Give the optimizers pieces with gradients, for the step that follows.

        Gradients of 16 bits for masters are multiplied in float32; with `cuts_at_shards` in 16 bits, as it is
        without shards.

        Args:
            flats: The gradients of each bucket: sums, where pieces are.
            factors: They are multiplied by them, one after the other.
            unused: Numbers of parameters to which nobody has a gradient: these get none.
            keep: The step may be taken back, or made again with the same sums: they are not changed.
        """
        skipped = set(unused)
        changed = self._changed(skipped) if self._masters else set()
        given: list[tuple[Piece, torch.Tensor]] = []
        states = {}
        for piece in self._pieces:
            piece.stepped, states[id(piece)] = piece.values, piece.state
            if piece.stretch.index in skipped:
                piece.values.grad = None
                continue
            gradient = flats[piece.bucket][piece.offset : piece.offset + piece.size]
            if keep:
                before = {name: _copied(value) for name, value in piece.state.items()}
                self._copies.append((piece, piece.values.clone(), before))
            if self._masters and piece.values.dtype in LOW_PRECISION:
                gradient = gradient.clone() if self.cuts_at_shards else gradient.float()
                has_changed = piece.stretch.index in changed
                piece.stepped, states[id(piece)] = take_master(piece.values, piece.state, has_changed)
            elif keep:
                gradient = gradient.clone()  # some optimizers write into gradients
            given.append((piece, gradient))
        _multiply([gradient for _, gradient in given], factors)
        for piece, gradient in given:
            piece.stepped.grad = gradient.to(piece.stepped.dtype)
        for optimizer in self._optimizers:
            self._states.append((optimizer, optimizer.state))
            own: Any = defaultdict(dict)
            for group in optimizer.param_groups:
                parameters = group["params"]
                self._stepping.append((group, parameters))
                pieces = [
                    piece
                    for parameter in parameters
                    for piece in self._by_parameter.get(self._index.get(id(parameter), -1), ())
                ]
                group["params"] = [piece.stepped for piece in pieces]
                own.update({piece.stepped: states[id(piece)] for piece in pieces if states[id(piece)]})
            optimizer.state = own

    def take_back(self) -> None:
        """Have pieces be what they were before a step that has ended, of which `keep` was asked."""
        for piece, values, state in self._copies:
            piece.values.copy_(values)
            piece.state = state
        # What a script had written into parameters has to be seen again.
        self._copies, self._versions = [], {}

    def keep_step(self) -> None:
        """Forget how a step could be taken back."""
        self._copies = []

    @only_looks
    def _changed(self, skipped: Collection[int]) -> set[int]:
        """Return the numbers of the parameters that a script may have written into since they stepped last.

        Args:
            skipped: Numbers of those that do not step now.
        """
        now = {index: self._parameters[index]._version for index in self._by_parameter.keys() - skipped}
        changed = {index for index, version in now.items() if self._versions.get(index) != version}
        self._versions |= now
        return changed

    def end_step(self) -> None:
        """Give the optimizers their parameters back, after their step."""
        if not self._stepping:
            return
        made: dict[int, State] = {}
        for optimizer, state in self._states:
            made |= {id(stepped): own for stepped, own in optimizer.state.items()}
            optimizer.state = state
        for group, parameters in self._stepping:
            group["params"] = parameters
        self._states, self._stepping = [], []
        for piece in self._pieces:
            stepped, piece.stepped = piece.stepped, piece.values
            stepped.grad = None
            if stepped is piece.values:
                piece.state = made.get(id(stepped), piece.state)
                continue
            piece.state = {**made.get(id(stepped), {}), MASTER: stepped}
            piece.values.copy_(stepped)

    @torch.no_grad()
    def step_now(
        self,
        flats: Sequence[Sums],
        factors: Sequence[float],
        unused: Collection[int],
        options: Sequence[Mapping[str, Any]],
    ) -> None:
        """Make a step outside of the script's, with the options that it had.

        Args:
            flats: As for `begin_step`.
            factors: As for `begin_step`.
            unused: As for `begin_step`.
            options: Of `options`, when the script asked for that step.
        """
        groups = self._groups()
        kept = [{name: group[name] for name in chosen} for group, chosen in zip(groups, options, strict=True)]
        for group, chosen in zip(groups, options, strict=True):
            group.update(chosen)
        self.begin_step(flats, factors, unused)
        try:
            for optimizer in self._optimizers:
                _plain_step(optimizer)
        finally:
            self.end_step()
            for group, own in zip(groups, kept, strict=True):
                group.update(own)


def _multiply(gradients: list[torch.Tensor], factors: Sequence[float]) -> None:
    for factor in factors:
        if factor == 1.0 or not gradients:
            continue
        if gradients[0].device.type == "cpu":
            # torch's call for many at once rounds the factor itself to 16 bits there, and is no faster.
            for gradient in gradients:
                gradient.mul_(factor)
        else:
            torch._foreach_mul_(gradients, factor)


def in_buckets(shards: Sequence[Shard], numbers: Sequence[int]) -> list[list[int]]:
    """Return neighbouring shards by bucket. PURE.

    Args:
        shards: All of the layout.
        numbers: Ascending, without gaps.
    """
    return [list(own) for _, own in groupby(numbers, key=lambda number: shards[number].bucket)]


def _plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Make a step without calling hooks: the script's and the library's belong to the script's own step."""
    hooks: Any = optimizer
    kept = hooks._optimizer_step_pre_hooks, hooks._optimizer_step_post_hooks
    hooks._optimizer_step_pre_hooks, hooks._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        optimizer.step()
    finally:
        hooks._optimizer_step_pre_hooks, hooks._optimizer_step_post_hooks = kept


def joined(stretch: Stretch, parts: Sequence[tuple[Stretch, State]]) -> State:
    """Return the state of a stretch, put together from parts that cover it, in tensors of its own.

    Args:
        stretch: Of a parameter.
        parts: Of the same parameter, ascending.
    """
    own = [part for part in parts if stretch.start <= part[0].start and part[0].stop <= stretch.stop]
    covered = sum(part.stop - part.start for part, _ in own)
    if not own or not own[0][1]:
        return {}
    if covered != stretch.stop - stretch.start:
        raise SpringtideError(
            f"of {stretch.stop - stretch.start} elements the state of {covered} is here: a shard was cut"
        )
    state: State = {}
    for name, first in own[0][1].items():
        if is_by_element(first, own[0][0]):
            state[name] = torch.cat([part[name] for _, part in own])
        else:
            state[name] = _copied(first)
    return state


def is_made_of(state: State, stretch: Stretch, parts: Sequence[tuple[Stretch, State]]) -> bool:
    """Return whether parts are views of the state of a stretch, and together all of it.

    Args:
        state: Of the stretch.
        stretch: Of a parameter.
        parts: Of the same parameter, ascending.
    """
    covered = 0
    for part, own in parts:
        if part.stop <= stretch.start or stretch.stop <= part.start:
            continue
        if own.keys() != state.keys() or not (stretch.start <= part.start and part.stop <= stretch.stop):
            return False
        first = part.start - stretch.start
        for name, value in own.items():
            whole = state[name]
            if is_by_element(whole, stretch):
                if not is_by_element(value, part) or value.data_ptr() != whole[first:].data_ptr():
                    return False
            elif value is not whole:
                return False
        covered += part.stop - part.start
    return covered == stretch.stop - stretch.start


def is_by_element(value: Any, stretch: Stretch) -> bool:
    """Return whether a value of a stretch's state has an element for each of the stretch's.

    Args:
        value: Of the optimizer's state.
        stretch: It belongs to it.
    """
    return _is_tensor(value) and value.dim() == 1 and value.numel() == stretch.stop - stretch.start


def part_of(piece: Piece, stretch: Stretch, name: str) -> State:
    """Return the part of a piece's state that belongs to a stretch in it, as views.

    Args:
        piece: Held here.
        stretch: Lies in it.
        name: Of the parameter, for errors.

    Raises:
        SpringtideError: The optimizer keeps something that cannot be cut.
    """
    first = stretch.start - piece.stretch.start
    found: State = {}
    for key, value in piece.state.items():
        if is_by_element(value, piece.stretch):
            found[key] = value[first : first + stretch.stop - stretch.start]
        elif not _is_tensor(value) or value.numel() == 1:
            found[key] = value
        else:
            raise SpringtideError(
                f"the optimizer's state {key!r} of {name} has the shape {tuple(value.shape)} for "
                f"{piece.size} elements: it cannot be cut, so this optimizer cannot be sharded"
            )
    return found


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
