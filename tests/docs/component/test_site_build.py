"""`make docs` builds a site that is whole: each page as GitHub shows it, and nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt

from docs.site.repository import PAGES, site_page

ROOT = Path(__file__).resolve().parents[3]
BUILD_SECONDS = 180
WRITTEN = sorted([*PAGES, *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))])
# Blocks whose order must be the same; paragraphs are not among them, since lists have them or not.
BLOCKS = {
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "ul",
    "ol",
    "li",
    "pre",
    "table",
    "tr",
    "th",
    "td",
    "blockquote",
    "img",
}
INLINE = {"em", "strong", "code"}
VOID = {"img", "br", "hr", "input", "meta", "link"}


class Shown(HTMLParser):
    """Collects a page's text as a reader sees it: blocks in their order, and the letters in them.

    Attributes:
        seen: names of blocks and inline markup, and what is written between them, without spaces.
    """

    def __init__(self, within: str | None = None) -> None:
        super().__init__()
        self._within = within  # the element that holds the text; None: everything
        self._inside = within is None
        self._code = 0
        self._left_out = 0  # open elements from one on that is no text of the page
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == self._within:
            self._inside = True
        names = (dict(attrs).get("class") or "").split()
        if self._left_out or {"headerlink", "springtide-recording"} & set(names):
            self._left_out += tag not in VOID
            return
        if self._inside and (tag in BLOCKS or (tag in INLINE and not self._code)):
            self.seen.append(f"<{tag}>")
        self._code += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag == self._within:
            self._inside = False
        if self._left_out:
            self._left_out -= 1
            return
        self._code -= tag == "pre"

    def handle_data(self, data: str) -> None:
        text = re.sub(r"\s+", "", data)
        if not self._inside or self._left_out or not text:
            return
        if self.seen and not self.seen[-1].startswith("<"):
            self.seen[-1] += text
        else:
            self.seen.append(text)


class Addresses(HTMLParser):
    """Collects the addresses of a page.

    Attributes:
        links: where a reader can go.
        loaded: what a browser fetches to show the page.
        ids: that links can name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if "id" in found:
            self.ids.add(found["id"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(found["href"])
        elif "src" in found:
            self.loaded.append(found["src"])


def addresses(page: Path) -> Addresses:
    found = Addresses()
    found.feed(page.read_text())
    return found


def shown(html: str, within: str | None = None) -> list[str]:
    found = Shown(within)
    found.feed(html)
    return found.seen


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does."""
    if importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs-material is not installed: make docs brings it")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


def html_of(site: Path, path: str) -> Path:
    """Return the file of a repository's page."""
    page = Path(site_page(path)).with_suffix(".html")
    return site / (page.with_name("index.html") if page.name == "README.html" else page)


def test_pages_read_as_on_github(site: Path) -> None:
    """MkDocs' Markdown differs from GitHub's where lists are nested; no page may depend on it."""
    github = MarkdownIt("commonmark").enable("table").enable("strikethrough")
    different = {}
    for path in WRITTEN:
        wanted = shown(github.render((ROOT / path).read_text()))
        found = shown(html_of(site, path).read_text(), within="article")
        if wanted != found:
            pairs = itertools.zip_longest(wanted, found)
            first = next(number for number, (one, other) in enumerate(pairs) if one != other)
            different[path] = (wanted[first - 3 : first + 3], found[first - 3 : first + 3])
    assert different == {}


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(WRITTEN)
    loaded = {address for page in pages for address in addresses(page).loaded}
    assert any(address.endswith(".css") for address in loaded)
    assert {address for address in loaded if re.match(r"(?:[a-z]+:)?//", address)} == set()
    styles = "".join(style.read_text() for style in site.rglob("*.css"))
    assert re.findall(r"(?:@import|url\()\s*['\"]?(?:https?:)?//[^)\s]*", styles) == []


def test_every_address_in_the_site_exists(site: Path) -> None:
    pages = {page: addresses(page) for page in site.rglob("*.html") if page.name != "404.html"}
    wrong = []
    for page, found in pages.items():
        for address in [*found.links, *found.loaded]:
            name, _, anchor = unquote(address).partition("#")
            if re.match(r"[a-z]+:", name):
                continue
            target = (page.parent / name.partition("?")[0]).resolve() if name else page
            if target.is_dir():
                target /= "index.html"
            known = target in pages
            if not target.is_file() or (anchor and known and anchor not in pages[target].ids):
                wrong.append(f"{page.relative_to(site)}: {address}")
    assert wrong == []


def test_search_finds_pages_and_no_listing(site: Path) -> None:
    text = (site / "search/search_index.js").read_text()
    index = json.loads(text.removeprefix("var __index = "))
    where = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {str(html_of(site, path).relative_to(site)) for path in WRITTEN} <= where
    assert {name for name in where if name.startswith("source/")} == {"source/tests/index.html"}
    boosts = {entry["location"]: entry.get("boost") for entry in index["docs"]}
    assert boosts["guide.html"] is None
    assert boosts["decisions/0001-own-gradient-buckets.html"] < 1
