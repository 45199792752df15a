"""Times that the operator tells: durations, since no two machines have the same clock."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from springtide_coordinator import wire
from springtide_protocol import coordinator_pb2 as pb

CLOCKS = st.floats(1.6e9, 1.9e9)


@hypothesis.given(now=CLOCKS, theirs=CLOCKS, seconds=st.floats(0.001, 1e4))
def test_time_to_leave_is_by_the_own_clock(now: float, theirs: float, seconds: float) -> None:
    """The other time in the message is another machine's."""
    pod = wire.to_pod(pb.Pod(leave_by=theirs + seconds, leave_in_seconds=seconds), now)
    assert pod.leave_by == pytest.approx(now + seconds, abs=1e-3)
    asked = pb.SyncRequest(suspend=True, suspend_by=theirs + seconds, suspend_in_seconds=seconds)
    assert wire.to_synced(asked, now).suspend_by == pytest.approx(now + seconds, abs=1e-3)


@hypothesis.given(now=CLOCKS, theirs=CLOCKS)
def test_earlier_operator_says_a_time_and_no_duration(now: float, theirs: float) -> None:
    assert wire.to_pod(pb.Pod(leave_by=theirs), now).leave_by == theirs
    assert wire.to_synced(pb.SyncRequest(suspend=True, suspend_by=theirs), now).suspend_by == theirs


@pytest.mark.parametrize("odd", [0.0, -1.0, float("nan"), float("inf")])
def test_duration_that_cannot_be_one_counts_as_not_told(odd: float) -> None:
    assert wire.to_pod(pb.Pod(leave_in_seconds=odd), 1e9).leave_by == 0.0
