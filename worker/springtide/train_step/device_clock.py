"""Measure what a step's gradients take on an accelerator, where the host only gives out the work."""

from __future__ import annotations

import torch


class DeviceClock:
    """Take the time on a CUDA device from a step's begin to its last gradient. Nothing on other devices.

    Order of calls: `begin`, `end` (once or more), and `seconds` when the host has waited for what follows on
    the gradients. Only the script's thread uses it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._begin: torch.cuda.Event | None = None
        self._end: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Note that work for a step is given out from here on."""
        self._begin = self._mark()

    def end(self) -> None:
        """Note that all work for the gradients has been given out."""
        self._end = self._mark()

    def seconds(self) -> float | None:
        """Return what the device took between both; None where it has no clock."""
        if self._begin is None or self._end is None:
            return None
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) / 1000.0

    def _mark(self) -> torch.cuda.Event | None:
        if self._device is None:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
