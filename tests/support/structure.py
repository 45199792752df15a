"""The structure that the source keeps: how deep classes are, who makes attributes, who imports whom; and
what tests keep to.

`make lint` runs this file, which prints a line for each finding, and ends with 1 if there is one:

* a class of ours that is more than three classes deep: what varies is a part that is held, not a base class;
* `Base.method(self, ...)`: a base that is called by name is a second object inside of the first;
* an attribute that a class declares without ever making it: it is made in another class, or nowhere;
* modules that import each other in a circle, also for types only (`if TYPE_CHECKING:`);
* a module that imports more of another package than the part that this one has for others;
* a docstring that begins with the middle of a sentence ("Of ...", "As ..."), or has a sentence
  that begins with Who, Whoever or What: it has to be understood without the name above it;
* a public function of two or more parameters whose docstring has no line for one of them below `Args:`;
* a file that makes threads, locks or events, or tasks in an event loop, and does not begin with a word on
  who holds which lock and which thread or task calls what;
* in tests, a name of a test that is longer than 60 characters;
* in tests, a private name of something that the file does not define itself: a test goes the public way.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

ROOTS = ("protocol", "operator", "worker", "ps", "deploy/local")
MAX_DEPTH = 3
MAX_TEST_NAME = 60
GENERATED = ("_pb2.py", "_pb2_grpc.py")

# The part of a package that modules of others import.
PARTS_FOR_OTHERS = {"springtide_operator": "springtide_operator.api"}

# First words of docstrings that are no sentence by themselves.
_FIRST_WORDS = """
After Again Already And As At Because Before Between Both But By Else Even For From Here If In It Its Like
Neither None Nor Not Nothing Now Of On Once Only Or Otherwise She Since So Still Than That Their Them Then
There These They This Those To Until Up What Whatever When Where Wherever While Who Whoever Whom Whose With
Within Without
"""
FRAGMENTS = frozenset(_FIRST_WORDS.split())
# Decorators: an overload is explained where the function is made, and a command by the help of its options
# (--help prints its docstring).
_EXPLAINED_ELSEWHERE = frozenset(("callback", "command", "overload"))
_QUESTIONS = re.compile(r"(?:[.:;!?]\s+|\n\n\s*)(?:Who|Whoever|What)\b")

_CONCURRENT = {
    *(f"threading.{name}" for name in ("BoundedSemaphore", "Condition", "Event", "Lock", "RLock", "Thread")),
    *(f"asyncio.{name}" for name in ("Condition", "Event", "Lock", "Semaphore")),
}

# Their fields are declared and made by what the class is made with.
_MAKES_FIELDS = {
    "BaseModel",
    "Enum",
    "Exception",
    "IntEnum",
    "IntFlag",
    "NamedTuple",
    "Protocol",
    "StrEnum",
    "TypedDict",
}


# Named tuples' interface.
_OF_RECORDS = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}

# They take an attribute by its name.
_BY_NAME = {"delattr", "getattr", "hasattr", "object", "patch", "setattr"}

# Of libraries, where there is no other way (`os._exit` is one for everybody).
_OF_LIBRARIES = {
    "_aten._local_scalar_dense",
    "_aten._to_copy",
    "aten._fused_adamw_",
    "atexit._run_exitfuncs",
    "cuda._sleep",
    "os._exit",
    "running_mean._version",
    "threading._shutdown",
    "torch.Tensor._make_wrapper_subclass",
    "torch._foreach_norm",
}


@dataclass(frozen=True)
class Module:
    """One source file: its dotted name, where it lies, and what it says."""

    name: str
    path: Path
    tree: ast.Module

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """Everything of the file: a walk over it takes as long as parsing, and each rule looks at all."""
        return list(ast.walk(self.tree))


@dataclass
class Class:
    """One class: the names of its bases, the attributes that it declares only, and those that it makes."""

    name: str
    module: str
    line: int
    bases: list[str]
    makes_fields: bool
    declared: dict[str, int] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)


def read_modules(root: Path, roots: Iterable[str] = ROOTS) -> list[Module]:
    """Parse every source file below the source roots; generated ones are left out."""
    found = []
    for source in roots:
        for path in sorted((root / source).rglob("*.py")):
            inside = path.relative_to(root / source)
            if path.name.endswith(GENERATED) or (source == "deploy" and inside.parts[0] == "local"):
                continue
            parts = inside.with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Module(name, path.relative_to(root), ast.parse(path.read_text())))
    return found


def read_classes(modules: Iterable[Module]) -> dict[str, Class]:
    """Return the classes by name; of two with one name the first counts."""
    found: dict[str, Class] = {}
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, _read_class(module, node))
    return found


def findings(modules: list[Module]) -> list[str]:
    """Return one line for each thing that breaks the structure."""
    classes = read_classes(modules)
    return [
        *_deep(classes),
        *(line for module in modules for line in _unbound_calls(module, classes)),
        *_undeclared_owners(classes),
        *_circles(modules),
        *_past_parts_for_others(modules),
    ]


def fragments(modules: Iterable[Module]) -> list[str]:
    """Return one line for each docstring that does not stand alone."""
    return [line for module in modules for line in _fragments(module)]


def without_arguments(modules: Iterable[Module]) -> list[str]:
    """Return one line for each public function of two or more parameters that does not explain each one."""
    return [
        f"{module.path}:{function.lineno}: the Args of {function.name} lack {', '.join(missing)}"
        for module in modules
        for function in _public_functions(module.tree.body)
        if len(parameters := _parameters(function)) > 1
        and (missing := [name for name in parameters if name not in _explained(function)])
    ]


def unexplained(modules: Iterable[Module]) -> list[str]:
    """Return one line for each file whose beginning does not explain its threads, tasks and locks."""
    return [
        f"{module.path}:{line}: {made} is made, and the file's docstring has no word on threads or tasks"
        for module in modules
        for line, made in list(_concurrency(module))[:1]
        if not re.search(r"\b[Tt]hreads?\b|\bTasks?:", ast.get_docstring(module.tree) or "")
    ]


def findings_in_tests(tests: Iterable[Module], modules: Iterable[Module]) -> list[str]:
    """Return one line for each thing that tests should not do. modules: the source that they are of."""
    ours = {name for module in modules for name in _names_made(module)}
    return [line for test in tests for line in (*_long_names(test), *_private_uses(test, ours))]


def _docstrings(module: Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, those below constants and attributes included."""
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
        body = getattr(node, "body", None)
        if not isinstance(body, list):  # of a lambda or a conditional expression
            continue
        for made, below in pairwise(body):
            if not isinstance(made, ast.Assign | ast.AnnAssign) or not isinstance(below, ast.Expr):
                continue
            if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                yield below.lineno, below.value.value


