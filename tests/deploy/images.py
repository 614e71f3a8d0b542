"""The images: what each holds, and its settings as its process reads them."""

from pathlib import Path

from gateway.settings import GatewaySettings
from tensorline.settings import MeshSettings, StageSettings, read_settings
from tests.deploy.dockerfile import read_stages

__all__ = ["DOCKERFILE", "EXTRAS", "MODULES", "ROOT", "STAGES", "read_target_settings"]

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
STAGES = read_stages(DOCKERFILE)
EXTRAS = {
    "gateway": {"consul", "otlp"},
    "preprocess": {"preprocess", "consul", "otlp"},
    "model": {"onnx", "consul", "otlp"},
    "postprocess": {"postprocess", "consul", "otlp"},
}
MODULES = {name: f"services.{name}" for name in EXTRAS} | {"gateway": "gateway"}
SETTINGS: dict[str, type[MeshSettings]] = dict.fromkeys(EXTRAS, StageSettings) | {"gateway": GatewaySettings}


def read_target_settings(name: str, environment: dict[str, str]) -> MeshSettings:
    """As the process reads them: an unknown name or a wrong value is an error."""
    return read_settings(SETTINGS[name], environment)
