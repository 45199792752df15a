"""Files that plain PyTorch reads, out of a checkpoint: `python -m springtide.checkpoint.consolidate`.

A checkpoint's files are read once, all of them checked, and each piece of a wanted tensor goes straight to
its place in a new file, which is mapped into memory: what is written may leave the memory at any time. So the
state may be larger than this machine's memory, and of what is not wanted no more than a chunk is there.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from springtide.checkpoint import inspect, names, restore
from springtide.checkpoint.manifest import CorruptError, Manifest, NewerError
from springtide.checkpoint.shares import Piece
from springtide.checkpoint.storage import Storage, StorageError
from springtide.comm import codec
from springtide.errors import UsageError

FAILED = 1
REFUSED = 2
_COMPILED = "_orig_mod."
"""Begins names below a module that `torch.compile` wraps; fully qualified names have it not."""

Place = tuple[int, int]
"""A tensor of a checkpoint: the number of its part, and its own in there."""


@dataclass(frozen=True, slots=True)
class Consolidated:
    """A model that was written.

    Attributes:
        manifest: of its checkpoint.
        tensors: how many were written, the optimizer's included.
        size: bytes of these.
        passed_over: newer checkpoints that cannot be used, and why.
    """

    manifest: Manifest
    tensors: int
    size: int
    passed_over: list[str]

    def __str__(self) -> str:
        step, mebibytes = self.manifest.state.step, self.size / (1 << 20)
        return f"the model of {self.manifest.name} (step {step}), {self.tensors} tensors, {mebibytes:.1f} MiB"


def to_safetensors(uri: str, path: Path, name: str = "") -> Consolidated:
    """Write parameters and buffers as one safetensors file with the names of the model's `state_dict`.

    A tensor that has several names there (tied weights) is written under each of them, since
    `load_state_dict` wants them all and the format lets no two names share memory.

    Args:
        uri: of the folder of checkpoints, whose newest whole one is taken, or of one checkpoint.
        path: of the file to write; it must not be there.
        name: of the one checkpoint to take; "": the newest that is whole.

    Returns:
        The checkpoint that was taken, and how much of it was written.

    Raises:
        FileExistsError: something is at `path`.
        StorageError: there is no checkpoint, or storage does not answer.
        CorruptError: no checkpoint is whole; the text says what is wrong with each.
        NewerError: the newest that is whole is of a later release.
        UsageError: a tensor has a type that safetensors has no name for.
        OSError: the file cannot be written.
    """
    _check_free(path)

    def write(checkpoint: _Checkpoint, passed_over: list[str]) -> Consolidated:
        tensors = checkpoint.model()
        order = sorted(tensors, key=lambda key: (-tensors[key].dtype.itemsize, key))
        head, begins = _safetensors_header(tensors, order, checkpoint.manifest)
        size = sum(tensor.nbytes for tensor in tensors.values())
        with _aside(path) as aside:
            memory = _map_new_file(aside, len(head) + size)
            memory[: len(head)] = head
            places: dict[Place, torch.Tensor] = {}
            again: list[tuple[torch.Tensor, torch.Tensor]] = []
            for key in order:
                target = _bytes_of(memory, len(head) + begins[key], tensors[key].nbytes)
                first = places.setdefault(checkpoint.place_of(tensors[key], key), target)
                if first is not target:
                    again.append((target, first))
            checkpoint.read(places)
            for target, first in again:
                target.copy_(first)
            _sync(aside)
            os.replace(aside, path)
        return Consolidated(checkpoint.manifest, len(tensors), size, passed_over)

    return _with_newest(uri, name, write)


def to_dcp(uri: str, folder: Path, name: str = "", *, optimizer: bool = False) -> Consolidated:
    """Write parameters and buffers as a folder of `torch.distributed.checkpoint` (DCP).

    It holds {"model": ..., "optimizer": ...} with the names of
    `torch.distributed.checkpoint.state_dict.get_state_dict`. While it is written there has to be room for it
    twice.

    Args:
        uri: of the folder of checkpoints, whose newest whole one is taken, or of one checkpoint.
        folder: to write; it must not be there, or be empty.
        name: of the one checkpoint to take; "": the newest that is whole.
        optimizer: write the optimizer's state and its groups, too.

    Returns:
        The checkpoint that was taken, and how much of it was written.

    Raises:
        FileExistsError: something is at `folder`.
        StorageError: there is no checkpoint, or storage does not answer.
        CorruptError: no checkpoint is whole; the text says what is wrong with each.
        NewerError: the newest that is whole is of a later release.
        UsageError: the optimizer's state has no names.
        OSError: the folder cannot be written.
    """
    _check_free(folder, may_be_empty=True)

    def write(checkpoint: _Checkpoint, passed_over: list[str]) -> Consolidated:
        outlines = _dcp_state(checkpoint.outline, optimizer)
        wanted = [checkpoint.place_of(tensor, "") for tensor in _tensors_in(outlines)]
        if optimizer:
            wanted += checkpoint.places_of_arrays
        with _aside(folder, ".tensors") as scratch, _aside(folder) as aside:
            tree = checkpoint.read_mapped(scratch, wanted)
            state = _dcp_state(tree, optimizer)
            _save_dcp(state, aside)
            found = list(_tensors_in(state))
            os.replace(aside, folder)
        size = sum(tensor.nbytes for tensor in found)
        return Consolidated(checkpoint.manifest, len(found), size, passed_over)

    return _with_newest(uri, name, write)


def _with_newest(
    uri: str, name: str, write: Callable[[_Checkpoint, list[str]], Consolidated]
) -> Consolidated:
    """Write the newest checkpoint that can be read; a damaged one is passed over for the one before."""
    if name and names.parse(name) is None:
        raise StorageError(f"{name!r} is no name of a checkpoint, which are like step-000000000040-g1.0.1")
    storage, found = inspect.find(f"{uri.rstrip('/')}/{name}" if name else uri)
    whole = restore.candidates(storage)
    problems: list[str] = []
    for each in found:
        if each not in whole:
            continue
        try:
            return write(_Checkpoint(storage, each), problems)
        except NewerError as error:
            raise NewerError(f"{each}: {error}") from None
        except CorruptError as error:
            problems.append(f"{each}: {error}")
    raise CorruptError("; ".join(problems) or f"none of the checkpoints at {uri} is whole")


class _Checkpoint:
    """A checkpoint whose descriptions were read: its tree, with tensors on the meta device."""

    def __init__(self, storage: Storage, name: str) -> None:
        """Read the descriptions. Raise CorruptError, StorageError."""
        self._storage, self._name = storage, name
        self.manifest = restore.manifest_of(storage, name)
        parts = restore.parts_of(self.manifest)
        self._parts = [parts[kind] for kind in sorted(parts, key=lambda kind: (kind != "workers", kind))]
        self._headers, self._specs, self._placed = [], [], []
        trees = []
        for part in self._parts:
            header, specs = restore.read_header(storage, name, part)
            try:
                tree, placed = codec.outline(header, specs)
            except ValueError as error:
                raise CorruptError(f"{part.header.path}: {error}") from None
            trees.append(tree)
            self._headers.append(header)
            self._specs.append(specs)
            self._placed.append(placed)
        self._places = {
            id(each.outline): ((number, each.index), each.order)
            for number, placed in enumerate(self._placed)
            for each in placed
        }
        self.outline = _joined(trees)

    def model(self) -> dict[str, torch.Tensor]:
        """Return the outlines of the model's tensors, by their names in its `state_dict`."""
        return _model_tensors(self.outline)

    def place_of(self, outline: torch.Tensor, name: str) -> Place:
        """Return where a tensor of the outline is. Raise CorruptError.

        Args:
            outline: the tensor on the meta device.
            name: of one that has to lie in memory in the usual order; "": any order will do.
        """
        place, order = self._places[id(outline)]
        if name and order is not None:
            raise CorruptError(f"{name} lies in another order in memory, which no checkpoint has")
        return place

    @property
    def places_of_arrays(self) -> list[Place]:
        """The numpy numbers and arrays of the tree, whose outlines are zeros."""
        return [
            (number, index)
            for number, (specs, placed) in enumerate(zip(self._specs, self._placed, strict=True))
            for index in sorted(set(range(len(specs))) - {each.index for each in placed})
        ]

    def read(self, places: Mapping[Place, torch.Tensor]) -> None:
        """Read and check all files.

        Args:
            places: memory of the wanted tensors: uint8, one-dimensional; the others are checked only.

        Raises:
            CorruptError: a file is not what was written.
            StorageError: storage does not answer.
        """
        for number, (part, specs) in enumerate(zip(self._parts, self._specs, strict=True)):

            def place(piece: Piece, number: int = number, specs: Any = specs) -> torch.Tensor | None:
                memory = places.get((number, piece.tensor))
                if memory is None:
                    return None
                size = specs[piece.tensor].dtype.itemsize
                return memory[piece.start * size : piece.stop * size]

            restore.read_shares(self._storage, self._name, part, specs, place)

    def read_mapped(self, path: Path, wanted: Sequence[Place]) -> Any:
        """Return the tree with the wanted tensors in a new file, mapped into memory; the others are outlines.

        Args:
            path: of the file.
            wanted: tensors to read.

        Raises:
            CorruptError: a file is not what was written.
            StorageError: storage does not answer.
            OSError: there is no room for the file.
        """
        begins: dict[Place, int] = {}
        end = 0
        for place in wanted:
            if place not in begins:
                begins[place] = end
                size = self._specs[place[0]][place[1]].nbytes
                end += -(-size // codec.ALIGNMENT) * codec.ALIGNMENT
        memory = _map_new_file(path, end)
        places = {
            (part, index): _bytes_of(memory, begin, self._specs[part][index].nbytes)
            for (part, index), begin in begins.items()
        }
        self.read(places)
        trees = []
        for number, (header, specs) in enumerate(zip(self._headers, self._specs, strict=True)):
            tensors = [_as_tensor(places.get((number, index)), spec) for index, spec in enumerate(specs)]
            try:
                trees.append(codec.unflatten(header, tensors))
            except ValueError as error:
                raise CorruptError(f"{self._parts[number].header.path}: {error}") from None
        return _joined(trees)


def _as_tensor(memory: torch.Tensor | None, spec: codec.TensorSpec) -> torch.Tensor:
    if memory is None or not spec.nbytes:
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta" if memory is None else "cpu")
    return memory.view(spec.dtype).view(spec.shape)


def _joined(trees: Sequence[Any]) -> Any:
    tree, *more = trees
    for held in more:
        restore.join(tree, held)
    return tree


def _model_tensors(tree: Any) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by their names in the model's `state_dict`. Raise CorruptError."""
    try:
        held = {**tree["parameters"], **tree["buffers"]}
        saved_as = tree.get("saved_as", {})
        return {key: item for name, item in held.items() for key in saved_as.get(name, [name])}
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"its tree is not that of a job's state: {error!r}") from None


