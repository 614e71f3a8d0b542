"""Run in a mount namespace of its own, with a /dev/shm of 64 MiB: a mesh whose arenas could grow to more than that."""

import asyncio
import sys
import tempfile
from pathlib import Path

import numpy as np
import uvloop
from grpc import StatusCode

from tests.e2e.client import Failure, Stub, arrays, outcome, request
from tests.e2e.mesh import running_mesh
from tests.e2e.models import chain_repositories, chain_services, write_chain


async def one(stub: Stub, megabytes: int, number: int) -> Failure | None:
    sent = np.full(megabytes << 18, number, np.float32)

    async def right() -> None:
        answer = arrays(await stub.ModelInfer(request("chain", x=sent)))
        assert np.array_equal(answer["y"], sent), "a wrong answer"

    return await outcome(right())


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_chain(root, "chain", parameters={"mode": "copy"})
        async with (
            running_mesh(
                root,
                services=chain_services(root),
                gateway_repositories=chain_repositories(root),
                extra_env={"TENSORLINE_ARENA_BYTES": str(30 << 20)},
            ) as mesh,
            mesh.stub() as stub,
        ):
            pids = {name: mesh.pid(name) for name in mesh.names}
            for _ in range(2):
                too_big = await one(stub, 100, 1)
                assert too_big is not None
                assert too_big.code is StatusCode.RESOURCE_EXHAUSTED, too_big
                answers = await asyncio.gather(*(one(stub, 15, number) for number in range(10)))
                codes = [StatusCode.OK if answer is None else answer.code for answer in answers]
                assert set(codes) <= {StatusCode.OK, StatusCode.RESOURCE_EXHAUSTED}, answers
                assert StatusCode.OK in codes, answers
                for answer in answers:
                    assert answer is None or "/" not in answer.text, answer
                small = await asyncio.gather(*(one(stub, 1, number) for number in range(8)))
                assert small == [None] * 8, small
                await mesh.wait_idle()
            assert pids == {name: mesh.pid(name) for name in mesh.names}
    print("alive")


if __name__ == "__main__":
    sys.path.insert(0, ".")
    uvloop.run(main())
