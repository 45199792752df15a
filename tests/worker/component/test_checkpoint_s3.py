"""Checkpoints on S3, as moto serves it: written in shares, found, checked, pruned, read back."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from s3_server import s3_server

from springtide.checkpoint import names, restore
from springtide.checkpoint.keeper import Checkpoints
from springtide.checkpoint.location import CheckpointLocation
from springtide.checkpoint.manifest import CorruptError
from springtide.checkpoint.shares import Share
from springtide.checkpoint.storage import Storage, StorageError
from springtide.checkpoint.writer import Written
from springtide_protocol.names import GenerationName, StateName

pytestmark = pytest.mark.timeout(300)

URI = "s3://bucket/some/jobs"
FOLDER = "space-job-12345678"
MEMBERS = ("w0", "w1", "w2")


@pytest.fixture(scope="module")
def server() -> Iterator[None]:
    with s3_server("bucket") as access, pytest.MonkeyPatch.context() as patched:
        for name, value in access.items():
            patched.setenv(name, value)
        yield


def state(step: int) -> StateName:
    return StateName(GenerationName.of(1, 0, 1), step)


def tree(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((300, 7), float(step)), "b": torch.arange(5) + step}


def save(step: int, uri: str = URI) -> list[Written]:
    """All members write their shares of a state."""
    told: list[Written] = []
    place = CheckpointLocation(uri, FOLDER, keep=2)
    members = [Checkpoints(place, {}, lambda _: None, told.append) for _ in MEMBERS]
    for index, member in enumerate(members):
        member.take(state(step), lambda: tree(step), Share(index, MEMBERS), "interval")
    for member in members:
        assert member.flush(60)
        member.close()
    return told


@pytest.mark.usefixtures("server")
def test_what_is_written_comes_back_and_old_ones_go() -> None:
    storage = Storage(URI, FOLDER)
    assert storage.checkpoints() == {}
    for step in (1, 2, 3):
        assert [t.error for t in save(step)] == [""] * 3
    assert restore.candidates(storage) == [names.folder(state(3)), names.folder(state(2))]
    found, skipped = restore.newest(storage)
    assert found is not None
    assert skipped == []
    assert torch.equal(found.tree["a"], tree(3)["a"])
    assert torch.equal(found.tree["b"], tree(3)["b"])
    # A damaged one is passed over, as on a folder.
    share = names.share_file("", 1, 3)
    storage.put(f"{names.folder(state(3))}/{share}", b"rubbish")
    with pytest.raises(CorruptError, match=share):
        restore.verify(storage, names.folder(state(3)))
    found, skipped = restore.newest(storage)
    assert found is not None
    assert found.manifest.state == state(2)
    assert len(skipped) == 1


@pytest.mark.usefixtures("server")
def test_a_bucket_that_is_not_there_is_told_alike_each_time() -> None:
    errors = {told.error for _ in range(2) for told in save(1, "s3://nobody/x") if told.error}
    assert errors
    for error in errors:
        assert "s3://nobody/x" in error
        assert not re.search(r"[0-9.]+ ?ms", error)
    with pytest.raises(StorageError, match="cannot list s3://nobody/x"):
        Storage("s3://nobody/x", FOLDER).checkpoints()


@pytest.mark.usefixtures("server")
def test_what_does_not_train_is_written_once_and_goes() -> None:
    uri = "s3://bucket/frozen/jobs"
    storage = Storage(uri, FOLDER)
    assert storage.sizes(names.FROZEN) == {}
    backbone = torch.arange(500.0)

    def save_adapter(step: int) -> None:
        told: list[Written] = []
        members = [
            Checkpoints(CheckpointLocation(uri, FOLDER, keep=1), {}, lambda _: None, told.append)
            for _ in MEMBERS
        ]
        content = {
            "parameters": {"backbone": backbone, "adapter": torch.full((7,), float(step))},
            "frozen": ["backbone"],
        }
        for index, member in enumerate(members):
            member.take(state(step), lambda: content, Share(index, MEMBERS), "interval")
        for member in members:
            assert member.flush(60)
            member.close()
        assert not any(one.error for one in told), told

    save_adapter(1)
    first = storage.sizes(names.FROZEN)
    assert len(first) == 1
    save_adapter(2)
    assert storage.sizes(names.FROZEN) == first
    backbone += 1
    save_adapter(3)
    assert len(storage.sizes(names.FROZEN)) == 1
    assert storage.sizes(names.FROZEN).keys() != first.keys()
    found, _ = restore.newest(storage)
    assert found is not None
    assert torch.equal(found.tree["parameters"]["backbone"], backbone)
    assert float(found.tree["parameters"]["adapter"][0]) == 3.0
