"""Requests of the client to the API server, and what becomes of the answers."""

from __future__ import annotations

import contextlib
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_fake_kube import FakeKube, job, pod

from springtide.client import (
    ClientError,
    ClusterRefused,
    JobFailed,
    JobNotFound,
    JobTimeout,
    SourceError,
    TrainingClient,
    TrainingJob,
)
from springtide_client.session import Session
from springtide_kube.errors import ApiRefusal, Unreachable
from springtide_kube.loop_thread import LoopThread

JOBS = "/apis/springtide.dev/v1alpha1/namespaces/default/trainingjobs"
DIGITS = f"{JOBS}/digits"
MAPS = "/api/v1/namespaces/default/configmaps"
PODS = "/api/v1/namespaces/default/pods"
EVENTS = "/api/v1/namespaces/default/events"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "client.md"


def train(lr: float = 0.1) -> None:
    print(lr)


def stored(body: Any) -> Any:
    return body | {"metadata": body["metadata"] | {"uid": "u1", "namespace": "default"}}


@pytest.fixture
def kube() -> FakeKube:
    made = FakeKube()
    made.lists = {JOBS: [[job()]], EVENTS: [[]], PODS: [[]]}
    made.answers = {
        ("POST", MAPS): stored,
        ("POST", JOBS): stored,
        ("GET", DIGITS): job(values={"loss": "0.25"}, state="Running"),
    }
    return made


@pytest.fixture
def client(kube: FakeKube, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainingClient]:
    def opened(**_: Any) -> Session:
        return Session(LoopThread("test"), kube, contextlib.AsyncExitStack(), "default")

    monkeypatch.setattr("springtide_client.client.open_session", opened)
    monkeypatch.setattr("springtide_client.job.LAST_SECONDS", 0.05)
    monkeypatch.setattr("springtide_cli.follow.LAST_EVENTS_SECONDS", 0.01)
    with TrainingClient() as made:
        yield made


def sent(kube: FakeKube) -> list[tuple[str, str]]:
    return [(method, path) for method, path, *_ in kube.requests]


def accept_everything(kube: FakeKube) -> None:
    """Take changes of the ConfigMap that the client has just named."""

    class Answers(dict[tuple[str, str], Any]):
        def get(self, key: tuple[str, str], default: Any = None) -> Any:
            if key[0] in ("PATCH", "DELETE") and key[1].startswith(f"{MAPS}/"):
                return {"kind": "ConfigMap"}
            return super().get(key, default)

    kube.answers = Answers(kube.answers)


def test_train_makes_both_objects_and_ties_them(client: TrainingClient, kube: FakeKube) -> None:
    accept_everything(kube)
    made = client.train(train, (1, 8), arguments={"lr": 0.5}, name="digits")
    assert (made.name, made.namespace, made.uid) == ("digits", "default", "u1")
    [maps, jobs, patch] = kube.requests
    assert [maps[:2], jobs[:2]] == [("POST", MAPS), ("POST", JOBS)]
    assert jobs[3] == {"fieldValidation": "Strict"}
    name = maps[2]["metadata"]["name"]
    volume = jobs[2]["spec"]["workers"]["template"]["spec"]["volumes"][0]
    assert volume["configMap"]["name"] == name
    assert patch[:2] == ("PATCH", f"{MAPS}/{name}")
    assert patch[2]["metadata"]["ownerReferences"][0]["uid"] == "u1"


def test_a_refused_job_leaves_nothing_and_says_why(client: TrainingClient, kube: FakeKube) -> None:
    accept_everything(kube)
    for refusal, words in (
        (
            ApiRefusal(422, "Invalid", "spec.workers: too many"),
            r"job digits was refused: spec\.workers: too many",
        ),
        (ApiRefusal(403, "Forbidden", "tim cannot create"), "was refused: tim cannot create"),
        (ApiRefusal(409, "AlreadyExists", "exists"), "there is a job digits already: choose another name"),
        (ApiRefusal(404, "NotFound", "404 page not found"), "Springtide is not installed in this cluster"),
    ):
        kube.requests.clear()
        kube.answers["POST", JOBS] = refusal
        with pytest.raises(ClusterRefused, match=words) as caught:
            client.train(train, name="digits")
        assert (caught.value.code, caught.value.reason) == (refusal.code, refusal.reason)
        assert [method for method, _ in sent(kube)] == ["POST", "POST", "DELETE"]


@pytest.mark.parametrize(
    "lost", [Unreachable("the API server does not answer"), ApiRefusal(504, "Timeout", "does not answer")]
)
def test_code_stays_where_an_answer_is_lost(client: TrainingClient, kube: FakeKube, lost: Exception) -> None:
    """The server may have made the job, which would wait for its code for ever."""
    kube.requests.clear()
    kube.answers["POST", JOBS] = lost
    with pytest.raises(ClusterRefused, match=r"whether job digits was made: .*does not answer; client\.get"):
        client.train(train, name="digits")
    assert [method for method, _ in sent(kube)] == ["POST", "POST"]


