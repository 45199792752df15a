"""Figures that the sharding benchmark computes from its observations."""

from __future__ import annotations

import contextlib
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import sharding
from benchmarks.peers import fsdp2, torchrun
from benchmarks.sharding import GRADIENTS, OPTIMIZER, PEER, UNSHARDED, Kills
from benchmarks.support import sides
from benchmarks.support.sides import PORT, RANK, Forked, Side, Turn
from benchmarks.support.turns import Report, slowest

FIGURES = (
    "optimizer_bytes",
    "gradient_bytes",
    "gradient_peak_bytes",
    "tensor_bytes",
    "steps",
    "reduce_seconds",
    "gather_seconds",
)


WARM_UP, STEPS = 3, 4


def reports(seconds: float, steps: int, made: int, *values: float) -> list[Report]:
    """Two workers' answers: the second is slower by a tenth, and has a byte more."""
    figures = [
        dict(zip(FIGURES, (values[0] + more, *values[1:4], made, *values[4:]), strict=True))
        for more in (0, 1)
    ]
    return [Report([9.0] + [seconds + 0.1 * worker] * (steps - 1), figures[worker]) for worker in range(2)]


class Played:
    """Turns of processes that are only said to train."""

    def __init__(self, failing: str = "", at: int = 0) -> None:
        self.order: list[str] = []
        self._failing, self._at = failing, at
        self._made = dict.fromkeys((*sharding.SHARDS, PEER), 0)

    def take(self, side: str, steps: int, look: bool) -> list[Report]:
        self.order.append(side)
        if side == self._failing and self.order.count(side) > self._at:
            raise RuntimeError(f"a process of {side} ended")
        self._made[side] += steps
        made = self._made[side]
        seconds = {UNSHARDED: 1.0, OPTIMIZER: 1.2, GRADIENTS: 1.3, PEER: 2.1}[side]
        held = {UNSHARDED: 200, OPTIMIZER: 133, GRADIENTS: 133, PEER: 66}[side]
        gradients = (100, 125) if side != GRADIENTS else (60, 90)
        return reports(seconds, steps, made, held, *gradients, 300, 0.5 * made, 0.25 * made)


def play(played: Played, reasons: dict[str, str], rounds: int) -> dict[str, Side]:
    turn = Turn(WARM_UP, STEPS, rounds)
    return sides.by_turns(played.take, (*sharding.SHARDS, PEER), reasons, turn)


def test_first_step_of_a_turn_and_faster_workers_are_left_out() -> None:
    assert slowest([Report([9.0, 1.0, 2.0]), Report([1.0, 3.0, 1.0])]) == [3.0, 2.0]
    assert slowest([]) == []


def test_sides_take_turns_in_another_order_each_time() -> None:
    played = Played()
    reasons = {PEER: ""}
    seen = play(played, reasons, 4)
    rounds = [played.order[at : at + 4] for at in range(0, len(played.order), 4)]
    assert len(rounds) == 5
    assert {order[0] for order in rounds[1:]} == {UNSHARDED, OPTIMIZER, GRADIENTS, PEER}
    assert {len(side.seconds) for side in seen.values()} == {4 * STEPS}


def test_case_has_ratios_to_unsharded_and_to_the_peer() -> None:
    reasons = {PEER: ""}
    case = sharding.case_figures(play(Played(), reasons, 2), reasons[PEER])
    assert set(sharding.CASE_KEYS) <= case.keys()
    assert case["optimizer_bytes_ratio"] == pytest.approx(134 / 201)
    assert case["gradient_bytes_ratio"] == pytest.approx(0.6)
    assert case["gradient_peak_bytes_ratio"] == pytest.approx(90 / 125)
    assert case["step_ratio_to_unsharded"] == pytest.approx(1.3 / 1.1)
    assert case["gradients_step_ratio_to_unsharded"] == pytest.approx(1.4 / 1.1)
    assert case["step_ratio_to_fsdp2"] == pytest.approx(1.3 / 2.2)
    assert (case["exposed_reduce_seconds"], case["exposed_gather_seconds"]) == (0.5, 0.25)
    assert case["sides"][PEER]["optimizer_bytes"] == 67
    json.dumps(case)


@pytest.mark.parametrize("at", [0, 2])
def test_peer_that_fails_is_null_with_a_reason(at: int) -> None:
    reasons = {PEER: ""}
    case = sharding.case_figures(play(Played(PEER, at), reasons, 3), reasons[PEER])
    assert case["step_ratio_to_fsdp2"] is None
    assert case["step_ratio_to_fsdp2_reason"] == "a process of fsdp2 ended"
    assert case["step_ratio_to_unsharded"] == pytest.approx(1.3 / 1.1)


