"""The processes of one pod, which train one model together: their mesh, and what they decide together.

[Note: one decision] A step of a pod begins in all its processes or in none, and is committed by all or by
none: a process that went another way than the others would leave them in a collective of `fully_shard` for
ever, or with another state. Each decision has a name, and its outcome is written once, by whoever knows it
first: YES by the process that sees that all have said yes, NO by one that says no, or whose generation is
over while it waits. Each process follows what is written, whatever it has said itself. Between two decisions
nobody leaves: the body of a step runs to its end also when the generation is over, and is dropped there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from springtide.comm.process_group import Group
from springtide.errors import SpringtideError, UsageError
from springtide.pods.dims import MeshShape
from springtide.pods.grid import Grid
from springtide.pods.rendezvous import Meeting, await_all, meet

log = logging.getLogger(__name__)

_dist: Any = dist  # its type stubs lack the stores

_T = TypeVar("_T")
_YES, _NO = "yes", "no"
_FIRST_PAUSE, _LONGEST_PAUSE = 50e-6, 2e-3  # seconds between two looks at the store


class Pod:
    """The processes of this pod, as one of them sees the others. Used by the script's thread.

    Attributes:
        shape: of the mesh.
        mesh: torch's DeviceMesh.
        grid: the place in the present generation; None before the first one.
        row: the group of the processes with this local rank in the generation; None before the first one.
    """

    def __init__(
        self,
        shape: MeshShape,
        mesh: Any,
        meeting: Meeting,
        local_rank: int,
        seconds: float,
        over: Callable[[], str],
    ) -> None:
        """Make it of what `form_pod` has formed.

        Args:
            shape: of the mesh.
            mesh: torch's DeviceMesh.
            meeting: of the pod's processes.
            local_rank: of this process.
            seconds: that a process waits for the others' word, at most.
            over: returns why the present generation is over; "" while it goes on. Any thread's word.
        """
        self.shape, self.mesh = shape, mesh
        self.local_rank = local_rank
        self.grid: Grid | None = None
        self.row: Group | None = None
        self._meeting, self._store = meeting, meeting.decisions
        self._seconds, self._over = seconds, over
        self._generation = ""
        self._said: list[str] = []
        self._last = ""
        self._questions = 0

    @property
    def processes(self) -> int:
        """Return how many processes the pod has."""
        return self.shape.processes

    @property
    def counts(self) -> bool:
        """Return whether this process's samples count; others compute on the same ones where it does not."""
        return self.shape.counts(self.local_rank)

    @property
    def data_place(self) -> tuple[int, int, range]:
        """Return which part of a global batch this process takes, of how many, and which are the pod's."""
        degree = self.shape.data_degree
        pod, pods = (0, 1) if self.grid is None else (self.grid.pod, self.grid.pods)
        first = pod * degree
        return first + self.shape.data_index(self.local_rank), pods * degree, range(first, first + degree)

    # ---- the generation

    def enter(self, generation: str, grid: Grid, row: Group) -> None:
        """Take the place of this process in a new generation.

        Args:
            generation: its name, the same at all processes of the pod and different from all others.
            grid: where its processes stand.
            row: the group of those with this local rank.
        """
        self._generation, self.grid, self.row = generation, grid, row

    def begins(self, step: int) -> bool:
        """Decide whether all processes of the pod begin a step.

        Args:
            step: its number.
        """
        agreed = self._decide(f"{self._generation}/{step}/begin", True)
        if not agreed:
            time.sleep(_LONGEST_PAUSE)  # this process may not have heard yet that the generation is over
        return agreed

    def commits(self, step: int, able: bool) -> bool:
        """Decide whether all processes of the pod commit a step.

        Args:
            step: its number.
            able: all sums of the step have come here.
        """
        return self._decide(f"{self._generation}/{step}/commit", able)

    def _decide(self, name: str, yes: bool) -> bool:
        """Return the pod's decision; see [Note: one decision]."""
        return yes if self.processes == 1 else _served(lambda: self._decided(name, yes))

    def _decided(self, name: str, yes: bool) -> bool:
        store, key = self._store, f"decision/{name}"
        own = f"{key}/{self.local_rank}"
        if key != self._last:  # one that was decided may be asked for again, and has to be there then
            self._last = key
            self._forget()
            self._said.append(own)
            if self.local_rank == 0:
                self._said.append(key)
        if not yes:
            return self._write(key, _NO)
        store.set(own, "")
        if store.check([f"{key}/{rank}" for rank in range(self.processes)]):
            return self._write(key, _YES)
        pause, deadline = _FIRST_PAUSE, time.monotonic() + self._seconds
        while not store.check([key]):
            if self._over():
                return self._write(key, _NO)
            if time.monotonic() > deadline:
                begin = f"step {name.split('/')[-2]}: after {self._seconds:g} s"
                await_all(store, key, self.processes, 0.0, begin)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return self._read(key)

    def _write(self, key: str, outcome: str) -> bool:
        """Write a decision unless there is one; return what it is."""
        return bool(self._store.compare_set(key, "", outcome) == _YES.encode())

    def _read(self, key: str) -> bool:
        return bool(self._store.get(key) == _YES.encode())

    def _forget(self) -> None:
        """Delete what was said for the decision before the last: nobody asks for it any more, since each
        process had read it when it said something for the last one.
        """
        kept = 2 * (2 if self.local_rank == 0 else 1)
        while len(self._said) > kept:
            self._store.delete_key(self._said.pop(0))

    # ---- questions to others

    def ask_as_one(self, own: str, ask: Callable[[list[str]], str], check: Callable[[], None]) -> str:
        """Have the first process of the pod ask somebody for all of them, which all call this.

        Args:
            own: what this process has to say.
            ask: called in the first process, with what all have said, by local rank.
            check: called in the others while they wait for the answer; raises what ends that.

        Returns:
            The answer, in all processes.

        Raises:
            SpringtideError: a process of the pod did not come in time; it is named. Or the first one is gone.
        """
        return ask([own]) if self.processes == 1 else _served(lambda: self._asked(own, ask, check))

    def _asked(self, own: str, ask: Callable[[list[str]], str], check: Callable[[], None]) -> str:
        store, last = self._store, f"question/{self._questions}"
        self._questions += 1
        key = f"question/{self._questions}"
        store.set(f"{key}/{self.local_rank}", own)
        if self.local_rank > 0:
            # As long as the first process lives: whom it asks may have to wait for other pods.
            while not store.check([f"{key}/answer"]):
                check()
                time.sleep(_LONGEST_PAUSE)
            return str(store.get(f"{key}/answer").decode())
        begin = f"after {self._seconds:g} s"
        await_all(store, key, self.processes, time.monotonic() + self._seconds, begin)
        # Whoever asks anew has read the last answer.
        for name in (*range(self.processes), "answer"):
            store.delete_key(f"{last}/{name}")
        answer = ask([store.get(f"{key}/{rank}").decode() for rank in range(self.processes)])
        store.set(f"{key}/answer", answer)
        return answer

    # ---- sums in the pod

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the processes of the pod, which all call it.

        Args:
            value: float64 scalar.
        """
        if self.processes == 1:
            return value
        here = value.detach().to("cpu", torch.float64)
        dist.all_reduce(here)
        return here.to(value.device)

    def close(self) -> None:
        """End the pod's process group; the process is about to exit."""
        if self.row is not None:
            self.row.release()
        if dist.is_initialized():
            dist.destroy_process_group()


