"""Steps that fail on the servers: what is tried again, and what ends a worker."""

from __future__ import annotations

from springtide.ps.step_failures import StepFailures


def test_repeated_failure_without_progress_ends_the_worker() -> None:
    failures = StepFailures()
    assert not failures.failed(15, "first", lost=True)
    assert failures.last(12) == "first"
    assert failures.failed(15, "second", lost=True)
    assert failures.last(15) == "second"


def test_it_may_fail_somewhat_earlier_the_second_time() -> None:
    failures = StepFailures()
    assert not failures.failed(15, "no memory", lost=True)
    assert failures.failed(13, "no memory", lost=False)


def test_whoever_got_further_begins_to_count_anew() -> None:
    failures = StepFailures()
    for step in (15, 16, 20, 300):
        assert failures.last(step) == ""
        assert not failures.failed(step, "no memory", lost=True)


def test_refusal_and_a_loss_found_after_it_are_one_failure() -> None:
    failures = StepFailures()
    assert not failures.failed(15, "refused", lost=False)
    assert not failures.failed(15, "lost", lost=True)
    assert failures.failed(15, "refused", lost=False)


def test_two_refusals_are_two_failures() -> None:
    """Two refusals count as two failures: without common steps a push is sent again, and nothing is lost."""
    failures = StepFailures()
    assert not failures.failed(15, "refused", lost=False)
    assert failures.failed(15, "refused", lost=False)


def test_a_state_that_is_on_no_storage_either_is_not_tried_again() -> None:
    assert not StepFailures().failed(15, "refused", lost=False, can_go_back=False)
    assert StepFailures().failed(15, "lost", lost=True, can_go_back=False)
