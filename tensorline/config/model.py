"""A model's configuration as frozen values: what the runtime and the gateway ask of a config.pbtxt."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "DynamicBatching",
    "EnsembleStep",
    "InstanceGroup",
    "ModelConfig",
    "QueuePolicy",
    "SequenceBatching",
    "TensorSpec",
    "VersionPolicy",
    "WarmupInput",
    "WarmupSample",
]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output. `dims` without the batch dimension; -1 is any size."""

    name: str
    datatype: str
    """Protocol name: "FP32", "BYTES"."""
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None
    optional: bool = False
    label_filename: str = ""
    is_shape_tensor: bool = False
    """No batch dimension is added to it."""
    allow_ragged_batch: bool = False


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How long and how many requests of one level may wait."""

    default_timeout_us: int = 0
    """0: for ever."""
    allow_timeout_override: bool = False
    delays: bool = False
    """A request that waited too long moves to the end of its level; False: it is refused."""
    max_queue_size: int = 0
    """0: the service's own limit."""


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    """0: one queue for all; else levels 1 (the highest) to this."""
    default_priority_level: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policy: Mapping[int, QueuePolicy] = field(default_factory=dict)
    """Policies of single levels; a level without one has the default policy."""


@dataclass(frozen=True, slots=True)
class SequenceBatching:
    max_idle_us: int = 1_000_000
    is_oldest: bool = False
    """The oldest strategy; else direct."""
    is_iterative: bool = False


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    name: str = ""
    count: int = 1
    kind: str = "KIND_AUTO"
    gpus: tuple[int, ...] = ()
    is_passive: bool = False


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """One step of a pipeline: which model, and how its tensors map to those of the pipeline."""

    model: str
    version: int
    """-1: the newest that is ready."""
    inputs: Mapping[str, str]
    """Model input name -> pipeline tensor name."""
    outputs: Mapping[str, str]
    """Model output name -> pipeline tensor name."""


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """Which versions are served: the `latest` highest numbers, `specific` ones, or all."""

    latest: int | None = 1
    specific: tuple[int, ...] = ()
    all: bool = False


@dataclass(frozen=True, slots=True)
class WarmupInput:
    """One tensor of a warm-up request, `dims` without the batch dimension."""

    datatype: str
    dims: tuple[int, ...]
    is_random: bool = False
    file: str = ""
    """Name in the model's folder `warmup`, of raw tensor bytes; "": zeros, unless it is random."""


@dataclass(frozen=True, slots=True)
class WarmupSample:
    name: str
    batch_size: int
    """Requests of one row each that run together; 0: the sample is passed over."""
    inputs: Mapping[str, WarmupInput]
    count: int = 1


@dataclass(frozen=True, slots=True)
class ModelConfig:
    name: str
    backend: str
    platform: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    parameters: Mapping[str, str] = field(default_factory=dict)
    instance_groups: tuple[InstanceGroup, ...] = ()
    dynamic_batching: DynamicBatching | None = None
    steps: tuple[EnsembleStep, ...] = ()
    """Of a pipeline (`platform: "ensemble"`), else empty."""
    version_policy: VersionPolicy = VersionPolicy()
    default_model_filename: str = ""
    decoupled: bool = False
    max_queue_size: int = 0
    """Requests that may wait; 0: the service's own limit."""
    encoded: bytes = b""
    """The whole completed inference.ModelConfig, serialized."""
    sequence_batching: SequenceBatching | None = None
    metric_tags: Mapping[str, str] = field(default_factory=dict)
    response_cache: bool = False
    max_inflight_requests: int = 0
    """Of a pipeline, for each step; 0: no limit."""
    warmups: tuple[WarmupSample, ...] = ()
    """What each instance runs before it is used."""

    @property
    def is_ensemble(self) -> bool:
        return self.platform == "ensemble"

    def input(self, name: str) -> TensorSpec | None:
        return next((spec for spec in self.inputs if spec.name == name), None)

    def output(self, name: str) -> TensorSpec | None:
        return next((spec for spec in self.outputs if spec.name == name), None)
