import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from springtide_cli import main, run
from springtide_cli.manifest import Changes

runner = CliRunner()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def record(what: str, options: run.Options, console: object, *changes: Changes) -> int:
        calls.append((what, options, *changes))
        return 7

    monkeypatch.setattr(run, "run", record)
    monkeypatch.setattr(run, "follow", record)
    return calls


def test_version() -> None:
    result = runner.invoke(main.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"springtide {metadata.version('springtide')}\n")


def test_help_names_every_command() -> None:
    result = runner.invoke(main.app, ["--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in ("run", "follow", "local"))


def test_options_reach_the_commands_and_exit_codes_come_back(ran: list[tuple[Any, ...]]) -> None:
    full = [
        "run",
        "job.yaml",
        "--kubeconfig",
        "k",
        "--context",
        "c",
        "-n",
        "ns",
        "--logs",
        "--plain",
        "--force-conflicts",
    ]
    assert runner.invoke(main.app, full).exit_code == 7
    assert (
        runner.invoke(
            main.app, ["run", "job.yaml", "--local", "--keep", "--template", "small", "--standby", "2"]
        ).exit_code
        == 7
    )
    assert runner.invoke(main.app, ["follow", "digits", "-n", "ns"]).exit_code == 7
    assert ran == [
        ("job.yaml", run.Options("k", "c", "ns", logs=True, plain=True, force_conflicts=True), Changes()),
        ("job.yaml", run.Options(local=True, keep=True), Changes("small", 2)),
        ("digits", run.Options(namespace="ns")),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "a", "--local", "--context", "c"],
        ["run", "a", "--keep"],
        ["follow", "a", "--local", "--kubeconfig", "k"],
        ["nonsense"],
    ],
)
def test_wrong_options_are_2(arguments: list[str], ran: list[tuple[Any, ...]]) -> None:
    assert runner.invoke(main.app, arguments).exit_code == 2
    assert ran == []


def test_local_is_handed_on_with_all_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr("springtide_local.cli.app", lambda **given: called.append(given))
    assert runner.invoke(main.app, ["local", "node", "kill", "a", "--data", "x", "--help"]).exit_code == 0
    assert called == [
        {"args": ["node", "kill", "a", "--data", "x", "--help"], "prog_name": "springtide local"}
    ]


def test_local_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "springtide_local.cli", None)
    result = runner.invoke(main.app, ["local", "status"])
    assert result.exit_code == 2
    assert "pip install 'springtide[local]'" in result.output


def test_help_imports_nothing_heavy() -> None:
    heavy = ("aiohttp", "kubernetes", "springtide_local", "springtide_operator", "torch", "grpc")
    script = f"import sys, springtide_cli.main; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert out.stdout.strip() == "[]"


def test_the_app_is_a_typer_app() -> None:
    assert isinstance(main.app, typer.Typer)
