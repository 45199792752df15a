"""Spans on their way to a collector: bounded, counted, in a thread that nobody waits for."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from trace_collector import TraceCollector, grpc_collector, http_collector

from springtide_protocol import span_export
from springtide_protocol.span_export import SpanQueue, job_resource, open_tracer, process_began
from springtide_protocol.span_metrics import SpanCollector
from springtide_protocol.tracing import (
    Sampler,
    Span,
    SpanEvent,
    TraceContext,
    TraceSettings,
    of_job,
)

JOB = {"SPRINGTIDE_JOB": "digits", "SPRINGTIDE_POD_NAME": "digits-worker-0-0", "SPRINGTIDE_NAMESPACE": "ml"}


class FakeExporter:
    """Takes spans, fails, or blocks until it is closed."""

    def __init__(self, problem: str = "", blocks: bool = False) -> None:
        self.problem, self.blocks = problem, blocks
        self.batches: list[list[Span]] = []
        self.entered, self.closed = threading.Event(), threading.Event()

    def export(self, spans: Sequence[Span]) -> str:
        self.batches.append(list(spans))
        self.entered.set()
        if self.blocks:
            self.closed.wait(30)
            return "it was closed"
        return self.problem

    def close(self) -> None:
        self.closed.set()


def settings(**options: object) -> TraceSettings:
    return TraceSettings(True, endpoint="http://collector", **{"delay": 0.01, **options})  # type: ignore[arg-type]


def span(name: str = "recovery", context: TraceContext | None = None) -> Span:
    return Span(name, context or TraceContext(7, 9), 1.0, 2.0)


@pytest.fixture
def opened() -> Iterator[Callable[..., SpanQueue]]:
    """Open queues that are closed at the test's end."""
    queues: list[SpanQueue] = []

    def make(exporter: FakeExporter, **options: object) -> SpanQueue:
        queues.append(SpanQueue(settings(**options), exporter))
        return queues[-1]

    yield make
    for queue in queues:
        queue.close(1.0)


def test_spans_are_exported_in_batches_and_counted(opened: Callable[..., SpanQueue]) -> None:
    exporter = FakeExporter()
    queue = opened(exporter, most_at_once=3, delay=0.05)
    for _ in range(7):
        queue.record(span())
    queue.close()
    assert [len(batch) for batch in exporter.batches] == [3, 3, 1]
    assert (queue.exported, queue.dropped) == (7, 0)
    assert exporter.closed.is_set()


def test_no_thread_runs_before_there_is_a_span(opened: Callable[..., SpanQueue]) -> None:
    queue = opened(FakeExporter())
    queue.new_trace()
    assert "springtide-traces" not in {thread.name for thread in threading.enumerate()}
    queue.close()


def test_full_queue_drops_counts_and_says_so_once(
    opened: Callable[..., SpanQueue], caplog: pytest.LogCaptureFixture
) -> None:
    exporter = FakeExporter(blocks=True)
    queue = opened(exporter, most_waiting=5, most_at_once=1)
    queue.record(span())
    assert exporter.entered.wait(10)
    for _ in range(9):
        queue.record(span())
    assert queue.dropped == 4
    began = time.monotonic()
    queue.close(0.2)
    assert time.monotonic() - began < 5
    assert (queue.exported, queue.dropped) == (0, 10)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "OTEL_BSP_MAX_QUEUE_SIZE" in caplog.text


def test_failing_collector_costs_spans_and_one_warning(
    opened: Callable[..., SpanQueue], caplog: pytest.LogCaptureFixture
) -> None:
    queue = opened(FakeExporter(problem="503 Service Unavailable"), most_at_once=1)
    for _ in range(4):
        queue.record(span())
    queue.close()
    assert (queue.exported, queue.dropped) == (0, 4)
    [record] = caplog.records
    assert "http://collector: 503 Service Unavailable" in record.getMessage()


def test_exception_of_the_exporter_ends_nothing(opened: Callable[..., SpanQueue]) -> None:
    class Raising(FakeExporter):
        def export(self, spans: Sequence[Span]) -> str:
            super().export(spans)
            if len(self.batches) == 1:
                raise ValueError("a library's fault")
            return ""

    queue = opened(Raising(), most_at_once=1)
    queue.record(span())
    queue.record(span())
    queue.close()
    assert (queue.exported, queue.dropped) == (1, 1)


def test_span_after_the_end_is_dropped(opened: Callable[..., SpanQueue]) -> None:
    queue = opened(FakeExporter())
    queue.close()
    queue.record(span())
    assert queue.dropped == 1


def test_unsampled_spans_go_nowhere(opened: Callable[..., SpanQueue]) -> None:
    exporter = FakeExporter()
    queue = opened(exporter, sampler=Sampler(0.0))
    began = queue.new_trace()
    assert not began.sampled
    assert not queue.begin(of_job("uid")).sampled
    queue.record(span(context=queue.child_of(began)))
    queue.record(span(context=TraceContext(1, 2, sampled=True)))  # somebody else has decided on that
    queue.close()
    assert [len(batch) for batch in exporter.batches] == [1]


