"""The coordinator's server: gRPC for workers and operator, HTTP for metrics and views, one event loop.

Threads: one event loop, without locks. Each stream has a reading and a writing task, which end together; a
ticker calls the hub, and a signal sets `stop`. HTTP is served in threads of its own (`web`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import grpc
import grpc.aio

from springtide_coordinator.hub import Hub
from springtide_coordinator.reply import answer_sync
from springtide_coordinator.restarts import next_incarnation
from springtide_coordinator.settings import Options
from springtide_coordinator.streams import Stream
from springtide_protocol import coordinator_pb2 as pb
from springtide_protocol import coordinator_pb2_grpc as pb_grpc
from springtide_protocol.channel import OPERATOR_METADATA, server_options
from springtide_protocol.codec import MalformedError
from springtide_protocol.span_export import SpanQueue, process_began
from springtide_protocol.versions import IncompatibleError

log = logging.getLogger("springtide.coordinator")

MIN_CONNECTIONS = 8192
HELLO_TIMEOUT = 10.0  # s from the opening of a stream to its Hello
LARGE_BYTES = 4096  # of a message that is worth keeping
METHODS = ("Session", "Serve", "Sync")


class TokenCheck(grpc.aio.ServerInterceptor):
    """Lets calls with one of the job's tokens in, and Sync only with the operator's own beside it.

    A refused call is handled as a stream of which nothing is read: gRPC takes a unary request into memory
    before its handler is asked, up to the limit of a message. Only the transport's window remains.

    Args:
        tokens: the job's: the newest, and those that pods of the job may still have.
        operator_digest: SHA-256 of the operator's token, hex: whoever reads it here cannot speak as the
            operator. Empty: the job's token suffices.
    """

    def __init__(self, tokens: Sequence[str], operator_digest: str = "") -> None:
        self._expected = [f"Bearer {token}".encode() for token in tokens]
        self._operator_digest = operator_digest
        self._unknown: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(self._deny)
        self._no_operator: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            self._deny_sync
        )

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Return the handler of a call, or one that refuses it; None for a method that there is not.

        Args:
            continuation: returns the handler.
            details: of the call: method and metadata.
        """
        method = details.method.rpartition("/")[2]
        if method not in METHODS:
            return None
        given = dict(details.invocation_metadata or ())
        shown = _bytes(given.get("authorization", ""))
        if not sum(hmac.compare_digest(shown, expected) for expected in self._expected):
            return self._unknown
        if method == "Sync" and self._operator_digest:
            digest = hashlib.sha256(_bytes(given.get(OPERATOR_METADATA, ""))).hexdigest()
            if not hmac.compare_digest(digest, self._operator_digest):
                return self._no_operator
        return await continuation(details)

    async def _deny(self, _: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            "the job's token is missing or wrong: send `authorization: Bearer TOKEN` (SPRINGTIDE_TOKEN)",
        )

    async def _deny_sync(self, _: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            "only the operator may say this: its own token is missing or wrong",
        )


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


