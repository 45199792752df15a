"""Real processes, the real coordinator, checkpoints in a folder: when nobody is left, the next ones go on
from the newest, with the numbers of an undisturbed run; whoever dies while writing one leaves the one before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_checks import check
from worker_cluster import Worker, WorkerCluster, Zygote
from worker_reference import Reference

from springtide.checkpoint import names, restore
from springtide.checkpoint.storage import Storage
from springtide.coordination import outcome
from springtide.data.marks import marked_ids

OPTIONS: dict[str, Any] = {
    "samples": 230,
    "batch": 32,
    "epochs": 5,
    "pace": 0.03,
    "optimizer": "adam",
    "lr": 0.01,
}
STEPS = 40
FOLDER = "default-test-alone"

pytestmark = pytest.mark.timeout(300)


class Place:
    """The folder of the job's checkpoints."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        self.root = root
        self.folder = root / FOLDER
        self.storage = Storage(str(root), FOLDER)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, the newest first."""
        return [state.step for name in restore.candidates(self.storage) if (state := names.parse(name))]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "volume")


@pytest.fixture
def make_cluster(zygote: Zygote, tmp_path: Path, place: Place) -> Iterator[Callable[..., WorkerCluster]]:
    clusters: list[WorkerCluster] = []

    def make(**settings: Any) -> WorkerCluster:
        options = OPTIONS | settings.pop("options", {})
        environment = {
            "SPRINGTIDE_CHECKPOINT_URI": str(place.root),
            "SPRINGTIDE_CHECKPOINT_SECONDS": "0.1",
            "SPRINGTIDE_CHECKPOINT_KEEP": "2",
        } | settings.pop("environment", {})
        clusters.append(WorkerCluster(zygote, tmp_path, options, environment=environment, **settings))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


def went_on_from(workers: list[Worker]) -> int:
    """The step after which these processes' first own commit came."""
    return min(worker.commits()[0]["step"] for worker in workers if worker.commits()) - 1


@pytest.mark.slow
def test_all_killed_others_go_on_from_newest_checkpoint(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, place: Place
) -> None:
    cluster = make_cluster()
    first = cluster.start(3)
    cluster.until(lambda: place.steps()[:1] >= [8], "a checkpoint")
    for worker in first:
        worker.kill()
    cluster.until_done()
    newest = place.steps()[0]
    second = [cluster.add(), cluster.add()]
    cluster.until(lambda: place.steps()[0] > newest, "a checkpoint of the second pair")
    assert went_on_from(second) == newest
    cluster.until(lambda: len(place.steps()) > 1, "two checkpoints")
    for worker in second:
        worker.kill()
    cluster.until_done()
    damaged, before = place.steps()[:2]
    share = next((place.folder / restore.candidates(place.storage)[0]).glob("*.safetensors"))
    share.write_bytes(share.read_bytes()[:-1])
    last = cluster.add()
    cluster.until_done()
    check(cluster, reference, [last])
    assert went_on_from([last]) == before < damaged
    assert cluster.reply is not None
    assert "cut short" in cluster.reply.restored.skipped[0]
    # The last state is saved too, and no more than two are kept.
    assert place.steps()[0] == STEPS
    assert len(place.steps()) == 2
    assert restore.verify(place.storage, restore.candidates(place.storage)[0]).reason == "end"


@pytest.mark.slow
def test_killed_at_every_point_of_a_checkpoint(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, place: Place
) -> None:
    """The first of two members dies there, each time at another point, and the next two go on from what is
    whole. The second one cannot go on alone, so that no other checkpoint is made.
    """
    cluster = make_cluster(minimum=2)
    pair = cluster.start(2)
    cluster.until(lambda: bool(place.steps()), "a checkpoint")
    for point in ("restore", "staged", "share", "shared", "manifest", "saved", "pruned"):
        for worker in pair:
            worker.kill()
        cluster.until_done()
        before = place.steps()[0]
        pair = [cluster.add(fault=f"{point}:*:kill"), cluster.add()]
        cluster.until(lambda doomed=pair[0]: not doomed.running, f"the death at {point}")
        for name in restore.candidates(place.storage):
            restore.verify(place.storage, name)
        assert (place.steps()[0] > before) == (point in ("saved", "pruned"))
        assert pair[0].code == -9
        assert point == "restore" or went_on_from(pair) == before
    pair[1].kill()
    cluster.until_done()
    newest = place.steps()[0]
    last = [cluster.add(), cluster.add()]
    cluster.until_done()
    assert went_on_from(last) == newest
    check(cluster, reference, last)


def put_away(cluster: WorkerCluster, *workers: Worker) -> None:
    """Suspend the job, and end its coordinator when nobody is left."""
    cluster.suspend = True
    cluster.until_done(*workers)
    cluster.until(lambda: cluster.reply is not None and cluster.reply.put_away, "the job to be put away")


