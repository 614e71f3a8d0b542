"""Triton's command-line flags that have no meaning here: taken, so that a start script need not change, and named.

The flags that have one are options of the commands themselves (`flags.py`).
Source: `tritonserver --help`, releases 24 to 26.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tensorline.cli.failure import UsageError

__all__ = ["TRITON_FLAGS", "TritonFlag", "is_true", "sort_out"]


@dataclass(frozen=True, slots=True)
class TritonFlag:
    """A flag that is accepted and passed over."""

    as_here: str | None = None
    """The value that says what happens here anyway: no warning for it."""
    takes_value: bool = True
    instead: str = ""
    """What to use here."""


IN_CONFIG: Final = "set it in the model's config.pbtxt"
TRUE: Final = TritonFlag(as_here="true")
FALSE: Final = TritonFlag(as_here="false")
NO_MEANING: Final = TritonFlag()

TRITON_FLAGS: Final[Mapping[str, TritonFlag]] = {
    # Start, repository
    "--strict-model-config": FALSE,
    "--disable-auto-complete-config": TritonFlag(takes_value=False),
    "--model-control-mode": TritonFlag(as_here="none"),
    "--load-model": NO_MEANING,
    "--repository-poll-secs": NO_MEANING,
    "--model-config-name": NO_MEANING,
    "--model-load-retry-count": TritonFlag(as_here="0"),
    "--model-load-gpu-limit": NO_MEANING,
    "--model-namespacing": FALSE,
    "--enable-peer-access": NO_MEANING,
    # Front ends
    "--allow-http": TRUE,
    "--allow-grpc": TRUE,
    "--allow-metrics": TRUE,
    "--allow-client-shm": FALSE,
    "--reuse-http-port": FALSE,
    "--reuse-grpc-port": TritonFlag(as_here="false", instead="--workers shares the gRPC port between processes"),
    "--http-thread-count": TritonFlag(instead="--workers"),
    "--http-max-input-size": NO_MEANING,
    "--http-header-forward-pattern": NO_MEANING,
    "--http-restricted-api": NO_MEANING,
    "--grpc-header-forward-pattern": NO_MEANING,
    "--grpc-restricted-protocol": NO_MEANING,
    "--grpc-infer-thread-count": TritonFlag(instead="--workers"),
    "--grpc-infer-allocation-pool-size": NO_MEANING,
    "--grpc-max-response-pool-size": NO_MEANING,
    "--grpc-infer-response-compression-level": TritonFlag(as_here="none"),
    "--grpc-use-ssl": FALSE,
    "--grpc-use-ssl-mutual": FALSE,
    "--grpc-server-cert": NO_MEANING,
    "--grpc-server-key": NO_MEANING,
    "--grpc-root-cert": NO_MEANING,
    "--grpc-keepalive-time": NO_MEANING,
    "--grpc-keepalive-timeout": NO_MEANING,
    "--grpc-keepalive-permit-without-calls": NO_MEANING,
    "--grpc-http2-max-pings-without-data": NO_MEANING,
    "--grpc-http2-min-recv-ping-interval-without-data": NO_MEANING,
    "--grpc-http2-max-ping-strikes": NO_MEANING,
    "--grpc-max-connection-age": NO_MEANING,
    "--grpc-max-connection-age-grace": NO_MEANING,
    "--allow-sagemaker": FALSE,
    "--sagemaker-port": NO_MEANING,
    "--sagemaker-safe-port-range": NO_MEANING,
    "--sagemaker-thread-count": NO_MEANING,
    "--allow-vertex-ai": FALSE,
    "--vertex-ai-port": NO_MEANING,
    "--vertex-ai-thread-count": NO_MEANING,
    "--vertex-ai-default-model": NO_MEANING,
    # Logs, metrics, traces
    "--log-format": TritonFlag(instead="lines are JSON unless stderr is a terminal"),
    "--log-file": TritonFlag(instead="redirect stderr"),
    "--metrics-config": NO_MEANING,
    "--metrics-interval-ms": NO_MEANING,
    "--allow-cpu-metrics": NO_MEANING,
    "--allow-gpu-metrics": NO_MEANING,
    "--trace-config": TritonFlag(instead="OTEL_EXPORTER_OTLP_ENDPOINT"),
    "--trace-file": TritonFlag(instead="`tensorline trace`"),
    "--trace-level": NO_MEANING,
    "--trace-rate": NO_MEANING,
    "--trace-count": NO_MEANING,
    "--trace-log-frequency": NO_MEANING,
    # Backends, memory, scheduling
    "--backend-directory": NO_MEANING,
    "--backend-config": TritonFlag(instead=IN_CONFIG),
    "--repoagent-directory": NO_MEANING,
    "--cache-config": NO_MEANING,
    "--cache-directory": NO_MEANING,
    "--response-cache-byte-size": TritonFlag(as_here="0"),
    "--rate-limit": TritonFlag(as_here="off"),
    "--rate-limit-resource": NO_MEANING,
    "--pinned-memory-pool-byte-size": TritonFlag(instead="--arena-bytes"),
    "--cuda-memory-pool-byte-size": NO_MEANING,
    "--cuda-virtual-address-size": NO_MEANING,
    "--min-supported-compute-capability": NO_MEANING,
    "--buffer-manager-thread-count": NO_MEANING,
    "--host-policy": NO_MEANING,
}


def is_true(flag: str, value: str) -> bool:
    """A switch in Triton's manner: it always has a value.

    Raises:
        UsageError: another word.
    """
    word = value.lower()
    if word in ("true", "1", "on"):
        return True
    if word in ("false", "0", "off"):
        return False
    raise UsageError(f"{flag} is true or false, not {value!r}")


def sort_out(arguments: Sequence[str], known: Iterable[str]) -> list[str]:
    """Go through what the command's own options left over: one warning for each of Triton's flags that changes nothing.

    Args:
        arguments: "--flag=value", "--flag value" or "--switch", in their order.
        known: The command's own flags, to suggest the nearest.
    Raises:
        UsageError: neither ours nor Triton's, or its value is missing.
    """
    warnings, rest = [], list(arguments)
    while rest:
        name, has_value, value = rest.pop(0).partition("=")
        flag = TRITON_FLAGS.get(name)
        if flag is None:
            raise _unknown(name, known)
        if flag.takes_value and not has_value:
            if not rest:
                raise UsageError(f"{name} needs a value")
            value = rest.pop(0)
        if flag.as_here is None or value.lower() not in _spellings(flag.as_here):
            given = f"{name}={value}" if flag.takes_value else name
            warnings.append(f"{given} has no effect here" + (f"; {flag.instead}" if flag.instead else ""))
    return warnings


def _spellings(value: str) -> tuple[str, ...]:
    return {"true": ("true", "1", "on"), "false": ("false", "0", "off")}.get(value, (value,))


def _unknown(name: str, known: Iterable[str]) -> UsageError:
    if not name.startswith("-"):
        return UsageError(f"unexpected argument {name!r}")
    near = difflib.get_close_matches(name, [*known, *TRITON_FLAGS], n=1)
    return UsageError(f"there is no flag {name}" + (f"; did you mean {near[0]}?" if near else ""))
