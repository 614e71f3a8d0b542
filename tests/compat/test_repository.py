"""Index, load and unload through every published client. The server is in explicit mode, everything loaded."""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.compat.clients import Client
from tests.compat.repository import ENTRIES
from tests.compat.server import Server
from tests.e2e.mesh import until

ONE = np.ones(2, np.float32)


async def states(client: Client, model: str) -> dict[str, tuple[str, str]]:
    """State and reason by version."""
    rows = await client.get_model_repository_index()
    return {
        row.get("version", ""): (row.get("state", ""), row.get("reason", "")) for row in rows if row["name"] == model
    }


@asynccontextmanager
async def restored(client: Client, *models: str) -> AsyncIterator[None]:
    """Whatever happens, the models are as on disk afterwards, for the next test."""
    try:
        yield
    finally:
        for model in models:
            await client.unload_model(model)
            await until_unloaded(client, model)
            await client.load_model(model)


async def until_unloaded(client: Client, model: str) -> None:
    async def is_gone() -> bool:
        return not await client.is_model_ready(model)

    await until(is_gone, 20)


async def test_the_index(client: Client) -> None:
    rows = await client.get_model_repository_index()
    assert {row["name"] for row in rows} >= {entry.name for entry in ENTRIES}
    assert await states(client, "simple") == {"1": ("READY", "")}
    assert await states(client, "versioned") == {"1": ("READY", ""), "3": ("READY", "")}
    assert [(row["name"], row.get("version", "")) for row in rows] == sorted(
        (row["name"], row.get("version", "")) for row in rows
    )


async def test_unload_and_load(client: Client) -> None:
    async with restored(client, "spare"):
        await client.unload_model("spare")
        await until_unloaded(client, "spare")

        async def is_told() -> bool:
            return await states(client, "spare") == {"1": ("UNAVAILABLE", "unloaded")}

        await until(is_told, 10)
        with client.refused("NOT_FOUND", "Request for unknown model: 'spare' has no available versions"):
            await client.infer("spare", {"x": ONE})
        with client.refused("UNAVAILABLE", "Request for unknown model: 'spare' version 1 is not at ready state"):
            await client.infer("spare", {"x": ONE}, model_version="1")
        assert await client.is_server_ready()  # what was unloaded is no reason not to be
        await client.load_model("spare")
        assert await states(client, "spare") == {"1": ("READY", "")}
        assert (await client.arrays("spare", {"x": ONE}))["y"].tolist() == [1, 1]


async def test_what_is_loaded_already_and_what_nobody_knows(client: Client) -> None:
    await client.load_model("spare")
    await client.unload_model("nobody")
    with client.refused("INTERNAL", "failed to load 'nobody', failed to poll from model repository"):
        await client.load_model("nobody")


async def test_a_configuration_in_place_of_that_on_disk(client: Client) -> None:
    config = await client.get_model_config("spare")
    config["input"][0]["dims"] = config["output"][0]["dims"] = ["2"]
    config["max_batch_size"] = 4
    async with restored(client, "spare"):
        await client.load_model("spare", config=json.dumps(config))
        metadata = await client.get_model_metadata("spare")
        assert [int(size) for size in metadata["inputs"][0]["shape"]] == [-1, 2]
        assert (await client.arrays("spare", {"x": ONE.reshape(1, 2)}))["y"].tolist() == [[1, 1]]
    assert [int(size) for size in (await client.get_model_metadata("spare"))["inputs"][0]["shape"]] == [-1]


async def test_a_bad_configuration_leaves_the_model_as_it_was(client: Client) -> None:
    for config in ("{", json.dumps({"no_such_field": 1}), json.dumps({"max_batch_size": -1})):
        with client.refused("INTERNAL", "failed to load 'spare', failed to poll from model repository"):
            await client.load_model("spare", config=config)
        assert (await client.arrays("spare", {"x": ONE}))["y"].tolist() == [1, 1]


async def test_files_in_place_of_those_on_disk(client: Client) -> None:
    """I01: a model that exists only through the call, and is gone after it was unloaded."""
    config = await client.get_model_config("spare")
    config["name"] = "brought"
    source = Path(__file__).with_name("triton_models").joinpath("identity.py").read_bytes()
    files = {"file:7/model.py": source}
    try:
        await client.load_model("brought", config=json.dumps(config), files=files)
        assert (await client.get_model_metadata("brought"))["versions"] == ["7"]
        result = await client.infer("brought", {"x": ONE})
        assert (client.version(result), result.as_numpy("y").tolist()) == ("7", [1, 1])
        assert "brought" not in [row["name"] for row in await client.get_model_repository_index()]
    finally:
        await client.unload_model("brought")
    await until_unloaded(client, "brought")
    with client.refused("INTERNAL", "failed to load 'brought', failed to poll from model repository"):
        await client.load_model("brought")


async def test_files_that_may_not_be(client: Client, tmp_path: Path) -> None:
    """I01: no way out of the model's folder, and none without a configuration."""
    config = json.dumps(await client.get_model_config("spare"))
    for path in ("../../x", f"{tmp_path}/x", "1/../../../x"):
        with pytest.raises(InferenceServerException, match=r"'spare'|file override"):  # Triton has codes for each
            await client.load_model("spare", config=config, files={f"file:{path}": b"x"})
    assert not os.listdir(tmp_path)
    assert (await client.arrays("spare", {"x": ONE}))["y"].tolist() == [1, 1]


async def test_unloading_a_step_takes_its_pipeline_with_it(client: Client) -> None:
    async with restored(client, "spare_step", "chain"):
        await client.unload_model("spare_step")
        await until_unloaded(client, "spare_step")
        await until_unloaded(client, "chain")
        await client.load_model("chain")  # brings back what it needs
        assert (await client.arrays("chain", {"x": ONE}))["y"].tolist() == [1, 1]


@pytest.mark.parametrize("body", [b"", b"{}", b'{"ready": true}'])
def test_the_index_by_http(server: Server, body: bytes) -> None:
    answer = server.fetch("/v2/repository/index", body)
    assert answer.status == 200
    assert {"name": "simple", "version": "1", "state": "READY"} in answer.json
