"""`springtide top`: what it reads, what it shows, and what it says where it may not look."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import Any

import pytest
from cli_fake_kube import UNREACHABLE, FakeKube, job
from rich.console import Console

from springtide_cli import topview
from springtide_cli.errors import Refused
from springtide_cli.top import COORDINATORS, Top, parse, show
from springtide_cli.topview import Numbers, Row
from springtide_kube.errors import ApiRefusal

NOW = datetime(2026, 5, 1, 12, 0, 0, tzinfo=UTC)
JOBS = "/apis/springtide.dev/v1alpha1/trainingjobs"
METRICS = """\
# TYPE springtide_coordinator_generation gauge
springtide_coordinator_generation{training_job="digits",job_namespace="default"} 7
# TYPE springtide_coordinator_generation_members gauge
springtide_coordinator_generation_members{training_job="digits",job_namespace="default"} 2
# TYPE springtide_coordinator_step gauge
springtide_coordinator_step{training_job="digits",job_namespace="default"} 1234
# TYPE springtide_coordinator_step_seconds gauge
springtide_coordinator_step_seconds{training_job="digits",job_namespace="default"} 0.0123
# TYPE springtide_coordinator_samples_per_second gauge
springtide_coordinator_samples_per_second{training_job="digits",job_namespace="default"} 9876.5
# TYPE springtide_coordinator_goodput_ratio gauge
springtide_coordinator_goodput_ratio{training_job="digits",job_namespace="default"} 0.75
# TYPE springtide_coordinator_members gauge
springtide_coordinator_members{training_job="digits",job_namespace="default",standing="active"} 2
"""
STATUS = {
    "state": "Running",
    "workers": {"summary": "3/3"},
    "parameterServers": {"summary": "2/2"},
    "generation": 5,
    "step": 1000,
    "goodput": "0.5",
}


def coordinator(uid: str = "u1", address: str = "10.0.0.9") -> dict[str, Any]:
    meta = {"name": "digits-coordinator-1", "namespace": "default", "ownerReferences": [{"uid": uid}]}
    return {"metadata": meta, "status": {"phase": "Running", "podIP": address}}


def event(message: str, when: str, kind: str = "TrainingJob") -> dict[str, Any]:
    about = {"kind": kind, "namespace": "default", "name": "digits"}
    return {
        "involvedObject": about,
        "reason": "Scaled",
        "message": message,
        "lastTimestamp": when,
        "metadata": {},
    }


@pytest.fixture
def kube() -> FakeKube:
    fake = FakeKube()
    fake.lists[JOBS] = [[job(**STATUS)]]
    fake.lists["/api/v1/pods"] = [[coordinator()]]
    fake.lists["/api/v1/events"] = [[event("from 3 to 5", "2026-05-01T11:58:00Z")]]
    stream = fake.stream("/api/v1/namespaces/default/pods/digits-coordinator-1:9401/proxy/metrics")
    for line in [*METRICS.splitlines(), None]:
        stream.put_nowait(line)
    return fake


async def look(kube: FakeKube, namespace: str | None = None) -> list[str]:
    seen = await Top(kube, namespace, lambda: NOW).look()
    return topview.plain(seen.rows, seen.events)


async def test_numbers_are_the_coordinator_s(kube: FakeKube) -> None:
    heading, line, last = await look(kube)
    assert heading.split("  ")[0] == "NAMESPACE"
    assert line.split() == [
        "default",
        "digits",
        "Running",
        "2/3",
        "2/2",
        "7",
        "1234",
        "-",
        "-",
        "12",
        "ms",
        "9876",
        "0.750",
        "0",
    ]
    assert last == "  2m ago  default/digits  Scaled: from 3 to 5"
    assert ("GET", "/api/v1/pods", None, {"labelSelector": COORDINATORS}, "application/json") in kube.requests


async def test_done_and_left_are_those_of_the_status(kube: FakeKube) -> None:
    told = {"progress": 37, "estimatedCompletionTime": "2026-05-01T14:10:00Z"}
    kube.lists[JOBS] = [[job(**STATUS, **told)]]
    heading, line, _ = await look(kube)
    at = heading.index("DONE")
    assert heading[at:].split()[:2] == ["DONE", "LEFT"]
    assert line[at:].split()[:3] == ["37", "%", "2h"]
    late = job(**STATUS, progress=99, estimatedCompletionTime="2026-05-01T11:00:00Z")
    row = topview.rows([late], {}, NOW)[0]
    assert topview.cells(row)[7:9] == ("99 %", "0s"), "an estimate that is over"


async def test_parts_by_speed_are_told_of_the_slowest(kube: FakeKube) -> None:
    shares = [{"name": f"digits-worker-{n}", "samples": 9 - n, "secondsPerSample": "0.02"} for n in range(4)]
    kube.lists[JOBS] = [[job(**(STATUS | {"workers": {"summary": "3/3", "balance": shares}}))]]
    assert (await look(kube))[2] == (
        "default/digits: parts by speed: digits-worker-0 9 samples (0.02 s each), digits-worker-1 8 samples "
        "(0.02 s each), digits-worker-2 7 samples (0.02 s each)"
    )


async def test_standbys_that_are_ready_stand_behind_the_workers(kube: FakeKube) -> None:
    standby = {"summary": "1/2", "trouble": "no node takes it"}
    kube.lists[JOBS] = [[job(**STATUS, standby=standby)]]
    heading, line, trouble, _ = await look(kube)
    assert line.split()[3] == "2/3+1"
    assert line.split()[4] == "2/2", "the column of servers stays where it is"
    assert trouble == "default/digits: standbys: no node takes it"
    assert heading.split()[3] == "WORKERS"


async def test_without_right_to_coordinator_status_is_shown_saying_so(kube: FakeKube) -> None:
    path = "/api/v1/namespaces/default/pods/digits-coordinator-1:9401/proxy/metrics"
    kube.streams.pop(path)
    kube.stream(path).put_nowait(ApiRefusal(403, "Forbidden", "pods/proxy is forbidden"))
    _, line, note, _ = await look(kube)
    assert line.split() == ["default", "digits", "Running", "3/3", "2/2", "5", "1000", *"----", "0.5", "0"]
    assert note == "default/digits: numbers from its status: pods/proxy is forbidden"


async def test_a_coordinator_that_does_not_answer_holds_nothing_up(
    kube: FakeKube, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("springtide_cli.top.METRICS_SECONDS", 0.01)
    kube.streams.clear()
    assert "its coordinator does not answer within 0 s" in (await look(kube))[2]


async def test_a_closed_port_on_this_machine_is_said(kube: FakeKube) -> None:
    kube.lists["/api/v1/pods"] = [[coordinator(address="127.255.255.254")]]
    assert "its coordinator does not answer" in (await look(kube))[2]


async def test_one_namespace_is_asked_alone(kube: FakeKube) -> None:
    kube.lists["/apis/springtide.dev/v1alpha1/namespaces/lab/trainingjobs"] = [[]]
    kube.lists["/api/v1/namespaces/lab/pods"] = [[]]
    kube.lists["/api/v1/namespaces/lab/events"] = [[]]
    assert await look(kube, "lab") == ["no training jobs"]
    assert all("/namespaces/lab/" in request[1] for request in kube.requests)


async def test_a_refusal_says_what_to_do(kube: FakeKube) -> None:
    kube.answers["GET", JOBS] = ApiRefusal(403, "Forbidden", "trainingjobs is forbidden")
    with pytest.raises(
        Refused, match=r"jobs cannot be listed: trainingjobs is forbidden \(name a namespace with -n\)"
    ):
        await look(kube)


async def test_once_prints_one_look(kube: FakeKube) -> None:
    console = Console(file=io.StringIO(), width=200)
    await show(kube, None, console, seconds=60, once=True, live=False)
    assert isinstance(console.file, io.StringIO)
    assert "digits" in console.file.getvalue()


async def test_an_api_server_that_never_answered_is_refused(kube: FakeKube) -> None:
    kube.answers["GET", JOBS] = UNREACHABLE
    with pytest.raises(Refused, match="does not answer"):
        await show(kube, None, Console(file=io.StringIO()), seconds=1, once=True, live=False)


async def test_an_api_server_that_goes_away_leaves_the_last_look(kube: FakeKube) -> None:
    kube.lists[JOBS] = [[job(**STATUS)], UNREACHABLE, ApiRefusal(403, "Forbidden", "over")]
    console = Console(file=io.StringIO(), width=200)
    with pytest.raises(Refused, match="over"):
        await show(kube, None, console, seconds=0.001, once=False, live=False)
    assert isinstance(console.file, io.StringIO)
    last = console.file.getvalue().split("NAMESPACE")[-1]
    assert "digits" in last
    assert "no news: the API server at" in last


def test_rows_put_running_jobs_first() -> None:
    jobs = [
        job(name="b", uid="1", state="Succeeded"),
        job(name="c", uid="2", state="Running"),
        job(name="a", uid="3"),
    ]
    assert [row.job.name for row in topview.rows(jobs, {})] == ["c", "b", "a"]


def test_events_of_other_kinds_and_old_ones_are_left_out() -> None:
    many = [event(str(n), f"2026-05-01T11:{n:02}:00Z") for n in range(20)]
    lines = topview.event_lines([*many, event("pod", "2026-05-01T11:59:59Z", kind="Pod")], NOW)
    assert [line.rsplit(" ", 1)[1] for line in lines] == [str(n) for n in range(12, 20)]


def test_series_with_labels_of_their_own_are_no_single_numbers() -> None:
    values = parse(METRICS)
    assert "springtide_coordinator_members" not in values
    assert topview.numbers(values) == Numbers(7, 2, 1234, 0.0123, 9876.5, 0.75)
    assert topview.numbers({}) == Numbers()


def test_screen_draws_every_row() -> None:
    console = Console(file=io.StringIO(), width=160)
    seen = [Row(view_of("one")), Row(view_of("two"), trouble="away")]
    console.print(topview.screen(seen, ["an event"]))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(
        word in text for word in ("one", "two", "numbers from its status: away", "an event", "STEP TIME")
    )


def view_of(name: str) -> Any:
    from springtide_cli.jobview import view

    return view(job(name=name, **STATUS))
