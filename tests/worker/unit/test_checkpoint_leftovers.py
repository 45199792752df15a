"""Files that failed attempts have left on storage are deleted, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_members import FOLDER, Members, equal, state, tree

from springtide import faults
from springtide.checkpoint import names
from springtide.checkpoint.shares import Share
from springtide.checkpoint.storage import Storage, StorageError


def folders(root: Path) -> dict[int, bool]:
    """Step of each checkpoint -> whether it has a manifest."""
    found = Storage(str(root), FOLDER).checkpoints()
    return {name.step: whole for key, whole in found.items() if (name := names.parse(key)) is not None}


def test_as_long_as_checkpoints_fail_the_place_does_not_fill_up(tmp_path: Path) -> None:
    members = Members(tmp_path, 2)
    members.save(state(1), tree(1))
    for step in (2, 3, 4):
        faults.arm(f"manifest:{step}:raise")
        try:
            assert members.save(state(step), tree(step)).error
        finally:
            faults.arm("")
        assert folders(tmp_path) == {1: True, step: False}
    found, skipped = members.all[0].newest(must_read=True)
    assert found is not None
    assert equal(found.tree, tree(1))
    assert skipped == []
    assert not members.save(state(5), tree(5)).error
    assert folders(tmp_path) == {1: True, 5: True}
    members.close()


def test_a_member_on_a_disk_of_its_own_does_not_fill_it(tmp_path: Path) -> None:
    members = Members(tmp_path, 2)
    for step in range(1, 5):
        members.all[1].take(state(step), lambda: tree(), Share(1, members.share), "interval")
        members.flush()
        assert folders(tmp_path) == {step: False}
    members.close()


@pytest.mark.parametrize("reason", ["interval", "end", "leaving"])
def test_what_the_first_member_may_still_complete_stays(tmp_path: Path, reason: str) -> None:
    """A checkpoint that the first member may still complete is not deleted.

    At a loop's end one is taken while another is written; by time, that happens in the next generation only.
    """
    members = Members(tmp_path, 2)
    members.all[1].take(state(1), lambda: tree(1), Share(1, members.share), "interval")
    members.flush()
    later = state(2, number=2 if reason == "interval" else 1)
    members.all[1].take(later, lambda: tree(2), Share(1, members.share), reason)
    members.flush()
    for name, seed in ((state(1), 1), (later, 2)):
        members.all[0].take(name, lambda seed=seed: tree(seed), Share(0, members.share), reason)  # type: ignore[misc]
        members.flush()
    assert folders(tmp_path) == {1: True, 2: True}
    members.close()


def test_what_cannot_be_deleted_yet_goes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = Members(tmp_path, 2)
    delete = Storage.delete

    def refuse(storage: Storage, name: str) -> None:
        raise StorageError(f"cannot delete {name}")

    for step in (1, 2, 3):
        members.all[1].take(state(step), lambda: tree(), Share(1, members.share), "interval")
        members.flush()
        monkeypatch.setattr(Storage, "delete", refuse if step == 1 else delete)
    assert folders(tmp_path) == {3: False}
    assert [told.error for told in members.told] == ["", "", ""]
    members.close()
