"""A model that is loaded and unloaded a hundred times leaves nothing behind."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
import tritonclient.grpc.aio as triton
from onnx import TensorProto, helper

from tests.e2e.mesh import STAGES, Mesh, Service, running_mesh, until
from tests.e2e.models import model, tensor, write

pytestmark = [pytest.mark.usefixtures("one_loop"), pytest.mark.slow]

CYCLES = 100
WARM = 10
GROWTH = 1.05
SERVICES = {"stages": Service(STAGES), "engine": Service("services.model")}


def onnx_identity(folder: Path) -> None:
    write(folder, f'backend: "onnxruntime" input [ {tensor("x")} ] output [ {tensor("y")} ]')
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "identity", values[:1], values[1:])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.save(made, folder / "1" / "model.onnx")


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    onnx_identity(tmp_path / "net")
    model(tmp_path, "plain", "add", parameters={"by": "0"})
    model(tmp_path, "other", "add", parameters={"by": "0"})
    explicit = {"TENSORLINE_MODEL_CONTROL_MODE": "explicit"}
    async with running_mesh(tmp_path, services=SERVICES, extra_env=explicit) as mesh:
        await mesh.wait_instances(2)
        yield mesh


def memory(mesh: Mesh) -> int:
    return sum(psutil.Process(mesh.pid(name)).memory_info().rss for name in mesh.names)


@pytest.mark.parametrize("name", ["plain", "net"])
async def test_a_hundred_cycles(mesh: Mesh, name: str) -> None:
    """F05."""
    x = triton.InferInput("x", [3], "FP32")
    x.set_data_from_numpy(np.arange(3, dtype=np.float32))
    async with triton.InferenceServerClient(mesh.target) as client:
        await client.load_model("other")

        async def latency_s() -> float:
            took = []
            for _ in range(50):
                began = time.perf_counter()
                await client.infer("other", [x])
                took.append(time.perf_counter() - began)
            return sorted(took)[len(took) // 2]

        async def is_idle() -> bool:
            return not await client.is_model_ready(name) and not await mesh.held()

        for cycle in range(CYCLES):
            await client.load_model(name)
            answer = await client.infer(name, [x])
            assert answer.as_numpy("y").tolist() == [0, 1, 2]
            await client.unload_model(name)
            if cycle == WARM:
                await until(is_idle)
                before = memory(mesh)
                footprints = {each: mesh.footprint(each) for each in mesh.names}
                quick_s = await latency_s()
        await until(is_idle)
        assert memory(mesh) < before * GROWTH
        for each, was in footprints.items():
            now = mesh.footprint(each)
            assert abs(now.descriptors - was.descriptors) <= 3
            assert abs(now.threads - was.threads) <= 2
        assert await latency_s() < quick_s * 3  # 10 % in the case; a shared machine is not that even