def _dcp_state(tree: Any, optimizer: bool) -> dict[str, Any]:
    """Return the state as DCP users name it. Raise CorruptError, UsageError."""
    model = {key.replace(_COMPILED, ""): item for key, item in _model_tensors(tree).items()}
    return {"model": model} | ({"optimizer": _optimizer_state(tree)} if optimizer else {})


def _optimizer_state(tree: Any) -> dict[str, Any]:
    """Return the state of all optimizers, as `get_state_dict` does: by the parameters' names."""
    try:
        saved = tree["optimizer"]
        members = saved.get("members")
        if members is None:
            raise UsageError(
                "the checkpoint is of a build that did not save which parameters the optimizer's groups have:"
                " leave --optimizer out"
            )
        groups = [[name.replace(_COMPILED, "") for name in group] for own in members for group in own]
        named = [name for group in groups for name in group]
        if several := sorted(name for name, count in Counter(named).items() if count > 1 or not name):
            raise UsageError(
                f"{several[0] or 'a parameter without a name'} is in several optimizers, which have one state"
                " for each name here: leave --optimizer out"
            )
        state = {name: dict(values) for name, values in zip(named, saved["state"], strict=True) if values}
        options = [{**values, "params": group} for values, group in zip(saved["groups"], groups, strict=True)]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptError(f"its optimizer's state is not that of a job: {error!r}") from None
    return {"state": state, "param_groups": options}


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _save_dcp(state: dict[str, Any], folder: Path) -> None:
    """Write a folder of DCP in this process alone. Raise OSError."""
    # Imported here: it takes a second, which other callers need not wait.
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0] if error.failures else error
        raise OSError(f"cannot write {folder}: {cause}") from error


