"""Unary inference through every published client."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.compat.clients import Client
from tests.compat.repository import LABELS
from tests.compat.server import Server

A = np.arange(16, dtype=np.int32).reshape(1, 16)
B = np.ones((1, 16), np.int32)
ONE = np.ones(1, np.float32)


async def test_two_inputs_and_two_outputs(client: Client) -> None:
    answer = await client.arrays("simple", {"A": A, "B": B})
    np.testing.assert_array_equal(answer["SUM"], A + B)
    np.testing.assert_array_equal(answer["DIFF"], A - B)


async def test_rows_of_a_batch(client: Client) -> None:
    a, b = np.random.default_rng(1).integers(-(2**31), 2**31, (2, 8, 16), np.int32)
    answer = await client.arrays("simple", {"A": a, "B": b}, outputs=["SUM"])
    assert list(answer) == ["SUM"]
    np.testing.assert_array_equal(answer["SUM"], a + b)


async def test_outputs_that_were_not_asked_for_stay_away(client: Client) -> None:
    result = await client.infer("simple", {"A": A, "B": B}, ["DIFF"])
    assert client.names(result) == ["DIFF"]
    both = await client.infer("simple", {"A": A, "B": B}, ["DIFF", "SUM"])
    assert sorted(client.names(both)) == ["DIFF", "SUM"]


@pytest.mark.parametrize("id", ["", "r-1", "身份编号", 'a"b\\c'])
async def test_ids_come_back(client: Client, id: str) -> None:
    """A14."""
    assert client.id(await client.infer("line_FP32", {"x": ONE}, request_id=id)) == id


async def test_the_version_that_ran_is_told(client: Client) -> None:
    for version, ran in (("", "3"), ("1", "1"), ("3", "3")):
        assert client.version(await client.infer("versioned", {"x": ONE}, model_version=version)) == ran


async def test_a_pipeline(client: Client) -> None:
    values = np.linspace(-1, 1, 1000, dtype=np.float32)
    np.testing.assert_array_equal((await client.arrays("chain", {"x": values}))["y"], values)


async def test_optional_inputs(client: Client) -> None:
    """E02, for one model: what may be left out may be left out."""
    assert (await client.arrays("choosy", {"x": ONE}))["y"].tolist() == [1]
    assert (await client.arrays("choosy", {"x": ONE, "extra": np.zeros(7, np.float32)}))["y"].tolist() == [1]


async def test_more_than_one_datatype(client: Client) -> None:
    """A12."""
    number, text = np.array([[128]], np.uint32), np.array([b"hi"], np.object_)
    answer = await client.arrays("mixed", {"n": number, "s": text})
    assert answer["n_out"].tolist() == [[128]]
    assert answer["s_out"].tolist() == [b"hi"]


async def test_parameters_reach_the_model(client: Client) -> None:
    """Reserved ones do not; of the custom ones each kind arrives as it was sent."""
    sent = {"text": "a b", "flag": True, "count": 5, "big": 2**53 + 1, "negative": -3}
    answer = await client.arrays("parameters", {"x": ONE}, request_id="p1", priority=0, parameters=sent)
    assert json.loads(answer["y"][0]) == {"id": "p1", "parameters": sent}


async def test_classification(client: Client) -> None:
    values = np.array([[0.5, -1, 3, 2], [9, 8, 7, 6]], np.float32)
    result = await client.infer("labelled", {"x": values}, [client.output("y", 2)])
    assert client.shape(result, "y") == [2, 2]
    assert result.as_numpy("y").tolist() == [
        [f"3.000000:2:{LABELS[2]}".encode(), f"2.000000:3:{LABELS[3]}".encode()],
        [f"9.000000:0:{LABELS[0]}".encode(), f"8.000000:1:{LABELS[1]}".encode()],
    ]


async def test_classification_of_integers_without_labels(client: Client) -> None:
    values = np.array([[3, -1, 7]], np.int32)
    result = await client.infer("ident_INT32", {"x": values}, [client.output("y", 9)])
    assert client.shape(result, "y") == [3]
    assert result.as_numpy("y").tolist() == [b"7:2", b"3:0", b"-1:1"]


@pytest.mark.parametrize("datatype", ["FP16", "BOOL"])
async def test_what_cannot_be_classified(client: Client, datatype: str) -> None:
    array: NDArray[Any] = np.zeros((1, 2), np.float16 if datatype == "FP16" else np.bool_)
    with client.refused(
        "INVALID_ARGUMENT", f"class result not available for output due to unsupported type '{datatype}'"
    ):
        await client.infer(f"ident_{datatype}", {"x": array}, [client.output("y", 1)])


async def test_an_error_of_the_model_keeps_its_words(client: Client, server: Server) -> None:
    with client.refused("INTERNAL", "bad row"):
        await client.infer("boom", {"x": -ONE}, request_id="x1")
    assert (await client.arrays("boom", {"x": ONE}))["y"].tolist() == [1]


@pytest.mark.parametrize("client", ["grpc.aio", "http.aio"], indirect=True)
async def test_right_answers_to_the_right_callers(client: Client) -> None:
    """B01, in small: rows of many callers share batches and each caller gets its own."""
    rows = [np.full((1 + at % 3, 4), at, np.float32) for at in range(60)]
    answers = await asyncio.gather(*(client.arrays("ident_b8", {"x": row}) for row in rows))
    for row, answer in zip(rows, answers, strict=True):
        np.testing.assert_array_equal(answer["y"], row)


async def test_compressed_requests_and_answers(client: Client) -> None:
    """A18: by each client's own option."""
    values = np.arange(100_000, dtype=np.float32)
    for method in ("gzip", "deflate"):
        options = (
            {"compression_algorithm": method}
            if client.is_grpc
            else {"request_compression_algorithm": method, "response_compression_algorithm": method}
        )
        answer = await client.arrays("line_FP32", {"x": values}, **options)
        np.testing.assert_array_equal(answer["y"], values)
        wrong = {"x": values.reshape(10, -1)}
        with client.refused("INVALID_ARGUMENT", "unexpected shape for input 'x' for model 'line_FP32'"):
            await client.infer("line_FP32", wrong, **options)


async def test_a_decoupled_model_is_no_matter_for_unary_calls(client: Client) -> None:
    front = "ModelInfer RPC" if client.is_grpc else "HTTP end point"
    text = f"{front} doesn't support models with decoupled transaction policy"
    inputs = {"IN": np.array([1], np.int32), "DELAY": np.array([0], np.uint32)}
    for model in ("repeat", "chain_repeat"):
        with client.refused("UNIMPLEMENTED", text):
            await client.infer(model, inputs)
