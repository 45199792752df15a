"""Write deploy/locks/: every distribution of the images with its version and the hashes of its wheels.

    make lock                                        versions that constraints.txt has stay as they are
    make lock UPGRADE=1                              the newest of all; put them into constraints.txt, too
    make lock TORCH_INDEX_URL=... TORCH_LOCK=FILE    only torch, from an index of other builds (e.g. for CPUs)

Versions and hashes are those that the package index publishes. uv chooses for Linux on x86_64 and aarch64 and
for all Pythons that we support, from wheels alone: nothing is built from source while an image is made.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from deploy.requirements import BUILD, EXTRAS, IMAGES, TORCH, TORCH_NEEDS, Pin, normalized, requirements

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "deploy/locks"
PYTHONS = ("cp311", "cp312", "cp313")
MACHINES = ("x86_64", "aarch64")
_HEADER = """\
# {what}
# Written by `make lock` from pyproject.toml and constraints.txt; tests hold it to them.
"""


def places(wheel: str) -> set[tuple[str, str]]:
    """Return the images in which a wheel may be installed, by Python and machine, e.g. ("cp311", "aarch64").

    Args:
        wheel: its file name.
    """
    result = set()
    for tag in parse_wheel_filename(wheel)[3]:
        if tag.platform == "any":
            machines = list(MACHINES)
        elif tag.platform.startswith(("manylinux", "linux")):
            machines = [machine for machine in MACHINES if tag.platform.endswith(machine)]
        else:
            continue
        for python in PYTHONS:
            level = int(python.removeprefix("cp3"))
            own = tag.interpreter == python and tag.abi in {python, "abi3", "none"}
            stable = tag.abi == "abi3" and tag.interpreter in {f"cp3{minor}" for minor in range(level + 1)}
            pure = tag.abi == "none" and tag.interpreter in {
                "py3",
                *(f"py3{minor}" for minor in range(level + 1)),
            }
            if own or stable or pure:
                result |= {(python, machine) for machine in machines}
    return result


def chosen(pylock: str) -> dict[str, Pin]:
    """Read what uv chose, by name; hashes are those of the wheels that fit an image.

    Args:
        pylock: a lock in the format of pylock.toml (PEP 751).

    Raises:
        ValueError: for a distribution without a wheel for some image: it would be built there, from source.
    """
    result = {}
    for package in tomllib.loads(pylock)["packages"]:
        name = normalized(package["name"])
        files = {
            item["url"].rpartition("/")[2].replace("%2B", "+"): item["hashes"]["sha256"]
            for item in package.get("wheels", [])
        }
        fitting = {file: found for file in files if (found := places(file))}
        missing = {(python, machine) for python in PYTHONS for machine in MACHINES}.difference(
            *fitting.values()
        )
        if missing:
            raise ValueError(f"{name}=={package['version']} has no wheel for {sorted(missing)}")
        hashes = tuple(sorted({files[file] for file in fitting}))
        result[name] = Pin(name, package["version"], _short(package.get("marker", "")), hashes, ())
    return result


def resolve(lines: Iterable[str], *options: str) -> dict[str, Pin]:
    """Return all that requirements need, as uv resolves them.

    Args:
        lines: the requirements.
        options: further ones for `uv pip compile`.

    Raises:
        SystemExit: if uv finds no solution; it has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted, lock = Path(folder, "wanted.in"), Path(folder, "pylock.toml")
        wanted.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11"]
        command += [
            "--only-binary",
            ":all:",
            "--format",
            "pylock.toml",
            "-o",
            str(lock),
            *options,
            str(wanted),
        ]
        done = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
        if done.returncode:
            raise SystemExit(f"make lock: uv found no solution for {', '.join(lines)}")
        return chosen(lock.read_text(encoding="utf-8"))


def lock_images(pyproject: str, *options: str) -> tuple[list[Pin], list[Pin]]:
    """Return the pins of images, and those of torch's builds.

    Args:
        pyproject: the text of pyproject.toml.
        options: for `uv pip compile`.
    """
    wanted = {name: requirements(pyproject, extras) for name, extras in (IMAGES | EXTRAS).items()}
    wanted[BUILD] = tomllib.loads(pyproject)["build-system"]["requires"]
    everything = resolve(sorted({line for lines in wanted.values() for line in lines}), *options)
    exact = [f"{pin.name}=={pin.version}" for pin in everything.values()]
    with tempfile.TemporaryDirectory() as folder:
        # Each set alone, with the versions that fit all of them together.
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("\n".join(exact) + "\n", encoding="utf-8")
        sets: dict[str, set[str]] = defaultdict(set)
        alone = {
            name: [line for line in lines if Requirement(line).name != "torch"]
            for name, lines in wanted.items()
        }
        for name, lines in (alone | {TORCH_NEEDS: ["torch"]}).items():
            for found in resolve(lines, "-c", str(constraints)):
                sets[found].add(name)
    order = [BUILD, *IMAGES, TORCH_NEEDS, *EXTRAS]
    pins = [
        Pin(pin.name, pin.version, pin.marker, pin.hashes, tuple(sorted(sets[name], key=order.index)))
        for name, pin in sorted(everything.items())
    ]
    # What the examples need beside a worker, without what it has.
    pins = [
        Pin(
            pin.name,
            pin.version,
            pin.marker,
            pin.hashes,
            tuple(item for item in pin.sets if item != "examples"),
        )
        if "worker" in pin.sets
        else pin
        for pin in pins
    ]
    torch = [
        Pin(pin.name, pin.version, pin.marker, pin.hashes, ("torch",))
        for pin in pins
        if TORCH.match(pin.name)
    ]
    return [pin for pin in pins if not TORCH.match(pin.name)], torch


def main() -> None:
    """Write both locks, or torch's alone where another index is named."""
    parser = argparse.ArgumentParser(description="write deploy/locks/")
    parser.add_argument(
        "--upgrade", action="store_true", help="the newest versions, not those of constraints.txt"
    )
    parser.add_argument("--torch-index-url", default="", help="an index of other builds of torch")
    parser.add_argument("--torch-lock", default="deploy/locks/torch.txt", help="where torch's pins go")
    options = parser.parse_args()
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    keep = () if options.upgrade else ("-c", "constraints.txt")
    if options.torch_index_url:
        found = resolve(["torch"], "--no-deps", "--index-url", options.torch_index_url, *keep)
        torch = [Pin(pin.name, pin.version, pin.marker, pin.hashes, ("torch",)) for pin in found.values()]
    else:
        images, torch = lock_images(pyproject, *keep)
        _write(LOCKS / "images.txt", "What images hold beside torch, and which of them.", images)
    _write(ROOT / options.torch_lock, "torch, and what its builds for GPUs need.", torch)


def _write(path: Path, what: str, pins: list[Pin]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_HEADER.format(what=what) + "".join(pin.text() for pin in pins), encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(pins)} distributions", file=sys.stderr)


def _short(marker: str) -> str:
    """Return a marker without what is true in every image: Linux, our machines and Pythons."""
    both = "(platform_machine == 'aarch64' or platform_machine == 'x86_64') and sys_platform == 'linux'"
    either = (
        "(platform_machine == 'aarch64' and sys_platform == 'linux') or"
        " (platform_machine == 'x86_64' and sys_platform == 'linux')"
    )
    for always in (
        f"python_full_version < '3.14' and {both}",
        f"python_full_version < '3.14' and ({either})",
    ):
        if marker == always:
            return ""
    return marker


if __name__ == "__main__":
    main()
