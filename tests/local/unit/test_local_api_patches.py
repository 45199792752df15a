"""Merge, JSON and strategic merge patches."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide_local.api import builtin
from springtide_local.api.patch import json_patch, merge_patch, strategic_merge
from springtide_local.ports import ApiError

POD = builtin.kind_node("", "v1", "Pod")
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=2), below, max_size=3),
    max_leaves=8,
)


def pod(**spec: Any) -> dict[str, Any]:
    return {"kind": "Pod", "spec": spec}


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        # The examples of RFC 7386, appendix A.
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_merge_patch_follows_the_rfc(target: Any, patch: Any, result: Any) -> None:
    assert merge_patch(target, patch) == result


@pytest.mark.slow
@given(json_values, json_values)
def test_a_merge_patch_is_idempotent_and_leaves_its_target(target: Any, patch: Any) -> None:
    before = repr(target)
    once = merge_patch(target, patch)
    assert merge_patch(once, patch) == once
    assert repr(target) == before


def test_json_patch_refuses_in_two_ways() -> None:
    with pytest.raises(ApiError) as caught:
        json_patch({"a": 1}, [{"op": "replace", "path": "/b/c", "value": 1}])
    assert caught.value.code == 422
    with pytest.raises(ApiError) as caught:
        json_patch({"a": 1}, [{"op": "invent", "path": "/a"}])
    assert caught.value.code == 400
    with pytest.raises(ApiError) as caught:
        json_patch({"a": 1}, {"op": "remove"})
    assert caught.value.code == 400


def test_lists_with_a_merge_key_merge_item_by_item() -> None:
    target = pod(
        containers=[{"name": "a", "image": "1", "env": [{"name": "X", "value": "1"}]}, {"name": "b"}]
    )
    patch = {"spec": {"containers": [{"name": "a", "env": [{"name": "Y", "value": "2"}]}, {"name": "c"}]}}
    merged = strategic_merge(target, patch, POD)
    first, second, third = merged["spec"]["containers"]
    assert first == {
        "name": "a",
        "image": "1",
        "env": [{"name": "X", "value": "1"}, {"name": "Y", "value": "2"}],
    }
    assert (second, third) == ({"name": "b"}, {"name": "c"})
    assert target["spec"]["containers"][0]["env"] == [{"name": "X", "value": "1"}]


def test_directives_delete_replace_and_order() -> None:
    target = pod(containers=[{"name": "a"}, {"name": "b"}, {"name": "c"}], nodeSelector={"x": "1"})
    deleted = strategic_merge(target, {"spec": {"containers": [{"name": "b", "$patch": "delete"}]}}, POD)
    assert [container["name"] for container in deleted["spec"]["containers"]] == ["a", "c"]
    replaced = strategic_merge(target, {"spec": {"containers": [{"$patch": "replace"}, {"name": "z"}]}}, POD)
    assert [container["name"] for container in replaced["spec"]["containers"]] == ["z"]
    order = {"$setElementOrder/containers": [{"name": "c"}, {"name": "a"}, {"name": "b"}]}
    ordered = strategic_merge(target, {"spec": order}, POD)
    assert [container["name"] for container in ordered["spec"]["containers"]] == ["c", "a", "b"]
    selector = strategic_merge(target, {"spec": {"nodeSelector": {"y": "2", "$patch": "replace"}}}, POD)
    assert selector["spec"]["nodeSelector"] == {"y": "2"}


def test_sets_unite_and_lose_what_is_named() -> None:
    meta = {"metadata": {"finalizers": ["a/b", "c/d"]}}
    added = strategic_merge(meta, {"metadata": {"finalizers": ["e/f", "a/b"]}}, POD)
    assert added["metadata"]["finalizers"] == ["a/b", "c/d", "e/f"]
    removed = strategic_merge(meta, {"metadata": {"$deleteFromPrimitiveList/finalizers": ["a/b"]}}, POD)
    assert removed["metadata"]["finalizers"] == ["c/d"]


def test_atomic_lists_are_replaced_and_a_missing_key_is_refused() -> None:
    target = pod(containers=[{"name": "a", "command": ["x", "y"]}])
    merged = strategic_merge(target, {"spec": {"containers": [{"name": "a", "command": ["z"]}]}}, POD)
    assert merged["spec"]["containers"][0]["command"] == ["z"]
    with pytest.raises(ApiError, match="does not contain declared merge key: name"):
        strategic_merge(target, {"spec": {"containers": [{"image": "x"}]}}, POD)


def test_retain_keys_clears_what_is_not_kept() -> None:
    target = {"spec": {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}}}
    patch = {"spec": {"strategy": {"$retainKeys": ["type"], "type": "Recreate"}}}
    node = builtin.kind_node("apps", "v1", "Deployment")
    assert strategic_merge(target, patch, node) == {"spec": {"strategy": {"type": "Recreate"}}}
