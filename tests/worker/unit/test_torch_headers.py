"""Assumptions of our stand-ins for NCCL about torch, read in the installed torch's headers and type stubs."""

from __future__ import annotations

import importlib
import inspect
import mmap
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from springtide.comm.nccl import tame_nccl

PACKAGE = Path(torch.__file__).parent
C10D = PACKAGE / "include/torch/csrc/distributed/c10d"


def read(path: Path) -> str:
    """Return a file's text without comments, white space as single blanks; skip where torch has it not."""
    if not path.exists():
        pytest.skip(f"this build of torch came without {path.relative_to(PACKAGE)}")
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", path.read_text(), flags=re.DOTALL)
    return " ".join(text.split())


def header(name: str) -> str:
    return read(C10D / name)


def body(text: str, start: str) -> str:
    """Return the text from `start` to the brace that closes what opens behind it."""
    at = text.index(start)
    depth = 0
    for position in range(text.index("{", at), len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[at : position + 1]
    raise AssertionError(f"{start} does not end")


def stub(name: str) -> str:
    """Return the stub of a class of torch's C++ part, as it is written."""
    path = PACKAGE / "_C/_distributed_c10d.pyi"
    if not path.exists():
        pytest.skip(f"this build of torch came without {path.relative_to(PACKAGE)}")
    found = re.search(rf"^class {name}\b.*?(?=^\S)", path.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[0]


def test_every_variable_that_is_set_for_nccl_is_torch_s() -> None:
    """Every variable that is set for NCCL is known to torch: by its header, or by a library with CUDA."""
    environ: dict[str, str] = {}
    tame_nccl(environ)
    known = set(re.findall(r'"(\w+)"', header("ProcessGroupNCCL.hpp")))
    rest = set(environ) - known
    assert rest <= {"TORCH_NCCL_NONBLOCKING_TIMEOUT"}
    library = PACKAGE / "lib/libtorch_cuda.so"
    if library.exists():
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            assert [name for name in rest if content.find(name.encode()) < 0] == []


def test_no_error_handling_is_mode_zero() -> None:
    modes = body(header("ProcessGroupNCCL.hpp"), "enum ErrorHandlingMode")
    assert "NoHandling = 0," in modes


def test_connecting_has_a_limit_of_its_own() -> None:
    """`abort` takes the mutex that connecting holds, for so long at most."""
    text = header("NCCLUtils.hpp")
    assert "int nccl_nonblocking_timeout();" in text
    communicator = body(text, "class NCCLComm")
    for declared in ("MutexType mutex_", "void waitReady(", "void abort(", "ncclComm_t getNcclComm()"):
        assert declared in communicator, declared


def test_nccl_s_work_overrides_what_the_stand_in_has() -> None:
    work = body(header("ProcessGroupNCCL.hpp"), "class WorkNCCL : public Work")
    for declared in (
        "bool isCompleted() override",
        "bool isSuccess() const override",
        "bool wait(std::chrono::milliseconds timeout = kNoTimeout) override",
        "void synchronize() override",
    ):
        assert declared in work, declared
    # It has no `exception` of its own: that is the base's, which `isCompleted` sets.
    assert "exception() const override" not in work
    assert "std::exception_ptr exception() const" in body(header("Work.hpp"), "class TORCH_API Work ")


def test_nccl_s_group_can_be_aborted_and_connected_early() -> None:
    group = body(header("ProcessGroupNCCL.hpp"), "class TORCH_API ProcessGroupNCCL : public Backend")
    for declared in ("void abort() override", "void eagerConnectSingleDevice(at::Device device) override"):
        assert declared in group, declared


def test_sums_run_on_a_stream_of_their_own_by_default() -> None:
    """Torch runs sums on a stream of their own by default.

    Otherwise a sum would run on the script's stream, and `wait` would join nothing.
    """
    assert "bool asyncOp = true;" in body(header("Types.hpp"), "struct AllreduceOptions")
    options = dist.AllreduceOptions()  # type: ignore[attr-defined]
    assert getattr(options, "asyncOp", True) is True


def test_python_has_the_calls_that_we_make() -> None:
    for name, calls in {
        "Work": ("is_completed", "is_success", "exception", "wait"),
        "Backend": ("abort", "eager_connect_single_device"),
        "ProcessGroupNCCL": ("abort",),
    }.items():
        text = stub(name)
        assert [call for call in calls if f"def {call}(self" not in text] == []
    assert "blocking: int" in stub("ProcessGroupNCCL")
    assert "def _timeout(self, val: timedelta)" in stub("Backend")


def test_abort_and_eager_connection_are_in_the_bindings() -> None:
    """The base class of all backends binds `abort` and the eager connection.

    A build without CUDA has no other backend than gloo to ask.
    """
    for name in ("abort", "eager_connect_single_device", "shutdown"):
        assert callable(getattr(dist.ProcessGroupGloo, name))
    for name in ("is_completed", "is_success", "exception", "wait"):
        assert callable(getattr(dist.Work, name))  # type: ignore[attr-defined]


def test_error_of_an_abandoned_call_is_a_runtime_error() -> None:
    """NCCL's works raise NotImplementedError from `is_success`, which our handlers would take for a sum's."""
    assert issubclass(NotImplementedError, RuntimeError)


def test_pinned_memory_and_streams_are_as_we_use_them() -> None:
    """Torch's Python sources have a device's stream, and events without timing, the way we use them."""
    source = inspect.getsource(torch.cuda.streams)
    for text in ("def wait_stream(self, stream", "def wait_event(self, event", "enable_timing=False"):
        assert text in source
    assert re.search(r"def record_event\(self, event[^)]* = ?None|def record_event\(self, event=None", source)


def test_step_counts_lie_where_the_state_s_rule_says() -> None:
    """Fused and capturable optimizers keep step counts on the device, others on the CPU
    (`train_step/state.py`).
    """
    source = " ".join(inspect.getsource(importlib.import_module("torch.optim.adam")).split())
    rule = source.split(' state["step"] = (', 1)[1].split('state["exp_avg"]', 1)[0]
    there, here = rule.split('if group["capturable"] or group["fused"]')
    assert "device=p.device" in there
    assert "p.device" not in here
