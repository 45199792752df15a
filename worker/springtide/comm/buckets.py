"""Gradients on their way into the sum: weighted into flat buffers as backward makes them, sent bucket by
bucket.

A bucket is sent when its last gradient is there and all buckets before it have been sent, so that all members
send in the same order and sending overlaps the rest of backward. That order is the layout's at first, and
then the one in which backward fills them (`use_order`), which all members must be told alike.

[Note: unused parameters] A parameter without a gradient (BERT's pooler under MLM, an expert that nothing was
sent to) would hold up its bucket, and all behind it, until backward is over. So what no member has used in
the last step counts as there from the begin: its bucket leaves with zeros for it. If a gradient comes all the
same, and its bucket has left, it is late: it is kept apart, the commit vote tells all members, and they sum
the late ones once more. All members must expect the same, or they would send different things.

A bucket of which nothing is expected is not sent at all, since the sum of zeros is known: then all gradients
that come for it are late. Its memory is zeros already if nobody has written into it since the last time. One
that was wrong to leave out is not left out again with the same members: its gradients would come late again,
and a sum after backward hides behind nothing.

[Note: gathering] One call of torch for each gradient costs more than copying it, where it is small, or where
it lies on a GPU, on which each call launches a kernel. So in the last micro-batch of a step such gradients
stay where backward has left them until their bucket is full, and are copied and weighted together. At the
end of each backward pass what still waits is copied, too: a script never sees anything but the views.

[Note: own sums] A sum over the members takes the place of what this worker has put in, and if it fails,
nobody knows what is there. So that a step which is dropped loses nothing of what this worker has computed,
each bucket can be copied before it leaves (`copies`); one that has not left is its own copy. Without copies,
at no cost but memory, all micro-batches but the last one can be kept (`keeps_base`): they are added up in
memory of their own, the base, and what goes into the buckets is the sum of that and the last one's gradient.

Where buckets go to parameter servers, each by itself, no order has to be kept: one that is complete leaves at
once, and a parameter without a gradient holds up its own bucket only.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeGuard

import torch

from springtide.comm.cuda_streams import Writers, current_stream_of
from springtide.comm.layout import Field, Layout
from springtide.comm.process_group import DONE, Work, wait_for
from springtide.comm.work import drop_apart
from springtide.errors import UsageError

StartSum = Callable[[torch.Tensor], Work]

_SMALL_BYTES = 16 << 10
"""Size up to which, on the CPU, a call costs more than going over the memory a second time."""

_GRAD = operator.attrgetter("grad")
_ENGINE: Any = torch.autograd.Variable._execution_engine


class Buckets:
    """The flat gradient buffers of one model. One step at a time: `begin`, `put`..., `flush`, `wait`.

    Used by the script's thread and by those of autograd, which run while the script's waits in backward();
    `close_gathering` by any.
    """

    def __init__(self, layout: Layout, device: torch.device | None = None) -> None:
        self.layout = layout
        self._device = device
        self._writers = Writers(current_stream_of(device))
        self._names = [field.name for field in layout.fields]
        on_cpu = device is None or device.type == "cpu"
        self._is_deferred = [not on_cpu or _nbytes(field) <= _SMALL_BYTES for field in layout.fields]
        """Whether the gradient of each parameter is copied with others; see [Note: gathering]."""
        self._most_deferred = [
            sum(self._is_deferred[index] for index in indices) for indices in layout.members
        ]
        self._leaves: list[torch.Tensor] = []
        """The parameters that are watched, by index."""
        # Hooks hold these, so they stay the same objects. By parameter: whether its next gradient is taken
        # without a look; by bucket: how many gradients are missing, and which wait for those.
        self._ready = bytearray(len(self._names))
        self._missing = [0] * len(layout.members)
        self._waiting: list[list[int]] = [[] for _ in layout.members]
        self._flats: list[torch.Tensor] = []
        self.views: list[torch.Tensor] = []
        self._spans: list[list[torch.Tensor]] = []
        """The memory of what is gathered in each bucket, in as few pieces as possible."""
        self._part_spans: dict[int, tuple[frozenset[int], list[tuple[int, int]]]] = {}
        """The same for the parameters that were last gathered without the bucket's others: its elements."""
        self._in_memory: Sequence[Sequence[int]] = layout.members
        """The parameters that lie in each bucket's memory, in its order."""
        self._offsets = [slot.offset for slot in layout.slots]
        """Place of each of them in its bucket's memory, by number."""
        self._order = list(range(len(layout.members)))
        self._memory_of_copies: dict[int, torch.Tensor] = {}
        self._base: list[torch.Tensor] = []
        self._base_views: list[torch.Tensor] = []
        self._zero_versions: dict[int, int] = {}
        """Versions of the buckets that are zeros as long as theirs are these."""
        self.allocate()
        self.begin(lambda tensor: _unbound())

    def allocate(self) -> None:
        """New buffers: a collective of a dead group may still write into the old ones."""
        layout = self.layout
        self._zero_versions.clear()
        self._flats = [
            torch.zeros(size, dtype=dtype, device=self._device)
            for size, dtype in zip(layout.sizes, layout.dtypes, strict=True)
        ]
        self.views = self._views_of(self._flats)
        self._spans = [
            [flat[start:end] for start, end in self._spans_of(bucket, self._is_deferred_in(bucket))]
            for bucket, flat in enumerate(self._flats)
        ]

    def _views_of(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [
            flats[slot.bucket].narrow(0, slot.offset, field.numel).view(field.shape)
            for field, slot in zip(self.layout.fields, self.layout.slots, strict=True)
        ]

    def _is_deferred_in(self, bucket: int) -> frozenset[int]:
        return frozenset(index for index in self.layout.members[bucket] if self._is_deferred[index])

    def _spans_of(self, bucket: int, chosen: Collection[int]) -> list[tuple[int, int]]:
        """Return the elements of a bucket that some of its parameters have, in as few pieces as possible."""
        return _spans(self.layout, self._in_memory[bucket], self._offsets, chosen)

    def _memory_of(self, bucket: int, indices: Sequence[int]) -> list[torch.Tensor]:
        """Return the memory of what is gathered, in as few pieces as possible.

        The first gradient of a backward pass is looked at, and so it is never among its bucket's others.

        Args:
            bucket: its number.
            indices: of parameters in it.
        """
        if len(indices) == self._most_deferred[bucket]:
            return self._spans[bucket]
        chosen, known = frozenset(indices), self._part_spans.get(bucket)
        if known is None or known[0] != chosen:
            known = self._part_spans[bucket] = chosen, self._spans_of(bucket, chosen)
        flat = self._flats[bucket]
        return [flat[start:end] for start, end in known[1]]

    def begin(self, start_sum: StartSum) -> None:
        """Start a step whose buckets go through start_sum."""
        self._start_sum = start_sum
        self._writers.begin()
        self._backward_pass = [-1] * len(self._names)
        self._carried: set[int] = set()
        self._missing[:] = [len(indices) for indices in self.layout.members]
        self._versions = [flat._version for flat in self._flats]
        self._works: list[Work] = []
        self._is_sent = [False] * len(self._flats)
        self._filled: list[int] = []
        self.leaving = 0
        self._unused: frozenset[int] = frozenset()
        self._left_out: frozenset[int] = frozenset()
        self._late: dict[int, torch.Tensor] = {}
        self._copies: dict[int, torch.Tensor] = {}
        self._in_base: set[int] = set()
        self._only_in_base: set[int] = set()
        self._to_base = False
        self.copying_seconds = 0.0
        self.close_gathering()
        for indices in self._waiting:
            indices.clear()

    gathers = True
    """Whether `open_gathering` may be called; see [Note: gathering]."""

    def watch(
        self, parameters: Sequence[torch.Tensor], alone: Callable[[int, torch.Tensor], object]
    ) -> list[Any]:
        """Have each gradient of the parameters put in when backward has accumulated it.

        Args:
            parameters: by index.
            alone: called with (index, parameter) for what is not gathered: it calls `put`.

        Returns:
            Handles, to take the hooks away.
        """
        self._leaves = list(parameters)
        return [
            parameter.register_post_accumulate_grad_hook(self._hook(index, alone))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._leaves)
        ]

    def open_gathering(self, scale: float, micro: int, when_full: Callable[[int], object]) -> None:
        """Take further gradients of a backward pass of the step's last micro-batch by the bucket.

        Args:
            scale: factor for them; not 0.
            micro: number of the micro-batch.
            when_full: called with the number of a bucket's gradients before they are copied and sent. Its
                errors leave backward().
        """
        self._scale, self._micro, self._when_full = scale, micro, when_full
        self._to_base = False
        # Those of earlier micro-batches, or backward passes, are added to.
        self._onto = self.used if micro or self._carried else None
        _ENGINE.queue_callback(self._end_of_backward)
        self._ready[:] = b"\1" * len(self._ready)
        if self._backward_pass.count(micro) == 1:
            self._ready[self._backward_pass.index(micro)] = 0
        else:
            self._ready[:] = bytes(number != micro for number in self._backward_pass)
        for index in self._unused:
            self._ready[index] = 0

    def close_gathering(self) -> None:
        """Have the next gradient come one by one, and be looked at. Any thread."""
        self._ready[:] = bytes(len(self._ready))

    def _hook(
        self, index: int, alone: Callable[[int, torch.Tensor], object]
    ) -> Callable[[torch.Tensor], None]:
        """Return what autograd calls for each parameter in each backward pass: every name in it counts.

        Args:
            index: of the parameter.
            alone: as for `watch`.
        """
        bucket = self.layout.slots[index].bucket
        ready, missing, waiting = self._ready, self._missing, self._waiting[bucket]
        is_with = self._writers.is_with if self._writers.any else None

        def waits(parameter: torch.Tensor) -> None:
            if not ready[index] or (is_with is not None and not is_with(bucket)):
                leaves_at_once(parameter)
                return
            ready[index] = 0
            waiting.append(index)
            missing[bucket] = left = missing[bucket] - 1
            if not left:
                self._full(bucket)

        def leaves_at_once(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if not ready[index] or gradient is None or not _is_plain(gradient):
                if waiting:
                    self._gather(bucket)
                alone(index, parameter)
                return
            ready[index] = 0
            parameter.grad = self._write(index, bucket, gradient, self._scale)
            self._backward_pass[index] = self._micro
            missing[bucket] = left = missing[bucket] - 1
            if not left:
                self._full(bucket)

        return waits if self._is_deferred[index] else leaves_at_once

    def _full(self, bucket: int) -> None:
        """Send a bucket all of whose gradients are there."""
        self._filled.append(bucket)
        self._when_full(len(self.layout.members[bucket]))
        self._gather(bucket)
        self._send_complete(bucket)

    def _end_of_backward(self) -> None:
        self.close_gathering()
        for bucket in range(len(self._waiting)):
            self._gather(bucket)

    def _gather(self, bucket: int) -> None:
        """Copy and weight what waits for the bucket, and leave its views as the parameters' gradients."""
        indices = self._waiting[bucket]
        if not indices:
            return
        self._check(bucket)
        leaves = [self._leaves[index] for index in indices]
        gradients = self._plain_gradients(indices, list(map(_GRAD, leaves)))
        with self._writers.with_first(bucket):
            views = self._copy(bucket, indices, gradients)
        self._versions[bucket] = self._flats[bucket]._version
        passes, micro = self._backward_pass, self._micro
        for index, leaf, view in zip(indices, leaves, views, strict=True):
            passes[index] = micro
            leaf.grad = view
        indices.clear()

    def _plain_gradients(
        self, indices: list[int], gradients: list[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Return what waits, without a graph of its own. Raise UsageError for what cannot be summed.

        Args:
            indices: of the parameters.
            gradients: theirs, as backward and other hooks have left them.
        """
        if _are_plain(gradients):
            return gradients
        found = [gradient for gradient in gradients if gradient is not None]
        if len(found) < len(gradients):
            raise removed(self._names[indices[[gradient is None for gradient in gradients].index(True)]])
        for index, gradient in zip(indices, found, strict=True):
            self._check_layout(index, gradient)
        return [gradient.detach() for gradient in found]

    def _copy(self, bucket: int, indices: list[int], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Put gradients in, weighted; return the tensors that hold them."""
        onto = self._onto
        views = [self.views[index] for index in indices]
        if onto is not None and any(onto[index] for index in indices):
            for index, view in zip(indices, views, strict=True):
                if not onto[index]:
                    view.zero_()
                elif index in self._only_in_base:
                    view.copy_(self._base_views[index])
                    self._only_in_base.discard(index)
            torch._foreach_add_(views, gradients, alpha=self._scale)
            return views
        torch._foreach_copy_(views, gradients)
        if self._scale != 1.0:
            torch._foreach_mul_(self._memory_of(bucket, indices), self._scale)
        return views

    patient = False
    """Whether no bucket leaves before `flush`: a micro-batch may have more than one backward."""

    in_order = True
    """Whether a bucket leaves after all before it alone: where members sum, all must send in one order."""

    leaving = 0
    """The bucket that a sum is being started for."""

    may_expect_unused = True
    """Whether sums can be added to after they were made; see [Note: unused parameters]."""

    def expect_unused(self, indices: Iterable[int], returned: Iterable[int] = ()) -> None:
        """Wait for these parameters' gradients in no bucket, and send no bucket that has no others.

        All members must name the same ones, after `begin`.

        Args:
            indices: numbers of the parameters.
            returned: numbers of parameters whose buckets are sent all the same.
        """
        self._unused = frozenset(indices)
        if self._unused:
            sent = {self.layout.slots[index].bucket for index in returned}
            self._left_out = frozenset(
                bucket
                for bucket, members in enumerate(self.layout.members)
                if bucket not in sent and self._unused.issuperset(members)
            )
        for index in sorted(self._unused, reverse=True):
            self._count_in(self.layout.slots[index].bucket)

    may_reorder = True
    """Whether buckets may leave in another order than the layout's."""

    def use_order(self, order: Sequence[int]) -> None:
        """Send the buckets in this order from the next step on; all members must do so in the same step."""
        self._order = list(order)

    def filled(self) -> list[int]:
        """Return the buckets in the order in which the running step has filled them."""
        return list(self._filled)

    def is_late(self, index: int) -> bool:
        """Whether a gradient for the parameter came after its bucket had left."""
        return index in self._late

    def start_late(self, indices: Sequence[int], start_sum: StartSum) -> list[tuple[torch.Tensor, Work]]:
        """Begin to sum what was late for these parameters, here or at other members; one sum for each dtype.

        Args:
            indices: numbers of parameters, the same at all members.
            start_sum: starts the sum of a flat tensor over the members.

        Returns:
            (flat tensor, its sum) in the order of the dtypes' first parameters, for `add_late`.
        """
        self._writers.join(self._late_account)
        return [(flat, start_sum(flat)) for flat in self._late_flats(indices)]

    def add_late(self, indices: Sequence[int], flats: Sequence[torch.Tensor]) -> None:
        """Add the sums of `start_late` to those of the buckets.

        Args:
            indices: numbers of parameters, the same at all members.
            flats: of `start_late`, summed by now.
        """
        offsets = [0] * len(flats)
        numbers = {dtype: number for number, dtype in enumerate(self._dtypes_of(indices))}
        for index in indices:
            view, number = self.views[index], numbers[self.views[index].dtype]
            begin, offsets[number] = offsets[number], offsets[number] + view.numel()
            view.add_(flats[number][begin : offsets[number]].view_as(view))
        self._versions = [flat._version for flat in self._flats]

    def _late_flats(self, indices: Sequence[int]) -> list[torch.Tensor]:
        return [
            torch.cat(
                [
                    self._late.get(index, torch.zeros_like(self.views[index])).reshape(-1)
                    for index in indices
                    if self.views[index].dtype == dtype
                ]
            )
            for dtype in self._dtypes_of(indices)
        ]

    def _dtypes_of(self, indices: Sequence[int]) -> list[torch.dtype]:
        return list(dict.fromkeys(self.views[index].dtype for index in indices))

    @property
    def _late_account(self) -> int:
        """Return the number that `_writers` has for late gradients, which lie in no bucket."""
        return -1

    def begin_backward_pass(self, start_sum: StartSum, left: Collection[int]) -> None:
        """Begin another backward pass of the step.

        Args:
            start_sum: starts the sum of a flat tensor over the members.
            left: numbers of parameters whose last sums are added to.
        """
        self.begin(start_sum)

    @property
    def used(self) -> list[bool]:
        """Return for each parameter whether a gradient was put in during this step."""
        if not self._carried:
            return [number >= 0 for number in self._backward_pass]
        return [number >= 0 or index in self._carried for index, number in enumerate(self._backward_pass)]

    @property
    def any_used(self) -> bool:
        """Whether any gradient was put in during this step."""
        return bool(self._carried) or any(number >= 0 for number in self._backward_pass)

    def has_all(self, micro: int) -> bool:
        """Whether micro-batch number `micro` has put in a gradient for each parameter."""
        return self._backward_pass.count(micro) == len(self._backward_pass)

    def has(self, index: int, micro: int) -> bool:
        """Return whether a micro-batch has put in a gradient for a parameter.

        Args:
            index: number of the parameter.
            micro: number of the micro-batch.
        """
        return self._backward_pass[index] == micro

    @property
    def bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self._flats)

    def carry(self, index: int, gradient: torch.Tensor) -> None:
        """Begin with what an earlier backward pass has left for a parameter.

        Args:
            index: number of the parameter.
            gradient: weighted already, of the parameter's shape.
        """
        bucket = self.layout.slots[index].bucket
        self._check(bucket)
        self._writers.write(bucket, onto=False)
        self.views[index].copy_(gradient)
        self._versions[bucket] = self._flats[bucket]._version
        self._carried.add(index)

    copies = False
    """Whether each bucket is copied before it leaves, from the next one on; see [Note: own sums]."""

    copying_seconds = 0.0
    """Time for which copies have held the running step up; that of the calls, where a device makes them."""

    @property
    def has_own(self) -> bool:
        """Whether what this worker has put in is known apart from what others have; see [Note: own sums]."""
        return all(
            bucket in self._copies or bucket in self._left_out or self._stays(bucket)
            for bucket, is_sent in enumerate(self._is_sent)
            if is_sent
        )

    keeps_what_leaves = False
    """Whether nobody writes into a bucket that has left, as all sums are made elsewhere."""

    def _stays(self, bucket: int) -> bool:
        """Return whether a sum of the bucket, which has left, is made elsewhere than in the bucket."""
        return self.keeps_what_leaves

    def own(self) -> list[torch.Tensor]:
        """Return what this worker has put in, by bucket; the caller's own memory. Only while `has_own`."""
        own = []
        for bucket in range(len(self._flats)):
            copied = self._copies.pop(bucket, None)
            if copied is not None:
                self._memory_of_copies.pop(bucket, None)
            else:
                self._fill(bucket, self.layout.members[bucket])
                self._writers.join(bucket)
                copied = self._copied(bucket)
            own.append(copied)
        self._writers.join(self._late_account)
        for index, late in self._late.items():
            slot = self.layout.slots[index]
            own[slot.bucket][slot.offset : slot.offset + late.numel()].view_as(late).add_(late)
        return own

    keeps_base = False
    """Whether what micro-batches before the last one add up to is kept apart; see [Note: own sums]."""

    @property
    def in_base(self) -> list[bool]:
        """Return for each parameter whether there is a gradient of it in the base."""
        return [index in self._in_base for index in range(len(self._names))]

    def base(self) -> list[torch.Tensor]:
        """Return what all micro-batches but the last one add up to, by bucket; the caller's own memory. There
        is something in the base.
        """
        kept = [torch.zeros_like(flat) for flat in self._base]
        views = self._views_of(kept)
        for index in sorted(self._in_base):
            views[index].copy_(self._base_views[index])
        return kept

    def go_on_with(self, own: Sequence[torch.Tensor], used: Sequence[bool]) -> None:
        """Begin with what an earlier try at the step has put in.

        Args:
            own: as from `own` or `base`.
            used: by parameter, whether there is a gradient of it.
        """
        for bucket, kept in enumerate(own):
            self._check(bucket)
            self._writers.write(bucket, onto=False)
            self._contents(bucket).copy_(kept)
            self._versions[bucket] = self._flats[bucket]._version
        self._carried.update(index for index, is_used in enumerate(used) if is_used)
        if self.keeps_base:
            for index in self._carried:
                self._into_base(index).copy_(self.views[index])

    def _contents(self, bucket: int) -> torch.Tensor:
        """Return the tensor that a bucket's gradients are added up in."""
        return self._flats[bucket]

    def _copied(self, bucket: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of what a bucket's gradients add up to.

        Args:
            bucket: its number.
            into: memory for it, from an earlier call; None: new memory.
        """
        contents = self._contents(bucket)
        return contents.clone() if into is None else into.copy_(contents)

    @property
    def carried(self) -> list[bool]:
        """Return for each parameter whether the step began with a gradient of it."""
        return [index in self._carried for index in range(len(self._names))]

    def put(self, index: int, gradient: torch.Tensor, scale: float, micro: int, last: bool) -> torch.Tensor:
        """Add scale * gradient to a parameter's sum.

        More than one of a micro-batch add up; of the last micro-batch, only while `patient`.

        Args:
            index: number of the parameter.
            gradient: of the parameter's shape.
            scale: of the micro-batch; 0 puts zeros in, whatever the gradient (0 x NaN is NaN).
            micro: number of the micro-batch.
            last: nothing more comes for it in this step.

        Returns:
            The view of the bucket that the sum lies in.
        """
        self._check_new(index, gradient, micro, last)
        again = self._backward_pass[index] == micro
        bucket = self.layout.slots[index].bucket
        self._check(bucket)
        view = self.views[index]
        if self._is_sent[bucket]:
            self._put_late(index, gradient, scale)
            self._backward_pass[index] = micro
            return view
        self._to_base = self.keeps_base and not last
        self._write(index, bucket, gradient, scale)
        self._backward_pass[index] = micro
        if last and not again:
            if index not in self._unused:
                self._count_in(bucket)
            if not self.patient:
                self._send_complete(bucket)
        return self.views[index]

    def _write(self, index: int, bucket: int, gradient: torch.Tensor, scale: float) -> torch.Tensor:
        view = self.views[index]
        first = self._backward_pass[index] < 0 and index not in self._carried
        self._writers.write(bucket, onto=not first)
        if self._to_base:
            view = self._into_base(index)
        elif index in self._only_in_base:
            self._only_in_base.discard(index)
            if scale == 0.0:
                view.copy_(self._base_views[index])
            else:
                torch.add(self._base_views[index], gradient, alpha=scale, out=view)
            self._versions[bucket] = self._flats[bucket]._version
            return view
        if scale == 0.0:
            if first:
                view.zero_()
        elif not first:
            view.add_(gradient, alpha=scale)
        elif scale == 1.0:
            view.copy_(gradient)
        else:
            torch.mul(gradient, scale, out=view)
        self._versions[bucket] = self._flats[bucket]._version
        return view

    def _into_base(self, index: int) -> torch.Tensor:
        """Return where micro-batches before the last one are added up for a parameter."""
        if not self._base:
            self._base = self._new_base()
            self._base_views = self._views_of(self._base)
        self._in_base.add(index)
        self._only_in_base.add(index)
        return self._base_views[index]

    def _new_base(self) -> list[torch.Tensor]:
        """Return memory for the base: zeros, by bucket."""
        return [torch.zeros_like(flat) for flat in self._flats]

    def _put_late(self, index: int, gradient: torch.Tensor, scale: float) -> None:
        self._writers.write(self._late_account, onto=index in self._late)
        late = self._late.get(index)
        if late is None:
            late = self._late[index] = torch.zeros_like(self.views[index])
        if scale != 0.0:
            late.add_(gradient, alpha=scale)

    def flush(self) -> None:
        """Send what has not been sent; parameters without a gradient count as zero."""
        self.close_gathering()
        for bucket, missing in enumerate(self._missing):
            if missing and not self._is_sent[bucket]:
                self._fill(bucket, self.layout.members[bucket])
            self._missing[bucket] = 0
            self._send_complete(bucket)

    def _fill(self, bucket: int, indices: Iterable[int]) -> None:
        """Put in zeros for those of the parameters that have no gradient yet, and the base for those whose
        last micro-batch has none.
        """
        for index in indices:
            has_none = self._backward_pass[index] < 0 and index not in self._carried
            if has_none or index in self._only_in_base:
                self._check(bucket)
                self._writers.write(bucket, onto=not has_none)
                if has_none:
                    self.views[index].zero_()
                else:
                    self.views[index].copy_(self._base_views[index])
                    self._only_in_base.discard(index)
                self._versions[bucket] = self._flats[bucket]._version

    def wait(self) -> None:
        """Wait until all sums are there.

        Raise RuntimeError of the group's, UsageError if a gradient was changed meanwhile.
        """
        wait_for(self._works)
        self.check_untouched()

    def versions(self) -> list[int]:
        """Return a number for each bucket that is another one when anybody has written into it since."""
        return [flat._version for flat in self._flats]

    def check_untouched(self) -> None:
        """Raise UsageError when somebody else has changed a gradient."""
        for bucket in range(len(self._flats)):
            self._check(bucket)

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients by a number, or by a tensor of one number on their device."""
        for flat in self._flats:
            flat.mul_(factor)

    def square_norm(self, indices: Sequence[int]) -> torch.Tensor:
        """Sum of squares over the gradients of these parameters, float64 scalar."""
        if not indices:
            return torch.zeros((), dtype=torch.float64)
        norms = torch._foreach_norm([self.views[index] for index in indices])
        return torch.stack(norms).to(torch.float64).square().sum()

    def settle(self, last: bool) -> None:
        """Finish the sums of a step after its commit vote.

        Args:
            last: all members stop after this step.

        Raises:
            RuntimeError: the group's.
        """

    def end_part(self) -> None:
        """The gradients of a part of the step are all there; nothing is left to do for sums of numbers."""

    closing = False
    """Whether the next body is to be the last one before all members stop."""

    def ends(self, wanted: bool) -> bool:
        """All members agree whether to stop: whether this body is the last one, and not the next."""
        return wanted

    def reopen(self) -> None:
        """Members have stopped: another generation begins."""

    def drop_works(self) -> None:
        """Give the last step's sums back: their group was released, which keeps those that never ended."""
        works, self._works = self._works, []
        if works:
            drop_apart(works)

    def take(self, indices: Iterable[int]) -> None:
        """An optimizer's step takes the sums of these parameters."""

    def committed(self) -> None:
        """The step cannot be dropped any more."""

    def _outgoing(self, bucket: int) -> torch.Tensor:
        """Return the tensor of a bucket that is summed over the members."""
        return self._flats[bucket]

    holds: Callable[[], bool] = staticmethod(lambda: False)
    """Asked before buckets leave: whether none leaves any more, because the step is dropped."""

    def _send_complete(self, bucket: int) -> None:
        """Send what can leave, now that something has come for this bucket."""
        if self.holds():
            return
        if self.in_order:
            while len(self._works) < len(self._order) and self._missing[self._order[len(self._works)]] == 0:
                self._send(self._order[len(self._works)])
        elif not self._missing[bucket] and not self._is_sent[bucket]:
            self._send(bucket)

    def _send(self, bucket: int) -> None:
        if bucket in self._left_out:
            self._leave_out(bucket)
            self._is_sent[bucket] = True
            self._works.append(DONE)
            return
        self._zero_versions.pop(bucket, None)  # sums are written without moving the version
        if self._unused:
            self._fill(bucket, self._unused.intersection(self.layout.members[bucket]))
        self._writers.join(bucket)
        if self.copies:
            self._copy_out(bucket)
        self._is_sent[bucket], self.leaving = True, bucket
        self._works.append(self._start_sum(self._outgoing(bucket)))

    def _leave_out(self, bucket: int) -> None:
        """Have zeros for the sum of a bucket, and for a late one whatever has come for it."""
        members = self.layout.members[bucket]
        came = [index for index in members if self._backward_pass[index] >= 0 or index in self._carried]
        if came or self._zero_versions.get(bucket) != self._flats[bucket]._version:
            self._writers.join(bucket)
            self._fill(bucket, members)
            for index in came:
                self._put_late(index, self.views[index], 1.0)
                self.views[index].zero_()
            self._versions[bucket] = self._zero_versions[bucket] = self._flats[bucket]._version

    def _copy_out(self, bucket: int) -> None:
        began = time.perf_counter()
        kept = self._copied(bucket, self._memory_of_copies.get(bucket))
        self._copies[bucket] = self._memory_of_copies[bucket] = kept
        self.copying_seconds += time.perf_counter() - began

    def _count_in(self, bucket: int) -> None:
        """One gradient less is missing."""
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            self._filled.append(bucket)

    def _check_new(self, index: int, gradient: torch.Tensor, micro: int, last: bool) -> None:
        if last and not self.patient and self._backward_pass[index] == micro:
            raise UsageError(
                f"two gradients for {self._names[index]} in one micro-batch, and the first one is on its way "
                "to the other workers: add the losses up and call backward() once"
            )
        self._check_layout(index, gradient)

    def _check_layout(self, index: int, gradient: torch.Tensor) -> None:
        if gradient.layout != torch.strided:
            raise UsageError(
                f"the gradient of {self._names[index]} is sparse, which is not supported: make the "
                "embedding with sparse=False"
            )

    def _check(self, bucket: int) -> None:
        if self._flats[bucket]._version != self._versions[bucket]:
            raise changed()


def changed() -> UsageError:
    """Return the error for a gradient that somebody has changed before its sum."""
    return UsageError(
        "a gradient was changed between backward() and optimizer.step(): it is already on its way to the "
        "other workers. Give distribute(..., clip_norm=) for clipping, and scale the loss instead of the "
        "gradients"
    )


def removed(name: str) -> UsageError:
    """Return the error for a parameter of this name whose gradient is gone when it is to be summed."""
    return UsageError(f"the gradient of {name} was removed by another hook: remove that hook")


def _is_plain(gradient: torch.Tensor) -> bool:
    """Return whether it is dense, and not part of a graph (`backward(create_graph=True)`)."""
    return gradient.layout is torch.strided and not gradient.requires_grad


def _are_plain(gradients: list[torch.Tensor | None]) -> TypeGuard[list[torch.Tensor]]:
    """Return whether all of them are there and `_is_plain`; without a call for each, as it is asked each step
    for all.
    """
    strided = torch.strided
    for gradient in gradients:
        if gradient is None or gradient.requires_grad or gradient.layout is not strided:
            return False
    return True


def _nbytes(field: Field) -> int:
    return field.numel * field.dtype.itemsize


def _spans(
    layout: Layout, members: Sequence[int], offsets: Sequence[int], chosen: Collection[int]
) -> list[tuple[int, int]]:
    """Return (start, end) in elements of the chosen parameters' places; neighbours are one piece. PURE.

    Args:
        layout: of the buckets.
        members: the parameters that lie in one of them, in the order of its memory.
        offsets: where each parameter begins, by its number.
        chosen: numbers of some of the members.
    """
    spans: list[tuple[int, int]] = []
    joins = False
    for index in members:
        is_chosen = index in chosen
        if is_chosen:
            start = offsets[index]
            end = start + layout.fields[index].numel
            if joins:
                spans[-1] = spans[-1][0], end
            else:
                spans.append((start, end))
        joins = is_chosen
    return spans


def _unbound() -> Work:
    raise RuntimeError("begin() comes first")
