"""Read the locks and write each image's requirements: the Dockerfile runs this beside pyproject.toml.

    python requirements.py write FOLDER [LOCK]     write IMAGE.txt and IMAGE-torch.txt: pins with hashes
    python requirements.py keep NAME FILE          take NAME out of FILE where it is installed
    python requirements.py base IMAGE [UNPINNED]   end with 1 unless IMAGE names a digest

`make lock` writes the lock (deploy/lock.py). Needs nothing but Python's standard library.
"""

import re
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

IMAGES = {
    "operator": ("operator", "otel"),
    "worker": ("worker", "otel"),
    "ps": ("ps", "otel"),
    "all": ("operator", "worker", "ps", "local", "otel"),
}
# Further sets of distributions: what examples need beyond a worker, and what writes an SBOM.
EXTRAS = {"examples": ("examples",), "sbom": ("sbom",)}
BUILD = "build"
# The builds of torch have a lock of their own (deploy/locks/torch.txt), since a base image may bring another.
TORCH = re.compile(r"^(torch|triton|nvidia-.+|cuda-.+)$")
TORCH_NEEDS = "torch-needs"
UNPINNED_ALLOWED = "allowed"
_OWN = re.compile(r"^springtide\[(?P<extras>[a-z,]+)\]$")
_PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^ ;\\]+)(?: ; (?P<marker>[^\\]+?))? \\$")
_HASH = re.compile(r"^    --hash=sha256:(?P<hash>[0-9a-f]{64})(?: \\)?$")
_SETS = "# for: "


@dataclass(frozen=True)
class Pin:
    """One distribution of a lock.

    Attributes:
        name: normalized as package indexes do it.
        version: exactly this one.
        marker: where it is installed, or "" for everywhere.
        hashes: SHA-256 of the files that may be installed, hexadecimal.
        sets: images and other sets that have it.
    """

    name: str
    version: str
    marker: str
    hashes: tuple[str, ...]
    sets: tuple[str, ...]

    def text(self) -> str:
        """Return it as lines of a requirements file."""
        marker = f" ; {self.marker}" if self.marker else ""
        lines = [
            f"{self.name}=={self.version}{marker}",
            *(f"    --hash=sha256:{item}" for item in self.hashes),
        ]
        return f"{_SETS}{' '.join(self.sets)}\n" + " \\\n".join(lines) + "\n"


def normalized(name: str) -> str:
    """Return a distribution's name as package indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> list[Pin]:
    """Parse a lock.

    Raises:
        ValueError: for a line that is no pin, no hash and no comment, e.g. an option or an address, and for a
            pin without a hash.
    """
    result: list[Pin] = []
    sets: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(_SETS):
            sets = tuple(line.removeprefix(_SETS).split())
        elif not line.strip() or line.startswith("#"):
            continue
        elif pin := _PIN.match(line):
            result.append(
                Pin(normalized(pin["name"]), pin["version"], (pin["marker"] or "").strip(), (), sets)
            )
        elif (digest := _HASH.match(line)) and result:
            last = result.pop()
            hashes = (*last.hashes, digest["hash"])
            result.append(Pin(last.name, last.version, last.marker, hashes, last.sets))
        else:
            raise ValueError(f"line {number}: neither NAME==VERSION with hashes nor a comment: {line!r}")
    for item in result:
        if not item.hashes:
            raise ValueError(f"{item.name}=={item.version} has no hash: write the lock again (make lock)")
    return result


def requirements(pyproject: str, extras: tuple[str, ...]) -> list[str]:
    """Return the requirements of the distribution with these extras, those that name further extras resolved.

    Args:
        pyproject: the text of pyproject.toml.
        extras: of the distribution.

    Raises:
        KeyError: for an extra that does not exist.
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


def write(folder: Path, lock: str) -> None:
    """Write a requirements file for each set of the lock into a folder.

    Args:
        folder: where to; IMAGE.txt has what it needs beside torch, IMAGE-torch.txt what torch needs.
        lock: the text of deploy/locks/images.txt.
    """
    pins = read_lock(lock)
    for name in (BUILD, *IMAGES, *EXTRAS):
        own = [pin for pin in pins if name in pin.sets]
        (folder / f"{name}.txt").write_text("".join(pin.text() for pin in own), encoding="utf-8")
        needs = [pin for pin in pins if TORCH_NEEDS in pin.sets and pin not in own]
        (folder / f"{name}-torch.txt").write_text("".join(pin.text() for pin in needs), encoding="utf-8")


def without_installed(text: str, name: str) -> str:
    """Return a lock's text without one distribution where this interpreter has it, in whatever version.

    Args:
        text: of the lock.
        name: of the distribution.
    """
    try:
        version(name)
    except PackageNotFoundError:
        return text
    return "".join(pin.text() for pin in read_lock(text) if pin.name != normalized(name))


def base_error(image: str, unpinned: str = "") -> str | None:
    """Return why an image may not be built on, or None.

    Args:
        image: as FROM names it.
        unpinned: "allowed" lets a name without a digest pass.
    """
    if re.search(r"@sha256:[0-9a-f]{64}$", image) or unpinned == UNPINNED_ALLOWED:
        return None
    return (
        f"the base image {image!r} is named without a digest, so that nobody knows what is built: name it as"
        f" {image.partition('@')[0]}@sha256:... (docker buildx imagetools inspect says the digest), or say"
        f" --build-arg UNPINNED_BASE={UNPINNED_ALLOWED}"
    )


def main(arguments: list[str]) -> int:
    """Carry out the command line; returns the exit status."""
    match arguments:
        case ["write", folder, *rest]:
            write(Path(folder), Path(rest[0] if rest else "locks/images.txt").read_text(encoding="utf-8"))
        case ["keep", name, file]:
            path = Path(file)
            path.write_text(without_installed(path.read_text(encoding="utf-8"), name), encoding="utf-8")
        case ["base", image, *unpinned]:
            error = base_error(image, *unpinned)
            if error is not None:
                print(error, file=sys.stderr)
                return 1
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
