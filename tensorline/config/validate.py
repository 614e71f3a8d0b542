"""The rules that a single configuration must keep. Each error names model, field, value and wish."""

import math
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Final, NoReturn

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tensorline.errors import ConfigError
from tensorline.protocol.stubs.inference import model_config_pb2 as pb

__all__ = ["validate", "validate_enums", "validate_tensors"]

_BATCH_TYPES: Final = (pb.TYPE_INT32, pb.TYPE_FP32)


def validate(config: pb.ModelConfig) -> None:
    """Check schedulers, policies, cache, instance groups: all that no backend completes.

    Raises:
        ConfigError: the first rule that is broken.
    Source: model-config.md §5, §6, §8, §11, §13.
    """
    validate_enums(config)
    if config.max_batch_size < 0:
        _refuse(config, "max_batch_size", config.max_batch_size, "0 (no batching) or more")
    _check_path(config, "default_model_filename", config.default_model_filename)
    for capability, filename in config.cc_model_filenames.items():
        _check_path(config, f"cc_model_filenames['{capability}']", filename)
    for version in config.version_policy.specific.versions:
        if version < 1:
            _refuse(config, "version_policy.specific.versions", version, "version numbers > 0")
    for index, group in enumerate(config.instance_group):
        _check_group(config, f"instance_group[{index}]", group)
    if config.HasField("dynamic_batching"):
        _check_dynamic_batching(config)
    _check_response_cache(config)
    _check_warmup(config)
    _check_ensemble(config)


def validate_enums(config: pb.ModelConfig) -> None:
    """Refuse numbers that no name stands for: text format, JSON and the wire let them through.

    Raises:
        ConfigError: names the field.
    """
    for where, number in _unknown_enums(config, ""):
        _refuse(config, where, number, "a value that its enum has")


def validate_tensors(config: pb.ModelConfig) -> None:
    """Check inputs, outputs and batch inputs, which a backend may have completed.

    A tensor without dims is a scalar. Triton refuses that; a client that has one would have to know why it is [1].

    Raises:
        ConfigError: the first rule that is broken.
    Source: model-config.md §3, §4.
    """
    _check_names(config, "input", [spec.name for spec in config.input])
    _check_names(config, "output", [spec.name for spec in config.output])
    for spec in config.input:
        _check_tensor(config, f"input '{spec.name}'", spec)
        if spec.format != pb.ModelInput.FORMAT_NONE and len(spec.dims) != 3:
            wish = f"exactly 3 for format {pb.ModelInput.Format.Name(spec.format)}"
            _refuse(config, f"dims of input '{spec.name}'", list(spec.dims), wish)
    for output in config.output:
        _check_tensor(config, f"output '{output.name}'", output)
        _check_path(config, f"label_filename of output '{output.name}'", output.label_filename)
    _check_batch_inputs(config)


def _refuse(config: pb.ModelConfig, field: str, value: object, wish: str) -> NoReturn:
    shown = f"'{value}'" if isinstance(value, str) else str(value)
    raise ConfigError(f"model '{config.name}': field {field} is {shown}, must be {wish}")


def _unknown_enums(message: Message, path: str) -> Iterator[tuple[str, int]]:
    for field, value in message.ListFields():
        where = f"{path}.{field.name}".lstrip(".")
        if field.type == FieldDescriptor.TYPE_ENUM:
            known = field.enum_type.values_by_number if field.enum_type else {}
            yield from ((where, number) for number in (value if field.is_repeated else [value]) if number not in known)
        elif field.message_type is not None:
            is_map = field.message_type.GetOptions().map_entry
            parts = value.values() if is_map else value if field.is_repeated else [value]
            for index, part in enumerate(part for part in parts if isinstance(part, Message)):
                yield from _unknown_enums(part, f"{where}[{index}]" if field.is_repeated else where)


def _check_path(config: pb.ModelConfig, field: str, path: str) -> None:
    """Held to the model's directory; the links in it are the repository's to check."""
    if path and (path.startswith("/") or "\0" in path or "\\" in path or ".." in PurePosixPath(path).parts):
        _refuse(config, field, path, "a path inside the model's directory")


def _check_group(config: pb.ModelConfig, where: str, group: pb.ModelInstanceGroup) -> None:
    kind = pb.ModelInstanceGroup.Kind.Name(group.kind)
    if group.gpus and kind in ("KIND_CPU", "KIND_MODEL"):
        _refuse(config, f"{where}.gpus", list(group.gpus), f"empty for {kind}")
    if any(gpu < 0 for gpu in group.gpus) or len(set(group.gpus)) < len(group.gpus):
        _refuse(config, f"{where}.gpus", list(group.gpus), "different ordinals of 0 or more")


