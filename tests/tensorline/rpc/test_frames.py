import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorline.errors import InvalidTensorError, ResourceExhaustedError
from tensorline.protocol.stubs.tensorline.v1 import stage_pb2 as pb
from tensorline.rpc.channels import CHUNK_BYTES
from tensorline.rpc.frames import (
    UNCLAIMED_LIMIT,
    ChunkStore,
    ParameterValue,
    decode_parameters,
    decode_result,
    decode_tensor,
    encode_parameters,
    encode_tensor,
    encode_timing,
)
from tensorline.telemetry.record import StageTiming
from tensorline.tensor import DATATYPES, Handle, Tensor

MIB = 1 << 20
UINT64 = st.integers(0, (1 << 64) - 1)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
NS = st.integers(0, (1 << 63) - 1)
VALUES = st.one_of(st.booleans(), INT64, UINT64, st.text(), st.floats())
HANDLES = st.builds(Handle, st.binary(min_size=16, max_size=16), UINT64, UINT64, UINT64, UINT64)
SHAPES = st.lists(INT64, max_size=6).map(tuple)
NO_CHUNKS = ChunkStore(0)


def over_the_wire(values: Mapping[str, ParameterValue]) -> dict[str, ParameterValue]:
    sent = pb.Submit()
    encode_parameters(sent.parameters, values)
    return decode_parameters(pb.Submit.FromString(sent.SerializeToString()).parameters)


def chunk(chunk_id: int, data: bytes, total: int) -> pb.Chunk:
    return pb.Chunk(id=chunk_id, data=data, total=total)


def chunked(chunk_id: int, length: int, name: str = "x") -> pb.Tensor:
    return pb.Tensor(name=name, datatype="UINT8", shape=[length], chunked=pb.Chunked(id=chunk_id, length=length))


@given(st.dictionaries(st.text(), VALUES))
def test_parameters_come_back_with_their_kinds(values: dict[str, ParameterValue]) -> None:
    back = over_the_wire(values)
    assert back.keys() == values.keys()
    for key, value in values.items():
        assert type(back[key]) is type(value)
        assert back[key] == value or (isinstance(value, float) and math.isnan(value))


