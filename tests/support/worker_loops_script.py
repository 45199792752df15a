"""Trains in several loops of one epoch of four steps each. argv: RESULT_FOLDER JSON_OPTIONS.

Options: loops; says: whether the script says how many steps that makes.
"""

from __future__ import annotations

import json
import sys

import torch

import springtide


def main() -> None:
    options = json.loads(sys.argv[2])
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    springtide.init()
    if options["says"]:
        springtide.set_total_steps(4 * options["loops"])
    springtide.distribute(model, optimizer)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    for epoch in range(options["loops"]):
        for batch in springtide.batches(x, batch_size=16, epochs=1, seed=epoch):
            with springtide.step():
                (model(batch.data) - batch.data.sum(1, keepdim=True)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
