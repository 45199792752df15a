"""Reads the step logs that the workers write, while they write them."""

from __future__ import annotations

from pathlib import Path

from springtide_demo.commits import Commit, parse_line


class StepLogs:
    """A folder of `POD.jsonl` files that grow. A line counts once it is whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def poll(self) -> list[Commit]:
        """Return the commits written since the last call. Raises ValueError for a line that is no commit."""
        found: list[Commit] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text.rfind(b"\n") + 1
            if whole:
                self._read[path] = self._read.get(path, 0) + whole
                found += [parse_line(line, path.stem) for line in text[:whole].decode().splitlines() if line]
        return found
