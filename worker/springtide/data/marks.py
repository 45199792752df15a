"""Marks of a few samples, by which members find that they read different data, though as much of it.

The ledger proves that every number of a sample was trained once, and nothing about what stands behind the
number: where two nodes list the same files in another order, each worker trains something else. So members
compare marks of a few samples. Labels, tokens, strings and images of bytes have to be equal to the bit. Of
floating numbers a mark has their size and two random projections, which must be nearly equal: a resampling or
a Fourier transform rounds otherwise on another kind of CPU, and is the same sample.

Why two projections tell samples apart: Achlioptas, Database-friendly Random Projections, JCSS 2003.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from springtide.data.mixing import mix, mix_tensor

MAX_MARKED = 32
"""Samples that members compare at most."""
_UNIT = 1_000_000
_NEAR = 0.01
_DEPTH = 20
_PLAIN = (str, bytes, int, float, type(None))
"""Types whose `repr` gives an order that is the same in every process."""

Mark = list[int]
"""[exact, size, projection, projection] of a sample: a hash, and three numbers in millionths. JSON-able."""
Marks = dict[str, Mark]
"""Marks by the sample's number, as text: JSON has no other keys."""


def marked_ids(size: int, count: int) -> list[int]:
    """Return the numbers of the samples that are compared, the same on all members.

    A smaller count gives the first of them. They do not depend on the seed, so that a script with a loop for
    each epoch, and a seed for each loop, compares the same ones on a worker that joins later.

    Args:
        size: samples of the data set.
        count: how many are wanted.
    """
    found: dict[int, None] = {}
    number = 0
    while len(found) < min(count, size):
        found[mix(0x5A3D, size, number) % size] = None
        number += 1
    return list(found)


@dataclass(slots=True)
class _Reading:
    """Digest, size and projections of one sample, as far as it has been read."""

    digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=8))
    size: float = 0.0
    projections: list[float] = field(default_factory=lambda: [0.0, 0.0])
    left_out: list[str] = field(default_factory=list)

    def add(self, kind: str, data: bytes | memoryview = b"") -> None:
        """Count exact bytes, under a name for their kind."""
        self.digest.update(f"{kind}:{len(data)};".encode())
        self.digest.update(data)

    def add_floats(self, values: np.ndarray[Any, Any]) -> None:
        """Count floating numbers; float64, shape (n,)."""
        finite = np.isfinite(values)
        if not finite.all():
            kinds = np.isnan(values) + 2 * np.isposinf(values) + 3 * np.isneginf(values)
            self.add("not finite", kinds.astype(np.uint8).tobytes())
            values = np.where(finite, values, 0.0)
        root = math.sqrt(float(values @ values) / values.size) if values.size else 0.0
        if root == 0.0 or not math.isfinite(root):
            self.add("no size")
            return
        self.size += math.log(root)
        for number in range(len(self.projections)):
            product = float(values @ _weights(values.size, number))
            self.projections[number] += product / (root * math.sqrt(values.size))


def mark(sample: Any) -> tuple[Mark, list[str]]:
    """Return the mark of a sample, and the types of what is in it and was left out.

    Args:
        sample: tensors, numpy arrays, what numpy reads as one (images), numbers, strings, bytes, None, and
            mappings, sequences, sets and dataclasses of them. Of anything else only the type counts.
    """
    reading = _Reading()
    _look(sample, reading, 0)
    exact = int.from_bytes(reading.digest.digest(), "little") >> 1
    numbers = [reading.size, *reading.projections]
    return [exact, *(round(value * _UNIT) for value in numbers)], reading.left_out


