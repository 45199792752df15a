"""Which commit is the last release, and what happens where git does not have it."""

from __future__ import annotations

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