@pytest.mark.slow
def test_a_cut_off_members_late_checkpoint_replaces_nothing(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, place: Place
) -> None:
    """The first member is stopped before it writes a manifest; the other goes on and saves; then it wakes."""
    cluster = make_cluster()
    stopped, other = cluster.start(2, faults={0: "manifest:*:stop"})
    cluster.until(lambda: bool(place.steps()), "a checkpoint of the other one")
    before = place.steps()[0]
    late = stopped.commits()[-1]["generation"]
    stopped.wake()
    cluster.until(lambda: "lost the coordinator" in stopped.log(), "the late one to go on")
    cluster.until_done()
    check(cluster, reference, [stopped, other])
    for name in restore.candidates(place.storage):
        assert restore.verify(place.storage, name).state.generation.number > late
    assert place.steps()[0] == STEPS > before


@pytest.mark.slow
def test_job_drained_then_suspended_goes_on_where_it_was(
    make_cluster: Callable[..., WorkerCluster], reference: Reference, place: Place
) -> None:
    """No checkpoint is made by time. First all pods are deleted, under a coordinator that lives on; then the
    job is suspended, and resumed under another one.
    """
    cluster = make_cluster(environment={"SPRINGTIDE_CHECKPOINT_SECONDS": "3600"})
    first = cluster.start(3)
    cluster.until_step(5)
    gone_by = time.time() + 15
    for worker in first:
        worker.leave_by = gone_by
    cluster.until_done()
    drained_at = max(commit["step"] for worker in first for commit in worker.commits())
    assert place.steps() == [drained_at]
    second = [cluster.add(), cluster.add()]
    cluster.until(lambda: len(second[0].commits()) > 3, "steps of the next ones")
    assert went_on_from(second) == drained_at
    put_away(cluster, *second)
    suspended_at = max(commit["step"] for worker in second for commit in worker.commits())
    reply = cluster.reply
    assert reply is not None
    assert reply.all_saved
    assert reply.checkpoint.name == restore.candidates(place.storage)[0]
    assert reply.checkpoint.state.step == suspended_at
    for worker in second:
        assert worker.outcome() == outcome.Left("the job is suspended")
        assert worker.code == 0
    cluster.kill_coordinator()
    cluster.suspend, cluster.saved = False, reply.checkpoint.name
    cluster.start_coordinator()
    third = cluster.add()
    cluster.until_done()
    assert went_on_from([third]) == suspended_at
    check(cluster, reference, [third])
    assert cluster.reply is not None
    assert cluster.reply.states_lost == 0
    assert cluster.reply.restored.name == reply.checkpoint.name


@pytest.mark.slow
def test_killed_while_what_does_not_train_is_written(
    make_cluster: Callable[..., WorkerCluster], place: Place
) -> None:
    """The next members write it whole; those after them, at another number, find it there."""
    cluster = make_cluster(options={"frozen": 1, "epochs": 8}, minimum=2)
    blocks = place.folder / names.FROZEN
    first = cluster.start(2, faults=dict.fromkeys((0, 1), "frozen:*:kill"))
    cluster.until(lambda: any(not worker.running for worker in first), "the death of who has the block")
    for worker in first:
        worker.kill()
    cluster.until_done()
    assert place.steps() == []
    assert [path.suffix for path in blocks.iterdir()] == [".new"]
    second = [cluster.add(), cluster.add()]
    cluster.until(lambda: len(place.steps()) > 1, "two checkpoints")
    for worker in second:
        worker.kill()
    cluster.until_done()
    (block,) = list(blocks.iterdir())
    written = block.stat()
    newest = place.steps()[0]
    # All of the third restore: one that came later would join those that have.
    cluster.minimum, now = 3, time.monotonic()
    cluster.until(lambda: cluster.asked_at > now, "the operator's next call")
    third = [cluster.add(), cluster.add(), cluster.add()]
    cluster.until_done()
    assert went_on_from(third) == newest
    for worker in third:
        assert "files were read here and" in worker.log()  # each its share
    assert all(isinstance(worker.outcome(), outcome.Finished) for worker in third), cluster.logs()
    assert len({worker.result()["parameters"] for worker in third}) == 1
    assert list(blocks.iterdir()) == [block]
    assert (block.stat().st_ino, block.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    for name in restore.candidates(place.storage):
        restore.verify(place.storage, name)


@pytest.mark.slow
def test_going_on_from_a_checkpoint_of_other_data_is_warned(
    make_cluster: Callable[..., WorkerCluster], place: Place
) -> None:
    """Data are corrected between two runs: that is no error."""
    cluster = make_cluster()
    first = cluster.start(2)
    cluster.until(lambda: bool(place.steps()), "a checkpoint")
    for worker in first:
        worker.kill()
    cluster.until_done()
    second = [cluster.add(other_order=[[0, 2], [0, 3]]) for _ in range(2)]
    cluster.until_done()
    assert all(isinstance(worker.outcome(), outcome.Finished) for worker in second), cluster.logs()
    # One that came a moment later has joined the other, which had read the checkpoint alone.
    read = [worker.log() for worker in second if "springtide INFO restored " in worker.log()]
    assert read
    for said in read:
        assert "are not what they were when step-" in said
        assert str(sorted(marked_ids(230, 8)))[1:-1] in said
