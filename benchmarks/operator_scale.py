"""The operator with many jobs, on the embedded API server with pods that are only said to run.

    python -m benchmarks.operator_scale [--quick] [--json FILE]

The operator is the real process, the API server real HTTP; one process answers the operator's gRPC calls for
the coordinators of all jobs, as a coordinator would whose workers all train. Everything shares this machine,
so the API server's speed bounds what is seen:

* `pods_per_second`: a job of 200 workers, from the request that makes the job to the last of its pods; the
  median of three such jobs, one after another; `pods_per_second_worst`: the slowest of them.
* `operator_cpu_seconds_per_pod`: the operator's processor time for that, over these pods: the part of a
  pod's making that is not the API server's; the median, too.
* `first_pod_seconds_alone`, `first_pod_seconds_beside_jobs`: one job in another namespace, from the request
  that makes it to its first pod, while nothing else happens and when `jobs` new jobs were just made in one
  namespace; `jobs_running_by_then`: how many of those the operator was done with.
* `seconds_to_running`: `jobs` jobs of 8 workers, from the first request to the last condition Running.
* `api_requests_per_pod`: the operator's requests on pods (watches aside) over the pods of the 200-worker job,
  from making them to deleting all but one by scaling down.
* `idle_cpu_fraction`: the operator's share of a core over a minute in which all jobs run and nothing
  else happens.
* `requests_per_idle_minute`: all its requests in that time, watches and lists included.
* `rss_mib_with_jobs`, `rss_kib_per_job`: the acting operator's resident memory after that, and what of it
  came with each of these jobs, its pods and the connection to its coordinator included.
* `rss_bytes_per_pod`, `rss_mib_at_10000_pods`, `rss_mib_with_hostile_pods`: of an operator that stands by,
  the growth of its resident memory with 10,000 pods of 10 KB, over 1,250 jobs, and the largest it ever was,
  with 5,000 nodes, without and with 100 more pods of 1 MB that are nobody's, by a server that only lists
  (`benchmarks.support.large_cluster`).
* `acting_rss_mib_at_10000_pods`: what one that acts takes at most: `rss_mib_at_10000_pods` and, for each of
  those jobs, `rss_kib_per_job`; the pods count twice in it.
* `takeover_seconds`: kill -9 of the acting operator, with another one standing by and all jobs in place, to
  the first decision of the other (a worker deleted at the kill has a successor).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

Object = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
ADDRESS = "127.0.0.2"  # of every pretended pod; the coordinators' process listens there
NAMESPACE = "scale"
GUEST = "guest"  # another tenant's
SYSTEM = "springtide-system"
ACCOUNT = f"system:serviceaccount:{SYSTEM}:springtide-operator"
WORKERS = 8
BIG = 200
LARGE = ("big", "big-2", "big-3")  # names of the jobs with so many workers
JOBS = "/apis/springtide.dev/v1alpha1/namespaces/{}/trainingjobs"
JOBS_PATH = JOBS.format(NAMESPACE)


def answer_for_coordinators(address: str) -> None:
    """Serve Sync for every job: all workers that run train in generation 1, and the step stands still.

    address: host:port, which the first line of output repeats. Raises RuntimeError when it is taken.
    """
    import grpc

    from springtide_protocol import coordinator_pb2 as pb
    from springtide_protocol import coordinator_pb2_grpc as pb_grpc
    from springtide_protocol.channel import server_options
    from springtide_protocol.heartbeat import LIMIT, of_members

    class Answers(pb_grpc.CoordinatorServicer):
        def Sync(self, request: pb.SyncRequest, context: grpc.ServicerContext) -> pb.SyncReply:
            incarnation = pb.Incarnation(number=request.incarnation_number)
            running = [pod for pod in request.living if pod.started and not pod.leave_by]
            if len(running) < max(1, request.minimum):
                return pb.SyncReply(incarnation=incarnation, phase=pb.WAITING, reason="WaitingForWorkers")
            name = pb.GenerationName(incarnation=pb.Incarnation(number=1), number=1)
            return pb.SyncReply(
                incarnation=incarnation,
                phase=pb.RUNNING,
                generation=name,
                state=pb.StateName(generation=name, step=100),
                members=[
                    pb.MemberStatus(
                        member=pb.Member(id=pod.uid, pod_uid=pod.uid, pod_name=pod.name),
                        standing=pb.ACTIVE,
                        connected=True,
                    )
                    for pod in running
                ],
                samples_per_second=1000.0,
                goodput=1.0,
                step_seconds=0.1,
                unix_time=time.time(),
                last_commit_unix=time.time(),
            )

    server = grpc.server(futures.ThreadPoolExecutor(2), options=server_options(of_members(LIMIT)))
    pb_grpc.add_CoordinatorServicer_to_server(Answers(), server)
    server.add_insecure_port(address)
    server.start()
    print(f"listens on {address}", flush=True)
    server.wait_for_termination()


@contextlib.contextmanager
def coordinators(address: str = f"{ADDRESS}:7070") -> Iterator[None]:
    """The process that answers for them. Raises RuntimeError with its own last words when it does not come
    up.
    """
    command = [sys.executable, "-m", "benchmarks.operator_scale", "--coordinators", address]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors)
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                code = process.wait(10)
                errors.seek(0)
                said = errors.read().strip()[-2000:] or "nothing"
                raise RuntimeError(
                    f"who answers for the coordinators on {address} ended with {code}:\n{said}"
                )
            yield
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


class Api:
    """A few calls of the API server, many at a time."""

    def __init__(self, kubeconfig: Path) -> None:
        from springtide_kube.client import Caller, Client
        from springtide_kube.connection import Connections, from_kubeconfig

        self.connections = Connections(partial(from_kubeconfig, [str(kubeconfig)]))
        self.client = Client(self.connections, Caller("springtide-benchmark"), timeout=60)

    async def close(self) -> None:
        await self.client.close()

    async def request(self, method: str, path: str, body: Object | None = None, **query: str) -> Object:
        """The answer, also to what conflicts. Raises RuntimeError."""
        from springtide_kube.content_types import APPLY_PATCH, JSON, MERGE_PATCH
        from springtide_kube.errors import ApiError

        kind = MERGE_PATCH if method == "PATCH" else JSON
        if query.get("fieldManager"):
            kind = APPLY_PATCH
        try:
            return await self.client.request(method, path, body, query, kind)
        except ApiError as error:
            if error.code == 409:
                return {}
            raise RuntimeError(f"{method} {path}: {error.message}") from error

    async def watch(self, path: str, **query: str) -> AsyncIterator[Object]:
        """Events of all that exists and of every change."""
        async for line in self.client.lines(path, {"watch": "true", **query}):
            yield json.loads(line)

    async def used(self) -> dict[str, int]:
        """Requests of the operator so far: on pods, and all, both without watches; and really all."""
        count = {"pods": 0, "all": 0, "with_watches": 0}
        for use in (await self.request("GET", "/debug/springtide/requests"))["requests"]:
            if use["user"] != ACCOUNT:
                continue
            count["with_watches"] += use["count"]
            if use["verb"] not in ("watch", "list"):
                count["all"] += use["count"]
                count["pods"] += use["count"] if use["resource"] == "pods" else 0
        return count


def job(name: str, replicas: int, namespace: str = NAMESPACE) -> Object:
    container = {"name": "worker", "image": "springtide/worker:0.1.0", "command": ["python", "train.py"]}
    return {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "workers": {
                "replicas": replicas,
                "minReplicas": 1,
                "template": {"spec": {"containers": [container]}},
            }
        },
    }


async def until(seconds: float, what: str, attempt: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not attempt():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        await asyncio.sleep(0.02)


class Seen:
    """State collected from the watches: the living pods of each job, and the jobs that are Running."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, str]] = {}
        self.running: set[str] = set()

    async def follow_pods(self, api: Api) -> None:
        async for event in api.watch(f"/api/v1/namespaces/{NAMESPACE}/pods"):
            meta = event["object"]["metadata"]
            pods = self.pods.setdefault(meta["labels"]["springtide.dev/job"], {})
            if event["type"] == "DELETED":
                pods.pop(meta["name"], None)
            else:
                pods[meta["name"]] = event["object"].get("status", {}).get("phase", "")

    async def follow_jobs(self, api: Api) -> None:
        async for event in api.watch(JOBS_PATH):
            conditions = (event["object"].get("status") or {}).get("conditions") or []
            if any(c["type"] == "Running" and c["status"] == "True" for c in conditions):
                self.running.add(event["object"]["metadata"]["name"])

    def count(self, name: str) -> int:
        return len(self.pods.get(name, {}))


