"""docs/compatibility.md is made of the cases that the tests try."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from compatibility import CASES

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_page_is_generated_from_the_cases() -> None:
    spec = importlib.util.spec_from_file_location("springtide_docs_compatibility", DOCS / "compatibility.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    page = (DOCS / "compatibility.md").read_text()
    assert page == generator.markdown(), "docs/compatibility.md is older than the cases: run make generate"
    titles = [case.title for case in CASES.values()]
    assert len(set(titles)) == len(titles) >= 40
