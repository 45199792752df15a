"""How many GPUs this container has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from springtide.errors import SpringtideError

_ASK = "import torch; print('count', torch.cuda.device_count())"
_SECONDS = 120.0


def count(root: Path = Path("/"), ask: Callable[[], str] | None = None) -> int:
    """Count CUDA devices as torch does (CUDA_VISIBLE_DEVICES holds).

    Torch is asked in a process of its own, so that the launcher stays small.

    Args:
        root: of the file system in which device files are looked for.
        ask: returns what such a process prints; None: start one.

    Returns:
        The number; 0 without a driver.

    Raises:
        SpringtideError: there is a driver, and torch cannot be asked.
    """
    if not any((root / "dev").glob("nvidia[0-9]*")) and not (root / "dev/dxg").exists():
        return 0
    words = (ask or _asked)().split()
    if len(words) < 2 or words[-2] != "count" or not words[-1].isdigit():
        raise SpringtideError("--processes auto: torch did not say how many GPUs there are; give the number")
    return int(words[-1])


def _asked() -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except subprocess.TimeoutExpired:
        raise SpringtideError(
            f"--processes auto: torch did not count the GPUs within {_SECONDS:g} s; give the number"
        ) from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
        raise SpringtideError(f"--processes auto: torch cannot count the GPUs: {last}") from None
    return done.stdout