async def install(api: Api, folder: Path) -> Path:
    """The CRD, namespaces, the operator's rights, and a kubeconfig that speaks as its service account."""
    import yaml

    crd = yaml.safe_load((ROOT / "deploy/crd/trainingjobs.yaml").read_text())
    await api.request("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
    for name in (NAMESPACE, GUEST, SYSTEM):
        await api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    where = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts"
    rights = "/apis/rbac.authorization.k8s.io/v1"
    paths = {
        "ServiceAccount": where,
        "ClusterRole": f"{rights}/clusterroles",
        "ClusterRoleBinding": f"{rights}/clusterrolebindings",
        "Role": f"{rights}/namespaces/{{}}/roles",
        "RoleBinding": f"{rights}/namespaces/{{}}/rolebindings",
    }
    for document in yaml.safe_load_all((ROOT / "deploy/operator.yaml").read_text()):
        if document and document["kind"] in paths:
            to = paths[document["kind"]].format(document["metadata"].get("namespace", ""))
            await api.request("POST", to, document)
    token = await api.request("POST", f"{where}/springtide-operator/token", {"spec": {}})
    config = yaml.safe_load((folder / "cluster" / "kubeconfig").read_text())
    config["users"][0]["user"] = {"token": token["status"]["token"]}
    path = folder / "operator-kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


class Operator:
    """One operator process."""

    def __init__(self, kubeconfig: Path, name: str, port: int, log: Path) -> None:
        self._log = log.open("wb")
        environment = os.environ | {
            "KUBECONFIG": str(kubeconfig),
            "POD_NAMESPACE": SYSTEM,
            "POD_NAME": name,
            "POD_UID": name,
            "SPRINGTIDE_BIND": "127.0.0.1",
            "SPRINGTIDE_METRICS_PORT": str(port),
            "SPRINGTIDE_NETWORK_POLICY": "{}",
            "SPRINGTIDE_LOG_LEVEL": "warning",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "springtide_operator"],
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self, what: str) -> int:
        """Return bytes of resident memory: VmRSS, now; VmHWM, the most there ever was."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{what}:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"the kernel does not say {what} of {self.process.pid}")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._log.close()


async def measure(
    jobs: int,
    idle_seconds: float,
    folder: Path,
    big: int = BIG,
    calm_seconds: float = 20.0,
    takeover: bool = True,
) -> Object:
    """All figures, in the order in which they are printed.

    big: workers of each large job. calm_seconds: until the last writes and their echoes are over.
    """
    api = Api(folder / "cluster" / "kubeconfig")
    operators: list[Operator] = []
    watches: list[asyncio.Task[None]] = []
    result: Object = {}
    try:
        kubeconfig = await install(api, folder)
        first = Operator(kubeconfig, "first", 0, folder / "first.log")
        operators.append(first)
        seen = Seen()
        watches = [asyncio.create_task(seen.follow_pods(api)), asyncio.create_task(seen.follow_jobs(api))]
        await api.request("POST", JOBS_PATH, job("warm-up", 1))
        await until(300, "the operator to run a first job", lambda: "warm-up" in seen.running)

        result["first_pod_seconds_alone"] = await first_pod(api, "alone")
        before = await api.used()
        speeds, costs = [], []
        for name in LARGE:
            speed, cost = await large_job(api, seen, first, name, big)
            speeds.append(speed)
            costs.append(cost)
        after = await api.used()
        result["pods_per_second"] = statistics.median(speeds)
        result["pods_per_second_worst"] = min(speeds)
        result["operator_cpu_seconds_per_pod"] = statistics.median(costs)
        made = (big + 1) * len(LARGE)
        result["api_requests_per_pod"] = (after["pods"] - before["pods"]) / made
        result["api_requests_of_all_kinds_per_pod"] = (after["all"] - before["all"]) / made
        report(result, "pods_per_second", "pods_per_second_worst")
        report(result, "operator_cpu_seconds_per_pod", "api_requests_per_pod")
        report(result, "api_requests_of_all_kinds_per_pod", "first_pod_seconds_alone")

        started, cpu, memory = time.monotonic(), first.cpu_seconds(), first.memory("VmRSS")
        names = [f"job-{number}" for number in range(jobs)]
        for start in range(0, jobs, 16):
            some = names[start : start + 16]
            await asyncio.gather(*(api.request("POST", JOBS_PATH, job(name, WORKERS)) for name in some))
        result["first_pod_seconds_beside_jobs"] = await first_pod(api, "beside")
        result["jobs_running_by_then"] = len(seen.running & set(names))
        await until(1800, "all jobs to run", lambda: seen.running >= set(names))
        await until(600, "all pods", lambda: all(seen.count(name) == WORKERS + 1 for name in names))
        result["jobs"], result["pods"] = jobs, sum(seen.count(name) for name in names)
        result["seconds_to_running"] = time.monotonic() - started
        result["operator_cpu_seconds_to_running"] = first.cpu_seconds() - cpu
        report(result, "first_pod_seconds_beside_jobs", "jobs_running_by_then")
        report(result, "jobs", "pods", "seconds_to_running", "operator_cpu_seconds_to_running")

        await asyncio.sleep(calm_seconds)
        cpu, started, before = first.cpu_seconds(), time.monotonic(), await api.used()
        await asyncio.sleep(idle_seconds)
        result["idle_cpu_fraction"] = (first.cpu_seconds() - cpu) / (time.monotonic() - started)
        minutes, after = (time.monotonic() - started) / 60, await api.used()
        result["idle_api_requests"] = after["all"] - before["all"]
        result["requests_per_idle_minute"] = (after["with_watches"] - before["with_watches"]) / minutes
        result["rss_mib_with_jobs"] = first.memory("VmRSS") / 2**20
        result["rss_kib_per_job"] = max(0, first.memory("VmRSS") - memory) / 1024 / jobs
        report(
            result,
            "idle_cpu_fraction",
            "idle_api_requests",
            "requests_per_idle_minute",
            "rss_mib_with_jobs",
            "rss_kib_per_job",
        )

        if takeover:
            operators.append(Operator(kubeconfig, "second", 0, folder / "second.log"))
            result["takeover_seconds"] = await take_over(api, seen, first, 0.75 * calm_seconds)
            report(result, "takeover_seconds")
    except BaseException:
        for log in (folder / "first.log", folder / "second.log"):
            if log.exists():
                print(f"-- {log.name}", log.read_text(errors="replace")[-4000:], file=sys.stderr)
        raise
    finally:
        for task in watches:
            task.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        for operator in operators:
            operator.end()
        await api.close()
    return result


async def large_job(api: Api, seen: Seen, operator: Operator, name: str, workers: int) -> tuple[float, float]:
    """Make a job, wait until it runs, and shrink it to one worker.

    Returns:
        Its pods per second, from the request to the last pod; and the operator's processor time for each of
        them, in seconds.
    """
    started, cpu = time.monotonic(), operator.cpu_seconds()
    await api.request("POST", JOBS_PATH, job(name, workers))
    await until(300, f"all pods of {name}", lambda: seen.count(name) == workers + 1)
    speed = workers / (time.monotonic() - started)
    cost = (operator.cpu_seconds() - cpu) / workers
    await until(300, f"{name} to run", lambda: name in seen.running)
    await api.request("PATCH", f"{JOBS_PATH}/{name}", {"spec": {"workers": {"replicas": 1}}})
    await until(300, f"{name} to shrink", lambda: seen.count(name) == 2)
    return speed, cost


async def first_pod(api: Api, name: str) -> float:
    """Return the seconds from the request that makes another tenant's job to its first pod."""
    started = time.monotonic()
    await api.request("POST", JOBS.format(GUEST), job(name, 1, GUEST))
    async for event in api.watch(
        f"/api/v1/namespaces/{GUEST}/pods", labelSelector=f"springtide.dev/job={name}"
    ):
        if event["type"] == "ADDED":
            break
    return time.monotonic() - started


