"""Congestion control of what carries parameters or gradients, where the machine's is made for longer paths.

BBR (Cardwell et al., BBR: Congestion-Based Congestion Control, 2016) sends at a pace, by timers, as fast as
it believes the path to be. Over loopback that takes a fifth to two fifths of the throughput, another part on
each connection.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Final

NEAR_SECONDS: Final = 0.001
"""A shorter round trip does not leave the data centre."""
_PACED: Final = "bbr"
INSTEAD: Final = ("cubic", "reno")
"""Algorithms without pacing, the best first."""
_NAME_BYTES: Final = 16
_MIN_RTT_AT: Final = 148  # of struct tcp_info: uint32, microseconds (Linux 4.6)
_UNKNOWN: Final = 0xFFFFFFFF


def instead_of(current: str, round_trip: float | None) -> tuple[str, ...]:
    """Return the algorithms to ask the kernel for, the best first. PURE.

    Args:
        current: the connection's.
        round_trip: the shortest one so far, in seconds; None: it is not known.

    Returns:
        Their names; none: it stays as it is.
    """
    near = round_trip is not None and round_trip < NEAR_SECONDS
    return INSTEAD if near and current.startswith(_PACED) else ()


def choose(sock: socket.socket) -> str:
    """Set the congestion control of a connection that has carried something; return its name, "" for what is
    no TCP.

    A kernel may keep names for administrators: without one that it allows, all stays as it is.
    """
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    except OSError:
        return ""
    current = raw.rstrip(b"\0").decode("ascii", "replace")
    for name in instead_of(current, round_trip_of(sock)):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            return name
    return current


def round_trip_of(sock: socket.socket) -> float | None:
    """Return the shortest round trip of a connection so far, in seconds; None: not known."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT_AT + 4)
    except OSError:
        return None
    if len(info) < _MIN_RTT_AT + 4:
        return None
    (microseconds,) = struct.unpack_from("I", info, _MIN_RTT_AT)
    return None if microseconds == _UNKNOWN else microseconds / 1e6
