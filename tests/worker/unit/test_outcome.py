import dataclasses
import json
import math
import os
import runpy
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.comm import codec
from springtide.coordination import outcome
from springtide.coordination.outcome import Failed, Finished, Left

DONE = Finished(
    incarnation=(1, 0),
    generation=7,
    step=2400,
    epochs=300,
    data={"epoch": 300, "seen": 0, "repeated": 0, "lost": 0, "skipped": 0, "totalSeen": 431100},
    values={"test_accuracy": 0.978},
    report={"generations": 7, "restarts": 0},
)


def test_the_message_is_the_documented_one() -> None:
    assert json.loads(outcome.to_json(DONE)) == {
        "outcome": "Finished",
        "incarnation": [1, 0],
        "generation": 7,
        "step": 2400,
        "epochs": 300,
        "data": {"epoch": 300, "seen": 0, "repeated": 0, "lost": 0, "skipped": 0, "totalSeen": 431100},
        "values": {"test_accuracy": 0.978},
        "report": {"generations": 7, "restarts": 0},
    }
    assert json.loads(outcome.to_json(Left("SIGTERM"))) == {"outcome": "Left", "reason": "SIGTERM"}
    assert json.loads(outcome.to_json(Failed("ValueError", "bad", "train.py:31 in main"))) == {
        "outcome": "Failed",
        "exception": "ValueError",
        "message": "bad",
        "frame": "train.py:31 in main",
    }


@pytest.mark.parametrize(
    "made",
    [
        DONE,
        dataclasses.replace(DONE, taken={"step": 2400, "samples": 9, "shards": "0-3", "begun": "4:1"}),
        Left("asked"),
        Left("late", finished=True),
        Failed("E", "é\n\"'\\", "a.py:1"),
    ],
)
def test_what_is_written_is_read(made: outcome.Outcome) -> None:
    assert outcome.parse(outcome.to_json(made)) == made


def test_values_that_json_cannot_say_survive() -> None:
    values = {"nan": math.nan, "up": math.inf, "down": -math.inf}
    text = outcome.to_json(Finished((1, 0), 1, 1, 1, values=values))
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name))["values"] == {
        "nan": "nan",
        "up": "inf",
        "down": "-inf",
    }
    read = outcome.parse(text)
    assert isinstance(read, Finished)
    assert math.isnan(read.values["nan"])
    assert (read.values["up"], read.values["down"]) == (math.inf, -math.inf)


@pytest.mark.parametrize(
    "text",
    [None, "", "log line", "{}", "[]", "3", '{"outcome": "Else"}', '{"outcome": "Finished"}', b"\xff",
     '{"outcome": "Finished", "incarnation": [1], "generation": 1, "step": 1, "epochs": 1}',
     '{"outcome": "Finished", "incarnation": [1, 0], "generation": 1, "step": "x", "epochs": 1}',
     '{"outcome": "Finished", "incarnation": [1, 0], "generation": 1, "step": 1, "epochs": 1, "data": 7}'],
)  # fmt: skip
def test_anything_else_is_no_outcome(text: str | bytes | None) -> None:
    assert outcome.parse(text) is None


@settings(deadline=None)
@given(message=st.text(max_size=6000), frame=st.text(max_size=3000), name=st.text(max_size=3000))
def test_message_never_exceeds_limit_and_loses_text_first(message: str, frame: str, name: str) -> None:
    text = outcome.to_json(Failed(name, message, frame))
    assert len(text) <= outcome.LIMIT_BYTES
    read = outcome.parse(text)
    assert isinstance(read, Failed)
    if read.message != message:
        assert read.message.endswith("…")
        assert message.startswith(read.message[:-1])
    if read.frame != frame:
        assert read.message == "…"
    if read.exception != name:
        assert read.frame == "…"


def test_the_whole_room_is_used() -> None:
    for letter in ("x", "é", "\n", "漢", "😀"):
        text = outcome.to_json(Failed("E", letter * 5000, "f"))
        assert outcome.LIMIT_BYTES - 4 <= len(text) <= outcome.LIMIT_BYTES


def test_values_go_before_data_when_there_are_too_many() -> None:
    values = {f"value_{i:04}": 1.0 for i in range(1000)}
    read = outcome.parse(outcome.to_json(Finished((1, 0), 1, 1, 1, data={"lost": 0}, values=values)))
    assert read == Finished((1, 0), 1, 1, 1, data={"lost": 0})


def test_text_that_is_no_unicode_is_shown_escaped() -> None:
    read = outcome.parse(outcome.to_json(Failed("E", "bad \udcff name", "")))
    assert read == Failed("E", "bad \\udcff name", "")


