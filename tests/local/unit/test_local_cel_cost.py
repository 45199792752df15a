"""Costs of CEL expressions are those that Kubernetes' API server estimates.

The figures of the tables are the ones that its own tests give for these schemas and expressions.
"""

from __future__ import annotations

from typing import Any

import pytest

from springtide_local.api.cel.checking import check
from springtide_local.api.cel.cost import EXPRESSION_LIMIT, LARGEST, Range, estimate
from springtide_local.api.cel.types import declared

Schema = dict[str, Any]
NUMBER: Schema = {"type": "number"}
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
INT_OR_STRING: Schema = {"x-kubernetes-int-or-string": True}
TWO_TEXTS: Schema = {
    "type": "object",
    "required": ["required"],
    "properties": {"required": STRING, "optional": STRING},
}


def cost(schema: Schema, rule: str) -> Range:
    what = declared(schema)
    assert what is not None
    return estimate(check(rule, {"self": what, "oldSelf": what}), what)


def text(format: str) -> Schema:
    return {"type": "string", "format": format}


def many(items: Schema, most: int | None = None) -> Schema:
    limit = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": items, **limit}


def by_name(values: Schema, most: int | None = None) -> Schema:
    limit = {} if most is None else {"maxProperties": most}
    return {"type": "object", "additionalProperties": values, **limit}


def limited(schema: Schema, most: int) -> Schema:
    return {**schema, "maxLength": most}


def nested(outer: int | None, middle: int | None, inner: int | None) -> Schema:
    last = {**TWO_TEXTS, **({} if inner is None else {"maxProperties": inner})}
    return many(by_name(last, middle), outer)


ALL = "self.all(x, true)"


@pytest.mark.parametrize(
    ("schema", "rule", "most"),
    [
        (many(NUMBER), ALL, 4718591),
        (many(NUMBER, 10), ALL, 32),
        (many(STRING), ALL, 3145727),
        (many(STRING, 20), ALL, 62),
        (many(BOOLEAN), ALL, 1887437),
        (many(BOOLEAN, 5), ALL, 17),
        (many(many(NUMBER)), ALL, 3145727),
        (many(many(NUMBER), 100), ALL, 302),
        (many(TWO_TEXTS), ALL, 555128),
        (many(TWO_TEXTS, 50), ALL, 152),
        (by_name(NUMBER), ALL, 1348169),
        (by_name(NUMBER, 10), ALL, 32),
        (by_name(STRING), ALL, 1179647),
        (by_name(STRING, 3), ALL, 11),
        (by_name(BOOLEAN), ALL, 943718),
        (by_name(TWO_TEXTS), ALL, 428963),
        (by_name(by_name(NUMBER)), ALL, 1179647),
        (by_name(many(NUMBER)), ALL, 1179647),
        (by_name(text("duration")), ALL, 1048577),
        (by_name(text("date")), ALL, 524288),
        (by_name(text("date-time")), ALL, 349526),
        (by_name(INT_OR_STRING), ALL, 1348169),
        (many(text("duration")), ALL, 2359295),
        (many(text("date")), ALL, 725936),
        (many(text("date-time")), ALL, 428963),
        (many(INT_OR_STRING), ALL, 4718591),
    ],
)
def test_loop_counts_what_a_request_can_hold(schema: Schema, rule: str, most: int) -> None:
    assert cost(schema, rule).high == most


