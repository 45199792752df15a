"""Gaps in which a process computed are told, and those in which it stood still are not."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.coordination.held_lock import COMPUTED, LEAST_GAP, HeldLock


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.01, 5.0), st.sampled_from([0.0, 0.4, 0.6, 2.0]), st.booleans()), max_size=10
    )
)
def test_longest_gap_with_a_processor_is_told(gaps: list[tuple[float, float, bool]]) -> None:
    held, now, processor = HeldLock(0.0, 0.0), 0.0, 0.0
    for gap, share, watched in gaps:
        held.look(now, processor, watched)
        now, processor = now + gap, processor + share * gap
    held.look(now, processor, True)
    counted = [(gap, share) for gap, share, watched in gaps if watched]
    computed = [gap for gap, share in counted if share >= COMPUTED and gap >= LEAST_GAP + 1e-6]
    assert abs(held.seconds - max(computed, default=held.seconds)) < 1e-6
    assert held.seconds == 0 or any(share >= COMPUTED for _, share in counted)


def test_a_stopped_process_has_nothing_to_tell() -> None:
    held = HeldLock(0.0, 0.0, watched=True)
    held.look(10.0, 0.1, True)
    assert held.seconds == 0


def test_imports_before_the_first_commit_are_not_told() -> None:
    held = HeldLock(0.0, 0.0)
    held.look(5.0, 5.0, False)
    held.look(10.0, 10.0, True)
    assert held.seconds == 0
    held.look(11.0, 11.0, True)
    assert held.seconds == 1.0
