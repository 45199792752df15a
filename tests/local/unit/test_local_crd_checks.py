"""The embedded API server refuses a CRD for what a real one refuses it for, and in its words.

All texts of the tables were compared with those of kube-apiserver 1.36 for the same definitions.
"""

from __future__ import annotations

from typing import Any

import pytest

from springtide_local.api.crd_schema import field_path_problem
from springtide_local.api.kinds.crds import Definitions

Schema = dict[str, Any]
INT: Schema = {"type": "integer"}
STRING: Schema = {"type": "string"}
FIELDS: Schema = {
    "n": {"type": "object", "properties": {"namespace": {"type": "string", "maxLength": 63}}},
    "a": INT,
    "b": {"type": "number"},
    "s": STRING,
    "t": {"type": "string", "maxLength": 10},
    "l": {"type": "array", "items": STRING},
    "k": {"type": "array", "items": INT, "maxItems": 5},
    "m": {"type": "object", "additionalProperties": STRING},
    "o": {"type": "object", "properties": {"x": INT, "y": STRING}},
    "d": {"type": "string", "format": "date-time"},
    "p": {"x-kubernetes-int-or-string": True},
    "e": {"type": "boolean"},
}
SPEC = "spec.validation.openAPIV3Schema.properties[spec]"


def definition(fields: Schema, rules: list[Schema] | None = None) -> Schema:
    spec: Schema = {"type": "object", "properties": fields}
    if rules is not None:
        spec["x-kubernetes-validations"] = rules
    raw = {"type": "object", "properties": {"spec": spec}}
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


def problems(made: Schema) -> list[str]:
    return [str(error) for error in Definitions().check(made)]


def compiled(rule: Schema) -> list[str]:
    """Return what is said about one rule, without its place and itself."""
    return [text.partition("}: ")[2] or text for text in problems(definition(FIELDS, [rule]))]


@pytest.mark.parametrize(
    ("rule", "column", "said"),
    [
        ("self.foo", 5, "undefined field 'foo'"),
        ("self.o.z == 1", 7, "undefined field 'z'"),
        ("self.a.b", 7, "type 'int' does not support field selection"),
        ("foo", 1, "undeclared reference to 'foo' (in container '')"),
        ("foo(self.a)", 4, "undeclared reference to 'foo' (in container '')"),
        ("self.s.foo()", 11, "undeclared reference to 'foo' (in container '')"),
        ("self.a == 'x'", 8, "found no matching overload for '_==_' applied to '(int, string)'"),
        ("self.a == 1.5", 8, "found no matching overload for '_==_' applied to '(int, double)'"),
        ("self.a == null", 8, "found no matching overload for '_==_' applied to '(int, null)'"),
        ("size(self.a) > 1", 5, "found no matching overload for 'size' applied to '(int)'"),
        ("self.s + self.a == ''", 8, "found no matching overload for '_+_' applied to '(string, int)'"),
        ("!self.a", 1, "found no matching overload for '!_' applied to '(int)'"),
        ("self.a in self.l", 8, "found no matching overload for '@in' applied to '(int, list(string))'"),
        ("self.l['a'] == ''", 7, "found no matching overload for '_[_]' applied to '(list(string), string)'"),
        ("self.l.all(x, x > 1)", 17, "found no matching overload for '_>_' applied to '(string, int)'"),
        ("self.e ? self.a : self.s", 8, "no matching overload for '_?_:_' applied to '(bool, int, string)'"),
        ("self.l.all(1, true)", 12, "argument must be a simple name"),
        ("has(self)", 5, "invalid argument to has() macro"),
        ("[1, 'a'].size() > 0", 5, "expected type 'int' but found 'string'"),
        ("self.e && self.a", 15, "expected type 'bool' but found 'int'"),
    ],
)
def test_rule_with_wrong_types_is_refused(rule: str, column: int, said: str) -> None:
    (text,) = compiled({"rule": rule})
    head, line, mark = text.split("\n")
    assert head.startswith(f"compilation failed: ERROR: <input>:1:{column}: ")
    assert head.endswith(said)
    assert (line, mark) == (f" | {rule}", f" | {'.' * (column - 1)}^")


