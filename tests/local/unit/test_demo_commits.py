from __future__ import annotations

import json
import random

import pytest
from demo_histories import FIRST, SECOND, commit, steady

from springtide_demo.commits import History, parse_line, samples_per_second, steps_per_second
from springtide_protocol.names import GenerationName

LINE = {
    "step": 7,
    "generation": 3,
    "incarnation": [2, 1],
    "time": 100.5,
    "step_seconds": 0.01,
    "samples": 64,
    "values": {"loss": 0.25},
    "member": "ab",
}


def test_a_line_of_a_step_log_is_read() -> None:
    read = parse_line(json.dumps(LINE), "digits-worker-1-0")
    assert (read.step, read.generation, read.unix_time) == (7, GenerationName.of(2, 1, 3), 100.5)
    assert (read.samples, read.loss, read.pod) == (64, 0.25, "digits-worker-1-0")


def test_a_step_without_a_loss_has_none() -> None:
    assert parse_line(json.dumps(LINE | {"values": {}}), "a").loss is None


@pytest.mark.parametrize("line", ["", "{", "[]", '{"step": 1}', json.dumps(LINE | {"incarnation": 5})])
def test_a_broken_line_is_named_with_its_pod(line: str) -> None:
    with pytest.raises(ValueError, match="step log of digits-worker-1-0"):
        parse_line(line, "digits-worker-1-0")


def test_step_committed_twice_keeps_the_greatest_generation() -> None:
    records = [
        commit(1, 10.0),
        commit(2, 10.1, loss=0.9),
        commit(2, 10.5, SECOND, loss=0.8),
        commit(2, 10.4, SECOND, pod="b", loss=0.8),
    ]
    for seed in range(6):
        random.Random(seed).shuffle(records)
        history = History()
        history.add(records)
        assert [(c.step, c.generation, c.unix_time, c.loss) for c in history.curve()] == [
            (1, FIRST, 10.0, 0.5),
            (2, SECOND, 10.4, 0.8),
        ]


def test_active_are_those_of_the_newest_commits_generation() -> None:
    history = History()
    history.add(steady(1, 3, 0.0, pod="a") + steady(1, 3, 0.0, pod="b"))
    assert history.active() == {"a", "b"}
    history.add(steady(4, 5, 1.0, SECOND, pod="b"))
    assert history.active() == {"b"}
    assert history.first_commit[SECOND] == 1.0


def test_missing_steps_are_named() -> None:
    history = History()
    history.add([commit(1, 0.0), commit(4, 0.1)])
    assert history.missing_steps(5) == [2, 3, 5]


def test_the_rate_counts_the_samples_after_the_first_commit() -> None:
    history = History()
    assert samples_per_second(history.recent(5.0)) == 0.0
    history.add(steady(1, 1, 0.0))
    assert samples_per_second(history.recent(5.0)) == 0.0
    history.add(steady(2, 1001, 0.01))
    assert samples_per_second(history.recent(5.0)) == pytest.approx(6400.0)
    assert steps_per_second(history.recent(5.0)) == pytest.approx(100.0)


def test_recent_commits_are_those_of_the_last_seconds_in_order() -> None:
    history = History()
    history.add([commit(1, 0.0), commit(3, 2.0), commit(2, 1.0), commit(5, 3.0)])
    assert [c.step for c in history.recent(1.5)] == [3, 5]
    assert [c.step for c in history.recent(100.0)] == [1, 2, 3, 5]