def _fragments(module: Module) -> Iterator[str]:
    for line, text in _docstrings(module):
        first = re.match(r"[\"'(\[{]*(\w*)", text)
        if (first is not None and first[1] in FRAGMENTS) or text.startswith("A part of "):
            yield f"{module.path}:{line}: the docstring {text.split(chr(10))[0]!r} does not stand alone"
        elif question := _QUESTIONS.search(text):
            yield f"{module.path}:{line}: a sentence of the docstring begins with {question[0].split()[-1]!r}"


def _public_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_") or _EXPLAINED_ELSEWHERE.intersection(
                map(_last_name, node.decorator_list)
            ):
                continue
            if isinstance(node, ast.ClassDef):
                yield from _public_functions(node.body)
            else:
                yield node


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = function.args
    names = [parameter.arg for parameter in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def _explained(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the parameters that have a line of their own below `Args:`."""
    _, _, text = (ast.get_docstring(function) or "").partition("Args:\n")
    return set(re.findall(r"^    (\w+): \S", re.split(r"^\S", text, maxsplit=1, flags=re.M)[0], re.M))


def _concurrency(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for each thread, task, lock, condition or event that a file makes."""
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            made = f"{node.value.id}.{node.attr}"
            if made in _CONCURRENT:
                yield node.lineno, made


def _last_name(node: ast.expr) -> str:
    """Return the last name of `a.b.C[...]`: C; "" for any other expression."""
    if isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Call):
        node = node.func
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _read_class(module: Module, node: ast.ClassDef) -> Class:
    bases = [_last_name(base) for base in node.bases]
    decorators = {_last_name(decorator) for decorator in node.decorator_list}
    makes_fields = "dataclass" in decorators or bool(_MAKES_FIELDS.intersection(bases))
    found = Class(node.name, str(module.path), node.lineno, bases, makes_fields)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if statement.value is None and _last_name(statement.annotation) != "ClassVar":
                found.declared[statement.target.id] = statement.lineno
        elif isinstance(statement, ast.Assign):
            found.made.update(target.id for target in statement.targets if isinstance(target, ast.Name))
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            found.made.update(_attributes_made(statement))
    return found


def _attributes_made(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "cls")
        ):
            yield node.attr


def _ancestors(name: str, classes: Mapping[str, Class], seen: tuple[str, ...] = ()) -> Iterator[Class]:
    if name in classes and name not in seen:
        for base in classes[name].bases:
            if base in classes and base not in (*seen, name):
                yield classes[base]
                yield from _ancestors(base, classes, (*seen, name))


def _depth(name: str, classes: Mapping[str, Class], seen: tuple[str, ...] = ()) -> int:
    if name not in classes or name in seen:
        return 0
    return 1 + max((_depth(base, classes, (*seen, name)) for base in classes[name].bases), default=0)


