"""Findings of `make lint` about the structure of the source, on small trees that break one rule each."""

from __future__ import annotations

from pathlib import Path

import pytest
from structure import (
    findings,
    findings_in_tests,
    fragments,
    read_modules,
    strongly_connected,
    unexplained,
    without_arguments,
)

DEEP = """
class A: ...
class B(A): ...
class C(B): ...
class D(C): ...
"""
UNBOUND = """
class A:
    def act(self): ...
class B(A):
    def act(self):
        A.act(self)
"""
UNDECLARED = """
class Mixin:
    links: int
    def act(self): return self.links
"""
DECLARED = """
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol
class Base:
    def __init__(self): self.links = 1
class Below(Base):
    links: int
    kind: ClassVar[str]
@dataclass
class Data:
    number: int
class Pair(NamedTuple):
    number: int
class Port(Protocol):
    number: int
"""
LONG = f"def test_{'x' * 56}(): ...\n"
PRIVATE = """
from package.one import _two
def test_it(monkeypatch, thing):
    thing.part._inside(_two)
    monkeypatch.setattr(thing, "_now", 1)
    monkeypatch.setattr("package.one._LIMIT", 1)
class Below(Above):
    def __init__(self): self._shared = 1
def test_that(): Below()._shared
"""
PUBLIC = """
import os
from package.one import __version__, two
class Fake:
    def __init__(self): self._inside = 1
    def _own(self): return self._inside, super()._other
def test_it(monkeypatch, pair):
    fake = Fake()
    fake._own()
    fake._inside += 1
    pair._replace(one=1)
    monkeypatch.setattr(two, "now", 1)
    _ = os._exit
"""


def found_in(root: Path, **sources: str) -> list[str]:
    for name, text in sources.items():
        path = root / "ps" / "package" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return findings(read_modules(root, ("ps",)))


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        (DEEP, "ps/package/one.py:5: D is 4 classes deep, 3 are the limit"),
        (UNBOUND, "ps/package/one.py:6: A.act(self, ...) calls a base by its name"),
        (UNDECLARED, "ps/package/one.py:3: Mixin.links is declared here and made in another class"),
    ],
    ids=["deep", "unbound", "undeclared"],
)
def test_a_broken_rule_is_found(text: str, finding: str, tmp_path: Path) -> None:
    assert found_in(tmp_path, one=text) == [finding]


def test_declared_fields_of_data_are_no_finding(tmp_path: Path) -> None:
    assert found_in(tmp_path, one=DECLARED) == []


