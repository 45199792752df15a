"""An ordinary life makes no Warning event, on no object."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from e2e_cluster import OPERATOR_NAMESPACE, E2ECluster
from e2e_jobs import RunningJob

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SERVERS = {"strategy": {"type": "ParameterServer"}, "parameterServers": {"replicas": 1}}


@pytest.mark.slow
@pytest.mark.parametrize("spec", [{}, SERVERS], ids=["all-reduce", "servers"])
def test_an_ordinary_life_makes_no_warning(
    e2e: E2ECluster, start: Callable[..., RunningJob], spec: dict[str, object]
) -> None:
    """Start, scale up and down, a drain, and the end."""
    before = e2e.warnings(OPERATOR_NAMESPACE)
    running = start("quiet", workers=1, epochs=100_000, **spec)
    running.until_trains(1)
    running.scale(2)
    running.until_trains(2)
    node = running.pods()[0]["spec"]["nodeName"]
    try:
        e2e.drain(node, running.name)
        running.until_trains(2)
    finally:
        e2e.kubectl("uncordon", node)
    running.scale(1)
    running.until_trains(1)
    assert not e2e.warnings(running.namespace), running.describe()
    e2e.kubectl("delete", "stj", running.name, "-n", running.namespace, "--timeout=60s")
    if spec:  # `test_a_job_succeeds_and_proves_its_samples` looks at the end of a job without servers
        again = start("finishes", workers=2, epochs=30, **spec)
        again.until_condition("Succeeded")
        assert not e2e.warnings(running.namespace), again.describe()
    assert e2e.warnings(OPERATOR_NAMESPACE) == before
