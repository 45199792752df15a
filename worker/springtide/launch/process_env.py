"""Environment of each process of a pod, and the files by which it talks to its launcher."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from springtide.coordination.outcome import PATH_VARIABLE, Outcome, parse
from springtide.errors import SpringtideError

STEP_LOG_VARIABLE = "SPRINGTIDE_STEP_LOG"
METRICS_FILE_VARIABLE = "SPRINGTIDE_METRICS_FILE"
POD_FOLDER_VARIABLE = "SPRINGTIDE_POD_FOLDER"
TOGETHER = "together"
"""The file in that folder that says that the pod's processes train as one."""


@dataclass(frozen=True, slots=True)
class ProcessFiles:
    """The files of one process."""

    folder: Path

    @property
    def end(self) -> Path:
        return self.folder / "termination-message"

    @property
    def port(self) -> Path:
        return self.folder / "metrics-port"

    def clear(self) -> None:
        """Remove the files of the last process of this rank before the next one starts."""
        for path in (self.end, self.port):
            path.unlink(missing_ok=True)

    def outcome(self) -> Outcome | None:
        try:
            return parse(self.end.read_bytes())
        except OSError:
            return None


class Folder:
    """A temporary folder with a place for each of `count` processes.

    Raise SpringtideError when none can be made.
    """

    def __init__(self, count: int) -> None:
        try:
            self._path = Path(tempfile.mkdtemp(prefix="springtide-"))
        except OSError:
            try:
                # With a read-only root file system this is what the operator mounts for every worker.
                self._path = Path(tempfile.mkdtemp(prefix="springtide-", dir="/dev/shm"))
            except OSError as error:
                raise SpringtideError(
                    f"springtide launch needs a folder to write to, and has none ({error.strerror}): mount an"
                    " emptyDir at /tmp, or set TMPDIR"
                ) from error
        self.rank_files = [ProcessFiles(self._path / str(rank)) for rank in range(count)]
        self.shared = self._path / "pod"
        for folder in (self.shared, *(place.folder for place in self.rank_files)):
            folder.mkdir()

    @property
    def trains_as_one(self) -> bool:
        """Return whether the processes have begun to form a group of their own (`springtide.mesh()`)."""
        return (self.shared / TOGETHER).exists()

    def close(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


def environment(
    environ: Mapping[str, str], rank: int, count: int, folder: Folder, threads: int | None
) -> dict[str, str]:
    """Return the environment of one process.

    Args:
        environ: the launcher's.
        rank: local rank of the process.
        count: processes of the launcher.
        folder: by which the processes talk to the launcher, and find each other.
        threads: OMP_NUM_THREADS where it is not set already; None: not set.
    """
    place = folder.rank_files[rank]
    result = {
        **environ,
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        PATH_VARIABLE: str(place.end),
        METRICS_FILE_VARIABLE: str(place.port),
        POD_FOLDER_VARIABLE: str(folder.shared),
    }
    # Through a pipe Python would keep its output back until a buffer is full.
    result.setdefault("PYTHONUNBUFFERED", "1")
    if count > 1 and result.get(STEP_LOG_VARIABLE):
        result[STEP_LOG_VARIABLE] += f".{rank}"
    if threads is not None:
        result.setdefault("OMP_NUM_THREADS", str(threads))
    return result
