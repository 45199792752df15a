"""workers.processesPerPod: the pod's command, the sizes that the coordinator is told, members of one pod."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from coordinator_room import Room, info

from springtide_coordinator.membership import messages as say
from springtide_coordinator.membership.events import PodSeen, Synced
from springtide_coordinator.membership.messages import ParkReason, Standing
from springtide_operator.api.job import Job
from springtide_operator.api.reasons import END_FAILED
from springtide_operator.coordinator_connection import to_request
from springtide_operator.manifests.init_process import text
from springtide_operator.manifests.worker import TemplateError, worker_pod
from springtide_operator.plan.coordinator_sync import make_sync
from springtide_operator.plan.observation import Observation
from springtide_operator.plan.outcome import read_end


def job(processes: int, command: list[str] | None, **container: Any) -> Job:
    worker = {"name": "worker", "image": "w", **({"command": command} if command else {}), **container}
    sizes = {"replicas": 3, "minReplicas": 2, "maxReplicas": 5, "processesPerPod": processes}
    return Job.parse(
        {
            "metadata": {"name": "j", "namespace": "n", "uid": "12345678"},
            "spec": {"workers": {**sizes, "template": {"spec": {"containers": [worker]}}}},
        }
    )


def container(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = worker_pod(job, 0, 0, "10.0.0.1:7070")["spec"]["containers"][0]
    return found


def behind_init(container: dict[str, Any]) -> list[str]:
    """Return the command that the init process runs."""
    command: list[str] = container["command"]
    return command[command.index(text()) + 1 :]


def test_the_command_is_run_by_the_launcher() -> None:
    limits = {"resources": {"limits": {"cpu": "8"}}, "args": ["--lr", "0.1"]}
    made = container(job(4, ["python", "train.py"], **limits))
    assert behind_init(made) == ["springtide", "launch", "--processes", "4", "--", "python", "train.py"]
    assert made["args"] == ["--lr", "0.1"]
    env = {entry["name"]: entry.get("value") for entry in made["env"]}
    assert (env["OMP_NUM_THREADS"], env["SPRINGTIDE_PROCESSES"]) == ("2", "4")
    alone = container(job(1, ["python", "train.py"]))
    assert behind_init(alone) == ["python", "train.py"]
    assert "SPRINGTIDE_PROCESSES" not in {entry["name"] for entry in alone["env"]}
    for own in (["/opt/bin/springtide", "launch", "--", "x"], ["python", "-m", "springtide.launch", "x"]):
        assert behind_init(container(job(2, own))) == own
    with pytest.raises(TemplateError, match="container 'worker' has no command"):
        container(job(2, None))


def test_sizes_are_told_in_processes() -> None:
    request = to_request(make_sync(job(4, ["x"]), Observation(), 1, 0.0))
    assert (request.target, request.minimum, request.maximum) == (12, 8, 20)
    assert request.processes_per_pod == 4


def test_why_one_of_several_ended_is_the_workers_reason() -> None:
    def end(message: str) -> Any:
        state = {"terminated": {"exitCode": 137, "reason": "Error", "message": message}}
        return read_end({"status": {"phase": "Failed"}}, {"state": state})

    starved = end('{"outcome":"Failed","exception":"","message":"process 1 was killed","reason":"OOMKilled"}')
    assert (starved.kind, starved.reason, starved.message) == (
        END_FAILED,
        "OOMKilled",
        "process 1 was killed",
    )
    other = end('{"outcome":"Failed","exception":"E","message":"m","reason":"Whatever"}')
    assert (other.reason, other.message, other.exception) == ("Error", "E: m", "E")


class Pods(Room):
    """Members `w0.1`: process 1 of pod w0."""

    def __init__(self, pods: int, processes: int, minimum: int = 1) -> None:
        super().__init__(target=pods * processes, minimum=minimum * processes, maximum=8 * processes)
        self.processes = processes
        self.hear(*(f"w{number}" for number in range(pods)))

    def hear(self, *living: str) -> None:
        seen = tuple(PodSeen(uid, f"pod-{uid}", leave_by=self.leaving.get(uid, 0.0)) for uid in living)
        sizes = self.m.target, self.m.minimum, self.m.maximum
        self.feed(Synced(*sizes, seen, processes_per_pod=self.processes))

    def process(self, name: str, again: str = "", **fields: Any) -> str:
        pod, _, rank = name.partition(".")
        member = name + again
        self.hello(member, as_info=replace(info(pod), id=member, local_rank=int(rank)), **fields)
        return member

    def begin(self, *names: str) -> None:
        for name in names:
            self.process(name)
        for name in names:
            self.park(name)
        self.form()


def test_processes_of_a_pod_are_members_in_order_of_slots() -> None:
    pods = Pods(2, 2)
    for name in ("w1.0", "w0.1", "w1.1"):
        pods.process(name)
        pods.park(name)
    assert pods.number == 0
    assert pods.status.waiting_for == ("pod-w0",)  # one process of it is missing
    pods.process("w0.0")
    pods.park("w0.0")
    assert pods.members == ("w0.0", "w0.1", "w1.0", "w1.1")
    assert [member.label for member in pods.m.current.members][:2] == ["pod-w0", "pod-w0/1"]  # type: ignore[union-attr]


def test_others_of_a_pod_go_on_at_a_restart_also_at_minimum() -> None:
    pods = Pods(1, 3, minimum=1)
    pods.begin("w0.0", "w0.1", "w0.2")
    pods.lose("w0.1")
    for name in ("w0.0", "w0.2"):
        pods.park(
            name, ParkReason.REDUCTION_FAILED, at=None if pods.m.current is None else pods.m.current.base
        )
    assert pods.members == ("w0.0", "w0.2")
    held = pods.form()
    pods.process("w0.1", "again")
    pods.park("w0.1again")
    assert pods.told("w0.0", say.Boundary)
    for name in ("w0.0", "w0.2"):
        pods.park(name, ParkReason.BOUNDARY, at=held)
    assert pods.members == ("w0.0", "w0.1again", "w0.2")


def test_the_minimum_counts_pods() -> None:
    pods = Pods(2, 2, minimum=2)
    pods.begin("w0.0", "w0.1", "w1.0", "w1.1")
    base = pods.m.current.base  # type: ignore[union-attr]
    for name in ("w1.0", "w1.1"):
        pods.lose(name)
    for name in ("w0.0", "w0.1"):
        pods.park(name, ParkReason.REDUCTION_FAILED, at=base)
    pods.hear("w0")
    assert pods.status.reason == "BelowMinimum"
    assert pods.number == 1


def test_successor_proves_process_end_and_gone_pod_that_of_all() -> None:
    pods = Pods(2, 2)
    pods.begin("w0.0", "w0.1", "w1.0", "w1.1")
    base = pods.m.current.base  # type: ignore[union-attr]
    pods.process("w1.1", "again")
    assert [said.retry for said in pods.said["w1.1"] if isinstance(said, say.Refused)] == [False]
    assert pods.m.current is not None
    assert set(pods.m.current.lost) == {"w1.1"}  # not its neighbour
    pods.hear("w0")
    pods.lose("w1.0")
    for name in ("w0.0", "w0.1"):
        pods.park(name, ParkReason.DROPPED, at=base)
    pods.tick(1.0)
    assert pods.members == ("w0.0", "w0.1")
    assert pods.m.members["w0.0"].standing is Standing.ACTIVE


def test_pod_that_goes_takes_all_processes_at_one_boundary() -> None:
    pods = Pods(2, 2)
    pods.begin("w0.0", "w0.1", "w1.0", "w1.1")
    base = pods.m.current.base  # type: ignore[union-attr]
    pods.leaving["w1"] = pods.now + 60
    pods.hear("w0", "w1")
    for name in ("w0.0", "w0.1", "w1.0", "w1.1"):
        assert pods.told(name, say.Boundary)
        pods.park(name, ParkReason.BOUNDARY, at=base)
    assert pods.members == ("w0.0", "w0.1")
    for name in ("w1.0", "w1.1"):
        assert pods.last(name, say.Leave).reason == "its pod is going away"
