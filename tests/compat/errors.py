"""Rows of errors.md: a call by gRPC and, where it can be said there, the same by HTTP; code, and gist of the text."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from tritonclient.grpc import service_pb2 as pb

__all__ = ["Http", "Row", "binary", "infer", "json_infer", "parameters"]

ONE = b"\0\0\x80\x3f"


@dataclass(frozen=True)
class Http:
    """A request to the REST twin.

    Args:
        status: Where it is not that of the gRPC code.
        words: Where they are not those by gRPC.
        triton, triton_words: What Triton 2.51 answers instead.
    """

    path: str
    body: Any = None
    method: str = ""
    status: int = 0
    words: str = ""
    triton: int = 0
    triton_words: str = ""
    headers: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Row:
    """
    Args:
        rpc, message: None for what only HTTP has.
        code: The gRPC code's name; "OK" for what is taken.
        triton, triton_words: What Triton 2.51 answers instead, a deliberate difference; "-" for what kills it.
    """

    code: str
    words: str
    rpc: str = ""
    message: Callable[[], Message] | None = None
    http: Http | None = None
    triton: str = ""
    triton_words: str = ""


def infer(
    model: str = "line_FP32",
    name: str = "x",
    datatype: str = "FP32",
    shape: Sequence[int] = (1,),
    raw: bytes | None = ONE,
    *,
    more: Callable[[Any], object] | None = None,
    **fields: str,
) -> Callable[[], Message]:
    """A ModelInferRequest with one input; `more` changes it."""

    def make() -> Message:
        message = pb.ModelInferRequest(model_name=model, id="r1", **fields)
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        if raw is not None:
            message.raw_input_contents.append(raw)
        if more is not None:
            more(message)
        made: Message = message
        return made

    return make


def json_infer(
    model: str = "line_FP32",
    name: str = "x",
    datatype: str = "FP32",
    shape: Sequence[int] = (1,),
    data: Any = (1.0,),
    *,
    version: str = "",
    tensor: Mapping[str, Any] | None = None,
    **differs: Any,
) -> Http:
    """The same by JSON; `tensor` is more of the input, `differs` of the request's body or of the answer."""
    fields = {"name": name, "datatype": datatype, "shape": list(shape)}
    if data is not None:
        fields["data"] = data
    answer = {key: differs.pop(key) for key in ("status", "words", "triton", "triton_words") if key in differs}
    body = {"id": "r1", "inputs": [fields | dict(tensor or {})], **differs}
    return Http(f"/v2/models/{model}{f'/versions/{version}' if version else ''}/infer", body, **answer)


def binary(
    model: str = "line_FP32", datatype: str = "FP32", shape: Sequence[int] = (1,), raw: bytes = ONE, **differs: Any
) -> Http:
    """One input in the binary extension's form."""
    tensor = {"name": "x", "datatype": datatype, "shape": list(shape), "parameters": {"binary_data_size": len(raw)}}
    head = json.dumps({"id": "r1", "inputs": [tensor]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return Http(f"/v2/models/{model}/infer", head + raw, headers=headers, **differs)


def parameters(**values: Any) -> Callable[[Any], object]:
    """Put request parameters into a message: by the oneof's member, `timeout=("string_param", "1")`; None: unset."""

    def change(message: Any) -> None:
        for key, value in values.items():
            if value is None:
                message.parameters[key].SetInParent()
            else:
                setattr(message.parameters[key], *value)

    return change
