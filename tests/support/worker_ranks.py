"""Several workers as threads of the test's own process, with real groups and without a coordinator.

Each rank has a runtime of its own: what a script says through `springtide.` it says here through a `Rank`.
Bodies must draw no random numbers: the process has one generator.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from worker_groups import form_groups, together

from springtide.comm.process_group import Group
from springtide.comm.store import StreamStore
from springtide.data.loop import plan_loop
from springtide.elastic.async_loop import AsyncLoop
from springtide.elastic.runtime import Runtime
from springtide.ps.backend import backend_for
from springtide.ps.forward_waits import wait_for_values
from springtide.ps.generation import GenerationStart
from springtide.ps.host_memory import Copier
from springtide.settings import Settings
from springtide.train_step.options import TrainerOptions
from springtide.train_step.trainer import Trainer
from springtide.train_step.validation import declare

_seeding = threading.Lock()


@contextlib.contextmanager
def seeded(number: int) -> Iterator[None]:
    """Random numbers that belong to the caller, whatever other ranks draw."""
    with _seeding:
        torch.manual_seed(number)
        yield


class Rank:
    """One worker: rank, and the library's calls."""

    def __init__(self, group: Group, settings: Mapping[str, Any], ready: threading.Barrier) -> None:
        self.rank = group.rank
        self._ready = ready
        self.copier: Copier | None = None
        self.runtime = Runtime(Settings(**settings))
        self.runtime.state.use_group(group)

    @property
    def trainer(self) -> Trainer:
        assert self.runtime.trainer is not None
        return self.runtime.trainer

    @property
    def step_number(self) -> int:
        """Return the number of the step that the running body would commit, from 1."""
        return self.runtime.position.cursor.step + 1

    def distribute(
        self,
        model: Any,
        optimizer: Any,
        *,
        clip_norm: float | None = None,
        buffers: Mapping[str, str] | None = None,
        **tracked: Any,
    ) -> None:
        settings = self.runtime.settings
        exact = bool(settings.logical_workers)
        on_servers = settings.strategy != "AllReduce"
        declared = declare(
            model,
            optimizer,
            clip_norm,
            tracked,
            buffers=buffers,
            in_job=True,
            exact=exact,
            compression=settings.compression,
            strategy=settings.strategy,
            consistency=settings.consistency,
            shard=settings.shard,
        )
        options = TrainerOptions(
            multi_step=declared.multi_step,
            clip_norm=clip_norm,
            rules=declared.rules,
            bucket_bytes=2048,
            logical_workers=settings.logical_workers,
            compression=settings.sum_compression,
            make_servers=backend_for(settings, self.copier) if on_servers else None,
        )
        trainer = Trainer(declared.models, declared.optimizers, tracked, options)
        self.runtime.trainers.install(trainer)
        for index, handle in self.trainer.tables.items():
            handle.read = partial(self.runtime.values.rows, index)
            handle.read_all = partial(self.runtime.values.all_rows, index)
        if settings.strategy == "ParameterServer":
            wait_for_values(declared.models, self.runtime.values.settle, self.trainer.pending)
        servers = self.trainer.servers
        if servers is not None and servers.asynchronous and servers.async_backend is not None:
            loop = AsyncLoop(self.runtime.async_loop_parts(), servers.async_backend, tracked)
            self.runtime.consistencies.use(loop, "")
        # Bodies seed the process's generator: models have to be made before.
        self._ready.wait(120)

    def enter_servers(self, addresses: list[str], store: StreamStore) -> None:
        """Begin training on these parameter servers from rank 0's parameters; all ranks share the store."""
        group, servers = self.runtime.group, self.trainer.servers
        assert servers is not None
        store.set(f"id/{group.rank}", self.runtime.settings.process_id.encode())
        members = tuple(store.get(f"id/{rank}").decode() for rank in range(group.size))
        start = GenerationStart(
            (1, 0, 1), members, dict(zip(addresses, addresses, strict=True)), frozenset(), 0
        )
        servers.begin_generation(start, group, store, holds=group.rank == 0, leader=0, fresh=True)
        self._ready.wait(120)
        servers.resolve()

    def batches(self, dataset: Any, **arguments: Any) -> Iterator[Any]:
        return self.runtime.loops.batches(plan_loop(dataset, **arguments))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.runtime.steps.enter()
        try:
            yield
        except BaseException as error:
            if not self.runtime.steps.leave(error):
                raise
            self._settle()
        else:
            self.runtime.steps.leave(None)

    def report(self, **values: Any) -> None:
        self.runtime.report(values)

    def drop(self, reason: str = "the test says so") -> None:
        """Drop the running body; all ranks have to do so at the same place of it."""
        self.trainer.drop(reason)

    def _settle(self) -> None:
        """A dropped body is followed by another group, which has waited for the old one's sums; here not."""
        if self.trainer.failure is not None:
            raise RuntimeError(f"rank {self.rank}: {self.trainer.failure.detail}")
        deadline = time.monotonic() + 30
        while not self.runtime.group.is_idle:
            assert time.monotonic() < deadline, "the sums of a dropped body did not end in 30 s"
            time.sleep(0.001)


def on_ranks(size: int, script: Callable[[Rank], Any], **settings: Any) -> list[Any]:
    """Run the script on `size` ranks at once; return its results by rank, or raise the first exception."""
    ready = threading.Barrier(size)
    ranks = [Rank(group, settings, ready) for group in form_groups(size)]

    def run(rank: Rank) -> Any:
        try:
            return script(rank)
        except BaseException as error:
            failures.append(error)
            # So that nobody waits for it.
            ready.abort()
            rank.runtime.group.shut()
            raise

    failures: list[BaseException] = []
    try:
        return together([lambda rank=rank: run(rank) for rank in ranks])
    except BaseException:
        raise failures[0] from None
    finally:
        for rank in ranks:
            rank.runtime.close()
