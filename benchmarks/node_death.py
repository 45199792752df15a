"""How long training stands still when a machine loses power: with the coordinator, a worker, or a server.

    python -m benchmarks.node_death [--quick] [--json FILE]

The embedded cluster with Kubernetes' default times (leases renewed every 10 s, NotReady after 40 s), the
operator on a node of its own, and on three more nodes a job of three workers by all-reduce and one on two
parameter servers with two copies of everything. A node crashes: its processes are gone, its kubelet and its
addresses are silent (nothing is acknowledged, no connection is refused). Then it comes back.

* `coordinator_on_node_seconds`: the longest pause between two commits after the loss of the node that has the
  all-reduce job's coordinator and one of its workers; `worker_on_node_seconds`: that of one with a worker
  and no coordinator; `server_on_node_seconds`: that of one with a server of the other job (and no
  coordinator). Medians.
* `status_seconds`: from the crash until status says of a job that commits nothing that it does not
  train, and 0 samples/s; null where it never stood still for five seconds.
* `samples_lost`, `samples_repeated`: by the check that travels with the parameters, of both jobs.

Peers are null: with torchrun and torchft the same needs a rendezvous or lighthouse that is not on the node.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

Object = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = "default"
ALL_REDUCE, SERVERS = "digits", "digits-ps"
KINDS = ("coordinator", "worker", "server")
NODES = 4
PAUSE_SECONDS = 0.1
WINDOW_SECONDS = 10.0
"""Seconds after the first step of the generation without the node: a pause that begins within it still
counts.
"""
CALM_SECONDS = 4.0
GIVE_UP_SECONDS = 90.0
PEERS_REASON = "torchrun's rendezvous and torchft's lighthouse live outside of the job, on no node of theirs"


def until(seconds: float, what: str, attempt: Callable[[], Any]) -> Any:
    """Repeat until it is true. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while True:
        if result := attempt():
            return result
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.1)


def longest_pause(times: list[float], at: float) -> float:
    """Seconds between two commits in a row, of which the second came after `at`; `times` in order.

    Raises ValueError when none came before, or none after.
    """
    after = [moment for moment in times if moment > at]
    before = [moment for moment in times if moment <= at]
    if not before or not after:
        raise ValueError("no commit before the crash, or none after it: the pause cannot be measured")
    pairs = zip([before[-1], *after[:-1]], after, strict=True)
    return max(later - earlier for earlier, later in pairs)


class Job:
    """One TrainingJob on the embedded cluster, and the commits of its workers."""

    def __init__(self, kube: Any, name: str, steps: Path) -> None:
        from springtide_demo.commits import History
        from springtide_demo.steplog import StepLogs

        steps.mkdir()
        self.name = name
        self.kube = kube
        self._history, self._logs = History(), StepLogs(steps)
        kube.apply(manifest(name, steps), NAMESPACE)

    def history(self) -> Any:
        self._history.add(self._logs.poll())
        return self._history

    def status(self) -> Object:
        return dict(self.kube.job(NAMESPACE, self.name).get("status") or {})

    def pods(self, role: str) -> list[Object]:
        """Return the pods of a role that run and are not being deleted."""
        found = self.kube.pods(NAMESPACE, f"springtide.dev/job={self.name},springtide.dev/role={role}")
        return [
            pod
            for pod in found
            if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]

    def nodes(self, role: str) -> set[str]:
        return {pod["spec"]["nodeName"] for pod in self.pods(role)}

    def move(self, pod: Object, away_from: set[str]) -> None:
        """Delete a pod so that the one in its place is made on another node."""
        meta, role = pod["metadata"], pod["metadata"]["labels"]["springtide.dev/role"]
        count, path = len(self.pods(role)), f"/api/v1/namespaces/{NAMESPACE}/pods/{meta['name']}"
        for node in away_from:
            self._taint(node, [{"key": "springtide.dev/benchmark", "effect": "NoSchedule"}])
        try:
            self.kube.request("DELETE", path)

            def moved() -> bool:
                there = self.pods(role)
                return len(there) == count and meta["uid"] not in {p["metadata"]["uid"] for p in there}

            until(60, f"a pod in the place of {meta['name']}", moved)
        finally:
            for node in away_from:
                self._taint(node, [])

    def _taint(self, node: str, taints: list[Object]) -> None:
        merge = "application/merge-patch+json"
        self.kube.request("PATCH", f"/api/v1/nodes/{node}", {"spec": {"taints": taints}}, merge)

    def whole(self) -> bool:
        """Whether everything wanted is there and trains."""
        status = self.status()
        workers, servers = status.get("workers") or {}, status.get("parameterServers") or {}
        full = workers.get("desired") and workers.get("active") == workers["desired"]
        served = not servers or servers.get("ready") == servers["desired"]
        history, now = self.history(), time.time()
        newest = history.newest()
        if newest is None or now - newest.unix_time > 2.0:
            return False
        # Servers copy to each other after they have come.
        calm = now - history.first_commit[newest.generation] > CALM_SECONDS
        return bool(full and served and calm and status.get("state") == "Running")


