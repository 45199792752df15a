"""Sums on a device: the logic against a fake backend, and the real ones where there is CUDA."""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from gpu_capabilities import needs_cuda
from worker_groups import addresses, together, wired_stores

from springtide.comm.buckets import Buckets
from springtide.comm.cuda_streams import Writers
from springtide.comm.layout import Field, plan_layout
from springtide.comm.nccl import DeviceSums, choose_backend, form_nccl, tame_nccl
from springtide.comm.process_group import Group, form
from springtide.comm.store import FormationCancelled
from springtide.errors import UsageError


class FakeWork:
    """A work as ProcessGroupNCCL's: its calls, and what they raise, are those of WorkNCCL in torch's source.

    `wait` only queues the current stream behind it. `is_success` throws in every version that is supported
    (`C10_THROW_ERROR(NotImplementedError, ...)`). `exception` is None until the watchdog or a look finds
    an error. After an abort it is completed, and `exception` says nothing.
    """

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: str | None = None

    def wait(self) -> None:
        """Queue the wait only, the way NCCL's `wait` does."""

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def exception(self) -> Exception | None:
        return None if self.error is None else RuntimeError(self.error)


class FakeBackend:
    """A ProcessGroupNCCL: an abort ends all that is under way, and nothing says that it ended badly."""

    def __init__(self) -> None:
        self.works: list[FakeWork] = []
        self.may_abort = threading.Event()
        self.may_abort.set()

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> FakeWork:
        """Begin; refuse what `check_gpu_single_tensor` does."""
        (tensor,) = tensors
        if tensor.layout != torch.strided:
            raise ValueError("Tensors must be CUDA and dense")
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        self.works.append(FakeWork())
        return self.works[-1]

    def alltoall_base(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: list[int],
        sent_sizes: list[int],
        options: Any,
    ) -> FakeWork:
        """Begin; refuse what `check_gpu_single_tensor` and `checkSplitSizes` do, for a group of two."""
        for tensor, sizes in ((received, received_sizes), (sent, sent_sizes)):
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
            if len(sizes) != 2:
                raise RuntimeError("Number of tensor splits not equal to group size")
            if sum(sizes) != tensor.size(0):
                raise RuntimeError("Split sizes doesn't match total dim 0 size")
        self.works.append(FakeWork())
        return self.works[-1]

    def abort(self) -> None:
        self.may_abort.wait(30)
        for work in self.works:
            work.ended.set()


class FakeEvent:
    def __init__(self, work: FakeWork) -> None:
        self._work = work

    def query(self) -> bool:
        return self._work.ended.is_set()


def _sums(abort_seconds: float = 20.0, seconds: float = 30.0) -> tuple[DeviceSums, FakeBackend]:
    backend = FakeBackend()
    sums = DeviceSums(
        backend,
        timedelta(seconds=seconds),
        backend.abort,
        record=lambda _: FakeEvent(backend.works[-1]),
        abort_seconds=abort_seconds,
    )
    return sums, backend


