"""Sums of tensors on a CUDA device: through NCCL, complete only when the host has seen it.

A collective that NCCL calls done is merely queued on a stream. If the optimizer were queued behind it, an
abort would let every survivor step on partial sums. So `wait` returns when the host has seen the event behind
the sum, and the generation was not shut before that.

Threads and locks: `_lock` guards whether the communicator is shut, and how many sums are about to begin; it
is held while nothing blocks. The script's thread sums, waits and releases; `shut` may come on any thread (the
coordinator's stream, say) and begins an abort in a thread of its own, since NCCL's may block.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from springtide.comm.work import Collective, is_lost, keep_for_ever
from springtide.errors import SpringtideError, UsageError

Backend = Literal["gloo", "nccl"]
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3  # seconds between two looks at an event
_RELEASE_SECONDS = 1.0


INITIALISE_SECONDS = 60
"""The longest that a communicator may take to connect all members, as a generation's formation may."""


class Event(Protocol):
    """A point in a stream of the device, as far as the host can ask about it."""

    def query(self) -> bool: ...


def choose_backend(wanted: str, device_type: str, nccl_available: bool) -> Backend:
    """Choose the backend for sums of gradients.

    Args:
        wanted: `Auto`, `Gloo` or `NCCL`, of the manifest.
        device_type: of the model, as torch names it.
        nccl_available: this torch has NCCL.

    Raises:
        UsageError: NCCL is wanted and cannot be.
    """
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
    """Make the GPU of this process the current device, so that "cuda" means it.

    Of several processes in a pod each has a GPU of its own. Nothing happens for a single process, or without
    GPUs.

    Args:
        local_rank: of this process in its pod.
        processes: of the pod.

    Raises:
        SpringtideError: there are fewer GPUs than processes.
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
    # Otherwise `wait` stays in C++ until the collective's timeout, whatever becomes of the group.
    environ["TORCH_NCCL_BLOCKING_WAIT"] = "0"
    # torch: it "must be set together with" the error handling, which is off.
    environ["TORCH_NCCL_DESYNC_DEBUG"] = "0"
    # While a communicator waits for a peer that has died, an abort waits for it: half an hour by default.
    environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(INITIALISE_SECONDS))


def end_of_device(device: torch.device) -> None:
    """Wait until nothing that was queued on the device runs any more."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Past:
    """A point in the order of the CPU's work, which is done when its call returns."""

    def query(self) -> bool:
        return True


def record_event(device: torch.device) -> Event:
    """Return a point in the device's current stream, behind all that is queued there now."""
    if device.type != "cuda":
        return _Past()
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda.current_stream(device).record_event(event)
    point: Event = event
    return point


