"""errors.md §6, §8, §9 and §10: shared memory, the repository, settings, and what only HTTP has."""

from collections.abc import Callable
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from tests.compat.errors import Http, Row, infer, json_infer

__all__ = ["ROWS"]

BAD, MISSING, NO = "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"


def asked(rpc: str, **fields: Any) -> dict[str, Any]:
    return {"rpc": rpc, "message": lambda: getattr(pb, f"{rpc}Request")(**fields)}


def region(*, of_output: bool = False, **values: Any) -> dict[str, Any]:
    """An inference with these parameters at its input, or at its output; numbers and texts, or (member, value)."""

    def change(message: Any) -> None:
        target = message.outputs.add(name="y") if of_output else message.inputs[0]
        for key, value in values.items():
            if isinstance(value, tuple):
                setattr(target.parameters[key], *value)
            elif isinstance(value, str):
                target.parameters[key].string_param = value
            else:
                target.parameters[key].int64_param = value

    return {"rpc": "ModelInfer", "message": infer(raw=infer_raw(of_output), more=change)}


def infer_raw(is_there: bool) -> bytes | None:
    return b"\0\0\0\0" if is_there else None


def loading(**values: Any) -> dict[str, Any]:
    """A load of `spare` with these parameters, each (member, value)."""

    def make() -> Any:
        message = pb.RepositoryModelLoadRequest(model_name="spare")
        for key, value in values.items():
            setattr(message.parameters[key.replace("file_", "file:")], *value)
        return message

    return {"rpc": "RepositoryModelLoad", "message": make}


def unloading(member: str, value: Any) -> Callable[[], Any]:
    def make() -> Any:
        message = pb.RepositoryModelUnloadRequest(model_name="nobody")
        setattr(message.parameters["unload_dependents"], member, value)
        return message

    return make


def traced(key: str, *values: str, model: str = "") -> dict[str, Any]:
    def make() -> Any:
        message = pb.TraceSettingRequest(model_name=model)
        message.settings[key].value.extend(values)
        return message

    return {"rpc": "TraceSetting", "message": make}


def logged(key: str, member: str, value: Any) -> dict[str, Any]:
    def make() -> Any:
        message = pb.LogSettingsRequest()
        setattr(message.settings[key], member, value)
        return message

    return {"rpc": "LogSettings", "message": make}


def trace_http(**body: Any) -> Http:
    return Http("/v2/trace/setting", body)


