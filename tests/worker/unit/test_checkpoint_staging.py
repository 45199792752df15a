"""The copy of a share from a device: all of it arrives, in memory that is locked as long as it is used."""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from fake_device import DEVICE, Accelerator, There

from springtide.checkpoint.shares import Share
from springtide.checkpoint.staging import CudaCopies, Stage
from springtide.comm import codec


class LateCopies:
    """A device that is behind the host: its copies arrive when they are waited for."""

    def __init__(self, may_lock: bool = True) -> None:
        self.locked: list[int] = []
        """Bytes of the memories that are locked now."""
        self.tries = 0
        self._may_lock = may_lock
        self._under_way: list[tuple[torch.Tensor, torch.Tensor]] = []

    def lock(self, memory: torch.Tensor, device: torch.device) -> Callable[[], object] | None:
        assert device == DEVICE
        self.tries += 1
        if not self._may_lock:
            return None
        self.locked.append(memory.numel())
        return lambda: self.locked.remove(memory.numel())

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._under_way.append((source, target))

    def wait(self) -> None:
        for source, target in self._under_way:
            assert isinstance(source, There)
            target.copy_(source.here)
        self._under_way.clear()


def tree(size: int) -> dict[str, Any]:
    """Return tensors of three types, one of them not contiguous; `size` elements each."""
    return {
        "a": torch.arange(size, dtype=torch.float32),
        "b": torch.arange(size).to(torch.bfloat16),
        "c": torch.arange(2 * size, dtype=torch.int64).view(2, size).t(),
    }


@contextlib.contextmanager
def on_device(patch: pytest.MonkeyPatch, numbers: Sequence[int] = (0,)) -> Iterator[None]:
    """Have the tensors of these numbers lie on the device: a tree itself holds torch's own types only."""
    flatten = codec.flatten_numbered

    def moved(tree: Any, *, move: bool) -> tuple[bytes, list[torch.Tensor], dict[int, int]]:
        header, tensors, found = flatten(tree, move=move)
        return header, [accelerator.put(t) if n in numbers else t for n, t in enumerate(tensors)], found

    with Accelerator() as accelerator, patch.context() as context:
        context.setattr(codec, "flatten_numbered", moved)
        yield


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("numbers", [(0, 1, 2), (1,)])
def test_share_from_a_device_is_that_of_the_cpu(
    index: int, numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    share, content = Share(index, ("w0", "w1", "w2")), tree(100)
    expected = Stage().take(content, share)
    with on_device(monkeypatch, numbers):
        found = Stage(LateCopies()).take(content, share)
    assert (found.header, found.pieces) == (expected.header, expected.pieces)
    assert torch.equal(found.memory, expected.memory)


def test_memory_is_locked_once_and_unlocked_before_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, share = LateCopies(), Share(0, ("w0",))
    stage = Stage(copies)
    with on_device(monkeypatch):
        for size, tries, locked in ((10, 1, 220), (8, 1, 220), (50, 2, 1100)):
            stage.take(tree(size), share)
            assert (copies.tries, copies.locked) == (tries, [locked])


def test_memory_that_cannot_be_locked_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, share = LateCopies(may_lock=False), Share(0, ("w0",))
    stage = Stage(copies)
    with on_device(monkeypatch):
        for _ in range(3):
            taken = stage.take(tree(10), share)
    assert copies.tries == 1
    assert torch.equal(taken.memory, Stage().take(tree(10), share).memory)


def test_state_on_the_cpu_locks_nothing() -> None:
    copies = LateCopies()
    Stage(copies).take(tree(10), Share(0, ("w0",)))
    assert copies.tries == 0


GPU = torch.device("cuda", 1)


def make_current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Return the devices that are made current, the innermost last."""
    current: list[torch.device] = []

    @contextlib.contextmanager
    def device(wanted: torch.device) -> Iterator[None]:
        current.append(wanted)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    return current


def test_refused_lock_is_told_and_leaves_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The runtime notes the refusal; the script's next kernel would raise it."""
    noted: list[int] = []
    current = make_current(monkeypatch)

    def register(address: int, size: int, flags: int) -> int:
        assert (size, flags, current) == (100, 1, [GPU])
        noted.append(2)
        return 2

    def zeros(*_: Any, device: torch.device) -> None:
        assert device == current[-1]
        raise RuntimeError(f"CUDA error {noted.pop()}: out of memory")

    memory = torch.empty(100, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: types.SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch, "zeros", zeros)
    with caplog.at_level(logging.WARNING, "springtide"):
        assert CudaCopies().lock(memory, GPU) is None
    assert noted == []
    assert "100 bytes for checkpoints cannot be locked in memory (cudaError 2)" in caplog.text


def test_lock_is_undone_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, undone = torch.empty(100, dtype=torch.uint8), list[int]()
    runtime = types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=undone.append)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    make_current(monkeypatch)
    unlock = CudaCopies().lock(memory, GPU)
    assert unlock is not None
    unlock()
    assert undone == [memory.data_ptr()]
