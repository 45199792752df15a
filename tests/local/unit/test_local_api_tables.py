"""Server-side printing: ages, JSONPath, the state of a pod, columns."""

from __future__ import annotations

from typing import Any

import pytest

from springtide_local.api import jsonpath, tables
from springtide_local.api.columns import COLUMNS
from springtide_local.api.durations import age, human_duration
from springtide_local.api.kinds.registry import builtin_resources
from springtide_local.api.pod_state import pod_cells, pod_reason
from springtide_local.api.resources import ResourceType


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "<invalid>"),
        (-1, "0s"),
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (200, "3m20s"),
        (600, "10m"),
        (179 * 60, "179m"),
        (3 * 3600, "3h"),
        (3 * 3600 + 60, "3h1m"),
        (47 * 3600, "47h"),
        (48 * 3600, "2d"),
        (51 * 3600, "2d3h"),
        (30 * 86400, "30d"),
        (800 * 86400, "2y70d"),
        (3650 * 86400, "10y"),
    ],
)
def test_durations_read_as_in_kubectl(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


def test_an_age_needs_a_time() -> None:
    assert age("1970-01-01T00:00:10Z", 15.0) == "5s"
    assert age(None, 15.0) == "<unknown>"
    assert age("yesterday", 15.0) == "<invalid>"


OBJECT = {
    "spec": {"size": 2, "list": [{"name": "a"}, {"name": "b"}]},
    "metadata": {"labels": {"x.y/z": "v"}},
    "status": {"conditions": [{"type": "Ready", "status": "True"}, {"type": "Done", "status": "False"}]},
}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (".spec.size", [2]),
        ("{.spec.size}", [2]),
        (".spec.list[1].name", ["b"]),
        (".spec.list[-1].name", ["b"]),
        (".spec.list[*].name", ["a", "b"]),
        (".spec.list[9].name", []),
        ('.status.conditions[?(@.type=="Ready")].status', ["True"]),
        (".status.conditions[?(@.type=='Done')].status", ["False"]),
        (".status.conditions[?(@.type!='Done')].type", ["Ready"]),
        (".metadata.labels.x\\.y/z", ["v"]),
        (".metadata.labels['x.y/z']", ["v"]),
        (".spec.none.deeper", []),
    ],
)
def test_paths_of_columns(path: str, found: list[Any]) -> None:
    assert jsonpath.find(OBJECT, path) == found


def test_a_path_that_is_none_says_where() -> None:
    with pytest.raises(ValueError, match=r"from '\[\?'"):
        jsonpath.find(OBJECT, ".spec[?")


def pod(status: dict[str, Any], **meta: Any) -> dict[str, Any]:
    spec = {"containers": [{"name": "a"}, {"name": "b"}], "initContainers": [{"name": "i"}]}
    return {"metadata": {"name": "p", **meta}, "spec": spec, "status": status}


def container(ready: bool = False, restarts: int = 0, **state: Any) -> dict[str, Any]:
    return {"name": "a", "ready": ready, "restartCount": restarts, "state": state}


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ({"phase": "Pending"}, "Pending"),
        ({"phase": "Failed", "reason": "Evicted"}, "Evicted"),
        ({"phase": "Running", "containerStatuses": [container(True, running={})]}, "Running"),
        (
            {"phase": "Pending", "containerStatuses": [container(waiting={"reason": "ErrImagePull"})]},
            "ErrImagePull",
        ),
        (
            {"phase": "Running", "containerStatuses": [container(waiting={"reason": "CrashLoopBackOff"})]},
            "CrashLoopBackOff",
        ),
        ({"phase": "Failed", "containerStatuses": [container(terminated={"reason": "Error"})]}, "Error"),
        ({"phase": "Failed", "containerStatuses": [container(terminated={"exitCode": 3})]}, "ExitCode:3"),
        ({"phase": "Failed", "containerStatuses": [container(terminated={"signal": 9})]}, "Signal:9"),
        (
            {
                "phase": "Running",
                "containerStatuses": [
                    container(terminated={"reason": "Completed"}),
                    container(True, running={}),
                ],
                "conditions": [{"type": "Ready", "status": "False"}],
            },
            "NotReady",
        ),
        ({"phase": "Pending", "initContainerStatuses": [container(running={})]}, "Init:0/1"),
        (
            {"phase": "Pending", "initContainerStatuses": [container(terminated={"exitCode": 1})]},
            "Init:ExitCode:1",
        ),
        (
            {
                "phase": "Pending",
                "initContainerStatuses": [container(waiting={"reason": "CrashLoopBackOff"})],
            },
            "Init:CrashLoopBackOff",
        ),
    ],
)
def test_a_pod_tells_its_state(status: dict[str, Any], text: str) -> None:
    assert pod_reason(pod(status)) == text


def test_a_pod_that_goes_is_terminating_and_restarts_tell_when() -> None:
    assert pod_reason(pod({"phase": "Running"}, deletionTimestamp="1970-01-01T00:00:00Z")) == "Terminating"
    ended = {"lastState": {"terminated": {"finishedAt": "1970-01-01T00:00:10Z"}}}
    statuses = [{**container(True, 3, running={}), **ended}, container(False, 1)]
    cells = pod_cells(pod({"phase": "Running", "containerStatuses": statuses}), 15.0)
    assert cells[:3] == ("1/2", "Running", "4 (5s ago)")


def resource(*columns: dict[str, Any]) -> ResourceType:
    return ResourceType("g.dev", "v1", "things", "Thing", True, custom=True, columns=list(columns))


def test_columns_of_a_definition_keep_their_types() -> None:
    kinds = ("integer", "number", "boolean", "string", "date")
    columns = tables.columns_of(resource(*({"name": k, "type": k, "jsonPath": ".spec.v"} for k in kinds)))
    for value, cells in (
        (2, [2, 2.0, None, "2", None]),
        (2.5, [2, 2.5, None, "2.5", None]),
        (True, [None, None, True, "true", None]),
        ("1970-01-01T00:00:10Z", [None, None, None, "1970-01-01T00:00:10Z", "5s"]),
        (["a"], [None, None, None, '["a"]', None]),
    ):
        row = tables.row(columns, {"metadata": {"name": "x"}, "spec": {"v": value}}, 15.0, "None")
        assert row["cells"] == ["x", *cells]
    assert tables.row(columns, {"metadata": {"name": "x"}}, 0.0, "None")["cells"] == ["x", *[None] * 5]


def test_every_builtin_kind_prints_without_spec_and_status() -> None:
    meta = {"name": "x", "namespace": "n", "creationTimestamp": "1970-01-01T00:00:00Z"}
    body = {"metadata": meta, "spec": {"scaleTargetRef": {"kind": "K", "name": "n"}}}
    for found in builtin_resources():
        columns = tables.columns_of(found)
        assert "name" in {column.format for column in columns}, found.storage
        cells = tables.row(columns, body, 60.0, "None")["cells"]
        assert len(cells) == len(columns), found.storage
    assert set(COLUMNS) <= {found.storage for found in builtin_resources()}
