"""`springtide launch`: from arguments and environment to an exit code."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence

from springtide.errors import SpringtideError, UsageError
from springtide.launch import devices
from springtide.launch.options import PROCESSES_VARIABLE, Options, parse
from springtide.launch.pod import Pod
from springtide.launch.solo import Solo
from springtide.settings import Settings, read_settings

log = logging.getLogger("springtide")

_BAD_ARGUMENTS = 2


def main(arguments: Sequence[str]) -> int:
    """Run the command of the arguments and return the exit code: that of the script, 128 + n when signal n
    ended it, 127 when it cannot be started, 2 for wrong arguments or a wrong environment.
    """
    environ = dict(os.environ)
    # What is forked here becomes another program at once, and gRPC's handlers abort it now and then. They are
    # left out if this is set when gRPC is imported.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    try:
        options = parse(arguments)
        settings = read_settings()
        _log_to_stderr()
        count = agreed(_count(options), environ)
        if options.torchrun_env and settings.alone:
            return Solo(options, count, environ).run()
        if options.torchrun_env:
            return _launch(options, settings, count, environ)
        if settings.alone and count > 1:
            raise UsageError(
                f"--processes {count} outside of a job: there is no coordinator that makes"
                " the processes one job. Apply a TrainingJob with workers.processesPerPod, or say"
                " --torchrun-env for a script that uses torch.distributed by itself"
            )
        return Pod(options, settings, count, environ).run()
    except SpringtideError as error:
        print(f"springtide launch: {error}", file=sys.stderr)
        return _BAD_ARGUMENTS


def _launch(options: Options, settings: Settings, count: int, environ: Mapping[str, str]) -> int:
    from springtide.launch.script_launcher import ScriptLauncher

    return ScriptLauncher(options, settings, count, environ, settings.job_uid or settings.job).run()


def agreed(count: int, environ: Mapping[str, str]) -> int:
    """Raise UsageError in a job whose manifest has another number of processes in the pod; return the number.

    Args:
        count: of the command line.
        environ: the pod's variables.
    """
    expected = environ.get(PROCESSES_VARIABLE) or "1"
    if environ.get("SPRINGTIDE_COORDINATOR") and expected != str(count):
        raise UsageError(
            f"this pod would run {count} processes, and the job's workers.processesPerPod is {expected}:"
            " make them equal, or leave --processes out"
        )
    return count


def _count(options: Options) -> int:
    if options.processes:
        return options.processes
    found = devices.count()
    log.info("%d GPUs are there: %d processes", found, max(1, found))
    return max(1, found)


def _log_to_stderr() -> None:
    logger = logging.getLogger("springtide")
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s springtide launch %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
