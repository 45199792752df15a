"""`make images` and `make kind-load`: which commands they run, in which order, and what they say without."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from deploy.images import TARGETS, ImagesError, Wanted, chart_version, commands, engine, main

ROOT = Path(__file__).resolve().parents[3]
VERSION = chart_version()


def stand_in(folder: Path, name: str, fails_at: str = "never") -> None:
    """Put a program on PATH that writes down what it is called with, and fails at a word."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(
        f'#!/bin/sh\necho {name} "$@" >> "{folder}/calls"\ncase "$*" in *{fails_at}*) exit 3;; esac\n'
    )
    program.chmod(0o755)


def run_make(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    not_ours = ("PIP_", "MAKE", "MFLAGS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(not_ours)}
    env["PATH"] = f"{folder}:{env['PATH']}"
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_targets_are_the_images_that_charts_and_docs_name() -> None:
    stages = re.findall(r"^FROM .* AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(TARGETS) <= set(stages)
    page = (ROOT / "docs" / "install.md").read_text()
    assert all(f"`springtide/{target}`" in page for target in TARGETS)


def test_base_is_given_to_the_worker_alone() -> None:
    built = commands(Wanted("docker", "1.2", arguments=(("BASE", "cuda"), ("PIP_INDEX_URL", "x"))))
    assert ["BASE=cuda" in command for command in built] == [False, True, False]
    assert all("PIP_INDEX_URL=x" in command for command in built)


def test_pushed_images_carry_the_registry() -> None:
    pushed = commands(Wanted("podman", "1.2", registry="r.example.com/a/", push=True))[3:]
    assert pushed == [["podman", "push", f"r.example.com/a/springtide/{name}:1.2"] for name in TARGETS]


def test_make_kind_load_builds_then_loads_all(tmp_path: Path) -> None:
    stand_in(tmp_path, "docker")
    stand_in(tmp_path, "kind")
    done = run_make(tmp_path, "kind-load", "CLUSTER=lab")
    assert done.returncode == 0, done.stderr
    names = [f"springtide/{target}:{VERSION}" for target in TARGETS]
    build = "docker build --target {} --build-arg VERSION={} --tag {} ."
    assert (tmp_path / "calls").read_text().splitlines() == [
        *(build.format(target, VERSION, name) for target, name in zip(TARGETS, names, strict=True)),
        f"kind load docker-image --name lab {' '.join(names)}",
    ]


def test_make_images_stops_at_a_build_that_fails(tmp_path: Path) -> None:
    stand_in(tmp_path, "docker", fails_at="worker")
    done = run_make(tmp_path, "images", "ENGINE=docker")
    assert done.returncode != 0
    assert "images: docker build --target worker" in done.stderr
    assert "ended with 3" in done.stderr
    assert "ps" not in (tmp_path / "calls").read_text()


def test_push_without_a_registry_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--push", "--dry-run"]) == 1
    assert "REGISTRY=" in capsys.readouterr().err


def test_kind_with_podman_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kind", "kind", "--engine", "podman", "--dry-run"]) == 1
    assert "kind takes images from docker" in capsys.readouterr().err


def test_no_engine_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImagesError, match="docker or podman is not on PATH"):
        engine("")
