"""The cost of disturbances: the digits job under a seeded trace of kills, drains and returned nodes.

    python -m benchmarks.goodput [--quick] [--seed N] [--json FILE]

The embedded cluster with the operator, three workers and a standby (`--standby 0`: none) on four nodes.
Between two disturbances lie ten seconds on average (exponentially distributed): a worker that trains dies by
kill -9, a node is drained as `kubectl drain` does it
(its coordinator too, if it is there), a drained node returns. A step's work is a pause of 50 ms, as if an
accelerator computed: on few cores, workers that start would else take them from those that train.

* `goodput`: seconds of steps that survive over wall time, while the trace runs; a step's seconds are the mean
  of those that its members note. (That of the member that commits first is too short: it tends to be one that
  began last.) `goodput_undisturbed`: the same of three workers before it, which is what there is to have.
* `throughput_ratio`: samples of surviving steps over what undisturbed groups of the same sizes would have
  done in the same time; their rates are measured before.
* `lost_seconds_by_cause`: what `status.lostSeconds` gained.
* `samples_repeated`, `samples_lost`: by the check that travels with the parameters.
  Null, with a `reason`, where no step came within a minute after the trace.
* `survivor_restarts`: worker processes that ended although nobody aimed at them or their node.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

Object = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE = "default"
JOB = "digits"
WORKERS = "springtide.dev/job=digits,springtide.dev/role=worker"
SIZE = 3
NODES = 4
MEAN_SECONDS = 10.0
PAUSE_SECONDS = 0.05
CALIBRATION_SECONDS = 8.0
SETTLING_SECONDS = 2.0


def until(seconds: float, what: str, attempt: Callable[[], Any]) -> Any:
    """Repeat until it is true. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while True:
        if result := attempt():
            return result
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.1)


@dataclass
class StepSeconds:
    """Note how long each step took its members, in seconds."""

    noted: dict[tuple[Any, int], list[float]] = field(default_factory=dict)  # by generation and step

    def add(self, commits: Sequence[Any]) -> None:
        """Take in what members have noted."""
        for commit in commits:
            self.noted.setdefault((commit.generation, commit.step), []).append(commit.step_seconds)

    def total(self, curve: Sequence[Any]) -> float:
        """Return the seconds of some surviving steps, each the mean over its members."""
        return sum(statistics.fmean(self.noted.get((c.generation, c.step), [c.step_seconds])) for c in curve)


@dataclass
class Watch:
    """Worker processes as pods show them. `aimed`: uids of pods that a disturbance was meant for."""

    kube: Any
    seen: dict[str, tuple[str, str, int]] = field(default_factory=dict)  # uid: pod, node, pid
    ended: dict[str, str] = field(default_factory=dict)  # uid: how
    aimed: set[str] = field(default_factory=set)
    cordoned: set[str] = field(default_factory=set)

    def look(self) -> list[Any]:
        """The worker pods that run now; remembers what has ended since the last look."""
        from springtide_demo.observe import pod_view

        pods = {pod.uid: pod for pod in map(pod_view, self.kube.pods(NAMESPACE, WORKERS))}
        for uid, pod in pods.items():
            if pod.node in self.cordoned:
                self.aimed.add(uid)
            known = self.seen.get(uid)
            if pod.past_pids and uid not in self.ended:
                self.ended[uid] = f"{pod.name} ended: exit code {pod.exit_code}, {pod.message[:200]}"
            if pod.pid is not None and known is None:
                self.seen[uid] = (pod.name, pod.node, pod.pid)
        for uid in set(self.seen) - set(pods) - set(self.ended):
            self.ended[uid] = f"{self.seen[uid][0]} is gone"
        return [pod for pod in pods.values() if pod.pid is not None and not pod.leaving]

    def innocent(self) -> list[str]:
        """Return how those worker processes ended that nobody aimed at."""
        return [text for uid, text in self.ended.items() if uid in self.seen and uid not in self.aimed]


def disturb(kube: Any, watch: Watch, dice: random.Random, training: frozenset[str] = frozenset()) -> str:
    """Do one thing to the job.

    Args:
        kube: the cluster.
        watch: with what is known of the pods.
        dice: that decide what, and to whom.
        training: names of the pods that train, of which one is killed; empty: any.

    Returns:
        The kind of the event.

    Raises:
        ApiRefusal: the API server refuses it.
        ProcessLookupError: the process was gone.
    """
    from springtide_local.strays import program_of

    running = watch.look()
    kinds = ["kill", "kill", "kill"]
    kinds += ["drain", "drain"] if len(watch.cordoned) < 2 else []
    kinds += ["return", "return"] if watch.cordoned else []
    kind = dice.choice(kinds)
    if kind == "kill":
        if not running:
            return "nobody to kill"
        members = [pod for pod in running if pod.name in training] or running
        victim = dice.choice(sorted(members, key=lambda pod: str(pod.name)))
        watch.aimed.add(victim.uid)
        os.kill(program_of(victim.pid), signal.SIGKILL)
    elif kind == "drain":
        used = sorted({pod.node for pod in running} - watch.cordoned)
        if not used:
            return "nothing to drain"
        node = dice.choice(used)
        watch.cordoned.add(node)
        kube.cordon(node)
        watch.look()
        for pod in kube.pods_on(node):
            meta = pod["metadata"]
            if meta["namespace"] == NAMESPACE and "deletionTimestamp" not in meta:
                kube.evict(NAMESPACE, meta["name"])
    else:
        node = dice.choice(sorted(watch.cordoned))
        watch.look()
        watch.cordoned.remove(node)
        kube.request(
            "PATCH",
            f"/api/v1/nodes/{node}",
            {"spec": {"unschedulable": None}},
            "application/merge-patch+json",
        )
    return kind


