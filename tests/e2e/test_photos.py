"""The main job, with the published clients: a photo in, labels out, across four processes."""

import asyncio
import io
import struct
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from PIL import Image
from tritonclient.utils import InferenceServerException

from examples.prepare import EXAMPLES
from examples.reference import Answer, preprocess, probabilities, top_five
from tensorline import __version__
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.tensor import Array
from tests.e2e.client import Stub, arrays, failure, infer, request
from tests.e2e.mesh import Mesh, running_mesh

CLOSE = 1e-4


@pytest.fixture(scope="module")
async def mesh(photos: list[Path]) -> AsyncIterator[Mesh]:
    async with running_mesh(EXAMPLES / "models") as mesh:
        yield mesh


@pytest.fixture(scope="module")
async def stub(mesh: Mesh) -> AsyncIterator[Stub]:
    async with mesh.stub() as stub:
        yield stub


def pile(*files: bytes) -> Array:
    """[n, 1], a file in each row."""
    array = np.empty((len(files), 1), object)
    array[:, 0] = files
    return array


def is_close(answer: dict[str, Array], row: int, want: list[Answer]) -> bool:
    assert answer["class"][row].tolist() == [index for index, _, _ in want]
    assert [label.decode() for label in answer["label"][row].tolist()] == [label for _, label, _ in want]
    np.testing.assert_allclose(answer["score"][row], [score for _, _, score in want], atol=CLOSE)
    return True


def triton_input(files: Array) -> triton.InferInput:
    tensor = triton.InferInput("image", list(files.shape), "BYTES")
    tensor.set_data_from_numpy(files)
    return tensor


async def test_photos_with_the_published_client(mesh: Mesh, photos: list[Path]) -> None:
    def classify() -> list[triton.InferResult]:
        with triton.InferenceServerClient(mesh.target) as client:
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready("classify")
            return [client.infer("classify", [triton_input(pile(photo.read_bytes()))]) for photo in photos]

    for photo, result in zip(photos, await asyncio.to_thread(classify), strict=True):
        answer = {name: result.as_numpy(name) for name in ("class", "label", "score")}
        assert is_close(answer, 0, top_five(photo))


async def test_photos_with_the_published_asynchronous_client(mesh: Mesh, photos: list[Path]) -> None:
    async with triton_aio.InferenceServerClient(mesh.target) as client:
        inputs = {photo.name: [triton_input(pile(photo.read_bytes()))] for photo in photos}
        results = await asyncio.gather(*(client.infer("classify", inputs[id], request_id=id) for id in inputs))
        for photo, result in zip(photos, results, strict=True):
            assert result.get_response().id == photo.name
            answer = {name: result.as_numpy(name) for name in ("class", "label", "score")}
            assert is_close(answer, 0, top_five(photo))


async def test_a_batch_of_photos(stub: Stub, photos: list[Path]) -> None:
    answer = await infer(stub, "classify", image=pile(*(photo.read_bytes() for photo in photos)))
    assert all(is_close(answer, row, top_five(photo)) for row, photo in enumerate(photos))


async def test_typed_contents(stub: Stub, photos: list[Path]) -> None:
    message = pb.ModelInferRequest(model_name="classify", id="t1")
    contents = message.inputs.add(name="image", datatype="BYTES", shape=[1, 1]).contents
    contents.bytes_contents.append(photos[0].read_bytes())
    response = await stub.ModelInfer(message)
    assert not response.raw_output_contents
    found = {output.name: output.contents for output in response.outputs}
    want = top_five(photos[0])
    assert list(found["class"].int64_contents) == [index for index, _, _ in want]
    assert [label.decode() for label in found["label"].bytes_contents] == [label for _, label, _ in want]
    np.testing.assert_allclose(found["score"].fp32_contents, [score for _, _, score in want], atol=CLOSE)


async def test_a_subset_of_the_outputs(stub: Stub, photos: list[Path]) -> None:
    response = await stub.ModelInfer(request("classify", ["label"], image=pile(photos[0].read_bytes())))
    assert list(arrays(response)) == ["label"]
    assert response.parameters["sequence_id"].int64_param == 0  # as every pipeline of Triton's answers


async def test_classes_of_the_network_alone(mesh: Mesh, stub: Stub, photos: list[Path]) -> None:
    pixels = preprocess(photos[0])
    message = request("efficientnet_lite0", pixels=pixels)
    message.outputs.add(name="logits").parameters["classification"].int64_param = 3
    rows = [text.decode().split(":") for text in arrays(await stub.ModelInfer(message))["logits"][0].tolist()]
    best = np.argsort(-probabilities(pixels)[0])[:3].tolist()
    assert [int(row[1]) for row in rows] == best
    direct = (await infer(stub, "efficientnet_lite0", pixels=pixels))["logits"][0]
    np.testing.assert_allclose([float(row[0]) for row in rows], direct[best], atol=CLOSE)
    for name in ("label", "class"):
        refused = request("classify", image=pile(photos[0].read_bytes()))
        refused.outputs.add(name=name).parameters["classification"].int64_param = 3
        if name == "label":
            assert "unsupported type 'BYTES'" in (await failure(stub.ModelInfer(refused))).text
        else:
            assert arrays(await stub.ModelInfer(refused))[name].shape == (1, 3)


