"""Common uses of torch.distributed, over the ranks that the environment names. argv: FOLDER.

Nothing here knows the library. Rank 0 writes the names of what was tried and held to FOLDER/held.ROUND; every
check raises. Then all sum in a ring, until FOLDER/finish is there.

The order of events is told by lines that ranks append to one file (`Events`), never by time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def same(found: torch.Tensor, expected: Any) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype).expand_as(found))


def ring_all_reduce(part: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks with isend and irecv to the neighbours alone."""
    total, passing = part.clone(), part.clone()
    for _ in range(WORLD - 1):
        coming = torch.empty_like(part)
        sent = dist.isend(passing, (RANK + 1) % WORLD)
        got = dist.irecv(coming, (RANK - 1) % WORLD)
        sent.wait()
        got.wait()
        total += coming
        passing = coming
    return total


class Events:
    """Lines in the order in which they were appended, by any rank; made by all ranks together."""

    def __init__(self) -> None:
        name = torch.randint(1 << 62, (1,))
        dist.broadcast(name, src=0)
        self._path = Path(sys.argv[1]) / f"events.{int(name)}"

    def tell(self, event: str) -> None:
        line = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(line, f"{event}\n".encode())
        os.close(line)

    def read(self) -> list[str]:
        return self._path.read_text().splitlines() if self._path.exists() else []

    def until(self, expected: set[str]) -> None:
        """Raise TimeoutError that names what is missing."""
        deadline = time.monotonic() + 60
        while missing := expected - set(self.read()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {RANK} waited 60 s for {sorted(missing)}")
            time.sleep(0.005)


def barriers() -> None:
    """Nobody passes before the last has arrived, whoever it is; a barrier of some waits for these alone."""
    for late in range(WORLD):
        events = Events()
        others = {f"arrives {rank}" for rank in range(WORLD) if rank != late}
        if late == RANK:
            events.until(others)
            time.sleep(0.2)  # whoever does not wait shows it now
        events.tell(f"arrives {RANK}")
        dist.barrier()
        events.tell(f"passes {RANK}")
        events.until({f"passes {rank}" for rank in range(WORLD)})
        kinds = [line.split()[0] for line in events.read()]
        assert kinds == ["arrives"] * WORLD + ["passes"] * WORLD, events.read()
    events, pair = Events(), dist.new_group([0, 1])
    if RANK < 2:
        dist.barrier(group=pair)
        events.tell(f"passes {RANK}")
        summed = torch.full((2,), float(RANK + 1))
        dist.all_reduce(summed, group=pair)
        same(summed, 3.0)
    else:
        events.until({"passes 0", "passes 1"})
    dist.barrier()


def primitives() -> None:
    mine = torch.full((4,), float(RANK + 1))
    whole = sum(range(1, WORLD + 1))
    if RANK == 0:
        dist.send(mine, 1)
    elif RANK == 1:
        got = torch.empty(4)
        dist.recv(got, 0)
        same(got, 1.0)
    copied = mine.clone()
    dist.broadcast(copied, src=1)
    same(copied, 2.0)
    summed = mine.clone()
    dist.reduce(summed, dst=0)
    if RANK == 0:
        same(summed, whole)
    summed = mine.clone()
    dist.all_reduce(summed, op=dist.ReduceOp.SUM)
    same(summed, whole)
    part = torch.empty(2)
    dist.scatter(part, [torch.full((2,), float(r)) for r in range(WORLD)] if RANK == 0 else None, src=0)
    same(part, float(RANK))
    gathered = [torch.empty(4) for _ in range(WORLD)] if RANK == 0 else None
    dist.gather(mine, gathered, dst=0)
    for other, piece in enumerate(gathered or []):
        same(piece, other + 1.0)
    pieces = [torch.empty(4) for _ in range(WORLD)]
    dist.all_gather(pieces, mine)
    same(torch.stack(pieces)[:, 0], [other + 1.0 for other in range(WORLD)])
    scattered = torch.empty(1)
    dist.reduce_scatter(scattered, [torch.full((1,), float(10 * r + RANK)) for r in range(WORLD)])
    same(scattered, WORLD * 10.0 * RANK + sum(range(WORLD)))
    same(ring_all_reduce(mine), whole)
    alone = [dist.new_group([other]) for other in range(WORLD)]
    lonely = mine.clone()
    dist.all_reduce(lonely, group=alone[RANK])
    same(lonely, RANK + 1.0)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def alone_over(seeds: range) -> torch.Tensor:
    """Parameters after one step over all batches in one process."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = sum((model(x) - y).square().mean() for x, y in map(batch, seeds)) / len(seeds)
    loss.backward()
    optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def data_parallel() -> None:
    model = network()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    x, y = batch(RANK)
    (wrapped(x) - y).square().mean().backward()
    optimizer.step()
    found = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(found, alone_over(range(WORLD)))


def fully_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = batch(RANK)
    (model(x) - y).square().mean().backward()
    optimizer.step()
    found = torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])  # type: ignore[attr-defined]
    torch.testing.assert_close(found, alone_over(range(WORLD)))


def pipeline() -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    layers = list(network())
    cut = [nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:])]
    if RANK > 1:
        return  # two stages are enough to see it work
    stage = PipelineStage(cut[RANK], RANK, 2, torch.device("cpu"), group=dist.new_group([0, 1]))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda out, y: (out - y).square().mean())
    x, y = batch(0)
    losses: list[torch.Tensor] = []
    if RANK == 0:
        schedule.step(x)
    else:
        out = schedule.step(target=y, losses=losses)
        torch.testing.assert_close(out, network()(x))
        torch.testing.assert_close(torch.stack(losses).mean(), (network()(x) - y).square().mean())
    assert all(p.grad is not None for p in cut[RANK].parameters())


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def remote_calls() -> None:
    import torch.distributed.autograd as remote_autograd

    if RANK == 0:
        weight = torch.ones(3, requires_grad=True)
        with remote_autograd.context() as context:
            loss = rpc.rpc_sync("worker1", double, (weight * 3,)).sum()
            remote_autograd.backward(context, [loss])
            same(remote_autograd.get_gradients(context)[weight], 6.0)


def partitioner(x: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Which rank computes which part."""
    return [(f"worker{rank}", part) for rank, part in enumerate(x.chunk(WORLD))]


def mapper(part: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (part @ weight).square().sum()


def reducer(results: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(results).sum()


def parallelize(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """TorchOpt's pattern: cut the arguments, map on the ranks by RPC, reduce; gradients flow through."""
    futures = [rpc.rpc_async(name, mapper, (part, weight)) for name, part in partitioner(x)]
    return reducer([future.wait() for future in futures])


def partition_map_reduce() -> None:
    import torch.distributed.autograd as remote_autograd

    if RANK == 0:
        x, _ = batch(3)
        weight = torch.ones(6, requires_grad=True)
        with remote_autograd.context() as context:
            loss = parallelize(x, weight)
            remote_autograd.backward(context, [loss])
            gradient = remote_autograd.get_gradients(context)[weight]
        local = torch.ones(6, requires_grad=True)
        mapper(x, local).backward()
        torch.testing.assert_close(gradient, local.grad)


def energy(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum()


def torchopt_itself() -> None:
    import torchopt.distributed as todist  # type: ignore[import-not-found]

    loss = todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.sum_reducer)(energy)
    if RANK == 0:
        x = batch(3)[0].requires_grad_()
        with todist.autograd.context() as context:
            value = loss(x)
            gradient = todist.autograd.grad(context, value, x)[0]
        torch.testing.assert_close(value, energy(x))
        torch.testing.assert_close(gradient, 2 * x.detach())


def main() -> None:
    torch.set_num_threads(1)
    held: dict[str, str] = {}

    def attempt(what: Callable[[], None]) -> None:
        try:
            what()
            held[what.__name__] = "held"
        except ModuleNotFoundError as error:
            held[what.__name__] = f"skipped: {error}"

    dist.init_process_group("gloo")
    for what in (primitives, barriers, data_parallel, fully_sharded, pipeline):
        attempt(what)
    rpc.init_rpc(f"worker{RANK}", rank=RANK, world_size=WORLD)
    for what in (remote_calls, partition_map_reduce, torchopt_itself):
        attempt(what)
    folder, held_in = Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    if RANK == 0:
        (folder / "held.new").write_text(json.dumps(held))
        (folder / "held.new").rename(folder / f"held.{held_in}")
    over = torch.zeros(1)
    while not over.item():
        # All stop after the same turn; whoever is ended in between leaves the others in the middle of it.
        over = ring_all_reduce(torch.tensor([float((folder / "finish").exists())]))
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
