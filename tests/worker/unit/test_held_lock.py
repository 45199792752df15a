"""Gaps in which a process computed are told, and those in which it stood still are not."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.coordination.held_lock import COMPUTED, LEAST_GAP, HeldLock


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 5.0), st.sampled_from([0.0, 0.4, 0.6, 2.0])), max_size=10))
def test_longest_gap_with_a_processor_is_told(gaps: list[tuple[float, float]]) -> None:
    held, now, processor = HeldLock(0.0, 0.0), 0.0, 0.0
    for gap, share in gaps:
        now, processor = now + gap, processor + share * gap
        held.look(now, processor)
    computed = [gap for gap, share in gaps if share >= COMPUTED and gap >= LEAST_GAP + 1e-6]
    assert abs(held.seconds - max(computed, default=held.seconds)) < 1e-6
    assert held.seconds == 0 or any(share >= COMPUTED for _, share in gaps)


def test_a_stopped_process_has_nothing_to_tell() -> None:
    held = HeldLock(0.0, 0.0)
    held.look(10.0, 0.1)
    assert held.seconds == 0
