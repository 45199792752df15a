import asyncio
import io
import itertools
from typing import Any

import pytest
from cli_fake_kube import UNREACHABLE, FakeKube, event, job, pod, until
from rich.console import Console

from springtide_cli import install, run
from springtide_cli.apply import Applier
from springtide_cli.errors import CliError, Refused
from springtide_cli.follow import Follower
from springtide_cli.manifest import parse
from springtide_cli.run import Options, Progress
from springtide_cli.screen import PlainScreen
from springtide_kube.errors import ApiRefusal

JOBS = "/apis/springtide.dev/v1alpha1/namespaces/default/trainingjobs"
EVENTS = "/api/v1/namespaces/default/events"
PODS = "/api/v1/namespaces/default/pods"
GROUP = {
    "resources": [
        {"kind": "TrainingJob", "name": "trainingjobs", "namespaced": True},
        {"kind": "TrainingJob", "name": "trainingjobs/scale"},
    ]
}
CORE = {
    "resources": [
        {"kind": "ConfigMap", "name": "configmaps", "namespaced": True},
        {"kind": "Namespace", "name": "namespaces", "namespaced": False},
    ]
}
TEXT = """
apiVersion: v1
kind: ConfigMap
metadata: {name: settings, namespace: other}
---
apiVersion: springtide.dev/v1alpha1
kind: TrainingJob
metadata: {name: digits}
spec: {workers: {}}
"""


class Recorder(PlainScreen):
    def __init__(self) -> None:
        self.out = io.StringIO()
        super().__init__(Console(file=self.out))

    @property
    def texts(self) -> list[str]:
        return [line[10:] for line in self.out.getvalue().splitlines()]


@pytest.fixture
def kube() -> FakeKube:
    made = FakeKube()
    made.lists = {JOBS: [[job()]], EVENTS: [[]], PODS: [[]]}
    made.answers = {("GET", "/apis/springtide.dev/v1alpha1"): GROUP, ("GET", "/api/v1"): CORE}
    return made


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("springtide_cli.follow.LAST_EVENTS_SECONDS", 0.05)
    monkeypatch.setattr("springtide_cli.follow.TICK_SECONDS", 0.01)


async def follow(kube: FakeKube, screen: Recorder, **options: Any) -> int:
    async with asyncio.timeout(60):
        return await Follower(kube, screen, **options).follow("default", "digits", "u1")


