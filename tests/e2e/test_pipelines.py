"""Pipelines over three processes: branches, failures half-way, what is released when, and what travels along."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from grpc import StatusCode

from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tests.e2e.client import Stub, arrays, failure, infer, outcome, request
from tests.e2e.mesh import Mesh, running_mesh, until
from tests.e2e.models import CHAIN, chain_repositories, chain_services, ensemble, model, write_chain

SIZES = [64 << 10, 1 << 20, 16 << 20]
SOCKET_BYTES = 64 << 10
"""Of one request, through the sockets of all stages together (issue 2, bench c)."""


def write_models(root: Path) -> None:
    pipelines = root / "pipelines"
    write_chain(root, "passing")
    write_chain(root, "copying", parameters={"mode": "copy"})
    write_chain(root, "echo", "echo", datatype="BYTES", dims="1")
    write_chain(root, "adding", "add")
    model(root / "pre", "split", "add", outputs=("once", "twice"))
    model(root / "mid", "left", "add", parameters={"by": "10"})
    model(root / "post", "right", "add", parameters={"by": "100"})
    model(root / "mid", "join", "add", inputs=("p", "q"), parameters={"by": "0"})
    model(root / "post", "boom", "boom")
    model(root / "post", "wait", "identity", parameters={"execute_delay_ms": "2600"})
    model(
        root / "pre", "versioned", "echo", datatype="BYTES", dims="1", versions=(1, 3), text="version_policy {all {}}"
    )
    steps = [
        ("split", {"x": "x"}, {"once": "a", "twice": "b"}),
        ("left", {"x": "a"}, {"y": "c"}),
        ("right", {"x": "b"}, {"y": "d"}),
        ("join", {"p": "c", "q": "d"}, {"y": "y"}),
    ]
    ensemble(pipelines, "diamond", steps)
    ensemble(pipelines, "forked", steps[:3], outputs=("c", "d"))
    ensemble(pipelines, "half_used", [("split", {"x": "x"}, {"twice": "a"}), ("left", {"x": "a"}, {"y": "y"})])
    ensemble(pipelines, "failing", [("left", {"x": "x"}, {"y": "a"}), ("boom", {"x": "a"}, {"y": "y"})])
    ensemble(pipelines, "half_failing", [*steps[:2], ("boom", {"x": "b"}, {"y": "d"}), steps[3]])
    ensemble(pipelines, "waiting", [("left", {"x": "x"}, {"y": "a"}), ("wait", {"x": "a"}, {"y": "y"})])
    pair, delay = "instance_group [ { count: 2 } ]", {"execute_delay_ms": "500"}
    gathering = "dynamic_batching { max_queue_delay_microseconds: 100000 }"
    model(root / "pre", "gather", "identity", batch=8, text=gathering, parameters={"mode": "copy"})
    model(root / "pre", "hold", "identity", batch=8, text=pair, parameters=delay)
    model(root / "pre", "after", "identity", batch=8, text=pair, parameters={**delay, "mode": "copy"})
    steps = [("gather", {"x": "x"}, {"y": "a"}), ("hold", {"x": "a"}, {"y": "b"}), ("after", {"x": "b"}, {"y": "y"})]
    ensemble(pipelines, "sharing", steps, batch=8)
    ensemble(pipelines, "outer", [("diamond", {"x": "x"}, {"y": "y"})])
    for version in (-1, 1, 3):
        name = "newest" if version < 0 else f"version_{version}"
        step = ("versioned", {"x": "x"}, {"y": "y"})
        ensemble(pipelines, name, [step], datatype="BYTES", dims="1", version=version)
    ensemble(pipelines, "version_2", [("versioned", {"x": "x"}, {"y": "y"})], datatype="BYTES", dims="1", version=2)


@pytest.fixture(scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    root = tmp_path_factory.mktemp("repository")
    write_models(root)
    async with running_mesh(
        root,
        services=chain_services(root),
        gateway_repositories=chain_repositories(root),
        gateway_env={"TENSORLINE_STRICT_READINESS": "false"},
    ) as mesh:
        await mesh.wait_instances(3)
        yield mesh


@pytest.fixture(scope="module")
async def stub(mesh: Mesh) -> AsyncIterator[Stub]:
    async with mesh.stub() as stub:
        yield stub


X = np.array([1, 2, 3], np.float32)


@pytest.mark.parametrize("size", [3, 1 << 18])
async def test_a_diamond(mesh: Mesh, stub: Stub, size: int) -> None:
    x = np.arange(size, dtype=np.float32)
    answer = await infer(stub, "diamond", x=x)
    np.testing.assert_array_equal(answer["y"], (x + 1 + 10) + ((x + 1) * 2 + 100))
    await mesh.wait_idle()


async def test_what_is_not_asked_for_does_not_run(mesh: Mesh, stub: Stub) -> None:
    series = 'nv_inference_request_success{model="right",version="1"}'
    before = (await mesh.metrics())[series]
    answer = arrays(await stub.ModelInfer(request("forked", ["c"], x=X)))
    assert {name: array.tolist() for name, array in answer.items()} == {"c": (X + 11).tolist()}
    assert (await mesh.metrics())[series] == before
    assert set(await infer(stub, "forked", x=X)) == {"c", "d"}
    assert (await mesh.metrics())[series] == before + 1


async def test_an_output_that_nothing_reads(mesh: Mesh, stub: Stub) -> None:
    x = np.ones(1 << 18, np.float32)
    assert (await infer(stub, "half_used", x=x))["y"][0] == 14
    await mesh.wait_idle()


async def test_inputs_are_released_when_their_last_reader_is_done(mesh: Mesh, stub: Stub) -> None:
    x = np.ones(1 << 18, np.float32)
    flying = asyncio.ensure_future(infer(stub, "waiting", x=x))
    # The second step waits for seconds: the gateway's own block, that of the input, has gone back by then.

    async def only_the_middle() -> bool:
        held = await mesh.held()
        by_service = {row["service"]: row["arena_bytes"] for row in await mesh.instances()}
        return "gateway" not in held and held.get("in flight") == 1 and by_service["mid"] >= 1 << 20

    await until(only_the_middle, 2.4)
    assert (await flying)["y"][0] == 11
    await mesh.wait_idle()


async def test_a_step_fails_half_way(mesh: Mesh, stub: Stub) -> None:  # E01
    series = 'nv_inference_request_failure{model="boom",reason="BACKEND",version="1"}'
    before = (await mesh.metrics())[series]
    big = np.full(1 << 18, 20, np.float32)
    bad = big.copy()
    bad[100] = -3  # plus 10 is 7
    calls = [stub.ModelInfer(request("failing", id=f"e{at}", x=bad if at == 4 else big)) for at in range(10)]
    answers = await asyncio.gather(*map(outcome, calls))
    assert [at for at, answer in enumerate(answers) if answer is not None] == [4]
    found = await failure(stub.ModelInfer(request("failing", id="e10", x=bad)))
    assert (found.code, found.text) == (StatusCode.INTERNAL, "in ensemble 'failing', model 'boom': bad row")
    assert (await mesh.metrics())[series] == before + 2
    await mesh.wait_idle()


async def test_one_branch_fails_while_the_other_runs(mesh: Mesh, stub: Stub) -> None:
    x = np.full(1 << 18, 2.5, np.float32)  # plus 1, doubled: 7
    for _ in range(20):
        assert "bad row" in (await failure(stub.ModelInfer(request("half_failing", x=x)))).text
    np.testing.assert_array_equal((await infer(stub, "half_failing", x=X))["y"], (X + 11) + (X + 1) * 2)
    await mesh.wait_idle()


async def test_a_cancel_takes_no_block_from_its_neighbour(mesh: Mesh, stub: Stub) -> None:
    """Two requests in one block, which the step that runs passes on: the block is given back once for each."""
    x = np.ones((1, 1 << 16), np.float32)
    leaving = stub.ModelInfer(request("sharing", x=x))
    staying = asyncio.ensure_future(infer(stub, "sharing", x=x * 2))
    flying = asyncio.ensure_future(failure(leaving))
    await asyncio.sleep(0.35)
    leaving.cancel()
    np.testing.assert_array_equal((await staying)["y"], x * 2)
    with pytest.raises(asyncio.CancelledError):
        await flying
    await mesh.wait_idle()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["passing", "copying", "adding"])
async def test_tensors_do_not_travel(mesh: Mesh, stub: Stub, name: str, size: int) -> None:
    """Whatever the size: what the stages read and write is handles."""
    count = 5
    sent = [np.full(size // 4, number, np.float32) for number in range(count)]
    by = 3 if name == "adding" else 0
    await infer(stub, name, x=sent[0])
    before = mesh.io_bytes(*CHAIN)
    for x in sent:
        assert (await infer(stub, name, x=x))["y"].tobytes() == (x + by).tobytes()
    assert (mesh.io_bytes(*CHAIN) - before) / count < SOCKET_BYTES
    await mesh.wait_idle()


def story(answer: pb.ModelInferResponse) -> list[dict[str, object]]:
    (text,) = arrays(answer)["y"].tolist()
    return list(json.loads(text))


async def test_what_must_travel_travels(mesh: Mesh, stub: Stub) -> None:  # E04; the trace id: test_traces.py
    message = request("echo", id="id 7", x=np.array([b""], object))
    values = {
        "bool_param": True,
        "int64_param": -(2**63),
        "string_param": "ü",
        "double_param": 1.0,
        "uint64_param": 2**64 - 1,
    }
    for kind, value in values.items():
        setattr(message.parameters[f"a {kind}"], kind, value)
    message.parameters["priority"].int64_param = 2
    message.parameters["sequence_id"].int64_param = 7
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    told = story(await stub.ModelInfer(message))
    assert [each["model"] for each in told] == ["echo_pre", "echo_mid", "echo_post"]
    assert len({each["pid"] for each in told}) == 3
    for each in told:
        assert each["id"] == "id 7"
        assert each["parameters"] == {f"a {kind}": value for kind, value in values.items()}
        assert each["kinds"] == {
            "a bool_param": "bool",
            "a int64_param": "int",
            "a string_param": "str",
            "a double_param": "float",
            "a uint64_param": "int",
        }
        assert each["wanted"] == ["y"]


async def test_the_answer_of_a_pipeline_says_its_sequence(stub: Stub) -> None:
    message = request("adding", x=X)
    message.parameters["sequence_id"].string_param = "s"
    message.parameters["sequence_start"].bool_param = True
    answer = (await stub.ModelInfer(message)).parameters
    assert answer["sequence_id"].string_param == "s"
    assert (answer["sequence_start"].bool_param, answer["sequence_end"].bool_param) == (True, False)


@pytest.mark.parametrize(("name", "version"), [("newest", 3), ("version_1", 1), ("version_3", 3)])
async def test_steps_run_the_version_they_name(stub: Stub, name: str, version: int) -> None:
    answer = await stub.ModelInfer(request(name, x=np.array([b""], object)))
    assert [each["version"] for each in story(answer)] == [version]
    assert answer.model_version == "1"  # the pipeline's own


async def test_a_step_of_a_version_that_is_not_there(mesh: Mesh, stub: Stub) -> None:
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name="version_2"))).ready
    found = await failure(stub.ModelInfer(request("version_2", x=np.array([b""], object))))
    assert found.code is StatusCode.UNAVAILABLE
    assert "'versioned' version 2" in found.text


async def test_pipelines_in_pipelines_are_refused_clearly(mesh: Mesh, stub: Stub) -> None:
    """They come with a later release; until then nobody should look for a service that is down."""
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name="outer"))).ready
    found = await failure(stub.ModelInfer(request("outer", x=X)))
    assert found.code is StatusCode.UNAVAILABLE
    assert "step 'diamond' is itself a pipeline" in found.text
    rows = {row["name"]: row for row in (await mesh.get("/api/models"))[1]}
    assert "step 'diamond' is itself a pipeline" in rows["outer"]["reason"]
