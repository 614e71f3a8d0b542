"""Health, metadata, configuration: every published client sees what it would see of a Triton."""

from tests.compat.clients import Client
from tests.compat.repository import DATATYPE_NAMES
from tests.compat.server import Server

EXTENSIONS = [
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
]
NOT_YET = {"sequence", "schedule_policy"}


async def test_the_server_is_live_and_ready(client: Client) -> None:
    assert await client.is_server_live()
    assert await client.is_server_ready()


async def test_models_are_ready(client: Client) -> None:
    """F09: ready means ready, for the server, for a model, and for a pipeline."""
    for model, version, ready in (
        ("simple", "", True),
        ("simple", "1", True),
        ("simple", "2", False),
        ("versioned", "3", True),
        ("versioned", "2", False),
        ("chain", "", True),
        ("nobody", "", False),
    ):
        assert await client.is_model_ready(model, version) is ready, (model, version)


async def test_server_metadata(client: Client, server: Server) -> None:
    metadata = await client.get_server_metadata()
    assert metadata["name"] == server.either(ours="tensorline", triton="triton")
    assert metadata["version"]
    wanted = [name for name in EXTENSIONS if server.is_triton or name not in NOT_YET]
    assert [name for name in metadata["extensions"] if name in EXTENSIONS] == wanted


async def test_model_metadata(client: Client, server: Server) -> None:
    metadata = await client.get_model_metadata("simple")
    assert metadata["name"] == "simple"
    assert metadata["versions"] == ["1"]
    assert metadata["platform"] == server.either(ours="addsub", triton="python")
    found = {tensor["name"]: tensor for tensor in (*metadata["inputs"], *metadata["outputs"])}
    assert list(found) == ["A", "B", "SUM", "DIFF"]
    for tensor in found.values():
        assert (tensor["datatype"], [int(size) for size in tensor["shape"]]) == ("INT32", [-1, 16])


async def test_metadata_has_each_datatype_by_its_name(client: Client) -> None:
    for datatype in DATATYPE_NAMES:
        metadata = await client.get_model_metadata(f"ident_{datatype}")
        assert metadata["inputs"][0]["datatype"] == datatype
        assert metadata["outputs"][0]["datatype"] == datatype


async def test_metadata_of_a_pipeline(client: Client) -> None:
    assert (await client.get_model_metadata("chain"))["platform"] == "ensemble"


async def test_versions(client: Client) -> None:
    assert (await client.get_model_metadata("versioned"))["versions"] == ["1", "3"]
    assert (await client.get_model_metadata("versioned", "1"))["versions"] == ["1"]


async def test_configuration_is_complete(client: Client, server: Server) -> None:
    """Written fields, and what is filled in: version policy, instance group, batcher's preferred size."""
    config = await client.get_model_config("ident_b8")
    assert config["name"] == "ident_b8"
    assert config["backend"] == server.either(ours="identity", triton="python")
    assert config["max_batch_size"] == 8
    assert config["input"][0]["name"] == "x"
    assert config["input"][0]["data_type"] == "TYPE_FP32"
    assert [int(size) for size in config["input"][0]["dims"]] == [4]
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert config["dynamic_batching"]["preferred_batch_size"] == [8]
    assert int(config["dynamic_batching"]["max_queue_delay_microseconds"]) == 20000
    (group,) = config["instance_group"]
    assert (group["name"], group["count"], group["kind"]) == ("ident_b8", 1, "KIND_CPU")
    assert config["optimization"]["input_pinned_memory"] == {"enable": True}
    assert config["optimization"]["output_pinned_memory"] == {"enable": True}


async def test_configuration_of_a_pipeline(client: Client) -> None:
    config = await client.get_model_config("chain_repeat")
    assert config["platform"] == "ensemble"
    (step,) = config["ensemble_scheduling"]["step"]
    assert (step["model_name"], step["output_map"]) == ("repeat", {"OUT": "OUT", "IDX": "IDX"})
    assert config["model_transaction_policy"] == {"decoupled": True}


async def test_what_is_not_there(client: Client) -> None:
    for ask in (client.get_model_metadata, client.get_model_config):
        with client.refused("NOT_FOUND", "Request for unknown model: 'nobody' is not found"):
            await ask("nobody")
        with client.refused("NOT_FOUND", "Request for unknown model: 'simple' version 7 is not found"):
            await ask("simple", "7")
