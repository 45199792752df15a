"""The source of a function with what it uses, as one script. Nothing is pickled.

Written into the script, each by its name: helpers and classes of the function's own module with what they use
in turn, constants, and imports of modules that workers have. A value that lives in this process only (a
model, an open file, a lock) is refused by name.

[Note: names] Which names are used is asked of the compiler, not guessed from the text: the loads of globals
in the compiled source are exactly the names that running it will look up, in nested functions and class
bodies too. Annotations are not among them, since the script does not evaluate any.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import importlib
import importlib.metadata
import importlib.util
import inspect
import linecache
import math
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from springtide_client.errors import SourceError

_LOADS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}
_STORES = {"STORE_NAME", "STORE_GLOBAL"}
# Every script has them.
_OF_EACH_MODULE = {"__name__", "__file__", "__doc__", "__builtins__", "__spec__", "__package__", "__loader__"}
_ADVICE = "make it inside of the function, or pass plain values by arguments={...}"
_MISSING = object()


def script_of(function: Callable[..., object], code: Path | None = None) -> str:
    """Return a script that calls a function with the keywords in the JSON file that its first argument names.

    Args:
        function: one with source, from a file or a notebook.
        code: the folder that travels too, from which modules may be imported; None: none does.

    Raises:
        SourceError: it uses what cannot be sent; the text names it.
    """
    checked = check(function)
    collector = _Collector(checked, code)
    collector.add_definition(checked.__name__, checked, checked.__name__)
    return "\n".join(
        [
            f'"""{checked.__qualname__}, sent by springtide.client."""',
            "",
            "from __future__ import annotations",
            "",
            *sorted(collector.imports, key=lambda line: (" as " in line or line.startswith("from"), line)),
            *(f"\n{text}" for text in collector.definitions),
            "",
            'if __name__ == "__main__":',
            "    import json as _json",
            "    import sys as _sys",
            "",
            '    with open(_sys.argv[1], encoding="utf-8") as _file:',
            "        _arguments = _json.load(_file)",
            f"    {checked.__name__}(**_arguments)",
            "",
        ]
    )


def check(function: Callable[..., object]) -> FunctionType:
    """Return the function beneath its decorators where it is of a kind that can be sent.

    Args:
        function: given by a user.

    Raises:
        SourceError: it is a method, a class, a lambda, asynchronous or a generator, or an object that is
            called.
    """
    name = getattr(function, "__qualname__", None) or repr(function)
    if inspect.ismethod(function):
        raise SourceError(
            f"{name} is a method, and its object lives in this process: write a function that makes the"
            " object and calls it"
        )
    if isinstance(function, type):
        raise SourceError(f"{name} is a class: write a function that makes one")
    bare = inspect.unwrap(function)
    if not isinstance(bare, FunctionType):
        hint = ": give its function, and its values by arguments={...}" if hasattr(bare, "func") else ""
        raise SourceError(f"{name} is no function with source, but a {type(bare).__name__}{hint}")
    if bare.__name__ == "<lambda>":
        raise SourceError("a lambda cannot be sent, for it has no statements of its own: write it with def")
    if "." in bare.__qualname__.rpartition("<locals>.")[2]:
        raise SourceError(
            f"{name} is a method of a class: write a function that makes the object and calls it"
        )
    if inspect.iscoroutinefunction(bare) or inspect.isasyncgenfunction(bare):
        raise SourceError(f"{name} is asynchronous: write a plain function, which may call asyncio.run(...)")
    if inspect.isgeneratorfunction(bare):
        raise SourceError(f"{name} is a generator, whose body a call does not run: write a plain function")
    return bare


class _Collector:
    """Collects imports and definitions in the order in which a script may have them."""

    def __init__(self, function: FunctionType, code: Path | None) -> None:
        """Begin with nothing.

        Args:
            function: whose module's names are written, not imported.
            code: the folder that travels too.
        """
        self.imports: list[str] = []
        self.definitions: list[str] = []
        self._home = function.__module__
        self._globals = function.__globals__
        self._code = code
        self._named: dict[str, Any] = {}
        self._written = _imports_of(function)

    def add_definition(self, name: str, value: Any, user: str) -> None:
        """Write a function or class, after all that it uses.

        Args:
            name: by which it is used.
            value: the function or class.
            user: of it, for messages.
        """
        self._named[name] = value
        bare = inspect.unwrap(value) if inspect.isfunction(value) else value
        text = _text_of(bare, name, user)
        closure = _closure_of(bare)
        tree = ast.parse(text)
        code = compile(text, "<function>", "exec", __future__.annotations.compiler_flag, dont_inherit=True)
        for used in sorted(_names_used(code)):
            self._add(used, self._value(used, closure, name), name, captured=used in closure)
        for used in sorted(_annotation_names(tree)):
            self._add_annotation(used)
        self._add_submodules(tree)
        self.definitions.append(text.rstrip("\n") + "\n")
        if bare.__name__ != name:
            self.definitions.append(f"{name} = {bare.__name__}\n")

    def _value(self, name: str, closure: Mapping[str, Any], user: str) -> Any:
        if name in _OF_EACH_MODULE:  # also looked up by each class body
            return _MISSING
        for names in (closure, self._globals):
            if name in names:
                return names[name]
        if hasattr(builtins, name):
            return _MISSING
        raise SourceError(f"{user} uses {name!r}, which is not defined where {user} is")

    def _add(self, name: str, value: Any, user: str, *, captured: bool) -> None:
        if value is _MISSING or self._is_named(name, value, user):
            return
        if statement := self._import_of(name, value, user):
            self.imports.append(statement)
        elif captured and not _is_plain(value):
            raise SourceError(
                f"{user} closes over {name!r} ({_kind(value)}) of the function around it, which is not sent:"
                f" {_ADVICE}"
            )
        elif inspect.isfunction(value) or isinstance(value, type):
            self.add_definition(name, value, user)
            return
        elif _is_plain(value):
            self.definitions.append(f"{name} = {value!r}\n")
        else:
            raise SourceError(
                f"{user} uses {name!r} ({_kind(value)}), which lives in this process and is not sent:"
                f" {_ADVICE}"
            )
        self._named[name] = value

    def _is_named(self, name: str, value: Any, user: str) -> bool:
        if name not in self._named:
            return False
        if self._named[name] is not value and self._named[name] != value:
            raise SourceError(f"{user} uses {name!r}, which is something else in what it calls: rename one")
        return True

    def _add_annotation(self, name: str) -> None:
        """Import a name of an annotation if that is possible; nothing evaluates it unless it is asked for."""
        value = self._globals.get(name, _MISSING)
        if value is _MISSING or name in self._named:
            return
        try:
            statement = self._import_of(name, value, name)
        except SourceError:
            return
        if statement:
            self.imports.append(statement)
            self._named[name] = value

    def _add_submodules(self, tree: ast.Module) -> None:
        """Import `a.b` where the text says `a.b.c`: importing `a` alone need not import it."""
        for node in ast.walk(tree):
            chain = _chain(node)
            module = self._named.get(chain[0]) if chain else None
            if not isinstance(module, ModuleType):
                continue
            full = module.__name__
            for part in chain[1:]:
                full = f"{full}.{part}"
                if full not in sys.modules:
                    break
                if (line := f"import {full}") not in self.imports:
                    self.imports.append(line)

    def _import_of(self, name: str, value: Any, user: str) -> str:
        """Return the statement that imports a value by a name; "" if it is not from a module."""
        for module, attribute in self._sources(name, value):
            if module == self._home or module == "__main__":
                continue
            self._check_module(module, name, user)
            if attribute:
                return f"from {module} import {attribute}" + (f" as {name}" if attribute != name else "")
            return f"import {module}" + (f" as {name}" if module != name else "")
        return ""

    def _sources(self, name: str, value: Any) -> Iterator[tuple[str, str]]:
        """Yield (module, attribute), "" for the module itself, in which a value is found."""
        if isinstance(value, ModuleType):
            yield value.__name__, ""
            return
        if name in self._written:
            module, attribute = self._written[name]
            if attribute and _attribute(module, attribute) is value:
                yield module, attribute
        home, own = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if isinstance(home, str) and isinstance(own, str) and _attribute(home, own) is value:
            yield home, own
        root = type(value).__module__.partition(".")[0]
        if root != "builtins" and _attribute(root, name) is value:
            yield root, name

    def _check_module(self, module: str, name: str, user: str) -> None:
        if _is_installed(module):
            return
        file = getattr(sys.modules.get(module), "__file__", None)
        where = f" ({file})" if file else ""
        if self._code is None:
            raise SourceError(
                f"{user} uses {name!r} of the module {module}{where}, which workers do not have: send"
                ' its folder by code="FOLDER"'
            )
        top = self._code / module.partition(".")[0]
        if not (top.is_dir() or top.with_suffix(".py").is_file()):
            raise SourceError(
                f"{user} uses {name!r} of the module {module}{where}, which is not in the folder {self._code}"
                " that is sent"
            )


def _attribute(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, _MISSING) if "." not in name else _MISSING


def _kind(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")


def _is_plain(value: Any) -> bool:
    """Whether a literal says all of a value."""
    if value is None or type(value) in (bool, int, str, bytes):
        return True
    if type(value) is float:
        return math.isfinite(value)
    if type(value) in (tuple, list, set, frozenset):
        return (bool(value) or type(value) is not frozenset) and all(map(_is_plain, value))
    return type(value) is dict and all(map(_is_plain, (*value.keys(), *value.values())))


def _text_of(value: Any, name: str, user: str) -> str:
    """Return the text of a function or class, nested ones below an `if True:` that keeps their strings whole.

    Raises:
        SourceError: it cannot be read, or is not what was defined.
    """
    try:
        text = inspect.getsource(value)
    except (OSError, TypeError) as error:
        raise SourceError(
            f"the source of {name}, which {user} needs, cannot be read ({error}): define it in a file or a"
            " notebook cell"
        ) from error
    if text[:1].isspace():
        text = f"if True:\n{text}"
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise SourceError(
            f"the source of {name} cannot be taken alone (line {error.lineno}: {error.msg})"
        ) from error
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    if value.__name__ not in defined:
        raise SourceError(f"the file of {name} has changed since it was imported: import it again")
    return text


def _closure_of(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, FunctionType):
        return {}
    found = {}
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue  # not defined yet; a call would fail
    return found


def _names_used(code: CodeType) -> set[str]:
    """Return the names that code looks up outside of itself, nested code included."""
    loaded: set[str] = set()
    stored: set[str] = set()
    nested: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _LOADS:
            loaded.add(str(instruction.argval))
        elif instruction.opname in _STORES:
            stored.add(str(instruction.argval))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            nested |= _names_used(constant)
    if code.co_name == "<module>":
        return (loaded | nested) - stored
    # What a class body stores, its methods do not see; what a function stores in a global, it may load.
    return (loaded - (stored if code.co_flags & inspect.CO_OPTIMIZED == 0 else set())) | nested


def _annotation_names(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(annotation, ast.expr):
                found |= {part.id for part in ast.walk(annotation) if isinstance(part, ast.Name)}
    return found


def _chain(node: ast.AST) -> list[str]:
    """Return the names of `a.b.c`; empty for any other expression."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if names and isinstance(node, ast.Name) else []