def test_own_side_that_fails_is_raised() -> None:
    with pytest.raises(RuntimeError, match="a process of optimizer ended"):
        play(Played(OPTIMIZER, 1), {PEER: ""}, 3)


def test_top_figure_is_the_worse_model_and_null_without_one() -> None:
    cases: dict[str, dict[str, Any]] = {
        name: dict.fromkeys(sharding.CASE_KEYS, 1.0 + at) for at, name in enumerate(sharding.MODELS)
    }
    assert sharding.worst(cases)["step_ratio_to_unsharded"] == 2.0
    cases["26MB"]["step_ratio_to_fsdp2"] = None
    found = sharding.worst(cases)
    assert (found["step_ratio_to_fsdp2"], found["optimizer_bytes_ratio"]) == (None, 2.0)
    del cases["67MB"]
    assert set(sharding.worst(cases).values()) == {None}


def test_step_committed_by_two_generations_is_lost_once() -> None:
    assert sharding.steps_lost([(1, 1), (2, 1), (2, 1), (3, 2)]) == 0
    assert sharding.steps_lost([(1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (3, 3)]) == 3


def test_shards_are_copied_when_the_last_line_on_them_says_so() -> None:
    begins, again = (
        "67 shards get their second copy while training goes on\n",
        ("all shards are at two workers again\n"),
    )
    assert sharding.is_copied("")
    assert not sharding.is_copied(begins)
    assert sharding.is_copied(begins + again)
    assert not sharding.is_copied(begins + again + begins)


def test_kills_are_compared_by_their_medians() -> None:
    ours = Kills([0.3, 0.9, 0.4], [0.7, 0.5, 0.6], 1, 2, 3, 4, [0.05, 0.02, 0.03])
    plain = Kills([0.2, 0.1], [0.4, 0.3])
    seen = {OPTIMIZER: ours, UNSHARDED: plain}
    found = sharding.kill_figures(seen, "")
    assert found["kill_gap_seconds_p50"] == 0.4
    assert found["unsharded_kill_gap_seconds_p50"] == pytest.approx(0.15)
    assert found["kill_gap_ratio"] == pytest.approx(0.4 / 0.15)
    assert found["join_gap_seconds"] == 0.6
    assert found["unsharded_join_gap_seconds"] == pytest.approx(0.35)
    names = ("steps_lost", "samples_repeated", "samples_lost", "checkpoints_read", "kills")
    assert [found[name] for name in names] == [1, 2, 3, 4, 3]
    assert found["transfer_seconds"] == {"26MB": 0.03}
    none = sharding.kill_figures({OPTIMIZER: Kills([0.3]), UNSHARDED: Kills()}, "waited 60 s")
    assert {none[key] for key in sharding.KILL_KEYS} == {None}
    assert none["kills_reason"] == "waited 60 s"


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the parts of a run return figures without any process; steps of the larger model fail."""

    def steps(width: int, turn: Turn, zygote: object) -> dict[str, Any]:
        if width == sharding.MODELS["67MB"]:
            raise TimeoutError("2 of 3 processes came")
        return dict.fromkeys(sharding.CASE_KEYS, 1.0) | {"sides": {}}

    killed = dict.fromkeys(sharding.KILL_KEYS, 1) | {"transfer_seconds": {"26MB": 0.5}}
    peer = {"torchrun_fsdp2_kill_gap_seconds": None, "torchrun_fsdp2_reason": "no steps"}
    monkeypatch.setattr(sharding, "Zygote", lambda script: contextlib.nullcontext())
    monkeypatch.setattr(sharding, "measure_steps", steps)
    monkeypatch.setattr(sharding, "measure_kills", lambda rounds, repeats, zygote: killed)
    monkeypatch.setattr(
        sharding, "measure_transfers", lambda repeats, zygote: {"transfer_seconds": {"196MB": 1.0}}
    )
    monkeypatch.setattr(fsdp2, "measure_kills", lambda width, tries, cut: peer)


def test_parts_that_fail_leave_the_others_and_a_reason(no_processes: None) -> None:
    found = sharding.measure(sharding.QUICK)
    assert found["reason"] == "67MB: 2 of 3 processes came"
    assert (found["step_ratio_to_unsharded"], found["kill_gap_ratio"]) == (None, 1)
    assert found["cases"]["26MB"]["step_ratio_to_unsharded"] == 1.0
    assert found["torchrun_fsdp2_reason"] == "no steps"
    assert found["transfer_seconds"] == {"26MB": 0.5}
    assert sharding.measure(sharding.FULL)["transfer_seconds"] == {"196MB": 1.0}


@pytest.mark.parametrize("sizes", [sharding.QUICK, sharding.FULL])
def test_medians_are_of_three_at_least(sizes: sharding.Sizes) -> None:
    assert sizes.turns.keys() == sharding.MODELS.keys()
    for turn in sizes.turns.values():
        assert turn.steps * turn.rounds >= 6
        assert turn.warm_up > sharding.PEAK_STEP
    jobs, kills = sizes.kills
    assert jobs * kills >= 4


def test_bytes_of_other_tensors_are_counted_once_by_memory() -> None:
    known, memory = torch.zeros(1000), torch.zeros(4096)
    views = [memory[:10], memory[10:]]
    nothing = torch.zeros(5, layout=torch.sparse_coo)
    with FakeTensorMode():
        traced = torch.empty(100)
    lazy = torch.nn.LazyLinear(2).weight
    objects = [known, "no tensor", memory, *views, nothing, traced, lazy]
    assert sharding.other_bytes([known], objects) == 4 * 4096
    assert sharding.other_bytes([known, views[1]], objects) == 0
    gc.freeze()  # as a worker does before it trains
    try:
        assert sharding.other_bytes([]) >= 4 * (1000 + 4096)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


def test_kill_costs_the_pause_and_the_steps_behind_a_checkpoint() -> None:
    before = [(1.0, 38), (2.0, 39), (2.1, 39), (3.05, 40)]
    assert torchrun.after_kill(before, [(9.0, 21), (9.1, 21)], killed=3.0) == torchrun.Kill(
        pytest.approx(9.0 - 3.05), 20, 40
    )
    assert torchrun.after_kill(before[:3], [(2.5, 40)], killed=2.2) == torchrun.Kill(
        pytest.approx(0.4), 0, 39
    )


def test_kill_under_torchrun_without_a_step_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter([torchrun.Kill(10.0, 12, 34), torchrun.Kill(60.0, None, 38), torchrun.Kill(12.0, 4, 24)])
    readies = []

    def kill_one(module: str, ready: int, arguments: list[str], cut: float) -> torchrun.Kill:
        readies.append(ready)
        return next(kills)

    monkeypatch.setattr(fsdp2, "kill_one", kill_one)
    found = fsdp2.measure_kills(1280, 3)
    assert found["torchrun_fsdp2_kill_gap_seconds"] == 12.0
    assert found["torchrun_fsdp2_steps_lost"] == 12
    assert found["torchrun_fsdp2_reason"] == "after 1 of 3 kills no step came within 60 s"
    assert readies == [30, 37, 24]

    def fails(*arguments: object) -> torchrun.Kill:
        raise TimeoutError("torchrun made no 30 steps")

    monkeypatch.setattr(fsdp2, "kill_one", fails)
    found = fsdp2.measure_kills(1280, 1)
    assert found["torchrun_fsdp2_kill_gap_seconds"] is None
    assert found["torchrun_fsdp2_reason"] == "torchrun made no 30 steps"


def test_newest_checkpoint_is_one_that_is_whole(tmp_path: Path) -> None:
    assert fsdp2.newest(tmp_path) == 0
    for step in (20, 40, 100):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (20, 40):
        (tmp_path / f"checkpoint-{step}" / ".metadata").touch()
    assert fsdp2.newest(tmp_path) == 40


class Forks:
    """Says that it forks processes, of which none is there any more."""

    def __init__(self) -> None:
        self.made: list[dict[str, str]] = []

    def fork(self, environment: dict[str, str], log: Path) -> int:
        self.made.append(environment)
        log.write_text("ImportError: no fully_shard")
        return 1_000_000_000 + len(self.made)


def test_process_of_the_peer_that_ends_says_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "free_port", lambda: 20_000)
    forks = Forks()
    processes = Forked(tmp_path / PEER, 3, forks, {"BENCHMARK_SIDE": PEER})  # type: ignore[arg-type]
    assert [made[RANK] for made in forks.made] == ["0", "1", "2"]
    assert len({made[PORT] for made in forks.made}) == 1
    with pytest.raises(RuntimeError, match="no fully_shard"):
        processes.check()
    processes.close()
