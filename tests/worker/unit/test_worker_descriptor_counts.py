"""How large a group may be, by the descriptors that a process may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.comm import descriptors
from springtide.comm.descriptors import SPARE, largest_group, of_group, why_too_few


@given(st.integers(0, 100_000), st.integers(0, 2000))
def test_largest_group_fits_and_one_more_does_not(limit: int, opened: int) -> None:
    largest = largest_group(limit, opened)
    assert largest == 1 or opened + SPARE + of_group(largest) <= limit
    assert opened + SPARE + of_group(largest + 1) > limit


def test_default_limit_of_1024_is_too_low_for_512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "open_descriptors", lambda: 60)
    monkeypatch.setattr(descriptors, "descriptor_limit", lambda: 1024)
    assert why_too_few(0) == why_too_few(400) == ""
    said = why_too_few(512)
    assert "may open 1024 files (its hard limit, RLIMIT_NOFILE)" in said
    assert "generations of 448 processes, and the job wants 512" in said
    needed = 60 + SPARE + of_group(512)
    assert f"limit to {needed} at least" in said
    monkeypatch.setattr(descriptors, "descriptor_limit", lambda: needed)
    assert why_too_few(512) == ""