@pytest.mark.parametrize(
    "rule",
    [
        "self.a > 1.5",
        "self.p > 1",
        "self.p == 'a'",
        "dyn(self.a) == 'x'",
        "type(self.a) == int",
        "self.o == null",
        "self.d > timestamp('2020-01-01T00:00:00Z')",
        "self.k.map(x, x * 2).all(x, x < 5)",
        "self.k.filter(x, x > 1).size() < 3",
        "self.k.exists_one(x, x == 1)",
        "self.m.all(k, self.m[k] != '')",
        "self.t.split(',').all(x, x != '')",
        "oldSelf.a == self.a",
        "self.n.namespace == self.n.__namespace__",
        "!has(self.n.namespace) || size(self.n.namespace) == 0",
    ],
)
def test_rule_with_right_types_is_accepted(rule: str) -> None:
    assert problems(definition(FIELDS, [{"rule": rule}])) == []


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"rule": "self.a"}, "cel expression must evaluate to a bool"),
        ({"rule": "self.a > 1", "messageExpression": "1"}, "messageExpression must evaluate to a string"),
        (
            {"rule": "self.a > 1", "messageExpression": "foo"},
            "messageExpression compilation failed: ERROR: <input>:1:1: undeclared reference to 'foo'"
            " (in container '')\n | foo\n | ^",
        ),
        (
            {"rule": "isQuantity(self.s)"},
            "the embedded API server cannot evaluate isQuantity(); Kubernetes can",
        ),
    ],
)
def test_expression_of_another_kind_is_refused(rule: Schema, said: str) -> None:
    assert compiled(rule) == [said]


LONG = "self.matches('[a-z]+[a-z]+[a-z]+[a-z]+[a-z]+[a-z]+')"


@pytest.mark.parametrize(
    ("part", "where", "factor"),
    [
        (
            {"type": "array", "items": {**STRING, "x-kubernetes-validations": [{"rule": LONG}]}},
            ".items",
            None,
        ),
        (
            {
                "type": "array",
                "maxItems": 5000,
                "items": {**STRING, "maxLength": 1000, "x-kubernetes-validations": [{"rule": LONG}]},
            },
            ".items",
            "1.8x",
        ),
        (
            {
                "type": "object",
                "maxProperties": 3000,
                "additionalProperties": {
                    **STRING,
                    "maxLength": 1000,
                    "x-kubernetes-validations": [{"rule": LONG}],
                },
            },
            ".additionalProperties",
            "1.083000x",
        ),
    ],
)
def test_rule_below_a_list_counts_once_per_item(part: Schema, where: str, factor: str | None) -> None:
    place = f"{SPEC}.properties[a]{where}.x-kubernetes-validations[0].rule"
    shown = factor or "more than 100x"
    found = problems(definition({"a": part}))
    assert found[0].startswith(
        f"{place}: Forbidden: estimated rule cost exceeds budget by factor of {shown} ("
    )


def test_many_dear_rules_are_too_dear_together() -> None:
    part = {
        "type": "array",
        "maxItems": 2400,
        "items": {**STRING, "maxLength": 1000, "x-kubernetes-validations": [{"rule": LONG}]},
    }
    found = problems(definition({f"a{index}": part for index in range(14)}))
    assert len(found) == 5
    for text in found[:4]:
        assert text.endswith(
            "Forbidden: contributed to estimated rule cost total exceeding cost limit for entire"
            " OpenAPIv3 schema"
        )
    assert "rule cost total for entire OpenAPIv3 schema exceeds budget by factor of 1.212960x" in found[4]