def manifest(name: str, steps: Path) -> Object:
    from springtide_demo.kube import load
    from springtide_demo.manifest import read_sample, with_step_logs

    file = {ALL_REDUCE: "digits-allreduce", SERVERS: "digits-ps"}[name]
    job = read_sample(load(ROOT / f"deploy/samples/{file}.yaml")).job
    container = job["spec"]["workers"]["template"]["spec"]["containers"][0]
    ours = {"DIGITS_EPOCHS": "100000", "DIGITS_PAUSE_SECONDS": str(PAUSE_SECONDS)}
    container["env"] = [e for e in container.get("env") or [] if e["name"] not in ours]
    container["env"] += [{"name": key, "value": value} for key, value in ours.items()]
    count = 3 if name == ALL_REDUCE else 2
    job["metadata"]["name"] = name
    job["spec"]["workers"] |= {"replicas": count, "minReplicas": 1, "maxReplicas": count + 1}
    return with_step_logs(job, steps)


class StatusWatch:
    """Looks at a job's status beside everything else, and remembers when it first told of a standstill."""

    def __init__(self, job: Job, at: float) -> None:
        self.told_after: float | None = None
        self._job, self._at = job, at
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_for_ever, daemon=True)
        self._thread.start()

    def stop(self) -> float | None:
        self._over.set()
        self._thread.join(15)
        return self.told_after

    def _look_for_ever(self) -> None:
        while not self._over.wait(0.1) and self.told_after is None:
            status = self._job.status()
            conditions: list[Object] = status.get("conditions") or []
            running: Object = next((c for c in conditions if c["type"] == "Running"), {})
            still = running.get("status") != "True" and float(status.get("samplesPerSecond") or 0) == 0
            if still:
                self.told_after = time.time() - self._at
                print(f"  status after {self.told_after:.1f} s: {status.get('message')}", flush=True)


def choose(kind: str, jobs: dict[str, Job]) -> tuple[Job, str]:
    """The job whose pause counts, and the node to crash: also where that node has more than was asked for."""
    if kind == "coordinator":
        job = jobs[ALL_REDUCE]
        return job, min(job.nodes("coordinator"))
    role, job = ("worker", jobs[ALL_REDUCE]) if kind == "worker" else ("parameter-server", jobs[SERVERS])
    away = job.nodes("coordinator")
    found = [pod["spec"]["nodeName"] for pod in job.pods(role) if pod["spec"]["nodeName"] not in away]
    return job, min(found, key=lambda node: (found.count(node), node))


def arrange(kind: str, jobs: dict[str, Job]) -> None:
    """See to it that a node has what is to be lost, and not what must stay."""
    before = time.monotonic()
    _arrange(kind, jobs)
    if time.monotonic() - before > 1.0:
        time.sleep(CALM_SECONDS)  # a coordinator that was moved has found everybody


def _arrange(kind: str, jobs: dict[str, Job]) -> None:
    if kind == "server":
        job = jobs[SERVERS]
        if len(job.nodes("parameter-server")) < 2:
            job.move(job.pods("parameter-server")[0], away_from=job.nodes("parameter-server"))
        if job.nodes("coordinator") & job.nodes("parameter-server"):
            job.move(job.pods("coordinator")[0], away_from=job.nodes("parameter-server"))
    else:
        job = jobs[ALL_REDUCE]
        if kind == "worker" and not job.nodes("worker") - job.nodes("coordinator"):
            job.move(job.pods("worker")[0], away_from=job.nodes("coordinator"))
        if kind == "coordinator" and not job.nodes("worker") & job.nodes("coordinator"):
            every = {node["metadata"]["name"] for node in job.kube.request("GET", "/api/v1/nodes")["items"]}
            job.move(job.pods("coordinator")[0], away_from=every - job.nodes("worker"))


