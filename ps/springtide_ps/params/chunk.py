"""One chunk of a model's parameters with the state of the script's optimizer for it. PURE.

The optimizer is torch's own, over the pieces of parameters that lie in the chunk: parameter groups, the steps
that a parameter without gradients skips, and what its state is called are as in a single process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

import torch

from springtide_ps.params.applied import AppliedBatches
from springtide_ps.params.fused import leaves_gradients, stepper
from springtide_ps.params.optim import Update, UpdateError, check_options
from springtide_ps.params.sparse_gradient import SparseGradient, count_elements
from springtide_ps.wire.frames import DTYPE_NAMES, DTYPES, joined
from springtide_ps.wire.keys import APPLIED_BATCHES_KEY, BACKWARD_PASS_KEY

PIECE_FIELDS: Final = 4
BACKWARD_PASSES_LIMIT: Final = 64
"""Most backward passes in one step; servers keep their sums until it is decided."""
SUBSTEPS_LIMIT: Final = 256
"""Most optimizer steps, one after another, in one step."""
GROUPS_LIMIT: Final = 1 << 16
"""Most parameter groups, those of all optimizers of a script together."""
PARAMETERS_LIMIT: Final = 1 << 22
"""Most parameters that a step can name."""
_NAMES_LIMIT: Final = 16
_OF_STATES: Final = ("initial_accumulator_value",)
"""Options that count when an optimizer is made."""


Groups = tuple[Mapping[str, Any], ...]
"""The options of each parameter group, of all optimizers one after another."""


class ChunkError(ValueError):
    """Raised for data that are no chunk, or do not fit this one."""


@dataclass(frozen=True, slots=True)
class StepSpec:
    """How a step is applied to the sums of its gradients.

    scale: they are multiplied by it. skip: nothing is applied. groups: the options by parameter group, of all
    optimizers one after another. unused: numbers of parameters to which no worker had a gradient, or whose
    optimizer makes no step. factors: by group, what the sums are multiplied by besides; none: 1.
    backward_pass: of the step's sums, those that are meant. before: what is applied earlier in the same step,
    itself without such.
    """

    scale: float
    skip: bool
    groups: Groups
    unused: frozenset[int] = frozenset()
    factors: tuple[float, ...] = ()
    backward_pass: int = 0
    before: tuple[StepSpec, ...] = ()

    @property
    def substeps(self) -> tuple[StepSpec, ...]:
        """Return the substeps, which are applied one after another."""
        return (*self.before, replace(self, before=())) if self.before else (self,)

    def first(self, count: int) -> StepSpec:
        """Return the step that ends after its first `count` substeps."""
        parts = self.substeps[:count]
        return replace(parts[-1], before=parts[:-1])

    def begins(self, other: StepSpec) -> bool:
        """Return whether its substeps are the first ones of the other's."""
        return self.substeps == other.substeps[: len(self.substeps)]

    def to_json(self, groups: Callable[[Groups], Any] | None = None) -> dict[str, Any]:
        """Return the step in JSON's types.

        Args:
            groups: makes what stands for the groups' options; None: they stand there themselves.
        """
        runs = [[len(list(run)), factor] for factor, run in groupby(self.factors)]
        return {
            **({"factors": runs} if runs else {}),
            **({BACKWARD_PASS_KEY: self.backward_pass} if self.backward_pass else {}),
            **({"before": [part.to_json(groups) for part in self.before]} if self.before else {}),
            "scale": self.scale,
            "skip": self.skip,
            "groups": [dict(group) for group in self.groups] if groups is None else groups(self.groups),
            "unused": _bounds(self.unused),
        }

    @classmethod
    def from_json(cls, value: Any, groups: Callable[[Any], Groups] | None = None) -> StepSpec:
        """Return the step that `to_json` was of.

        Args:
            value: parsed JSON.
            groups: returns the options that something in place of a list of them stands for.

        Raises:
            ChunkError: it is none.
        """
        try:
            scale, skip = float(value["scale"]), bool(value["skip"])
            said = value["groups"]
            if groups is not None and not isinstance(said, list):
                options = groups(said)
            else:
                options = tuple(dict(group) for group in said)
            factors = _factors_in(value.get("factors", ()), len(options))
            unused = _numbers_in(value["unused"])
            number, earlier = int(value.get(BACKWARD_PASS_KEY, 0)), list(value.get("before", ()))
            if not 0 <= number < BACKWARD_PASSES_LIMIT or len(earlier) >= SUBSTEPS_LIMIT:
                raise ValueError(f"backward pass {number} after {len(earlier)} parts of a step")
            if any("before" in part for part in earlier):
                raise ValueError("a part of a step has no parts")
            before = tuple(cls.from_json(part, groups) for part in earlier)
        except ChunkError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise ChunkError(f"a step cannot be applied like this: {error!r}") from None
        return cls(scale, skip, options, unused, factors, number, before)


