"""gRPC options that both sides share.

Liveness is the transport's keepalive, answered by gRPC's own threads: a process that holds the interpreter
lock for seconds is alive, a stopped one is not. `grpc.http2.ping_timeout_ms` is needed beside the two
keepalive options; its default of a minute would otherwise decide.
"""

from __future__ import annotations

from springtide_protocol.heartbeat import Heartbeat, of_coordinator
from springtide_protocol.limits import MAX_MESSAGE_BYTES

OPERATOR_METADATA = "springtide-operator"
"""Name of the metadata in which the operator's own token travels."""
HANDSHAKE_MS = 5_000
IDLE_MS = 120_000
MAX_METADATA_BYTES = 8 * 1024
MAX_STREAMS = 32

Options = list[tuple[str, int]]


def keepalive_options(heartbeat: Heartbeat) -> Options:
    """Ping after silence while a call is open, and give up without an answer.

    A connection without a call, as the operator's is nearly always, is left alone: a thousand of them would
    cost the operator a thousand pings a second.
    """
    ping, answer = (
        max(1, int(seconds * 1000)) for seconds in (heartbeat.ping_every, heartbeat.answer_within)
    )
    return [
        ("grpc.keepalive_time_ms", ping),
        ("grpc.keepalive_timeout_ms", answer),
        ("grpc.http2.ping_timeout_ms", answer),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]


def server_options(heartbeat: Heartbeat, connections: int = 8192) -> Options:
    """Return the options of a gRPC server whose clients may ping as often as they like; a second one on its
    port fails.

    The cost of a connection before a token was seen is bounded: time until a connection speaks HTTP/2, calls
    and metadata on it, its life without a call, and the window in which bytes come that nobody has read.

    Args:
        heartbeat: how often a connection is pinged, and for how long it may be silent.
        connections: streams at a time.
    """
    return [
        *keepalive_options(heartbeat),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


def client_options(limit: float) -> Options:
    """A connection of its own for each client, found again within a second.

    limit: the heartbeat limit, in seconds; after half as long again of silence the coordinator is left.
    """
    return [
        *keepalive_options(of_coordinator(limit)),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Also how long a first attempt may take: the other end may be short of processor time, or far away.
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]


def token_metadata(token: str, operator_token: str = "") -> tuple[tuple[str, str], ...]:
    """Return the metadata that every call carries.

    Args:
        token: the job's.
        operator_token: the operator's own, which only its calls carry.
    """
    own = ((OPERATOR_METADATA, operator_token),) if operator_token else ()
    return (("authorization", f"Bearer {token}"), *own)
