"""Writing a state in shares and reading it again, on a folder: what comes back, and what is noticed."""

from __future__ import annotations

import json
import os
import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch
from checkpoint_members import FOLDER, Members, equal, state, tree
from fsspec.spec import AbstractFileSystem
from gpu_capabilities import cuda_param

from springtide import faults
from springtide.checkpoint import consolidate, inspect, names, restore, schedule
from springtide.checkpoint.keeper import Checkpoints
from springtide.checkpoint.location import CheckpointLocation
from springtide.checkpoint.manifest import (
    VERSION_WITH_FROZEN,
    CorruptError,
    File,
    NewerError,
    Receipt,
    parse_receipt,
)
from springtide.checkpoint.names import TABLES
from springtide.checkpoint.shares import Share
from springtide.checkpoint.staging import Collected, GoneError, Stage
from springtide.checkpoint.storage import Storage, StorageError
from springtide.checkpoint.writer import Written
from springtide.errors import SpringtideError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_state_comes_back_whoever_wrote_it(root: Path, count: int) -> None:
    members = Members(root, count)
    members.save(state(5), tree())
    found, skipped = members.all[0].newest(must_read=True)
    assert found is not None
    assert skipped == []
    assert equal(found.tree, tree())
    assert found.tree["tracked"]["x"] is found.tree["tracked"]["y"]
    assert found.manifest.state == state(5)
    assert [t.whole for t in members.told].count(True) == 1
    members.close()
    # Any safetensors library reads the files.
    folder = root / FOLDER / names.folder(state(5))
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == count
    read = {key: value for path in files for key, value in safetensors.torch.load_file(path).items()}
    assert (
        torch.cat([read[k] for k in sorted(read, key=lambda k: int(k[7:])) if k[:7] == "000000."]).numel()
        == 165
    )


on_cuda = cuda_param("checkpoints")


