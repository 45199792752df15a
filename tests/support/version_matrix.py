"""A short suite with the lowest and the newest versions that pyproject.toml allows: `make versions`.

For each Python that is here two virtual environments are made below build/versions/: in one, all that
Springtide names itself has the lowest version that it allows, in the other one the newest. The tests come
from this tree. A row, or its part, is left out with the reason where the machine lacks a Python, or a build
of torch for CPUs (`TORCH_INDEX_URL` names an index of such).

    make versions [ARGS="--python 3.12 --end lowest"]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "versions"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
LOWEST, NEWEST = "lowest", "newest"
EXTRAS = "operator,local,otel"
TORCH_EXTRAS = "worker,ps"
OLDEST_TORCH = "2.7.0"
SHOWN = ("grpcio", "protobuf", "torch", "numpy", "kopf", "kubernetes", "opentelemetry-sdk")
"""Distributions of which the table says what was installed."""
TOOLS = (
    "pytest>=8",
    "pytest-asyncio>=0.24",
    "pytest-timeout>=2.3",
    "hypothesis>=6.100",
    "pytest-xdist>=3.6",
    "psutil",
)
SUITE = ("tests/protocol", "tests/coordinator/component")
TORCH_SUITE = (
    "tests/worker/component/test_traces_jobs.py",
    "tests/ps/component/test_ps_registration.py",
    "tests/ps/component/test_ps_kv.py",
)
_OLD_PROTOBUF = "ignore:Type google._upb:DeprecationWarning"
"""The filter of what Python 3.12 says of an old protobuf's types, once; tests take warnings for errors."""
INSTALL_SECONDS, SUITE_SECONDS = 900, 900


@dataclass
class Row:
    """One environment, and what became of it.

    Attributes:
        python: its version, as asked for.
        end: LOWEST or NEWEST.
        versions: installed ones, by distribution.
        result: the suite's last line; "" where it was not run.
        skipped: why it, or a part of it, was left out.
        failed: whether it failed.
    """

    python: str
    end: str
    versions: dict[str, str] = field(default_factory=dict)
    result: str = ""
    skipped: str = ""
    failed: bool = False


class StepError(Exception):
    """A command of a row ended with an error; the text is its last words."""


