"""The commands of pages, typed as they stand, on an embedded cluster in the order of a job's life: README.md,
getting-started.md, install.md, life.md, operations.md, security.md, troubleshooting.md; then checkpoints.md.

`NODE` and addresses, which a page leaves to the reader, are put in, and the example is longer and slower.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from checkpoint_members import FOLDER, Members, state
from digits_alone import digits_alone
from forked_start import forked
from page_code import commands, pieces_of
from required import require_tool
from uncompiled import uncompiled

from springtide.data.cursor import Cursor
from springtide.data.ledger import Ledger
from springtide.train_step.buffers import Buffers
from springtide.train_step.state import Position, State, names_in_state_dict
from springtide_local.cluster import Cluster
from springtide_local.settings import Settings

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the embedded cluster runs on Linux only"),
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = Path("examples/digits/train.py")
COMMAND_SECONDS = 300
WORKERS = "pods -l springtide.dev/role=worker"
EPOCHS = 10_000  # the job outlasts the pages
PAUSE = 0.1  # seconds; five workers would else keep all processors busy while commands are typed


@dataclass
class Terminal:
    """A reader's bash in the checkout.

    Attributes:
        env: its variables.
        cluster: the embedded cluster that its commands mean.
    """

    env: dict[str, str]
    cluster: Cluster

    def run(self, command: str, codes: tuple[int, ...] = (0,)) -> str:
        """Run a line and return what it printed.

        Args:
            command: the line.
            codes: the exit codes that it may have.
        """
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        assert done.returncode in codes, f"$ {command}\n{done.stdout}"
        return done.stdout

    def get(self, path: str, of: str = "stj/digits") -> str:
        """Return a field of an object, "" where there is none."""
        return self.run(f"kubectl get {of} -o jsonpath='{{{path}}}'")

    def until(self, path: str, wanted: str) -> None:
        """Wait until a field of the job is as wanted."""
        wait = f"kubectl wait stj/digits --for=jsonpath='{{{path}}}'={wanted} --timeout=120s"
        said = self.run(wait, codes=(0, 1))
        assert "condition met" in said, f"{path} is not {wanted}: {said}\n{self.story()}"

    def until_pods(self, count: int) -> None:
        """Wait until the job has so many workers' pods, among them those that are about to go."""
        deadline = time.monotonic() + 120.0
        while (found := self.get(".items[*].kind", WORKERS).split()) != ["Pod"] * count:
            assert time.monotonic() < deadline, f"{len(found)} workers, not {count}:\n{self.story()}"
            time.sleep(1.0)

    def goes_on(self) -> None:
        """Wait until the job has committed some more steps."""
        wanted = int(self.get(".status.step")) + 20
        watch = """timeout 120 kubectl get stj/digits --watch -o jsonpath='{.status.step}{"\\n"}'"""
        watching = subprocess.Popen(["bash", "-c", f"exec {watch}"], env=self.env, stdout=PIPE, text=True)
        with watching:
            assert watching.stdout is not None
            reached = any(int(line) >= wanted for line in watching.stdout)
            watching.terminate()
        assert reached, f"no step {wanted}:\n{self.story()}"

    def story(self) -> str:
        return self.run("kubectl describe stj digits; kubectl get pods -o wide")


def section(page: str, heading: str) -> list[str]:
    """Return the commands below a heading of a page of docs/, or of README.md."""
    path = page if page == "README.md" else f"docs/{page}"
    return [line for piece in pieces_of(path, "console", heading) for line in commands(piece)]


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """The cluster is the one that `springtide local` finds; its workers' image has the other example."""
    require_tool("kubectl")
    folder = tmp_path_factory.mktemp("pages")
    text = (ROOT / EXAMPLE).read_text()
    text, changed = re.subn(r'("DIGITS_EPOCHS", )"\d+"', rf'\1"{EPOCHS}"', text)
    text, slowed = re.subn(r'os\.environ\.get\("DIGITS_PAUSE_SECONDS", "0"\)', f'"{PAUSE}"', text)
    assert (changed, slowed) == (1, 1)
    script = folder / "image" / EXAMPLE
    script.parent.mkdir(parents=True)
    script.write_text(uncompiled(digits_alone(text)))
    data = folder / "state/springtide/local"
    with forked():
        started = Cluster.start(data, Settings(nodes=4, cpus="4", memory="4Gi"))
    with started as cluster:
        cluster.add_image("springtide/worker", Path(sys.executable), folder / "image")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        state_home = {"XDG_STATE_HOME": str(folder / "state"), "HOME": str(folder), "COLUMNS": "200"}
        yield Terminal(
            {**os.environ, **state_home, "PATH": path, "KUBECONFIG": str(cluster.kubeconfig)}, cluster
        )


