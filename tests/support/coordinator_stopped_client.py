"""A session in a process of its own, for a test that stops it. Arguments: address, token, member's name."""

from __future__ import annotations

import sys
import threading

from coordinator_process import Member


def main() -> None:
    member = Member(sys.argv[1], sys.argv[3], token=sys.argv[2], slot=1)
    member.client.wait_connected(10)
    member.park()
    print("parked", flush=True)
    member.wait("prepare", timeout=60)
    print("prepare", flush=True)
    threading.Event().wait(60)


if __name__ == "__main__":
    main()
