"""Members of a job with parameters on servers, as threads: what a worker does around its exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from ps_servers import TOKEN
from torch.nn import functional as F

from springtide.comm.layout import Field, plan_layout
from springtide.comm.process_group import Group
from springtide.comm.store import StreamStore
from springtide.ps.backend import PsBackend
from springtide.ps.context import GroupSettings, PsContext, PsSettings
from springtide.ps.generation import GenerationStart
from springtide_ps.server.server import Server


def build(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(5, 40), torch.nn.Tanh()]
    for _ in range(5):
        layers += [torch.nn.Linear(40, 40), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(40, 3))


def gradients_of(model: torch.nn.Module, step: int, part: int, parts: int) -> None:
    """Gradients of the mean over a seeded batch of 12, from this part's samples only."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(12, 5, generator=generator), torch.randn(12, 3, generator=generator)
    x, y = (tensor.to(next(model.parameters()).device) for tensor in (x, y))
    own = slice(part * 12 // parts, (part + 1) * 12 // parts)
    model.zero_grad()
    (F.mse_loss(model(x[own]), y[own], reduction="sum") / y.numel()).backward()


class Store(StreamStore):
    """One store that all members share."""

    def __init__(self) -> None:
        super().__init__(lambda key, value: None, ["all"], 30.0)


def group_at(address: str | None) -> GroupSettings | None:
    """Groups of two, whose sums come to this address."""
    return None if address is None else GroupSettings(2, address, 60.0)


class Member:
    """A worker reduced to its use of the parameter servers."""

    def __init__(self, name: str, optimizer: Callable[[Any], torch.optim.Optimizer], **options: Any) -> None:
        self.name = name
        self.device = options.get("device", "cpu")
        self.model = options.get("build", build)(seed=sum(map(ord, name))).to(self.device)
        self.optimizer = optimizer(self.model)
        named = dict(self.model.named_parameters())
        self.layout = plan_layout([Field(n, tuple(p.shape), p.dtype) for n, p in named.items()], 256)
        settings = PsSettings(
            me=name,
            token=TOKEN,
            replication=options.get("replication", 1),
            with_norm=options.get("with_norm", False),
            connect_seconds=10.0,
            answer_seconds=20.0,
            asynchronous=options.get("asynchronous", False),
            early_values=options.get("early", False),
            group=options.get("group") or group_at(options.get("places", {}).get(name)),
        )
        optimizers = options.get("optimizers", lambda model: [self.optimizer])(self.model)
        compression, copier = options.get("compression", lambda: None)(), options.get("copier")
        context = PsContext(named, self.layout, optimizers, settings, compression, copier)
        self.exchange = PsBackend(context)
        self.step = 0
        self.gradients = options.get("gradients", gradients_of)
        self.sent = 0
        self.order: list[int] = []
        self.flats: list[torch.Tensor] = []

    def begin(
        self, number: int, members: list[str], running: list[Server], store: StreamStore, **how: Any
    ) -> None:
        group = Group(None, members.index(self.name), len(members), 10.0)
        start = GenerationStart(
            (1, 0, number),
            tuple(members),
            {f"s{server.port}": f"127.0.0.1:{server.port}" for server in running},
            frozenset(how.get("leaving", ())),
            how.get("step", 0),
            how.get("bound"),
        )
        self.exchange.begin_generation(
            start,
            group,
            store,
            holds=how.get("holds", True),
            leader=how.get("leader", 0),
            fresh=how.get("fresh", False),
        )
        self.step = start.step

    def push(self, part: int, parts: int) -> float | None:
        self.send(part, parts)
        return self.exchange.prepare()

    def send(self, part: int, parts: int) -> None:
        self.exchange.settle()
        self.gradients(self.model, self.step + 1, part, parts)
        self.exchange.begin_step()
        self.flats = [torch.zeros(size, device=self.device) for size in self.layout.sizes]
        for bucket in self.order or range(len(self.flats)):
            flat = self.flats[bucket]
            for index in self.layout.members[bucket]:
                gradient = list(self.model.parameters())[index].grad
                offset = self.layout.slots[index].offset
                flat[offset : offset + gradient.numel()] = gradient.flatten()
            self.sent += self.exchange.push(flat, bucket).nbytes

    def commit(self, scale: float = 1.0, unused: tuple[int, ...] = ()) -> None:
        self.exchange.commit((scale,), unused)
        self.step += 1

    def values(self) -> list[torch.Tensor]:
        self.exchange.settle()
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@contextmanager
def members(
    count: int, optimizer: Callable[[Any], torch.optim.Optimizer], **options: Any
) -> Iterator[list[Member]]:
    made = [Member(f"m{number}", optimizer, **options) for number in range(count)]
    try:
        yield made
    finally:
        for member in made:
            member.exchange.close()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Make the calls at the same time; raise the first error."""
    results: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    return results