def _safetensors_header(
    tensors: Mapping[str, torch.Tensor], order: Sequence[str], manifest: Manifest
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file.

    Args:
        tensors: their outlines, by name.
        order: the names in the order of their memory.
        manifest: of the checkpoint, which the file's metadata names.

    Returns:
        The bytes, and where each tensor's memory begins behind them.

    Raises:
        UsageError: a dtype has no name in safetensors.
    """
    known: dict[torch.dtype, str] = {}
    metadata = {"format": "pt", "checkpoint": manifest.name, "step": str(manifest.state.step)}
    entries: dict[str, Any] = {"__metadata__": metadata}
    begins: dict[str, int] = {}
    end = 0
    for key in order:
        tensor = tensors[key]
        if tensor.dtype not in known:
            known[tensor.dtype] = _safetensors_dtype(tensor.dtype, key)
        begins[key], end = end, end + tensor.nbytes
        entries[key] = {
            "dtype": known[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begins[key], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, begins


def _safetensors_dtype(dtype: torch.dtype, key: str) -> str:
    """Return the name that the installed library writes for a dtype. Raise UsageError."""
    try:
        raw = safetensors.torch.save({"it": torch.zeros(1, dtype=torch.uint8).repeat(16).view(dtype)})
        size = int.from_bytes(raw[:8], "little")
        return str(json.loads(raw[8 : 8 + size])["it"]["dtype"])
    except Exception as error:  # the library has several for this
        raise UsageError(
            f"{key} is {dtype}, which the installed safetensors cannot hold ({error!r}): write a DCP folder"
        ) from None


def _check_free(target: Path, *, may_be_empty: bool = False) -> None:
    """Raise FileExistsError where something is; FileNotFoundError where there is no folder to write in."""
    if os.path.lexists(target):
        empty = may_be_empty and target.is_dir() and not target.is_symlink() and not any(target.iterdir())
        if not empty:
            raise FileExistsError(f"{target} is there already: name another one")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent}: make it, or write to another one")


@contextmanager
def _aside(target: Path, suffix: str = ".new") -> Iterator[Path]:
    """A path beside the target; what is there at the end goes."""
    target = target.absolute()
    path = target.with_name(f"{target.name}.{os.getpid()}{suffix}")
    try:
        yield path
    finally:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _map_new_file(path: Path, size: int) -> mmap.mmap:
    """Return the memory of a new file of at least this size. Raise OSError.

    Its room is taken first: writing to a mapped file on a full disk would kill the process.
    """
    with open(path, "xb+") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
        except OSError as error:
            raise OSError(f"{path} cannot have the {size} bytes it needs: {error.strerror}") from error
        return mmap.mmap(file.fileno(), 0)


def _bytes_of(memory: mmap.mmap, begin: int, size: int) -> torch.Tensor:
    """Return a part of the memory as uint8, whose storage is that part alone: DCP copies views of more."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=begin)


def _sync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m springtide.checkpoint.consolidate",
        description="Write the model of a checkpoint as files that plain PyTorch reads.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "uri",
        metavar="URI|FOLDER",
        help="a path, file:// or s3://: a job's folder (status.checkpoint.uri), or one checkpoint in it",
    )
    parser.add_argument(
        "--name", default="", metavar="CHECKPOINT", help="the one to take; default: the newest that is whole"
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--to", type=Path, metavar="FILE.safetensors", help="a new safetensors file")
    target.add_argument("--to-dcp", type=Path, metavar="FOLDER", help="a new folder for DCP")
    parser.add_argument(
        "--optimizer", action="store_true", help="with --to-dcp: the optimizer's state and groups, too"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 2 when it was refused, 1 when it failed.

    Args:
        arguments: without the program's name; None: those of the process.

    Raises:
        SystemExit: the arguments are wrong, or ask for help.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.optimizer and options.to_dcp is None:
        parser.error("--optimizer needs --to-dcp: a safetensors file holds tensors alone, and no groups")
    try:
        if options.to_dcp is None:
            written = to_safetensors(options.uri, options.to, options.name)
        else:
            written = to_dcp(options.uri, options.to_dcp, options.name, optimizer=options.optimizer)
    except (StorageError, FileExistsError, FileNotFoundError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    except (CorruptError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    for problem in written.passed_over:
        print(f"passed over: {problem}", file=sys.stderr)
    print(f"{options.to or options.to_dcp}: {written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