def test_a_function_that_cannot_be_sent_asks_nobody(client: TrainingClient, kube: FakeKube) -> None:
    with pytest.raises(SourceError, match="lambda"):
        client.train(lambda: None)
    assert kube.requests == []


def test_a_job_is_read_listed_and_changed(client: TrainingClient, kube: FakeKube) -> None:
    found = client.get("digits")
    assert found.status.state == "Running"
    assert found.values == {"loss": 0.25}
    assert [one.name for one in client.list()] == ["digits"]
    for method, path in (("PATCH", DIGITS), ("PATCH", f"{DIGITS}/scale")):
        kube.answers[method, path] = job()
    kube.requests.clear()
    found.scale(5)
    found.scale((2, 6))
    found.suspend()
    found.resume()
    assert [(path.removeprefix(DIGITS), body["spec"]) for _, path, body, *_ in kube.requests] == [
        ("/scale", {"replicas": 5}),
        ("", {"workers": {"replicas": 6, "minReplicas": 2, "maxReplicas": 6}}),
        ("", {"suspend": True}),
        ("", {"suspend": False}),
    ]
    kube.answers["PATCH", f"{DIGITS}/scale"] = ApiRefusal(422, "Invalid", "replicas must lie between 1 and 8")
    with pytest.raises(ClusterRefused, match="must lie between 1 and 8"):
        found.scale(9)
    with pytest.raises(JobNotFound):
        client.get("other")
    kube.answers["GET", DIGITS] = job(uid="u2")
    with pytest.raises(JobNotFound, match="another one has its name now"):
        found.status  # noqa: B018


def test_delete_waits_until_the_job_is_gone(client: TrainingClient, kube: FakeKube) -> None:
    found = client.get("digits")
    kube.answers["DELETE", DIGITS] = job()
    left = iter([job(), job(), job(uid="u2")])
    kube.answers["GET", DIGITS] = lambda _: next(left)
    kube.requests.clear()
    found.delete()
    assert next(left, None) is None
    assert kube.requests[0][2]["preconditions"] == {"uid": "u1"}
    kube.answers["GET", DIGITS] = job()
    with pytest.raises(JobTimeout, match=r"still there 0\.05 s after"):
        found.delete(timeout=0.05)
    kube.answers["DELETE", DIGITS] = ApiRefusal(404, "NotFound", "gone")
    found.delete()
    kube.answers["DELETE", DIGITS] = ApiRefusal(403, "Forbidden", "tim cannot delete")
    with pytest.raises(ClusterRefused, match="tim cannot delete"):
        found.delete()


def test_wait_ends_when_the_job_is_there(
    client: TrainingClient, kube: FakeKube, capsys: pytest.CaptureFixture[str]
) -> None:
    found = client.get("digits")
    kube.lists[JOBS] = [[job(step=3, conditions={"Running": (True, "Training", "it trains")})]]
    assert found.wait(30, until="Running").step == 3
    assert "Running: it trains" in capsys.readouterr().out
    assert found.wait(30, until=lambda status: (status.step or 0) > 2, progress=False).step == 3
    assert capsys.readouterr().out == ""
    kube.lists[JOBS] = [[job(step=9, conditions={"Succeeded": (True, "WorkerFinished", "done")})]]
    assert found.wait(30).step == 9
    assert "digits succeeded after 9 steps" in capsys.readouterr().out


def test_a_failed_job_says_its_reason_and_its_log(client: TrainingClient, kube: FakeKube) -> None:
    found = client.get("digits")
    failed = job(
        conditions={"Failed": (True, "BackoffLimitExceeded", "too often")},
        lastFailure={"pod": "digits-worker-0-1", "message": "no such data"},
    )
    kube.lists[JOBS] = [[failed]]
    kube.answers["GET", f"{PODS}/digits-worker-0-1"] = pod("digits-worker-0-1", uid="p")
    for item in ("Traceback", "FileNotFoundError: /data", None):
        kube.stream(f"{PODS}/digits-worker-0-1/log").put_nowait(item)
    with pytest.raises(JobFailed, match=r"digits failed \(BackoffLimitExceeded\): too often") as caught:
        found.wait(30, progress=False)
    assert caught.value.log == "Traceback\nFileNotFoundError: /data"
    assert caught.value.message == "too often; last failure, in digits-worker-0-1: no such data"
    assert "The end of the log of digits-worker-0-1:\nTraceback" in str(caught.value)
    assert [query["tailLines"] for path, query in kube.opened if path.endswith("/log")] == ["20"]
    with pytest.raises(JobFailed, match="BackoffLimitExceeded"):
        found.wait(30, until="Running", progress=False)