def same_mark(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two marks may be of the same sample.

    Args:
        one: a mark: its hash first, then the projections of its floating numbers.
        other: another member's, of the same length.

    Returns:
        True when the hashes are equal, and the projections as near as two machines' arithmetic may differ.
    """
    near = all(abs(a - b) <= _NEAR * _UNIT for a, b in zip(one[1:], other[1:], strict=True))
    return one[0] == other[0] and near


def differing(mine: Mapping[str, Sequence[int]], theirs: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the numbers of the samples that both have marks of, and not the same.

    Args:
        mine: marks by the number of the sample, in decimal.
        theirs: another member's.

    Returns:
        The numbers in ascending order; empty when the two have no sample in common.
    """
    both = [number for number in mine if number in theirs]
    return sorted(int(number) for number in both if not same_mark(mine[number], theirs[number]))


def is_other_data(wrong: Sequence[int], mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Return whether so many samples differ that the order must be another.

    One in a few may be read in a way that is random, seldom, and by no generator that can be seeded.

    Args:
        wrong: numbers of the samples that differ, as `differing` returns them.
        mine: marks by the number of the sample.
        theirs: another member's.

    Returns:
        True from half of the samples on that both have marks of.
    """
    return 2 * len(wrong) >= max(1, sum(number in theirs for number in mine))


@dataclass(frozen=True, slots=True)
class Row:
    """One member's report on its data.

    Attributes:
        held: it held the job's state when the generation began.
        plan: the fingerprint of its loop, without marks.
    """

    stage: int
    held: bool
    plan: Mapping[str, Any]
    marks: Mapping[str, Sequence[int]]

    def fits(self, other: Row) -> bool:
        """Return whether both read the same data with the same arguments, or are in different loops."""
        if self.stage != other.stage:
            return True
        wrong = differing(self.marks, other.marks)
        return self.plan == other.plan and not (wrong and is_other_data(wrong, self.marks, other.marks))


def reference(rows: Sequence[Row]) -> int:
    """Return the rank whose data counts: of the members that held the state, or all if none did, the first
    that most of them agree with.
    """
    candidates = [rank for rank, row in enumerate(rows) if row.held] or list(range(len(rows)))
    kinds: dict[str, int] = {}  # of rows that are equal -> the first of them
    counts: Counter[int] = Counter()
    for rank in candidates:
        counts[kinds.setdefault(repr(dataclasses.replace(rows[rank], held=True)), rank)] += 1
    votes = {
        first: sum(count for other, count in counts.items() if rows[first].fits(rows[other]))
        for first in counts
    }
    return max(votes, key=lambda first: (votes[first], -first))


def _look(value: Any, reading: _Reading, depth: int) -> None:
    kind = type(value)
    if depth > _DEPTH:
        reading.left_out.append(f"{kind.__qualname__} at depth {depth}")
    elif value is None or isinstance(value, bool | int):
        reading.add("whole", repr(value).encode())
    elif isinstance(value, float):
        reading.add("float")
        reading.add_floats(np.array([value]))
    elif isinstance(value, complex):
        reading.add("complex")
        reading.add_floats(np.array([value.real, value.imag]))
    elif isinstance(value, str):
        # The same file may lie below another folder.
        reading.add("str", (value.rpartition("/")[2] if value.startswith("/") else value).encode())
    elif isinstance(value, bytes | bytearray | memoryview):
        reading.add("bytes", bytes(value))
    elif isinstance(value, torch.Tensor):
        _look_at_tensor(value, reading)
    elif isinstance(value, np.ndarray | np.generic):
        _look_at_array(np.asarray(value), reading, depth)
    elif isinstance(value, Mapping) and all(isinstance(key, _PLAIN) for key in value):
        reading.add("mapping", str(len(value)).encode())
        for key in sorted(value, key=repr):
            _look(key, reading, depth + 1)
            _look(value[key], reading, depth + 1)
    elif isinstance(value, list | tuple):
        reading.add("sequence", str(len(value)).encode())
        for item in value:
            _look(item, reading, depth + 1)
    elif isinstance(value, set | frozenset) and all(isinstance(item, _PLAIN) for item in value):
        _look(sorted(value, key=repr), reading, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _look({item.name: getattr(value, item.name) for item in dataclasses.fields(value)}, reading, depth)
    elif hasattr(kind, "__array_interface__"):
        _look_at_array(np.asarray(value), reading, depth)
    else:
        reading.add("type", kind.__qualname__.encode())
        reading.left_out.append(kind.__qualname__)


def _look_at_tensor(tensor: torch.Tensor, reading: _Reading) -> None:
    reading.add("tensor", f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        reading.left_out.append(f"tensor of {tensor.layout}")
        return
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if plain.is_complex():
        plain = torch.view_as_real(plain.to(torch.complex128))
    if plain.is_floating_point():
        reading.add_floats(plain.reshape(-1).double().numpy())
    else:
        reading.add("bytes", plain.reshape(-1).view(torch.uint8).numpy().data)


def _look_at_array(array: np.ndarray[Any, Any], reading: _Reading, depth: int) -> None:
    reading.add("array", f"{array.dtype.str}{array.shape}".encode())
    if array.dtype.kind == "O":
        _look(array.reshape(-1).tolist(), reading, depth + 1)
    elif array.dtype.kind in "fc":
        plain = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64).reshape(-1)
        reading.add_floats(plain.view(np.float64))
    elif array.dtype.hasobject:
        reading.left_out.append(f"array of {array.dtype}")
    else:
        reading.add("bytes", np.ascontiguousarray(array).tobytes())


def _weights(count: int, number: int) -> np.ndarray[Any, Any]:
    """Return `count` numbers, random by place, of mean 0 and variance 1; float64. number: of the row."""
    mixed = mix_tensor(torch.arange(count) ^ (number << 60))
    return (mixed.double() * (math.sqrt(3.0) * 2.0**-63)).numpy()
