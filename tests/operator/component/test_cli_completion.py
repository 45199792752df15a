"""kubectl's plugin, and what shells and kubectl complete, with the real kubectl where it is called."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cli_fake_kube import UNREACHABLE, FakeKube, job

from springtide_cli import completing, run
from springtide_cli.completing import for_kubectl
from springtide_cli.main import app

ROOT = Path(__file__).resolve().parents[3]
NO_FILES = ":4"
JOBS = "/apis/springtide.dev/v1alpha1/namespaces/{}/trainingjobs"


@pytest.fixture
def plugin(tmp_path: Path, require_tool: Callable[[str], str]) -> Callable[..., str]:
    """Call the real kubectl with the scripts that pyproject.toml names."""
    kubectl = require_tool("kubectl")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name in ("kubectl-springtide", "kubectl_complete-springtide"):
        module, function = scripts[name].split(":")
        script = tmp_path / name
        script.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT / 'operator')!r})\n"
            f"from {module} import {function}\n{function}()\n"
        )
        script.chmod(0o755)

    def call(*words: str) -> str:
        # An installed plugin of the same name would be one too many.
        others = (path for path in os.environ["PATH"].split(":") if not (Path(path) / script.name).exists())
        env = {**os.environ, "PATH": ":".join([str(tmp_path), *others]), "KUBECONFIG": str(tmp_path / "no")}
        done = subprocess.run([kubectl, *words], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


def test_kubectl_finds_the_plugin_and_its_usage_says_so(plugin: Callable[..., str]) -> None:
    assert "kubectl-springtide" in plugin("plugin", "list")
    assert "Usage: kubectl springtide follow" in plugin("springtide", "follow", "--help")
    assert "Usage: kubectl springtide checkpoint" in plugin("springtide", "checkpoint", "--help")


def test_kubectl_completes_commands_of_the_plugin(plugin: Callable[..., str]) -> None:
    assert plugin("__complete", "springtide", "fo").splitlines() == ["follow", NO_FILES]
    # No cluster answers: no name, and nothing else in the user's line.
    assert plugin("__complete", "springtide", "follow", "").splitlines() == [NO_FILES]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_scripts_ask_the_command(shell: str) -> None:
    argv = [sys.executable, "-m", "springtide_cli.main", "completion", shell]
    script = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout
    assert f"_SPRINGTIDE_COMPLETE=complete_{shell}" in script


@pytest.mark.parametrize(
    "asked",
    [
        {"_SPRINGTIDE_COMPLETE": "complete_zsh"},
        {"_SPRINGTIDE_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    ],
    ids=["zsh", "fish"],
)
def test_zsh_and_fish_are_answered(asked: dict[str, str]) -> None:
    """Ask as their scripts do: neither shell is here."""
    env = {**os.environ, **asked, "_TYPER_COMPLETE_ARGS": "springtide au"}
    argv = [sys.executable, "-m", "springtide_cli.main"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    assert "audit" in done.stdout, done.stderr
    assert "follow" not in done.stdout


def test_bash_completes_by_the_script(tmp_path: Path) -> None:
    command = tmp_path / "springtide"
    command.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT / 'operator')!r})\n"
        "from springtide_cli.entry import main\nmain()\n"
    )
    command.chmod(0o755)
    typed = (
        "source <(springtide completion bash); COMP_WORDS=(springtide au); COMP_CWORD=1;"
        ' _springtide_completion springtide; echo "${COMPREPLY[@]}"'
    )
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", typed], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["audit"], done.stderr


@pytest.fixture
def kube(monkeypatch: pytest.MonkeyPatch) -> FakeKube:
    """A cluster with jobs a1, a2 and b in namespace `default`, and c in `other`."""
    fake = FakeKube()
    for namespace, names in (("default", ("b", "a2", "a1")), ("other", ("c",))):
        fake.lists[JOBS.format(namespace)] = [[job(name=name) for name in names]]

    @asynccontextmanager
    async def on_cluster(options: run.Options) -> AsyncIterator[Any]:
        yield fake

    monkeypatch.setattr(run, "on_cluster", on_cluster)
    return fake


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["follow", "a"], ["a1", "a2"]),
        (["audit", ""], ["a1", "a2", "b"]),
        (["follow", "-n", "other", ""], ["c"]),
        (["follow", "x"], []),
        (["audit", "--sam"], ["--samples"]),
        (["completion", "z"], ["zsh"]),
    ],
    ids=str,
)
def test_words_are_completed(kube: FakeKube, words: list[str], found: list[str]) -> None:
    assert for_kubectl(app, words).splitlines() == [*found, NO_FILES]


def test_a_cluster_that_refuses_gives_no_names(kube: FakeKube, capfd: pytest.CaptureFixture[str]) -> None:
    kube.lists[JOBS.format("default")] = [UNREACHABLE]
    assert for_kubectl(app, ["follow", ""]) == f"{NO_FILES}\n"
    assert capfd.readouterr() == ("", "")


def test_a_cluster_that_hangs_is_not_waited_for(kube: FakeKube, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(600)

    monkeypatch.setattr(kube, "request", hang)
    monkeypatch.setattr(completing, "SECONDS", 0.05)
    began = time.monotonic()
    assert for_kubectl(app, ["follow", ""]) == f"{NO_FILES}\n"
    assert time.monotonic() - began < 60
