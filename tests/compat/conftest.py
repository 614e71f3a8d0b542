"""One server for the whole suite: a mesh of ours, or the one that --server-grpc and --server-http name."""

from collections.abc import AsyncIterator, Generator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.compat.clients import CLIENTS, Client, open_client
from tests.compat.server import Server, own_server

HERE = Path(__file__).parent
_RUNNING = pytest.StashKey[ExitStack]()


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Server:
    """Closed by `pytest_runtest_teardown`."""
    option = request.config.getoption
    grpc, http = option("--server-grpc"), option("--server-http")
    if grpc and http:
        host = str(http).rpartition(":")[0]
        return Server(grpc, http, option("--server-metrics") or f"{host}:8002", is_triton=True)
    if grpc or http:
        raise pytest.UsageError("--server-grpc and --server-http belong together")
    running = request.config.stash.setdefault(_RUNNING, ExitStack())
    return running.enter_context(own_server())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """The mesh ends with the last test of this folder, not with the session: other tests want the machine."""
    try:
        yield
    finally:
        if nextitem is None or HERE not in nextitem.path.parents:
            item.config.stash.get(_RUNNING, ExitStack()).close()


@pytest.fixture(params=CLIENTS)
async def client(request: pytest.FixtureRequest, server: Server) -> AsyncIterator[Client]:
    """Each published client in turn."""
    async with open_client(request.param, server) as client:
        yield client
