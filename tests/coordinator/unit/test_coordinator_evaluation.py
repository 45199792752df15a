"""Every sample of an evaluation counts once, whoever asks, dies, comes back or says things twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_coordinator import wire
from springtide_coordinator.evaluation import (
    KEPT_EVALUATIONS,
    Evaluations,
    Finished,
    Key,
    Mismatch,
    SampleRange,
    Total,
)
from springtide_protocol import codec
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol.names import GenerationName, Incarnation, StateName

STATE = StateName(GenerationName(Incarnation(1, 0), 1), 7)
KEY = Key(STATE, 0)
KINDS = st.sampled_from(["finish", "gone", "again", "late"])


def found(taken: SampleRange) -> Finished:
    """Return the result of a range whose samples' values are their numbers."""
    total = float(sum(range(taken.start, taken.stop)))
    return Finished(taken, {"mean": total}, {"mean": float(taken.stop - taken.start)})


@settings(deadline=None, max_examples=150)
@given(
    samples=st.integers(1, 60),
    unit=st.integers(1, 9),
    actions=st.lists(st.tuples(KINDS, st.integers(0, 3)), max_size=60),
)
def test_each_sample_counts_once(samples: int, unit: int, actions: list[tuple[str, int]]) -> None:
    evaluations = Evaluations()
    holds: dict[str, SampleRange | None] = {}  # by member: its range; None: it waits
    totals: dict[str, Total] = {}
    stale: list[tuple[str, SampleRange]] = []
    numbers = 0

    def ask(member: str, finished: Finished | None) -> None:
        nonlocal numbers
        numbers += 1
        holds[member] = None
        tell(evaluations.ask(member, numbers, KEY, samples, unit, finished, 4))

    def tell(answers: dict[str, tuple[int, SampleRange | Total | Mismatch]]) -> None:
        for member, (_, answer) in answers.items():
            assert holds.get(member, "unknown") is None, "an answer that nobody waits for"
            if isinstance(answer, Total):
                totals[member] = answer
                del holds[member]
            else:
                assert isinstance(answer, SampleRange)
                holds[member] = answer

    def act(what: str, member: str) -> None:
        taken = holds.get(member)
        if what == "gone":
            holds.pop(member, None)
            if taken is not None:
                stale.append((member, taken))
            tell(evaluations.gone(member, 4))
        elif what == "late" and stale:
            who, old = stale.pop()
            if who not in holds and who not in totals:  # it was only cut off, and comes back with its sums
                ask(who, found(old))
        elif what == "again" and member in holds:
            ask(member, None)  # said again on a new stream
        elif member not in holds and member not in totals:
            ask(member, None)
        elif taken is not None:
            ask(member, found(taken))

    for what, number in actions:
        act(what, f"member-{number}")
    last = "member-9"
    if not totals:
        ask(last, None)
    for _ in range(4 * samples + 20):
        for member in list(holds):
            act("finish", member)
    assert not holds
    expected = Total({"mean": sum(range(samples)) / samples}, samples)
    for total in totals.values():
        assert total.samples == expected.samples
        assert total.values == pytest.approx(expected.values)


def test_a_range_of_a_lost_worker_goes_to_one_that_waits() -> None:
    evaluations = Evaluations()
    first = evaluations.ask("a", 1, KEY, 10, 10, None, 2)
    assert first == {"a": (1, SampleRange(0, 10))}
    assert evaluations.ask("b", 5, KEY, 10, 10, None, 2) == {}
    assert evaluations.gone("a", 2) == {"b": (5, SampleRange(0, 10))}
    answers = evaluations.ask("b", 6, KEY, 10, 10, found(SampleRange(0, 10)), 2)
    assert answers == {"b": (6, Total({"mean": 4.5}, 10))}
    # Somebody who comes later gets the total at once.
    assert evaluations.ask("c", 1, KEY, 10, 10, None, 2) == {"c": (1, Total({"mean": 4.5}, 10))}


def test_shares_shrink_towards_the_end() -> None:
    evaluations = Evaluations()
    sizes = []
    for number in range(200):
        answer = evaluations.ask("a", number, KEY, 1000, 10, None, 3)["a"][1]
        if isinstance(answer, Total):
            break
        assert isinstance(answer, SampleRange)
        sizes.append(answer.stop - answer.start)
        evaluations.ask("a", number, KEY, 1000, 10, found(answer), 3)
    assert sum(sizes) >= 1000
    assert sizes[0] == 160
    assert sizes[-1] == 10


def test_other_arguments_and_old_evaluations() -> None:
    evaluations = Evaluations()
    evaluations.ask("a", 1, KEY, 10, 5, None, 2)
    answer = evaluations.ask("b", 2, KEY, 11, 5, None, 2)["b"][1]
    assert isinstance(answer, Mismatch)
    assert "10 samples" in answer.problem
    for index in range(1, KEPT_EVALUATIONS + 5):
        evaluations.ask("a", 1, Key(STATE, index), 10, 5, None, 2)
    known = [
        index
        for index in range(KEPT_EVALUATIONS + 5)
        if isinstance(evaluations.ask("b", 3, Key(STATE, index), 11, 5, None, 2)["b"][1], Mismatch)
    ]
    assert known == list(range(5, KEPT_EVALUATIONS + 5))


def test_shards_are_compared_by_name_and_batch_size() -> None:
    evaluations, kind = Evaluations(), "shards 0badcafe, batch_size 8"
    assert evaluations.ask("a", 1, KEY, 4, 1, None, 2, kind) == {"a": (1, SampleRange(0, 1))}
    for number, other in enumerate(("shards 12345678, batch_size 8", "shards 0badcafe, batch_size 4", "")):
        answer = evaluations.ask("b", number, KEY, 4, 1, None, 2, other)["b"][1]
        assert isinstance(answer, Mismatch)
        assert ("samples by number here" if not other else f"4 {other} here") in answer.problem
    assert evaluations.ask("b", 9, KEY, 4, 1, None, 2, kind) == {"b": (9, SampleRange(1, 2))}


def test_messages() -> None:
    with pytest.raises(codec.MalformedError, match=r"Evaluate.state is not set"):
        wire.to_evaluate(pb.Evaluate(samples=1, unit=1))
    message = pb.Evaluate(state=codec.state_to_proto(STATE), samples=0, unit=1)
    with pytest.raises(codec.MalformedError, match="samples and unit"):
        wire.to_evaluate(message)
    message.samples, message.stop = 4, 2
    message.sums["x"], message.weights["x"] = 3.0, 2.0
    asked = wire.to_evaluate(message)
    assert asked.key == KEY
    assert asked.finished == Finished(SampleRange(0, 2), {"x": 3.0}, {"x": 2.0})
    message.kind = "k" * 129
    with pytest.raises(codec.MalformedError, match=r"Evaluate.kind has more than 128 characters"):
        wire.to_evaluate(message)
    for number in range(70):
        message.sums[str(number)] = 1.0
    with pytest.raises(codec.MalformedError, match="more than 64 names"):
        wire.to_evaluate(message)
