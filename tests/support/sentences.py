"""One sentence a line in the documentation, so that a change of one shows as a change of one.

`python tests/support/sentences.py [PAGE ...]` writes pages again so; without pages, all of them. A sentence
of more than 110 columns goes on in the next line. Tables, headings, code and quoted blocks stay as they are.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 110
GENERATED = ("docs/api.md", "docs/reference.md", "docs/recordings/tutorial.md")

# What may begin a line that is no running text.
_APART = re.compile(r"\s*(#|\||>|<|```|~~~|!\[|\[[^\]]+\]:|-{3,}$|={3,}$|$)")
_ITEM = re.compile(r"(\s*(?:[*+-]|\d+\.)\s+)(.*)")
_END = re.compile(r"[.?!][)\"'`*]*\s+(?=[A-Z`\"'(\[*0-9])")
_NO_END = re.compile(r"\b(e\.g|i\.e|vs|cf|No|et al|approx|etc|[A-Z])\.[)\"'`*]*\s+$")


def pages() -> list[Path]:
    """Return all pages that are written by hand."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
    found += sorted((ROOT / "docs").rglob("*.md"))
    return [page for page in found if str(page.relative_to(ROOT)) not in GENERATED]


def sentences(text: str) -> Iterator[str]:
    """Cut running text into sentences; what is in backticks or in a link is never cut."""
    hidden = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", lambda found: "`" * len(found[0]), text)
    begin = 0
    for end in _END.finditer(hidden):
        if not _NO_END.search(hidden[begin : end.end()]):
            yield text[begin : end.end()].strip()
            begin = end.end()
    if rest := text[begin:].strip():
        yield rest


def written(text: str) -> str:
    """Return a page with one sentence a line."""
    out: list[str] = []
    block: list[str] = []
    first, rest = "", ""
    fenced = False

    def flush() -> None:
        nonlocal first, rest
        if block:
            joined = " ".join(line.strip() for line in block)
            for number, sentence in enumerate(sentences(joined)):
                lead = first if number == 0 else rest
                out.extend(_wrapped(sentence, lead, rest))
        block.clear()
        first = rest = ""

    for line in text.split("\n"):
        if re.match(r"\s*(```|~~~)", line):
            flush()
            fenced = not fenced
            out.append(line)
        elif fenced or _APART.match(line) or (not block and re.match(r"( {4}|\t)", line)):
            flush()
            out.append(line)
        elif item := _ITEM.fullmatch(line):
            flush()
            first, rest = item[1], " " * len(item[1])
            block.append(item[2])
        else:
            if not block:
                first = rest = re.match(r"\s*", line)[0]  # type: ignore[index]
            block.append(line)
    flush()
    return "\n".join(out)


def _wrapped(sentence: str, first: str, rest: str) -> list[str]:
    """Wrap a sentence between words; a line never begins with what Markdown would take for a list."""
    shown = re.sub(r"`[^`]*`", lambda found: found[0].replace(" ", "\0"), sentence)
    lines = textwrap.wrap(
        shown,
        COLUMNS,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for number in range(1, len(lines)):
        if re.match(r"\s*([*+-]|\d+\.|#+|>|\|)\s", lines[number] + " "):
            word, _, after = lines[number].strip().partition(" ")
            lines[number - 1] += " " + word
            lines[number] = rest + after
    return [line.replace("\0", " ") for line in lines if line.strip()]


def main(names: Iterable[str]) -> None:
    for page in [Path(name) for name in names] or pages():
        page.write_text(written(page.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
