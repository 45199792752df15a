"""Reading ahead: the same samples as without, and little is read twice when the members change."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, default_collate
from worker_alone import Script, library

import springtide
from springtide.data.cursor import Cursor
from springtide.data.loop import plan_loop
from springtide.data.partition import pieces
from springtide.loading import prefetch
from springtide.loading.prefetch import Loader, Wanted, make_loader
from springtide.loading.rows import is_rows, join_rows, take_rows

X = torch.arange(60, dtype=torch.float32)


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=12, max_size=12),
    ahead=st.integers(1, 5),
    batch=st.integers(4, 17),
)
def test_nothing_is_asked_for_twice_while_it_is_known(sizes: list[int], ahead: int, batch: int) -> None:
    """Rank 0 finds all its samples, each requested once, whatever the sizes of the generations."""
    plan = plan_loop(X, batch_size=batch, epochs=3, min_part=1)
    wanted = Wanted(plan)
    cursor = Cursor()
    asked: dict[int, list[int]] = {}
    for size in sizes:
        if plan.ended(cursor):
            break
        wanted.stand_at(cursor, 0, size)
        while len(wanted.under_way) < ahead and (request := wanted.next()) is not None:
            asked.setdefault(request.step, []).extend(request.ids)
        needed = set(plan.batch(cursor, 0, size).ids.tolist())
        while not needed <= wanted.held.get(cursor.step, set()):
            if not wanted.under_way:
                request = wanted.next()
                assert request is not None
                asked.setdefault(request.step, []).extend(request.ids)
            wanted.arrived()
        cursor = plan.advance(cursor)
    for step, numbers in asked.items():
        assert len(numbers) == len(set(numbers)), f"step {step}"


class Counted(Dataset[Any]):
    """Samples as a dict; each read is a line in a file, with the process that read it."""

    def __init__(self, path: Any) -> None:
        self._path = path

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Any]:
        with open(self._path, "a") as file:
            file.write(f"{index} {os.getpid()}\n")
        return {"x": X[index], "pair": (torch.tensor([index, -index]), index)}


def test_a_change_of_members_reads_little_twice(tmp_path: Any) -> None:
    dataset = Counted(tmp_path / "reads")
    plan = plan_loop(dataset, batch_size=12, epochs=1, seed=3)
    loader = Loader(plan, 2)
    try:
        cursor = Cursor()
        for rank, size in [(0, 2), (0, 2), (1, 3), (0, 1), (0, 1)]:
            loader.stand_at(cursor, rank, size)
            ids = plan.batch(cursor, rank, size).ids
            got = loader.read(cursor.step, ids)
            assert torch.equal(got["x"], X[ids])
            assert torch.equal(got["pair"][0], torch.stack([ids, -ids], 1))
            assert torch.equal(got["pair"][1], ids)
            # The same again: a dropped step; and its pieces.
            assert torch.equal(loader.read(cursor.step, ids)["x"], X[ids])
            assert torch.equal(loader.read(cursor.step, ids[1:3])["x"], X[ids[1:3]])
            cursor = plan.advance(cursor)
    finally:
        loader.close()
    reads = [line.split() for line in (tmp_path / "reads").read_text().splitlines()]
    numbers = [int(number) for number, _ in reads]
    needed = 6 + 6 + 4 + 12 + 12
    # What was asked for ahead for parts that another worker has now is read in vain; nothing is read twice.
    assert len(numbers) == len(set(numbers))
    assert needed <= len(numbers) <= needed + 4 * 6
    assert loader.read_here < needed / 2
    assert len({process for _, process in reads}) >= 2


@pytest.mark.parametrize(
    ("device", "pins"), [(None, False), (torch.device("cpu"), False), (torch.device("cuda", 1), True)]
)
def test_batches_are_pinned_for_a_model_on_a_gpu(
    device: torch.device | None, pins: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are pinned for a model on a GPU, with the model's device current, and not for any other
    model.
    """
    current, seen = list[torch.device](), list[Any]()

    @contextlib.contextmanager
    def make_current(wanted: torch.device) -> Iterator[None]:
        current.append(wanted)
        yield
        current.pop()

    class Seen(DataLoader[Any]):
        def __init__(self, *arguments: Any, pin_memory: bool, **named: Any) -> None:
            super().__init__(*arguments, pin_memory=False, **named)
            self._pins = pin_memory

        def __iter__(self) -> Any:
            seen.append((self._pins, list(current)))
            return super().__iter__()

    monkeypatch.setattr(prefetch, "DataLoader", Seen)
    monkeypatch.setattr(torch.cuda, "device", make_current)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plan, cursor = plan_loop(Counted(tmp_path / "reads"), batch_size=12, epochs=1, seed=3), Cursor()
    loader = make_loader(plan, 1, exact=False, device=device)
    assert loader is not None
    with contextlib.closing(loader):
        loader.stand_at(cursor, 0, 1)
        loader.read(cursor.step, plan.batch(cursor, 0, 1).ids)
    assert seen == [(pins, [device] if pins else [])]


