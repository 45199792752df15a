"""Repeat known attacks against the real processes on the embedded cluster.

    python -m benchmarks.hostile [--quick] [--json FILE]

Attacks are a table (`ATTACKS`), each with the process that it is aimed at. Those on the operator:

* jobs nested 1,200, 3,000 and 9,000 levels deep, few fat jobs, fat pods of nobody, pods with hostile
  termination messages, malformed templates, a quantity of a million digits, forged status, names with `../`,
  policies of others under our names, a coordinator that answers with infinities, and a flood of jobs.

A proxy in front of the embedded API server adds to the lists and watches that the operator reads those
objects that the server does not store (deep ones, and those that the CRD now refuses), and takes the status
that the operator writes of them.

* `operator_alive`: the process never ended by itself, `/livez` is well, and after all attacks, by the
  running process and by a freshly started one, a job of somebody else gets its pods.
* `operator_peak_mib`: the largest resident memory of both processes.
* `other_tenants_first_pod_seconds`: from the request for a job to its first worker's pod, while 200 jobs of
  20 workers of another namespace are made; the worst of three.
* `unexpected_exceptions`: errors that nobody foresaw, by the operator's own count, and tracebacks in its log.
* `taken_over`: objects of others that were changed or deleted.
* `jobs_without_a_word`: hostile jobs of the proxy's that no condition tells of.

Those on the ports of a coordinator and of a parameter server are in `benchmarks.hostile_ports`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import itertools
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.hostile_ports import ports_under_attack
from benchmarks.operator_scale import ADDRESS, ROOT, Api, Operator, install, until
from benchmarks.support.ports import free_port
from springtide_local.api.patch import merge_patch as merged

Object = dict[str, Any]

TENANT = "tenant"
FLOOD = "flood"
OTHER = "other"
JOBS = "/apis/springtide.dev/v1alpha1"
VOLCANO = "scheduling.volcano.sh"
DEPTHS = (1_200, 3_000, 9_000)
FAT_JOBS, FAT_JOB_VALUES = 12, 480_000
FAT_PODS, FAT_POD_ENTRIES = 100, 30_000
FLOOD_WORKERS = 20
PROBES = 3
PATIENCE = 60.0
_STATUS = re.compile(rf"^{JOBS}/namespaces/([^/]+)/trainingjobs/([^/]+)/status$")
_MESSAGES = (
    '{"outcome":' + "[" * 4_000,
    '{"outcome":"Finished","data":' + '{"a":' * 600,
    '{"outcome":"Finished","values":{"a":' + "9" * 400 + "}}",
    '{"outcome":"Finished","values":{"a":1e999},"step":' + "9" * 400 + "}",
)


class Stage:
    """The API server with what attackers have put into it, and what the attacks share."""

    def __init__(self, api: Api, quick: bool) -> None:
        self.api = api
        self.quick = quick
        self.jobs: dict[tuple[str, str], tuple[Object, str]] = {}  # what only the proxy serves: object, text
        self.pods: list[str] = []
        self.witnesses: list[tuple[str, Object]] = []  # objects of others: where, spec
        self._versions = itertools.count(1)
        self.first_pods: dict[str, float] = {}

    async def place(self, job: Object) -> bool:
        """Create a job; where the API server refuses it, have the proxy serve it. True: it was stored."""
        meta = job["metadata"]
        try:
            await self.api.request("POST", f"{JOBS}/namespaces/{meta['namespace']}/trainingjobs", job)
        except RuntimeError:
            self.inject(job)
            return False
        return True

    def inject(self, job: Object, spec: str | None = None) -> None:
        """Serve a job that is not stored; `spec`: its text, where that is not what `job` says."""
        meta = job["metadata"]
        version = str(next(self._versions))
        job = {
            "apiVersion": "springtide.dev/v1alpha1",
            "kind": "TrainingJob",
            **job,
            "metadata": {
                **meta,
                "uid": f"injected-{meta['name']}",
                "generation": 1,
                "resourceVersion": version,
            },
        }
        self.jobs[meta["namespace"], meta["name"]] = (job, spec or json.dumps(job["spec"]))

    def text_of(self, key: tuple[str, str]) -> str:
        job, spec = self.jobs[key]
        rest = json.dumps({name: value for name, value in job.items() if name != "spec"})
        return f'{rest[:-1]}, "spec": {spec}}}'

    def write_status(self, key: tuple[str, str], patch: Object) -> str:
        """Merge into the status of an injected job; the object's text."""
        job, spec = self.jobs[key]
        status = merged(job.get("status") or {}, patch.get("status") or {})
        version = str(next(self._versions))
        self.jobs[key] = (
            {**job, "status": status, "metadata": {**job["metadata"], "resourceVersion": version}},
            spec,
        )
        return self.text_of(key)

    async def protect(self, path: str, obj: Object) -> None:
        """Create somebody else's object, which must stay as it is."""
        made = await self.api.request("POST", path, obj)
        self.witnesses.append((f"{path}/{obj['metadata']['name']}", made.get("spec") or {}))

    def jobs_without_a_word(self) -> list[str]:
        """Jobs beyond all limits of which the operator has not said that they are."""
        silent = []
        for (_, name), (found, _) in self.jobs.items():
            said = (found.get("status") or {}).get("conditions") or []
            told = [
                c["reason"] for c in said if c["type"] in ("Degraded", "Failed") and c["status"] == "True"
            ]
            if not told:
                silent.append(name)
        return silent

    async def taken_over(self) -> int:
        """How many of others' objects are gone, changed or owned now."""
        count = 0
        for path, spec in self.witnesses:
            try:
                found = await self.api.request("GET", path)
            except RuntimeError:
                count += 1
                continue
            owned = bool(found["metadata"].get("ownerReferences")) or "deletionTimestamp" in found["metadata"]
            same = all(
                found.get("spec", {}).get(key) == value for key, value in spec.items() if key != "nodeName"
            )
            count += owned or not same
        return count

    async def first_pod(self, name: str) -> float:
        """Seconds from the request for a job of the other tenant to its first worker's pod."""
        path = f"{JOBS}/namespaces/{OTHER}/trainingjobs"
        started = time.monotonic()
        await self.api.request("POST", path, job(OTHER, name))
        pod = f"{name}-worker-0-0"
        await until(PATIENCE, f"the pod {pod} of another tenant", lambda: pod in self.first_pods)
        return self.first_pods[pod] - started

    async def follow(self) -> None:
        """Note when pods of the other tenant are made."""
        async for event in self.api.watch(f"/api/v1/namespaces/{OTHER}/pods"):
            self.first_pods.setdefault(event["object"]["metadata"]["name"], time.monotonic())


