"""Routes besides inference: what the operation is given, and what its answer looks like."""

import base64
from typing import Any

import pytest
from google.protobuf.message import Message

from gateway.operations import Operations
from gateway.operations.metadata import EXTENSIONS, Metadata
from tensorline import __version__
from tensorline.errors import InternalError, NotFoundError, ResourceExhaustedError, UnavailableError
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tests.gateway.house import FP32, add, ensemble, entry, open_house
from tests.gateway.rest.twin import Answer, Twin, twin
from tests.tensorline.stage.pair import config

MOST = 2**64 - 1


class Noting:
    """A group that notes what it is asked, and answers what it is told to."""

    def __init__(self, **answers: Message | Exception) -> None:
        self.asked: list[Any] = []
        self._answers = answers
        for rpc in answers:
            setattr(self, rpc, self._called(rpc))

    def _called(self, rpc: str) -> Any:
        async def call(message: Message) -> Message:
            self.asked.append(message)
            answer = self._answers[rpc]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


async def ask(group: Noting, path: str, body: object = None, *, method: str = "") -> Answer:
    async with open_house() as house:
        return await twin(house, operations=Operations(group)).ask(path, body, method=method)


async def test_the_server() -> None:
    async with open_house({"one": add(1)}) as house:
        asking = twin(house)
        assert (await asking.ask("/v2")).json == {
            "name": "server 1",
            "version": __version__,
            "extensions": [*EXTENSIONS],
        }
        for path in ("/v2/health/live", "/v2/health/ready"):
            answer = await asking.ask(path)
            assert (answer.status, answer.json) == (200, {path.rpartition("/")[2]: True})
        house.readiness.accepts = False
        assert [(await asking.ask(f"/v2/health/{name}")).status for name in ("live", "ready")] == [200, 400]
    assert "binary_tensor_data" in EXTENSIONS


async def test_models() -> None:
    model = entry("away", config(FP32, {"y": "FP32"}) + '\nbackend: "elsewhere"')
    async with open_house(
        {"one": add(1)}, entries=[model, ensemble("chain", ("one", {"x": "x"}, {"y": "y"}))]
    ) as house:
        asking = twin(house)
        for path in ("/v2/models/one", "/v2/models/one/versions/1", "/v2/models/one/versions/01"):
            assert (await asking.ask(path)).json == {
                "name": "one",
                "versions": ["1"],
                "platform": "one",
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1]}],
                "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1]}],
            }
            ready = await asking.ask(f"{path}/ready")
            assert (ready.status, ready.json) == (200, {"name": "one", "ready": True})
        for path in ("/v2/models/away/ready", "/v2/models/nobody/ready", "/v2/models/one/versions/2/ready"):
            assert (await asking.ask(path)).error == (400, "Model version not ready")
        assert (await asking.ask("/v2/models/one/versions/00000000000000000000/ready")).status == 400
        assert (await asking.ask("/v2/models/nobody")).error == (
            404,
            "Request for unknown model: 'nobody' is not found",
        )
        assert (await asking.ask("/v2/models/away")).status == 503
        told = (await asking.ask("/v2/models/chain/config")).json
        assert (told["platform"], told["max_batch_size"], told["input"][0]["dims"]) == ("ensemble", 0, [-1])
        assert told["ensemble_scheduling"]["step"][0] == {
            "model_name": "one",
            "model_version": -1,
            "input_map": {"x": "x"},
            "output_map": {"y": "y"},
            "model_namespace": "",
        }
        assert "dynamic_batching" not in told


PATHS = [
    "/v2",
    "/v2/health/live",
    "/v2/health/ready",
    "/v2/models/one",
    "/v2/models/one/ready",
    "/v2/models/one/config",
]


@pytest.mark.parametrize("path", PATHS)
async def test_paths_are_exact_and_so_are_methods(path: str) -> None:
    async with open_house({"one": add(1)}) as house:
        asking = twin(house)
        assert (await asking.ask(path)).status == 200
        assert (await asking.ask(f"{path}/")).error == (404, "Not Found")
        assert (await asking.ask(path, b"")).error == (405, "Method Not Allowed")
        assert (await asking.ask(path, method="DELETE")).error == (405, "Method Not Allowed")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v2/model",
        "/v2/models",
        "/v2/models/one/versions/x",
        "/v2/models/one/versions/-1",
        "/v2/models/one/versions/1x/infer",
        "/v2/models/one/versions/ 1/ready",
        "/v2/models/a/b/ready",
        "/v2/health",
    ],
)
async def test_unknown_paths(path: str) -> None:
    async with open_house({"one": add(1)}) as house:
        assert (await twin(house).ask(path)).error == (404, "Not Found")
        assert (await twin(house).ask(path, {})).error == (404, "Not Found")