@pytest.mark.parametrize("condition", ["", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "])
def test_a_circle_is_found_also_for_types_only(condition: str, tmp_path: Path) -> None:
    circle = {
        "one": "from package import two",
        "two": "from package.three import Three",
        "three": f"{condition}from .one import One",
    }
    assert found_in(tmp_path, **circle) == [
        "modules import each other in a circle: package.one, package.three, package.two"
    ]


def found_in_tests(root: Path, text: str) -> list[str]:
    (root / "tests").mkdir()
    (root / "tests" / "test_one.py").write_text(text)
    (root / "ps" / "package").mkdir(parents=True)
    (root / "ps" / "package" / "two.py").write_text("_shared = 1")
    return findings_in_tests(read_modules(root, ("tests",)), read_modules(root, ("ps",)))


def test_names_of_tests_have_at_most_60_characters(tmp_path: Path) -> None:
    assert found_in_tests(tmp_path, LONG) == [
        f"tests/test_one.py:1: test_{'x' * 56} has 61 characters, 60 are the limit"
    ]


def test_private_names_of_others_are_found_in_tests(tmp_path: Path) -> None:
    assert sorted(found_in_tests(tmp_path, PRIVATE)) == [
        "tests/test_one.py:2: from package.one import _two is private",
        "tests/test_one.py:4: thing.part._inside is private",
        "tests/test_one.py:5: monkeypatch.setattr(thing, '_now', 1) is private",
        "tests/test_one.py:6: monkeypatch.setattr('package.one._LIMIT', 1) is private",
        "tests/test_one.py:9: Below()._shared is private",
    ]


def test_private_names_of_the_file_itself_are_no_finding(tmp_path: Path) -> None:
    assert found_in_tests(tmp_path, PUBLIC) == []


def test_others_import_the_part_that_a_package_has_for_them(tmp_path: Path) -> None:
    sources = {
        "springtide_operator/__init__.py": "",
        "springtide_operator/api.py": "",
        "springtide_operator/apiary.py": "from springtide_operator import plan",
        "springtide_operator/plan.py": "from . import api",
        "springtide_cli/one.py": "from springtide_operator import api, plan\nimport springtide_operator.api",
        "springtide_cli/two.py": "if True:\n    from springtide_operator.apiary import bees",
    }
    for name, text in sources.items():
        path = tmp_path / "operator" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    only = "of springtide_operator others import springtide_operator.api only"
    assert findings(read_modules(tmp_path, ("operator",))) == [
        f"springtide_cli.one imports springtide_operator.plan: {only}",
        f"springtide_cli.two imports springtide_operator.apiary: {only}",
    ]


def test_a_long_chain_is_no_circle() -> None:
    chain = {str(number): [str(number + 1)] for number in range(5000)}
    assert {len(part) for part in strongly_connected(chain)} == {1}


@pytest.mark.parametrize(
    "text",
    [
        "Of a chunk.",
        "What a member says.",
        "A part of `Store`, which makes what is named here.",
        "(Nothing) is done.",
        "Return the value. Who asks waits.",
        "Return the value.\n\n    What is not there is made.",
    ],
)
def test_docstrings_that_do_not_stand_alone_are_found(text: str, tmp_path: Path) -> None:
    assert len(fragments_in(tmp_path, text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Return the value of a chunk.",
        "`None` is refused; say what is wrong.",
        "(key, value) of each chunk.",
        "",
    ],
)
def test_docstrings_that_stand_alone_are_no_finding(text: str, tmp_path: Path) -> None:
    assert fragments_in(tmp_path, text) == []


@pytest.mark.parametrize(
    "source",
    [
        'LIMIT = 3\n"""Of a chunk."""\n',
        'LIMIT: int = 3\n"""By chunk: what it has."""\n',
        'class Chunk:\n    limit: int\n    """Of a chunk."""\n',
        'def act(self):\n    self.limit = 3\n    """Of a chunk."""\n',
    ],
)
def test_docstrings_of_constants_stand_alone_too(source: str, tmp_path: Path) -> None:
    write(tmp_path, source)
    assert len(fragments(read_modules(tmp_path, ("protocol",)))) == 1
    write(tmp_path, source.replace("Of a chunk", "Limit of a chunk").replace("By chunk: what", "Bytes that"))
    assert fragments(read_modules(tmp_path, ("protocol",))) == []


def fragments_in(root: Path, text: str) -> list[str]:
    write(root, f'def act():\n    """{text}"""\n')
    return fragments(read_modules(root, ("protocol",)))


@pytest.mark.parametrize("made", ["threading.Lock()", "threading.Thread(target=act)", "asyncio.Event()"])
def test_a_lock_in_a_file_without_a_word_on_it_is_found(made: str, tmp_path: Path) -> None:
    write(tmp_path, f'"""Serve."""\nguard = {made}\n')
    assert len(unexplained(read_modules(tmp_path, ("protocol",)))) == 1
    write(tmp_path, f'"""Serve.\n\nThreads: one of its own.\n"""\nguard = {made}\n')
    assert unexplained(read_modules(tmp_path, ("protocol",))) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('def act(one, two):\n    """Act."""\n', 1),
        ("class One:\n    async def act(self, one, *, two): ...\n", 1),
        (
            'def act(one, two):\n    """Act.\n\n    Args:\n        one: a.\n        two: b.\n    """\n',
            0,
        ),
        (
            'def act(one, two):\n    """Act.\n\n    Args:\n        one: a.\n\n    Raises:\n        two: b.\n'
            '    """\n',
            1,
        ),
        ('class One:\n    def act(self, one):\n        """Act."""\ndef _own(one, two): ...\n', 0),
        ("@overload\ndef act(one, two): ...\n", 0),
        ('@app.command("act")\ndef act(one, two):\n    """Act."""\n', 0),
    ],
)
def test_public_functions_without_args_are_found(text: str, count: int, tmp_path: Path) -> None:
    write(tmp_path, text)
    assert len(without_arguments(read_modules(tmp_path, ("protocol",)))) == count


def write(root: Path, text: str) -> None:
    path = root / "protocol" / "package" / "one.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