@dataclass(frozen=True)
class Attack:
    """`target`: the process whose figures it is about. `run` returns figures to add to the result."""

    target: str
    run: Callable[[Stage], Awaitable[Object | None]]
    seconds: float = field(default=120.0)


def job(namespace: str, name: str, replicas: int = 1, spec: Object | None = None, **container: Any) -> Object:
    """A job; `spec` goes into its pod template's."""
    main = {"name": "worker", "image": "springtide/worker:0.1.0", "command": ["python", "t.py"], **container}
    template = {"spec": {"containers": [main], **(spec or {})}}
    return {
        "apiVersion": "springtide.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"workers": {"replicas": replicas, "minReplicas": 1, "template": template}},
    }


async def deep_jobs(stage: Stage) -> None:
    for levels in DEPTHS:
        deep = '{"a":' * levels + "1" + "}" * levels
        made = job(TENANT, f"deep-{levels}")
        containers = json.dumps(made["spec"]["workers"]["template"]["spec"]["containers"])
        template = f'{{"metadata": {deep}, "spec": {{"containers": {containers}}}}}'
        stage.inject(made, f'{{"workers": {{"replicas": 1, "minReplicas": 1, "template": {template}}}}}')


async def fat_jobs(stage: Stage) -> None:
    for number in range(FAT_JOBS):
        made = job(TENANT, f"fat-{number}")
        containers = json.dumps(made["spec"]["workers"]["template"]["spec"]["containers"])
        fat = "[" + "{}," * (FAT_JOB_VALUES - 1) + "{}]"
        template = f'{{"metadata": {{"x": {fat}}}, "spec": {{"containers": {containers}}}}}'
        workers = f'{{"replicas": 1, "minReplicas": 1, "template": {template}}}'
        stage.inject(made, f'{{"suspend": true, "workers": {workers}}}')


