"""Read a Dockerfile, and carry out its COPY and pip steps in plain folders and virtual environments."""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

_VARIABLE = re.compile(r"\$\{(?P<braced>\w+)\}|\$(?P<plain>\w+)")


@dataclass(frozen=True)
class Step:
    """One instruction: its word in capitals and the rest, continuation lines joined."""

    word: str
    rest: str


@dataclass(frozen=True)
class Stage:
    """FROM ... AS name, with the steps up to the next FROM."""

    name: str
    base: str
    steps: tuple[Step, ...]


def parse(text: str) -> tuple[dict[str, str], dict[str, Stage]]:
    """(global ARGs, stages by name). Raises ValueError for a stage without a name."""
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    current: tuple[str, str] | None = None
    steps: list[Step] = []

    def close() -> None:
        if current is not None:
            stages[current[0]] = Stage(current[0], current[1], tuple(steps))
            steps.clear()

    for line in _logical_lines(text):
        word, _, rest = line.partition(" ")
        word, rest = word.upper(), rest.strip()
        if word == "FROM":
            close()
            words = [item for item in rest.split() if not item.startswith("--")]
            if len(words) != 3 or words[1].upper() != "AS":
                raise ValueError(f"a stage without a name: {line}")
            current = (words[2], words[0])
        elif current is None:
            name, _, default = rest.partition("=")
            arguments[name] = default
        else:
            steps.append(Step(word, rest))
    close()
    return arguments, stages


def chain(stages: Mapping[str, Stage], target: str) -> list[Step]:
    """All steps of a target, those of the stages that it builds on first."""
    stage = stages[target]
    before = chain(stages, stage.base) if stage.base in stages else []
    return [*before, *stage.steps]


def values(steps: list[Step], word: str) -> list[str]:
    return [step.rest for step in steps if step.word == word]


def environment(steps: list[Step]) -> dict[str, str]:
    """Return the variables that ENV sets."""
    pairs = (item.partition("=") for rest in values(steps, "ENV") for item in shlex.split(rest))
    return {name: value for name, _, value in pairs}


@dataclass
class Build:
    """Stages built below `folder`: each has a root folder and shares one virtual environment per target."""

    context: Path
    folder: Path
    stages: Mapping[str, Stage]
    arguments: dict[str, str] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)  # --build-arg
    extra_environment: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    output: str = ""

    def root(self, stage: str) -> Path:
        return self.folder / stage / "root"

    def python(self, stage: str) -> Path:
        return self.folder / stage / "venv" / "bin" / "python"

    def build(self, target: str, python: Path | None = None) -> Path:
        """Carry out the target's steps; returns its root folder. `python`: use this one, not a new venv.

        RUN steps without pip or python (users and groups) are noted in `skipped`.
        """
        root = self.root(target)
        root.mkdir(parents=True)
        if python is None:
            venv.create(self.folder / target / "venv", with_pip=False, symlinks=True)
            python = self.python(target)
            # This interpreter's pip, told to work for the other: unpacking a pip for each would take seconds.
            pip = python.with_name("pip")
            pip.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip --python "{python}" "$@"\n')
            pip.chmod(0o755)
        workdir = PurePosixPath("/")
        steps = chain(self.stages, target)
        variables = environment(steps)
        for step in steps:
            rest = _expanded(step.rest, variables)
            if step.word == "ARG":
                name, _, default = rest.partition("=")
                value = self.given.get(name, default.strip('"') or self.arguments.get(name, ""))
                variables[name] = _expanded(value, self.arguments | variables)
            elif step.word == "WORKDIR":
                workdir = PurePosixPath(rest)
                self._inside(root, workdir).mkdir(parents=True, exist_ok=True)
            elif step.word == "COPY":
                self._copy(root, workdir, rest)
            elif step.word == "RUN":
                if re.search(r"\b(pip|python)\b", rest):
                    self._run(root, workdir, step.rest, python, variables)
                else:
                    self.skipped.append(rest)
        return root

    def _copy(self, root: Path, workdir: PurePosixPath, rest: str) -> None:
        words = rest.split()
        source = self.context
        if words[0].startswith("--from="):
            source = self.root(words.pop(0).removeprefix("--from="))
        *names, target = words
        ignored = _ignored(self.context) if source == self.context else []
        for name in names:
            origin = source / name.lstrip("/")
            if not origin.exists():
                raise FileNotFoundError(f"COPY {rest}: {name} is not there")
            place = self._inside(root, workdir / target)
            if origin.is_dir():
                shutil.copytree(origin, place, ignore=_ignore(source, ignored), dirs_exist_ok=True)
                continue
            if target.endswith("/"):
                place = place / origin.name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(origin, place)

    def _run(
        self, root: Path, workdir: PurePosixPath, command: str, python: Path, env: dict[str, str]
    ) -> None:
        """The step's own shell text; paths from the root point into `root`."""
        for top in ("/source", "/wheels", "/requirements", "/opt/springtide", "/springtide", "/tmp/sbom"):
            command = re.sub(rf"(?<![\w./]){re.escape(top)}(?=[/\s]|$)", str(root) + top, command)
        path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SPRINGTIDE_")}
        done = subprocess.run(
            ["sh", "-eu", "-c", command],
            cwd=self._inside(root, workdir),
            env=inherited | env | self.extra_environment | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        self.output += done.stdout
        if done.returncode != 0:
            raise RuntimeError(f"RUN {command}\nended with {done.returncode}:\n{done.stdout}{done.stderr}")

    @staticmethod
    def _inside(root: Path, path: PurePosixPath) -> Path:
        return root / path.relative_to("/")


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda m: variables.get(m["braced"] or m["plain"], m[0]), text)


def _logical_lines(text: str) -> list[str]:
    result, pending = [], ""
    for line in text.splitlines():
        if line.lstrip().startswith("#") or (not line.strip() and not pending):
            continue
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1].strip() + " "
            continue
        result.append((pending + line.strip()).strip())
        pending = ""
    return result


def _ignored(context: Path) -> list[str]:
    file = context / ".dockerignore"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _ignore(context: Path, patterns: list[str]):  # type: ignore[no-untyped-def]
    def ignore(folder: str, names: list[str]) -> set[str]:
        inside = Path(folder).relative_to(context)
        return {
            name
            for name in names
            for pattern in patterns
            if fnmatch.fnmatch(name, pattern.removeprefix("**/"))
            and ("/" not in pattern or pattern.startswith("**/"))
            and (pattern.startswith("**/") or inside == Path())
        }

    return ignore
