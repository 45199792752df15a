"""`make recording`: run the commands of docs/tutorial.md in a real terminal, and write what it shows.

    python -m docs.site.record [PAGE]

A bash in a pseudo-terminal gets the page's commands, typed letter by letter, each after the one before has
ended; a heading of the page becomes a comment. Every letter of output is recorded with its time. Paths of
this checkout and of the home folder are written as `~/springtide` and `~`; nothing else is changed. A command
that fails ends the recording with an error, and the files stay as they were.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from docs.site.casts import PROMPT, Cast, transcript, unknown
from springtide_local.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "recordings"
WIDTH, HEIGHT = 110, 30
IDLE_LIMIT = 1.5
KEY_SECONDS, READ_SECONDS = 0.03, 1.0
COMMAND_SECONDS = 600.0
STOP_SECONDS = 10.0
# What bash says before each prompt: the exit code, which is taken out of the recording.
_DONE = re.compile(r"\x1b\]9;(\d+)\x07")
_PARTIAL = re.compile(r"\x1b(?:\][^\x07]*)?$")


class RecordingError(Exception):
    """A command failed, or did not end; the message says which, and what the terminal showed."""


def script(page: str) -> list[str]:
    """Return the lines to type for a page: its commands, and a comment for each heading above some.

    Args:
        page: its Markdown.
    """
    lines: list[str] = []
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        blocks = re.findall(r"^```console\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
        commands = re.findall(r"^\$ (.*)$", "".join(blocks), re.MULTILINE)
        if commands:
            lines += [f"# {section.splitlines()[0]}", *commands]
    return lines


def _take_terminal() -> None:
    """Make the terminal the one that controls the new session, so that bash has job control."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A bash in a pseudo-terminal whose output is kept with its times. One thread uses it."""

    def __init__(self, folder: Path, environ: Mapping[str, str], hidden: Sequence[tuple[str, str]]) -> None:
        self._hidden = hidden
        self._begun = time.monotonic()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._left = ""  # output whose end is not there yet
        self._codes: list[int] = []  # exit codes since the last line was typed
        self.events: list[tuple[float, str]] = []
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        self._bash = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "--noediting", "-i"],
            cwd=folder,
            env=dict(environ),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)

    def wait(self, seconds: float) -> int:
        """Record until the prompt is there, and return the exit code of the command before it.

        Args:
            seconds: after which it is an error.

        Raises:
            RecordingError: the prompt did not come.
        """
        deadline = time.monotonic() + seconds
        while not self._codes:
            if time.monotonic() > deadline:
                raise RecordingError(f"no prompt after {seconds:.0f} s:\n{self.shown()}")
            self._read(0.1)
        self._read(0.2)  # the prompt itself comes after the code
        return self._codes.pop()

    def type(self, text: str) -> None:
        """Type a line, letter by letter, and the return key; the command may end before this returns."""
        self._codes.clear()
        for letter in f"{text}\n":
            os.write(self._master, letter.encode())
            self.pause(KEY_SECONDS)

    def pause(self, seconds: float) -> None:
        """Record for a while, in which a reader reads."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._read(min(0.05, max(0.0, deadline - time.monotonic())))

    def close(self) -> None:
        """End bash and wait for it."""
        self._bash.send_signal(signal.SIGHUP)
        os.close(self._master)
        try:
            self._bash.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._bash.kill()
            self._bash.wait()

    def shown(self) -> str:
        """Return the end of what was recorded, for messages."""
        return "".join(text for _, text in self.events)[-2000:]

    def _read(self, seconds: float) -> None:
        """Record what comes next, if it comes within some seconds."""
        ready, _, _ = select.select([self._master], [], [], seconds)
        if not ready:
            return
        try:
            data = os.read(self._master, 65536)
        except OSError as error:  # Linux says EIO when bash has ended
            raise RecordingError(f"bash has ended:\n{self.shown()}") from error
        text = self._left + self._decoder.decode(data)
        cut = _PARTIAL.search(text)
        self._left = text[cut.start() :] if cut else ""
        text = text[: cut.start()] if cut else text
        self._codes += map(int, _DONE.findall(text))
        text = _DONE.sub("", text)
        for found, instead in self._hidden:
            text = text.replace(found, instead)
        if text:
            self.events.append((time.monotonic() - self._begun, text))


def record(
    lines: Sequence[str],
    title: str,
    folder: Path,
    home: Path,
    environ: Mapping[str, str],
    pause: float = READ_SECONDS,
) -> Cast:
    """Type lines into a terminal, and return the recording.

    Args:
        lines: to type, each after the command before has ended with 0.
        title: of the recording.
        folder: in which the commands run.
        home: the home folder of the shell.
        environ: variables of the shell, besides those of the terminal.
        pause: seconds before each line, in which a reader reads.

    Raises:
        RecordingError: a command fails, or shows what the player cannot show.
    """
    shell = {
        "TERM": "xterm-256color",
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / ".local/state"),
        "PS1": PROMPT,
        "PROMPT_COMMAND": r"printf '\033]9;%d\007' $?",
    }
    started = int(time.time())
    terminal = Terminal(folder, {**environ, **shell}, [(str(folder), "~/springtide"), (str(home), "~")])
    try:
        terminal.wait(30.0)
        for line in lines:
            terminal.pause(pause)
            terminal.type(line)
            if code := terminal.wait(COMMAND_SECONDS):
                raise RecordingError(f"exit code {code} of `{line}`:\n{terminal.shown()}")
        terminal.pause(pause)
    finally:
        terminal.close()
    cast = Cast(WIDTH, HEIGHT, title, started, tuple(terminal.events), IDLE_LIMIT)
    if strange := unknown(cast.output):
        raise RecordingError(f"the player knows nothing of {sorted(set(strange))}")
    return cast


def main(name: str = "tutorial") -> int:
    """Record a page of docs/, and write its .cast and its transcript; return the exit code."""
    page = (ROOT / "docs" / f"{name}.md").read_text()
    title = page.splitlines()[0].removeprefix("# ")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environ = {"PATH": path, "LANG": "C.UTF-8"}
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="springtide-recording-") as home:
        try:
            cast = record(script(page), title, ROOT, Path(home), environ)
        except RecordingError as error:
            print(f"recording: {error}", file=sys.stderr)
            return 1
        finally:
            Cluster(Path(home) / ".local/state/springtide/local").stop()  # after a recording that failed
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.cast").write_text(cast.dump())
    (FOLDER / f"{name}.md").write_text(transcript(cast, f"{name}.md", f"{name}.cast"))
    print(f"docs/recordings/{name}.cast: {cast.seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
