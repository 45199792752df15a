"""Functions become scripts that do the same elsewhere, or are refused by name."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import client_helpers
import pytest
import torch

from springtide_client.errors import SourceError
from springtide_client.source import script_of


def run(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
    """Run a script as its process would, with nothing of this module in reach."""
    (folder / "arguments.json").write_text(json.dumps(arguments))
    monkeypatch.setattr(sys, "argv", ["script.py", str(folder / "arguments.json")])
    main = ModuleType("__main__")  # in which dataclasses look names up
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(compile(script, "script.py", "exec"), main.__dict__)


def test_a_function_takes_along_what_it_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = script_of(client_helpers.train)
    monkeypatch.delitem(sys.modules, "client_helpers")
    run(script, tmp_path, monkeypatch, path=str(tmp_path / "out"), steps=[0, 1])
    found = json.loads((tmp_path / "out").read_text())
    assert found == {"rates": [0.2, 0.275], "text": "keeps\n    its indentation", "finite": True}
    lines = script.splitlines()
    for line in (
        "import os.path",
        "import json as js",
        "import torch.nn.functional as F",
        "import torch.nn as nn",
        "import torch.utils.data",
        "EPOCHS = 3",
    ):
        assert line in lines
    assert "client_helpers" not in script
    assert "lock = " not in script


def test_it_writes_each_definition_once_and_in_order() -> None:
    script = script_of(client_helpers.train)
    for text in ("def double(", "def halve(", "class Settings", "def logged(", "RATES = ", "EPOCHS = "):
        assert script.count(text) == 1
    assert script.index("RATES = ") < script.index("class Settings") < script.index("def train(")
    assert script.index("def logged(") < script.index("@logged")


@pytest.mark.parametrize(("which", "said"), [("alone", "c\nd"), ("plain", "a\nb 7")])
def test_nested_functions_keep_their_text(
    which: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(script_of(client_helpers.nested(None, 7)[which]), tmp_path, monkeypatch, path=str(tmp_path / "out"))
    assert (tmp_path / "out").read_text() == said


def test_live_objects_are_refused_by_name() -> None:
    for function, words in (
        (client_helpers.with_lock, r"with_lock uses 'lock' \(a _thread\.lock\), which lives in this process"),
        (client_helpers.with_model, r"with_model uses 'model' \(a torch\.nn\.modules\.linear\.Linear\)"),
        (
            client_helpers.nested(torch.nn.Linear(1, 1), 0)["live"],
            r"over_live closes over 'live' \(a torch\.nn\.modules\.linear\.Linear\) .* make it inside",
        ),
        (client_helpers.with_nothing, "with_nothing uses 'undefined', which is not defined"),
    ):
        with pytest.raises(SourceError, match=words):
            script_of(function)


@pytest.mark.parametrize("value", [float("nan"), [object()], {"a": Path("x")}, torch.tensor(1.0)])
def test_values_without_a_literal_are_not_plain(value: Any) -> None:
    with pytest.raises(SourceError, match="over_live closes over 'live'"):
        script_of(client_helpers.nested(value, 0)["live"])


class Called:
    def __call__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: None, "a lambda cannot be sent"),
        (client_helpers.asynchronous, "asynchronous is asynchronous"),
        (client_helpers.generator, "generator is a generator"),
        (client_helpers.Trainer().fit, r"Trainer\.fit is a method, and its object lives in this process"),
        (client_helpers.Trainer.fit, r"Trainer\.fit is a method of a class"),
        (client_helpers.Trainer, "Trainer is a class"),
        (functools.partial(client_helpers.train, "x"), "no function with source, but a partial: give its"),
        (Called(), "no function with source, but a Called"),
        (print, "print is no function with source"),
    ],
    ids=lambda value: getattr(value, "__name__", "object") if callable(value) else "",
)
def test_other_callables_are_refused(function: Any, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        script_of(function)


def test_a_function_without_source_is_refused() -> None:
    names: dict[str, Any] = {"__name__": "typed"}
    exec("def typed(): pass", names)
    with pytest.raises(SourceError, match="the source of typed, which typed needs, cannot be read"):
        script_of(names["typed"])


def test_a_users_module_needs_its_folder(tmp_path: Path) -> None:
    function = client_helpers.with_another_module
    with pytest.raises(SourceError, match=r"'cli_fake_kube' of the module .* send its folder by code="):
        script_of(function)
    with pytest.raises(SourceError, match="which is not in the folder"):
        script_of(function, tmp_path)
    (tmp_path / "cli_fake_kube.py").touch()
    assert "import cli_fake_kube" in script_of(function, tmp_path).splitlines()


def test_a_changed_file_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "changing.py"
    path.write_text("def first():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import changing

    path.write_text("def renamed_since():\n    return 2\n")
    monkeypatch.delitem(sys.modules, "changing")
    with pytest.raises(SourceError, match="the file of first has changed since it was imported"):
        script_of(changing.first)
