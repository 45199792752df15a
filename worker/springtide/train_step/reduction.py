"""All sums of a step over the members of its group: gradients, the commit vote, buffers; and what follows
when one fails."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from springtide import faults
from springtide.comm import commit_vote
from springtide.comm.buckets import Buckets
from springtide.comm.combine import Combined, Packing, Rule, Share, on_device
from springtide.comm.exchanged_sums import MOST_AT_ONCE
from springtide.comm.process_group import Group, Work, peers_in, wait_for
from springtide.data.balance import Figure
from springtide.data.ledger import contribution
from springtide.embedding.handle import Handle
from springtide.embedding.step import StepTables
from springtide.errors import Dropped, SpringtideError, UsageError
from springtide.exact.parts import PartContribution, total_ids
from springtide.exact.step import ExactStep
from springtide.pods.pod import Pod
from springtide.ps.backend import ParameterBackend
from springtide.ps.connections import servers_in
from springtide.train_step.bucket_order import BucketOrder
from springtide.train_step.buffers import Buffers
from springtide.train_step.context import Failure, StepAssignment, StepContext
from springtide.train_step.gradients import Gradients, clip_coefficient
from springtide.train_step.hyperparameters import Hyperparameters
from springtide.train_step.late_buffers import adopt_arrived
from springtide.train_step.replicas import Found, Replicas
from springtide.train_step.transaction import Phase, Transaction

_MAX_BACKWARD_PASSES = 64  # told apart in the commit vote's step number


@dataclass(frozen=True, slots=True)
class Reduced:
    """The result of a reduction, equal on all members.

    Attributes:
        result: of the commit vote.
        correction: factor for the sums of gradients.
        combined: buffers by index, to be written into the model.
    """

    result: commit_vote.Result
    correction: float
    combined: Mapping[int, torch.Tensor]
    norm: float | None = None
    """Norm of the sums of gradients in the step's home (on servers, say), without the correction."""

    @property
    def norm_elsewhere(self) -> float:
        """Return the norm of the gradients on servers as they count; 0 where there are none."""
        return 0.0 if self.norm is None else self.norm * abs(self.correction)


def commit_on(
    home: ParameterBackend,
    reduced: Reduced,
    gradients: Gradients,
    clip_norm: float | None,
    inverse: float = 1.0,
    skip: bool = False,
    held: float = 1.0,
) -> None:
    """Have the home make its part of the step; the script's optimizer finds no gradients of that.

    Args:
        home: of parameters or tables.
        reduced: the step's sums.
        gradients: of the parameters.
        clip_norm: of all gradients together; None: no clipping.
        inverse: that a GradScaler multiplies gradients by.
        skip: a gradient is not finite, so nothing changes.
        held: that the gradients in this process are still multiplied with.
    """
    factors = [reduced.correction, inverse]
    if clip_norm is not None and reduced.norm is not None and not skip:
        here = 0.0 if home.dense else gradients.norm() / held
        norm = math.hypot(reduced.norm_elsewhere * inverse, here)
        gradients.unclipped = norm
        factors.append(clip_coefficient(clip_norm, norm))
    home.commit(factors, [index for index, used in enumerate(reduced.result.used) if not used], skip)
    if home.dense:
        gradients.forget()


def own_part(
    assignment: StepAssignment, buffers: Buffers, exact: bool, kept_buffers: Collection[int] = ()
) -> PartContribution:
    """Return the contribution of the body that has worked on this assignment.

    Args:
        assignment: of the body.
        buffers: of the model.
        exact: in exact mode, where the buffers that moved go along.
        kept_buffers: numbers of those that an earlier try at the step has moved.

    Raises:
        UsageError: in exact mode, a buffer was None and is a tensor now.
    """
    ids = contribution(assignment.batch.micro.contributed_ids, assignment.stage, assignment.epoch)
    moved = [
        has_moved and (not assignment.batch.standin or index in kept_buffers) and rule is not Rule.LOCAL
        for index, (has_moved, rule) in enumerate(zip(buffers.moved(), buffers.rules, strict=True))
    ]
    if exact and buffers.arrived:
        raise UsageError(
            f"one of the model's buffers {', '.join(buffers.awaited)} was None and is a tensor now: in exact "
            "mode it has to be there before distribute(); run a batch through the model first"
        )
    values: dict[int, torch.Tensor] = {}
    if exact:
        values = buffers.copies([index for index, has_moved in enumerate(moved) if has_moved])
    return PartContribution(assignment.part, assignment.batch.micro.contributed_weight, ids, moved, values)


