"""Who may know whom: every import against the arrows of the design, and what may not be written anywhere."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("tensorline", "gateway", "services")
STUBS = "tensorline/protocol/stubs/"

FRAMEWORKS = frozenset(("onnxruntime", "torch", "tensorrt", "vllm"))
FRAMEWORK_HOME = "services.model"

MAY_SEE_STUBS = (
    "tensorline.protocol",
    "tensorline.rpc",
    "tensorline.config",
    "tensorline.stage.server",
    "tensorline.stage.session",  # one stream of that server
    "tensorline.cli.client",  # the other end of the gateway's wire
)
GATEWAY_FRONT_ENDS = (
    "gateway.grpc_v2",
    "gateway.grpc_stream",
    "gateway.operations",
    "gateway.rest",
    "gateway.openai",
    "gateway.http",
    "gateway.front",
)
"""Modules, or packages, of the gateway that speak a wire protocol."""
MAY_SEE_OTLP = ("tensorline.telemetry", "gateway.otlp")

FORBIDDEN_MODULES = frozenset(("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"))
FORBIDDEN_CALLS = frozenset(("eval", "exec"))


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    tree: ast.Module

    def imports(self) -> Iterator[str]:
        """Full names; `from a import b` gives `a.b`, which may be a module."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = ".".join(self._package()[: len(self._package()) - node.level + 1]) if node.level else ""
                origin = ".".join(part for part in (base, node.module or "") if part)
                yield from (f"{origin}.{alias.name}" for alias in node.names)

    def _package(self) -> list[str]:
        parts = self.name.split(".")
        return parts if self.path.name == "__init__.py" else parts[:-1]

    def is_in(self, *names: str) -> bool:
        return any(self.name == name or self.name.startswith(name + ".") for name in names)


def modules(*rooms: str) -> list[Module]:
    found = []
    for room in rooms:
        for path in sorted((ROOT / room).rglob("*.py")):
            relative = path.relative_to(ROOT)
            if relative.as_posix().startswith(STUBS):
                continue
            parts = relative.with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"))))
    return found


def reaches(imported: str, name: str) -> bool:
    return imported == name or imported.startswith(name + ".")


def service_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def arrow_is_forbidden(module: Module, imported: str) -> bool:
    room = module.name.split(".")[0]
    if room == "tensorline":
        return reaches(imported, "gateway") or reaches(imported, "services")
    if room == "gateway":
        return reaches(imported, "services")
    if reaches(imported, "gateway"):
        return True
    return reaches(imported, "services") and service_of(imported) not in ("services", service_of(module.name))


def test_no_arrow_points_the_wrong_way() -> None:
    wrong = [
        f"{each.name} imports {imported}"
        for each in modules(*ROOMS)
        for imported in each.imports()
        if arrow_is_forbidden(each, imported)
    ]
    assert wrong == []


def test_frameworks_stay_in_the_model_service() -> None:
    wrong = [
        f"{each.name} imports {imported}"
        for each in modules(*ROOMS)
        for imported in each.imports()
        if imported.split(".")[0] in FRAMEWORKS and not each.is_in(FRAMEWORK_HOME)
    ]
    assert wrong == []


def is_generated(imported: str) -> bool:
    """A stub of ours, or one that a package brings; health and reflection are services, not messages of ours."""
    return any(part.endswith(("_pb2", "_pb2_grpc")) for part in imported.split(".")) and not imported.startswith(
        "grpc_"
    )


def may_see(module: Module, imported: str) -> bool:
    if reaches(imported, "opentelemetry.proto"):
        return module.is_in(*MAY_SEE_OTLP)
    return module.is_in(*MAY_SEE_STUBS, *GATEWAY_FRONT_ENDS)


def test_generated_code_stays_in_the_wire_adapters() -> None:
    wrong = [
        f"{each.name} imports {imported}"
        for each in modules(*ROOMS)
        for imported in each.imports()
        if is_generated(imported) and not may_see(each, imported)
    ]
    assert wrong == []