def manifest(steps: Path, standby: int = 1) -> Object:
    """Return the job.

    Args:
        steps: a folder for the workers' logs of steps.
        standby: pods that wait beyond its workers.
    """
    from springtide_demo.kube import load
    from springtide_demo.manifest import read_sample, with_step_logs

    job = read_sample(load(ROOT / "deploy/samples/digits-allreduce.yaml")).job
    container = job["spec"]["workers"]["template"]["spec"]["containers"][0]
    ours = {"DIGITS_EPOCHS": "100000", "DIGITS_PAUSE_SECONDS": str(PAUSE_SECONDS)}
    container["env"] = [e for e in container.get("env") or [] if e["name"] not in ours]
    container["env"] += [{"name": name, "value": value} for name, value in ours.items()]
    sizes = {"replicas": SIZE, "minReplicas": 1, "maxReplicas": SIZE, "standby": standby}
    job["spec"]["workers"] |= sizes
    job["spec"]["failurePolicy"] = {"backoffLimit": 10000}
    return with_step_logs(job, steps)


def rates(
    kube: Any, history: Callable[[], Any], steps: StepSeconds, shares: dict[int, float]
) -> dict[int, float]:
    """Measure how the running job does undisturbed.

    Args:
        kube: the cluster.
        history: of the job's commits.
        steps: how long they took.
        shares: gets the seconds of steps over wall time, by number of workers.

    Returns:
        Samples per second by number of workers.
    """
    from springtide_demo.commits import samples_per_second

    found = {}
    for size in range(1, SIZE + 1):
        kube.scale(NAMESPACE, JOB, size)
        until(120, f"{size} workers to train", partial(_trains, history, size))
        time.sleep(SETTLING_SECONDS)
        start = time.time()
        time.sleep(CALIBRATION_SECONDS)
        commits = [c for c in history().curve() if c.unix_time >= start]
        found[size] = samples_per_second(commits)
        if len(commits) > 1:
            shares[size] = steps.total(commits[1:]) / (commits[-1].unix_time - commits[0].unix_time)
        print(f"undisturbed, {size} workers: {found[size]:.0f} samples/s", flush=True)
    return found


def expected_samples(
    commits: list[Any], members: Any, rate: dict[int, float], start: float, end: float
) -> float:
    """Return the samples that undisturbed groups would have done: each second at the rate of the group whose
    commit ends it.
    """
    total, at = 0.0, start
    for commit in commits:
        size = min(max(rate), len(members[commit.generation]))
        total += max(0.0, commit.unix_time - at) * rate[size]
        at = max(at, commit.unix_time)
    last = min(max(rate), len(members[commits[-1].generation]))
    return total + max(0.0, end - at) * rate[last]


def lost_seconds(status: Object) -> dict[str, float]:
    return {cause: float(seconds) for cause, seconds in (status.get("lostSeconds") or {}).items()}


