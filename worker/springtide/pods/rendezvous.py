"""How the processes of one pod find each other: a store on the loopback address, a file that says where.

`springtide launch` makes the folder, and looks into it: once a process has begun to form the pod's group, the
pod's processes live and end together.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from springtide.errors import SpringtideError
from springtide.launch.process_env import TOGETHER

_PORT = "port"
_PAUSE_SECONDS = 0.01

Store = Any
_dist: Any = dist  # its type stubs lack the stores


@dataclass(frozen=True, slots=True)
class Meeting:
    """The store that the processes of a pod share.

    Attributes:
        group: a connection for the process group.
        decisions: another one, for what the pod decides.
        server: what serves it, in the process with local rank 0, as long as this object lives.
    """

    group: Store
    decisions: Store
    server: Store | None = None


def meet(folder: str, local_rank: int, processes: int, seconds: float) -> Meeting:
    """Connect the processes of a pod.

    Args:
        folder: that the launcher has made for the pod; "" without a launcher.
        local_rank: of this process.
        processes: of the pod.
        seconds: to wait for the others, at most.

    Returns:
        Their store.

    Raises:
        SpringtideError: there is no launcher, or a process of the pod did not come; it is named.
    """
    if processes == 1:
        store = _dist.HashStore()
        return Meeting(store, store)
    if not folder:
        raise SpringtideError(
            f"mesh(): the {processes} processes of a pod are started by `springtide launch`, which this one "
            "was not: set spec.workers.processesPerPod, and leave LOCAL_WORLD_SIZE alone"
        )
    (Path(folder) / TOGETHER).touch()
    deadline = time.monotonic() + seconds
    server = None
    if local_rank == 0:
        server = _serve(Path(folder) / _PORT, processes, seconds)
    port = _read_port(Path(folder) / _PORT, deadline, seconds)
    group, decisions = _connect(port, processes, seconds), _connect(port, processes, seconds)
    decisions.set(f"here/{local_rank}", "")
    await_all(decisions, "here", processes, deadline, f"mesh(): after {seconds:g} s")
    return Meeting(group, decisions, server)


def await_all(store: Store, key: str, processes: int, deadline: float, begin: str) -> None:
    """Wait until each process of the pod has set its key.

    Args:
        store: of the pod.
        key: what the keys begin with; a slash and the local rank follow.
        processes: of the pod.
        deadline: monotonic seconds.
        begin: of the error's text.

    Raises:
        SpringtideError: the deadline is over; the processes that did not come are named.
    """
    keys = {rank: f"{key}/{rank}" for rank in range(processes)}
    while not store.check(list(keys.values())):
        if time.monotonic() > deadline:
            missing = [rank for rank, name in keys.items() if not store.check([name])]
            raise SpringtideError(
                f"{begin} the process with local rank {', '.join(map(str, missing))} of this pod has not "
                "come: all processes of a pod must make the same calls"
            )
        time.sleep(_PAUSE_SECONDS)


def _serve(path: Path, processes: int, seconds: float) -> Store:
    """Serve the pod's store on a free port of the loopback address, and write down which."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = _dist.TCPStore(
        "127.0.0.1",
        port,
        processes,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
        master_listen_fd=listener.detach(),
    )
    partial = path.with_suffix(".new")
    partial.write_text(str(port))
    os.replace(partial, path)
    return store


def _connect(port: int, processes: int, seconds: float) -> Store:
    return _dist.TCPStore(
        "127.0.0.1",
        port,
        processes,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
    )


def _read_port(path: Path, deadline: float, seconds: float) -> int:
    while True:
        try:
            return int(path.read_text())
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise SpringtideError(
                    f"mesh(): after {seconds:g} s the process with local rank 0 of this pod has not called "
                    "it: all processes of a pod must"
                ) from None
            time.sleep(_PAUSE_SECONDS)
