"""How gradients travel to the servers: as they are, in 16 bits, or only the largest elements of each chunk.

Top-k with error feedback: what a push leaves out is the worker's residual, which it adds to its next gradient
(Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018). Residuals are the worker's own and are
never transferred. They go with a state by its name, the generation and step in which it was made: a dropped
body leaves them as they were, and where others committed the step, what this worker left out of it counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from springtide.ps.sharding import PlannedChunk
from springtide_ps.params.sparse_gradient import INDEX_BYTES, SparseGradient, worth_it

Made = tuple[tuple[int, int, int], int]
"""A state that is in no other run: the generation that made it, and its step."""
Spans = Sequence[tuple[int, int]]
Substeps = Sequence[Mapping[str, Spans]]
"""Optimizer steps with the same sums: for each chunk that has a part in one, the elements that have none."""

KINDS: Final = ("None", "BF16", "FP16", "TopK")
_WIRE: Final = {"BF16": torch.bfloat16, "FP16": torch.float16}


@dataclass(frozen=True, slots=True)
class Pushed:
    """A push has no answer of its own: what prepares the step waits for it. nbytes: what is sent."""

    nbytes: int

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Residuals:
    """Keep by chunk what this worker's gradients still owe. PURE.

    A body may have several backward passes, and several optimizer steps (*substeps*) with the sums of each. A
    pass leaves some elements out, which are owed if a substep has taken its sums.
    """

    def __init__(self) -> None:
        self._made: Made | None = None
        self._residuals: dict[str, torch.Tensor] = {}
        self._next_made: Made | None = None
        self._next: dict[str, torch.Tensor | None] = {}  # what the running pass has left out
        self._since: dict[
            str, torch.Tensor | None
        ] = {}  # owed after the passes before it of the running body

    def begin(self, made: Made) -> None:
        """Begin a body that would make this state."""
        self._next_made, self._next, self._since = made, {}, {}

    def begin_backward_pass(self, substeps: Substeps) -> None:
        """Begin another backward pass of the body. substeps: those with the sums of the last one."""
        self._since |= self._after(substeps)
        self._next = {}

    def owed(self, key: str, gradient: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return the gradient with what was left out before, in memory of its own.

        Args:
            key: The chunk's.
            gradient: Flat.
            scale: See `scaled`.
        """
        kept = self.residual(key)
        return gradient.clone() if kept is None else gradient + scaled(kept, scale, gradient.dtype)

    def residual(self, key: str) -> torch.Tensor | None:
        """Return what was left out before."""
        return self._since[key] if key in self._since else self._residuals.get(key)

    def leave_out(self, key: str, rest: torch.Tensor | None) -> None:
        """Note what is not sent of a chunk; the memory is kept.

        Args:
            key: The chunk's.
            rest: Flat; None: everything is sent.
        """
        self._next[key] = rest

    def stand_at(self, made: Made | None, substeps: Substeps, skip: bool) -> None:
        """Note that the worker holds this state now, whatever worker committed it.

        Args:
            made: The state; None: it is not known.
            substeps: Of its last step, those that have taken the last backward pass' sums.
            skip: The step changed nothing.
        """
        if made == self._made:
            return
        if made is None or made != self._next_made:
            self._residuals = {}  # this worker had no part in that step
        elif not skip:
            for key, rest in {**self._since, **self._after(substeps)}.items():
                self._keep(key, rest)
        self._made, self._next_made, self._next, self._since = made, None, {}, {}

    def stand_anywhere(self) -> None:
        """Keep what is owed, whatever state the worker holds: the strategy changes."""
        self._made = self._next_made = None
        self._next, self._since = {}, {}

    def landed(self, key: str, unused: Spans, applied: bool) -> None:
        """Note that a push of this chunk has been answered; unless it was applied, nothing of it is owed.

        Args:
            key: The chunk's.
            unused: The elements that it did not take.
            applied: Whether it was applied.
        """
        if key in self._next:
            rest = self._next.pop(key)
            if applied:
                self._keep(key, _left(self.residual(key), rest, [unused]))

    def _after(self, substeps: Substeps) -> dict[str, torch.Tensor | None]:
        """Return what is owed when these substeps have taken the sums of the running backward pass."""
        found = {}
        for key, rest in self._next.items():
            if own := [part[key] for part in substeps if key in part]:
                found[key] = _left(self.residual(key), rest, own)
        return found

    def _keep(self, key: str, rest: torch.Tensor | None) -> None:
        self._residuals.pop(key, None)
        if rest is not None:
            self._residuals[key] = rest


