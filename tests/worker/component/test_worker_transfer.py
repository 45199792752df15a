"""State transfers over real groups: into the live state, from several holders, on from where one was lost."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from worker_groups import FormedGroups, together

from springtide.comm import codec
from springtide.comm import process_group as groups_module
from springtide.comm import state_pieces as pieces
from springtide.comm import state_transfer as transfer
from springtide.comm.process_group import Group
from springtide.comm.state_transfer import Destination, Landing, Reception, receive_state, roles, send_state
from springtide.comm.transfer_progress import Progress
from springtide.comm.work import Message, Waiter
from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.train_step.buffers import Buffers
from springtide.train_step.state import Position, State

LIMIT = 1 << 20
POSITION = Position(Cursor(1, 2, 3, 4), Ledger(stage=1, epoch=2, expected=10, count=3), 1.5)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MOST_PIECE_BYTES", 1024)
    monkeypatch.setattr(pieces, "LEAST_PIECE_BYTES", 1024)


@pytest.fixture
def groups() -> Iterator[Callable[..., list[Group]]]:
    formed = FormedGroups()
    yield formed
    formed.close()  # some are broken, and cannot be freed


class Script:
    """A model with an optimizer, as a worker's script has them; 27 KB with Adam's state."""

    def __init__(self, seed: int, steps: int = 0, **options: Any) -> None:
        torch.manual_seed(options.get("weights", seed))
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(2, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.Flatten(), torch.nn.Linear(256, 8)
        ).to(memory_format=options.get("memory_format", torch.contiguous_format))
        self.frozen = options.get("frozen", 0)
        for parameter in list(self.model.parameters())[: self.frozen]:
            parameter.requires_grad_(False)
        trained = [item for item in self.model.parameters() if item.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=0.01)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.state = State(
            dict(self.model.named_parameters()), Buffers(self.model), [self.optimizer], {"ema": self.average}
        )
        self.landing, self.overwritten, self.in_place = Landing(), 0, True
        torch.manual_seed(77)
        self.step(steps)

    def step(self, count: int = 1) -> None:
        for number in range(count):
            self.optimizer.zero_grad()
            torch.manual_seed(number)
            self.model(torch.randn(4, 2, 6, 6)).square().sum().backward()
            self.optimizer.step()
            self.average.update_parameters(self.model)

    def flat(self) -> codec.Flattened:
        return codec.flatten_in_place(self.state.read(POSITION, {"samples": 10}))

    def reception(self) -> Reception:
        def overwrite() -> None:
            self.overwritten += 1

        def prepare(outline: Any) -> Destination:
            assert self.state.check(outline) == POSITION
            return Destination(self.state.places(outline), self.in_place)

        return Reception(prepare, LIMIT, overwrite, self.landing)

    def tensors(self) -> list[torch.Tensor]:
        flat = codec.flatten_in_place(self.state.read(POSITION, {"samples": 10}))
        return [tensor.clone() for tensor in flat.tensors]


def same(one: Script, other: Script) -> bool:
    mine, theirs = one.tensors(), other.tensors()
    return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def moves(
    made: list[Group], lacking: dict[int, Script], holders: dict[int, Script], **events: Any
) -> list[Any]:
    """Transfer; return by rank the bytes that it has sent, or (tree, bytes that came)."""
    who = roles(list(lacking), len(made))

    def call(rank: int) -> Any:
        if rank in lacking:
            return receive_state(made[rank], who, lacking[rank].reception(), **events.get(f"of_{rank}", {}))
        return send_state(made[rank], who, holders[rank].flat(), spread, **events.get(f"of_{rank}", {}))

    return together([lambda rank=rank: call(rank) for rank in range(len(made))])


def spread(path: str) -> bool:
    return path.startswith(("parameters", "optimizer.state"))


def install(joiner: Script, tree: Any) -> None:
    joiner.state.write(tree, give=True)


@pytest.mark.parametrize(
    ("size", "lacking"), [(2, [1]), (3, [1, 2]), (3, [2]), (5, [0, 2, 4]), (4, [3]), (6, [1, 2, 3, 5])]
)
def test_whoever_holds_all_get_the_state(
    size: int, lacking: list[int], groups: Callable[..., list[Group]]
) -> None:
    joiners = {rank: Script(seed=rank + 5) for rank in lacking}
    holders = {rank: Script(1, steps=3) for rank in range(size) if rank not in lacking}
    before = {
        rank: [item.data_ptr() for item in joiner.model.parameters()] for rank, joiner in joiners.items()
    }
    results = moves(groups(size), joiners, holders)
    whole = sum(tensor.nbytes for tensor in Script(1, steps=3).tensors())
    header = len(Script(1, steps=3).flat().header)
    for rank, joiner in joiners.items():
        tree, moved = results[rank]
        install(joiner, tree)
        assert same(joiner, Script(1, steps=3))
        assert [item.data_ptr() for item in joiner.model.parameters()] == before[rank]
        assert joiner.overwritten == 1
        assert whole // 2 < moved <= whole + header
    # A share each: nobody sends more than the first one, with the header and what only it may send.
    sent = [results[rank] for rank in holders]
    if len(sent) > 1:
        assert max(sent) <= whole // len(sent) + whole // 3 + header


def test_a_joiner_trains_on_as_the_holder_does(groups: Callable[..., list[Group]]) -> None:
    joiner, holder = Script(5), Script(1, steps=2)
    tree, _ = moves(groups(2), {1: joiner}, {0: holder})[1]
    install(joiner, tree)
    joiner.step(2)
    holder.step(2)
    assert same(joiner, holder)


def test_optimizer_state_is_received_where_it_stays(groups: Callable[..., list[Group]]) -> None:
    joiner = Script(5)
    tree, _ = moves(groups(2), {1: joiner}, {0: Script(1, steps=2)})[1]
    came = {item["exp_avg"].data_ptr() for item in tree["optimizer"]["state"]}
    install(joiner, tree)
    assert {item["exp_avg"].data_ptr() for item in joiner.optimizer.state.values()} == came


def test_channels_last_is_received_as_it_lies(groups: Callable[..., list[Group]]) -> None:
    joiner = Script(5, memory_format=torch.channels_last)
    holder = Script(1, steps=2, memory_format=torch.channels_last)
    weight = holder.model[0].weight
    flat = holder.flat()
    assert any(tensor.data_ptr() == weight.data_ptr() for tensor in flat.tensors)  # no copy of it is sent
    tree, _ = moves(groups(2), {1: joiner}, {0: holder})[1]
    assert tree["parameters"]["0.weight"].data_ptr() == joiner.model[0].weight.data_ptr()
    install(joiner, tree)
    assert same(joiner, holder)
    for parameter, state in joiner.optimizer.state.items():
        assert state["exp_avg"].stride() == parameter.stride()


@pytest.mark.parametrize("in_other_order", ["joiner", "holder"])
def test_memory_in_another_order_is_no_hindrance(
    in_other_order: str, groups: Callable[..., list[Group]]
) -> None:
    formats = {in_other_order: torch.channels_last}
    joiner = Script(5, memory_format=formats.get("joiner", torch.contiguous_format))
    holder = Script(1, steps=2, memory_format=formats.get("holder", torch.contiguous_format))
    tree, _ = moves(groups(2), {1: joiner}, {0: holder})[1]
    install(joiner, tree)
    for mine, theirs in zip(joiner.model.parameters(), holder.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for parameter, state in joiner.optimizer.state.items():
        assert state["exp_avg"].stride() == parameter.stride()


def test_frozen_weights_of_the_same_file_do_not_travel(groups: Callable[..., list[Group]]) -> None:
    """Frozen weights of the same file do not travel, and neither does the average of them."""
    joiner, holder = Script(5, weights=9, frozen=4), Script(1, steps=2, weights=9, frozen=4)
    progress = Progress("", sends=False)
    sent, (tree, moved) = moves(groups(2), {1: joiner}, {0: holder}, of_1={"progress": progress})
    install(joiner, tree)
    assert same(joiner, holder)
    # The linear layer with Adam's two and the average, and what is small: nothing of the convolution.
    trained = sum(item.nbytes for item in holder.model[3].parameters())
    frozen = holder.model[0].weight.nbytes
    assert moved == sent
    assert progress.reused >= frozen
    assert moved - len(holder.flat().header) <= 4 * trained + 2 * 1024


def test_a_state_that_is_here_bit_for_bit_does_not_move(groups: Callable[..., list[Group]]) -> None:
    joiner, holder = Script(1, steps=2), Script(1, steps=2)
    sent, (tree, moved) = moves(groups(2), {1: joiner}, {0: holder})
    assert sent == moved == len(holder.flat().header)
    assert joiner.overwritten == 0
    install(joiner, tree)
    assert same(joiner, holder)


def test_one_odd_value_brings_its_piece_alone(groups: Callable[..., list[Group]]) -> None:
    joiner, holder = Script(1, steps=2), Script(1, steps=2)
    with torch.no_grad():
        joiner.model[3].weight[4, 100] += 1
    sent, (tree, moved) = moves(groups(2), {1: joiner}, {0: holder})
    assert len(holder.flat().header) < sent == moved <= len(holder.flat().header) + 1024
    install(joiner, tree)
    assert same(joiner, holder)


def test_memory_of_a_device_passes_through_few_rooms(
    groups: Callable[..., list[Group]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of a chain. No device is here: no piece is one stretch of the host's memory."""
    made: list[int] = []

    def room(size: int, **options: Any) -> torch.Tensor:
        made.append(size)
        return torch.empty(size, dtype=torch.uint8)

    class Counted(pieces.Rooms):
        def __init__(self, pinned: bool) -> None:
            super().__init__(pinned, room)

    monkeypatch.setattr(transfer, "Rooms", Counted)
    monkeypatch.setattr(pieces.PieceMemory, "direct", lambda self, number: None)
    near, far, holder = Script(5), Script(6), Script(1, steps=2)
    (_, (tree_near, _), (tree_far, _)) = moves(groups(3), {1: near, 2: far}, {0: holder})
    for joiner, tree in ((near, tree_near), (far, tree_far)):
        install(joiner, tree)
        assert same(joiner, holder)
    # Three each way, and those that one in the middle passes on; for each length of the pieces.
    assert len(made) <= 4 * (3 + 3 + 3 + 8)
    sizes = [item.nbytes for item in holder.tensors()]
    assert len(made) < len(pieces.into_pieces(sizes, [True] * len(sizes), 1024)[0])


