"""Tell an error of this process's own from one that happened between members.

While a generation forms, what fails between members (a connection, a peer, a checksum) is tried again by all
of them. An error that this process would meet each time is none of the others' business: it ends this process
at once, with its own words.
"""

from __future__ import annotations

import errno

import torch

_MEMORY = (
    "can't allocate memory",  # DefaultCPUAllocator
    "cannot allocate memory",
    "out of memory",
    "bad_alloc",
)
_DEVICE = ("CUDA error", "HIP error", "device-side assert", "cuDNN error", "CUBLAS_STATUS")
_DESCRIPTORS = ("too many open files",)
_FORM = ("state header:", "bytes are the limit here")
_NUMBERS = {
    errno.ENOMEM: "memory",
    errno.EMFILE: "descriptors",
    errno.ENFILE: "descriptors",
}
_HINTS = {
    "memory": "give the workers more memory, or the model less: smaller batches do not help here, for no "
    "step was running",
    "device": "its device failed: the process cannot use it any more",
    "descriptors": "raise the limit of open files (ulimit -n) in the workers' container runtime or image",
    "form": "all workers of a job must run one version of springtide, and one script",
}


def own_fault(error: BaseException) -> str:
    """Return what kind of trouble of its own a process has; "" where it may be another's.

    Args:
        error: that came up while a generation formed.
    """
    if "parameter server" in str(error):
        return ""  # its words, not this process's
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "memory"
    if isinstance(error, OSError) and error.errno in _NUMBERS:
        return _NUMBERS[error.errno]
    text = str(error).lower()
    kinds = {"memory": _MEMORY, "device": _DEVICE, "descriptors": _DESCRIPTORS, "form": _FORM}
    if "nccl" in text:
        del kinds["device"]  # "unhandled cuda error" may be a peer's death
    for kind, signs in kinds.items():
        if any(sign.lower() in text for sign in signs):
            return kind
    return ""


def in_words(kind: str, error: BaseException) -> str:
    """Return what the process ends with.

    Args:
        kind: of `own_fault`.
        error: that came up.
    """
    said = str(error).strip().partition("\n")[0]
    return (
        f"this worker cannot be a member of the new generation, for a reason of its own: "
        f"{type(error).__name__}: {said}. The others go on without it; {_HINTS[kind]}"
    )
