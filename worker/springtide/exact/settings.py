"""Settings of a process in exact mode beside the sums: threads, code paths of libraries, deterministic
algorithms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from springtide.errors import SpringtideError, UsageError
from springtide.settings import Settings

MOST_PARTS = 1000
CUBLAS_WORKSPACE = ":4096:8"
"""Value of CUBLAS_WORKSPACE_CONFIG with which cuBLAS gives the same bits each time; it reads it once."""
MKL_CBWR = "AVX2,STRICT"
"""Mode in which MKL's results depend neither on its operands' alignment nor on the newest instructions."""


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


@dataclass(frozen=True, slots=True)
class OnGpu:
    """Settings on which a GPU's bits depend in this process."""

    workspace: str
    deterministic: bool
    only_warns: bool
    benchmark: bool


def on_gpu(workspace: str) -> OnGpu:
    """Return the present settings of a GPU. workspace: CUBLAS_WORKSPACE_CONFIG of the environment."""
    return OnGpu(
        workspace,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )


def check_gpu(found: OnGpu) -> None:
    """Raise UsageError when a model on a GPU would not give equal bits in this process."""
    if found.workspace != CUBLAS_WORKSPACE:
        raise UsageError(
            f"distribute(): exact mode on a GPU needs CUBLAS_WORKSPACE_CONFIG={CUBLAS_WORKSPACE} in the "
            f"environment of the process from its start, and it is {found.workspace!r}: the operator sets it "
            "with strategy.allReduce.exact; without a cluster, set it before starting Python"
        )
    if not found.deterministic or found.only_warns:
        raise UsageError(
            "distribute(): the script has switched deterministic algorithms off since springtide.init(), "
            "which exact mode needs: leave torch.use_deterministic_algorithms() out"
        )
    if found.benchmark:
        raise UsageError(
            "distribute(): the script has set torch.backends.cudnn.benchmark since springtide.init(): then "
            "times decide which algorithm computes, and exact mode's bits with it; leave that out"
        )


def describe(logical_workers: int, device: torch.device) -> str:
    """Describe the facts that all members must have in common, besides the model, for equal bits.

    Args:
        logical_workers: 0 without exact sums.
        device: of the model.

    Returns:
        "" without exact sums.

    device: of the model.
    """
    if not logical_workers:
        return ""
    common = (
        f"exact: {logical_workers} logical workers, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    )
    if device.type != "cuda":
        return common
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return f"{common}, {name} {capability}, CUDA {torch.version.cuda}, cuDNN {cudnn}"
