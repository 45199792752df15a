"""Decisions of a restore: who reads which part of a checkpoint, its chunks on the way, and the memory for
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from springtide.checkpoint.restore import assign
from springtide.comm import gather
from springtide.launch.cgroup import memory_left


@given(sizes=st.lists(st.integers(0, 1000), max_size=40), count=st.integers(1, 9))
def test_each_file_is_read_by_one_member_and_shares_are_fair(sizes: list[int], count: int) -> None:
    shares = assign(sizes, count)
    assert sorted(number for share in shares for number in share) == list(range(len(sizes)))
    loads = [sum(sizes[number] for number in share) for share in shares]
    # The last file that the fullest got went to it because nobody had less.
    assert max(loads) - min(loads) <= max(sizes, default=0)


@given(
    sizes=st.lists(st.integers(0, 70), max_size=12),
    most=st.integers(1, 30),
)
def test_chunks_are_all_bytes_in_order_and_not_too_many(sizes: list[int], most: int) -> None:
    memory = torch.arange(sum(sizes), dtype=torch.int64).to(torch.uint8)
    parts = list(torch.split(memory, sizes)) if sizes else []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gather, "CHUNK_BYTES", most)
        found = list(gather.chunks(parts))
    assert all(0 < sum(part.numel() for part in chunk) <= most for chunk in found)
    joined = [part for chunk in found for part in chunk]
    assert torch.equal(torch.cat([*joined, memory[:0]]), memory)
    if joined:
        joined[0][0] = 255
        assert memory[0] == 255  # views, not copies


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_memory_left_is_the_least_of_machine_and_limits(tmp_path: Path) -> None:
    assert memory_left(tmp_path) is None
    write(tmp_path, {"proc/meminfo": "MemTotal: 100 kB\nMemAvailable:   50 kB\n"})
    assert memory_left(tmp_path) == 50 * 1024
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/worker\n",
            "sys/fs/cgroup/pod/worker/memory.max": "max\n",
            "sys/fs/cgroup/pod/worker/memory.current": "7000\n",
            "sys/fs/cgroup/pod/memory.max": "20000\n",
            "sys/fs/cgroup/pod/memory.current": "9000\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 3000\n",
        },
    )
    assert memory_left(tmp_path) == 20000 - 9000 + 3000


def test_memory_left_knows_the_first_version_of_groups(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/pod\n",
            "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": "5000\n",
            "sys/fs/cgroup/memory/pod/memory.usage_in_bytes": "6000\n",
        },
    )
    assert memory_left(tmp_path) == 0
