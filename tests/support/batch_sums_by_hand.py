"""Workers without common steps, by hand: bodies of two backward passes and a step after each."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from ps_loose import batches_of
from ps_members import Member, Store
from ps_servers import servers
from worker_ranks import seeded

import springtide
from springtide.embedding.local import merged
from springtide.ps.context import GroupSettings
from springtide_ps.server.server import Server


class Net(torch.nn.Module):
    """A table and a layer, an optimizer each."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with seeded(seed):
            self.words = springtide.Embedding(None, 3, seed=1, slices=2)
            self.layer = torch.nn.Linear(3, 40)


def gradients_of(model: Net, step: int, part: int, parts: int) -> None:
    """Set gradients of the table and the layer that do not depend on the parameters' values.

    Args:
        part: the number of the backward pass.
    """
    model.zero_grad()
    generator = torch.Generator().manual_seed(100 * step + part)
    (model.words(torch.arange(step, step + 4)) * torch.randn(4, 3, generator=generator)).sum().backward()
    model.layer.weight.grad = torch.randn(40, 3, generator=generator)
    model.layer.bias.grad = torch.randn(40, generator=generator)


class Loose:
    """A worker by hand, perhaps of a group, whose members have equal parts of the gradients. Its bodies step
    the table first, or the layer, see that, and step the other one.
    """

    def __init__(
        self,
        name: str = "m0",
        table_first: bool = False,
        replication: int = 1,
        group: GroupSettings | None = None,
    ) -> None:
        made: list[torch.optim.Optimizer] = []

        def optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
            named = list(model.named_parameters())
            tables = [p for n, p in named if n.startswith("words")]
            layers = [p for n, p in named if n.startswith("layer")]
            made.extend(torch.optim.SGD(own, lr=0.1) for own in (tables, layers))
            return made

        self.member = Member(
            name,
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            asynchronous=True,
            group=group,
            optimizers=optimizers,
            build=Net,
            gradients=gradients_of,
            replication=replication,
        )
        self.exchange = self.member.exchange
        self.batches = batches_of(self.member)
        self.first, self.second = made if table_first else reversed(made)
        self.generation = 0
        for index, handle in self.exchange.tables.handles.items():
            handle.managed, handle.read = True, partial(self.exchange.read_rows, index)
            handle.read_all = partial(self.exchange.all_rows, index)

    def begin(self, running: list[Server], members: tuple[str, ...] = ("m0",), store: Any = None) -> None:
        self.generation += 1
        fresh = self.generation == 1
        self.member.begin(self.generation, list(members), running, store or Store(), fresh=fresh)

    def backward(self, number: int) -> None:
        """A round's gradients leave."""
        exchange, model = self.exchange, self.member.model
        share = 1.0 if self.batches.group is None else 1.0 / self.batches.group.size
        gradients_of(model, self.member.step + 1, number, 1)  # type: ignore[arg-type]
        for bucket, size in enumerate(self.member.layout.sizes):
            flat = torch.zeros(size)
            for index in self.member.layout.members[bucket]:
                gradient = list(model.parameters())[index].grad
                offset = self.member.layout.slots[index].offset
                if gradient is not None:
                    flat[offset : offset + gradient.numel()] = gradient.flatten() * share
            exchange.push(flat, bucket)
        for index, handle in exchange.tables.handles.items():
            ids, sums = merged(handle.take(), handle.dim)
            exchange.stage_rows(index, ids, sums * share)
        exchange.prepare()

    def half(self, wanted: int | None = None, see: bool = True) -> None:
        """The body's first round, and its step. see: what that made is looked at."""
        lease = self.batches.lease(0, 100)
        assert lease.number is not None
        assert wanted in (None, lease.number)
        self.exchange.settle()
        self.member.step = lease.number
        self.exchange.begin_step()
        self.backward(0)
        self.exchange.stage(self.first, None, 1.0, 1.0, (), ())
        if see:
            self.exchange.settle()

    def rest(self) -> None:
        self.exchange.begin_backward_pass()
        self.backward(1)
        self.exchange.stage(self.second, None, 1.0, 1.0, (), ())
        self.exchange.commit((1.0,), ())

    @property
    def first_keys(self) -> list[str]:
        """Return the chunks that the first step of a body changes."""
        number = self.exchange.optimizers.all.index(self.first)
        keys = self.batches.keys_in_order()
        return [key for key in keys if self.batches.owner_of(key) == number]

    def applied_batches(self) -> set[tuple[int, ...]]:
        return {
            tuple(applied_batches.intervals.to_json())
            for applied_batches in self.batches.applied_batches().values()
        }

    def values(self) -> list[torch.Tensor]:
        self.exchange.settle()
        model: Any = self.member.model
        dense = [item.detach().clone() for item in model.layer.parameters()]
        return [*model.words.export(), *dense]


def undisturbed(bodies: int, table_first: bool, name: str = "m0") -> list[torch.Tensor]:
    """Return the values that one worker alone makes of the bodies.

    Args:
        name: of the worker; decides on which chunk it begins.
    """
    with servers(2) as running:
        loose = Loose(name, table_first)
        loose.begin(running, (name,))
        loose.exchange.resolve()
        for number in range(bodies):
            loose.half(number, see=number % 2 == 0)
            loose.rest()
        values = loose.values()
        assert loose.applied_batches() == {(0, bodies)}
        assert sum(server.counters.repeated for server in running) == 0
        loose.exchange.close()
        return values


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
