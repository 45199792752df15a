"""The heap keeps freed memory, except for users who have tuned it."""

import pytest

from springtide.memory.allocator import MOST_KEPT, bytes_to_keep

GIB = 1 << 30


@pytest.mark.parametrize(
    ("environ", "limit", "kept"),
    [
        ({}, None, MOST_KEPT),
        ({}, 64 * GIB, MOST_KEPT),
        ({}, 2 * GIB, GIB // 8),
        ({"LD_PRELOAD": "/usr/lib/libgomp.so"}, None, MOST_KEPT),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, None, None),
        ({"LD_PRELOAD": "/usr/lib/libtcmalloc.so"}, None, None),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, None, None),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0"}, None, None),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, None, MOST_KEPT),
    ],
)
def test_bytes_that_the_heap_keeps(environ: dict[str, str], limit: int | None, kept: int | None) -> None:
    assert bytes_to_keep(environ, limit) == kept
