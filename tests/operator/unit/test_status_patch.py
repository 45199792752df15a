"""Status that more than one version of the operator writes, and an API server whose CRD is older."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from springtide_operator.cluster import merge_patch
from springtide_operator.status_patch import missing, status_schema, with_unknown

KNOWN = {
    "properties": {
        "step": {"type": "integer"},
        "workers": {"type": "object", "properties": {"ready": {"type": "integer"}}},
        "slots": {
            "type": "object",
            "additionalProperties": {"type": "object", "properties": {"uid": {"type": "string"}}},
        },
        "conditions": {
            "type": "array",
            "x-kubernetes-list-map-keys": ["type"],
            "items": {"type": "object", "properties": {"type": {}, "status": {}}},
        },
        "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
    }
}
leaves = st.integers() | st.text(max_size=3)
names = st.sampled_from(["ready", "uid", "later"])
objects = st.fixed_dictionaries(
    {},
    optional={
        "step": leaves,
        "later": leaves,
        "workers": st.dictionaries(names, leaves),
        "slots": st.dictionaries(st.sampled_from("0123"), st.dictionaries(names, leaves)),
        "free": st.dictionaries(names, leaves),
    },
)


def applied(patch: Any, to: Any) -> Any:
    """Merge as RFC 7386 says."""
    if not isinstance(patch, dict):
        return patch
    result = dict(to) if isinstance(to, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = applied(value, result.get(key))
    return result


def known(status: dict[str, Any]) -> dict[str, Any]:
    """Cut a status to what this version knows, as its own models do."""
    cut = {key: value for key, value in status.items() if key in KNOWN["properties"]}
    if "workers" in cut:
        cut["workers"] = {key: value for key, value in cut["workers"].items() if key == "ready"}
    if "slots" in cut:
        slots = cut["slots"].items()
        cut["slots"] = {name: {k: v for k, v in slot.items() if k == "uid"} for name, slot in slots}
    return cut


@given(objects, objects)
def test_only_known_fields_change(old: dict[str, Any], wanted: dict[str, Any]) -> None:
    wanted = known(wanted)
    after = applied(merge_patch(old, with_unknown(old, wanted, KNOWN)), old)
    assert known(after) == wanted
    assert after.get("later") == old.get("later")
    if "workers" in wanted:
        assert after["workers"].get("later") == old.get("workers", {}).get("later")
    for name, slot in after.get("slots", {}).items():
        assert slot.get("later") == old.get("slots", {}).get(name, {}).get("later")
    assert not missing(wanted, after)


def test_items_of_a_list_keep_what_another_version_has_said() -> None:
    old = {"conditions": [{"type": "A", "status": "True", "later": 1}, {"type": "B", "later": 2}]}
    new = {"conditions": [{"type": "C", "status": "False"}, {"type": "A", "status": "False"}]}
    assert with_unknown(old, new, KNOWN)["conditions"] == [
        {"type": "C", "status": "False"},
        {"type": "A", "status": "False", "later": 1},
    ]


def test_what_was_dropped_is_named() -> None:
    wanted = {"a": 1, "b": {"c": {}, "d": None}, "e": [{"f": 1}, {"f": 2}], "g": [1]}
    assert missing(wanted, {"a": 2, "b": {"c": {}}, "e": [{"f": 1}, {"f": 2, "more": 0}], "g": [2]}) == []
    assert missing(wanted, {"b": {}, "e": [{"f": 1}, {}], "g": []}) == [
        "status.a",
        "status.b.c",
        "status.e[1].f",
        "status.g",
    ]
    assert missing({"a": {"b": 1}}, {"a": 1}) == ["status.a"]


def test_the_schema_is_that_of_the_crd() -> None:
    properties = status_schema()["properties"]
    assert properties["slots"]["additionalProperties"]["properties"]["attempt"]["type"] == "integer"
    assert properties["conditions"]["x-kubernetes-list-map-keys"] == ["type"]
