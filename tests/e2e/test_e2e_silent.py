"""Faults that take a minute to be noticed: begun with the session, looked at last."""

from __future__ import annotations

import pytest
from e2e_jobs import RunningJob

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_a_script_that_never_calls_init_is_named_after_a_minute(silent: RunningJob) -> None:
    degraded = silent.until_condition("Degraded", 240, reason="WorkerSilent")
    # Under whichever attempt: another test may have drained its first node.
    assert "silent-worker-0-" in degraded["message"]
    assert "init()" in degraded["message"]
