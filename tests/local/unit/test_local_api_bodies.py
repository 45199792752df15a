"""Bodies of requests cost no more than they are worth: depth, aliases, numbers, halves of characters."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from springtide_local.api import eviction
from springtide_local.api.bodies import MAX_DEPTH, decode, of_type
from springtide_local.api.housekeeping import Housekeeper
from springtide_local.api.objects import canonical_quantity, quantity
from springtide_local.api.requests import deletion
from springtide_local.api.store import Store
from springtide_local.ports import ApiError
from springtide_local.quantities import parse_quantity

JSON, YAML = "application/json", "application/yaml"
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def nested(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


def bomb(levels: int) -> bytes:
    """Nine aliases to nine aliases to nine aliases, and so on."""
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines).encode()


@pytest.mark.slow
@given(VALUES)
def test_what_json_and_yaml_say_comes_back(value: Any) -> None:
    assert decode(JSON, json.dumps(value).encode()) == value
    assert decode(YAML, json.dumps({"k": value}).encode()) == {"k": value}
    if isinstance(value, dict):
        text = yaml.safe_dump(value, allow_unicode=True)
        assert decode(YAML, text.encode()) == yaml.safe_load(text)


def test_numbers_and_keys_of_yaml_become_those_of_json() -> None:
    assert decode(YAML, b"7: 2\ntrue: x\n1.5: [~]\n") == {"7": 2, "true": "x", "1.5": [None]}
    assert decode(YAML, b"a: &x {b: 1}\nc: *x\n") == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        (JSON, nested(MAX_DEPTH + 1), "exceeded max depth"),
        (JSON, nested(100_000), "exceeded max depth"),
        (JSON, b"[" * 300_000, "exceeded max depth"),
        (YAML, nested(50_000), "exceeded max depth"),
        (YAML, b"{a: " * 5000 + b"1" + b"}" * 5000, "exceeded max depth"),
        (YAML, b"- " * 10_000 + b"x", "exceeded max depth"),
        (YAML, b"[" * 10_000, "exceeded max depth"),
        (YAML, bomb(8), "excessive aliasing"),
        (YAML, b"a: &x {b: *x}", "contains itself"),
        (YAML, b"a: 2020-01-01", "no value of JSON"),
        (YAML, b"a: .nan", "unsupported value"),
        (YAML, b"? [a]\n: b", "malformed"),
        (YAML, b"!!python/object/apply:os.system [id]", "malformed"),
        (JSON, b'{"a":NaN}', "malformed"),
        (JSON, b'{"a":-Infinity}', "malformed"),
        (JSON, b'{"a":1e999}', "cannot unmarshal number 1e999"),
        (JSON, b'{"a":' + b"1" * 10_000 + b"}", "malformed"),
    ],
)
def test_a_costly_or_malformed_body_is_refused_at_once(kind: str, body: bytes, text: str) -> None:
    began = time.process_time()
    with pytest.raises(ApiError, match=text) as refused:
        decode(kind, body)
    assert refused.value.code == 400
    assert time.process_time() - began < 1.0


def test_the_deepest_body_is_stored() -> None:
    deep = decode(JSON, nested(MAX_DEPTH))
    store = Store()
    made = {"metadata": {"name": "c"}, "data": {"a": json.dumps(deep)}}
    assert store.create("configmaps", made, "default")["data"]["a"].count("{") == MAX_DEPTH


def test_halves_of_characters_are_replaced() -> None:
    assert decode(JSON, b'{"a":"\\ud800","\\udc00":["x\\udfff"]}') == {"a": "\ufffd", "\ufffd": ["x\ufffd"]}
    assert decode(JSON, b'{"a":"\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    assert decode(JSON, b'{"a":"\xff"}') == {"a": "\ufffd"}


@pytest.mark.parametrize(
    ("body", "query", "code", "text"),
    [
        ({"gracePeriodSeconds": "x"}, {}, 400, "cannot unmarshal string into Go struct field DeleteOptions"),
        ({"gracePeriodSeconds": 1.5}, {}, 400, "cannot unmarshal number 1.5"),
        ({"gracePeriodSeconds": 2**70}, {}, 400, "of type int64"),
        ({"preconditions": "x"}, {}, 400, "DeleteOptions.preconditions"),
        ({"preconditions": {"uid": 1}}, {}, 400, "Preconditions.uid of type string"),
        ({"propagationPolicy": ["x"]}, {}, 400, "cannot unmarshal array"),
        ({"propagationPolicy": "Never"}, {}, 422, "Unsupported value"),
        ({"orphanDependents": "yes"}, {}, 400, "of type bool"),
        ({"kind": "Pod"}, {}, 400, "no kind"),
        ({}, {"gracePeriodSeconds": "x"}, 400, 'strconv.ParseInt: parsing "x": invalid syntax'),
    ],
)
def test_odd_options_of_a_deletion_are_refused(
    body: dict[str, Any], query: dict[str, str], code: int, text: str
) -> None:
    with pytest.raises(ApiError) as refused:
        deletion(body, query)
    assert refused.value.code == code
    assert text in refused.value.message


def test_options_of_a_deletion_are_read() -> None:
    body = {"gracePeriodSeconds": 3, "preconditions": {"uid": "u"}, "propagationPolicy": "Orphan"}
    found = deletion(body, {"gracePeriodSeconds": "9"})
    assert (found.grace, found.uid, found.resource_version, found.orphan) == (3, "u", None, True)
    assert deletion({}, {"gracePeriodSeconds": "9"}).grace == 9
    assert of_type({"a": None}, "X", "a", "string") is None


async def test_one_bad_budget_does_not_end_the_housekeeping(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    keeper = Housekeeper(store)
    store.create(eviction.PDBS, {"metadata": {"name": "empty"}}, "default")
    keeper.work()
    store.create("namespaces", {"metadata": {"name": "n"}})
    refresh = eviction.refresh_status

    def failing(store: Store, namespace: str) -> None:
        if namespace == "default":
            raise KeyError("spec")
        refresh(store, namespace)

    monkeypatch.setattr(eviction, "refresh_status", failing)
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"a": "b"}}}
    for namespace in ("default", "n"):
        store.create(eviction.PDBS, {"metadata": {"name": "b"}, "spec": spec}, namespace)
    keeper.work()
    assert store.get(eviction.PDBS, "b", "n")["status"]["desiredHealthy"] == 1


@pytest.mark.parametrize("text", ["1e999999", "1e-999999", "9" * 70_000, "٣"])
def test_a_quantity_without_bounds_is_none(text: str) -> None:
    began = time.process_time()
    for parse in (quantity, parse_quantity):
        with pytest.raises(ValueError, match="quantit"):
            parse(text)
    assert canonical_quantity(text) == text
    assert (quantity("1e18"), parse_quantity("1E18")) == (10**18, 10**18)
    assert time.process_time() - began < 1.0
