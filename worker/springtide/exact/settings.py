"""What exact mode fixes in a process beside the sums: threads, MKL's code paths, deterministic algorithms."""

from __future__ import annotations

import torch

from springtide.environment import Settings
from springtide.errors import SpringtideError

MOST_PARTS = 1000
MKL_CBWR = "AVX2,STRICT"
"""With it, MKL's results depend neither on the alignment of its operands nor on the newest instructions."""


def prepare(settings: Settings) -> None:
    """Fix what the bits depend on. Raise SpringtideError for an environment in which that came too late."""
    if settings.logical_workers > MOST_PARTS:
        raise SpringtideError(
            f"environment variable SPRINGTIDE_LOGICAL_WORKERS must be at most {MOST_PARTS}, got "
            f"{settings.logical_workers}"
        )
    has_mkl = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if has_mkl and settings.mkl_cbwr != MKL_CBWR:
        raise SpringtideError(
            f"exact mode needs MKL_CBWR={MKL_CBWR} in the environment of the process, before torch is "
            f"imported, and it is {settings.mkl_cbwr!r}: the operator sets it with strategy.allReduce.exact; "
            "without a cluster, set it before starting Python"
        )
    if not settings.threads:
        torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory guards against reads of it, at the price of a pass over every tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def describe(logical_workers: int) -> str:
    """What all members must have in common, besides the model, for equal bits; "" without exact sums."""
    if not logical_workers:
        return ""
    return (
        f"exact: {logical_workers} logical workers, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    )
