"""What killed processes leave in a mesh's directory goes; what the living hold stays."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tensorline.cli.leftovers import sweep_mesh

PROCESS = """
import asyncio, socket, sys, time
from pathlib import Path
from tensorline.discovery import ServiceInstance, open_registry
from tensorline.rpc.sockets import claim_socket
from tensorline.shm import open_arena, open_directory

async def main(mesh, name):
    directory = open_directory(mesh)
    async with open_arena(directory, 1 << 20), open_registry(f"file://{mesh}/registry") as registry:
        with claim_socket(mesh / "sockets", name) as path:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            about = ServiceInstance(
                id=name, service="model", address="", local_address=f"unix:{path}", nonce=directory.nonce.hex(),
                host="here", release="1"
            )
            await registry.register(about)
            print("up", flush=True)
            await asyncio.sleep(60)

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


def start(mesh: Path, name: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen([sys.executable, "-c", PROCESS, mesh, name], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def files(mesh: Path) -> set[str]:
    return {str(path.relative_to(mesh)) for path in mesh.rglob("*") if not path.is_dir()}


def test_the_dead_ones_files_go_and_the_living_ones_stay(tmp_path: Path) -> None:
    mesh = tmp_path / "mesh"
    with start(mesh, "living") as living:
        before = files(mesh)
        with start(mesh, "dead") as dead:
            assert len(files(mesh)) == 2 * len(before) - 1, "all but the nonce"
            os.kill(dead.pid, signal.SIGKILL)
        sweep_mesh(mesh)
        assert files(mesh) == before
        living.kill()
    sweep_mesh(mesh)
    assert files(mesh) == {"nonce"}


def test_a_directory_that_is_none_of_a_mesh_is_left_alone(tmp_path: Path) -> None:
    sweep_mesh(tmp_path)
    sweep_mesh(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []
