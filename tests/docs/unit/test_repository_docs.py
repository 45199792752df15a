"""The documentation says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gpu_capabilities import files_with_gpu_tests
from sentences import pages, written

from springtide_operator.api import reasons

ROOT = Path(__file__).resolve().parents[3]
# Seen on pods, in status and in events, not in conditions.
OTHERS = ("DELETE_", "END_", "STATE_", "EVENT_", "SIZE_")
TYPES = {
    "RUNNING",
    "RESCALING",
    "DEGRADED",
    "SUSPENDED",
    "SUCCEEDED",
    "FAILED",
    "READY",
    "RECONCILING",
    "STALLED",
}


def test_every_reason_of_a_condition_is_explained() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text()
    named = {
        name: value
        for name, value in vars(reasons).items()
        if name.isupper()
        and isinstance(value, str)
        and (name == "STATE_LOST" or not name.startswith(OTHERS))
        and name not in TYPES
    }
    assert len(named) >= 20
    assert [value for value in named.values() if f"`{value}`" not in text] == []


def test_every_reason_of_a_size_is_explained() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    named = [value for name, value in vars(reasons).items() if name.startswith("SIZE_")]
    assert len(named) >= 5
    assert [value for value in named if f"| `{value}` |" not in text] == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md", "docs/glossary.md"])
def test_paths_in_backticks_exist(page: str) -> None:
    roots = [ROOT, *(ROOT / root for root in ("protocol", "operator", "worker", "ps", "deploy/local"))]
    named = re.findall(r"`((?:[a-z_.]+/)+(?:[a-z_.*]+)?)`", (ROOT / page).read_text())
    ours = [name for name in named if any((root / name.split("/")[0]).is_dir() for root in roots)]
    assert [name for name in ours if not any(list(root.glob(name)) for root in roots)] == []


def test_policies_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    [sentence] = re.findall(r"The policies, each a pure file in.*?\n\n", text, re.DOTALL)
    named = re.findall(r"`([a-z_]+)`", sentence)
    assert len(named) >= 10
    plan = ROOT / "operator/springtide_operator/plan"
    assert [name for name in named if not (plan / f"{name}.py").is_file()] == []


def test_every_file_of_tests_that_need_a_gpu_is_named_as_not_run() -> None:
    text = (ROOT / "docs/unverified.md").read_text()
    files = [path for path in files_with_gpu_tests(ROOT / "tests") if "docs" not in path.parts]
    assert len(files) >= 9
    assert [path.name for path in files if str(path.relative_to(ROOT)) not in text] == []


def test_make_targets_named_in_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z-]+)", (ROOT / "README.md").read_text())) - {"and"}
    assert {target for target in named if not re.search(rf"^{target}:", makefile, re.MULTILINE)} == set()
    for target in ("help", "demo", "test", "tools", "lint", "bench", "chaos", "fuzz", "gpu", "clean"):
        assert re.search(rf"^{target}:.*## ", makefile, re.MULTILINE), f"make help does not list {target}"


def test_every_test_of_the_threat_table_exists() -> None:
    text = (ROOT / "docs/security.md").read_text()
    rows = [line for line in text.splitlines() if "`test_" in line]
    named = {name for row in rows for name in re.findall(r"`(test_\w+)`", row)}
    assert len(rows) >= 20
    found = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert named - found == set()


def test_every_variable_of_a_pod_is_in_the_table() -> None:
    """The table of docs/architecture.md names what the operator's manifests write."""
    folder = ROOT / "operator/springtide_operator/manifests"
    written_ones = {
        name
        for path in folder.glob("*.py")
        for name in re.findall(r'"(SPRINGTIDE_[A-Z0-9_]*[A-Z0-9])"', path.read_text())
    }
    assert len(written_ones) >= 40
    page = (ROOT / "docs/architecture.md").read_text()
    assert {name for name in written_ones if f"`{name}`" not in page} == set()


def test_pages_have_one_sentence_a_line() -> None:
    """`python tests/support/sentences.py` writes them so."""
    assert [
        str(page.relative_to(ROOT)) for page in pages() if written(page.read_text()) != page.read_text()
    ] == []


def test_sentences_end_where_they_end() -> None:
    text = "* One, e.g. `a. B`, two. Three (four.) Five [6. Seven](x. Y) 8.5 nine. `ten` is last.\n\n| a. B |"
    assert written(text).split("\n") == [
        "* One, e.g. `a. B`, two.",
        "  Three (four.)",
        "  Five [6. Seven](x. Y) 8.5 nine.",
        "  `ten` is last.",
        "",
        "| a. B |",
    ]


@pytest.mark.parametrize(
    ("walk", "most"),
    [
        ("From `spec.workers.replicas` to a pod", 16),
        ("A gradient from `backward()` to a server and back", 18),
        ("From kill -9 of a worker to the next step", 20),
    ],
)
def test_walks_lead_through_few_files(walk: str, most: int) -> None:
    text = (ROOT / "docs/architecture.md").read_text().split(f"### {walk}\n", 1)[1].split("\n### ", 1)[0]
    steps = re.findall(r"^\d+\. `([^`]+)`: `([A-Za-z_]+)`", text, re.MULTILINE)
    assert len(steps) == len(re.findall(r"^\d+\. ", text, re.MULTILINE))
    for path, name in steps:
        assert re.search(rf"^ *(?:async )?(?:def|class) {name}\b", (ROOT / path).read_text(), re.MULTILINE), (
            f"{path} has no {name}"
        )
    assert 0 < len({path for path, _ in steps}) <= most
