"""Whether the gateway would serve now: what ServerReady, the HTTP health routes and grpc.health all say."""

from grpc_health.v1 import health, health_pb2

from gateway.models import Models

__all__ = ["Readiness"]

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Readiness:
    """Args:
    is_strict: Ready means that every model of the gateway's repositories is; else that the gateway itself is up.
    """

    def __init__(self, models: Models, *, is_strict: bool) -> None:
        self.checks = health.aio.HealthServicer()
        self.accepts = False
        """The front ends are open and the process does not stop."""
        self._models = models
        self._is_strict = is_strict
        self._told: dict[str, bool] = {}

    @property
    def is_ready(self) -> bool:
        if not self.accepts:
            return False
        return not self._is_strict or all(map(self._models.versions, self._models.expected))

    async def publish(self) -> None:
        """Bring grpc.health up to date: the server under "", each model under its name."""
        now = {name: self.accepts and bool(self._models.versions(name)) for name in self._models.names}
        now[""] = self.is_ready
        for name, is_ready in now.items():
            if self._told.get(name) != is_ready:
                self._told[name] = is_ready
                await self.checks.set(name, SERVING if is_ready else NOT_SERVING)
