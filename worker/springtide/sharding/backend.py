"""The optimizer's step in shards: a `ParameterBackend` whose home is all workers together.

In a step every gradient's sum comes to the two members that hold its shard, each of them makes the same
update of it, and the owner sends the new values to all others. The commit vote begins when all sums are at
both: from then on a member may be lost and nothing with it, so whoever hears the vote's result commits. One
that had put in its vote and never heard the result holds the sums until the next step begins. If others have
committed, it is told by which factor they multiplied (the outcome is a part of the state that they hand
over), and makes the same step: nobody goes back, and no sum is made twice.

Between generations the members tell each other what they hold; `shard_map.plan` says who is to hold what, and
what is missing moves. Where both holders of a shard are lost, nobody can go on from that state: the newest
checkpoint is restored, in the same processes.

Only the script's thread comes here, and autograd's while that waits in backward().
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from springtide import faults
from springtide.comm.gather import gather_bytes
from springtide.comm.layout import Layout
from springtide.comm.process_group import Group
from springtide.exact.buckets import ExactBuckets
from springtide.settings import Settings
from springtide.sharding.collectives import (
    LEAST_UNDER_WAY,
    WHOLE_SUMS_MEMBERS,
    Exchanges,
    Flat,
    HeldSums,
    Interval,
    Outgoing,
    Source,
    Sums,
    agreed_least,
    merged,
    most_under_way,
)
from springtide.sharding.exact_sums import restore_held
from springtide.sharding.filling import AT_ONCE, Batch, Fill, alone, filled, next_batch, postponed
from springtide.sharding.migration import VALUES, Form, Move, forms_of, migrate, moves
from springtide.sharding.norms import squares_of, totals_of
from springtide.sharding.pieces import HeldPieces, ShardPart, State, Stretch
from springtide.sharding.restore import Target
from springtide.sharding.shard_map import LostShardsError, ShardMap, divide, plan
from springtide.sharding.snapshot import Description, ShardSnapshot, WritingPlan, describe, take_snapshot
from springtide_protocol.names import GenerationName, StateName

log = logging.getLogger(__name__)

PartsOf = Callable[[int], list[ShardPart]]
"""Returns the parts of a shard, by its number."""

_FILLING: Final = -1
"""Stands for shards on their way to a second member, where buckets of values have their numbers."""


class ShardsLostError(Exception):
    """Say that this generation cannot begin from the state that was chosen: shards of it are at no member."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A bucket's gradients on their way to the owners; they are waited for in `prepare`."""

    nbytes: int

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Outcome:
    """Say how a committed step was made, for a member that holds its sums.

    Attributes:
        factors: Sums are multiplied by them, one after the other.
        unused: Numbers of parameters to which nobody had a gradient.
        skip: The step changes nothing.
    """

    state: StateName
    factors: tuple[float, ...]
    unused: tuple[int, ...]
    skip: bool

    def to_json(self) -> dict[str, Any]:
        generation = self.state.generation
        name = [*generation.key, self.state.step]
        told = {"state": name, "factors": list(self.factors), "unused": list(self.unused), "skip": self.skip}
        return told | {"scale": math.prod(self.factors)}  # for members of earlier releases

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Outcome:
        incarnation, restart, number, step = told["state"]
        name = GenerationName.of(incarnation=incarnation, restart=restart, number=number)
        factors = tuple(told.get("factors", [told["scale"]]))
        return cls(StateName(name, step), factors, tuple(told["unused"]), told["skip"])


@dataclass(frozen=True, slots=True)
class Prepared:
    """Sums of a step that was voted for here, and whose result this member has not heard.

    Attributes:
        state: Name of the state that the step would make.
        sums: By bucket, where pieces are.
        options: Of the optimizers' groups, when the script asked for the step.
    """

    state: StateName
    sums: tuple[Sums, ...]
    options: list[dict[str, Any]]


