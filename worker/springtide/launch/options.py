"""The command line of `springtide launch`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from springtide.errors import UsageError

PROCESSES_VARIABLE = "SPRINGTIDE_PROCESSES"
MOST_PROCESSES = 64
GRACE_VARIABLE = "SPRINGTIDE_GRACE_SECONDS"
"""Seconds from SIGTERM until the pod is killed, as its manifest says."""
MOST_SCRIPT_GRACE = 20.0
"""Limit where the time of the pod is not known: the coordinator of such an operator waits for 30 s."""
FAREWELL_SECONDS = 5.0
"""Part of a pod's time in which its launcher hears of the change, and says that it leaves."""


@dataclass(frozen=True, slots=True)
class Options:
    """processes: 0 for one per GPU. restarts: of processes in this pod. Seconds for backoff and grace."""

    command: tuple[str, ...]
    processes: int = 0
    restarts: int = 3
    backoff: float = 1.0
    grace: float | None = None
    """Time to end in, in seconds; None: as long as the way of launching has it."""
    torchrun_env: bool = False
    numa: bool = True
    prefix: bool | None = None
    """Whether output lines carry the process's number; None: where there are several."""


def parse(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> Options:
    """Read the launcher's command line.

    Args:
        arguments: without the program's name.
        environ: gives the number of processes where no option does.

    Raises:
        UsageError: it says what is wrong.
        SystemExit: with 0, after --help.
    """
    parser = _Parser(
        prog="springtide launch",
        usage="springtide launch [options] -- command [arguments]",
        description="Run a training script in one or several processes of this pod (or machine): restart a"
        " single one that fails, forward signals, mark output, serve metrics and health, tell the outcome.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="example: springtide launch --processes auto -- python train.py --epochs 10",
    )
    default = environ.get(PROCESSES_VARIABLE) or "1"
    parser.add_argument(
        "--processes",
        default=default,
        metavar="N|auto",
        help=f"processes; auto: one per GPU, one without GPUs. Default: ${PROCESSES_VARIABLE}, else 1",
    )
    parser.add_argument(
        "--restarts",
        type=_whole,
        default=3,
        metavar="N",
        help="how often processes that fail are started again in this pod while others of it run (3)",
    )
    parser.add_argument(
        "--backoff", type=_seconds, default=1.0, metavar="SECONDS", help="before the first restart (1)"
    )
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=None,
        metavar="SECONDS",
        help="between SIGTERM and SIGKILL: for the other processes when the pod gives up (60), and with"
        f" --torchrun-env for scripts whose members change (10; in a job at most"
        f" terminationGracePeriodSeconds of the pod less {FAREWELL_SECONDS:g})",
    )
    parser.add_argument(
        "--torchrun-env",
        action="store_true",
        help="the script knows nothing of springtide: it gets RANK, WORLD_SIZE, MASTER_ADDR ... as from"
        " torchrun, and is started again when members come or go; without a job on this machine alone",
    )
    parser.add_argument(
        "--numa",
        choices=("auto", "off"),
        default="auto",
        help="auto: on machines with several NUMA nodes a process runs on the node of its GPU",
    )
    parser.add_argument(
        "--prefix", choices=("auto", "on", "off"), default="auto", help="whether lines begin with [RANK]"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    words = list(arguments)
    split = words.index("--") if "--" in words else len(words)
    found = parser.parse_args(words[:split])
    # What comes behind -- is the command's, whatever it looks like.
    command = [*found.command, *words[split + 1 :]]
    if found.command and (split < len(words) or found.command[0].startswith("-")):
        raise UsageError(f"{found.command[0]!r} is no option: see springtide launch --help")
    if not command:
        raise UsageError("no command: say springtide launch --processes 2 -- python train.py")
    if found.torchrun_env and found.grace is not None:
        _check_script_grace(found.grace, environ)
    return Options(
        command=tuple(command),
        processes=_processes(found.processes),
        restarts=found.restarts,
        backoff=found.backoff,
        grace=found.grace,
        torchrun_env=found.torchrun_env,
        numa=found.numa == "auto",
        prefix={"auto": None, "on": True, "off": False}[found.prefix],
    )


def _check_script_grace(grace: float, environ: Mapping[str, str]) -> None:
    """Raise UsageError for a time to end in that a script would not be given.

    Args:
        grace: in seconds.
        environ: of the launcher.
    """
    if not environ.get("SPRINGTIDE_COORDINATOR"):
        return  # on this machine alone nobody else ends it
    told = environ.get(GRACE_VARIABLE, "")
    if not told.isdigit():
        if grace > MOST_SCRIPT_GRACE:
            raise UsageError(
                f"--grace must be at most {MOST_SCRIPT_GRACE:g} with --torchrun-env, got {grace:g}: the"
                f" operator of this job does not tell the pod's time to end in ({GRACE_VARIABLE}); upgrade it"
            )
    elif grace > max(float(told) - FAREWELL_SECONDS, 0.0):
        raise UsageError(
            f"--grace must be at most {max(float(told) - FAREWELL_SECONDS, 0.0):g} with --torchrun-env, got"
            f" {grace:g}: the pod is killed {told} s after it is asked to end; raise"
            " spec.workers.template.spec.terminationGracePeriodSeconds"
        )


def _processes(text: str) -> int:
    if text == "auto":
        return 0
    if not text.isdigit() or not 1 <= int(text) <= MOST_PROCESSES:
        raise UsageError(f"--processes must be auto or a number from 1 to {MOST_PROCESSES}, got {text!r}")
    return int(text)


def _whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a whole number from 0, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 86400:
        raise argparse.ArgumentTypeError(f"must be seconds from 0, got {text!r}")
    return value


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)