@pytest.mark.parametrize("device", ["cpu", on_cuda])
def test_a_step_waits_for_the_copy_only(root: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """`take` returns while storage stands still, and what changes after it does not get into the
    checkpoint.
    """
    answers = threading.Event()
    make_folder = Storage.make_folder

    def wait(storage: Storage, path: str) -> None:
        assert answers.wait(60)
        make_folder(storage, path)

    monkeypatch.setattr(Storage, "make_folder", wait)
    members = Members(root, 1)
    content = tree()
    live = content["parameters"]["a"] = content["parameters"]["a"].to(device)
    members.all[0].take(state(1), lambda: content, Share(0, ("w0",)), "interval")
    assert members.all[0].busy
    assert members.told == []
    live.zero_()
    answers.set()
    assert members.all[0].flush(60)
    found, _ = members.all[0].newest(must_read=True)
    assert found is not None
    assert equal(found.tree, tree())
    members.close()


def test_the_newest_is_of_the_latest_generation(root: Path) -> None:
    members = Members(root, 2)
    for name, seed in ((state(9, 1), 1), (state(4, 2), 2), (state(3, 1, 2), 3), (state(11, 5), 4)):
        members.save(name, tree(seed))
    found, _ = members.all[0].newest(must_read=True)
    assert found is not None
    assert found.manifest.state == state(3, 1, 2)
    assert equal(found.tree, tree(3))
    members.close()


def test_so_many_are_kept(root: Path) -> None:
    members = Members(root, 2, keep=2)
    storage = Storage(str(root), FOLDER)
    storage.make_folder(names.folder(state(2)))  # of somebody who died
    storage.make_folder(names.folder(state(99)))  # of somebody who is ahead
    for step in range(1, 6):
        members.save(state(step), tree(step))
    assert set(storage.checkpoints()) == {names.folder(state(step)) for step in (4, 5, 99)}
    members.close()


def test_a_fenced_members_late_one_replaces_and_deletes_nothing(root: Path) -> None:
    newer, late = Members(root, 2, keep=1), Members(root, 2, keep=1)
    newer.save(state(7, 1, 2), tree(1))
    assert late.save(state(9, 6, 1), tree(2)).error == ""
    found, _ = newer.all[0].newest(must_read=True)
    assert found is not None
    assert found.manifest.state == state(7, 1, 2)
    newer.close()
    late.close()


def damage(folder: Path, how: str) -> None:
    share = next(folder.glob("*00001-of-00002.safetensors"))
    raw = bytearray(share.read_bytes())
    match how:
        case "a bit":
            raw[-3] ^= 4
            share.write_bytes(raw)
        case "the header":
            raw[20] ^= 1
            share.write_bytes(raw)
        case "the end":
            share.write_bytes(raw[:-1])
        case "more":
            share.write_bytes(raw + b"x")
        case "all":
            share.write_bytes(b"")
        case "gone":
            share.unlink()
        case "the tree":
            (folder / "workers.json").write_bytes(b"{}")
        case "more tree":
            with (folder / "workers.json").open("ab") as file:
                file.write(b" ")
        case "no tree":
            (folder / "workers.json").unlink()
        case "the manifest":
            (folder / names.MANIFEST).write_text("{")
        case "servers":
            text = (folder / names.MANIFEST).read_text()
            (folder / names.MANIFEST).write_text(text.replace('"workers": {', '"servers": {'))


@pytest.mark.parametrize(
    "how",
    [
        "a bit",
        "the header",
        "the end",
        "more",
        "all",
        "gone",
        "the tree",
        "more tree",
        "no tree",
        "the manifest",
        "servers",
    ],
)
def test_a_damaged_one_is_passed_over_with_its_reason(
    root: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    members = Members(root, 2)
    members.save(state(1), tree(1))
    members.save(state(2), tree(2))
    damage(root / FOLDER / names.folder(state(2)), how)
    found, skipped = members.all[0].newest(must_read=True)
    assert found is not None
    assert equal(found.tree, tree(1))
    assert len(skipped) == 1
    assert skipped[0].startswith(names.folder(state(2)))
    assert "cannot be used" in caplog.text
    with pytest.raises(CorruptError):
        restore.verify(Storage(str(root), FOLDER), names.folder(state(2)))
    restore.verify(Storage(str(root), FOLDER), names.folder(state(1)))
    members.close()


def rewritten(path: Path, version: int) -> None:
    """Say in a file of JSON that it has this version."""
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": version}))


def test_newer_checkpoint_is_an_error_and_no_way_back(root: Path, tmp_path: Path) -> None:
    """An older one would lose steps without a word."""
    members = Members(root, 1)
    for step in (5, 6):
        members.save(state(step), tree())
    members.close()
    name = names.folder(state(6))
    rewritten(root / FOLDER / name / names.MANIFEST, VERSION_WITH_FROZEN + 1)
    with pytest.raises(SpringtideError, match=f"{name}: .* version 3, .* 1 to 2: upgrade springtide"):
        restore.newest(Storage(str(root), FOLDER))
    [newer, older] = inspect.entries(str(root / FOLDER))
    assert "upgrade springtide" in newer.problem
    assert older.manifest is not None
    with pytest.raises(NewerError, match="upgrade springtide"):
        consolidate.to_safetensors(str(root / FOLDER), tmp_path / "model.safetensors")


def test_checkpoint_of_an_impossible_version_is_passed_over(root: Path) -> None:
    members = Members(root, 1)
    for step in (5, 6):
        members.save(state(step), tree())
    members.close()
    rewritten(root / FOLDER / names.folder(state(6)) / names.MANIFEST, 0)
    found, skipped = restore.newest(Storage(str(root), FOLDER))
    assert found is not None
    assert found.manifest.state == state(5)
    assert "malformed" in skipped[0]


def test_receipt_of_the_last_release_is_read() -> None:
    receipt = Receipt(File("a", 1, "0" * 64), "layout")
    written = json.loads(receipt.to_json())
    assert written.pop("version") == 1
    assert parse_receipt(json.dumps(written).encode()) == receipt
    with pytest.raises(NewerError, match=r"receipt of a share has version 2, .* 1 to 1: upgrade springtide"):
        parse_receipt(json.dumps({**written, "version": 2}).encode())


def test_without_a_manifest_there_is_no_checkpoint(root: Path) -> None:
    members = Members(root, 2)
    members.save(state(1), tree(1))
    (root / FOLDER / names.folder(state(1)) / names.MANIFEST).unlink()
    assert members.all[0].newest(must_read=True) == (None, [])
    members.close()


@pytest.mark.parametrize("point", ["share", "shared", "manifest", "saved", "pruned"])
def test_a_failure_at_any_point_is_told_and_leaves_a_whole_one(root: Path, point: str) -> None:
    members = Members(root, 1, keep=1)
    assert not members.save(state(1), tree(1)).error
    faults.arm(f"{point}:2:raise")
    try:
        assert f"fault at {point} of step 2" in members.save(state(2), tree(2)).error
    finally:
        faults.arm("")
    for expected in (2 if point in ("saved", "pruned") else 1, 3):
        found, skipped = members.all[0].newest(must_read=True)
        assert found is not None
        assert skipped == []
        assert found.manifest.state == state(expected)
        assert equal(found.tree, tree(expected))
        if expected < 3:
            assert not members.save(state(3), tree(3)).error
    members.close()


def test_a_share_that_never_comes_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide.checkpoint.waiting.GRACE_SECONDS", 0.0)
    members = Members(root, 2)
    members.present = ["w0"]
    members.all[0].take(state(1), tree, Share(0, members.share), "interval")
    assert members.all[0].flush(30)
    assert members.told[-1].error == "w1 did not live to write its share"
    assert not (root / FOLDER / names.folder(state(1)) / names.MANIFEST).exists()
    members.close()


class OnServers:
    """Two tensors of the state that servers hold.

    Args:
        broken: why they cannot be read; "" if they can.

    Args:
        broken: why the part cannot be had; "" if it can.
    """

    kind = "servers"

    def __init__(self, broken: str = "") -> None:
        self.broken, self.closed = broken, False
        generator = torch.Generator().manual_seed(9)
        self.tree = {
            "optimizer": {0: {"exp_avg": torch.randn(5, 3, generator=generator), "step": torch.tensor(4.0)}},
            "tables": {"t0.0": {"about": "{}", "memory": torch.arange(77, dtype=torch.uint8)}},
        }

    def collect(self, index: int, count: int) -> Collected:
        if self.broken:
            raise GoneError(self.broken)
        return Stage().take(self.tree, Share(index, ("w",) * count))

    def close(self) -> None:
        self.closed = True


def with_optimizer() -> dict[str, Any]:
    content = tree()
    return {**content, "buffers": {}, "optimizer": {"state": [{}, {}], "groups": []}, "tracked": {TABLES: {}}}


def test_what_servers_hold_comes_back_with_the_rest(root: Path, tmp_path: Path) -> None:
    members, content = Members(root, 2), with_optimizer()
    servers = [OnServers(), OnServers()]
    asked: list[tuple[str, int]] = []

    def take_snapshot(of: OnServers, name: str, readers: int) -> OnServers:
        asked.append((name, readers))
        return of

    for index, member in enumerate(members.all):
        share = Share(index, members.share, "-2")
        member.take(state(5), lambda: content, share, "interval", partial(take_snapshot, servers[index]))
    members.flush()
    assert asked == [(names.folder(state(5)) + "-2", 2)] * 2
    assert all(part.closed for part in servers)
    found, _ = members.all[0].newest(must_read=True)
    assert found is not None
    assert set(found.manifest.parts) == {"workers", "servers"}
    held = servers[0].tree
    assert equal(found.tree["optimizer"]["state"], [held["optimizer"][0], {}])
    assert equal(found.tree["tracked"], {TABLES: held["tables"]})
    assert equal(found.tree["parameters"], content["parameters"])
    uri = str(root / FOLDER)
    assert [entry.problem for entry in inspect.verify(uri)] == [""]
    consolidate.to_safetensors(uri, tmp_path / "model.safetensors")
    read = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(read["a"], content["parameters"]["a"])
    # A damaged file of theirs is noticed as one of the workers' is.
    path = next((root / FOLDER / names.folder(state(5))).glob("servers-2-00001*.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert "has not the checksum" in inspect.verify(uri)[0].problem
    members.close()


@pytest.mark.parametrize("who", [0, 1])
def test_a_share_that_servers_do_not_give_is_told_at_once(root: Path, who: int) -> None:
    members, content = Members(root, 2), with_optimizer()
    servers = [OnServers(), OnServers()]
    servers[who].broken = "parameter server 10.0.0.7:7080: it is gone"
    for index, member in enumerate(members.all):
        own = servers[index]
        member.take(
            state(5), lambda: content, Share(index, members.share), "interval", lambda *_, own=own: own
        )
    members.flush()
    told = {written.error for written in members.told if written.error}
    assert servers[who].broken in told
    assert who == 0 or f"the share of w1: {servers[who].broken}" in told
    assert not any(written.whole for written in members.told)
    assert all(part.closed for part in servers)
    assert not members.save(state(6), tree()).error
    members.close()


def test_servers_keep_nothing_for_a_place_that_cannot_be_opened(root: Path) -> None:
    members, content, servers = Members(root, 1, uri="nonsense://bucket"), with_optimizer(), OnServers()
    members.all[0].take(state(5), lambda: content, Share(0, members.share), "interval", lambda *_: servers)
    members.flush()
    assert "nonsense" in members.told[0].error
    assert servers.closed
    members.close()


def test_members_with_other_tensors_make_no_checkpoint(root: Path) -> None:
    members = Members(root, 2)
    members.all[1].take(state(1), lambda: {"x": torch.zeros(4)}, Share(1, members.share), "interval")
    members.all[0].take(state(1), tree, Share(0, members.share), "interval")
    members.flush()
    assert [t.error for t in members.told if t.error] == ["the state of w1 has other tensors than that of w0"]
    members.close()


@pytest.mark.parametrize("kind", ["absent", "a file", "not ours"])
def test_a_place_that_cannot_be_written_is_told(root: Path, kind: str) -> None:
    place = root / "volume"
    if kind == "a file":
        place.write_text("")
    if kind == "not ours":
        if os.geteuid() == 0:
            pytest.skip("root may write anywhere")
        place.mkdir(mode=0o500)
    members = Members(place, 1)
    told = members.save(state(1), tree())
    assert str(place) in told.error
    assert kind == "not ours" or "is the volume mounted?" in told.error
    assert not (kind == "absent" and place.exists())
    members.close()


def test_storage_that_does_not_answer_is_no_reason_to_begin_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("springtide.checkpoint.keeper.READ_PAUSE_SECONDS", 0.0)
    members = Members(root / "absent", 1)
    assert members.all[0].newest(must_read=False) == (None, [])
    with pytest.raises(SpringtideError, match="does not begin again from nothing"):
        members.all[0].newest(must_read=True)
    members.close()


def test_a_protocol_that_nobody_knows_is_told() -> None:
    with pytest.raises(StorageError, match="nonsense"):
        Storage("nonsense://bucket/x")


def test_storage_failing_at_open_is_reported_and_job_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unreachable(AbstractFileSystem):  # type: ignore[misc]
        protocol = "unreachable"

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            raise OSError(-2, "Name or service not known")

    fsspec.register_implementation("unreachable", Unreachable, clobber=True)
    with pytest.raises(StorageError, match="cannot reach unreachable://host/x: OSError: Name or service"):
        Storage("unreachable://host/x")
    members = Members(Path(), 1, uri="unreachable://host")
    assert members.all[0].newest(must_read=False) == (None, [])
    members.close()


def test_unsavable_state_is_reported_and_training_goes_on(root: Path) -> None:
    members = Members(root, 1)
    told = members.save(state(1), {"tracked": {"x": object()}})
    assert "tracked.x" in told.error
    assert members.save(state(2), tree()).error == ""
    members.close()


def test_checkpoint_of_another_job_is_restored_only_if_named(root: Path) -> None:
    first = Members(root, 2)
    first.save(state(1), tree(1))
    first.save(state(2), tree(2))
    first.close()
    told: list[Written] = []

    def other(restore_from: str) -> Checkpoints:
        place = CheckpointLocation(str(root), "space-job-87654321", 60.0, 3, restore_from)
        return Checkpoints(place, {}, lambda _: None, told.append)

    assert other("").newest(must_read=False) == (None, [])
    job = f"{root}/{FOLDER}"
    for uri, seed in ((job, 2), (f"{job}/", 2), (f"{job}/{names.folder(state(1))}", 1)):
        found, _ = other(uri).newest(must_read=False)
        assert found is not None
        assert equal(found.tree, tree(seed))
    with pytest.raises(SpringtideError, match="no whole checkpoint"):
        other(str(root)).newest(must_read=False)
    with pytest.raises(SpringtideError, match=r"manifest\.json"):
        other(f"{job}/{names.folder(state(3))}").newest(must_read=False)


def test_the_interval_runs_from_the_last_one(root: Path) -> None:
    now = [100.0]
    member = Checkpoints(
        CheckpointLocation(str(root), FOLDER, 60.0), {}, lambda _: None, lambda _: None, clock=lambda: now[0]
    )
    assert member.wish(first=True) == 0.0
    now[0] += 60
    assert member.wish(first=True) == 1.0
    assert member.wish(first=False) == 0.0
    member.committed(1.0, ended=False)
    assert member.due
    member.take(state(1), tree, Share(0, ("w0",)), "interval")
    assert not member.due
    assert member.flush(30)
    now[0] += 59
    assert member.wish(first=True) == 0.0
    member.close()


def test_nothing_is_left_running(root: Path) -> None:
    members = Members(root, 2)
    members.save(state(1), tree())
    members.close()
    assert not [t for t in threading.enumerate() if t.name == "springtide-checkpoint" and t.is_alive()]
    assert not list(root.rglob("*.new"))
    shutil.rmtree(root / FOLDER)


@pytest.mark.parametrize(
    ("total", "due"),
    [(0.0, True), (schedule.BUSY, True), (schedule.UNABLE, False)],
    ids=["nobody wishes", "one still writes", "one cannot"],
)
def test_an_early_end_is_saved_once(tmp_path: Path, total: float, due: bool) -> None:
    member = Checkpoints(CheckpointLocation(str(tmp_path), FOLDER), {}, lambda _: None, lambda _: None)
    member.end_early()
    assert not member.due, "no step was committed here"
    member.committed(total, False)
    assert not member.due
    member.end_early()
    assert member.due == due
    member.due = False
    member.end_early()
    assert not member.due, "it is saved already"
