"""A step that ends one worker after the other fails the job; anything less certain does not."""

from __future__ import annotations

import pytest
from operator_world import World, job_object

from springtide_coordinator.poison import Death, Poison, Verdict
from springtide_operator.api import reasons
from springtide_operator.plan.observation import PoisonReport
from springtide_protocol.names import GenerationName, Incarnation


def death(member: str, generation: int, detail: str = "ValueError: bad picture 17") -> Death:
    name = GenerationName(Incarnation(1, 0), generation)
    return Death(name, member, f"job-worker-{member}", "samples 32 to 63 of pass 1", detail)


def test_the_second_worker_in_the_same_step() -> None:
    poison = Poison()
    poison.failed(4, death("a", 1))
    assert poison.verdict is None
    poison.failed(4, death("b", 2, "ValueError: bad picture 17, at another place"))
    assert poison.verdict == Verdict(
        4,
        "samples 32 to 63 of pass 1",
        ("job-worker-a", "job-worker-b"),
        "ValueError: bad picture 17, at another place",
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((4, death("a", 1)), (5, death("b", 2))),  # another step
        ((4, death("a", 1)), (4, death("b", 1))),  # at once: it has not been tried again
        ((4, death("a", 1)), (4, death("a", 2))),  # one process cannot end twice
        ((4, death("a", 1)), (4, death("b", 2, "KeyError: 'x'"))),  # another exception
        ((0, death("a", 1)), (0, death("b", 2))),  # from outside, or in no step
        ((5, death("a", 1)), (4, death("b", 2))),  # the job has gone back
    ],
)
def test_what_is_no_proof(first: tuple[int, Death], second: tuple[int, Death]) -> None:
    poison = Poison()
    poison.failed(*first)
    poison.failed(*second)
    assert poison.verdict is None


def test_a_commit_of_the_step_clears_it() -> None:
    poison = Poison()
    poison.failed(4, death("a", 1))
    poison.committed(3)
    poison.failed(4, death("b", 2))
    assert poison.verdict is not None
    poison.committed(4)
    assert poison.verdict is None
    poison.failed(4, death("c", 3))
    assert poison.verdict is None


def test_the_job_fails_and_names_the_samples() -> None:
    world = World(job=job_object(3))
    world.settle()
    report = PoisonReport(
        4, "samples 32 to 63 of pass 1", ("j-worker-0-0", "j-worker-1-0"), "ValueError: bad"
    )
    world.reports(poison=report)
    world.round()
    assert world.status["state"] == "Failed"
    failed = next(c for c in world.status["conditions"] if c["type"] == "Failed")
    assert failed["reason"] == reasons.POISON_STEP
    assert "step 4 (samples 32 to 63 of pass 1) has ended j-worker-0-0 and j-worker-1-0" in failed["message"]
    assert "ValueError: bad" in failed["message"]