def pod_of_nobody(name: str, entries: int, message: str = "", owner: Object | None = None) -> str:
    meta = {
        "name": name,
        "namespace": TENANT,
        "uid": f"uid-{name}",
        "resourceVersion": "1",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"springtide.dev/job": "nobody", "springtide.dev/role": "worker"},
        "ownerReferences": [owner] if owner else [],
    }
    env = ",".join(f'{{"name":"VARIABLE_{n}","value":""}}' for n in range(entries))
    container = f'{{"name":"worker","image":"i","env":[{env}]}}'
    ended = {"exitCode": 0, "message": message, "finishedAt": "2026-01-01T00:00:01Z"}
    status: Object = {"phase": "Pending"}
    if message:
        status = {
            "phase": "Succeeded",
            "containerStatuses": [{"name": "worker", "state": {"terminated": ended}}],
        }
    head = json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "status": status})
    return f'{head[:-1]},"spec":{{"containers":[{container}]}}}}'


async def fat_pods(stage: Stage) -> None:
    stage.pods += [pod_of_nobody(f"nobody-worker-{n}-0", FAT_POD_ENTRIES) for n in range(FAT_PODS)]


async def poison_messages(stage: Stage) -> None:
    """Attack with pods that nobody owns, and with pods that claim to be a job's."""
    owner = {"apiVersion": "springtide.dev/v1alpha1", "kind": "TrainingJob", "name": "x", "uid": "u"}
    for number, message in enumerate(_MESSAGES):
        stage.pods.append(pod_of_nobody(f"poison-worker-{number}-0", 1, message))
        claims = {**owner, "controller": True}
        stage.pods.append(pod_of_nobody(f"claimed-worker-{number}-0", 1, message, claims))


async def malformed_templates(stage: Stage) -> None:
    queued = {"kueue.x-k8s.io/queue-name": "q"}
    shapes: list[tuple[Object, Object, Object]] = [
        ({}, {"resources": {"limits": {"cpu": "1e999"}}}, {}),
        ({}, {"resources": {"limits": {"cpu": "inf"}}}, {}),
        ({"schedulerName": "volcano"}, {"resources": {"limits": {"nvidia.com/gpu": "1e999999"}}}, {}),
        ({}, {"env": [{"name": ["A"]}]}, {}),
        ({"tolerations": [{"key": []}]}, {}, {}),
        ({"initContainers": [1]}, {}, {}),
        ({"initContainers": [[]]}, {}, queued),
        ({"priorityClassName": "../../../../api/v1/namespaces/other/pods/victim"}, {}, queued),
        ({"nodeSelector": [1], "volumes": {"a": 1}}, {"ports": [[]]}, {}),
    ]
    for number, (spec, container, labels) in enumerate(shapes):
        made = job(TENANT, f"malformed-{number}", spec=spec, **container)
        made["metadata"]["labels"] = labels
        await stage.place(made)
    annotated = job(TENANT, "malformed-annotations", spec={"schedulerName": "volcano"})
    annotated["spec"]["workers"]["template"]["metadata"] = {"annotations": "x"}
    await stage.place(annotated)


