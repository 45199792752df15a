"""Structural schemas: pruning, defaults, validation, CEL rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide_local.api import schema
from springtide_local.api.cel.evaluation import validate_rules
from springtide_local.api.errors import FieldError
from springtide_local.api.kinds.crds import Definitions


def problems(raw: dict[str, Any], value: Any, path: str = "spec") -> list[str]:
    found: list[FieldError] = []
    schema.validate(schema.compile_schema(raw), value, path, found)
    return [str(error) for error in found]


def rule_problems(raw: dict[str, Any], value: Any, old: Any = schema.MISSING) -> list[str]:
    found: list[FieldError] = []
    validate_rules(schema.compile_schema(raw), value, old, "spec", found)
    return [str(error) for error in found]


@pytest.mark.parametrize(
    ("raw", "value", "said"),
    [
        (
            {"type": "integer"},
            "x",
            'spec: Invalid value: "string": spec in body must be of type integer: "string"',
        ),
        ({"type": "integer"}, True, 'Invalid value: "boolean"'),
        ({"type": "integer"}, 1.5, 'Invalid value: "number"'),
        ({"type": "string"}, None, 'Invalid value: "null"'),
        ({"type": "integer", "maximum": 3}, 4, "spec in body should be less than or equal to 3"),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, 3, "should be greater than 3"),
        ({"type": "integer", "multipleOf": 5}, 7, "should be a multiple of 5"),
        ({"type": "integer", "format": "int32"}, 2**31, "must be of type int32"),
        ({"type": "string", "maxLength": 2}, "abc", "spec: Too long: may not be more than 2 bytes"),
        ({"type": "string", "minLength": 2}, "a", "should be at least 2 chars long"),
        ({"type": "string", "pattern": "^a+$"}, "b", "spec in body should match '^a+$'"),
        ({"type": "string", "format": "date-time"}, "today", "must be of type date-time"),
        ({"type": "string", "format": "ipv4"}, "1.2.3", "must be of type ipv4"),
        ({"type": "string", "enum": ["a"]}, "b", 'Unsupported value: "b": supported values: "a"'),
        (
            {"type": "array", "maxItems": 1, "items": {"type": "integer"}},
            [1, 2],
            "Too many: 2: must have at most 1",
        ),
        ({"type": "array", "minItems": 1, "items": {"type": "integer"}}, [], "should have at least 1 items"),
        ({"type": "object", "required": ["a"], "properties": {"a": {}}}, {}, "spec.a: Required value"),
        ({"type": "object", "maxProperties": 0}, {"a": 1}, "Too many: 1"),
        (
            {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
            ["a", "a"],
            'spec[1]: Duplicate value: "a"',
        ),
        ({"type": "integer", "anyOf": [{"minimum": 5}, {"maximum": 1}]}, 3, "at least one schema (anyOf)"),
        ({"type": "integer", "oneOf": [{"minimum": 1}, {"minimum": 2}]}, 3, "2 valid alternatives"),
        ({"type": "integer", "not": {"minimum": 2}}, 3, "must not validate the schema (not)"),
        ({"x-kubernetes-int-or-string": True}, 1.5, "must be of type integer,string"),
    ],
)
def test_each_rule_of_a_schema_is_told(raw: dict[str, Any], value: Any, said: str) -> None:
    found = problems(raw, value)
    assert len(found) == 1
    assert said in found[0]


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ({"type": "number"}, 1),
        ({"type": "integer"}, 2.0),
        ({"type": "string", "nullable": True}, None),
        ({"x-kubernetes-int-or-string": True}, "50%"),
        ({"type": "object", "x-kubernetes-preserve-unknown-fields": True}, {"a": [None, {}]}),
        ({"type": "string", "format": "date-time"}, "2026-01-01T00:00:00Z"),
        ({"type": "string", "format": "unheard-of"}, "x"),
    ],
)
def test_what_fits_is_left_alone(raw: dict[str, Any], value: Any) -> None:
    assert problems(raw, value) == []


SCALARS = st.sampled_from([None, True, False, 0, 1, 2.0, 1.5, -1, "", "a", "bb"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3)
    ),
    max_leaves=8,
)
SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.recursive(
    st.sampled_from(
        [{"type": "integer", "minimum": 1}, {"type": "boolean"}, {"type": "string", "maxLength": 1}, {}]
    ),
    lambda inner: st.one_of(
        st.builds(
            lambda a, b: {"type": "object", "required": ["a"], "properties": {"a": a, "b": b}}, inner, inner
        ),
        st.builds(lambda a: {"type": "object", "additionalProperties": a}, inner),
        st.builds(lambda a: {"type": "array", "items": a, "maxItems": 2}, inner),
    ),
    max_leaves=5,
)


@given(SCHEMAS, VALUES, VALUES)
def test_what_did_not_change_hides_no_problem(raw: dict[str, Any], old: Any, new: Any) -> None:
    node = schema.compile_schema(raw)
    before: list[FieldError] = []
    schema.validate(node, old, "spec", before)
    whole: list[FieldError] = []
    schema.validate(node, new, "spec", whole)
    changed: list[FieldError] = []
    schema.validate(node, new, "spec", changed, None if before else old)
    assert changed == whole


def test_equal_values_of_other_types_are_looked_at() -> None:
    node = schema.compile_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    for value in ({"a": True}, {"a": 1.5}):
        found: list[FieldError] = []
        schema.validate(node, value, "spec", found, {"a": 1})
        assert len(found) == 1, value


def test_pruning_names_what_it_drops() -> None:
    node = schema.compile_schema(
        {
            "type": "object",
            "properties": {
                "spec": {
                    "type": "object",
                    "properties": {
                        "list": {
                            "type": "array",
                            "items": {"type": "object", "properties": {"a": {"type": "integer"}}},
                        },
                        "map": {
                            "type": "object",
                            "additionalProperties": {"type": "object", "properties": {}},
                        },
                        "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                    },
                }
            },
        }
    )
    value = {
        "apiVersion": "v1",
        "kind": "X",
        "metadata": {"name": "a"},
        "spec": {"list": [{"a": 1, "b": 2}], "map": {"k": {"c": 1}}, "free": {"d": {"e": 1}}, "f": 1},
    }
    unknown: list[str] = []
    schema.prune(node, value, "", unknown, root=True)
    assert unknown == ["spec.list[0].b", "spec.map.k.c", "spec.f"]
    assert value["spec"] == {"list": [{"a": 1}], "map": {"k": {}}, "free": {"d": {"e": 1}}}


def test_defaults_reach_into_lists_and_replace_nulls() -> None:
    inner = {"type": "object", "properties": {"n": {"type": "integer", "default": 1}}}
    node = schema.compile_schema(
        {
            "type": "object",
            "properties": {
                "list": {"type": "array", "items": inner},
                "made": {**inner, "default": {}},
                "absent": inner,
                "null": {"type": "integer", "default": 2},
                "kept": {"type": "integer", "default": 2, "nullable": True},
            },
        }
    )
    value: dict[str, Any] = {"list": [{}, {"n": 5}], "null": None, "kept": None}
    schema.apply_defaults(node, value)
    assert value == {"list": [{"n": 1}, {"n": 5}], "null": 2, "kept": None, "made": {"n": 1}}


def rules(*texts: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "x-kubernetes-validations": [{"rule": text, "message": f"broken: {text}"} for text in texts],
    }


INT = {"type": "integer"}


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        ("self.a <= self.b", {"a": 1, "b": 1}, {"a": 2, "b": 1}),
        ("!has(self.a) || self.a > 1", {}, {"a": 1}),
        ("size(self.s) < 3", {"s": "ab"}, {"s": "abc"}),
        ("self.l.all(x, x > 0)", {"l": [1, 2]}, {"l": [1, 0]}),
        ("self.l.exists(x, x == 2)", {"l": [1, 2]}, {"l": [1]}),
        ("self.l.isSorted()", {"l": [1, 2]}, {"l": [2, 1]}),
        ("self.l.sum() == 3", {"l": [1, 2]}, {"l": [2, 2]}),
        ("self.s in ['x', 'y']", {"s": "x"}, {"s": "z"}),
        ("self.s.startsWith('x') && self.s.matches('^x[0-9]$')", {"s": "x1"}, {"s": "x"}),
        ("self.s.lowerAscii() == self.s", {"s": "x"}, {"s": "X"}),
        ("self.f < 1.5", {"f": 1}, {"f": 2}),
        ("self.m.k == 'v'", {"m": {"k": "v"}}, {"m": {"k": "w"}}),
        ("self.__namespace__ == 'a'", {"namespace": "a"}, {"namespace": "b"}),
        ("self.namespace == 'a'", {"namespace": "a"}, {"namespace": "b"}),
        ("!has(self.namespace)", {}, {"namespace": "b"}),
        ("self.a == 1 ? self.b == 1 : true", {"a": 1, "b": 1}, {"a": 1, "b": 2}),
        ("type(self.p) == int || self.p == '5'", {"p": 5}, {"p": "6"}),
    ],
)
def test_rules_decide(rule: str, good: dict[str, Any], bad: dict[str, Any]) -> None:
    raw = rules(
        rule,
        a=INT,
        b=INT,
        s={"type": "string"},
        l={"type": "array", "items": INT},
        f={"type": "number"},
        m={"type": "object", "additionalProperties": {"type": "string"}},
        namespace={"type": "string"},
        p={"x-kubernetes-int-or-string": True},
    )
    assert rule_problems(raw, good) == []
    assert rule_problems(raw, bad) == [f'spec: Invalid value: "object": broken: {rule}']


def test_transition_rules_need_a_past() -> None:
    raw = {
        "type": "object",
        "properties": {"n": {**INT, "x-kubernetes-validations": [{"rule": "self >= oldSelf"}]}},
    }
    assert rule_problems(raw, {"n": 1}) == []
    assert rule_problems(raw, {"n": 1}, {}) == []
    assert rule_problems(raw, {"n": 2}, {"n": 1}) == []
    assert rule_problems(raw, {"n": 1}, {"n": 2}) == [
        'spec.n: Invalid value: "integer": failed rule: self >= oldSelf'
    ]


def test_remembered_answers_are_those_of_their_own_past() -> None:
    size = {**INT, "x-kubernetes-validations": [{"rule": "self >= oldSelf"}]}
    name_rule = {"rule": "self.metadata.name.startsWith('a')", "message": "an a first"}
    root = schema.compile_schema(
        {
            "type": "object",
            "x-kubernetes-validations": [name_rule],
            "properties": {
                "spec": {"type": "object", "properties": {"n": size}},
                "status": {"type": "object"},
            },
        }
    )

    def answers(name: str, n: int, old: int | None) -> list[str]:
        new = {"metadata": {"name": name, "resourceVersion": str(n)}, "spec": {"n": n}, "status": {"now": n}}
        found: list[FieldError] = []
        past = schema.MISSING if old is None else {"metadata": {"name": name}, "spec": {"n": old}}
        validate_rules(root, new, past, "", found)
        return [str(error) for error in found]

    shrunk = 'spec.n: Invalid value: "integer": failed rule: self >= oldSelf'
    misnamed = '<nil>: Invalid value: "object": an a first'
    for _ in range(2):
        assert answers("a", 2, None) == answers("a", 2, 1) == answers("a", 2, 2) == []
        assert answers("a", 2, 3) == [shrunk]
        assert answers("b", 2, 3) == [misnamed, shrunk]
        assert answers("b", 2, 2) == [misnamed]


def test_rules_see_the_names_alone_of_metadata() -> None:
    root = schema.compile_schema(
        {"type": "object", "x-kubernetes-validations": [{"rule": "!has(self.metadata.labels)"}]}
    )
    found: list[FieldError] = []
    validate_rules(root, {"metadata": {"name": "a", "labels": {"b": "c"}}}, schema.MISSING, "", found)
    assert found == []


def test_items_of_a_map_list_keep_their_past() -> None:
    item = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "n": INT},
        "x-kubernetes-validations": [{"rule": "self.n == oldSelf.n", "message": "n is immutable"}],
    }
    raw = {
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["name"],
        "items": item,
    }
    old = [{"name": "a", "n": 1}, {"name": "b", "n": 2}]
    new = [{"name": "b", "n": 2}, {"name": "c", "n": 9}, {"name": "a", "n": 3}]
    assert rule_problems(raw, new, old) == ['spec[2]: Invalid value: "object": n is immutable']


def test_reason_path_and_message_expression() -> None:
    raw = rules(a=INT)
    raw["x-kubernetes-validations"] = [
        {
            "rule": "self.a < 3",
            "messageExpression": "'a is ' + string(self.a)",
            "message": "unused",
            "reason": "FieldValueForbidden",
            "fieldPath": ".a",
        }
    ]
    assert rule_problems(raw, {"a": 5}) == ["spec.a: Forbidden: a is 5"]


def test_a_rule_that_fails_to_run_is_an_error_of_the_object() -> None:
    found = rule_problems(rules("self.a > 1", a=INT), {})
    assert len(found) == 1
    assert "no such" in found[0]


def definition(raw: dict[str, Any]) -> dict[str, Any]:
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": raw}}
    return {
        "metadata": {"name": "things.example.dev"},
        "spec": {
            "group": "example.dev",
            "scope": "Namespaced",
            "names": {"plural": "things", "singular": "thing", "kind": "Thing", "listKind": "ThingList"},
            "conversion": {"strategy": "None"},
            "versions": [version],
        },
    }


LIST = {"type": "array", "items": INT}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"type": "object", "properties": {"a": {}}}, "type: Required value: must not be empty"),
        ({"type": "object", "properties": {"a": {"type": "array"}}}, "items: Required value"),
        ({"type": "object", "properties": {"a": {"type": "text"}}}, 'Unsupported value: "text"'),
        ({"type": "string"}, "must be object at the root"),
        (rules("self.a >", a=INT), "compilation failed"),
        (rules("self.l.all(x, self.l.all(y, x != y))", l=LIST), "estimated rule cost exceeds budget"),
        ({"type": "object", "properties": {"a": {**INT, "default": "x"}}}, "default: Invalid value"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}, "regular expression"),
        (
            {
                "type": "object",
                "properties": {
                    "a": {"type": "object", "properties": {"b": INT}, "additionalProperties": INT}
                },
            },
            "mutual exclusive",
        ),
    ],
)
def test_wrong_definitions_are_refused(raw: dict[str, Any], said: str) -> None:
    found = [str(error) for error in Definitions().check(definition(raw))]
    assert any(said in text for text in found), found


def test_a_definition_is_checked_and_left_as_it_is() -> None:
    inner = {"type": "object", "default": {}, "properties": {"n": {**INT, "default": 1}}}
    raw = {"type": "object", "properties": {"a": inner}}
    assert Definitions().check(definition(raw)) == []
    assert raw["properties"]["a"]["default"] == {}


def test_a_right_definition_is_not() -> None:
    bounded = {**LIST, "maxItems": 5}
    assert Definitions().check(definition(rules("self.l.all(x, x > 0)", l=bounded))) == []
    wrong = definition(rules(a=INT))
    wrong["metadata"]["name"] = "other.example.dev"
    assert 'must be spec.names.plural+"."+spec.group' in str(Definitions().check(wrong)[0])
