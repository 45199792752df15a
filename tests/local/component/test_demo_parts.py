"""The demo's parts that touch files and processes, and its manifest."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from springtide_demo import actions, reference, scenario
from springtide_demo.manifest import read_sample, with_step_logs
from springtide_demo.observe import pod_view
from springtide_demo.report import Promise
from springtide_demo.steplog import StepLogs
from springtide_demo.view import Snapshot, View, WorkerRow, sparkline
from springtide_kube.errors import ApiRefusal

RECORD = {
    "step": 1,
    "generation": 1,
    "incarnation": [1, 0],
    "time": 5.0,
    "step_seconds": 0.1,
    "samples": 8,
    "values": {"loss": 2.0},
}
JOB = {
    "kind": "TrainingJob",
    "metadata": {"name": "digits"},
    "spec": {
        "workers": {
            "template": {
                "spec": {
                    "containers": [
                        {
                            "command": ["python", "train.py"],
                            "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {}}],
                        }
                    ]
                }
            }
        }
    },
}


def test_a_line_counts_once_it_is_whole(tmp_path: Path) -> None:
    logs, path = StepLogs(tmp_path), tmp_path / "digits-worker-0-0.jsonl"
    assert logs.poll() == []
    text = json.dumps(RECORD)
    path.write_text(text + "\n" + text[:20])
    assert [(c.step, c.pod) for c in logs.poll()] == [(1, "digits-worker-0-0")]
    assert logs.poll() == []
    with path.open("a") as file:
        file.write(text[20:] + "\n")
    (tmp_path / "digits-worker-1-0.jsonl").write_text(text + "\n")
    assert [c.pod for c in logs.poll()] == ["digits-worker-0-0", "digits-worker-1-0"]


def test_the_sample_is_read_and_gets_a_step_log_and_nothing_else(tmp_path: Path) -> None:
    sample = read_sample([JOB])
    assert (sample.name, sample.command, sample.env) == ("digits", ["python", "train.py"], {"A": "1"})
    changed = with_step_logs(JOB, tmp_path)
    spec = changed["spec"]["workers"]["template"]["spec"]
    container = spec["containers"][0]
    assert container["env"][:2] == sample.job["spec"]["workers"]["template"]["spec"]["containers"][0]["env"]
    assert container["env"][2]["value"].startswith(
        container["volumeMounts"][0]["mountPath"] + "/$(SPRINGTIDE_POD_NAME)"
    )
    assert spec["volumes"][0]["hostPath"]["path"] == str(tmp_path)
    assert "volumes" not in JOB["spec"]["workers"]["template"]["spec"]


@pytest.mark.parametrize(("documents", "words"), [([], "one TrainingJob, not 0"), ([JOB, JOB], "not 2")])
def test_a_sample_without_its_job_is_refused(documents: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_sample(documents)


def script(tmp_path: Path, code: str) -> reference.ReferenceRun:
    (tmp_path / "train.py").write_text(code)
    return reference.start(["python", "train.py"], {"WORD": "here"}, tmp_path, tmp_path / "alone")


def test_undisturbed_run_has_this_python_and_manifests_env(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPRINGTIDE_COORDINATOR", "nobody:1")
    code = f"""
import json, os, sys
assert os.environ["WORD"] == "here" and sys.executable == {sys.executable!r}
assert "SPRINGTIDE_COORDINATOR" not in os.environ
record = {RECORD!r}
with open(os.environ["SPRINGTIDE_STEP_LOG"], "w") as file:
    for step in (2, 1):
        file.write(json.dumps(record | {{"step": step}}) + "\\n")
