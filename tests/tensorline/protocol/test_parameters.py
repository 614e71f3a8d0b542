"""Request parameters: which are custom, which reserved, and which refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorline.errors import InvalidTensorError, TensorlineError, UnsupportedError
from tensorline.protocol.infer import NO_OPTIONS, Limits, RequestOptions
from tensorline.protocol.parameters import decode_parameters, encode_parameters
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb

P = pb.InferParameter


def test_all_five_kinds_travel() -> None:
    wire = {
        "flag": P(bool_param=True),
        "count": P(int64_param=-(2**63)),
        "text": P(string_param="é"),
        "ratio": P(double_param=0.1),
        "big": P(uint64_param=2**64 - 1),
    }
    custom, options = decode_parameters(wire)
    assert custom == {"flag": True, "count": -(2**63), "text": "é", "ratio": 0.1, "big": 2**64 - 1}
    assert type(custom["flag"]) is bool
    assert options is NO_OPTIONS
    back = pb.ModelInferResponse()
    encode_parameters(custom, back.parameters)
    assert {key: back.parameters[key] for key in wire} == wire


def test_reserved_keys_are_told_apart() -> None:
    custom, options = decode_parameters(
        {
            "sequence_id": P(string_param="a"),
            "sequence_start": P(bool_param=True),
            "sequence_end": P(bool_param=True),
            "priority": P(uint64_param=2),
            "timeout": P(int64_param=-5),
            "triton_enable_empty_final_response": P(bool_param=True),
            "binary_data_output": P(bool_param=True),
        }
    )
    assert custom == {"binary_data_output": True}
    assert options == RequestOptions("a", True, True, 2, -5, True)


def test_a_negative_sequence_id_wraps() -> None:
    assert decode_parameters({"sequence_id": P(int64_param=-1)})[1].sequence_id == 2**64 - 1


@pytest.mark.parametrize(
    ("key", "value", "kind", "text"),
    [
        (
            "k",
            P(),
            InvalidTensorError,
            "invalid value type for 'k': it is unset, expected int64_param, bool_param, or ",
        ),
        (
            "sequence_id",
            P(uint64_param=1),
            InvalidTensorError,
            "got uint64_param, expected int64_param or string_param",
        ),
        (
            "sequence_id",
            P(string_param="x" * 129),
            UnsupportedError,
            "string correlation ID cannot be longer than 128 char",
        ),
        ("sequence_id", P(string_param="é" * 65), UnsupportedError, "got 130 bytes"),
        (
            "sequence_start",
            P(int64_param=1),
            InvalidTensorError,
            "invalid value type for 'sequence_start': got int64_param",
        ),
        ("sequence_end", P(string_param="1"), InvalidTensorError, "expected bool_param"),
        ("priority", P(int64_param=-1), InvalidTensorError, "invalid value -1 for 'priority', expected value >= 0"),
        ("priority", P(double_param=1), InvalidTensorError, "expected int64_param or uint64_param"),
        (
            "timeout",
            P(uint64_param=1),
            InvalidTensorError,
            "invalid value type for 'timeout': got uint64_param, expected int64",
        ),
        ("triton_enable_empty_final_response", P(int64_param=1), InvalidTensorError, "expected bool_param"),
        (
            "triton_x",
            P(int64_param=1),
            InvalidTensorError,
            "parameter keys starting with 'triton_' are reserved, got 'triton_x'",
        ),
        ("k" * 129, P(bool_param=True), InvalidTensorError, "has 129 bytes, at most 128 are allowed"),
        (
            "k",
            P(string_param="v" * 65537),
            InvalidTensorError,
            "parameter 'k' has 65537 bytes, at most 65536 are allowed",
        ),
    ],
)
def test_what_is_refused(key: str, value: pb.InferParameter, kind: type[TensorlineError], text: str) -> None:
    with pytest.raises(kind) as caught:
        decode_parameters({key: value})
    assert text in str(caught.value)


def test_limits_hold_at_the_limit_and_one_over() -> None:
    at = {f"k{index}": P(int64_param=index) for index in range(256)}
    assert len(decode_parameters(at)[0]) == 256
    with pytest.raises(InvalidTensorError, match="request has 257 parameters, at most 256 are allowed"):
        decode_parameters({**at, "one more": P(bool_param=True)})
    assert decode_parameters({"k" * 128: P(string_param="v" * 65536), "s": P(string_param="")})
    with pytest.raises(InvalidTensorError, match="at most 3"):
        decode_parameters({"abcd": P(bool_param=True)}, Limits(parameter_key=3))


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, b"x", None, [1]])
def test_what_the_wire_cannot_hold_is_not_encoded(value: object) -> None:
    with pytest.raises(TypeError):
        encode_parameters({"k": value}, pb.ModelInferResponse().parameters)  # type: ignore[dict-item]


@given(
    st.dictionaries(
        st.text(max_size=20).filter(lambda key: not key.startswith("triton_")),
        st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=50) | st.floats(allow_nan=False),
        max_size=6,
    )
)
def test_values_come_back_as_they_went(values: dict[str, bool | int | str | float]) -> None:
    message = pb.ModelInferRequest()
    encode_parameters(values, message.parameters)
    try:
        custom, _ = decode_parameters(message.parameters)
    except TensorlineError:
        return  # a reserved key with another type
    assert {key: (type(value), value) for key, value in custom.items()} == {
        key: (type(value), value) for key, value in values.items() if key in custom
    }
