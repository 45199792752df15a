"""Trains a model of which one layer is never used. argv: RESULT_FOLDER JSON_OPTIONS.

It runs in processes of several releases, so it uses what all of them have. Options: epochs, of eight steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import springtide


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 1), "idle": torch.nn.Linear(64, 64)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    springtide.init()
    springtide.distribute(model, optimizer)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    for batch in springtide.batches(x, batch_size=8, epochs=options["epochs"], seed=0):
        with springtide.step():
            (model["used"](batch.data) - batch.data.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(options.get("pace", 0.0))
    values = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    (folder / f"{os.environ.get('SPRINGTIDE_POD_NAME', 'alone')}.values").write_text(json.dumps(values))


if __name__ == "__main__":
    main()
