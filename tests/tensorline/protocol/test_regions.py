"""The shared-memory parameters of tensors: which bytes belong to which input, and what is refused in Triton's words."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorline.errors import InvalidTensorError
from tensorline.protocol import wire
from tensorline.protocol.codec import decode_request, encode_response
from tensorline.protocol.infer import InferRequest, InferResponse, ParameterValue, RegionUse, RequestedOutput
from tensorline.protocol.regions import region_use
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.protocol.wire import decode_request_wire, encode_response_wire
from tensorline.tensor import Tensor

REGION, SIZE, OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"
P = pb.InferParameter
Input = pb.ModelInferRequest.InferInputTensor
WHAT = "input tensor 'x' for model 'm'"


def use(region: str = "r", byte_size: int = 2, offset: int | None = None) -> dict[str, P]:
    parameters = {REGION: P(string_param=region), SIZE: P(int64_param=byte_size)}
    return parameters if offset is None else {**parameters, OFFSET: P(int64_param=offset)}


def tensor(name: str, parameters: dict[str, P] | None = None, **contents: Any) -> Input:
    filled = {"contents": pb.InferTensorContents(**contents)} if contents else {}
    return Input(name=name, datatype="UINT8", shape=[2], parameters=parameters, **filled)


def request(*inputs: Input, raw: tuple[bytes, ...] = ()) -> pb.ModelInferRequest:
    return pb.ModelInferRequest(model_name="m", inputs=inputs, raw_input_contents=raw)


def both_ways(message: pb.ModelInferRequest, monkeypatch: pytest.MonkeyPatch) -> InferRequest:
    """Decoded by protobuf and taken apart by hand."""
    decoded = decode_request(message)
    monkeypatch.setattr(wire, "LARGE", 0)
    by_hand = decode_request_wire(message.SerializeToString())
    assert (by_hand.inputs, by_hand.regions, by_hand.is_typed) == (decoded.inputs, decoded.regions, decoded.is_typed)
    return decoded


def data_of(decoded: InferRequest) -> list[object]:
    return [each.data for each in decoded.inputs]


def test_raw_entries_are_of_those_that_are_in_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [tensor("a", use("one")), tensor("b"), tensor("c", use("two", 2, 5)), tensor("d")]
    decoded = both_ways(request(*inputs, raw=(b"bb", b"dd", b"surplus")), monkeypatch)
    assert data_of(decoded) == [None, b"bb", None, b"dd"]
    assert decoded.regions == {"a": RegionUse("one", 0, 2), "c": RegionUse("two", 5, 2)}
    assert [each.name for each in decoded.inputs] == ["a", "b", "c", "d"]


def test_typed_contents_beside_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = both_ways(request(tensor("a", use()), tensor("b", uint_contents=[1, 2])), monkeypatch)
    assert (data_of(decoded), decoded.is_typed) == ([None, b"\1\2"], True)


def test_all_in_regions_is_not_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = both_ways(request(tensor("a", use()), tensor("b", use())), monkeypatch)
    assert (data_of(decoded), decoded.is_typed, len(decoded.regions)) == ([None, None], False, 2)


def test_a_surplus_raw_entry_beside_regions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_of(both_ways(request(tensor("a", use()), raw=(b"xx",)), monkeypatch)) == [None]


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({REGION: P(string_param="r")}, f"'{SIZE}' must be specified along with '{REGION}' for {WHAT}"),
        ({SIZE: P(int64_param=2)}, f"'{SIZE}' can not be specified without '{REGION}' for {WHAT}"),
        ({OFFSET: P(int64_param=2)}, f"'{OFFSET}' can not be specified without '{REGION}' for {WHAT}"),
        (
            {**use(), REGION: P(int64_param=1)},
            f"invalid value type for '{REGION}' parameter for {WHAT}: got int64_param",
        ),
        (
            {**use(), SIZE: P(string_param="2")},
            f"'{SIZE}' parameter for {WHAT}: got string_param, expected int64_param",
        ),
        ({**use(), SIZE: P(uint64_param=2)}, "got uint64_param, expected int64_param"),
        ({**use(), SIZE: P(double_param=2)}, "got double_param, expected int64_param"),
        (
            {**use(), OFFSET: P(bool_param=True)},
            f"'{OFFSET}' parameter for {WHAT}: got bool_param, expected int64_param",
        ),
        ({**use(), OFFSET: P()}, "got none, expected int64_param"),
    ],
)
def test_parameters_that_are_refused(parameters: dict[str, P], text: str) -> None:
    for message in (request(tensor("x", parameters)), request(tensor("x", parameters), raw=(b"ab",))):
        with pytest.raises(InvalidTensorError) as caught:
            decode_request(message)
        assert text in str(caught.value)
    message = request(tensor("x"), raw=(b"ab",))
    message.outputs.add(name="y", parameters=parameters)
    with pytest.raises(InvalidTensorError) as caught:
        decode_request(message)
    assert text.replace(WHAT, "output 'y'") in str(caught.value)


@pytest.mark.parametrize("raw", [(), (b"ab",)])
def test_contents_and_a_region(raw: tuple[bytes, ...]) -> None:
    with pytest.raises(InvalidTensorError, match="unexpected 'content' provided when using shared memory for input"):
        decode_request(request(tensor("x", use(), uint_contents=[1, 2]), raw=raw))


def test_too_few_raw_entries_beside_a_region() -> None:
    message = request(tensor("a"), tensor("b", use()), tensor("c"), raw=(b"aa",))
    with pytest.raises(InvalidTensorError, match="unable to find data for input tensor 'c' for model 'm'"):
        decode_request(message)


def test_outputs_in_regions() -> None:
    message = request(tensor("x"), raw=(b"ab",))
    message.outputs.add(name="y", parameters=use("out", 100, 7))
    message.outputs.add(name="z")
    assert decode_request(message).outputs == [
        RequestedOutput("y", region=RegionUse("out", 7, 100)),
        RequestedOutput("z"),
    ]


def test_a_region_and_classes_are_refused() -> None:
    message = request(tensor("x"), raw=(b"ab",))
    message.outputs.add(name="y", parameters={**use(), "classification": P(int64_param=3)})
    text = "output can't set both 'shared_memory_region' and 'classification'"
    with pytest.raises(InvalidTensorError, match=text):
        decode_request(message)


@given(st.integers(), st.integers())
def test_any_integer_is_taken_here(offset: int, byte_size: int) -> None:
    """They are looked at where the region is known."""
    kinds: dict[str, tuple[str, ParameterValue]] = {
        REGION: ("string_param", "r"),
        SIZE: ("int64_param", byte_size),
        OFFSET: ("int64_param", offset),
        "other": ("double_param", 1.0),
    }
    assert region_use(WHAT, kinds) == RegionUse("r", offset, byte_size)


def test_no_region() -> None:
    assert region_use(WHAT, {"other": ("double_param", 1.0)}) is None


OUTPUTS = [Tensor("y", "UINT8", (2,), b""), Tensor("z", "UINT8", (1,), b"z")]
RESPONSE = InferResponse("m", "1", "", OUTPUTS, regions={"y": RegionUse("r", 0, 9)})


def test_an_output_in_a_region_has_an_empty_entry() -> None:
    message = encode_response(RESPONSE)
    assert list(message.raw_output_contents) == [b"", b"z"]
    assert list(message.outputs[0].shape) == [2]
    assert pb.ModelInferResponse.FromString(encode_response_wire(RESPONSE)) == message


def test_an_output_in_a_region_has_no_contents() -> None:
    message = encode_response(RESPONSE, is_typed=True)
    assert [each.HasField("contents") for each in message.outputs] == [False, True]
    assert list(message.raw_output_contents) == []
    assert pb.ModelInferResponse.FromString(encode_response_wire(RESPONSE, is_typed=True)) == message
