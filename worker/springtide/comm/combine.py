"""Buffers that changed in a step, combined over the members by a rule for each of them.

They travel as float64 numbers in one vector that is summed, so that they can ride with the commit vote.
Integers and booleans travel exactly: 64 bits as two numbers of 32.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

_LOW = 0xFFFF_FFFF
_SHAPE = operator.attrgetter("shape")


class Rule(enum.StrEnum):
    """Rule by which a buffer that each member has changed in its own way gets one value.

    Attributes:
        MEAN: the average by samples.
        FIRST: the first member's.
        SUM: the changes of all are added up.
        MIN, MAX: the smallest or largest value, by element.
        LOCAL: each member keeps its own.
    """

    MEAN = "mean"
    FIRST = "first"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Share:
    """One member's share in a combined buffer.

    Args:
        weight: number of its samples; with 0 its buffers are ignored, unless it is the first member.
        rank: in the group.
        size: of the group.
    """

    weight: float
    rank: int
    size: int


class Packing:
    """The way of chosen buffers into a sum and back: which lie side by side, and how many numbers each has.

    It depends on the buffers' forms and rules alone, so it is found once for many steps. A model has hundreds
    of running statistics: one by one they would cost more than their sum, so those of a rule, device and
    dtype are packed by one call.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], rules: Sequence[Rule]) -> None:
        """Find the way.

        Args:
            buffers: to be packed.
            rules: one for each.
        """
        self._buffers = list(buffers)
        self._shapes = [buffer.shape for buffer in buffers]
        together: dict[tuple[object, ...], list[int]] = {}
        for position, (buffer, rule) in enumerate(zip(buffers, rules, strict=True)):
            alone = position if rule not in (Rule.MEAN, Rule.FIRST) else None
            together.setdefault((rule, alone, buffer.device, buffer.dtype), []).append(position)
        self._stretches = [
            _Stretch.of(positions, buffers, rules[positions[0]]) for positions in together.values()
        ]
        self.looks_back = any(stretch.looks_back for stretch in self._stretches)
        """Whether a rule needs to know what the step has found."""
        self.is_plain = not self.looks_back and all(
            stretch.like.is_cpu and not stretch.like.is_complex() for stretch in self._stretches
        )
        """Whether what comes out lies in memory as the buffers' own numbers do, on the CPU."""

    def fits(self, buffers: Sequence[torch.Tensor]) -> bool:
        """Return whether these are the buffers that it was made for, in the same form."""
        return (
            len(buffers) == len(self._buffers)
            and all(map(operator.is_, buffers, self._buffers))
            and list(map(_SHAPE, buffers)) == self._shapes
        )

    def pack(
        self, buffers: Sequence[torch.Tensor], committed: Sequence[torch.Tensor], share: Share
    ) -> torch.Tensor:
        """Return what this member puts into the sum; float64 [n] on the CPU.

        Args:
            buffers: as this member's step has left them.
            committed: as the step has found them, alike on all members; empty unless `looks_back`.
            share: this member's.
        """
        parts = [
            _packed(stretch.joined(buffers), stretch.rule, stretch.before(committed), share)
            for stretch in self._stretches
        ]
        return torch.cat(parts) if parts else _zeros(0)

    def unpack(
        self, total: torch.Tensor, committed: Sequence[torch.Tensor], total_weight: float, size: int
    ) -> list[torch.Tensor]:
        """Return new tensors, like the buffers.

        Args:
            total: float64 [n], the sum of what all members have packed.
            committed: as for `pack`.
            total_weight: the sum of the members' weights.
            size: number of members.
        """
        return self.split(self.unpack_flat(total, committed, total_weight, size))

    def unpack_flat(
        self, total: torch.Tensor, committed: Sequence[torch.Tensor], total_weight: float, size: int
    ) -> list[torch.Tensor]:
        """Return what `split` makes the results of `unpack` from: one new tensor for each stretch.

        Args:
            total: as for `unpack`.
            committed: as for `pack`.
            total_weight: the sum of the members' weights.
            size: number of members.
        """
        flats, offset = [], 0
        for stretch in self._stretches:
            numbers = stretch.numbers
            if stretch.rule in (Rule.FIRST, Rule.MIN, Rule.MAX):
                numbers *= 1 if is_floating(stretch.like) else 2
            if stretch.rule in (Rule.MIN, Rule.MAX):
                numbers *= size
            piece, offset = total[offset : offset + numbers], offset + numbers
            before = stretch.before(committed)
            values = _unpacked(piece, stretch.like, stretch.rule, before, total_weight, size)
            flats.append(values if stretch.like.is_complex() else values.to(stretch.like.dtype))
        return flats

    def rooms(self) -> list[torch.Tensor]:
        """Return tensors like those of `unpack_flat`, with any numbers. Only where `is_plain`."""
        return [torch.empty(stretch.numbers, dtype=stretch.like.dtype) for stretch in self._stretches]

    def split(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors like the buffers, which show the memory of these (that of complex ones is new).

        Args:
            flats: one for each stretch.
        """
        found: dict[int, torch.Tensor] = {}
        for stretch, flat in zip(self._stretches, flats, strict=True):
            found |= zip(stretch.positions, stretch.split(flat), strict=True)
        return [found[position] for position in range(len(self._buffers))]

    def pack_there(self, buffers: Sequence[torch.Tensor], share: Share) -> list[torch.Tensor]:
        """Return what this member puts into the sums of buffers that lie on a device, for which `on_device`
        says so: flat tensors there, one for each rule and dtype. Nothing is waited for.

        Floating numbers travel as float32, unless they are wider; integers as int64.

        Args:
            buffers: as this member's step has left them.
            share: this member's.
        """
        parts = []
        for stretch in self._stretches:
            flat = stretch.joined(buffers).to(_wide(stretch.like))
            factor = share.weight if stretch.rule is Rule.MEAN else float(share.rank == 0)
            # Not times zero: what does not count may be NaN.
            parts.append((flat if factor == 1 else flat * factor) if factor > 0 else torch.zeros_like(flat))
        return parts

    def unpack_there(self, totals: Sequence[torch.Tensor], total_weight: float) -> list[torch.Tensor]:
        """Return new tensors, like the buffers, from the sums of what `pack_there` made.

        Args:
            totals: one for each sum.
            total_weight: the sum of the members' weights.
        """
        combined: dict[int, torch.Tensor] = {}
        for total, stretch in zip(totals, self._stretches, strict=True):
            values = total / total_weight if stretch.rule is Rule.MEAN else total
            combined |= zip(stretch.positions, stretch.split(values), strict=True)
        return [combined[position] for position in range(len(self._buffers))]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Buffers that lie side by side in a sum.

    Attributes:
        positions: of the buffers.
        rule: of all of them.
        like: one of them.
        counts: of numbers, by buffer; a complex one has two.
        shapes: by buffer.
        are_rows: whether each has one dimension and is real: nothing has to be reshaped.
        are_scalars: whether each has none and is real.
    """

    positions: list[int]
    rule: Rule
    like: torch.Tensor
    counts: list[int]
    shapes: list[torch.Size]
    are_rows: bool
    are_scalars: bool

    @classmethod
    def of(cls, positions: list[int], buffers: Sequence[torch.Tensor], rule: Rule) -> _Stretch:
        """Describe the buffers at these positions.

        Args:
            positions: of buffers with the same device and dtype.
            buffers: all that are combined.
            rule: of those at the positions.
        """
        chosen = [buffers[position] for position in positions]
        real = not chosen[0].is_complex()
        return cls(
            positions,
            rule,
            chosen[0],
            [flat_view(buffer).numel() for buffer in chosen],
            [buffer.shape for buffer in chosen],
            real and all(buffer.dim() == 1 for buffer in chosen),
            real and all(buffer.dim() == 0 for buffer in chosen),
        )

    @property
    def numbers(self) -> int:
        return sum(self.counts)

    @property
    def looks_back(self) -> bool:
        """Whether the rule needs to know what the step has found; such a stretch has one buffer."""
        return self.rule not in (Rule.MEAN, Rule.FIRST)

    def before(self, committed: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what the step has found, of all buffers in `committed`; any tensor where nobody looks."""
        return committed[self.positions[0]] if self.looks_back else self.like

    def joined(self, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the numbers of these among the buffers, in one dimension; a copy unless it is one buffer."""
        if len(self.positions) == 1:
            return flat_view(buffers[self.positions[0]])
        chosen = [buffers[position] for position in self.positions]
        if self.are_rows:
            return torch.cat(chosen)
        return torch.stack(chosen) if self.are_scalars else torch.cat([flat_view(item) for item in chosen])

    def split(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cut what lies side by side into tensors like the buffers."""
        if self.like.is_complex():
            pieces = torch.split(values, self.counts)
            return [
                shaped_like(piece, self.like, shape) for piece, shape in zip(pieces, self.shapes, strict=True)
            ]
        values = values.to(self.like.dtype)  # at once
        if self.are_scalars:
            return values.unbind()
        pieces = torch.split(values, self.counts)
        if self.are_rows:
            return pieces
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


class Combined(Mapping[int, torch.Tensor]):
    """Values of buffers by number. They lie side by side as they came out of the sum, and are cut into
    tensors when somebody asks for one: a model has hundreds of running statistics, and a step needs none of
    them by itself.

    Attributes:
        way: by which they came.
        flats: as from `Packing.unpack_flat`.
        indices: the buffers' numbers, in the way's order.
    """

    def __init__(self, way: Packing, flats: Sequence[torch.Tensor], indices: list[int]) -> None:
        self.way, self.flats, self.indices = way, flats, indices
        self._tensors: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self._tensors:
            self._tensors = dict(zip(self.indices, self.way.split(self.flats), strict=True))
        return self._tensors[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def on_device(buffer: torch.Tensor, rule: Rule) -> bool:
    """Tell whether a buffer is summed where it lies (`Packing.pack_there`), without a way through the host.

    Args:
        buffer: of a model.
        rule: by which it is combined.
    """
    return buffer.device.type != "cpu" and rule in (Rule.MEAN, Rule.FIRST)


def _packed(own: torch.Tensor, rule: Rule, before: torch.Tensor, share: Share) -> torch.Tensor:
    own = own.cpu()
    if rule is Rule.MEAN:
        return own.to(torch.float64) * share.weight if share.weight > 0 else _zeros(own.numel())
    if rule is Rule.SUM:
        if not share.weight > 0:
            return _zeros(own.numel())
        wide = torch.float64 if is_floating(own) else torch.int64
        return (own.to(wide) - flat_view(before).cpu().to(wide)).to(torch.float64)
    if rule is Rule.FIRST:
        numbers = as_numbers(own)
        return numbers if share.rank == 0 else torch.zeros_like(numbers)
    # Smallest and largest: each member has a place of its own in the sum.
    numbers = as_numbers(own if share.weight > 0 else flat_view(before).cpu())
    places = _zeros(share.size * numbers.numel()).view(share.size, -1)
    places[share.rank] = numbers
    return places.view(-1)


def _wide(buffer: torch.Tensor) -> torch.dtype:
    if not is_floating(buffer):
        return torch.int64
    return torch.float64 if flat_view(buffer).dtype == torch.float64 else torch.float32


def _unpacked(
    piece: torch.Tensor,
    buffer: torch.Tensor,
    rule: Rule,
    before: torch.Tensor,
    total_weight: float,
    size: int,
) -> torch.Tensor:
    floating = is_floating(buffer)
    if rule is Rule.MEAN:
        return piece / total_weight
    if rule is Rule.SUM:
        wide = torch.float64 if floating else torch.int64
        return flat_view(before).cpu().to(wide) + piece.to(wide)
    if rule is Rule.FIRST:
        return piece if floating else join_halves(piece)
    rows = [row if floating else join_halves(row) for row in piece.view(size, -1)]
    return extreme(rows, rule)


def extreme(rows: Sequence[torch.Tensor], rule: Rule) -> torch.Tensor:
    """Return the smallest or largest by element; a NaN of any row stays one.

    Args:
        rows: of one shape, at least one.
        rule: `MIN` or `MAX`.
    """
    stacked = torch.stack(list(rows))
    return stacked.amin(0) if rule is Rule.MIN else stacked.amax(0)


def _zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64)


def as_numbers(flat: torch.Tensor) -> torch.Tensor:
    """float64, exactly: [n] from floating numbers [n], [2n] from integers or booleans."""
    return flat.to(torch.float64) if flat.is_floating_point() else split_halves(flat)


def split_halves(integers: torch.Tensor) -> torch.Tensor:
    """float64 [2n] from integers or booleans [n]: the high halves, then the low ones."""
    whole = integers.to(torch.int64)
    return torch.cat([(whole >> 32).to(torch.float64), (whole & _LOW).to(torch.float64)])


def join_halves(halves: torch.Tensor) -> torch.Tensor:
    """int64 [n] from what `split_halves` made."""
    whole = halves.to(torch.int64)
    count = whole.numel() // 2
    return (whole[:count] << 32) | whole[count:]


def is_floating(buffer: torch.Tensor) -> bool:
    """Complex numbers too."""
    return buffer.is_floating_point() or buffer.is_complex()


def flat_view(buffer: torch.Tensor) -> torch.Tensor:
    """The values in one dimension, real and imaginary parts side by side."""
    return (torch.view_as_real(buffer) if buffer.is_complex() else buffer).reshape(-1)


def shaped_like(piece: torch.Tensor, buffer: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
    """Return a piece of a `flat_view` as a tensor like `buffer`: the inverse of that function.

    Args:
        piece: real numbers in one dimension.
        buffer: with the dtype that is wanted.
        shape: that is wanted; None for the buffer's.
    """
    shape = buffer.shape if shape is None else shape
    if buffer.is_complex():
        real = torch.view_as_real(buffer)
        return torch.view_as_complex(piece.to(real.dtype).reshape(*shape, 2).contiguous())
    return piece.to(buffer.dtype).reshape(shape)