def _later(call: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(0.05, call)
    timer.start()
    return timer


def test_a_sum_is_complete_when_the_host_has_seen_it() -> None:
    sums, backend = _sums()
    work = sums.start_sum(torch.ones(2))
    timer = _later(backend.works[0].ended.set)
    work.wait()
    assert backend.works[0].ended.is_set()
    timer.join()
    sums.shut()
    assert sums.release()


def test_an_abort_never_looks_like_a_sum() -> None:
    """The aborted collective's event happens, without an error: only the mark tells."""
    sums, _ = _sums()
    work = sums.start_sum(torch.ones(2))
    timer = _later(sums.shut)
    with pytest.raises(RuntimeError, match="was shut"):
        work.wait()
    timer.join()
    with pytest.raises(RuntimeError, match="was shut"):
        sums.start_sum(torch.ones(2))


def test_exchange_is_complete_when_the_host_has_seen_it() -> None:
    """Queueing behind it does not wait; a wait does, and an abort is no exchange either."""
    sums, backend = _sums()
    rooms = torch.zeros(3), torch.ones(5)
    raw = [room.view(torch.uint8) for room in rooms]
    work = sums.start_exchange(*raw, [0, 12], [0, 20])
    work.queue()
    assert not work.is_completed()
    timer = _later(backend.works[0].ended.set)
    work.wait()
    timer.join()
    stuck = sums.start_exchange(*raw, [0, 12], [0, 20])
    timer = _later(sums.shut)
    with pytest.raises(RuntimeError, match="was shut"):
        stuck.wait()
    timer.join()
    assert sums.release()


def test_sum_that_takes_longer_than_its_limit_fails() -> None:
    """NCCL itself has none: its watchdog is switched off."""
    sums, backend = _sums(seconds=0.05)
    work = sums.start_sum(torch.ones(2))
    with pytest.raises(RuntimeError, match=r"did not end in 0\.05 s"):
        work.wait()
    sums.shut()
    assert sums.release()
    assert backend.works[0].ended.is_set(), "it is aborted"


def test_failed_sum_raises_what_the_backend_says() -> None:
    sums, backend = _sums()
    work = sums.start_sum(torch.ones(2))
    backend.works[0].error = "ncclRemoteError"
    backend.works[0].ended.set()
    with pytest.raises(RuntimeError, match="ncclRemoteError"):
        work.wait()


def test_buffers_are_used_again_after_the_abort_has_ended() -> None:
    """Buffers are used again as soon as the abort has ended, since nothing writes into them any more.

    Memory might not suffice for a second set of buffers just after a failure.
    """
    backend, waited = FakeBackend(), []
    sums = DeviceSums(backend, timedelta(seconds=1), backend.abort, synchronize=waited.append)
    sums.start_sum(torch.ones(2))
    backend.may_abort.clear()
    sums.shut()
    timer = _later(backend.may_abort.set)
    assert sums.release()
    assert backend.may_abort.is_set(), "the abort had not ended"
    assert waited == [torch.device("cpu")], "kernels may run a little longer than the abort"
    timer.join()


def test_buffers_under_an_abort_that_does_not_end_are_given_up() -> None:
    sums, backend = _sums(abort_seconds=0.05)
    tensor = torch.ones(2)
    sums.start_sum(tensor)
    backend.may_abort.clear()
    sums.shut()
    references = sys.getrefcount(tensor)
    assert not sums.release()
    del sums
    assert sys.getrefcount(tensor) >= references, "a late kernel may still write into it"
    backend.may_abort.set()


def test_shut_beside_the_beginning_of_a_sum_awaits_the_abort() -> None:
    """The sum is under way on the device, though nobody has a handle of it yet."""
    backend = FakeBackend()
    begins, goes_on = threading.Event(), threading.Event()
    take = backend.allreduce

    def allreduce(tensors: list[torch.Tensor], options: Any) -> FakeWork:
        begins.set()
        assert goes_on.wait(30)
        return take(tensors, options)

    backend.allreduce = allreduce  # type: ignore[method-assign]
    backend.may_abort.clear()
    sums = DeviceSums(backend, timedelta(seconds=1), backend.abort, abort_seconds=0.05)
    starting = threading.Thread(target=lambda: sums.start_sum(torch.ones(2)))
    starting.start()
    assert begins.wait(30)
    sums.shut()
    goes_on.set()
    starting.join(30)
    assert not sums.release(), "the abort has not ended"
    backend.may_abort.set()


class FakeGlooWork(FakeWork):
    """A work of gloo's: it waits, for as long as it is told, and raises what has failed."""

    def wait(self, timeout: timedelta = timedelta(seconds=30)) -> None:
        if not self.ended.wait(timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        if self.error is not None:
            raise RuntimeError(self.error)


class FakeGloo(FakeBackend):
    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> FakeWork:
        self.works.append(FakeGlooWork())
        return self.works[-1]


def test_buffers_are_used_again_after_gloo_s_sum_has_failed() -> None:
    """Through the host it copies back only what it has summed: a peer's death costs no memory."""
    backend, waited = FakeGloo(), list[torch.device]()
    sums = DeviceSums(backend, timedelta(seconds=1), None, synchronize=waited.append)
    work, _ = sums.start_sum(torch.ones(2)), sums.start_sum(torch.ones(2))
    sums.shut()
    for each in backend.works:
        each.error = "Connection closed by peer"
        each.ended.set()
    with pytest.raises(RuntimeError, match="closed by peer"):
        work.wait()
    assert sums.release()
    assert waited == [torch.device("cpu")], "copies may be queued still"


def test_buffers_of_a_sum_that_gloo_has_lost_are_given_up() -> None:
    backend = FakeGloo()
    sums = DeviceSums(backend, timedelta(seconds=1), None)
    work = sums.start_sum(torch.ones(2))
    sums.shut()
    with pytest.raises(RuntimeError, match="was shut while a collective was under way"):
        work.wait()
    assert not sums.release()


def test_idle_communicator_is_released_without_waiting() -> None:
    """A communicator without a running sum is released without a wait for its abort.

    The next generation would otherwise wait for it at each boundary.
    """
    sums, backend = _sums()
    sums.start_sum(torch.ones(2))
    backend.works[0].ended.set()
    backend.may_abort.clear()
    sums.shut()
    began = time.monotonic()
    assert sums.release()
    assert time.monotonic() - began < 10
    backend.may_abort.set()


def test_sums_that_have_ended_are_looked_at_once() -> None:
    """Hundreds of buckets start ahead of the device: to look at all of them each time costs seconds."""
    sums, backend = _sums()
    looks = 0

    class Counting(FakeWork):
        def is_completed(self) -> bool:
            nonlocal looks
            looks += 1
            return super().is_completed()

    def allreduce(tensors: list[torch.Tensor], options: Any) -> FakeWork:
        backend.works.append(Counting())
        return backend.works[-1]

    backend.allreduce = allreduce  # type: ignore[method-assign]
    for _ in range(500):
        sums.start_sum(torch.ones(1))
    assert looks <= 500
    for work in backend.works:
        work.ended.set()
    sums.start_sum(torch.ones(1))
    assert looks <= 1002


class FakeNCCL:
    """ProcessGroupNCCL whose first collective holds the communicator's lock until all are connected.

    `NCCLComm::getNcclComm` waits in it for up to TORCH_NCCL_NONBLOCKING_TIMEOUT, and `abort` needs it.
    """

    made: ClassVar[list[FakeNCCL]] = []

    class Options:
        def __init__(self) -> None:
            self.config = types.SimpleNamespace(blocking=1)

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        assert options.config.blocking == 0
        self._lock, self.connected, self.aborted = threading.Lock(), threading.Event(), threading.Event()
        self.works: list[FakeWork] = []
        self.abort_began = threading.Event()
        self.communicates = False
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Begins to connect; does not wait."""
        self.communicates = True

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> FakeWork:
        with self._lock:
            if not self.connected.wait(30):
                raise RuntimeError("NCCL communicator initialization timed out")
        self.works.append(FakeWork())
        self.first_sum(self.works[-1])
        return self.works[-1]

    @staticmethod
    def first_sum(work: FakeWork) -> None:
        """Have the sum that connects end well; tests replace it."""
        work.ended.set()

    def abort(self) -> None:
        """Ends the communicator, if there is one by now."""
        self.abort_began.set()
        with self._lock:
            for work in self.works:
                work.ended.set()
            if self.communicates:
                self.aborted.set()


def test_peer_that_dies_while_nccl_connects_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formation is cancelled at once; what is connected in the end, nobody needs: it is aborted."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    FakeNCCL.made.clear()
    stores, places = wired_stores(2), addresses(2)
    limits = {"connect_seconds": 30.0, "collective_seconds": 30.0}

    def forms(rank: int) -> None:
        timer = threading.Timer(0.5, lambda: stores[rank].cancel("worker-1 died"))
        timer.start()
        with pytest.raises(FormationCancelled, match="worker-1 died"):
            form(stores[rank], rank, 2, places[rank], **limits, nccl_device=torch.device("cpu"))
        timer.join()

    began = time.monotonic()
    together([lambda: forms(0), lambda: forms(1)])
    assert time.monotonic() - began < 15
    for backend in FakeNCCL.made:
        backend.connected.set()
    assert [backend.aborted.wait(20) for backend in FakeNCCL.made] == [True, True]


def form_with_fake_nccl(rank: int, stores: list[Any], places: list[str]) -> Group:
    limits = {"connect_seconds": 30.0, "collective_seconds": 30.0}
    return form(stores[rank], rank, 2, places[rank], **limits, nccl_device=torch.device("cpu"))


def test_peer_that_dies_before_its_first_sum_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are connected, and the device waits for the dead one: its kernel ends by an abort alone."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    monkeypatch.setattr(FakeNCCL, "first_sum", staticmethod(lambda work: None))
    FakeNCCL.made.clear()
    started = threading.Semaphore(0)

    def record(device: torch.device) -> Any:
        started.release()
        return types.SimpleNamespace(query=lambda: all(nccl.aborted.is_set() for nccl in FakeNCCL.made))

    monkeypatch.setattr("springtide.comm.nccl.record_event", record)
    stores, places = wired_stores(2), addresses(2)

    def dies() -> None:
        for backend in until_made(2):
            backend.connected.set()
        assert started.acquire(timeout=30)
        assert started.acquire(timeout=30)
        for store in stores:
            store.cancel("worker-1 died")

    def forms(rank: int) -> None:
        with pytest.raises(FormationCancelled, match="worker-1 died"):
            form_with_fake_nccl(rank, stores, places)

    together([dies, lambda: forms(0), lambda: forms(1)])
    assert [backend.aborted.wait(20) for backend in FakeNCCL.made] == [True, True]


def test_communicator_made_after_the_abort_is_aborted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formation was given up at the moment at which NCCL was about to begin."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    FakeNCCL.made.clear()
    stores, places = wired_stores(2), addresses(2)

    def connect(nccl: FakeNCCL, device: torch.device) -> None:
        stores[0].cancel("worker-1 died")
        stores[1].cancel("worker-1 died")
        assert nccl.abort_began.wait(30)
        nccl.communicates = True

    monkeypatch.setattr(FakeNCCL, "eager_connect_single_device", connect)

    def forms(rank: int) -> None:
        with pytest.raises(FormationCancelled, match="worker-1 died"):
            form_with_fake_nccl(rank, stores, places)

    together([lambda: forms(0), lambda: forms(1)])
    # Who is told before NCCL's group is made has none to abort.
    assert FakeNCCL.made
    assert all(backend.aborted.wait(20) for backend in FakeNCCL.made)


def test_nccl_whose_first_sum_fails_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process group whose first sum fails is aborted.

    The sum's kernel would otherwise keep the device busy for as long as the process lives.
    """
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    FakeNCCL.made.clear()

    def fail(work: FakeWork) -> None:
        work.error = "ncclRemoteError: a peer has left"
        work.ended.set()

    monkeypatch.setattr(FakeNCCL, "first_sum", staticmethod(fail))
    stores, places = wired_stores(2), addresses(2)

    def connect() -> None:
        for backend in until_made(2):
            backend.connected.set()

    def forms(rank: int) -> None:
        with pytest.raises(RuntimeError, match="ncclRemoteError"):
            form_with_fake_nccl(rank, stores, places)

    together([connect, lambda: forms(0), lambda: forms(1)])
    assert [backend.aborted.wait(20) for backend in FakeNCCL.made] == [True, True]


def until_made(count: int) -> list[FakeNCCL]:
    """Return the communicators, once there are as many."""
    deadline = time.monotonic() + 30
    while len(FakeNCCL.made) < count:
        assert time.monotonic() < deadline, f"{len(FakeNCCL.made)} of {count} communicators after 30 s"
        time.sleep(0.01)
    return list(FakeNCCL.made)


def test_nccl_is_connected_when_the_group_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first collective of a group ends while the group is formed, before the script's first backward
    pass.
    """
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNCCL, raising=False)
    FakeNCCL.made.clear()
    timer = threading.Timer(0.3, lambda: [backend.connected.set() for backend in FakeNCCL.made])
    stores, places = wired_stores(2), addresses(2)

    def forms(rank: int) -> bool:
        group = form(
            stores[rank],
            rank,
            2,
            places[rank],
            connect_seconds=30,
            collective_seconds=30,
            nccl_device=torch.device("cpu"),
        )
        connected = all(backend.connected.is_set() for backend in FakeNCCL.made)
        group.release()
        return connected

    timer.start()
    assert together([lambda: forms(0), lambda: forms(1)]) == [True, True]
    timer.join()


def test_a_group_shuts_its_device_too() -> None:
    sums, backend = _sums()
    group = Group(None, 0, 2, 1.0)
    group.use_device(sums)
    sums.start_sum(torch.ones(1))
    group.shut()
    assert backend.works[0].ended.wait(30)
    assert group.release()
    late, _ = _sums()
    group.use_device(late)
    with pytest.raises(RuntimeError, match="was shut"):
        late.start_sum(torch.ones(1))


@pytest.mark.parametrize(
    ("wanted", "device", "nccl", "expected"),
    [
        ("Auto", "cpu", True, "gloo"),
        ("Auto", "cuda", True, "nccl"),
        ("Auto", "cuda", False, "gloo"),
        ("Gloo", "cuda", True, "gloo"),
        ("NCCL", "cuda", True, "nccl"),
        ("NCCL", "cpu", True, "the model is on cpu: move it to a GPU"),
        ("NCCL", "cuda", False, "this torch has none"),
    ],
)
def test_backend(wanted: str, device: str, nccl: bool, expected: str) -> None:
    if expected in ("gloo", "nccl"):
        assert choose_backend(wanted, device, nccl) == expected
        return
    with pytest.raises(UsageError, match=expected):
        choose_backend(wanted, device, nccl)


def test_nccl_s_watchdog_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    tame_nccl(environ)
    assert environ == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_BLOCKING_WAIT": "0",
        "TORCH_NCCL_DESYNC_DEBUG": "0",
        "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",
    }
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    with pytest.raises(UsageError, match="call springtide"):
        tame_nccl({})


class Stream:
    """Remembers what is queued on it and behind which streams."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.behind: list[str] = []

    def wait_stream(self, stream: Any) -> None:
        self.behind.append(stream.name)


def test_sum_begins_after_every_stream_that_wrote_its_bucket() -> None:
    main, side, third = Stream("main"), Stream("side"), Stream("third")
    now = main
    writers = Writers(lambda: now)
    writers.write(0, onto=False)
    now = side
    writers.write(0, onto=False)
    writers.write(1, onto=False)
    assert side.behind == []  # other parts of the bucket
    writers.join(0)
    assert side.behind == ["main"]
    now = main
    writers.join(1)
    assert main.behind == ["side"]
    writers.join(1)
    assert main.behind == ["side"], "once is enough"
    # The next micro-batch adds to what another stream has written.
    writers.write(2, onto=False)
    now = third
    writers.write(2, onto=True)
    assert third.behind == ["main"]
    writers.begin()
    writers.join(2)
    assert third.behind == ["main"]


def test_buckets_join_streams_before_they_send(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [Field(f"p{i}", (4,), torch.float32) for i in range(2)]
    main, side = Stream("main"), Stream("side")
    now = main
    monkeypatch.setattr("springtide.comm.buckets.current_stream_of", lambda device: lambda: now)
    buckets = Buckets(plan_layout(fields, 1 << 20))
    sent: list[list[str]] = []

    class Work:
        def wait(self) -> bool:
            return True

        def is_completed(self) -> bool:
            return True

    def start_sum(tensor: torch.Tensor) -> Work:
        sent.append(list(now.behind))
        return Work()

    buckets.begin(start_sum)
    buckets.put(1, torch.ones(4), 1.0, 0, last=True)
    now = side
    buckets.put(0, torch.ones(4), 1.0, 0, last=True)
    assert sent == [["main"]]
    # Nothing came for a parameter: what is filled with zeros is written, too.
    buckets.begin(start_sum)
    buckets.put(1, torch.ones(4), 1.0, 0, last=True)
    now = main
    buckets.flush()
    assert sent[1:] == [["side"]]


@needs_cuda("nccl-one")
def test_nccl_with_one_rank_sums_and_ends() -> None:
    tame_nccl()
    store = wired_stores(1)[0]
    sums = form_nccl(store, 0, 1, torch.device("cuda", 0), 30.0)
    tensor = torch.arange(1000, device="cuda", dtype=torch.float32)
    sums.start_sum(tensor).wait()
    assert torch.equal(tensor.cpu(), torch.arange(1000, dtype=torch.float32))
    sums.shut()
    assert sums.release()


@needs_cuda("gloo")
def test_gloo_takes_cuda_tensors_through_the_host() -> None:
    stores = wired_stores(2)

    def member(rank: int) -> list[float]:
        group = form(stores[rank], rank, 2, "127.0.0.1", connect_seconds=30, collective_seconds=30)
        tensor = torch.full((5,), rank + 1.0, device="cuda")
        group.start_sum(tensor).wait()
        values: list[float] = tensor.tolist()
        assert group.release()
        return values

    assert together([lambda r=rank: member(r) for rank in range(2)]) == [[3.0] * 5] * 2


@needs_cuda("streams")
def test_gradients_from_side_streams_are_whole_in_their_sum() -> None:
    device = torch.device("cuda", 0)
    fields = [Field(f"p{i}", (1 << 20,), torch.float32) for i in range(2)]
    buckets = Buckets(plan_layout(fields, 64 << 20), device)
    tame_nccl()
    sums = form_nccl(wired_stores(1)[0], 0, 1, device, 30.0)
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for turn in range(20):
        buckets.begin(sums.start_sum)
        with torch.cuda.stream(side):
            slow = torch.full((2048, 2048), 1 / 2048, device=device)
            for _ in range(20):
                slow = slow @ slow
            late = torch.full((1 << 20,), float(turn), device=device) + 0 * slow.sum()
            buckets.put(1, late, 1.0, 0, last=True)
        buckets.put(0, torch.ones(1 << 20, device=device), 1.0, 0, last=True)
        buckets.wait()
        assert buckets.views[1].unique().tolist() == [float(turn)]
    sums.shut()
    assert sums.release()


@needs_cuda("nccl-two", devices=2)
def test_nccl_between_two_devices_and_an_abort() -> None:
    tame_nccl()
    stores = wired_stores(2)

    def member(rank: int) -> float:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        sums = form_nccl(stores[rank], rank, 2, device, 30.0)
        tensor = torch.full((1000,), rank + 1.0, device=device)
        sums.start_sum(tensor).wait()
        total = float(tensor[0])
        if rank == 0:
            stuck = sums.start_sum(tensor)  # the other never comes
            timer = _later(sums.shut)
            with pytest.raises(RuntimeError, match="was shut"):
                stuck.wait()
            timer.join()
        else:
            sums.shut()
        sums.release()
        return total

    assert together([lambda r=rank: member(r) for rank in range(2)]) == [3.0, 3.0]