class Servicer(pb_grpc.CoordinatorServicer):
    """Carries messages between gRPC and the hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def Session(
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Carry one worker's stream until it ends.

        Args:
            request_iterator: messages of the process.
            context: of the call.
        """
        stream = self._hub.new_stream()
        await self._carry(stream, self._read(stream, request_iterator), context)

    async def Serve(
        self, request_iterator: AsyncIterator[pb.ServerMessage], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Carry one parameter server's stream until it ends.

        Args:
            request_iterator: messages of the process.
            context: of the call.
        """
        stream = self._hub.new_server_stream()
        await self._carry(stream, self._read_server(stream, request_iterator), context)

    async def _carry(
        self,
        stream: Stream[Any],
        reading: Coroutine[Any, Any, None],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Read and write until either ends; then the hub knows that the stream is closed."""
        reader = asyncio.create_task(reading)
        writer = asyncio.create_task(self._write(stream, context))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if reader.done() and not writer.done():
                stream.end()
                await asyncio.wait((writer,), timeout=1.0)
        finally:
            self._hub.closed(stream)
            for task in (reader, writer):
                task.cancel()
            results = await asyncio.gather(reader, writer, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, grpc.aio.AbortError | EOFError):
                log.error("stream of %s failed", stream.member or "a process", exc_info=result)

    async def _read(
        self, stream: Stream[pb.CoordinatorMessage], requests: AsyncIterator[pb.WorkerMessage]
    ) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT):
                first = await anext(requests, None)
        except TimeoutError:
            self._hub.refuse(stream, f"no Hello within {HELLO_TIMEOUT:g} s")
            return
        if first is None:
            return
        if first.WhichOneof("message") != "hello":
            self._hub.refuse(stream, "the first message of a stream must be Hello")
            return
        self._hub.hello(stream, first.hello)
        async for message in requests:
            self._hub.receive(stream, message)

    async def _read_server(
        self, stream: Stream[pb.ServerOrder], requests: AsyncIterator[pb.ServerMessage]
    ) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT):
                first = await anext(requests, None)
        except TimeoutError:
            self._hub.refuse_server(stream, f"no ServerHello within {HELLO_TIMEOUT:g} s")
            return
        if first is None:
            return
        if first.WhichOneof("message") != "hello":
            self._hub.refuse_server(stream, "the first message of a stream must be ServerHello")
            return
        self._hub.server_hello(stream, first.hello)
        async for message in requests:
            self._hub.server_receive(stream, message)

    async def _write(self, stream: Stream[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async for message in stream.messages():
            await context.write(message)

    async def Sync(
        self, request: pb.SyncRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.SyncReply:
        """Answer the operator; a request that cannot be right is refused with INVALID_ARGUMENT, an operator
        of a release too far away with FAILED_PRECONDITION.

        Args:
            request: the operator's word.
            context: of the call.
        """
        try:
            return answer_sync(self._hub, request)
        except MalformedError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except IncompatibleError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))


class Serializer:
    """Writes messages as bytes, and a large one that goes to many members only once.

    A message must not change once it is on its way.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, bytes] | None = None

    def __call__(self, message: Any) -> bytes:
        """Return the bytes of a protobuf message."""
        if self._last is not None and self._last[0] is message:
            return self._last[1]
        written: bytes = message.SerializeToString()
        if len(written) >= LARGE_BYTES:
            self._last = (message, written)
        return written


def handlers(servicer: Servicer) -> grpc.GenericRpcHandler:
    """Return the service's handlers, as the generated code makes them but for the serializer of streams."""
    serializer = Serializer()
    return grpc.method_handlers_generic_handler(
        pb.DESCRIPTOR.services_by_name["Coordinator"].full_name,
        {
            "Session": grpc.stream_stream_rpc_method_handler(
                servicer.Session,
                request_deserializer=pb.WorkerMessage.FromString,
                response_serializer=serializer,
            ),
            "Serve": grpc.stream_stream_rpc_method_handler(
                servicer.Serve,
                request_deserializer=pb.ServerMessage.FromString,
                response_serializer=pb.ServerOrder.SerializeToString,
            ),
            "Sync": grpc.unary_unary_rpc_method_handler(
                servicer.Sync,
                request_deserializer=pb.SyncRequest.FromString,
                response_serializer=pb.SyncReply.SerializeToString,
            ),
        },
    )


def host_port(host: str, port: int) -> str:
    """Return an address that gRPC understands.

    Args:
        host: address or name; all addresses when empty.
        port: 0 for a free one.
    """
    host = host or "[::]"
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{host}:{port}"


class PortTakenError(RuntimeError):
    """The address could not be listened on."""


async def start_grpc(hub: Hub, options: Options) -> tuple[grpc.aio.Server, int]:
    """Listen for workers, parameter servers and the operator.

    Args:
        hub: all state of the process.
        options: of the process.

    Returns:
        The server and its port.

    Raises:
        PortTakenError: with the address.
    """
    # One for each process and as many again for those that come back; a job may be edited to be larger.
    connections = max(MIN_CONNECTIONS, 4 * (options.maximum + options.servers))
    server = grpc.aio.server(
        interceptors=[TokenCheck((options.token, *options.former_tokens), options.operator_digest)],
        options=server_options(options.heartbeat, connections),
        maximum_concurrent_rpcs=connections,
    )
    server.add_generic_rpc_handlers((handlers(Servicer(hub)),))
    certificate = options.certificate

    def listen(address: str) -> int:
        if certificate is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, certificate.credentials())

    address = host_port(options.host, options.port)
    try:
        port = listen(address)
    except RuntimeError:
        port = 0
    if not port and not options.host:  # no IPv6 here
        address = host_port("0.0.0.0", options.port)
        with contextlib.suppress(RuntimeError):
            port = listen(address)
    if not port:
        raise PortTakenError(f"cannot listen on {address}: the port is taken or the address is not ours")
    await server.start()
    return server, port


async def tick_for_ever(hub: Hub, seconds: float) -> None:
    """Let the hub look again and again, since time decides too.

    Args:
        hub: all state of the process.
        seconds: between two looks.
    """
    while True:
        await asyncio.sleep(seconds)
        hub.tick(seconds)


async def serve(options: Options, spans: SpanQueue | None = None) -> None:
    """Serve until SIGTERM or SIGINT. Workers do not mind the end: they go on and look for the next one.

    Args:
        options: of the process.
        spans: take what is traced, and are closed by the caller; None: nothing is.

    Raises:
        PortTakenError, ValueError, OSError: it cannot serve; the text says why.
    """
    incarnation = next_incarnation(options.state_dir, options.number)
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[None] = loop.create_future()

    def call(what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:
            if not failed.done():
                failed.set_exception(error)

    hub = Hub(
        options,
        incarnation,
        later=lambda seconds, what: loop.call_later(seconds, call, what),
        tracer=spans,
        began=process_began() if spans is not None else 0.0,
    )
    try:
        await hub.lifelines.listen(options.host)
    except OSError as error:
        log.warning("no lifelines: the end of a process is noticed by its stream alone: %s", error)
    server, port = await start_grpc(hub, options)
    log.info("listening", extra={"fields": {"port": port, "incarnation": incarnation}})
    stop = asyncio.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    from springtide_coordinator.web import start_web  # what it imports takes as long as all the rest

    web = start_web(hub, options, spans)
    ticker = asyncio.create_task(tick_for_ever(hub, options.tick))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((stopped, ticker, failed), return_when=asyncio.FIRST_COMPLETED)
        if ticker.done():
            ticker.result()
        if failed.done():
            failed.result()
    finally:
        log.info("stops")
        for task in (ticker, stopped, failed):
            task.cancel()
        await asyncio.gather(ticker, stopped, failed, return_exceptions=True)
        hub.changes.close(hub.clock(), "the coordinator ended before a step was committed")
        await server.stop(grace=None)
        hub.lifelines.close()
        web.close()
