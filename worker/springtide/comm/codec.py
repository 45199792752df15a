"""State trees without pickle: a JSON header that describes the tree, and its tensors as raw memory.

Made for `state_dict`s of models, optimizers and schedulers. A tree is built of dict (also OrderedDict,
Counter, and defaultdict of dict, list, int or float), list, tuple, str, int, float, bool, None, bytes, dense
tensors of any dtype, `torch.Size`, `torch.dtype`, `torch.device`, and numpy scalars and arrays of numbers;
anything else is one TypeError that names its path. Types, dict order, int keys, infinities and NaN come back
as they were; a tensor that stands in several places comes back as one tensor.

A header comes from a peer, so it is checked before memory is taken: `specs` and `unpack` raise ValueError.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

VERSION = 1
ALIGNMENT = 64  # bytes; every tensor of a packed buffer starts at a multiple
_DEPTH = 100

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
}
_KINDS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter", defaultdict: "default"}
_FACTORIES: dict[str, Callable[[], Any]] = {"dict": dict, "list": list, "int": int, "float": float}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """dtype, shape and where the tensor lies in a packed buffer: offset and nbytes in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


MAX_TENSORS = 1_000_000
"""Most tensors of one state: sixty layers with 256 experts each, with Adam, have 200,000."""


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


# ---- tree -> header and tensors


