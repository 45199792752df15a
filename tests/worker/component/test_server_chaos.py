"""Real workers, parameter servers and a real coordinator under faults from a seed, in all kinds of job with
servers, also in groups, while the consistency changes and while the line to a server is cut: whatever
survives has the numbers of an undisturbed run, and each sample counts once.

Seeds that once found something are kept in tests/support/server_chaos_seeds.txt.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from chaos_seeds import Seed, each_seed, seconds
from server_chaos import CUTS_FROM, ServerChaos
from server_chaos_jobs import ROUNDING, ROWS, SUMS, Job, job_of
from worker_checks import check
from worker_cluster import WorkerCluster, Zygote
from worker_reference import Reference, train_alone
from worker_results import check_equal

SECONDS = seconds(25)
SEEDS = Path(__file__).resolve().parents[2] / "support" / "server_chaos_seeds.txt"

pytestmark = pytest.mark.timeout(int(600 + 2 * SECONDS))


class References:
    """Undisturbed runs of the jobs that were drawn, each made once."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self._zygote, self._folder = zygote, folder
        self._found: dict[str, Reference] = {}

    def of(self, job: Job) -> Reference:
        key = json.dumps(job.options)
        if key not in self._found:
            folder = self._folder / str(len(self._found))
            folder.mkdir()
            self._found[key] = train_alone(self._zygote, folder, job.options)
        return self._found[key]


@pytest.fixture(scope="module")
def references(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(zygote, tmp_path_factory.mktemp("alone"))


def survive(zygote: Zygote, folder: Path, references: References, seed: Seed) -> str:
    """One job under the faults of this seed; what happened, in a line."""
    job = job_of(seed)
    reference = references.of(job)
    environment = {
        "SPRINGTIDE_STRATEGY": job.strategy,
        "SPRINGTIDE_CONSISTENCY": job.consistency,
        "SPRINGTIDE_REPLICATION": str(job.copies),
        "SPRINGTIDE_GROUP_SIZE": str(job.group),
    }
    if seed.version >= CUTS_FROM:
        environment["SPRINGTIDE_CONNECT_SECONDS"] = "2"
    if job.copies == 1:
        (folder / "volume").mkdir()
        environment |= {
            "SPRINGTIDE_CHECKPOINT_URI": str(folder / "volume"),
            "SPRINGTIDE_CHECKPOINT_SECONDS": "0.2",
        }
    cluster = WorkerCluster(zygote, folder, job.options, environment=environment)
    cluster.servers_wanted = 2
    chaos = ServerChaos(cluster, seed, job.copies, job.switches)
    try:
        chaos.begin()
        cluster.until(lambda: bool(chaos.anchor.commits()), "the anchor's first commit")
        until = time.monotonic() + 8.0
        while not cluster.finished() and time.monotonic() < until:
            time.sleep(chaos.random.choice((0.02, 0.1, 0.4, 0.8)))
            chaos.strike()
        chaos.heal()
        cluster.until(chaos.is_over, "the anchor's end", 60.0, slowly=False)
        chaos.end()
        finished = cluster.finished()
        assert chaos.anchor in finished, cluster.logs()
        if job.exact:
            check(cluster, reference, finished)
        else:
            [result, *_] = check_equal(cluster, finished, job.options)
            if job.options in (SUMS, ROWS):
                close = pytest.approx(reference.values, abs=ROUNDING)
                assert result["values"] == close, f"{cluster.logs()}\nnot each range once in each chunk"
        assert cluster.reply is not None
        number, lost = cluster.reply.generation.number, cluster.reply.states_lost
        assert not lost or job.copies == 1, cluster.logs()
        switches = sum("consistency" in deed for deed in chaos.log)
        cuts = sum(" off ps-" in deed for deed in chaos.log)
        done = f"{len(chaos.log)} deeds, {switches} switches, {cuts} lines cut"
        return f"{job}, {done}, generation {number}, {lost} states lost"
    except AssertionError as error:
        story = "\n".join(chaos.log)
        raise AssertionError(f"seed {seed} (kept in {SEEDS.name}), {job}:\n{story}\n{error}") from error
    finally:
        chaos.close()


@pytest.mark.slow
def test_whatever_happens_to_servers_and_workers_nothing_is_lost(
    zygote: Zygote, references: References, tmp_path: Path
) -> None:
    def one(seed: Seed) -> str:
        folder = tmp_path / str(seed).replace(":", "-")
        folder.mkdir()
        return survive(zygote, folder, references, seed)

    each_seed(SEEDS, SECONDS, one)
