"""Build the images that a cluster needs, push them, or load them into kind: `python deploy/images.py --help`.

Three of them, from one Dockerfile: `operator` (also each job's coordinator), `worker`, and `ps` for parameter
servers. `make images` and `make kind-load` call it. It needs Python alone, no virtual environment.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("operator", "worker", "ps")
ENGINES = ("docker", "podman")
# Build arguments of the Dockerfile that may be given in the environment.
ARGUMENTS = ("PIP_INDEX_URL", "PYTHON_IMAGE", "BASE", "UNPINNED_BASE", "TORCH_LOCK", "TORCH_INDEX_URL")


class ImagesError(Exception):
    """An image was not built: the message says why and what to do."""


@dataclass(frozen=True)
class Wanted:
    """Options of a build. `registry` comes before `springtide/NAME`; empty: the engine's own."""

    engine: str
    version: str
    registry: str = ""
    arguments: tuple[tuple[str, str], ...] = ()
    push: bool = False
    kind: str = ""  # the kind cluster into which they are loaded
    targets: tuple[str, ...] = TARGETS

    def name(self, target: str) -> str:
        """Return an image's whole name."""
        prefix = f"{self.registry.rstrip('/')}/" if self.registry else ""
        return f"{prefix}springtide/{target}:{self.version}"


def commands(wanted: Wanted) -> list[list[str]]:
    """Return the commands in order."""
    result = []
    for target in wanted.targets:
        given = [
            flag
            for name, value in (*wanted.arguments, ("VERSION", wanted.version))
            if name != "BASE" or target == "worker"
            for flag in ("--build-arg", f"{name}={value}")
        ]
        result.append([wanted.engine, "build", "--target", target, *given, "--tag", wanted.name(target), "."])
    names = [wanted.name(target) for target in wanted.targets]
    if wanted.push:
        result += [[wanted.engine, "push", name] for name in names]
    if wanted.kind:
        result.append(["kind", "load", "docker-image", "--name", wanted.kind, *names])
    return result


def chart_version(root: Path = ROOT) -> str:
    """Return the version under which the chart asks for its images. Raises ImagesError."""
    text = (root / "charts" / "springtide" / "Chart.yaml").read_text()
    found = re.search(r'^appVersion:\s*"?([^"\s]+)"?\s*$', text, re.MULTILINE)
    if found is None:
        raise ImagesError("charts/springtide/Chart.yaml names no appVersion")
    return found[1]


def engine(named: str) -> str:
    """Return the container engine to use. Raises ImagesError where there is none."""
    tried = (named,) if named else ENGINES
    for name in tried:
        if shutil.which(name):
            return name
    raise ImagesError(f"{' or '.join(tried)} is not on PATH: install it, or name another by ENGINE=")


def carry_out(command: Sequence[str]) -> None:
    """Show a command and run it. Raises ImagesError with its exit code."""
    print(f"$ {shlex.join(command)}", flush=True)
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code != 0:
        raise ImagesError(f"{shlex.join(command)} ended with {code}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and run; 0 when all was done, 1 when not."""
    parser = argparse.ArgumentParser(prog="images.py", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--registry", default="", help="put before the names, e.g. registry.example.com/team")
    parser.add_argument("--engine", default="", help="docker or podman; default: the one on PATH")
    parser.add_argument("--version", default="", help="default: the chart's appVersion")
    parser.add_argument("--push", action="store_true", help="push them to the registry")
    parser.add_argument("--kind", default="", metavar="CLUSTER", help="load them into this kind cluster")
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    options = parser.parse_args(arguments)
    try:
        if options.push and not options.registry:
            raise ImagesError("to push, name a registry: REGISTRY=registry.example.com")
        given = tuple((name, os.environ[name]) for name in ARGUMENTS if os.environ.get(name))
        wanted = Wanted(
            engine=(options.engine or ENGINES[0]) if options.dry_run else engine(options.engine),
            version=options.version or chart_version(),
            registry=options.registry,
            arguments=given,
            push=options.push,
            kind=options.kind,
        )
        if wanted.kind and wanted.engine != "docker":
            raise ImagesError(
                f"kind takes images from docker, not from {wanted.engine}: make images, then push them to a"
                " registry that the kind cluster reaches"
            )
        if wanted.kind and not options.dry_run and shutil.which("kind") is None:
            raise ImagesError("kind is not on PATH: https://kind.sigs.k8s.io says how to install it")
        for command in commands(wanted):
            if options.dry_run:
                print(f"$ {shlex.join(command)}")
            else:
                carry_out(command)
    except ImagesError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
