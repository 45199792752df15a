"""The peer of benchmarks.uneven: DistributedDataParallel on gloo, three processes, the last one slow.

    python -m benchmarks.peers.uneven_ddp SOCKET    three processes that make steps by turns

It averages over processes, so each of them has as many samples of a batch as any other.
"""

from __future__ import annotations

import os
import sys
import time


def train_by_turns(rank: int, path: str, port: int) -> None:
    """Make steps as the benchmark asks for them.

    Args:
        rank: Of this process.
        path: Of the socket of turns.
        port: On which rank 0 is found.
    """
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.support.turns import Player
    from benchmarks.uneven import BATCH, DDP, WORKERS, build, hold, samples

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORKERS)
    plain, optimizer = build()
    model = DistributedDataParallel(plain)
    inputs, labels = samples()
    part, at = BATCH // WORKERS, rank * (BATCH // WORKERS)
    player = Player(path, DDP, dict)
    while True:
        ids = torch.arange(at, at + part) % len(inputs)
        began = time.perf_counter()
        loss = F.cross_entropy(model(inputs[ids]), labels[ids])
        hold(began, part, rank, True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        at += BATCH
        player.step_ended()


def main(path: str) -> None:
    """Fork the processes, and wait for their end.

    Args:
        path: Of the socket of turns.
    """
    import torch.nn.parallel  # noqa: F401

    from benchmarks.support.ports import free_port
    from benchmarks.uneven import WORKERS

    port, pids = free_port(), []
    for rank in range(WORKERS):
        pid = os.fork()
        if pid == 0:
            train_by_turns(rank, path, port)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    raise SystemExit(max(map(abs, codes)))


if __name__ == "__main__":
    main(sys.argv[1])
