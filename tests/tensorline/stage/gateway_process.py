"""A gateway as a process of its own: `gateway_process.py TARGET DIRECTORY` holds one answer and has one in flight."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import uvloop

from tensorline.rpc.connecting import connect_stage
from tensorline.rpc.connection import LocalPeer, StageConnection
from tensorline.rpc.frames import StageResult, Submission
from tensorline.rpc.hosted import HostedModel
from tensorline.shm import Arena, open_directory
from tensorline.tensor import Tensor


async def main(target: str, path: Path) -> None:
    directory = open_directory(path)
    held: list[StageResult] = []
    x = Tensor("x", "UINT8", (1,), np.zeros(1, np.uint8).tobytes())

    def on_models(connection: StageConnection, models: list[HostedModel]) -> None:
        connection.submit(Submission("big", "", [x]), held.append)
        connection.submit(Submission("slow", "", [x]), held.append)

    with Arena(directory, 1 << 20) as arena:
        local = LocalPeer("gateway-2", directory.nonce, arena.id, 1 << 20)
        running = asyncio.create_task(connect_stage(target, "", local, lambda _: None, on_models))
        while not held and not running.done():
            await asyncio.sleep(0.005)
        print("held", flush=True)
        await running


uvloop.run(main(sys.argv[1], Path(sys.argv[2])))