def cut_at(order: int, *made: Group) -> dict[str, Any]:
    def on_piece(at: int, count: int, size: int) -> None:
        if at == order:
            for group in made:
                group.shut()

    return {"on_piece": on_piece}


def broken(call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError):
        call()


@pytest.mark.parametrize("in_place", [True, False])
def test_pieces_of_all_holders_are_kept_when_one_dies(
    in_place: bool, groups: Callable[..., list[Group]]
) -> None:
    joiner, holders = Script(5), [Script(1, steps=2) for _ in range(2)]
    joiner.in_place = in_place
    before = joiner.tensors()
    made, who = groups(3), roles([2], 3)

    def send(rank: int) -> None:
        broken(lambda: send_state(made[rank], who, holders[rank].flat(), spread))

    def receive() -> None:
        events = cut_at(14, *made)
        broken(lambda: receive_state(made[2], who, joiner.reception(), **events))

    together([lambda: send(0), lambda: send(1), receive])
    assert joiner.overwritten == in_place
    unchanged = all(torch.equal(a, b) for a, b in zip(before, joiner.tensors(), strict=False))
    assert unchanged != in_place
    progress = Progress("", sends=False)
    tree, moved = moves(groups(2), {1: joiner}, {0: holders[1]}, of_1={"progress": progress})[1]
    whole = sum(tensor.nbytes for tensor in holders[1].tensors())
    assert progress.reused >= 14 * 512
    assert moved <= whole + len(holders[1].flat().header) - progress.reused
    install(joiner, tree)
    assert same(joiner, holders[1])


