"""Springtide: elastic data-parallel training. The same script trains alone and as a member of a job that
rises and falls.

    springtide.init()
    model, optimizer = springtide.distribute(model, optimizer, scheduler=scheduler)
    for batch in springtide.batches(dataset, batch_size=256, epochs=10, seed=0):
        with springtide.step():
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

A body of `step()` happens as a whole or not at all: when members are lost, it is left, put back, and its
samples are dealt again. The global batch stays what `batch_size` says, whatever the number of workers.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING

from springtide.elastic.termination import catch_early
from springtide.errors import GenerationChanged, SpringtideError, UsageError

if TYPE_CHECKING:
    from types import ModuleType

    from springtide import data as data
    from springtide import loggers as loggers
    from springtide.api import (
        batches,
        distribute,
        init,
        local_rank,
        local_world_size,
        mesh,
        process_group,
        rank,
        report,
        retry,
        set_total_steps,
        step,
        world_size,
    )
    from springtide.elastic.ranks import on_ranks, rank_zero_only
    from springtide.embedding.modules import Embedding, EmbeddingBag

__version__ = "0.1.0"

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "GenerationChanged",
    "SpringtideError",
    "UsageError",
    "__version__",
    "batches",
    "distribute",
    "init",
    "local_rank",
    "local_world_size",
    "mesh",
    "on_ranks",
    "process_group",
    "rank",
    "rank_zero_only",
    "report",
    "retry",
    "set_total_steps",
    "step",
    "world_size",
]


catch_early()

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """The training functions are imported when they are first used, so that what trains nothing
        (`springtide launch`) does not import torch.
        """
        if name in ("api", "data", "loggers"):
            return _import(f"springtide.{name}")
        if name not in __all__:
            raise AttributeError(f"module 'springtide' has no attribute {name!r}")
        home = "springtide.api"
        if name in ("on_ranks", "rank_zero_only"):
            home = "springtide.elastic.ranks"
        elif name.startswith("Embedding"):
            home = "springtide.embedding.modules"
        value = getattr(_import(home), name)
        globals()[name] = value
        return value

    def _import(module: str) -> ModuleType:
        """Import a module of the library without a look for garbage meanwhile.

        It brings torch's compiler, as the first optimizer would. That makes objects by the hundred thousand,
        all of which stay: Python would search them and torch's own again and again, for a third of the time
        until a worker can join.
        """
        collects = gc.isenabled()
        gc.disable()
        try:
            return importlib.import_module(module)
        finally:
            if collects:
                gc.enable()