async def test_a_job_is_followed_to_its_end_with_its_events_and_logs(
    kube: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("springtide_cli.follow.LAST_EVENTS_SECONDS", 1.0)
    screen = Recorder()
    kube.lists[PODS] = [[pod("digits-worker-0-1", uid="p")]]
    log = kube.stream(f"{PODS}/digits-worker-0-1/log")
    log.put_nowait("2026-01-01T00:00:01Z loss 0.5")
    log.put_nowait(ApiRefusal(404, "NotFound", "gone"))
    task = asyncio.create_task(follow(kube, screen, logs=True))
    kube.send(EVENTS, "ADDED", event("Scaled", "from 3 to 5"))
    kube.send(JOBS, "MODIFIED", job(conditions={"Running": (True, "Training", "it trains")}))
    await until(lambda: {"digits-worker-0-1 | loss 0.5", "Running: it trains"} <= set(screen.texts))
    kube.send(JOBS, "MODIFIED", job(conditions={"Succeeded": (True, "WorkerFinished", "done")}))
    kube.send(EVENTS, "ADDED", event("Recovered", "late news", uid="e2"))
    assert await task == 0
    assert screen.texts[-1] == "digits succeeded"
    assert {"Scaled: from 3 to 5", "Recovered: late news"} <= set(screen.texts)


async def test_failure_is_1_and_nothing_is_left_running(kube: FakeKube) -> None:
    before = len(asyncio.all_tasks())
    kube.lists[JOBS] = [[job(conditions={"Failed": (True, "BackoffLimitExceeded", "too often")})]]
    screen = Recorder()
    assert await follow(kube, screen) == 1
    assert "digits failed: too often" in screen.texts
    assert len(asyncio.all_tasks()) == before


async def test_a_job_that_may_not_be_watched_is_an_error(kube: FakeKube) -> None:
    kube.lists[JOBS] = [ApiRefusal(403, "Forbidden", "user tim cannot list trainingjobs")]
    with pytest.raises(CliError, match="digits cannot be watched: user tim cannot list"):
        await follow(kube, Recorder())


async def test_unreadable_events_and_logs_are_reported_and_skipped(kube: FakeKube) -> None:
    kube.lists[EVENTS] = [ApiRefusal(403, "Forbidden", "no events for tim")]
    kube.lists[PODS] = [ApiRefusal(403, "Forbidden", "no pods for tim")]
    screen = Recorder()
    task = asyncio.create_task(follow(kube, screen, logs=True))
    await until(lambda: len(screen.texts) >= 2)
    kube.send(JOBS, "MODIFIED", job(conditions={"Succeeded": (True, "WorkerFinished", "done")}))
    assert await task == 0
    assert {"events cannot be read: no events for tim", "worker logs cannot be read: no pods for tim"} <= set(
        screen.texts
    )


async def test_a_job_without_an_operator_is_said(kube: FakeKube) -> None:
    screen, seconds = Recorder(), itertools.count(step=10)
    task = asyncio.create_task(follow(kube, screen, clock=lambda: float(next(seconds))))
    await until(lambda: bool(screen.texts))
    assert "no operator has taken up the job" in screen.texts[0]
    kube.send(JOBS, "DELETED", job())
    assert await task == 1
    assert screen.texts[-1] == "digits was deleted before it ended"


# ---- applying


def stored(version: str) -> dict[str, Any]:
    made = job()
    made["metadata"]["resourceVersion"] = version
    return made


async def test_the_objects_are_applied_in_order_in_their_namespaces(kube: FakeKube) -> None:
    job_path, map_path = f"{JOBS}/digits", "/api/v1/namespaces/other/configmaps/settings"
    kube.answers |= {("PATCH", job_path): stored("1"), ("PATCH", map_path): stored("2")}
    screen, progress = Recorder(), Progress()
    manifest = parse(TEXT, "job.yaml")
    assert await run.apply_all(kube, manifest, Options(), screen, progress) == stored("1")
    patches = [
        (path, body, query, kind) for method, path, body, query, kind in kube.requests if method == "PATCH"
    ]
    query = {"fieldManager": "springtide", "fieldValidation": "Strict", "force": "false"}
    assert patches == [
        (path, obj, query, "application/apply-patch+yaml")
        for path, obj in zip([map_path, job_path], manifest.objects, strict=True)
    ]
    assert screen.texts == ["ConfigMap settings created", "TrainingJob digits created"]
    assert progress.job == ("default", "digits")


async def test_what_an_apply_did_is_told(kube: FakeKube) -> None:
    path = f"{JOBS}/digits"
    obj = parse(TEXT, "x").job
    kube.answers |= {("GET", path): stored("1"), ("PATCH", path): stored("1")}
    assert (await Applier(kube, "default").apply(obj))[1] == "unchanged"
    kube.answers[("PATCH", path)] = stored("2")
    assert (await Applier(kube, "default").apply(obj))[1] == "configured"
    assert (await Applier(kube, "default", force=True).apply(obj))[1] == "configured"
    assert kube.requests[-1][3]["force"] == "true"


async def test_the_namespace_option_is_for_objects_that_name_none(kube: FakeKube) -> None:
    other = JOBS.replace("default", "other") + "/digits"
    kube.answers |= {("PATCH", other): stored("1"), ("PATCH", "/api/v1/namespaces/new"): stored("1")}
    applier = Applier(kube, "other")
    await applier.apply(parse(TEXT, "x").job)
    await applier.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "new"}})
    assert [r[1] for r in kube.requests if r[0] == "PATCH"] == [other, "/api/v1/namespaces/new"]


async def test_the_api_servers_refusal_is_passed_on(kube: FakeKube) -> None:
    message = 'TrainingJob.springtide.dev "digits" is invalid: spec.workers.template: Required value'
    kube.answers[("PATCH", f"{JOBS}/digits")] = ApiRefusal(422, "Invalid", message)
    with pytest.raises(
        Refused, match=r"^TrainingJob digits was refused: TrainingJob\.springtide\.dev .* Required value$"
    ):
        await Applier(kube, "default").apply(parse(TEXT, "x").job)
    kube.answers[("PATCH", f"{JOBS}/digits")] = ApiRefusal(409, "Conflict", "Apply failed with 1 conflict")
    with pytest.raises(Refused, match="1 conflict; --force-conflicts takes these fields over"):
        await Applier(kube, "default").apply(parse(TEXT, "x").job)


async def test_a_cluster_without_springtide_is_told_so(kube: FakeKube) -> None:
    del kube.answers[("GET", "/apis/springtide.dev/v1alpha1")]
    with pytest.raises(
        Refused, match=r"knows no TrainingJob in springtide\.dev/v1alpha1\. Springtide is not installed"
    ):
        await Applier(kube, "default").apply(parse(TEXT, "x").job)
    with pytest.raises(Refused, match=r"knows no Wodget in v1$"):
        await Applier(kube, "default").apply(
            {"apiVersion": "v1", "kind": "Wodget", "metadata": {"name": "a"}}
        )


async def test_no_right_to_read_is_a_refusal_too(kube: FakeKube) -> None:
    kube.answers[("GET", f"{JOBS}/digits")] = ApiRefusal(403, "Forbidden", "tim cannot get")
    with pytest.raises(Refused, match="tim cannot get"):
        await Applier(kube, "default").apply(parse(TEXT, "x").job)
    with pytest.raises(Refused, match="tim cannot get"):
        await run.read_job(kube, "default", "digits")


