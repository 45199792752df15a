"""Which gradient lies where: one bucket layout for the life of the job, from names and sizes alone.

Parameters are taken in reverse order, because backward produces the last ones first. Nothing that differs
between members or changes over time (arrival order, the first batch) has a part in it, so that members that
joined at any time reduce the same buckets.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_ALIGN_BYTES = 64
_FIRST_BUCKET_BYTES = 1 << 20
_SMALLEST_BYTES = 2 << 20
_BUCKETS = 8


@dataclass(frozen=True, slots=True)
class Field:
    """Shape and type of one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def field_of(name: str, tensor: torch.Tensor) -> Field:
    """Return the name, shape and dtype of a tensor.

    Args:
        name: of the parameter or buffer.
        tensor: its value.
    """
    return Field(name, tuple(tensor.shape), tensor.dtype)


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of one parameter's gradient: bucket, offset in elements."""

    bucket: int
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """slots: by parameter. sizes (in elements), dtypes and members (parameter indices): by bucket."""

    fields: tuple[Field, ...]
    slots: tuple[Slot, ...]
    sizes: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    members: tuple[tuple[int, ...], ...]


def most_bucket_bytes(total: int, device: str) -> int:
    """Return the bytes of the largest buckets that a model's gradients are cut into by themselves.

    The last bucket leaves when backward is over, and all wait for its sum, so on the CPU it is a small part
    of the model. A device's sums cost a launch each, and are not cut further than the job asks.

    Args:
        total: bytes of all gradients.
        device: type of the device that has them.
    """
    return max(_SMALLEST_BYTES, total // _BUCKETS) if device == "cpu" else 1 << 62


def plan_layout(fields: Sequence[Field], bucket_bytes: int, align_elements: int = 1) -> Layout:
    """Fill buckets of one dtype each, the first of each dtype smaller so that sending begins early.

    Args:
        fields: of the parameters, in the model's order.
        bucket_bytes: of a bucket, about.
        align_elements: each parameter begins at a multiple of it, and of 64 bytes.

    Returns:
        The layout, the same for the same arguments.

    Raises:
        ValueError: `bucket_bytes` is below 1, or two fields share a name.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    names = [field.name for field in fields]
    if len(set(names)) != len(names):
        raise ValueError(
            f"parameters share names: {sorted({name for name in names if names.count(name) > 1})}"
        )
    slots: dict[int, Slot] = {}
    sizes: list[int] = []
    dtypes: list[torch.dtype] = []
    members: list[list[int]] = []
    open_bucket: dict[torch.dtype, int] = {}
    limits: list[int] = []
    for index in reversed(range(len(fields))):
        field = fields[index]
        align = math.lcm(align_elements, max(1, _ALIGN_BYTES // field.dtype.itemsize))
        bucket = open_bucket.get(field.dtype)
        if bucket is None or sizes[bucket] * field.dtype.itemsize >= limits[bucket]:
            limits.append(min(_FIRST_BUCKET_BYTES, bucket_bytes) if bucket is None else bucket_bytes)
            bucket = open_bucket[field.dtype] = len(sizes)
            sizes.append(0)
            dtypes.append(field.dtype)
            members.append([])
        slots[index] = Slot(bucket, sizes[bucket])
        sizes[bucket] += -(-field.numel // align) * align
        members[bucket].append(index)
    return Layout(
        tuple(fields),
        tuple(slots[index] for index in range(len(fields))),
        tuple(sizes),
        tuple(dtypes),
        tuple(tuple(indices) for indices in members),
    )


def layout_hash(layout: Layout, buffers: Sequence[Field], extra: str = "") -> str:
    """Return a hex digest that is equal exactly for members that reduce the same things in the same places.

    Args:
        layout: of the gradients.
        buffers: the model's buffers, which are reduced too.
        extra: anything else that all members must agree on.
    """
    digest = hashlib.sha256()
    for kind, fields in (("parameter", layout.fields), ("buffer", tuple(buffers))):
        for field in fields:
            digest.update(f"{kind} {field.name} {field.shape} {field.dtype}\n".encode())
    digest.update(f"{[(slot.bucket, slot.offset) for slot in layout.slots]} {layout.sizes}\n{extra}".encode())
    return digest.hexdigest()[:32]
