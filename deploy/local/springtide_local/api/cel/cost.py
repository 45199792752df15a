"""Upper bounds of the cost of expressions, by the table of costs that Kubernetes publishes.

The API server refuses a CRD whose rules could cost too much. It works with sizes, as a smallest and a
largest number: a limit of the schema bounds the largest one, and what has none counts as what a request can
hold. A string that was made in the expression has the size of its parts; one that was made from a number has
none at all, which is why joining it to another costs more than any limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from springtide_local.api.cel.checking import Checked
from springtide_local.api.cel.syntax import (
    ACCUMULATOR,
    Call,
    Expr,
    Ident,
    ListOf,
    Literal,
    Loop,
    MapOf,
    Select,
    Struct,
)
from springtide_local.api.cel.types import MAX_REQUEST_BYTES, Declared, Type

EXPRESSION_LIMIT = 10_000_000
DEFINITION_LIMIT = 100_000_000
LARGEST = 2**64 - 1
_TRAVERSAL = 0.1
_REGEX = 0.25
_LIST, _MAP, _STRUCT = 10, 30, 40
_SCALARS = ("bool", "double", "duration", "int", "timestamp", "uint")
_SCANNED = ("isSorted", "sum", "max", "min", "indexOf", "lastIndexOf")
_CHECKED_TEXTS = ("cidr", "isIP", "isCIDR", "ip", "quantity", "isQuantity")
_CHEAP = frozenset(
    [
        "sign",
        "asInteger",
        "isInteger",
        "asApproximateFloat",
        "isGreaterThan",
        "isLessThan",
        "compareTo",
        "add",
        "sub",
        "getScheme",
        "getHostname",
        "getHost",
        "getPort",
        "getEscapedPath",
        "getQuery",
    ]
)
_COMPARISONS = frozenset(
    f"{word}_{kind}"
    for word in ("less", "less_equals", "greater", "greater_equals")
    for kind in ("string", "bytes")
) | {"equals", "not_equals"}


@dataclass(frozen=True)
class Range:
    """A smallest and a largest number, of items or of cost. Sums and products stop at 64 bits."""

    low: int
    high: int

    def __add__(self, other: Range) -> Range:
        return Range(min(self.low + other.low, LARGEST), min(self.high + other.high, LARGEST))

    def __mul__(self, other: Range) -> Range:
        return Range(min(self.low * other.low, LARGEST), min(self.high * other.high, LARGEST))

    def __or__(self, other: Range) -> Range:
        return Range(min(self.low, other.low), max(self.high, other.high))

    def scaled(self, factor: float) -> Range:
        """Return the product with a factor, rounded up."""
        return Range(_scaled(self.low, factor), _scaled(self.high, factor))


ONE = Range(1, 1)
NOTHING = Range(0, 0)
UNKNOWN = Range(0, LARGEST)
Path = tuple[str, ...]


@dataclass(frozen=True)
class _Entry:
    """Sizes of the keys and values of a list or map that the expression makes."""

    kind: str
    key: Range
    value: Range

    def __or__(self, other: _Entry) -> _Entry:
        return _Entry(self.kind, self.key | other.key, self.value | other.value)


@dataclass(frozen=True)
class _Local:
    """A variable of a macro."""

    path: Path
    size: Range | None
    entry: _Entry | None = None


@dataclass(frozen=True)
class _Priced:
    """Cost of a call, and the size of its result where it is known."""

    cost: Range
    size: Range | None = None


def estimate(checked: Checked, root: Declared) -> Range:
    """Estimate what an expression costs.

    Args:
        checked: The expression with its types.
        root: The schema's declaration of `self` (and `oldSelf`).

    Returns:
        Least and most.
    """
    return _Estimator(checked, root).cost(checked.root)


def cardinality(least: int) -> int:
    """Return how often a value of so many bytes fits into a request."""
    return MAX_REQUEST_BYTES // (least + 1)


class _Estimator:
    """Walks one expression. Costs of operands come first: they leave paths and sizes behind."""

    def __init__(self, checked: Checked, root: Declared) -> None:
        self._checked = checked
        self._root = root
        self._paths: dict[Expr, Path] = {}
        self._sizes: dict[Expr, Range] = {}
        self._entries: dict[Expr, _Entry] = {}
        self._locals: dict[str, list[_Local]] = {}

    def cost(self, expr: Expr) -> Range:
        """Return what an operation costs, its operands included."""
        match expr:
            case Literal():
                return NOTHING
            case Ident():
                local = self._local(expr.name)
                self._paths[expr] = local.path if local else (expr.name,)
                return ONE
            case Select():
                return self._select(expr)
            case Call():
                return self._call(expr)
            case ListOf():
                return self._list(expr)
            case MapOf():
                return self._map(expr)
            case Struct():
                return sum((self.cost(value) for _, value in expr.fields), Range(_STRUCT, _STRUCT))
            case Loop():
                return self._loop(expr)
            case _:
                raise TypeError(f"no operation: {expr}")

    def _select(self, expr: Select) -> Range:
        operand = self.cost(expr.operand)
        if expr.test:
            return operand
        if self._type(expr.operand).kind in ("map", "object", "parameter"):
            operand += ONE
        self._paths[expr] = (*self._path(expr.operand), expr.field)
        return operand

    def _list(self, expr: ListOf) -> Range:
        total = Range(_LIST, _LIST)
        for element in expr.elements:
            total += self.cost(element)
        self._entries[expr] = _Entry("list", ONE, self._largest(expr.elements))
        return total

    def _map(self, expr: MapOf) -> Range:
        total = Range(_MAP, _MAP)
        for key, value in expr.entries:
            total += self.cost(key) + self.cost(value)
        keys = self._largest(tuple(key for key, _ in expr.entries))
        self._entries[expr] = _Entry("map", keys, self._largest(tuple(value for _, value in expr.entries)))
        return total

    def _largest(self, elements: tuple[Expr, ...]) -> Range:
        found = Range(LARGEST if elements else 0, 0)
        for element in elements:
            found |= self._size(element)
        return found

    def _loop(self, expr: Loop) -> Range:
        total = self.cost(expr.over) + self.cost(expr.start)
        start = _Local(self._path(expr.start), self._known(expr.start), self._entry(expr.start))
        self._locals.setdefault(ACCUMULATOR, []).append(start)
        self._locals.setdefault(expr.variable, []).append(self._variable(expr.over))
        each = self.cost(expr.condition) + self.cost(expr.step)
        self._locals[expr.variable].pop()
        total += self.cost(expr.result)
        self._locals[ACCUMULATOR].pop()
        times = self._size(expr.over)
        if isinstance(expr.start, Literal):
            self._sizes[expr] = ONE
        else:
            self._sizes[expr] = times
            entry = self._entry(expr.step)
            if entry is not None:
                self._entries[expr] = entry
        return total + times * each

    def _variable(self, over: Expr) -> _Local:
        entry = self._entry(over)
        kind = entry.kind if entry else self._type(over).kind
        size = None if entry is None else entry.value if kind == "list" else entry.key
        return _Local((*self._path(over), "@items" if kind == "list" else "@keys"), size)

    def _call(self, expr: Call) -> Range:
        if expr.function == "dyn":
            (argument,) = expr.arguments
            cost = ONE + self.cost(argument)
            size, entry = self._known(argument), self._entry(argument)
            if size is not None:
                self._sizes[expr] = size
            if entry is not None:
                self._entries[expr] = entry
            return cost
        costs = [self.cost(argument) for argument in expr.arguments]
        overloads = self._checked.overloads.get(expr, ())
        if not overloads:
            return NOTHING
        target = self._target(expr)
        before = NOTHING if target is None else self.cost(target)
        dearest = Range(LARGEST, 0)
        made: Range | None = None
        for overload in overloads:
            priced = self._priced(expr, overload, costs)
            dearest |= priced.cost
            if priced.size is not None:
                made = priced.size if made is None else made | priced.size
            if overload in ("index_list", "index_map"):
                entry = self._entry(expr.arguments[0])
                made = entry.value if entry else None
                below = "@items" if overload == "index_list" else "@values"
                self._paths[expr] = (*self._path(expr.arguments[0]), below)
            if made is None:
                made = self._known(expr)
        if made is not None:
            self._sizes[expr] = made
        return before + dearest

    def _priced(self, expr: Call, overload: str, costs: list[Range]) -> _Priced:
        """Price one overload of a call: by the functions that Kubernetes adds, or else by those of CEL."""
        arguments = sum(costs, NOTHING)
        added = self._added(expr, overload)
        if added is not None:
            return _Priced(added.cost + arguments, added.size)
        given = expr.arguments
        match overload:
            case "logical_and" | "logical_or":
                return _Priced(Range(costs[0].low, arguments.high))
            case "conditional":
                entries = self._entry(given[1]), self._entry(given[2])
                if entries[0] is not None and entries[1] is not None:
                    self._entries[expr] = entries[0] | entries[1]
                size = self._size(given[1]) | self._size(given[2])
                return _Priced(costs[0] + (costs[1] | costs[2]), size)
            case "add_string" | "add_bytes" | "add_list":
                return self._sum(expr, overload, arguments)
        return _Priced(self._plain(expr, overload) + arguments, self._converted(expr, overload))

    def _plain(self, expr: Call, overload: str) -> Range:
        """Return the cost of one of CEL's own functions without its arguments."""
        given, target = expr.arguments, self._target(expr)
        if overload in _COMPARISONS:
            most = min(self._size(given[0]).high, self._size(given[1]).high)
            return Range(1 if most else 0, most).scaled(_TRAVERSAL)
        match overload:
            case "string_to_bytes" | "bytes_to_string" | "strings_quote":
                return self._size(given[0]).scaled(_TRAVERSAL)
            case "starts_with_string" | "ends_with_string":
                return self._size(given[0]).scaled(_TRAVERSAL)
            case "string_format" if target is not None:
                return self._size(target).scaled(_TRAVERSAL)
            case "in_list":
                return self._size(given[1])
            case "matches_string" if target is not None:
                text = (self._size(target) + ONE).scaled(_TRAVERSAL)
                return text * self._size(given[0]).scaled(_REGEX)
            case "contains_string" if target is not None:
                return self._size(target).scaled(_TRAVERSAL) * self._size(given[0]).scaled(_TRAVERSAL)
        return ONE

    def _converted(self, expr: Call, overload: str) -> Range | None:
        """Return the size of what a conversion makes; None where nothing bounds it, as for a number."""
        if overload not in ("string_to_bytes", "bytes_to_string", "strings_quote"):
            return None
        size = self._size(expr.arguments[0])
        match overload:
            case "string_to_bytes":
                return Range(size.low, min(size.high * 4, LARGEST))
            case "bytes_to_string":
                return Range(size.low // 4, size.high)
            case _:
                return Range(size.low + 2, min(size.high * 2 + 2, LARGEST))

    def _sum(self, expr: Call, overload: str, arguments: Range) -> _Priced:
        left, right = expr.arguments
        size = self._size(left) + self._size(right)
        entries = self._entry(left), self._entry(right)
        if entries[0] is not None and entries[1] is not None:
            self._entries[expr] = entries[0] | entries[1]
        own = ONE if overload == "add_list" else size.scaled(_TRAVERSAL)
        return _Priced(own + arguments, size)

    def _added(self, expr: Call, overload: str) -> _Priced | None:
        """Price a function that Kubernetes adds; None for CEL's own."""
        name, target, given = expr.function, self._target(expr), expr.arguments
        if name in _CHEAP:
            return _Priced(ONE)
        if name in _CHECKED_TEXTS and target is None:
            return _Priced(self._size(given[0]).scaled(_TRAVERSAL))
        if name == "url" and target is None:
            size = self._size(given[0])
            return _Priced(size.scaled(_TRAVERSAL), size)
        if name == "_==_" and self._type(given[0]).name in ("net.IP", "net.CIDR", "kubernetes.Quantity"):
            return _Priced(ONE)
        if target is None:
            return None
        if name in _SCANNED:
            return _Priced(self._scanned(target))
        size = self._size(target)
        match name:
            case "lowerAscii" | "upperAscii" | "substring" | "trim":
                return _Priced(size.scaled(_TRAVERSAL), size)
            case "replace":
                made = _replaced(size, self._size(given[0]), self._size(given[1]))
                return _Priced(size.scaled(2 * _TRAVERSAL), made)
            case "split":
                most = size.high
                if len(given) > 1 and isinstance(given[1], Literal) and given[1].kind == "int":
                    most = given[1].value % 2**64
                return _Priced(size.scaled(2 * _TRAVERSAL), Range(0, most))
            case "join":
                made = self._join_size(target, given)
                return _Priced(made.scaled(_TRAVERSAL), made)
            case "find" | "findAll":
                cost = (size + ONE).scaled(_TRAVERSAL) * self._size(given[0]).scaled(_REGEX)
                return _Priced(cost, Range(0, size.high))
        return None

    def _scanned(self, target: Expr) -> Range:
        size = self._size(target)
        found = self._type(target)
        if not found.parameters:
            return size.scaled(_TRAVERSAL)
        each = ONE
        if found.parameters[0].kind in ("string", "bytes"):
            each += self._element_size(target).scaled(_TRAVERSAL)
        return size * each

    def _join_size(self, target: Expr, given: tuple[Expr, ...]) -> Range:
        items = self._size(target)
        size = items * self._element_size(target)
        if given:
            between = Range(max(items.low - 1, 0), max(items.high - 1, 0))
            size += self._size(given[0]) * between
        return size

    def _element_size(self, target: Expr) -> Range:
        found = self._declared_size((*self._path(target), "@items")) if self._path(target) else None
        return found or UNKNOWN

    def _target(self, expr: Call) -> Expr | None:
        """Return what a method is called on; in `strings.quote(x)` that is nothing."""
        return None if expr in self._checked.namespaced else expr.target

    def _type(self, expr: Expr) -> Type:
        return self._checked.types[expr]

    def _local(self, name: str) -> _Local | None:
        stack = self._locals.get(name)
        return stack[-1] if stack else None

    def _path(self, expr: Expr) -> Path:
        local = self._local(expr.name) if isinstance(expr, Ident) else None
        return local.path if local else self._paths.get(expr, ())

    def _entry(self, expr: Expr) -> _Entry | None:
        if expr in self._entries:
            return self._entries[expr]
        local = self._local(expr.name) if isinstance(expr, Ident) else None
        return local.entry if local else None

    def _size(self, expr: Expr) -> Range:
        return self._known(expr) or UNKNOWN

    def _known(self, expr: Expr) -> Range | None:
        """Return the size of a value: computed, written out, declared by the schema, or that of its type."""
        if expr in self._sizes:
            return self._sizes[expr]
        written = _written_size(expr)
        if written is not None:
            return Range(written, written)
        found = self._declared_size(self._path(expr))
        if found is not None:
            self._sizes[expr] = found
            return found
        if self._type(expr).kind in _SCALARS:
            return ONE
        local = self._local(expr.name) if isinstance(expr, Ident) else None
        return local.size if local else None

    def _declared_size(self, path: Path) -> Range | None:
        """Return the size that the schema gives to a path; its first part is the variable's name."""
        if not path or path[0] == ACCUMULATOR:
            return None
        at: Declared | None = self._root
        for step in path[1:]:
            if at is None:
                return None
            if step in ("@items", "@values"):
                at = at.element
            elif step == "@keys":
                at = at.key
            else:
                at = at.member(step)
        return None if at is None else Range(0, at.size)


def _written_size(expr: Expr) -> int | None:
    match expr:
        case Literal(kind="string" | "bytes"):
            return len(expr.value)
        case Literal():
            return 1
        case ListOf():
            return len(expr.elements)
        case MapOf():
            return len(expr.entries)
    return None


def _replaced(size: Range, old: Range, new: Range) -> Range:
    """Return the size of a text in which `old` is replaced by `new` as often, or as seldom, as can be."""
    if old.low == 0:  # nothing is replaced by something around each character
        most = min((size.high + 1) * new.high + size.high, LARGEST)
    elif new.high <= old.low:
        most = size.high
    else:
        most = min(math.ceil(size.high / old.low) * new.high, LARGEST)
    if old.high == 0:
        least = (size.low + 1) * new.low + size.low
    elif old.high <= new.low:
        least = size.low
    else:
        least = math.ceil(size.low / old.high) * new.low
    return Range(min(least, LARGEST), most)


def _scaled(number: int, factor: float) -> int:
    return min(math.ceil(float(number) * factor), LARGEST)
