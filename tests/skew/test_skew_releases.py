"""Which commit is the last release, and what happens where git does not have it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import releases


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder, as somebody."""
    identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.com")
    command = ["git", *identity, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree without history, in which the tests believe to be."""
    folder = tmp_path / "clone"
    folder.mkdir()
    monkeypatch.setattr(releases, "ROOT", folder)
    monkeypatch.delenv("SPRINGTIDE_REQUIRE", raising=False)
    return folder


def test_tree_without_history_skips_with_the_reason(clone: Path, tmp_path: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match=r"cannot be had from git: .*\(a clone with history"):
        releases.last_release(tmp_path / "last")


def test_missing_history_fails_where_it_is_required(
    clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPRINGTIDE_REQUIRE", f"helm,{releases.LAST}")
    with pytest.raises(pytest.fail.Exception, match="clone with history and tags"):
        releases.last_release(tmp_path / "last")


def test_newest_tag_before_this_commit_is_the_last_release(clone: Path) -> None:
    git(clone, "init", "--quiet")
    base = releases.BASE.read_text(encoding="utf-8").strip()
    for tag in ("", "", "v0.9.0", "v0.10.0", ""):
        git(clone, "commit", "--quiet", "--allow-empty", "--message", "more")
        if tag:
            git(clone, "tag", tag)
        if git(clone, "rev-list", "--count", "HEAD") == "2":
            assert releases.last_commit() == base  # no tag yet
    assert releases.last_commit() == "v0.10.0"
    git(clone, "tag", "v0.11.0")
    assert releases.last_commit() == "v0.10.0"  # a release is compared with the one before


@pytest.fixture
def shallow(tmp_path: Path) -> Path:
    """A shallow clone of a repository with the script of continuous integration and make targets."""
    origin, folder = tmp_path / "origin", tmp_path / "shallow"
    (origin / ".ci").mkdir(parents=True)
    (origin / ".ci" / "run").write_bytes((releases.BASE.parents[2] / ".ci" / "run").read_bytes())
    (origin / "Makefile").write_text("tools:\ntest:\n\t@echo tests require $$SPRINGTIDE_REQUIRE\n")
    git(origin, "init", "--quiet")
    git(origin, "add", ".")
    for number in range(3):
        git(origin, "commit", "--quiet", "--allow-empty", "--message", f"{number}")
    git(tmp_path, "clone", "--quiet", "--depth", "1", origin.as_uri(), str(folder))
    assert git(folder, "rev-list", "--count", "HEAD") == "1"
    return folder


def run_ci(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "SPRINGTIDE_REQUIRE"}
    command = ["bash", str(folder / ".ci" / "run")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_ci_fetches_history_and_requires_the_release(shallow: Path) -> None:
    done = run_ci(shallow)
    assert done.returncode == 0, done.stderr
    assert releases.LAST in done.stdout.split("tests require ")[1].strip().split(",")
    assert git(shallow, "rev-list", "--count", "HEAD") == "3"


def test_ci_fails_where_history_cannot_be_fetched(shallow: Path) -> None:
    git(shallow, "remote", "set-url", "origin", str(shallow.parent / "nowhere"))
    done = run_ci(shallow)
    assert done.returncode == 1
    assert "clone with history and tags" in done.stderr
    assert "tests require" not in done.stdout