def together(samples: list[Any]) -> list[int]:
    """The process that collates, and just these samples: nothing of this can be cut into rows."""
    return [os.getpid(), *sorted(sample["pair"][1] for sample in samples)]


@pytest.mark.parametrize("split", [1, 2])
def test_the_scripts_own_collating_is_done_ahead(tmp_path: Any, split: int) -> None:
    """The script's own collating runs in the reading processes, once it is known how the script splits its
    part.
    """
    plan = plan_loop(
        Counted(tmp_path / "reads"), batch_size=12, epochs=6, seed=3, collate_fn=together, min_part=1
    )
    loader = Loader(plan, 2)
    here, at = [], str(os.getpid())
    try:
        cursor = Cursor()
        for rank, size in [(0, 2)] * 7 + [(1, 3)] * 2 + [(0, 1)]:
            loader.stand_at(cursor, rank, size)
            ids = plan.batch(cursor, rank, size).ids
            for piece in pieces(len(ids), split):
                part = ids[piece.start : piece.start + piece.size]
                process, *numbers = loader.read(cursor.step, part)
                assert numbers == sorted(part.tolist())
                here.append(process == os.getpid())
                # A body that is left and done again.
                assert loader.read(cursor.step, part)[1:] == numbers
            cursor = plan.advance(cursor)
    finally:
        loader.close()
    # Only the first step's was asked for before anybody knew of the split.
    assert here == [split == 2 and number < 2 for number in range(10 * split)]
    reads = [line.split() for line in (tmp_path / "reads").read_text().splitlines()]
    assert {process for _, process in reads} - {at}


def test_what_a_change_of_members_cuts_is_collated_again(tmp_path: Any) -> None:
    plan = plan_loop(Counted(tmp_path / "reads"), batch_size=12, epochs=1, seed=3, collate_fn=together)
    loader = Loader(plan, 2)
    try:
        cursor = Cursor()
        for rank, size in [(0, 2), (1, 3), (0, 1), (1, 2)]:
            loader.stand_at(cursor, rank, size)
            ids = plan.batch(cursor, rank, size).ids
            for part in (ids, ids[:2], ids[2:], ids):
                assert loader.read(cursor.step, part)[1:] == sorted(part.tolist())
            cursor = plan.advance(cursor)
    finally:
        loader.close()


@given(
    steps=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=12, max_size=12),
    micro_batch=st.sampled_from([None, 3, 5]),
)
def test_how_a_script_splits_is_learned(steps: list[tuple[int, int]], micro_batch: int | None) -> None:
    """A request has the split that the script used in its last step."""
    plan = plan_loop(X, batch_size=13, epochs=3, min_part=1, micro_batch=micro_batch)
    wanted, cursor, before = Wanted(plan, True), Cursor(), 1
    sizes: list[int] = []
    for size, split in steps:
        if plan.ended(cursor):
            break
        wanted.stand_at(cursor, 0, size, sizes)
        wanted.under_way.clear()
        wanted.made.clear()
        request = wanted.next()
        ids = plan.batch(cursor, 0, size).ids
        assert request is not None
        assert request.ids == ids.tolist()
        assert request.step == cursor.step
        assert [number for micro in request.micro_batches() for number in micro] == request.ids
        assert list(request.sizes) == [piece.size for piece in pieces(len(ids), before, micro_batch)]
        sizes = [piece.size for piece in pieces(len(ids), split, micro_batch)]
        fitting = [
            m for m in (before, 1, 2, 3, 4) if sizes == [p.size for p in pieces(len(ids), m, micro_batch)]
        ]
        before = fitting[0]
        wanted.stand_at(cursor, 1, size + 1)  # plans anew from here
        cursor = plan.advance(cursor)


