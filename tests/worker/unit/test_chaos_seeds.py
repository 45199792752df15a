"""Seeds of the random faults: old ones keep their meaning, and new ones draw every named point."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from chaos_points import NEWEST, SELDOM, VERSIONS, chance_of_any_step, points
from chaos_seeds import Seed, each_seed, keep, kept, parse
from server_chaos import CUTS_FROM, ServerChaos, deeds
from server_chaos_jobs import ROUNDING, ROWS, SUMS, Job, job_of
from worker_chaos import FOLLOW_FROM, SPEED_FROM, Chaos, follow_of, speed_of
from worker_script import make_data, make_model

from springtide import faults


def test_each_named_point_is_drawn_somewhere() -> None:
    drawn = {point for kind in VERSIONS for point in points(kind, NEWEST)}
    everything = faults.POINTS | faults.TRANSFER_POINTS | faults.CHECKPOINT_POINTS | faults.WAITING_POINTS
    everything |= faults.PUSH_POINTS
    assert drawn == everything, "a new point gets a new version of chaos_points.VERSIONS"
    assert drawn > SELDOM


@pytest.mark.parametrize("kind", VERSIONS)
def test_versions_only_grow(kind: str) -> None:
    lists = VERSIONS[kind]
    assert len(lists) == NEWEST
    assert [list(names) for names in lists] == [sorted(set(names)) for names in lists]
    for older, newer in itertools.pairwise(lists):
        assert set(older) <= set(newer)
    with pytest.raises(ValueError, match="versions 1 to"):
        points(kind, NEWEST + 1)


FIRST_OF_5 = [
    "reduced:*:sleep=0.3",
    "transfer:35:kill",
    "prepared:17:term",
    "backward:9:sleep=0.3",
    "prepared:26:raise",
]


def drawn_by(version: int, count: int) -> list[str]:
    chaos = object.__new__(Chaos)
    chaos.random, chaos.version = random.Random(5), version
    return [chaos.draw_fault() for _ in range(count)]


def test_a_seed_of_the_first_version_draws_what_it_always_drew() -> None:
    assert drawn_by(1, 5) == FIRST_OF_5
    assert all(entry.partition(":")[0] in points("workers", 1) for entry in drawn_by(1, 300))


def test_newer_seed_draws_new_points_and_seldom_any_step() -> None:
    made = [entry.split(":") for entry in drawn_by(NEWEST, 4000)]
    for point in ("asked", "sending", "receiving", "following", "transfer", "backward"):
        steps = [step for name, step, _ in made if name == point]
        share = sum(step == "*" for step in steps) / len(steps)
        assert abs(share - chance_of_any_step(point, NEWEST)) < 0.12
    assert chance_of_any_step("asked", 1) == 0.3
    for point, step, action in made:
        faults.parse(f"{point}:{step}:{action}")


def test_every_second_new_seed_has_parts_by_speed() -> None:
    assert speed_of(Seed(5, SPEED_FROM - 1)) == speed_of(Seed(6, SPEED_FROM)) == ({}, {})
    options, environment = speed_of(Seed(5, SPEED_FROM))
    assert environment == {"SPRINGTIDE_BALANCE": "Speed"}
    assert len(set(options["sample_seconds"].values())) == 3


def test_joiners_of_newer_seeds_follow() -> None:
    assert follow_of(Seed(5, FOLLOW_FROM - 1)) == {}
    assert follow_of(Seed(5)) == {"SPRINGTIDE_FOLLOW_MIB": "0"}
    assert {"feeding", "following"} <= set(points("workers", FOLLOW_FROM)) - set(
        points("workers", FOLLOW_FROM - 1)
    )


def test_seeds_are_read_and_kept_with_their_version(tmp_path: Path) -> None:
    path = tmp_path / "seeds.txt"
    path.write_text("# what this is\n5 # of old\n2:7 # newer\n")
    assert kept(path) == [Seed(5, 1), Seed(7, 2)]
    keep(path, Seed(7, 2))
    keep(path, Seed(7, 1))
    assert kept(path) == [Seed(5, 1), Seed(7, 2), Seed(7, 1)]
    assert parse("11", NEWEST) == Seed(11)
    assert parse("1:11", NEWEST) == Seed(11, 1)


def test_kept_seeds_come_first_and_a_failure_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPRINGTIDE_CHAOS_SEED", raising=False)
    monkeypatch.setattr("chaos_seeds.ENDLESS", False)
    path = tmp_path / "seeds.txt"
    path.write_text(f"3\n{NEWEST}:1\n")
    seen: list[Seed] = []

    def survive(seed: Seed) -> str:
        seen.append(seed)
        assert len(seen) < 4
        return "well"

    with pytest.raises(AssertionError):
        each_seed(path, 1e9, survive)
    assert seen == [Seed(3, 1), Seed(1), Seed(2), Seed(3)]
    assert kept(path) == [Seed(3, 1), Seed(1), Seed(3)]
    monkeypatch.setattr("chaos_seeds.FRESH", 2)
    seen.clear()
    each_seed(path, 1e9, lambda seed: seen.append(seed) or "well")
    assert seen == [Seed(3, 1), Seed(1), Seed(3), Seed(2), Seed(4)]
    seen.clear()
    each_seed(path, -1.0, lambda seed: seen.append(seed) or "well")
    assert seen == [Seed(3, 1), Seed(1), Seed(3)], "the kept ones are all tried, however long they take"
    monkeypatch.setenv("SPRINGTIDE_CHAOS_SEED", "1:9")
    seen.clear()
    each_seed(path, -1.0, survive)
    assert seen == [Seed(9, 1)]


def kind_of(job: Job) -> tuple[str, str, int, int, bool]:
    return job.strategy, job.consistency, job.copies, job.group, job.switches


def test_jobs_with_servers_stay_those_of_the_seeds_version() -> None:
    for version in (1, 2):
        assert [kind_of(job_of(Seed(number, version))) for number in range(4, 8)] == [
            ("ParameterServer", "Synchronous", 2, 1, False),
            ("Hybrid", "Synchronous", 2, 1, False),
            ("ParameterServer", "BoundedStaleness", 2, 1, False),
            ("ParameterServer", "Synchronous", 1, 1, False),
        ]


def test_newer_seeds_draw_each_consistency_in_groups_and_without() -> None:
    jobs = [job_of(Seed(number, 3)) for number in range(10)]
    switching = {(job.consistency, job.group) for job in jobs if job.switches}
    modes = ("Synchronous", "BoundedStaleness", "Asynchronous")
    assert switching == {(mode, group) for mode in modes for group in (1, 2)}
    assert all(job.options is SUMS for job in jobs if job.switches or job.consistency != "Synchronous")
    assert {kind_of(job_of(Seed(number, 2))) for number in (0, 1, 3)} <= {kind_of(job) for job in jobs}


def test_newest_seeds_draw_tables_and_single_copies_too() -> None:
    jobs = [job_of(Seed(number)) for number in range(15)]
    switching = {(job.options["model"], job.consistency) for job in jobs if job.switches}
    assert switching >= {("rows", mode) for mode in ("Synchronous", "BoundedStaleness", "Asynchronous")}
    assert {job.group for job in jobs if job.options is ROWS} == {1, 2}
    alone = [job for job in jobs if job.copies == 1 and job.consistency != "Synchronous"]
    assert [job.options for job in alone if job.options in (SUMS, ROWS)] == [SUMS, ROWS, SUMS]
    assert any(job.strategy == "Hybrid" and job.group == 2 for job in jobs)
    assert {kind_of(job_of(Seed(number, 2))) for number in (0, 1, 3)} <= {kind_of(job) for job in jobs}


def test_only_newer_seeds_cut_lines_and_old_ones_are_unchanged() -> None:
    for version in range(1, CUTS_FROM):
        assert deeds(version) == ("kill", "kill", "kill", "stop", "more", "fewer")
    newer = deeds(NEWEST)
    assert newer[:6] == deeds(1)
    assert set(newer[6:]) == {"cut"}
    assert [job_of(Seed(number, 5)) for number in range(15)] == [
        job_of(Seed(number, 4)) for number in range(15)
    ]


def test_batch_counted_twice_or_never_is_seen_in_each_layer() -> None:
    """A batch counted twice or never moves each layer by far more than the tolerance, at any parameters."""
    x, y = make_data(SUMS["samples"])
    model, other = make_model("sums"), make_model("sums")
    for ids in torch.randperm(len(x)).split(SUMS["batch"]):
        for one in (model, other):
            one.zero_grad()
            F.nll_loss(one(x[ids]), y[ids]).backward()
        for layer, same in zip(model.parameters(), other.parameters(), strict=True):
            assert layer.grad is not None
            assert same.grad is not None
            assert torch.equal(layer.grad, same.grad)
            assert float(layer.grad.abs().max()) * SUMS["lr"] > 5 * ROUNDING


def test_workers_of_the_sums_often_break_in_the_middle_of_a_push() -> None:
    chaos = object.__new__(ServerChaos)
    chaos.random, chaos.version, chaos.switches = random.Random(3), NEWEST, True
    made = [chaos.draw_fault() for _ in range(300)]
    pushing = {entry for entry in made if entry.startswith("pushing:*:")}
    assert sum(entry in pushing for entry in made) > 75
    for entry in made:
        faults.parse(entry)
    chaos.switches, chaos.version, chaos.random = False, 2, random.Random(3)
    assert not any(chaos.draw_fault().startswith("pushing") for _ in range(300))
