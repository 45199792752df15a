"""Messages about failed calls, in words."""

from __future__ import annotations

from typing import Any

import grpc


def describe_error(error: grpc.RpcError) -> str:
    """A gRPC error in one line."""
    code, details = status_of(error)
    return f"{code.name}: {details}" if code is not None else repr(error)


def status_of(error: grpc.RpcError) -> tuple[grpc.StatusCode | None, str]:
    """Status and text of an error; at run time the errors of calls are calls, which the types cannot say."""
    call: Any = error
    if not hasattr(call, "code"):
        return None, ""
    return call.code(), call.details() or ""
