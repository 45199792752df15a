"""Jobs go on from checkpoints of another release, with parameters on servers or without."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from releases import Tree
from worker_checks import check
from worker_cluster import WorkerCluster, Zygote
from worker_reference import Reference

from springtide.checkpoint import manifest, names

ALL = os.environ.get("SPRINGTIDE_SKEW") == "all"
CASES = [
    # saved by, read by, parameters on servers
    ("last", "today", False),
    ("last", "today", True),
    ("today", "last", True),  # the format is the last release's: a rollback goes on, too
    ("today", "last", False),
    ("today", "next", False),
    ("next", "today", False),
]
FOLDER = "default-test-alone"

pytestmark = pytest.mark.timeout(300)


def saved(cluster: WorkerCluster) -> int:
    """The step of the newest whole checkpoint that the coordinator knows of."""
    return 0 if cluster.reply is None else cluster.reply.checkpoint.state.step


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "reader", "on_servers"), CASES if ALL else CASES[:2])
def test_a_checkpoint_of_another_release_is_gone_on_from(
    job_of: Callable[..., WorkerCluster],
    tree_of: Callable[[str], Tree],
    zygote_of: Callable[[str], Zygote],
    reference: Reference,
    tmp_path: Path,
    writer: str,
    reader: str,
    on_servers: bool,
) -> None:
    """All processes end at once, and those that come are of the other release."""
    volume = tmp_path / "volume"
    volume.mkdir()
    place = {"SPRINGTIDE_CHECKPOINT_URI": str(volume), "SPRINGTIDE_CHECKPOINT_SECONDS": "0.1"}
    cluster = job_of(workers=writer, coordinator=writer, servers=writer if on_servers else "", **place)
    members = cluster.start(2)
    cluster.until(lambda: saved(cluster) >= 4, "a checkpoint")
    for process in (*members, *cluster.servers):
        process.kill()
    cluster.until_done()
    cluster.kill_coordinator()
    left = max(state.step for path in (volume / FOLDER).iterdir() if (state := names.parse(path.name)))
    cluster.change_release(zygote_of(reader), tree_of(reader).script)
    cluster.start_coordinator()
    for slot in range(cluster.servers_wanted):
        cluster.add_server(slot)
    others = [cluster.add(), cluster.add()]
    cluster.until_done()
    check(cluster, reference, others)
    assert cluster.reply is not None
    restored = cluster.reply.restored
    assert 4 <= restored.state.step <= left
    assert not restored.skipped
    assert min(commit["step"] for one in others for commit in one.commits()) == restored.state.step + 1


def test_checkpoint_of_the_next_format_ends_with_its_reason(
    job_of: Callable[..., WorkerCluster], tmp_path: Path
) -> None:
    """Older ones are there, and are not gone back to."""
    volume = tmp_path / "volume"
    volume.mkdir()
    place = {"SPRINGTIDE_CHECKPOINT_URI": str(volume), "SPRINGTIDE_CHECKPOINT_SECONDS": "0.1"}
    cluster = job_of(workers="today", coordinator="today", **place)
    members = cluster.start(2)
    cluster.until(lambda: saved(cluster) >= 4, "a checkpoint")
    for worker in members:
        worker.kill()
    cluster.until_done()
    whole = [path for path in (volume / FOLDER).iterdir() if (path / names.MANIFEST).exists()]
    newest = max(whole, key=lambda path: path.name) / names.MANIFEST
    later = f'"version": {manifest.VERSION_WITH_FROZEN + 1}'
    text = newest.read_text(encoding="utf-8")
    assert f'"version": {manifest.VERSION}' in text
    newest.write_text(text.replace(f'"version": {manifest.VERSION}', later, 1), encoding="utf-8")
    worker = cluster.add()
    cluster.until_done(worker)
    assert worker.code != 0
    assert f"has version {manifest.VERSION_WITH_FROZEN + 1}" in worker.log()
    assert "upgrade springtide" in worker.log()
