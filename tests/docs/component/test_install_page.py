"""docs/install.md, followed word by word on an embedded cluster; docker and kind are stand-ins, and the image
of workers has a shorter example.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from digits_alone import digits_alone
from forked_start import forked
from required import require_tool
from uncompiled import uncompiled

from springtide_local.cluster import Cluster
from springtide_local.settings import Settings

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[3]
COMMAND_SECONDS = 600
EXAMPLE = Path("examples/digits/train.py")
# Steps that wait, long enough for five workers and an upgrade: the page says nothing of how many there are.
EPOCHS, PAUSE = 12, 0.1


def commands(heading: str) -> list[str]:
    """Return the commands of a section's console blocks, lines that go on joined."""
    text = (ROOT / "docs" / "install.md").read_text()
    section = re.split(r"^## ", text.split(f"\n## {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    blocks = re.findall(r"^```console\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


@dataclass(frozen=True)
class Shell:
    """A user's terminal in the checkout, whose kubectl and helm mean the cluster."""

    env: dict[str, str]

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        return done.stdout


def shorter_example(root: Path) -> None:
    """Write the example that the page trains, with EPOCHS epochs of slow steps, into an image's working
    directory.

    It begins without torch's compiler and scikit-learn.
    """
    text = (ROOT / EXAMPLE).read_text()
    for name, value in (("DIGITS_EPOCHS", EPOCHS), ("DIGITS_PAUSE_SECONDS", PAUSE)):
        text, changed = re.subn(rf'("{name}", )"\d+"', rf'\1"{value}"', text)
        assert changed == 1
    (root / EXAMPLE).parent.mkdir(parents=True)
    (root / EXAMPLE).write_text(uncompiled(digits_alone(text)))


@pytest.fixture(scope="module", autouse=True)
def begun() -> None:
    """Begin the fork server before a test that must leave no child behind."""
    with forked():
        return


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    for tool in ("kubectl", "helm", "make"):
        require_tool(tool)
    for name in ("docker", "kind"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> "{tmp_path}/calls"\n')
        program.chmod(0o755)
    shorter_example(tmp_path / "image")
    with forked():
        started = Cluster.start(tmp_path / "cluster", Settings(nodes=2, cpus="2", memory="4Gi"))
    with started as cluster:
        cluster.add_image("springtide/worker", Path(sys.executable), tmp_path / "image")
        path = f"{tmp_path}:{os.environ['PATH']}"
        yield Shell({**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "PATH": path})


@pytest.mark.slow
def test_page_followed_literally_installs_upgrades_and_removes(shell: Shell, tmp_path: Path) -> None:
    *installing, until_over = commands("kind")
    said = {command: shell.run(command) for command in installing}
    calls = (tmp_path / "calls").read_text()
    assert all(f"--target {image}" in calls for image in ("operator", "worker", "ps"))
    assert "kind load docker-image" in calls
    assert "digits" in said["kubectl get stj"]
    # While it trains.
    for command in commands("Upgrading"):
        shell.run(command)
    assert "condition met" in shell.run(until_over)
    for command in commands("Removing"):
        shell.run(command)
    # Deployments go at once, and their pods when the processes have ended.
    shell.run("kubectl wait --for=delete pods --all -n springtide-system --timeout=120s")
    left = shell.run("kubectl get pods,secrets,leases,deployments,services -n springtide-system -o name")
    assert left.split() == []
    assert "springtide" not in shell.run("kubectl get crds,clusterroles,clusterrolebindings -o name")
    assert shell.run("kubectl wait --for=delete pods -l springtide.dev/job --timeout=120s") == ""
