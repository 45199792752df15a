"""Groups: formed through our store, ended at once whatever is stuck in them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from worker_groups import addresses, together, wired_stores

from springtide.comm import process_group as groups_module
from springtide.comm.combine import Packing, Rule, Share
from springtide.comm.process_group import Group, form, peers_in
from springtide.comm.store import FormationCancelled, StreamStore
from springtide.comm.work import Collective
from springtide_ps.wire import congestion


def test_sum_over_three(groups: Callable[..., list[Group]]) -> None:
    members = groups(3)
    tensors = [torch.full((1000,), float(group.rank + 1)) for group in members]
    works = [group.start_sum(tensor) for group, tensor in zip(members, tensors, strict=True)]
    together([lambda work=work: work.wait() for work in works])
    assert all(torch.equal(tensor, torch.full((1000,), 6.0)) for tensor in tensors)


def test_connections_are_not_paced(
    groups: Callable[..., list[Group]], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, plain = list[str](), congestion.choose

    def from_bbr(connection: socket.socket) -> str:
        with contextlib.suppress(OSError):  # not every kernel has it
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        chosen.append(plain(connection))
        return chosen[-1]

    monkeypatch.setattr(congestion, "choose", from_bbr)
    members = groups(3)
    assert len(chosen) >= 6  # in one process a group also finds connections between the others
    assert not any(name.startswith("bbr") for name in chosen)
    tensors = [torch.ones(1000) for _ in members]
    works = [group.start_sum(tensor) for group, tensor in zip(members, tensors, strict=True)]
    together([lambda work=work: work.wait() for work in works])
    assert all(torch.equal(tensor, torch.full((1000,), 3.0)) for tensor in tensors)


def test_group_of_one_needs_no_peer() -> None:
    group = form(wired_stores(1)[0], 0, 1, "127.0.0.1", connect_seconds=1, collective_seconds=1)
    tensor = torch.ones(3)
    group.start_sum(tensor).wait()
    assert tensor.tolist() == [1.0] * 3
    with pytest.raises(RuntimeError, match="a group of one has no peers"):
        group.start_send(tensor, 0)
    assert group.release()


def test_shutting_releases_a_stuck_collective_here_and_there(groups: Callable[..., list[Group]]) -> None:
    first, second = groups(2)
    stuck = first.start_sum(torch.ones(10))
    timer = threading.Timer(0.2, first.shut)
    timer.start()
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        stuck.wait()
    assert time.monotonic() - began < 20  # the collective's own limit is 30 s
    assert first.release()
    with pytest.raises(RuntimeError):
        second.start_sum(torch.ones(10)).wait()
    timer.join()


def test_a_late_peer_is_waited_for_in_turns(groups: Callable[..., list[Group]]) -> None:
    first, second = groups(2)
    ours, theirs = torch.ones(10), torch.ones(10)
    late: list[object] = []
    timer = threading.Timer(0.7, lambda: late.append(second.start_sum(theirs).wait()))
    timer.start()
    first.start_sum(ours).wait()
    timer.join()
    assert ours.tolist() == theirs.tolist() == [2.0] * 10
    assert late == [True]


def test_collective_lost_by_backend_is_given_up_after_shutdown() -> None:
    """gloo was seen to forget a collective whose connection broke: its wait ended by its timeout alone."""

    class Lost:
        waits = 0

        def wait(self, timeout: timedelta) -> bool:
            self.waits += 1
            raise RuntimeError("Operation timed out!")

        def is_completed(self) -> bool:
            return False

    work = Lost()
    collective = Collective(work, lambda: work.waits > 2)
    with pytest.raises(RuntimeError, match="the group was shut while a collective was under way"):
        collective.wait()
    assert work.waits == 3


def test_a_collective_that_ends_while_a_turn_does_counts() -> None:
    class Late:
        waits = 0

        def wait(self, *timeout: timedelta) -> bool:
            self.waits += 1
            if self.waits == 1:
                raise RuntimeError("Operation timed out!")
            return True

        def is_completed(self) -> bool:
            return True

    assert Collective(Late(), lambda: False).wait()


def test_shut_is_idempotent_and_final(groups: Callable[..., list[Group]]) -> None:
    first, _ = groups(2)
    first.shut()
    first.shut()
    assert first.is_shut
    with pytest.raises(RuntimeError):
        first.start_sum(torch.ones(10)).wait()
    assert first.release()
    # Not the sum of a group of one.
    with pytest.raises(RuntimeError, match="has been released"):
        first.start_sum(torch.ones(10))


def test_forming_is_cancelled_from_another_thread() -> None:
    store = wired_stores(2)[0]
    timer = threading.Timer(0.1, lambda: store.cancel("worker-1 died"))
    timer.start()
    began = time.monotonic()
    with pytest.raises(FormationCancelled, match="worker-1 died"):
        form(store, 0, 2, addresses(1)[0], connect_seconds=60, collective_seconds=60)
    assert time.monotonic() - began < 40
    timer.join()


def test_forming_with_a_peer_that_does_not_answer_is_cancelled() -> None:
    """Forming a group with a peer that does not answer is cancelled at once.

    The peer's address is known, so the backend tries to connect for long and looks at no store meanwhile.
    """
    ours, theirs = wired_stores(2, silent=[0])  # the peer never hears of us
    places = addresses(2)
    limits = {"connect_seconds": 60.0, "collective_seconds": 60.0}

    def forms(store: StreamStore, rank: int) -> str:
        timer = threading.Timer(0.5, lambda: store.cancel(f"worker-{1 - rank} died"))
        timer.start()
        with pytest.raises(FormationCancelled, match="died"):
            form(store, rank, 2, places[rank], **limits)
        timer.join()
        return store.cancelled or ""

    began = time.monotonic()
    assert together([lambda: forms(ours, 0), lambda: forms(theirs, 1)]) == [
        "worker-1 died",
        "worker-0 died",
    ]
    assert time.monotonic() - began < 40


def test_missing_member_is_named() -> None:
    store = wired_stores(2, timeout_seconds=0.2)[0]
    with pytest.raises(TimeoutError, match=r"no address from worker-1 in 0\.2 s"):
        form(store, 0, 2, addresses(1)[0], connect_seconds=10, collective_seconds=10)


def test_socket_is_found_while_a_duplicate_of_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread of the process looks for its own, and duplicates what it finds."""
    before = groups_module.sockets_by_inode()
    with socket.create_server(("127.0.0.1", 0)) as server:
        passing = os.dup(server.fileno())
        listed = groups_module.sockets_by_inode()
        os.close(passing)
        monkeypatch.setattr(groups_module, "sockets_by_inode", lambda: listed)
        port = server.getsockname()[1]
        assert groups_module.listener_among_new(before, "127.0.0.1") == f"127.0.0.1:{port}"
    assert any(passing in descriptors for descriptors in listed.values())