@pytest.fixture(scope="module", autouse=True)
def begun() -> None:
    """Begin the fork server before a test that must leave no child behind."""
    with forked():
        return


def test_first_commands_start_a_job(terminal: Terminal) -> None:
    readme, started = section("README.md", "On your machine"), section("getting-started.md", "Watch it")
    assert readme[0].startswith("make venv")  # made this environment
    *beginning, watch, scale, stop = readme[1:]
    assert started[: len(beginning)] == beginning
    assert section("install.md", "Without Helm") == [beginning[2]]
    local, export, *applying = beginning
    assert f"export KUBECONFIG={terminal.cluster.kubeconfig}" in terminal.run(local)
    assert export == "export KUBECONFIG=..."
    for command in applying:
        terminal.run(command)
    terminal.run("kubectl wait --for=condition=Running stj/digits --timeout=2m")
    terminal.until(".status.workers.summary", "3/3")
    assert "digits" in terminal.run(f"timeout 3 {watch}", codes=(124,))
    assert started[len(beginning)] == watch
    assert "digits-worker-0-0" in terminal.run(started[len(beginning) + 1])
    terminal.run(scale)
    assert terminal.get(".spec.workers.replicas") == "5"
    assert stop == "springtide local stop"


@pytest.mark.slow
def test_pages_for_operations_look_at_it(terminal: Terminal) -> None:
    state, describe, top, audit = section("operations.md", "Where to look first")
    assert "GOODPUT" in terminal.run(state)
    assert "Conditions:" in terminal.run(describe)
    assert "digits" in terminal.run(f"{top} --once")
    assert "exactly once" in terminal.run(audit)
    for command in section("troubleshooting.md", "Troubleshooting"):
        assert terminal.run(command.replace("NAME", "digits"))
    ready, over = section("operations.md", "Flux, Argo CD and kubectl wait")
    assert "condition met" in terminal.run(ready)
    assert "--for=condition=Succeeded" in over  # asked at the end, by another page's words
    for command in section("install.md", "The command line"):
        terminal.run(command.replace("fish | source", "fish > /dev/null"))
    for command in section("life.md", "Standbys"):
        terminal.run(command)


def test_timeline_is_read_with_the_token(terminal: Terminal) -> None:
    require_tool("curl")
    forward, secret, token, asked = section("security.md", "Who is asked for what")
    assert forward == "kubectl port-forward pod/digits-coordinator-1 9401 &"
    # The embedded cluster forwards no ports; its pods have addresses on this machine.
    address = terminal.get(".status.podIP", "pod/digits-coordinator-1")
    asked = asked.replace("127.0.0.1", address).replace("curl", "curl --silent --show-error --fail")
    assert '"generations"' in terminal.run(f"{secret}\n{token}\n{asked}")


@pytest.mark.slow
def test_suspended_job_resumes(terminal: Terminal) -> None:
    suspend, resume = section("life.md", "Suspend and resume")
    terminal.run(suspend)
    terminal.run("kubectl wait --for=condition=Suspended stj/digits --timeout=2m")
    terminal.run(resume)
    terminal.run("kubectl wait --for=condition=Running stj/digits --timeout=2m")