def _factors_in(runs: Any, count: int) -> tuple[float, ...]:
    """Return the factor of each group. runs: [how many groups, their factor], of all `count` or of none."""
    factors = list[float]()
    for length, factor in runs:
        if not 0 < length <= count - len(factors):
            raise ValueError(f"factors for more than {count} groups")
        factors += [float(factor)] * length
    if len(factors) not in (0, count):
        raise ValueError(f"{len(factors)} factors for {count} groups")
    return tuple(factors)


def _bounds(numbers: Collection[int]) -> list[int]:
    """Return (first, one after the last) of each run of the numbers, one after another."""
    bounds = list[int]()
    for number in sorted(numbers):
        if bounds and bounds[-1] == number:
            bounds[-1] = number + 1
        else:
            bounds += [number, number + 1]
    return bounds


def _numbers_in(bounds: Any) -> frozenset[int]:
    """Return the numbers in these runs, which are written as `_bounds` does."""
    if not isinstance(bounds, list) or not all(type(number) is int for number in bounds):
        raise ValueError("numbers of parameters are given by the ends of their runs")
    firsts, stops = bounds[::2], bounds[1::2]
    ordered = all(first < stop for first, stop in zip(firsts, stops, strict=True))
    if not ordered or any(after < stop for stop, after in zip(stops, firsts[1:], strict=False)):
        raise ValueError(f"runs of numbers follow each other, and not {bounds[:4]}")
    if bounds and not 0 <= bounds[0] <= bounds[-1] <= PARAMETERS_LIMIT:
        raise ValueError(f"parameters from {bounds[0]} to {bounds[-1]}: {PARAMETERS_LIMIT} are the limit")
    runs = zip(firsts, stops, strict=True)
    return frozenset(number for first, stop in runs for number in range(first, stop))


