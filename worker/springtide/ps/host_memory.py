"""The memory of one process' parameters, and the host memory through which servers are spoken to.

On the CPU both are the same. On a GPU gradients are copied to pinned memory as backward makes them, and sent
from there by a thread of its own; values land in pinned memory and are copied from it layer by layer. Both go
over streams beside the script's, which waits for nothing but the values that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, Protocol

import torch

from springtide.comm.layout import Layout


class Done(Protocol):
    """A copy under way."""

    def synchronize(self) -> object:
        """Return when it has arrived."""


class Copier(Protocol):
    """Copies between a device and the host without keeping the script's stream waiting."""

    def host(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros on the host, fit for such copies.

        Args:
            size: Elements.
            dtype: Of the elements.

        Returns:
            Flat.
        """
        ...

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Done:
        """Begin to copy what the script's stream has made.

        Args:
            source: On the device.
            target: On the host, as large.

        Returns:
            The copy.
        """
        ...

    def mark(self) -> None:
        """Later copies to the device come after what the script's stream does until now."""

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy; what the script's stream does from now on comes after it.

        Args:
            source: On the host.
            target: On the device, as large.
        """


class CudaCopier:
    """Pinned memory, and a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        streams: Any = torch.cuda.Stream
        self._device = device
        self._out, self.incoming = streams(device), streams(device)
        """`incoming`: the stream of copies to the device."""
        self._mark: Any = None

    def host(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return pinned zeros on the host.

        Args:
            size: Elements.
            dtype: Of the elements.

        Returns:
            Flat.
        """
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Done:
        """Begin to copy what the script's stream has made, on a stream of the copier's.

        Args:
            source: On the device.
            target: On the host, as large.

        Returns:
            The copy.
        """
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            target.copy_(source, non_blocking=True)
        done: Done = self._out.record_event()
        return done

    def mark(self) -> None:
        self._mark = torch.cuda.current_stream(self._device).record_event()

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy, on a stream of the copier's; what the script's stream does from now on comes after
        it.

        Args:
            source: On the host.
            target: On the device, as large.
        """
        if self._mark is not None:
            self.incoming.wait_event(self._mark)
        with torch.cuda.stream(self.incoming):
            target.copy_(source, non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self.incoming)


class HostMemory:
    """The parameters of a model in flat memory of the layout, one tensor for each bucket.

    values: that memory on the host, where what the servers send arrives. copier: for parameters that are on
    a device; chosen by where they are when not given.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], layout: Layout, copier: Copier | None = None
    ) -> None:
        device = parameters[0].device if parameters else torch.device("cpu")
        self._copier = copier or (CudaCopier(device) if device.type == "cuda" else None)
        self._flats = _flatten(parameters, layout, device) if parameters else []
        self.values = self._flats
        self._gradients: list[torch.Tensor] = []
        self._sending: list[Future[None]] = []
        self._sender: ThreadPoolExecutor | None = None
        if self._copier is not None:
            self.values, self._gradients = (
                [self._copier.host(flat.numel(), flat.dtype) for flat in self._flats] for _ in range(2)
            )
            self._sender = ThreadPoolExecutor(1, "springtide-ps-copies")

    def send(self, bucket: int, gradients: torch.Tensor, send: Callable[[torch.Tensor], None]) -> None:
        """Have a bucket's gradients sent from the host: now, or in order by a thread.

        Args:
            bucket: Its number.
            gradients: Flat, where the script has them.
            send: Called with them on the host.
        """
        if self._copier is None or self._sender is None:
            send(gradients)
            return
        on_host = self._gradients[bucket]
        done = self._copier.to_host(gradients, on_host)

        def when_there(source: torch.Tensor) -> None:
            # As long as the copy reads it, `source` must not go back to the allocator, which would give it
            # to the script's next tensors: another stream reads it than the one that it was made on.
            done.synchronize()
            del source
            send(on_host)

        self._sending.append(self._sender.submit(when_there, gradients))

    def sent(self) -> None:
        """Wait until everything is on its way. Raise what `send` has raised."""
        sending, self._sending = self._sending, []
        wait_for(sending)
        for future in sending:
            future.result()

    def drop(self) -> None:
        """Wait until nothing is copied or sent any more, whatever comes of it."""
        wait_for(self._sending)
        self._sending = []

    def mark(self) -> None:
        """Values are asked for: what the script does until now still reads the old ones."""
        if self._copier is not None:
            self._copier.mark()

    def bring_up(self, bucket: int, start: int, stop: int) -> None:
        """Have the parameters hold values that have arrived.

        Args:
            bucket: Its number.
            start: Number of the first element.
            stop: Number of the element after the last.
        """
        if self._copier is not None:
            self._copier.to_device(self.values[bucket][start:stop], self._flats[bucket][start:stop])

    def bring_down(self) -> None:
        """Have `values` hold what the parameters do."""
        if self._copier is not None:
            for flat, value in zip(self._flats, self.values, strict=True):
                self._copier.to_host(flat, value).synchronize()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.shutdown()


def _flatten(
    parameters: Sequence[torch.nn.Parameter], layout: Layout, device: torch.device
) -> list[torch.Tensor]:
    """Move the parameters into flat memory of the layout, one tensor for each bucket."""
    flats = [
        torch.zeros(size, dtype=dtype, device=device)
        for size, dtype in zip(layout.sizes, layout.dtypes, strict=True)
    ]
    with torch.no_grad():
        for parameter, item, slot in zip(parameters, layout.fields, layout.slots, strict=True):
            view = flats[slot.bucket].narrow(0, slot.offset, item.numel).view(item.shape)
            view.copy_(parameter)
            parameter.data = view
    return flats
