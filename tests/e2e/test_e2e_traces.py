"""One trace of a recovery over operator, coordinator and workers, at a collector that takes OTLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from e2e_cluster import OPERATOR_LABELS, OPERATOR_NAMESPACE, E2ECluster, until_operator_is_ready
from e2e_jobs import RunningJob
from trace_collector import Received, TraceCollector, http_collector

from springtide_protocol.tracing import of_job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

Start = Callable[..., RunningJob]


@pytest.fixture
def collector(e2e: E2ECluster) -> Iterator[TraceCollector]:
    """A collector that the operator exports to, and has the pods of jobs export to."""
    if not e2e.ours:
        pytest.skip("pods of this cluster cannot reach a collector in the tests' process")
    deployment = e2e.kubectl("get", "deployments", "-n", OPERATOR_NAMESPACE, "-o", "name").split()[0]

    def set_environment(*variables: str) -> None:
        before = e2e.pods(OPERATOR_NAMESPACE, OPERATOR_LABELS)[0]["metadata"]["uid"]
        e2e.kubectl("set", "env", deployment, "-n", OPERATOR_NAMESPACE, *variables)
        until_operator_is_ready(e2e, other_than=before)

    with http_collector() as found:
        set_environment(f"OTEL_EXPORTER_OTLP_ENDPOINT={found.endpoint}", "OTEL_BSP_SCHEDULE_DELAY=100")
        try:
            yield found
        finally:
            set_environment("OTEL_EXPORTER_OTLP_ENDPOINT-", "OTEL_BSP_SCHEDULE_DELAY-")


@pytest.mark.slow
def test_killed_worker_gives_one_trace_of_all_who_replace_it(
    e2e: E2ECluster, start: Start, collector: TraceCollector
) -> None:
    running = start("traced", workers=2, epochs=120, pace="0.3")
    running.until_trains(2)
    kept, lost = running.pods()
    running.delete_pod(lost["metadata"]["name"], "--force", "--grace-period=0")
    running.until_goes_on()
    running.until_trains(2)
    names = {pod["metadata"]["name"] for pod in running.pods()}
    [successor] = names - {kept["metadata"]["name"]}

    def whole() -> Received | None:
        """Return the recovery once its trace has what operator, coordinator and both workers do."""
        for recovery in collector.named("recovery"):
            spans = collector.of_trace(recovery.trace)
            entered = {span.pod for span in spans if span.name == "enter generation"}
            if "replace pod" in {span.name for span in spans} and entered == names:
                return recovery
        return None

    recovery: Received = collector.until(whole, "the whole recovery")
    spans = collector.of_trace(recovery.trace)
    assert {span.service for span in spans} == {
        "springtide-operator",
        "springtide-coordinator",
        "springtide-worker",
    }
    assert recovery.attributes["springtide.lost_pods"] == [lost["metadata"]["uid"]]
    [replaced] = [span for span in spans if span.name == "replace pod"]
    assert replaced.parent == recovery.span
    assert replaced.attributes["k8s.pod.name"] == successor
    assert replaced.events == ("pod created", "pod scheduled", "pod runs")
    first_steps = [span for span in spans if span.name == "first step" and span.pod == successor]
    assert first_steps
    assert replaced.began < first_steps[0].began
    by_id = {span.span for span in spans}
    assert [span for span in spans if span.parent not in by_id] == [recovery]

    running.set_pace(0)
    running.until_condition("Succeeded")
    trace = f"{of_job(running.read()['metadata']['uid']).trace_id:032x}"

    last = f"1.0/{running.status()['generation']}"

    def job_and_generations() -> list[Received]:
        """Return them once the last generation, which its coordinator records as it ends, is among them."""
        found = [span for span in collector.of_trace(trace) if span.name in ("job", "generation")]
        there = {span.attributes.get("springtide.generation") for span in found if span.name == "generation"}
        return found if last in there and any(span.name == "job" for span in found) else []

    found = collector.until(job_and_generations, f"the job and generation {last}")
    [job] = [span for span in found if span.name == "job"]
    assert (job.service, job.parent, job.error) == ("springtide-operator", "", "")
    assert job.attributes["springtide.step"] == 120 * 4
    assert {span.parent for span in found if span is not job} == {job.span}