def uv(*arguments: str, seconds: int = INSTALL_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run uv; return what it prints. Raises StepError."""
    done = subprocess.run(["uv", *arguments], capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode:
        raise StepError(done.stderr.strip()[-2000:])
    return done


def find_python(version: str) -> str:
    """Return the path of an interpreter of that version; "" where there is none on this machine."""
    try:
        return uv("python", "find", "--no-python-downloads", version).stdout.strip()
    except StepError:
        root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
        found = sorted(root.glob(f"versions/{version}.*/bin/python"))
        return str(found[-1]) if found else ""


def local_wheels() -> list[str]:
    """Return the folders of wheels that pip is configured with, as arguments of uv."""
    asked = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    folders = done.stdout.split() if done.returncode == 0 else []
    folders += os.environ.get("PIP_FIND_LINKS", "").split()
    return [part for folder in dict.fromkeys(folders) for part in ("--find-links", folder)]


def torch_for(python: Path, end: str) -> tuple[list[str], str]:
    """Return the arguments that install a build of torch for CPUs, and what is not as it should be.

    Args:
        python: of the environment.
        end: LOWEST or NEWEST.

    Returns:
        No arguments where there is no such build for this Python.
    """
    index = os.environ.get("TORCH_INDEX_URL")
    source = ["--index", index] if index else local_wheels()
    where = f"at {index}" if index else "here, and TORCH_INDEX_URL names no index of such"
    wanted = f"torch=={OLDEST_TORCH}" if end == LOWEST else f"torch>={OLDEST_TORCH}"
    for requirement in (wanted, f"torch>={OLDEST_TORCH}"):
        if found := find_build(python, requirement, *source, *([] if index else ["--no-index"])):
            lacking = "" if requirement == wanted else f"torch {OLDEST_TORCH}: no build for CPUs {where}"
            return [*source, f"torch=={found}"], lacking
    return [], f"all that needs torch: no build for CPUs {where}"


def find_build(python: Path, requirement: str, *source: str) -> str:
    """Return the version that uv would install from there alone; "" where there is none."""
    try:
        said = uv("pip", "install", "--dry-run", "--no-deps", "-p", str(python), *source, requirement)
    except StepError:
        return ""
    found = re.search(r"torch==(\S+)", said.stdout + said.stderr)
    return found[1] if found else ""


def make(row: Row, interpreter: str) -> tuple[Path, bool]:
    """Make the environment of a row; return its Python, and whether it has torch. Raises StepError."""
    folder = BUILD / f"{row.python}-{row.end}"
    uv("venv", "--quiet", "--clear", "-p", interpreter, str(folder))
    python = folder / "bin" / "python"
    torch, row.skipped = torch_for(python, row.end)
    extras = f"{EXTRAS},{TORCH_EXTRAS}" if torch else EXTRAS
    resolution = "lowest-direct" if row.end == LOWEST else "highest"
    wheels = ["--only-binary", ":all:", "--no-binary", "springtide", *local_wheels()]
    own = f"springtide[{extras}] @ {ROOT.as_uri()}"
    if torch:  # before all else, whose index may have another build of it
        uv("pip", "install", "--quiet", "-p", str(python), *torch)
    uv("pip", "install", "--quiet", "-p", str(python), "--resolution", resolution, *wheels, own, *torch[-1:])
    uv("pip", "install", "--quiet", "-p", str(python), *wheels, *TOOLS)
    return python, bool(torch)


def installed(python: Path) -> dict[str, str]:
    """Return the versions of what the table shows."""
    listed = json.loads(uv("pip", "list", "--format", "json", "-p", str(python)).stdout)
    found = {entry["name"].lower(): entry["version"] for entry in listed}
    return {name: found[name] for name in SHOWN if name in found}


def run_suite(row: Row, python: Path, with_torch: bool) -> None:
    """Run the tests, and note how they ended."""
    suite = [*SUITE, *(TORCH_SUITE if with_torch else ())]
    options = ["-q", "-p", "no:cacheprovider", "--no-header", "-W", _OLD_PROTOBUF]
    command = [str(python), "-m", "pytest", *options, *suite]
    environ = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    log = BUILD / f"{row.python}-{row.end}.log"
    with log.open("w") as file:
        done = subprocess.run(
            command, cwd=ROOT, env=environ, stdout=file, stderr=file, timeout=SUITE_SECONDS, check=False
        )
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    row.result = re.sub(r" in [0-9.]+s.*", "", lines[-1] if lines else "nothing was said")
    row.failed = done.returncode != 0


def try_row(row: Row) -> Row:
    """Make one environment and run the suite in it."""
    interpreter = find_python(row.python)
    if not interpreter:
        row.skipped = f"no Python {row.python} on this machine"
        return row
    try:
        python, with_torch = make(row, interpreter)
        row.versions = installed(python)
        run_suite(row, python, with_torch)
    except (StepError, subprocess.TimeoutExpired) as error:
        row.failed, row.result = True, f"{type(error).__name__}: {error}"
    return row


def table(rows: Iterable[Row]) -> str:
    """Return the rows as a table of Markdown. PURE."""
    lines = ["| Python | versions | " + " | ".join(SHOWN) + " | result |", "|---" * (len(SHOWN) + 3) + "|"]
    for row in rows:
        said = "; ".join(filter(None, (row.result or "not run", row.skipped and f"left out: {row.skipped}")))
        cells = [row.python, row.end, *(row.versions.get(name, "-") for name in SHOWN), said]
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", choices=PYTHONS, action="append", help="only this one")
    parser.add_argument("--end", choices=(LOWEST, NEWEST), action="append", help="only this one")
    chosen = parser.parse_args(arguments)
    BUILD.mkdir(parents=True, exist_ok=True)
    rows = []
    for python in chosen.python or PYTHONS:
        for end in chosen.end or (LOWEST, NEWEST):
            rows.append(try_row(Row(python, end)))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    (BUILD / "table.md").write_text(table(rows))
    (BUILD / "rows.json").write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    print(f"\n{table(rows)}")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
