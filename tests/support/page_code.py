"""The pieces of code of all pages: where they stand, and which test runs them.

`RUN_BY` and `NOT_RUN` together name every piece that is code (tests/docs/unit/test_page_code.py holds that).
A piece is meant by its page and its language, or by its page, its language and its heading.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
# Languages of pictures made of letters, and of what programs print.
NO_CODE = ("", "text")
CODE = ("python", "console", "yaml", "json")

Key = tuple[str, ...]

_DOCS = "tests/docs/component"
_PAGES = f"{_DOCS}/test_page_python.py"
_COMMANDS = f"{_DOCS}/test_page_commands.py"
_READ = (
    "tests/docs/unit/test_page_code.py"  # compared with what it is about, or checked as the API server does
)

# {(page, language[, heading]): the file of the test that runs it}
RUN_BY: dict[Key, str] = {
    ("README.md", "python"): _PAGES,
    ("README.md", "console", "On your machine"): _COMMANDS,
    ("docs/architecture.md", "json"): _READ,
    ("docs/checkpoints.md", "yaml"): _READ,
    ("docs/checkpoints.md", "python"): "tests/worker/unit/test_checkpoint_consolidate.py",
    ("docs/checkpoints.md", "console"): _COMMANDS,
    ("docs/client.md", "python"): "tests/operator/unit/test_client_jobs.py",
    ("docs/coming-from.md", "python"): f"{_DOCS}/test_coming_from.py",
    ("docs/coming-from.md", "yaml"): f"{_DOCS}/test_coming_from.py",
    ("docs/data.md", "python"): "tests/docs/unit/test_data_docs.py",
    ("docs/data.md", "console"): "tests/docs/unit/test_data_docs.py",
    ("docs/exact.md", "yaml"): _READ,
    ("docs/fsdp.md", "yaml"): _READ,
    ("docs/fsdp.md", "python"): _PAGES,
    ("docs/getting-started.md", "yaml"): _READ,
    ("docs/getting-started.md", "console", "Watch it"): _COMMANDS,
    ("docs/guide.md", "python"): "tests/docs/unit/test_guide.py",
    ("docs/install.md", "console", "kind"): f"{_DOCS}/test_install_page.py",
    ("docs/install.md", "console", "Upgrading"): f"{_DOCS}/test_install_page.py",
    ("docs/install.md", "console", "Removing"): f"{_DOCS}/test_install_page.py",
    ("docs/install.md", "console", "Without Helm"): _COMMANDS,
    ("docs/install.md", "console", "The command line"): _COMMANDS,
    ("docs/launch.md", "yaml"): _READ,
    ("docs/life.md", "console"): _COMMANDS,
    ("docs/operations.md", "console"): _COMMANDS,
    ("docs/own-collectives.md", "python"): f"{_DOCS}/test_coming_from.py",
    ("docs/parameter-servers.md", "yaml"): _READ,
    ("docs/parameter-servers.md", "python"): _PAGES,
    ("docs/reference.md", "python"): "tests/docs/unit/test_reference_docs.py",
    ("docs/security.md", "yaml"): _READ,
    ("docs/security.md", "console"): _COMMANDS,
    ("docs/sharding.md", "yaml"): _READ,
    ("docs/templates.md", "yaml"): _READ,
    ("docs/traces.md", "yaml"): _READ,
    ("docs/trackers.md", "python"): _PAGES,
    ("docs/trainers.md", "python"): "tests/docs/unit/test_trainers_docs.py",
    ("docs/troubleshooting.md", "console"): _COMMANDS,
    ("docs/tutorial.md", "console"): _COMMANDS,
    ("docs/troubleshooting.md", "yaml"): _READ,
}

_TARGETS = "targets of make, whose names are tested; each does the work of minutes"
_CHART = (
    "a variant of the kind section's command, which is run; its values are tested against the chart's schema"
)
# {(page, language, heading): why no test runs it}
NOT_RUN: dict[Key, str] = {
    ("CONTRIBUTING.md", "console", "Set up"): _TARGETS,
    ("README.md", "console", "Two commands"): _TARGETS,
    ("README.md", "console", "On a real cluster"): "needs a registry and a cluster that pulls from it",
    ("docs/getting-started.md", "console", "Install"): "made the environment in which tests run",
    ("docs/gpu.md", "console", "On a GPU"): "needs a CUDA device",
    ("docs/install.md", "console", "Images"): "needs a registry",
    ("docs/install.md", "console", "With Helm"): _CHART,
    ("docs/install.md", "console", "Without access to the internet"): _CHART,
    ("docs/install.md", "console", "For some namespaces only"): _CHART,
    ("docs/install.md", "console", "One cluster, several releases"): _CHART,
    ("docs/install.md", "console", "Seeing it"): _CHART,
    ("docs/install.md", "console", "Trying it on your cluster"): "needs a cluster that is no embedded one",
    ("docs/supply-chain.md", "console", "Other builds of torch"): "needs Docker and an index of packages",
    ("docs/supply-chain.md", "console", "What an image holds"): "needs Docker and a built image",
    ("docs/supply-chain.md", "console", "A release"): "needs Docker, a registry, cosign and an identity",
    ("docs/templates.md", "console", "Templates of the platform's team"): "the file is applied, and its job "
    "scaled, in tests/local/component/test_kubectl_policies.py",
    ("docs/templates.md", "console", "What the API server refuses"): "the file is applied, and obeyed, in "
    "tests/local/component/test_kubectl_policies.py",
    ("docs/traces.md", "console", "Traces"): _CHART,
    ("docs/versions.md", "console", "Trying them"): _TARGETS,
    ("tests/README.md", "console", "How to run"): _TARGETS,
}


@dataclass(frozen=True)
class Piece:
    """A fenced block of a page.

    Attributes:
        page: its path from the repository's root.
        heading: above it, without markup.
        language: after the fence's backticks.
        text: what is fenced, without the fence's indent.
    """

    page: str
    heading: str
    language: str
    text: str

    @property
    def keys(self) -> tuple[Key, Key]:
        """Return the names that may mean it, the exact one first."""
        return (self.page, self.language, self.heading), (self.page, self.language)


@cache
def pieces() -> tuple[Piece, ...]:
    """Return the fenced blocks of all pages."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests/README.md"]
    return tuple(piece for page in sorted(pages) for piece in _of_page(page))


