"""Regions of system shared memory through every published client."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from tests.compat.clients import Client
from tests.compat.server import Server

PAGE = 4096


@contextmanager
def memory(byte_size: int = PAGE) -> Iterator[tuple[str, Any]]:
    """Name and handle of a new region of this process."""
    name = f"compat_{uuid.uuid4().hex[:12]}"
    handle = shm.create_shared_memory_region(name, f"/{name}", byte_size)
    try:
        yield name, handle
    finally:
        shm.destroy_shared_memory_region(handle)


async def statuses(client: Client, name: str = "") -> list[dict[str, Any]]:
    """Rows of the status, alike for all clients."""
    found = await client.get_system_shared_memory_status(name)
    rows = list(found.get("regions", {}).values()) if client.is_grpc else found
    return [
        {"name": row["name"], "key": row["key"], **{key: int(row.get(key, 0)) for key in ("offset", "byte_size")}}
        for row in rows
    ]


async def test_register_status_unregister(client: Client) -> None:
    with memory(2 * PAGE) as (name, _):
        await client.register_system_shared_memory(name, f"/{name}", PAGE, offset=PAGE)
        assert await statuses(client, name) == [{"name": name, "key": f"/{name}", "offset": PAGE, "byte_size": PAGE}]
        assert name in [row["name"] for row in await statuses(client)]
        with client.refused("ALREADY_EXISTS", f"shared memory region '{name}' already in manager"):
            await client.register_system_shared_memory(name, f"/{name}", PAGE)
        await client.unregister_system_shared_memory(name)
        await client.unregister_system_shared_memory(name)  # unknown by now: no error
        with client.refused("NOT_FOUND", f"Unable to find system shared memory region: '{name}'"):
            await statuses(client, name)


async def test_unregister_all(client: Client) -> None:
    with memory() as (one, _), memory() as (other, _):
        for name in (one, other):
            await client.register_system_shared_memory(name, f"/{name}", PAGE)
        await client.unregister_system_shared_memory()
        assert await statuses(client) == []


async def test_tensors_in_and_out(client: Client) -> None:
    """Input and outputs in one region, at odd offsets too."""
    a, b = np.arange(16, dtype=np.int32).reshape(1, 16), np.full((1, 16), 7, np.int32)
    with memory() as (name, handle):
        shm.set_shared_memory_region(handle, [a], offset=1)
        shm.set_shared_memory_region(handle, [b], offset=65)
        await client.register_system_shared_memory(name, f"/{name}", PAGE)
        inputs = [client.module.InferInput(each, [1, 16], "INT32") for each in "AB"]
        inputs[0].set_shared_memory(name, 64, offset=1)
        inputs[1].set_shared_memory(name, 64, offset=65)
        outputs = [client.output("SUM"), client.output("DIFF", binary_data=True)]
        outputs[0].set_shared_memory(name, 100, offset=1000)  # more room than needed is fine
        try:
            result = await client.infer("simple", inputs, outputs)
        finally:
            await client.unregister_system_shared_memory(name)
        assert client.shape(result, "SUM") == [1, 16]
        np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.int32, [1, 16], 1000), a + b)
        np.testing.assert_array_equal(result.as_numpy("DIFF"), a - b)


async def test_text_in_shared_memory(client: Client) -> None:
    """A01: opaque bytes."""
    text = np.array([b"a\0b", b"\0\0", b"", b"\xff\xfe\0", "café".encode()], np.object_)
    data = serialize_byte_tensor(text).item()
    with memory() as (name, handle):
        shm.set_shared_memory_region(handle, [np.frombuffer(data, np.uint8)])
        await client.register_system_shared_memory(name, f"/{name}", PAGE)
        tensor = client.module.InferInput("x", [5], "BYTES")
        tensor.set_shared_memory(name, len(data))
        output = client.output("y")
        output.set_shared_memory(name, 512, offset=1024)
        try:
            await client.infer("line_BYTES", [tensor], [output])
        finally:
            await client.unregister_system_shared_memory(name)
        came = shm.get_contents_as_numpy(handle, np.uint8, [len(data)], 1024).tobytes()
        assert came == data


async def test_a_window_begins_where_it_was_registered(client: Client, server: Server) -> None:
    """Offset 0 of a region is its registered offset. Triton 2.51 applies that twice; see protocol.md §7.1."""
    values = np.arange(4, dtype=np.float32)
    with memory(2 * PAGE) as (name, handle):
        shm.set_shared_memory_region(handle, [values], offset=PAGE)
        await client.register_system_shared_memory(name, f"/{name}", PAGE, offset=PAGE)
        tensor = client.module.InferInput("x", [4], "FP32")
        tensor.set_shared_memory(name, 16)
        try:
            if server.is_triton:
                pytest.skip("reads foreign memory there")
            result = await client.infer("line_FP32", [tensor])
        finally:
            await client.unregister_system_shared_memory(name)
        np.testing.assert_array_equal(result.as_numpy("y"), values)


async def test_bounds(client: Client) -> None:
    """E08."""
    with memory() as (name, handle):
        shm.set_shared_memory_region(handle, [np.ones(4, np.float32)])
        with client.refused("INVALID_ARGUMENT", f"failed to register shared memory region '{name}'"):
            await client.register_system_shared_memory(name, f"/{name}", 2 * PAGE)
        with client.refused("INVALID_ARGUMENT", f"failed to register shared memory region '{name}'"):
            await client.register_system_shared_memory(name, f"/{name}", 2**63, offset=2**63)
        await client.register_system_shared_memory(name, f"/{name}", PAGE)
        try:
            for offset, size, words in (
                (PAGE, 16, f"Invalid offset for shared memory region: '{name}'"),
                (PAGE + 1, 16, f"Invalid offset for shared memory region: '{name}'"),
                (PAGE - 15, 16, f"Invalid offset + byte size for shared memory region: '{name}'"),
                (0, 12, "input byte size mismatch for input 'x' for model 'line_FP32'. Expected 16, got 12"),
            ):
                tensor = client.module.InferInput("x", [4], "FP32")
                tensor.set_shared_memory(name, size, offset=offset)
                with client.refused("INVALID_ARGUMENT", words):
                    await client.infer("line_FP32", [tensor])
            tensor.set_shared_memory(name, 16)
            output = client.output("y")
            output.set_shared_memory(name, 8, offset=64)
            with client.refused("INTERNAL", "shared memory size specified with the request for output 'y' (8 bytes)"):
                await client.infer("line_FP32", [tensor], [output])
        finally:
            await client.unregister_system_shared_memory(name)


@pytest.mark.parametrize("key", ["/compat_nobody", "/../etc/passwd", "/../shm/../../etc/passwd"])
async def test_keys_that_are_no_memory(client: Client, key: str) -> None:
    """E08, I03. The code is INTERNAL on Triton, for the first; what matters is that nothing is opened."""
    with pytest.raises(InferenceServerException):
        await client.register_system_shared_memory("none", key, PAGE)
    assert "none" not in [row["name"] for row in await statuses(client)]


async def test_unknown_regions(client: Client) -> None:
    tensor = client.module.InferInput("x", [4], "FP32")
    tensor.set_shared_memory("nowhere", 16)
    with client.refused("NOT_FOUND", "Unable to find shared memory region: 'nowhere'"):
        await client.infer("line_FP32", [tensor])


async def test_no_gpu_no_device_memory(client: Client) -> None:
    found = await client.get_cuda_shared_memory_status()
    assert (found.get("regions", {}) if client.is_grpc else found) in ({}, [])
    with client.refused("NOT_FOUND", "Unable to find cuda shared memory region: 'nowhere'"):
        await client.get_cuda_shared_memory_status("nowhere")
    await client.unregister_cuda_shared_memory()
    await client.unregister_cuda_shared_memory("nowhere")
