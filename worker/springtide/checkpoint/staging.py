"""The copy that a step waits for: a member's share of the state, in memory of its own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from springtide.checkpoint import shares
from springtide.checkpoint.frozen import Block, FrozenBlocks
from springtide.checkpoint.local_shards import OwnShards, pieces_of, with_whole
from springtide.checkpoint.shares import Piece, Share
from springtide.comm import codec
from springtide.pods.tensors import ShardRuns
from springtide_protocol.names import StateName

log = logging.getLogger("springtide")

_PORTABLE = 1  # cudaHostRegisterPortable: locked for all devices of the process


class GoneError(Exception):
    """Raised when some of the state cannot be had any more; the text says which, and why."""


@dataclass(frozen=True, slots=True)
class Collected:
    """A share of a tree. header: of the tree (codec); memory: uint8, the pieces one by one.

    frozen: numbers of the tensors that do not train, of which there are blocks instead of pieces.
    """

    header: bytes
    specs: list[codec.TensorSpec]
    pieces: list[Piece]
    memory: torch.Tensor
    frozen: tuple[int, ...] = ()
    blocks: list[Block] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes that have to be saved."""
        return self.memory.numel() + sum(b.memory.numel() for b in self.blocks if b.memory is not None)


class Elsewhere(Protocol):
    """State that is not in this process, as it was when it was asked for; for the writing thread.

    Attributes:
        kind: of the processes that hold it.
    """

    @property
    def kind(self) -> str: ...

    def collect(self, index: int, count: int) -> Collected:
        """Bring one share of it here.

        Args:
            index: of the share, from 0.
            count: of the shares.

        Raises:
            GoneError: those that hold it have let it go.
        """
        ...

    def close(self) -> None:
        """Release the state: it is not needed any more."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A checkpoint's contents and name, as the writing thread needs them.

    Attributes:
        own: this member's share of the workers' state.
        elsewhere: state that other processes hold.
    """

    state: StateName
    share: Share
    reason: str
    own: Collected
    elsewhere: Elsewhere | None = None
    seconds: float = 0.0


