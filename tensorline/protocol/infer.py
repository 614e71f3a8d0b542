"""An inference request and its response as our own values, whatever front end they came through."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tensorline.tensor import RANK_LIMIT, Tensor

__all__ = [
    "LIMITS",
    "NO_OPTIONS",
    "InferRequest",
    "InferResponse",
    "Limits",
    "ParameterValue",
    "RegionUse",
    "RequestOptions",
    "RequestedOutput",
    "shown",
]

ParameterValue = bool | int | str | float
"""A custom parameter. Signed and unsigned 64-bit integers are both `int`; what is over 2^63-1 travels unsigned."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may have of each. Lengths of text in UTF-8 bytes."""

    inputs: int = 1024
    outputs: int = 1024
    parameters: int = 256
    parameter_key: int = 128
    parameter_value: int = 64 << 10
    request_id: int = 64 << 10
    rank: int = RANK_LIMIT


LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The reserved request parameters: for schedulers, never shown to a model as parameters."""

    sequence_id: int | str = 0
    """0 or "": not in a sequence."""
    sequence_start: bool = False
    sequence_end: bool = False
    priority: int = 0
    """0: the model's default level; 1 is the highest."""
    timeout_us: int = 0
    """Of the queue, where the model allows it; not the call's deadline."""
    empty_final_response: bool = False


NO_OPTIONS: Final = RequestOptions()


class RegionUse(NamedTuple):
    """Where in a client's shared memory a tensor is, or is to go."""

    region: str
    """As the client registered it."""
    offset: int
    """Bytes from the registered window's begin. Whatever integer the client wrote: checked where it is used."""
    byte_size: int
    """Of an input; of an output the room that it has."""


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    name: str
    classification: int = 0
    """Top classes wanted in place of the tensor; 0: the tensor."""
    region: RegionUse | None = None
    """None: the bytes are wanted in the response."""


@dataclass(frozen=True, slots=True)
class InferRequest:
    model: str
    version: str
    """As the client wrote it; empty: the newest that is ready."""
    id: str
    inputs: Sequence[Tensor]
    outputs: Sequence[RequestedOutput] = ()
    """Empty: all of them."""
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    """Custom ones, which models see."""
    options: RequestOptions = NO_OPTIONS
    is_typed: bool = False
    """Tensors came as typed contents, and are answered so."""
    regions: Mapping[str, RegionUse] = field(default_factory=dict)
    """By input name, for inputs in a client's shared memory; the `data` of their tensors is empty until it is read."""


@dataclass(frozen=True, slots=True)
class InferResponse:
    model: str
    version: str
    """That ran; empty in a bare final response."""
    id: str
    outputs: Sequence[Tensor]
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    is_final: bool = True
    """Nothing follows for its request. Without outputs: a decoupled model's end alone, no response of its own."""
    regions: Mapping[str, RegionUse] = field(default_factory=dict)
    """By output name, for outputs that were written to a client's shared memory; they carry no bytes."""


def shown(text: str, limit: int = 128) -> str:
    """A client's text as an error repeats it: cut, so that the rest of the sentence fits."""
    return text if len(text) <= limit else text[:limit] + "…"
