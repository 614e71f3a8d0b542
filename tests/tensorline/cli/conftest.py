import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorline.cli.lines import KeptOutput
from tests.tensorline.cli.standins import api, inference

__all__ = ["api", "inference"]

MakeScript = Callable[[str, str], str]


@pytest.fixture
def output() -> KeptOutput:
    return KeptOutput()


@pytest.fixture
def script(tmp_path: Path) -> MakeScript:
    """Write a program for a child process: its path."""

    def make(name: str, body: str) -> str:
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(body))
        return str(path)

    return make


FAKE_GATEWAY = '''
"""Stands in for the gateway: HTTP alone; it is ready when every service of the mesh has left a file."""
import json, os, signal, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

mesh = Path(os.environ["TENSORLINE_MESH_DIRECTORY"])
unready = "FAKE_UNREADY" in os.environ
print("gateway is told", json.dumps({k: v for k, v in os.environ.items() if k.startswith("TENSORLINE_")}), flush=True)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        services = [path.name for path in mesh.iterdir() if path.name in ("preprocess", "model", "postprocess")]
        path = self.path.partition("?")[0]
        if path == "/v2/health/ready":
            return self.answer(200 if len(services) == 3 and not unready else 400, {})
        if path == "/api/instances":
            return self.answer(200, [{"service": name} for name in services])
        if path == "/api/models":
            down = {"name": "broken", "version": "", "state": "UNAVAILABLE", "reason": "its file is cut short"}
            up = {"name": "classify", "version": "1", "state": "READY"}
            return self.answer(200, [up, down] if unready else [up])
        self.answer(404, {"error": "nothing here"})

    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *arguments):
        pass

server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["TENSORLINE_HTTP_PORT"])), Handler)
def stop(number, frame):
    print("gateway drains", flush=True)
    threading.Thread(target=server.shutdown).start()
signal.signal(signal.SIGTERM, stop)
server.serve_forever()
'''
FAKE_SERVICE = """
import os, signal, sys, time
from pathlib import Path

name = Path(__file__).parent.name
if os.environ.get("FAKE_BROKEN") == name:
    print(f"{name}: TENSORLINE_ARENA_BYTES='x': not a size", file=sys.stderr)
    sys.exit(2)
mark = Path(os.environ["TENSORLINE_MESH_DIRECTORY"]) / name
mark.touch()
print(f'{{"event": "{name} is ready", "level": "info"}}', flush=True)
def stop(number, frame):
    if os.environ.get("FAKE_STUBBORN") == name:
        print(f"{name} goes on", flush=True)
        return
    mark.unlink()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def fake_mesh(tmp_path: Path) -> dict[str, str]:
    """An environment in which the gateway and the services are small stand-ins, with a mesh directory of its own."""
    mesh, packages = tmp_path / "mesh", tmp_path / "packages"
    mesh.mkdir()
    for package, body in [
        ("gateway", FAKE_GATEWAY),
        *((f"services/{name}", FAKE_SERVICE) for name in ("preprocess", "model", "postprocess")),
    ]:
        (packages / package).mkdir(parents=True)
        (packages / package / "__init__.py").write_text("")
        (packages / package / "__main__.py").write_text(body)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TENSORLINE_")}
    return {**kept, "PYTHONPATH": str(packages), "TENSORLINE_MESH_DIRECTORY": str(mesh)}
