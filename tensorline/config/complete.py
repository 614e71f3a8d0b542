"""What a config.pbtxt leaves out: name, backend, file name, policies, instance groups."""

from collections.abc import Mapping, MutableSequence, Sequence
from typing import Final

from tensorline.config.model import ModelConfig
from tensorline.config.values import config_from_message, config_to_message, data_type
from tensorline.errors import ConfigError
from tensorline.protocol.stubs.inference import model_config_pb2 as pb

__all__ = ["FILELESS_BACKENDS", "complete", "complete_groups", "is_fileless", "with_devices", "with_signature"]

DEFAULT_FILES: Final[Mapping[str, str]] = {
    "tensorrt": "model.plan",
    "onnxruntime": "model.onnx",
    "openvino": "model.xml",
    "pytorch": "model.pt",
    "python": "model.py",
    "tensorflow": "model.savedmodel",
    "vllm": "model.json",
}
PLATFORMS: Final[Mapping[str, tuple[str, ...]]] = {
    "tensorrt": ("tensorrt_plan",),
    "onnxruntime": ("onnxruntime_onnx",),
    "pytorch": ("pytorch_libtorch", "libtorch", "torch_aoti"),
    "tensorflow": ("tensorflow_savedmodel", "tensorflow_graphdef"),
}
"""The platforms of a backend, the one that is filled in first."""

PLATFORM_FILES: Final[Mapping[str, str]] = {"torch_aoti": "model.pt2", "tensorflow_graphdef": "model.graphdef"}
"""Where a platform's default file is not its backend's."""

FILELESS_BACKENDS: Final = frozenset(
    (
        "image",
        "text",
        "audio",
        "classification",
        "detection",
        "text_decode",
        "identity",
        "generate",
        "repeat",
        "remote",
        "ensemble",
    )
)
"""Backends whose models are their configuration: no model file, and so no default name of one."""

TWO_ON_CPU: Final = frozenset(("onnxruntime", "tensorflow"))
"""Backends with two instances on a CPU where no count is given."""

ENSEMBLE: Final = "ensemble"
IDLE_DEFAULT_US: Final = 1_000_000


def is_fileless(config: pb.ModelConfig | ModelConfig) -> bool:
    """Whether the model has nothing in its version directory, which then need not exist."""
    return config.platform == ENSEMBLE or config.backend in FILELESS_BACKENDS


def complete(config: pb.ModelConfig, model: str, files: Sequence[str]) -> None:
    """Fill and normalise `config` in place, as far as no backend is needed.

    Args:
        model: Name of the model's directory.
        files: Names in the first version directory, for a configuration that names no backend.
    Raises:
        ConfigError: another name than the directory's, no backend to be found, or one that its platform contradicts.
    Source: Triton model repository and auto-completion, order of model-config.md §12.
    """
    if config.name and config.name != model:
        raise ConfigError(f"model '{model}': field 'name' is '{config.name}', must be the directory's name '{model}'")
    config.name = model
    _fill_backend(config, files)
    _fill_filename(config)
    _normalise(config)


def _fill_backend(config: pb.ModelConfig, files: Sequence[str]) -> None:
    platform = config.platform
    if ENSEMBLE in (platform, config.backend) or (
        config.HasField("ensemble_scheduling") and not platform and not config.backend
    ):
        if config.backend not in ("", ENSEMBLE) or platform not in ("", ENSEMBLE):
            raise ConfigError(
                f"model '{config.name}': unexpected 'platform' and 'backend' pair, got '{platform}' and "
                f"'{config.backend}'; a pipeline has platform 'ensemble' and no backend"
            )
        config.platform, config.backend = ENSEMBLE, ""
        return
    if not config.backend:
        config.backend = _found_backend(config, files)
    known = PLATFORMS.get(config.backend)
    if not platform and known:
        config.platform = _platform_of_file(config.default_model_filename, known)
    elif platform and known and platform not in known:
        raise ConfigError(
            f"model '{config.name}': unexpected 'platform' and 'backend' pair, got '{platform}' and "
            f"'{config.backend}', wants platform '{known[0]}'"
        )


def _found_backend(config: pb.ModelConfig, files: Sequence[str]) -> str:
    by_platform = {platform: backend for backend, platforms in PLATFORMS.items() for platform in platforms}
    by_file = {file: backend for backend, file in DEFAULT_FILES.items()}
    by_file |= {PLATFORM_FILES[platform]: by_platform[platform] for platform in PLATFORM_FILES}
    if config.platform:
        return by_platform.get(config.platform, config.platform)
    if config.default_model_filename:
        stem, dot, backend = config.default_model_filename.rpartition(".")
        found = by_file.get(config.default_model_filename)
        if found is None and dot:  # "net.onnx": the kind of file decides
            found = next((name for file, name in by_file.items() if file.rpartition(".")[2] == backend), None)
            found = found or (backend if stem == "model" else None)
        if found is not None:
            return found
    for file, backend in by_file.items():
        if file in files:
            return backend
    for name in (*files, config.name):
        stem, dot, suffix = name.rpartition(".")
        if dot and (stem == "model" or name == config.name):
            return suffix
    raise ConfigError(
        f"model '{config.name}': field 'backend' is empty, and neither 'platform', 'default_model_filename' nor a file "
        f'of the first version names one; say for example backend: "onnxruntime"'
    )


