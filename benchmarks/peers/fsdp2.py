"""The peer of benchmarks.sharding: torch's `fully_shard` (FSDP2) on gloo, three processes, same model.

    python -m benchmarks.peers.fsdp2 FOLDER WIDTH    one process under torchrun

Those that make steps by turns are forked by the benchmark. Under torchrun a process saves a checkpoint
(torch.distributed.checkpoint) each SAVE_EVERY steps, into the folder, and begins from the newest one that is
there, as a script for torchrun has to.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.torchrun import CUT_SECONDS, WORKERS, Kill, kill_one

SAVE_EVERY = 20


def sharded(width: int) -> tuple[Any, Any]:
    """Return the model, each of its layers sharded over all processes, and its optimizer.

    Args:
        width: Of the layers.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from benchmarks.sharding import build

    model, mesh = build(width), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_by_turns(path: str, width: int, rank: int, port: int) -> None:
    """Make steps as the benchmark asks for them.

    Args:
        path: Of the socket of turns.
        width: Of the model's layers.
        rank: Of this process.
        port: On which rank 0 is found.
    """
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F

    from benchmarks.sharding import BATCH, PEER, samples
    from benchmarks.support.turns import Player

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORKERS)
    model, optimizer = sharded(width)
    x, y = samples(width)
    part, first = BATCH // WORKERS, rank * (BATCH // WORKERS)

    def look() -> dict[str, float]:
        state = [value for own in optimizer.state.values() for value in own.values()]
        return {"optimizer_bytes": sum(_local(value).nbytes for value in state)}

    player = Player(path, PEER, look)
    while True:
        ids = torch.arange(part).add(first) % len(x)
        F.cross_entropy(model(x[ids]), y[ids]).backward()
        optimizer.step()
        optimizer.zero_grad()
        first += BATCH
        player.step_ended()


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def train_under_torchrun(folder: Path, width: int) -> None:
    """Train, with a checkpoint each SAVE_EVERY steps; append a line for each step.

    Args:
        folder: For checkpoints and lines.
        width: Of the model's layers.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.nn import functional as F

    from benchmarks.sharding import BATCH, samples

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, optimizer = sharded(width)
    x, y = samples(width)
    part = BATCH // dist.get_world_size()
    step = newest(folder)
    if step:
        own, state = get_state_dict(model, optimizer)
        load({"model": own, "optimizer": state}, checkpoint_id=folder / f"checkpoint-{step}")
        set_state_dict(model, optimizer, model_state_dict=own, optim_state_dict=state)
    with (folder / f"steps-{os.getpid()}").open("a", buffering=1) as log:
        while True:
            ids = torch.arange(part).add(step * BATCH + dist.get_rank() * part) % len(x)
            F.cross_entropy(model(x[ids]), y[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            log.write(f"{time.time()} {step}\n")
            if step % SAVE_EVERY == 0:
                own, state = get_state_dict(model, optimizer)
                save({"model": own, "optimizer": state}, checkpoint_id=folder / f"checkpoint-{step}")


def newest(folder: Path) -> int:
    """Return the step of the newest checkpoint in the folder that is whole; 0 where there is none."""
    # The metadata is written when all shares are there.
    found = [path.parent.name for path in folder.glob("checkpoint-*/.metadata")]
    return max((int(name.partition("-")[2]) for name in found), default=0)


def measure_kills(width: int, tries: int, cut: float = CUT_SECONDS) -> dict[str, Any]:
    """Return the medians over kills at different places between two checkpoints; null with a reason.

    Args:
        width: Of the model's layers.
        tries: Kills, each in a run of its own.
        cut: Seconds that are waited for a step after a kill, at most, and are then its gap.
    """
    kills = []
    try:
        for number in range(tries):
            # First in the middle between two checkpoints, then earlier and later.
            ready = SAVE_EVERY + (SAVE_EVERY // 2 + 7 * number) % SAVE_EVERY
            kills.append(kill_one("benchmarks.peers.fsdp2", ready, [str(width)], cut))
    except (TimeoutError, OSError) as error:
        return {
            "torchrun_fsdp2_kill_gap_seconds": None,
            "torchrun_fsdp2_steps_lost": None,
            "torchrun_fsdp2_reason": str(error),
        }
    cut_short = sum(kill.steps_lost is None for kill in kills)
    return {
        "torchrun_fsdp2_kill_gap_seconds": statistics.median(kill.gap_seconds for kill in kills),
        "torchrun_fsdp2_steps_lost": statistics.median(lost(kill) for kill in kills),
        "torchrun_fsdp2_reason": f"after {cut_short} of {len(kills)} kills no step came within {cut:g} s"
        if cut_short
        else None,
    }


def lost(kill: Kill) -> int:
    """Return how many steps have to be made again; at least those since the newest checkpoint. PURE."""
    return kill.steps_made % SAVE_EVERY if kill.steps_lost is None else kill.steps_lost


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="for checkpoints and steps")
    parser.add_argument("width", type=int, help="of the model's layers")
    arguments = parser.parse_args()
    train_under_torchrun(arguments.folder, arguments.width)


if __name__ == "__main__":
    main()
