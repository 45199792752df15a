"""Trains one loop after another until an evaluation says that it is enough. argv: RESULT_FOLDER JSON_OPTIONS.

Writes RESULT_FOLDER/POD.json at its end: what the evaluations found.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import springtide


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    springtide.init()
    springtide.distribute(model, optimizer)
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
    y = 2 * x[:, :1]
    found: list[float] = []
    for epoch in range(options["most"]):
        for inputs, wanted in springtide.batches((x, y), batch_size=32, seed=epoch):
            with springtide.step():
                (model(inputs) - wanted).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        evaluation = springtide.batches((x, y), batch_size=8, train=False)
        for inputs, wanted in evaluation:
            with torch.no_grad():
                springtide.report(loss=(model(inputs) - wanted).square().mean())
        found.append(evaluation.values["loss"])
        if found[-1] < options["enough"]:
            break
    (folder / f"{os.environ['SPRINGTIDE_POD_NAME']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
