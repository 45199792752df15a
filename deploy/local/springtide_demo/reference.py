"""The undisturbed run: the same script alone in one process, for its loss curve and its count of samples."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from springtide_demo.commits import Commit
from springtide_demo.machine import Load, Machine
from springtide_demo.patience import Patience
from springtide_demo.steplog import StepLogs

# Of a machine of our own, without a step: it starts beside all else, and gives way to it.
STILL_SECONDS = 60.0
POLL_SECONDS = 0.05


@dataclass
class ReferenceRun:
    """A started run. `folder` receives its step log and its output."""

    process: subprocess.Popen[bytes]
    folder: Path

    def finished(self) -> bool:
        """Say whether it has ended (however)."""
        return self.process.poll() is not None

    def curve(self, still: float = STILL_SECONDS, machine: Machine | None = None) -> list[Commit]:
        """Wait for the end and return its commits in order of their steps.

        Args:
            still: seconds of a machine of our own in which it makes no step.
            machine: says what others leave of it.

        Raises:
            TimeoutError: it made no step for so long.
            RuntimeError: it failed; with the end of its output.
        """
        logs, commits, patience = StepLogs(self.folder), [], Patience(still)
        while (code := self.process.poll()) is None:
            commits += logs.poll()
            if machine is not None:
                machine.sample()
            load, now = machine.lately() if machine is not None else Load(), time.monotonic()
            if patience.look([len(commits)], now, load.others):
                raise TimeoutError(
                    f"the undisturbed run has not ended, and made no step for {patience.since(now):.0f} s"
                    f" ({len(commits)} steps so far; {load})"
                )
            time.sleep(POLL_SECONDS)
        if code != 0:
            raise RuntimeError(f"the undisturbed run ended with exit code {code}:\n{self._output()}")
        commits = sorted([*commits, *logs.poll()], key=lambda commit: commit.step)
        if not commits:
            raise RuntimeError(f"the undisturbed run wrote no step log:\n{self._output()}")
        return commits

    def stop(self) -> None:
        """End the process if it lives, and wait for it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def _output(self) -> str:
        return "\n".join((self.folder / "output.txt").read_text(errors="replace").splitlines()[-15:])


def start(command: Sequence[str], env: Mapping[str, str], root: Path, folder: Path) -> ReferenceRun:
    """Start the manifest's command in this Python, without a job around it.

    Args:
        command: of the manifest's workers; `python` becomes this one.
        env: of the manifest's workers.
        root: the image's working directory.
        folder: for output, step log and home; it is made when it is missing.

    Returns:
        The running process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable if word == "python" else word for word in command]
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "HOME": str(folder),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        **env,
        "SPRINGTIDE_STEP_LOG": str(folder / "alone.jsonl"),
    }
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            words,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    # It shall not slow down what starts beside it.
    os.setpriority(os.PRIO_PROCESS, process.pid, 5)
    return ReferenceRun(process, folder)