STATISTIC = {"count": 0, "ns": 0}


async def test_statistics_are_numbers_with_their_zeros() -> None:
    told = pb.ModelStatisticsResponse()
    row = told.model_stats.add(name="m", version="1", inference_count=MOST, last_inference=7)
    row.inference_stats.success.ns = MOST
    row.batch_stats.add(batch_size=2).compute_infer.ns = 5
    row.response_stats["0"].success.count = 1
    group = Noting(ModelStatistics=told)
    for path, name, version in (
        ("/v2/models/stats", "", ""),
        ("/v2/models/m/stats", "m", ""),
        ("/v2/models/m/versions/3/stats", "m", "3"),
    ):
        answer = await ask(group, path)
        assert group.asked[-1] == pb.ModelStatisticsRequest(name=name, version=version)
    (stats,) = answer.json["model_stats"]
    assert [*stats] == [
        "name",
        "version",
        "last_inference",
        "inference_count",
        "execution_count",
        "inference_stats",
        "response_stats",
        "batch_stats",
        "memory_usage",
    ]
    assert (stats["inference_count"], stats["execution_count"], stats["memory_usage"]) == (MOST, 0, [])
    assert stats["inference_stats"]["success"] == {"count": 0, "ns": MOST}
    assert {*map(str, stats["inference_stats"].values())} == {str(STATISTIC), str({"count": 0, "ns": MOST})}
    assert stats["batch_stats"] == [
        {
            "batch_size": 2,
            "compute_input": STATISTIC,
            "compute_infer": {"count": 0, "ns": 5},
            "compute_output": STATISTIC,
        }
    ]
    assert stats["response_stats"]["0"]["empty_response"] == STATISTIC


