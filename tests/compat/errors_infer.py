"""errors.md §2 to §5: models and versions, inputs, their data, request parameters."""

from typing import Any

from tritonclient.grpc import service_pb2 as pb

from tests.compat.errors import ONE, Http, Row, binary, infer, json_infer, parameters

__all__ = ["ROWS"]

BAD, MISSING, NO = "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"


def pair(first: tuple[str, list[int]], second: tuple[str, list[int]] | None) -> Any:
    """A request to `simple` with these inputs, INT32, all zero."""

    def make() -> Any:
        message = pb.ModelInferRequest(model_name="simple", id="r1")
        for name, shape in filter(None, (first, second)):
            message.inputs.add(name=name, datatype="INT32", shape=shape)
            message.raw_input_contents.append(bytes(4 * shape[0] * shape[1]))
        return message

    return make


def json_pair(first: tuple[str, list[int]], second: tuple[str, list[int]] | None) -> Http:
    inputs = [
        {"name": name, "datatype": "INT32", "shape": shape, "data": [0] * (shape[0] * shape[1])}
        for name, shape in filter(None, (first, second))
    ]
    return Http("/v2/models/simple/infer", {"id": "r1", "inputs": inputs})


def typed(datatype: str, **lists: list[Any]) -> Any:
    def change(message: Any) -> None:
        message.inputs[0].contents.CopyFrom(pb.InferTensorContents(**lists))

    return infer(
        f"line_{datatype}" if datatype in ("FP32", "BYTES") else f"ident_{datatype}",
        "x",
        datatype,
        (1,) if datatype in ("FP32", "BYTES") else (1, 1),
        None,
        more=change,
    )


def output(name: str, **value: Any) -> Any:
    def change(message: Any) -> None:
        wanted = message.outputs.add(name=name)
        if value:
            wanted.parameters["classification"].CopyFrom(pb.InferParameter(**value))

    return change


def named(rpc: str, **fields: str) -> dict[str, Any]:
    return {"rpc": rpc, "message": lambda: getattr(pb, f"{rpc}Request")(**fields)}


def asked(**more: Any) -> dict[str, Any]:
    return {"rpc": "ModelInfer", "message": infer(**more)}


def change(rpc: str = "ModelInfer", **more: Any) -> dict[str, Any]:
    return {"rpc": rpc, "message": infer(more=parameters(**more))}


