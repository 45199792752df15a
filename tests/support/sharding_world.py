"""Members with sharded optimizers over groups that may break at any call, beside one plain optimizer.

The truth for all members is what the plain optimizer makes of the sums of the committed steps. Gradients are
small whole numbers, so that sums are exact in any order.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fake_groups import Dead, FakeGroup, Network, Turns

from springtide.comm.layout import Layout, field_of, plan_layout
from springtide.exact.buckets import ExactBuckets
from springtide.exact.rounding import BLOCK
from springtide.sharding.backend import ShardedOptimizer, ShardsLostError
from springtide.sharding.collectives import LEAST_UNDER_WAY, WHOLE_SUMS_MEMBERS
from springtide.sharding.filling import AT_ONCE
from springtide.sharding.pieces import State, Stretch
from springtide.sharding.shard_map import Shard
from springtide.train_step.master_weights import MASTER
from springtide_protocol.names import GenerationName, StateName

BUCKET_BYTES = 4096
FEW_UNDER_WAY = 6000
SCALE = 0.5
MOST_MEMBERS = 9

MakeOptimizer = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]


def adam(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam with two groups."""
    half = len(parameters) // 2
    groups: list[dict[str, Any]] = [
        {"params": parameters[:half]},
        {"params": parameters[half:], "weight_decay": 0.25, "amsgrad": True},
    ]
    return torch.optim.Adam(groups, lr=0.125)


def small_parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.nn.Parameter]:
    """Return parameters of all sorts: of one number, of one element, none, channels_last, large and small."""
    draw = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "number": (),
        "wide": (5, 301),
        "one": (1,),
        "nothing": (0, 3),
        "image": (6, 5, 3, 3),
        "long": (1100,),
        "tail": (17,),
    }
    found = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=draw)
        if name == "image":
            value = value.contiguous(memory_format=torch.channels_last)
        found[name] = torch.nn.Parameter(value.to(dtype))
    return found