async def test_the_repository_index_is_an_array() -> None:
    told = pb.RepositoryIndexResponse()
    told.models.add(name="a", version="1", state="READY")
    told.models.add(name="b")
    told.models.add(name="c", version="1", state="UNAVAILABLE", reason="unloaded")
    group = Noting(RepositoryIndex=told)
    for body, ready in ((b"", False), ({}, False), ({"ready": True}, True)):
        answer = await ask(group, "/v2/repository/index", body)
        assert group.asked[-1] == pb.RepositoryIndexRequest(ready=ready)
    assert answer.json == [
        {"name": "a", "version": "1", "state": "READY"},
        {"name": "b"},
        {"name": "c", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
    ]
    assert (await ask(group, "/v2/repository/index", {"ready": 1})).error[0] == 400
    await ask(group, "/v2/repository/mine/index", b"")
    assert group.asked[-1].repository_name == "mine"


async def test_load_and_unload() -> None:
    group = Noting(
        RepositoryModelLoad=pb.RepositoryModelLoadResponse(), RepositoryModelUnload=pb.RepositoryModelUnloadResponse()
    )
    content = base64.b64encode(b"\0\xff").decode()
    body = {"parameters": {"config": "{}", "file:1/model.py": content, "other": "x"}}
    answer = await ask(group, "/v2/repository/models/m/load", body)
    assert (answer.status, answer.body) == (200, b"")
    loaded = group.asked[-1]
    assert loaded.model_name == "m"
    assert {key: value.WhichOneof("parameter_choice") for key, value in loaded.parameters.items()} == {
        "config": "string_param",
        "file:1/model.py": "bytes_param",
        "other": "string_param",
    }
    assert loaded.parameters["file:1/model.py"].bytes_param == b"\0\xff"
    for parameters, told in (
        ({"config": {}}, "Unable to parse 'config' of the load parameters: it is an object, a string is wanted"),
        ({"file:1/a": "%%"}, "load parameter 'file:1/a' is no base64"),
        ({"file:1/a": "a"}, "load parameter 'file:1/a' is no base64"),
        ({"file:1/a": "é"}, "load parameter 'file:1/a' is no base64"),
    ):
        assert (await ask(group, "/v2/repository/models/m/load", {"parameters": parameters})).error == (400, told)
    await ask(group, "/v2/repository/mine/models/m/load", b"")
    assert (group.asked[-1].repository_name, group.asked[-1].model_name) == ("mine", "m")

    kinds = {"parameters": {"unload_dependents": True, "a": 1, "b": "s"}}
    assert (await ask(group, "/v2/repository/models/m/unload", kinds)).status == 200
    unloaded = group.asked[-1].parameters
    assert (unloaded["unload_dependents"].bool_param, unloaded["a"].int64_param, unloaded["b"].string_param) == (
        True,
        1,
        "s",
    )
    others: list[object] = [None, 1.5, [], 2**64 - 1]
    for value in others:
        status, _ = (await ask(group, "/v2/repository/models/m/unload", {"parameters": {"a": value}})).error
        assert status == 400


async def test_system_shared_memory() -> None:
    told = pb.SystemSharedMemoryStatusResponse()
    for name in ("b", "a"):
        told.regions[name].CopyFrom(
            pb.SystemSharedMemoryStatusResponse.RegionStatus(name=name, key="/k", byte_size=MOST)
        )
    group = Noting(
        SystemSharedMemoryStatus=told,
        SystemSharedMemoryRegister=pb.SystemSharedMemoryRegisterResponse(),
        SystemSharedMemoryUnregister=pb.SystemSharedMemoryUnregisterResponse(),
    )
    root = "/v2/systemsharedmemory"
    assert (await ask(group, f"{root}/status")).json == [
        {"name": name, "key": "/k", "offset": 0, "byte_size": MOST} for name in ("a", "b")
    ]
    await ask(group, f"{root}/region/a/status")
    assert group.asked[-1] == pb.SystemSharedMemoryStatusRequest(name="a")
    answer = await ask(group, f"{root}/region/a/register", {"key": "/k", "byte_size": 8})
    assert (answer.status, answer.body) == (200, b"")
    assert group.asked[-1] == pb.SystemSharedMemoryRegisterRequest(name="a", key="/k", byte_size=8)
    await ask(group, f"{root}/region/a/register", {"key": "/k", "byte_size": MOST, "offset": 3})
    assert (group.asked[-1].offset, group.asked[-1].byte_size) == (3, MOST)
    for path, name in ((f"{root}/unregister", ""), (f"{root}/region/a/unregister", "a")):
        assert (await ask(group, path, b"")).status == 200
        assert group.asked[-1] == pb.SystemSharedMemoryUnregisterRequest(name=name)
    for body, words in (
        ({"byte_size": 8}, "Shared memory register request has no 'key' field"),
        ({"key": "/k"}, "Shared memory register request has no 'byte_size' field"),
        ({"key": 5, "byte_size": 8}, "Unable to parse 'key'"),
        ({"key": "/k", "byte_size": "8"}, "Unable to parse 'byte_size'"),
        ({"key": "/k", "byte_size": -1}, "Unable to parse 'byte_size': it is -1"),
        ({"key": "/k", "byte_size": 8, "offset": 1.5}, "Unable to parse 'offset'"),
        (b"", "The document is empty"),
    ):
        status, text = (await ask(group, f"{root}/region/a/register", body)).error
        assert status == 400
        assert words in text


async def test_cuda_shared_memory() -> None:
    group = Noting(
        CudaSharedMemoryStatus=pb.CudaSharedMemoryStatusResponse(),
        CudaSharedMemoryRegister=pb.CudaSharedMemoryRegisterResponse(),
        CudaSharedMemoryUnregister=pb.CudaSharedMemoryUnregisterResponse(),
    )
    root = "/v2/cudasharedmemory"
    assert (await ask(group, f"{root}/status")).json == []
    handle = base64.b64encode(bytes(64)).decode()
    body = {"raw_handle": {"b64": handle}, "device_id": 1, "byte_size": 8}
    assert (await ask(group, f"{root}/region/a/register", body)).status == 200
    assert group.asked[-1] == pb.CudaSharedMemoryRegisterRequest(
        name="a", raw_handle=bytes(64), device_id=1, byte_size=8
    )
    for wrong in ({"b64": "AAAA"}, {"b64": "?"}, {}, "x"):
        status, text = (await ask(group, f"{root}/region/a/register", {**body, "raw_handle": wrong})).error
        assert (status, "raw_handle" in text) == (400, True)
    assert (await ask(group, f"{root}/region/a/unregister", b"")).status == 200


async def test_trace_settings() -> None:
    told = pb.TraceSettingResponse()
    told.settings["trace_level"].value.append("OFF")
    told.settings["trace_rate"].value.append("5")
    told.settings["resource"].value.extend(["a=b", "c=d"])
    told.settings["url"].SetInParent()
    group = Noting(TraceSetting=told)
    for path, model in (("/v2/trace/setting", ""), ("/v2/models/m/trace/setting", "m")):
        answer = await ask(group, path)
        assert group.asked[-1] == pb.TraceSettingRequest(model_name=model)
        await ask(group, path, {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "3", "trace_count": None})
        settings = group.asked[-1].settings
        assert group.asked[-1].model_name == model
        assert {key: [*settings[key].value] for key in sorted(settings)} == {
            "trace_count": [],
            "trace_level": ["TIMESTAMPS", "TENSORS"],
            "trace_rate": ["3"],
        }
    assert answer.json == {"trace_level": ["OFF"], "trace_rate": "5", "resource": ["a=b", "c=d"], "url": ""}
    await ask(group, "/v2/trace/setting", {"trace_level": None})
    assert [*group.asked[-1].settings["trace_level"].value] == []
    await ask(group, "/v2/trace/setting", {"unknown": 5, "trace_rate": "1"})
    assert [*group.asked[-1].settings] == ["trace_rate"]
    for key, value in (("trace_rate", 5), ("trace_rate", ["5"]), ("trace_level", "OFF"), ("trace_level", [5])):
        status, text = (await ask(group, "/v2/trace/setting", {key: value})).error
        assert (status, f"Unable to parse '{key}'" in text) == (400, True)


async def test_log_settings() -> None:
    told = pb.LogSettingsResponse()
    told.settings["log_info"].bool_param = False
    told.settings["log_verbose_level"].uint32_param = 0
    told.settings["log_format"].string_param = "default"
    group = Noting(LogSettings=told)
    answer = await ask(group, "/v2/logging")
    assert answer.json == {"log_info": False, "log_verbose_level": 0, "log_format": "default"}
    await ask(group, "/v2/logging", {"log_info": True, "log_verbose_level": 2**32 - 1, "log_format": "ISO8601"})
    settings = group.asked[-1].settings
    assert settings["log_info"].bool_param
    assert (settings["log_verbose_level"].uint32_param, settings["log_format"].string_param) == (2**32 - 1, "ISO8601")
    await ask(group, "/v2/logging", {"unknown": {}, "log_error": True})
    assert [*group.asked[-1].settings] == ["log_error"]
    others: list[object] = [-1, 2**32, 1.5, None, {}]
    for value in others:
        status, text = (await ask(group, "/v2/logging", {"log_verbose_level": value})).error
        assert (status, "Unable to parse 'log_verbose_level'" in text) == (400, True)


async def test_an_operation_that_is_not_there() -> None:
    async with open_house() as house:
        asking = Twin(twin(house, operations=Operations()).app)
        assert (await asking.ask("/v2/logging")).error == (501, "this server does not have LogSettings")
        assert (await asking.ask("/v2/repository/index", b"")).error[0] == 501


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (NotFoundError("not here"), 404, None),
        (UnavailableError("not now"), 503, "1"),
        (ResourceExhaustedError("too much"), 429, "1"),
        (InternalError("our fault"), 500, None),
    ],
)
async def test_failures(error: Exception, status: int, retry: str | None) -> None:
    answer = await ask(Noting(ModelConfig=error), "/v2/models/m/config")
    assert answer.error == (status, str(error))
    assert answer.headers.get("retry-after") == retry


async def test_a_bug_is_told_as_internal_and_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    answer = await ask(Noting(ModelConfig=ZeroDivisionError("row 7 of customers")), "/v2/models/m/config")
    assert answer.error == (500, "internal error")
    assert "row 7 of customers" in caplog.text


async def test_a_long_error_is_cut() -> None:
    answer = await ask(Noting(ModelConfig=NotFoundError("é" * 5000)), "/v2/models/m/config")
    assert answer.error == (404, "é" * 512)


async def test_the_metadata_group_is_what_both_front_ends_call() -> None:
    async with open_house({"one": add(1)}) as house:
        group = Metadata(house.models, house.readiness, "s")
        message = await group.ModelMetadata(pb.ModelMetadataRequest(name="one"))
        assert (await twin(house).ask("/v2/models/one")).json["name"] == message.name
