"""The page that sets us beside others cites what it says of them; its figures are those of other pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "comparison.md").read_text()
PEERS = ["torchrun", "torchft", "Kubeflow Trainer", "Ray Train", "DLRover"]
# What needs no citation: that a system does not have a thing, or leaves it to another.
UNCITED = {
    "left to the script",
    "none",
    "nothing found",
    "the operator is no part of training",
    "what the launcher in its pods does",
}


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, its head first."""
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in (lines[0], *lines[2:])]


def test_every_claim_about_others_is_cited() -> None:
    head, *body = rows("What happens")
    assert [cell.strip("| ") for cell in head][-6:] == ["Springtide", *PEERS]
    assert len(body) >= 8
    uncited = [
        (row[0], cell)
        for row in body
        for cell in row[2:]
        if cell not in UNCITED and not re.search(r"\]\(https://[^)]+\)", cell)
    ]
    assert uncited == []
    assert {len(row) for row in body} == {7}


MEASURED = rows("What was measured")[1:]


@pytest.mark.parametrize("row", MEASURED, ids=[row[3].split("`")[1] for row in MEASURED])
def test_every_figure_is_on_the_page_that_it_names(row: list[str]) -> None:
    what, ours, theirs, benchmark = row
    (name,), (target,) = re.findall(r"`(\w+)`", benchmark), re.findall(r"\]\(([^)#]+)", benchmark)
    assert (DOCS.parent / "benchmarks" / f"{name}.py").is_file()
    source = (DOCS / target).read_text()
    figures = re.findall(r"\d+\.\d+", " ".join((what, ours, theirs)))
    assert figures
    assert [figure for figure in figures if figure not in source] == []


def test_what_was_not_measured_is_said() -> None:
    flat = " ".join(PAGE.split())
    assert "Kubeflow Trainer, Ray Train and DLRover were run by nobody here" in flat
    assert "(unverified.md)" in PAGE
