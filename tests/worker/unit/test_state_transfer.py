"""Decisions of a state transfer: receiving into live memory, reports, and the rights of a dead group."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from springtide.comm import codec
from springtide.comm.process_group import Group
from springtide.comm.state_transfer import Reception, Roles
from springtide.comm.store_entries import Entries
from springtide.elastic import state_transfer as module
from springtide.elastic.state_transfer import (
    StateTransfer,
    TransferOrder,
    TransferSides,
    copied,
    order_in_row,
)
from springtide.elastic.training_state import TrainingState
from springtide.errors import SpringtideError


class Lost(RuntimeError):
    """The sender is gone."""


class World:
    """One receiver; `step` is what the state that comes is of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, step: int = 7, breaks: bool = False) -> None:
        self.forgotten = 0
        self.in_place: bool | None = None
        self.breaks, self.step = breaks, step
        self.senders: tuple[int, ...] = ()
        trainers: Any = MagicMock()
        trainers.require.return_value.state.size_bytes.return_value = 1000
        self.transfer = StateTransfer(TrainingState(Group(None, 0, 1, 1.0)), trainers, MagicMock())
        monkeypatch.setattr(module, "receive_state", self.receive)

    def receive(self, group: Any, who: Roles, reception: Reception, *_: Any) -> tuple[Any, int]:
        self.senders = who.senders
        self.in_place = reception.prepare({}).in_place
        if self.in_place:
            reception.overwrite()
        if self.breaks:
            raise Lost
        return {"whole": True}, 10

    def forget(self) -> None:
        self.forgotten += 1

    def run(
        self, size: int, lacking: list[int], *, has_state: bool, fresh: bool = False, **store: bytes
    ) -> tuple[int, Any]:
        entries: Any = MagicMock()
        entries.get = lambda key: store.get(f"of_{key.rpartition('/')[2]}", b"same")
        order = TransferOrder(tuple(map(str, range(size))), tuple(lacking), entries, fresh)
        group: Any = MagicMock(rank=lacking[0], size=size)
        sides = TransferSides(
            has_state=has_state,
            forget=self.forget,
            read=lambda: pytest.fail("a receiver sends nothing"),
            prepare=lambda outline: ({}, self.step),
        )
        return self.transfer.run(order, group, sides)


@pytest.mark.parametrize(
    ("holders", "has_state", "fresh", "step", "in_place"),
    [
        (1, False, False, 7, True),
        (2, False, False, 7, True),
        (2, True, False, 7, True),  # an older state: another member has the newer one, too
        (1, True, False, 7, False),  # it would be the newest if the holder dies now
        (1, False, True, 0, False),  # initial states of two processes make no third one
        (1, False, True, 7, True),  # of a checkpoint, which can be read again
    ],
)
def test_live_memory_is_overwritten_where_nothing_is_lost(
    holders: int,
    has_state: bool,
    fresh: bool,
    step: int,
    in_place: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, step=step)
    world.run(holders + 1, [holders], has_state=has_state, fresh=fresh)
    assert world.in_place is in_place
    assert world.forgotten == world.transfer.torn == in_place
    world.transfer.installed()
    assert not world.transfer.torn


def test_broken_transfer_leaves_no_state_until_one_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, breaks=True)
    with pytest.raises(Lost):
        world.run(2, [1], has_state=False)
    assert world.transfer.torn
    assert world.transfer.progress is None
    # Initial values come beside what is there, which stays a mixture until they are installed.
    world.step = 0
    with pytest.raises(Lost):
        world.run(2, [1], has_state=False, fresh=True)
    assert world.in_place is False
    assert world.transfer.torn
    world.breaks = False
    world.run(2, [1], has_state=False, fresh=True)
    world.transfer.installed()
    assert not world.transfer.torn