async def confused_deputy(stage: Stage) -> None:
    """Somebody else's policies under the names that a job's had, and a pod that status points at."""
    policies = f"/apis/networking.k8s.io/v1/namespaces/{TENANT}/networkpolicies"
    budgets = f"/apis/policy/v1/namespaces/{TENANT}/poddisruptionbudgets"
    closed = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    meta = {"namespace": TENANT}
    policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "spec": closed}
    await stage.protect(policies, {**policy, "metadata": {**meta, "name": "isolate-pods"}})
    budget = {"minAvailable": 3, "selector": {"matchLabels": {"app": "db"}}}
    kind = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "spec": budget}
    await stage.protect(budgets, {**kind, "metadata": {**meta, "name": "isolate-servers"}})
    container = {"name": "c", "image": "i", "command": ["sleep", "1000"]}
    victim = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "victim", "namespace": OTHER}}
    await stage.protect(f"/api/v1/namespaces/{OTHER}/pods", {**victim, "spec": {"containers": [container]}})
    isolate = job(TENANT, "isolate")
    isolate["spec"] |= {"strategy": {"type": "ParameterServer"}, "parameterServers": {"replicas": 2}}
    await stage.place(isolate)
    forged = job(TENANT, "forged")
    await stage.place(forged)
    gang = {
        "scheduler": "Volcano",
        "apiVersion": "x/y",
        "podGroup": f"../../../../../../api/v1/namespaces/{OTHER}/pods/victim",
        "minMember": 1,
    }
    with contextlib.suppress(RuntimeError):  # refused by the schema: as good
        path = f"{JOBS}/namespaces/{TENANT}/trainingjobs/forged/status"
        await stage.api.request("PATCH", path, {"status": {"gang": gang}})


async def hostile_replies(stage: Stage) -> None:
    """Place jobs whose coordinators' answers `answer_for_coordinators` makes; it knows them by name."""
    for number in range(3):
        await stage.place(job(TENANT, f"liar-{number}"))


async def flood(stage: Stage) -> Object:
    alone = await stage.first_pod("alone")
    path = f"{JOBS}/namespaces/{FLOOD}/trainingjobs"
    slots = asyncio.Semaphore(8)

    async def one(number: int) -> None:
        async with slots:
            await stage.api.request("POST", path, job(FLOOD, f"flood-{number}", FLOOD_WORKERS))

    count = 200
    making = [asyncio.create_task(one(number)) for number in range(count)]
    seconds = []
    for number in range(PROBES):
        await asyncio.sleep(2.0)
        seconds.append(await stage.first_pod(f"probe-{number}"))
    await asyncio.gather(*making)
    listed = await stage.api.request("GET", f"/api/v1/namespaces/{FLOOD}/pods", limit="1")
    left = (listed.get("metadata") or {}).get("remainingItemCount")
    return {
        "first_pod_alone_seconds": alone,
        "other_tenants_first_pod_seconds": max(seconds),
        "flood_pods_at_the_end_of_probes": None if left is None else left + 1,
    }


ATTACKS: dict[str, Attack] = {
    "deep jobs": Attack("operator", deep_jobs),
    "fat jobs": Attack("operator", fat_jobs),
    "fat pods of nobody": Attack("operator", fat_pods),
    "poisoned termination messages": Attack("operator", poison_messages),
    "malformed templates": Attack("operator", malformed_templates),
    "confused deputy": Attack("operator", confused_deputy),
    "hostile replies": Attack("operator", hostile_replies),
    "flood": Attack("operator", flood),
}


