"""The instrumented model and optimizer: gradients into buckets, reductions before the step, or undo."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from springtide import faults
from springtide.buffers import Buffers
from springtide.data.batch import Batch
from springtide.data.ledger import contribution
from springtide.errors import Dropped, PartDone, SpringtideError, UsageError
from springtide.exact.buckets import ExactBuckets
from springtide.exact.parts import Kept, total_ids
from springtide.exact.rounding import BLOCK
from springtide.exact.settings import describe
from springtide.exact.step import ExactStep
from springtide.exchange import side
from springtide.exchange.buckets import Buckets
from springtide.exchange.combine import pack, unpack
from springtide.exchange.device import choose_backend
from springtide.exchange.groups import Group, Work, peers_in
from springtide.exchange.layout import Field, layout_hash, plan_layout
from springtide.randomness import seed_part
from springtide.state import State
from springtide.transaction import Phase, Transaction
from springtide.undo import Undo


@dataclass(slots=True)
class Deal:
    """What a body works on. number: the step that it would commit, from 1. stage, epoch: of its samples.

    part: whose random numbers it draws. first, last: of the bodies that this worker runs for the step (more
    than one in exact mode only).
    """

    batch: Batch
    group: Group
    number: int
    seed: int
    stage: int
    epoch: int
    part: int
    first: bool = True
    last: bool = True


@dataclass(slots=True)
class Body:
    """Account of the running body; times in seconds."""

    deal: Deal
    began: float
    reports: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    result: side.Result | None = None
    exposed_seconds: float = 0.0
    backward_seconds: float = 0.0
    sums_began: float = 0.0
    communication_seconds: float = 0.0  # from the first reduction's begin to the last one's end
    reduced_bytes: int = 0
    gradients: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why this member's reductions failed. suspects: IP addresses of peers that the error names."""

    detail: str
    suspects: list[str]


