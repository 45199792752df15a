"""Messages that people see while members receive the state."""

from __future__ import annotations

from pathlib import Path

import pytest

from springtide_coordinator.hub import Hub
from springtide_coordinator.reply import answer_sync
from springtide_coordinator.settings import Options
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.names import Incarnation

GIB = 1 << 30


class Job:
    """Members of a hub that form a generation."""

    def __init__(self, folder: Path, size: int) -> None:
        options = Options(
            token="t", number=1, state_dir=folder, target=size, minimum=size, job="j", namespace="n"
        )
        self.hub = Hub(options, Incarnation(1), lambda: 1000.0)
        self.streams = {}
        for number in range(size):
            stream = self.streams[f"w{number}"] = self.hub.new_stream()
            member = pb.Member(id=f"w{number}", pod_uid=f"w{number}", pod_name=f"pod-w{number}", slot=number)
            self.hub.hello(stream, pb.Hello(protocol_version=1, member=member, standing=pb.STARTING))
            self.hub.receive(stream, pb.WorkerMessage(parked=pb.Parked(reason=pb.STANDBY)))
        living = [pb.Pod(uid=name, name=f"pod-{name}", started=True) for name in self.streams]
        self.word = pb.SyncRequest(
            target=size, minimum=size, maximum=size, living=living, observed=True, incarnation_number=1
        )
        self.message()

    @property
    def generation(self) -> pb.GenerationName:
        current = self.hub.membership.current
        assert current is not None
        return pb.GenerationName(incarnation=pb.Incarnation(number=1), number=current.name.number)

    def receives(self, name: str, done: int, total: int, generation: int = 0) -> None:
        told = pb.Transferring(
            generation=self.generation, holder="pod-w0", bytes_done=done, bytes_total=total
        )
        told.generation.number += generation
        self.hub.receive(self.streams[name], pb.WorkerMessage(transferring=told))

    def formed(self, name: str) -> None:
        formed = pb.WorkerMessage(formed=pb.Formed(generation=self.generation))
        self.hub.receive(self.streams[name], formed)

    def message(self) -> str:
        return answer_sync(self.hub, self.word).message


def test_who_has_how_much(tmp_path: Path) -> None:
    job = Job(tmp_path, 3)
    before = job.message()
    assert "is being formed" in before
    job.receives("w1", 3 * GIB, 12 * GIB)
    job.receives("w2", 0, 0)
    assert job.message() == (
        f"{before}; pod-w1 has 25 % of 12.0 GiB of state from pod-w0, pod-w2 waits for the state from pod-w0"
    )
    job.receives("w1", 6 * GIB, 12 * GIB)
    job.receives("w2", 0, 900, generation=1)
    assert "pod-w1 has 50 %" in job.message()
    assert "pod-w2 waits" in job.message(), "words about other generations count for nothing"
    job.formed("w1")
    assert "pod-w1" not in job.message()
    for name in ("w0", "w2"):
        job.formed(name)
    assert "state from" not in job.message()


def test_many_are_not_all_named(tmp_path: Path) -> None:
    job = Job(tmp_path, 6)
    for number in range(1, 6):
        job.receives(f"w{number}", 100, 500)
    assert job.message().endswith("pod-w3 has 20 % of 500 bytes of state from pod-w0, and 2 more receive it")


@pytest.mark.parametrize("said", [pb.Transferring(holder="x"), pb.Transferring(bytes_total=3)])
def test_a_word_without_a_generation_ends_the_stream(tmp_path: Path, said: pb.Transferring) -> None:
    job = Job(tmp_path, 2)
    job.hub.receive(job.streams["w1"], pb.WorkerMessage(transferring=said))
    assert job.streams["w1"].ended
