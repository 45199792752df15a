"""Pure decisions about checkpoints: names, shares, manifests, when they are taken, which may go."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from springtide.checkpoint import names, schedule, shares
from springtide.checkpoint.keep import expendable
from springtide.checkpoint.manifest import CorruptError, File, Manifest, Part, parse, parse_receipt
from springtide.checkpoint.waiting import GRACE_SECONDS, PATIENCE_SECONDS, give_up
from springtide.comm.codec import TensorSpec
from springtide_protocol.names import GenerationName, StateName

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.bool, torch.complex64]


def state(step: int, number: int = 1, incarnation: int = 1, restart: int = 0) -> StateName:
    return StateName(GenerationName.of(incarnation, restart, number), step)


STATES = st.builds(
    state, st.integers(0, 10**13), st.integers(0, 10**6), st.integers(0, 10**4), st.integers(0, 99)
)


@given(STATES)
def test_a_folders_name_is_the_states_name(name: StateName) -> None:
    assert names.parse(names.folder(name)) == name


@pytest.mark.parametrize(
    "other", ["", "step-1-g1.0.1", "step-000000000001-g1.0", "step-000000000001-g01.0.1", "lost+found", "."]
)
def test_other_folders_are_no_checkpoints(other: str) -> None:
    assert names.parse(other) is None


specs_lists = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.integers(0, 40)).map(
        lambda pair: TensorSpec(pair[0], (pair[1],), 0, pair[1] * pair[0].itemsize)
    ),
    max_size=12,
)


@given(specs_lists, st.integers(1, 9))
@settings(deadline=None)
def test_shares_are_the_whole_state_once_and_equal_in_size(specs: list[TensorSpec], count: int) -> None:
    cut = [shares.split(specs, index, count) for index in range(count)]
    assert shares.missing(specs, [piece for share in cut for piece in share]) == ""
    sizes = [sum((p.stop - p.start) * specs[p.tensor].dtype.itemsize for p in share) for share in cut]
    assert max(sizes) - min(sizes) <= 2 * 8
    for share in cut:
        widths = [specs[piece.tensor].dtype.itemsize for piece in share]
        assert widths == sorted(widths, reverse=True)
        assert all(shares.parse_key(piece.key) == (piece.tensor, piece.start) for piece in share)


@given(specs_lists.filter(lambda specs: any(s.nbytes for s in specs)), st.integers(1, 4), st.randoms())
@settings(deadline=None)
def test_a_piece_too_few_or_too_many_is_noticed(specs: list[TensorSpec], count: int, chance: object) -> None:
    pieces = [piece for index in range(count) for piece in shares.split(specs, index, count)]
    some = pieces[chance.randrange(len(pieces))]  # type: ignore[attr-defined]
    assert shares.missing(specs, [piece for piece in pieces if piece is not some])
    assert shares.missing(specs, [*pieces, some])


def test_members_with_other_tensors_have_other_layouts() -> None:
    one = TensorSpec(torch.float32, (2, 3), 0, 24)
    assert shares.layout([one]) == shares.layout([TensorSpec(torch.float32, (2, 3), 64, 24)])
    assert shares.layout([one]) != shares.layout([TensorSpec(torch.float32, (3, 2), 0, 24)])
    assert shares.layout([one]) != shares.layout([TensorSpec(torch.int32, (2, 3), 0, 24)])


FILE = File("workers-00000-of-00001.safetensors", 12, "a" * 64)
MANIFEST = Manifest(
    state(7, 2), {"name": "digits"}, 1.5, "end", {"workers": Part(File("workers.json", 3, "0" * 64), (FILE,))}
)


def header(**change: object) -> dict[str, object]:
    return {"parts": {"workers": {"header": {"path": "x", "bytes": 1, "sha256": "a" * 64} | change}}}


def test_a_manifest_comes_back() -> None:
    assert parse(MANIFEST.to_json(), MANIFEST.name) == MANIFEST
    assert MANIFEST.size == 15


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"version": 3}, "version 3"),
        ({"format": "zip"}, "zip"),
        ({"state": {"step": 1}}, "TypeError"),
        ({"state": {"incarnation": 1, "restart": 0, "number": 2, "step": -7}}, "whole number"),
        ({"state": {"incarnation": 1, "restart": 0, "number": 2, "step": 8}}, "that of step-000000000008"),
        (
            {"parts": {"workers": {"header": {"path": "../../x", "bytes": 1, "sha256": "a" * 64}}}},
            "file name",
        ),
        ({"parts": {"workers": {"header": {"path": "x", "bytes": 1, "sha256": "?"}}}}, "checksum"),
        ({"parts": []}, "AttributeError"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(change: dict[str, object], told: str) -> None:
    raw = json.dumps(json.loads(MANIFEST.to_json()) | change).encode()
    with pytest.raises(CorruptError, match=told):
        parse(raw, MANIFEST.name)


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[]", b'{"format": 1}', b"[" * 100_000])
def test_rubbish_is_no_manifest_and_no_receipt(raw: bytes) -> None:
    with pytest.raises(CorruptError):
        parse(raw, MANIFEST.name)
    with pytest.raises(CorruptError):
        parse_receipt(raw)


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=1000), st.booleans()
)
@settings(deadline=None, max_examples=50)
def test_all_take_a_checkpoint_or_none(members: list[tuple[bool, bool, bool]], ended: bool) -> None:
    total = sum(schedule.contribution(*member) for member in members)
    able = all(member[0] for member in members)
    busy = any(member[1] for member in members)
    wished = any(member[2] for member in members)
    assert schedule.take(total, ended) == (able and (ended or (wished and not busy)))


def test_after_failure_next_try_comes_sooner_then_less_often() -> None:
    assert not schedule.due(59.0, 0.0, 60.0, 0)
    assert schedule.due(60.0, 0.0, 60.0, 0)
    waits = [next(s for s in range(4000) if schedule.due(s, 0.0, 3600.0, failures)) for failures in range(10)]
    assert waits == [3600, 15, 30, 60, 120, 240, 480, 960, 1920, 3600]


@given(st.dictionaries(STATES, st.booleans(), max_size=20), STATES, st.integers(1, 5))
@settings(deadline=None)
def test_what_is_deleted_is_old_and_enough_stays(
    found: dict[StateName, bool], own: StateName, keep: int
) -> None:
    found = {**found, own: True}
    gone = expendable(found, own, keep)
    assert all(name < own for name in gone)
    if any(name.generation.incarnation > own.generation.incarnation for name in found):
        assert gone == []
        return
    left = [name for name, whole in found.items() if whole and name <= own and name not in gone]
    whole = [name for name, complete in found.items() if complete and name <= own]
    assert sorted(left) == sorted(whole)[-keep:]
    # What was never completed goes when a later one is there.
    assert all(name in gone for name, complete in found.items() if not complete and name < own)


def test_the_first_member_waits_for_shares_but_not_for_the_dead() -> None:
    assert give_up([], 1e9, 0.0, ["a"]) == ""
    assert give_up(["b"], PATIENCE_SECONDS - 1, 0.0, None) == ""
    assert "same storage" in give_up(["b"], PATIENCE_SECONDS, 0.0, None)
    assert give_up(["b"], PATIENCE_SECONDS, 5.0, None) == ""
    assert give_up(["b"], GRACE_SECONDS, 0.0, ["a", "b"]) == ""
    assert give_up(["b"], GRACE_SECONDS - 1, 0.0, ["a"]) == ""
    assert give_up(["b"], GRACE_SECONDS, 0.0, ["a"]) == "b did not live to write its share"