def strike(kind: str, jobs: dict[str, Job], cluster: Any) -> Object:
    """Crash one node and bring it back; what it cost."""
    whole = partial(until, 120, "both jobs to be whole", lambda: all(job.whole() for job in jobs.values()))
    whole()
    arrange(kind, jobs)
    whole()
    job, node = choose(kind, jobs)
    before = job.history().newest().generation
    at = time.time()
    cluster.crash_node(node)
    watch = StatusWatch(job, at)

    def caused() -> bool:
        newest = job.history().newest()
        return bool(newest.generation > before and newest.unix_time > at)

    try:
        until(GIVE_UP_SECONDS, f"a generation without node {node}", caused)
        time.sleep(WINDOW_SECONDS)
    finally:
        told = watch.stop()
        cluster.restore_node(node)
    times = sorted(commit.unix_time for commit in job.history().curve())
    pause = longest_pause(times, at)
    print(f"{kind} on {node}: {pause:.2f} s without a step", flush=True)
    return {"pause": pause, "status": told if pause > 5.0 else None}


@contextlib.contextmanager
def cluster_with_operator(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Start a cluster with default times, and the operator on a node that takes nobody else; with its API."""
    from springtide_demo.kube import Kube
    from springtide_demo.observe import pod_view
    from springtide_kube.errors import ApiRefusal
    from springtide_local.cluster import Cluster
    from springtide_local.settings import NodeTimes, Settings

    settings = Settings(nodes=NODES, times=NodeTimes(heartbeat=10.0, grace=40.0, toleration=300.0))
    with Cluster.start(folder, settings) as cluster, Kube(cluster.kubeconfig) as kube:
        for path in (*sorted((ROOT / "deploy/crd").glob("*.yaml")), ROOT / "deploy/operator.yaml"):
            _patiently(partial(kube.apply_file, path), ApiRefusal)
        operator = "springtide.dev/role=operator"
        until(
            60,
            "the operator to be ready",
            lambda: any(pod_view(pod).ready for pod in kube.pods("springtide-system", operator)),
        )
        for pod in kube.pods("springtide-system", operator):
            kube.cordon(pod["spec"]["nodeName"])
        yield cluster, kube


def measure(repeats: int, folder: Path) -> Object:
    """All figures; what could not be measured is null, with a reason."""
    found: dict[str, list[Object]] = {kind: [] for kind in KINDS}
    reason, data = None, []
    with cluster_with_operator(folder / "cluster") as (cluster, kube):
        jobs = {name: Job(kube, name, folder / name) for name in (ALL_REDUCE, SERVERS)}
        try:
            for _ in range(repeats):
                for kind in KINDS:
                    found[kind].append(strike(kind, jobs, cluster))
        except (TimeoutError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            print(reason, flush=True)
        try:
            end = time.time()
            until(60, "progress to be written", lambda: all(_after(j.status(), end) for j in jobs.values()))
            data = [job.status()["data"] for job in jobs.values()]
        except TimeoutError as error:
            reason = reason or str(error)
    return report(found, data, reason)


def report(found: dict[str, list[Object]], data: list[Object], reason: str | None) -> Object:
    """The figures that are written. data: the check's counts of each job; empty where none were heard."""
    result: Object = {}
    for kind in KINDS:
        pauses = [one["pause"] for one in found[kind]]
        result[f"{kind}_on_node_seconds"] = statistics.median(pauses) if pauses else None
        result[f"{kind}_on_node_seconds_max"] = max(pauses, default=None)
    told = [one["status"] for kind in KINDS for one in found[kind] if one["status"] is not None]
    result["status_seconds"] = statistics.median(told) if told else None
    for key in ("lost", "repeated"):
        result[f"samples_{key}"] = sum(counts[key] for counts in data) if data else None
    return {
        **result,
        "repeats": min(map(len, found.values())),
        "reason": reason,
        "torchrun": None,
        "torchft": None,
        "peers_reason": PEERS_REASON,
    }


def _after(status: Object, moment: float) -> bool:
    from datetime import datetime

    text = str(status.get("progressTime") or "1970-01-01T00:00:00Z")
    return datetime.fromisoformat(text).timestamp() > moment


def _patiently(attempt: Callable[[], Any], refusal: type[Exception]) -> None:
    """Repeat the attempt for half a minute: a kind is served only a moment after its CRD was taken."""
    deadline = time.monotonic() + 30
    while True:
        try:
            attempt()
            return
        except refusal:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one crash of each kind instead of five")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # what was started ends, too
    if sys.platform != "linux":
        sys.exit("benchmarks.node_death: the embedded cluster needs Linux")
    with tempfile.TemporaryDirectory() as folder:
        result = measure(1 if arguments.quick else 5, Path(folder))
    print(
        "  ".join(f"{kind} {_seconds(result[f'{kind}_on_node_seconds'])}" for kind in KINDS)
        + f"  status {_seconds(result['status_seconds'])}"
        + f"  repeated {result['samples_repeated']}  lost {result['samples_lost']}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} s"


if __name__ == "__main__":
    main()
