"""gRPC settings of the mesh, on both ends. Each has its reason in what was measured (docs/architecture.md)."""

from typing import Final

from grpc import aio

__all__ = ["CHUNK_BYTES", "MESSAGE_BYTES", "PROTOCOL", "open_stage_channel", "stage_server_options"]

PROTOCOL: Final = 1
"""Version of stage.proto that this release speaks."""

CHUNK_BYTES: Final = 1 << 20
"""Largest piece of an inline tensor in one frame."""

MESSAGE_BYTES: Final = 4 * CHUNK_BYTES
"""Largest message on a stage stream: its frames stay under one chunk beyond the limit at which a message is closed."""

_SIZES: Final = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_metadata_size", 8 << 10),
]


def open_stage_channel(target: str) -> aio.Channel:
    """A channel to one stage instance: "unix:/path" or "host:port". The caller closes it."""
    return aio.insecure_channel(
        target,
        options=[
            *_SIZES,
            # The documented keepalive time-out never fires: without the ping time-out a dead peer costs a minute.
            ("grpc.keepalive_time_ms", 2000),
            ("grpc.keepalive_timeout_ms", 2000),
            ("grpc.http2.ping_timeout_ms", 2000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            # The default back-off grows to two minutes; `min` is the connect time-out.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 1000),
            ("grpc.max_reconnect_backoff_ms", 1000),
            # A stream is committed at its first message: retries belong to requests, and the gateway has their budget.
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),
            # Two instances behind one address in turn must not share a subchannel of the process's global pool.
            ("grpc.use_local_subchannel_pool", 1),
        ],
    )


def stage_server_options(max_streams: int) -> list[tuple[str, int]]:
    """Server options of a stage: `max_streams` bounds the handlers that one connection can start."""
    return [
        *_SIZES,
        ("grpc.max_concurrent_streams", max_streams),
        # Not spelt like its documented constant; that one is ignored without a word and pings end in GOAWAY.
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.keepalive_permit_without_calls", 1),
        # Two servers on one port would both start.
        ("grpc.so_reuseport", 0),
    ]
