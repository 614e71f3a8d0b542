"""`tensorline health`: is one process ready? For the health checks of containers and process managers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tensorline.cli.api import is_ready
from tensorline.cli.environment import PREFIX
from tensorline.cli.failure import CommandError, UsageError
from tensorline.cli.ports import Listener

if TYPE_CHECKING:
    import grpc

__all__ = ["check_health", "own_target"]


def own_target(environ: Mapping[str, str]) -> str:
    """Where the process that has this environment answers: a stage where it listens, a gateway on its HTTP port.

    Raises:
        UsageError: the environment holds no port.
    """
    listen = environ.get(f"{PREFIX}LISTEN", "")
    if listen:
        host, _, port = listen.rpartition(":")
        return Listener("gRPC", host, _port(f"{PREFIX}LISTEN", listen, port), "--listen").target
    address, port = environ.get(f"{PREFIX}HTTP_ADDRESS", "127.0.0.1"), environ.get(f"{PREFIX}HTTP_PORT", "8000")
    return f"http://{Listener('HTTP', address, _port(f'{PREFIX}HTTP_PORT', port, port), '--http').target}"


def check_health(target: str, model: str, timeout_s: float) -> None:
    """
    Args:
        target: "http://host:port" of a gateway; "host:port" or "unix:/path" of whoever speaks grpc.health.v1.
        model: Whose health is asked for; "": the process's.
    Raises:
        CommandError: it does not answer, or it is not ready.
        UsageError: `target` is no address.
    """
    what = f"model {model!r} at {target}" if model else target
    if target.startswith(("http://", "https://")):
        if not is_ready(target, timeout_s, model):
            raise CommandError(f"{what} is not ready")
        return
    status = _grpc_health(target, model, timeout_s)
    if status != "SERVING":
        raise CommandError(f"{what} is {status}")


def _grpc_health(target: str, model: str, timeout_s: float) -> str:
    from tensorline.cli.client import check_target, why_away  # before grpc, which it keeps from writing lines

    address = check_target(target, "TARGET")
    import grpc
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
    from grpc_health.v1.health_pb2_grpc import HealthStub

    try:
        with grpc.insecure_channel(address) as channel:
            check = HealthStub(channel).Check  # type: ignore[attr-defined]  # types-grpcio leaves it out
            answer = check(HealthCheckRequest(service=model), timeout=timeout_s)
    except grpc.RpcError as error:
        if not isinstance(error, grpc.Call):
            raise
        raise CommandError(why_away(error, target) or _why_not(error, target, model, timeout_s)) from None
    return str(HealthCheckResponse.ServingStatus.Name(answer.status))


def _why_not(error: "grpc.Call", target: str, model: str, timeout_s: float) -> str:
    import grpc

    code = error.code()
    if code is grpc.StatusCode.NOT_FOUND:
        return f"{target} knows of no model {model!r}"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"what answers at {target} has no grpc.health.v1: is it a process of Tensorline?"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"{target} did not answer within {timeout_s:g} s"
    return f"{target} does not tell: {code.name} {error.details() or ''}".rstrip()


def _port(variable: str, value: str, port: str) -> int:
    if port.isascii() and port.isdecimal() and int(port) < 1 << 16:
        return int(port)
    raise UsageError(f"{variable}={value!r} holds no port")
