"""The site has every page, in one place, and its links lead somewhere: what can be said without MkDocs."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from docs.site.repository import PAGES, github_slug, reached, resolve, site_page, source_page, with_site_links

ROOT = Path(__file__).resolve().parents[3]
CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
WRITTEN = sorted([*PAGES, *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))])
MARKDOWN = MarkdownIt("commonmark").enable("table")
READERS = ["Start", "ML engineers", "Platform engineers", "Contributors"]


def navigated(part: Any) -> Iterator[str]:
    """Yield the pages of a part of the navigation, in order."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, list):
        for one in part:
            yield from navigated(one)
    else:
        for one in part.values():
            yield from navigated(one)


def anchors(path: str) -> list[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    tokens = MARKDOWN.parse((ROOT / path).read_text())
    found = []
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            texts = [
                child.content for child in inline.children or () if child.type in ("text", "code_inline")
            ]
            found.append(github_slug("".join(texts)))
    return found


def links(path: str) -> list[str]:
    """Return the targets of a page's links, as Markdown has them."""
    tokens = [child for token in MARKDOWN.parse((ROOT / path).read_text()) for child in token.children or ()]
    found = [token.attrGet("href") or token.attrGet("src") for token in tokens]
    return [str(target) for target in found if target]


def test_every_page_has_one_place_in_the_navigation() -> None:
    named = list(navigated(CONFIG["nav"]))
    decisions = {path for path in WRITTEN if re.match(r"docs/decisions/\d", path)}
    wanted = {site_page(path) for path in WRITTEN if path not in decisions} | {"source/tests/README.md"}
    assert sorted(named) == sorted(set(named))
    assert wanted - set(named) == set(), "name the page in mkdocs.yml's nav, below the reader it is for"
    assert set(named) - wanted == set(), "mkdocs.yml's nav names pages that are not there"
    index = links("docs/decisions/README.md")
    assert sorted(f"docs/decisions/{name}" for name in index) == sorted(decisions)


def test_navigation_is_by_reader() -> None:
    assert [name for part in CONFIG["nav"] for name in part] == READERS


@pytest.mark.slow
@pytest.mark.parametrize("path", [*WRITTEN, "tests/README.md"])
def test_links_and_their_anchors_lead_somewhere(path: str) -> None:
    wrong = []
    for target in links(path):
        name, _, anchor = target.partition("#")
        found = resolve(path, name, ROOT) if name else path
        if found is None:
            continue
        if not (ROOT / found).exists() or (anchor and anchors(found).count(anchor) != 1):
            wrong.append(target)
    assert wrong == []


def test_site_fetches_nothing_when_it_is_viewed() -> None:
    assert CONFIG["theme"]["font"] is False
    assert {"search", "offline"} <= {name for one in CONFIG["plugins"] for name in one} | set(
        CONFIG["plugins"]
    )
    scripts = [
        *CONFIG["extra"]["polyfills"],
        *CONFIG.get("extra_javascript", ()),
        *CONFIG.get("extra_css", ()),
    ]
    assert [name for name in scripts if not (ROOT / "docs" / name).is_file()] == []
    # The offline plugin adds one from elsewhere unless there is a script of this name.
    assert any("iframe-worker" in name for name in CONFIG["extra"]["polyfills"])
    assert "repo_url" not in CONFIG, "the theme asks GitHub for a repository's stars"


def test_every_warning_of_a_build_is_an_error() -> None:
    values = {value for part in CONFIG["validation"].values() for value in part.values()}
    assert values == {"warn"}
    assert re.search(r"^\t.*mkdocs build --strict", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("path", "page"),
    [
        ("README.md", "index.md"),
        ("docs/decisions/0001-own-gradient-buckets.md", "decisions/0001-own-gradient-buckets.md"),
        ("examples/digits/train.py", "source/examples/digits/train.py.md"),
        ("tests/README.md", "source/tests/README.md"),
        ("Dockerfile", "source/Dockerfile.md"),
    ],
)
def test_files_have_their_page(path: str, page: str) -> None:
    assert site_page(path) == page


def test_links_lead_to_the_pages_of_the_site() -> None:
    text = (
        "[a](guide.md#data) [b](../README.md#parts) [c](../examples/digits/train.py)\n"
        "[d](https://example.com/x) [e](#here) `[f](../README.md)` ![g](consistency.svg) [h](decisions)\n"
        "```python\nx = [i](../README.md)\n```\n"
        "[j](../tests/README.md) [k](../deploy/locks)\n"
    )
    assert with_site_links("docs/install.md", text, ROOT) == (
        "[a](guide.md#data) [b](index.md#parts) [c](source/examples/digits/train.py.md)\n"
        "[d](https://example.com/x) [e](#here) `[f](../README.md)` ![g](consistency.svg)"
        " [h](decisions/README.md)\n"
        "```python\nx = [i](../README.md)\n```\n"
        "[j](source/tests/README.md) [k](source/deploy/locks.md)\n"
    )
    assert with_site_links("README.md", "[a](docs/guide.md)", ROOT) == "[a](guide.md)"
    assert with_site_links("tests/README.md", "[a](../docs/gpu.md)", ROOT) == "[a](../../gpu.md)"


def test_what_pages_link_to_is_found_through_other_pages(tmp_path: Path) -> None:
    for name in ("docs", "examples", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "docs/a.md").write_text("[b](../notes/b.md) [c](c.md) [lost](../lost.py)\n")
    (tmp_path / "docs/c.md").write_text("[folder](../examples)\n")
    (tmp_path / "notes/b.md").write_text("[script](../examples/x.py)\n")
    (tmp_path / "examples/x.py").write_text("print()\n")
    assert reached(["docs/a.md"], tmp_path) == ["examples", "examples/x.py", "notes/b.md"]


def test_pages_of_files_show_them_whole(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text('"""\n```python\n"""\n')
    (tmp_path / "folder").mkdir()
    for name in ("b.txt", "a.txt", ".hidden"):
        (tmp_path / "folder" / name).touch()
    assert source_page("x.py", tmp_path) == '# x.py\n\n````python\n"""\n```python\n"""\n````\n'
    assert source_page("folder", tmp_path) == "# folder/\n\n* `a.txt`\n* `b.txt`\n"
    notebook = source_page("examples/notebook.ipynb", ROOT)
    assert "```python\n" in notebook
    assert '"cell_type"' not in notebook


def test_paths_of_pages_stay_inside_the_site() -> None:
    for path in reached([*WRITTEN, "tests/README.md"], ROOT):
        assert posixpath.normpath(site_page(path)) == site_page(path)
        assert not site_page(path).startswith("..")


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("When workers are lost", "when-workers-are-lost"),
        ("Flux, Argo CD and kubectl wait", "flux-argo-cd-and-kubectl-wait"),
        ("A gradient from backward() to a server", "a-gradient-from-backward-to-a-server"),
        ("spec.a_b - c", "speca_b---c"),
    ],
)
def test_anchors_are_those_of_github(heading: str, anchor: str) -> None:
    assert github_slug(heading) == anchor