FILE = "file location can not be updated through network protocol"
POLLED = "failed to load 'nobody', failed to poll from model repository"
PAGE: dict[str, Any] = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
LINE = "/v2/models/line_FP32/infer"
ROWS: dict[str, Row] = {
    # §6; sizes and offsets that need a region are in test_shared_memory.py
    "no such key": Row(
        "INTERNAL",
        "Unable to open shared memory region: '/compat_nobody'",
        **asked("SystemSharedMemoryRegister", name="r", key="/compat_nobody", byte_size=4096),
        http=Http("/v2/systemsharedmemory/region/r/register", {"key": "/compat_nobody", "byte_size": 4096}),
    ),
    "unknown region's status": Row(
        MISSING,
        "Unable to find system shared memory region: 'nowhere'",
        **asked("SystemSharedMemoryStatus", name="nowhere"),
        http=Http("/v2/systemsharedmemory/region/nowhere/status"),
    ),
    "unknown device region's status": Row(
        MISSING,
        "Unable to find cuda shared memory region: 'nowhere'",
        **asked("CudaSharedMemoryStatus", name="nowhere"),
        http=Http("/v2/cudasharedmemory/region/nowhere/status"),
    ),
    "unregister nothing": Row(
        "OK",
        "",
        **asked("SystemSharedMemoryUnregister", name="nowhere"),
        http=Http("/v2/systemsharedmemory/region/nowhere/unregister", method="POST"),
    ),
    "unknown region in use": Row(MISSING, "Unable to find shared memory region: 'r'", **region(**PAGE)),
    "unknown region for an output": Row(
        MISSING, "Unable to find shared memory region: 'r'", **region(of_output=True, **PAGE)
    ),
    "region without size": Row(
        BAD,
        "'shared_memory_byte_size' must be specified along with 'shared_memory_region'",
        **region(shared_memory_region="r"),
        http=json_infer(
            data=None,
            tensor={"parameters": {"shared_memory_region": "r"}},
            triton=404,
            triton_words="Unable to find shared memory region: 'r'",
        ),
    ),
    "size without region": Row(
        BAD, "can not be specified without 'shared_memory_region'", **region(of_output=True, shared_memory_byte_size=4)
    ),
    "offset without region": Row(
        BAD, "can not be specified without 'shared_memory_region'", **region(of_output=True, shared_memory_offset=4)
    ),
    "kind of a region": Row(BAD, "shared_memory_region", **region(shared_memory_region=4, shared_memory_byte_size=4)),
    "kind of a size": Row(
        BAD, "shared_memory_byte_size", **region(shared_memory_region="r", shared_memory_byte_size="4")
    ),
    # §8
    "load unknown": Row(
        "INTERNAL",
        POLLED,
        **asked("RepositoryModelLoad", model_name="nobody"),
        http=Http("/v2/repository/models/nobody/load", method="POST"),
    ),
    "load parameter": Row(BAD, "unrecognized load parameter 'k'", **loading(k=("string_param", "v"))),
    "kind of configuration": Row(BAD, "config", **loading(config=("bool_param", True))),
    "kind of file": Row(
        BAD, "file:1/x", **loading(**{"config": ("string_param", "{}"), "file_1/x": ("string_param", "v")})
    ),
    "file without configuration": Row(
        "INTERNAL",
        "failed to load 'spare', failed to poll from model repository",
        **loading(**{"file_1/x": ("bytes_param", b"v")}),
    ),
    "kind of dependents": Row(BAD, "bool_param", rpc="RepositoryModelUnload", message=unloading("string_param", "yes")),
    "unload unknown": Row(
        "OK",
        "",
        **asked("RepositoryModelUnload", model_name="nobody"),
        http=Http("/v2/repository/models/nobody/unload", method="POST"),
    ),
    "repository's name": Row(
        NO, "'repository_name' specification is not supported", **asked("RepositoryIndex", repository_name="r")
    ),
    "repository's name at load": Row(
        NO,
        "'repository_name' specification is not supported",
        **asked("RepositoryModelLoad", repository_name="r", model_name="spare"),
    ),
    "repository's name at unload": Row(
        NO,
        "'repository_name' specification is not supported",
        **asked("RepositoryModelUnload", repository_name="r", model_name="nobody"),
    ),
    # §9
    "trace file": Row(NO, FILE, **traced("trace_file", "x"), http=trace_http(trace_file="x")),
    "trace off and on": Row(
        BAD,
        "Expect only one trace level 'OFF' is specified",
        **traced("trace_level", "OFF", "TIMESTAMPS"),
        http=trace_http(trace_level=["OFF", "TIMESTAMPS"]),
    ),
    "two rates": Row(BAD, "xpect only 1 value for 'trace_rate'", **traced("trace_rate", "1", "2")),
    "rate": Row(
        BAD, "Unable to parse 'trace_rate', got: x", **traced("trace_rate", "x"), http=trace_http(trace_rate="x")
    ),
    "count": Row(BAD, "Expecting value >= -1, got", **traced("trace_count", "-2"), http=trace_http(trace_count="-2")),
    "great rate": Row(
        BAD,
        "Unable to parse 'trace_rate', value is out of range",
        **traced("trace_rate", "9" * 30),
        http=trace_http(trace_rate="9" * 30),
    ),
    "unknown trace setting": Row("OK", "", **traced("nothing", "1"), http=trace_http(nothing="1")),
    "trace of no model": Row(
        BAD,
        "Request for unknown model : nobody",
        **traced("trace_rate", "1", model="nobody"),
        http=Http("/v2/models/nobody/trace/setting", {"trace_rate": "1"}),
    ),
    "log file": Row(
        NO, FILE, **logged("log_file", "string_param", "x"), http=Http("/v2/logging", {"log_file": "x"}, triton=0)
    ),
    "kind of log switch": Row(
        BAD,
        "log_info",
        **logged("log_info", "string_param", "x"),
        http=Http("/v2/logging", {"log_info": "x"}, triton=500, triton_words="boolean"),
    ),
    "kind of verbosity": Row(BAD, "log_verbose_level", **logged("log_verbose_level", "string_param", "x")),
    "log format": Row(
        BAD,
        "log_format, got: x",
        **logged("log_format", "string_param", "x"),
        http=Http("/v2/logging", {"log_format": "x"}, triton=503),
    ),
    "unknown log setting": Row("OK", "", **logged("nothing", "bool_param", True)),
    # §10; paths and methods are in test_curl.py
    "no JSON": Row(BAD, "failed to parse the request JSON buffer", http=Http(LINE, b"{", triton=500)),
    "no inputs": Row(BAD, "Unable to parse 'inputs'", http=Http(LINE, {"id": "r1"}, triton=500)),
    "inputs of another kind": Row(BAD, "inputs", http=Http(LINE, {"inputs": 3}, triton=500, triton_words="array")),
    "data count": Row(
        BAD,
        "Shape does not match true shape of 'data' field",
        http=json_infer(shape=(2,), triton=500),
    ),
    "no data": Row(BAD, "Input must set only one of the following fields", http=json_infer(data=None)),
    "two sources": Row(
        BAD,
        "Input must set only one of the following fields",
        http=json_infer(tensor={"parameters": {"binary_data_size": 4}}),
    ),
    "half floats": Row(
        BAD,
        "receiving FP16 data via JSON is not supported",
        http=json_infer("ident_FP16", datatype="FP16", shape=(1, 1)),
    ),
    "header length": Row(
        BAD,
        "inference header size should be in range",
        http=Http(LINE, b"{}", headers={"Inference-Header-Content-Length": "99"}),
    ),
    "negative header length": Row(
        BAD,
        "inference header size should be in range",
        http=Http(LINE, b"{}", headers={"Inference-Header-Content-Length": "-1"}),
    ),
    "raw for two inputs": Row(
        BAD,
        "Raw request must only have 1 input",
        http=Http("/v2/models/simple/infer", b"1234", headers={"Inference-Header-Content-Length": "0"}),
    ),
    "raw of two open dimensions": Row(
        BAD,
        "more than one variable-sized dimension",
        http=Http("/v2/models/ident_FP32/infer", b"1234", headers={"Inference-Header-Content-Length": "0"}),
    ),
    "strange encoding": Row(
        NO, "Unsupported compression type", http=Http(LINE, b"{}", headers={"Content-Encoding": "br"})
    ),
    "region without key": Row(
        BAD,
        "Shared memory register request has no 'key' field",
        http=Http("/v2/systemsharedmemory/region/r/register", {"byte_size": 4096}),
    ),
}
