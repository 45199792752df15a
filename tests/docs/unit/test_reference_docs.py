"""docs/reference.md is what the docstrings say, and leaves no public name out."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import springtide
from springtide import kv

DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("springtide_docs_reference", DOCS / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_generated_from_the_docstrings(generator: ModuleType) -> None:
    page = (DOCS / "reference.md").read_text()
    assert page == generator.markdown(), "docs/reference.md is older than the docstrings: run make generate"


def test_every_public_name_has_an_entry(generator: ModuleType) -> None:
    text = generator.markdown()
    for module in (springtide, kv):
        names = [name for name in module.__all__ if not name.startswith("_")]
        assert len(names) > 7
        missing = [
            name
            for name in names
            if f"### `{module.__name__}.{name}`\n" not in text and f"\n| `{name}`(" not in text
        ]
        assert missing == []


def test_a_public_name_without_a_docstring_is_named(
    generator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv.KVStore.push, "__doc__", None)
    with pytest.raises(ValueError, match=r"KVStore\.push is public and has no docstring"):
        generator.markdown()


def test_arguments_and_errors_are_lists(generator: ModuleType) -> None:
    doc = (
        "Act.\n\n    Args:\n        one: a\n            b.\n        two: c: d.\n\n    Raises:\n        It: e."
    )
    assert generator.as_markdown(doc, "it") == (
        "Act.\n\nArguments:\n\n- `one`: a b.\n- `two`: c: d.\n\nRaises:\n\n- `It`: e."
    )


def test_indented_blocks_are_code_and_lines_are_joined(generator: ModuleType) -> None:
    doc = "One sentence,\n    cut.\n\n        with step():\n            pass\n\n    Another.\n    "
    assert generator.as_markdown(doc, "it") == (
        "One sentence, cut.\n\n```python\nwith step():\n    pass\n```\n\nAnother."
    )
