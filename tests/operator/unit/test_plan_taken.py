"""`status.data.taken`: how it comes from workers, and what becomes of it where a release does not know it."""

from __future__ import annotations

import copy
import json
from typing import Any

from cli_fake_kube import job
from operator_world import World, finished_message, job_object

from springtide_cli.audit import audit
from springtide_operator.coordinator_connection import to_report
from springtide_operator.manifests.worker import worker_pod
from springtide_operator.plan import observe, progress
from springtide_operator.plan.observation import Finished, TakenReport
from springtide_operator.status_patch import status_schema, with_unknown
from springtide_protocol import coordinator_pb2 as pb


def reply(step: int, samples: int, *, taken: bool = True) -> pb.SyncReply:
    """Return a coordinator's answer about a source that never ends."""
    data = pb.Data(seen=samples, total_seen=samples)
    if taken:
        data.taken.CopyFrom(pb.Taken(step=step, samples=samples, shards="0-3", begun="4:7"))
    return pb.SyncReply(data=data)


def status_of(answer: pb.SyncReply, old: dict[str, Any] | None = None) -> dict[str, Any]:
    return progress.numbers(to_report(answer, at=1000.0), old or {})


def parsed(said: dict[str, Any]) -> Finished:
    """Return what the operator reads from the pod of a worker that said this at its end."""
    world = World(job=job_object())
    raw = world.add(worker_pod(world.parsed(), 0, 0, "10.0.0.1:7070"))
    world.run(raw)
    world.end(raw, 0, json.dumps(said), None)
    pod = observe.worker_pod(raw)
    assert pod is not None
    assert pod.end is not None
    assert pod.end.finished is not None
    return pod.end.finished


def test_what_was_taken_comes_into_status() -> None:
    status = status_of(reply(5, 40))
    assert status["data"]["taken"] == {
        "step": 5,
        "totalSeen": 40,
        "samples": 40,
        "shards": "0-3",
        "begun": "4:7",
    }
    assert audit(job(state="Running", **status)).code == 0


def test_a_worker_that_does_not_tell_leaves_nothing_old() -> None:
    before = status_of(reply(5, 40))
    after = status_of(reply(6, 48, taken=False), before)
    written = with_unknown(before, after, status_schema())
    assert "taken" not in written["data"]
    assert "not known" not in "".join(line.text for line in audit(job(state="Running", **written)).lines)


def test_a_release_without_the_field_makes_it_old() -> None:
    """An operator keeps fields that it does not know, as they are."""
    schema = copy.deepcopy(status_schema())
    del schema["properties"]["data"]["properties"]["taken"]
    before = status_of(reply(5, 40))
    written = with_unknown(before, status_of(reply(6, 48, taken=False)), schema)
    assert written["data"]["taken"] == before["data"]["taken"]
    found = audit(job(state="Running", **written))
    assert found.code == 2
    assert "not known; it was last told after step 5" in "".join(line.text for line in found.lines)
    # The next release that knows it mends it.
    assert audit(job(state="Running", **status_of(reply(7, 56), written))).code == 0


def test_the_last_worker_tells_it_at_the_end() -> None:
    said = json.loads(finished_message(3))
    assert parsed(said).taken is None
    said["data"] |= {"epoch": 0, "seen": 40, "totalSeen": 40}
    finished = parsed(said | {"taken": {"step": 5, "samples": 40, "shards": "0-3", "begun": ""}})
    assert finished.taken == TakenReport(5, 40, "0-3")
    status = progress.final(finished, status_of(reply(4, 32)))
    assert (status["data"]["taken"]["step"], status["data"]["taken"]["totalSeen"]) == (5, 40)
    assert parsed(said | {"taken": {"step": "x", "samples": 40}}).taken is None
    assert parsed(said | {"taken": 7}).taken is None