def _deep(classes: Mapping[str, Class]) -> Iterator[str]:
    for name, found in classes.items():
        if (depth := _depth(name, classes)) > MAX_DEPTH:
            yield f"{found.module}:{found.line}: {name} is {depth} classes deep, {MAX_DEPTH} are the limit"


def _unbound_calls(module: Module, classes: Mapping[str, Class]) -> Iterator[str]:
    for node in module.nodes:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id in classes
            and node.args
            and isinstance(node.args[0], ast.Name)
            and node.args[0].id == "self"
        ):
            called = f"{node.func.value.id}.{node.func.attr}"
            yield f"{module.path}:{node.lineno}: {called}(self, ...) calls a base by its name"


def _undeclared_owners(classes: Mapping[str, Class]) -> Iterator[str]:
    for name, found in classes.items():
        family = [found, *_ancestors(name, classes)]
        # A base that is not ours may make fields as well.
        if any(one.makes_fields for one in family):
            continue
        made = set().union(*(one.made for one in family))
        for attribute, line in found.declared.items():
            if attribute not in made:
                yield f"{found.module}:{line}: {name}.{attribute} is declared here and made in another class"


def _circles(modules: list[Module]) -> Iterator[str]:
    names = {module.name for module in modules}
    graph = {module.name: sorted(set(_imports(module, names))) for module in modules}
    for circle in strongly_connected(graph):
        if len(circle) > 1:
            yield f"modules import each other in a circle: {', '.join(sorted(circle))}"


def _past_parts_for_others(modules: list[Module]) -> Iterator[str]:
    names = {module.name for module in modules}
    for module in modules:
        importer = module.name.partition(".")[0]
        for name in sorted(set(_imports(module, names))):
            package = name.partition(".")[0]
            part = PARTS_FOR_OTHERS.get(package)
            if part and importer != package and not f"{name}.".startswith(f"{part}."):
                yield f"{module.name} imports {name}: of {package} others import {part} only"


def _long_names(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name
            if name.startswith("test") and len(name) > MAX_TEST_NAME:
                yield (
                    f"{module.path}:{node.lineno}: {name} has {len(name)} characters, "
                    f"{MAX_TEST_NAME} are the limit"
                )


def _private_uses(test: Module, ours: set[str]) -> Iterator[str]:
    own = set(_names_made(test)) - ours
    for node in test.nodes:
        for name in _names_used(node):
            if _is_private(name.rpartition(".")[2]) and name not in own:
                shown = ast.unparse(node)
                if not any(f".{shown}".endswith(f".{known}") for known in _OF_LIBRARIES):
                    yield f"{test.path}:{node.lineno}: {shown} is private"  # type: ignore[attr-defined]


def _names_made(module: Module) -> Iterator[str]:
    """Yield the names of functions, classes, variables, and attributes of `self` that a file makes."""
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node):
            yield node.attr


def _names_used(node: ast.AST) -> Iterator[str]:
    """Yield the names of other objects that a node uses."""
    if isinstance(node, ast.Attribute):
        if not _is_own(node):
            yield node.attr
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Call) and _last_name(node.func) in _BY_NAME:
        for argument in node.args:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value


def _is_own(node: ast.Attribute) -> bool:
    """Whether it is an attribute of `self`, `cls` or `super()`."""
    base = node.value.func if isinstance(node.value, ast.Call) else node.value
    return isinstance(base, ast.Name) and base.id in ("self", "cls", "super")


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in _OF_RECORDS


def _imports(module: Module, names: set[str]) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.name.split(".")
                if module.path.name != "__init__.py":
                    package = package[:-1]
                package = package[: len(package) - (node.level - 1)]
                base = ".".join([*package, *([base] if base else [])])
            found = [
                f"{base}.{alias.name}" if f"{base}.{alias.name}" in names else base for alias in node.names
            ]
        else:
            continue
        yield from (name for name in found if name in names and name != module.name)


def strongly_connected(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Return the strongly connected components of a graph (Tarjan 1972, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []
    for start in graph:
        if start in index:
            continue
        index[start] = low[start] = len(index)
        stack.append(start)
        work = [(start, iter(graph[start]))]
        while work:
            node, edges = work[-1]
            for other in edges:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    work.append((other, iter(graph.get(other, ()))))
                    break
                if other in stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    cut = stack.index(node)
                    found.append(set(stack[cut:]))
                    del stack[cut:]
    return found


def main() -> int:
    root = Path(__file__).resolve().parents[2]
    modules, tests = read_modules(root), read_modules(root, ("tests",))
    found = [
        *findings(modules),
        *fragments(modules),
        *unexplained(modules),
        *without_arguments(modules),
        *findings_in_tests(tests, modules),
        *fragments(tests),
    ]
    found += fragments(read_modules(root, ("benchmarks", "charts", "deploy", "docs", "examples")))
    print("\n".join(found) or f"structure: {len(modules) + len(tests)} files keep it")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
