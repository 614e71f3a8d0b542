"""Model configurations: config.pbtxt parsed, completed, validated; the repository; frozen values of both."""

from tensorline.config.complete import with_devices
from tensorline.config.labels import read_labels, read_model_labels
from tensorline.config.load import config_from_text, load_config
from tensorline.config.model import (
    DynamicBatching,
    EnsembleStep,
    InstanceGroup,
    ModelConfig,
    QueuePolicy,
    SequenceBatching,
    TensorSpec,
    VersionPolicy,
)
from tensorline.config.repository import RepositoryEntry, is_model_name, scan
from tensorline.config.values import config_from_encoded

__all__ = [
    "DynamicBatching",
    "EnsembleStep",
    "InstanceGroup",
    "ModelConfig",
    "QueuePolicy",
    "RepositoryEntry",
    "SequenceBatching",
    "TensorSpec",
    "VersionPolicy",
    "config_from_encoded",
    "config_from_text",
    "is_model_name",
    "load_config",
    "read_labels",
    "read_model_labels",
    "scan",
    "with_devices",
]
