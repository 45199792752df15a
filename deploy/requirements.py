"""The dependencies of each image as requirements files, from pyproject.toml: `python requirements.py FOLDER`.

Run by the Dockerfile beside a copy of pyproject.toml: images then have dependencies in a layer of their own.
Needs nothing but Python's standard library.
"""

import re
import sys
import tomllib
from pathlib import Path

IMAGES = {
    "operator": ("operator",),
    "worker": ("worker",),
    "ps": ("ps",),
    "all": ("operator", "worker", "ps", "local"),
}
_OWN = re.compile(r"^springtide\[(?P<extras>[a-z,]+)\]$")


def requirements(pyproject: str, extras: tuple[str, ...]) -> list[str]:
    """Requirements of the distribution with these extras, those that name further extras of it resolved.

    Raises KeyError for an extra that does not exist.
    """
    project = tomllib.loads(pyproject)["project"]
    result: list[str] = list(project["dependencies"])
    seen: set[str] = set()
    waiting = list(extras)
    while waiting:
        extra = waiting.pop(0)
        if extra in seen:
            continue
        seen.add(extra)
        for line in project["optional-dependencies"][extra]:
            own = _OWN.match(line)
            if own:
                waiting += own["extras"].split(",")
            elif line not in result:
                result.append(line)
    return result


def main(folder: Path, pyproject: Path) -> None:
    """Write FOLDER/IMAGE.txt for every image."""
    text = pyproject.read_text(encoding="utf-8")
    for image, extras in IMAGES.items():
        (folder / f"{image}.txt").write_text("\n".join(requirements(text, extras)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path("pyproject.toml"))
