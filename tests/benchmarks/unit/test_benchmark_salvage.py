"""The figures that benchmarks.salvage makes of its observations."""

from __future__ import annotations

import pytest

from benchmarks.peers.torchft import Seen
from benchmarks.salvage import LIMIT_SECONDS, RECOVERY_SECONDS, figures, peer


def test_figures_are_medians_over_the_limit() -> None:
    found = figures([1.3, 0.9, 1.15], 0, 0)
    assert found["extra_seconds_per_kill"] == 1.15
    assert found["extra_over_limit"] == pytest.approx((1.15 - RECOVERY_SECONDS) / LIMIT_SECONDS)
    assert (found["extra_seconds_max"], found["kills"], "reason" in found) == (1.3, 3, False)


def test_nothing_measured_is_null_with_a_reason() -> None:
    found = figures([], None, None, "waited 60 s for the ledger")
    assert found["extra_seconds_per_kill"] is found["extra_over_limit"] is found["samples_lost"] is None
    assert found["reason"] == "waited 60 s for the ledger"
    assert peer(Seen(reason="torchft is not installed")) == {
        "torchft_extra_seconds_per_kill": None,
        "torchft_kills": 0,
        "torchft_reason": "torchft is not installed",
    }


def test_extra_of_the_peer_is_beyond_its_own_step() -> None:
    seen = Seen(gaps={"kill_worker": [4.5, 4.1, 9.0]}, step=2.5)
    assert peer(seen) == {"torchft_extra_seconds_per_kill": 2.0, "torchft_kills": 3}