class Chunk:
    """values: flat, of this chunk's own memory. pieces: int64 [n, 4] of (parameter's number, its group, first
    element, element after the last); elements in no piece are padding and stay as they are. groups: of its
    optimizer. first: where these are among the groups of all optimizers, `among` of them (0: there is one
    optimizer). applied_batches: which batches the values hold, where workers do not step together.

    Raise ChunkError for pieces outside of the values, UpdateError for an optimizer that does not exist.
    """

    def __init__(
        self,
        values: torch.Tensor,
        pieces: Sequence[Sequence[int]],
        optimizer: str,
        groups: Sequence[Mapping[str, Any]],
        first: int = 0,
        among: int = 0,
    ) -> None:
        if not pieces or not groups:
            raise ChunkError("a chunk has at least one piece of a parameter, and its optimizer a group")
        self.first, self._among = first, among or len(groups)
        if not 0 <= first <= self._among - len(groups):
            raise ChunkError(f"an optimizer's {len(groups)} groups from {first} are not among {among}")
        self.values = values
        self.applied_batches: AppliedBatches | None = None
        self.optimizer_name = optimizer
        self.pieces = [tuple(piece) for piece in pieces]
        end = 0
        for _, group, start, stop in self.pieces:
            if not end <= start <= stop <= values.numel() or not 0 <= group < len(groups):
                raise ChunkError("a chunk's pieces do not fit its values or its optimizer's groups")
            end = stop
        self._groups: Sequence[Mapping[str, Any]] = tuple(groups)
        used = sorted({group for _, group, _, _ in self.pieces})
        self._tensors = [values[start:stop] for _, _, start, stop in self.pieces]
        self._group_numbers = used
        check_spec(optimizer, [self._groups[number] for number in used])
        # A script may have set options that torch takes in a step and not when an optimizer is made (nesterov
        # while momentum rests, say): so they are set afterwards, but for those of a state that begins.
        begun = {name: self._groups[used[0]][name] for name in _OF_STATES if name in self._groups[used[0]]}
        self._optimizer = Update(optimizer, begun).make(
            [
                {
                    "params": [
                        tensor
                        for tensor, (_, group, _, _) in zip(self._tensors, self.pieces, strict=True)
                        if group == number
                    ]
                }
                for number in used
            ]
        )
        for number, made in zip(used, self._optimizer.param_groups, strict=True):
            made.update(options_of(self._groups[number]))
        self._make_step = stepper(self._optimizer)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def check_gradient(self, nbytes: int, dtype: torch.dtype | None) -> None:
        """Refuse a gradient of another size than the chunk's.

        Args:
            nbytes: that it brings.
            dtype: of its elements; None: the values'.

        Raises:
            ChunkError: it is not as large as the values.
        """
        wanted = self.values.numel() * (dtype or self.dtype).itemsize
        if nbytes != wanted:
            raise ChunkError(f"a gradient brings {nbytes} bytes, {wanted} belong there")

    def check_sparse(self, nbytes: int, dtype: torch.dtype | None) -> None:
        """Refuse bytes that cannot be a selection of the gradient's elements.

        Args:
            nbytes: of indices and elements.
            dtype: of the elements.

        Raises:
            ChunkError: the elements are not of the values' type.
            SparseGradientError: the size cannot be.
        """
        if dtype is not self.dtype:
            raise ChunkError(f"elements of a gradient are {self.dtype} here, not {dtype}")
        count_elements(nbytes, dtype, self.values.numel())

    def add(
        self, total: torch.Tensor | None, gradient: torch.Tensor | SparseGradient, spare: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the sum so far with one more gradient.

        Args:
            total: flat; None: there is none yet. It is used up.
            gradient: flat, or some of its elements; its memory is not kept.
            spare: memory to use for a new sum.
        """
        if isinstance(gradient, SparseGradient):
            if total is None:
                total = torch.zeros_like(self.values) if spare is None else spare.zero_()
            return gradient.add_to(total)
        if total is not None:
            return total.add_(gradient)
        first = torch.empty_like(self.values) if spare is None else spare
        return first.copy_(gradient)

    def apply(self, total: torch.Tensor, step_spec: StepSpec, keep: bool = False) -> None:
        """Make one optimizer step with the sums of the gradients.

        Args:
            total: flat, like the values; used up unless `keep`.
            step_spec: how the step is made; its substeps before are not looked at.
            keep: the sums are needed again.

        Raises:
            ChunkError: the step is of another optimizer.
        """
        if step_spec.skip:
            return
        self.check(step_spec)
        scale = step_spec.scale * (step_spec.factors[self.first] if step_spec.factors else 1.0)
        if scale != 1.0:
            total = total * scale if keep else total.mul_(scale)
        elif keep and not leaves_gradients(self._optimizer):
            total = total.clone()
        self._groups = step_spec.groups[self.first : self.first + len(self._groups)]
        for number, group in zip(self._group_numbers, self._optimizer.param_groups, strict=True):
            group.update(options_of(self._groups[number]))
        for tensor, (parameter, _, start, stop) in zip(self._tensors, self.pieces, strict=True):
            tensor.grad = None if parameter in step_spec.unused else total[start:stop]
        self._make_step()
        for tensor in self._tensors:
            tensor.grad = None

    def check(self, step_spec: StepSpec) -> None:
        """Raise ChunkError for a step of another optimizer."""
        if len(step_spec.groups) != self._among:
            raise ChunkError(f"the step has {len(step_spec.groups)} parameter groups, not {self._among}")

    def square_norm(self, total: torch.Tensor) -> float:
        """Sum of the squares of the sums, padding left out; finite exactly when all of them are.

        (Of float64 also when it is beyond its range.)
        """
        return square_norm([total[start:stop] for _, _, start, stop in self.pieces])

    def dump(self) -> tuple[dict[str, Any], torch.Tensor]:
        """(JSON, uint8 [n]) from which `load` makes an equal chunk; the memory is a copy."""
        states = [self._optimizer.state.get(tensor, {}) for tensor in self._tensors]
        options = self._used_options()
        fields, parts = [], [self.values, self.piece_table(), options]
        for name, kind, scalar, present in self.state_fields():
            fields.append([name, kind, scalar])
            parts.append(torch.tensor(present, dtype=torch.uint8))
            held = [state[name].reshape(-1) for state in states if name in state]
            parts.append(torch.cat(held))
        batches = self.applied_batches
        applied = {} if batches is None else {APPLIED_BATCHES_KEY: batches.to_json()}
        one = self.first == 0 and self._among == len(self._groups)
        return {
            **applied,
            **({} if one else {"first": self.first, "among": self._among}),
            "dtype": DTYPE_NAMES[self.values.dtype],
            "elements": self.values.numel(),
            "pieces": len(self.pieces),
            "optimizer": self.optimizer_name,
            "groups": len(self._groups),
            "options": options.nbytes,
            "state": fields,
        }, joined(*parts)

    def _used_options(self) -> torch.Tensor:
        """Return, as JSON (uint8 [n]), the options of the groups that its pieces are in.

        They go with the tensors: each parameter may be a group of its own, and frames have little room beside
        those.
        """
        distinct: list[tuple[Mapping[str, Any], list[int]]] = []
        for number in self._group_numbers:
            if not distinct or distinct[-1][0] != self._groups[number]:
                distinct.append((self._groups[number], []))
            distinct[-1][1].append(number)
        text = json.dumps([[dict(options), numbers] for options, numbers in distinct])
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def state_fields(self) -> list[tuple[str, str, bool, list[bool]]]:
        """Return the fields of the optimizer's state: (name, dtype, whether it is one number, which pieces
        have it).
        """
        states = [self._optimizer.state.get(tensor, {}) for tensor in self._tensors]
        fields = []
        for name in sorted({name for state in states for name in state}):
            first = next(state[name] for state in states if name in state)
            present = [name in state for state in states]
            fields.append((name, DTYPE_NAMES[first.dtype], first.dim() == 0, present))
        return fields

    def state_of(self, piece: int) -> dict[str, torch.Tensor]:
        """The optimizer's state of a piece, flat; its memory is the chunk's own."""
        return dict(self._optimizer.state.get(self._tensors[piece], {}))

    def set_state(self, piece: int, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the optimizer's state of a piece.

        Args:
            piece: its number.
            state: by name; the memory is the chunk's from now on.
        """
        self._optimizer.state[self._tensors[piece]] = dict(state)

    def piece_table(self) -> torch.Tensor:
        return torch.tensor(self.pieces, dtype=torch.int64).reshape(-1, PIECE_FIELDS)

    def become(self, other: Chunk) -> bool:
        """Take the values and the optimizer's state of a chunk of the same pieces, in this one's memory.

        False, and nothing is taken: it has another form, or state that this one has no memory for.
        """
        if self.pieces != other.pieces or self.values.dtype is not other.values.dtype:
            return False
        mine, theirs = [self.values], [other.values]
        for ours, its in zip(self._tensors, other._tensors, strict=True):
            here, there = self._optimizer.state.get(ours, {}), other._optimizer.state.get(its, {})
            if here.keys() != there.keys():
                return False
            mine += [here[name] for name in there]
            theirs += there.values()
        if any(a.shape != b.shape or a.dtype is not b.dtype for a, b in zip(mine, theirs, strict=True)):
            return False
        for a, b in zip(mine, theirs, strict=True):
            a.copy_(b)
        self.applied_batches = None if other.applied_batches is None else other.applied_batches.copy()
        return True

    def again(self, meta: Mapping[str, Any], payload: torch.Tensor) -> Chunk:
        """Return this chunk as it was when it was dumped.

        Args:
            meta: the dump's JSON.
            payload: the dump's memory, uint8, which is copied.

        Raises:
            ChunkError: it is no dump of a chunk.
        """
        return Chunk.load(meta, payload)

    @classmethod
    def load(cls, meta: Mapping[str, Any], payload: torch.Tensor) -> Chunk:
        """Return the chunk that was dumped.

        Args:
            meta: the dump's JSON.
            payload: the dump's memory, uint8, which is copied.

        Raises:
            ChunkError: it is no dump of a chunk.
        """
        reader = _Reader(payload)
        try:
            dtype = DTYPES[str(meta["dtype"])]
            values = reader.take(int(meta["elements"]), dtype)
            pieces = reader.take(int(meta["pieces"]) * PIECE_FIELDS, torch.int64)
            options = reader.take(int(meta["options"]), torch.uint8)
            chunk = cls(
                values,
                pieces.reshape(-1, PIECE_FIELDS).tolist(),
                str(meta["optimizer"]),
                _groups_in(options, int(meta["groups"])),
                int(meta.get("first", 0)),
                int(meta.get("among", 0)),
            )
            if APPLIED_BATCHES_KEY in meta:
                chunk.applied_batches = AppliedBatches.from_json(meta[APPLIED_BATCHES_KEY])
            fields = meta.get("state", [])
            if len(fields) > _NAMES_LIMIT:
                raise ChunkError(f"an optimizer with {len(fields)} kinds of state is not known")
            for name, kind, scalar in fields:
                present = reader.take(len(chunk.pieces), torch.uint8).tolist()
                for tensor, has in zip(chunk._tensors, present, strict=True):
                    if has:
                        held = reader.take(1 if scalar else tensor.numel(), DTYPES[kind])
                        chunk._optimizer.state[tensor][str(name)] = held[0] if scalar else held
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, ChunkError | UpdateError):
                raise
            raise ChunkError(f"this is no chunk: {error!r}") from None
        reader.check_end()
        return chunk


