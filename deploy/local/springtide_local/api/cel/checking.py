"""The types of an expression: what does not fit is found when a CRD is written, not when an object comes.

The algorithm is that of CEL's language definition, and the texts are those of the API server's compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from springtide_local.api.cel import library
from springtide_local.api.cel.syntax import (
    ACCUMULATOR,
    Call,
    CelError,
    Expr,
    Ident,
    ListOf,
    Literal,
    Loop,
    MapOf,
    Select,
    Struct,
    located,
    parse,
)
from springtide_local.api.cel.types import (
    BOOL,
    DYN,
    ERROR,
    Declared,
    Type,
    list_of,
    map_of,
)

_NULLABLE = ("object", "timestamp", "duration", "null_type")
_TYPE_NAMES = ("bool", "int", "uint", "double", "string", "bytes", "list", "map", "null_type", "type")
_MESSAGE_TYPES = {
    "google.protobuf.Timestamp": Type("timestamp"),
    "google.protobuf.Duration": Type("duration"),
}


@dataclass
class Checked:
    """An expression with the type of each operation and the overloads of each call.

    Attributes:
        text: The expression as it was written.
        root: Its tree.
        types: By operation.
        overloads: By call; several where a type is only known when the rule runs.
        functions: Names of all functions that are called.
        names: Variables that are used.
        namespaced: Calls of functions whose name has a dot.
    """

    text: str
    root: Expr
    types: dict[Expr, Type] = field(default_factory=dict)
    overloads: dict[Expr, tuple[str, ...]] = field(default_factory=dict)
    functions: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    namespaced: set[Expr] = field(default_factory=set)

    @property
    def type(self) -> Type:
        """The type of the whole."""
        return self.types[self.root]


def check(text: str, variables: Mapping[str, Declared]) -> Checked:
    """Find the types of an expression.

    Args:
        text: The expression.
        variables: The declared names: `self` and `oldSelf` in a rule.

    Returns:
        The expression with its types.

    Raises:
        CelError: It does not parse, or types do not fit; the text names all that is wrong.
    """
    checked = Checked(text, parse(text))
    checker = _Checker(checked, variables)
    checker.visit(checked.root)
    checker.finish()
    if checker.problems:
        raise CelError("\n".join(located(text, *found) for found in sorted(set(checker.problems))))
    return checked


class _Checker:
    """Walks one expression. `_bound` maps type variables to what they turned out to be."""

    def __init__(self, checked: Checked, variables: Mapping[str, Declared]) -> None:
        self.problems: list[tuple[int, str]] = []
        self._checked = checked
        self._scopes = [{name: what.type for name, what in variables.items()}]
        self._objects: dict[str, Declared] = {}
        self._bound: dict[str, Type] = {}
        self._made = 0
        for what in variables.values():
            self._collect(what)

    def finish(self) -> None:
        """Put what type variables turned out to be in their place; dyn where it stayed open."""
        for expr, found in self._checked.types.items():
            self._checked.types[expr] = self._resolved(found, open_as=DYN)

    def visit(self, expr: Expr) -> Type:
        """Return the type of one operation and remember it."""
        match expr:
            case Literal():
                found = Type(expr.kind)
            case Ident():
                found = self._ident(expr)
            case Select():
                found = self._select(expr)
            case Call():
                found = self._call(expr)
            case ListOf():
                found = list_of(self._joined(expr.elements))
            case MapOf():
                keys = self._joined(tuple(key for key, _ in expr.entries))
                found = map_of(keys, self._joined(tuple(value for _, value in expr.entries)))
            case Loop():
                found = self._loop(expr)
            case Struct():
                found = self._struct(expr)
            case _:
                raise TypeError(f"no operation: {expr}")
        self._checked.types[expr] = found
        return found

    def _collect(self, what: Declared) -> None:
        if what.type.kind == "object":
            self._objects[what.type.name] = what
            for child in what.fields.values():
                self._collect(child)
        elif what.element is not None:
            self._collect(what.element)

    def _wrong(self, expr: Expr, message: str) -> Type:
        self.problems.append((expr.position, message))
        return ERROR

    def _ident(self, expr: Ident) -> Type:
        for scope in reversed(self._scopes):
            if expr.name in scope:
                self._checked.names.add(expr.name)
                return scope[expr.name]
        if expr.name in _TYPE_NAMES:
            return Type("type", (Type(expr.name),))
        return self._wrong(expr, f"undeclared reference to '{expr.name}' (in container '')")

    def _select(self, expr: Select) -> Type:
        path = _dotted(expr)
        if path in _MESSAGE_TYPES and not expr.test:
            return Type("type", (_MESSAGE_TYPES[path],))
        operand = self._resolved(self.visit(expr.operand))
        result = DYN
        if operand.kind == "map":
            result = operand.parameters[1]
        elif operand.kind == "object":
            known = self._objects.get(operand.name)
            field = None if known is None else known.member(expr.field)
            wrong = f"undefined field '{expr.field}'"
            result = field.type if field is not None else self._wrong(expr, wrong)
        elif operand.kind == "parameter":
            self._bound[operand.name] = DYN
        elif operand.kind not in ("dyn", "error"):
            self._wrong(expr, f"type '{operand}' does not support field selection")
        return BOOL if expr.test else result

    def _call(self, expr: Call) -> Type:
        for argument in expr.arguments:
            self.visit(argument)
        target = expr.target
        name = expr.function
        if target is not None:
            prefix = _dotted(target)
            if prefix and f"{prefix}.{name}" in library.functions():
                name, target = f"{prefix}.{name}", None
                self._checked.namespaced.add(expr)
            else:
                self.visit(target)
        overloads = library.functions().get(name)
        if overloads is None:
            return self._wrong(expr, f"undeclared reference to '{name}' (in container '')")
        self._checked.functions.add(name)
        if name in ("_&&_", "_||_"):
            return self._logical(expr)
        given = [*([target] if target is not None else []), *expr.arguments]
        return self._resolve(expr, name, overloads, given, target is not None)

    def _logical(self, expr: Call) -> Type:
        fits = True
        for argument in expr.arguments:
            found = self._checked.types[argument]
            if not self._assign([(found, BOOL)]):
                self._wrong(argument, f"expected type 'bool' but found '{self._resolved(found)}'")
                fits = False
        self._checked.overloads[expr] = ("logical_and" if expr.function == "_&&_" else "logical_or",)
        return BOOL if fits else ERROR

    def _resolve(
        self, expr: Call, name: str, overloads: tuple[library.Overload, ...], given: list[Expr], method: bool
    ) -> Type:
        """Choose all overloads that fit. Several do where a type is dyn; then the result is dyn, too."""
        types = [self._checked.types[argument] for argument in given]
        chosen: list[str] = []
        result: Type | None = None
        for overload in overloads:
            if overload.method != method or len(overload.arguments) != len(types):
                continue
            fresh = self._fresh(overload)
            wanted = [_filled(each, fresh) for each in overload.arguments]
            if not self._assign(list(zip(types, wanted, strict=True))):
                continue
            chosen.append(overload.name)
            found = self._resolved(_filled(overload.result, fresh))
            if result is None:
                result = found
            elif result != DYN and found != result:
                result = DYN
        if result is None:
            shown = [str(self._resolved(each, open_as=DYN)) for each in types]
            signature = f"({', '.join(shown)})"
            if method:
                signature = f"{shown[0]}.({', '.join(shown[1:])})"
            return self._wrong(expr, f"found no matching overload for '{name}' applied to '{signature}'")
        self._checked.overloads[expr] = tuple(chosen)
        return result

    def _loop(self, expr: Loop) -> Type:
        over = self._resolved(self.visit(expr.over))
        start = self.visit(expr.start)
        variable = ERROR
        if over.kind == "list" or over.kind == "map":
            variable = over.parameters[0]
        elif over.kind in ("dyn", "error", "parameter"):
            if over.kind == "parameter":
                self._bound[over.name] = DYN
            variable = DYN
        else:
            text = f"expression of type '{over}' cannot be range of a comprehension"
            self._wrong(expr.over, f"{text} (must be list, map, or dynamic)")
        self._scopes.append({ACCUMULATOR: start})
        self._scopes.append({expr.variable: variable})
        self._expect(expr.condition, BOOL)
        self._expect(expr.step, start)
        self._scopes.pop()
        result = self.visit(expr.result)
        self._scopes.pop()
        return self._resolved(result)

    def _expect(self, expr: Expr, wanted: Type) -> None:
        found = self.visit(expr)
        if not self._assign([(wanted, found)]):
            shown = self._resolved(wanted), self._resolved(found)
            self._wrong(expr, f"expected type '{shown[0]}' but found '{shown[1]}'")

    def _struct(self, expr: Struct) -> Type:
        for _, value in expr.fields:
            self.visit(value)
        return self._wrong(expr, f"undeclared reference to '{expr.name}' (in container '')")

    def _joined(self, elements: tuple[Expr, ...]) -> Type:
        """Return the one type of all elements of a literal: Kubernetes wants them alike."""
        joined: Type | None = None
        for element in elements:
            found = self.visit(element)
            if joined is None:
                joined = found
            elif self._assign([(joined, found)]):
                joined = joined if joined.kind != "dyn" else found
            else:
                shown = self._resolved(joined), self._resolved(found)
                self._wrong(element, f"expected type '{shown[0]}' but found '{shown[1]}'")
        return joined if joined is not None else self._variable()

    def _variable(self) -> Type:
        self._made += 1
        return Type("parameter", name=f"_var{self._made}")

    def _fresh(self, overload: library.Overload) -> dict[str, Type]:
        return {name: self._variable() for name in _parameters((*overload.arguments, overload.result))}

    def _resolved(self, found: Type, open_as: Type | None = None) -> Type:
        """Return a type with what is known of its variables in their place."""
        if found.kind == "parameter":
            if found.name in self._bound:
                return self._resolved(self._bound[found.name], open_as)
            return open_as if open_as is not None else found
        if not found.parameters:
            return found
        return Type(found.kind, tuple(self._resolved(each, open_as) for each in found.parameters), found.name)

    def _assign(self, pairs: list[tuple[Type, Type]]) -> bool:
        """Tell whether each value fits its place; only then what was learnt of variables stays."""
        before = dict(self._bound)
        if all(self._fits(value, place) for value, place in pairs):
            return True
        self._bound = before
        return False

    def _fits(self, value: Type, place: Type) -> bool:
        for one, other in ((place, value), (value, place)):
            if one.kind == "parameter":
                return self._bind(one, other)
        if value.kind in ("dyn", "error") or place.kind in ("dyn", "error"):
            return True
        if value.kind == "null_type":
            return place.kind in _NULLABLE
        if place.kind == "null_type":
            return value.kind in _NULLABLE
        if value.kind == "type" and place.kind == "type":
            return True
        if (value.kind, value.name) != (place.kind, place.name):
            return False
        return all(map(self._fits, value.parameters, place.parameters))

    def _bind(self, variable: Type, found: Type) -> bool:
        found = self._resolved(found)
        if found == variable:
            return True
        known = self._bound.get(variable.name)
        if known is None:
            if variable.name in _parameters((found,)):
                return False
            self._bound[variable.name] = found
            return True
        if not self._fits(found, known):
            return False
        if found.kind == "dyn" or (known.kind == "null_type" and found.kind != "null_type"):
            self._bound[variable.name] = found
        return True


def _filled(found: Type, names: dict[str, Type]) -> Type:
    if found.kind == "parameter":
        return names[found.name]
    return Type(found.kind, tuple(_filled(each, names) for each in found.parameters), found.name)


def _parameters(types: tuple[Type, ...]) -> set[str]:
    names: set[str] = set()
    for each in types:
        names |= {each.name} if each.kind == "parameter" else _parameters(each.parameters)
    return names


def _dotted(expr: Expr) -> str:
    """Return `a.b` for a path of names; nothing for anything else."""
    if isinstance(expr, Ident):
        return expr.name
    if isinstance(expr, Select) and not expr.test:
        operand = _dotted(expr.operand)
        return f"{operand}.{expr.field}" if operand else ""
    return ""