def _check_dynamic_batching(config: pb.ModelConfig) -> None:
    batching = config.dynamic_batching
    for size in batching.preferred_batch_size:
        if not 0 < size <= config.max_batch_size:
            wish = f"in 1..{config.max_batch_size} (max_batch_size)" if config.max_batch_size else "absent"
            _refuse(config, "dynamic_batching.preferred_batch_size", size, wish)
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels and not 1 <= default <= levels:
        _refuse(config, "dynamic_batching.default_priority_level", default, f"in 1..{levels} (priority_levels)")
    for level in batching.priority_queue_policy:
        if not 1 <= level <= levels:
            _refuse(
                config, "dynamic_batching.priority_queue_policy", level, f"a level in 1..{levels} (priority_levels)"
            )
    if not batching.preserve_ordering:
        return
    if levels > 1:
        _refuse(config, "dynamic_batching.priority_levels", levels, "at most 1 with preserve_ordering")
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if any(p.timeout_action == pb.ModelQueuePolicy.DELAY and p.default_timeout_microseconds for p in policies):
        _refuse(
            config, "dynamic_batching.preserve_ordering", True, "false where a queue policy delays after a time-out"
        )


def _check_response_cache(config: pb.ModelConfig) -> None:
    if not config.response_cache.enable:
        return
    if config.HasField("sequence_batching"):
        _refuse(config, "response_cache.enable", True, "false with sequence_batching")
    if config.model_transaction_policy.decoupled:
        _refuse(config, "response_cache.enable", True, "false for a decoupled model")


def _check_warmup(config: pb.ModelConfig) -> None:
    for index, sample in enumerate(config.model_warmup):
        for name, given in sample.inputs.items():
            where = f"model_warmup[{index}].inputs['{name}']"
            if given.data_type == pb.TYPE_INVALID:
                _refuse(config, f"{where}.data_type", "TYPE_INVALID", "a datatype")
            if any(dim < 1 for dim in given.dims):
                _refuse(config, f"{where}.dims", list(given.dims), "sizes >= 1")
            if given.WhichOneof("input_data_type") is None:
                _refuse(config, where, "without data", "zero_data, random_data or input_data_file")
            _check_path(config, f"{where}.input_data_file", given.input_data_file)
        if sample.batch_size > max(1, config.max_batch_size):
            wish = f"at most {max(1, config.max_batch_size)} (max_batch_size)"
            _refuse(config, f"model_warmup[{index}].batch_size", sample.batch_size, wish)


def _check_ensemble(config: pb.ModelConfig) -> None:
    """What a pipeline may not say; its graph is checked by `tensorline.config.ensemble`."""
    if config.platform != "ensemble":
        if config.HasField("ensemble_scheduling"):
            _refuse(config, "platform", config.platform, "'ensemble' with ensemble_scheduling")
        return
    if not config.ensemble_scheduling.step:
        _refuse(config, "ensemble_scheduling.step", "", "one step or more")
    if config.instance_group:
        _refuse(config, "instance_group", len(config.instance_group), "absent from an ensemble")
    if config.HasField("optimization"):
        _refuse(config, "optimization", "set", "absent from an ensemble")
    if config.model_warmup:
        _refuse(config, "model_warmup", len(config.model_warmup), "absent from an ensemble")


def _check_names(config: pb.ModelConfig, field: str, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if not name:
            _refuse(config, f"{field}[{index}].name", "", "a name")
        if name in names[:index]:
            _refuse(config, f"{field}[{index}].name", name, f"a name that no other {field} has")


def _check_tensor(config: pb.ModelConfig, where: str, spec: pb.ModelInput | pb.ModelOutput) -> None:
    if spec.data_type == pb.TYPE_INVALID:
        _refuse(config, f"data_type of {where}", "TYPE_INVALID", "a datatype")
    if any(dim < 1 and dim != -1 for dim in spec.dims):
        _refuse(config, f"dims of {where}", list(spec.dims), "sizes >= 1, or -1 for any size")
    if not spec.HasField("reshape"):
        return
    shape = list(spec.reshape.shape)
    if any(dim < 1 and dim != -1 for dim in shape):
        _refuse(config, f"reshape of {where}", shape, "sizes >= 1, or -1 for any size")
    if not shape and not config.max_batch_size:
        _refuse(config, f"reshape of {where}", shape, "not empty where max_batch_size is 0")
    if _products(shape) != _products(spec.dims):
        _refuse(config, f"reshape of {where}", shape, f"as many elements as dims {list(spec.dims)}")


def _products(dims: Sequence[int]) -> list[int]:
    """Element counts between the -1: [2, 3, -1, 4] gives [6, 4]."""
    runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            runs.append([])
        else:
            runs[-1].append(dim)
    return [math.prod(run) for run in runs]


def _check_batch_inputs(config: pb.ModelConfig) -> None:
    inputs = {spec.name for spec in config.input}
    for index, made in enumerate(config.batch_input):
        if made.data_type not in _BATCH_TYPES:
            name = pb.DataType.Name(made.data_type)
            _refuse(config, f"batch_input[{index}].data_type", name, "TYPE_INT32 or TYPE_FP32")
    named: list[tuple[str, Sequence[pb.BatchInput | pb.BatchOutput]]] = [
        ("batch_input", config.batch_input),
        ("batch_output", config.batch_output),
    ]
    for field, batches in named:
        for index, batch in enumerate(batches):
            if not batch.target_name:
                _refuse(config, f"{field}[{index}].target_name", [], "one name or more")
            if len(batch.source_input) != 1 or batch.source_input[0] not in inputs:
                source = list(batch.source_input)
                _refuse(config, f"{field}[{index}].source_input", source, f"exactly one of {sorted(inputs)}")