def measure(seconds: float, seed: int, folder: Path, standby: int = 1) -> Object:
    """Run the job and its disturbances; return all figures.

    Args:
        seconds: of the disturbances.
        seed: of their trace.
        folder: for the cluster and logs.
        standby: pods that wait beyond the workers.
    """
    from springtide_demo.commits import History
    from springtide_demo.kube import Kube
    from springtide_demo.observe import pod_view
    from springtide_demo.steplog import StepLogs
    from springtide_kube.errors import ApiRefusal
    from springtide_local.cluster import Cluster
    from springtide_local.settings import Settings

    record, logs, steps = History(), StepLogs(folder / "steps"), StepSeconds()

    def history() -> History:
        found = list(logs.poll())
        record.add(found)
        steps.add(found)
        return record

    def status() -> Object:
        return dict(kube.job(NAMESPACE, JOB).get("status") or {})

    (folder / "steps").mkdir()
    with (
        Cluster.start(folder / "cluster", Settings(nodes=NODES)) as cluster,
        Kube(cluster.kubeconfig) as kube,
    ):
        for path in (*sorted((ROOT / "deploy/crd").glob("*.yaml")), ROOT / "deploy/operator.yaml"):
            _patiently(partial(kube.apply_file, path), ApiRefusal)
        until(
            60,
            "the operator to be ready",
            lambda: any(
                pod_view(p).ready for p in kube.pods("springtide-system", "springtide.dev/role=operator")
            ),
        )
        kube.apply(manifest(folder / "steps", standby), NAMESPACE)
        until(120, "the job to train", lambda: history().newest() is not None)
        shares: dict[int, float] = {}
        rate = rates(kube, history, steps, shares)
        until(
            120,
            "standbys to be ready",
            lambda: (status().get("standby") or {}).get("ready", 0) >= standby,
        )
        dice, watch, events = random.Random(seed), Watch(kube), Counter[str]()
        watch.look()
        before, restarts = lost_seconds(status()), status().get("restarts") or {}
        start = time.time()
        due = start + dice.expovariate(1 / MEAN_SECONDS)
        while time.time() < start + seconds:
            if time.time() >= due:
                try:
                    kind = disturb(kube, watch, dice, history().active())
                except (ApiRefusal, ProcessLookupError) as error:
                    kind = f"failed: {type(error).__name__}"
                events[kind] += 1
                print(f"{time.time() - start:6.1f} s  {kind}", flush=True)
                due = time.time() + dice.expovariate(1 / MEAN_SECONDS)
            watch.look()
            history()
            time.sleep(0.2)
        end = time.time()
        trouble = None
        try:
            until(60, "progress to be written", lambda: _written_after(status(), end))
        except TimeoutError as error:
            trouble = f"no step after the trace's end: {error}"
            print(trouble, flush=True)
        watch.look()
        final = status()
        innocent = watch.innocent()
        for text in innocent:
            print(f"ended although nobody aimed at it: {text}", flush=True)
        return {
            **figures(history(), steps, rate, start, end, before, final, trouble),
            "goodput_undisturbed": shares.get(SIZE),
            "survivor_restarts": len(innocent),
            "seed": seed,
            "standby": standby,
            "events": dict(events),
            "restarts": {
                kind: (final.get("restarts") or {}).get(kind, 0) - restarts.get(kind, 0)
                for kind in ("failures", "preemptions")
            },
        }


def figures(
    history: Any,
    steps: StepSeconds,
    rate: dict[int, float],
    start: float,
    end: float,
    before: dict[str, float],
    final: Object,
    trouble: str | None,
) -> Object:
    """Return the figures of the steps between start and end.

    Args:
        history: of the job's commits.
        steps: how long they took.
        start: unix seconds.
        end: unix seconds.
        rate: samples a second, by group size, from `rates`.
        before: lost seconds at the start.
        final: the job's status at the end.
        trouble: why that status is too old, or None.
    """
    commits = [c for c in history.curve() if start <= c.unix_time <= end]
    done = sum(commit.samples for commit in commits)
    after = lost_seconds(final)
    gaps = [b.unix_time - a.unix_time for a, b in pairwise(commits)]
    return {
        "goodput": min(1.0, steps.total(commits) / (end - start)),
        "throughput_ratio": done / expected_samples(commits, history.members, rate, start, end)
        if commits
        else 0.0,
        "lost_seconds_by_cause": {c: round(after[c] - before.get(c, 0.0), 3) for c in sorted(after)},
        "samples_repeated": None if trouble else final["data"]["repeated"],
        "samples_lost": None if trouble else final["data"]["lost"],
        "reason": trouble,
        "seconds": end - start,
        "longest_pause_seconds": max(gaps, default=0.0),
        "median_step_seconds": statistics.median(gaps) if gaps else 0.0,
        "samples_per_second_by_workers": {str(size): value for size, value in rate.items()},
    }


def _trains(history: Callable[[], Any], size: int) -> bool:
    return len(history().active()) == size


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


def _written_after(status: Object, moment: float) -> bool:
    from datetime import datetime

    text = str(status.get("progressTime") or "1970-01-01T00:00:00Z")
    return datetime.fromisoformat(text).timestamp() > moment


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="2 minutes of disturbances instead of 10")
    parser.add_argument("--seed", type=int, default=1, help="of the trace (default 1)")
    parser.add_argument("--seconds", type=float, help="another length of the trace")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--standby", type=int, default=1, help="pods that wait beyond the workers (default 1)"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # what was started ends, too
    if sys.platform != "linux":
        sys.exit("benchmarks.goodput: the embedded cluster needs Linux")
    seconds = arguments.seconds or (120.0 if arguments.quick else 600.0)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(seconds, arguments.seed, Path(folder), arguments.standby)
    print(
        f"goodput {result['goodput']:.3f}  throughput_ratio {result['throughput_ratio']:.3f}"
        f"  repeated {result['samples_repeated']}  lost {result['samples_lost']}"
        f"  survivor restarts {result['survivor_restarts']}  lost seconds {result['lost_seconds_by_cause']}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
