"""The calls that we make to a Consul agent. Each is bounded in time, and fails with UnavailableError."""

from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
from consul.exceptions import ACLDisabled, ACLPermissionDenied, ConsulException

from tensorline.discovery.consul.entry import Registration, check_id
from tensorline.discovery.consul.transport import Client, Transport
from tensorline.discovery.url import ConsulUrl
from tensorline.errors import UnavailableError

__all__ = ["Agent"]

CALL_S = 2.0
"""For one call that does not wait for a change."""
WATCH_SLACK_S = 5.0
WATCH_JITTER = 17 / 16
"""Consul answers a watch after its wait and up to a sixteenth of it."""
REAP_AFTER = "1m"
"""A critical instance is removed for good after so long: Consul's minimum; its reaper runs every 30 s."""


class Agent:
    """Build it in the running loop; `aclose` it there."""

    def __init__(self, url: ConsulUrl) -> None:
        self._url = url
        watch_s = url.wait_s * WATCH_JITTER + WATCH_SLACK_S
        self._transport = Transport(url.host, url.port, call_s=CALL_S, watch_s=watch_s)
        self._client = Client(self._transport)

    async def register(self, registration: Registration) -> None:
        """Announce it, passing for one TTL; over an older registration of the same id."""
        await self._call(
            lambda token: self._client.agent.service.register(
                self._url.service,
                service_id=registration.id,
                address=registration.address,
                port=registration.port,
                tags=registration.tags,
                meta=registration.meta,
                check={
                    "CheckID": check_id(registration.id),
                    "Name": "beat",
                    "TTL": _duration(self._url.ttl_s),
                    "DeregisterCriticalServiceAfter": REAP_AFTER,
                    "Status": "passing",
                },
                replace_existing_checks=True,
                token=token,
            )
        )

    async def beat(self, instance_id: str) -> bool:
        """Tell the agent that the instance lives. False: the agent does not know it (any more)."""
        try:
            return bool(
                await self._call(lambda token: self._client.agent.check.ttl_pass(check_id(instance_id), token=token))
            )
        except _RefusedError:
            # Releases differ: "no associated TTL" with 500, "unknown check" with 404, which py-consul makes False.
            return False

    async def deregister(self, instance_id: str) -> None:
        """An unknown id is no error."""
        try:
            await self._call(lambda token: self._client.agent.service.deregister(instance_id, token=token))
        except _RefusedError:
            return

    async def instances(self, index: int, wait_s: float) -> tuple[int, list[object]]:
        """All instances of the service, critical ones too; at once for index 0, else when they differ from `index`.

        Returns:
            The new index, and `/v1/health/service` entries, unchecked.
        """
        answer = await self._call(
            lambda token: self._client.health.service(
                self._url.service,
                index=index or None,
                wait=_duration(wait_s),
                dc=self._url.dc or None,
                token=token,
            )
        )
        text, entries = answer
        if not str(text).isdecimal() or not isinstance(entries, list):
            raise UnavailableError("the Consul agent's answer is not one of Consul")
        return int(text), entries

    async def aclose(self) -> None:
        await self._transport.close()

    async def _call(self, call: Callable[[str | None], Coroutine[Any, Any, Any]]) -> Any:
        """
        Raises:
            _RefusedError: the agent answered, with an error.
            UnavailableError: it did not answer, or does not take our token.
        """
        token = self._token()
        try:
            return await call(token)
        except (ACLDisabled, ACLPermissionDenied) as err:
            raise UnavailableError(f"the Consul agent refuses the token: {str(err)[:200]}") from err
        except ConsulException as err:
            raise _RefusedError(f"the Consul agent answered {str(err)[:200]}") from err
        except (aiohttp.ClientError, OSError, TimeoutError, UnicodeDecodeError) as err:
            raise UnavailableError(f"the Consul agent does not answer: {type(err).__name__} {err}") from err

    def _token(self) -> str | None:
        """Read anew for each call, so that a changed token is used at once: a small local file, about once a second."""
        if self._url.token_file is None:
            return None
        try:
            return self._url.token_file.read_text().strip() or None
        except (OSError, UnicodeDecodeError) as err:
            # Not without: an anonymous question may be answered with a shorter list instead of an error.
            raise UnavailableError(f"the Consul token file cannot be read: {type(err).__name__}") from err


class _RefusedError(UnavailableError):
    """An HTTP error status."""


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"