def test_names_of_spans_leave_the_scripts_random_numbers_alone(opened: Callable[..., SpanQueue]) -> None:
    queue = opened(FakeExporter())
    random.seed(0)
    expected = random.getrandbits(64)
    random.seed(0)
    contexts = {queue.child_of(queue.new_trace()) for _ in range(20)}
    assert random.getrandbits(64) == expected
    assert len({context.trace_id for context in contexts}) == 20


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_records_nothing(opened: Callable[..., SpanQueue]) -> None:
    exporter = FakeExporter()
    queue = opened(exporter)
    child = os.fork()
    if child == 0:  # as the loader of a data set does, whose process has no exporting thread
        queue.record(span())
        queue.close(5.0)
        os._exit(len(exporter.batches) + queue.dropped)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize(
    ("protocol", "collecting"), [("http/protobuf", http_collector), ("grpc", grpc_collector)]
)
def test_collector_gets_all_that_a_span_says(
    protocol: str,
    collecting: Callable[[], AbstractContextManager[TraceCollector]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with collecting() as collector:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_BSP_SCHEDULE_DELAY": "10",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=lab",
            **JOB,
        }
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        queue = open_tracer("springtide-worker", job_resource(os.environ))
        assert queue is not None
        parent = TraceContext(0xABC, 0xDEF)
        whole = Span(
            "transfer state",
            TraceContext(0xABC, 0x123),
            1000.25,
            1000.5,
            parent,
            {"springtide.bytes": 7, "springtide.receives": True, "springtide.lost_pods": ["a", "b"]},
            (SpanEvent("pod created", 1000.3),),
            (of_job("uid"),),
            "RuntimeError: lost",
        )
        queue.record(whole)
        queue.close(20.0)
        [found] = collector.spans
    assert (queue.exported, queue.dropped) == (1, 0)
    assert (found.service, found.pod, found.name) == (
        "springtide-worker",
        JOB["SPRINGTIDE_POD_NAME"],
        whole.name,
    )
    assert (found.trace, found.span, found.parent) == (f"{0xABC:032x}", f"{0x123:016x}", f"{0xDEF:016x}")
    assert (found.began, found.ended) == (1000.25, 1000.5)
    assert found.attributes == dict(whole.attributes)
    assert (found.events, found.error) == (("pod created",), "RuntimeError: lost")
    assert found.links == (f"{of_job('uid').trace_id:032x}",)
    assert found.resource["deployment.environment.name"] == "lab"
    assert found.resource["springtide.job"] == "digits"
    assert "k8s.node.name" not in found.resource  # not known here
    assert not caplog.records


def test_services_own_name_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    with http_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "vision")
        queue = open_tracer("springtide-worker", {})
        assert queue is not None
        queue.record(span())
        queue.close(20.0)
        assert [one.service for one in collector.spans] == ["vision"]


def test_refusing_collector_is_named_once_by_us_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with http_collector() as collector:
        collector.refuse = 2
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
        queue = open_tracer("springtide-worker", {})
        assert queue is not None
        for _ in range(3):
            queue.record(span())
        queue.close(20.0)
    assert (queue.exported, queue.dropped) == (1, 2)
    [record] = caplog.records
    assert record.name == "springtide.tracing"
    assert "400" in record.getMessage()


def test_others_words_of_the_library_stay_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with http_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        queue = open_tracer("x", {})
        assert queue is not None
        queue.record(span())
        queue.close(20.0)
    logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").warning("the script's own")
    assert "the script's own" in caplog.text


def test_missing_library_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(span_export.importlib.util, "find_spec", lambda name: None)
    assert open_tracer("x", {}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector"}) is None
    [record] = caplog.records
    assert "springtide[otel]" in record.getMessage()


def test_nothing_is_opened_where_nobody_asks(caplog: pytest.LogCaptureFixture) -> None:
    assert open_tracer("x", {}, {}) is None
    assert (
        open_tracer("x", {}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_SDK_DISABLED": "TRUE"}) is None
    )
    assert not caplog.records


def test_counts_are_served_with_the_processes_labels(opened: Callable[..., SpanQueue]) -> None:
    queue = opened(FakeExporter(problem="no"))
    queue.record(span())
    queue.close()
    registry = CollectorRegistry()
    registry.register(SpanCollector(queue, {"training_job": "digits"}))
    text = generate_latest(registry).decode()
    assert 'springtide_trace_spans_dropped_total{training_job="digits"} 1.0' in text
    assert 'springtide_trace_spans_exported_total{training_job="digits"} 0.0' in text


def test_process_began_before_now_and_after_the_machine() -> None:
    began = process_began()
    assert time.time() - 7200 < began < time.time()