async def take_over(api: Api, seen: Seen, first: Operator, ready_seconds: float) -> float:
    """Kill the first operator when the other one has listed everything, and waits for the lease."""
    await asyncio.sleep(ready_seconds)
    victim = "job-0-worker-0-0"
    first.process.send_signal(signal.SIGKILL)
    started = time.monotonic()
    await api.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{victim}", gracePeriodSeconds="0")
    await until(120, "a successor of the deleted worker", lambda: "job-0-worker-0-1" in seen.pods["job-0"])
    return time.monotonic() - started


KEPT_JOBS, KEPT_PODS, KEPT_NODES, HOSTILE_PODS = 1250, 10_000, 5000, 100
CALM_SECONDS = 60.0  # for an operator that has listed everything; on a loaded machine it may never be calm


def measure_memory(folder: Path, pods: int = KEPT_PODS, nodes: int = KEPT_NODES) -> Object:
    """Return what many pods cost an operator that stands by.

    Args:
        folder: for logs.
        pods: number of them, in the runs with pods.
        nodes: number of nodes, in all runs.
    """
    bare, _ = memory_with(folder, 0, nodes, 0)
    kept, most = memory_with(folder, pods, nodes, 0)
    _, hostile = memory_with(folder, pods, nodes, HOSTILE_PODS)
    result = {
        "rss_bytes_per_pod": (kept - bare) / pods,
        "rss_mib_at_10000_pods": most / 2**20,
        "rss_mib_with_hostile_pods": hostile / 2**20,
    }
    report(result, *result)
    return result