@pytest.mark.parametrize(
    ("schema", "rule", "most"),
    [
        (many(NUMBER, 10), "self.all(x, self.all(y, true))", 352),
        (many(NUMBER, 10), "self.all(x, self.all(y, self.all(z, true)))", 3552),
        (many(NUMBER), "self.all(x, x == 0.0)", 6291454),
        (many(NUMBER, 3 * 1024 * 2048), "self.all(x, x == 0.0)", 25165826),
        (by_name(STRING), "self.all(x, x.contains(self[x]))", 2752507),
        (by_name(limited(STRING, 10), 10), "self.all(x, x.contains(self[x]))", 72),
        (nested(None, None, None), 'self.all(x, x["y"].required == "z")', 7340027),
        (nested(10, 10, 10), 'self.all(x, x["y"].required == "z")', 72),
        (nested(None, 10, None), 'self.all(x, x["y"].required == "z")', 7340027),
        (many(by_name(NUMBER)), "self.all(x, x.y == 25.2)", 6291452),
        (many(by_name(NUMBER), 12), "self.all(x, x.y == 25.2)", 74),
    ],
)
def test_nested_loops_multiply(schema: Schema, rule: str, most: int) -> None:
    assert cost(schema, rule).high == most


@pytest.mark.parametrize("rule", ["self.all(x, self.all(y, true))", "self.all(x, self.all(y, x == y))"])
def test_loop_in_a_loop_without_a_limit_is_beyond_the_limit(rule: str) -> None:
    assert cost(many(NUMBER), rule).high > EXPRESSION_LIMIT


@pytest.mark.parametrize(
    ("schema", "rule", "most"),
    [
        (by_name(NUMBER), "has(self.x)", 1),
        (many(NUMBER), "self[1] == 0.0", 2),
        (many(STRING), "self[1] == self[1]", 314577),
        (many(INT_OR_STRING), "self[0] == 5", 3),
        (many(BOOLEAN), "self[0] == false", 2),
        (many(TWO_TEXTS), "self[0] == null", 2),
        (many(many(NUMBER)), "self[0][0] == -1.0", 3),
        (many(by_name(NUMBER)), "self[0].x > 2.0", 4),
        (many(text("duration")), "self[0].getHours() == 2", 4),
        (many(text("date")), "self[2].getDayOfMonth() == 13", 4),
        (by_name(NUMBER), 'self["x"] == 0.0', 2),
        (by_name(text("date-time")), 'self["a"] == self["b"]', 8),
        (by_name(text("duration")), 'self["c"] == self["d"]', 8),
        (by_name({"type": "integer"}), "oldSelf.size() == self.size()", 5),
    ],
)
def test_operations_have_the_published_costs(schema: Schema, rule: str, most: int) -> None:
    assert cost(schema, rule).high == most


ENUM = {"type": "string", "enum": ["A", "B", "C", "LongValue"]}


@pytest.mark.parametrize(
    ("schema", "rule", "most"),
    [
        (STRING, "self.contains('test')", 314574),
        (limited(STRING, 10), "self.contains('test')", 5),
        (STRING, "self.startsWith('test')", 2),
        (STRING, "self.endsWith('test')", 2),
        (STRING, 'size(self + "hello") > size("hello")', 314578),
        (limited(STRING, 4), 'size(self + "hello") > size("hello")', 7),
        (STRING, 'self.matches("x")', 314574),
        (limited(STRING, 50), 'self.matches("x")', 22),
        (STRING, '"".matches("(((((((((())))))))))[0-9]")', 7),
        (STRING, 'self.matches("")', 1),
        (limited(STRING, 0), 'self == "x"', 1),
        (STRING, 'self == "x"', 2),
        (text("byte"), 'self == b"x"', 2),
        (limited(text("byte"), 0), 'self == b"x"', 1),
        (STRING, "self.find('[0-9]+') == ''", 629147),
        (limited(STRING, 10), "self.find('[0-9]+') == ''", 11),
        (STRING, "self.lowerAscii() == 'lower!'", 314575),
        (limited(STRING, 10), "self.lowerAscii() == 'lower!'", 6),
        (ENUM, "self.contains('A')", 2),
        (limited(ENUM, 1000), "self.contains('A')", 401),
        (INT_OR_STRING, "isQuantity(self)", 314574),
        (limited(INT_OR_STRING, 20), "isQuantity(self)", 9),
        (many(STRING), "self.join(' ') == 'aa bb'", 329853068905),
        (many(limited(STRING, 10), 10), "self.join(' ') == 'aa bb'", 43),
        (many(STRING), "self.isSorted() == true", 329854432052),
        (many(limited(STRING, 10), 10), "self.isSorted() == true", 52),
    ],
)
def test_texts_cost_their_length(schema: Schema, rule: str, most: int) -> None:
    assert cost(schema, rule).high == most


