"""Figures that the goodput benchmark computes from its observations."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import goodput
from springtide_demo.commits import Commit, History
from springtide_operator.api.job import Job
from springtide_protocol.names import GenerationName

ONE, TWO = GenerationName.of(1, 0, 1), GenerationName.of(1, 0, 2)


def commit(step: int, generation: GenerationName, at: float) -> Commit:
    return Commit(step, generation, at, 0.1, 10, None, "p")


def test_second_counts_by_size_of_the_group_that_commits_next() -> None:
    members = {ONE: {"a", "b"}, TWO: {"a"}}
    commits = [commit(1, ONE, 101.0), commit(2, ONE, 102.0), commit(3, TWO, 105.0)]
    rates = {1: 10.0, 2: 100.0}
    assert goodput.expected_samples(commits, members, rates, 100.0, 106.0) == pytest.approx(200 + 30 + 10)


def test_figures_are_of_the_steps_of_the_trace_alone() -> None:
    history = History()
    history.add([commit(step, ONE, 99.0 + step) for step in range(1, 5)])
    final = {"data": {"repeated": 0, "lost": 3}, "lostSeconds": {"WorkerLost": "2.5"}}
    steps = goodput.StepSeconds()
    found = goodput.figures(history, steps, {1: 10.0}, 101.0, 103.0, {"WorkerLost": 0.5}, final, None)
    assert found["goodput"] == pytest.approx(3 * 0.1 / 2)
    assert found["throughput_ratio"] == pytest.approx(30 / 20)
    assert found["lost_seconds_by_cause"] == {"WorkerLost": 2.0}
    assert (found["samples_repeated"], found["samples_lost"], found["reason"]) == (0, 3, None)
    assert (found["median_step_seconds"], found["longest_pause_seconds"]) == (1.0, 1.0)
    late = goodput.figures(history, steps, {1: 10.0}, 200.0, 201.0, {}, {}, "no step came")
    assert (late["goodput"], late["throughput_ratio"], late["samples_lost"]) == (0.0, 0.0, None)


def test_step_takes_as_long_as_its_members_say_on_average() -> None:
    """One begins last and commits first: by it alone a third of the time would be missing."""
    steps, history = goodput.StepSeconds(), History()
    own = [Commit(1, ONE, 101.0, 0.2, 10, None, "a"), Commit(1, ONE, 101.01, 0.4, 10, None, "b")]
    steps.add(own)
    history.add(own)
    assert history.curve()[0].step_seconds == 0.2
    assert steps.total(history.curve()) == pytest.approx(0.3)


def test_every_size_is_measured_undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(goodput, "SETTLING_SECONDS", 0.0)
    monkeypatch.setattr(goodput, "CALIBRATION_SECONDS", 0.0)
    history = History()

    class Scaled:
        def scale(self, namespace: str, name: str, replicas: int) -> None:
            """Have so many workers train at once, with steps a second apart, from long after now on."""
            first, made = history.last_step + 1, GenerationName.of(1, 0, replicas)
            for step in (first, first + 1):
                for pod in range(replicas):
                    history.add([Commit(step, made, 1e12 + step, 0.1, 10 * replicas, None, f"p{pod}")])

    shares: dict[int, float] = {}
    found = goodput.rates(Scaled(), lambda: history, goodput.StepSeconds(), shares)
    assert list(found) == [1, 2, 3]
    assert found[1] == 10.0
    assert shares[3] == pytest.approx(0.1)


def test_the_job_is_one_of_ours(tmp_path: Path) -> None:
    made = goodput.manifest(tmp_path)
    made["metadata"] |= {"namespace": goodput.NAMESPACE, "uid": "uid", "generation": 1}
    job = Job.parse(made)
    assert job.name == goodput.JOB
    assert (job.spec.workers.replicas, job.spec.workers.min_replicas) == (goodput.SIZE, 1)
    assert job.spec.workers.standby == 1


def test_one_that_trains_is_killed_and_no_standby(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    monkeypatch.setattr(goodput.os, "kill", lambda pid, number: killed.append(pid))
    monkeypatch.setattr("springtide_local.strays.program_of", lambda pid: pid)
    kube = Kube()
    watch = goodput.Watch(kube)
    for number in range(4):
        kube.run(f"u{number}", "n1", 100 + number)
    dice = random.Random(0)
    kinds = iter(["kill"] * 20)
    pick = dice.choice
    dice.choice = lambda found: next(kinds) if "kill" in found else pick(found)  # type: ignore[method-assign]
    for _ in range(20):
        assert goodput.disturb(kube, watch, dice, frozenset({"pod-u1", "pod-u2"})) == "kill"
    assert set(killed) == {101, 102}


class Kube:
    """Pods as the API shows them."""

    def __init__(self) -> None:
        self.items: dict[str, dict[str, Any]] = {}

    def pods(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        return list(self.items.values())

    def pods_on(self, node: str) -> list[dict[str, Any]]:
        return [pod for pod in self.items.values() if pod["spec"]["nodeName"] == node]

    def run(self, uid: str, node: str, pid: int) -> None:
        state = {"containerID": f"process://{pid}", "state": {"running": {}}}
        self.items[uid] = {
            "metadata": {"name": f"pod-{uid}", "uid": uid, "namespace": goodput.NAMESPACE},
            "spec": {"nodeName": node},
            "status": {"phase": "Running", "containerStatuses": [state]},
        }

    def end(self, uid: str, pid: int) -> None:
        ended = {"containerID": f"process://{pid}", "exitCode": 1, "message": "ValueError"}
        self.items[uid]["status"]["containerStatuses"] = [{"state": {"terminated": ended}}]

    def cordon(self, node: str) -> None: ...

    def evict(self, namespace: str, name: str) -> None:
        del self.items[name.removeprefix("pod-")]


def test_only_untargeted_processes_count_as_restarted_survivors() -> None:
    kube = Kube()
    watch = goodput.Watch(kube)
    for number, node in enumerate(("n1", "n2", "n3", "n4")):
        kube.run(f"u{number}", node, 100 + number)
    assert len(watch.look()) == 4
    watch.aimed.add("u0")
    kube.end("u0", 100)
    watch.cordoned.add("n2")
    watch.look()
    del kube.items["u1"]
    watch.look()
    assert watch.innocent() == []
    kube.end("u2", 102)
    del kube.items["u3"]
    watch.look()
    assert [text.split(":")[0] for text in sorted(watch.innocent())] == ["pod-u2 ended", "pod-u3 is gone"]


def test_a_drain_aims_at_all_pods_of_its_node() -> None:
    kube = Kube()
    watch = goodput.Watch(kube)
    kube.run("u0", "n1", 2**22 + 1)
    kube.run("u1", "n1", 2**22 + 2)
    watch.look()
    dice = random.Random(0)
    dice.choice = lambda found: "drain" if "drain" in found else found[0]  # type: ignore[method-assign]
    assert goodput.disturb(kube, watch, dice) == "drain"
    assert (kube.items, watch.cordoned) == ({}, {"n1"})
    watch.look()
    assert (len(watch.ended), watch.innocent()) == (2, [])
