"""What a gateway is told at its start."""

from pathlib import Path

from pydantic import (
    ByteSize,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from gateway.addresses import is_loopback
from tensorline.errors import ConfigError
from tensorline.settings import MeshSettings
from tensorline.telemetry.metrics_options import metrics_options
from tensorline.telemetry.trace_config import trace_config

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
    http_max_input_size: ByteSize = ByteSize(64 << 20)
    """Bytes of a request's body on the HTTP port, also unpacked."""
    grpc_restricted_protocol: list[str] = Field(default_factory=list)
    """Each "category,category:key=value": these RPCs need the metadata "triton-grpc-protocol-<key>" with this value. In
    the environment separated by semicolons, as `http_restricted_api`."""
    http_restricted_api: list[str] = Field(default_factory=list)
    """Each "category,category:key=value": these routes need the header "<key>" with this value."""
    grpc_header_forward_pattern: str = ""
    """Metadata whose whole key matches becomes a parameter of the request; empty: none does."""
    http_header_forward_pattern: str = ""
    """The same for headers, by their names as the client writes them."""
    admin_token_file: Path | None = None
    """Holds the token for what is not public on the HTTP port; needed there unless it is bound to loopback."""
    allow_client_shm: bool | None = None
    """Whether clients may register shared memory. None: when the gRPC and HTTP ports are bound to loopback."""
    max_client_regions: PositiveInt = 512
    """Regions of shared memory that clients may have registered at a time; fewer where the process's limit of open
    files is low."""
    client_regions: Path | None = None
    """Directory of the regions, which the workers share; set by the parent."""
    trace_rate: NonNegativeFloat = 100.0
    """Traces a second that are exported although neither the caller nor a sampler asked for them; errors and the
    slowest are besides. OTEL_TRACES_SAMPLER decides in its place when it is set."""
    trace_store: PositiveInt = 2000
    """Requests that the embedded trace store keeps; it is bounded in bytes too."""
    trace_config: list[str] = Field(default_factory=list)
    """Start values of the trace settings as Triton's --trace-config has them, `key=value` or `mode,key=value`; in the
    environment separated by semicolons. None: TENSORLINE_TRACE_RATE and OTEL_* decide alone."""
    metrics_config: list[str] = Field(default_factory=list)
    """Which model families the metrics page has, `key=value` as Triton's --metrics-config; in the environment separated
    by semicolons."""
    allow_cpu_metrics: bool = True
    """Show the host's CPU and memory on the metrics page."""

    @field_validator("trace_config", "metrics_config", mode="before")
    @classmethod
    def _split_lines(cls, value: object) -> object:
        return [line.strip() for line in value.split(";") if line.strip()] if isinstance(value, str) else value

    @field_validator("trace_config", "metrics_config")
    @classmethod
    def _check_lines(cls, value: list[str], info: ValidationInfo) -> list[str]:
        try:
            _ = trace_config(value) if info.field_name == "trace_config" else metrics_options(value)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return value

    @field_validator("grpc_restricted_protocol", "http_restricted_api", mode="before")
    @classmethod
    def _split_restrictions(cls, value: object) -> object:
        return [part for part in value.split(";") if part] if isinstance(value, str) else value

    @property
    def allows_client_shm(self) -> bool:
        if self.allow_client_shm is None:
            return is_loopback(self.grpc_address) and is_loopback(self.http_address)
        return self.allow_client_shm