@pytest.mark.parametrize(("most", "wanted"), [(None, 629154), (4, 12)])
def test_a_replaced_text_has_the_size_of_its_result(most: int | None, wanted: int) -> None:
    own = STRING if most is None else limited(STRING, most)
    names = {"str": own, "before": limited(STRING, 2), "after": limited(STRING, 4)}
    rule = "self.str.replace(self.before, self.after) == 'does not matter'"
    assert cost({"type": "object", "properties": names}, rule).high == wanted


@pytest.mark.parametrize(("most", "wanted"), [(None, 629160), (10, 22)])
def test_a_split_text_costs_two_traversals(most: int | None, wanted: int) -> None:
    own = STRING if most is None else limited(STRING, most)
    schema = {"type": "object", "properties": {"str": own, "separator": own}}
    assert cost(schema, "self.str.split(self.separator) == []").high == wanted


@pytest.mark.parametrize(
    ("rule", "least", "most"),
    [
        ("[1, 2, 3, 4, 5].sum()", 15, 15),
        ("[1.0, 2.0, 3.0, 4.0, 5.0].max()", 15, 15),
        ("[uint(1), uint(2), uint(3), uint(4), uint(5)].min()", 20, 20),
        ("[true, false, true, false, true].isSorted()", 15, 15),
        ("[1, 2, 3, 4, 5].indexOf(3)", 15, 15),
        ("'ABCDEFGHIJ abcdefghij'.lowerAscii()", 3, 3),
        ("'ABCDEFGHIJ abcdefghij'.lowerAscii() == 'abcdefghij ABCDEFGHIJ'.lowerAscii()", 7, 9),
        ("strings.quote('ABCDEFGHIJ abcdefghij')", 3, 3),
        ("strings.quote('ABCDEFGHIJ abcdefghij') == strings.quote('ABCDEFGHIJ abcdefghij')", 7, 11),
        ("'abc 123 def 123'.replace('123', '456')", 3, 3),
        ("'abc 123 def 123'.split(' ', 1)", 3, 3),
        ("'abc 123 def 123'.substring(5, 8)", 2, 2),
        ("'  abc 123 def 123  '.trim()", 2, 2),
        ("'abc 123 def 123'.findAll('123', 1)", 2, 2),
    ],
)
def test_written_values_have_an_exact_size(rule: str, least: int, most: int) -> None:
    assert cost(STRING, rule) == Range(least, most)


def test_text_made_from_a_number_has_no_limit() -> None:
    schema = {"type": "object", "properties": {"size": {"type": "integer", "maximum": 9}}}
    made = cost(schema, "'size is ' + string(self.size)")
    assert made.high > 100 * EXPRESSION_LIMIT
    assert made.high > LARGEST // 11  # a tenth per byte of a text of unknown length


def test_a_choice_costs_its_dearer_side() -> None:
    schema = {"type": "object", "properties": {"a": limited(STRING, 100), "b": BOOLEAN}}
    cheap, dear = cost(schema, "self.b").high, cost(schema, "self.a.matches('x')").high
    assert cost(schema, "self.b ? self.a.matches('x') : self.b").high == cheap + dear


def test_filtered_list_keeps_the_size_of_its_source() -> None:
    assert cost(many(NUMBER, 10), "self.filter(x, x > 0.0).all(x, true)").high < 300
    assert cost(many(NUMBER), "self.filter(x, x > 0.0).all(x, true)").high > EXPRESSION_LIMIT
