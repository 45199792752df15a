"""The undisturbed run: the same script alone in one process, for its loss curve and its count of samples."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from springtide_demo.commits import Commit
from springtide_demo.steplog import StepLogs

SECONDS = 120.0


@dataclass
class ReferenceRun:
    """A started run. `folder` receives its step log and its output."""

    process: subprocess.Popen[bytes]
    folder: Path

    def finished(self) -> bool:
        """Say whether it has ended (however)."""
        return self.process.poll() is not None

    def curve(self, timeout: float = SECONDS) -> list[Commit]:
        """Wait for the end and return its commits in order of their steps.

        Raises TimeoutError after `timeout` seconds, RuntimeError with the end of its output when it failed.
        """
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"the undisturbed run has not ended within {timeout:.0f} s") from error
        if code != 0:
            raise RuntimeError(f"the undisturbed run ended with exit code {code}:\n{self._output()}")
        commits = sorted(StepLogs(self.folder).poll(), key=lambda commit: commit.step)
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

    `command` and `env` are what the manifest gives its workers; `python` becomes this one. `root` is the
    image's working directory.
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
