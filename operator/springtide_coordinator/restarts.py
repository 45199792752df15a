"""Counts the restarts of the coordinator's container, so that no incarnation is ever used twice."""

from __future__ import annotations

import json
import os
from pathlib import Path

from springtide_protocol.names import Incarnation

FILE = "incarnation.json"


def next_incarnation(state_dir: Path, number: int) -> Incarnation:
    """Take the next incarnation and write it down before it is used.

    Args:
        state_dir: lives as long as the pod; made when missing.
        number: raised by the operator before it made the pod.

    Raises:
        ValueError: the file of an earlier start cannot be understood.
        OSError: the directory cannot be written.
    """
    state_dir.mkdir(parents=True, exist_ok=True)
    path = state_dir / FILE
    restart = 0
    if path.exists():
        try:
            last = json.loads(path.read_text())
            last_number, last_restart = int(last["number"]), int(last["restart"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}): restarts cannot be counted, so names could be used twice."
                " Delete the coordinator's pod; the operator makes one with a new incarnation."
            ) from error
        if last_number == number:
            restart = last_restart + 1
    beside = path.with_suffix(".new")
    with beside.open("w") as file:
        json.dump({"number": number, "restart": restart}, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    return Incarnation(number, restart)
