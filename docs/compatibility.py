"""Generate docs/compatibility.md from the cases of the tests: `python docs/compatibility.py > FILE`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from community_scripts import SCRIPTS, changed_lines  # after its folder is on the path
from compatibility import CASES, STRATEGIES, Case

from springtide.integrations.accelerate import arguments as accelerate
from springtide.integrations.lightning import arguments as lightning
from springtide.integrations.transformers import arguments as transformers
from springtide.integrations.treatment import Field, Treatment

_HEAD = """\
# Which scripts work

Generated from the cases of the tests by `python docs/compatibility.py`.
Each script is written once, and trained by plain PyTorch in one process and by Springtide: two workers, and a
third that joins while they train (`make compatibility`, some minutes; each run of the tests has every case
under one of the strategies).
What is compared is every parameter and buffer after the last step.

* A number: the largest difference to plain PyTorch that is allowed; sums are added up in another order.
* *alike*: all workers end with the same bits, and the numbers depend on how many workers there are.
* *refused*: one sentence says why, and what to do.
"""
_COLUMNS = {
    "AllReduce": "AllReduce",
    "exact": "AllReduce, [exact](exact.md)",
    "shards": "AllReduce, [shards](sharding.md)",
    "exact shards": "AllReduce, exact and shards",
    "ParameterServer": "[ParameterServer](parameter-servers.md)",
}


_TRAINER = """\
## Hugging Face's TrainingArguments

Every field, for [`ElasticTrainer`](trainers.md); made of the table in
`springtide.integrations.transformers.arguments`.
A refused one is refused by name when the trainer is made, unless it has the value in parentheses.

| field | | |
|---|---|---|
"""


_LIGHTNING = """\

## Lightning's Trainer

Every argument, for [`SpringtideStrategy`](trainers.md#lightning); made of the table in
`springtide.integrations.lightning.arguments`.
A refused one is refused by name when `fit()` is called, unless it has the value in parentheses.

| argument | | |
|---|---|---|
"""
_CALLBACKS = """\

## Lightning's callbacks

Those that are refused, with classes derived from them.

| callback | why |
|---|---|
"""
_ACCELERATE = """\

## Accelerate's Accelerator

Every argument, for [`ElasticAccelerator`](trainers.md#accelerate); made of the table in
`springtide.integrations.accelerate.arguments`.
A refused one is refused by name when it is made, unless it has the value in parentheses.

| argument | | |
|---|---|---|
"""


_COMMUNITY = """\
## Scripts of communities

Whole scripts in the style of the tutorials and repositories that people begin with (`tests/community/`), and
how many of their lines change: lines added, removed or written anew, but not those that only move to the
right below a `with`.
Each runs under `AllReduce` with two workers, one of which is killed in the first epoch, and a third that
joins (`make community`; each run of the tests has three).
Where it says *alike*, random numbers in a step or statistics of a part of the batch are in the result.

| script | lines | result | |
|---|---|---|---|
"""


def _community() -> str:
    """Return the section on whole scripts."""
    rows = []
    for name, script in SCRIPTS.items():
        tolerance = "alike" if script.tolerance is None else f"{script.tolerance:.0e}".replace("e-0", "e-")
        outcome = "refused" if script.refused else tolerance
        lines = "" if script.refused else str(changed_lines(name))
        rows.append(f"| {script.title} | {lines} | {outcome} | {script.note} |\n")
    return "".join([_COMMUNITY, *rows, "\n"])


def _rows(fields: Mapping[str, Field]) -> str:
    """Return the rows of a table of arguments."""
    rows = []
    for treatment in Treatment:
        for name, field in fields.items():
            if field.treatment is treatment:
                only = f" ({field.allowed})" if field.allowed else ""
                rows.append(f"| `{name}` | {treatment}{only} | {field.note} |\n")
    return "".join(rows)


def _trainers() -> str:
    """Return the sections on the arguments of other libraries' trainers."""
    callbacks = "".join(f"| `{name}` | {why} |\n" for name, why in lightning.CALLBACKS.items())
    parts = [_TRAINER, _rows(transformers.FIELDS), _LIGHTNING, _rows(lightning.ARGUMENTS), _CALLBACKS]
    return "".join([*parts, callbacks, _ACCELERATE, _rows(accelerate.ARGUMENTS)])


def _outcome(case: Case, strategy: str) -> str:
    if case.refusal(strategy):
        return "refused"
    tolerance = case.tolerance_of(strategy)
    return "alike" if tolerance is None else f"{tolerance:.0e}".replace("e-0", "e-")


def markdown() -> str:
    """The page."""
    lines = [_HEAD]
    for group, cases in groupby(CASES.values(), key=lambda case: case.group):
        lines += [
            f"## {group}\n",
            "| script | " + " | ".join(_COLUMNS[strategy] for strategy in STRATEGIES) + " |",
            "|---" * (1 + len(STRATEGIES)) + "|",
        ]
        for case in cases:
            outcomes = " | ".join(_outcome(case, strategy) for strategy in STRATEGIES)
            lines.append(f"| {case.title} | {outcomes} |")
        lines.append("")
    return "\n".join(lines) + "\n" + _community() + _trainers()


if __name__ == "__main__":
    print(markdown(), end="")
