"""`python -m springtide_ps`, but the optimizer's step fails half done from a learning rate on.

argv: MODULE, as for `program`.
"""

import runpy
import sys

import torch

from springtide_ps.params.chunk import Chunk, StepSpec

LIMIT = 0.1 * 0.995**9.5
"""Learning rate below which steps fail: `worker_script` has it from its eleventh step on."""

_apply = Chunk.apply


def _half(self: Chunk, total: torch.Tensor, step_spec: StepSpec, keep: bool = False) -> None:
    if any(group["lr"] < LIMIT for group in step_spec.groups):
        self.values[: len(self.values) // 2] = 7.0
        raise RuntimeError("no memory for it")
    _apply(self, total, step_spec, keep)


if __name__ == "__main__":
    Chunk.apply = _half  # type: ignore[method-assign]
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