MAP = {"type": "array", "x-kubernetes-list-type": "map"}
NAMED = {"type": "object", "required": ["n"], "properties": {"n": STRING}}
ATOMIC_SET = "must be atomic as item of a list with x-kubernetes-list-type=set"
KEYS = "must be map if x-kubernetes-list-map-keys is non-empty"


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({}, ".type: Required value: must not be empty for specified object fields"),
        ({"type": "array"}, ".items: Required value: must be specified"),
        (
            {"type": "text"},
            '.type: Unsupported value: "text": supported values: "array", "boolean", "integer", "number",'
            ' "object", "string"',
        ),
        (
            {"type": "object", "properties": {"b": INT}, "additionalProperties": False},
            ".additionalProperties: Forbidden: additionalProperties and properties are mutual exclusive",
        ),
        (
            {"type": "object", "properties": {"b": INT}, "default": {"c": 1}},
            '.default: Invalid value: {"c":1}: must not have unknown fields',
        ),
        (
            {
                "type": "object",
                "required": ["b"],
                "properties": {"b": {**INT, "default": 1}},
                "default": {},
            },
            ".default.b: Required value",
        ),
        (
            {**STRING, "enum": ["x"], "default": "y"},
            '.default: Unsupported value: "y": supported values: "x"',
        ),
        ({**STRING, "maxLength": 3, "default": "long"}, ".default: Too long: may not be more than 3 bytes"),
        (
            {**STRING, "pattern": "("},
            '.pattern: Invalid value: "(": must be a valid regular expression, but isn\'t: error'
            " parsing regexp:"
            " missing closing ): `(`",
        ),
        (
            {**STRING, "pattern": "^(?!a)b"},
            '.pattern: Invalid value: "^(?!a)b": must be a valid regular expression, but isn\'t:'
            " error parsing"
            " regexp: invalid or unsupported Perl syntax: `(?!`",
        ),
        (
            {"type": "object", "x-kubernetes-preserve-unknown-fields": False},
            ".x-kubernetes-preserve-unknown-fields: Invalid value: false: must be true or undefined",
        ),
        (
            {"x-kubernetes-int-or-string": True, "x-kubernetes-preserve-unknown-fields": True},
            ".x-kubernetes-preserve-unknown-fields: Invalid value: true: must be false if"
            " x-kubernetes-int-or-string is true",
        ),
        (
            {"type": "object", "x-kubernetes-embedded-resource": True},
            ".properties: Required value: must not be empty if x-kubernetes-embedded-resource is true without"
            " x-kubernetes-preserve-unknown-fields",
        ),
        (
            {**MAP, "items": NAMED},
            ".x-kubernetes-list-map-keys: Required value: must not be empty if x-kubernetes-list-type is map",
        ),
        (
            {**MAP, "x-kubernetes-list-map-keys": ["q"], "items": NAMED},
            '.x-kubernetes-list-map-keys: Invalid value: ["q"]: entries must all be names of item properties',
        ),
        (
            {**MAP, "x-kubernetes-list-map-keys": ["n"], "items": {**NAMED, "required": []}},
            ".items.properties[n].default: Required value: this property is in"
            " x-kubernetes-list-map-keys, so it"
            " must have a default or be a required property",
        ),
        (
            {"type": "array", "x-kubernetes-list-map-keys": ["n"], "items": STRING},
            f".x-kubernetes-list-type: Required value: {KEYS}",
        ),
        (
            {"type": "array", "x-kubernetes-list-type": "set", "items": NAMED},
            f".items.x-kubernetes-map-type: Invalid value: null: {ATOMIC_SET}",
        ),
        (
            {"type": "array", "x-kubernetes-list-type": "bag", "items": STRING},
            '.x-kubernetes-list-type: Unsupported value: "bag": supported values: "atomic", "set", "map"',
        ),
        (
            {**STRING, "x-kubernetes-map-type": "atomic"},
            '.type: Invalid value: "string": must be object if x-kubernetes-map-type is specified',
        ),
        (
            {"type": "array", "uniqueItems": True, "items": STRING},
            ".uniqueItems: Forbidden: uniqueItems cannot be set to true since the runtime complexity becomes"
            " quadratic",
        ),
        ({"$ref": "#/x"}, ".$ref: Forbidden: $ref is not supported"),
        (
            {"type": "object", "anyOf": [{"type": "object"}]},
            ".anyOf[0].type: Forbidden: must be empty to be structural",
        ),
    ],
)
def test_schema_that_is_not_structural_is_refused(part: Schema, said: str) -> None:
    assert f"{SPEC}.properties[a]{said}" in problems(definition({"a": part}))


@pytest.mark.parametrize(
    "part",
    [
        {"x-kubernetes-preserve-unknown-fields": True},
        {"type": "object", "properties": {"b": INT}, "additionalProperties": True},
        {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}, {"type": "string"}]},
        {
            "type": "object",
            "x-kubernetes-embedded-resource": True,
            "x-kubernetes-preserve-unknown-fields": True,
        },
        {"type": "array", "x-kubernetes-list-type": "set", "items": STRING},
        {"type": "object", "properties": {"z": INT}, "anyOf": [{"required": ["z"]}]},
        {**INT, "maxLength": 4},
        {**INT, "minimum": 5, "maximum": 1},
    ],
)
def test_schema_that_kubernetes_accepts_is_accepted(part: Schema) -> None:
    assert problems(definition({"a": part})) == []


@pytest.mark.parametrize("path", [".a", ".o.x", ".m.x", ".m['x']", ".o['x']", "['a']"])
def test_field_path_to_a_field_is_accepted(path: str) -> None:
    assert problems(definition(FIELDS, [{"rule": "self.a > 1", "fieldPath": path}])) == []


@pytest.mark.parametrize("path", ["a", ".o.q", ".l[0]", ".", ".a.b", " "])
def test_field_path_to_nothing_is_refused(path: str) -> None:
    found = problems(definition(FIELDS, [{"rule": "self.a > 1", "fieldPath": path}]))
    where = f"{SPEC}.x-kubernetes-validations[0].fieldPath"
    assert f'{where}: Invalid value: "{path}": must be a valid path' in found


