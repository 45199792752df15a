"""A worker that trains in ranges, by hand, on servers in this process."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from ps_members import Member, Store
from ps_servers import servers

from springtide.ps.async_backend import AsyncBackend
from springtide.ps.compression import GradientCompression
from springtide_ps.server.server import Server


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)


def batches_of(member: Member) -> AsyncBackend:
    """Return what takes a member's batches."""
    found = member.exchange.async_backend
    assert found is not None
    return found


class Loose:
    """A worker by hand: generations, ranges, bodies; on servers over which the test has power."""

    def __init__(
        self,
        running: list[Server],
        compression: str = "None",
        early: bool = False,
        name: str = "m0",
        bound: int | None = None,
    ) -> None:
        self.running, self.generation, self.store, self.bound = running, 0, Store(), bound
        self.member = Member(
            name,
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            asynchronous=True,
            early=early,
            compression=lambda: GradientCompression(compression, 0.2),
        )
        self.exchange = self.member.exchange
        self.batches = batches_of(self.member)

    def begin(self) -> None:
        """The next generation."""
        self.generation += 1
        self.store = Store()
        fresh = self.generation == 1
        self.member.begin(
            self.generation, [self.member.name], self.running, self.store, fresh=fresh, bound=self.bound
        )
        self.exchange.resolve()

    def body(self) -> None:
        """Take a range; its gradients leave."""
        lease = self.batches.lease(0, 100)
        assert lease.number is not None
        self.member.step = lease.number
        self.member.push(0, 1)

    def applied_batches(self) -> set[tuple[int, ...]]:
        return {
            tuple(applied_batches.intervals.to_json())
            for applied_batches in self.batches.applied_batches().values()
        }

    def values(self) -> torch.Tensor:
        return torch.cat([value.flatten() for value in self.member.values()])

    def held(self) -> torch.Tensor:
        """The newest values on the servers."""
        self.exchange.settle()
        self.batches.refresh()
        return self.values()


def undisturbed(bodies: int, compression: str) -> torch.Tensor:
    with servers(2) as running:
        loose = Loose(running, compression)
        loose.begin()
        for _ in range(bodies):
            loose.body()
            loose.exchange.commit((1.0,), ())
        values = loose.values()
        loose.exchange.close()
        return values


def cut(loose: Loose) -> None:
    """The worker's connections break, and servers see that."""
    for server in loose.running:
        for client in server.connections:
            client.stream.abort()
    links = loose.exchange.connections
    until(lambda: all(links[server].broken for server in links), "the connections' end")
    until(lambda: not any(server.stashed_bytes for server in loose.running), "the offers' end")


def arrived(loose: Loose, server: Server) -> bool:
    """Whether the server has everything that the open body has offered to it."""
    name = f"s{server.port}"
    here = {key for client in server.connections for _, key in list(client.stash.stashed)}
    return here == {key for key, homes in loose.exchange.context.generation.homes.items() if homes[0] == name}