class DeviceSum:
    """A sum under way on a device. `wait` is called once, from the thread whose stream goes on."""

    def __init__(self, owner: DeviceSums, work: Any, tensor: torch.Tensor) -> None:
        self._owner, self._work, self.tensor = owner, work, tensor

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def ended_well(self) -> bool:
        # Not `is_success()`, which raises NotImplementedError for every work of NCCL's.
        return self.is_completed() and self._work.exception() is None

    def queue(self) -> None:
        """Have what is queued on the device from here on come after it; the host does not wait for it."""
        self._work.wait()

    def wait(self) -> object:
        """Raise RuntimeError when the group was shut, or the collective failed or takes too long."""
        return self.wait_with(())

    def wait_with(self, others: Sequence[DeviceSum]) -> object:
        """Wait for this sum and for others of the same device that began before it; the host waits once.

        Raises:
            RuntimeError: the group was shut, or one of the collectives has failed, or takes too long.
        """
        sums = (*others, self)
        for each in sums:
            # Queues the current stream behind the collective; for NCCL this does not wait.
            each._work.wait()
        event = self._owner.record(self.tensor.device)
        pause = _FIRST_PAUSE
        limit = self._owner.timeout.total_seconds()
        deadline = time.monotonic() + limit
        while not event.query():
            # The last one alone: a communicator that fails fails all that was begun on it, and to ask
            # hundreds of sums again and again would take longer than they do.
            self._owner.check(self._work)
            if time.monotonic() > deadline:
                # NCCL's own limit is part of the error handling that `tame_nccl` switches off.
                raise RuntimeError(f"a sum on the device did not end in {limit:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        # An abort lets the event happen too: the mark is set before the abort begins.
        for each in sums:
            self._owner.check(each._work)
        return True


class DeviceSums:
    """One generation's communicator of a device. `shut` may be called from any thread.

    Args:
        backend: a ProcessGroupNCCL, or a ProcessGroupGloo, which takes CUDA tensors through the host.
        timeout: of a sum.
        abort: ends what is under way on the device; None where the backend's sockets are shut instead.
        record: makes an event behind all that is queued on a device.
        synchronize: waits for all that is queued on a device.
        abort_seconds: how long `release` waits for an abort. NCCL's kernels see it within a second or two.
    """

    def __init__(
        self,
        backend: Any,
        timeout: timedelta,
        abort: Callable[[], None] | None,
        record: Callable[[torch.device], Event] = record_event,
        synchronize: Callable[[torch.device], None] = end_of_device,
        abort_seconds: float = 20.0,
    ) -> None:
        self._backend, self.timeout, self._abort, self.record = backend, timeout, abort, record
        self._synchronize, self._abort_seconds = synchronize, abort_seconds
        self._lock = threading.Lock()
        self._shut = False
        self._shut_at = 0.0  # monotonic
        self._idle = False
        """Whether nothing was under way when the group was shut."""
        self._aborting: threading.Thread | None = None
        self._sums: deque[DeviceSum] = deque()
        self._starting = 0
        """How many sums are about to begin, which `_sums` lacks."""

    def start_sum(self, tensor: torch.Tensor) -> DeviceSum:
        """Begin to replace `tensor` (contiguous, on the device) by its sum over the members."""
        return self.start(tensor, dist.ReduceOp.SUM)

    def start(self, tensor: torch.Tensor, operation: Any) -> DeviceSum:
        """Begin to replace a tensor by its reduction over the members.

        Args:
            tensor: contiguous, on the device; it is not to be touched before the sum's `wait`.
            operation: one of torch's `ReduceOp`.

        Returns:
            The sum that has begun.

        Raises:
            RuntimeError: the communicator is shut, or cannot connect.
        """
        options: Any = dist.AllreduceOptions()
        options.reduceOp = operation
        options.timeout = self.timeout
        return self._begin(tensor, lambda backend: backend.allreduce([tensor], options))

    def start_exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> DeviceSum:
        """Begin an exchange; as `Group.start_exchange`, with both tensors on the device.

        Args:
            received: contiguous, one-dimensional; not to be touched before the work's `wait`.
            sent: contiguous, one-dimensional.
            received_sizes: elements from each rank.
            sent_sizes: elements for each rank.

        Returns:
            The exchange that has begun.

        Raises:
            RuntimeError: the communicator is shut, or cannot connect.
        """
        options: Any = dist.AllToAllOptions()
        options.timeout = self.timeout
        sizes = list(received_sizes), list(sent_sizes)
        return self._begin(received, lambda backend: backend.alltoall_base(received, sent, *sizes, options))

    def _begin(self, tensor: torch.Tensor, begin: Callable[[Any], Any]) -> DeviceSum:
        with self._lock:
            self.check(None)
            self._starting += 1
        try:
            # Not under the lock, which `shut` needs: it waits for peers while the communicator connects.
            work = begin(self._backend)
            if self._abort is None:
                work = Collective(work, self._has_lost)
            started = DeviceSum(self, work, tensor)
            # They end in the order in which they began: looking at all of them would be quadratic in buckets.
            while self._sums and self._sums[0].is_completed():
                self._sums.popleft()
            self._sums.append(started)
        finally:
            with self._lock:
                self._starting -= 1
        return started

    def _has_lost(self) -> bool:
        return is_lost(time.monotonic() - self._shut_at if self._shut else None)

    def check(self, work: Any | None) -> None:
        """Raise RuntimeError when the group was shut, or `work` has failed."""
        if self._shut:
            raise RuntimeError("the group of this generation was shut")
        if work is not None and work.is_completed() and (error := work.exception()) is not None:
            raise RuntimeError(f"a sum on the device failed: {error}")

    def shut(self) -> bool:
        """Fail what is under way and what comes; kernels that wait for a peer end. Idempotent.

        Returns:
            Whether this was the first call, which begins the abort.
        """
        with self._lock:
            if self._shut:
                return False
            self._shut_at, self._shut = time.monotonic(), True
            # The thread that begins one changes `_sums` meanwhile.
            self._idle = not self._starting and all(started.ended_well() for started in self._sums)
        if self._abort is not None:
            # It may take a while, and this may be the thread that listens to the coordinator.
            self._aborting = _begin_abort(self._abort)
        return True

    def release(self) -> bool:
        """Forget the communicator, after `shut`; where a sum was under way, wait for the abort to end.

        Returns:
            Whether nothing writes into the sums' buffers any more, so that they can be used again. Otherwise
            they are kept for ever, and new ones have to be made.
        """
        sums, backend = self._sums, self._backend
        self._sums, self._backend = deque(), None
        if self._idle:
            return True
        if self._aborting is not None:
            self._aborting.join(self._abort_seconds)
            clean = not self._aborting.is_alive()
        else:
            # A sum of gloo's that has failed is over: it copies back only what it has summed.
            deadline = time.monotonic() + _RELEASE_SECONDS
            while not (clean := all(started.is_completed() for started in sums)):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.001)
        if not clean:
            keep_for_ever(backend, *sums)
            return False
        for device in {started.tensor.device for started in sums}:
            self._synchronize(device)
        return True