# ---- exceptions


def raised(call: Callable[[], object], root: Path) -> Failed:
    try:
        call()
    except BaseException as error:
        return outcome.failed(error, os.fspath(root))
    raise AssertionError("nothing was raised")


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Failed]:
    def run(text: str) -> Failed:
        (tmp_path / "package").mkdir()
        (tmp_path / "package" / "deep.py").write_text("def dive(f):\n    return f()\n")
        path = tmp_path / "train.py"
        path.write_text(text)
        return raised(lambda: runpy.run_path(os.fspath(path)), tmp_path)

    return run


def test_the_frame_is_the_users_last_one(script: Callable[[str], Failed]) -> None:
    made = script("def main():\n    raise ValueError('bad data')\nmain()\n")
    assert made == Failed("ValueError", "bad data", "train.py:2 in main")


def test_frames_of_libraries_are_skipped(script: Callable[[str], Failed]) -> None:
    made = script("import json, torch\ndef load():\n    json.loads('{')\nload()\n")
    assert (made.exception, made.frame) == ("json.decoder.JSONDecodeError", "train.py:3 in load")


def test_frames_of_torch_and_of_springtide_are_skipped(tmp_path: Path) -> None:
    here = Path(__file__)
    made = raised(lambda: torch.nn.Linear(2, 2)(torch.zeros(3)), here.parent)
    assert made.frame.startswith("test_outcome.py:")
    assert made.frame.endswith("in <lambda>")
    made = raised(lambda: outcome.write(Left("x"), tmp_path / "no" / "folder"), tmp_path)
    assert (made.exception, made.frame.split(":")[0]) == ("FileNotFoundError", "test_outcome.py")
    # Of another folder of the library than the one that asks.
    made = raised(lambda: codec.specs(b"", 1), tmp_path)
    assert made.frame.split(":")[0] == "test_outcome.py"


def test_file_outside_of_the_scripts_folder_is_told_by_name(tmp_path: Path) -> None:
    assert raised(lambda: 1 / 0, tmp_path).frame.startswith("test_outcome.py:")


def test_a_module_beside_the_script_is_told_with_its_folder(
    script: Callable[[str], Failed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(os.fspath(tmp_path))
    made = script("from package.deep import dive\ndive(None)\n")
    assert (made.exception, made.frame) == ("TypeError", os.path.join("package", "deep.py") + ":2 in dive")


def test_an_error_at_the_top_of_the_script_has_no_function(script: Callable[[str], Failed]) -> None:
    assert script("x = 1\n1 / x - 1 / 0\n").frame == "train.py:2"


def test_a_syntax_error_is_told_where_it_is(script: Callable[[str], Failed]) -> None:
    made = script("x = 1\ndef broken(:\n")
    assert (made.exception, made.frame) == ("SyntaxError", "train.py:2")


def test_notes_exit_codes_and_broken_texts() -> None:
    noted = ValueError("bad")
    noted.add_note("while reading sample 3 of the dataset")
    assert outcome.failed(noted) == Failed("ValueError", "bad\nwhile reading sample 3 of the dataset", "")
    assert outcome.failed(SystemExit(3)) == Failed("SystemExit", "exit code 3", "")

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    made = outcome.failed(Mute())
    assert made.exception.endswith("Mute")
    assert made.message == "(its text cannot be shown: str() raised RuntimeError)"


# ---- the file


def test_the_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("x" * 5000)
    assert outcome.write(DONE, path)
    assert outcome.parse(path.read_bytes()) == DONE
    assert os.listdir(tmp_path) == ["log"]


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(outcome.PATH_VARIABLE, raising=False)
    assert outcome.write(Left("x")) is False
    monkeypatch.setenv(outcome.PATH_VARIABLE, os.fspath(tmp_path / "log"))
    assert outcome.write(Left("x")) is True
    assert outcome.parse((tmp_path / "log").read_text()) == Left("x")


def test_a_file_that_cannot_be_replaced_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(source: object, target: object) -> None:
        raise OSError(16, "Device or resource busy")  # what a rename onto a mount says

    monkeypatch.setattr(os, "replace", busy)
    path = tmp_path / "log"
    path.write_text("x" * 5000)
    inode = path.stat()[stat.ST_INO]
    assert outcome.write(DONE, path)
    assert outcome.parse(path.read_bytes()) == DONE
    assert path.stat()[stat.ST_INO] == inode
    assert os.listdir(tmp_path) == ["log"]


def test_a_place_that_cannot_be_written_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no/folder"):
        outcome.write(Left("x"), tmp_path / "no" / "folder")