class _Encoder:
    def __init__(self, move: bool, as_they_lie: bool = False) -> None:
        self._move, self._as_they_lie = move, as_they_lie
        self.tensors: list[torch.Tensor] = []
        self.numbers: dict[int, int] = {}
        self.paths: list[str] = []
        self._known: dict[tuple[Any, ...], int] = {}
        self._alive: list[torch.Tensor] = []

    def node(self, value: Any, path: str, depth: int) -> Any:
        if depth > _DEPTH:
            raise TypeError(f"{path[:200]}: nested deeper than {_DEPTH} levels; does it contain itself?")
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is list:
            return [self.node(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        if kind is tuple:
            return {"tuple": [self.node(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]}
        if kind in _KINDS:
            return self._mapping(value, path, depth)
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode("ascii")}
        if kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return self._tensor_node(value, path)
        if kind is torch.Size:
            return {"size": list(value)}
        if kind is torch.dtype:
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": str(value)}
        if isinstance(value, np.generic | np.ndarray):
            return self._numpy(value, path)
        raise TypeError(
            f"{path or 'state'}: {kind.__module__}.{kind.__qualname__} cannot be part of the job's state; "
            "state is made of tensors, numbers, strings, dicts, lists and tuples"
        )

    def _mapping(self, value: Any, path: str, depth: int) -> dict[str, Any]:
        items = [
            [self.node(key, f"{path}(key {key!r})", depth + 1), self.node(item, _below(path, key), depth + 1)]
            for key, item in value.items()
        ]
        node: dict[str, Any] = {_KINDS[type(value)]: items}
        if isinstance(value, defaultdict):
            names = [name for name, factory in _FACTORIES.items() if factory is value.default_factory]
            if not names:
                raise TypeError(
                    f"{path or 'state'}: a defaultdict of {value.default_factory!r} cannot be part of "
                    f"the job's state; use a plain dict, or one of {sorted(_FACTORIES)}"
                )
            node["factory"] = names[0]
        return node

    def _tensor_node(self, value: torch.Tensor, path: str) -> dict[str, Any]:
        order = _order_in_memory(value) if self._as_they_lie else None
        if order is None:
            number = self.numbers[id(value)] = self._tensor(value, path)
            return {"tensor": number}
        return {"permuted": [self._tensor(value.permute(order), path), order]}

    def _add(self, tensor: torch.Tensor, path: str) -> int:
        self.tensors.append(tensor)
        self.paths.append(path)
        return len(self.tensors) - 1

    def _tensor(self, value: torch.Tensor, path: str) -> int:
        if value.is_meta and not self._move and not self._as_they_lie:
            return self._add(value, path)  # only its form is wanted
        if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
            raise TypeError(
                f"{path or 'state'}: the job's state is made of dense tensors, not {value.layout}"
            )
        name = str(value.dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise TypeError(f"{path or 'state'}: tensors of {value.dtype} cannot be part of the job's state")
        plain = value.detach().resolve_conj().resolve_neg()
        known = (str(plain.device), plain.data_ptr(), plain.dtype, tuple(plain.shape), plain.stride())
        if plain.numel() and known in self._known:
            return self._known[known]
        self._known[known] = len(self.tensors)
        self._alive.append(plain)  # so that no later temporary gets the same address
        return self._add((plain.to("cpu") if self._move else plain).contiguous(), path)

    def _numpy(self, value: Any, path: str) -> dict[str, Any]:
        if value.dtype.kind not in "biufc":
            raise TypeError(
                f"{path or 'state'}: numpy values of {value.dtype} cannot be part of the job's state"
            )
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        node = {"index": self._add(torch.from_numpy(raw.copy()), path), "dtype": value.dtype.str}
        return (
            {"scalar": node}
            if isinstance(value, np.generic)
            else {"array": node | {"shape": list(value.shape)}}
        )


def _below(path: str, key: Any) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


def flatten(tree: Any, name: str = "", *, move: bool = True) -> tuple[bytes, list[torch.Tensor]]:
    """Cut a tree into a header and tensors.

    The tensors are contiguous, and on the CPU unless `move` is False. Those that already were share memory
    with the tree: send them before the tree changes, or use `pack`.

    Args:
        tree: dicts, lists and tuples of tensors and plain values.
        name: begins the paths in errors.
        move: bring tensors to the CPU; without it, tensors on the meta device are described, and come back as
            they are.

    Returns:
        The header (JSON), and the tensors in its order.

    Raises:
        TypeError: a value cannot be encoded; the path of the first one is named.
    """
    header, tensors, _ = flatten_numbered(tree, name, move=move)
    return header, tensors


def flatten_numbered(
    tree: Any, name: str = "", *, move: bool = True
) -> tuple[bytes, list[torch.Tensor], dict[int, int]]:
    """Cut a tree into a header and tensors, as `flatten` does, and number its tensors.

    Args:
        tree: dicts, lists and tuples of tensors and plain values.
        name: begins the paths in errors.
        move: bring tensors to the CPU; without it, tensors on the meta device are described, and come back as
            they are.

    Returns:
        The header, the tensors, and the number of each tensor object of the tree by its `id`.

    Raises:
        TypeError: a value cannot be encoded; the path of the first one is named.
    """
    encoder = _Encoder(move)
    return _header(encoder, tree, name), encoder.tensors, encoder.numbers


@dataclass(frozen=True, slots=True)
class Flattened:
    """A tree as it is sent: its header, its tensors as they lie in memory, and where each stands."""

    header: bytes
    tensors: list[torch.Tensor]
    paths: list[str]


def flatten_in_place(tree: Any) -> Flattened:
    """Flatten a tree whose tensors stay where they are, on their devices, without copies.

    A dense tensor whose dimensions lie in another order in memory (channels last, say) is described in that
    order, and comes back in it. One that has gaps, or covers memory twice, is copied. Raise TypeError as
    `flatten` does.
    """
    encoder = _Encoder(move=False, as_they_lie=True)
    return Flattened(_header(encoder, tree, ""), encoder.tensors, encoder.paths)


def _header(encoder: _Encoder, tree: Any, name: str) -> bytes:
    node = encoder.node(tree, name, 0)
    if len(encoder.tensors) > MAX_TENSORS:
        found = f"{len(encoder.tensors)} tensors"
        raise TypeError(f"{name or 'state'}: {found} are more than the {MAX_TENSORS} that a state may have")
    described = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in encoder.tensors]
    header = {"version": VERSION, "tensors": described, "tree": node}
    return json.dumps(header, separators=(",", ":"), allow_nan=False).encode("utf-8")


def _order_in_memory(tensor: torch.Tensor) -> list[int] | None:
    """Return the order of a dense tensor's dimensions in memory; None where it is the usual one."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda at: (-strides[at], at))
    return order if tensor.permute(order).is_contiguous() else None


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8 of shape (nbytes,); shared, whatever the dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def pack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A copy of `flatten`'s tensors in one uint8 buffer of shape (packed_size,), for `unpack`."""
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(_aligned(end))
        end = offsets[-1] + tensor.numel() * tensor.element_size()
    buffer = torch.zeros(end, dtype=torch.uint8)
    for offset, tensor in zip(offsets, tensors, strict=True):
        raw = as_bytes(tensor)
        buffer[offset : offset + raw.numel()] = raw
    return buffer


# ---- header and tensors -> tree


def _parse(header: bytes) -> dict[str, Any]:
    try:
        value = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"state header: no JSON: {error}") from error
    if not isinstance(value, dict) or set(value) != {"version", "tensors", "tree"}:
        raise ValueError("state header: expected an object of version, tensors and tree")
    if value["version"] != VERSION:
        raise ValueError(f"state header: version {value['version']!r}, this process reads version {VERSION}")
    return value


def _specs(described: Any, limit_bytes: int) -> list[TensorSpec]:
    if not isinstance(described, list):
        raise ValueError("state header: tensors is no list")
    if len(described) > MAX_TENSORS:
        raise ValueError(f"state header: {len(described)} tensors, more than {MAX_TENSORS}")
    specs, end = [], 0
    for i, entry in enumerate(described):
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list)):
            raise ValueError(f"state header: tensor {i} is not described by a dtype and a shape")
        name, shape = entry
        if not isinstance(name, str) or name not in DTYPES:
            raise ValueError(f"state header: tensor {i} has the unknown dtype {name!r}")
        possible = len(shape) <= 64 and all(type(size) is int and size >= 0 for size in shape)
        if not possible or math.prod(size for size in shape if size) > 1 << 60:
            raise ValueError(f"state header: tensor {i} has the impossible shape {shape!r}")
        dtype = DTYPES[name]
        nbytes = math.prod(shape) * dtype.itemsize
        specs.append(TensorSpec(dtype, tuple(shape), _aligned(end), nbytes))
        end = specs[-1].offset + nbytes
        if end > limit_bytes:
            raise ValueError(
                f"state header: tensors 0..{i} need {end} bytes, more than the limit of {limit_bytes}"
            )
    return specs