def test_sockets_of_a_group_are_found_at_reused_descriptors() -> None:
    """An old group's descriptors are closed by the backend's thread, maybe while the next group forms."""
    olds = [socket.socket() for _ in range(40)]
    before = groups_module.sockets_by_inode()
    for old in olds:
        old.close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert [server.fileno()] in before.values()
        host, port = server.getsockname()
        assert groups_module.listener_among_new(before, "127.0.0.1") == f"{host}:{port}"
        with socket.create_connection((host, port)) as client:
            accepted, _ = server.accept()
            found = groups_module.connections_among_new(before, f"{host}:{port}", {"127.0.0.9:1"})
            names = [one.getsockname() for one in found]
            for one in [*found, accepted]:
                one.close()
            assert names == [(host, port)]
            # Neither the listener nor what other threads connect.
            assert client.getsockname() not in names


def test_addresses_in_an_error() -> None:
    error = RuntimeError("Read error [127.0.0.1]:48279: reset; Connection closed by peer [10.0.0.7]:5")
    assert peers_in(error) == ["127.0.0.1", "10.0.0.7"]
    assert peers_in(RuntimeError("nothing")) == []


def _combined(group: Group, buffers: list[torch.Tensor], weight: float) -> list[torch.Tensor]:
    rules = [Rule.MEAN, Rule.FIRST, Rule.FIRST]
    packing = Packing(buffers, rules)
    total = packing.pack(buffers, buffers, Share(weight, group.rank, group.size))
    group.start_sum(total).wait()
    return packing.unpack(total, buffers, 4.0, group.size)


def test_buffers_are_combined_by_weight(groups: Callable[..., list[Group]]) -> None:
    members = groups(3)
    values = [
        [torch.tensor([1.0, 2.0]), torch.tensor(5), torch.tensor([True, False])],
        [torch.tensor([5.0, 4.0]), torch.tensor(99), torch.tensor([False, False])],
        [torch.full((2,), float("nan")), torch.tensor(-1), torch.tensor([True, True])],
    ]
    results = together(
        [
            lambda g=group, v=value, w=weight: _combined(g, v, w)
            for group, value, weight in zip(members, values, [3.0, 1.0, 0.0], strict=True)
        ]
    )
    for combined in results:
        assert combined[0].tolist() == [2.0, 2.5]
        assert combined[1].tolist() == 5
        assert combined[1].dtype == torch.int64
        assert combined[2].tolist() == [True, False]


@pytest.mark.parametrize("number", [0, 5, -1, 2**40 + 3, -(2**62) - 7, 2**63 - 1, -(2**63)])
def test_integers_travel_exactly(number: int) -> None:
    ours, theirs = [torch.tensor([number, 1])], [torch.tensor([17, 18])]
    packing = Packing(ours, [Rule.FIRST])
    total = packing.pack(ours, ours, Share(1.0, 0, 2)) + packing.pack(theirs, theirs, Share(3.0, 1, 2))
    assert packing.unpack(total, ours, 4.0, 2)[0].tolist() == [number, 1]


@pytest.mark.slow
def test_a_process_ends_though_a_collective_of_its_never_will() -> None:
    """Freeing the group would wait for the collective, also at the interpreter's end."""
    script = """
import time
import torch
from springtide.comm.process_group import Group

class Stuck:
    def __del__(self):
        time.sleep(600)
    def allreduce(self, tensors, options):
        return Stuck()
    def alltoall_base(self, *arguments):
        return Stuck()
    def is_completed(self):
        return False

group = Group(Stuck(), 0, 2, 600.0)
group.start_sum(torch.zeros(1))
group.start_sum(torch.zeros(4 << 20))
print(group.release())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], timeout=60, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_forked_child_leaves_groups_in_garbage_alone() -> None:
    """Freeing a group in a child joins threads that the child does not have: it would hang or abort."""
    script = """
import gc
import os
from datetime import timedelta

import torch.distributed as dist

from springtide.comm import process_group

assert process_group
gc.disable()
cycle = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))]
cycle.append(cycle)
del cycle
child = os.fork()
if child == 0:
    gc.collect()
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) + 10)
"""
    done = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        assert done.wait(60) == 10
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(done.pid, signal.SIGKILL)
        done.wait()
