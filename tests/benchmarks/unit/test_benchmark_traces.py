"""Figures of the benchmark of traces."""

from __future__ import annotations

import pytest

from benchmarks import traces
from benchmarks.support.sides import Side


def test_ratio_is_the_median_of_pairs_of_turns() -> None:
    def side(*means: float) -> Side:
        return Side([[mean] * traces.STEPS for mean in means])

    result = traces.figures({traces.ON: side(0.011, 0.030, 0.022), traces.OFF: side(0.01, 0.01, 0.02)}, 7)
    assert result["traced_ratio"] == pytest.approx(1.1)
    assert (result["step_seconds_on"], result["step_seconds_off"]) == (0.022, 0.01)
    assert (result["pairs"], result["requests"]) == (3, 7)
