"""The optimizer's step fails on real servers whenever it is tried, and what the job makes of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ps_failing
import pytest
from worker_checks import check
from worker_cluster import WorkerCluster
from worker_reference import Reference

from springtide.coordination import outcome

OPTIONS: dict[str, Any] = {"samples": 230, "batch": 32, "epochs": 7, "pace": 0.015, "clip_norm": 0.5}
_ADDRESS = r"at parameter server 127\.[\d.]+:7080"
_FAILED = r".*failed there: RuntimeError: no memory for it"
TOLD = re.compile(rf"newest values of .*weight {_ADDRESS}: {_FAILED}|: \d\..*: {_FAILED}.* {_ADDRESS}")
"""Parameters, server and error, from a server's refusal or from what is asked of all."""

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
@pytest.mark.parametrize("consistency", ["Synchronous", "Asynchronous"])
@pytest.mark.parametrize(("replication", "stored"), [(1, False), (2, False), (1, True)])
def test_step_failing_at_every_try_ends_workers_saying_where(
    new_server_cluster: Callable[..., WorkerCluster],
    tmp_path: Path,
    consistency: str,
    replication: int,
    stored: bool,
) -> None:
    environment = {"SPRINGTIDE_CONSISTENCY": consistency}
    if stored:
        (tmp_path / "volume").mkdir()
        environment |= {
            "SPRINGTIDE_CHECKPOINT_URI": str(tmp_path / "volume"),
            "SPRINGTIDE_CHECKPOINT_SECONDS": "0.05",
        }
    cluster = new_server_cluster(OPTIONS, 2, replication, environment=environment)
    cluster.server_programs = dict.fromkeys(range(2), Path(ps_failing.__file__))
    cluster.stands_still = False
    workers = cluster.start(2)
    cluster.until_done()
    for worker in workers:
        ended = worker.outcome()
        assert isinstance(ended, outcome.Failed), cluster.logs()
        assert ended.exception == "springtide.errors.ServerStepError", cluster.logs()
        assert TOLD.search(ended.message), ended.message
    assert cluster.reply is not None
    # Where there was something to go back to, they went back in the same processes. One that did not
    # hear of the first loss itself, since its generation had ended by then, goes back twice.
    went_back = cluster.reply.states_lost > 0
    assert went_back == (stored and consistency == "Synchronous"), cluster.logs()


@pytest.mark.slow
def test_one_failing_server_does_not_end_a_job_with_copies(
    new_server_cluster: Callable[..., WorkerCluster], reference: Reference
) -> None:
    cluster = new_server_cluster(OPTIONS, 2, 2)
    cluster.server_programs = {0: Path(ps_failing.__file__)}
    cluster.stands_still = False
    workers = cluster.start(2)
    cluster.until_done()
    check(cluster, reference, workers)
