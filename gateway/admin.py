"""The HTTP side for people and tools: models, instances and traces as JSON, and the metrics page."""

import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from gateway.addresses import is_loopback
from gateway.mesh import Mesh
from gateway.service import InferenceService
from gateway.siblings import Siblings, merge_metrics
from tensorline.errors import TensorlineError
from tensorline.rpc.hosted import READY, UNAVAILABLE
from tensorline.telemetry.metrics import CONTENT_TYPE
from tensorline.telemetry.recorder import Recorder
from tensorline.telemetry.store import TraceStore

__all__ = ["AdminRoutes", "metrics_app"]

log = logging.getLogger(__name__)

LOCAL_NAMES = ["localhost", "127.0.0.1", "[::1]", "::1"]
LIST_LIMIT = 1000
TRACE_ID = re.compile("[0-9a-fA-F]{32}")


class Json(JSONResponse):
    def render(self, content: object) -> bytes:
        return orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)


class AdminRoutes:
    """Args:
    address: That it is bound to. Beyond loopback, what is not public needs the operators' token.
    token_file: Holds the token; read at each use, so that it can be changed. None: no token, and none will do.
    public: Routes beside these, for everybody who may connect.
    """

    def __init__(
        self,
        service: InferenceService,
        mesh: Mesh,
        store: TraceStore,
        address: str,
        token_file: Path | None,
        siblings: Siblings,
        public: Sequence[BaseRoute] = (),
    ) -> None:
        self._service = service
        self._mesh = mesh
        self._store = store
        self._address = address
        self._is_open = is_loopback(address)
        self._siblings = siblings
        self._public = public
        self._token_file = token_file

    def app(self) -> Starlette:
        def admin(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
            async def guarded(request: Request) -> Response:
                return (
                    await handler(request) if self._may(request) else _error(403, "an operator's token is needed here")
                )

            return guarded

        routes = [
            *self._public,
            Route("/api/models", admin(self._models)),
            Route("/api/instances", admin(self._instances)),
            Route("/api/traces", admin(self._traces)),
        ]
        # A page of another site that the operator's browser has open must not reach us by a name of its own.
        guard = (
            [Middleware(TrustedHostMiddleware, allowed_hosts=[*LOCAL_NAMES, self._address])] if self._is_open else []
        )
        app = Starlette(routes=routes, middleware=guard, exception_handlers={HTTPException: _told})
        app.router.redirect_slashes = False
        return app

    def _may(self, request: Request) -> bool:
        if self._token_file is None:
            return self._is_open
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
        try:
            token = self._token_file.read_bytes().strip()
        except OSError as error:
            log.error("the operators' token cannot be read", extra={"cause": str(error)})
            return False
        return bool(token) and hmac.compare_digest(given, token)

    async def _models(self, request: Request) -> Response:
        models = self._service.models
        rows = []
        for name in models.names:
            for version in models.versions(name):
                config = models.find(name, str(version)).config
                rows.append(
                    {
                        "name": name,
                        "version": str(version),
                        "state": READY,
                        "reason": "",
                        "backend": config.platform if config.is_ensemble else config.backend,
                        "max_batch_size": config.max_batch_size,
                        "instances": [c.instance_id for c in self._mesh.serving(name, str(version))],
                        "steps": [step.model for step in config.steps],
                    }
                )
            if not models.versions(name):
                rows.append({"name": name, "version": "", "state": UNAVAILABLE, "reason": _why(models.find, name)})
        return Json(rows)

    async def _instances(self, request: Request) -> Response:
        return Json([asdict(view) for view in self._mesh.instances])

    async def _traces(self, request: Request) -> Response:
        """`which`: last, slowest, list, or a trace id in hex; `model` narrows the latter ones, `limit` the list."""
        self._service.recorder.settle()
        which = request.query_params.get("which", "list")
        model = request.query_params.get("model")
        if which == "list":
            limit = request.query_params.get("limit", "100")
            if not (limit.isascii() and limit.isdecimal() and len(limit) < 5 and 1 <= int(limit) <= LIST_LIMIT):
                return _error(400, f"limit is '{limit[:20]}', a number from 1 to {LIST_LIMIT} is wanted")
            rows = [*self._store.list(model=model, limit=int(limit)), *await self._elsewhere(request)]
            return Json(sorted(rows, key=_started, reverse=True)[: int(limit)])
        if which == "last":
            last = next(iter(self._store.list(model=model, limit=1)), None)
            found = self._store.get(bytes.fromhex(last["trace_id"])) if last is not None else []
            records = [record for record in found if model in (None, record.model)]
        elif which == "slowest":
            slowest = self._store.slowest(model)
            records = [slowest] if slowest is not None else []
        else:
            if not TRACE_ID.fullmatch(which):
                return _error(400, f"which is '{which[:64]}'; last, slowest, list or a trace id in hex is wanted")
            records = self._store.get(bytes.fromhex(which))
        traces = [*map(self._store.to_json, records), *await self._elsewhere(request)]
        if not traces:
            return _error(404, "no such trace is kept; only recent, failed and slow requests are")
        if which == "last":
            traces = [max(traces, key=_started)]
        elif which == "slowest":
            traces = [max(traces, key=lambda trace: trace["duration_ns"])]
        return Json(traces)

    async def _elsewhere(self, request: Request) -> list[Any]:
        """What the other workers answer to the same question."""
        # Written anew: what came may hold bytes that no request line may.
        bodies = await self._siblings.ask(f"/api/traces?{urlencode(request.query_params.multi_items())}")
        return [row for body in bodies for row in orjson.loads(body)]


def metrics_app(recorder: Recorder, siblings: Siblings) -> Starlette:
    """The metrics page: of all workers together."""

    async def page(request: Request) -> Response:
        own = recorder.render_metrics()
        others = await siblings.ask("/metrics")
        return Response(merge_metrics([own, *others]) if others else own, headers={"content-type": CONTENT_TYPE})

    return Starlette(routes=[Route("/metrics", page)])


async def _told(request: Request, error: Exception) -> Response:
    """An unknown path or a wrong method, as everything else here answers."""
    status, text = (error.status_code, error.detail) if isinstance(error, HTTPException) else (500, "internal error")
    return _error(status, text)


def _started(trace: Any) -> int:
    return int(trace["start_ns"])


def _error(status: int, text: str) -> Response:
    return Json({"error": text}, status_code=status)


def _why(find: Callable[[str, str], object], name: str) -> str:
    try:
        find(name, "")
    except TensorlineError as error:
        return str(error)
    return ""
