"""`tensorline health`: is one process ready? For the health checks of containers and process managers."""

from collections.abc import Mapping

from tensorline.cli.api import is_ready
from tensorline.cli.environment import PREFIX
from tensorline.cli.failure import CommandError
from tensorline.cli.ports import Listener

__all__ = ["check_health", "own_target"]


def own_target(environ: Mapping[str, str]) -> str:
    """Where the process that has this environment answers: a stage where it listens, a gateway on its HTTP port."""
    listen = environ.get(f"{PREFIX}LISTEN", "")
    if listen:
        host, _, port = listen.rpartition(":")
        return Listener("gRPC", host, int(port or 0), "--listen").target
    address = environ.get(f"{PREFIX}HTTP_ADDRESS", "127.0.0.1")
    return f"http://{Listener('HTTP', address, int(environ.get(f'{PREFIX}HTTP_PORT', '8000')), '--http').target}"


def check_health(target: str, service: str, timeout_s: float) -> None:
    """
    Args:
        target: "http://host:port" of a gateway; "host:port" or "unix:/path" of whoever speaks grpc.health.v1.
        service: Whose health is asked for over gRPC: a model, or "" for the process.
    Raises:
        CommandError: it does not answer, or it is not ready.
    """
    if target.startswith(("http://", "https://")):
        if not is_ready(target, timeout_s):
            raise CommandError(f"{target} is not ready")
        return
    import grpc
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
    from grpc_health.v1.health_pb2_grpc import HealthStub

    try:
        with grpc.insecure_channel(target) as channel:
            check = HealthStub(channel).Check  # type: ignore[attr-defined]  # types-grpcio leaves it out
            answer = check(HealthCheckRequest(service=service), timeout=timeout_s)
    except grpc.RpcError as error:
        told = error.details() if isinstance(error, grpc.Call) else str(error)
        raise CommandError(f"{target} does not answer: {told}") from None
    if answer.status != HealthCheckResponse.SERVING:
        raise CommandError(f"{target} is {HealthCheckResponse.ServingStatus.Name(answer.status)}")