def _groups_in(options: torch.Tensor, count: int) -> list[dict[str, Any]]:
    """Return the options of `count` groups, of those that are not used none."""
    if not 0 < count <= GROUPS_LIMIT:
        raise ChunkError(f"{count} parameter groups: 1 to {GROUPS_LIMIT} can be")
    groups: list[dict[str, Any]] = [{}] * count
    for own, numbers in json.loads(options.numpy().tobytes()):
        for number in numbers:
            if not 0 <= number < count:
                raise ChunkError(f"options of group {number}, and there are {count}")
            groups[number] = dict(own)
    return groups


class _Reader:
    """Takes tensors out of a block of memory, one after another; each is a copy."""

    def __init__(self, payload: torch.Tensor) -> None:
        self._payload, self._at = payload, 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        nbytes = count * dtype.itemsize
        if count < 0 or self._at + nbytes > self._payload.numel():
            raise ChunkError("a chunk is longer than what was sent of it")
        part = self._payload[self._at : self._at + nbytes].clone()
        self._at += nbytes
        return part.view(dtype)

    def check_end(self) -> None:
        if self._at != self._payload.numel():
            raise ChunkError(f"{self._payload.numel() - self._at} bytes follow a chunk")


def square_norm(parts: Sequence[torch.Tensor]) -> float:
    """Sum of the squares of all elements, as `Chunk.square_norm`."""
    norms = [float(norm) for norm in torch._foreach_norm(list(parts))]
    if not all(map(math.isfinite, norms)):
        # The squares may be beyond float32 alone.
        norms = [float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in parts]
    return math.fsum(norm * norm for norm in norms)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options as torch takes them."""
    return {name: tuple(value) if name == "betas" else value for name, value in group.items()}


def check_spec(optimizer: str, groups: Collection[Mapping[str, Any]]) -> None:
    """Refuse options that the optimizer does not have.

    Args:
        optimizer: its name.
        groups: options by parameter group.

    Raises:
        UpdateError: it does not have one of them.
    """
    for group in groups:
        check_options(optimizer, group)
