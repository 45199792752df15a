"""Samples on the model's device, one micro-batch ahead of the step, beside a make-believe device."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from gpu_capabilities import needs_cuda
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.data import Dataset, TensorDataset
from torch.utils.data._utils.pin_memory import pin_memory
from worker_alone import Script, library

import springtide
from springtide import api
from springtide.data.cursor import Cursor
from springtide.data.loop import LoopPlan, plan_loop
from springtide.data.partition import pieces
from springtide.loading import prefetch
from springtide.loading.arrivals import Arrivals
from springtide.loading.device_copies import CudaCopier, DeviceCopies, copier_for, moved_by
from springtide.loading.prefetch import Loader, make_loader

X = torch.arange(60, dtype=torch.float32)
GARBAGE = -7.0


class Stream:
    """A queue of a make-believe device, whose work is done late, as `Device` likes."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.queued = deque[tuple[Callable[[], bool], Callable[[], None]]]()
        self.done = self.asked = 0

    def push(self, work: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        self.queued.append((ready, work))
        self.asked += 1

    def run_one(self) -> bool:
        """Do the oldest piece of work; False when it waits for another stream."""
        ready, work = self.queued[0]
        if not ready():
            return False
        self.queued.popleft()
        work()
        self.done += 1
        return True

    def reached(self, place: int) -> bool:
        return self.done >= place

    def record_event(self, event: Any = None) -> Callable[[], bool]:
        return partial(self.reached, self.asked)

    def wait_event(self, event: Callable[[], bool]) -> None:
        self.push(lambda: None, event)


class OnDevice(torch.Tensor):
    """A tensor of the device, in a block that its stream may use again when nobody holds it."""

    block: Block

    def record_stream(self, stream: Any) -> None:
        self.block.used_by.add(stream)


class Block:
    def __init__(self, values: torch.Tensor, stream: Stream) -> None:
        self.values, self.stream = values, stream
        self.used_by = set[Stream]()
        self.free_when: list[Callable[[], bool]] | None = None

    def release(self) -> None:
        # As torch's allocator: an event on each stream that was recorded, and none on the block's own.
        self.free_when = [stream.record_event() for stream in self.used_by]


class InHost(torch.Tensor):
    """A tensor in locked memory, whose copy is queued on the current stream."""

    device_of: Device

    def to(self, *_: Any, **named: Any) -> Any:
        assert named["non_blocking"]
        return self.device_of.copied(self)


class Device:
    """Streams whose work is done in any order that events allow, and memory that is used again."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.main = Stream(self)
        self.streams, self.current, self.blocks = [self.main], [self.main], list[Block]()

    def make_stream(self, *_: Any) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    @contextlib.contextmanager
    def switch(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    def host(self, values: torch.Tensor) -> torch.Tensor:
        found = values.as_subclass(InHost)
        found.device_of = self
        return found

    def copied(self, source: torch.Tensor) -> torch.Tensor:
        stream, plain = self.current[-1], source.as_subclass(torch.Tensor)
        block = self._block(stream, plain.shape)
        values = block.values

        def copy_over() -> None:
            values.copy_(plain)

        stream.push(copy_over)
        found = values.as_subclass(OnDevice)
        found.block = block
        weakref.finalize(found, block.release)
        self.work_a_little()
        return found

    def _block(self, stream: Stream, shape: torch.Size) -> Block:
        for block in self.blocks:
            fits = block.stream is stream and block.values.shape == shape and block.free_when is not None
            if fits and all(event() for event in block.free_when or ()):
                block.used_by.clear()
                block.free_when = None
                return block
        self.blocks.append(Block(torch.full(shape, GARBAGE), stream))
        return self.blocks[-1]

    def read(self, tensor: torch.Tensor, into: list[list[float]]) -> None:
        """Queue a kernel that reads the tensor on the current stream."""
        values = tensor.as_subclass(torch.Tensor)
        self.current[-1].push(lambda: into.append(values.tolist()))
        self.work_a_little()

    def work_a_little(self) -> None:
        for _ in range(self._chance.randrange(4)):
            stream = self._chance.choice(self.streams)
            if stream.queued:
                stream.run_one()

    def synchronize(self) -> None:
        while any(stream.queued for stream in self.streams):
            moved = [stream.run_one() for stream in self.streams if stream.queued]
            assert any(moved), "streams wait for each other"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Device:
    made = Device(random.Random(getattr(request, "param", 0)))
    monkeypatch.setattr(torch.cuda, "Stream", made.make_stream)
    monkeypatch.setattr(torch.cuda, "stream", made.switch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: made.current[-1])
    return made


def test_the_make_believe_streams_are_called_as_torch_s() -> None:
    for name in ("wait_event", "record_event"):
        torchs = inspect.signature(getattr(torch.cuda.Stream, name))
        assert list(inspect.signature(getattr(Stream, name)).parameters) == list(torchs.parameters), name
    assert "record_stream(stream)" in (torch.Tensor.record_stream.__doc__ or "")


@pytest.mark.parametrize("device", range(12), indirect=True)
def test_a_step_reads_what_was_copied_for_it(device: Device) -> None:
    """Each micro-batch is read whole, whatever the device does first, and memory is not used again before."""
    copies = DeviceCopies(CudaCopier(torch.device("cuda", 0)))
    batches = [(number, {"x": device.host(torch.full((3,), float(number)))}) for number in range(12)]
    seen: list[list[float]] = []
    for number, batch in batches:
        found = copies.take(number, batch)["x"]
        if number != 5:  # its answer comes late, so that it is copied when it is asked for
            copies.begin((number + 1) % 12, batches[(number + 1) % 12][1])
        if number % 4 == 3:
            copies.begin("of a step that is dealt anew", batches[0][1])
            copies.begin(number + 1, batches[(number + 1) % 12][1])
        device.read(found, seen)
        del found
    copies.drop()
    device.synchronize()
    assert seen == [[float(number)] * 3 for number in range(12)]
    assert len(device.blocks) <= 8, "memory is used again"


class Pair(NamedTuple):
    a: Any
    b: Any


class Tokens(dict[str, Any]):
    """A mapping that has more than its items."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.words = ["one"]


def test_containers_stay_what_they_are() -> None:
    tokens = Tokens({"ids": torch.ones(2), "names": ["a", "b"]})
    packed = pack_padded_sequence(torch.ones(2, 3), torch.tensor([3, 2]), batch_first=True)
    given = Pair([tokens, 3, "text"], (torch.zeros(1), None, packed))
    moved = moved_by(lambda value: value.to(torch.float64), given)
    assert isinstance(moved, Pair)
    assert moved.a[1:] == [3, "text"]
    assert isinstance(moved.a[0], Tokens)
    assert moved.a[0].words == ["one"]
    assert moved.a[0]["ids"].dtype is moved.b[0].dtype is moved.b[2].data.dtype is torch.float64
    assert moved.b[2].batch_sizes.dtype is torch.int64, "an object with a to() of its own moves itself"
    assert tokens["ids"].dtype is torch.float32
    assert tokens["names"] is not None


class Copies:
    """A copier that notes what it is asked for; what it gives is on no device."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.ahead_of_step = weakref.WeakSet[Any]()
        self.most = 0

    def now(self, collated: Any) -> Any:
        self.asked.append("now")
        return ("moved", collated)

    def ahead(self, collated: Any) -> Any:
        made = Moved(copy.deepcopy(collated))
        self.ahead_of_step.add(made)
        self.most = max(self.most, len(self.ahead_of_step))
        return made

    def take(self, moved: Any) -> Any:
        self.asked.append("ahead")
        return ("moved", moved.collated)


class Moved:
    def __init__(self, collated: Any) -> None:
        self.collated = collated


def test_what_moves_itself_is_not_copied_ahead() -> None:
    copier = Copies()
    copies = DeviceCopies(copier)
    packed = pack_padded_sequence(torch.ones(2, 3), torch.tensor([3, 2]), batch_first=True)
    for number, batch in enumerate([packed, [{"x": packed}], {"x": [torch.ones(2), "text", None, 3]}]):
        copies.begin(number, batch)
        copies.take(number, batch)
    assert copier.asked == ["now", "now", "ahead"]


class Answers:
    """DataLoader in one process: it asks ahead, answers come by pickle, and torch's own function pins them.

    pinned: how many of the answers that are under way are here.
    """

    pinned = 2

    def __init__(self, dataset: Any, *, batch_sampler: Any, prefetch_factor: int, **named: Any) -> None:
        assert named["pin_memory"]
        self._dataset, self._requests = dataset, iter(batch_sampler)
        self._made, self._ahead = deque[list[Any]](), prefetch_factor
        self._ask()

    def _ask(self) -> None:
        while len(self._made) < self._ahead and (request := next(self._requests, None)) is not None:
            self._made.append([pickle.loads(pickle.dumps(self._dataset.__getitems__(request))), False])
        for answer in list(self._made)[: self.pinned]:
            self._pin(answer)

    def _pin(self, answer: list[Any]) -> None:
        if not answer[1]:
            answer[:] = pin_memory(answer[0], "cuda"), True

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        self._pin(self._made[0])
        answer = self._made.popleft()[0]
        self._ask()
        return answer

    def _shutdown_workers(self) -> None:
        self._made.clear()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> type[Answers]:
    class Own(Answers):
        pass

    monkeypatch.setattr(prefetch, "DataLoader", Own)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return Own


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return {"x": X[index], "number": index}


def numbered(samples: list[Any]) -> Any:
    return {"x": torch.stack([sample["x"] for sample in samples]), "lengths": [1] * len(samples)}


def read_all(
    plan: LoopPlan, copier: Copies, splits: list[int], sizes: list[tuple[int, int]]
) -> Iterator[None]:
    """Read the steps of a loop, and compare each micro-batch with the samples that it should have."""
    loader = make_loader(plan, 1, exact=False, device=torch.device("cuda", 0), copier=copier)
    assert loader is not None
    cursor = Cursor()
    with contextlib.closing(loader):
        for split, (rank, size) in zip(splits, sizes, strict=True):
            loader.stand_at(cursor, rank, size)
            ids = plan.batch(cursor, rank, size).ids
            for piece in pieces(len(ids), split):
                part = ids[piece.start : piece.start + piece.size]
                word, found = loader.read(cursor.step, part)
                assert word == "moved"
                assert found["x"].tolist() == part.tolist()
            yield
            cursor = plan.advance(cursor)


@pytest.mark.parametrize("collate_fn", [None, numbered])
def test_the_next_micro_batch_is_copied_ahead(answers: type[Answers], collate_fn: Any) -> None:
    """All but the first step, from which it is learned how the script splits; never more than one at once."""
    plan = plan_loop(Samples(), batch_size=12, epochs=1, seed=3, min_part=1, collate_fn=collate_fn)
    copier = Copies()
    for _ in read_all(plan, copier, [2] * 5, [(0, 2)] * 5):
        pass
    # The second step's is asked for, and cut, before the first one's split is known.
    assert copier.asked[:2] == ["now", "now"]
    assert copier.asked[4:] == ["ahead"] * 6
    assert copier.most == 1
    assert not copier.ahead_of_step, "nothing is kept behind the loop's end"


@pytest.mark.parametrize("collate_fn", [None, numbered])
def test_what_is_dealt_anew_is_copied_anew(answers: type[Answers], collate_fn: Any) -> None:
    """Members come and go, and a step is done again: all samples are right, and nothing is kept."""
    plan = plan_loop(Samples(), batch_size=12, epochs=2, seed=3, min_part=1, collate_fn=collate_fn)
    copier = Copies()
    sizes = [(0, 2), (0, 2), (1, 3), (1, 3), (1, 3), (0, 1), (0, 2), (0, 2), (0, 2)]
    for _ in read_all(plan, copier, [1, 1, 1, 1, 2, 2, 2, 1, 3], sizes):
        pass
    assert copier.asked[1] == "ahead"
    assert copier.asked[2] == "now"
    assert not copier.ahead_of_step


def test_a_step_that_is_done_again_has_its_samples(answers: type[Answers]) -> None:
    plan, copier = plan_loop(Samples(), batch_size=12, epochs=1, seed=3), Copies()
    loader = Loader(plan, 1, torch.device("cuda", 0), copier)
    with contextlib.closing(loader):
        for step, again in enumerate([1, 3, 2]):
            cursor = plan.advance(Cursor()) if step == 1 else Cursor()
            cursor = plan.advance(plan.advance(Cursor())) if step == 2 else cursor
            for _ in range(again):
                loader.stand_at(cursor, 0, 2)
                ids = plan.batch(cursor, 0, 2).ids
                assert loader.read(step, ids)[1]["x"].tolist() == ids.tolist()
    assert copier.asked == ["now", "ahead", "now", "now", "ahead", "now"]


def test_nothing_waits_for_samples_to_copy_ahead(answers: type[Answers]) -> None:
    """An answer that is not here when the step before begins is copied when it is asked for."""
    answers.pinned = 0
    plan, copier = plan_loop(Samples(), batch_size=12, epochs=1, seed=3), Copies()
    for _ in read_all(plan, copier, [1] * 5, [(0, 2)] * 5):
        pass
    assert copier.asked == ["now"] * 5


def test_a_mark_of_a_loop_that_is_over_notes_nothing() -> None:
    arrivals = Arrivals()
    mark = pickle.loads(pickle.dumps(arrivals.mark(("step", 1))))
    assert not arrivals.is_here(("step", 1))
    assert pin_memory(mark) is mark
    assert arrivals.is_here(("step", 1))
    arrivals.forget(("step", 1))
    assert not arrivals.is_here(("step", 1))
    del arrivals
    mark.pin_memory()


def test_a_script_has_its_samples_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are moved with and without processes that read ahead, and in evaluations, if a script asks."""
    copier = Copies()
    monkeypatch.setattr(api, "copier_for", lambda device: copier)

    def words(script: Script, **options: Any) -> set[str]:
        found = set()
        for batch in script.batches(**options):
            with springtide.step():
                word, samples = batch.data if isinstance(batch.data[0], str) else ("", batch)
                found.add(word)
                script.loss(samples).backward()
                script.finish()
        return found

    with library():
        script = Script()
        assert words(script, to_device=True) == {"moved"}
        assert words(script, to_device=True, loader_workers=1) == {"moved"}
        assert words(script) == {""}
        for to_device in (True, False):
            evaluation = springtide.batches((script.x,), batch_size=8, train=False, to_device=to_device)
            assert all(isinstance(batch.data[0], str) is to_device for batch in evaluation)
        with pytest.raises(ValueError, match="to_device must be True or False"):
            script.batches(to_device="cuda")


def test_models_on_the_cpu_have_no_copies() -> None:
    assert copier_for(None) is None
    assert copier_for(torch.device("cpu")) is None
    assert isinstance(copier_for(torch.device("cuda", 0)), CudaCopier)


@needs_cuda("streams")
def test_batches_lie_on_the_device_ahead_of_the_step() -> None:
    """Long kernels are queued between the steps, so that copies run beside them and memory is used again."""
    samples = torch.arange(64 * 40, dtype=torch.float32).repeat_interleave(4096).view(64 * 40, 4096)
    plan = plan_loop(TensorDataset(samples), batch_size=64, epochs=1, seed=3)
    device = torch.device("cuda", 0)
    loader = make_loader(plan, 2, exact=False, device=device, copier=copier_for(device))
    assert loader is not None
    cursor, sums, busy = Cursor(), list[torch.Tensor](), torch.randn(2048, 2048, device=device)
    with contextlib.closing(loader):
        while not plan.ended(cursor):
            loader.stand_at(cursor, 0, 1)
            ids = plan.batch(cursor, 0, 1).ids
            (x,) = loader.read(cursor.step, ids)
            assert x.device == device
            for _ in range(8):
                busy = busy @ busy
                busy = busy / busy.norm()
            sums.append((x[:, 0].double() - ids.to(device)).abs().sum() + (x[:, 0] - x[:, -1]).abs().sum())
            del x
            cursor = plan.advance(cursor)
    assert len(sums) == 40
    assert torch.stack(sums).sum().item() == 0.0
