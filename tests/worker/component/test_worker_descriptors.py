"""Descriptors of a process group: as many as are counted on, and an error where they do not suffice."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from worker_groups import wired_stores

from springtide.comm import descriptors
from springtide.comm.descriptors import TooFewDescriptorsError, of_group
from springtide.comm.process_group import form
from springtide.elastic.runtime import Runtime
from springtide.settings import Settings

MEMBER = """
import sys
import torch.distributed as dist
from springtide.comm.descriptors import open_descriptors
from springtide.comm.process_group import form

class Store(dist.FileStore):
    cancelled = None

rank, size, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = Store(path, size)
before = open_descriptors()
group = form(store, rank, size, "127.0.0.1", connect_seconds=30, collective_seconds=30)
store.set(f"there/{rank}", b"")
for other in range(size):
    store.get(f"there/{other}")
print(open_descriptors() - before, flush=True)
sys.stdin.read()
group.shut()
"""


@pytest.mark.slow
def test_a_group_takes_as_many_as_are_counted_on(tmp_path: Path) -> None:
    size = 4
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(rank), str(size), str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        taken = []
        for member in members:
            assert member.stdout is not None
            taken.append(int(member.stdout.readline()))
    finally:
        for member in members:
            member.communicate(timeout=60)
    assert max(taken) <= of_group(size)
    assert min(taken) >= of_group(size) - 1, "one is for a moment only, while the group forms"


def test_group_without_room_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "descriptor_limit", lambda: descriptors.open_descriptors() + 200)
    with pytest.raises(
        TooFewDescriptorsError, match="a group of 600 processes takes 1203 descriptors"
    ) as raised:
        form(wired_stores(1)[0], 0, 600, "127.0.0.1", connect_seconds=1, collective_seconds=1)
    assert raised.value.errno == errno.EMFILE


def test_a_worker_of_a_job_raises_its_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        settings = Settings(coordinator="127.0.0.1:1", token="t", pod_name="worker-0", pod_uid="uid")
        Runtime(settings).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
