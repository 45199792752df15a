"""Names of spans, samplers, and OpenTelemetry's variables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide_protocol.tracing import (
    OFF,
    Sampler,
    Span,
    TraceContext,
    TraceSettings,
    derived,
    of_checkpoint,
    of_coordinator,
    of_job,
    parse,
    read_settings,
)

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
contexts = st.builds(TraceContext, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans())


@given(contexts)
def test_traceparent_names_the_span_it_was_made_of(context: TraceContext) -> None:
    assert parse(str(context)) == context


@given(st.text(max_size=80))
def test_text_that_is_no_traceparent_names_nothing(text: str) -> None:
    found = parse(text)
    assert found is None or str(found)[3:52] == text[3:52]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00-00000000000000000000000000000000-0000000000000001-01",
        "00-00000000000000000000000000000001-0000000000000000-01",
        "ff-00000000000000000000000000000001-0000000000000001-01",
        "00-0000000000000000000000000000000A-0000000000000001-01",
        "00-00000000000000000000000000000001-0000000000000001-01-more",
        "00-00000000000000000000000000000001-0000000000000001",
        " 00-00000000000000000000000000000001-0000000000000001-01",
    ],
)
def test_malformed_traceparent_is_none(text: str) -> None:
    assert parse(text) is None


def test_traceparent_of_a_later_version_is_read() -> None:
    found = parse("01-00000000000000000000000000000001-0000000000000002-03-what-comes-later")
    assert found == TraceContext(1, 2, sampled=True)


def test_derived_names_are_equal_everywhere_and_differ() -> None:
    # Processes of different releases compute it: it must stay.
    assert str(of_job("uid")) == "00-edaf5b84a942f0e3718b7cf4b9035f45-9cc9aaee2d7d252a-01"
    assert of_job("uid") == derived("uid", "job")
    made = [
        of_job("a"),
        of_job("b"),
        of_coordinator("a", 2, 0),
        of_coordinator("a", 2, 1),
        of_coordinator("a", 3, 0),
        of_checkpoint("a", "step-1"),
        of_checkpoint("b", "step-1"),
    ]
    assert len({context.trace_id for context in made}) == len(made)


@given(st.integers(1, 2**128 - 1), st.floats(0, 1))
def test_sampler_of_a_share_keeps_more_with_a_greater_share(trace_id: int, ratio: float) -> None:
    if Sampler(ratio).begins(trace_id):
        assert Sampler(1.0).begins(trace_id)
        assert Sampler((1 + ratio) / 2).begins(trace_id)
    assert not Sampler(0.0).begins(trace_id)


def test_sampler_that_follows_keeps_what_the_beginner_decided() -> None:
    kept, dropped = TraceContext(1, 1, sampled=True), TraceContext(1, 1, sampled=False)
    assert Sampler(0.0).keeps(kept)
    assert not Sampler(1.0).keeps(dropped)
    assert not Sampler(0.0, follows=False).keeps(kept)
    assert Sampler(1.0, follows=False).keeps(dropped)


def test_nothing_is_exported_unless_somebody_asks() -> None:
    assert read_settings({}) == TraceSettings()
    assert not read_settings({"OTEL_TRACES_SAMPLER": "always_on"}).enabled
    assert not read_settings({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}).enabled
    assert not read_settings({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}).enabled
    assert read_settings({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}).problems == ()


def test_endpoint_or_exporter_turns_traces_on() -> None:
    found = read_settings(ENDPOINT)
    assert found == TraceSettings(True, endpoint="http://collector:4318")
    own = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://traces:1/v1/traces", **ENDPOINT}
    assert read_settings(own).endpoint == "http://traces:1/v1/traces"
    assert read_settings({"OTEL_TRACES_EXPORTER": "console,otlp"}).enabled


def test_variables_are_followed() -> None:
    found = read_settings(
        {
            **ENDPOINT,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.25",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_BSP_MAX_QUEUE_SIZE": "7",
        }
    )
    assert found == TraceSettings(
        True, "grpc", "http://collector:4318", Sampler(0.25), most_waiting=7, most_at_once=7, delay=0.1
    )
    always = read_settings({**ENDPOINT, "OTEL_TRACES_SAMPLER": "always_off"}).sampler
    assert always == Sampler(0.0, follows=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        ("OTEL_BSP_SCHEDULE_DELAY", "soon"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
    ],
)
def test_variable_that_cannot_be_followed_is_named(name: str, value: str) -> None:
    found = read_settings({**ENDPOINT, name: value})
    [problem] = found.problems
    assert name in problem
    assert value in problem
    assert found.enabled == (name != "OTEL_TRACES_EXPORTER")


def test_wrong_share_of_traces_is_named() -> None:
    found = read_settings(
        {**ENDPOINT, "OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "nan"}
    )
    assert "OTEL_TRACES_SAMPLER_ARG" in found.problems[0]
    assert found.sampler == Sampler(1.0, follows=False)


def test_tracer_that_is_off_does_nothing() -> None:
    context = OFF.child_of(OFF.begin(of_job("uid")))
    assert not OFF.enabled
    assert not context.sampled
    assert not OFF.new_trace().sampled
    OFF.record(Span("job", context, 0.0, 1.0))