def dangers(module: Module) -> Iterator[str]:
    for imported in module.imports():
        if imported.split(".")[0] in FORBIDDEN_MODULES:
            yield f"{module.name} imports {imported}"
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        where = f"{module.name}:{node.lineno}"
        called = node.func
        if isinstance(called, ast.Name) and called.id in FORBIDDEN_CALLS:
            yield f"{where} calls {called.id}"
        if isinstance(called, ast.Attribute):
            owner = called.value.id if isinstance(called.value, ast.Name) else ""
            if (owner, called.attr) in (("os", "system"), ("os", "popen"), ("asyncio", "create_subprocess_shell")):
                yield f"{where} calls {owner}.{called.attr}"
            if owner == "yaml" and called.attr in ("load", "load_all", "unsafe_load", "full_load"):
                yield f"{where} calls yaml.{called.attr}"
            if owner in ("np", "numpy") and called.attr == "load" and allows_pickle(node):
                yield f"{where} calls numpy.load with pickles"
        for word in node.keywords:
            if word.arg == "shell" and not (isinstance(word.value, ast.Constant) and word.value.value is False):
                yield f"{where} passes shell="


def allows_pickle(call: ast.Call) -> bool:
    return any(
        word.arg == "allow_pickle" and not (isinstance(word.value, ast.Constant) and word.value.value is False)
        for word in call.keywords
    )


def test_nothing_received_can_become_code() -> None:
    wrong = [danger for each in modules(*ROOMS, "protos") for danger in dangers(each)]
    assert wrong == []


def test_no_stub_of_the_wire_contract_is_in_the_default_pool() -> None:
    stubs = sorted((ROOT / STUBS / "inference").glob("*_pb2.py"))
    assert stubs
    for stub in stubs:
        text = stub.read_text()
        assert "_descriptor_pool" not in text, stub.name
        assert "POOL.AddSerializedFile" in text, stub.name


def module(name: str, text: str) -> Module:
    return Module(name, Path("x.py"), ast.parse(text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tensorline.rpc.x", "import gateway.mesh"),
        ("tensorline.x", "from services import model"),
        ("gateway.x", "def f():\n  from services.model import onnx"),
        ("services.model.x", "from services.preprocess.image import decode"),
        ("services.model.x", "import services.postprocess"),
        ("services.model.x", "from gateway import mesh"),
        ("services.model.x", "from ..postprocess import boxes"),
    ],
)
def test_the_check_sees_a_wrong_arrow(name: str, text: str) -> None:
    each = module(name, text)
    assert any(arrow_is_forbidden(each, imported) for imported in each.imports())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("services.model.x", "from services.model import onnx"),
        ("services.model.x", "from . import onnx"),
        ("services.model.x", "from tensorline.stage import main"),
        ("gateway.x", "from gateway.plan import Plan"),
        ("gateway.x", "import tensorline"),
    ],
)
def test_the_check_lets_right_arrows_pass(name: str, text: str) -> None:
    each = module(name, text)
    assert not any(arrow_is_forbidden(each, imported) for imported in each.imports())


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "exec(x)",
        "subprocess.run(x, shell=True)",
        "subprocess.run(x, shell=flag)",
        "os.system('x')",
        "yaml.load(x)",
        "np.load(x, allow_pickle=True)",
    ],
)
def test_the_check_sees_danger(text: str) -> None:
    assert list(dangers(module("gateway.x", text)))


def test_the_check_sees_stubs() -> None:
    for text in (
        "from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb",
        "from tensorline.protocol.stubs.tensorline.v1.stage_pb2_grpc import StageStub",
        "from opentelemetry.proto.trace.v1.trace_pb2 import Span",
    ):
        each = module("gateway.mesh", text)
        assert [imported for imported in each.imports() if is_generated(imported) and not may_see(each, imported)]
