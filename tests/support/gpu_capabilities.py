"""Name what has to work on a device, and mark the tests that show it.

`@needs_cuda(NAME)` marks a test, and `cuda_param(NAME)` is the value "cuda" of a test's parameter `device`.
Both are skipped without a device; `make gpu` runs them and reports by name (`gpu_run`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

MARK = "cuda"
CAPABILITIES = {
    "steps": "a script's steps equal plain PyTorch's",
    "nccl-one": "NCCL with one rank",
    "nccl-two": "NCCL between two devices",
    "gloo": "gloo with CUDA tensors, between two ranks on one device",
    "processes": "two processes on one device",
    "optimizers": "fused and capturable optimizers, and where a joiner's and a restored state lies",
    "channels-last": "`channels_last` with a fused optimizer",
    "amp": "autocast in bfloat16, and in float16 with a GradScaler",
    "batchnorm": "models with BatchNorm",
    "streams": "gradients from side streams, and copies beside compute",
    "checkpoints": "checkpoints: saved and restored bit by bit",
    "joins": "a worker that joins has the state, and equal parameters afterwards",
    "aborts": "a sum that is stuck is released",
    "servers": "parameter servers, through pinned memory",
    "shards": "the optimizer's state in shards: exchanges between two ranks, a loss and a join",
    "pods": "a model divided over the devices of a pod: fully_shard over NCCL",
    "exact": "exact mode: equal bits with one to three workers",
    "random": "random numbers of a batch's part",
    "compile": "`torch.compile`",
    "figures": "the measured figures",
}
FIGURES = {
    "step_ratio_two_processes": ("step against DDP, two processes on one device, gloo", "ratio"),
    "step_ratio_one_process": ("step of one process against DDP with NCCL and one rank", "ratio"),
    "copy_overlap": ("copies to and from the host, hidden behind compute", "fraction"),
    "transfer_seconds_per_gib": ("state from device to device, through the host", "seconds per GiB"),
}
"""Measured figures by name: a sentence and the unit of each. A test of `figures` gives it to `record_figure`.
"""

_FIGURE = "figure "
NO_DEVICE = "no CUDA device"


def needs_cuda(capability: str, devices: int = 1) -> Callable[[Any], Any]:
    """Return the decorator of a test that shows the capability. devices: how many it needs."""
    marks = _marks(capability, devices)

    def mark(test: Any) -> Any:
        for each in marks:
            test = each(test)
        return test

    return mark


def cuda_param(capability: str) -> Any:
    """Return the parameter "cuda" of a test that also runs on the CPU."""
    return pytest.param("cuda", marks=_marks(capability, 1))


def _marks(capability: str, devices: int) -> list[pytest.MarkDecorator]:
    import torch

    if capability not in CAPABILITIES:
        raise ValueError(f"{capability!r} is no capability: take one of {', '.join(CAPABILITIES)}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reason = NO_DEVICE if not count else f"needs {devices} CUDA devices, there are {count}"
    return [getattr(pytest.mark, MARK)(capability), pytest.mark.skipif(count < devices, reason=reason)]


def capability_of(item: pytest.Item) -> str:
    """Return the capability that the test shows; "" for a test that needs no device.

    Raises:
        pytest.UsageError: the mark names none.
    """
    mark = item.get_closest_marker(MARK)
    if mark is None:
        return ""
    named = mark.args[0] if mark.args else ""
    if named not in CAPABILITIES:
        raise pytest.UsageError(
            f"{item.nodeid}: the mark {MARK} names {named!r}: use needs_cuda or cuda_param of"
            f" tests/support/gpu_capabilities.py with one of {', '.join(CAPABILITIES)}"
        )
    return str(named)


def record_figure(record_property: Callable[[str, object], None], name: str, value: float) -> None:
    """Have the report show the figure. record_property: pytest's fixture."""
    if name not in FIGURES:
        raise ValueError(f"{name!r} is no figure: take one of {', '.join(FIGURES)}")
    record_property(_FIGURE + name, value)


def figures_of(properties: Iterable[tuple[str, object]]) -> dict[str, float]:
    """Return the figures among a report's `user_properties`."""
    return {
        name.removeprefix(_FIGURE): float(str(value))
        for name, value in properties
        if name.startswith(_FIGURE)
    }


def files_with_gpu_tests(root: Path) -> list[Path]:
    """Return the files below `root` with tests that need a device, in order."""
    marks = (needs_cuda.__name__ + "(", cuda_param.__name__ + "(")
    return sorted(path for path in root.rglob("test_*.py") if any(mark in path.read_text() for mark in marks))