def _imports_of(function: FunctionType) -> dict[str, tuple[str, str]]:
    """Return (module, attribute) by name for the imports in the function's file, or in a notebook's cells."""
    file = function.__code__.co_filename
    linecache.checkcache(file)
    files = [file]
    if function.__module__ == "__main__":
        folder = os.path.dirname(file)
        files += [one for one in list(linecache.cache) if os.path.dirname(one) == folder and one != file]
    found: dict[str, tuple[str, str]] = {}
    for one in files:
        try:
            tree = ast.parse("".join(linecache.getlines(one)))
        except SyntaxError:
            continue  # a cell of another language
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                try:
                    relative = "." * node.level + (node.module or "")
                    module = importlib.util.resolve_name(relative, function.__globals__.get("__package__"))
                except ImportError:
                    continue
                found |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
    return found


def _is_installed(module: str) -> bool:
    """Whether a module belongs to Python or to an installed package, as images have them."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names or top == "springtide":
        return True
    paths = sysconfig.get_paths()
    file = getattr(sys.modules.get(top), "__file__", None)
    roots = {os.path.realpath(paths[key]) for key in ("purelib", "platlib")}
    if file and any(os.path.realpath(file).startswith(root + os.sep) for root in roots):
        return True
    return top in importlib.metadata.packages_distributions()
