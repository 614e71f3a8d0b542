"""What the workers behind one port ask of each other, over Unix sockets that nobody else can open.

Bodies are ours on both ends: protobuf for statistics, JSON for settings and for what was loaded.
"""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.agreement import SETTINGS_PATH, Agreement
from gateway.operations.statistics import STATISTICS_PATH, own_statistics
from gateway.repository import Repository
from gateway.wishes import WISHES_PATH
from tensorline.telemetry.recorder import Recorder

__all__ = ["settings_route", "statistics_route", "worker_routes"]


def worker_routes(recorder: Recorder, agreement: Agreement, repository: Repository) -> list[Route]:
    async def models(request: Request) -> Response:
        return Response(await repository.merge(await request.body()))

    wishes = Route(WISHES_PATH, models, methods=["GET", "POST"])
    return [statistics_route(recorder), settings_route(agreement), wishes]


def statistics_route(recorder: Recorder) -> Route:
    async def statistics(request: Request) -> Response:
        return Response(own_statistics(recorder, request.query_params.get("model", "")).SerializeToString())

    return Route(STATISTICS_PATH, statistics)


def settings_route(agreement: Agreement) -> Route:
    async def settings(request: Request) -> Response:
        return Response(agreement.merge(await request.body()))

    return Route(SETTINGS_PATH, settings, methods=["GET", "POST"])
