"""One generation's process group: formed through a store of ours, ended by shutting its sockets.

Dropping a gloo group with a stuck collective blocks for the collective's whole timeout. Shutting down
duplicates of its connected sockets makes the collective fail within milliseconds on both ends, and the group
can be freed at once.

Threads and locks: `_lock` guards the group's sockets, whether it is shut, the device's communicator, the
calls to make when it is shut, and the list of collectives. The script's thread forms, sums and releases;
messages may be another thread's; `shut` may come on any thread (the coordinator's stream, say) and waits for
no peer. A formation runs in a thread of its own, so that it can be left.
"""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import logging
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from springtide.comm.descriptors import check_room
from springtide.comm.exchanged_sums import ExchangedSum, is_exchanged
from springtide.comm.nccl import DeviceSum, DeviceSums, form_nccl
from springtide.comm.store import FormationCancelled, StreamStore
from springtide.comm.work import Collective, Message, Waiter, is_lost, keep_until_done, let_go
from springtide_ps.wire import congestion

log = logging.getLogger("springtide")

_LISTENER_KEY = "listener"
_CANCEL_SECONDS = 0.01
_PEER = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+")

_Gloo: Any = dist.ProcessGroupGloo  # its type stubs lack the operations

# A group that nobody uses any more may wait in a cycle for the garbage collector. Where that runs in a forked
# child (a process of a DataLoader, say), the group's destructor joins threads that only the parent has: the
# child hangs for ever, or aborts with "std::system_error: Invalid argument". So a child never collects what
# was there before it.
os.register_at_fork(after_in_child=gc.freeze)


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


def wait_for(works: Sequence[Work]) -> None:
    """Wait until all of them are there; for those on a device the host waits once.

    Raises:
        RuntimeError: one has failed, or its group was shut.
    """
    on_device = [work for work in works if isinstance(work, DeviceSum)]
    for work in works:
        if not isinstance(work, DeviceSum):
            work.wait()
    if on_device:
        on_device[-1].wait_with(on_device[:-1])