class Trainer:
    """One model and its optimizer.

    Hooks and calls of a body come from the script's thread, `drop` from any. logical_workers: 0 unless sums
    are to be exact.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        tracked: Mapping[str, Any],
        *,
        clip_norm: float | None,
        bucket_bytes: int,
        logical_workers: int = 0,
        backend: str = "Auto",
    ) -> None:
        named = dict(model.named_parameters())
        trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self._frozen = {name: parameter for name, parameter in named.items() if not parameter.requires_grad}
        self._names = list(trained)
        self._parameters = list(trained.values())
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._buffers = Buffers(model)
        self._undo = Undo(self._parameters, self._buffers, optimizer, tracked)
        fields = [_field(name, parameter) for name, parameter in trained.items()]
        layout = plan_layout(fields, bucket_bytes, BLOCK if logical_workers else 1)
        self.device = self._parameters[0].device
        exchange = choose_backend(backend, self.device.type, dist.is_nccl_available())
        self.nccl_device = self.device if exchange == "nccl" else None
        self._exact: ExactStep | None = None
        self.buckets = Buckets(layout, self.device)
        if logical_workers:
            self.buckets = exact = ExactBuckets(layout, logical_workers)
            self._exact = ExactStep(exact, logical_workers)
            tracked = {**tracked, "exact mode": exact.exponents}
        self.state = State(named, self._buffers, optimizer, tracked)
        frozen = [_field(name, parameter) for name, parameter in self._frozen.items()]
        buffers = [
            _field(name, item)
            for name, item in zip(self._buffers.names, self._buffers.current(), strict=True)
        ]
        settings = f"{describe(logical_workers)} {self.device.type} {exchange}"
        agreed = f"{type(optimizer).__name__} {clip_norm} {settings}"
        self.layout_hash = layout_hash(layout, [*frozen, *buffers], agreed)
        self.transaction = Transaction()
        self.failure: Failure | None = None
        self.waiting_since: float | None = None
        self._body: Body | None = None
        self._earlier: Body | None = None
        self._change_wanted = False
        self._moving: tuple[Group | None, list[int]] = (None, [])
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._parameters)
        ]
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        model.register_forward_pre_hook(lambda *_: self.transaction.check_alive())

    # ---- the body

    def begin(self, deal: Deal) -> None:
        """Open a body. Raise UsageError when the step cannot be isolated."""
        self._check_gradients_gone()
        self._check_frozen()
        self.transaction.begin()
        self._undo.begin()
        if self._exact is None:
            self.buckets.begin(self._start_sum)
        else:
            self._exact.begin(deal.group, deal.number, deal.first, deal.last, self._start_sum)
        seed_part(deal.seed, deal.number, deal.part)
        self._body = Body(deal, time.perf_counter())
        if self._earlier is not None and not deal.first:
            self._body.began, self._body.reports = self._earlier.began, self._earlier.reports
        faults.reach("body", deal.number)

    def report(self, values: Mapping[str, float]) -> None:
        """Values of the current micro-batch, which count with its weight."""
        if self.transaction.phase in (Phase.STEPPING, Phase.STEPPED):
            raise UsageError(
                "report() after optimizer.step() in the same body comes too late, because values travel "
                "with the gradients: call report() before optimizer.step(), or after the body"
            )
        self.transaction.require_open("report()")
        body = self._running()
        weight = body.deal.batch.micro.current_weight
        for name, value in values.items():
            body.reports.setdefault(name, []).append((float(value), weight))
        if len(body.reports) > side.MOST_VALUES:
            raise UsageError(
                f"report(): at most {side.MOST_VALUES} different values in a step, got {sorted(body.reports)}"
            )

    def want_change(self, wanted: bool) -> None:
        """Whether this member asks all to stop after the running step; the next side reduction says so.

        Any thread.
        """
        self._change_wanted = wanted

    def end_dropped(self) -> None:
        """Put back what the dropped body moved. Raise UsageError when it cannot be."""
        self._undo.put_back()
        self._body = self._earlier = None
        self.transaction.end()

    def end_part(self) -> None:
        """The body of a part has ended, and its gradients are kept: put back the rest of what it moved.

        Raise UsageError when it cannot be.
        """
        self._undo.put_back()
        self._body, self._earlier = None, self._body
        self.transaction.end()

    def end_stepped(self) -> Body:
        """The body has ended after its optimizer step; return its account.

        Raise UsageError if it made no step.
        """
        phase = self.transaction.phase
        body = self._running()
        if phase in (Phase.OPEN, Phase.DROPPED):
            missing = (
                "without backward() and optimizer.step()"
                if not any(self.buckets.used)
                else "without optimizer.step()"
            )
            raise UsageError(
                f"the body of step {body.deal.number} ended {missing}: a body holds one whole step on every "
                "worker. Do not skip batches with `continue` or `if`; accumulate gradients over "
                "batch.split(m), not over bodies"
            )
        if phase is Phase.STEPPING:
            raise SpringtideError(
                f"optimizer.step() of step {body.deal.number} raised an exception that the script caught: "
                "the parameters may be half updated; let the exception end the process"
            )
        self._body = self._earlier = None
        return body

    def drop(self, reason: str) -> bool:
        return self.transaction.drop(reason)

    # ---- hooks

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if self.transaction.phase is Phase.IDLE:
            return  # gradients outside of a step are the script's own affair
        self.transaction.require_open("backward()")
        body = self._running()
        micro = body.deal.batch.micro
        try:
            micro.contribute()
        except RuntimeError as error:
            raise UsageError(str(error)) from None
        gradient = parameter.grad
        if gradient is None:
            raise UsageError(
                f"the gradient of {self._names[index]} was removed by another hook: remove that hook"
            )
        last = micro.is_last
        view = self.buckets.put(index, gradient, micro.scale, micro.index, last)
        parameter.grad = view if last else None
        body.gradients += 1
        if body.gradients == (len(self._parameters) + 1) // 2:
            faults.reach("backward", body.deal.number)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.transaction.require_open("optimizer.step()")
        body = self._running()
        if kwargs.get("closure") is not None or any(callable(item) for item in args[1:]):
            raise UsageError(
                "optimizer.step(closure) is not supported: call backward() in the body, then optimizer.step()"
            )
        deal = body.deal
        micro = deal.batch.micro
        if micro.remaining_samples or (deal.batch.standin and not any(self.buckets.used)):
            raise UsageError(
                f"optimizer.step() before backward() of all samples of the batch ({micro.remaining_samples} "
                "are missing): call loss.backward() for the batch, or for each micro-batch of batch.split()"
            )
        self._undo.check_untouched()
        self._check_gradients_ours()
        own = self._own_part(body)
        parts = [own] if self._exact is None else self._exact.keep(own)
        if not deal.last:
            self._end_gradients()
        faults.reach("gradients", deal.number)
        started = time.perf_counter()
        body.backward_seconds = started - body.began
        self.buckets.flush()
        part = self._contribution(body, parts)
        fields = side.encode(part)
        expected = self._expected_buffers(deal.group)
        vector = torch.cat((fields, self._packed(expected, deal)))
        work = self._start_sum(vector)
        self._reduce(self.buckets.wait)
        self._reduce(work.wait)
        result = side.decode(vector[: len(fields)], part, deal.group.size)
        if not result.same_step:
            raise SpringtideError(
                f"this worker is at step {deal.number} and another member of its group is not; this must "
                "not happen: please report it with the logs of all workers"
            )
        weight = result.weight
        if self._exact is not None:
            if self._exact.misfit(result.extra):
                self._do_again(self._exact, deal)
            weight = self._exact.total_weight(result.extra)
        try:
            correction = micro.correction(weight)
        except ValueError as error:
            raise UsageError(str(error)) from None
        changed = [index for index, anywhere in enumerate(result.changed) if anywhere]
        combined: dict[int, torch.Tensor] = {}
        if changed and self._buffers_travel(deal.group):
            riders = [(expected, vector[len(fields) :])]
            if late := [index for index in changed if index not in set(expected)]:
                rest = self._packed(late, deal)
                self._reduce(self._start_sum(rest).wait)
                riders.append((late, rest))
            for indices, total in riders:
                combined |= zip(indices, self._unpacked(indices, total, result), strict=True)
        self._moving = (deal.group, changed)
        ended = time.perf_counter()
        body.exposed_seconds = ended - started
        body.communication_seconds = ended - (body.sums_began or started)
        faults.reach("reduced", deal.number)
        self.transaction.start_stepping()
        faults.reach("stepping", deal.number)
        if combined:
            self._buffers.write(changed, combined)
        body.result = result
        if self._exact is not None:
            self._exact.commit(deal.number)
        self._place_gradients(result.used, correction)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.transaction.finish_stepping()
        faults.reach("stepped", self._running().deal.number)

    # ---- parts

    def _own_part(self, body: Body) -> Kept:
        """What the running body puts in."""
        deal = body.deal
        ids = contribution(deal.batch.micro.contributed_ids, deal.stage, deal.epoch)
        moved = [moved and not deal.batch.standin for moved in self._buffers.moved()]
        values: dict[int, torch.Tensor] = {}
        if self._exact is not None:
            values = self._buffers.copies([index for index, has_moved in enumerate(moved) if has_moved])
        return Kept(deal.part, deal.batch.micro.contributed_weight, ids, moved, values)

    def _end_gradients(self) -> NoReturn:
        """Leave the body of a part whose step goes on with another one."""
        assert isinstance(self.buckets, ExactBuckets)
        self.buckets.end_part()
        self.transaction.set_aside()
        raise PartDone

    def _do_again(self, exact: ExactStep, deal: Deal) -> NoReturn:
        """Agree on exponents that fit, and leave the body: its samples are dealt again."""
        needed = exact.needed()
        self._reduce(lambda: deal.group.start_max(needed).wait())
        exact.do_again(deal.group, deal.number, needed)
        self.transaction.drop("a gradient did not fit its block's exponent; the step is done again")
        raise Dropped(self.transaction.reason)

    def _contribution(self, body: Body, parts: list[Kept]) -> side.Contribution:
        deal = body.deal
        ids = total_ids(parts)
        weight = math.fsum(part.weight for part in parts)
        body.samples = ids.samples
        return side.Contribution(
            step=deal.number,
            weight=weight,
            count=ids.samples,
            hash_lo=ids.hash_lo,
            hash_hi=ids.hash_hi,
            change=self._change_wanted,
            seconds=time.perf_counter() - body.began,
            used=[used and not deal.batch.standin for used in self.buckets.used],
            changed=[any(flags) for flags in zip(*(part.moved for part in parts), strict=True)],
            values={name: _mean(entries) for name, entries in body.reports.items()},
            values_weight=weight,
            extra=[] if self._exact is None else self._exact.extra(),
        )

    def _expected_buffers(self, group: Group) -> list[int]:
        """The buffers that ride with the side reduction: those that moved in the group's last step, which all
        members know alike. A buffer that moves for the first time takes a second round.
        """
        known, moved = self._moving
        return moved if known is group and self._buffers_travel(group) else []

    def _buffers_travel(self, group: Group) -> bool:
        """Whether there are buffers to combine: those of other members, or of logical parts."""
        return group.size > 1 or self._exact is not None

    def _packed(self, indices: list[int], deal: Deal) -> torch.Tensor:
        if self._exact is not None:
            return self._exact.pack(indices, self._buffers.committed)
        buffers = self._buffers.current()
        return pack(
            [buffers[index] for index in indices], deal.batch.micro.contributed_weight, deal.group.rank == 0
        )

    def _unpacked(self, indices: list[int], total: torch.Tensor, result: side.Result) -> list[torch.Tensor]:
        if self._exact is not None:
            return self._exact.unpack(total, indices, self._buffers.committed, result.extra)
        buffers = self._buffers.current()
        return unpack(total, [buffers[index] for index in indices], result.weight)

    def _place_gradients(self, used: list[bool], correction: float) -> None:
        if correction != 1.0:
            self.buckets.scale(correction)
        for index, parameter in enumerate(self._parameters):
            parameter.grad = self.buckets.views[index] if used[index] else None
        if self._clip_norm is not None:
            norm = math.sqrt(
                float(self.buckets.square_norm([index for index, is_used in enumerate(used) if is_used]))
            )
            coefficient = self._clip_norm / (norm + 1e-6)
            if not coefficient >= 1.0:
                self.buckets.scale(coefficient)

    def _check_gradients_ours(self) -> None:
        last_round = self._running().deal.batch.micro.index
        for index, parameter in enumerate(self._parameters):
            expected = self.buckets.views[index] if self.buckets.has(index, last_round) else None
            if parameter.grad is not expected:
                raise UsageError(
                    f"the gradient of {self._names[index]} was replaced between backward() and "
                    "optimizer.step(): call optimizer.zero_grad() after optimizer.step(), and give "
                    "distribute(..., clip_norm=) for clipping"
                )

    def _check_gradients_gone(self) -> None:
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and parameter.grad is not self.buckets.views[index]:
                raise UsageError(
                    f"{self._names[index]} has a gradient from outside of the step, which would be lost: "
                    "call optimizer.zero_grad() before `with springtide.step():`"
                )

    def _check_frozen(self) -> None:
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise UsageError(
                    f"parameter {name} was frozen when distribute() was called and requires a gradient now: "
                    "let everything that will ever be trained require gradients when calling distribute()"
                )

    def _start_sum(self, tensor: torch.Tensor) -> Work:
        body = self._running()
        body.sums_began = body.sums_began or time.perf_counter()
        body.reduced_bytes += tensor.nbytes
        try:
            return body.deal.group.start_sum(tensor)
        except RuntimeError as error:
            self._fail(error)

    def _reduce(self, wait: Callable[[], object]) -> None:
        self.waiting_since = time.monotonic()
        try:
            wait()
        except SpringtideError:
            raise
        except RuntimeError as error:
            self._fail(error)
        finally:
            self.waiting_since = None

    def _fail(self, error: RuntimeError) -> NoReturn:
        """A reduction failed: because the step was dropped, or else the step is dropped for it."""
        if self.transaction.phase is not Phase.DROPPED:
            self.failure = Failure(str(error), peers_in(error))
            self.transaction.drop("a reduction failed")
        self._running().deal.group.shut()
        raise Dropped(self.transaction.reason) from None

    def _running(self) -> Body:
        if self._body is None:
            raise UsageError(
                "outside of a step: put the training code of each batch into `with springtide.step():`"
            )
        return self._body


def _field(name: str, tensor: torch.Tensor) -> Field:
    return Field(name, tuple(tensor.shape), tensor.dtype)


def _mean(entries: list[tuple[float, float]]) -> float:
    total = math.fsum(weight for _, weight in entries)
    return math.fsum(value * weight for value, weight in entries) / total if total else 0.0