def _served(use: Callable[[], _T]) -> _T:
    """Return what a use of the pod's store returns. Raise SpringtideError when the store is gone."""
    try:
        return use()
    except SpringtideError:
        raise
    except RuntimeError as error:
        raise SpringtideError(
            f"the process with local rank 0 of this pod is gone, and with it the pod: {error}"
        ) from None


def form_pod(
    shape: MeshShape,
    *,
    folder: str,
    local_rank: int,
    device: str,
    form_seconds: float,
    wait_seconds: float,
    over: Callable[[], str],
) -> Pod:
    """Form the pod's process group and its mesh.

    Args:
        shape: of the mesh.
        folder: that the launcher has made for the pod.
        local_rank: of this process.
        device: type of the mesh's devices, "cpu" or "cuda".
        form_seconds: to wait for the pod's other processes, at most.
        wait_seconds: limit of a collective in the pod, and of the wait for a decision.
        over: as for `Pod`.

    Raises:
        UsageError: the script has a process group already, or the processes want different meshes.
        SpringtideError: a process of the pod did not come; it is named.
    """
    if dist.is_initialized():
        raise UsageError(
            "mesh(): the script has called torch.distributed.init_process_group(): leave that to mesh(), "
            "which makes the pod's group the default one"
        )
    from torch.distributed.device_mesh import init_device_mesh  # takes a second to import

    meeting = meet(folder, local_rank, shape.processes, form_seconds)
    store = meeting.decisions
    store.set(f"shape/{local_rank}", f"{device} {shape}")
    shapes = [store.get(f"shape/{rank}").decode() for rank in range(shape.processes)]
    if len(set(shapes)) > 1:
        raise UsageError(
            f"mesh(): the processes of the pod ask for different meshes: {', '.join(shapes)}; all must make "
            "the same call"
        )
    # The processes of a pod share its network: their connections stay on the loopback interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        store=_dist.PrefixStore("group", meeting.group),
        rank=local_rank,
        world_size=shape.processes,
        timeout=timedelta(seconds=wait_seconds),
    )
    mesh = init_device_mesh(device, shape.sizes, mesh_dim_names=shape.names)
    log.info(
        "pod of %d processes: this is local rank %d of %s on %s", shape.processes, local_rank, shape, device
    )
    return Pod(shape, mesh, meeting, local_rank, wait_seconds, over)