class _Done:
    """Stand for a sum that needs no peer: over one member, or of zeros alone."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


DONE = _Done()


class Group:
    """The collectives of one generation. Started works must be started in the same order by all members;
    messages may be another thread's.

    CPU tensors go through gloo, those of a device through `device` (NCCL, or gloo by way of the host). Small
    ones are summed by an exchange; see `exchanged_sums`.

    Every failure is a RuntimeError of the backend's. `shut` may be called from any thread, `release` by the
    owner when no call is under way in it.
    """

    def __init__(
        self,
        backend: Any | None,
        rank: int,
        size: int,
        timeout_seconds: float,
        device: DeviceSums | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._backend = backend
        self._store: StreamStore | None = None
        self._timeout = timedelta(seconds=timeout_seconds)
        self._exchange_options: Any = dist.AllToAllOptions()
        self._exchange_options.timeout = self._timeout
        self._sockets: list[socket.socket] = []
        self._inodes: set[str] = set()
        self._lock = threading.Lock()
        self._shut = False
        self._shut_at = 0.0  # monotonic
        self._works: deque[Work] = deque()
        self._waiter = Waiter(self._timeout, lambda: self._shut)
        self._device = device
        self._on_shut: list[Callable[[], object]] = []
        self.before_next: Callable[[], object] | None = None
        """Called before the next sum or exchange begins, which it may precede by others; it has to take
        itself away first. For collectives that are begun one after another as they are needed: all members
        must have begun them before any other."""

    def on_shut(self, call: Callable[[], object]) -> None:
        """Have `call` made when the group is shut, by the thread that shuts it; at once if it is."""
        with self._lock:
            if not self._shut:
                self._on_shut.append(call)
                return
        call()

    def start_sum(self, tensor: torch.Tensor, *, in_place: bool = False) -> Work:
        """Begin to replace a tensor by its sum over the members.

        Args:
            tensor: contiguous.
            in_place: without memory for what comes, as for one of many sums that are begun before the first
                one is waited for (`exchanged_sums.MOST_AT_ONCE`); the same at all members.

        Returns:
            The sum under way.
        """
        return self._start_reduce(tensor, dist.ReduceOp.SUM, in_place)

    def start_max(self, tensor: torch.Tensor) -> Work:
        """Begin to replace `tensor` (contiguous) by its maximum over the members, by element."""
        return self._start_reduce(tensor, dist.ReduceOp.MAX)

    def _start_reduce(self, tensor: torch.Tensor, operation: Any, in_place: bool = False) -> Work:
        if self.size == 1:
            return DONE
        if self.before_next is not None:
            self.before_next()
        if tensor.device.type != "cpu":
            return self._sums_on_device().start(tensor, operation)
        if not in_place and is_exchanged(tensor.nbytes, self.size):
            return self._track(ExchangedSum(self._exchange, tensor, self.rank, self.size, operation))
        options: Any = dist.AllreduceOptions()
        options.reduceOp = operation
        options.timeout = self._timeout
        return self._track(Collective(self._alive().allreduce([tensor], options), self._has_lost))

    def start_exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> Work:
        """Begin to send each member its part of a tensor, and to receive a part from each.

        Args:
            received: contiguous, one-dimensional; filled when the work is over, in the order of the ranks.
            sent: contiguous, one-dimensional, of the same dtype and device; the parts in the order of the
                ranks. It is not to be changed before the work is over.
            received_sizes: elements from each rank; that of this member is 0.
            sent_sizes: elements for each rank, likewise.

        Returns:
            The exchange under way.
        """
        if self.size == 1:
            return DONE
        if self.before_next is not None:
            self.before_next()
        # As bytes: backends know few dtypes, and nothing is computed on the way.
        size, raw = sent.element_size(), (received.view(torch.uint8), sent.view(torch.uint8))
        sizes = [size * count for count in received_sizes], [size * count for count in sent_sizes]
        if sent.device.type != "cpu":
            return self._sums_on_device().start_exchange(*raw, *sizes)
        return self._track(self._exchange(*raw, *sizes))

    def _exchange(
        self, received: torch.Tensor, sent: torch.Tensor, received_sizes: list[int], sent_sizes: list[int]
    ) -> Collective:
        """Begin an exchange through the backend of the CPU; as `start_exchange`, of types that it knows."""
        backend, options = self._alive(), self._exchange_options
        work = backend.alltoall_base(received, sent, received_sizes, sent_sizes, options)
        return Collective(work, self._has_lost)

    def _sums_on_device(self) -> DeviceSums:
        with self._lock:  # `shut` may come in between, and must find it
            if self._device is None:
                self._device = DeviceSums(self._alive(), self._timeout, None)
                if self._shut:
                    self._device.shut()
            return self._device

    def start_send(self, tensor: torch.Tensor, receiver: int) -> Work:
        """Begin to send a tensor to one member.

        Args:
            tensor: contiguous, on the CPU; it is not to be changed before the work is over.
            receiver: its rank.

        Returns:
            The message on its way.
        """
        return self._track(Message(self._alive().send([tensor], receiver, 0), tensor, self._waiter))

    def start_receive(self, tensor: torch.Tensor, sender: int) -> Work:
        """Begin to receive into a tensor from one member.

        Args:
            tensor: contiguous, on the CPU; filled when the work is over.
            sender: its rank.

        Returns:
            The message on its way.
        """
        return self._track(Message(self._alive().recv([tensor], sender, 0), tensor, self._waiter))

    @property
    def backend(self) -> Any | None:
        """The CPU's backend of torch; None for a group of one. Raise RuntimeError when it was released."""
        return None if self.size == 1 else self._alive()

    def _alive(self) -> Any:
        if self._backend is None:
            raise RuntimeError(
                "a group of one has no peers" if self.size == 1 else "the group has been released"
            )
        return self._backend

    def _track(self, work: Work) -> Work:
        with self._lock:
            # They end about in the order in which they began: each is looked at a few times, not each time.
            while self._works and self._works[0].is_completed():
                self._works.popleft()
            self._works.append(work)
        return work

    @property
    def is_idle(self) -> bool:
        """Whether all that was begun has ended."""
        return all(work.is_completed() for work in list(self._works))  # another thread may begin a message

    @property
    def is_shut(self) -> bool:
        return self._shut

    def shut(self) -> None:
        """Fail everything that is under way or comes later, here and at the peers that wait for us.

        Idempotent.
        """
        with self._lock:
            if self._shut:
                return
            self._shut_at, self._shut = time.monotonic(), True
            for connection in self._sockets:
                # The peer may have gone first.
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
            self._sockets.clear()
            calls, self._on_shut = self._on_shut, []
            device = self._device
        if device is not None:
            device.shut()
        for call in calls:
            call()

    def is_disconnected(self, seconds: float) -> bool:
        """Return whether the backend has closed the connections of a group that was shut.

        It reads from them on a thread of its own, and closes each on that thread. So once they are closed
        nothing can write any more into memory that was given to it, also for a message that it has lost.

        Args:
            seconds: to wait for that, at most.
        """
        deadline = time.monotonic() + seconds
        while not self._inodes.isdisjoint(sockets_by_inode()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _has_lost(self) -> bool:
        """Return whether the backend will never say what became of works that have not ended."""
        # Connections that were not found are not known to be closed.
        found = bool(self._inodes)
        seconds = time.monotonic() - self._shut_at if self._shut else None
        return is_lost(seconds, lambda: found and self.is_disconnected(0.0))

    def use_device(self, sums: DeviceSums) -> None:
        """Take over the communicator of a device; a group shut in the meantime shuts it at once."""
        with self._lock:
            self._device = sums
            if not self._shut:
                return
        sums.shut()

    def release(self) -> bool:
        """Shut and free the group.

        False: a collective is still stuck, so that its buffers must not be used again.
        """
        self.shut()
        let_go()
        clean = True
        if self._device is not None:
            clean, self._device = self._device.release(), None
        while pending := [work for work in self._works if not work.is_completed()]:
            if all(isinstance(work, Message) and work.lost for work in pending) or self._has_lost():
                keep_until_done(self._works, self._backend, self._store)
                self._backend, self._works = None, deque()
                return False
            time.sleep(0.001)
        self._waiter.close()
        self._works = deque()
        self._backend = None
        self._store = None
        return clean

    def adopt(self, store: StreamStore, sockets: Sequence[socket.socket]) -> None:
        """Take over what the group needs as long as it lives; a group shut in the meantime shuts the sockets
        at once.

        Args:
            store: through which the group was formed.
            sockets: duplicates of the group's connections.
        """
        with self._lock:
            self._store = store
            self._inodes |= {inode for item in sockets if (inode := _inode(item.fileno())) is not None}
            if not self._shut:
                self._sockets.extend(sockets)
                return
        for connection in sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def form(
    store: StreamStore,
    rank: int,
    size: int,
    address: str,
    *,
    connect_seconds: float,
    collective_seconds: float,
    nccl_device: torch.device | None = None,
) -> Group:
    """Form the group of a generation; blocks until all members are connected.

    Args:
        store: through which the members find each other.
        rank: of this member.
        size: of the generation.
        address: IP of this process, to which the group's listener is bound.
        connect_seconds: limit for connecting to peers once their addresses are known, and of the silence of a
            peer's machine.
        collective_seconds: limit of a collective, above any time after which the coordinator acts.
        nccl_device: where sums of CUDA tensors go through NCCL; None: through gloo.

    Returns:
        The group, with all members connected.

    Raises:
        FormationCancelled: the generation was over first.
        TimeoutError: a member did not come; it is named.
        TooFewDescriptorsError: this process may not open as many files as the group takes.
        RuntimeError: a connection failed.
    """
    if size == 1:
        return Group(None, 0, 1, collective_seconds)
    check_room(size)
    before = sockets_by_inode()
    options = _Gloo._Options()
    options._devices = [_Gloo.create_device(hostname=address)]
    options._timeout = timedelta(seconds=connect_seconds)
    listener = listener_among_new(before, address)
    store.set(f"{_LISTENER_KEY}/{rank}", listener.encode())
    backend = _built(store, lambda: _Gloo(store, rank, size, options))
    group = Group(backend, rank, size, collective_seconds)
    peers = {store.get(f"{_LISTENER_KEY}/{other}").decode() for other in range(size) if other != rank}
    connections = connections_among_new(before, listener, peers)
    if len(connections) != size - 1:
        log.warning(
            "found %d connections of a group of %d; a collective that gets stuck may block longer",
            len(connections),
            size,
        )
    for connection in connections:
        notice_silence(connection, connect_seconds)
        congestion.choose(connection)
    group.adopt(store, connections)
    if nccl_device is not None:
        try:
            group.use_device(
                _built(
                    store,
                    lambda: form_nccl(
                        store,
                        rank,
                        size,
                        nccl_device,
                        collective_seconds,
                        lambda made: group.on_shut(made.shut),
                    ),
                    abandon=DeviceSums.shut,
                )
            )
        except BaseException:
            group.release()
            raise
    return group


def notice_silence(connection: socket.socket, seconds: float) -> None:
    """Have the connection fail when the peer's machine acknowledges nothing for so long.

    It takes the kernel a quarter of an hour otherwise, or for ever where this side only waits. The peer's
    kernel answers for a process that computes or is stopped: what that means the coordinator knows.

    Args:
        connection: to the peer, by TCP.
        seconds: limit of the silence.
    """
    whole = max(1, int(seconds))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, max(1, whole // 2)),
        (socket.TCP_KEEPINTVL, max(1, whole // 5)),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 1000 * whole),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _built(
    store: StreamStore, build: Callable[[], Any], abandon: Callable[[Any], object] = lambda built: None
) -> Any:
    """Return what `build` returns, or raise what it raises; FormationCancelled once the store is cancelled.

    The backend connects to its peers without looking at the store, and tries a peer that has died again and
    again (measured: 50 s). Then it is left to a thread that nobody waits for, and what it has built in the
    end goes to `abandon`.
    """
    done, handing_over = threading.Event(), threading.Lock()
    outcome: list[Any] = []

    def run() -> None:
        try:
            built, error = build(), None
        except Exception as raised:  # goes to the caller below, if it still waits
            built, error = None, raised
        with handing_over:
            if store.cancelled is None:
                outcome.extend((built, error))
                built = None
            done.set()
        if built is not None:
            abandon(built)

    threading.Thread(target=run, name="springtide-formation", daemon=True).start()
    while not done.wait(_CANCEL_SECONDS):
        if store.cancelled is not None:
            with handing_over:
                if outcome and outcome[0] is not None:
                    abandon(outcome[0])
            raise FormationCancelled(store.cancelled)
    if not outcome:
        raise FormationCancelled(store.cancelled)
    built, error = outcome
    if error is not None:
        raise error
    return built


def peers_in(error: BaseException) -> list[str]:
    """IP addresses of the peers that a backend's error names, without repetition."""
    return list(dict.fromkeys(_PEER.findall(str(error))))


def sockets_by_inode() -> dict[str, list[int]]:
    """Descriptors by inode: numbers of descriptors are used again as soon as an old group is freed.

    All of them, since one may be a duplicate that another thread closes the next moment.
    """
    found: dict[str, list[int]] = {}
    for entry in os.listdir("/proc/self/fd"):
        if (inode := _inode(int(entry))) is not None:
            found.setdefault(inode, []).append(int(entry))
    return found


def _inode(descriptor: int) -> str | None:
    """`socket:[N]`; None for what is no socket, or closed by now."""
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None
    return target if target.startswith("socket:") else None


def _new_sockets(before: Collection[str]) -> Iterator[socket.socket]:
    """Duplicates, each for one turn of the loop, of the process's IP sockets that were not there before."""
    for inode, descriptors in sorted(sockets_by_inode().items()):
        duplicate = None if inode in before else _duplicate(inode, descriptors)
        if duplicate is not None:
            with duplicate:
                if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                    yield duplicate


def _duplicate(inode: str, descriptors: Sequence[int]) -> socket.socket | None:
    """Return a duplicate of the socket; None when it is closed by now."""
    for descriptor in descriptors:
        try:
            copied = os.dup(descriptor)
        except OSError:
            continue  # closed since
        if _inode(copied) != inode:  # the descriptor is another's by now
            os.close(copied)
            continue
        return socket.socket(fileno=copied)
    return None


def _listens(candidate: socket.socket) -> bool:
    return bool(candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def listener_among_new(before: Collection[str], address: str) -> str:
    """Return `host:port` of the new socket that listens on the address.

    Args:
        before: inodes of the sockets that were there before the backend was made.
        address: IP of this process.

    Raises:
        RuntimeError: the backend opened none.
    """
    for candidate in _new_sockets(before):
        if _listens(candidate):
            bound = candidate.getsockname()
            if ipaddress.ip_address(bound[0]) == ipaddress.ip_address(address):
                return _endpoint(bound)
    raise RuntimeError("the backend opened no listening socket; this version of torch is not supported")


def connections_among_new(before: Collection[str], listener: str, peers: set[str]) -> list[socket.socket]:
    """Return duplicates of this group's connected sockets; other threads may have opened some of their own.

    Args:
        before: inodes of the sockets that were there before the backend was made.
        listener: `host:port` of this member's listener.
        peers: `host:port` of the others' listeners.
    """
    found = []
    for candidate in _new_sockets(before):
        if _listens(candidate):
            continue
        try:
            ours, theirs = _endpoint(candidate.getsockname()), _endpoint(candidate.getpeername())
        except OSError:
            continue  # not connected
        if ours == listener or theirs in peers:
            # Not candidate.dup(): it sets the mode of the shared file description to blocking, and the
            # backend's one thread then hangs in a read.
            found.append(socket.socket(fileno=os.dup(candidate.fileno())))
    return found


def _endpoint(address: tuple[object, ...]) -> str:
    return f"{address[0]}:{address[1]}"
