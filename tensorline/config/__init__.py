"""Model configurations: config.pbtxt parsed, completed, validated; the repository; frozen values of both."""

from tensorline.config.complete import with_devices, with_signature
from tensorline.config.footprint import Footprint, footprint
from tensorline.config.labels import read_labels, read_model_labels
from tensorline.config.load import config_from_override, config_from_text, load_config
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
from tensorline.config.repository import RepositoryEntry, find_entry, is_model_name, model_paths, scan, served_versions
from tensorline.config.values import config_from_encoded

__all__ = [
    "DynamicBatching",
    "EnsembleStep",
    "Footprint",
    "InstanceGroup",
    "ModelConfig",
    "QueuePolicy",
    "RepositoryEntry",
    "SequenceBatching",
    "TensorSpec",
    "VersionPolicy",
    "config_from_encoded",
    "config_from_override",
    "config_from_text",
    "find_entry",
    "footprint",
    "is_model_name",
    "load_config",
    "model_paths",
    "read_labels",
    "read_model_labels",
    "scan",
    "served_versions",
    "with_devices",
    "with_signature",
]
