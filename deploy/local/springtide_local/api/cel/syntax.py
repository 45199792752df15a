"""CEL expressions as a tree of operations, the way the API server's compiler sees them.

cel-python parses the text. Its tree follows the grammar, ten levels for a name; here operators become calls
of functions (`_+_`), and macros become what they stand for: `has` a test, `all`, `exists`, `exists_one`,
`map` and `filter` a loop with an accumulator. Types and costs are defined on this form.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import celpy
from celpy.evaluation import celbytes, celstr

ACCUMULATOR = "@result"
_OPERATORS = {
    "relation_lt": "<",
    "relation_le": "<=",
    "relation_gt": ">",
    "relation_ge": ">=",
    "relation_eq": "==",
    "relation_ne": "!=",
    "addition_add": "+",
    "addition_sub": "-",
    "multiplication_mul": "*",
    "multiplication_div": "/",
    "multiplication_mod": "%",
}


class CelError(Exception):
    """An expression that does not compile. The text is what the API server says, place included."""


@dataclass(frozen=True, eq=False)
class Expr:
    """One operation. `position` is the offset in the text that an error about it points at."""

    position: int


@dataclass(frozen=True, eq=False)
class Literal(Expr):
    kind: str
    value: Any


@dataclass(frozen=True, eq=False)
class Ident(Expr):
    name: str


@dataclass(frozen=True, eq=False)
class Select(Expr):
    """A field of an object or a value of a map; with `test` whether it is there."""

    operand: Expr
    field: str
    test: bool = False


@dataclass(frozen=True, eq=False)
class Call(Expr):
    function: str
    arguments: tuple[Expr, ...]
    target: Expr | None = None


@dataclass(frozen=True, eq=False)
class ListOf(Expr):
    elements: tuple[Expr, ...]


@dataclass(frozen=True, eq=False)
class MapOf(Expr):
    entries: tuple[tuple[Expr, Expr], ...]


@dataclass(frozen=True, eq=False)
class Struct(Expr):
    name: str
    fields: tuple[tuple[str, Expr], ...]


@dataclass(frozen=True, eq=False)
class Loop(Expr):
    """A macro: `variable` walks `over`; `step` makes the next accumulator while `condition` holds."""

    over: Expr
    variable: str
    start: Expr
    condition: Expr
    step: Expr
    result: Expr


def located(text: str, position: int, message: str) -> str:
    """Say where an error is, as the API server does: line and column, the line, a mark below it.

    Args:
        text: the whole expression.
        position: of the error, in characters from 0.
        message: the error itself.

    Returns:
        Three lines.
    """
    before = text[:position]
    line = before.count("\n") + 1
    column = position - (before.rfind("\n") + 1)
    shown = text.split("\n")[line - 1]
    return f"ERROR: <input>:{line}:{column + 1}: {message}\n | {shown}\n | {'.' * column}^"


@functools.cache
def _environment() -> celpy.Environment:
    return celpy.Environment()


@functools.lru_cache(maxsize=4096)
def parse(text: str) -> Expr:
    """Return the tree of an expression. Raises CelError where it is none."""
    try:
        tree = _environment().compile(text)
    except celpy.CELParseError as problem:
        raise CelError(_syntax_error(text, problem)) from None
    except RecursionError:
        raise CelError(located(text, 0, "expression recursion limit exceeded: 250")) from None
    return _Reader(text).read(tree)


def _syntax_error(text: str, problem: celpy.CELParseError) -> str:
    line, column = problem.line or 1, max((problem.column or 1) - 1, 0)
    start = sum(len(each) + 1 for each in text.split("\n")[: line - 1])
    found = text[start + column : start + column + 1] or "<EOF>"
    return located(text, min(start + column, len(text)), f"Syntax error: mismatched input '{found}'")


class _Reader:
    """Makes operations from cel-python's tree of one text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def read(self, tree: Any) -> Expr:
        name, children = tree.data, tree.children
        if name in ("expr", "conditionalor", "conditionaland", "relation", "addition", "multiplication"):
            if len(children) == 1:
                return self.read(children[0])
            return self._operator(name, children)
        if name == "unary" and len(children) == 2:
            sign = "!_" if children[0].data == "unary_not" else "-_"
            return Call(_start(tree), sign, (self.read(children[1]),))
        if name in ("unary", "member", "primary", "paren_expr"):
            return self.read(children[0])
        reader = getattr(self, f"_read_{name}")
        result: Expr = reader(tree, children)
        return result

    def _operator(self, name: str, children: list[Any]) -> Expr:
        if name == "expr":
            place = self._between(children[0], children[1], "?")
            return Call(place, "_?_:_", tuple(self.read(child) for child in children))
        if name in ("conditionalor", "conditionaland"):
            sign = "||" if name == "conditionalor" else "&&"
            place = self._between(children[0], children[1], sign)
            return Call(place, f"_{sign}_", (self.read(children[0]), self.read(children[1])))
        left = children[0]
        pair = (self.read(left.children[0]), self.read(children[1]))
        sign = "in" if left.data == "relation_in" else _OPERATORS[left.data]
        place = self._between(left.children[0], children[1], sign)
        return Call(place, "@in" if sign == "in" else f"_{sign}_", pair)

    def _between(self, left: Any, right: Any, sign: str) -> int:
        return max(self._text.find(sign, _end(left), _start(right) or len(self._text)), 0)

    def _read_member_dot(self, tree: Any, children: list[Any]) -> Expr:
        dot = self._text.rfind(".", _end(children[0]), children[1].start_pos)
        return Select(max(dot, 0), self.read(children[0]), str(children[1]))

    def _read_member_dot_arg(self, tree: Any, children: list[Any]) -> Expr:
        place = self._text.find("(", children[1].end_pos)
        arguments = self._arguments(children[2:])
        target, name = self.read(children[0]), str(children[1])
        return self._macro(place, target, name, arguments) or Call(place, name, arguments, target)

    def _read_member_index(self, tree: Any, children: list[Any]) -> Expr:
        place = self._text.find("[", _end(children[0]))
        return Call(place, "_[_]", (self.read(children[0]), self.read(children[1])))

    def _read_member_object(self, tree: Any, children: list[Any]) -> Expr:
        place = self._text.find("{", _end(children[0]))
        name = self._text[_start(children[0]) : _end(children[0])]
        given = children[1].children if len(children) > 1 else []
        fields = tuple(
            (str(key), self.read(value)) for key, value in zip(given[::2], given[1::2], strict=True)
        )
        return Struct(place, name, fields)

    def _read_ident_arg(self, tree: Any, children: list[Any]) -> Expr:
        place = self._text.find("(", children[0].end_pos)
        arguments = self._arguments(children[1:])
        if str(children[0]) == "has" and len(arguments) == 1:
            (field,) = arguments
            if not isinstance(field, Select):
                message = "invalid argument to has() macro"
                raise CelError(located(self._text, field.position, message))
            return Select(place, field.operand, field.field, test=True)
        return Call(place, str(children[0]), arguments)

    _read_dot_ident_arg = _read_ident_arg

    def _read_ident(self, tree: Any, children: list[Any]) -> Expr:
        return Ident(_start(tree), str(children[0]))

    _read_dot_ident = _read_ident

    def _read_list_lit(self, tree: Any, children: list[Any]) -> Expr:
        return ListOf(_start(tree), self._arguments(children))

    def _read_map_lit(self, tree: Any, children: list[Any]) -> Expr:
        given = self._arguments(children)
        return MapOf(_start(tree), tuple(zip(given[::2], given[1::2], strict=True)))

    def _read_literal(self, tree: Any, children: list[Any]) -> Expr:
        token, place = children[0], _start(tree)
        match token.type:
            case "INT_LIT":
                return Literal(place, "int", int(token, 0))
            case "UINT_LIT":
                return Literal(place, "uint", int(token[:-1], 0))
            case "FLOAT_LIT":
                return Literal(place, "double", float(token))
            case "BOOL_LIT":
                return Literal(place, "bool", token == "true")
            case "NULL_LIT":
                return Literal(place, "null_type", None)
            case "BYTES_LIT":
                return Literal(place, "bytes", bytes(celbytes(token)))
            case _:
                return Literal(place, "string", str(celstr(token)))

    def _arguments(self, children: list[Any]) -> tuple[Expr, ...]:
        return tuple(self.read(child) for child in children[0].children) if children else ()

    def _macro(self, place: int, over: Expr, name: str, arguments: tuple[Expr, ...]) -> Expr | None:
        """Expand a call that is one of the loops; None for any other call."""
        wanted = {"map": (2, 3), "filter": (2,), "all": (2,), "exists": (2,), "exists_one": (2,)}
        name = "exists_one" if name == "existsOne" else name
        if len(arguments) not in wanted.get(name, ()):
            return None
        variable = arguments[0]
        if not isinstance(variable, Ident):
            raise CelError(located(self._text, variable.position, "argument must be a simple name"))
        so_far = Ident(place, ACCUMULATOR)
        start, condition, step, result = _loop(place, name, variable, arguments[1:], so_far)
        return Loop(place, over, variable.name, start, condition, step, result)


