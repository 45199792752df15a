"""Write TensorBoard's event files: a folder for each run, and in it files that only ever grow.

Each file of ours begins with three events: the version, a session's START at the step of the first value that
follows, and a head that says what the files before this one hold. TensorBoard drops what it has read at or
behind a START's step. So steps that are made anew take the place of those that were dropped, and whatever a
former writer adds to its own file after its time is dropped, too. The next writer reads the newest file
alone, since its head has the rest; a file is followed by another one before it grows large.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Final

from springtide.errors import UsageError
from springtide.loggers.logger import OWN_PREFIX, Record, Recorded, Run, require

MAX_FILE_BYTES: Final = 4 << 20
"""Size at which a file is followed by another one: about 60,000 values."""
_HEAD = f"{OWN_PREFIX}head"
_GENERATION = f"{OWN_PREFIX}generation"
_SUFFIX = ".springtide"
_FILE = re.compile(r"events\.out\.tfevents\.(\d{10})\..*" + re.escape(_SUFFIX))


class TensorBoard:
    """Write values of committed steps for TensorBoard, to `FOLDER/RUN` on a volume that all workers mount.

    A step that was dropped is not shown: TensorBoard forgets it when the steps behind the checkpoint are made
    anew. Changes of the members are at `springtide/workers` (scalars) and `springtide/generation` (text),
    hyperparameters in the HParams tab.
    """

    settle_seconds = 0.0  # a START of the next writer drops what the one before adds late

    def __init__(self, folder: str | os.PathLike[str], *, name: str = "tensorboard") -> None:
        """Make the logger; nothing is read or written yet.

        Args:
            folder: of all runs, what `tensorboard --logdir` is given.
            name: of the logger, in logs and metrics.

        Raises:
            UsageError: the folder is no path of a file system.
        """
        text = os.fspath(folder)
        if "://" in text or not text:
            raise UsageError(
                f"TensorBoard({text!r}): name a folder of a volume that all workers mount; event files grow "
                "by appending, which object stores cannot do"
            )
        self.name = name
        self._root = Path(text)
        # From `open` to `close`.
        self._folder = self._root
        self._recorded = Recorded()
        self._config: dict[str, Any] = {}
        self._written_config: dict[str, Any] = {}
        self._purge: int | None = None  # step from which on what is there is dropped
        self._newest = ""  # name of the newest file of the run
        self._file: IO[bytes] | None = None
        self._size = 0

    def check(self) -> None:
        """Raise SpringtideError when the package tensorboard is missing."""
        require("tensorboard", "TensorBoard(...)", "tensorboard")

    def open(self, run: Run) -> Recorded:
        """Read what the newest whole file of the run holds."""
        self._folder, self._config = self._root / run.id, dict(run.config)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._recorded, self._written_config, self._purge = Recorded(), {}, None
        files = self._files()
        self._newest = files[-1].name if files else ""
        for path in reversed(files):
            found = _read(path)
            if found is not None:
                self._recorded, self._written_config = found
                break
        return self._recorded

    def rewind(self, step: int) -> bool:
        """Have TensorBoard drop what is behind the step, with the next value."""
        self._recorded = self._recorded.up_to(step)
        self._purge = step + 1
        self._end_file()
        return True

    def write(self, records: Sequence[Record]) -> None:
        """Append the records' values and annotations."""
        parts = []
        for record in records:
            parts += [_framed(event) for event in _events(record)]
        if self._file is None or self._size > MAX_FILE_BYTES:
            self._begin_file(records[0].step)
        assert self._file is not None
        data = b"".join(parts)
        self._file.write(data)
        self._file.flush()
        self._size += len(data)
        self._recorded = self._recorded.with_records(records)

    def close(self, outcome: str) -> None:
        """End the file."""
        self._end_file()

    def _files(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if _FILE.fullmatch(path.name))

    def _end_file(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _begin_file(self, step: int) -> None:
        """Begin a file behind all others, whatever the clocks of the nodes say.

        Args:
            step: of the first value.
        """
        self._end_file()
        start = step if self._purge is None else min(step, self._purge)
        seconds = int(time.time())
        if files := self._files():
            if files[-1].name != self._newest:
                # A START here would drop what it has written.
                raise RuntimeError(f"another process writes {self._folder / files[-1].name}")
            match = _FILE.fullmatch(files[-1].name)
            assert match is not None
            seconds = max(seconds, int(match.group(1)) + 1)
        name = f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}.{os.getpid()}{_SUFFIX}"
        head: dict[str, Any] = {
            "steps": self._recorded.steps,
            "generation": self._recorded.generation,
            "config": self._config,
        }
        events = [_version(), _start(start), _text(_HEAD, json.dumps(head), start, plugin="springtide")]
        if self._config != self._written_config:
            events += _config_events(self._config)
        data = b"".join(map(_framed, events))
        # It appears whole: a reader that finds it empty would take the run for one without values.
        beside = self._folder / f".{name}"
        self._file = beside.open("wb")
        self._file.write(data)
        self._file.flush()
        os.rename(beside, self._folder / name)
        self._newest = name
        self._size, self._purge, self._written_config = len(data), None, dict(self._config)