class Proxy:
    """A proxy before the API server that adds the stage's objects to lists and watches, and passes on all
    else.
    """

    def __init__(self, api: Api, stage: Stage) -> None:
        self._api = api
        self._stage = stage
        self._session: Any = None
        self._server = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serve; the address."""
        import aiohttp
        from aiohttp import web

        found = await self._api.connections.current()
        self._server = found.server
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=found.ssl_context()))

        app = web.Application(client_max_size=8 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=1.0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
            await self._session.close()

    async def _answer(self, request: Any) -> Any:
        from aiohttp import web

        written = _STATUS.match(request.path)
        if request.method == "PATCH" and written and (written[1], written[2]) in self._stage.jobs:
            text = self._stage.write_status((written[1], written[2]), await request.json())
            return web.Response(text=text, content_type="application/json")
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() in ("authorization", "content-type", "accept", "user-agent")
        }
        async with self._session.request(
            request.method,
            self._server + request.raw_path,
            data=await request.read(),
            headers=headers,
            timeout=None,
        ) as answer:
            extra = self._extra(request) if request.method == "GET" and answer.status == 200 else []
            if request.query.get("watch"):
                return await self._watch(request, answer, extra)
            body = await answer.read()
            if extra and not (page := json.loads(body)).get("metadata", {}).get("continue"):
                return await self._list(request, page, extra)
            return web.Response(body=body, status=answer.status, content_type=answer.content_type)

    def _extra(self, request: Any) -> list[str]:
        if request.path.endswith("/trainingjobs"):
            return [self._stage.text_of(key) for key in self._stage.jobs]
        if request.path == "/api/v1/pods" and "labelSelector" in request.query:
            return self._stage.pods
        return []

    async def _list(self, request: Any, page: Object, extra: list[str]) -> Any:
        """Send a list with more items, none of which is parsed."""
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        items = [json.dumps(item) for item in page.pop("items", None) or []]
        with contextlib.suppress(ConnectionError):
            await response.write(f'{json.dumps(page)[:-1]},"items":['.encode())
            for number, text in enumerate([*items, *extra]):
                await response.write(f"{',' if number else ''}{text}".encode())
            await response.write(b"]}")
        return response

    async def _watch(self, request: Any, answer: Any, extra: list[str]) -> Any:
        from aiohttp import web

        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for text in extra:
                await response.write(f'{{"type":"MODIFIED","object":{text}}}\n'.encode())
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
        return response


def answer_for_coordinators(address: str) -> None:
    """Answer Sync for every job: with infinities for those called liar, that nobody trains for the others."""
    import grpc

    from springtide_protocol import coordinator_pb2 as pb
    from springtide_protocol import coordinator_pb2_grpc as pb_grpc

    class Answers(pb_grpc.CoordinatorServicer):
        def Sync(self, request: pb.SyncRequest, context: grpc.ServicerContext) -> pb.SyncReply:
            reply = pb.SyncReply(phase=pb.WAITING, reason="WaitingForWorkers")
            reply.incarnation.number = request.incarnation_number
            if any(pod.name.startswith("liar-") for pod in request.living):
                reply.phase = pb.RUNNING
                reply.generation.number = 2**63
                reply.samples_per_second = reply.goodput = reply.last_commit_unix = float("inf")
                reply.checkpoint.written_unix = float("inf")
                reply.checkpoint.name = "n" * 100_000
                reply.stall.since_unix = float("nan")
                reply.lost_seconds["failure"] = float("inf")
                for number in range(10_000):
                    reply.values[f"value-{number}"] = float("nan")
                for number in range(1_000):
                    reply.failures.add(number=number + 1, seconds=float("inf"), reason="r" * 1_000)
            return reply

    server = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_CoordinatorServicer_to_server(Answers(), server)
    server.add_insecure_port(address)
    server.start()
    print(f"listens on {address}", flush=True)
    server.wait_for_termination()


@contextlib.contextmanager
def coordinators() -> Iterator[None]:
    """The process that answers for coordinators."""
    command = [sys.executable, "-m", "benchmarks.hostile", "--coordinators", f"{ADDRESS}:7070"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"who answers for coordinators ended with {process.wait(10)}")
        yield
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def peak_mib(pid: int) -> float:
    """The largest resident memory of a process so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


async def ask(port: int, path: str) -> tuple[int, str]:
    """GET from the operator's metrics port; (0, why) where it does not answer."""
    import aiohttp

    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as session,
            session.get(f"http://127.0.0.1:{port}{path}") as response,
        ):
            return response.status, await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return 0, repr(error)


def surprises(metrics: str, log: str) -> int:
    """Errors that nobody foresaw: by the operator's count, and tracebacks."""
    counted = re.findall(r"^springtide_operator_internal_errors_total\{[^}]*\} ([0-9.]+)", metrics, re.M)
    return int(sum(float(one) for one in counted)) + log.count("Traceback (most recent call last)")


