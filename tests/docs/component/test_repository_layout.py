"""The repository's traps: `operator/` must not hide Python's own, and no file names its machine."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCE_ROOTS = ("protocol", "operator", "worker", "ps", "deploy/local")


def tracked_files() -> list[Path]:
    """Return the files that git tracks or would track; in no checkout, all outside hidden folders."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
        timeout=30,
    )
    if listing.returncode == 0:
        return [
            path for name in listing.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()
        ]
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file() and not path.relative_to(ROOT).parts[0].startswith(".")
    ]


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_a_source_root_is_no_package(root: str) -> None:
    assert not (ROOT / root / "__init__.py").exists()


def test_no_test_and_no_conftest_lies_below_a_source_root() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in tracked_files()
        if str(path.relative_to(ROOT)).startswith(tuple(f"{root}/" for root in SOURCE_ROOTS))
        and (
            path.name == "conftest.py"
            or path.name.startswith("test_")
            or "tests" in path.relative_to(ROOT).parts
        )
    ]
    assert found == []


def test_no_tests_folder_is_a_package_and_operator_is_on_no_path() -> None:
    """`tests/operator` would hide Python's own if `tests` were on `sys.path`."""
    tests = ROOT / "tests"
    assert [str(path) for path in tests.rglob("__init__.py")] == []
    assert str(tests) not in sys.path
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "tests" not in options["pythonpath"]


def test_tests_lie_as_the_packages_do() -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    single = {Path("e2e"), Path("fuzz"), Path("skew")}
    assert single <= folders
    assert {folder.name for folder in folders - single} == {"unit", "component"}
    assert {folder.parent.name for folder in folders - single} == {
        "benchmarks",
        "chart",
        "coordinator",
        "docs",
        "local",
        "operator",
        "protocol",
        "ps",
        "worker",
    }


def test_names_of_test_files_are_unique() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_names_of_test_helpers_hide_no_module() -> None:
    installed = sys.stdlib_module_names
    assert [path.name for path in (ROOT / "tests/support").glob("*.py") if path.stem in installed] == []


@pytest.mark.parametrize("arguments", [["-c"], ["-m", "timeit", "-n1", "-r1"]], ids=["command", "module"])
def test_standard_operator_is_intact_from_repository_root(arguments: list[str]) -> None:
    code = "import operator; assert operator.add(1, 1) == 2, operator; print(operator.__file__)"
    done = subprocess.run(
        [sys.executable, *arguments, code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout.split("\n")[0] or str(ROOT / ".venv") in done.stdout


def test_packages_are_found_in_source_roots_without_namespaces() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert settings["setuptools"]["packages"]["find"] == {"where": list(SOURCE_ROOTS), "namespaces": False}
    for root in SOURCE_ROOTS:
        assert root in settings["mypy"]["mypy_path"]
        assert root in settings["ruff"]["src"]
        assert root in settings["pytest"]["ini_options"]["pythonpath"]


def test_no_file_names_the_machine_it_was_made_on() -> None:
    # Put together here, so that this file does not contain them.
    forbidden = [f"/{'work'}/{place}" for place in ("main", "shared", ".library")] + [
        f"/{'tmp'}/prompt",
        f"/{'opt'}/pypi",
    ]
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {word}" for word in forbidden if word in text]
    assert found == []


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
    for name in ("deploy/operator.yaml", "deploy/samples/digits-allreduce.yaml"):
        text = (ROOT / name).read_text()
        images = re.findall(r"springtide/(?:operator|worker):(\S+?)[\"']?$", text, re.MULTILINE)
        assert images, f"{name} names no image of ours"
        assert set(images) == {version}


def test_git_tracks_no_link_to_elsewhere_and_nothing_ignored() -> None:
    def listed(*options: str) -> list[str]:
        done = subprocess.run(
            ["git", "ls-files", *options], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
        )
        if done.returncode != 0:
            pytest.skip("this is no git checkout")
        return done.stdout.splitlines()

    links = [line.split("\t", 1)[1] for line in listed("--stage") if line.startswith("120000 ")]
    inside = [(ROOT / name).resolve().relative_to(ROOT.resolve()) for name in links]
    assert set(map(str, inside)) <= set(listed())
    assert listed("--cached", "--ignored", "--exclude-standard") == []
