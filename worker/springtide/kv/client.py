"""A client of named tensors and tables on parameter servers: what `springtide.kv.connect()` returns."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import torch

from springtide.kv.table import Table, settle
from springtide_ps.params.embedding import TableError, TableSpec
from springtide_ps.params.placement import CHUNK_BYTES, Chunk, split, spread
from springtide_ps.wire.client import Answer, RefusedError, ServerClient, ServerLostError
from springtide_ps.wire.frames import DTYPE_NAMES
from springtide_ps.wire.stream import RejectedError, addresses

__all__ = [
    "Handle",
    "KVStore",
    "RefusedError",
    "RejectedError",
    "ServerLostError",
    "Table",
    "TableError",
    "connect",
]

SEND_SECONDS = 60.0
"""Limit of the wait for room in the queue of requests to a server."""


class Handle:
    """A request under way. The tensors that were given to it must not change before it is done."""

    def __init__(self, what: str, parts: Sequence[tuple[Future[Answer], str]]) -> None:
        self._what, self._parts = what, parts

    def done(self) -> bool:
        """Whether every server has answered, or can answer no more."""
        return all(future.done() for future, _ in self._parts)

    def wait(self, timeout: float = 60.0) -> None:
        """Wait for the servers' answers.

        Raises TimeoutError that names the servers that did not answer, ServerLostError for a connection that
        broke (a push may have been applied there or not), RefusedError for what a server cannot do.
        """
        settle(self._what, self._parts, timeout)


class KVStore:
    """Tensors by name over a fixed list of servers; the order of the list is part of the agreement.

    Every process must name the same servers in the same order. Tensors may be on any device and of any
    layout of strides; those that are not contiguous on the CPU are copied. Methods may be called from any
    thread. They raise ServerLostError when a server's connection is broken, or is that of a process from
    which this one was forked: connect anew.
    """

    def __init__(self, clients: Sequence[ServerClient], chunk_bytes: int = CHUNK_BYTES) -> None:
        self._clients = list(clients)
        self._chunk_bytes = chunk_bytes
        self._chunks: dict[str, list[tuple[Chunk, ServerClient]]] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connections; requests without an answer fail with ServerLostError."""
        for client in self._clients:
            client.close()

    def set_update(self, name: str, *, timeout: float = 60.0, **options: Any) -> None:
        """Choose what later pushes do, on all servers.

        Args:
            name: "assign" (at first), "sum", "sgd", "adam", "adamw", "adagrad" or "rmsprop".
            timeout: seconds until all servers have to have answered.
            options: those of torch's optimizer of that name.

        Raises:
            RefusedError: a server does not know the name or an option.
            TimeoutError: a server did not answer; it is named.
        """
        parts = [(client.update(name, **options), client.address) for client in self._clients]
        Handle(f"set_update({name!r})", parts).wait(timeout)

    def init(self, key: str | int, value: torch.Tensor, *, timeout: float = 60.0) -> bool:
        """Make a key.

        Args:
            key: its name; a number counts as its decimal digits.
            value: its first values, of any shape; the key keeps shape and dtype.
            timeout: seconds until all servers have to have answered.

        Returns:
            False when another process made it first, whose values then stand.

        Raises:
            RefusedError: the key is there with another shape or dtype, or a server has no room.
            TimeoutError: a server did not answer; it is named.
        """
        name = str(key)
        flat = self._flat(value)
        placed = self._place(name, flat)
        parts = [
            (client.init(chunk.name, flat[chunk.start : chunk.stop], value.shape), client.address)
            for chunk, client in placed
        ]
        Handle(f"init({name!r})", parts).wait(timeout)
        self._dtypes[name], self._chunks[name] = flat.dtype, placed
        return all(bool(future.result().meta.get("created")) for future, _ in parts)

    def push(self, key: str | int, value: torch.Tensor) -> Handle:
        """Send values and return at once.

        Args:
            key: that this process has made by `init`.
            value: of the key's size and dtype; leave it as it is until the handle's `wait()` is over.

        Returns:
            The handle to wait for the servers' answers with.

        Raises:
            KeyError: this process did not `init()` the key.
            ValueError: the tensor has another size or dtype.
            TypeError: it is no tensor.
            TimeoutError: 4096 requests wait to be sent to a server, and none has left for a minute; the
                server is named.
        """
        flat = self._flat(value)
        return self._each("push", key, flat, lambda c, chunk, part: c.push(chunk, part))

    def pull(self, key: str | int, out: torch.Tensor, *, timeout: float = 60.0) -> torch.Tensor:
        """Fill a tensor with the key's values, and return it.

        Args:
            key: that this process has made by `init`.
            out: of the key's size and dtype, contiguous, on the CPU.
            timeout: seconds until all servers have to have answered.

        Raises:
            KeyError: this process did not `init()` the key.
            ValueError: the tensor cannot take the values.
            TimeoutError: a server did not answer; it is named.
        """
        self.start_pull(key, out).wait(timeout)
        return out

    def start_pull(self, key: str | int, out: torch.Tensor) -> Handle:
        """Let the key's values land in a tensor; use it after the handle's `wait()`.

        Args:
            key: that this process has made by `init`.
            out: of the key's size and dtype, contiguous, on the CPU.

        Returns:
            The handle to wait for the servers' answers with.

        Raises:
            KeyError: this process did not `init()` the key.
            ValueError: the tensor cannot take the values.
        """
        flat = self._target(out)
        return self._each("pull", key, flat, lambda c, chunk, part: c.pull(chunk, part))

    def push_pull(self, key: str | int, value: torch.Tensor, out: torch.Tensor) -> Handle:
        """Push values, and let the values that this push made land in a tensor.

        Args:
            key: that this process has made by `init`.
            value: what is pushed: of the key's shape and dtype.
            out: of the key's size and dtype, contiguous, on the CPU; use it after the handle's `wait()`.

        Returns:
            The handle to wait for the servers' answers with.

        Raises:
            KeyError: this process did not `init()` the key.
            ValueError: one of the tensors has another size or dtype, or `out` cannot take the values.
        """
        flat, target = self._flat(value), self._target(out)
        self._placed("push_pull", key, target)
        handle = []
        for chunk, client in self._placed("push_pull", key, flat):
            parts = flat[chunk.start : chunk.stop], target[chunk.start : chunk.stop]
            handle.append((client.push_pull(chunk.name, *parts), client.address))
        return Handle(f"push_pull({str(key)!r})", handle)

    def table(
        self,
        name: str,
        dim: int,
        *,
        optimizer: str = "sgd",
        init: str = "normal",
        scale: float = 1.0,
        seed: int = 0,
        max_rows: int = 0,
        max_age: int = 0,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        timeout: float = 60.0,
        **options: Any,
    ) -> Table:
        """Make an embedding table, or find the one that another process made.

        Args:
            name: of the table, the same in every process.
            dim: numbers of a row.
            optimizer: "sgd", "adagrad" or "adam".
            init: the first values of a row: "normal", "uniform" or "zeros".
            scale: of these values: standard deviation, or the bound.
            seed: of these values, which are the same on any number of servers.
            max_rows: of all servers together; rows that were touched longest ago go; 0 keeps all.
            max_age: in pushes; rows that were not touched for longer go; 0 keeps all.
            max_norm: rows that are looked up have at most this norm, as those of torch's Embedding; None:
                any.
            norm_type: the p of that norm.
            scale_grad_by_freq: a push divides a row's gradient by how often it names the row; each push is a
                step of its own, so other workers' pushes are not counted.
            timeout: seconds until all servers have to have answered.
            options: `lr` and the other options of torch's optimizer.

        Raises:
            TableError: the options cannot be.
            RefusedError: the table is there as another.
            TimeoutError: a server did not answer; it is named.
        """
        per_server = -(-max_rows // len(self._clients))
        spec = TableSpec(
            dim,
            optimizer,
            options,
            init,
            scale,
            seed,
            per_server,
            max_age,
            max_norm=max_norm,
            norm_type=norm_type,
            by_frequency=scale_grad_by_freq,
        )
        parts = [(client.table(name, spec), client.address) for client in self._clients]
        settle(f"table({name!r})", parts, timeout)
        return Table(name, spec, self._clients)

    def status(self, timeout: float = 10.0) -> list[dict[str, Any]]:
        """Return each server's figures: keys, bytes, updates, clients."""
        parts = [(client.status(), client.address) for client in self._clients]
        Handle("status", parts).wait(timeout)
        return [{"server": server, **future.result().meta} for future, server in parts]

    # ---- parts

    def _each(self, what: str, key: str | int, flat: torch.Tensor, ask: Any) -> Handle:
        parts = [
            (ask(client, chunk.name, flat[chunk.start : chunk.stop]), client.address)
            for chunk, client in self._placed(what, key, flat)
        ]
        return Handle(f"{what}({str(key)!r})", parts)

    def _placed(self, what: str, key: str | int, flat: torch.Tensor) -> list[tuple[Chunk, ServerClient]]:
        placed = self._chunks.get(str(key))
        if placed is None:
            raise KeyError(
                f"{what}: this process did not init({key!r}); every process calls it, one makes it"
            )
        if placed[-1][0].stop != flat.numel():
            raise ValueError(
                f"{what}: {key!r} has {placed[-1][0].stop} elements, this tensor has {flat.numel()}"
            )
        dtype = self._dtypes[str(key)]
        if flat.dtype is not dtype:
            raise ValueError(f"{what}: {key!r} is of {dtype}, this tensor of {flat.dtype}: convert it first")
        return placed

    def _place(self, name: str, flat: torch.Tensor) -> list[tuple[Chunk, ServerClient]]:
        chunks = split(name, flat.numel(), flat.element_size(), self._chunk_bytes)
        return [
            (c, self._clients[s]) for c, s in zip(chunks, spread(chunks, len(self._clients)), strict=True)
        ]

    @staticmethod
    def _flat(value: torch.Tensor) -> torch.Tensor:
        _check_tensor(value)
        if value.layout is not torch.strided or value.dtype not in DTYPE_NAMES:
            raise ValueError(f"a {value.dtype} tensor of layout {value.layout} cannot be sent")
        return value.detach().to("cpu").contiguous().reshape(-1)

    @staticmethod
    def _target(out: torch.Tensor) -> torch.Tensor:
        _check_tensor(out)
        if out.device.type != "cpu" or not out.is_contiguous():
            raise ValueError(
                "out must be contiguous and on the CPU: values land in its memory as they arrive"
            )
        return out.detach().reshape(-1)


def _check_tensor(value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"springtide.kv takes and fills torch tensors, not a {type(value).__name__}")


def connect(
    servers: Sequence[str],
    token: str,
    *,
    timeout: float = 10.0,
    chunk_bytes: int = CHUNK_BYTES,
    tls: ssl.SSLContext | None = None,
) -> KVStore:
    """Connect to every server of a list.

    Args:
        servers: "host:port" of each, the same list in the same order in every process.
        token: by which the servers know their clients.
        timeout: seconds for each connection.
        chunk_bytes: larger tensors are cut into pieces of this size, which are spread over the servers; the
            same in every process.
        tls: the context of encrypted connections; None: unencrypted.

    Returns:
        The store, connected to all servers.

    Raises:
        ValueError: the list is bad.
        RejectedError: the token is wrong.
        OSError: a server cannot be reached in time; it is named.
    """
    clients: list[ServerClient] = []
    try:
        for address in addresses(servers):
            try:
                clients.append(ServerClient(address, token, timeout, tls, patience=SEND_SECONDS))
            except RejectedError:
                raise
            except OSError as error:
                raise ConnectionError(
                    f"parameter server {address[0]}:{address[1]} cannot be reached: {error}"
                ) from error
    except BaseException:
        for client in clients:
            client.close()
        raise
    return KVStore(clients, chunk_bytes)
