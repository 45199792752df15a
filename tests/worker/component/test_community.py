"""Scripts as their communities write them, changed by the guide, through a kill -9 and a join.

Each run of the suite has three cheap ones; `make community` has all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from community_scripts import BEYOND, MAX_LINES, SCRIPTS, changed_lines
from worker_cluster import WorkerCluster, Zygote

from springtide.coordination import outcome

SCRIPT = Path(__file__).parents[2] / "support" / "community_run.py"
CHEAP = ("dcgan", "quickstart", "resumable_stream")
ALL = os.environ.get("SPRINGTIDE_COMMUNITY") == "all"
CHOSEN = [name for name in SCRIPTS if ALL or name in CHEAP]
STRATEGIES = {
    "exact": {"SPRINGTIDE_STRATEGY": "AllReduce", "SPRINGTIDE_LOGICAL_WORKERS": "4"},
    "shards": {"SPRINGTIDE_STRATEGY": "AllReduce", "SPRINGTIDE_SHARD": "Gradients"},
    "ParameterServer": {"SPRINGTIDE_STRATEGY": "ParameterServer", "SPRINGTIDE_REPLICATION": "1"},
}
LIBRARIES = "accelerate lightning transformers" if ALL else ""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """Yield a zygote of processes whose sums may be exact."""
    imports = f"torchdata.stateful_dataloader {LIBRARIES}"
    zygote = Zygote(ZYGOTE_IMPORTS=imports, MKL_CBWR="AVX2,STRICT")
    yield zygote
    zygote.close()


def run_plainly(zygote: Zygote, name: str, folder: Path) -> dict[str, Any]:
    """Run a script as it is, in one process, over the samples in the order of the job."""
    log = folder / "plain.log"
    argv = [str(SCRIPT), str(folder), json.dumps({"script": name, "plain": True})]
    assert zygote.wait(zygote.fork({}, argv, log), 120.0) == 0, log.read_text()
    found: dict[str, Any] = json.loads((folder / "plain.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CHOSEN if not SCRIPTS[name].refused])
def test_script_ends_as_alone_through_kill_and_join(
    name: str, new_cluster: Callable[..., WorkerCluster], zygote: Zygote, tmp_path: Path
) -> None:
    """One of two dies in a backward pass of the first epoch, and one joins in the second."""
    script = SCRIPTS[name]
    for module in script.imports:
        pytest.importorskip(module)
    wanted = run_plainly(zygote, name, tmp_path)
    cluster = new_cluster({"script": name}, script=SCRIPT)
    killed, second = cluster.start(2, faults={0: "backward:4:kill"})
    cluster.until_step(script.join_at, second)
    joiner = cluster.add()
    cluster.until_done(second, joiner)
    assert killed.code == -9, cluster.logs()
    found = []
    for worker in (second, joiner):
        assert isinstance(worker.outcome(), outcome.Finished), cluster.logs()
        result = worker.result()
        assert result is not None, cluster.logs()
        found.append(result)
    assert joiner.commits(), "it came too late to have a part in the job"
    assert found[0]["digest"] == found[1]["digest"], cluster.logs()
    if script.tolerance is not None:
        assert found[0]["values"] == pytest.approx(wanted["values"], abs=script.tolerance), cluster.logs()
    if script.learned is not None:
        assert max(wanted["loss"], found[0]["loss"], found[1]["loss"]) <= script.learned


@pytest.mark.skipif(not ALL, reason="make community has the other strategies")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_joiner_passes_ended_loops_in_each_strategy(
    strategy: str, new_cluster: Callable[..., WorkerCluster]
) -> None:
    """Behind each loop the script uses its last loss."""
    cluster = new_cluster({"script": "quickstart"}, script=SCRIPT, environment=STRATEGIES[strategy])
    cluster.servers_wanted = 2 if strategy == "ParameterServer" else 0
    _, second = cluster.start(2, faults={0: "backward:4:kill"})
    cluster.until_step(30, second)
    joiner = cluster.add()
    cluster.until_done(second, joiner)
    found = [worker.result() for worker in (second, joiner)]
    assert None not in found, cluster.logs()
    assert found[0]["digest"] == found[1]["digest"]
    assert joiner.log().count("last loss of the epoch") == 5


@pytest.mark.parametrize("name", [name for name in SCRIPTS if SCRIPTS[name].refused])
def test_refused_script_says_what_to_do(name: str, zygote: Zygote, tmp_path: Path) -> None:
    """A script is refused in its first step, in a job or alone."""
    log = tmp_path / "log"
    argv = [str(SCRIPT), str(tmp_path), json.dumps({"script": name})]
    assert zygote.wait(zygote.fork({}, argv, log), 120.0) == 1, log.read_text()
    *_, last = (line for line in log.read_text().splitlines() if "UsageError: " in line)
    assert SCRIPTS[name].refused in last


@pytest.mark.parametrize("name", SCRIPTS)
def test_few_lines_of_a_script_change(name: str) -> None:
    lines = changed_lines(name)
    assert lines == BEYOND[name] if name in BEYOND else 0 < lines <= MAX_LINES