NOBODY = "Request for unknown model: 'nobody' is not found"
NUMBER, TRITON_NUMBER = (
    "failed to read version from string",
    "failed to get model version from specified version string",
)
OTHER = "'line_FP32' version 9 is not found"
ROWS: dict[str, Row] = {
    # §2
    "unknown model": Row(MISSING, NOBODY, **asked(model="nobody"), http=json_infer("nobody")),
    "no model": Row(MISSING, "Request for unknown model: '' is not found", **asked(model="")),
    "unknown model's metadata": Row(
        MISSING, NOBODY, **named("ModelMetadata", name="nobody"), http=Http("/v2/models/nobody")
    ),
    "unknown model's configuration": Row(
        MISSING, NOBODY, **named("ModelConfig", name="nobody"), http=Http("/v2/models/nobody/config")
    ),
    "unknown version": Row(MISSING, OTHER, **asked(model_version="9"), http=json_infer(version="9")),
    "version 0": Row(MISSING, "version 0 is not found", **asked(model_version="0"), http=json_infer(version="0")),
    "no number": Row(BAD, NUMBER, **asked(model_version="abc"), triton_words=TRITON_NUMBER),
    "no number for metadata": Row(
        BAD, NUMBER, **named("ModelMetadata", name="simple", version="x"), triton_words=TRITON_NUMBER
    ),
    "no number for ready": Row(
        BAD, NUMBER, **named("ModelReady", name="simple", version="x"), triton_words=TRITON_NUMBER
    ),
    "negative version": Row(
        BAD, "must be integer > 0", **asked(model_version="-1"), triton_words="should be an integral value > 0"
    ),
    "decoupled": Row(
        NO,
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
        **asked(model="repeat", name="IN"),
        http=json_infer(
            "repeat", "IN", words="HTTP end point doesn't support models with decoupled transaction policy"
        ),
    ),
    # §3
    "too few inputs": Row(
        BAD,
        "expected 2 inputs but got 1 inputs for model 'simple'. Got input(s) ['A'], but missing required input(s) "
        "['B']. "
        "Please provide all required input(s).",
        rpc="ModelInfer",
        message=pair(("A", [1, 16]), None),
        http=json_pair(("A", [1, 16]), None),
    ),
    "wrong name": Row(
        BAD, "unexpected inference input 'z' for model 'line_FP32'", **asked(name="z"), http=json_infer(name="z")
    ),
    "wrong name for a pipeline": Row(
        BAD,
        "unexpected inference input 'z' for model 'chain'",
        **asked(model="chain", name="z"),
        http=json_infer("chain", "z"),
    ),
    "duplicate input": Row(
        BAD,
        "input 'A' already exists in request",
        rpc="ModelInfer",
        message=pair(("A", [1, 16]), ("A", [1, 16])),
        http=json_pair(("A", [1, 16]), ("A", [1, 16])),
    ),
    "wrong datatype": Row(
        BAD,
        "inference input 'x' data-type is 'INT32', but model 'line_FP32' expects 'FP32'",
        **asked(datatype="INT32"),
        http=json_infer(datatype="INT32", data=[1]),
    ),
    "no datatype": Row(BAD, "data-type is '<invalid>'", **asked(datatype="fp32")),
    "rank": Row(
        BAD,
        "unexpected shape for input 'x' for model 'line_FP32'. Expected [-1], got [1,1].",
        **asked(shape=(1, 1)),
        http=json_infer(shape=(1, 1)),
    ),
    "rank with batching": Row(
        BAD,
        "unexpected shape for input 'x' for model 'ident_b8'. Expected [-1,4], got [1].",
        **asked(model="ident_b8"),
        http=json_infer("ident_b8"),
    ),
    "dimension -1": Row(BAD, "All input dimensions should be specified for input 'x'", **asked(shape=(-1,))),
    "no shape": Row(
        BAD,
        "input 'x' has no shape but model requires batch dimension",
        **asked(model="ident_b8", shape=()),
        http=json_infer("ident_b8", shape=()),
    ),
    "batches differ": Row(
        BAD,
        "batch size does not match other inputs",
        rpc="ModelInfer",
        message=pair(("A", [2, 16]), ("B", [3, 16])),
        http=json_pair(("A", [2, 16]), ("B", [3, 16])),
    ),
    "batch too big": Row(
        BAD,
        "inference request batch-size must be <= 8 for 'ident_b8'",
        **asked(model="ident_b8", shape=(9, 4), raw=bytes(144)),
        http=json_infer("ident_b8", shape=(9, 4), data=[0.0] * 36),
    ),
    "batch 0": Row(
        BAD,
        "input byte size mismatch for input 'x' for model 'ident_b8'",
        **asked(model="ident_b8", shape=(0, 4), raw=b""),
        http=json_infer("ident_b8", shape=(0, 4), data=[]),
    ),
    "unknown output": Row(
        BAD,
        "unexpected inference output 'z' for model 'line_FP32'",
        **asked(more=output("z")),
        http=json_infer(outputs=[{"name": "z"}]),
    ),
    "duplicate output": Row(
        BAD,
        "output 'y' already exists in request",
        **asked(
            more=lambda message: message.outputs.extend([pb.ModelInferRequest.InferRequestedOutputTensor(name="y")] * 2)
        ),
        http=json_infer(outputs=[{"name": "y"}] * 2, triton=200),
        triton="OK",
    ),
    "count overflows": Row(BAD, "exceed maximum size", **asked(shape=(2**62 + 1,)), triton="-"),
    # §4
    "byte size": Row(
        BAD,
        "input byte size mismatch for input 'x' for model 'line_FP32'. Expected 4, got 3",
        **asked(raw=b"123"),
        http=binary(raw=b"123"),
    ),
    "typed and raw": Row(
        BAD,
        "contents field must not be specified when using raw_input_contents",
        **asked(more=lambda message: message.inputs[0].contents.fp32_contents.append(1)),
    ),
    "other list": Row(
        BAD,
        "unexpected explicit tensor data for input tensor 'x'",
        rpc="ModelInfer",
        message=typed("FP32", int_contents=[1]),
    ),
    "half floats": Row(
        BAD,
        "unexpected explicit tensor data for input tensor 'x'",
        rpc="ModelInfer",
        message=typed("FP16", fp32_contents=[1]),
    ),
    "no data": Row(BAD, "unable to find data for input tensor 'x'", **asked(raw=None)),
    "surplus data": Row("OK", "", **asked(more=lambda message: message.raw_input_contents.append(ONE))),
    "few strings": Row(
        BAD,
        "expected 2 string elements for inference input 'x' for model 'line_BYTES', got 1",
        **asked(model="line_BYTES", datatype="BYTES", shape=(2,), raw=b"\1\0\0\0a"),
        http=binary("line_BYTES", "BYTES", (2,), b"\1\0\0\0a"),
    ),
    "many strings": Row(
        BAD,
        "unexpected number of string elements 2 for inference input 'x' for model 'line_BYTES', expecting 1",
        **asked(model="line_BYTES", datatype="BYTES", raw=b"\1\0\0\0a" * 2),
        http=binary("line_BYTES", "BYTES", (1,), b"\1\0\0\0a" * 2),
    ),
    "cut length": Row(
        BAD,
        "incomplete string length indicator for inference input 'x' for model 'line_BYTES', expecting 4 bytes but "
        "only 2 bytes available",
        **asked(model="line_BYTES", datatype="BYTES", raw=b"\1\0"),
        http=binary("line_BYTES", "BYTES", (1,), b"\1\0"),
    ),
    "cut string": Row(
        BAD,
        "incomplete string data for inference input 'x'",
        **asked(model="line_BYTES", datatype="BYTES", raw=b"\7\0\0\0a"),
        http=binary("line_BYTES", "BYTES", (1,), b"\7\0\0\0a"),
    ),
    # §5
    "unset parameter": Row(BAD, "int64_param, bool_param, or string_param", **change(k=None)),
    "uint64 parameter": Row("OK", "", **change(k=("uint64_param", 1)), triton=BAD),
    "double parameter": Row("OK", "", **change(k=("double_param", 1.5)), http=json_infer(parameters={"k": 1.5})),
    "reserved parameter": Row(
        BAD,
        "parameter keys starting with 'triton_' are reserved",
        **change(triton_x=("bool_param", True)),
        http=json_infer(parameters={"triton_x": True}),
    ),
    "negative priority": Row(BAD, "xpected value >= 0", **change(priority=("int64_param", -1))),
    "kind of priority": Row(BAD, "expected int64_param or uint64_param", **change(priority=("string_param", "1"))),
    "kind of timeout": Row(BAD, "int64_param", **change(timeout=("string_param", "1"))),
    "kind of sequence id": Row(BAD, "sequence_id", **change(sequence_id=("bool_param", True))),
    "kind of sequence start": Row(BAD, "sequence_start", **change(sequence_start=("int64_param", 1))),
    "kind of sequence end": Row(BAD, "sequence_end", **change(sequence_end=("int64_param", 1))),
    "kind of empty final response": Row(
        BAD, "bool_param", **change(triton_enable_empty_final_response=("int64_param", 1))
    ),
    "long sequence id": Row(
        NO,
        "string correlation ID cannot be longer than 128 characters",
        **change(sequence_id=("string_param", "s" * 129)),
    ),
    "classes 0": Row(BAD, "classification", **asked(more=output("y", int64_param=0))),
    "kind of classes": Row(BAD, "int64_param", **asked(more=output("y", string_param="1"))),
    "parameter that is an object": Row(
        BAD, "parameter 'k' has invalid type", http=json_infer(parameters={"k": {}}), triton_words="invalid type"
    ),
}
