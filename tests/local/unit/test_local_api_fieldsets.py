"""Field sets: the algebra behind server-side apply."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from springtide_local.api import fieldsets
from springtide_local.api.schema import compile_schema

NODE = compile_schema(
    {
        "type": "object",
        "properties": {
            "parts": {
                "type": "array",
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
                "items": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
                },
            },
            "tags": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
            "order": {"type": "array", "items": {"type": "integer"}},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            "whole": {"type": "object", "x-kubernetes-map-type": "atomic"},
        },
    }
)
names = st.sampled_from("abc")
items = st.fixed_dictionaries({"name": names}, optional={"size": st.integers(0, 2)})
values = st.fixed_dictionaries(
    {"labels": st.dictionaries(names, names, min_size=1, max_size=3)},
    optional={
        "parts": st.lists(items, min_size=1, max_size=3, unique_by=lambda part: part["name"]),
        "tags": st.lists(names, min_size=1, max_size=3, unique=True),
        "order": st.lists(st.integers(0, 2), max_size=2),
        "whole": st.dictionaries(names, names, max_size=2),
    },
)


def shown(value: dict[str, Any]) -> list[str]:
    return list(fieldsets.paths(fieldsets.fields_of(value, NODE)))


def test_fields_are_named_by_the_schema() -> None:
    value = {
        "parts": [{"name": "x", "size": 1}],
        "tags": ["t"],
        "order": [1, 2],
        "labels": {"a": "b"},
        "whole": {"a": "b"},
        "none": {},
    }
    assert shown(value) == [
        ".labels.a",
        ".none",
        ".order",
        '.parts[name="x"]',
        '.parts[name="x"].name',
        '.parts[name="x"].size',
        '.tags[="t"]',
        ".whole",
    ]


def test_the_wire_form_is_that_of_kubernetes() -> None:
    trie = fieldsets.fields_of({"parts": [{"name": "x"}], "order": []}, NODE)
    wire = fieldsets.dump(trie)
    assert wire == {"f:order": {}, "f:parts": {'k:{"name":"x"}': {".": {}, "f:name": {}}}}
    assert fieldsets.load(wire) == trie


@given(values, values)
def test_union_difference_intersection_belong_together(left: dict[str, Any], right: dict[str, Any]) -> None:
    a, b = fieldsets.fields_of(left, NODE), fieldsets.fields_of(right, NODE)
    first, second = set(fieldsets.paths(a)), set(fieldsets.paths(b))
    assert set(fieldsets.paths(fieldsets.union(a, b))) == first | second
    assert set(fieldsets.paths(fieldsets.difference(a, b))) == first - second
    assert set(fieldsets.paths(fieldsets.intersection(a, b))) == first & second
    assert fieldsets.load(fieldsets.dump(a)) == a


@given(values, values)
def test_what_is_merged_is_there_and_what_was_there_stays(
    live: dict[str, Any], config: dict[str, Any]
) -> None:
    merged = fieldsets.merge(live, config, NODE)
    wanted = fieldsets.fields_of(config, NODE)
    assert fieldsets.differing(wanted, config, merged, NODE) == {}
    gone, _ = fieldsets.compare(merged, fieldsets.merge(merged, live, NODE), NODE)
    kept = fieldsets.difference(fieldsets.fields_of(live, NODE), wanted)
    assert fieldsets.intersection(kept, gone) == {}


@given(values, values)
def test_equal_values_compare_equal_and_changes_are_found(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert fieldsets.compare(old, old, NODE) == ({}, {})
    changed, removed = fieldsets.compare(old, new, NODE)
    before, after = set(shown(old)), set(shown(new))
    assert set(fieldsets.paths(changed)) >= after - before
    assert set(fieldsets.paths(removed)) >= before - after
    assert bool(changed or removed) == (in_order(old) != in_order(new))


def in_order(value: dict[str, Any]) -> dict[str, Any]:
    """Keyed lists have no order of their own."""
    return {
        name: sorted(item, key=str) if name in ("parts", "tags") else item for name, item in value.items()
    }


def test_an_empty_container_adds_nothing_and_takes_nothing() -> None:
    live = {"labels": {"a": "b"}, "parts": [{"name": "x"}]}
    assert fieldsets.merge(live, {"labels": {}, "parts": []}, NODE) == live


def test_removed_fields_take_what_is_below_with_them() -> None:
    value = {"parts": [{"name": "x", "size": 1}, {"name": "k"}], "labels": {"a": "b"}}
    drop = fieldsets.fields_of({"parts": [{"name": "x"}], "labels": {"a": ""}}, NODE)
    assert fieldsets.remove(value, drop, NODE) == {"parts": [{"name": "k"}]}
