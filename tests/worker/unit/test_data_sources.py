"""Data sets of other libraries: each sample once at any size, and by name what cannot be accounted for."""

from __future__ import annotations

import io
import json
import tarfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stream_job import StreamJob
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from springtide.data import Shards, pack_tokens
from springtide.errors import SpringtideError
from springtide.integrations.mds import MDS
from springtide.integrations.sources import given, one_shard

OPTIONS: dict[str, Any] = {"batch_size": 6, "epochs": 2, "shuffle_buffer": 8}


def batches(dataset: Any, sizes: tuple[int, ...] = (1,), **options: Any) -> list[list[Any]]:
    """Return the global batches of a job whose members are so many, one number after another."""
    job = StreamJob([], OPTIONS | options, dataset=dataset)
    while not job.ended:
        job.resize(sizes[len(job.steps) % len(sizes)])
        job.step()
    job.close()
    assert (job.ledger.repeated, job.ledger.lost) == (0, 0)
    return [batch for _, batch in job.steps]


def check_accounted(dataset: Any, name: Callable[[Any], Any], expected: list[Any]) -> None:
    """Each pass has each of the samples once, and batches do not depend on the number of members."""
    found = [[name(sample) for sample in batch] for batch in batches(dataset)]
    assert sorted(item for batch in found for item in batch) == sorted(2 * expected)
    other = [[name(sample) for sample in batch] for batch in batches(dataset, (3, 1, 2))]
    assert other == found


# ---- WebDataset


@pytest.fixture
def tars(tmp_path: Path) -> list[str]:
    """Four tar files of five samples."""
    for shard in range(4):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as file:
            for number in range(5):
                for kind, text in (("txt", f"{shard}-{number}"), ("json", json.dumps({"n": number}))):
                    member = tarfile.TarInfo(f"{shard:02}{number:03}.{kind}")
                    member.size = len(text)
                    file.addfile(member, io.BytesIO(text.encode()))
    return [str(tmp_path / f"{shard}.tar") for shard in range(4)]


def web(urls: Any, **options: Any) -> Any:
    wds = pytest.importorskip("webdataset")
    return wds.WebDataset(urls, shardshuffle=False, **options)


# It leaves files that it has not read to their end to the garbage collection.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_tar_files_of_webdataset_are_accounted_for(tars: list[str]) -> None:
    dataset = given(web(tars).decode().to_tuple("txt", "json"), None, True).dataset
    assert len(dataset.shards) == 4
    expected = [f"{shard}-{number}" for shard in range(4) for number in range(5)]
    check_accounted(dataset, lambda sample: sample[0], expected)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda tars: web(tars).shuffle(10), "shuffle of this WebDataset"),
        (lambda tars: web(tars).batched(2), "batched of this WebDataset"),
        (lambda tars: web(tars, resampled=True), "begins with ResampledShards"),
        (lambda tars: web(tars).with_epoch(3), "an epoch of its own"),
    ],
)
def test_random_stages_of_webdataset_are_refused(
    tars: list[str], make: Callable[[list[str]], Any], reason: str
) -> None:
    pytest.importorskip("webdataset")
    with pytest.raises(TypeError, match=reason):
        given(make(tars), None, True)


# ---- torchdata


def loader(dataset: Any, **options: Any) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's, about itself
        return module.StatefulDataLoader(dataset, **options)


def test_a_stateful_loader_gives_data_collate_and_order() -> None:
    dataset = TensorDataset(torch.arange(12))

    def collate(samples: list[Any]) -> Any:
        return samples

    for shuffle in (True, False):
        found = given(loader(dataset, batch_size=4, shuffle=shuffle, collate_fn=collate), None, True)
        assert (found.dataset, found.collate_fn, found.shuffle) == (dataset, collate, shuffle)
    own = given(loader(dataset, batch_size=4), list, True)
    assert own.collate_fn is list