@dataclass(frozen=True, slots=True)
class _Riders:
    """The buffers that members combine in a step, and their ways.

    Attributes:
        indices: all of them.
        host_indices: those that ride with the commit vote.
        host: their way; unused in exact mode.
        there_indices: those that are summed on their device.
        there: their way.
    """

    indices: list[int]
    host_indices: list[int]
    host: Packing
    there_indices: list[int]
    there: Packing


@dataclass
class _Packed:
    """Buffers on their way.

    Attributes:
        riders: which they are.
        here: float64 on the CPU, the numbers that ride with the commit vote.
        there: on their device.
    """

    riders: _Riders
    here: torch.Tensor
    there: list[torch.Tensor]


class _Void:
    """A sum that was not begun, of a step that is dropped."""

    def wait(self) -> object:
        raise RuntimeError("the step was dropped before this sum began")

    def is_completed(self) -> bool:
        return True


class Reduction:
    """The sums of one model's steps. Used from the script's thread; `failure` and `waiting_since` are read by
    others.

    change_wanted: whether this member asks all to stop after the running step. waiting_since: monotonic time
    since when a sum is being waited for. save_wish: what it puts in for a checkpoint, by the group's rank.
    in_batches: whether members make no steps in common; of those that work on a range together, the first
    one's options count, and the others may have gone past other ranges than it. figure: this member's, for
    the cut by speed. found: what this member has found of streams of shards.
    """

    def __init__(
        self,
        buckets: Buckets,
        buffers: Buffers,
        exact: ExactStep | None,
        transaction: Transaction,
        home: ParameterBackend | None = None,
        tables: Mapping[int, Handle] | None = None,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        replicas: Replicas | None = None,
        pod: Pod | None = None,
    ) -> None:
        """home: of parameters that this process does not step itself. tables: by parameter's number.
        optimizers: whose options members compare. replicas: compares what has to be equal on all members.
        pod: whose processes hold parts, so that gradients are summed over those of one local rank.
        """
        self._pod = pod
        self.replicas = replicas or Replicas(buffers, None, None)
        self._buckets = buckets
        self._in_place = buckets.bytes > MOST_AT_ONCE  # all may leave before the first one is waited for
        self._home = home
        self._tables = None if home is None else StepTables(tables or {}, home)
        self._buffers = buffers
        self._summed: dict[int, torch.Tensor] = {}
        """Buffers whose changes the running body has added up, as it has left them."""
        self._exact = exact
        self._transaction = transaction
        self._body: StepContext | None = None
        self._moving: tuple[Group | None, list[int]] = (None, [])
        self._riders: _Riders | None = None
        # Most models have no buffers that move, in any step.
        self._no_riders = _Riders([], [], Packing([], []), [], Packing([], []))
        self._no_numbers = torch.zeros(0, dtype=torch.float64)
        self._unused: tuple[Group | None, list[int]] = (None, [])
        """The parameters without a gradient in the group's last step, which all its members know alike."""
        self._returned: tuple[Group | None, set[int]] = (None, set())
        """Parameters that were not expected in a step of the group, and had a gradient all the same; all its
        members know them alike."""
        self.expects_unused = False
        """Whether such a parameter holds up no bucket in the next step; see [Note: unused parameters]."""
        self.failure: Failure | None = None
        self.waiting_since: float | None = None
        self.change_wanted = False
        self.save_wish: Callable[[int], float] = lambda rank: 0.0
        self.in_batches: Callable[[], bool] = lambda: False
        self.figure: Callable[[], Figure] = Figure
        self.found: Callable[[], Sequence[float]] = tuple
        self.newcomer = True
        """Whether it was given the state that the generation began from, and has made no step since."""
        self._hyperparameters = Hyperparameters(optimizers)
        self._order = BucketOrder(buckets, home is None or not home.dense)

    def begin(self, body: StepContext) -> None:
        """Count all sums that begin from here on for this body."""
        self._body, self._summed = body, {}
        self._order.begin(body.assignment.group)
        if self._home is not None:
            self._home.begin_step()
        if self._tables is not None:
            self._tables.begin()

    def expected_unused(self) -> list[int]:
        """Return the parameters that the running body's buckets do not wait for."""
        known, unused = self._unused
        return unused if self.expects_unused and known is self._running().assignment.group else []

    def expect_unused(self) -> None:
        """Have the running body's buckets not wait for those."""
        if unused := self.expected_unused():
            known, returned = self._returned
            same = known is self._running().assignment.group
            self._buckets.expect_unused(unused, returned if same else ())

    def begin_backward_pass(self, left: Mapping[int, float]) -> None:
        """Another backward of the body begins; as `StepTables.begin_backward_pass`."""
        if self._tables is not None:
            self._tables.begin_backward_pass(left)

    def start_sum(self, tensor: torch.Tensor) -> Work:
        """Begin to replace the tensor by its sum over the members. Raise Dropped when the group is broken."""
        return self._start_sum(tensor, self._running().assignment.group)

    def _start_sum(self, tensor: torch.Tensor, group: Group, in_place: bool = False) -> Work:
        body = self._running()
        body.sums_began = body.sums_began or time.perf_counter()
        body.reduced_bytes += tensor.nbytes
        try:
            return group.start_sum(tensor, in_place=in_place)
        except RuntimeError as error:
            self._fail(error)

    def start_gradients(self, tensor: torch.Tensor) -> Work:
        """Begin to sum the bucket of gradients that leaves: by servers where they hold it, by `start_sum`
        otherwise.
        """
        if self._pod is not None and self._pod.row is not None:
            return self._start_sum(tensor, self._pod.row, self._in_place)
        body = self._running()
        body.sums_began = body.sums_began or time.perf_counter()
        try:
            if self._home is not None and self._home.dense:
                pushed = self._home.push(tensor, self._buckets.leaving)
                body.reduced_bytes += pushed.nbytes
                return pushed
            body.reduced_bytes += tensor.nbytes
            return body.assignment.group.start_sum(tensor, in_place=self._in_place)
        except SpringtideError:
            raise
        except RuntimeError as error:
            self._drop_for(error)
            if self._transaction.phase is Phase.FINISHING and self._buckets.has_own:
                return _Void()  # the micro-batch goes on, and its gradients stay here
            self._leave()

    def put_rows(self, index: int, scale: float, last: bool, micro: int) -> None:
        """Take the gradients of a table's rows, when a backward pass has reached a parameter that may stand
        for one.

        Args:
            index: number of the parameter.
            scale: of the micro-batch; 0 leaves its rows out.
            last: it is the step's last micro-batch.
            micro: number of the micro-batch.

        Raises:
            Dropped: the servers fail.
        """
        if self._tables is None:
            return
        try:
            self._tables.put(index, scale, last, micro)
        except SpringtideError:
            raise
        except RuntimeError as error:
            self._fail(error)

    def ask(self, wait: Callable[[], object]) -> str | None:
        """Wait for servers. In a step that is not committed, raise Dropped when it fails; return why between
        steps. After optimizer.step() there is no way back: raise SpringtideError.
        """
        self._transaction.check_alive()
        phase = self._transaction.phase
        # Another thread may drop the step at any time: what it waits for does not come then, and is no loss.
        if phase in (Phase.OPEN, Phase.FINISHING, Phase.DROPPED):
            self._wait(wait)
            return None
        try:
            wait()
        except SpringtideError:
            raise
        except RuntimeError as error:
            if phase is not Phase.IDLE:
                raise SpringtideError(f"the values of a committed step cannot be had: {error}") from None
            self.failure = Failure(str(error), servers_in(error))
            return str(error)
        return None

    def complete(self, body: StepContext, parts: list[PartContribution]) -> Reduced:
        """Wait for all sums of the backward pass.

        Args:
            body: the running one.
            parts: what this member's bodies have put in.

        Returns:
            The sums, and what follows from them for the step.

        Raises:
            Dropped: a sum fails, or the step has to be done again.
            SpringtideError: the step cannot be committed.
            UsageError: it cannot, for what the script does.
        """
        assignment = body.assignment
        faults.reach_in(body.backward_pass, "gradients", assignment.number)
        started = time.perf_counter()
        body.backward_seconds = started - body.began - body.exposed_seconds
        body.waited_before = body.waited_seconds
        body.own_seconds = started - body.began - body.waited_before
        self._buckets.flush()
        if self._transaction.phase is Phase.FINISHING:
            self._leave()  # buckets that have not left would be missed by members that go on
        part = self._contribution(body, parts)
        fields = commit_vote.encode(part)
        expected = self._expected_buffers(assignment.group)
        riders = self._packed(expected, assignment)
        vector = torch.cat((fields, riders.here)) if expected else fields
        norm = None if self._home is None else self._put_on_servers(self._home, body)
        self._wait_for_sums(vector, riders.there)
        result = commit_vote.decode(vector[: len(fields)], part, assignment.group.size)
        self._check_vote(result, body)
        self.newcomer = False
        if not result.replicas_agree:
            found = self.replicas.after_vote(assignment.number, part.digest, assignment.group, self.total)
            body.found, self.change_wanted = found, self.change_wanted or found.mends
        if self._exact is None:
            self._order.take(result.extra)
        self._sum_late(assignment.group, result)
        self._wait(lambda: self._buckets.settle(result.change))
        weight = self._total_weight(result, assignment)
        try:
            correction = assignment.batch.micro.correction(weight)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if expected:
            riders.here = vector[len(fields) :]
        combined = self._combined(result, riders, assignment)
        if self._buffers.awaited and result.changed[-1]:
            adopt_arrived(
                self._buffers,
                assignment.group.rank == 0,
                lambda tensor: self._wait(self.start_sum(tensor).wait),
            )
        ended = time.perf_counter()
        body.exposed_seconds += ended - started
        body.communication_seconds += ended - (body.sums_began or started)
        body.sums_began = 0.0
        body.weight, body.reported = math.fsum(kept.weight for kept in parts), body.entries
        ends = self._buckets.ends(result.change)
        ends = ends if self._home is None else self._home.ends(ends)
        body.result, body.change = result, body.change or ends
        faults.reach_in(body.backward_pass, "reduced", assignment.number)
        return Reduced(result, correction, combined, norm)

    def _put_on_servers(self, home: ParameterBackend, body: StepContext) -> float | None:
        """Wait until all gradients of all members are on the servers: before that nobody may learn that the
        step counts. Return the norm of their sums; see `Reduced.norm`.
        """
        number = body.assignment.number
        if home.dense:
            self._wait(self._buckets.wait)
        if self._tables is not None:
            self._wait(self._tables.flush)
        faults.reach_in(body.backward_pass, "pushed", number)
        norm = self._prepare(home)
        faults.reach_in(body.backward_pass, "prepared", number)
        return norm

    def _wait_for_sums(self, vector: torch.Tensor, there: list[torch.Tensor]) -> None:
        """Sum the commit vote and the buffers on a device; wait for these and for all buckets.

        Args:
            vector: the commit vote, and what rides with it.
            there: buffers, on their device.
        """
        work = self.start_sum(vector)
        started = [self.start_sum(tensor) for tensor in there]
        # They began after the buckets, so that the host waits once.
        self._wait(partial(wait_for, started))
        self._wait(self._buckets.wait)
        self._wait(work.wait)

    def _check_vote(self, result: commit_vote.Result, body: StepContext) -> None:
        """Raise SpringtideError if the members are at different steps, UsageError if their optimizers'
        options differ.
        """
        if not result.same_step:
            raise SpringtideError(
                f"this worker is at optimizer.step() number {body.backward_pass + 1} of step "
                f"{body.assignment.number} and another member of its group is not: all workers have to make "
                "the same optimizer steps, whatever their samples are"
            )
        if not result.options_fit and not self.in_batches():
            raise UsageError(
                f"at step {body.assignment.number} this worker's optimizer has other options than the other "
                f"workers' ({self._hyperparameters.described()}): replicas would drift apart. Set options "
                "from what all workers have alike: a scheduler or a counter that distribute() was given by "
                "name (a count of the script's own begins anew in a worker that joins), a mean over all "
                "workers (not this worker's loss)"
            )

    def _total_weight(self, result: commit_vote.Result, assignment: StepAssignment) -> float:
        """Return the weight of all samples. In exact mode, raise Dropped when the step is done again."""
        if self._exact is None:
            return result.weight
        if self._exact.misfit(result.extra):
            self._do_again(self._exact, assignment)
        return self._exact.total_weight(result.extra)

    def _sum_late(self, group: Group, result: commit_vote.Result) -> None:
        """Sum the gradients that came after their buckets had left, at any member; remember who had none."""
        expected = self.expected_unused()
        self._unused = group, [index for index, used in enumerate(result.used) if not used]
        if late := [index for index, is_late in zip(expected, result.late, strict=True) if is_late]:
            started = self._buckets.start_late(late, self.start_sum)
            for _, work in started:
                self._wait(work.wait)
            self._buckets.add_late(late, [flat for flat, _ in started])
            known, returned = self._returned
            self._returned = group, (returned if known is group else set()).union(late)

    @property
    def running(self) -> StepContext | None:
        """The body that is worked on, or was last."""
        return self._body

    def total(self, sums: torch.Tensor) -> None:
        """Replace the tensor by its sum over the members. Raise Dropped when that fails."""
        group = self._running().assignment.group
        self._wait(lambda: group.start_sum(sums).wait())

    def compare_replicas(self, group: Group) -> Found:
        """Compare the members' states between two steps; as `Replicas.compare`. Raise RuntimeError when a sum
        fails.
        """
        if self.in_batches():
            return Found()

        def total(sums: torch.Tensor) -> None:
            self.waiting_since = time.monotonic()
            try:
                group.start_sum(sums).wait()
            finally:
                self.waiting_since = None

        return self.replicas.compare(group, total)

    def mean(self, value: float, body: StepContext) -> float:
        """Return the mean over the samples of all members.

        Args:
            value: mean over this member's samples.
            body: the running one.

        Raises:
            Dropped: the sum fails.
        """
        weight = body.weight
        sums = torch.tensor([value * weight if weight > 0 else 0.0, weight], dtype=torch.float64)
        self._wait(self.start_sum(sums).wait)
        return float(sums[0] / sums[1])

    def mean_loss(self, loss: Any, body: StepContext) -> Any:
        """Return the mean of a closure's result: a number, a tensor with one element, or None.

        Args:
            loss: of this member's samples.
            body: the running one.

        Raises:
            Dropped: the sum fails.
        """
        if loss is None:
            return None
        if not isinstance(loss, torch.Tensor):
            return self.mean(float(loss), body)
        return torch.full_like(loss.detach(), self.mean(float(loss.detach()), body))

    def _combined(
        self, result: commit_vote.Result, expected: _Packed, assignment: StepAssignment
    ) -> Mapping[int, torch.Tensor]:
        flags = result.changed[: len(self._buffers.names)]
        changed = [index for index, anywhere in enumerate(flags) if anywhere]
        combined: Mapping[int, torch.Tensor] = {}
        if changed and self._buffers_travel(assignment.group):
            combined = self._unpacked(expected, result)
            known = set(expected.riders.indices)
            if late := [index for index in changed if index not in known]:
                rest = self._packed(late, assignment)
                for tensor in (rest.here, *rest.there):
                    self._wait(self.start_sum(tensor).wait)
                combined = {**combined, **self._unpacked(rest, result)}
        self._moving = (assignment.group, changed)
        rules = self._buffers.rules
        if Rule.SUM in rules:  # else nobody asks for single values, and they stay side by side
            self._summed |= {index: value for index, value in combined.items() if rules[index] is Rule.SUM}
        if len(combined) in (0, len(changed)):
            return combined
        return {index: combined[index] for index in changed}

    def _contribution(self, body: StepContext, parts: list[PartContribution]) -> commit_vote.Contribution:
        assignment = body.assignment
        ids = total_ids(parts)
        weight = math.fsum(part.weight for part in parts)
        body.samples = ids.samples
        body.computed_samples = ids.samples - body.carried_samples
        used = self._buckets.carried if assignment.batch.standin else self._buckets.used
        for index in body.zeros:
            used[index] = True
        compares = self._looks_at_others(body)
        return commit_vote.Contribution(
            step=assignment.number * _MAX_BACKWARD_PASSES + body.backward_pass % _MAX_BACKWARD_PASSES,
            weight=weight,
            count=ids.samples,
            hash_lo=ids.hash_lo,
            hash_hi=ids.hash_hi,
            change=self.change_wanted,
            seconds=time.perf_counter() - body.began,
            used=used,
            changed=[
                *(any(flags) for flags in zip(*(part.moved for part in parts), strict=True)),
                *([self._buffers.arrived] if self._buffers.awaited else []),
            ],
            values=body.values(),
            values_weight=weight,
            save=self.save_wish(assignment.group.rank),
            options=self._hyperparameters.hashes(),
            newcomer=self.newcomer,
            extra=self._order.vote(assignment.group) if self._exact is None else self._exact.extra(),
            digest=self.replicas.vote_digest(assignment.number) if compares else 0,
            copies=self.replicas.vote_copies(assignment.number, assignment.group.rank) if compares else 0,
            late=[self._buckets.is_late(index) for index in self.expected_unused()],
            figures=self._figures(assignment.group),
            found=self.found(),
        )

    def _figures(self, group: Group) -> list[float]:
        """Return this member's figures in its place among those of all members."""
        before, own = group.rank, self.figure()
        others = [0.0] * len(own)
        return [*others * before, *map(float, own), *others * (group.size - before - 1)]

    def _looks_at_others(self, body: StepContext) -> bool:
        """Return whether the running step's vote may compare what members have alike."""
        return body.assignment.group.size > 1 and not body.backward_pass and not self.in_batches()

    def _expected_buffers(self, group: Group) -> list[int]:
        """The buffers that ride with the commit vote: those that moved in the group's last step, which all
        members know alike. A buffer that moves for the first time takes a second round.
        """
        known, moved = self._moving
        return moved if known is group and self._buffers_travel(group) else []

    def _buffers_travel(self, group: Group) -> bool:
        """Whether there are buffers to combine: those of other members, or of logical parts."""
        return group.size > 1 or self._exact is not None

    def _riders_of(self, indices: list[int], buffers: list[torch.Tensor]) -> _Riders:
        """Return the ways of these buffers: those of the last step, unless they or their forms are others.

        Args:
            indices: of the buffers.
            buffers: the present tensors, one for each index.
        """
        known = self._riders
        if known is not None and known.indices == indices:
            if not known.there_indices and known.host.fits(buffers):
                return known
            by_index = dict(zip(indices, buffers, strict=True))
            if known.host.fits([by_index[index] for index in known.host_indices]) and known.there.fits(
                [by_index[index] for index in known.there_indices]
            ):
                return known
        rules = self._buffers.rules
        moves = [on_device(buffer, rules[index]) for index, buffer in zip(indices, buffers, strict=True)]
        ways = []
        for wanted in (False, True):
            chosen = [number for number, stays in enumerate(moves) if stays == wanted]
            numbers = [indices[number] for number in chosen]
            way = Packing([buffers[number] for number in chosen], [rules[number] for number in numbers])
            ways.append((numbers, way))
        (host_indices, host), (there_indices, there) = ways
        return _Riders(indices, host_indices, host, there_indices, there)

    def _packed(self, indices: list[int], assignment: StepAssignment) -> _Packed:
        if not indices and self._exact is None:
            return _Packed(self._no_riders, self._no_numbers, [])
        current = self._buffers.current() if indices else []
        self._riders = riders = self._riders_of(indices, [current[index] for index in indices])
        if self._exact is not None:
            here = self._exact.pack(indices, self._buffers.committed, self._buffers.rules)
            return _Packed(riders, here, [])
        share = Share(assignment.batch.micro.contributed_weight, assignment.group.rank, assignment.group.size)
        on_host = [current[index] for index in riders.host_indices]
        here = riders.host.pack(on_host, self._found_by(riders), share)
        there = riders.there.pack_there([current[index] for index in riders.there_indices], share)
        return _Packed(riders, here, there)

    def _found_by(self, riders: _Riders) -> list[torch.Tensor]:
        """Return what the running step, or its last round, has found in the buffers that ride with the commit
        vote; nothing where no rule asks.
        """
        if not riders.host.looks_back:
            return []
        committed, summed = self._buffers.committed, self._summed
        return [summed.get(index, committed[index]) for index in riders.host_indices]

    def _unpacked(self, totals: _Packed, result: commit_vote.Result) -> Mapping[int, torch.Tensor]:
        riders, buffers = totals.riders, self._buffers
        if self._exact is not None:
            indices, rules = riders.indices, buffers.rules
            values = self._exact.unpack(totals.here, indices, buffers.committed, rules, result.extra)
            return dict(zip(indices, values, strict=True))
        size, found = self._running().assignment.group.size, self._found_by(riders)
        flats = riders.host.unpack_flat(totals.here, found, result.weight, size)
        combined = Combined(riders.host, flats, riders.host_indices)
        if not totals.there:
            return combined
        values = riders.there.unpack_there(totals.there, result.weight)
        return {**combined, **dict(zip(riders.there_indices, values, strict=True))}

    def fall_back(self, error: RuntimeError) -> NoReturn:
        """Leave the body, whose step was made and has been undone, since its values do not come."""
        self.failure = Failure(str(error), peers_in(error))
        self._transaction.fall_back("the values of the step did not come")
        self._running().assignment.group.shut()
        raise Dropped(self._transaction.reason) from None

    def do_again(self, reason: str) -> NoReturn:
        """Leave the body, since this member's contribution is spoilt; its samples are assigned again."""
        self._running().is_kept, self._running().before_last = False, None
        if self._home is None and self._running().assignment.group.size == 1:
            self._transaction.drop(reason)
            self._leave()
        self._fail(RuntimeError(reason))

    def _do_again(self, exact: ExactStep, assignment: StepAssignment) -> NoReturn:
        """Agree on exponents that fit, and leave the body: its samples are dealt again."""
        needed = exact.needed()
        self._running().is_kept, self._running().is_void = False, True
        self._wait(lambda: assignment.group.start_max(needed).wait())
        exact.do_again(assignment.group, assignment.number, needed)
        self._transaction.drop("a gradient did not fit its block's exponent; the step is done again")
        self._leave()

    def _prepare(self, home: ParameterBackend) -> float | None:
        found: list[float | None] = []
        self._wait(lambda: found.append(home.prepare()))
        return found[0]

    def _wait(self, wait: Callable[[], object]) -> None:
        self.waiting_since, began = time.monotonic(), time.perf_counter()
        try:
            wait()
        except SpringtideError:
            raise
        except RuntimeError as error:
            self._fail(error)
        finally:
            self.waiting_since = None
            if self._body is not None:
                self._body.waited_seconds += time.perf_counter() - began

    def _fail(self, error: RuntimeError) -> NoReturn:
        """A reduction failed: because the step was dropped, or else the step is dropped for it."""
        self._drop_for(error)
        self._leave()

    def _drop_for(self, error: RuntimeError) -> None:
        if self._transaction.phase not in (Phase.FINISHING, Phase.DROPPED):
            self.failure = Failure(str(error), [*peers_in(error), *servers_in(error)])
            self._transaction.drop("a reduction failed")
        if self._body is not None:  # none yet, where a body begins with a look at values
            self._body.assignment.group.shut()

    def _leave(self) -> NoReturn:
        """Leave the body of a step that has been dropped."""
        self._transaction.finish()
        raise Dropped(self._transaction.reason) from None

    def _running(self) -> StepContext:
        assert self._body is not None
        return self._body
