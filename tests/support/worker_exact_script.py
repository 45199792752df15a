"""The training script of exact mode's tests: everything random and stateful that a step can hold. argv:
RESULT_FOLDER JSON_OPTIONS.

Augmentation in the dataset, dropout, BatchNorm, autocast, GradScaler, clipping, micro-batches, Adam, a
scheduler. Writes RESULT_FOLDER/POD.json at its end: digests of parameters, buffers and the optimizer's state;
and to RESULT_FOLDER/POD.losses a line for each loss that is computed: step, samples, bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import springtide


class Augmented(torch.utils.data.Dataset[Any]):
    """Samples that differ each time they are read, by three sources of random numbers."""

    def __init__(self, samples: int, fault: str) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(samples, 12, generator=generator)
        self.y = self.x[:, :3].argmax(1)
        if fault:
            self.x[7, 3] = float(fault)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        noise = 0.1 * torch.randn(12) + random.gauss(0, 0.1) + np.random.randn() * 0.1
        return self.x[index] * (1 + noise.float()), self.y[index]


def digest(tensors: Iterable[torch.Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.manual_seed(int(os.environ.get("SPRINGTIDE_SLOT", "0")))
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 40),
        torch.nn.BatchNorm1d(40),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(40, 30),
        torch.nn.ReLU(),
        torch.nn.Linear(30, 3),
    )
    if options.get("bfloat16"):
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    springtide.init()
    # A scale at which the first gradients overflow.
    scaler = torch.amp.GradScaler("cpu", 2.0**126, 4.0, 2.0**-7, 4, enabled="scaler" in options)
    runtime = springtide.api.active_runtime
    assert runtime is not None
    clip_norm = options.get("clip_norm", 0.5)
    springtide.distribute(model, optimizer, scheduler=scheduler, scaler=scaler, clip_norm=clip_norm)
    dataset = Augmented(options["samples"], options.get("not_finite", ""))
    name = os.environ.get("SPRINGTIDE_POD_NAME", "alone")
    losses = (folder / f"{name}.losses").open("a", buffering=1)
    for batch in springtide.batches(dataset, batch_size=options["batch"], epochs=options["epochs"], seed=5):
        with springtide.step():
            for micro in batch.split(options.get("split", 1)):
                inputs, labels = micro
                with torch.autocast("cpu", torch.bfloat16, enabled=options.get("autocast", True)):
                    loss = F.cross_entropy(model(inputs.to(next(model.parameters()).dtype)).float(), labels)
                scaler.scale(loss).backward()
                springtide.report(loss=loss)
                step = runtime.position.cursor.step + 1
                if micro.samples:  # and no stand-in
                    ids = ",".join(map(str, micro.ids.tolist()))
                    losses.write(f"{step} {ids} {loss.item().hex()}\n")
            slot = os.environ.get("SPRINGTIDE_SLOT", "0")
            time.sleep(options.get("pace", 0.0) + options.get("part_seconds", {}).get(slot, 0.0))
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
    losses.close()
    state = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    result = {
        "parameters": digest(model.parameters()),
        "buffers": digest(model.buffers()),
        "optimizer": digest(state),
        "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
        "scale": scaler.get_scale(),
        "rate": optimizer.param_groups[0]["lr"],
        "audit": runtime.position.ledger.audit(),
        "step": runtime.position.cursor.step,
    }
    (folder / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
