"""Each piece of code on a page is run by a test, or a list says why not; commands and manifests exist."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml
from chart_render import schema_errors
from page_code import CODE, NO_CODE, NOT_RUN, RUN_BY, Key, Piece, commands, pieces, pieces_of

from springtide.coordination import outcome
from springtide.launch.options import parse as launch_options
from springtide_cli.main import app
from springtide_local.api import schema
from springtide_local.api.errors import FieldError
from springtide_operator.api.crd import custom_resource_definition

ROOT = Path(__file__).resolve().parents[3]
KNOWN = RUN_BY | NOT_RUN
HERE = str(Path(__file__).relative_to(ROOT))
MANIFESTS = [piece for piece in pieces() if piece.language == "yaml" and piece.page != "docs/coming-from.md"]
COMMANDS = [
    (piece.page, command) for piece in pieces() if piece.language == "console" for command in commands(piece)
]
NODE = schema.compile_schema(custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
JOB = {
    "apiVersion": "springtide.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "digits", "namespace": "team"},
    "spec": {
        "workers": {
            "template": {"spec": {"containers": [{"name": "worker", "image": "me/train:1"}]}},
        }
    },
}
# Programs of others, whose arguments no test here knows.
FOREIGN = {"docker", "kind", "cosign", "curl", "source", "export", "."}


def named(piece: Piece) -> Key | None:
    return next((key for key in piece.keys if key in KNOWN), None)


def test_every_piece_of_code_is_run_or_says_why_not() -> None:
    assert {piece.language for piece in pieces()} <= {*CODE, *NO_CODE}
    missing = [piece.keys[0] for piece in pieces() if piece.language in CODE and named(piece) is None]
    assert missing == [], "name them in tests/support/page_code.py"
    assert len([piece for piece in pieces() if piece.language in CODE]) > 130


def test_the_list_names_no_piece_that_is_gone() -> None:
    assert set(RUN_BY) & set(NOT_RUN) == set()
    assert set(KNOWN) - {named(piece) for piece in pieces()} == set()
    assert [key for key, why in NOT_RUN.items() if len(why.split()) < 3] == []


# The reference has signatures, which are no programs.
PYTHON = [piece for piece in pieces() if piece.language == "python" and piece.page != "docs/reference.md"]


@pytest.mark.parametrize("piece", PYTHON, ids=lambda piece: f"{piece.page} {piece.heading}")
def test_python_on_pages_is_python(piece: Piece) -> None:
    compile(textwrap.dedent(piece.text), piece.page, "exec")


@pytest.mark.parametrize("test", sorted(set(RUN_BY.values())))
def test_the_tests_that_run_pieces_read_their_pages(test: str) -> None:
    text = (ROOT / test).read_text()
    pages = {Path(key[0]).name for key, name in RUN_BY.items() if name == test}
    if test == HERE:
        assert "pieces()" in text
    else:
        assert [page for page in sorted(pages) if page not in text] == []


# ---- manifests


def without_dots(value: Any) -> Any:
    """Return a manifest without what `...` stands for."""
    if isinstance(value, dict):
        return {key: without_dots(one) for key, one in value.items() if "..." not in (key, one)}
    return [without_dots(one) for one in value] if isinstance(value, list) else value


def merged(base: Any, more: Any) -> Any:
    if isinstance(base, dict) and isinstance(more, dict):
        return {key: merged(base.get(key), more.get(key, base.get(key))) for key in {*base, *more}}
    return copy.deepcopy(more if more is not None else base)


def job_of(text: str) -> dict[str, Any] | None:
    """Return the job that a piece of YAML is, or is a part of; None for another kind of object."""
    part = without_dots(yaml.safe_load(text))
    if set(part) <= {"apiVersion", "kind", "metadata", "spec", "status"}:
        return merged(JOB, part) if part.get("kind", "TrainingJob") == "TrainingJob" else None
    if "failurePolicy" in part:
        return merged(JOB, {"spec": part})
    if "command" in part or "env" in part:
        container = {"name": "worker", "image": "me/train:1", **part}
        return merged(JOB, {"spec": {"workers": {"template": {"spec": {"containers": [container]}}}}})
    return None


def problems(job: dict[str, Any]) -> list[str]:
    """Return what the API server would say about a job."""
    job, unknown, found = copy.deepcopy(job), list[str](), list[FieldError]()
    schema.prune(NODE, job, "", unknown, root=True)
    schema.apply_defaults(NODE, job)
    schema.validate(NODE, job, "", found)
    return [f"unknown field {path}" for path in unknown] + [str(error) for error in found]


@pytest.mark.parametrize("piece", MANIFESTS, ids=lambda piece: f"{piece.page} {piece.heading}")
def test_manifests_on_pages_are_accepted(piece: Piece) -> None:
    job = job_of(piece.text)
    if job is not None:
        assert problems(job) == []
        return
    part = yaml.safe_load(piece.text)
    if "kind" in part:
        assert schema_errors(part, "1.31.0") == []
        return
    values = merged(yaml.safe_load((ROOT / "charts/springtide/values.yaml").read_text()), part)
    jsonschema.validate(values, json.loads((ROOT / "charts/springtide/values.schema.json").read_text()))


def test_a_wrong_field_of_a_manifest_is_found() -> None:
    assert problems(merged(JOB, {"spec": {"wokers": 1}})) == ["unknown field spec.wokers"]
    assert "spec.workers.replicas" in problems(merged(JOB, {"spec": {"workers": {"replicas": "x"}}}))[0]
    (piece,) = pieces_of("docs/exact.md", "yaml")
    job = job_of(piece.text)
    assert job is not None
    assert job["spec"]["strategy"]["allReduce"] == {"exact": True, "logicalWorkers": 8}
    assert job["spec"]["workers"].keys() == {"replicas", "minReplicas", "maxReplicas", "template"}


def test_launcher_in_manifests_takes_its_arguments() -> None:
    found = 0
    for piece in pieces_of("docs/launch.md", "yaml"):
        job = job_of(piece.text)
        assert job is not None
        command = job["spec"]["workers"]["template"]["spec"]["containers"][0]["command"]
        if command[:2] == ["springtide", "launch"]:
            assert launch_options(command[2:]).command == ("python", "train.py")
            found += 1
    assert found == 1


def test_outcomes_on_the_page_are_what_workers_write() -> None:
    (piece,) = pieces_of("docs/architecture.md", "json")
    decoder, left, kinds = json.JSONDecoder(), piece.text.strip(), list[str]()
    while left:
        said, end = decoder.raw_decode(left)
        read = outcome.parse(json.dumps(said))
        assert read is not None
        assert json.loads(outcome.to_json(read)) == said
        kinds.append(type(read).__name__)
        left = left[end:].strip()
    assert Counter(kinds) == {"Finished": 1, "Left": 2, "Failed": 1}


# ---- commands


def outer_and_inner(command: str) -> tuple[str, list[str]]:
    """Return a line with `$(...)` and `<(...)` replaced by a word, and what stood in them."""
    outer, inner, position = "", list[str](), 0
    while opening := re.search(r"[$<]\(", command[position:]):
        begin = position + opening.end()
        depth, quote, end = 1, "", begin
        while depth:
            letter = command[end]
            if quote or letter in "'\"":
                quote = "" if letter == quote else quote or letter
            else:
                depth += {"(": 1, ")": -1}.get(letter, 0)
            end += 1
        outer += command[position : position + opening.start()] + "SUBSTITUTED"
        inner.append(command[begin : end - 1])
        position = end
    return outer + command[position:], inner


def simple(command: str) -> Iterator[list[str]]:
    """Yield the simple commands of a line: of pipes, lists and substitutions."""
    outer, inner = outer_and_inner(command)
    for inside in inner:
        yield from simple(inside)
    part: list[str] = []
    for word in [*shlex.split(outer), "&&"]:
        if word in ("&&", "|", "&", ";"):
            if part and not re.fullmatch(r"[A-Z_]+=.*", part[0]):
                yield part
            part = []
        else:
            part.append(word)


def parsed(arguments: list[str]) -> str:
    """Parse a `springtide` command as it would be, without running it, and return its name."""
    command: Any = typer.main.get_command(app)
    left = list(arguments)
    while hasattr(command, "commands"):
        command = command.commands[left.pop(0)]  # options come after the command
    command.make_context("springtide", left)
    return str(command.name)


def chart_values(arguments: list[str]) -> dict[str, Any]:
    """Return the values that helm's `--set` arguments make."""
    found: dict[str, Any] = {}
    for option, value in pairwise(arguments):
        if option != "--set":
            continue
        path, _, text = value.partition("=")
        last: Any = text.strip("{}").split(",") if text.startswith("{") else yaml.safe_load(text)
        for name in reversed(path.split(".")):
            last = {name: last}
        found = merged(found, last)
    return found


def targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}: {text}" for page, text in COMMANDS])
def test_commands_on_pages_exist(page: str, command: str) -> None:
    for program, *arguments in simple(command):
        if program == "make":
            named = [word for word in arguments if re.fullmatch(r"[a-z0-9-]+", word)]
            assert named
            assert set(named) <= targets()
        elif program == "springtide":
            assert parsed(arguments)
        elif program == "python" and arguments[0] == "-m":
            assert importlib.util.find_spec(arguments[1]) is not None
        elif program == "helm":
            values = merged(
                yaml.safe_load((ROOT / "charts/springtide/values.yaml").read_text()), chart_values(arguments)
            )
            shown = json.loads((ROOT / "charts/springtide/values.schema.json").read_text())
            if "..." not in command:
                jsonschema.validate(values, shown)
        else:
            assert program in FOREIGN | {"kubectl", "python", "cat", "git", "base64"}, program
        for word in arguments:
            if re.match(r"(?:deploy|charts|examples|docs|tests)/", word) and not word.startswith(
                "deploy/springtide"
            ):
                assert (ROOT / word).exists(), word