def test_an_older_state_beside_stays_whole_until_the_end(groups: Callable[..., list[Group]]) -> None:
    survivor, holder = Script(1, steps=1), Script(1, steps=2)
    survivor.in_place = False
    before = survivor.tensors()
    tree, _ = moves(groups(2), {1: survivor}, {0: holder})[1]
    assert all(torch.equal(a, b) for a, b in zip(before, survivor.tensors(), strict=True))
    assert survivor.overwritten == 0
    install(survivor, tree)
    assert same(survivor, holder)


def test_an_older_state_is_overwritten_in_place(groups: Callable[..., list[Group]]) -> None:
    survivor, holder = Script(1, steps=1), Script(1, steps=2)
    places = [item.data_ptr() for state in survivor.optimizer.state.values() for item in state.values()]
    tree, _ = moves(groups(2), {1: survivor}, {0: holder})[1]
    assert survivor.overwritten == 1
    install(survivor, tree)
    assert same(survivor, holder)
    assert places == [
        item.data_ptr() for state in survivor.optimizer.state.values() for item in state.values()
    ]


def test_one_with_all_passes_on_to_one_with_nothing(groups: Callable[..., list[Group]]) -> None:
    near, far, holder = Script(1, steps=2), Script(5), Script(1, steps=2)
    sent, (_, moved_near), (tree, moved_far) = moves(groups(3), {1: near, 2: far}, {0: holder})
    header = len(holder.flat().header)
    assert sent == moved_near == header
    assert moved_far > header
    install(far, tree)
    assert same(far, holder)


