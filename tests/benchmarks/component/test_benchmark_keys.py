"""Output of the worker's benchmarks: every key is there, null with a reason where a run was cut short."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest

from benchmarks import checkpoint, exact, hostile, recovery, steady_state, transfer
from benchmarks.peers import torchft, torchrun
from benchmarks.support.sides import Side

ROOT = Path(__file__).resolve().parents[3]


def raising(error: Exception) -> Any:
    def call(*arguments: object) -> Any:
        raise error

    return call


def test_recovery_counts_by_kind_and_says_why_a_peer_is_missing() -> None:
    ours = {kind: recovery.figures([0.3, 0.1, 0.2], [3, 0, 0]) for kind in recovery.KINDS}
    assert ours["join"] == {
        "gap_seconds_p50": 0.2,
        "gap_seconds_max": 0.3,
        "steps_redone": 3,
        "samples_repeated": 0,
        "samples_lost": 0,
        "repeats": 3,
    }
    result = recovery.report(ours, 0.05, {"gap_seconds_p50": 60.0, "censored": 1}, NO_TORCHFT)
    assert result["heartbeat_limit_seconds"] > 0
    assert result["ratio_to_torchrun"] == pytest.approx(0.2 / 60)
    assert result["torchft"] is None
    assert result["torchft_reason"] == torchft.MISSING
    assert result["kill_ratio_to_torchft"] is None


def test_recovery_without_a_figure() -> None:
    none = recovery.figures([], [0, 0, 0], "waited 60 s for a generation")
    assert none["gap_seconds_p50"] is None
    assert none["samples_lost"] is None
    assert none["reason"].startswith("waited")
    ours = dict.fromkeys(recovery.KINDS, none)
    nothing = {"gap_seconds_p50": None, "censored": None, "reason": "no steps"}
    result = recovery.report(ours, None, nothing, NO_TORCHFT)
    assert result["ratio_to_torchrun"] is None
    assert result["hang_ratio_to_torchft"] is None
    assert result["torchrun"]["kill_worker"]["reason"] == "no steps"


NO_TORCHFT = torchft.figures({0.1: torchft.Seen(reason=torchft.MISSING)})


def test_recovery_is_compared_with_the_best_join_timeout() -> None:
    seen = {
        0.1: torchft.Seen({"kill_worker": [0.01], "hang_worker": [5.5, 5.1, 5.3]}, 0.2),  # one is no median
        1.0: torchft.Seen({"kill_worker": [0.7, 0.5, 0.6]}, 0.3, "waited 60 s"),
        10.0: torchft.Seen({"kill_worker": [5.0], "hang_worker": [6.0]}, 0.1),
    }
    theirs = torchft.figures(seen)
    assert theirs["kill_worker"]["join_timeout_seconds"] == 1.0
    assert theirs["kill_worker"]["by_join_timeout"] == {"0.1": 0.01, "1": 0.6, "10": 5.0}
    assert theirs["hang_worker"]["gap_seconds_p50"] == 5.3
    assert (theirs["median_step_seconds"], theirs["reason"]) == (0.2, "waited 60 s")
    ours = {kind: recovery.figures([0.3], [0, 0, 0]) for kind in recovery.KINDS}
    result = recovery.report(ours, 0.25, {"gap_seconds_p50": None}, theirs)
    assert result["kill_ratio_to_torchft"] == pytest.approx(0.05 / 0.3)
    assert result["hang_ratio_to_torchft"] == pytest.approx(0.3 / 5.3)
    assert result["torchft"] == theirs


def test_pause_of_torchft_ends_with_steps_of_the_others() -> None:
    seen = [(1.0, 1, 3), (1.3, 2, 3), (1.1, 1, 3), (1.6, 3, 3), (2.5, 4, 2), (9.0, 5, 2), (2.6, 4, 2)]
    steps = torchft.curve(torchft.Step(*step) for step in seen)
    assert [(step.unix_time, step.number) for step in steps[:2]] == [(1.0, 1), (1.3, 2)]
    assert torchft.pause(steps[:3], 1.4) is None
    assert torchft.pause(steps[:4], 1.4) is None  # another one may be missing there
    assert torchft.pause(steps, 1.4) == pytest.approx(6.5)
    assert torchft.pause([*steps[:4], torchft.Step(2.7, 5, 2)], 1.4) == pytest.approx(0.9)
    assert torchft.pause(steps, 0.5) is None


def test_torchft_that_is_not_installed_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert torchft.measure(torchft.QUICK_TRIES) == NO_TORCHFT
    assert NO_TORCHFT["reason"] == torchft.MISSING
    assert NO_TORCHFT["hang_worker"]["gap_seconds_p50"] is None


def test_loss_while_all_live_is_a_false_one() -> None:
    losses = [MagicMock(number=number) for number in (2, 4, 7)]
    assert [recovery.false_losses(before, losses) for before in (7, 3, 0)] == [0, 2, 3]


def test_steady_state_takes_the_median_of_pairs_of_turns() -> None:
    def start(ours: list[list[float]], ddp: list[list[float]]) -> dict[str, Side]:
        return {"springtide": Side(ours), "ddp": Side(ddp)}

    starts = [
        start([[1.0, 2.0], [3.0, 3.0], [9.0, 9.0]], [[2.0, 4.0], [3.0, 1.0], [9.0, 9.0]]),  # 0.5, 1.5, 1
        start([[6.0, 6.0], [8.0, 4.0], [5.0, 5.0]], [[2.0, 2.0], [4.0, 4.0], [4.0, 4.0]]),  # 3, 1.5, 1.25
        start([[4.0, 4.0], [4.0, 4.0], [4.0, 4.0]], [[5.0, 5.0], [5.0, 5.0], [2.0, 2.0]]),  # 0.8, 0.8, 2
    ]
    assert steady_state.case_figures(starts) == {
        "springtide_step_seconds": 4.0,
        "ddp_step_seconds": 4.0,
        "ratio_to_ddp": 1.25,
        "ratios_by_start": [1.0, 1.5, 0.8],
        "steps": 18,
    }


def test_steady_state_takes_the_median_and_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = iter([1.0, 1.3, 0.9, 1.1, 1.0, 1.2, 2.0, 3.0, 4.0, 5.0])

    def measure(*arguments: object) -> dict[str, float]:
        return {"springtide_step_seconds": 1.0, "ddp_step_seconds": 1.0, "ratio_to_ddp": next(ratios)}

    monkeypatch.setattr(steady_state, "measure", measure)
    result = steady_state.measure_all(steady_state.QUICK, MagicMock())
    assert result["ratio_to_ddp"] == pytest.approx(1.05)
    assert result["ratio_to_ddp_worst"] == 1.3
    assert len(result["cases"]) == 6
    assert [result[key] for key in steady_state.KINDS.values()] == [2.0, 3.0, 4.0, 5.0]
    monkeypatch.setattr(steady_state, "measure", raising(RuntimeError("worker 0 ended with 1")))
    result = steady_state.measure_all(steady_state.QUICK, MagicMock())
    assert result["ratio_to_ddp"] is None
    assert result["reason"].startswith("mlp_1MiB: worker 0 ended with 1; mlp_25MiB: worker 0")
    assert result["many_parameters_ratio"] is None
    assert result["many_parameters_ratio_reason"] == "worker 0 ended with 1"


def test_exact_compares_the_hashes_of_all_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    case = {
        "exact_step_seconds": 2.0,
        "plain_step_seconds": 1.0,
        "overhead_ratio": 2.0,
        "steps": 3,
        "steps_done_again": 0.0,
    }
    monkeypatch.setattr(exact, "overhead", lambda *arguments: dict(case))
    for hashes, equal in (({"a": "1", "b": "1"}, True), ({"a": "1", "b": "2"}, False)):
        monkeypatch.setattr(exact, "equality", lambda steps, found=hashes: found)
        result = exact.measure(3, 3)
        assert (result["equal"], result["hashes"], result["overhead_ratio"]) == (equal, hashes, 2.0)
    monkeypatch.setattr(exact, "equality", raising(AssertionError("waited 200 s in vain")))
    result = exact.measure(3, 3)
    assert result["equal"] is None
    assert result["overhead_ratio"] is None
    assert "in vain" in result["reason"]


def test_checkpoint_keeps_what_it_has_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured = {
        "state_bytes": 2**30,
        "step_stall_seconds_p50": 0.1,
        "torch_save_seconds_p50": 1.0,
        "stall_ratio_to_torch_save": 0.1,
        "bytes_per_second": 1e9,
        "step_seconds_p50": 0.5,
        "step_seconds_while_writing_p50": 0.6,
    }
    monkeypatch.setattr(checkpoint, "measure", lambda *arguments: dict(measured))
    monkeypatch.setattr(checkpoint, "restore", lambda folder, count, run: 1.0 * count)
    result = checkpoint.measure_all(tmp_path, 1, 1)
    assert result == measured | {"restore_seconds": {"1": 1.0, "3": 3.0}, "on_servers": measured}
    monkeypatch.setattr(checkpoint, "restore", raising(RuntimeError("no generation of 1")))
    result = checkpoint.measure_all(tmp_path, 1, 1)
    assert result["stall_ratio_to_torch_save"] == 0.1
    assert result["restore_seconds"] == {"1": None, "3": None}
    assert (result["on_servers"], result["reason"]) == (None, "no generation of 1")
    monkeypatch.setattr(checkpoint, "measure", raising(RuntimeError("no checkpoints")))
    assert checkpoint.measure_all(tmp_path, 1, 1)["stall_ratio_to_torch_save"] is None


def test_transfer_is_compared_by_turns_with_plain_sockets() -> None:
    seen = transfer.Seen(
        ours=[2e-9, 1e-9, 4e-9],
        plain=[1e-9, 2e-9, 4e-9],
        used=[4e-9, 4e-9, 4e-9],
        records=[{"rise": -4096}, {"rise": transfer.PARAMETER_BYTES // 10}],
    )
    result = transfer.figures(seen)
    assert set(result) == set(transfer.NAMES)
    assert result["ratio_to_plain_socket"] == 1.0
    assert result["ratio_to_plain_socket_into_used_memory"] == 2.0
    assert result["seconds_per_gib"] == pytest.approx(2e-9 * 2**30)
    assert result["extra_host_bytes_per_parameter_byte"] == pytest.approx(0.1, abs=1e-6)


def test_transfer_that_cannot_be_measured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "Job", lambda *_: MagicMock())
    monkeypatch.setattr(transfer, "joins", raising(TimeoutError("no step of 2 workers")))
    result = transfer.measure(1, 1)
    assert {result[name] for name in transfer.NAMES} == {None}
    assert (result["repeats"], result["reason"]) == (0, "no step of 2 workers")


def test_plain_socket_moves_all_bytes() -> None:
    assert transfer.plain_seconds(3 << 20, 1 << 20) > 0


def test_every_benchmark_can_be_run_by_make() -> None:
    """Modules, so that the repository's root has to be on the path of processes that they start."""
    recipe = subprocess.run(
        ["make", "-n", "-o", ".venv/.springtide-installed", "bench", "ARGS=--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    loop = recipe[recipe.index("for file in") :].replace("PYTHONSAFEPATH= python -m", "echo runs")
    done = subprocess.run(["bash", "-c", loop], cwd=ROOT, capture_output=True, text=True, check=True)
    runs = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("runs ")]
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    assert runs == [[f"benchmarks.{name}", "--quick"] for name in names]
    assert {"recovery", "steady_state", "exact", "checkpoint"} <= set(names)
    for name in names:
        module = importlib.import_module(f"benchmarks.{name}")
        assert callable(module.main)
        usage = next(line for line in (module.__doc__ or "").splitlines() if "python -m " in line)
        assert usage.strip().startswith(f"python -m benchmarks.{name} [--quick]")
        assert "[--json FILE]" in usage


AGENT = """
import subprocess, sys
child = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(child, start_new_session=True).pid, flush=True)
import time; time.sleep(600)
"""


def test_of_a_stopped_peer_nothing_is_left() -> None:
    command = [sys.executable, "-c", AGENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as agent:
        assert agent.stdout is not None
        child = psutil.Process(int(agent.stdout.readline()))
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait(60)
        torchrun.stop([agent, ended])
        assert agent.returncode == -9
    deadline = time.monotonic() + 30
    while psutil.pid_exists(child.pid) and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the agent's child lives on"
        time.sleep(0.01)


def test_hostile_has_every_key_and_adds_the_ports() -> None:
    ports = {
        "coordinator_alive": True,
        "coordinator_peak_mib": 1.0,
        "coordinator_surprises": 1,
        "server_alive": False,
        "server_extra_mib": 2.0,
        "server_surprises": 2,
    }
    result = hostile.complete({"operator_alive": True, "unexpected_exceptions": 3}, ports)
    assert set(hostile.KEYS) <= result.keys()
    assert (result["operator_alive"], result["coordinator_alive"], result["server_alive"]) == (
        True,
        True,
        False,
    )
    assert result["unexpected_exceptions"] == 6
    assert result["operator_peak_mib"] is None  # nobody measured it


def test_hostile_counts_surprises_of_both_kinds() -> None:
    metrics = (
        'springtide_operator_internal_errors_total{where="round"} 2.0\n'
        'springtide_operator_internal_errors_total{where="task"} 0.0\n'
    )
    log = "Traceback (most recent call last):\n  ...\nKeyError: 'x'\n"
    assert hostile.surprises(metrics, log) == 3
    assert hostile.surprises("", "") == 0
