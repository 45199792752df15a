"""Records that a worker makes of its commits, its environment, its faults and its metrics."""

from __future__ import annotations

import threading
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from springtide import faults
from springtide.coordination.metrics import Metrics
from springtide.coordination.progress import MAX_COMMITS, Commit, CommitLog, StepLog
from springtide.errors import SpringtideError
from springtide.settings import read_settings
from springtide_protocol.names import GenerationName, StateName


def commit(step: int, generation: int = 1) -> Commit:
    return Commit(StateName(GenerationName.of(1, 0, generation), step), 1.0, 0.1, 0.01, 32, {"loss": 0.5})


def steps(commits: list[Commit]) -> list[int]:
    return [one.state.step for one in commits]


def test_commits_are_told_once_and_again_to_who_lacks_them() -> None:
    ring = CommitLog()
    for step in (1, 2, 3):
        ring.add(commit(step))
    assert steps(ring.take()) == [1, 2, 3]
    assert ring.take() == []
    ring.add(commit(4))
    assert steps(ring.take()) == [4]
    ring.rewind(commit(2).state)
    assert steps(ring.take()) == [3, 4]
    ring.rewind(None)
    assert steps(ring.take()) == [1, 2, 3, 4]


def test_ring_is_bounded_telling_oldest_in_bounded_messages() -> None:
    ring = CommitLog()
    for step in range(1, MAX_COMMITS + 11):
        ring.add(commit(step))
    told: list[int] = []
    while part := ring.take():
        assert len(part) <= 512
        told += steps(part)
    assert told == list(range(11, MAX_COMMITS + 11))


def test_step_log_needs_a_writable_place(tmp_path: Path) -> None:
    with pytest.raises(SpringtideError, match="SPRINGTIDE_STEP_LOG: cannot append"):
        StepLog(str(tmp_path / "no" / "folder"), "me")


def test_job_environment() -> None:
    environment = {
        "SPRINGTIDE_COORDINATOR": "10.0.0.1:7070",
        "SPRINGTIDE_TOKEN": "t",
        "SPRINGTIDE_POD_UID": "u",
        "SPRINGTIDE_POD_NAME": "digits-worker-2-1",
        "SPRINGTIDE_POD_IP": "10.0.0.9",
        "SPRINGTIDE_SLOT": "2",
        "OMP_NUM_THREADS": "3,1",
    }
    settings = read_settings(environment)
    assert (settings.alone, settings.slot, settings.threads, settings.bucket_mib) == (False, 2, 3, 25.0)
    assert read_settings({}).alone
    assert read_settings({}).process_id != read_settings({}).process_id


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SPRINGTIDE_COORDINATOR": "here"}, "must be host:port, got 'here'"),
        ({"SPRINGTIDE_TOKEN": ""}, "SPRINGTIDE_TOKEN is missing"),
        ({"SPRINGTIDE_SLOT": "x"}, "SPRINGTIDE_SLOT must be a number >= 0, got 'x'"),
        ({"SPRINGTIDE_BUCKET_MIB": "0"}, "SPRINGTIDE_BUCKET_MIB must be a number"),
        (
            {"SPRINGTIDE_POD_IP": "worker-1.svc"},
            "SPRINGTIDE_POD_IP must be an IP address, got 'worker-1.svc'",
        ),
        ({"OMP_NUM_THREADS": "many"}, "OMP_NUM_THREADS must be"),
    ],
)
def test_environment_that_cannot_be_right(change: dict[str, str], message: str) -> None:
    environment = {
        "SPRINGTIDE_COORDINATOR": "10.0.0.1:7070",
        "SPRINGTIDE_TOKEN": "t",
        "SPRINGTIDE_POD_UID": "u",
        "SPRINGTIDE_POD_NAME": "n",
        "SPRINGTIDE_POD_IP": "fd00::1",
    }
    with pytest.raises(SpringtideError, match=message):
        read_settings(environment | change)


def test_faults_happen_once_at_their_point() -> None:
    faults.arm("reduced:3:raise;body:*:raise")
    try:
        faults.reach("reduced", 2)
        with pytest.raises(RuntimeError, match="fault at reduced of step 3"):
            faults.reach("reduced", 3)
        faults.reach("reduced", 3)
        with pytest.raises(RuntimeError, match="fault at body of step 9"):
            faults.reach("body", 9)
        faults.reach("body", 10)
    finally:
        faults.arm("")


def test_a_hold_lasts_as_long_as_its_file_and_from_its_step_on(tmp_path: Path) -> None:
    path = tmp_path / "hold"
    path.write_text("300 5")
    faults.arm(f"committed:*:hold={path}")
    try:
        faults.reach("committed", 4)
        held = threading.Thread(target=faults.reach, args=("committed", 5))
        held.start()
        held.join(0.02)
        assert held.is_alive()
        path.unlink()
        held.join(60)
        assert not held.is_alive()
        path.write_text("0.01")
        faults.reach("committed", 6)
    finally:
        faults.arm("")


@pytest.mark.parametrize("text", ["nowhere:1:kill", "body:x:kill", "body:1:explode", "body"])
def test_unknown_fault(text: str) -> None:
    with pytest.raises(ValueError, match="expected POINT:STEP:ACTION"):
        faults.parse(text)


def test_metrics_are_served_on_a_free_port_when_theirs_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Metrics("digits", "default"), Metrics("digits", "default")
    caplog.set_level("INFO", "springtide")
    stop_first = first.serve(0, "127.0.0.1")
    taken = int(caplog.messages[-1].rsplit(" ", 1)[1])
    second.steps.inc()
    stop_second = second.serve(taken, "127.0.0.1")
    free = int(caplog.messages[-1].rsplit(" ", 1)[1])
    try:
        assert taken != free
        with urllib.request.urlopen(f"http://127.0.0.1:{free}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        assert 'springtide_worker_steps_total{job_namespace="default",training_job="digits"} 1.0' in text
    finally:
        stop_second()
        stop_first()
    assert b"springtide_worker_step_seconds_bucket" in generate_latest(first.registry)
