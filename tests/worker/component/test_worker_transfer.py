"""State transfers: in pieces, along a chain of receivers, and on from where another sender was lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worker_groups import form_groups, together

from springtide.comm import codec
from springtide.comm import process_group as groups_module
from springtide.comm import state_pieces as pieces
from springtide.comm import state_transfer as transfer
from springtide.comm.process_group import Group
from springtide.comm.state_pieces import Incoming, OutgoingState, piece_size
from springtide.comm.state_transfer import Route, receive_state, route, send_state
from springtide.comm.transfer_progress import Progress
from springtide.comm.work import Message, Waiter

LIMIT = 1 << 20
PIECES = 25


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MOST_PIECE_BYTES", 1024)
    monkeypatch.setattr(pieces, "LEAST_PIECE_BYTES", 1024)


@pytest.fixture
def groups() -> Iterator[Callable[..., list[Group]]]:
    made: list[Group] = []

    def make(count: int) -> list[Group]:
        made.extend(form_groups(count))
        return made[-count:]

    yield make
    for group in made:
        group.shut()
    for group in made:
        group.release()


def tree(number: float = 0.1) -> dict[str, Any]:
    return {
        "big": torch.arange(3000, dtype=torch.float64),
        "small": [torch.tensor(True), torch.zeros(0), torch.arange(7, dtype=torch.int16)],
        "half": torch.randn(530, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
        "number": number,
    }


def check(received: dict[str, Any], number: float = 0.1) -> None:
    expected = tree()
    assert torch.equal(received["big"], expected["big"])
    assert torch.equal(received["half"], expected["half"])
    assert [item.tolist() for item in received["small"]] == [True, [], list(range(7))]
    assert received["number"] == number


def fails(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with pytest.raises(RuntimeError):
            call()

    return run


def test_a_state_passes_along_a_chain(groups: Callable[..., list[Group]]) -> None:
    holder, one, two = groups(3)
    counts: list[int] = []
    sent, got_one, got_two = together(
        [
            lambda: send_state(holder, 1, tree(), on_piece=lambda *_: counts.append(1)),
            lambda: receive_state(one, Route(0, 2), LIMIT),
            lambda: receive_state(two, Route(1, None), LIMIT),
        ]
    )
    for received, size in (got_one, got_two):
        assert size == sent
        check(received)
    assert len(counts) == PIECES


def test_another_holder_sends_what_is_missing(groups: Callable[..., list[Group]]) -> None:
    """The first is cut off in the middle. Of two receivers, each at another place, each gets its own rest."""
    holder, one, two = groups(3)
    near, far = Incoming(), Incoming()
    far_has_ten = threading.Event()

    def far_piece(order: int, count: int, size: int) -> None:
        if order == 9:
            far_has_ten.set()

    def near_piece(order: int, count: int, size: int) -> None:
        if order == 17:
            assert far_has_ten.wait(30)
            holder.shut()
            one.shut()

    together(
        [
            fails(lambda: send_state(holder, 1, tree())),
            fails(lambda: receive_state(one, Route(0, 2), LIMIT, near, on_piece=near_piece)),
            fails(lambda: receive_state(two, Route(1, None), LIMIT, far, on_piece=far_piece)),
        ]
    )
    near_here, far_here = near.bytes_here(), far.bytes_here()
    # Pieces that had been asked for may have come after the cut.
    assert 10 * 1024 <= far_here <= near_here
    assert 18 * 1024 <= near_here <= 21 * 1024
    # The other one's state differs in what is no tensor: its own seconds of training, say.
    holder, one, two = groups(3)
    progress = Progress("worker-2", sends=False)
    sent, (got, moved), (got_two, _) = together(
        [
            lambda: send_state(holder, 1, tree(0.2)),
            lambda: receive_state(one, Route(0, 2), LIMIT, near, progress),
            lambda: receive_state(two, Route(1, None), LIMIT, far),
        ]
    )
    check(got, 0.2)
    check(got_two, 0.2)
    header = len(codec.flatten(tree(0.2))[0])
    assert moved == sent == header + near.buffer.numel() - near_here
    assert (progress.kept, progress.done) == (near_here, progress.total)


def test_one_that_has_nothing_takes_part_behind_one_that_has_all(groups: Callable[..., list[Group]]) -> None:
    first = groups(2)
    here = Incoming()
    together(
        [
            lambda: send_state(first[0], 1, tree()),
            lambda: receive_state(first[1], Route(0, None), LIMIT, here),
        ]
    )
    holder, one, two = groups(3)
    sent, (got, moved), (got_two, moved_two) = together(
        [
            lambda: send_state(holder, 1, tree()),
            lambda: receive_state(one, Route(0, 2), LIMIT, here),
            lambda: receive_state(two, Route(1, None), LIMIT),
        ]
    )
    check(got)
    check(got_two)
    header = len(codec.flatten(tree())[0])
    assert sent == moved == header
    assert moved_two == header + here.buffer.numel()


def test_a_piece_that_differs_comes_again(groups: Callable[..., list[Group]]) -> None:
    first = groups(2)
    here = Incoming()
    other = tree()
    other["big"][1500] = -1.0
    together(
        [lambda: send_state(first[0], 1, other), lambda: receive_state(first[1], Route(0, None), LIMIT, here)]
    )
    holder, receiver = groups(2)
    sent, (got, moved) = together(
        [lambda: send_state(holder, 1, tree()), lambda: receive_state(receiver, Route(0, None), LIMIT, here)]
    )
    check(got)
    assert sent == moved == len(codec.flatten(tree())[0]) + 1024


def test_wrong_checksum_is_told_and_that_piece_comes_again(
    groups: Callable[..., list[Group]], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, receiver = groups(2)
    here = Incoming()
    with monkeypatch.context() as patched:
        calls: list[int] = []
        right = transfer.checksum

        def wrong(piece: torch.Tensor) -> int:
            calls.append(1)
            return right(piece) ^ (len(calls) == 4)

        patched.setattr(transfer, "checksum", wrong)  # the sender's alone
        with pytest.raises(ValueError, match=r"piece 3 is wrong \(1 of 25 are\)"):
            together(
                [
                    lambda: send_state(holder, 1, tree()),
                    lambda: receive_state(receiver, Route(0, None), LIMIT, here),
                ]
            )
    assert here.missing == [3]
    holder, receiver = groups(2)
    _, (got, moved) = together(
        [lambda: send_state(holder, 1, tree()), lambda: receive_state(receiver, Route(0, None), LIMIT, here)]
    )
    check(got)
    assert moved == len(codec.flatten(tree())[0]) + 1024


def test_a_state_of_another_script_is_taken_whole(groups: Callable[..., list[Group]]) -> None:
    first = groups(2)
    here = Incoming()
    smaller = {"big": torch.zeros(1000)}
    together(
        [
            lambda: send_state(first[0], 1, smaller),
            lambda: receive_state(first[1], Route(0, None), LIMIT, here),
        ]
    )
    holder, receiver = groups(2)
    _, (got, _) = together(
        [lambda: send_state(holder, 1, tree()), lambda: receive_state(receiver, Route(0, None), LIMIT, here)]
    )
    check(got)


def test_state_beyond_limit_is_refused_before_taking_memory(groups: Callable[..., list[Group]]) -> None:
    holder, receiver = groups(2)

    def receive() -> None:
        with pytest.raises(ValueError, match="100 bytes are the limit here"):
            receive_state(receiver, Route(0, None), 100)

    # More than the sockets hold.
    together([fails(lambda: send_state(holder, 1, {"big": torch.zeros(2 * 10**6)})), receive])


def test_a_state_without_tensors(groups: Callable[..., list[Group]]) -> None:
    holder, receiver = groups(2)
    _, (got, _) = together(
        [lambda: send_state(holder, 1, {"step": 3}), lambda: receive_state(receiver, Route(0, None), LIMIT)]
    )
    assert got == {"step": 3}


def test_message_is_awaited_as_long_as_a_collective_and_once() -> None:
    class Work:
        def __init__(self) -> None:
            self.waits: list[timedelta] = []

        def wait(self, timeout: timedelta) -> None:
            self.waits.append(timeout)

    work = Work()
    waiter = Waiter(timedelta(seconds=1800), lambda: False)
    message = Message(work, torch.zeros(1), waiter)
    assert not message.is_completed()
    message.wait()
    message.wait()
    assert work.waits == [timedelta(seconds=1800)]
    assert message.is_completed()
    waiter.close()


def test_message_lost_by_backend_is_left_once_group_is_shut() -> None:
    shut, never = threading.Event(), threading.Event()

    class Work:
        def wait(self, timeout: timedelta) -> None:
            shut.set()
            never.wait(timeout.total_seconds())

    message = Message(Work(), torch.zeros(1), Waiter(timedelta(seconds=60), shut.is_set))
    with pytest.raises(RuntimeError, match="shut while a message was on its way"):
        message.wait()
    assert message.lost
    assert not message.is_completed()
    message.wait()  # no second time
    never.set()


def test_one_thread_does_not_wait_for_the_message_of_another() -> None:
    waiter, waits, other_came = (
        Waiter(timedelta(seconds=60), lambda: False),
        threading.Event(),
        threading.Event(),
    )

    class Late:
        def wait(self, timeout: timedelta) -> None:
            waits.set()
            if not other_came.wait(20):
                raise RuntimeError("nobody else can wait meanwhile")

    class Here:
        def wait(self, timeout: timedelta) -> None:
            other_came.set()

    def second() -> bool:
        assert waits.wait(60)
        return waiter.wait(Here())

    assert together([lambda: waiter.wait(Late()), second]) == [True, True]
    waiter.close()


def test_a_group_with_a_lost_message_is_set_aside_at_once(
    groups: Callable[..., list[Group]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups_module, "RELEASE_SECONDS", 1000.0)
    one, _ = groups(2)
    message = one.start_receive(torch.zeros(4), 1)
    assert isinstance(message, Message)
    message.lost = True
    assert not one.release()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 300), max_size=8), st.integers(20, 700))
def test_pieces_are_the_packed_bytes(sizes: list[int], piece: int) -> None:
    tensors = [torch.arange(size, dtype=torch.int32).to(torch.uint8) for size in sizes]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pieces, "piece_size", lambda total: piece)
        outgoing = OutgoingState(tensors)
        room = torch.empty(piece, dtype=torch.uint8)
        parts = [outgoing.gather(number, room).clone() for number in range(len(outgoing))]
        assert [part.numel() for part in parts] == [
            outgoing.length(number) for number in range(len(outgoing))
        ]
        assert torch.equal(torch.cat([*parts, torch.empty(0, dtype=torch.uint8)]), codec.pack(tensors))


def test_sizes_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert piece_size(0) == piece_size(1 << 20) == 64 << 10
    assert piece_size(64 << 20) == 2 << 20
    assert piece_size(1 << 40) == 8 << 20


def test_chains() -> None:
    # Two holders, 0 and 3, of whose receivers each passes the state on to the next.
    transfers = [(1, 0), (2, 3), (4, 0), (5, 3), (6, 0)]
    assert [route(transfers, rank) for rank in range(8)] == [
        Route(None, 1),
        Route(0, 4),
        Route(3, 5),
        Route(None, 2),
        Route(1, 6),
        Route(2, None),
        Route(4, None),
        None,
    ]
    assert route([], 0) is None


def test_progress_in_words() -> None:
    progress = Progress("worker-0", sends=False, began=100.0)
    assert progress.text(107.0) == "receiving the state from worker-0: not begun after 7 s"
    progress.total, progress.kept, progress.done = 10 << 30, 1 << 30, 3 << 30
    assert progress.text(104.0) == (
        "receiving the state from worker-0: 3.0 GiB of 10.0 GiB (30 %), 512.0 MiB/s, 1.0 GiB were here"
    )
    progress = Progress("worker-2", sends=True, total=100, done=50, began=0.0)
    assert progress.text(10.0) == "sending the state to worker-2: 50 B of 100 B (50 %), 5 B/s"
