"""The operator's client of a job's coordinator (asyncio)."""

from __future__ import annotations

from types import TracebackType

import grpc
import grpc.aio

from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol import coordinator_pb2_grpc as pb_grpc
from springtide_protocol.channel import client_options, token_metadata
from springtide_protocol.tls import aio_channel


class SyncError(RuntimeError):
    """The coordinator did not answer; `retry` tells whether a later call may succeed."""

    def __init__(self, message: str, *, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry


class SyncClient:
    """The operator's client of one job's coordinator; use it in one event loop, and close it.

    keepalive: seconds until a coordinator that gives no sign of life is left, at most, while it is asked.
    authority: the certificate, in PEM, that the coordinator must have; empty: no TLS. operator_token: what
    only the operator knows; a coordinator that was told of it refuses Sync without.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        keepalive: float = 10.0,
        authority: str = "",
        operator_token: str = "",
    ) -> None:
        self.address = address
        self._metadata = token_metadata(token, operator_token)
        self._channel = aio_channel(address, client_options(keepalive), authority)
        self._stub = pb_grpc.CoordinatorStub(self._channel)  # type: ignore[no-untyped-call]

    async def sync(self, request: pb.SyncRequest, timeout: float = 2.0) -> pb.SyncReply:
        """Send the wanted sizes and the pods that were seen; return the job's state.

        Args:
            request: complete, so that a lost call loses nothing.
            timeout: in seconds.

        Raises:
            SyncError: no answer within `timeout` seconds, or it refuses token or release (retry=False).
        """
        try:
            reply: pb.SyncReply = await self._stub.Sync(
                request, metadata=self._metadata, timeout=timeout, wait_for_ready=False
            )
        except grpc.aio.AioRpcError as error:
            refused = error.code() in (
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.PERMISSION_DENIED,
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.FAILED_PRECONDITION,
            )
            raise SyncError(
                f"coordinator at {self.address}: {error.code().name}: {error.details()}", retry=not refused
            ) from None
        return reply

    async def close(self) -> None:
        await self._channel.close(grace=None)

    async def __aenter__(self) -> SyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
