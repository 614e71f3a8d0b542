"""Every row of errors.md that the protocol has by itself, over gRPC and over HTTP: code, and gist of the text."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from tests.compat import errors_infer, errors_other
from tests.compat.clients import HTTP_STATUS
from tests.compat.errors import Row
from tests.compat.server import Server

ROWS = {**errors_infer.ROWS, **{f"{name} ": row for name, row in errors_other.ROWS.items()}}


@pytest.fixture(scope="module")
def stub(server: Server) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def words(row: Row, server: Server) -> str:
    return (row.triton_words if server.is_triton else "") or row.words


@pytest.mark.parametrize("case", [name for name, row in ROWS.items() if row.rpc])
def test_by_grpc(server: Server, stub: Any, case: str) -> None:
    row = ROWS[case]
    assert row.message is not None
    if server.is_triton and row.triton == "-":
        pytest.skip("it would end the model's process there")
    wanted = server.either(ours=row.code, triton=row.triton or row.code)
    code, text = outcome(getattr(stub, row.rpc), row.message())
    assert (code, text) == (wanted, text)
    if code != "OK":
        assert words(row, server) in text


def outcome(method: Any, message: Any) -> tuple[str, str]:
    """The code's name and the text."""
    try:
        method(message, timeout=20)
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


@pytest.mark.parametrize("case", [name for name, row in ROWS.items() if row.http])
def test_by_http(server: Server, case: str) -> None:
    row = ROWS[case]
    http = row.http
    assert http is not None
    status = 200 if row.code == "OK" else http.status or HTTP_STATUS[row.code]
    answer = server.fetch(http.path, http.body, method=http.method, headers=http.headers)
    assert (answer.status, answer.body) == (server.either(ours=status, triton=http.triton or status), answer.body)
    if answer.status != 200:
        told = (http.triton_words if server.is_triton else "") or http.words or words(row, server)
        assert told in answer.error
