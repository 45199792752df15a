"""Buckets from names and sizes alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from springtide.comm.layout import Field, layout_hash, most_bucket_bytes, plan_layout

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=12)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@given(shapes, st.data(), st.integers(1, 4000))
def test_every_gradient_has_a_place_of_its_own(
    sizes: list[tuple[int, ...]], data: st.DataObject, bucket_bytes: int
) -> None:
    fields = [Field(f"p{i}", shape, data.draw(dtypes)) for i, shape in enumerate(sizes)]
    layout = plan_layout(fields, bucket_bytes)
    taken: set[tuple[int, int]] = set()
    for field, slot in zip(fields, layout.slots, strict=True):
        assert layout.dtypes[slot.bucket] == field.dtype
        assert slot.offset + field.numel <= layout.sizes[slot.bucket]
        places = {(slot.bucket, slot.offset + k) for k in range(field.numel)}
        assert not places & taken
        taken |= places
    assert sorted(index for members in layout.members for index in members) == list(range(len(fields)))


def test_last_parameters_come_first_in_buckets_of_about_size() -> None:
    fields = [Field(f"p{i}", (100,), torch.float32) for i in range(10)]
    layout = plan_layout(fields, 1000)
    assert layout.members == ((9, 8, 7), (6, 5, 4), (3, 2, 1), (0,))


def test_first_bucket_is_small_so_that_sending_begins_early() -> None:
    fields = [Field(f"p{i}", (1 << 17,), torch.float32) for i in range(12)]
    assert [len(members) for members in plan_layout(fields, 4 << 20).members] == [2, 8, 2]


def test_last_bucket_is_a_small_part_of_a_model_on_the_cpu() -> None:
    assert most_bucket_bytes(100 << 20, "cpu") == (100 << 20) // 8
    assert most_bucket_bytes(5 << 20, "cpu") == 2 << 20
    fields = [Field(f"layer{number}", (1 << 18,), torch.float32) for number in range(64)]  # 64 MiB
    sizes = plan_layout(fields, most_bucket_bytes(64 << 20, "cpu")).sizes
    assert max(sizes) * 4 == 8 << 20
    assert plan_layout(fields, min(25 << 20, most_bucket_bytes(64 << 20, "cuda"))).sizes[1] * 4 == 25 << 20


def test_hash_tells_what_would_be_reduced_differently() -> None:
    fields = [Field("a", (3,), torch.float32), Field("b", (2, 2), torch.float32)]
    buffers = [Field("mean", (3,), torch.float32)]
    same = layout_hash(plan_layout(fields, 100), buffers, "SGD")
    assert same == layout_hash(plan_layout(list(fields), 100), list(buffers), "SGD")
    others = [
        layout_hash(plan_layout(fields[::-1], 100), buffers, "SGD"),
        layout_hash(plan_layout([fields[0], Field("b", (4,), torch.float32)], 100), buffers, "SGD"),
        layout_hash(plan_layout([fields[0], Field("b", (2, 2), torch.float64)], 100), buffers, "SGD"),
        layout_hash(plan_layout(fields, 100), [], "SGD"),
        layout_hash(plan_layout(fields, 100), buffers, "Adam"),
        layout_hash(plan_layout(fields, 1), buffers, "SGD"),
    ]
    assert len({same, *others}) == len(others) + 1


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="bucket_bytes must be at least 1, got 0"):
        plan_layout([], 0)
    with pytest.raises(ValueError, match=r"share names: \['a'\]"):
        plan_layout([Field("a", (1,), torch.float32)] * 2, 10)