def test_sequences_of_different_lengths_train_and_evaluate() -> None:
    lengths = [int(n) for n in torch.randint(1, 9, (24,), generator=torch.Generator().manual_seed(2))]
    sequences = [(torch.ones(n), float(n)) for n in lengths]

    def pad(samples: list[tuple[torch.Tensor, float]]) -> tuple[torch.Tensor, torch.Tensor]:
        padded = torch.nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
        return padded, torch.tensor([[y] for _, y in samples])

    results = []
    for processes in (0, 1):
        with library() as runtime:
            torch.manual_seed(1)
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            springtide.distribute(model, optimizer)
            for batch in springtide.batches(
                sequences, batch_size=8, epochs=20, collate_fn=pad, loader_workers=processes
            ):
                with springtide.step():
                    for x, y in batch.split(2):
                        (model(x.sum(1, keepdim=True)) - y).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            evaluation = springtide.batches(sequences, batch_size=5, collate_fn=pad, train=False)
            for x, y in evaluation:
                with torch.no_grad():
                    springtide.report(error=(model(x.sum(1, keepdim=True)) - y).square().mean())
            results.append(evaluation.values["error"])
            assert runtime.position.ledger.audit()["totalSeen"] == 20 * 24
    assert results[0] == results[1] < 0.5


def test_training_is_the_same_with_and_without() -> None:
    def train(**options: Any) -> torch.Tensor:
        with library():
            script = Script(norm=True)
            attempts = 0
            for batch in script.batches(epochs=2, **options):
                attempts += 1
                with springtide.step():
                    for micro in batch.split(2):
                        script.loss(micro).backward()
                        if attempts == 3:
                            assert springtide.api.active_runtime is not None
                            assert springtide.api.active_runtime.trainer is not None
                            springtide.api.active_runtime.trainer.drop("the test says so")
                    script.finish()
            assert attempts == 7
            return script.parameters()

    assert torch.equal(train(loader_workers=2), train())


class Sockets(Dataset[Any]):
    """Answers with the number of IP sockets that the reading process holds."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        count = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{name}")
                if target.startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(name))) as found:
                        count += found.family in (socket.AF_INET, socket.AF_INET6)
            except OSError:
                continue
        return count


def test_processes_that_read_hold_no_connection() -> None:
    """Reading processes hold no connection of the worker.

    An open copy would hide the worker's death from its peers for as long as the reading process lives.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        assert Sockets()[0] >= 2
        plan = plan_loop(Sockets(), batch_size=4, shuffle=False)
        loader = Loader(plan, 1)
        try:
            loader.stand_at(Cursor(), 0, 1)
            assert loader.read(0, torch.arange(4)).tolist() == [0, 0, 0, 0]
        finally:
            loader.close()
        assert Sockets()[0] >= 2


def test_rows_of_collated_samples() -> None:
    samples = [{"a": torch.tensor([float(i)]), "b": (i, [torch.tensor(i)])} for i in range(4)]
    collated = default_collate(samples)
    assert is_rows(collated)
    joined = join_rows([take_rows(collated, 2, 4), take_rows(collated, 0, 1)])
    assert joined["a"].tolist() == [[2.0], [3.0], [0.0]]
    assert joined["b"][0].tolist() == [2, 3, 0]
    assert not is_rows(default_collate(["a", "b"]))
    assert not is_rows({"a": torch.zeros(())})


def test_arguments() -> None:
    plan = plan_loop(X, batch_size=4)
    assert make_loader(plan, 0, exact=True) is None
    with pytest.raises(ValueError, match="loader_workers must be an integer >= 0"):
        make_loader(plan, -1, exact=False)
    with pytest.raises(ValueError, match="does not go with exact mode"):
        make_loader(plan, 1, exact=True)
