"""Which errors are a process's own, and what is done with memory that several elements share."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from springtide.elastic.own_faults import in_words, own_fault
from springtide.errors import UsageError
from springtide.train_step.validation import declare, overlaps_itself


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "memory"),
        (MemoryError(), "memory"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
        (RuntimeError("[enforce fail at x.cpp:1] . DefaultCPUAllocator: can't allocate memory"), "memory"),
        (RuntimeError("std::bad_alloc"), "memory"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "device"),
        (OSError(errno.EMFILE, "Too many open files"), "descriptors"),
        (RuntimeError("[/gloo/transport/tcp/device.cc:210] socket: Too many open files"), "descriptors"),
        (ValueError("state header: version 9, this process reads version 1"), "form"),
        (ValueError("state transfer: 9 bytes were announced; 5 bytes are the limit here"), "form"),
        (ValueError("state transfer: the checksum of piece 3 is wrong (1 of 9 are); it is sent again"), ""),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.7]:3"), ""),
        (RuntimeError("NCCL error: ncclUnhandledCudaError: unhandled cuda error, NCCL 2.27"), ""),
        (TimeoutError("worker-1 did not tell its address in 60 s"), ""),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), ""),
        (RuntimeError("parameter server ps-1 at 10.0.0.9:7080: MemoryError: out of memory"), ""),
    ],
)  # fmt: skip
def test_errors_of_a_formation_are_its_own_or_not(error: BaseException, kind: str) -> None:
    assert own_fault(error) == kind
    if kind:
        said = in_words(kind, error)
        assert type(error).__name__ in said
        assert "\n" not in said


@given(st.lists(st.integers(0, 4), max_size=3), st.lists(st.integers(0, 6), min_size=3, max_size=3))
def test_memory_without_shared_places_is_found_right(shape: list[int], strides: list[int]) -> None:
    """Memory that is called free of overlaps gives each element a place of its own."""
    memory = torch.zeros(200)
    view = memory.as_strided(shape, strides[: len(shape)])
    places = torch.arange(200).as_strided(shape, strides[: len(shape)]).reshape(-1).tolist()
    if len(set(places)) < len(places):
        assert overlaps_itself(view)
    assert not overlaps_itself(torch.zeros(shape))
    assert not overlaps_itself(torch.zeros([*shape, 2]).transpose(0, -1))


class Masked(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        mask = torch.zeros(1, 1).expand(4, 4)
        self.register_buffer("mask", mask)
        self.register_buffer("again", mask)
        self.scale = torch.nn.Parameter(torch.ones(1).expand(3), requires_grad=False)


def distributed(model: torch.nn.Module, parameters: Any) -> None:
    declare(model, torch.optim.SGD(parameters, lr=0.1), None, {}, in_job=True, exact=False)


def test_expanded_buffers_get_memory_of_their_own() -> None:
    model = Masked()
    distributed(model, model.layer.parameters())
    assert model.mask.stride() == (4, 1)
    assert model.again is model.mask
    model.mask.copy_(torch.eye(4))  # as a state that comes does
    assert torch.equal(model.again, torch.eye(4))
    assert model.scale.stride() == (1,)
    assert isinstance(model.scale, torch.nn.Parameter)


def test_an_expanded_parameter_that_trains_is_refused() -> None:
    model = Masked()
    model.scale.requires_grad_()
    with pytest.raises(UsageError, match=r"parameter scale are one place in memory .* tensor\.clone\(\)"):
        distributed(model, model.parameters())