def test_field_path_is_looked_up_below_its_own_schema() -> None:
    inner = {"type": "object", "properties": {"it's": INT}}
    assert field_path_problem(inner, "['it\\'s']") is None
    assert field_path_problem(inner, ".spec") == "must be a valid path"


def test_old_self_below_a_plain_list_is_refused() -> None:
    rule = {"rule": "self == oldSelf"}
    part = {"type": "array", "items": {**INT, "x-kubernetes-validations": [rule]}}
    place = f"{SPEC}.properties[a]"
    assert problems(definition({"a": part})) == [
        f'{place}.items.x-kubernetes-validations[0].rule: Invalid value: "self == oldSelf": oldSelf cannot be'
        f" used on the uncorrelatable portion of the schema within {place}"
    ]


def test_metadata_may_limit_the_names_only() -> None:
    made = definition({})
    properties = made["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    properties["metadata"] = {"type": "object", "properties": {"name": {**STRING, "maxLength": 5}}}
    assert problems(made) == []
    properties["metadata"]["description"] = "not even that"
    assert problems(made) == [
        "spec.validation.openAPIV3Schema.properties[metadata]: Forbidden: must not specify"
        " anything other than"
        " name and generateName, but metadata is implicitly specified"
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"names.shortNames": ["A_b"]}, "spec.names.shortNames[0]: Invalid value"),
        (
            {"names.listKind": "Thing"},
            'spec.names.listKind: Invalid value: "Thing": kind and listKind may not',
        ),
        (
            {"preserveUnknownFields": True},
            "spec.preserveUnknownFields: Invalid value: true: cannot set to true",
        ),
        ({"scope": "World"}, "spec.scope: Unsupported value"),
    ],
)
def test_wrong_names_and_switches_are_refused(change: Schema, said: str) -> None:
    made = definition({"a": INT})
    for path, value in change.items():
        outer, _, name = path.rpartition(".")
        (made["spec"][outer] if outer else made["spec"])[name] = value
    assert any(text.startswith(said) for text in problems(made))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"additionalPrinterColumns": [{"name": "x", "type": "text", "jsonPath": ".spec.a"}]},
            'spec.additionalPrinterColumns[0].type: Invalid value: "text": must be one of'
            " boolean,date,integer,"
            "number,string",
        ),
        (
            {"additionalPrinterColumns": [{"name": "x", "type": "string", "jsonPath": "spec.a"}]},
            'spec.additionalPrinterColumns[0].JSONPath: Invalid value: "spec.a": must be a simple json path'
            " starting with .",
        ),
        (
            {"subresources": {"scale": {"specReplicasPath": ".status.a", "statusReplicasPath": ".status.b"}}},
            'spec.subresources.scale.specReplicasPath: Invalid value: ".status.a": should be a'
            " json path under"
            " .spec",
        ),
        (
            {"selectableFields": [{"jsonPath": ".spec.q"}]},
            'spec.selectableFields[0].jsonPath: Invalid value: ".spec.q": is an invalid path:'
            " does not refer to"
            " a valid field",
        ),
        (
            {"deprecationWarning": "old"},
            'spec.versions[0].deprecationWarning: Invalid value: "old": can only be set for'
            " deprecated versions",
        ),
        (
            {"storage": False},
            'spec.versions: Invalid value: ["v1"]: must have exactly one version marked as storage version',
        ),
    ],
)
def test_wrong_parts_of_a_version_are_refused(change: Schema, said: str) -> None:
    made = definition({"a": INT})
    made["spec"]["versions"][0].update(change)
    assert problems(made) == [said]


def test_what_any_of_names_at_the_root_must_be_declared() -> None:
    made = definition({"a": INT})
    raw = made["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    raw["anyOf"] = [{"properties": {"z": {"minimum": 1}}}]
    root = "spec.validation.openAPIV3Schema"
    assert problems(made) == [
        f"{root}.properties[z]: Required value: because it is defined in {root}.anyOf[0].properties[z]"
    ]


def test_versions_that_differ_are_named_in_errors() -> None:
    made = definition({"a": INT})
    worse = definition({"a": {}})["spec"]["versions"][0]
    made["spec"]["versions"].append({**worse, "name": "v2", "storage": False})
    (text,) = problems(made)
    assert text.startswith("spec.versions[1].schema.openAPIV3Schema.properties[spec].properties[a].type")
