"""Find free ports of this machine."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 10_000


def free_port() -> int:
    """Return a port that nobody listens on now, on any address.

    It is none of those that the kernel gives to connections, where there are others: one of these may be
    taken by a connection before the process that it is meant for has begun to listen.

    Raises:
        OSError: No port is free.
    """
    end = max(_FIRST, int(_EPHEMERAL.read_text().split()[0]))
    for port in (*random.sample(range(_FIRST, end), end - _FIRST), 0):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no port of this machine is free")
