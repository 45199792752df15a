"""JSON from the API server: hostile depth and size cost one object, never the list."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide_kube import wire_json
from springtide_operator import records
from springtide_operator.api import limits, names
from springtide_operator.api.job import InvalidJob, Job


def nested(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


def depth(value: Any) -> int:
    level, found = [value], 0
    while level := [
        inner
        for one in level
        for inner in (one.values() if isinstance(one, dict) else one)
        if isinstance(inner, dict | list)
    ]:
        found += 1
    return found + 1


@pytest.mark.parametrize("levels", [1_000, 9_000])
def test_deep_text_is_read_without_its_depths(levels: int) -> None:
    with pytest.raises(RecursionError):
        json.loads(nested(levels) if levels > 2000 else nested(9_000))
    found = wire_json.loads(f'{{"name": "x", "deep": {nested(levels)}, "after": [1]}}')
    assert (found["name"], found["after"]) == ("x", [1])
    assert depth(found) <= wire_json.MAX_DEPTH


def test_text_that_is_no_json_is_a_value_error() -> None:
    for text in ("", "{", '{"a":}', "[1", '"\\', nested(3)[:-1]):
        with pytest.raises(ValueError, match=r"column|EOF"):
            wire_json.loads(text)


TEXTS = st.text(alphabet='ab"\\{}[],:é', max_size=6)
VALUES = st.recursive(
    st.none() | st.integers(-3, 3) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


@given(
    st.lists(st.dictionaries(TEXTS, VALUES, max_size=3), max_size=4),
    st.dictionaries(TEXTS.filter(lambda key: key != "items"), VALUES, max_size=3),
    st.integers(1, 40),
    st.booleans(),
)
def test_a_list_in_pieces_is_the_same_list(
    items: list[Any], around: dict[str, Any], step: int, first: bool
) -> None:
    page = {"items": items, **around} if first else {**around, "items": items}
    text = json.dumps(page, ensure_ascii=False).encode()
    splitter = wire_json.Splitter()
    found = [one for at in range(0, len(text), step) for one in splitter.feed(text[at : at + step])]
    assert [json.loads(one) for one in found] == items
    assert json.loads(splitter.rest()) == {**around, "items": []}


@given(st.integers(1, 7), st.integers(95, 400))
def test_a_deep_item_leaves_the_others_whole(step: int, levels: int) -> None:
    text = f'{{"items": [{{"x": "}}"}}, {nested(levels)}, {{"y": [2]}}], "z": 1}}'.encode()
    splitter = wire_json.Splitter()
    found = [one for at in range(0, len(text), step) for one in splitter.feed(text[at : at + step])]
    first, deep, last = (wire_json.loads(one) for one in found)
    assert (first, last) == ({"x": "}"}, {"y": [2]})
    assert depth(deep) == min(levels, wire_json.MAX_DEPTH)


def job(template: Any) -> dict[str, Any]:
    meta = {"name": "bad", "namespace": "tenant", "uid": "u-1", "resourceVersion": "7", "generation": 3}
    return {"metadata": meta, "spec": {"workers": {"template": template}}}


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ({"metadata": {"x": [{}] * 40_000}}, "put large values into a ConfigMap"),
        (wire_json.loads(nested(70)), "levels deep"),
        (wire_json.loads(nested(9_000)), "levels deep"),
    ],
)
def test_a_job_beyond_limits_is_kept_as_its_name(template: Any, says: str) -> None:
    slim = records.job(job(template))
    assert says in slim[names.UNREADABLE]
    assert len(json.dumps(slim)) < 1_000
    assert slim["spec"] == {}
    with pytest.raises(InvalidJob, match=r"spec\.workers\.template"):
        Job.parse(slim)
    assert records.job(slim) == slim


def test_a_large_ordinary_template_is_kept() -> None:
    env = [{"name": f"V{number}", "value": "x" * 40} for number in range(800)]
    template = {"spec": {"containers": [{"image": "i", "env": env}]}}
    assert 50_000 < len(json.dumps(template)) < limits.MAX_TEMPLATE_BYTES
    assert records.job(job(template))["spec"]["workers"]["template"] == template


def test_a_status_that_is_not_ours_is_not_kept() -> None:
    forged = {**job({"spec": {}}), "status": {"slots": {str(n): {"x": "y" * 100} for n in range(9_000)}}}
    slim = records.job(forged)
    assert "status" in slim[names.UNREADABLE]
    assert slim["status"] == {}


def test_a_pod_of_nobody_is_kept_as_its_name() -> None:
    meta = {"name": "x-worker-0-0", "namespace": "n", "uid": "u", "resourceVersion": "1"}
    labels = {names.LABEL_JOB: "x", names.LABEL_ROLE: names.ROLE_WORKER}
    pod = {"metadata": {**meta, "labels": labels}, "spec": {"containers": [{"env": [{}] * 30_000}]}}
    assert records.pod(pod) == {"kind": "Pod", "metadata": meta}
    pod["metadata"]["ownerReferences"] = [
        {"apiVersion": "apps/v1", "kind": "ReplicaSet", "uid": "r", "controller": True}
    ]
    assert records.pod(pod) == {"kind": "Pod", "metadata": meta}


def test_no_pattern_uses_possessive_groups() -> None:
    """Python before 3.11.5 matches them wrongly (gh-106052), and base images have 3.11.2."""
    root = Path(__file__).resolve().parents[3]
    possessive = re.compile(r"\)([*+?]|\{[0-9,]+\})\+|\(\?>")
    found = [
        f"{path.relative_to(root)}:{number}"
        for folder in ("protocol", "operator", "worker", "ps", "deploy/local")
        for path in (root / folder).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "re.compile" in line or line.lstrip().startswith(("rb'", "r'", 'r"', 'rb"'))
        if possessive.search(line)
    ]
    assert found == []


def test_long_runs_of_objects_are_taken_apart_at_any_chunk() -> None:
    entries = ",".join(f'{{"name": "V{n}", "value": "{n}"}}' for n in range(1000))
    wide = "{" + ",".join(f'"k{n}": "v"' for n in range(1000)) + "}"
    item = (
        f'{{"metadata": {{"name": "x"}}, "env": [{entries}], "wide": {wide}, "deep": {"[" * 300}{"]" * 300}}}'
    )
    raw = f'{{"items": [{item}, {item}], "kind": "List"}}'.encode()
    for size in (7, 1000, len(raw)):
        splitter = wire_json.Splitter()
        items = [one for at in range(0, len(raw), size) for one in splitter.feed(raw[at : at + size])]
        assert len(items) == 2
        assert len(wire_json.loads(items[1])["env"]) == 1000
        assert len(wire_json.loads(items[1])["wide"]) == 1000
        assert wire_json.loads(splitter.rest()) == {"items": [], "kind": "List"}