def memory_with(folder: Path, pods: int, nodes: int, hostile: int, settle: float = 8.0) -> tuple[int, int]:
    """Return the resident memory, and the most it was, of an operator that has listed and watches.

    Args:
        folder: for its log.
        pods: number of pods.
        nodes: number of nodes.
        hostile: number of pods of 1 MB that are nobody's.
        settle: seconds after the last list, at least.
    """
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    numbers = [str(number) for number in (KEPT_JOBS, pods, nodes, hostile)]
    command = [sys.executable, "-m", "benchmarks.support.large_cluster", f"127.0.0.1:{port}", *numbers]
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    kubeconfig, log = folder / "large-kubeconfig", folder / "memory.log"
    kubeconfig.write_text(json.dumps(config))
    server = subprocess.Popen(command, cwd=ROOT)
    operator: Operator | None = None
    try:
        deadline = time.monotonic() + 300
        while lists_read(url) is None:
            if time.monotonic() > deadline or server.poll() is not None:
                raise TimeoutError(f"nothing listens at {url}")
            time.sleep(0.1)
        operator = Operator(kubeconfig, "memory", 0, log)
        while any((lists_read(url) or {}).get(kind, 0) < 1 for kind in ("trainingjobs", "pods", "nodes")):
            if time.monotonic() > deadline or operator.process.poll() is not None:
                raise TimeoutError(f"the operator has not listed everything:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)
        settled = time.monotonic() + settle
        before = -1.0
        while time.monotonic() < settled or operator.cpu_seconds() - before > 0.05:
            if time.monotonic() > settled + CALM_SECONDS:
                print(f"measured although the operator was not calm within {CALM_SECONDS:g} s", flush=True)
                break
            before = operator.cpu_seconds()
            time.sleep(1.0)
        return operator.memory("VmRSS"), operator.memory("VmHWM")
    finally:
        if operator is not None:
            operator.end()
        server.kill()
        server.wait()


def acting_memory(result: Object) -> float:
    """Return the most that an acting operator takes with KEPT_JOBS and their pods, in MiB. PURE."""
    return float(result["rss_mib_at_10000_pods"] + result["rss_kib_per_job"] * KEPT_JOBS / 1024)


def lists_read(url: str) -> dict[str, int] | None:
    """Return how many lists of each kind were read to their end; None while nothing listens."""
    try:
        with urllib.request.urlopen(f"{url}/debug/lists", timeout=10) as answer:
            return dict(json.load(answer))
    except OSError:
        return None


def report(result: Object, *keys: str) -> None:
    print("  ".join(f"{key} {result[key]:.4g}" for key in keys), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="200 jobs instead of 1,000")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--jobs", type=int, help="another number of jobs")
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    parser.add_argument("--coordinators", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # what was started ends, too
    if arguments.coordinators:
        answer_for_coordinators(arguments.coordinators)
        return
    from springtide_local.cluster import Cluster
    from springtide_local.settings import Settings

    jobs = arguments.jobs or (200 if arguments.quick else 1000)
    shape = Settings(nodes=10, cpus="1000", memory="4Ti", pods=2000, pretend=ADDRESS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        result = measure_memory(folder)
        with coordinators(), Cluster.start(folder / "cluster", shape):
            result |= asyncio.run(measure(jobs, arguments.idle_seconds, folder))
        result["acting_rss_mib_at_10000_pods"] = acting_memory(result)
        report(result, "acting_rss_mib_at_10000_pods")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
