"""Between a completed inference.ModelConfig message and our frozen values."""

from google.protobuf.message import DecodeError

from tensorline.config.model import (
    DynamicBatching,
    EnsembleStep,
    InstanceGroup,
    ModelConfig,
    QueuePolicy,
    SequenceBatching,
    TensorSpec,
    VersionPolicy,
    WarmupInput,
    WarmupSample,
)
from tensorline.config.validate import validate_enums, validate_tensors
from tensorline.errors import ConfigError
from tensorline.protocol.stubs.inference import model_config_pb2 as pb

__all__ = ["config_from_encoded", "config_from_message", "config_to_message", "data_type", "datatype_name"]


def datatype_name(data_type: int) -> str:
    """Protocol name of a DataType: "FP32" for TYPE_FP32, "BYTES" for TYPE_STRING, "" for none."""
    return _DATATYPES.get(data_type, "")


def data_type(name: str) -> "pb.DataType.ValueType | None":
    """The DataType of a protocol name; None: there is none."""
    found = next((value for value, known in _DATATYPES.items() if known == name), None)
    return None if found is None else pb.DataType.ValueType(found)


_DATATYPES: dict[int, str] = {
    value: "BYTES" if value == pb.TYPE_STRING else name.removeprefix("TYPE_")
    for name, value in pb.DataType.items()
    if value != pb.TYPE_INVALID
}
_KINDS: dict[int, str] = {value: name for name, value in pb.ModelInstanceGroup.Kind.items()}


def config_from_message(message: pb.ModelConfig) -> ModelConfig:
    """The values of a completed configuration; the message itself stays in `encoded`."""
    batching = message.dynamic_batching if message.HasField("dynamic_batching") else None
    return ModelConfig(
        name=message.name,
        backend=message.backend,
        platform=message.platform,
        max_batch_size=message.max_batch_size,
        inputs=tuple(_input(spec) for spec in message.input),
        outputs=tuple(_output(spec) for spec in message.output),
        parameters={key: value.string_value for key, value in message.parameters.items()},
        instance_groups=tuple(_group(group) for group in message.instance_group),
        dynamic_batching=None if batching is None else _dynamic_batching(batching),
        steps=tuple(_step(step) for step in message.ensemble_scheduling.step),
        version_policy=_version_policy(message.version_policy),
        default_model_filename=message.default_model_filename,
        decoupled=message.model_transaction_policy.decoupled,
        max_queue_size=message.dynamic_batching.default_queue_policy.max_queue_size,
        encoded=message.SerializeToString(deterministic=True),
        sequence_batching=_sequence_batching(message) if message.HasField("sequence_batching") else None,
        metric_tags=dict(message.metric_tags),
        response_cache=message.response_cache.enable,
        max_inflight_requests=message.ensemble_scheduling.max_inflight_requests,
        warmups=tuple(_warmup(sample) for sample in message.model_warmup),
    )


def config_to_message(config: ModelConfig) -> pb.ModelConfig:
    """The message that `config` was made from; the caller may change it."""
    return pb.ModelConfig.FromString(config.encoded)


def config_from_encoded(encoded: bytes) -> ModelConfig:
    """The configuration that a stage tells of a model it serves.

    Raises:
        ConfigError: not a serialized inference.ModelConfig, or its inputs and outputs are none.
    """
    try:
        message = pb.ModelConfig.FromString(encoded)
    except DecodeError as err:
        raise ConfigError("a served model's configuration is not a serialized inference.ModelConfig") from err
    validate_enums(message)
    validate_tensors(message)
    return config_from_message(message)


def _input(spec: pb.ModelInput) -> TensorSpec:
    return TensorSpec(
        name=spec.name,
        datatype=datatype_name(spec.data_type),
        dims=tuple(spec.dims),
        reshape=tuple(spec.reshape.shape) if spec.HasField("reshape") else None,
        optional=spec.optional,
        is_shape_tensor=spec.is_shape_tensor,
        allow_ragged_batch=spec.allow_ragged_batch,
    )


def _output(spec: pb.ModelOutput) -> TensorSpec:
    return TensorSpec(
        name=spec.name,
        datatype=datatype_name(spec.data_type),
        dims=tuple(spec.dims),
        reshape=tuple(spec.reshape.shape) if spec.HasField("reshape") else None,
        label_filename=spec.label_filename,
        is_shape_tensor=spec.is_shape_tensor,
    )


def _group(group: pb.ModelInstanceGroup) -> InstanceGroup:
    return InstanceGroup(
        name=group.name,
        count=max(group.count, 1),
        kind=_KINDS.get(group.kind, "KIND_AUTO"),
        gpus=tuple(group.gpus),
        is_passive=group.passive,
    )


def _step(step: pb.ModelEnsembling.Step) -> EnsembleStep:
    return EnsembleStep(
        model=step.model_name, version=step.model_version, inputs=dict(step.input_map), outputs=dict(step.output_map)
    )


def _dynamic_batching(batching: pb.ModelDynamicBatching) -> DynamicBatching:
    return DynamicBatching(
        preferred_batch_sizes=tuple(batching.preferred_batch_size),
        max_queue_delay_us=batching.max_queue_delay_microseconds,
        preserve_ordering=batching.preserve_ordering,
        priority_levels=batching.priority_levels,
        default_priority_level=batching.default_priority_level,
        default_queue_policy=_queue_policy(batching.default_queue_policy),
        priority_queue_policy={
            level: _queue_policy(policy) for level, policy in batching.priority_queue_policy.items()
        },
    )


def _queue_policy(policy: pb.ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        default_timeout_us=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        delays=policy.timeout_action == pb.ModelQueuePolicy.DELAY,
        max_queue_size=policy.max_queue_size,
    )


def _sequence_batching(message: pb.ModelConfig) -> SequenceBatching:
    batching = message.sequence_batching
    return SequenceBatching(
        max_idle_us=batching.max_sequence_idle_microseconds,
        is_oldest=batching.HasField("oldest"),
        is_iterative=batching.iterative_sequence,
    )


def _warmup(sample: pb.ModelWarmup) -> WarmupSample:
    inputs = {
        name: WarmupInput(datatype_name(each.data_type), tuple(each.dims), each.random_data, each.input_data_file)
        for name, each in sorted(sample.inputs.items())
    }
    return WarmupSample(sample.name, sample.batch_size, inputs, max(1, sample.count))


def _version_policy(policy: pb.ModelVersionPolicy) -> VersionPolicy:
    match policy.WhichOneof("policy_choice"):
        case "all":
            return VersionPolicy(latest=None, all=True)
        case "specific":
            return VersionPolicy(latest=None, specific=tuple(policy.specific.versions))
        case "latest":
            return VersionPolicy(latest=policy.latest.num_versions)
        case _:
            return VersionPolicy()