def test_another_script_is_refused_before_anything_changes(groups: Callable[..., list[Group]]) -> None:
    joiner, made, who = Script(5), groups(2), roles([1], 2)
    before = joiner.tensors()

    def refuse(outline: Any) -> Destination:
        raise LookupError("another script")

    def receive() -> None:
        with pytest.raises(LookupError):
            receive_state(made[1], who, Reception(refuse, LIMIT))

    together([lambda: broken(lambda: send_state(made[0], who, Script(1, steps=2).flat())), receive])
    assert all(torch.equal(a, b) for a, b in zip(before, joiner.tensors(), strict=True))


def test_wrong_checksum_is_told_and_that_piece_comes_again(
    groups: Callable[..., list[Group]], monkeypatch: pytest.MonkeyPatch
) -> None:
    joiner, holder = Script(5), Script(1, steps=2)
    made, who = groups(2), roles([1], 2)
    with monkeypatch.context() as patched:
        calls: list[int] = []
        right = transfer.checksum

        def wrong(data: torch.Tensor) -> int:
            # A byte that changed on its way, as the receiver sees it.
            if threading.current_thread().name.startswith(("receiver", "springtide-checksums")):
                calls.append(1)
                if len(calls) == 4:
                    data[5] ^= 1
            return right(data)

        patched.setattr(transfer, "checksum", wrong)

        def receive() -> None:
            threading.current_thread().name = "receiver"
            with pytest.raises(ValueError, match=r"the checksum of piece \d+ is wrong \(1 of \d+ are\)"):
                receive_state(made[1], who, joiner.reception())

        together([lambda: send_state(made[0], who, holder.flat()), receive])
    sent, (tree, moved) = moves(groups(2), {1: joiner}, {0: holder})
    header = len(holder.flat().header)
    assert header < sent == moved <= header + 1024
    install(joiner, tree)
    assert same(joiner, holder)


def test_state_beyond_limit_is_refused_before_taking_memory(groups: Callable[..., list[Group]]) -> None:
    made, who = groups(2), roles([1], 2)

    def receive() -> None:
        with pytest.raises(ValueError, match="100 bytes are the limit here"):
            receive_state(made[1], who, Reception(lambda outline: Destination({}), 100))

    together([lambda: broken(lambda: send_state(made[0], who, Script(1).flat())), receive])


