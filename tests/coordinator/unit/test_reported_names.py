"""Names that scripts report: bounded in the worker, in the hub and in the answer to Sync."""

from __future__ import annotations

from pathlib import Path

import pytest
from coordinator_room import state

from springtide.coordination.report_limits import ReportedNames
from springtide_coordinator.hub import Hub
from springtide_coordinator.reply import answer_sync
from springtide_coordinator.reported import MAX_KEPT_NAMES, Latest, Names
from springtide_coordinator.settings import Options
from springtide_protocol import codec
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.names import Incarnation


def test_a_worker_sends_64_names_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    reported = ReportedNames()
    values = {f"loss_{number:06d}": 1.0 for number in range(150_000)}
    assert sorted(reported.bounded(values)) == sorted(values)[:64]
    assert reported.bounded({"x" * 129: 1.0, "loss": 2.0}) == {"loss": 2.0}
    assert len(caplog.messages) == 1
    assert "149936 names beyond 64" in caplog.messages[0]


def test_a_name_that_changes_each_step_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    reported = ReportedNames()
    for step in range(200):
        assert reported.bounded({f"loss_{step}": 1.0}) == {f"loss_{step}": 1.0}
    assert len(caplog.messages) == 1
    assert "should not change from step to step" in caplog.messages[0]


def test_the_newest_names_stay() -> None:
    latest = Latest()
    for step in range(1000):
        latest.report({"loss": float(step), f"loss_{step}": 1.0})
    assert len(latest) == 64
    assert latest["loss"] == 999.0
    assert "loss_999" in latest


def test_kept_commits_share_few_names() -> None:
    names = Names()
    kept = [names.of({f"loss_{step}": 1.0}) for step in range(3 * MAX_KEPT_NAMES)]
    assert sum(map(len, kept)) == MAX_KEPT_NAMES


def test_a_sync_stays_small_whatever_was_reported(tmp_path: Path) -> None:
    hub = Hub(Options(token="t", number=1, state_dir=tmp_path), Incarnation(1, 0))
    stream = hub.new_stream()
    member = pb.Member(id="w0", pod_uid="w0")
    hub.hello(stream, pb.Hello(protocol_version=1, member=member, standing=pb.STARTING))
    for first in range(0, 150_000, 10_000):
        values = {f"{number:06d}_{'x' * 200}": 1.0 for number in range(first, first + 5_000)}
        values |= {f"loss_{number}": 1.0 for number in range(first, first + 5_000)}
        hub.receive(stream, pb.WorkerMessage(values=pb.Values(values=values)))
    commit = pb.Commit(state=codec.state_to_proto(state(1)), values={f"v{n}": 1.0 for n in range(5_000)})
    hub.receive(stream, pb.WorkerMessage(progress=pb.Progress(commits=[commit])))
    reply = answer_sync(hub, pb.SyncRequest(target=1))
    assert 0 < len(reply.values) <= 64
    assert reply.ByteSize() < 64 * 1024
