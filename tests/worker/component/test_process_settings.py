"""Settings of the C library and of torch that `init()` makes, and that they obey."""

import subprocess
import sys

STEPS = """
import ctypes, resource, sys
from springtide.memory.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory({})
    assert not keep_freed_memory({"MALLOC_TOP_PAD_": "0"})
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def step():
    blocks = [libc.malloc(2 << 20) for _ in range(8)]
    for block in blocks:
        ctypes.memset(block, 1, 2 << 20)
    for block in reversed(blocks):
        libc.free(block)
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
step()
before = faults()
for _ in range(5):
    step()
print(faults() - before)
"""

SUM = """
import os, sys
import torch
import torch.distributed as dist
from springtide.comm.flight_recorder import record_no_flights
if sys.argv[1] == "off":
    record_no_flights(on_device=False)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
import json
from torch._C._distributed_c10d import _dump_fr_trace_json
print(len(json.loads(_dump_fr_trace_json()).get("entries", [])))
"""


def printed(program: str, how: str) -> int:
    command = [sys.executable, "-c", program, how]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


def test_pages_of_a_freed_step_are_there_for_the_next() -> None:
    """A step of 16 MiB has 4,096 pages of 4 KiB, which come anew each time unless they are kept."""
    assert printed(STEPS, "kept") < 200
    assert printed(STEPS, "as it is") > 5 * 4096 // 2


def test_torch_records_no_sums_then() -> None:
    assert printed(SUM, "off") == 0
    assert printed(SUM, "as it is") > 0
