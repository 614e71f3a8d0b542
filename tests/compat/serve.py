"""`python -m tests.compat.serve`: a mesh of ours on the suite's models, until standard input ends.

It prints one line of JSON when it is ready: what `Server` is made of. Its exit status says whether every process ended
well, left nothing behind and wrote nothing alarming.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import uvloop

from tests.compat.repository import write_repository
from tests.e2e.mesh import Service, running_mesh

STAGES = str(Path(__file__).with_name("stages.py"))
ENVIRON = {"TENSORLINE_MODEL_CONTROL_MODE": "explicit", "TENSORLINE_LOAD_MODEL": "*"}
EXPECTED = ('"failed to load model"', '"model failed"')


async def serve() -> None:
    with tempfile.TemporaryDirectory(prefix="compat-") as folder:
        repository = Path(folder)
        write_repository(repository, is_triton=False)
        async with running_mesh(repository, services={"stages": Service(STAGES)}, extra_env=ENVIRON) as mesh:
            mesh.expected += EXPECTED
            ports = {"grpc": mesh.grpc_port, "http": mesh.http_port, "metrics": mesh.metrics_port}
            print(json.dumps({name: f"127.0.0.1:{port}" for name, port in ports.items()}), flush=True)
            await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(serve())