async def operator_under_attack(folder: Path, quick: bool) -> Object:
    """Figures of the attacks on the operator."""
    import yaml

    api = Api(folder / "cluster" / "kubeconfig")
    stage = Stage(api, quick)
    result: Object = {
        "operator_alive": True,
        "operator_peak_mib": 0.0,
        "unexpected_exceptions": 0,
        "failed": [],
    }
    following: asyncio.Task[None] | None = None
    try:
        kubeconfig = await install(api, folder)
        for name in (TENANT, FLOOD, OTHER):
            await api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        standin = (ROOT / "tests/support/gang_standin.yaml").read_text()
        for crd in yaml.safe_load_all(standin):
            if crd:
                path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
                await api.request("POST", path, crd)
        following = asyncio.create_task(stage.follow())
        async with Proxy(api, stage).running() as url:
            config = yaml.safe_load(kubeconfig.read_text())
            config["clusters"][0]["cluster"] = {"server": url}
            kubeconfig.write_text(yaml.safe_dump(config))
            attacks = {name: one for name, one in ATTACKS.items() if one.target == "operator"}
            for number in range(2):  # the running process, then one that finds all of it
                await one_life(stage, folder, kubeconfig, attacks if number == 0 else {}, number, result)
        result["taken_over"] = await stage.taken_over()
        result["jobs_without_a_word"] = stage.jobs_without_a_word()
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await api.close()
    return result


async def one_life(
    stage: Stage, folder: Path, kubeconfig: Path, attacks: dict[str, Attack], number: int, result: Object
) -> None:
    """Start an operator, attack it, see how it fares, end it."""
    log, port = folder / f"operator-{number}.log", free_port()
    operator = Operator(kubeconfig, f"operator-{number}", port, log)
    pid = operator.process.pid
    try:
        try:
            await stage.first_pod(f"before-{number}")
            for name, attack in attacks.items():
                async with asyncio.timeout(attack.seconds):
                    result |= await attack.run(stage) or {}
                code, said = await ask(port, "/livez")
                print(f"{name}: /livez {code}, peak {peak_mib(pid):.0f} MiB", flush=True)
                if code != 200:
                    result["failed"].append(f"{name}: {said.strip()}")
            await asyncio.sleep(5.0 if stage.quick else 30.0)  # resyncs and retries under all of it
            result[f"first_pod_after_{number}_seconds"] = await stage.first_pod(f"after-{number}")
        except (TimeoutError, RuntimeError) as error:
            result["failed"].append(str(error))
        code, said = await ask(port, "/livez")
        if operator.process.poll() is not None or code != 200:
            result["failed"].append(
                f"operator {number}: exit {operator.process.poll()}, {said.strip()[:200]}"
            )
        _, metrics = await ask(port, "/metrics")
        if operator.process.poll() is None:
            result["operator_peak_mib"] = max(result["operator_peak_mib"], peak_mib(pid))
        result["unexpected_exceptions"] += surprises(metrics, log.read_text(errors="replace"))
    finally:
        operator.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(operator.process.wait, 20)
        operator.end()
    result["operator_alive"] = not result["failed"]
    if result["failed"]:
        print(log.read_text(errors="replace")[-4000:], file=sys.stderr)


KEYS = (
    "operator_alive",
    "coordinator_alive",
    "server_alive",
    "operator_peak_mib",
    "coordinator_peak_mib",
    "server_extra_mib",
    "other_tenants_first_pod_seconds",
    "unexpected_exceptions",
)


def complete(result: Object, ports: Object) -> Object:
    """Join what was measured of the operator and of the ports; a key that nobody measured is null."""
    whole = {**dict.fromkeys(KEYS), **copy.deepcopy(result), **ports}
    found = ports["coordinator_surprises"] + ports["server_surprises"]
    whole["unexpected_exceptions"] = (whole["unexpected_exceptions"] or 0) + found
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="5 s under all attacks instead of 30")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--coordinators", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # what was started ends, too
    if arguments.coordinators:
        answer_for_coordinators(arguments.coordinators)
        return
    from springtide_local.cluster import Cluster
    from springtide_local.settings import Settings

    shape = Settings(nodes=10, cpus="1000", memory="4Ti", pods=2000, pretend=ADDRESS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with coordinators(), Cluster.start(folder / "cluster", shape):
            operator = asyncio.run(operator_under_attack(folder, arguments.quick))
        result = complete(operator, ports_under_attack(folder, arguments.quick))
    for key, value in result.items():
        print(f"{key} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
