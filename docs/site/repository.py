"""Find where a file of the repository lies in the site, and turn the links of pages accordingly.

Pages are written for readers of the repository: README.md is the home page, and links lead to scripts and
manifests that lie outside docs/. In the site each file that a page links to has a page of its own.
Paths are POSIX paths from the repository's root.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

# Pages outside docs/, and their names in the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
}
# The folder in the site of other files outside docs/.
SOURCE = "source"
_LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".json": "json",
    ".sh": "bash",
    "Dockerfile": "docker",
    "Makefile": "make",
}
# A fenced block, or code in backticks, in which nothing is a link; or a link's target.
_LINK = re.compile(r"^ *```.*?^ *```|`[^`]*`|(?<=\]\()([^)\s]+)(?=\))", re.MULTILINE | re.DOTALL)


def github_slug(heading: str, separator: str = "-") -> str:
    """Return the anchor that GitHub gives to a heading.

    Args:
        heading: its text, without markup.
        separator: between words; the argument that Python-Markdown passes.
    """
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", separator)


def site_page(path: str) -> str:
    """Return the name in the site, from its root, of a page or file of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{SOURCE}/{path}" if path.endswith(".md") else f"{SOURCE}/{path}.md"


def targets(text: str) -> list[str]:
    """Return the targets of a page's links, those to other sites included."""
    return [found[1] for found in _LINK.finditer(text) if found[1]]


def resolve(page: str, target: str, root: Path) -> str | None:
    """Return the repository's file that a link means.

    Args:
        page: that has the link.
        target: of the link, without its anchor.
        root: of the repository; a folder with a README.md means that.

    Returns:
        None for a link to another site or within the page.
    """
    if not target or re.match(r"[a-z]+:", target):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return f"{path}/README.md" if (root / path / "README.md").is_file() else path


def with_site_links(page: str, text: str, root: Path) -> str:
    """Return a page's text with links to where the site has what they mean.

    Args:
        page: its path.
        text: as in the repository.
        root: of the repository.
    """
    here = posixpath.dirname(site_page(page)) or "."

    def turned(found: re.Match[str]) -> str:
        target, hash_sign, anchor = (found[1] or "").partition("#")
        path = resolve(page, target, root)
        if path is None:
            return found[0]
        return posixpath.relpath(site_page(path), here) + hash_sign + anchor

    return _LINK.sub(turned, text)


def reached(pages: Iterable[str], root: Path) -> list[str]:
    """Return the files and folders outside docs/ that the site needs since pages link to them, sorted.

    Args:
        pages: of the site.
        root: of the repository.
    """
    left, seen = list(pages), set(pages)
    while left:
        page = left.pop()
        if not page.endswith(".md"):
            continue
        for target in targets((root / page).read_text()):
            path = resolve(page, target.partition("#")[0], root)
            if path is not None and path not in seen and (root / path).exists():
                seen.add(path)
                left.append(path)
    return sorted(path for path in seen if path not in PAGES and not path.startswith("docs/"))


def source_page(path: str, root: Path) -> str:
    """Return the Markdown of the page that shows a file, or lists a folder, outside docs/.

    Args:
        path: of the file or folder.
        root: of the repository.
    """
    file = root / path
    if file.is_dir():
        names = sorted(f"{one.name}/" if one.is_dir() else one.name for one in file.iterdir())
        return f"# {path}/\n\n" + "".join(f"* `{name}`\n" for name in names if name[0] not in "._")
    if file.suffix == ".md":
        return with_site_links(path, file.read_text(), root)
    if file.suffix == ".ipynb":
        return f"# {path}\n\n" + "\n".join(_cells(json.loads(file.read_text())))
    language = _LANGUAGES.get(file.suffix) or _LANGUAGES.get(file.name, "text")
    return f"# {path}\n\n{fenced(file.read_text(), language)}"


def fenced(text: str, language: str) -> str:
    """Return a block of code, whose fence is longer than any in the text.

    Args:
        text: the code.
        language: for its colours.
    """
    fence = "`" * max([3, *(len(found) + 1 for found in re.findall(r"`{3,}", text))])
    return f"{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _cells(notebook: dict[str, object]) -> Iterable[str]:
    """Yield the Markdown of a notebook's cells; outputs are left out."""
    cells = notebook["cells"]
    assert isinstance(cells, list)
    for cell in cells:
        text = "".join(cell["source"])
        yield f"{text}\n" if cell["cell_type"] == "markdown" else fenced(text, "python")
