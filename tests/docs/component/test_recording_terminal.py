"""A real bash is recorded, and the site's player shows what the transcript says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from required import require_tool

from docs.site.casts import Cast, load, screen, typed
from docs.site.record import RecordingError, record

ROOT = Path(__file__).resolve().parents[3]
PLAYER = ROOT / "docs/site/player.js"


def recorded(folder: Path, *lines: str) -> Cast:
    home = folder / "home"
    home.mkdir()
    environ = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    return record(lines, "Title", folder, home, environ, pause=0.0)


def test_commands_are_typed_and_their_output_recorded(tmp_path: Path) -> None:
    lines = [
        "# a comment",
        "echo 'ä'",
        r"printf '\033[1mbold\033[0m\n'",
        "pwd; cd; pwd",
        "x=5",
        'echo "$x $COLUMNS"',
        "tty",
    ]
    cast = recorded(tmp_path, *lines)
    shown = screen(cast.output)
    assert typed(shown) == lines[1:]
    assert "$ # a comment" in shown
    assert shown[shown.index("$ pwd; cd; pwd") + 1 :][:2] == ["~/springtide", "~/springtide/home"]
    assert "5 110" in shown
    assert shown[shown.index("$ echo 'ä'") + 1] == "ä"
    assert "\x1b[1mbold\x1b[0m" in cast.output
    assert "\x1b]9" not in cast.output
    # Letters come one after the other.
    assert sum(len(text) == 1 for _, text in cast.events) > 50
    times = [seconds for seconds, _ in cast.events]
    assert times == sorted(times)
    assert load(cast.dump()).output == cast.output


def test_command_that_fails_ends_the_recording(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"exit code 3 of `\(exit 3\)`"):
        recorded(tmp_path, "(exit 3)", "echo never")


def test_output_that_no_player_can_show_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="the player knows nothing of"):
        recorded(tmp_path, r"printf '\033[2J'")


def test_shell_that_ends_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="bash has ended"):
        recorded(tmp_path, "exit")


def test_the_player_shows_the_same_as_the_transcript() -> None:
    """Runs in Node, without a page, the part of the player that reads recordings and writes on a screen."""
    node = require_tool("node")
    code = """
    const player = require(process.argv[1]);
    const cast = player.read(require("fs").readFileSync(process.argv[2], "utf8"));
    const shown = (text) => {
      const screen = new player.Screen();
      screen.write(text);
      return screen.text();
    };
    const parts = ["abc\\rX", "abc\\r\\x1b[Kd", "ab\\b\\bX", "\\x1b[1;32mgreen\\x1b[0m end  ", "a\\nb"];
    const pauses = cast.events.map((event, index) => event.at - (index ? cast.events[index - 1].at : 0));
    console.log(JSON.stringify({
      text: player.screenAt(cast, cast.seconds).text(),
      half: player.screenAt(cast, cast.seconds / 2).text(),
      screens: parts.map(shown),
      seconds: cast.seconds,
      longest: Math.max(...pauses),
    }));
    """
    path = ROOT / "docs/recordings/tutorial.cast"
    done = subprocess.run(
        [node, "-e", code, str(PLAYER), str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    cast = load(path.read_text())
    whole = "\n".join(screen(cast.output))
    assert found["text"].strip() == whole.strip()
    assert 0 < len(found["half"]) < len(whole)
    assert found["screens"] == ["Xbc", "d", "Xb", "green end", "a\nb"]
    assert found["longest"] <= cast.idle_limit + 1e-6
    assert found["seconds"] < cast.seconds
