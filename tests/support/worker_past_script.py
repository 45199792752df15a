"""Trains in several loops of one epoch of four steps each. argv: RESULT_FOLDER JSON_OPTIONS.

Each body of a loop that the job has ended is written down in `worker-N.past`, with the rank that the script
sees there and whether the worker is a member; so is what comes behind each loop, in `worker-N.behind`.

Options: loops; gates: a body of an ended loop waits there until the test has made the file `gate-STAGE`;
evaluates: between two loops; errands: one worker does something for all there; meets: all workers sum a
number there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import springtide
import springtide.api


def note(path: Path, **fields: Any) -> None:
    """Append a line to what the test reads."""
    with path.open("a") as file:
        file.write(json.dumps(fields) + "\n")


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    springtide.init()
    springtide.distribute(model, optimizer, scheduler=scheduler)
    runtime = springtide.api.active_runtime
    assert runtime is not None
    name = runtime.settings.pod_name
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    for stage in range(options["loops"]):
        for batch in springtide.batches(x, batch_size=16, epochs=1, seed=stage):
            with springtide.step():
                if runtime.steps.is_past:
                    ranks = [springtide.rank(), springtide.world_size()]
                    is_member = runtime.state.generations > 0
                    note(folder / f"{name}.past", stage=stage, ranks=ranks, is_member=is_member)
                    gate = folder / f"gate-{stage}"
                    while options.get("gates") and not gate.exists():
                        time.sleep(0.01)
                loss = (model(batch.data) - batch.data.sum(1, keepdim=True)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        found: dict[str, Any] = {"stage": stage, "loss": loss.item(), "rank": springtide.rank()}
        if options.get("evaluates"):
            evaluation, samples = springtide.batches(x, batch_size=8, train=False), 0
            model.eval()
            for batch in evaluation:
                samples += batch.samples
                with torch.no_grad():
                    springtide.report(off=(model(batch.data) - batch.data.sum(1, keepdim=True)).abs().mean())
            model.train()
            found |= {"off": evaluation.values["off"], "samples": samples}
        for _ in runtime.evaluations.errand() if options.get("errands") else ():
            pass  # one of the workers does this for all
        if options.get("meets"):
            for attempt in springtide.retry():
                with attempt:
                    total = torch.ones(1)
                    dist.all_reduce(total, group=springtide.process_group())
            found["total"] = total.item()
        found["is_member"] = runtime.state.generations > 0
        note(folder / f"{name}.behind", **found)
    state = [value.tolist() for value in model.state_dict().values()]
    rate = optimizer.param_groups[0]["lr"]
    (folder / f"{name}.result").write_text(json.dumps([state, rate, runtime.position.ledger.audit()]))


if __name__ == "__main__":
    main()