def _loop(
    place: int, name: str, variable: Ident, rest: tuple[Expr, ...], so_far: Ident
) -> tuple[Expr, Expr, Expr, Expr]:
    """Return start, condition, step and result of a macro."""
    true = Literal(place, "bool", True)
    body = rest[-1]
    match name:
        case "all":
            condition = Call(place, "@not_strictly_false", (so_far,))
            return true, condition, Call(place, "_&&_", (so_far, body)), so_far
        case "exists":
            condition = Call(place, "@not_strictly_false", (Call(place, "!_", (so_far,)),))
            return Literal(place, "bool", False), condition, Call(place, "_||_", (so_far, body)), so_far
        case "exists_one":
            one = Literal(place, "int", 1)
            step = Call(place, "_?_:_", (body, Call(place, "_+_", (so_far, one)), so_far))
            return Literal(place, "int", 0), true, step, Call(place, "_==_", (so_far, one))
        case _:
            kept = Ident(place, variable.name) if name == "filter" else body
            step = Call(place, "_+_", (so_far, ListOf(place, (kept,))))
            if name == "filter" or len(rest) == 2:
                step = Call(place, "_?_:_", (rest[0], step, so_far))
            return ListOf(place, ()), true, step, so_far


def _start(tree: Any) -> int:
    found = getattr(tree.meta, "start_pos", None)  # cel-python gives `true` and `false` no place
    return found if isinstance(found, int) else 0


def _end(tree: Any) -> int:
    found = getattr(tree.meta, "end_pos", None)
    return found if isinstance(found, int) else 0
