"""What a gateway is told at its start."""

from pathlib import Path

from pydantic import ByteSize, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from tensorline.settings import MeshSettings

__all__ = ["GatewaySettings"]


class GatewaySettings(MeshSettings):
    grpc_address: str = "127.0.0.1"
    grpc_port: NonNegativeInt = 8001
    http_address: str = "127.0.0.1"
    http_port: NonNegativeInt = 8000
    metrics_address: str = "127.0.0.1"
    metrics_port: NonNegativeInt = 8002
    workers: PositiveInt = 1
    """Processes that share the gRPC port."""
    worker: NonNegativeInt = 0
    """Which of them this one is, from 1; set by the parent. 0: the parent, or the only one."""
    server_id: str = "tensorline"
    max_in_flight: PositiveInt = 1024
    max_message_bytes: ByteSize = ByteSize(1 << 30)
    max_bytes_in_flight: ByteSize = ByteSize(2 << 30)
    default_timeout_s: PositiveFloat = 60.0
    """For clients that set no deadline."""
    strict_readiness: bool = True
    """Ready means that every model of the repositories is; else that the gateway is up."""
    admin_token_file: Path | None = None
    """Holds the token for what is not public on the HTTP port; needed there unless it is bound to loopback."""
    trace_rate: NonNegativeFloat = 100.0
    """Traces a second that are exported although neither the caller nor a sampler asked for them; errors and the
    slowest are besides. OTEL_TRACES_SAMPLER decides in its place when it is set."""
    trace_store: PositiveInt = 2000
    """Requests that the embedded trace store keeps; it is bounded in bytes too."""
