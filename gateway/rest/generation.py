"""`generate`: a flat JSON object to a request, a response to a flat JSON object.

Source: protocol.md §13.6.
"""

from collections.abc import Sequence
from typing import Any

import orjson

from gateway.rest.inference import check_request_id
from gateway.rest.parameters import BINARY_OUTPUT, request_parameters
from gateway.rest.strict_json import kind_name, member, parse_object
from gateway.rest.tensors import decode_elements, encode_elements
from tensorline.config.model import ModelConfig, TensorSpec
from tensorline.errors import InvalidTensorError
from tensorline.protocol.infer import InferRequest, InferResponse
from tensorline.tensor import Tensor

__all__ = ["decode_generate", "encode_generate"]

PARAMETERS = "parameters"


def decode_generate(model: str, version: str, body: bytes, config: ModelConfig) -> InferRequest:
    """Members with an input's name are tensors, all others and those of `parameters` are parameters of the request.

    Raises:
        InvalidTensorError, UnsupportedError: a value that is no tensor of the input's, or no parameter.
    """
    document = parse_object(body)
    request_id = member(document, "id", str, default="") if "id" not in _names(config) else ""
    check_request_id(request_id)
    specs = {spec.name: spec for spec in config.inputs}
    inputs: list[Tensor] = []
    parameters: dict[str, Any] = {}
    for key, value in document.items():
        spec = specs.get(key)
        if spec is not None:
            inputs.append(_tensor(spec, value, is_batched=config.max_batch_size > 0))
        elif key == PARAMETERS:
            if not isinstance(value, dict):
                raise InvalidTensorError(f"Expected JSON object for keyword: '{PARAMETERS}', it is {kind_name(value)}")
            parameters |= value
        else:
            parameters[key] = value
    parameters.pop(BINARY_OUTPUT, None)  # there is no binary form here
    custom, options = request_parameters(parameters)
    return InferRequest(model, version, request_id, inputs, (), custom, options)


def _names(config: ModelConfig) -> set[str]:
    return {spec.name for spec in config.inputs}


def _tensor(spec: TensorSpec, value: Any, *, is_batched: bool) -> Tensor:
    elements = value if isinstance(value, list) else [value]
    if any(isinstance(element, list | dict) for element in elements):
        raise InvalidTensorError(
            f"Unable to parse '{spec.name}': an input is one element or a flat array of them, this is "
            f"{'nested' if isinstance(value, list) else 'an object'}"
        )
    dims = (-1, *spec.dims) if is_batched and not spec.is_shape_tensor else spec.dims
    shape = _fitted(spec.name, dims, len(elements))
    return Tensor(spec.name, spec.datatype, shape, decode_elements(spec.name, spec.datatype, shape, elements))


def _fitted(name: str, dims: Sequence[int], count: int) -> tuple[int, ...]:
    """A shape for so many elements: the innermost -1 takes what the fixed sizes leave, any other is 1.

    Raises:
        InvalidTensorError: there is none.
    """
    fixed = 1
    for size in dims:
        fixed *= size if size != -1 else 1
    innermost = max((index for index, size in enumerate(dims) if size == -1), default=None)
    fits = count == fixed if innermost is None else count % fixed == 0 if fixed else count == 0
    if not fits:
        raise InvalidTensorError(
            f"The schema can not convert input '{name}' to tensor with proper shape: it has {count} elements, the "
            f"model takes shape {list(dims)}"
        )
    rest = count // fixed if fixed else 0
    return tuple(rest if index == innermost else 1 if size == -1 else size for index, size in enumerate(dims))


def encode_generate(response: InferResponse) -> bytes:
    """
    Raises:
        InvalidTensorError: an output that JSON cannot carry.
    """
    told: dict[str, Any] = dict(response.parameters)
    for tensor in response.outputs:
        elements = encode_elements(tensor)
        told[tensor.name] = elements[0] if len(elements) == 1 else elements
    if response.id:
        told["id"] = response.id
    told["model_name"], told["model_version"] = response.model, response.version
    return orjson.dumps(told, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_SORT_KEYS)
