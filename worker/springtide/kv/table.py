"""Embedding tables on parameter servers: rows by id, spread over the servers by a hash of the id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait

import torch

from springtide_ps.params.embedding import TableSpec
from springtide_ps.params.idmap import mix
from springtide_ps.params.row_norms import bounded
from springtide_ps.wire.client import Answer, ServerClient

_PAGE_ROWS = 65_536


class Lookup:
    """Rows on their way. `result()` may be called once they are needed."""

    def __init__(
        self,
        name: str,
        spec: TableSpec,
        parts: Sequence[tuple[Future[Answer], str]],
        unique: torch.Tensor,
        inverse: torch.Tensor,
        shape: torch.Size,
    ) -> None:
        self._name, self._spec, self._parts = name, spec, parts
        self._unique, self._inverse, self._shape = unique, inverse, shape

    def result(self, timeout: float = 60.0) -> torch.Tensor:
        """float32 [*shape of the ids, dim].

        Raises TimeoutError that names the servers that did not answer, ServerLostError, RefusedError.
        """
        settle(f"lookup in {self._name!r}", self._parts, timeout)
        rows = bounded(self._unique, self._spec.max_norm, self._spec.norm_type)
        return rows.index_select(0, self._inverse).reshape(*self._shape, self._spec.dim)


class Push:
    """A push on its way."""

    def __init__(self, name: str, parts: Sequence[tuple[Future[Answer], str]]) -> None:
        self._name, self._parts = name, parts

    def wait(self, timeout: float = 60.0) -> None:
        """Raises TimeoutError that names the servers that did not answer, ServerLostError, RefusedError."""
        settle(f"push to {self._name!r}", self._parts, timeout)


class Table:
    """One table over a list of servers, which must be the same list in every process.

    Ids are any int64, in tensors of any shape. Repeated ids travel once. Every push counts one step of the
    optimizer on every server, so the numbers do not depend on how many servers there are.
    """

    def __init__(self, name: str, spec: TableSpec, clients: Sequence[ServerClient]) -> None:
        self.name, self.spec = name, spec
        self._clients = clients

    def lookup(self, ids: torch.Tensor, timeout: float = 60.0) -> torch.Tensor:
        """Return rows by id; rows that are not there yet are made.

        Args:
            ids: int64 or int32, of any shape.
            timeout: seconds until all servers have to have answered.

        Returns:
            float32 [*ids.shape, dim], on the CPU.

        Raises:
            TypeError: the ids are of another dtype.
            TimeoutError: a server did not answer; it is named.
        """
        return self.prefetch(ids).result(timeout)

    def prefetch(self, ids: torch.Tensor) -> Lookup:
        """Ask for rows and return at once, for example for the next batch."""
        flat = _flat(ids)
        unique, inverse = torch.unique(flat, return_inverse=True)
        order, counts = self._by_server(unique)
        unique = unique[order]
        # A row of `rows` is where the server's answer puts it; `inverse` follows.
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        rows = torch.empty(len(unique), self.spec.dim)
        parts, start = [], 0
        for client, count in zip(self._clients, counts, strict=True):
            if count:
                stop = start + count
                future = client.lookup(self.name, unique[start:stop], rows[start:stop])
                parts.append((future, client.address))
                start = stop
        return Lookup(self.name, self.spec, parts, rows, place[inverse], ids.shape)

    def push(self, ids: torch.Tensor, gradients: torch.Tensor) -> Push:
        """Make one step of the table's optimizer; return at once.

        Gradients of a repeated id are summed, or with scale_grad_by_freq averaged.

        Args:
            ids: int64 or int32, of any shape.
            gradients: float32 [*ids.shape, dim], on any device.

        Returns:
            The push, whose `wait()` waits for the servers' answers.

        Raises:
            ValueError: the gradients have another shape.
            TypeError: the ids are of another dtype.
        """
        flat = _flat(ids)
        if tuple(gradients.shape) != (*ids.shape, self.spec.dim):
            raise ValueError(
                f"table {self.name!r}: gradients of shape {tuple(gradients.shape)} for ids of shape "
                f"{tuple(ids.shape)}, expected {(*ids.shape, self.spec.dim)}"
            )
        values = gradients.detach().to("cpu", torch.float32).reshape(-1, self.spec.dim)
        unique, inverse = torch.unique(flat, return_inverse=True)
        order, counts = self._by_server(unique)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        summed = torch.zeros(len(unique), self.spec.dim).index_add_(0, place[inverse], values)
        if self.spec.by_frequency:
            summed /= torch.bincount(place[inverse], minlength=len(unique))[:, None]
        unique, parts, start = unique[order], [], 0
        for client, count in zip(self._clients, counts, strict=True):
            stop = start + count
            future = client.table_push(self.name, unique[start:stop], summed[start:stop])
            parts.append((future, client.address))
            start = stop
        return Push(self.name, parts)

    def export(self, timeout: float = 60.0) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int64 [n] in order, rows float32 [n, dim]) of all servers. Let no worker push meanwhile.

        With max_norm a row is bounded here from its next step on, not from its next lookup.
        """
        pages = [page for client in self._clients for page in self._pages(client, timeout)]
        ids = torch.cat([page[0] for page in pages])
        rows = torch.cat([page[1] for page in pages])
        order = torch.argsort(ids)
        return ids[order], rows[order]

    def _pages(self, client: ServerClient, timeout: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start = 0
        while True:
            future = client.page(self.name, start, _PAGE_ROWS)
            settle(f"export of {self.name!r}", [(future, client.address)], timeout)
            answer = future.result()
            count, payload = int(answer.meta["count"]), answer.payload
            assert payload is not None
            rows = payload[8 * count :].view(torch.float32).reshape(count, self.spec.dim)
            yield payload[: 8 * count].view(torch.int64), rows
            if not count:
                return
            start += count

    def _by_server(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """(the order that puts the ids of each server together, how many each has)."""
        if len(self._clients) == 1:
            return torch.arange(len(ids)), [len(ids)]
        # Bits that the servers' own maps do not use.
        server = (mix(ids.numpy(), seed=1) >> 32) % len(self._clients)
        which = torch.from_numpy(server.astype("int64"))
        counts = torch.bincount(which, minlength=len(self._clients))
        return torch.argsort(which, stable=True), counts.tolist()


def _flat(ids: torch.Tensor) -> torch.Tensor:
    """int64 [n], on the CPU. Raise TypeError for what are no ids."""
    if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
        given = ids.dtype if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise TypeError(f"ids of a table are a tensor of int64 or int32, not {given}")
    return ids.detach().to("cpu", torch.int64).reshape(-1)


def settle(what: str, parts: Sequence[tuple[Future[Answer], str]], timeout: float) -> None:
    """Wait for the answers of one request.

    Args:
        what: the request in words, for the error.
        parts: (future of the answer, server) of each part.
        timeout: seconds for all of them together.

    Raises:
        TimeoutError: an answer is missing; its server is named. An error that a server answered with is
            raised as it is.
    """
    wait([future for future, _ in parts], timeout)
    missing = sorted({server for future, server in parts if not future.done()})
    if missing:
        raise TimeoutError(f"{what}: no answer within {timeout:g} s from {', '.join(missing)}")
    for future, _ in parts:
        future.result()