def _platform_of_file(filename: str, platforms: Sequence[str]) -> str:
    return next((name for name in platforms if filename and PLATFORM_FILES.get(name) == filename), platforms[0])


def _fill_filename(config: pb.ModelConfig) -> None:
    if config.default_model_filename or is_fileless(config):
        return
    config.default_model_filename = (
        PLATFORM_FILES.get(config.platform) or DEFAULT_FILES.get(config.backend) or f"model.{config.backend}"
    )


def _normalise(config: pb.ModelConfig) -> None:
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    if config.HasField("dynamic_batching"):
        _fill_preferred(config.dynamic_batching.preferred_batch_size, config.max_batch_size)
    if config.HasField("sequence_batching"):
        sequence = config.sequence_batching
        if sequence.max_sequence_idle_microseconds == 0:
            sequence.max_sequence_idle_microseconds = IDLE_DEFAULT_US
        if sequence.WhichOneof("strategy_choice") is None:
            sequence.direct.SetInParent()
        if sequence.HasField("oldest"):
            _fill_preferred(sequence.oldest.preferred_batch_size, config.max_batch_size)
    if config.platform == ENSEMBLE:
        for step in config.ensemble_scheduling.step:
            if step.model_version == 0:  # left out: no version is 0
                step.model_version = -1
        config.model_transaction_policy.SetInParent()
        return
    for memory in ("input_pinned_memory", "output_pinned_memory"):
        if not config.optimization.HasField(memory):
            getattr(config.optimization, memory).enable = True


def _fill_preferred(sizes: MutableSequence[int], max_batch_size: int) -> None:
    if not sizes and max_batch_size > 0:
        sizes.append(max_batch_size)


def complete_groups(config: pb.ModelConfig) -> None:
    """Give every instance group its name, and a model without any group one. Not for pipelines."""
    if config.platform == ENSEMBLE:
        return
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        if group.kind != pb.ModelInstanceGroup.KIND_AUTO:
            _fill_count(config, group)


def _fill_count(config: pb.ModelConfig, group: pb.ModelInstanceGroup) -> None:
    if group.count < 1:
        on_cpu = group.kind == pb.ModelInstanceGroup.KIND_CPU
        group.count = 2 if on_cpu and config.backend in TWO_ON_CPU else 1


def with_devices(config: ModelConfig, gpus: Sequence[int]) -> ModelConfig:
    """The configuration on a host with these GPUs: KIND_AUTO becomes KIND_GPU or KIND_CPU.

    Raises:
        ConfigError: a group wants a GPU that is not there.
    """
    message = config_to_message(config)
    for group in message.instance_group:
        missing = [gpu for gpu in group.gpus if gpu not in gpus]
        if group.kind == pb.ModelInstanceGroup.KIND_AUTO:
            on_gpu = bool(gpus) and not missing
            group.kind = pb.ModelInstanceGroup.KIND_GPU if on_gpu else pb.ModelInstanceGroup.KIND_CPU
            if not on_gpu:
                group.ClearField("gpus")
        _fill_count(message, group)
        if group.kind != pb.ModelInstanceGroup.KIND_GPU:
            continue
        where = f"instance group '{group.name}' of model '{config.name}'"
        if not gpus:
            raise ConfigError(f"{where} has kind KIND_GPU but no GPUs are available")
        if missing:
            raise ConfigError(f"{where} wants GPUs {missing}, the host has {list(gpus)}")
        if not group.gpus:
            group.gpus.extend(gpus)
    return config_from_message(message)


Signature = Sequence[tuple[str, str, Sequence[int]]]
"""Name, datatype and whole shape (-1: any size) of each tensor that a model file takes, or gives."""


def with_signature(config: ModelConfig, inputs: Signature, outputs: Signature, *, batch_limit: int = 4) -> ModelConfig:
    """The configuration with what it leaves out of its tensors, as the model file has them.

    Args:
        batch_limit: max_batch_size of a model without one whose tensors all begin with a size that is left open, where
            the configuration says nothing of any tensor. It is batched then.
    Raises:
        ConfigError: a datatype that the protocol does not have.
    Source: model-config.md §12.5.
    """
    message = config_to_message(config)
    is_blank = not message.input and not message.output and not message.max_batch_size
    is_open = all(shape and shape[0] == -1 for _, _, shape in (*inputs, *outputs))
    if is_blank and is_open and inputs and outputs:
        message.max_batch_size = batch_limit
        if batch_limit > 1 and message.WhichOneof("scheduling_choice") is None:
            message.dynamic_batching.preferred_batch_size.append(batch_limit)
    leading = 1 if message.max_batch_size > 0 else 0
    has = bool(message.input), bool(message.output)
    for name, datatype, shape in () if has[0] else inputs:
        message.input.add(name=name, data_type=_of_file(config, name, datatype), dims=shape[leading:])
    for name, datatype, shape in () if has[1] else outputs:
        message.output.add(name=name, data_type=_of_file(config, name, datatype), dims=shape[leading:])
    return config_from_message(message)


def _of_file(config: ModelConfig, tensor: str, datatype: str) -> "pb.DataType.ValueType":
    known = data_type(datatype)
    if known is None:
        raise ConfigError(
            f"tensor '{tensor}' of model '{config.name}' is {datatype} in the model file: no datatype of ours"
        )
    return known