class DeviceCopies(Protocol):
    """Copies from a device to memory of the host, several under way at once.

    Calls: `lock` once for the memory, then `begin` for each part and `wait` for all of them, again and again;
    at last what `lock` has returned, before the memory is freed.
    """

    def lock(self, memory: torch.Tensor, device: torch.device) -> Callable[[], object] | None:
        """Lock the memory's pages, for copies from the device at the full rate of the bus.

        Args:
            memory: uint8, one-dimensional, on the CPU; it must outlive the lock.
            device: from which copies come.

        Returns:
            The function that undoes it; None: they cannot be locked, and copies are slower.
        """
        ...

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy, behind what the current stream of the source's device has queued.

        Args:
            source: on a device.
            target: of the same size and dtype, in locked memory of the host.
        """
        ...

    def wait(self) -> None:
        """Return when all that was begun has arrived."""


class CudaCopies:
    """Copies on the current streams, so that the memory of temporary sources is used again behind them only.

    Pages are locked as torch's own asynchronous checkpoints do it. torch's pinned memory would take up to
    twice as much: it comes in powers of two.
    """

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()

    def lock(self, memory: torch.Tensor, device: torch.device) -> Callable[[], object] | None:
        """Lock the memory's pages.

        Args:
            memory: uint8, one-dimensional, on the CPU; it must outlive the lock.
            device: a CUDA device; its context is used.

        Returns:
            The call that undoes it; None if the driver refuses.
        """
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = memory.data_ptr()
        with torch.cuda.device(device):  # another one may be current, and would get a context for this
            code = int(runtime.cudaHostRegister(address, memory.numel(), _PORTABLE))
            if not code:
                return partial(runtime.cudaHostUnregister, address)
            # The next kernel would raise the error that the runtime has noted.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
        log.warning(
            "%d bytes for checkpoints cannot be locked in memory (cudaError %d): copying takes longer",
            memory.numel(),
            code,
        )
        return None

    def begin(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy.

        Args:
            source: on a CUDA device.
            target: of the same size and dtype, in locked memory of the host.
        """
        target.copy_(source, non_blocking=True)
        self._devices.add(source.device)

    def wait(self) -> None:
        """Return when the current streams are through with all copies."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._devices.clear()


class Stage:
    """The memory, kept from one checkpoint to the next: one staged share at a time.

    copies: from tensors that are on a device.
    """

    def __init__(self, copies: DeviceCopies | None = None) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copies = copies or CudaCopies()
        self._unlock: Callable[[], object] | None = None
        self._tried_to_lock = False
        self._frozen = FrozenBlocks()

    def take(self, tree: Any, share: Share, own: OwnShards | None = None) -> Collected:
        """Copy the own share.

        Parameters that the tree names as "frozen" are copied only where they are not saved yet.

        Args:
            tree: of the state; its tensors may be on any device.
            share: which part of the state this member writes.
            own: which of the tensors are parts of larger ones, and what of them this member writes.

        Returns:
            The share; its memory is this stage's, and is written anew by the next call.

        Raises:
            TypeError: the state cannot be encoded; the place in it is named.
        """
        own, parts = own or OwnShards({}), dict[int, tuple[torch.Tensor, ShardRuns]]()
        if own.runs:
            tree, parts = with_whole(tree, own)
        header, tensors, numbers = codec.flatten_numbered(tree, move=False)
        specs, divided = specs_of(tensors), {numbers[key]: part for key, part in parts.items()}
        frozen = sorted({numbers[id(tree["parameters"][name])] for name in tree.get("frozen", ())})
        blocks = self._frozen.take(specs, tensors, frozen, share)
        apart = {*frozen, *divided}
        rest = [number for number in range(len(specs)) if number not in apart] if apart else None
        pieces = shares.split(specs, share.index, share.count, rest)
        sources = [tensors[piece.tensor].reshape(-1)[piece.start : piece.stop] for piece in pieces]
        for number, (part, runs) in divided.items():
            flat = part.detach().reshape(-1)
            for piece, at in pieces_of(number, runs, own):
                pieces.append(piece)
                sources.append(flat[at : at + piece.stop - piece.start])
        if divided:
            # The widest first, so that every piece of a file is aligned.
            order = sorted(range(len(pieces)), key=lambda at: -sources[at].element_size())
            pieces, sources = [pieces[at] for at in order], [sources[at] for at in order]
        sizes = [source.nbytes for source in sources]
        total = sum(sizes)
        devices = [source.device for source in sources]
        self._make_room(total, next((device for device in devices if device.type != "cpu"), None))
        offset = 0
        for source, size in zip(sources, sizes, strict=True):
            raw = source.view(torch.uint8)
            target = self._memory[offset : offset + size]
            if raw.device.type == "cpu":
                target.copy_(raw)
            else:
                self._copies.begin(raw, target)
            offset += size
        self._copies.wait()
        return Collected(header, specs, pieces, self._memory[:total], tuple(frozen), blocks)

    def _make_room(self, total: int, device: torch.device | None) -> None:
        """Have memory for so many bytes. device: where some of them come from, so that it is locked."""
        if self._memory.numel() < total:
            if self._unlock is not None:
                self._unlock()
            self._unlock, self._tried_to_lock = None, False
            self._memory = torch.empty(total, dtype=torch.uint8)
        if device is not None and not self._tried_to_lock:
            self._tried_to_lock = True
            self._unlock = self._copies.lock(self._memory, device)


def specs_of(tensors: Sequence[torch.Tensor]) -> list[codec.TensorSpec]:
    """Types and shapes; offsets are not used."""
    return [
        codec.TensorSpec(tensor.dtype, tuple(tensor.shape), 0, tensor.numel() * tensor.element_size())
        for tensor in tensors
    ]