@pytest.mark.slow
def test_tutorial_takes_a_worker_away_and_adds_two(terminal: Terminal) -> None:
    """All commands of tutorial.md but those that wait for the job's end and stop the cluster."""
    start, export, nodes, *lines = (
        line for piece in pieces_of("docs/tutorial.md", "console") for line in commands(piece)
    )
    assert f"export KUBECONFIG={terminal.cluster.kubeconfig}" in terminal.run(start)
    assert export.startswith("export KUBECONFIG=$PWD/")
    assert terminal.run(nodes).count(" Ready ") == 4
    # The job is one of other pages: of five workers with other names and a standby, and with recoveries.
    terminal.run("kubectl scale stj/digits --replicas=3")
    terminal.run('kubectl patch stj digits --type=merge -p \'{"spec":{"workers":{"standby":0}}}\'')
    terminal.until_pods(3)
    terminal.until(".status.workers.summary", "3/3")
    terminal.goes_on()  # the same status that says so counts the changes before
    worker = terminal.get(".items[1].metadata.name", WORKERS)
    restarts = int(terminal.get(".status.restarts.total"))
    *disturbing, succeeded, values, audit, stop = lines
    for line in disturbing:
        here = line.replace("digits-worker-1-0", worker).replace(
            "restarts.total}'=1", f"restarts.total}}'={restarts + 1}"
        )
        terminal.run(here)
    assert terminal.get(".status.workers.summary") == "5/5"
    assert "condition=Succeeded" in succeeded
    assert "loss" in terminal.run(values)
    assert "exactly once" in terminal.run(audit)
    assert stop == "springtide local stop"


@pytest.mark.slow
def test_disturbances_of_the_first_page_are_survived(terminal: Terminal) -> None:
    delete, scale, drain, crash, kill, describe = section("getting-started.md", "Watch it")[-6:]
    terminal.until(".status.workers.summary", "5/5")
    worker = terminal.get(".items[0].metadata.name", WORKERS)
    terminal.run(delete.replace("digits-worker-0-0", worker))
    terminal.goes_on()
    terminal.run(scale)
    terminal.until(".status.workers.summary", "5/5")
    # Nodes where the operator and the coordinator run come last: without these it takes longer.
    apart = terminal.get(".items[*].spec.nodeName", "pods -A -l 'springtide.dev/role!=worker'").split()
    nodes = terminal.get(".items[*].metadata.name", "nodes").split()
    nodes.sort(key=lambda node: node in apart)
    for command, node in zip((drain, crash, kill), nodes, strict=False):
        assert "NODE" in command
        terminal.run(command.replace("NODE", node))
        terminal.goes_on()
    assert "WorkerPreempted" in terminal.run(describe)


def test_last_command_stops_the_cluster(terminal: Terminal) -> None:
    terminal.run(section("README.md", "On your machine")[-1])
    assert not terminal.cluster.running


def checkpoint(folder: Path) -> Path:
    """Write the checkpoint of a job as two workers would, and return the job's folder."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    saved_as = names_in_state_dict(model)
    kept = State(dict(model.named_parameters()), Buffers(model), [optimizer], {}, saved_as)
    writers = Members(folder, 2)
    try:
        position = Position(Cursor(1, 2, 3, 4), Ledger(stage=1, epoch=2, expected=10, count=3), 1.5)
        assert writers.save(state(5), kept.read(position, {})).error == ""
    finally:
        writers.close()
    return folder / FOLDER


def test_commands_of_the_page_read_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    saved = str(checkpoint(tmp_path / "saved"))
    address = re.compile(r"(?:s3://bucket/prefix|/checkpoints)/default-\w+-1a2b3c4d")
    programs = {"python": [sys.executable], "springtide": [sys.executable, "-m", "springtide_cli.main"]}
    lines = [line for piece in pieces_of("docs/checkpoints.md", "console") for line in commands(piece)]
    assert len(lines) == 5
    for number, line in enumerate(lines):
        program, *arguments = shlex.split(address.sub(saved, line))
        assert saved in arguments
        named = [word.replace("model.safetensors", f"{number}.safetensors") for word in arguments]
        with forked():
            done = subprocess.run(
                [*programs[program], *named],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=COMMAND_SECONDS,
                check=False,
            )
        assert done.returncode == 0, f"$ {line}\n{done.stderr}"
    assert {path.name for path in tmp_path.iterdir()} == {
        "saved",
        "2.safetensors",
        "3.safetensors",
        "gpt.dcp",
    }