def test_an_interrupt_tells_what_stays_and_how_to_go_on() -> None:
    def texts(progress: Progress) -> list[str]:
        return [line.text for line in run.interrupted(progress)]

    assert texts(Progress()) == ["interrupted; nothing was applied"]
    assert texts(Progress(applied=["ConfigMap a"])) == ["interrupted; applied so far: ConfigMap a"]
    assert texts(Progress(job=("ml", "digits"), again=" --local")) == [
        "stopped following; the job digits goes on",
        "follow it again: springtide follow digits -n ml --local",
        "end it: kubectl delete trainingjobs.springtide.dev digits -n ml",
    ]


# ---- installing


def test_installed_manifests_are_those_of_the_repository() -> None:
    assert KINDS[0] == "CustomResourceDefinition"
    assert KINDS[-1] == "Deployment"


KINDS = [obj["kind"] for name in install.MANIFESTS for obj in install.objects(name)]


class Cluster(FakeKube):
    """Serves every kind, and stores what is applied with a status that gets ready at the third look."""

    def __init__(self, never: str = "") -> None:
        super().__init__()
        self.never = never
        self.looks: dict[str, int] = {}

    async def request(
        self, method: str, path: str, body: Any = None, query: Any = None, content_type: str = ""
    ) -> Any:
        parts = path.split("/")
        if path in self.lists:
            return await super().request(method, path, body, query, content_type)
        if len(parts) in (3, 4):
            return {
                "resources": [
                    {"kind": k, "name": k.lower(), "namespaced": k in ("Deployment", "Role")} for k in KINDS
                ]
            }
        if method == "PATCH":
            self.requests.append((method, path, body, {}, content_type))
            return {"metadata": {"resourceVersion": "1"}}
        kind = "Deployment" if "/deployments/" in path else "CustomResourceDefinition"
        if f"/{kind.lower()}s/" not in path.lower():
            raise ApiRefusal(404, "NotFound", "not found")
        self.looks[kind] = self.looks.get(kind, 0) + 1
        ready = self.looks[kind] >= (1 if self.never else 3) and kind != self.never
        condition = {
            "type": "Established" if kind != "Deployment" else "Available",
            "status": str(ready),
            "message": "minimum availability",
        }
        counts = {"updatedReplicas": 1, "availableReplicas": int(ready), "observedGeneration": 1}
        return {
            "metadata": {"generation": 1},
            "spec": {"replicas": 1},
            "status": {"conditions": [condition], **counts},
        }


@pytest.mark.slow
async def test_installing_waits_for_the_kind_and_for_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "POLL_SECONDS", 0.001)
    cluster = Cluster()
    async with asyncio.timeout(60):
        await install.install(cluster)
    assert cluster.looks == {"CustomResourceDefinition": 5, "Deployment": 3}  # three CRDs
    applied = [body["kind"] for _, _, body, _, _ in cluster.requests]
    assert applied == KINDS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("never", "what"),
    [
        (
            "Deployment",
            "springtide-operator is not ready after 0 s: 0 of 1 pods are ready; minimum availability",
        ),
        (
            "CustomResourceDefinition",
            "trainingjobs.springtide.dev is not ready after 0 s: its kind is not served yet",
        ),
    ],
)
async def test_an_install_that_does_not_get_ready_says_what_is_missing(
    never: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "POLL_SECONDS", 0.001)
    with pytest.raises(install.InstallError, match=what):
        await install.install(Cluster(never), timeout=0.3)


@pytest.mark.slow
async def test_operator_not_getting_ready_is_shown_with_its_log_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(install, "POLL_SECONDS", 0.001)
    cluster = Cluster("Deployment")
    status = {
        "phase": "Running",
        "containerStatuses": [
            {
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": {"exitCode": 1, "reason": "Error"}},
            }
        ],
        "conditions": [{"type": "Ready", "status": "False", "message": "unready: [operator]"}],
    }
    pods = "/api/v1/namespaces/springtide-system/pods"
    cluster.lists[pods] = [[{"metadata": {"name": "springtide-operator-x"}, "status": status}]]
    for item in ("it has no rights", None):
        cluster.stream(f"{pods}/springtide-operator-x/log").put_nowait(item)
    with pytest.raises(install.InstallError) as raised:
        await install.install(cluster, timeout=0.3)
    assert str(raised.value).splitlines()[1:] == [
        "  pod springtide-operator-x: Running, waiting (CrashLoopBackOff), last (Error 1),"
        " not Ready (unready: [operator])",
        "    it has no rights",
    ]


async def test_api_server_gone_while_applying_is_a_refusal(
    kube: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    kube.answers[("GET", f"{JOBS}/digits")] = UNREACHABLE
    kube.answers[("GET", "/api/v1/namespaces/other/configmaps/settings")] = UNREACHABLE

    class Connected:
        async def close(self) -> None:
            return None

        def __getattr__(self, name: str) -> Any:
            return getattr(kube, name)

    async def connected(*_: Any) -> Connected:
        return Connected()

    monkeypatch.setattr(run, "connect", connected)
    with pytest.raises(Refused, match="does not answer: Connection refused"):
        await run.run_manifest(parse(TEXT, "x"), Options(), Recorder(), Progress())
    with pytest.raises(Refused, match="does not answer: Connection refused"):
        await run.follow_job("digits", Options(), Recorder(), Progress())
