"""Real processes of a job and a real collector: one trace of each recovery, of all who take part in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trace_collector import Received, TraceCollector, grpc_collector, http_collector
from worker_cluster import WorkerCluster

from springtide_protocol.tracing import of_coordinator, of_job

OPTIONS: dict[str, Any] = {"samples": 230, "batch": 32, "epochs": 60, "optimizer": "adam", "lr": 0.01}
JOB_UID = "0a1b2c3d-traced"
WHOLE_JOB = f"{of_job(JOB_UID).trace_id:032x}"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def collector() -> Iterator[TraceCollector]:
    with http_collector() as found:
        yield found


@pytest.fixture
def collector_by_grpc() -> Iterator[TraceCollector]:
    with grpc_collector() as found:
        yield found


def traced(cluster: WorkerCluster, collector: TraceCollector, protocol: str = "") -> WorkerCluster:
    cluster.everywhere = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_BSP_SCHEDULE_DELAY": "50",
        "SPRINGTIDE_JOB_UID": JOB_UID,
    }
    return cluster


def until_span(cluster: WorkerCluster, collector: TraceCollector, name: str, **fields: str) -> Received:
    """Wait for a span, while the job goes on."""
    cluster.until(lambda: bool(collector.named(name, **fields)), f"a span {name} {fields}")
    return collector.named(name, **fields)[0]


def parts(spans: list[Received], whole: Received) -> dict[str, Received]:
    return {span.name: span for span in spans if span.parent == whole.span and span.service == whole.service}


def check_recovery(spans: list[Received]) -> None:
    """A trace has one span without a parent, the recovery; all others lie below it, and end when it does or
    later."""
    by_id = {span.span: span for span in spans}
    [first] = [span for span in spans if not span.parent]
    assert (first.name, first.service, first.error) == ("recovery", "springtide-coordinator", "")
    assert first.links == (WHOLE_JOB,)
    for span in spans:
        assert span.began <= span.ended
        assert span is first or span.parent in by_id, span


@pytest.mark.slow
def test_killed_worker_and_its_successor_are_in_one_trace(
    new_cluster: Callable[..., WorkerCluster], collector: TraceCollector, tmp_path: Path
) -> None:
    (tmp_path / "volume").mkdir()
    storage = {"SPRINGTIDE_CHECKPOINT_URI": str(tmp_path / "volume"), "SPRINGTIDE_CHECKPOINT_SECONDS": "0.3"}
    cluster = traced(new_cluster(OPTIONS, environment=storage), collector)
    first, second = cluster.start(2)
    cluster.until_step(5)
    second.kill()
    recovery = until_span(cluster, collector, "recovery")
    cluster.environment["SPRINGTIDE_SLOT"] = "1"
    third = cluster.add()
    until_span(cluster, collector, "enter generation", trace=recovery.trace, pod=third.name)
    cluster.kill_coordinator()
    cluster.start_coordinator()
    until_span(cluster, collector, "take over")
    cluster.until_done(first, third)
    cluster.close()  # processes say the rest at their end

    spans = collector.of_trace(recovery.trace)
    check_recovery(spans)
    assert recovery.attributes["springtide.lost_pods"] == ["uid-1"]
    assert {"stream broke", "member lost"} <= set(recovery.events)
    assert parts(spans, recovery).keys() == {"stop members", "form generation", "first step", "join"}
    [join] = collector.named("join", trace=recovery.trace)
    assert join.parent == recovery.span

    survivor, entering = collector.named("enter generation", trace=recovery.trace, pod=first.name)
    assert (survivor.parent, entering.parent) == (recovery.span, join.span)
    assert recovery.began <= survivor.ended <= recovery.ended + 0.001
    assert parts(spans, survivor).keys() == {
        "wait for generation",
        "form group",
        "agree with members",
        "first step",
    }
    [newcomer] = collector.named("enter generation", trace=recovery.trace, pod=third.name)
    assert newcomer.attributes["springtide.new_process"] is True
    made = parts(spans, newcomer)
    assert sorted(made, key=lambda name: made[name].began) == [
        "start process",
        "wait for generation",
        "form group",
        "transfer state",
        "agree with members",
        "first step",
    ]
    sent, received = parts(spans, entering)["transfer state"], made["transfer state"]
    assert sent.attributes["springtide.bytes"] == received.attributes["springtide.bytes"] > 0
    assert [one.attributes["springtide.receives"] for one in (sent, received)] == [False, True]
    assert made["first step"].attributes == parts(spans, entering)["first step"].attributes

    of_whole_job = collector.of_trace(WHOLE_JOB)
    generations = [span for span in of_whole_job if span.name == "generation"]
    assert [span.attributes["springtide.cause"] for span in generations] == ["start", "failure"]
    assert recovery.trace in {trace for span in generations for trace in span.links}
    taken = collector.named("take over")
    assert [span.trace for span in taken] == [f"{of_coordinator(JOB_UID, 2, 0).trace_id:032x}"]

    for checkpoint in collector.named("checkpoint"):
        shares = [span for span in collector.of_trace(checkpoint.trace) if span.name == "write share"]
        assert {span.parent for span in shares} == {checkpoint.span}
    assert any(len(collector.of_trace(span.trace)) == 3 for span in collector.named("checkpoint"))


@pytest.mark.slow
def test_lost_server_and_its_successor_are_in_one_trace(
    new_server_cluster: Callable[..., WorkerCluster], collector_by_grpc: TraceCollector
) -> None:
    collector = collector_by_grpc
    cluster = traced(new_server_cluster(OPTIONS, 2, 2), collector, "grpc")
    cluster.start(2)
    cluster.until_step(5)
    cluster.servers[1].kill()
    recovery = until_span(cluster, collector, "recovery")
    successor = cluster.add_server(1)
    cluster.until_settled()
    until_span(cluster, collector, "copy shards", trace=recovery.trace)
    until_span(cluster, collector, "enter generation", trace=recovery.trace, pod=successor.name)
    cluster.close()
    spans = collector.of_trace(recovery.trace)
    check_recovery(spans)
    assert recovery.attributes["springtide.lost_pods"] == [cluster.servers[1].uid]
    [join] = collector.named("join", trace=recovery.trace)
    stayed = collector.named("enter generation", trace=recovery.trace, pod=cluster.servers[0].name)
    assert [span.parent for span in stayed] == [recovery.span, join.span]
    [started] = collector.named("start server", trace=recovery.trace)
    [copied] = collector.named("copy shards", trace=recovery.trace)
    assert (started.pod, copied.pod) == (successor.name, cluster.servers[0].name)
    assert copied.attributes["springtide.bytes"] > 0
    entered = [span for span in spans if span.name == "enter on servers"]
    assert {span.pod for span in entered} == {worker.name for worker in cluster.workers}


def test_job_without_a_collector_trains_as_well(
    new_cluster: Callable[..., WorkerCluster], collector: TraceCollector
) -> None:
    """Nobody listens at the endpoint: that costs one line in each log, and no process its end."""
    with http_collector() as gone:
        pass
    cluster = traced(new_cluster(OPTIONS | {"epochs": 3}), gone)
    cluster.everywhere["OTEL_EXPORTER_OTLP_TIMEOUT"] = "1"
    workers = cluster.start(2)
    cluster.until_done(*workers)
    assert len(cluster.finished()) == 2
    for worker in workers:
        assert worker.log().count("traces do not reach") == 1
        assert "Traceback" not in worker.log()