def layout_of(parameters: Mapping[str, torch.nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> Layout:
    """Return the layout of the parameters' gradients."""
    return plan_layout([field_of(name, value) for name, value in parameters.items()], bucket_bytes)


def flats_of(layout: Layout, gradients: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """Return the buckets with these gradients in their places, and zeros elsewhere.

    Args:
        layout: Of the parameters.
        gradients: By parameter's number.
    """
    flats = [torch.zeros(size, dtype=dtype) for size, dtype in zip(layout.sizes, layout.dtypes, strict=True)]
    for index, gradient in gradients.items():
        slot = layout.slots[index]
        flats[slot.bucket][slot.offset : slot.offset + gradient.numel()] = gradient.reshape(-1)
    return flats


def gradients_for(layout: Layout, seed: int) -> dict[int, torch.Tensor]:
    """Return gradients of small whole numbers, by parameter's number."""
    draw = torch.Generator().manual_seed(seed)
    return {
        index: torch.randint(-8, 9, field.shape, generator=draw).to(field.dtype)
        for index, field in enumerate(layout.fields)
    }


def stretches(home: ShardedOptimizer, shard: Shard) -> list[Stretch]:
    """Return the stretches of parameters in a shard."""
    return [
        s for _, _, s in home.held.cells.between(shard.bucket, (shard.start, shard.stop)) if s is not None
    ]


def part_of_whole(value: Any, stretch: Stretch, shape: Sequence[int]) -> Any:
    """Return what of a plain optimizer's state of a parameter belongs to a stretch."""
    if isinstance(value, torch.Tensor) and tuple(value.shape) == tuple(shape) and (shape or value.dim()):
        return value.reshape(-1)[stretch.start : stretch.stop]
    return value


def same(one: Any, other: Any) -> bool:
    """Return whether two values of a state are equal bit for bit, whatever shape a single number has."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        flat = [value.detach().reshape(-1).contiguous().view(torch.uint8) for value in (one, other)]
        return one.dtype == other.dtype and torch.equal(*flat)
    return type(one) is type(other) and bool(one == other)


def check_state(found: State, truth: State, stretch: Stretch, shape: Sequence[int]) -> None:
    """Fail unless the state of a stretch is that of a plain optimizer."""
    assert found.keys() == truth.keys(), (stretch, found.keys(), truth.keys())
    for name, value in truth.items():
        assert same(found[name], part_of_whole(value, stretch, shape)), (stretch, name)


class Reference:
    """One plain optimizer that makes the committed steps.

    Attributes:
        step: The number of the last one.
        stepped: Those that the optimizer steps: the parameters, or float32 masters of 16-bit ones.
    """

    def __init__(
        self, make: MakeOptimizer, parameters: Mapping[str, torch.nn.Parameter], masters: bool = False
    ) -> None:
        self.parameters = list(parameters.values())
        self.stepped = [
            torch.nn.Parameter(item.detach().float()) if masters else item for item in self.parameters
        ]
        self.optimizer = make(self.stepped)
        self.step = 0

    def state_of(self, index: int) -> State:
        """Return the optimizer's state of a parameter, with its master if it has one that has stepped."""
        own = self.stepped[index]
        state = dict(self.optimizer.state.get(own, {}))
        return state | {MASTER: own.detach()} if state and own is not self.parameters[index] else state

    def make_step(
        self, gradients: Mapping[int, torch.Tensor], unused: Collection[int], skip: bool = False
    ) -> None:
        """Make a step with sums of gradients.

        Args:
            gradients: The sums, by parameter's number.
            unused: Parameters that get none.
            skip: It counts, and changes nothing.
        """
        if skip:
            self.step += 1
            schedule(self.optimizer, self.step)
            return
        for index, parameter in enumerate(self.stepped):
            if index not in unused:
                # Laid out as the parameter is, as autograd does it.
                parameter.grad = torch.empty_like(parameter).copy_(gradients[index] * SCALE)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for own, stepped in zip(self.parameters, self.stepped, strict=True):
                own.copy_(stepped)
        self.step += 1
        schedule(self.optimizer, self.step)


def schedule(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the learning rate that follows a step."""
    for group in optimizer.param_groups:
        group["lr"] = 0.125 / (1 + step % 4)


@dataclass(frozen=True)
class Variant:
    """Say what kind of job it is.

    Attributes:
        make: Makes the optimizer.
        masters: Parameters are bfloat16 and have float32 masters.
        bfloat16: Parameters are bfloat16 in any case.
        at_once: Bytes of second copies that a member sends or receives before a generation's first step.
        norm: The norm of all gradients is wanted in each step.
        exact: Gradients are summed as integers.
        reads: The script's code reads all values before its step counts.
        whole_sums: Which members sum whole buckets in small groups: "all", "some" (every other) or "none".
    """

    make: MakeOptimizer = adam
    masters: bool = False
    exact: bool = False
    reads: bool = False
    bfloat16: bool = False
    at_once: int = AT_ONCE
    norm: bool = False
    whole_sums: str = "all"

    def parameters(self, seed: int = 0) -> dict[str, torch.nn.Parameter]:
        """Return parameters of the variant's type."""
        return small_parameters(seed, torch.bfloat16 if self.masters or self.bfloat16 else torch.float32)

    def layout(self, parameters: Mapping[str, torch.nn.Parameter]) -> Layout:
        """Return the layout of the parameters' gradients."""
        fields = [field_of(name, value) for name, value in parameters.items()]
        return plan_layout(fields, BUCKET_BYTES, BLOCK if self.exact else 1)


class Member:
    """One worker.

    Attributes:
        state: The name of the state that it has; None: none.
        step: Steps committed in it.
        norm: That of the last step's summed gradients, where it is wanted.
        table: By shard, the names of those that hold it, as this member knows.
    """

    def __init__(
        self,
        name: str,
        node: str,
        variant: Variant,
        seed: int,
        keeps_gradients: bool,
        least_under_way: int,
        sums_whole: bool = True,
    ) -> None:
        self.name, self.node = name, node
        self.parameters = variant.parameters(seed)
        self.layout = variant.layout(self.parameters)
        self.optimizer = variant.make(list(self.parameters.values()))
        self.home = ShardedOptimizer(
            self.parameters,
            self.layout,
            [self.optimizer],
            with_norm=variant.norm,
            node=node,
            keeps_gradients=keeps_gradients or variant.exact,
            masters=variant.masters,
            least_under_way=least_under_way,
            at_once=variant.at_once,
            whole_sums_members=WHOLE_SUMS_MEMBERS if sums_whole else 1,
        )
        self.home.waits_for_values = variant.reads
        self.exact: ExactBuckets | None = None
        if variant.exact:
            self.exact = ExactBuckets(self.layout, MOST_MEMBERS)
            self.exact.whole = False
            self.home.use_exact(self.exact)
        self.state: StateName | None = None
        self.step = 0
        self.norm: float | None = None
        self.table: list[frozenset[str]] = []
        self._known: Any = None

    def note_table(self, members: Sequence[Member]) -> None:
        """Note who holds what, if that has changed, in the names of the generation's members."""
        assigned = self.home.assigned
        if assigned is not None and assigned is not self._known:
            self._known = assigned
            self.table = [
                frozenset(members[rank].name for rank in assigned.holders(shard))
                for shard in range(len(assigned.owners))
            ]

    def try_step(self, group: FakeGroup, seed: int, unused: Sequence[int], skip: bool = False) -> None:
        """Make a step of the present generation. Raise RuntimeError when the group breaks.

        Args:
            group: Of the generation.
            seed: Of this member's gradients.
            unused: Parameters without a gradient.
            skip: The step changes nothing, as where a GradScaler has found an infinite gradient.
        """
        assert self.state is not None
        home = self.home
        home.settle(None)
        gradients = {i: g for i, g in gradients_for(self.layout, seed).items() if i not in unused}
        if self.exact is None:
            self._sum(group, gradients)
        else:
            self._sum_exactly(self.exact, group, gradients)
        home.commit([SCALE], unused, skip)
        exponents = None if self.exact is None else self.exact.exponents.values
        if self.exact is not None:
            self.exact.commit(self.step + 1)
        if not skip:
            self.optimizer.step()
        try:
            if not skip:
                home.stepped()
        except RuntimeError as error:
            if not home.waits_for_values:
                # It is called inside of the script's optimizer.step().
                raise AssertionError("a broken group is no failure of a committed step") from error
            if self.exact is not None and exponents is not None:
                self.exact.exponents.values = exponents
            raise
        self.step += 1
        self.state = StateName(group.network.generation, self.step)  # type: ignore[attr-defined]
        if home.waits_for_values:
            values = [value.clone() for value in self.parameters.values()]
            home.settle(None)
            assert all(map(torch.equal, values, self.parameters.values())), "values came late"
        schedule(self.optimizer, self.step)

    def _sum(self, group: FakeGroup, gradients: Mapping[int, torch.Tensor]) -> None:
        home = self.home
        home.begin_step()
        for bucket, flat in enumerate(flats_of(self.layout, gradients)):
            home.push(flat, bucket)
            if not home.keeps_gradients:
                flat.fill_(float("nan"))
        self.norm = home.prepare()
        vote = torch.ones(1)
        group.start_sum(vote).wait()
        assert vote.item() == group.size

    def _sum_exactly(
        self, buckets: ExactBuckets, group: FakeGroup, gradients: Mapping[int, torch.Tensor]
    ) -> None:
        """Do the step again with other exponents where a gradient does not fit, as all members do."""
        exponents = None
        while True:
            self.home.begin_step()
            buckets.begin(lambda sums: self.home.push(sums, buckets.leaving), True, exponents)
            for index in sorted(gradients, reverse=True):
                buckets.put(index, gradients[index], 1.0, 0, True)
            buckets.flush()
            buckets.wait()
            self.norm = self.home.prepare()
            buckets.wait()
            vote = torch.tensor([1.0, float(buckets.exceeded)])
            group.start_sum(vote).wait()
            assert vote[0] == group.size
            if not vote[1]:
                break
            assert exponents is None, "a step that is done again must fit"
            needed = buckets.needed
            group.start_max(needed).wait()
            exponents = buckets.raised(needed)


PLAIN = Variant()


@dataclass
class Death:
    """Say that a member is lost at its group's call number `points`."""

    member: int
    points: int


class World:
    """All members of a job.

    Attributes:
        members: Those that live, in the order of their ranks.
        restored: How often the state had to come from a checkpoint.
    """

    def __init__(self, nodes: Sequence[str], seed: int = 0, variant: Variant = PLAIN) -> None:
        self._variant, self._seed, self._draw = variant, seed, random.Random(seed)
        self._count = 0
        self.members: list[Member] = []
        self.reference = Reference(variant.make, variant.parameters(), variant.masters)
        self._candidate: Reference | None = None
        self._generation = 0
        self._groups: list[FakeGroup] = []
        self._gone: set[str] = set()
        self._tables: list[list[frozenset[str]]] = []
        self.restored = -1
        self._fresh = True
        for node in nodes:
            self.join(node)

    # ---- who is there

    def join(self, node: str) -> None:
        """Have a member come; the next generation has it."""
        self._count += 1
        place = self._draw.randrange(len(self.members) + 1)
        name, seed = f"m{self._count}", 1000 + self._count
        # In half of all worlds buckets leave in several chunks.
        least = LEAST_UNDER_WAY if self._seed % 4 < 2 else FEW_UNDER_WAY
        whole = {"all": True, "some": self._count % 2 == 0, "none": False}[self._variant.whole_sums]
        member = Member(name, node, self._variant, seed, self._seed % 2 == 0, least, whole)
        self.members.insert(place, member)

    def lose(self, members: Collection[Member]) -> None:
        """Have members be lost, with all that they hold."""
        self._gone |= {member.name for member in members}
        self.members = [member for member in self.members if member not in members]

    def _is_lost(self) -> bool:
        """Return whether both holders of some shard are gone, by any table that a member may go by."""
        return any(holders <= self._gone for table in self._tables for holders in table)

    # ---- calls of all

    def _call(
        self, groups: Sequence[FakeGroup], call: Callable[[Member, FakeGroup], None]
    ) -> tuple[list[Member], list[Any]]:
        """Make a call at all members; return those that it had been well at, and the errors of the others."""
        before = list(self.members)
        turns = groups[0].network.turns
        results = turns.run(
            [lambda m=member, g=group: call(m, g) for member, group in zip(before, groups, strict=True)]
        )
        dead = [member for member, result in zip(before, results, strict=True) if isinstance(result, Dead)]
        for result in results:
            if isinstance(result, BaseException) and not isinstance(
                result, Dead | RuntimeError | ShardsLostError
            ):
                raise result
        if dead or any(isinstance(result, BaseException) for result in results):
            for group in groups:
                group.shut()
        well = [member for member, result in zip(before, results, strict=True) if result is None]
        self.lose(dead)
        errors = [result for result in results if isinstance(result, BaseException)]
        return well, [error for error in errors if not isinstance(error, Dead)]

    def _new_groups(self, deaths: Sequence[Death]) -> list[FakeGroup]:
        network = Network(Turns(self._draw), len(self.members), self._draw.randrange(1 << 30))
        self._generation += 1
        network.generation = GenerationName.of(  # type: ignore[attr-defined]
            incarnation=1, restart=0, number=self._generation
        )
        self._plan_deaths(network.groups, deaths)
        return network.groups

    def _plan_deaths(self, groups: Sequence[FakeGroup], deaths: Sequence[Death]) -> None:
        for group in groups:
            group.dies_after = None
        for death in deaths:
            group = groups[death.member % len(groups)]
            group.dies_after = group.points + death.points

    # ---- generations

    def form(self, deaths: Sequence[Sequence[Death]] = ()) -> None:
        """Form generations until one stands that has all members; check that it has the truth.

        Args:
            deaths: Those in the first generation that is tried, in the second, and so on.
        """
        planned = list(deaths)
        while self.members:
            if self._form_once(planned.pop(0) if planned else ()):
                return

    def _form_once(self, deaths: Sequence[Death]) -> bool:
        if self._fresh:
            self._restore()
        source = max((m for m in self.members if m.state), key=lambda m: m.step, default=None)
        if source is None:  # all that had any state are gone
            self._fresh = True
            return False
        newest, step = source.state, source.step
        assert newest is not None
        if step > self.reference.step:
            assert self._candidate is not None
            self.reference = self._candidate
        self._candidate = None
        assert step == self.reference.step, "a committed step was forgotten"
        for member in self.members:
            if member.state != newest:
                member.home.load_state_dict(copy.deepcopy(source.home.state_dict()))
                groups = [
                    {k: v for k, v in group.items() if k != "params"} | {"params": own["params"]}
                    for group, own in zip(
                        source.optimizer.param_groups,
                        member.optimizer.state_dict()["param_groups"],
                        strict=True,
                    )
                ]
                member.optimizer.load_state_dict({"state": {}, "param_groups": groups})
                if member.exact is not None and source.exact is not None:
                    exponents = source.exact.exponents.state_dict()
                    member.exact.exponents.load_state_dict(copy.deepcopy(exponents))
                # It says that it has that state from here on, as the library's workers do.
                member.state, member.step = newest, step
        fresh, self._groups = self._fresh, self._new_groups(deaths)
        members = list(self.members)

        def begin(member: Member, group: FakeGroup) -> None:
            member.home.begin_generation(
                group,  # type: ignore[arg-type]
                group.network.generation,  # type: ignore[attr-defined]
                newest,
                step=step,
                is_source=fresh and member is source,
                keep_values=False,
                on_bytes=lambda count: None,
            )

        well, errors = self._call(self._groups, begin)
        for member in members:
            member.note_table(members)
        lost = [error for error in errors if isinstance(error, ShardsLostError)]
        if lost:
            assert self._is_lost(), f"nobody lost both holders of a shard: {lost[0]}"
            self._fresh = True
            for member in self.members:
                member.state = None
            return False
        self._fresh = False
        if len(well) < len(members):
            # A member goes by its old table or by the new one.
            self._tables += [member.table for member in members if member.table]
            return False
        self._tables = [members[0].table]
        return True

    def _restore(self) -> None:
        """Give a member the truth, as from a checkpoint."""
        self.restored += 1
        self._gone = set()
        member = self._draw.choice(self.members)
        with torch.no_grad():
            for own, truth in zip(member.parameters.values(), self.reference.parameters, strict=True):
                own.copy_(truth)
        member.optimizer.load_state_dict(copy.deepcopy(self.reference.optimizer.state_dict()))
        for index, parameter in enumerate(member.parameters.values()):
            # Raw: torch gives state the type of the parameter.
            if state := self.reference.state_of(index):
                member.optimizer.state[parameter] = copy.deepcopy(state)
        number = self._generation
        name = GenerationName.of(incarnation=1, restart=self.restored, number=number)
        # The name of a restored state says nothing of its step.
        member.state, member.step = StateName(name, 0), self.reference.step
        for other in self.members:
            if other is not member:
                other.state = None
        self._tables = [[frozenset([member.name])]]

    # ---- what members do

    def train(
        self,
        steps: int,
        unused: Sequence[int] = (),
        deaths: Sequence[Death] = (),
        skip: bool = False,
    ) -> bool:
        """Make steps in the generation that stands; return whether it still does.

        Args:
            steps: At most so many.
            unused: Parameters without gradients in these steps.
            deaths: Members that are lost on the way.
            skip: The steps change nothing.
        """
        self._plan_deaths(self._groups, deaths)
        for _ in range(steps):
            seeds = {member.name: self._draw.randrange(1 << 30) for member in self.members}
            self._candidate = copy.deepcopy(self.reference)
            sums: dict[int, torch.Tensor] = {}
            for member in self.members:
                for index, gradient in gradients_for(member.layout, seeds[member.name]).items():
                    sums[index] = sums.get(index, torch.zeros_like(gradient)) + gradient
            self._candidate.make_step(sums, unused, skip)
            members = list(self.members)

            def step(member: Member, group: FakeGroup, seeds: dict[str, int] = seeds) -> None:
                try:
                    member.try_step(group, seeds[member.name], unused, skip)
                except RuntimeError:
                    group.shut()  # as the library's workers do, so that nobody waits
                    raise

            _, errors = self._call(self._groups, step)
            for member in members:
                member.note_table(members)
            if errors or len(self.members) < len(self._groups):
                # Some have got the shards that were on their way, and others do not know it.
                self._tables += [member.table for member in members]
                return False
            self._tables = [members[0].table]
            self.reference, self._candidate = self._candidate, None
            if self._variant.norm:
                self._check_norms([gradient for index, gradient in sums.items() if index not in unused])
        return True

    def _check_norms(self, gradients: Sequence[torch.Tensor]) -> None:
        truth = math.sqrt(sum(gradient.double().square().sum().item() for gradient in gradients))
        for member in self.members:
            assert member.norm is not None
            assert math.isclose(member.norm, truth, rel_tol=1e-9), (member.norm, truth)

    def leave(self, leavers: Collection[Member], deaths: Sequence[Death] = ()) -> None:
        """Have members go, whose shards are brought to the others first.

        Args:
            leavers: Those that go.
            deaths: Members that are lost meanwhile.
        """
        self._plan_deaths(self._groups, deaths)
        members = list(self.members)
        well, _ = self._call(self._groups, lambda m, g: m.home.evacuate(m in leavers))
        for member in members:
            member.note_table(members)
        stay = [member for member in self.members if member not in leavers]
        if len(well) == len(members) and stay:
            self._tables = [stay[0].table]
        else:
            self._tables += [member.table for member in members if member.table]
        self.lose(leavers)

    def each(self, call: Callable[[Member, FakeGroup], None]) -> None:
        """Make a call at all members. Raise the first RuntimeError of one."""
        self._plan_deaths(self._groups, ())
        _, errors = self._call(self._groups, call)
        if errors:
            raise errors[0]

    # ---- what must be true

    def check(self) -> None:
        """Fail unless all members have the truth: every value, and every shard at two of them but those that
        they say to be at one.
        """
        self.each(lambda m, g: m.home.settle(None))
        truth = self.reference
        for rank, member in enumerate(self.members):
            assert member.state is not None
            assert member.step == truth.step
            for own, value in zip(member.parameters.values(), truth.parameters, strict=True):
                assert torch.equal(own, value), (member.name, tuple(value.shape))
            home = member.home
            assert home.assigned is not None
            assert not member.optimizer.state
            if member.exact is not None:
                exponents = [other.exact.exponents.values for other in self.members if other.exact]
                assert all(torch.equal(member.exact.exponents.values, other) for other in exponents)
            for number in home.assigned.held_by(rank):
                for part in home.held.shard_parts(home.shards, number):
                    whole = truth.parameters[part.stretch.index]
                    state = truth.state_of(part.stretch.index)
                    check_state(part.state, state, part.stretch, whole.shape)
        holders = [len(table) for table in self._tables[0]]
        if len(self.members) > 1:
            assert set(holders) <= {1, 2}
            assert {holders.count(1)} == {member.home.single for member in self.members}
        else:
            assert set(holders) == {1}
