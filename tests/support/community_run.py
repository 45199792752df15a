"""Run a script of `tests/community/`, changed for a job or as it is. argv: FOLDER JSON_OPTIONS.

Options: script (its name), plain (unchanged, alone). Its result goes into FOLDER/POD.json: a digest of all
tensors, their values in a row, and the loss that it has saved.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from community_scripts import FOLDER, SCRIPTS, converted, source_of
from torch.utils.data import RandomSampler
from torch.utils.data.distributed import DistributedSampler

from springtide.data.cursor import Cursor
from springtide.data.order import make_order


def deal_as_a_job(order: str) -> None:
    """Have torch's random samplers give the order of the library's own.

    Args:
        order: "SEED EPOCH" of a pass, in which k stands for its number, from 0.
    """
    passes = itertools.count()
    seed, epoch = order.split()

    def in_order(size: int, k: int) -> list[int]:
        cursor = Cursor(epoch=k if epoch == "k" else int(epoch))
        names = k if seed == "k" else k + 1 if seed == "k+1" else int(seed)
        found: list[int] = make_order(size, size, True, False, None).batch_ids(names, cursor, size).tolist()
        return found

    def random(self: RandomSampler) -> Iterator[int]:
        return iter(in_order(len(self.data_source), next(passes)))

    def distributed(self: DistributedSampler[Any]) -> Iterator[int]:
        return iter(in_order(len(self.dataset), self.epoch))  # type: ignore[arg-type]

    RandomSampler.__iter__ = random  # type: ignore[method-assign]
    if "accelerate" in sys.modules:
        from accelerate.data_loader import SeedableRandomSampler

        SeedableRandomSampler.__iter__ = random
    DistributedSampler.__iter__ = distributed  # type: ignore[method-assign,assignment]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a saved state, in the order of their names."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from tensors_in(value[key])


def summary(path: Path) -> dict[str, Any]:
    """Return what a script has left.

    Args:
        path: of the file.
    """
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        saved: Any = load_file(path)
    else:
        saved = torch.load(path, weights_only=False)
        saved = saved["state_dict"] if path.suffix == ".ckpt" else saved
    loss = saved.pop("loss", None) if isinstance(saved, dict) else None
    tensors = [tensor.detach().cpu().double().flatten() for tensor in tensors_in(saved)]
    row = torch.cat(tensors)
    digest = hashlib.sha256(row.numpy().tobytes()).hexdigest()
    return {"digest": digest, "values": row.tolist(), "loss": None if loss is None else float(loss)}


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    name, plain = str(options["script"]), bool(options.get("plain"))
    pod = "plain" if plain else os.environ.get("SPRINGTIDE_POD_NAME", "alone")
    script = SCRIPTS[name]
    own, shared = folder / f"own-{pod}", folder / f"shared-{'plain' if plain else 'job'}"
    own.mkdir()
    shared.mkdir(exist_ok=True)
    os.chdir(own)
    os.environ.update(script.environment)
    if plain and script.order:
        deal_as_a_job(script.order)
    # Before a script has its own ways of logging: the tests read what the library tells.
    logging.getLogger("springtide").addHandler(logging.StreamHandler(sys.stderr))
    logging.getLogger("springtide").setLevel(logging.INFO)
    warnings.resetwarnings()
    warnings.simplefilter("ignore")  # they are the script's own affair
    sys.argv = [f"{name}.py", *(part.format(own=own, shared=shared) for part in script.arguments)]
    text = source_of(name) if plain else converted(name)
    program = compile(text, str(FOLDER / f"{name}.py"), "exec")
    exec(program, {"__name__": "__main__", "__file__": str(FOLDER / f"{name}.py")})
    result = Path(script.result.format(own=own, shared=shared))
    (folder / f"{pod}.json").write_text(json.dumps(summary(result)))


if __name__ == "__main__":
    main()