def test_a_state_without_tensors(groups: Callable[..., list[Group]]) -> None:
    made, who = groups(2), roles([1], 2)
    _, (tree, _) = together(
        [
            lambda: send_state(made[0], who, codec.flatten_in_place({"step": 3})),
            lambda: receive_state(made[1], who, Reception(lambda outline: Destination({}), LIMIT)),
        ]
    )
    assert tree == {"step": 3}


def test_nothing_is_written_once_connections_are_closed(groups: Callable[..., list[Group]]) -> None:
    """A transfer into live memory rests on this; the backend loses messages here now and then."""
    count, size = 100, 1024
    for turn in range(10):
        one, other = groups(2)
        target = torch.zeros(count * size, dtype=torch.uint8)
        asked = [one.start_receive(part, 1) for part in target.split(size)]
        for part in torch.ones(count * size, dtype=torch.uint8).split(size):
            other.start_send(part, 0)
        asked[3 * turn].wait()
        for group in (one, other) if turn % 2 else (other, one):
            group.shut()
        assert one.is_disconnected(10.0)
        seen = target.clone()
        for work in asked:
            with contextlib.suppress(RuntimeError):
                work.wait()
        one.release()
        assert torch.equal(target, seen)
        assert seen[: size * (3 * turn + 1)].all()


def test_a_group_that_stands_is_not_disconnected(groups: Callable[..., list[Group]]) -> None:
    one, _ = groups(2)
    assert not one.is_disconnected(0.0)


PEAK = """
import sys, torch
sys.path[:0] = sys.argv[1:]
from pathlib import Path
from worker_groups import form_groups, together
from springtide.comm import codec
from springtide.comm.state_transfer import Destination, Reception, receive_state, roles, send_state
from springtide.train_step.state import TensorPlace

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) << 10

torch.set_num_threads(1)
groups, who = form_groups(2), roles([1], 2)
size = 24 << 20
held = {str(at): torch.full((size,), at + 1, dtype=torch.uint8) for at in range(4)}
mine = {name: torch.zeros_like(item) + 9 for name, item in held.items()}

def prepare(outline):
    return Destination({id(item): TensorPlace(mine[name], True) for name, item in outline.items()})

together([lambda: send_state(groups[0], who, codec.flatten_in_place({"0": held["0"][:9000]})),
          lambda: receive_state(groups[1], who, Reception(lambda outline: Destination({}), 1 << 30))])
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
together([lambda: send_state(groups[0], who, codec.flatten_in_place(held)),
          lambda: receive_state(groups[1], who, Reception(prepare, 1 << 30))])
assert all(torch.equal(mine[name], item) for name, item in held.items())
print((status("VmHWM") - before) / (4 * size))
for group in groups:
    group.shut()
for group in groups:
    group.release()
"""


@pytest.mark.slow
def test_neither_side_has_a_second_state_in_memory() -> None:
    """The memory of both sides together grows by less than a second state.

    Both are threads of one process here, so its peak is that of both.
    """
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *sys.path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) <= 0.1


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
    monkeypatch.setattr(groups_module, "is_lost", lambda *times: False)  # not by its age
    one, _ = groups(2)
    message = one.start_receive(torch.zeros(4), 1)
    assert isinstance(message, Message)
    message.lost = True
    assert not one.release()


def test_progress_in_words() -> None:
    progress = Progress("worker-0", sends=False, began=100.0)
    assert progress.text(107.0) == "receiving the state from worker-0: not begun after 7 s"
    progress.total, progress.reused, progress.done = 10 << 30, 1 << 30, 3 << 30
    assert progress.text(104.0) == (
        "receiving the state from worker-0: 3.0 GiB of 10.0 GiB (30 %), 512.0 MiB/s, 1.0 GiB were here"
    )
    progress = Progress("worker-2", sends=True, total=100, done=50, began=0.0)
    assert progress.text(10.0) == "sending the state to worker-2: 50 B of 100 B (50 %), 5 B/s"
