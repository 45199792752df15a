"""Wait in a worker's script until its test lets it go on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def wait_for(path: Path, seconds: float = 60.0) -> None:
    """Wait until a file exists. Raise TimeoutError that names it."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} has not come within {seconds:.0f} s")
        time.sleep(0.05)


def hold(folder: Path, name: str, options: Mapping[str, Any]) -> None:
    """Wait for the file that the options name, if they name one.

    Args:
        folder: of the test, where `NAME.held` says that the worker waits.
        name: of the worker.
        options: of the script; `held_until` names the file.
    """
    if "held_until" in options:
        (folder / f"{name}.held").touch()
        wait_for(Path(options["held_until"]))
