"""The benchmark of one large job: its keys, what it says where a figure is missing, and gloo's entries."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import coordinator_scale


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the time of no large state machine: a millisecond for each member."""
    monkeypatch.setattr(coordinator_scale, "state_machine_seconds", lambda size: size / 1000)


def test_state_machine_of_a_generation_takes_its_time() -> None:
    assert 0 < coordinator_scale.state_machine_seconds(64) < 10


@pytest.mark.usefixtures("quick")
def test_figures_stand_under_their_keys() -> None:
    changes = {"256": 0.3, "512": 0.6}
    result = coordinator_scale.report(changes, {}, {"idle": 0.02, "training": 0.1}, {})
    assert result["cpu_seconds_per_change"] == changes
    assert result["growth_256_to_512"] == pytest.approx(2.0)
    assert result["idle_cpu_fraction"] == 0.02
    assert result["training_cpu_fraction"] == 0.1
    large = result["of_8000"]
    assert large["calculated_seconds"] == pytest.approx(0.6 * 8000 / 512), "twice as much at twice the size"
    assert large["state_machine_seconds"] == 8.0
    assert large["store_bytes"] == 8000 * (154 + 8 * 8000) > large["store_limit"]


def test_what_grows_with_the_square_is_calculated_so() -> None:
    assert coordinator_scale.calculated_seconds(1.0, 4.0, 1024) == pytest.approx(16.0)
    assert coordinator_scale.calculated_seconds(1.0, 3.0, 1024) == pytest.approx(10.0)


@pytest.mark.usefixtures("quick")
def test_too_few_descriptors_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_scale, "raise_descriptor_limit", lambda: 300)
    result = asyncio.run(coordinator_scale.measure((512,), 1, 0.1))
    assert result["cpu_seconds_per_change"] == {"512": None}
    assert result["growth_256_to_512"] is result["idle_cpu_fraction"] is None
    assert result["reasons"] == {"512": "the coordinator needs 768 descriptors, and the limit is 300"}


@pytest.mark.parametrize("size", [2, 512])
def test_entries_are_as_long_as_those_of_gloo(size: int) -> None:
    values = {coordinator_scale.gloo_value(member, size) for member in range(size)}
    assert {len(value) for value in values} == {154 + 8 * size}
    assert len(values) == size
