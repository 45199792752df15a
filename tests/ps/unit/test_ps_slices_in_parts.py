"""Slices of tables in parts, without servers: read as they were at one moment, and made anew."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ps_slices import PART, STEP_SPEC, Dumped, dumped, make, record

from springtide_ps.params.chunk import ChunkError
from springtide_ps.params.embedding_shard import Slice
from springtide_ps.params.load_parts import loads
from springtide_ps.server.snapshot import SnapshotKeeper, describe_shard, give
from springtide_ps.server.snapshot_reader import CHUNK_READS_LIMIT, READER_SECONDS, SnapshotReader
from springtide_ps.server.step_protocol import StepProtocolError


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 12), st.integers(1, 400), st.sampled_from(["sgd", "adagrad", "adam"]))
def test_parts_of_any_size_make_an_equal_slice(rows: int, part: int, optimizer: str) -> None:
    piece = make(rows, optimizer)
    made: Slice | None = None
    for about, memory in loads(piece, part):
        assert len(memory) <= part or "of" not in about
        if "of" not in about:
            made = Slice.load(about, memory)
            break
        if not about["at"]:
            made = Slice.begin(about, about["of"])
        assert made is not None
        assert not len(made.table)
        made.write(about["at"], memory)
    assert made is not None
    if piece.dumped_bytes > part:
        made.finish()
    assert dumped(made) == dumped(piece)
    for other in (piece, made):
        other.apply(record([3, 50]), STEP_SPEC)
    assert dumped(made) == dumped(piece)


def test_what_is_no_slice_takes_no_memory() -> None:
    about = make(5).about()
    with pytest.raises(ChunkError, match="17 bytes are not 5 rows"):
        Slice.begin(about, 17)
    each = make(1).dumped_bytes
    with pytest.raises(ChunkError, match="no slice of a table"):
        Slice.begin({**about, "rows": 1 << 50}, each << 50)


MOVES = st.lists(
    st.sampled_from(["change", "drop", "freeze", "of the cut", "begin", "read", "read"]), max_size=40
)


@settings(deadline=None, max_examples=60)
@given(MOVES, st.integers(1, 300))
def test_parts_of_one_moment_are_never_mixed_with_another(moves: list[str], part: int) -> None:
    cuts, piece = SnapshotKeeper(lambda: 0.0), make(6)
    held: Slice | None = piece
    wanted: dict[int, tuple[Dumped, bytearray]] = {}
    cut: tuple[str, Dumped, bytearray] | None = None
    for number, move in enumerate(moves):
        if move in ("change", "drop") and held is not None:
            cuts.before("k", held, 0)
            held.apply(record([number, 100 + number]), STEP_SPEC)
            held = None if move == "drop" else held
        elif move == "freeze" and held is not None:
            cuts.take(str(number), 0, 1, [("k", 0)])
            cut = str(number), dumped(held), bytearray()
        elif move == "begin" and held is not None:
            wanted[cuts.chunk_reads.begin("k")] = dumped(held), bytearray()
        elif move == "of the cut" and cut is not None:
            name, (about, memory), got = cut
            told = describe_shard(cuts.find(name), "k", held, 0)
            assert told is not None
            assert told["bytes"] == len(memory)
            found = give(cuts.find(name), "k", held, 0, len(got), part)
            assert found is not None
            assert (found[0], found[2]) == (about, len(memory))
            got += found[1].numpy().tobytes()
            assert bytes(got) == memory[: len(got)]
            if len(got) == len(memory):
                with pytest.raises(StepProtocolError, match="not here any more"):
                    give(cuts.find(name), "k", held, 0)
                assert cuts.nbytes == 0
                cut = None
        elif move == "read" and wanted:
            reading = min(wanted)
            (about, memory), got = wanted[reading]
            some = cuts.chunk_reads.take(reading, "k", held, len(got), part)
            assert (some[0], some[2]) == (about, len(memory))
            got += some[1].numpy().tobytes()
            assert bytes(got) == memory[: len(got)]
            if len(got) == len(memory):
                del wanted[reading]
    if not wanted:
        assert cuts.chunk_reads.nbytes == 0


def test_a_part_out_of_order_is_refused() -> None:
    cuts, piece = SnapshotKeeper(lambda: 0.0), make(6)
    cuts.take("one", 0, 1, [("k", 0)])
    reading = cuts.chunk_reads.begin("k")
    assert give(cuts.find("one"), "k", piece, 0, 0, PART)
    cuts.chunk_reads.take(reading, "k", piece, 0, PART)
    for at in (0, PART + 1):
        with pytest.raises(StepProtocolError, match=f"byte {PART} is next, not {at}"):
            give(cuts.find("one"), "k", piece, 0, at, PART)
        with pytest.raises(StepProtocolError, match=f"byte {PART} is next, not {at}"):
            cuts.chunk_reads.take(reading, "k", piece, at, PART)


def test_only_what_is_still_to_be_read_is_copied_and_once() -> None:
    cuts, piece = SnapshotKeeper(lambda: 0.0), make(6)
    cuts.take("one", 0, 1, [("k", 0)])
    give(cuts.find("one"), "k", piece, 0, 0, PART)
    chunk_reads = [cuts.chunk_reads.begin("k") for _ in range(3)]
    for reading in chunk_reads:
        cuts.chunk_reads.take(reading, "k", piece, 0, PART)
    for _ in range(2):
        cuts.before("k", piece, 0)
    assert cuts.nbytes == cuts.chunk_reads.nbytes == piece.dumped_bytes - PART
    for reading in chunk_reads:
        cuts.chunk_reads.end(reading)
    assert cuts.chunk_reads.nbytes == 0


def test_readings_that_nobody_goes_on_with_are_forgotten() -> None:
    now = [0.0]
    chunk_reads, piece = SnapshotReader(lambda: now[0]), make(6)
    old = chunk_reads.begin("k")
    chunk_reads.before("k", piece)
    assert chunk_reads.nbytes > 0
    now[0] = READER_SECONDS + 1
    chunk_reads.before("other", piece)
    assert chunk_reads.nbytes == 0
    with pytest.raises(StepProtocolError, match="not kept here any more"):
        chunk_reads.take(old, "k", piece, 0, PART)
    for _ in range(CHUNK_READS_LIMIT):
        chunk_reads.begin("k")
    with pytest.raises(StepProtocolError, match="are being read already"):
        chunk_reads.begin("k")
    chunk_reads.clear()
    chunk_reads.begin("k")