class ShardedOptimizer:
    """The parameters' home where the optimizer's state is cut over the workers."""

    dense = True
    any_staged = False

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        layout: Layout,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        with_norm: bool,
        node: str,
        keeps_gradients: bool = True,
        masters: bool = False,
        at_once: int = AT_ONCE,
        least_under_way: int = LEAST_UNDER_WAY,
        whole_sums_members: int = WHOLE_SUMS_MEMBERS,
    ) -> None:
        """Hold nothing yet.

        Args:
            parameters: The trained ones by name, in the layout's order.
            layout: Of their gradients.
            optimizers: Of the script.
            with_norm: The norm of all gradients is wanted in each step.
            node: Name of this process's node.
            keeps_gradients: Buckets keep their gradients until the next step; otherwise only the sums of what
                is held here stay.
            masters: Parameters of 16 bits have float32 masters, which the optimizers step.
            at_once: Bytes that a member sends, or receives, before a generation's first step, of second
                copies; the smallest of all members' counts.
            least_under_way: Bytes of memory for what is on its way, however small the model is; likewise.
            whole_sums_members: Members of the largest group in which this one would sum whole buckets.
        """
        self._at_once, self._least_under_way, self._masters = at_once, least_under_way, masters
        self._whole_sums_members = whole_sums_members
        self._layout, self._optimizers, self._with_norm, self._node = layout, optimizers, with_norm, node
        self._gradient_bytes = sum(
            size * dtype.itemsize for size, dtype in zip(layout.sizes, layout.dtypes, strict=True)
        )
        self._parameters = list(parameters.values())
        self._index = {id(item): index for index, item in enumerate(self._parameters)}
        self.shards = divide(layout.sizes, [dtype.itemsize for dtype in layout.dtypes])
        self.held = HeldPieces(self._parameters, layout, optimizers, masters)
        self._buckets_of = [slot.bucket for slot in layout.slots]
        self._map: ShardMap | None = None
        self._group: Group | None = None
        self._exchanges: Exchanges | None = None
        self._numbers: list[int] = []
        """The shards that are held here, whole and as of `_state`."""
        self._is_whole = False
        """Whether the whole state is in the parameters and the optimizers, and not in pieces."""
        self._state: StateName | None = None
        self.adopted = False
        """Whether the shards came from a checkpoint, and the generation that they are for has not begun."""
        self._generation: GenerationName | None = None
        self._step = 0
        """Steps that are committed in `_state`."""
        self._doubted: set[int] = set()
        """Shards in `_numbers` whose copy here is not the owner's, so that it counts only where there is no
        other."""
        self._to_fill: list[Fill] = []
        """Shards that are to get a second copy while training goes on."""
        self._batch: Batch | None = None
        """Collectives that are on their way."""
        self._prepared: Prepared | None = None
        self._outcome: Outcome | None = None
        self._flats: list[torch.Tensor] = [
            torch.empty(0, dtype=dtype, device=self._parameters[0].device) for dtype in layout.dtypes
        ]
        self.keeps_gradients = keeps_gradients
        self.gradients_of: Callable[[int], Source] | None = None
        """Returns the gradients of a bucket that leaves, where they are in no flat tensor."""
        self._sums: list[Sums] = list(self._flats)
        """Place of the sums of what is held here, by bucket."""
        self.repeats_backward = False
        """Whether a member has seen the script call backward() more than once for a micro-batch: members tell
        each other when a generation begins."""
        self._exact: ExactBuckets | None = None
        """Buckets of exact sums: integers, which are exchanged, and gradients that are made of them."""
        self.waits_for_values = False
        """Whether a step counts only when all its values are here, since the script reads them next."""
        self._before: tuple[StateName | None, int, Prepared | None, Outcome | None] = None, 0, None, None
        """The state, its step, and what was known of the next one, before the last step was made."""
        self._kept_values: list[torch.Tensor] | None = None
        self._norm: float | None = None
        self._norms: dict[int, float] = {}
        self._described: dict[int, Description] = {}
        self._gather_seconds = 0.0
        self.state_bytes = 0
        """Bytes of the optimizer's state that is held here after the last committed step."""
        self._measured: Sequence[object] = ()

    # ---- what it is

    def use_exact(self, buckets: ExactBuckets) -> None:
        """Have sums be exact: what is pushed are the integers of these buckets.

        Args:
            buckets: Of the gradients, which they keep.
        """
        self._exact, self.held.cuts_at_shards = buckets, True

    def take_gather_seconds(self) -> float:
        """Return for how long values were waited for since the last call."""
        seconds, self._gather_seconds = self._gather_seconds, 0.0
        return seconds

    @property
    def single(self) -> int:
        """Return how many shards are at one member, until they have a second copy."""
        return len(self._to_fill) + (0 if self._batch is None else len(self._batch.fills))

    @property
    def assigned(self) -> ShardMap | None:
        """Return who holds which shard in the present generation; None before the first."""
        return self._map

    def state_dict(self) -> dict[str, Any]:
        """Return what a member must know to make the last committed step."""
        return {"outcome": None if self._outcome is None else self._outcome.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Know what another member does."""
        told = state["outcome"]
        self._outcome = None if told is None else Outcome.from_json(told)

    # ---- restores

    def target(self) -> Target:
        """Return the shards, for a restore of their state."""

        def device(index: int, name: str, by_element: bool) -> torch.device:
            groups = (
                group
                for optimizer in self._optimizers
                for group in optimizer.param_groups
                if any(item is self._parameters[index] for item in group["params"])
            )
            # The script may have added its group since this process's optimizer was made.
            options = next(groups, self._optimizers[0].defaults)
            on_device = by_element or options.get("fused") or options.get("capturable")
            return self._parameters[index].device if on_device else torch.device("cpu")

        return Target(self.shards, self._layout, self.held.cells, self._node, device, self._masters)

    def adopt(self, state: StateName, numbers: Sequence[int], states: Mapping[Stretch, State]) -> None:
        """Hold what came from a checkpoint; the parameters get its values before the generation begins.

        Args:
            state: The name that it has.
            numbers: Of the shards that this member is to hold.
            states: Of all their stretches.
        """
        self._numbers, self._state, self.adopted = list(numbers), state, True
        self._is_whole, self._doubted, self._prepared = False, set(), None
        self.held.hold(self.shards, self._numbers, states)

    # ---- generations

    def begin_generation(
        self,
        group: Group,
        generation: GenerationName,
        state: StateName,
        *,
        step: int,
        is_source: bool,
        keep_values: bool,
        on_bytes: Callable[[int], object],
    ) -> int:
        """Agree who holds what, and bring it there. Members call this when they hold the rest of the state.

        Args:
            group: Of the generation.
            generation: Its name.
            state: The one that all begin from.
            step: Steps committed in it: after a restore the state's name does not say.
            is_source: This process has the whole of it, in its parameters and optimizers.
            keep_values: The script may change the parameters before its next loop, where that does not count.
            on_bytes: Called with the bytes of state that have come.

        Returns:
            The bytes of the optimizer's state that have come.

        Raises:
            ShardsLostError: Shards of that state are at no member.
            RuntimeError: The group's.
        """
        self._group, self._exchanges = group, None
        self._to_fill, self._batch = [], None
        self._generation, self._step = generation, step
        self._make_prepared(state)
        if self.adopted:
            self.held.values.take_in()
        self.adopted = False
        if is_source:
            self._numbers, self._state, self._is_whole = list(range(len(self.shards))), state, True
            self._doubted = set()
            self.held.values.take_in()
        elif self._state != state:
            self._numbers, self._doubted, self._is_whole = [], set(), False
        is_source = self._is_whole  # a generation that was to begin from it may have failed to form
        self._prepared = None
        own = {
            "node": self._node,
            "held": _packed(self._numbers),
            "doubted": _packed(sorted(self._doubted)),
            "repeats": self.repeats_backward,
            "source": is_source,
            "at once": self._at_once,
            "under way": self._least_under_way,
            "sums whole": self._may_sum_whole(group.size),
        }
        told = self._announce(group, own)
        self.repeats_backward = any(said.get("repeats", False) for said in told)
        held = certain(
            [_unpacked(said["held"]) for said in told], [_unpacked(said["doubted"]) for said in told]
        )
        try:
            assigned = plan(self.shards, [said["node"] for said in told], held)
        except LostShardsError as error:
            self._numbers, self._state = [], None
            raise ShardsLostError(str(error)) from None
        shard_parts = self._shard_parts(is_source)
        planned = forms_of(group, moves(held, assigned), self._with_values(shard_parts))
        if not any(said.get("source", False) for said in told):  # else one member would have all the work
            self._to_fill = postponed(planned, held, assigned, min(said["at once"] for said in told))
        assigned = alone(assigned, self._to_fill)
        for fill in self._to_fill:
            del planned[fill.move]
        states, came = self._migrated(group, planned, shard_parts, assigned, state, on_bytes)
        self._install(assigned, assigned.held_by(group.rank), states, state)
        self._described = {}
        self._describe()
        least = agreed_least([said.get("under way") for said in told])
        most = most_under_way(self._gradient_bytes, least)
        sums_whole = all(said.get("sums whole", False) for said in told)
        self._exchanges = Exchanges(group, self.shards, assigned, self._flats, most, sums_whole)
        # Those that hold a shard have its values; the others' parameters are as old as they are.
        self._bring_values()
        if keep_values:
            self.settle(None)
            self._kept_values = [item.data.clone() for item in self._parameters]
        log.info(
            "%d of %d shards are here (%d bytes of optimizer state, %d bytes came)",
            len(self._numbers),
            len(self.shards),
            self.held.state_bytes(),
            came,
        )
        if self._to_fill:
            log.info("%d shards get their second copy while training goes on", len(self._to_fill))
        self._go_on_filling()  # beside the first step, whose vote waits for it
        return came

    def _may_sum_whole(self, size: int) -> bool:
        """Return whether this member would sum whole buckets, as `WHOLE_SUMS_MEMBERS` tells, in such a group.

        Gradients that pass have no place for the sums of others' shards, and of exact sums, which are
        integers, only what is held here is turned back. On devices nobody has measured it.
        """
        on_host = self._device.type == "cpu"
        return size <= self._whole_sums_members and self.keeps_gradients and self._exact is None and on_host

    def _announce(self, group: Group, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell all members something, and return what all have told, by rank. Raise RuntimeError."""
        if group.size == 1:
            return [own]
        return [json.loads(text) for text in gather_bytes(group, json.dumps(own).encode())]

    def _make_prepared(self, state: StateName) -> None:
        """Make the step whose sums are here, if it was committed elsewhere and leads to this state."""
        prepared, outcome = self._prepared, self._outcome
        if prepared is None or outcome is None or prepared.state != state or outcome.state != state:
            return
        if not outcome.skip:
            self.held.step_now(prepared.sums, outcome.factors, outcome.unused, prepared.options)
        self._state = state
        log.info("step %d was committed by others: it is made here from the sums", state.step)

    def _with_values(self, shard_parts: PartsOf) -> PartsOf:
        """Return what gives the parts of a shard with the values of parameters in their state."""

        def with_values(number: int) -> list[ShardPart]:
            return [
                ShardPart(part.stretch, part.state | {VALUES: self.held.values.of(part.stretch)})
                for part in shard_parts(number)
            ]

        return with_values

    def _shard_parts(self, is_source: bool) -> PartsOf:
        """Return what gives the parts of a shard that is held here.

        Args:
            is_source: The state is in the parameters and optimizers.
        """
        whole = self.held.take_from_optimizers(self.shards, range(len(self.shards))) if is_source else {}

        def shard_parts(number: int) -> list[ShardPart]:
            if not is_source:
                return self.held.shard_parts(self.shards, number)
            shard = self.shards[number]
            stretches = self.held.cells.between(shard.bucket, (shard.start, shard.stop))
            return [ShardPart(item, whole[item]) for _, _, item in stretches if item is not None]

        return shard_parts

    def _migrated(
        self,
        group: Group,
        planned: Mapping[Move, Sequence[Form]],
        shard_parts: PartsOf,
        assigned: ShardMap,
        state: StateName,
        on_bytes: Callable[[int], object],
    ) -> tuple[dict[Stretch, State], int]:
        """Return the state of all that is to be held here, and how many bytes of it came."""
        came = 0

        def on_round(count: int) -> None:
            nonlocal came
            came += count
            on_bytes(count)
            faults.reach("filling", self._step + 1)

        arrived = migrate(group, planned, self._with_values(shard_parts), on_round)
        for stretch, own in arrived.items():
            self.held.values.of(stretch).copy_(own.pop(VALUES))
        mine = assigned.held_by(group.rank)
        try:
            # Nobody lets a shard go before those that are to hold it have it: one more may be lost here.
            if planned:
                group.start_sum(torch.zeros(1)).wait()
        except RuntimeError:
            if arrived:
                kept = {part.stretch: part.state for number in self._numbers for part in shard_parts(number)}
                self._numbers, self._state = sorted({*self._numbers, *mine}), state
                self._doubted -= set(mine)
                self.held.hold(self.shards, self._numbers, kept | arrived)
            raise
        staying = [part for number in set(self._numbers) & set(mine) for part in shard_parts(number)]
        return {part.stretch: part.state for part in staying} | arrived, came

    def _install(
        self, assigned: ShardMap, numbers: Sequence[int], states: Mapping[Stretch, State], state: StateName
    ) -> None:
        self.held.hold(self.shards, numbers, states, assigned)
        self.held.forget_in_optimizers()
        self._map, self._numbers, self._state = assigned, list(numbers), state
        self._is_whole, self._doubted = False, set()
        if not self.keeps_gradients:
            self._sums = [
                HeldSums(self.held.intervals(bucket), like) for bucket, like in enumerate(self._flats)
            ]

    def _bring_values(self) -> None:
        """Begin to bring the values of all shards to all members that do not hold them."""
        if self._exchanges is not None:
            # The parameters of the last buckets are needed first.
            buckets = reversed(range(len(self._flats)))
            self._exchanges.gather(
                [
                    Outgoing(bucket, self._parts(bucket), self._flats[bucket], partial(self._take, bucket))
                    for bucket in buckets
                ]
            )

    def evacuate(self, leaving: bool) -> None:
        """Bring the shards of members that are about to leave to those that stay; all members call this.

        Args:
            leaving: This one leaves.

        Raises:
            RuntimeError: The group's, when a member is lost meanwhile.
        """
        self.settle(None)
        self._to_fill = []
        if self._batch is not None and self._exchanges is not None:
            self._exchanges.receive(_FILLING)  # what is on its way must not be met by the end of the group
        self._batch = None
        self._describe()
        group, assigned = self._group, self._map
        if group is None or assigned is None or group.size == 1:
            return
        doubted = _packed(sorted(self._doubted))
        told = self._announce(group, {"node": self._node, "leaving": leaving, "doubted": doubted})
        staying = [rank for rank, said in enumerate(told) if not said["leaving"]]
        if not staying or len(staying) == group.size:
            return
        held = certain(
            [frozenset(assigned.held_by(rank)) for rank in range(group.size)],
            [_unpacked(said["doubted"]) for said in told],
        )
        rest = _planned_among(self.shards, [said["node"] for said in told], held, staying)
        if self._state is None:
            raise RuntimeError("this worker holds no shards")
        shard_parts = self._shard_parts(False)
        planned = forms_of(group, moves(held, rest), self._with_values(shard_parts))
        states, came = self._migrated(group, planned, shard_parts, rest, self._state, lambda count: None)
        # Those that leave keep what they hold, as long as they are here.
        if group.rank in staying:
            self._install(rest, rest.held_by(group.rank), states, self._state)
            self._exchanges = None
        log.info("%d members leave; %d bytes of their shards came here", group.size - len(staying), came)

    def doubt(self, numbers: Collection[int]) -> None:
        """Have shards that are held here be sent again by another holder when the next generation begins.

        Args:
            numbers: Of the shards, whose copies were found to differ.
        """
        self._doubted |= set(numbers) & set(self._numbers)

    def fetch_again(self) -> None:
        """Put the values back that the script may have changed between two loops."""
        if self._kept_values is None:
            return
        for parameter, kept in zip(self._parameters, self._kept_values, strict=True):
            parameter.data.copy_(kept)
        self.held.values.take_in()
        self._kept_values = None

    # ---- a step

    def begin_step(self) -> None:
        """Begin a step; sums of one that was not committed are forgotten."""
        self._prepared = None
        self._norm, self._norms = None, {}
        self._kept_values = None
        if self._exchanges is not None:
            self._exchanges.begin_step()

    def begin_backward_pass(self) -> None:
        """Refuse: a body has one backward pass here."""
        raise NotImplementedError("a body with several steps is refused by distribute()")

    def push(self, gradients: torch.Tensor, bucket: int) -> Sent:
        """Send a bucket's gradients to the owners of its shards, or to all in a small group.

        Args:
            gradients: Flat; of no account where `gradients_of` has them.
            bucket: Its number.
        """
        # Of a version of its own: sums that come are no change of the script's.
        flat = gradients.data
        assert self._exchanges is not None
        if self.keeps_gradients:
            self._sums[bucket] = flat
            if self._exchanges.sums_whole:
                return Sent(self._exchanges.sum_whole(flat))
            return Sent(self._exchanges.reduce(bucket, Flat(flat), flat, apart=False, like=flat))
        source = Flat(flat) if self.gradients_of is None else self.gradients_of(bucket)
        return Sent(self._exchanges.reduce(bucket, source, self._sums[bucket], apart=True))

    def ends(self, wanted: bool) -> bool:
        """Return whether this step is the last one before all members stop."""
        return wanted

    def stage_rows(self, index: int, ids: torch.Tensor, sums: torch.Tensor) -> None:
        """Refuse: tables are not sharded.

        Args:
            index: Number of the parameter that stands for the table.
            ids: int64 [n].
            sums: float32 [n, dim].

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("tables are refused by distribute()")

    def stage_tables(
        self, optimizer: torch.optim.Optimizer, scale: float, factor: float, unused: Collection[int]
    ) -> None:
        """Refuse: tables are not sharded.

        Args:
            optimizer: The one that steps.
            scale: Of the whole step.
            factor: Of this optimizer's gradients.
            unused: Numbers of parameters without a gradient.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("tables are refused by distribute()")

    def prepare(self) -> float | None:
        """Return when all sums are at owners and buddies; with the norm of all gradients, if it is wanted.

        Raise RuntimeError when an exchange fails.
        """
        assert self._exchanges is not None
        self.settle(None)  # values that no module has asked for: they have come by now
        self._end_filling()
        self._exchanges.finish_sums()
        if self._exact is not None:
            self._sums = list(self._restored(self._exact))
        if self._with_norm:
            self._find_norms()
        assert self._generation is not None
        following = StateName(self._generation, self._step + 1)
        self._prepared = Prepared(following, tuple(self._sums), self.held.options())
        return self._norm

    def _restored(self, buckets: ExactBuckets) -> list[torch.Tensor]:
        assert self._map is not None
        assert self._group is not None
        rank, owners = self._group.rank, self._map.owners
        owned = [shard for shard, owner in zip(self.shards, owners, strict=True) if owner == rank]
        held = [self.held.intervals(bucket) for bucket in range(len(self._flats))]
        return restore_held(buckets, self._group, held, owned)

    def _find_norms(self) -> None:
        """Sum the squares over the shards, for each optimizer, in an order that no member has a part in."""
        assert self._map is not None
        assert self._group is not None
        rank, owners = self._group.rank, self._map.owners
        numbers = {
            id(parameter): number
            for number, optimizer in enumerate(self._optimizers)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        owned = [number for number in self._numbers if owners[number] == rank]
        optimizer_of = [numbers[id(parameter)] for parameter in self._parameters]
        squares = squares_of(self.shards, owned, self.held.cells, self._sums, optimizer_of)
        self._group.start_sum(squares).wait()
        totals = totals_of(squares)
        self._norms = {
            id(optimizer): math.sqrt(square)
            for optimizer, square in zip(self._optimizers, totals, strict=True)
        }
        self._norm = math.sqrt(sum(totals))

    def norm_of(self, optimizer: torch.optim.Optimizer) -> float:
        """Return the norm of this optimizer's gradients, as of the last `prepare`."""
        return self._norms[id(optimizer)]

    def commit(self, factors: Sequence[float], unused: Collection[int], skip: bool = False) -> None:
        """Give the script's optimizers what they step: it is called right before they do.

        Args:
            factors: Gradients are multiplied by them: exact sums one after the other, as without shards,
                others once.
            unused: Numbers of parameters to which nobody has a gradient.
            skip: The step changes nothing, and no optimizer steps.
        """
        assert self._prepared is not None
        self._before = self._state, self._step, self._prepared, self._outcome
        chosen = (math.prod(factors),) if self._exact is None else tuple(factors)
        self._outcome = Outcome(self._prepared.state, chosen, tuple(unused), skip)
        if skip:
            self._take_name()
        else:
            self.held.begin_step(self._prepared.sums, chosen, unused, self.waits_for_values)

    def _take_name(self) -> None:
        """Hold the state that the commit has made, under its name."""
        assert self._outcome is not None
        self._state, self._step, self._prepared = self._outcome.state, self._outcome.state.step, None

    def stepped(self) -> None:
        """The optimizers have stepped: send the new values, and await them where the script reads them next.

        Raises:
            RuntimeError: They do not come in this generation, and the step is taken back: this member has the
                sums and no more, as if it had not heard the vote's result.
        """
        self.held.end_step()
        self._take_name()
        if self._measured is not self.held.pieces or not self.state_bytes:
            # A piece has as much from its first step on.
            self._measured, self.state_bytes = self.held.pieces, self.held.state_bytes()
        self._bring_values()
        self._go_on_filling()
        if self.waits_for_values:
            try:
                self.settle(None)
            except RuntimeError:
                self.held.take_back()
                self._state, self._step, self._prepared, self._outcome = self._before
                raise
            self.held.keep_step()

    # ---- second copies

    def _go_on_filling(self) -> None:
        """Begin to send the next shards that are at one member to another one, as they are now.

        From the next step on their sums go to both.
        """
        exchanges, assigned, group = self._exchanges, self._map, self._group
        if not self._to_fill or exchanges is None or assigned is None or group is None:
            return
        fills = next_batch(self._to_fill, exchanges.most)
        chosen = {fill.move for fill in fills}
        self._to_fill = [fill for fill in self._to_fill if fill.move not in chosen]
        batch = self._batch = Batch(fills, filled(assigned, fills), group.rank, group.size)

        def packed(way: Interval) -> list[torch.Tensor]:
            return batch.packed(way, self._shard_parts(False), self._device)

        like = torch.empty(0, dtype=torch.uint8, device=self._device)
        exchanges.send_behind(Outgoing(_FILLING, packed, like, batch.take), batch.route, batch.nbytes)
        exchanges.reassign(batch.assigned)
        if not self.keeps_gradients:
            coming = [self.shards[number] for number in batch.coming]
            for bucket in {shard.bucket for shard in coming}:
                own = [(shard.start, shard.stop) for shard in coming if shard.bucket == bucket]
                intervals = merged(sorted([*self.held.intervals(bucket), *own]))
                self._sums[bucket] = HeldSums(intervals, self._flats[bucket])

    def _end_filling(self) -> None:
        """Wait for shards that are on their way, and hold them.

        Raises:
            RuntimeError: They do not come in this generation, or their state did not look as was told.
        """
        batch, exchanges = self._batch, self._exchanges
        if batch is None:
            return
        assert exchanges is not None
        began = time.perf_counter()
        exchanges.receive(_FILLING)
        self._gather_seconds += time.perf_counter() - began
        faults.reach("filling", self._step + 1)
        if batch.changed:
            raise RuntimeError(
                f"the optimizer's state of {len(batch.changed)} shards has got another form since the "
                f"generation began: it is sent when the next one begins"
            )
        self.held.hold_more(self.shards, batch.runs, batch.coming, batch.states)
        self._numbers = sorted({*self._numbers, *batch.coming})
        self._map, self._batch = batch.assigned, None
        if not self._to_fill:
            log.info("all shards are at two workers again")

    # ---- values

    def settle(self, parameters: Collection[int] | None = None, to_the_end: bool = False) -> None:
        """Wait until the values of these parameters (None: all) are here.

        Args:
            parameters: By number.
            to_the_end: The step that made them can only be committed.

        Raises:
            RuntimeError: They do not come in this generation.
        """
        exchanges = self._exchanges
        if exchanges is None:
            return
        if parameters is None:
            wanted = exchanges.gathering
        else:
            buckets = {self._buckets_of[index] for index in parameters}
            wanted = [bucket for bucket in exchanges.gathering if bucket in buckets]
        if not wanted:
            return
        began = time.perf_counter()
        faults.reach("gathering", self._step + 1)
        for bucket in wanted:
            exchanges.receive(bucket)
            self.held.values.put_out(self._layout.members[bucket])
        self._gather_seconds += time.perf_counter() - began

    def _take(self, bucket: int, interval: Interval, came: torch.Tensor) -> None:
        for start, stop, stretch in self.held.cells.between(bucket, interval):
            if stretch is not None:
                self.held.values.of(stretch).copy_(came[start - interval[0] : stop - interval[0]])

    def _parts(self, bucket: int) -> Callable[[Interval], list[torch.Tensor]]:
        def parts(interval: Interval) -> list[torch.Tensor]:
            found = []
            for start, stop, stretch in self.held.cells.between(bucket, interval):
                if stretch is None:
                    found.append(
                        torch.zeros(stop - start, dtype=self._layout.dtypes[bucket], device=self._device)
                    )
                else:
                    found.append(self.held.values.of(stretch))
            return found

        return parts

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device

    # ---- checkpoints

    def snapshot(self, rank: int, writers: Collection[int], positions: Mapping[int, int]) -> ShardSnapshot:
        """Copy this member's part of the optimizer's state as it is after the last committed step.

        Args:
            rank: Of this member, in the generation that the state is of.
            writers: Ranks of all that write a part.
            positions: The place where the optimizer's state of a parameter stands in the checkpoint's tree.

        Raises:
            RuntimeError: A shard is at no member that writes, or the group fails.
        """
        assert self._map is not None
        self._describe()
        writing = WritingPlan(rank, writers, self._map, positions)
        return take_snapshot(self.held, self.shards, self._layout, writing, self._described)

    def _describe(self) -> None:
        """Have all members know what all states look like; without a group, as they last told each other."""
        own = describe(self.held)
        group = self._group
        if group is None or group.size == 1 or group.is_shut:
            self._described |= own
            return
        for text in gather_bytes(group, json.dumps(own).encode()):
            self._described |= {int(index): told for index, told in json.loads(text).items()}


def certain(held: Sequence[frozenset[int]], doubted: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """Return what members hold without what they doubt, unless nobody else has it. PURE.

    Args:
        held: The shards of each member, by rank.
        doubted: Those of them whose copy is not the owner's.
    """
    sure = [own - odd for own, odd in zip(held, doubted, strict=True)]
    somewhere = frozenset().union(*sure)
    return [own | (all_own - somewhere) for own, all_own in zip(sure, held, strict=True)]


def _planned_among(
    shards: Sequence[Any], nodes: Sequence[str], held: Sequence[Collection[int]], staying: Sequence[int]
) -> ShardMap:
    """Return a map over some of the members, in the ranks of all. PURE.

    Shards that only leavers hold count as held by one that stays: they have to move in any case.
    """
    there = {shard for rank in staying for shard in held[rank]}
    own = [set(held[rank]) for rank in staying]
    lacking = set(range(len(shards))) - there
    # Spread as the fresh shards of a bucket are: the plan gives each to whom it would come anyway.
    for place, shard in enumerate(sorted(lacking)):
        own[place % len(own)].add(shard)
    found = plan(shards, [nodes[rank] for rank in staying], own)
    return ShardMap(
        tuple(staying[rank] for rank in found.owners), tuple(staying[rank] for rank in found.buddies)
    )


def _packed(numbers: Sequence[int]) -> str:
    return f"{sum(1 << number for number in numbers):x}"


def _unpacked(text: str) -> frozenset[int]:
    bits = int(text, 16)
    return frozenset(number for number in range(bits.bit_length()) if bits >> number & 1)


def shards_for(
    settings: Settings, masters: bool = False
) -> Callable[
    [dict[str, torch.nn.Parameter], Layout, Sequence[torch.optim.Optimizer], bool], ShardedOptimizer
]:
    """Return what makes a trainer's shards.

    Args:
        settings: The worker's.
        masters: Parameters of 16 bits have float32 masters.
    """

    def make(
        parameters: dict[str, torch.nn.Parameter],
        layout: Layout,
        optimizers: Sequence[torch.optim.Optimizer],
        with_norm: bool,
    ) -> ShardedOptimizer:
        node = settings.node or settings.pod_uid or settings.process_id
        return ShardedOptimizer(
            parameters,
            layout,
            optimizers,
            with_norm=with_norm,
            node=node,
            # Exact sums are made of all parts of a step: integers stay until the last of them.
            keeps_gradients=settings.shard == "Optimizer" or bool(settings.logical_workers),
            masters=masters,
            at_once=int(settings.shards_at_once_mib * (1 << 20)),
            least_under_way=int(settings.shards_under_way_mib * (1 << 20)),
        )

    return make
