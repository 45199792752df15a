"""The dimensions of a pod's mesh: which processes take samples of their own, which the same ones. PURE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

DATA = ("dp", "dp_replicate", "dp_shard")
"""Along these, processes take different samples, and `fully_shard` averages their gradients."""
MODEL = ("tp",)
"""Along these, processes compute together on the same samples."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Names and sizes of a mesh's dimensions; processes are numbered row by row, as torch numbers them."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def processes(self) -> int:
        """Return how many processes the mesh has."""
        return math.prod(self.sizes)

    @property
    def data_degree(self) -> int:
        """Return how many processes of the pod take samples of their own."""
        return math.prod(size for name, size in zip(self.names, self.sizes, strict=True) if name in DATA)

    def coordinate(self, local_rank: int) -> dict[str, int]:
        """Return where a process stands, by the names of the dimensions."""
        found = {}
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            local_rank, found[name] = divmod(local_rank, size)
        return {name: found[name] for name in self.names}

    def data_index(self, local_rank: int) -> int:
        """Return which of the pod's parts of a global batch a process computes."""
        at, index = self.coordinate(local_rank), 0
        for name, size in zip(self.names, self.sizes, strict=True):
            if name in DATA:
                index = index * size + at[name]
        return index

    def counts(self, local_rank: int) -> bool:
        """Return whether a process's samples count: of those that compute on the same, the first does."""
        return not any(place for name, place in self.coordinate(local_rank).items() if name not in DATA)

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in zip(self.names, self.sizes, strict=True))


def mesh_shape(names: Sequence[str] | str, sizes: Sequence[int] | int | None, processes: int) -> MeshShape:
    """Check the arguments of `springtide.mesh()`.

    Args:
        names: of the dimensions; one name as a text, too.
        sizes: of the dimensions; None: one dimension with all processes.
        processes: of the pod.

    Returns:
        The shape.

    Raises:
        ValueError: the dimensions cannot be those of the pod's mesh; the text says what to do.
    """
    chosen = (names,) if isinstance(names, str) else tuple(names)
    known = (*DATA, *MODEL)
    if not chosen or len(set(chosen)) < len(chosen) or any(name not in known for name in chosen):
        raise ValueError(
            f"mesh(): dimensions are named {', '.join(known)}, each once, got {chosen!r}: along dp, "
            "dp_replicate and dp_shard processes take different samples, along tp the same ones"
        )
    if "dp" in chosen and len(set(chosen) & set(DATA)) > 1:
        raise ValueError(f"mesh(): dp stands alone, or dp_replicate and dp_shard together, got {chosen!r}")
    if sizes is None:
        if len(chosen) > 1:
            raise ValueError(f"mesh(): {chosen!r} needs the sizes too, as in mesh({chosen!r}, (2, 2))")
        sizes = processes
    wanted = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    whole = all(type(size) is int and size >= 1 for size in wanted)
    if not whole or len(wanted) != len(chosen) or math.prod(wanted) != processes:
        raise ValueError(
            f"mesh(): the sizes {wanted!r} of {chosen!r} must be {len(chosen)} numbers whose product is the "
            f"{processes} processes of this pod (spec.workers.processesPerPod)"
        )
    shape = MeshShape(chosen, wanted)
    by_name = dict(zip(chosen, wanted, strict=True))
    if by_name.get("dp_replicate", 1) > 1 and by_name.get("dp_shard", 1) == 1:
        raise ValueError(
            "mesh(): dp_replicate alone divides nothing: leave the mesh out, since processes without one are "
            "workers of their own, or give dp_shard at least 2"
        )
    return shape