@pytest.mark.parametrize(
    "value", [True, False, 0, 1, -(1 << 63), (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -0.0, math.inf]
)
def test_parameters_at_the_edges(value: ParameterValue) -> None:
    back = over_the_wire({"k": value})["k"]
    assert (repr(back), type(back)) == (repr(value), type(value))


def test_a_parameter_of_a_kind_that_we_do_not_know_is_left_out() -> None:
    assert decode_parameters({"new": pb.Parameter(), "old": pb.Parameter(int64_value=1)}) == {"old": 1}


@given(st.text(), st.sampled_from(list(DATATYPES)), SHAPES, st.one_of(st.binary(), HANDLES))
def test_a_tensor_comes_back(name: str, datatype: str, shape: tuple[int, ...], content: bytes | Handle) -> None:
    sent = (
        Tensor(name, datatype, shape, None, content)
        if isinstance(content, Handle)
        else Tensor(name, datatype, shape, content)
    )
    wire = pb.Tensor()
    encode_tensor(wire, sent)
    assert decode_tensor(pb.Tensor.FromString(wire.SerializeToString()), NO_CHUNKS) == sent


@pytest.mark.parametrize("data", [memoryview(b"abc"), memoryview(bytearray(b"abc")), None])
def test_a_tensor_of_any_buffer_comes_back_as_bytes(data: memoryview | None) -> None:
    wire = pb.Tensor()
    encode_tensor(wire, Tensor("x", "UINT8", (3,), data))
    assert decode_tensor(wire, NO_CHUNKS).data == (b"abc" if data is not None else b"")


def test_a_tensor_without_data_is_refused_by_name() -> None:
    with pytest.raises(InvalidTensorError, match="tensor 'x' came without data"):
        decode_tensor(pb.Tensor(name="x"), NO_CHUNKS)


@given(NS, NS, NS, NS, NS, NS, NS, UINT64, st.integers(0, (1 << 32) - 1), st.text())
def test_a_timing_comes_back(
    received: int,
    queued: int,
    batched: int,
    ready: int,
    computed: int,
    written: int,
    sent: int,
    batch_id: int,
    batch_size: int,
    instance: str,
) -> None:
    timing = StageTiming(received, queued, batched, ready, computed, written, 0, batch_id, batch_size, instance)
    wire = pb.Result()
    encode_timing(wire.timing, timing, sent)
    back = decode_result(pb.Result.FromString(wire.SerializeToString()), NO_CHUNKS).timing
    wanted = StageTiming(received, queued, batched, ready, computed, written, sent, batch_id, batch_size, instance)
    assert back == wanted


@pytest.mark.parametrize("count", [0, 1, 6, 8, 100])
def test_a_timing_of_another_length_is_ignored(count: int) -> None:
    wire = pb.Result(id=1, final=True, timing=pb.Timing(ns=[1] * count, batch_id=3))
    result = decode_result(wire, NO_CHUNKS)
    assert result.timing is None
    assert result.final


def test_unknown_fields_of_a_neighbouring_release_are_ignored() -> None:
    more = b"\xa2\x06\x03new"  # field 100, a string
    result = decode_result(pb.Result.FromString(pb.Result(id=1, error="e").SerializeToString() + more), NO_CHUNKS)
    assert result.error == "e"
    frame = pb.Frame.FromString(more)
    assert frame.WhichOneof("kind") is None


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * MIB + 7])
def test_chunks_are_put_together_in_order(size: int) -> None:
    store, data = ChunkStore(8 * MIB), bytes(index % 251 for index in range(1000)) * (size // 1000 + 1)
    data = data[:size]
    for at in range(0, size, CHUNK_BYTES):
        store.add(chunk(7, data[at : at + CHUNK_BYTES], size))
    tensor = decode_tensor(chunked(7, size), store)
    assert tensor.data == data
    assert store.held_bytes == 0


def test_a_chunked_tensor_cannot_be_written_to() -> None:
    store = ChunkStore(MIB)
    store.add(chunk(1, b"abcd", 4))
    data = decode_tensor(chunked(1, 4), store).data
    assert isinstance(data, memoryview)
    assert data.readonly


def test_chunks_of_several_tensors_may_come_mixed() -> None:
    store = ChunkStore(MIB)
    for part in (chunk(1, b"ab", 4), chunk(2, b"x", 2), chunk(1, b"cd", 4), chunk(2, b"y", 2)):
        store.add(part)
    assert bytes(store.take(2, 2)) == b"xy"
    assert bytes(store.take(1, 4)) == b"abcd"


def test_a_chunk_is_taken_once() -> None:
    store = ChunkStore(MIB)
    store.add(chunk(1, b"ab", 2))
    store.take(1, 2)
    with pytest.raises(InvalidTensorError, match="refers to chunks that never came"):
        store.take(1, 2)


def test_chunks_that_are_incomplete_when_asked_for_are_refused_and_gone() -> None:
    store = ChunkStore(MIB)
    store.add(chunk(1, b"ab", 4))
    with pytest.raises(InvalidTensorError, match="a tensor's chunks hold 2 bytes of 4"):
        store.take(1, 4)
    assert store.held_bytes == 0


def test_more_bytes_than_announced_are_refused_with_all_of_their_tensor() -> None:
    store = ChunkStore(MIB)
    store.add(chunk(1, b"ab", 3))
    with pytest.raises(InvalidTensorError, match="more chunk bytes than the announced 3"):
        store.add(chunk(1, b"cd", 3))
    store.add(chunk(1, b"e", 3))
    with pytest.raises(InvalidTensorError, match="more chunk bytes than the announced 3"):
        store.take(1, 3)
    assert store.held_bytes == 0


def test_a_total_that_changes_on_the_way_is_held_to_the_first() -> None:
    store = ChunkStore(MIB)
    store.add(chunk(1, b"ab", 3))
    with pytest.raises(InvalidTensorError, match="more chunk bytes than the announced 3"):
        store.add(chunk(1, b"cd", 100))


@pytest.mark.parametrize("total", [MIB + 1, 1 << 40, (1 << 64) - 1])
def test_a_huge_total_is_refused_before_anything_is_kept(total: int) -> None:
    store = ChunkStore(MIB)
    reason = f"of {total} bytes on one stream, at most {MIB} are allowed"
    with pytest.raises(ResourceExhaustedError, match=reason):
        store.add(chunk(1, b"", total))
    assert store.held_bytes == 0
    store.add(chunk(1, b"x", total))  # what follows of it is let pass, and said once more where it is asked for
    with pytest.raises(ResourceExhaustedError, match=reason):
        store.take(1, total)


def test_the_limit_counts_all_that_is_unclaimed_together() -> None:
    store = ChunkStore(10_000)
    store.add(chunk(1, b"a", 6000))
    with pytest.raises(ResourceExhaustedError, match="at most 10000 are allowed"):
        store.add(chunk(2, b"a", 6000))
    store.drop([1, 2])
    store.add(chunk(2, b"a", 6000))


def test_chunks_of_nothing_cannot_pile_up() -> None:
    store = ChunkStore(MIB)
    for number in range(UNCLAIMED_LIMIT):
        store.add(chunk(number, b"", 0))
    with pytest.raises(ResourceExhaustedError, match="4097 tensors in chunks on one stream, at most 4096 are allowed"):
        store.add(chunk(UNCLAIMED_LIMIT, b"", 0))


def test_a_result_that_cannot_be_decoded_leaves_no_chunk_behind() -> None:
    store = ChunkStore(MIB)
    store.add(chunk(1, b"ab", 2))
    store.add(chunk(3, b"cd", 2))
    wire = pb.Result(id=1, outputs=[chunked(1, 2), chunked(2, 2), chunked(3, 2)])
    with pytest.raises(InvalidTensorError):
        decode_result(wire, store)
    assert store.held_bytes == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.binary(max_size=40), st.integers(0, 80), st.booleans()),
        max_size=40,
    )
)
def test_no_sequence_of_chunks_breaks_the_books(steps: list[tuple[int, bytes, int, bool]]) -> None:
    """Whatever comes: what is taken was sent under that id, and nothing is held once all is taken or dropped."""
    store, limit = ChunkStore(100_000), 100_000
    for chunk_id, data, total, is_taken in steps:
        try:
            if is_taken:
                assert len(store.take(chunk_id, total)) == total
            else:
                store.add(chunk(chunk_id, data, total))
        except (InvalidTensorError, ResourceExhaustedError):
            pass
        assert 0 <= store.held_bytes <= limit
    store.drop(range(4))
    assert store.held_bytes == 0