def _begin_abort(abort: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=abort, name="springtide-nccl-abort", daemon=True)
    thread.start()
    return thread


def form_nccl(
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    timeout_seconds: float,
    on_made: Callable[[DeviceSums], object] = lambda sums: None,
) -> DeviceSums:
    """Form the NCCL communicator of a generation.

    Args:
        store: Its address travels through it, as gloo's does.
        rank: Of this process.
        size: How many members there are.
        device: Of the sums.
        timeout_seconds: Of a sum.
        on_made: Gets the communicator before it connects, so that whoever gives up waiting can shut it: a
            peer may die when all are connected and before its first sum, for which the device waits for ever.

    Returns:
        The communicator, when all members are connected: at most `INITIALISE_SECONDS` later, or when a peer
        takes part in its first sum.

    Raises:
        RuntimeError: NCCL's; or the communicator was shut. It is being aborted.
    """
    distributed: Any = dist  # its type stubs lack what a build may lack
    nccl = distributed.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=timeout_seconds)
    # A communicator that forms without blocking can be aborted while a peer is missing.
    options.config.blocking = 0
    backend = nccl(distributed.PrefixStore("nccl", store), rank, size, options)
    sums = DeviceSums(backend, timedelta(seconds=timeout_seconds), backend.abort, record_event)
    on_made(sums)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            backend.eager_connect_single_device(device)
            # The first collective waits until all members are connected, with the lock that an abort needs.
            # So it is made here, where somebody else may give up waiting, and not in the script's backward.
            sums.start_sum(torch.zeros(1, device=device)).wait()
    except BaseException:
        # Otherwise its kernel would keep the device busy for as long as the process lives. Where somebody
        # else has shut it, that abort may have come before there was a communicator.
        if not sums.shut():
            _begin_abort(backend.abort)
        raise
    return sums