@pytest.mark.parametrize(
    ("listed", "reason", "words"),
    [
        (
            [job(conditions={"Succeeded": (True, "WorkerFinished", "done")})],
            "WorkerFinished",
            "before it was Suspended",
        ),
        ([job(uid="u2")], "Deleted", "deleted before it ended"),
    ],
)
def test_waiting_for_what_will_not_come_ends(
    client: TrainingClient, kube: FakeKube, listed: Any, reason: str, words: str
) -> None:
    found = client.get("digits")
    kube.lists[JOBS] = [listed]
    with pytest.raises(JobFailed, match=words) as caught:
        found.wait(30, until="Suspended", progress=False)
    assert caught.value.reason == reason


def test_a_job_that_is_late_says_where_it_is(client: TrainingClient, kube: FakeKube) -> None:
    found = client.get("digits")
    kube.lists[JOBS] = [[job(state="Pending", message="waits for 2 pods")]]
    words = r"digits was not Running within 0\.1 s; it is Pending: waits for 2 pods"
    with pytest.raises(JobTimeout, match=words) as caught:
        found.wait(0.1, until="Running", progress=False)
    assert isinstance(caught.value, TimeoutError)


def test_a_job_that_may_not_be_watched_is_refused(client: TrainingClient, kube: FakeKube) -> None:
    found = client.get("digits")
    kube.lists[JOBS] = [ApiRefusal(403, "Forbidden", "tim cannot list trainingjobs")]
    with pytest.raises(ClusterRefused, match="tim cannot list"):
        found.wait(30, progress=False)
    with pytest.raises(ClusterRefused, match="tim cannot list"):
        list(found.logs(follow=True))


def test_logs_are_read_and_followed(client: TrainingClient, kube: FakeKube) -> None:
    found = client.get("digits")
    names = ["digits-worker-0-0", "digits-worker-1-0"]
    kube.lists[PODS] = [[pod(name, uid=name) for name in names]]

    def say(*lines: Any) -> None:
        for name, line in itertools.product(names, lines):
            kube.stream(f"{PODS}/{name}/log").put_nowait(line)

    say("loss 1", None)
    assert found.logs(tail=1).splitlines() == [f"{name} | loss 1" for name in names]
    kube.lists[PODS] = [[pod(names[0], uid="a")]]
    kube.stream(f"{PODS}/{names[0]}/log").put_nowait("loss 2")
    kube.stream(f"{PODS}/{names[0]}/log").put_nowait(None)
    assert found.logs(worker=0) == "loss 2"
    assert kube.requests[-1][3]["labelSelector"].endswith("springtide.dev/slot=0")
    kube.lists[PODS] = [[pod(names[0], uid="a", phase="Succeeded", state="terminated")]]
    kube.stream(f"{PODS}/{names[0]}/log").put_nowait("2026-01-01T00:00:01Z loss 3")
    kube.stream(f"{PODS}/{names[0]}/log").put_nowait(None)
    kube.lists[JOBS] = [[job(conditions={"Succeeded": (True, "WorkerFinished", "done")})]]
    assert list(found.logs(follow=True, worker=names[0])) == ["loss 3"]
    with pytest.raises(ClientError, match="tail= goes without follow"):
        found.logs(follow=True, tail=1)


def test_no_cluster_says_what_to_do_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(
        ClusterRefused, match=r"TrainingClient\(kubeconfig=\.\.\.\) .* TrainingClient\(local=True\)"
    ):
        TrainingClient()
    with pytest.raises(ClientError, match="leave out context= and kubeconfig="):
        TrainingClient(local=True, context="x")
    with pytest.raises(ClientError, match="keep=True goes with local=True"):
        TrainingClient(keep=True)


def test_the_page_says_what_works(
    client: TrainingClient, kube: FakeKube, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each piece of docs/client.md runs, one after the other, against answers like an API server's."""
    accept_everything(kube)
    done = job(
        conditions={"Succeeded": (True, "WorkerFinished", "done"), "Running": (True, "x", "y")}, step=9
    )
    kube.lists[JOBS] = [[done]]
    kube.answers |= {(method, DIGITS): done for method in ("PATCH", "DELETE")}
    kube.answers |= {("PATCH", f"{DIGITS}/scale"): done, ("GET", DIGITS): done}
    monkeypatch.setattr(TrainingJob, "delete", lambda self, **_: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "src").mkdir()
    for name in ("train.py", "src/train.py"):
        (tmp_path / name).write_text("print(1)")
    page = tmp_path / "page.py"
    blocks = [
        textwrap.dedent(text) for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    ]
    page.write_text("\n".join(blocks))
    assert len(blocks) >= 5
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(page.read_text(), str(page), "exec"), names)
    made = [body for method, path, body, *_ in kube.requests if (method, path) == ("POST", JOBS)]
    assert len(made) >= 3
