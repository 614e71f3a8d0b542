"""Triton's command-line flags that have no meaning here: taken, so that a start script need not change, and named.

The flags that have one are settings (`flags.py`).
Source: `tritonserver --help`, releases 24 to 26.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tensorline.cli.failure import UsageError

__all__ = ["TRITON_FLAGS", "TritonFlag", "is_true", "sort_out", "with_trace_config"]


@dataclass(frozen=True, slots=True)
class TritonFlag:
    """A flag that is accepted and passed over, or refused with a reason."""

    as_here: str | None = None
    """The value that says what happens here anyway: no warning for it."""
    takes_value: bool = True
    instead: str = ""
    """What to use here."""
    is_needed: bool = False
    """Whoever gives another value than `as_here` relies on it: to pass it over would be a danger. It is refused."""


IN_CONFIG: Final = "set it in the model's config.pbtxt"
TRUE: Final = TritonFlag(as_here="true")
FALSE: Final = TritonFlag(as_here="false")
TLS: Final = TritonFlag(
    as_here="false", instead="there is no TLS yet: a proxy in front of the port ends it", is_needed=True
)
NO_MEANING: Final = TritonFlag()

TRITON_FLAGS: Final[Mapping[str, TritonFlag]] = {
    # Start, repository
    "--strict-model-config": FALSE,
    "--disable-auto-complete-config": TritonFlag(takes_value=False),
    "--model-config-name": NO_MEANING,
    "--model-load-retry-count": TritonFlag(as_here="0"),
    "--model-load-gpu-limit": NO_MEANING,
    "--model-namespacing": FALSE,
    "--enable-peer-access": NO_MEANING,
    # Front ends
    "--allow-http": TRUE,
    "--allow-grpc": TRUE,
    "--allow-metrics": TRUE,
    "--reuse-http-port": FALSE,
    "--reuse-grpc-port": TritonFlag(as_here="false", instead="--workers shares the gRPC port between processes"),
    "--http-thread-count": TritonFlag(instead="--workers"),
    "--grpc-infer-thread-count": TritonFlag(instead="--workers"),
    "--grpc-infer-allocation-pool-size": NO_MEANING,
    "--grpc-max-response-pool-size": NO_MEANING,
    "--grpc-infer-response-compression-level": TritonFlag(as_here="none"),
    "--grpc-use-ssl": TLS,
    "--grpc-use-ssl-mutual": TLS,
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
    "--log-file": TritonFlag(instead="redirect stderr"),
    "--metrics-interval-ms": NO_MEANING,
    "--allow-gpu-metrics": NO_MEANING,
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
    "--cuda-memory-pool-byte-size": TritonFlag(instead="--arena-bytes"),
    "--cuda-virtual-address-size": NO_MEANING,
    "--min-supported-compute-capability": NO_MEANING,
    "--buffer-manager-thread-count": NO_MEANING,
    "--host-policy": NO_MEANING,
}


TRACE_FLAGS: Final[Mapping[str, str]] = {
    "--trace-level": "level",
    "--trace-rate": "rate",
    "--trace-count": "count",
    "--trace-file": "triton,file",
    "--trace-log-frequency": "triton,log-frequency",
}
"""Triton's older flags, and what each is of --trace-config."""


def with_trace_config(arguments: Sequence[str]) -> list[str]:
    """The older flags in the form of the newer one.

    Raises:
        UsageError: both forms are there, or a value is missing.
    """
    told: list[str] = []
    old = ""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        if name in TRACE_FLAGS:
            if not has_value and not rest:
                raise UsageError(f"{name} needs a value")
            old = name
            told += ["--trace-config", f"{TRACE_FLAGS[name]}={value if has_value else rest.pop(0)}"]
        else:
            told.append(word)
    if old and any(word.partition("=")[0] == "--trace-config" for word in arguments):
        raise UsageError(f"{old} and --trace-config say the same in two ways: use --trace-config alone")
    return told


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


def sort_out(
    arguments: Sequence[str], takes_value: Mapping[str, bool], elsewhere: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[str], list[str]]:
    """Tell a command's own flags from those of Triton that change nothing here.

    Args:
        arguments: "--flag=value", "--flag value" or "--switch" and other words, in their order.
        takes_value: The command's own flags; whether a value follows.
        elsewhere: Flags of ours that this command does not have, with a command that has each.
    Returns:
        What is left for the command, and one warning for each flag that would have changed something.
    Raises:
        UsageError: neither ours nor Triton's (with the nearest name), its value is missing, or nobody should rely on a
            flag that does nothing.
    """
    own: list[str] = []
    ignored: dict[str, list[str]] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        if word == "--":
            return [*own, word, *rest], _warnings(ignored)
        if name in takes_value or not name.startswith("--"):
            own.append(word)
            if takes_value.get(name) and not has_value and rest:
                own.append(rest.pop(0))
            continue
        flag = TRITON_FLAGS.get(name)
        if flag is None:
            raise _unknown(name, takes_value, elsewhere)
        if flag.takes_value and not has_value:
            if not rest:
                raise UsageError(f"{name} needs a value")
            value = rest.pop(0)
        if flag.as_here is None or value.lower() not in _spellings(flag.as_here):
            if flag.is_needed:
                raise UsageError(f"{name}={value} cannot be had; {flag.instead}")
            ignored.setdefault(name, []).append(f"{name}={value}" if flag.takes_value else name)
    return own, _warnings(ignored)


def _warnings(ignored: Mapping[str, Sequence[str]]) -> list[str]:
    told = []
    for name, given in ignored.items():
        instead = TRITON_FLAGS[name].instead
        told.append(f"{', '.join(given)} has no effect here" + (f"; {instead}" if instead else ""))
    return told


def _spellings(value: str) -> tuple[str, ...]:
    return {"true": ("true", "1", "on"), "false": ("false", "0", "off")}.get(value, (value,))


def _unknown(name: str, own: Mapping[str, bool], elsewhere: Mapping[str, str]) -> UsageError:
    if name in elsewhere:
        return UsageError(f"{name} is a flag of `tensorline {elsewhere[name]}`, not of this command")
    near = difflib.get_close_matches(name, [*own, *TRITON_FLAGS], n=1)
    return UsageError(f"there is no flag {name}" + (f"; did you mean {near[0]}?" if near else ""))