"""
    assert [c.step for c in script(tmp_path, code).curve(20.0)] == [1, 2]


def test_an_undisturbed_run_that_fails_shows_its_output(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"exit code 1:\n(.|\n)*ZeroDivisionError"):
        script(tmp_path, "1 / 0").curve(20.0)
    with pytest.raises(RuntimeError, match="wrote no step log"):
        script(tmp_path, "pass").curve(20.0)


def test_hanging_undisturbed_run_is_named_and_can_be_stopped(tmp_path: Path) -> None:
    run = script(tmp_path, "import threading; threading.Event().wait()")
    with pytest.raises(TimeoutError, match="not ended"):
        run.curve(0.1)
    assert not run.finished()
    run.stop()
    assert run.finished()


class FakeKube:
    """Records calls; evicting `refuses` fails as a disruption budget does."""

    def __init__(self, pods: list[dict[str, Any]], refuses: dict[str, int] | None = None) -> None:
        self.calls: list[tuple[str, ...]] = []
        self._pods, self._refuses = pods, refuses or {}

    def scale(self, namespace: str, name: str, replicas: int) -> None:
        self.calls.append(("scale", namespace, name, str(replicas)))

    def cordon(self, node: str) -> None:
        self.calls.append(("cordon", node))

    def pods_on(self, node: str) -> list[dict[str, Any]]:
        return [pod for pod in self._pods if pod["spec"]["nodeName"] == node]

    def evict(self, namespace: str, pod: str) -> None:
        if pod in self._refuses:
            raise ApiRefusal(self._refuses[pod], "", "no")
        self.calls.append(("evict", namespace, pod))


def pod(name: str, node: str, pid: int | None) -> dict[str, Any]:
    state = (
        {}
        if pid is None
        else {"containerStatuses": [{"containerID": f"process://{pid}", "state": {"running": {}}}]}
    )
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "namespace": "default"},
        "spec": {"nodeName": node},
        "status": state,
    }


def seen(*workers: dict[str, Any], coordinator: dict[str, Any] | None = None) -> actions.Seen:
    views = [pod_view(worker) for worker in workers]
    return actions.Seen(
        views, pod_view(coordinator) if coordinator else None, None, frozenset(v.name for v in views)
    )


def test_killing_kills_the_first_worker_that_trains() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        targets = seen(pod("digits-worker-1-0", "n", 1), pod("digits-worker-0-0", "n", process.pid))
        act = actions.carry_out(scenario.KILL_WORKER, FakeKube([]), "default", "digits", targets)  # type: ignore[arg-type]
        assert process.wait(timeout=60) == -9
    finally:
        process.kill()
        process.communicate()
    assert (act.uids, act.pid) == (frozenset({"uid-digits-worker-0-0"}), process.pid)
    with pytest.raises(actions.NotPossibleError, match="has just ended"):
        actions.carry_out(scenario.KILL_WORKER, FakeKube([]), "default", "digits", targets)  # type: ignore[arg-type]


def test_what_is_not_there_cannot_be_killed() -> None:
    for kind, what in (
        (scenario.KILL_WORKER, "worker"),
        (scenario.KILL_COORDINATOR, "coordinator"),
        (scenario.KILL_OPERATOR, "operator"),
    ):
        with pytest.raises(actions.NotPossibleError, match=f"no {what} process"):
            actions.carry_out(kind, FakeKube([]), "default", "digits", seen())  # type: ignore[arg-type]


def test_scaling_is_the_real_call() -> None:
    kube = FakeKube([])
    for kind in (scenario.SCALE_UP, scenario.SCALE_DOWN):
        actions.carry_out(kind, kube, "default", "digits", seen())  # type: ignore[arg-type]
    assert kube.calls == [("scale", "default", "digits", "5"), ("scale", "default", "digits", "2")]


def test_draining_cordons_first_and_evicts_everything_on_node() -> None:
    here = [pod("digits-worker-0-0", "node-1", 11), pod("gone", "node-1", None), pod("other", "node-1", 12)]
    kube = FakeKube([*here, pod("digits-worker-1-0", "node-2", 13)], refuses={"gone": 404})
    act = actions.carry_out(scenario.DRAIN_NODE, kube, "default", "digits", seen(here[0]))  # type: ignore[arg-type]
    assert kube.calls == [
        ("cordon", "node-1"),
        ("evict", "default", "digits-worker-0-0"),
        ("evict", "default", "other"),
    ]
    assert {"uid-digits-worker-0-0", "uid-other"} <= act.uids
    with pytest.raises(ApiRefusal):
        actions.carry_out(
            scenario.DRAIN_NODE, FakeKube(here, {"other": 429}), "default", "digits", seen(here[0])
        )  # type: ignore[arg-type]


def shown(terminal: bool) -> str:
    output = io.StringIO()
    with View(Console(file=output, force_terminal=terminal, width=120, highlight=False)) as view:
        view.say("kill-worker: explained")
        for _ in range(3):
            view.update(
                Snapshot(
                    "Running",
                    7,
                    100,
                    2,
                    1234.0,
                    0.5,
                    "",
                    [WorkerRow("digits-worker-0-0", "node-1", 4, "training")],
                    [1.0],
                )
            )
    view.verdict([Promise("held", "1", True), Promise("broken", "2", False)], ["report.json"])
    return output.getvalue()


def test_without_a_terminal_there_are_plain_lines_and_no_flood() -> None:
    text = shown(terminal=False)
    assert "\x1b" not in text
    assert text.count("step 7/100  generation 2  workers 1/1  1,234 samples/s  loss 0.5000") == 1
    assert "kill-worker: explained" in text
    assert [line.split()[0] for line in text.splitlines() if line.strip().startswith(("yes", "NO"))] == [
        "yes",
        "NO",
    ]


def test_on_a_terminal_there_is_a_panel() -> None:
    text = shown(terminal=True)
    assert "digits-worker-0-0" in text
    assert "kill-worker: explained" in text


def test_a_sparkline_scales_to_its_maximum() -> None:
    assert sparkline([0.0, 5.0, 10.0]) == "▁▅█"
    assert sparkline([0.0]) == "▁"
    assert sparkline([]) == ""