def specs(header: bytes, limit_bytes: int) -> list[TensorSpec]:
    """Return dtypes, shapes, and offsets in a packed buffer of the tensors of a header.

    Args:
        header: that `flatten` made.
        limit_bytes: most that a packed buffer may have.

    Raises:
        ValueError: the header is malformed, or more bytes would be needed.
    """
    return _specs(_parse(header)["tensors"], limit_bytes)


def packed_size(layout: list[TensorSpec]) -> int:
    """Bytes of the buffer that `pack` makes of these tensors."""
    return layout[-1].offset + layout[-1].nbytes if layout else 0


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of an outline: its number in the header, and the order of its dimensions there if unusual."""

    outline: torch.Tensor
    index: int
    order: list[int] | None

    def raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of a tensor of the same form with its dimensions in the header's order."""
        return tensor if self.order is None else tensor.permute(self.order)


class _Malformed(ValueError):
    """An error whose message already names the place in the header; the levels above pass it on."""


class _Decoder:
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.placed: list[Placed] = []

    def node(self, node: Any, depth: int) -> Any:
        if depth > 3 * _DEPTH:
            raise _Malformed(f"state header: nested deeper than {_DEPTH} levels")
        if node is None or isinstance(node, bool | int | float | str):
            return node
        if isinstance(node, list):
            return [self.node(item, depth + 1) for item in node]
        kind = next(iter(node), "")
        try:
            return self._tagged(kind, node, depth)
        except _Malformed:
            raise
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            raise _Malformed(f"state header: malformed {kind!r}: {error}") from error

    def _tagged(self, kind: str, node: dict[str, Any], depth: int) -> Any:
        value = node[kind]
        match kind:
            case "tuple":
                return tuple(self.node(item, depth + 1) for item in value)
            case "dict" | "ordered" | "counter" | "default":
                items = [(self.node(key, depth + 1), self.node(item, depth + 1)) for key, item in value]
                if kind == "dict":
                    return dict(items)
                if kind == "ordered":
                    return OrderedDict(items)
                if kind == "counter":
                    return Counter(dict(items))
                return defaultdict(_FACTORIES[node["factory"]], items)
            case "float":
                return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[value]
            case "bytes":
                return base64.b64decode(value, validate=True)
            case "tensor":
                return self._note(self._tensor(value), value, None)
            case "permuted":
                index, order = value
                back = [order.index(at) for at in range(len(order))]
                return self._note(self._tensor(index).permute(back), index, order)
            case "size":
                return torch.Size(value)
            case "dtype":
                return DTYPES[value]
            case "device":
                return torch.device(value)
            case "scalar" | "array":
                dtype = np.dtype(value["dtype"])
                if dtype.kind not in "biufc":
                    raise TypeError(f"numpy dtype {dtype}")
                found = self._tensor(value["index"])
                raw = bytes(found.numel()) if found.is_meta else found.numpy().tobytes()
                if kind == "scalar":
                    return np.frombuffer(raw, dtype, count=1)[0]
                return np.frombuffer(raw, dtype).reshape(value["shape"]).copy()
            case _:
                raise KeyError(f"unknown kind of value {kind!r}")

    def _note(self, found: torch.Tensor, index: int, order: list[int] | None) -> torch.Tensor:
        self.placed.append(Placed(found, index, order))
        return found

    def _tensor(self, index: Any) -> torch.Tensor:
        if type(index) is not int or not 0 <= index < len(self._tensors):
            raise IndexError(f"there is no tensor number {index!r}, only {len(self._tensors)}")
        return self._tensors[index]


