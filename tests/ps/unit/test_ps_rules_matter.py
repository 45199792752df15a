"""Each rule of the servers is there for something: without it random walks find a failure."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import textwrap
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

from springtide_ps.params import applied as ranges
from springtide_ps.server import lease_table as leases
from springtide_ps.server import step_protocol as rounds

WALKS = 300

TAKEN_OUT: list[tuple[str, str, ModuleType, str, str, str]] = [
    (
        "a step is made when all have committed it",
        "test_ps_rounds",
        rounds,
        "StepProtocol",
        "if self.committed != self.members:",
        "if not self.committed:",
    ),
    (
        "a step counts as complete when all have prepared it",
        "test_ps_rounds",
        rounds,
        "StepProtocol",
        "self.complete = self.prepared == self.members",
        "self.complete = bool(self.prepared)",
    ),
    (
        "an open step is made when all hold its state, and not before",
        "test_ps_rounds",
        rounds,
        "StepProtocol",
        "self.unresolved = step\n            return []",
        "self.version = step\n            self._clear()\n            return [Effect.APPLY]",
    ),
    (
        "a step that survivors committed is not dropped",
        "test_ps_rounds",
        rounds,
        "StepProtocol",
        "step == self.version + 1 and self.complete",
        "False",
    ),
    (
        "what was staged for a dropped step is forgotten",
        "test_ps_rounds",
        rounds,
        "StepProtocol",
        "self._clear()\n            return [*undone, Effect.DROP]",
        "return [*undone, Effect.DROP]",
    ),
    (
        "a tried step of which nobody knows any more is undone",
        "test_ps_rounds",
        rounds,
        "StepProtocol",
        "undone = [Effect.ROLL_BACK] if self.tried else []",
        "undone = []",
    ),
    (
        "a range counts once in a chunk",
        "test_ps_ranges",
        ranges,
        "AppliedBatches",
        "if not self.intervals.add(number):\n            return False",
        "self.intervals.add(number)",
    ),
    (
        "the fastest waits for the slowest",
        "test_ps_ranges",
        leases,
        "Leases",
        "self.bound is not None and ahead > self.bound",
        "False",
    ),
    (
        "a step that is on its way counts for the bound",
        "test_ps_ranges",
        leases,
        "Leases",
        "under_way = sum(n in sent for n in own)",
        "under_way = 0",
    ),
    (
        "a range that is on its way is not given again",
        "test_ps_ranges",
        leases,
        "Leases",
        "first <= n < stop and n not in sent",
        "first <= n < stop",
    ),
    (
        "joiners start at the minimum",
        "test_ps_ranges",
        leases,
        "starting_clocks",
        "least = min(known, default=0)",
        "least = 0",
    ),
    (
        "two do not work on one range",
        "test_ps_ranges",
        leases,
        "Leases",
        "if number not in self.leased)",
        "if True)",
    ),
    (
        "a range that some chunk lacks is given out again",
        "test_ps_ranges",
        leases,
        "Leases",
        "missing = self.finished.missing(first, stop)",
        "missing = self.finished.missing(max(first, max(self.finished.to_json(), default=0)), stop)",
    ),
]


def machine_of(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_again", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def search(module: ModuleType, walks: int) -> None:
    for seed in range(walks):
        module.walk(module.Training(), Random(seed))


def without(module: ModuleType, name: str, old: str, new: str) -> Any:
    """The class or function `name` with one rule replaced."""
    source = textwrap.dedent(inspect.getsource(getattr(module, name)))
    assert source.count(old) == 1, f"{name} does not have the rule {old!r} any more"
    names = dict(vars(module))
    exec("from __future__ import annotations\n" + source.replace(old, new), names)
    return names[name]


@pytest.mark.parametrize("test", ["test_ps_rounds", "test_ps_ranges"])
def test_with_all_rules_the_search_finds_nothing(test: str) -> None:
    search(machine_of(test), WALKS // 10)


@pytest.mark.parametrize(
    ("test", "module", "name", "old", "new"),
    [row[1:] for row in TAKEN_OUT],
    ids=[row[0] for row in TAKEN_OUT],
)
def test_without_the_rule_something_breaks(
    test: str, module: ModuleType, name: str, old: str, new: str
) -> None:
    machine = machine_of(test)
    setattr(machine, name, without(module, name, old, new))
    with pytest.raises((AssertionError, rounds.StepProtocolError, leases.LeaseError)):
        search(machine, WALKS)
