"""The installed operator, two of it, on an embedded cluster on which everything goes wrong: drained nodes,
lost nodes, operators that die and that stop for longer than their lease, and all of it at random.

SPRINGTIDE_CHAOS_SECONDS: how long the random part lasts (25). SPRINGTIDE_CHAOS_SEED: its seed. Seeds that
once found something are kept in tests/support/operator_chaos_seeds.txt, and come first.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_cluster import OPERATOR_NAMESPACE, E2ECluster, cluster
from operator_fake_worker import FakeJob
from operator_faults import Faults, acting_operator, kill_process, process_of
from operator_journal import Journal, Seen, Watcher

from springtide_local.cluster import Cluster
from springtide_operator.plan.values import parse_time

SECONDS = float(os.environ.get("SPRINGTIDE_CHAOS_SECONDS") or 25)
SEEDS = Path(__file__).resolve().parents[2] / "support" / "operator_chaos_seeds.txt"
PATIENCE = 120.0

Object = dict[str, Any]

pytestmark = [
    pytest.mark.timeout(int(300 + 2 * SECONDS)),
    pytest.mark.skipif(
        bool(os.environ.get("SPRINGTIDE_E2E_KUBECONFIG")), reason="kills processes of the embedded cluster"
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chaos")


@pytest.fixture(scope="module")
def system(folder: Path) -> Iterator[E2ECluster]:
    with cluster(folder) as running:
        running.kubectl("scale", "deploy/springtide-operator", "-n", OPERATOR_NAMESPACE, "--replicas=2")
        running.kubectl("rollout", "status", "deploy/springtide-operator", "-n", OPERATOR_NAMESPACE)
        yield running


@pytest.fixture
def embedded(system: E2ECluster, folder: Path) -> Cluster:
    return Cluster(folder / "cluster")


@pytest.fixture
def job(system: E2ECluster) -> Iterator[FakeJob]:
    with system.namespace(f"chaos-{secrets.token_hex(3)}") as namespace:
        yield FakeJob(system, namespace, "fake")


def worker_nodes(job: FakeJob) -> set[str]:
    return {
        pod["spec"]["nodeName"]
        for pod in job.pods().values()
        if "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") == "Running"
    }


@pytest.mark.slow
def test_any_node_can_be_drained_within_a_minute(system: E2ECluster, job: FakeJob) -> None:
    job.start(replicas=3)
    job.until_running("0-0", "1-0", "2-0")
    first = next(iter(job.pods("coordinator").values()))["spec"]["nodeName"]
    for node in sorted((f"springtide-{n}" for n in range(3)), key=lambda name: name != first):
        began = time.monotonic()
        flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=60s")
        system.kubectl("drain", node, *flags, timeout=90)
        took = time.monotonic() - began
        print(f"drained {node} in {took:.1f} s")
        system.until(
            PATIENCE,
            f"three workers that are not on {node}",
            lambda node=node: len(job.running()) == 3 and node not in worker_nodes(job),
        )
        system.kubectl("uncordon", node)
    assert job.status()["restarts"]["failures"] == 0
    assert job.status()["coordinator"]["incarnation"] > 1


@pytest.mark.slow
def test_a_cordoned_node_is_left_for_another_one(system: E2ECluster, job: FakeJob) -> None:
    job.start(replicas=2, elasticity={"moveOnCordon": True})
    before = job.until_running("0-0", "1-0")
    node = next(iter(job.pods().values()))["spec"]["nodeName"]
    with Watcher(str(system.kubeconfig), job.namespace, "fake", Journal(maximum=6)) as watcher:
        system.kubectl("cordon", node)
        try:
            system.until(
                PATIENCE,
                f"two workers that are not on {node}",
                lambda: len(job.running()) == 2 and node not in worker_nodes(job),
            )
        finally:
            system.kubectl("uncordon", node)
        seen = watcher.journal
        left = {name for name in before if name not in job.running()}

        def gone() -> list[Seen]:
            return [pod for pod in seen.pods.values() if pod.end == "NodeCordoned"]

        system.until(PATIENCE, f"the watch to tell of {left}", lambda: {p.name for p in gone()} == left)
        for old in gone():
            new = next(pod for pod in seen.pods.values() if pod.slot == old.slot and pod.end is None)
            assert new.began < old.ended, "the replacement came first"
    assert job.status()["restarts"]["total"] == 0


@pytest.mark.slow
def test_lost_node_costs_its_workers_once_and_leaves_nothing(
    system: E2ECluster, embedded: Cluster, job: FakeJob
) -> None:
    """The template tolerates lost nodes for ever: Kubernetes itself would never move these workers."""
    forever = [{"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}]
    job.start(replicas=3, pod={"tolerations": forever})
    job.until_running("0-0", "1-0", "2-0")
    coordinators = {pod["spec"]["nodeName"] for pod in job.pods("coordinator").values()}
    node = sorted(worker_nodes(job) - coordinators or worker_nodes(job))[0]
    lost = {name for name, pod in job.pods().items() if pod["spec"]["nodeName"] == node}
    embedded.kill_node(node)
    try:
        system.until(
            2 * PATIENCE,  # the operators may be on that node, too
            f"three workers that are not on {node}",
            lambda: len(job.running()) == 3 and node not in worker_nodes(job),
        )
    finally:
        embedded.restore_node(node, timeout=60)
    system.until(PATIENCE, f"{sorted(lost)} to go", lambda: not lost & set(job.pods()))
    restarts = job.status()["restarts"]
    assert (restarts["failures"], restarts["preemptedWorkers"]) == (0, len(lost))


@pytest.mark.slow
def test_operators_that_stop_and_die_lose_and_repeat_nothing(system: E2ECluster, job: FakeJob) -> None:
    journal = Journal(maximum=6)
    with Watcher(str(system.kubeconfig), job.namespace, "fake", journal):
        job.start(replicas=3)
        job.until_running("0-0", "1-0", "2-0", seconds=PATIENCE)
        stopped = acting_operator(system)
        assert stopped is not None
        pid = kill_process(stopped, signal.SIGSTOP)
        assert pid is not None
        began = time.monotonic()
        try:
            pods = job.pods()
            kill_process(pods["fake-worker-0-0"])
            system.kubectl("delete", "pod", "fake-worker-1-0", "-n", job.namespace, "--wait=false")
            system.kubectl("scale", "stj/fake", "-n", job.namespace, "--replicas=4")
            job.until_running("0-1", "1-1", "2-0", "3-0", seconds=PATIENCE)
            print(f"taken over {time.monotonic() - began:.1f} s after the stop")
        finally:
            os.kill(pid, signal.SIGCONT)
        now_acting = acting_operator(system)
        assert now_acting is not None
        assert now_acting["metadata"]["uid"] != stopped["metadata"]["uid"]
        system.kubectl("scale", "stj/fake", "-n", job.namespace, "--replicas=5")
        job.until_running("0-1", "1-1", "2-0", "3-0", "4-0", seconds=PATIENCE)
        restarts = job.status()["restarts"]
        assert (restarts["failedWorkers"], restarts["preemptedWorkers"]) == (1, 1)

        assert process_of(now_acting) == kill_process(now_acting)
        kill_process(job.pods()["fake-worker-2-0"])
        job.until_running("0-1", "1-1", "2-1", "3-0", "4-0", seconds=PATIENCE)
        restarts = job.status()["restarts"]
        assert (restarts["failedWorkers"], restarts["preemptedWorkers"]) == (2, 1)
        system.until(PATIENCE, "the watch to tell of all", lambda: journal.knows(job.all_pods()))
    made = sorted(seen.name.removeprefix("fake-worker-") for seen in journal.pods.values())
    assert made == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1", "3-0", "4-0"]
    assert [seen.name for seen in journal.coordinators.values()] == ["fake-coordinator-1"]
    assert journal.broken == []


def kept_seeds() -> list[int]:
    lines = SEEDS.read_text(encoding="utf-8").splitlines() if SEEDS.exists() else []
    return [int(line.split("#")[0]) for line in lines if line.split("#")[0].strip()]


def seeds() -> list[int]:
    """The kept ones, then one more: a given one, a new one where somebody asked for more time, else 1."""
    given = os.environ.get("SPRINGTIDE_CHAOS_SEED")
    more = random.SystemRandom().randrange(1_000_000) if os.environ.get("SPRINGTIDE_CHAOS_SECONDS") else 1
    return list(dict.fromkeys([*kept_seeds(), int(given) if given else more]))


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds())
def test_whatever_happens_the_promises_hold_and_it_ends_well(
    system: E2ECluster, embedded: Cluster, job: FakeJob, seed: int
) -> None:
    journal = Journal(maximum=6)
    faults = Faults(system, embedded, job, seed, replicas=3, most=4)
    with Watcher(str(system.kubeconfig), job.namespace, "fake", journal):
        job.start(replicas=3, failurePolicy={"backoffLimit": 10000})
        job.until_running("0-0", "1-0", "2-0", seconds=PATIENCE)
        try:
            end = time.monotonic() + SECONDS / len(seeds())
            short_since = None
            while (now := time.monotonic()) < end:
                faults.strike()
                assert journal.broken == []
                enough = len(journal.live()) >= faults.replicas or faults.hindered() is not None
                short_since = None if enough else short_since or now
                assert short_since is None or now - short_since < PATIENCE / 2, "too few workers for too long"
                time.sleep(faults.random.choice((0.05, 0.3, 1.0, 2.0)))
            faults.heal()
            settle(system, job, faults)
            system.until(PATIENCE, "the watch to tell of all", lambda: journal.knows(job.all_pods()))
            journal.disturbed = faults.operator_times
            check_counts(job, journal)
            restarts = job.status()["restarts"]
            print(f"seed {seed}: {len(faults.log)} faults, {len(journal.pods)} workers, {restarts}")
        except AssertionError as error:
            keep(seed)
            story = "\n".join(faults.log)
            raise AssertionError(f"seed {seed} (kept in {SEEDS.name}): {error}\n{story}") from None
        finally:
            faults.heal()
    assert journal.broken == []


def settle(system: E2ECluster, job: FakeJob, faults: Faults) -> None:
    """Faults are over: as many workers as wanted, one coordinator, nothing left behind, nothing to tell."""

    def settled() -> bool:
        workers, coordinators, status = job.pods(), job.pods("coordinator"), job.status()
        leaving = [
            p for p in (*workers.values(), *coordinators.values()) if "deletionTimestamp" in p["metadata"]
        ]
        live = [p for p in workers.values() if p["status"].get("phase") == "Running"]
        slots = {p["metadata"]["labels"]["springtide.dev/slot"] for p in live}
        return (
            len(live) == len(slots) == faults.replicas
            and not leaving
            and len(coordinators) == 1
            and status["workers"]["replicas"] == status["workers"]["desired"] == faults.replicas
            and status["coordinator"]["reachable"]
            and job.condition("Degraded")["status"] == "False"
        )

    # The backoff of workers that were killed again and again may be minutes long by now.
    status = job.status()
    until = max((entry["until"] for entry in (status.get("backoff") or {}).values()), default=None)
    wait = max(0.0, (parse_time(until) or 0.0) - time.time())
    try:
        system.until(PATIENCE + wait, f"{faults.replicas} workers after everything was healed", settled)
    except AssertionError as error:
        raise AssertionError(f"{error}; pods: {sorted(job.pods())}; status: {job.status()}") from None


def check_counts(job: FakeJob, journal: Journal) -> None:
    """Every end is counted once, and a failure is a process that died."""
    restarts = job.status()["restarts"]
    counted = restarts["failedWorkers"] + restarts["preemptedWorkers"]
    least, most = journal.early()
    assert least <= counted <= most, (restarts, journal.pods)
    assert restarts["failedWorkers"] <= journal.died(), (restarts, journal.pods)
    assert restarts["failures"] <= restarts["failedWorkers"]
    assert restarts["preemptions"] <= restarts["preemptedWorkers"]


def keep(seed: int) -> None:
    if seed not in kept_seeds():
        with SEEDS.open("a", encoding="utf-8") as file:
            file.write(f"{seed}\n")
