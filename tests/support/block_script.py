"""Training with collectives of its own between steps and after the loop. argv: RESULT_FOLDER JSON_OPTIONS.

Each run of a block is a line of FOLDER/POD.blocks: where, world size. In the blocks that the option `waits`
names, members wait for FOLDER/go-WHERE on their first run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from script_hold import wait_for

import springtide

FOLDER, OPTIONS = Path(sys.argv[1]), json.loads(sys.argv[2])
POD = os.environ["SPRINGTIDE_POD_NAME"]
X = torch.arange(96.0).reshape(24, 4) / 96


def note(text: str) -> None:
    with (FOLDER / f"{POD}.blocks").open("a") as file:
        file.write(text + "\n")


def total(where: str) -> float:
    """The sum of all samples, each member adding its share; waits in the middle of the block's first run."""
    runs = 0
    for attempt in springtide.retry():
        with attempt:
            rank, size = springtide.rank(), springtide.world_size()
            note(f"{where} {size}")
            mine = X[rank::size].sum().reshape(1)
            if runs == 0 and where in OPTIONS["waits"]:
                wait_for(FOLDER / f"go-{where}", 120.0)
            runs += 1
            dist.all_reduce(mine, group=springtide.process_group())
    return float(mine)


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    springtide.init()
    model, optimizer = springtide.distribute(model, optimizer)
    totals = []
    step = 0
    for batch in springtide.batches((X, X.sum(1, keepdim=True)), batch_size=8, epochs=10, seed=1):
        with springtide.step():
            (model(batch[0]) - batch[1]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step = springtide.api.active_runtime.position.cursor.step + 1
        if step % 10 == 0:
            totals.append(total(f"step{step}"))
    totals.append(total("end"))
    (FOLDER / f"{POD}.json").write_text(json.dumps(totals))


if __name__ == "__main__":
    main()