def _left(
    before: torch.Tensor | None, rest: torch.Tensor | None, substeps: Sequence[Spans]
) -> torch.Tensor | None:
    """Return what is owed of a chunk after substeps that take the same sums; None is nothing.

    before: owed when the gradient was sent, which it was added to. rest: left out of both. substeps: the
    elements that each did not take. An element that two of them have taken is owed once: the gradient that
    makes up for it is taken as often, and to owe twice as much would swing ever wider.
    """
    now = before
    for unused in substeps:
        then = rest
        if unused:
            whole = then if then is not None else now
            then = None if whole is None else torch.zeros_like(whole) if then is None else then.clone()
        if then is not None:
            for start, stop in unused:
                then[start:stop] = 0.0 if now is None else now[start:stop]
        now = then
    return now


def scaled(kept: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Return what is owed in units of gradients that are `scale` times what they stand for.

    Args:
        kept: Owed, in units of `scale` 1.
        scale: Of the gradients.
        dtype: Of the result.
    """
    return kept if scale == 1.0 else (kept * scale).to(dtype)


def unscaled(rest: torch.Tensor, scale: float) -> torch.Tensor:
    """Invert `scaled`, in float32 at least, since in 16 bits nothing may be left of it.

    Args:
        rest: Owed, in units of the gradients; it may be used up.
        scale: Of the gradients.
    """
    if scale == 1.0:
        return rest
    return rest.to(torch.promote_types(rest.dtype, torch.float32)).div_(scale)


class GradientCompression:
    """Makes of each chunk's gradient what travels. ratio: of elements, with TopK.

    Where members step together, `begin`, `begin_backward_pass`, `stand_at` and `ends` say which step a
    residual is of. Where they do not, `begin_update`, `begin_update_pass` and `landed` do: each chunk's push
    counts when it is answered, in whatever body or generation that is, and there is no last step to which all
    agree.

    closing: from the next body on, send everything that is owed, since this worker may leave after it.
    loss_scale: asked when a backward pass begins, what a GradScaler multiplies gradients by: residuals are
    kept without it, for it changes.
    """

    def __init__(self, kind: str = "None", ratio: float = 0.01) -> None:
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self._scale = 1.0
        self.kind, self._dtype, self._ratio = kind, _WIRE.get(kind), ratio
        self.residuals = Residuals() if kind == "TopK" else None
        self.closing = self._sends_all = False
        self._backward_pass = 0
        self._chunks: dict[str, PlannedChunk] = {}
        self._handed: dict[str, torch.Tensor] = {}

    def begin(self, made: Made) -> None:
        """Begin a body that would make this state."""
        self._begin_body()
        if self.residuals is not None:
            self.residuals.begin(made)

    def begin_update(self) -> None:
        """Begin a body that is no common step; what was pushed before may still be on its way."""
        self._begin_body()

    def begin_update_pass(self) -> None:
        """Begin another backward pass of such a body; pushes count as they are answered."""
        self._take_scale()

    def landed(self, key: str, unused: Collection[int], applied: bool) -> None:
        """Settle what is owed of a chunk whose push was answered.

        Args:
            key: The chunk's.
            unused: Parameters that had no part in the step.
            applied: Whether this worker's push is in the values, rather than another worker's.
        """
        if self.residuals is not None and key in self._chunks:
            self.residuals.landed(key, self._spans(key, unused), applied)

    def forget(self) -> None:
        """Owe nothing: training begins anew."""
        if self.residuals is not None:
            self.residuals = Residuals()

    def change_strategy(self) -> None:
        """Keep what is owed: the members step together from now on, or do so no more."""
        if self.residuals is not None:
            self.residuals.stand_anywhere()

    def reopen(self) -> None:
        """Begin a generation, whose last step is not known."""
        self.closing = self._sends_all = False

    def _begin_body(self) -> None:
        self._backward_pass, self._sends_all = 0, self.closing
        self._take_scale()

    def begin_backward_pass(self, substeps: Sequence[Collection[int]]) -> None:
        """Another backward pass of the body begins. substeps: of each optimizer step with the sums of the
        last one, parameters that had no part in it.
        """
        if self.residuals is not None:
            self.residuals.begin_backward_pass([self._substep(unused) for unused in substeps])
        self._backward_pass += 1
        self._take_scale()

    def _take_scale(self) -> None:
        self._handed = {}
        if self.residuals is not None:
            self._scale = self.loss_scale()

    def shrunk(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient, also of rows, in the type in which it travels."""
        smaller = self._dtype is not None and gradient.element_size() > self._dtype.itemsize
        return gradient.to(self._dtype) if smaller else gradient

    def nbytes(self, elements: int, dtype: torch.dtype) -> int:
        """Return how many bytes a gradient is on its way.

        Args:
            elements: Of the gradient.
            dtype: Of its elements, as the script has them.
        """
        count = 0 if self.residuals is None else self._selected_elements(elements, dtype)
        if count:
            return count * (INDEX_BYTES + dtype.itemsize)
        return elements * min(dtype.itemsize, (self._dtype or dtype).itemsize)

    def _selected_elements(self, elements: int, dtype: torch.dtype) -> int:
        """Return how many elements are selected; 0: all travel as they are."""
        count = math.ceil(elements * self._ratio)
        return 0 if self._sends_all or not worth_it(count, dtype, elements) else count

    def outgoing(self, chunk: PlannedChunk, gradient: torch.Tensor) -> torch.Tensor | SparseGradient:
        """Return the form in which a chunk's gradient travels.

        Args:
            chunk: The chunk.
            gradient: Flat.
        """
        if self.residuals is None:
            return self.shrunk(gradient)
        self._chunks[chunk.key] = chunk
        owed = self.residuals.owed(chunk.key, gradient, self._scale)
        _clear_padding(owed, chunk)
        count = self._selected_elements(owed.numel(), owed.dtype)
        if not count:
            self.residuals.leave_out(chunk.key, None)
            return owed
        indices = owed.abs().topk(count, sorted=False).indices.sort().values
        values = owed[indices]
        owed[indices] = 0.0
        self.residuals.leave_out(chunk.key, unscaled(owed, self._scale))
        return SparseGradient(indices.to(torch.int32), values)

    def hand_over(self, chunks: Collection[PlannedChunk], gradients: torch.Tensor) -> None:
        """Add what this worker owes to a bucket's gradients, in place: another one sends them.

        Args:
            chunks: Of the bucket.
            gradients: Of the whole bucket, flat.
        """
        if self.residuals is None:
            return
        for chunk in chunks:
            kept = self.residuals.residual(chunk.key)
            if kept is not None:
                self._chunks[chunk.key] = chunk
                # Not a change of the script's, so it is not to be seen as one.
                more = self._handed[chunk.key] = scaled(kept, self._scale, gradients.dtype)
                gradients.data[chunk.start : chunk.stop] += more.to(gradients.device)
                self.residuals.leave_out(chunk.key, None)

    def handed_over(self, key: str) -> torch.Tensor | None:
        """Return what the last `hand_over` of this backward pass has added to a chunk's gradient."""
        return self._handed.get(key)

    def stand_at(
        self, made: Made | None, substeps: Sequence[tuple[int, Collection[int]]], skip: bool
    ) -> None:
        """Note that the worker holds this state now.

        Args:
            made: The state; None: it is not known.
            substeps: Of its last step's optimizer steps, the number of the backward pass, and the parameters
                that had no part in it.
            skip: The step changed nothing.
        """
        if self.residuals is None:
            return
        # Who has not come to the last pass has prepared nothing that others could have committed.
        own = [self._substep(unused) for number, unused in substeps if number == self._backward_pass]
        self.residuals.stand_at(made, own, skip)

    def _substep(self, unused: Collection[int]) -> dict[str, Spans]:
        return {
            key: self._spans(key, unused)
            for key, chunk in self._chunks.items()
            if any(piece[0] not in unused for piece in chunk.pieces)
        }

    def _spans(self, key: str, unused: Collection[int]) -> Spans:
        return [(start, stop) for index, _, start, stop in self._chunks[key].pieces if index in unused]

    def ends(self, wanted: bool) -> bool:
        """Agree whether to stop: return whether this step is the last one.

        With residuals it is the next one, in which they are sent.
        """
        if self.residuals is None or self._sends_all:
            return wanted or self._sends_all
        self.closing = self.closing or wanted
        return False


def _clear_padding(flat: torch.Tensor, chunk: PlannedChunk) -> None:
    """Clear what belongs to no parameter of the optimizer: it would be left out for ever."""
    end = 0
    for _, _, start, stop in chunk.pieces:
        flat[end:start] = 0.0
        end = stop
    flat[end:] = 0.0
