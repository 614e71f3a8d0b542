"""py-consul's HTTP by our own rules.

`consul.aio` cannot be told these (py-consul 1.8, aiohttp 3.14): it has one time-out for beats and watches; and aiohttp
sends a request a second time, without a word, when its connection breaks. A watch whose agent restarted without its
data then waits in the new agent for an index of the old one, until `wait` ends, and nobody learns of the break.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
from consul.base import Consul, HTTPClient, Response

__all__ = ["Client", "Transport"]


class Transport(HTTPClient):  # type: ignore[misc]  # py-consul has no types
    """Build it in the running loop. A request that fails raises `aiohttp.ClientError`, `TimeoutError` or `OSError`."""

    def __init__(self, host: str, port: int, *, call_s: float, watch_s: float) -> None:
        super().__init__(f"[{host}]" if ":" in host else host, port, "http")
        self._call_timeout = aiohttp.ClientTimeout(total=call_s)
        self._watch_timeout = aiohttp.ClientTimeout(total=watch_s)
        self._calls = aiohttp.ClientSession()
        # A connection of its own for queries: each of them goes where the index of the last one came from.
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_create_start.append(_refuse_second_connection)
        self._queries = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1), trace_configs=[tracing])
        self._is_kept = False

    async def get(
        self,
        callback: Callable[[Response], Any],
        path: str,
        params: list[tuple[str, Any]] | None = None,
        headers: dict[str, str] | None = None,
        **_: object,
    ) -> Any:
        has_index = any(name == "index" for name, _ in params or ())
        request = self._queries.get(
            self.uri(path, params),
            headers=headers,
            timeout=self._watch_timeout if has_index else self._call_timeout,
            trace_request_ctx=has_index and self._is_kept,
            allow_redirects=False,  # the token goes to this agent alone
        )
        async with request as answer:
            self._is_kept = "close" not in answer.headers.get("Connection", "").lower()
            return callback(Response(answer.status, answer.headers, await answer.text(encoding="utf-8")))

    async def put(
        self,
        callback: Callable[[Response], Any],
        path: str,
        params: list[tuple[str, Any]] | None = None,
        data: str | bytes = "",
        headers: dict[str, str] | None = None,
        **_: object,
    ) -> Any:
        # Sent twice does no harm here, and gets a beat through when the kept connection has gone stale.
        request = self._calls.put(
            self.uri(path, params), data=data, headers=headers, timeout=self._call_timeout, allow_redirects=False
        )
        async with request as answer:
            return callback(Response(answer.status, answer.headers, await answer.text(encoding="utf-8")))

    # py-consul asks for these two of every transport; nothing that we call uses them.
    def post(self, *_: object, **__: object) -> Any:
        raise NotImplementedError

    def delete(self, *_: object, **__: object) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        await self._calls.close()
        await self._queries.close()


class Client(Consul):  # type: ignore[misc]  # py-consul has no types
    """py-consul over a `Transport`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        super().__init__(transport.host, transport.port, scheme="http", verify=False)
        self.token = None  # py-consul takes one from the environment; ours is in a file or nowhere

    def http_connect(self, *_: object, **__: object) -> Transport:
        return self._transport


async def _refuse_second_connection(_: object, context: SimpleNamespace, __: object) -> None:
    if context.trace_request_ctx:
        raise aiohttp.ClientConnectionError("the connection broke")
