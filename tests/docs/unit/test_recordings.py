"""Recordings of terminals: what is in docs/recordings/ is current, and what players show of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.site.casts import Cast, load, screen, transcript, typed, unknown
from docs.site.record import script

DOCS = Path(__file__).resolve().parents[3] / "docs"
CASTS = sorted(path.stem for path in (DOCS / "recordings").glob("*.cast"))
AGAIN = "run make recording"


def cast(name: str) -> Cast:
    return load((DOCS / "recordings" / f"{name}.cast").read_text())


def test_the_tutorial_is_recorded() -> None:
    assert CASTS == ["tutorial"]


@pytest.mark.parametrize("name", CASTS)
def test_recording_has_the_commands_of_its_page(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text()
    lines = [line for line in script(page) if not line.startswith("#")]
    assert len(lines) > 10
    assert typed(screen(cast(name).output)) == lines, AGAIN
    assert cast(name).title == page.splitlines()[0].removeprefix("# "), AGAIN
    assert f"(recordings/{name}.cast)" in page
    assert f"(recordings/{name}.md)" in page


@pytest.mark.parametrize("name", CASTS)
def test_transcript_says_what_the_recording_shows(name: str) -> None:
    text = (DOCS / "recordings" / f"{name}.md").read_text()
    assert text == transcript(cast(name), f"{name}.md", f"{name}.cast"), AGAIN


@pytest.mark.parametrize("name", CASTS)
def test_recording_names_no_machine_and_fits_the_player(name: str) -> None:
    output = cast(name).output
    assert unknown(output) == []
    assert re.findall(r"(?<!\r)\n", output) == [], "a terminal needs both, and so do players of others"
    assert re.findall(r"(?<![\w~.])/(?:home|root|tmp|work|Users|var)/\S*", output) == []
    assert cast(name).seconds < 300


def test_recording_is_read_as_it_was_written() -> None:
    made = Cast(80, 24, "Title", 1_700_000_000, ((0.5, "$ ls\n"), (1.25, "ä\x1b[1mb\x1b[0m\n")), 2.0)
    assert load(made.dump()) == made
    assert made.date == "2023-11-14"
    assert made.seconds == 1.25
    page = transcript(made, "page.md", "page.cast")
    assert "```text\n$ ls\näb\n```" in page
    assert "on 2023-11-14" in page


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "line 1: no recording of version 2"),
        ('{"version": 1}\n', "line 1"),
        ('{"version": 2}\n[1.0, "o", "x"]\n[0.5, "o", "y"]\n', "line 3"),
        ('{"version": 2}\n[1.0, "i", "x"]\n', "line 2"),
    ],
)
def test_what_is_no_recording_is_refused(lines: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(lines)


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        ("a\nb", ["a", "b"]),
        ("abc\rX", ["Xbc"]),
        ("abc\r\x1b[Kd", ["d"]),
        ("ab\b\bX", ["Xb"]),
        ("\x1b[1;32mgreen\x1b[0m end  ", ["green end"]),
        ("abc\rx\x1b[31my\x1b[0m\n", ["xyc", ""]),
    ],
)
def test_screen_shows_what_a_terminal_would(output: str, lines: list[str]) -> None:
    assert screen(output) == lines


@pytest.mark.parametrize(
    "sequence", ["\x1b[2J", "\x1b[3A", "\x1b[?25l", "\x1b]0;title\x07", "\x07", "\x1b(B"]
)
def test_sequences_that_no_player_here_knows_are_found(sequence: str) -> None:
    assert unknown(f"a\x1b[1mb\x1b[0m\r\n{sequence}c") == [sequence]


def test_script_has_commands_below_their_headings() -> None:
    page = (
        "# Title\n\n```console\n$ before\n```\n\n## One\n\n```console\n$ a\nprinted\n$ b 'c d'\n```\n\n"
        "## Two\n\n```python\n$ c\n```\n\n## Three\n\n```console\n$ d\n```\n"
    )
    assert script(page) == ["# One", "a", "b 'c d'", "# Three", "d"]