async def test_metadata_and_configuration(mesh: Mesh) -> None:
    async with triton_aio.InferenceServerClient(mesh.target) as client:
        server = await client.get_server_metadata()
        assert (server.name, server.version) == ("tensorline", __version__)
        classify = await client.get_model_metadata("classify", as_json=True)
        assert classify["platform"] == "ensemble"
        assert classify["versions"] == ["1"]
        assert classify["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": ["-1", "1"]}]
        assert [output["shape"] for output in classify["outputs"]] == [["-1", "5"]] * 3
        network = (await client.get_model_config("efficientnet_lite0")).config
        assert (network.name, network.backend, network.max_batch_size) == ("efficientnet_lite0", "onnxruntime", 8)
        steps = (await client.get_model_config("classify")).config.ensemble_scheduling.step
        assert [step.model_name for step in steps] == ["photo_decode", "efficientnet_lite0", "imagenet_labels"]
        with pytest.raises(InferenceServerException, match="is not found"):
            await client.get_model_config("nobody")


async def test_health_and_reflection(mesh: Mesh) -> None:
    async with mesh.channel() as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        for service in ("", "classify", "photo_decode"):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=service))).status == serving
        unknown = await failure(health.Check(health_pb2.HealthCheckRequest(service="nobody")))
        assert unknown.code is StatusCode.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest(service="classify"))
        assert (await watch.read()).status == serving
        watch.cancel()

        reflecting: Any = reflection_pb2_grpc.ServerReflectionStub
        reflection = reflecting(channel).ServerReflectionInfo()
        await reflection.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = [service.name for service in (await reflection.read()).list_services_response.service]
        assert "inference.GRPCInferenceService" in names
        assert "tensorline.v1.Stage" not in names
        for name in names:
            await reflection.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
            assert (await reflection.read()).file_descriptor_response.file_descriptor_proto, name
        reflection.cancel()


ORDERS = {
    "ours first": "from tensorline.protocol.stubs.inference import grpc_service_pb2; import tritonclient.grpc",
    "theirs first": "import tritonclient.grpc; from tensorline.protocol.stubs.inference import grpc_service_pb2",
}


@pytest.mark.parametrize("order", ORDERS)
async def test_both_clients_in_one_process(mesh: Mesh, photos: list[Path], order: str) -> None:  # A20
    program = f"""
{ORDERS[order]}
import grpc, sys
import numpy as np
import tritonclient.grpc as triton
from tensorline.protocol.stubs.inference.grpc_service_pb2 import ModelInferRequest
from tensorline.protocol.stubs.inference.grpc_service_pb2_grpc import GRPCInferenceServiceStub
pixels = np.zeros((1, 3, 224, 224), np.float32)
theirs = triton.InferenceServerClient(sys.argv[1])
tensor = triton.InferInput("pixels", pixels.shape, "FP32")
tensor.set_data_from_numpy(pixels)
one = theirs.infer("efficientnet_lite0", [tensor]).as_numpy("logits")
message = ModelInferRequest(model_name="efficientnet_lite0")
message.inputs.add(name="pixels", datatype="FP32", shape=pixels.shape)
message.raw_input_contents.append(pixels.tobytes())
with grpc.insecure_channel(sys.argv[1]) as channel:
    two = GRPCInferenceServiceStub(channel).ModelInfer(message).raw_output_contents[0]
assert one.tobytes() == two
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program, mesh.target], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# ---- What is no photo.


def png(width: int, height: int) -> bytes:
    """A file that says it has so many pixels, and has none."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


def white(format: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (300, 300), "white").save(file, format)
    return file.getvalue()


NO_PHOTOS = {
    "empty": b"",
    "text": b"this is no photo at all, but it is long enough to be one",
    "cut short": white("JPEG")[:400],
    "head alone": white("PNG")[:40],
    "bomb": png(60_000, 60_000),
    "no pixels": png(300, 300),
    "other format": white("BMP"),
}


@pytest.mark.parametrize("case", NO_PHOTOS)
async def test_no_photo(mesh: Mesh, stub: Stub, case: str) -> None:
    found = await failure(stub.ModelInfer(request("classify", id="p1", image=pile(NO_PHOTOS[case]))))
    assert found.code is StatusCode.INVALID_ARGUMENT
    assert found.text.startswith("in ensemble 'classify', model 'photo_decode': ")
    assert "image" in found.text
    assert found.took_s < 1.0
    assert not any(secret in found.text for secret in ("/", "PIL", "Traceback", ".py", "0x"))


async def test_one_bad_photo_among_good_ones(stub: Stub, photos: list[Path]) -> None:
    good = photos[0].read_bytes()
    found = await failure(stub.ModelInfer(request("classify", image=pile(good, b"no photo", good))))
    assert found.code is StatusCode.INVALID_ARGUMENT


async def test_claims_and_shapes_of_photos(stub: Stub, photos: list[Path]) -> None:
    claim = request("classify", image=pile(b"x"))
    claim.raw_input_contents[0] = b"\xff\xff\xff\x7fx"
    assert "expecting string of length 2147483647" in (await failure(stub.ModelInfer(claim))).text
    many = await failure(stub.ModelInfer(request("classify", image=pile(*[b"x"] * 9))))
    assert "batch-size must be <= 8 for 'classify'" in many.text
    flat = np.array([b"x"], object)
    assert "Expected [-1,1], got [1]" in (await failure(stub.ModelInfer(request("classify", image=flat)))).text


async def test_nothing_is_held_afterwards(mesh: Mesh, stub: Stub, photos: list[Path]) -> None:
    assert is_close(await infer(stub, "classify", image=pile(photos[1].read_bytes())), 0, top_five(photos[1]))
    await mesh.wait_idle()
