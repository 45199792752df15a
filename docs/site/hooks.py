"""Functions that MkDocs calls while it builds the site (mkdocs.yml names this file).

It gives README.md and the other pages outside docs/ their places, makes a page of each file that a page links
to, turns links accordingly, and gives headings the anchors that GitHub gives them. MkDocs calls the functions
in this order.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import repository  # MkDocs puts this folder on the path while it loads this file
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# Pages whose tables need the room of the table of contents.
WIDE = {"comparison.md"}


def on_config(config: MkDocsConfig) -> None:
    """Let headings have GitHub's anchors, which the pages' links name."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = repository.github_slug


def on_files(files: Files, *, config: MkDocsConfig) -> None:
    """Add the pages outside docs/, and one for each other file that is linked to."""
    pages = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    for path, name in repository.PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / path).read_text()))
        pages.append(path)
    for path in repository.reached([*pages, "tests/README.md"], ROOT):
        text = repository.source_page(path, ROOT)
        files.append(File.generated(config, repository.site_page(path), content=text))


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn a page's links, and let the search find pages about use before those about reasons."""
    uri = page.file.src_uri
    if uri.startswith(f"{repository.SOURCE}/"):
        _search(page, exclude=not uri.endswith("README.md"))
        return markdown
    if uri in WIDE:
        page.meta["hide"] = ["toc"]
    if uri.startswith("decisions/") or uri == "changelog.md":
        _search(page, boost=0.3)
    outside = {name: path for path, name in repository.PAGES.items()}
    return repository.with_site_links(outside.get(uri, f"docs/{uri}"), markdown, ROOT)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put a recording of a terminal below the paragraph that links to it; player.js plays it.

    It stands in the page itself, since a page that was opened as a file may fetch no other.
    """

    def with_recording(found: re.Match[str]) -> str:
        path = Path(config.docs_dir) / Path(page.file.src_uri).parent / found[1]
        # A script's text ends where a tag closes it.
        text = path.read_text().replace("<", "\\u003c")
        return f'{found[0]}<div class="springtide-recording"><script type="text/plain">{text}</script></div>'

    if page.file.src_uri.startswith("recordings/"):
        return html
    return re.sub(r'<p>(?:(?!</p>).)*<a href="([^":]+\.cast)">.*?</p>', with_recording, html, flags=re.DOTALL)


def _search(page: Page, **how: Any) -> None:
    page.meta["search"] = how
