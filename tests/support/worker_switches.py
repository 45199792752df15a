"""Jobs that go over between common steps and ranges while they train."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Final

from worker_cluster import Worker, WorkerCluster
from worker_results import commits

from springtide_protocol import coordinator_pb2 as pb

TOGETHER: Final = pb.Consistency(mode="Synchronous")
FREE: Final = pb.Consistency(mode="Asynchronous")
ENDS: Final = "asked to stop at the end of the epoch"


def gate(path: Path, step: int) -> str:
    """A fault: whoever comes to this step's body waits there as long as the file exists."""
    path.write_text("120")
    return f"body:{step}:hold={path}"


def to_and_fro(cluster: WorkerCluster, folder: Path, count: int, *, each: int, steps: int) -> list[Worker]:
    """The `count` workers of a job of so many steps, eight in an epoch, that begins with common steps: it
    takes ranges from the middle of the first epoch to the end of the second, and then loses one of its two
    servers. each: workers that take a range together.
    """
    gates = {step: folder / f"gate-{step}" for step in (6, 12, 20)}
    held = ";".join(gate(path, step) for step, path in gates.items())
    workers = cluster.start(count, faults=dict.fromkeys(range(count), held))
    cluster.until_step(5)
    cluster.consistency = FREE
    cluster.until(lambda: "asked to stop after the step" in workers[0].log(), "the boundary")
    gates[6].unlink()
    cluster.until(lambda: commits(cluster)[11] == each, "ranges", slowly=False)
    cluster.consistency = TOGETHER
    cluster.until(lambda: ENDS in workers[0].log(), "the word")
    gates[12].unlink()
    cluster.until(lambda: commits(cluster)[19] == count, "common steps", slowly=False)
    cluster.until_settled()
    cluster.servers[0].kill()
    cluster.add_server(0)
    cluster.until(lambda: not cluster.servers[0].running, "the server's death")
    gates[20].unlink()
    cluster.until_done()
    together = [*range(1, 7), *range(17, steps + 1)]
    found = {step: count if step in together else each for step in range(1, steps + 1)}
    assert commits(cluster) == Counter(found)
    assert [worker.code for worker in workers] == [0] * count
    return workers
