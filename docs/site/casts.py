"""Recordings of terminals in asciinema's format, version 2, and what they show as plain text.

A file has a line of JSON with the size of the terminal and the date, then one line for each piece of output:
[seconds, "o", text]. The player of the site (player.js) and `screen` here know the same few control
characters, and `unknown` finds others, so a recording has none that the player would show wrongly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

VERSION = 2
# Colours and their like, and "erase to the end of the line": all that the player does besides \n, \r and \b.
_KNOWN = re.compile(r"\x1b\[[0-9;]*m|\x1b\[0?K")
_CONTROL = re.compile(
    r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()].|.)|[^\n\r\b\x1b -\x7e\xa0-\U0010ffff]"
)
PROMPT = "$ "


@dataclass(frozen=True)
class Cast:
    """A recording of a terminal.

    Attributes:
        width: of the terminal, in columns.
        height: in lines.
        title: of the recording.
        timestamp: of its beginning, in unix seconds.
        events: (seconds since the beginning, output) in order.
        idle_limit: seconds that a pause takes at most when it is played.
    """

    width: int
    height: int
    title: str
    timestamp: int
    events: tuple[tuple[float, str], ...]
    idle_limit: float

    def dump(self) -> str:
        """Return the text of its file."""
        head = {
            "version": VERSION,
            "width": self.width,
            "height": self.height,
            "timestamp": self.timestamp,
            "idle_time_limit": self.idle_limit,
            "title": self.title,
            "env": {"TERM": "xterm-256color", "SHELL": "/bin/bash"},
        }
        lines = [head, *([round(seconds, 3), "o", text] for seconds, text in self.events)]
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)

    @property
    def output(self) -> str:
        """Return everything that was written to the terminal."""
        return "".join(text for _, text in self.events)

    @property
    def seconds(self) -> float:
        """Return how long it is, with its pauses."""
        return self.events[-1][0] if self.events else 0.0

    @property
    def date(self) -> str:
        """Return the day of the recording, in UTC."""
        return datetime.fromtimestamp(self.timestamp, UTC).strftime("%Y-%m-%d")


def load(text: str) -> Cast:
    """Read a recording.

    Args:
        text: of its file.

    Raises:
        ValueError: it is no such file, or its times go back; the message says in which line.
    """
    lines = text.splitlines()
    head: dict[str, Any] = json.loads(lines[0]) if lines else {}
    if head.get("version") != VERSION:
        raise ValueError(f"line 1: no recording of version {VERSION}: {lines[:1]}")
    events: list[tuple[float, str]] = []
    for number, line in enumerate(lines[1:], start=2):
        seconds, kind, written = json.loads(line)
        if kind != "o" or seconds < (events[-1][0] if events else 0.0):
            raise ValueError(f"line {number}: no output, or earlier than the line before")
        events.append((float(seconds), str(written)))
    return Cast(
        head["width"],
        head["height"],
        head["title"],
        head["timestamp"],
        tuple(events),
        head["idle_time_limit"],
    )


def unknown(output: str) -> list[str]:
    """Return the control sequences of an output that the player does not know."""
    return _CONTROL.findall(_KNOWN.sub("", output))


def screen(output: str) -> list[str]:
    """Return the lines that a terminal without end would show, without colours.

    Args:
        output: with no control sequence but those that the player knows.
    """
    lines, column = [""], 0
    for part in re.split(r"(\x1b\[[0-9;]*[mK]|[\n\r\b])", output):
        if part == "\n":
            lines.append("")
            column = 0
        elif part == "\r":
            column = 0
        elif part == "\b":
            column = max(0, column - 1)
        elif part.endswith("K") and part.startswith("\x1b"):
            lines[-1] = lines[-1][:column]
        elif not part.startswith("\x1b"):
            lines[-1] = lines[-1].ljust(column)[:column] + part + lines[-1][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


def typed(lines: Iterable[str]) -> list[str]:
    """Return the commands among lines of a screen, without those that are comments alone."""
    found = [line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT)]
    return [line for line in found if line.strip() and not line.startswith("#")]


def transcript(cast: Cast, page: str, file: str) -> str:
    """Return a page with what a recording shows.

    Args:
        cast: the recording.
        page: the name of the page whose commands it has, beside the folder of recordings.
        file: the name of the recording's file, in that folder.
    """
    minutes, seconds = divmod(round(cast.seconds), 60)
    took = f"{minutes} min {seconds} s"
    text = "\n".join(screen(cast.output)).removesuffix(PROMPT.strip()).strip("\n")
    return (
        f"# The terminal of the {Path(page).stem}\n\n"
        f"Made by `make recording` on {cast.date} from [the tutorial](../{page}), in {took}.\n"
        f"Paths of the checkout and of the home folder are written as `~/springtide` and `~`.\n"
        f"[{file}]({file}) is the same with its times, in asciinema's format.\n\n"
        f"```text\n{text}\n```\n"
    )
