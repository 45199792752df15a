"""A script that knows nothing of the library and needs no torch. argv: FOLDER JSON_OPTIONS.

Each process appends what it found in its environment to FOLDER/POD.runs, meets the others at MASTER_ADDR and
MASTER_PORT, and waits for FOLDER/finish.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)


def meet() -> None:
    """Connect as torch's store does: the first rank listens, the others connect."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", port))
        server.listen(16)
        others = [server.accept()[0] for _ in range(int(os.environ["WORLD_SIZE"]) - 1)]
        for other in others:
            other.sendall(b"together")
        return
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=30)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    assert connection.recv(8) == b"together"


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    pod = os.environ["SPRINGTIDE_POD_NAME"]
    assert "SPRINGTIDE_COORDINATOR" not in os.environ
    meet()
    found = {name: os.environ[name] for name in NAMES} | {"pid": str(os.getpid())}
    with (folder / f"{pod}.runs").open("a") as file:
        file.write(json.dumps(found) + "\n")
    if pod == options.get("fails"):
        sys.exit("ValueError: it cannot go on")
    while not (folder / "finish").exists():
        time.sleep(0.02)


if __name__ == "__main__":
    main()
