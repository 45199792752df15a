"""events.k8s.io/v1 shows the events of the core group under other names."""

from __future__ import annotations

from springtide_local.ports import Object

_RENAMED = {
    "involvedObject": "regarding",
    "message": "note",
    "count": "deprecatedCount",
    "source": "deprecatedSource",
    "firstTimestamp": "deprecatedFirstTimestamp",
    "lastTimestamp": "deprecatedLastTimestamp",
    "reportingComponent": "reportingController",
}
_BACK = {new: old for old, new in _RENAMED.items()}


def show(event: Object) -> Object:
    shown = {_RENAMED.get(name, name): value for name, value in event.items()}
    shown["apiVersion"] = "events.k8s.io/v1"
    return shown


def store(event: Object) -> Object:
    kept = {_BACK.get(name, name): value for name, value in event.items()}
    kept["apiVersion"] = "v1"
    return kept