def unflatten(header: bytes, tensors: list[torch.Tensor]) -> Any:
    """Return the tree again.

    Args:
        header: that `flatten` made.
        tensors: in the order of the header; the tree holds these.

    Raises:
        ValueError: header and tensors do not fit.
    """
    parsed = _parse(header)
    total = sum(t.numel() * t.element_size() + ALIGNMENT for t in tensors)
    layout = _specs(parsed["tensors"], total)
    found = [(t.dtype, tuple(t.shape)) for t in tensors]
    wanted = [(spec.dtype, spec.shape) for spec in layout]
    if found != wanted:
        i = next(
            (i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b),
            min(len(found), len(wanted)),
        )
        raise ValueError(
            f"state: tensor {i} does not fit the header ({len(found)} given, {len(wanted)} needed)"
        )
    return _Decoder(tensors).node(parsed["tree"], 0)


def outline(header: bytes, layout: list[TensorSpec]) -> tuple[Any, list[Placed]]:
    """Return the tree with tensors on the meta device and arrays of zeros, and where its tensors are.

    Args:
        header: of `flatten_in_place`.
        layout: of `specs`.

    Raises:
        ValueError: the header is malformed.
    """
    decoder = _Decoder([torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in layout])
    return decoder.node(_parse(header)["tree"], 0), decoder.placed


def unpack(header: bytes, buffer: torch.Tensor) -> Any:
    """Return the tree from a packed buffer.

    Args:
        header: that `flatten` made.
        buffer: contiguous uint8, shape (packed_size,); the tree's tensors are views into it.

    Raises:
        ValueError: header and buffer do not fit.
    """
    if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError("state: the packed buffer must be contiguous uint8 of shape (n,)")
    layout = specs(header, buffer.numel())
    if packed_size(layout) != buffer.numel():
        raise ValueError(
            f"state: the header describes {packed_size(layout)} bytes, the buffer has {buffer.numel()}"
        )
    tensors = [
        buffer[spec.offset : spec.offset + spec.nbytes].view(spec.dtype).view(spec.shape)
        if spec.nbytes
        else torch.empty(spec.shape, dtype=spec.dtype)
        for spec in layout
    ]
    return unflatten(header, tensors)
