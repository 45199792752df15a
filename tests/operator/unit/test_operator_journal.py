"""The journal by which the randomized cluster test judges: it must see forbidden events."""

from __future__ import annotations

from typing import Any

import pytest
from operator_journal import Journal, how

from springtide_operator.api import names

Object = dict[str, Any]


def pod(slot: int, attempt: int = 0, **meta: Any) -> Object:
    labels = {names.LABEL_ROLE: names.ROLE_WORKER, names.LABEL_SLOT: str(slot)}
    name = f"fake-worker-{slot}-{attempt}"
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": labels, **meta},
        "status": {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]},
    }


def ended(slot: int, code: int = 137, message: str = "", **status: Any) -> Object:
    state = {"state": {"terminated": {"exitCode": code, "message": message}}}
    return {**pod(slot), "status": {"phase": "Failed", "containerStatuses": [state], **status}}


MARK = {"annotations": {names.ANNOTATION_DELETED_BECAUSE: "ScaledDown"}}
GOES = {"deletionTimestamp": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("kind", "seen", "expected"),
    [
        ("MODIFIED", pod(0), None),
        ("MODIFIED", pod(0, **MARK), None),  # about to be deleted by the operator
        ("MODIFIED", pod(0, **MARK, **GOES), "ScaledDown"),
        ("MODIFIED", pod(0, **GOES), "deleted"),
        ("DELETED", pod(0), "vanished"),
        ("MODIFIED", ended(0), "died"),
        ("MODIFIED", ended(0, reason="Evicted"), "disrupted"),
        ("MODIFIED", ended(0, 0, '{"outcome": "Left"}'), "left"),
        ("MODIFIED", ended(0, 0, '{"outcome": "Finished"}'), "finished"),
    ],
)
def test_how_a_pod_ended(kind: str, seen: Object, expected: str | None) -> None:
    assert how(kind, seen) == expected


def test_too_many_workers_are_seen_also_for_a_moment() -> None:
    journal = Journal(maximum=2)
    for slot in range(3):
        journal.take("ADDED", pod(slot), slot)
    journal.take("MODIFIED", ended(0), 3)
    assert len(journal.broken) == 1
    assert "3 live workers, at most 2" in journal.broken[0]


def test_a_slot_has_two_workers_at_most() -> None:
    journal = Journal(maximum=9)
    for attempt in range(2):
        journal.take("ADDED", pod(0, attempt), attempt)
    assert journal.broken == []
    journal.take("ADDED", pod(0, 2), 2)
    assert journal.broken == ["slot 0 has ['fake-worker-0-0', 'fake-worker-0-1', 'fake-worker-0-2']"]


def test_what_must_be_counted_and_what_may() -> None:
    journal = Journal(maximum=9)
    for slot in range(5):
        journal.take("ADDED", pod(slot), 0)
    journal.take("MODIFIED", ended(0), 10)  # must
    journal.take("MODIFIED", pod(1, **MARK, **GOES), 10)  # must not
    journal.take("MODIFIED", ended(2), 10)
    journal.take("MODIFIED", {**ended(2), "metadata": pod(2, **MARK, **GOES)["metadata"]}, 11)  # may
    journal.take("DELETED", pod(3), 1)  # may: it was hardly there
    assert journal.early() == (1, 3)
    assert journal.died() == 2
    assert [seen.name for seen in journal.live()] == ["fake-worker-4-0"]


def test_what_the_watch_has_told_of() -> None:
    journal = Journal(maximum=3)
    coordinator = {
        **pod(7),
        "metadata": {"name": "c", "uid": "c", "labels": {names.LABEL_ROLE: "coordinator"}},
    }
    journal.take("ADDED", pod(0), 0)
    assert not journal.knows([pod(0), coordinator])
    journal.take("ADDED", coordinator, 1)
    assert journal.knows([pod(0), coordinator])
    # Its container is started again; that of a worker is not.
    journal.take("MODIFIED", {**coordinator, "status": ended(0)["status"]}, 2)
    assert journal.knows([pod(0), coordinator])
    assert not journal.knows([ended(0), coordinator])
    assert not journal.knows([coordinator])
    journal.take("MODIFIED", ended(0), 3)
    assert journal.knows([ended(0), coordinator])
    assert journal.knows([coordinator])
