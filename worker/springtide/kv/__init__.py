"""Named tensors and embedding tables on parameter servers: init, push, pull.

`connect()` returns a store; its verbs are those of MXNet's KVStore.
"""

from __future__ import annotations

from springtide.kv.client import (
    Handle,
    KVStore,
    RefusedError,
    RejectedError,
    ServerLostError,
    Table,
    TableError,
    connect,
)

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
