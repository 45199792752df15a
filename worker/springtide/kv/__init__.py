"""Named tensors on parameter servers, for those who want the raw thing: init, push, pull.

    store = springtide.kv.connect(["10.0.0.7:7080", "10.0.0.8:7080"], token=token)
    store.set_update("sgd", lr=0.1, momentum=0.9)
    store.init("w", torch.zeros(1000, 1000))
    store.push("w", gradient)  # returns at once
    store.pull("w", out=w)  # waits until w holds the values
    store.push_pull("w", gradient, out=w)  # both in one round

The verbs are those of MXNet's KVStore. A push is applied when it arrives; large tensors are cut into chunks
that are spread over the servers, so a pull beside other workers' pushes may mix versions of different chunks,
never inside of one.
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