def test_holders_that_keep_the_state_otherwise_do_not_send(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.run(4, [3], has_state=False, of_1=b"other")
    assert world.senders == (0, 2)


@pytest.mark.parametrize("open_still", [True, False])
def test_open_connections_end_a_process_that_received(
    open_still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(monkeypatch, breaks=True)
    group: Any = MagicMock()
    group.is_disconnected.return_value = not open_still
    world.transfer.detach(group)  # nothing has been received
    with pytest.raises(Lost):
        world.run(2, [1], has_state=False)
    if open_still:
        with pytest.raises(SpringtideError, match="the others go on"):
            world.transfer.detach(group)
    else:
        world.transfer.detach(group)
    world.transfer.installed()
    world.transfer.detach(group)


def test_a_copied_tree_shares_no_memory() -> None:
    live = torch.arange(4.0)
    tree = copied({"a": [live, live], "b": 3})
    live.zero_()
    assert tree["a"][0].tolist() == [0, 1, 2, 3]
    assert tree["b"] == 3


def test_trees_in_another_order_differ_in_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors of one shape that changed places would be taken for each other."""
    forms: list[bytes] = []
    monkeypatch.setattr(module, "send_state", lambda *_: 0)
    for tree in ({"a": torch.zeros(3), "b": torch.ones(3)}, {"b": torch.ones(3), "a": torch.zeros(3)}):
        world = World(monkeypatch)
        entries: Any = MagicMock()
        entries.set = lambda key, value: forms.append(value)
        entries.check = lambda keys: False
        order = TransferOrder(("a", "b", "c"), (2,), entries, fresh=False)
        group: Any = MagicMock(rank=0, size=3)
        sides = TransferSides(
            has_state=True,
            forget=world.forget,
            read=lambda tree=tree: tree,
            prepare=lambda outline: pytest.fail("a holder receives nothing"),
        )
        world.transfer.run(order, group, sides)
    assert len(set(forms)) == 2


@pytest.mark.parametrize(
    ("rank", "lacking", "fresh", "told"),
    [(0, (2,), False, True), (2, (2,), False, False), (0, (1, 2), False, False), (0, (), False, False),
     (0, (1, 2), True, False)],
)  # fmt: skip
def test_several_holders_tell_their_form_beforehand(
    rank: int, lacking: tuple[int, ...], fresh: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tell beforehand, and once, what would be told when the state is sent."""
    told_by: list[dict[str, bytes]] = []
    monkeypatch.setattr(module, "send_state", lambda *_: 0)
    for before in (True, False):
        published: list[str] = []
        world = World(monkeypatch)
        entries = Entries(lambda key, _, known=published: known.append(key), ["a", "b", "c"], 1.0)  # type: ignore[misc]
        entries.deliver([("tree/1", b"another")])
        order = TransferOrder(("a", "b", "c"), lacking, entries, fresh)  # type: ignore[arg-type]
        sides = TransferSides(
            has_state=True, forget=world.forget, read=lambda: {"a": torch.zeros(3)}, prepare=MagicMock()
        )
        if before:
            world.transfer.announce(order, rank, sides.read)
            assert published == ([f"tree/{rank}"] if told else [])
        if rank not in lacking:
            world.transfer.run(order, MagicMock(rank=rank, size=3), sides)
        told_by.append({key: entries.get(key) for key in published})
        assert len(published) == int(told)
    assert told_by[0] == told_by[1]


def test_outline_has_forms_and_no_memory() -> None:
    tree = {"a": torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), "b": [torch.zeros(2), 7]}
    flat = codec.flatten_in_place(tree)
    outline, placed = codec.outline(flat.header, codec.specs(flat.header, 1 << 20))
    assert outline["a"].is_meta
    assert outline["a"].shape == (2, 3, 4, 5)
    assert outline["b"][1] == 7
    assert [item.index for item in placed] == [0, 1]
    assert placed[0].raw(tree["a"]).is_contiguous()
    back = codec.unflatten(flat.header, [tensor.clone() for tensor in flat.tensors])
    assert torch.equal(back["a"], tree["a"])
    assert back["a"].stride() == tree["a"].stride()
    assert flat.paths == ["a", "b[0]"]


def test_processes_of_one_local_rank_hand_over_among_themselves() -> None:
    whole = TransferOrder(("a", "a", "b", "b"), (2, 3), MagicMock(), fresh=False)
    assert order_in_row(whole, (1, 3), "row/").lacking == (1,)
    # A fresh start: each local rank's initial part is that of its first process.
    assert order_in_row(
        TransferOrder(("a",) * 4, (1, 2, 3), MagicMock(), fresh=True), (1, 3), ""
    ).lacking == (1,)
    with pytest.raises(RuntimeError, match="none of b, b holds this local rank's part"):
        order_in_row(whole, (2, 3), "row/")