def test_a_loader_with_a_sampler_of_its_own_is_refused() -> None:
    sampler = WeightedRandomSampler([1.0, 2.0], 2)
    with pytest.raises(TypeError, match="a sampler of its own \\(WeightedRandomSampler\\)"):
        given(loader(TensorDataset(torch.arange(2)), sampler=sampler), None, True)


class Counting(IterableDataset[int]):
    """Numbers that can only be read from their begin."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def test_a_loader_over_an_iterable_is_one_stream() -> None:
    dataset = given(loader(Counting(), batch_size=4), None, True).dataset
    check_accounted(dataset, int, list(range(20)))


def test_other_data_are_left_as_they_are() -> None:
    for dataset in (torch.arange(3), TensorDataset(torch.arange(3)), Counting(), DataLoader([1, 2])):
        assert given(dataset, None, True).dataset is dataset


# ---- Hugging Face


def test_streaming_data_of_hugging_face_are_accounted_for() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (200 MB)")
    whole = datasets.Dataset.from_dict({"n": list(range(40))})
    stream = whole.to_iterable_dataset(num_shards=5)
    even = stream.map(lambda row: {"twice": 2 * row["n"]}).filter(lambda row: row["n"] % 2 == 0)
    for dataset, expected in ((stream, range(40)), (even, range(0, 40, 2))):
        found = given(dataset, None, True).dataset
        assert len(found.shards) == 5
        check_accounted(found, lambda row: row["n"], list(expected))
    shuffled = given(stream.shuffle(seed=3, buffer_size=10), None, True).dataset
    check_accounted(shuffled, lambda row: row["n"], list(range(40)))
    first = given(stream.take(7), None, True).dataset
    check_accounted(first, lambda row: row["n"], list(range(7)))
    from datasets.distributed import split_dataset_by_node

    with pytest.raises(TypeError, match="split_dataset_by_node"):
        given(split_dataset_by_node(stream, 0, 2), None, True)


def test_hugging_face_shuffles_of_two_seeds_are_told_apart() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (200 MB)")
    stream = datasets.Dataset.from_dict({"n": list(range(40))}).to_iterable_dataset(num_shards=5)
    one, same, other = (given(stream.shuffle(seed=seed), None, True).dataset for seed in (1, 1, 2))
    assert one.shards == same.shards != other.shards


# ---- MDS


def write_mds(folder: Path, lengths: list[int], **changes: Any) -> None:
    """Write shards of MDS, version 2, as its format says."""
    shards = []
    for shard, length in enumerate(lengths):
        samples = []
        for number in range(length):
            text = f"{shard}-{number}".encode()
            array = np.arange(6, dtype=np.float32) + number
            samples.append(
                len(text).to_bytes(4, "little") + np.int64(number).tobytes() + text + array.tobytes()
            )
        begin = 4 * (length + 2)
        offsets = np.cumsum([begin, *map(len, samples)]).astype(np.uint32)
        data = np.uint32(length).tobytes() + offsets.tobytes() + b"".join(samples)
        (folder / f"shard.{shard:05}.mds").write_bytes(data)
        shards.append(
            {
                "format": "mds",
                "version": 2,
                "compression": None,
                "column_names": ["n", "text", "x"],
                "column_encodings": ["int", "str", "ndarray:float32:2,3"],
                "column_sizes": [8, None, 24],
                "samples": length,
                "raw_data": {"basename": f"shard.{shard:05}.mds", "bytes": len(data), "hashes": {}},
            }
            | changes
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def test_mds_shards_are_accounted_for(tmp_path: Path) -> None:
    write_mds(tmp_path, [7, 1, 12])
    dataset = MDS(str(tmp_path))
    expected = [f"{shard}-{number}" for shard, length in enumerate([7, 1, 12]) for number in range(length)]
    check_accounted(dataset, lambda sample: sample["text"], expected)
    (sample,) = dataset.read_shard(dataset.shards[2], 11)
    assert (sample["n"], sample["x"].tolist()) == (11, [[11, 12, 13], [14, 15, 16]])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "json"}, "format 'json', version 2"),
        ({"compression": "zstd"}, "compressed with zstd"),
        ({"column_encodings": ["int", "pkl", "ndarray:float32:2,3"]}, "column text is pickled"),
        ({"column_encodings": ["int", "str", "ndarray"]}, "the encoding 'ndarray'"),
    ],
)
def test_mds_that_is_not_read_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    write_mds(tmp_path, [2], **changes)
    with pytest.raises(SpringtideError, match=reason):
        MDS(str(tmp_path))
    with pytest.raises(SpringtideError, match="there is no index"):
        MDS(str(tmp_path / "nowhere"))


def test_mds_that_was_cut_short_is_named(tmp_path: Path) -> None:
    write_mds(tmp_path, [3])
    file = tmp_path / "shard.00000.mds"
    file.write_bytes(file.read_bytes()[:-5])
    dataset = MDS(str(tmp_path))
    with pytest.raises(SpringtideError, match="mds ends 5 bytes too early"):
        list(dataset.read_shard(dataset.shards[0], 0))


# ---- packing


def documents(shard: int) -> Iterator[dict[str, list[int]]]:
    for number in range(4 + shard):
        yield {"input_ids": [100 * shard + 10 * number + 1 + place for place in range(1 + 3 * number % 7)]}


def test_packed_tokens_are_all_there_once() -> None:
    source = Shards([0, 1, 2], documents)
    packed = pack_tokens(source, 8, padding=9999)
    expected = [token for shard in range(3) for row in documents(shard) for token in row["input_ids"]]
    found = batches(packed, (2, 3), epochs=1)
    blocks = [block for batch in found for block in batch]
    tokens = [token for block in blocks for token in block["input_ids"][block["segment_ids"] >= 0].tolist()]
    assert sorted(tokens) == sorted(expected)
    for block in blocks:
        filled = block["segment_ids"] >= 0
        assert torch.equal(block["labels"][filled], block["input_ids"][filled])
        assert (block["labels"][~filled] == -100).all()
        assert (block["input_ids"][~filled] == 9999).all()
        assert (block["position_ids"][:1] == 0).all()


def test_packed_documents_have_places_and_an_end() -> None:
    source = Shards(["a"], lambda shard: [[1, 2, 3], [4, 5], [6]])
    first, second = pack_tokens(source, 6, tokens=lambda row: row, end=0).read_shard("a", 0)
    assert first["input_ids"].tolist() == [1, 2, 3, 0, 4, 5]
    assert first["position_ids"].tolist() == [0, 1, 2, 3, 0, 1]
    assert first["segment_ids"].tolist() == [0, 0, 0, 0, 1, 1]
    assert second["input_ids"].tolist() == [0, 6, 0, 0, 0, 0]
    assert second["labels"].tolist() == [0, 6, 0, -100, -100, -100]
    assert second["segment_ids"].tolist() == [0, 1, 1, -1, -1, -1]
    with pytest.raises(ValueError, match="length must be"):
        pack_tokens(source, 0)
    with pytest.raises(TypeError, match="has no shards"):
        pack_tokens([1, 2], 4)  # type: ignore[arg-type]


def test_samples_are_mapped_as_they_are_read() -> None:
    source = one_shard(range(10)).map(lambda number: -number)
    check_accounted(source, int, [-number for number in range(10)])


class KeepsItsPlace(IterableDataset[int]):
    """Numbers from its place on."""

    place = 2

    def __iter__(self) -> Iterator[int]:
        while self.place < 8:
            self.place += 1
            yield self.place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_data_that_keep_their_place_begin_anew_each_pass() -> None:
    """A pass begins where they stood when first given, wherever a reading that ended early left them."""
    dataset = KeepsItsPlace()
    for left_at in (2, 8, 6):
        shards = one_shard(dataset)
        reading = iter(shards.read_shard(None, 0))
        assert [next(reading) for _ in range(left_at - 2)] == list(range(3, left_at + 1))
    assert list(one_shard(dataset).read_shard(None, 1)) == [4, 5, 6, 7, 8]
