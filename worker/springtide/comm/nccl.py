"""Sums of tensors on a CUDA device: through NCCL, complete only when the host has seen it.

A collective that NCCL calls done is merely queued on a stream. If the optimizer were queued behind it, an
abort would let every survivor step on partial sums. So `wait` returns when the host has seen the event behind
the sum, and the generation was not shut before that.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, MutableMapping
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from springtide.comm.work import Collective
from springtide.errors import SpringtideError, UsageError

Backend = Literal["gloo", "nccl"]
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3  # seconds between two looks at an event
_RELEASE_SECONDS = 1.0


class Event(Protocol):
    """What the host can ask of a point in a stream."""

    def query(self) -> bool: ...


def choose_backend(wanted: str, device_type: str, nccl_available: bool) -> Backend:
    """wanted: `Auto`, `Gloo` or `NCCL`, of the manifest. Raise UsageError for what cannot be."""
    if wanted == "NCCL" and device_type != "cuda":
        raise UsageError(
            f"the job asks for the NCCL backend, and the model is on {device_type}: move it to a GPU before "
            "distribute(), or set strategy.allReduce.backend to Auto"
        )
    if wanted == "NCCL" and not nccl_available:
        raise UsageError(
            "the job asks for the NCCL backend, and this torch has none: use an image with a CUDA build of "
            "torch, or set strategy.allReduce.backend to Auto"
        )
    return "nccl" if wanted != "Gloo" and device_type == "cuda" and nccl_available else "gloo"


def take_gpu(local_rank: int, processes: int) -> None:
    """Of several processes in a pod each has a GPU of its own: make it the current device, so that "cuda"
    means it. Nothing to do for a single process, or without GPUs.

    Raise SpringtideError when there are fewer GPUs than processes.
    """
    if processes < 2 or not torch.cuda.is_available():
        return
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise SpringtideError(
            f"process {local_rank} of {processes} in this pod has no GPU, since there are {count}: ask for"
            f" {processes} GPUs for the container, or for {count} processes; to use none of them set"
            " CUDA_VISIBLE_DEVICES to nothing"
        )
    torch.cuda.set_device(local_rank)


def tame_nccl(environ: MutableMapping[str, str] = os.environ) -> None:
    """Keep NCCL's watchdog from ending the process when a peer dies. Call before any group exists.

    Raise UsageError when one does.
    """
    if dist.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend()):
        raise UsageError(
            "torch.distributed has an NCCL group already, whose watchdog ends the process when a peer dies: "
            "call springtide.init() first, and leave init_process_group() out"
        )
    environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"


def record_event(device: torch.device) -> Event:
    """A point in the device's current stream, behind all that is queued there now."""
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda.current_stream(device).record_event(event)
    point: Event = event
    return point


class DeviceSum:
    """A sum under way on a device. `wait` is called once, from the thread whose stream goes on."""

    def __init__(self, owner: DeviceSums, work: Any, tensor: torch.Tensor) -> None:
        self._owner, self._work, self._tensor = owner, work, tensor

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> object:
        """Raise RuntimeError when the group was shut or the collective failed."""
        # Queues the current stream behind the collective; for NCCL this does not wait.
        self._work.wait()
        event = self._owner.record(self._tensor.device)
        pause = _FIRST_PAUSE
        while not event.query():
            self._owner.check(self._work)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        # An abort lets the event happen too: the mark is set before the abort begins.
        self._owner.check(self._work)
        return True


class DeviceSums:
    """One generation's communicator of a device. `shut` may be called from any thread.

    backend: a ProcessGroupNCCL, or a ProcessGroupGloo, which takes CUDA tensors through the host.
    """

    def __init__(
        self,
        backend: Any,
        timeout: timedelta,
        abort: Callable[[], None] | None,
        record: Callable[[torch.device], Event] = record_event,
    ) -> None:
        self._backend, self._timeout, self._abort, self.record = backend, timeout, abort, record
        self._lock = threading.Lock()
        self._shut = False
        self._works: list[Any] = []

    def start_sum(self, tensor: torch.Tensor) -> DeviceSum:
        """Begin to replace `tensor` (contiguous, on the device) by its sum over the members."""
        return self.start(tensor, dist.ReduceOp.SUM)

    def start(self, tensor: torch.Tensor, operation: Any) -> DeviceSum:
        """As `start_sum`, with an operation of torch's."""
        self.check(None)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = operation
        options.timeout = self._timeout
        work = self._backend.allreduce([tensor], options)
        if self._abort is None:
            work = Collective(work, lambda: self._shut)
        self._works = [other for other in self._works if not other.is_completed()] + [work]
        return DeviceSum(self, work, tensor)

    def check(self, work: Any | None) -> None:
        """Raise RuntimeError when the group was shut, or `work` has failed."""
        if self._shut:
            raise RuntimeError("the group of this generation was shut")
        if work is not None and work.is_completed() and (error := work.exception()) is not None:
            raise RuntimeError(f"a sum on the device failed: {error}")

    def shut(self) -> None:
        """Fail what is under way and what comes; kernels that wait for a peer end. Idempotent."""
        with self._lock:
            if self._shut:
                return
            self._shut = True
        if self._abort is not None:
            # It may take a while, and this may be the thread that listens to the coordinator.
            threading.Thread(target=self._abort, name="springtide-nccl-abort", daemon=True).start()

    def release(self) -> bool:
        """After `shut`: forget the communicator. False: it was aborted under a sum, so that the buffers of
        that sum must not be used again.
        """
        deadline = time.monotonic() + _RELEASE_SECONDS
        clean = True
        for work in self._works:
            while not work.is_completed() and time.monotonic() < deadline:
                time.sleep(0.001)
            # Not `is_success()`, which raises NotImplementedError for every work of NCCL's.
            clean = clean and work.is_completed() and work.exception() is None
        self._works, self._backend = [], None
        return clean


def form_nccl(store: Any, rank: int, size: int, device: torch.device, timeout_seconds: float) -> DeviceSums:
    """The NCCL communicator of a generation; its address travels through `store` like gloo's.

    Raise RuntimeError of NCCL's.
    """
    distributed: Any = dist  # its type stubs lack what a build may lack
    nccl = distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_seconds)
    # A communicator that forms without blocking can be aborted while a peer is missing.
    options.config.blocking = 0
    backend = nccl(distributed.PrefixStore("nccl", store), rank, size, options)
    backend.eager_connect_single_device(device)
    return DeviceSums(backend, timedelta(seconds=timeout_seconds), backend.abort)
