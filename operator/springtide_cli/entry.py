"""The `springtide` script. `springtide launch` runs in images of workers, which lack what the rest needs."""

from __future__ import annotations

import sys


def main() -> None:
    """Hand over to the launcher or to the command line; exits the process."""
    if sys.argv[1:2] == ["launch"]:
        from springtide.launch.main import main as launcher

        sys.exit(launcher(sys.argv[2:]))
    try:
        from springtide_cli.main import main as command
    except ModuleNotFoundError as error:
        sys.exit(
            f"springtide: this image has only `springtide launch` ({error}): pip install 'springtide[cli]'"
        )
    command()