def pieces_of(page: str, language: str, heading: str = "") -> list[Piece]:
    """Return the pieces of a page in their order.

    Args:
        page: its path from the repository's root.
        language: of the pieces.
        heading: only those below it; "": all.

    Raises:
        AssertionError: there is none.
    """
    found = [
        piece
        for piece in pieces()
        if (piece.page, piece.language) == (page, language) and heading in ("", piece.heading)
    ]
    assert found, f"{page} has no {language} {f'below {heading!r}' if heading else ''}"
    return found


def python(page: str, *words: str) -> str:
    """Return the one piece of Python of a page that holds all of these words."""
    (found,) = (piece for piece in pieces_of(page, "python") if all(word in piece.text for word in words))
    return textwrap.dedent(found.text)


def commands(piece: Piece) -> list[str]:
    """Return the commands of a console's piece: lines that go on joined, comments left out.

    Lines without `$`, which programs printed, are left out as well.
    """
    lines = piece.text.replace("\\\n", " ").splitlines()
    found = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [re.sub(r"\s+#\s.*", "", line).strip() for line in found]


def _of_page(path: Path) -> list[Piece]:
    page, heading, found = str(path.relative_to(ROOT)), "", []
    tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text())
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and following is not None:
            inline = following.children or ()
            heading = "".join(child.content for child in inline if child.type in ("text", "code_inline"))
        elif token.type in ("fence", "code_block"):
            found.append(Piece(page, heading, token.info.strip(), token.content))
    return found
