"""Settings of the C library and of torch that a job's processes make, and that these obey."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, json, os, resource, sys
from types import SimpleNamespace
import torch
import torch.distributed as dist
from springtide.comm.flight_recorder import record_no_flights
from springtide.memory.allocator import keep_freed_memory
from springtide.memory.ready import warm_heap
from springtide.train_step.trainer import Trainer
import springtide.api

has_compiler = "torch._dynamo" in sys.modules
import torch._dynamo  # once: the first optimizer of each part would


def faults(call):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def steps():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]

    def five():
        for _ in range(5):
            blocks = [libc.malloc(2 << 20) for _ in range(8)]
            for block in blocks:
                ctypes.memset(block, 1, 2 << 20)
            for block in reversed(blocks):
                libc.free(block)

    five()
    as_it_is = faults(five)
    assert keep_freed_memory({})
    assert not keep_freed_memory({"MALLOC_TOP_PAD_": "0"})
    five()
    return as_it_is, faults(five)


def gradients():
    assert keep_freed_memory({})
    forms = [torch.empty(1024, 1024) for _ in range(8)]
    made = lambda: [torch.full_like(form, 1.0) for form in forms]
    kept = []
    as_it_is = faults(lambda: kept.append(made()))
    warm_heap(forms)
    return as_it_is, faults(made)


def first_steps():
    def imported():
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.grad = torch.ones(3)
        known = set(sys.modules)
        optimizer.step()
        return len(set(sys.modules) - known)

    if not os.fork():
        print(json.dumps(imported()), flush=True)
        os._exit(0)
    os.wait()
    Trainer.import_ahead(SimpleNamespace())
    return imported()


def sums(off):
    if off:
        record_no_flights(on_device=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(4))
    from torch._C._distributed_c10d import _dump_fr_trace_json

    return len(json.loads(_dump_fr_trace_json()).get("entries", []))


for call in (steps, gradients, first_steps, lambda: sums(False), lambda: sums(True)):
    if not os.fork():
        print(json.dumps(call()), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
print(json.dumps(has_compiler))
"""


@pytest.fixture(scope="module")
def printed() -> list[object]:
    """Return what the parts of the program have printed, each in a process of its own."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_pages_of_a_freed_step_are_there_for_the_next(printed: list[tuple[int, int]]) -> None:
    """A step of 16 MiB has 4,096 pages of 4 KiB, which come anew each time unless they are kept."""
    as_it_is, kept = printed[0]
    assert as_it_is > 5 * 4096 // 2
    assert kept < 200


def test_gradients_find_pages_in_a_warm_heap(printed: list[tuple[int, int]]) -> None:
    """Eight of 4 MiB have 8,192 pages of 4 KiB."""
    as_it_is, warm = printed[1]
    assert as_it_is > 4096
    assert warm < 200


def test_first_step_imports_nothing_after_a_joiner_has(printed: list[int]) -> None:
    as_it_is, ahead = printed[2], printed[3]
    assert as_it_is > 0
    assert ahead == 0


def test_torch_records_no_sums_where_it_is_told(printed: list[int]) -> None:
    as_it_is, told = printed[4], printed[5]
    assert as_it_is > 0
    assert told == 0


def test_library_is_imported_without_the_compiler(printed: list[bool]) -> None:
    """torch's compiler takes as long to import as torch itself, also for a script that has no optimizer."""
    assert printed[6] is False
