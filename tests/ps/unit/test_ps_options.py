"""Options of parameter groups on a connection: sent once, as what differs, and named by a number."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide_ps.params.chunk import GROUPS_LIMIT, SUBSTEPS_LIMIT, ChunkError, Groups, StepSpec
from springtide_ps.wire.frames import META_LIMIT, Frame, Kind, pack
from springtide_ps.wire.options import KEPT_LIMIT, ReceivedOptions, SentOptions, SharedOptions, spec_in

COUNT = 800


def groups(rate: float, count: int = COUNT, **more: Any) -> Groups:
    options = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, **more}
    return tuple({"lr": rate * 0.99**number, **options} for number in range(count))


class Ends:
    """The two ends of a connection that carries optimizer options, with a count of the bytes sent."""

    def __init__(self, shared: SharedOptions | None = None) -> None:
        self.sent, self.received = SentOptions(), ReceivedOptions(shared or SharedOptions())
        self.frames: list[int] = []

    def pass_on(self, spec: StepSpec) -> StepSpec:
        about, options = self.sent.describe(spec)
        for meta, text in options:
            assert len(json.dumps(meta)) < 10_000
            self.received.take(json.loads(json.dumps(meta)), text)
            self.frames.append(len(text))
        head = pack(Frame(Kind.COMMIT, 1, {"recipe": about}))
        assert len(head) < META_LIMIT // 4
        return self.received.read(json.loads(json.dumps(about)))


def test_a_group_per_parameter_travels_once() -> None:
    ends, spec = Ends(), StepSpec(0.5, False, groups(0.1), frozenset({3, 4, 5, 9}))
    assert ends.pass_on(spec) == spec
    assert ends.frames[0] > META_LIMIT  # more than fits beside a tensor
    for scale in (1.0, 2.0):
        again = StepSpec(scale, True, groups(0.1))
        assert ends.pass_on(again) == again
    assert len(ends.frames) == 1


def test_only_what_changed_is_sent_again() -> None:
    ends = Ends()
    ends.pass_on(StepSpec(1.0, False, groups(0.1)))
    one = list(groups(0.1))
    one[7] = {**one[7], "weight_decay": 0.5}
    assert ends.pass_on(StepSpec(1.0, False, tuple(one))).groups == tuple(one)
    assert ends.frames[1:] == [len(json.dumps({7: {"weight_decay": 0.5}}))]
    rates = StepSpec(1.0, False, groups(0.05))
    assert ends.pass_on(rates) == rates
    assert ends.frames[2] < ends.frames[0] // 2


def test_a_new_connection_gets_all_options() -> None:
    spec = StepSpec(1.0, False, groups(0.1))
    first, second = Ends(), Ends()
    first.pass_on(spec)
    first.pass_on(StepSpec(1.0, False, groups(0.2)))
    assert second.pass_on(spec) == spec
    assert second.frames == first.frames[:1]


def test_equal_options_of_two_connections_are_one_object() -> None:
    shared = SharedOptions()
    specs = [Ends(shared).pass_on(StepSpec(1.0, False, groups(0.1))) for _ in range(2)]
    assert specs[0].groups is specs[1].groups


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=4),
        min_size=1,
        max_size=30,
    )
)
@settings(deadline=None, max_examples=60)
def test_steps_arrive_as_they_were_sent(steps: list[list[tuple[int, int]]]) -> None:
    """Each part of a step: (which options, how many groups)."""
    ends = Ends()
    for step in steps:
        parts = tuple(
            StepSpec(
                1.0,
                False,
                groups(0.1 + which, count, **({"maximize": True} if which == 5 else {})),
                frozenset(range(which)),
                tuple([0.5] * (count - 1) + [0.25]),
                number,
            )
            for number, (which, count) in enumerate(step)
        )
        spec = replace(parts[-1], before=parts[:-1])
        assert ends.pass_on(spec) == spec
        assert StepSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_a_step_of_as_many_parts_as_can_be_arrives_often() -> None:
    ends = Ends()
    for turn in range(3):
        parts = tuple(
            StepSpec(1.0, False, groups(0.1 + turn + number, 2)) for number in range(SUBSTEPS_LIMIT)
        )
        spec = replace(parts[-1], before=parts[:-1])
        about, options = ends.sent.describe(spec)
        for meta, text in options:
            ends.received.take(meta, text)
        assert ends.received.read(about) == spec
    for step in range(2 * KEPT_LIMIT):
        spec = StepSpec(1.0, False, groups(0.2 + step, 2))
        assert ends.pass_on(spec) == spec


@pytest.mark.parametrize(
    ("meta", "text", "message"),
    [
        ({"n": 2, "base": 9}, b"{}", "differ from set 9, which was not sent here"),
        ({"n": 2, "base": 1}, b'{"2": {"lr": 1}}', "options of group 2, and there are 2"),
        ({"n": 2, "base": 1}, b'{"0": 7}', "cannot be read"),
        ({"n": 2}, b'{"0": {}}', "a list of those of each parameter group"),
        ({"n": 2}, b"[]", "0 parameter groups"),
        ({"n": 2}, b"[1]", "cannot be read"),
        ({"n": 2}, b"[" * 100_000, "cannot be read"),
        ({"n": "x"}, b"[{}]", "cannot be read"),
        ({}, b"[{}]", "cannot be read"),
        ({"n": 2, "drop": 3}, b"[{}]", "cannot be read"),
        ({"n": 2}, json.dumps([{}] * (GROUPS_LIMIT + 1)).encode(), f"{GROUPS_LIMIT + 1} parameter groups"),
    ],
)
def test_options_that_cannot_be_are_refused(meta: dict[str, Any], text: bytes, message: str) -> None:
    received = ReceivedOptions(SharedOptions())
    received.take({"n": 1}, b'[{"lr": 1}, {"lr": 2}]')
    with pytest.raises(ChunkError, match=message):
        received.take(meta, text)
    spec = {"scale": 1.0, "skip": False, "unused": [], "groups": 1}
    assert received.read(spec).groups == ({"lr": 1}, {"lr": 2})


def test_options_that_were_not_sent_are_refused() -> None:
    received = ReceivedOptions(SharedOptions())
    for number in (1, True, None, {}):
        with pytest.raises(ChunkError, match=r"options .* of parameter groups were not sent here"):
            received.read({"scale": 1.0, "skip": False, "unused": [], "groups": number})
    for number in range(KEPT_LIMIT):
        received.take({"n": number}, b"[{}]")
    with pytest.raises(ChunkError, match=f"after {KEPT_LIMIT} sets"):
        received.take({"n": KEPT_LIMIT}, b"[{}]")
    received.take({"n": KEPT_LIMIT, "drop": [0]}, b"[{}]")


def test_a_step_that_is_none_is_refused() -> None:
    good = StepSpec(1.0, False, ({"lr": 1.0},), frozenset({1, 2, 7})).to_json()
    assert good["unused"] == [1, 3, 7, 8]
    assert spec_in({"recipe": good}).unused == {1, 2, 7}
    for unused in ([1], [3, 1], [1, 3, 2, 4], [-1, 2], [0, 1 << 40], [0.5, 2], 3, [[0, 1]]):
        with pytest.raises(ChunkError, match="cannot be applied like this"):
            spec_in({"recipe": {**good, "unused": unused}})
    for factors in ([[1, 1.0], [1, 1.0]], [[0, 1.0]], [[1 << 60, 1.0]], 3, [1.0]):
        with pytest.raises(ChunkError, match="cannot be applied like this"):
            spec_in({"recipe": {**good, "factors": factors}})
    with pytest.raises(ChunkError):
        spec_in({})
