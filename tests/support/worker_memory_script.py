"""The training script of the tests of what a worker holds. argv: RESULT_FOLDER JSON_OPTIONS.

Writes RESULT_FOLDER/POD.json: the bytes of tensors by `benchmarks.sharding`, between two steps and where they
were most in backward.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import springtide

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks.sharding import Peak, look


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.manual_seed(0)
    width = options["width"]
    layers: list[torch.nn.Module] = []
    for _ in range(options["depth"]):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    model: torch.nn.Module = torch.nn.Sequential(*layers, torch.nn.Linear(width, 3))
    data = torch.randn(options["samples"], width), torch.randint(3, (options["samples"],))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    springtide.init()
    peak = Peak(model, optimizer)  # its hooks come before the library's
    peak.known = data
    springtide.distribute(model, optimizer)
    figures: dict[str, float] = {}
    for inputs, labels in springtide.batches(data, batch_size=options["batch"], epochs=options["epochs"]):
        if springtide.api.active_runtime.position.cursor.step == options["steps"] - 1:
            peak.close()
            figures = look(model, optimizer, data) | {"gradient_peak_bytes": peak.nbytes}
        with springtide.step():
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    (folder / f"{os.environ['SPRINGTIDE_POD_NAME']}.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
