"""Groups of two whose network breaks. To be run in a network of its own, with the rights to change it there;
prints, for each of the groups, what the collective of each rank that took part ended with, as JSON.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil
import torch
from worker_groups import form_groups

from springtide.comm.process_group import Group

COLLECTIVE_SECONDS = 600.0
CONNECT_SECONDS = 2.0


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=30)


def cut(address: str) -> None:
    """Drop all packets from and to the address, without an error for either side."""
    ip("rule", "add", "pref", "5", "to", address, "blackhole")
    ip("rule", "add", "pref", "5", "from", address, "blackhole")


def end_of(group: Group) -> str:
    """Start a sum that the other rank may never begin, and return its error, or "" if it completes."""
    try:
        group.start_sum(torch.ones(1 << 20)).wait()
    except RuntimeError as error:
        return str(error)
    return ""


def ends_of(taking_part: Sequence[int]) -> dict[int, str]:
    """Return how a sum ends, by rank, on the ranks that begin it when the connection is cut."""
    groups = form_groups(2, COLLECTIVE_SECONDS, CONNECT_SECONDS)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(end_of, groups)) == ["", ""]
        lines = psutil.Process().net_connections("tcp4")
        ours = [line.laddr.ip for line in lines if line.status == psutil.CONN_ESTABLISHED]
        cut(next(address for address in ours if address != "127.0.0.1"))
        return dict(zip(taking_part, pool.map(end_of, [groups[rank] for rank in taking_part]), strict=True))


def main() -> None:
    ip("link", "set", "lo", "up")
    # Rules before the one that knows all of this machine's addresses.
    ip("rule", "add", "pref", "10", "from", "all", "lookup", "local")
    ip("rule", "del", "pref", "0")
    print(json.dumps([ends_of(ranks) for ranks in ((0, 1), (0,), (1,))]), flush=True)


if __name__ == "__main__":
    main()
