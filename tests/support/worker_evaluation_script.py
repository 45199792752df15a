"""Trains a little and evaluates in between and at the end. argv: RESULT_FOLDER JSON_OPTIONS.

Writes RESULT_FOLDER/POD.json at its end: what each evaluation found, by step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import springtide


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.manual_seed(0)
    deeper = [torch.nn.Linear(4, 4) for _ in range(options.get("deeper", 0))]
    model = torch.nn.Sequential(*deeper, torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    springtide.init()
    springtide.distribute(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    count = options.get("held_out", 301)
    x, held_out = torch.randn(64, 4, generator=generator), torch.randn(count, 4, generator=generator)
    numbers = torch.arange(count, dtype=torch.float64)
    results: dict[int, dict[str, float]] = {}

    lengths = options.get("shards")
    evaluated: Any = (held_out, numbers)
    if lengths is not None:  # the same samples, in shards
        firsts = [sum(lengths[:shard]) for shard in range(len(lengths))]

        def read(shard: int) -> Iterator[Any]:
            rows = slice(firsts[shard], firsts[shard] + lengths[shard])
            return zip(held_out[rows], numbers[rows], strict=True)

        evaluated = springtide.data.Shards(range(len(lengths)), read)

    def evaluate(step: int) -> None:
        evaluation = springtide.batches(evaluated, batch_size=8, train=False)
        for batch in evaluation:
            time.sleep(options.get("pace", 0.0))
            with torch.no_grad():
                loss = (model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
            springtide.report(held_out=loss, number=batch[1].mean())
        results[step] = evaluation.values

    step = 0
    for batch in springtide.batches(x, batch_size=16, epochs=options["epochs"], seed=5):
        with springtide.step():
            (model(batch.data) - batch.data.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        done = springtide.api.active_runtime.position.cursor.step
        if done != step and done % 4 == 0:
            step = done
            evaluate(step)
    evaluate(-1)
    (folder / f"{os.environ.get('SPRINGTIDE_POD_NAME', 'alone')}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
