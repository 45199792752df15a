"""Write to Weights & Biases, online or offline.

The steps of a W&B run only ever rise: a row at or below the last one is not taken. A run can be rewound by
the server, when it is resumed; offline, and where the server refuses, rows of dropped steps stay, and those
steps are not written again. Offline each writer has a session's file of its own in the same folder, all with
the run's id; the next writer reads the newest rows there.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from springtide.errors import UsageError
from springtide.loggers.history import read_generation
from springtide.loggers.logger import OWN_PREFIX, Record, Recorded, Run, require
from springtide_protocol.names import WITHOUT_JOB

log = logging.getLogger(__name__)

GENERATION_KEY: Final = "springtide.generation"
"""Key of the run's config with the name of the newest generation."""
_GENERATION: Final = f"{OWN_PREFIX}generation"
_OURS = ("id", "name", "resume", "resume_from", "config", "dir", "reinit", "project", "mode", "fork_from")
# Of a session's file: W&B's framing of LevelDB's log.
_HEADER_BYTES, _BLOCK_BYTES, _PART_BYTES = 7, 32768, 7
_FULL, _LAST = 1, 4


class WandB:
    """Write values of committed steps to Weights & Biases, as rows of one run for each job.

    The run's id is that of the job, so a restarted job goes on with it. Steps that were dropped are taken
    back by rewinding the run, where the server can do that. Offline, and elsewhere, their rows stay with the
    values that they had, and the same steps are not written again. Changes of the members are in
    `springtide/workers` and `springtide/generation`, hyperparameters in the run's config.
    """

    settle_seconds = 3.0

    def __init__(
        self,
        project: str,
        *,
        folder: str | os.PathLike[str] | None = None,
        mode: str | None = None,
        name: str = "wandb",
        **options: Any,
    ) -> None:
        """Make the logger; nothing is read or written yet.

        Args:
            project: of W&B, in which the run is.
            folder: for W&B's files; offline, on a volume that all workers mount. None: W&B's own choice.
            mode: online or offline; None: what WANDB_MODE says.
            name: of the logger, in logs and metrics.
            options: more arguments of `wandb.init`, such as entity, group, tags, notes, settings.

        Raises:
            UsageError: an argument cannot be, or one of the options is the library's own affair.
        """
        if not isinstance(project, str) or not project:
            raise UsageError(f"WandB({project!r}): expected the name of a project")
        if mode not in (None, "online", "offline"):
            raise UsageError(f"WandB(mode={mode!r}): expected online or offline")
        taken = sorted(set(options) & set(_OURS))
        if taken:
            raise UsageError(
                f"WandB({taken[0]}=...): the library says that itself, so that a job has one run"
            )
        self.name = name
        self._options = {"project": project, "mode": mode, **options}
        self._folder = None if folder is None else Path(folder)
        # From `open` to `close`.
        self._described: Run | None = None
        self._run: Any = None

    def check(self) -> None:
        """Raise SpringtideError when the package wandb is missing."""
        require("wandb", "WandB(...)", "wandb")

    def open(self, run: Run) -> Recorded:
        """Resume the run, or begin it, and read how far it is."""
        self._described = run
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._begin(resume="allow")
        if self._run.offline:
            return _sessions(Path(self._run.settings.wandb_dir), run.id)
        generation = self._run.config.get(GENERATION_KEY, "")
        # The step of the next row.
        return Recorded(self._run.step - 1, {}, generation if isinstance(generation, str) else "")

    def rewind(self, step: int) -> bool:
        """Have the server rewind the run; return whether it did."""
        assert self._described is not None
        if self._run.offline:
            return False
        run, self._run = self._run, None
        run.finish()
        try:
            self._begin(resume_from=f"{self._described.id}?_step={step}")
        except Exception as error:
            log.info("tracker %s: the server does not rewind: %s", self.name, error)
            self._begin(resume="allow")
            return False
        return True

    def write(self, records: Sequence[Record]) -> None:
        """Log the records as rows; the last one is sent with the next one, or at the end."""
        for record in records:
            row: dict[str, Any] = {**record.values, "_timestamp": record.unix_time}
            if record.generation is not None:
                self._run.config.update({GENERATION_KEY: record.generation.name}, allow_val_change=True)
                row[_GENERATION] = str(record.generation)
            self._run.log(row, step=record.step)

    def close(self, outcome: str) -> None:
        """Send what is left and end the session."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=1 if outcome == "Failed" else 0)

    def _begin(self, **how: str) -> None:
        import wandb

        assert self._described is not None
        arguments: dict[str, Any] = {
            "id": self._described.id,
            "name": self._described.name,
            "dir": None if self._folder is None else str(self._folder),
            "reinit": "create_new",  # the script may have a run of its own
            "settings": {"console": "off"},  # the script's output is that of one worker of many
            **self._options,
            **how,
        }
        self._run = wandb.init(**arguments)
        self._run.config.update(dict(self._described.config), allow_val_change=True)


# ---- sessions that were written offline


def _sessions(folder: Path, run_id: str) -> Recorded:
    """Return what the sessions of a run in W&B's folder hold."""
    newest, generations = -1, [""]
    for path in folder.glob(f"*run-*/run-{run_id}.wandb"):
        for kind, content in _contents(path):
            if kind == "history":
                newest = max(newest, int(content.step.num))
            elif kind == "config":
                for item in content.update:
                    if GENERATION_KEY in (item.key, *item.nested_key):
                        generations.append(json.loads(item.value_json))
    # The files' names have the clocks of their nodes.
    return Recorded(newest, {}, max(generations, key=lambda name: read_generation(name) or WITHOUT_JOB))


def session_rows(folder: Path, run_id: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (step, values by name) of the rows of a run that was written offline, file by file.

    Args:
        folder: of W&B's sessions, `FOLDER/wandb`.
        run_id: of the run.
    """
    for path in sorted(folder.glob(f"*run-*/run-{run_id}.wandb")):
        for kind, content in _contents(path):
            if kind == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in content.item}
                yield int(content.step.num), {name: json.loads(text) for name, text in items.items()}


def _contents(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield (kind, message) of the whole records of a session's file; the last one may be cut short."""
    from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

    for data in _records(path.read_bytes()):
        record = WandbRecord.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind is not None:
            yield kind, getattr(record, kind)


def _records(data: bytes) -> Iterator[bytes]:
    place, record = _HEADER_BYTES, b""
    while place + _PART_BYTES <= len(data):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _PART_BYTES:  # the end of a block, which is too short for a part
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        place += _PART_BYTES
        if not kind or place + size > len(data):
            return
        record += data[place : place + size]
        place += size
        if kind in (_FULL, _LAST):
            yield record
            record = b""
