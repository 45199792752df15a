"""What the goodput benchmark computes from what it sees."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks import goodput
from springtide_demo.commits import Commit, Generation

ONE, TWO = Generation(1, 0, 1), Generation(1, 0, 2)


def commit(step: int, generation: Generation, at: float) -> Commit:
    return Commit(step, generation, at, 0.1, 10, None, "p")


def test_each_second_counts_by_the_size_of_the_group_that_commits_next() -> None:
    members = {ONE: {"a", "b"}, TWO: {"a"}}
    commits = [commit(1, ONE, 101.0), commit(2, ONE, 102.0), commit(3, TWO, 105.0)]
    rates = {1: 10.0, 2: 100.0}
    assert goodput.expected_samples(commits, members, rates, 100.0, 106.0) == pytest.approx(200 + 30 + 10)


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


def test_only_processes_that_nobody_aimed_at_are_survivors_that_restarted() -> None:
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
