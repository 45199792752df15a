"""The scripts `springtide` and `kubectl-springtide`. `springtide launch` runs in images of workers, which
lack what the rest needs.
"""

from __future__ import annotations

import sys

PLUGIN = "kubectl springtide"


def main(program: str = "springtide") -> None:
    """Hand over to the launcher or to the command line; exits the process.

    Args:
        program: what the command line is called in its texts.
    """
    if sys.argv[1:2] == ["launch"]:
        from springtide.launch.main import main as launcher

        sys.exit(launcher(sys.argv[2:]))
    try:
        from springtide_cli.main import main as command
    except ModuleNotFoundError as error:
        sys.exit(
            f"{program}: this image has only `springtide launch` ({error}): pip install 'springtide[cli]'"
        )
    command(program)


def plugin() -> None:
    """Be kubectl's plugin `kubectl springtide`, which kubectl finds by the script's name."""
    main(PLUGIN)


def complete_plugin() -> None:
    """Answer kubectl, which asks `kubectl_complete-springtide` what may follow on the words of a command."""
    from springtide_cli.completing import for_kubectl
    from springtide_cli.main import app

    sys.stdout.write(for_kubectl(app, sys.argv[1:]))
