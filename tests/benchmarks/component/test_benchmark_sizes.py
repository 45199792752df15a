"""Benchmarks do their work at the smallest sizes: what they measure is no matter here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_start import forked

from benchmarks import checkpoint, exact, ps_embedding, ps_throughput, steady_state
from benchmarks.support.sides import Turn
from benchmarks.support.zygote import Zygote

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def begun() -> None:
    """Begin the fork server before a test that must leave no child behind."""
    with forked():
        return


@pytest.fixture(autouse=True)
def modules_of_the_checkout(monkeypatch: pytest.MonkeyPatch, begun: None) -> Iterator[None]:
    """Have benchmarks import modules below the repository's root, which `make bench` does, too."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with forked():
        yield


@pytest.fixture(scope="module")
def steady_forks(begun: None) -> Iterator[Zygote]:
    """Return what forks the processes of `steady_state`."""
    with pytest.MonkeyPatch.context() as patch, forked():
        patch.delenv("PYTHONSAFEPATH", raising=False)
        zygote = Zygote(steady_state.Job.script)
    with zygote:
        yield zygote


def check_measured(figures: dict[str, Any], names: set[str]) -> None:
    """Exactly these keys, each of them measured."""
    assert set(figures) == names
    assert all(math.isfinite(figure) and figure >= 0 for figure in figures.values()), figures


@pytest.mark.slow
@pytest.mark.parametrize("way", ["springtide", "torch_rpc"])
def test_ways_to_push_and_pull_do_their_rounds(way: str) -> None:
    seconds = ps_throughput.measure_block(way, 1, chunk_bytes=4096)
    assert len(seconds) == 1
    assert seconds[0] > 0


def test_several_workers_and_servers_do_their_rounds() -> None:
    assert ps_throughput.measure_size(2, 2, 1, chunk_bytes=4096) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_embedding_lookups_and_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ps_embedding, "BATCH", 8)
    monkeypatch.setattr(ps_embedding, "IDS", 100)
    given = ps_embedding.batches(2)
    assert [tuple(ids.shape) for ids in given] == [(8, ps_embedding.BAG)] * 2
    sides = {"lookups_per_second", "updates_per_second"}
    check_measured(ps_embedding.measure_table(given), {f"table_{side}" for side in sides})
    others = {"local_ids_per_second", "ids_per_second", "ratio_to_local"}
    check_measured(ps_embedding.measure_service(given), sides | {f"{side}_wall" for side in sides} | others)


@pytest.mark.slow
def test_checkpoints_beside_torch_save_and_the_way_back(tmp_path: Path) -> None:
    figures = checkpoint.measure(tmp_path, 1, 1, width=16)
    assert figures["checkpoints"] == 1
    assert figures["state_bytes"] > 3 * 4 * checkpoint.LAYERS * 16**2
    assert figures["torch_save_seconds_p50"] > 0
    assert math.isfinite(figures["stall_ratio_to_torch_save"])
    assert checkpoint.restore(tmp_path, 1, 2, width=16) >= 0


@pytest.mark.parametrize("name", steady_state.MODELS)
def test_every_model_is_the_same_on_every_call(name: str) -> None:
    model, samples, labels, batch_size = steady_state.build(name)
    assert len(samples) == len(labels) >= batch_size
    again = steady_state.build(name)[0].state_dict()
    assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())
    assert model(samples[:2]).shape == (2, 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformer", *steady_state.KINDS])
def test_steps_beside_those_of_ddp(steady_forks: Zygote, name: str) -> None:
    figures = steady_state.measure(name, 1, Turn(1, 2, 1), steady_forks, starts=1)
    assert figures.pop("ratios_by_start") == [figures["ratio_to_ddp"]]
    check_measured(figures, {"springtide_step_seconds", "ddp_step_seconds", "ratio_to_ddp", "steps"})
    assert figures["steps"] == 2


@pytest.mark.slow
def test_steps_with_and_without_exact_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "WARM_UP", 1)
    figures = exact.overhead("transformer", 2)
    times = {"exact_step_seconds", "plain_step_seconds", "overhead_ratio"}
    check_measured(figures, times | {"steps", "steps_done_again"})
    assert figures["steps"] == 3
