"""`springtide run --local` as a user sees it: the real cluster, operator, coordinator and a worker."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked_start import forked
from uncompiled import uncompiled

from springtide_local.cluster import Cluster

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the embedded cluster runs on Linux only"),
    pytest.mark.timeout(1200),
    pytest.mark.usefixtures("fork_server"),
]

Run = Callable[..., tuple[int, str]]

JOB = """
apiVersion: springtide.dev/v1alpha1
kind: TrainingJob
metadata: {{name: {name}}}
spec:
  failurePolicy: {{backoffLimit: 0}}
  workers:
    template:
      spec:
        containers:
        - name: worker
          image: springtide/worker:0.1.0
          command: [python, {script}]
"""

TRAIN = uncompiled("""
import springtide, torch
springtide.init()
model = torch.nn.Linear(3, 1)
model, optimizer = springtide.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for x, y in springtide.batches((torch.randn(40, 3), torch.randn(40, 1)), batch_size=10, epochs=3):
    with springtide.step():
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
print("the script's last line")
""")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs the command with a state directory of its own, and stops the cluster in it afterwards."""
    state = {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path), "COLUMNS": "200"}
    environment = {key: value for key, value in os.environ.items() if key != "KUBECONFIG"} | state

    def command(*arguments: str) -> tuple[int, str]:
        with forked():
            done = subprocess.run(
                [sys.executable, "-m", "springtide_cli.main", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                timeout=280,
            )
        return done.returncode, done.stdout

    yield command
    Cluster(tmp_path / "state" / "springtide" / "local").stop()


def write(folder: Path, name: str, script: str) -> str:
    (folder / f"{name}.py").write_text(script)
    (folder / f"{name}.yaml").write_text(JOB.format(name=name, script=folder / f"{name}.py"))
    return str(folder / f"{name}.yaml")


@pytest.mark.slow
def test_failure_leaves_the_cluster_and_a_success_runs_in_it(run: Run, tmp_path: Path) -> None:
    code, out = run(
        "run", write(tmp_path, "bad", "raise SystemExit('no such data: /data/digits')"), "--local"
    )
    assert code == 1, out
    assert "no such data: /data/digits" in out
    assert "the embedded cluster goes on: export KUBECONFIG=" in out

    code, out = run("follow", "bad", "--local")
    assert (code, "bad failed" in out) == (1, True), out

    code, out = run("run", write(tmp_path, "good", TRAIN), "--local", "--logs")
    assert code == 0, out
    assert "uses the embedded cluster that runs" in out
    assert "| the script's last line" in out
    assert "good succeeded after 12 steps" in out
    assert "samples: 120 seen, 0 repeated, 0 lost" in out
    assert run("local", "status")[0] == 0


def test_a_refused_job_takes_the_cluster_that_it_started_with_it(run: Run, tmp_path: Path) -> None:
    path = Path(write(tmp_path, "odd", ""))
    path.write_text(path.read_text().replace("workers:", "wokers: 1\n  workers:"))
    code, out = run("run", str(path), "--local")
    assert code == 2, out
    assert ".spec.wokers: field not declared in schema" in out
    assert "stopped the embedded cluster" in out
    assert run("local", "status")[0] == 3
