"""A group as a process group of torch's, so that `torch.distributed` functions take it as `group=`."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from springtide.comm.process_group import Group
from springtide.errors import SpringtideError

_numbers = itertools.count()
_Dist: Any = dist
_Pg: Any = dist.ProcessGroup
_c10d: Any = c10d


class Handle:
    """`group` is what torch.distributed takes; `close` makes torch forget it.

    torch has no public way to give it a group that another store formed; where this version lacks what is
    needed, SpringtideError names it.
    """

    def __init__(self, source: Group, timeout_seconds: float) -> None:
        self.source = source
        self.name = f"springtide-{next(_numbers)}"
        store = _Dist.HashStore()  # the group is formed: it is not asked any more
        backend = source.backend
        if backend is None:
            timeout = timedelta(seconds=timeout_seconds)
            backend = _Dist.ProcessGroupGloo(store, 0, 1, timeout)
        try:
            group = _Pg(store, source.rank, source.size)
            kind = _Pg.BackendType.GLOO
            for device in ("cpu", "cuda"):
                group._register_backend(torch.device(device), kind, backend)
            group._set_default_backend(kind)
            group._set_group_name(self.name)
            world = _c10d._world
            world.pg_map[group] = ("gloo", store)
            world.pg_names[group] = self.name
            world.pg_group_ranks[group] = {rank: rank for rank in range(source.size)}
            world.pg_backend_config[group] = "cpu:gloo,cuda:gloo"
            _c10d._register_process_group(self.name, group)
        except AttributeError as error:
            raise SpringtideError(
                f"process_group() does not know torch {torch.__version__}: {error}; use report() or"
                " batches(..., train=False)"
            ) from None
        self.group: dist.ProcessGroup = group

    def close(self) -> None:
        world = _c10d._world
        for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
            table.pop(self.group, None)
        _c10d._unregister_process_group(self.name)
