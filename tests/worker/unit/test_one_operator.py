"""Tests whose ranks are threads share each operator of torch, also when they ask for it at the same time."""

from __future__ import annotations

import one_operator  # noqa: F401 (to import it is enough)
import torch


def test_second_thread_gets_the_operator_that_is_there() -> None:
    """The calls are those of a thread that looked before the first had made it."""
    packet = torch.ops.aten.special_airy_ai
    overload = packet.default
    assert type(torch.ops.aten).__getattr__(torch.ops.aten, "special_airy_ai") is packet
    assert type(packet).__getattr__(packet, "default") is overload