# ---- files


@cache
def _library() -> Any:
    """Import what each event needs, once: an import statement in a function costs as much as a value."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    return SimpleNamespace(Event=Event, Summary=Summary, checksum=masked_crc32c)


@lru_cache(maxsize=4096)
def _head_of_record(length: int) -> bytes:
    """Return a record's length and its checksum; records of the same values have the same."""
    data = struct.pack("<Q", length)
    return data + struct.pack("<I", _library().checksum(data))


def _framed(event: Any) -> bytes:
    """Return an event as a record: its length, the length's checksum, the event and its checksum."""
    data: bytes = event.SerializeToString()
    return _head_of_record(len(data)) + data + struct.pack("<I", _library().checksum(data))


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records that are whole; a writer that was killed leaves a part of one at the end."""
    checksum, place = _library().checksum, 0
    while place + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        end = place + 12 + length + 4
        if end > len(data):
            return
        body = data[place + 12 : end - 4]
        if checksum(body) != struct.unpack_from("<I", data, end - 4)[0]:
            return
        yield body
        place = end


def _read(path: Path) -> tuple[Recorded, dict[str, Any]] | None:
    """Return what a run holds whose newest file this is, and its hyperparameters; None without a head."""
    from tensorboard.compat.proto.event_pb2 import Event

    recorded: Recorded | None = None
    config: dict[str, Any] = {}
    steps: dict[str, int] = {}
    generation = ""
    for data in _records(path.read_bytes()):
        event = Event.FromString(data)
        for value in event.summary.value:
            if value.tag == _HEAD:
                head = json.loads(value.tensor.string_val[0])
                steps, generation, config = dict(head["steps"]), head["generation"], head["config"]
                recorded = Recorded()
            elif value.tag == _GENERATION:
                generation = value.metadata.summary_description
            elif recorded is not None and value.WhichOneof("value") == "simple_value":
                steps[value.tag] = max(event.step, steps.get(value.tag, -1))
    return None if recorded is None else (Recorded(-1, steps, generation), config)


# ---- events


def _version() -> Any:
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=time.time(), file_version="brain.Event:2")


def _start(step: int) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    return Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))


def _text(tag: str, text: str, step: int, *, plugin: str = "text", about: str = "") -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    value = Summary.Value(
        tag=tag,
        metadata=SummaryMetadata(
            plugin_data=SummaryMetadata.PluginData(plugin_name=plugin), summary_description=about
        ),
        tensor=TensorProto(dtype=DT_STRING, tensor_shape=TensorShapeProto(), string_val=[text.encode()]),
    )
    return Event(wall_time=time.time(), step=step, summary=Summary(value=[value]))


def _events(record: Record) -> Iterator[Any]:
    library = _library()
    if record.generation is not None:
        yield _text(_GENERATION, str(record.generation), record.step, about=record.generation.name)
    if record.values:
        event = library.Event(wall_time=record.unix_time, step=record.step)
        for name, number in record.values.items():
            event.summary.value.add(tag=name, simple_value=number)
        yield event


def _config_events(config: dict[str, Any]) -> list[Any]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    lines = "\n".join(f"| {name} | {value} |" for name, value in sorted(config.items()))
    table = f"| name | value |\n|---|---|\n{lines}"
    hparams = Event(wall_time=time.time(), summary=hparams_pb(config))
    return [hparams, _text(f"{OWN_PREFIX}config", table, 0)]
