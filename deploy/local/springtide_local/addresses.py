"""Loopback addresses: each cluster has a 127.X/16 of its own, each node, Service and pod an address in it."""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys
import zlib
from pathlib import Path

_USUAL_API_PORT = 6443
_CLAIM_PORT = 6442
_LOWEST, _HIGHEST = 10, 250
_CONNECTIONS = Path("/proc/net/tcp")
_LISTENS = "0A"  # include/net/tcp_states.h


def claim_network(seed: str, connections: Path = _CONNECTIONS) -> tuple[int, socket.socket]:
    """Claim a network 127.X/16 of the loopback device.

    Networks in which somebody listens already are left out: a process that outlived its cluster would answer
    there for a new pod.

    Args:
        seed: any text; the same one tries the same X first.
        connections: the kernel's list of TCP sockets.

    Returns:
        X, and the socket that claims the network for as long as it is open.

    Raises:
        RuntimeError: all are taken, or the system lets nobody listen there.
    """
    count = _HIGHEST - _LOWEST + 1
    first = zlib.crc32(seed.encode()) % count
    strangers = listened_networks(connections)
    for step in range(count):
        network = _LOWEST + (first + step) % count
        if network in strangers:
            continue
        claim = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            claim.bind((api_address(network), _CLAIM_PORT))
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise RuntimeError(f"{api_address(network)} cannot be used: {error.strerror}") from error
            continue
        return network, claim
    raise RuntimeError(
        f"in each of 127.{_LOWEST}/16 to 127.{_HIGHEST}/16 somebody listens, or has taken port {_CLAIM_PORT} "
        "of the first address, so no network is free: stop other clusters (`ss -ltn` shows who listens)"
    )


def listened_networks(connections: Path = _CONNECTIONS) -> set[int]:
    """X of each 127.X/16 in which a process listens on an address; none where that cannot be read.

    connections: a table as Linux shows it, with addresses as hexadecimal words in this machine's byte order.
    """
    try:
        lines = connections.read_text().splitlines()[1:]
    except OSError:
        return set()
    found = set()
    for line in lines:
        _, local, _, state, *_ = line.split()
        address = int(local.partition(":")[0], 16).to_bytes(4, sys.byteorder)
        if state == _LISTENS and address[0] == 127:
            found.add(address[1])
    return found


def api_port(address: str) -> int:
    """The usual port, or 0 (any) where somebody listens on it on all addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, _USUAL_API_PORT))
        except OSError:
            return 0
    return _USUAL_API_PORT


def api_address(network: int) -> str:
    return f"127.{network}.0.1"


def node_address(network: int, index: int) -> str:
    """Return the address of a node.

    Args:
        network: X of the cluster's 127.X/16.
        index: of the node, from 0 to 253.
    """
    return f"127.{network}.1.{index + 1}"


def service_range(network: int) -> str:
    return f"127.{network}.4.0/22"


class PodAddresses:
    """127.X.16.1 to 127.X.254.254, in turn, so that an address rests for long before another pod gets it."""

    def __init__(self, network: int) -> None:
        self._first = int(ipaddress.IPv4Address(f"127.{network}.16.1"))
        self._count = int(ipaddress.IPv4Address(f"127.{network}.254.254")) - self._first + 1
        self._next = 0
        self._used: set[str] = set()

    def take(self) -> str:
        """Raise RuntimeError when all are in use."""
        for _ in range(self._count):
            address = str(ipaddress.IPv4Address(self._first + self._next))
            self._next = (self._next + 1) % self._count
            if address not in self._used and not address.endswith((".0", ".255")):
                self._used.add(address)
                return address
        raise RuntimeError(f"all {self._count} pod addresses are in use: delete pods")

    def give_back(self, address: str) -> None:
        self._used.discard(address)
