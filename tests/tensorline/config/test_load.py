"""From text to completed, checked values."""

from pathlib import Path

import pytest

from tensorline.config import config_from_encoded, config_from_text, load_config, with_devices
from tensorline.config.model import (
    DynamicBatching,
    InstanceGroup,
    ModelConfig,
    QueuePolicy,
    SequenceBatching,
    TensorSpec,
    VersionPolicy,
)
from tensorline.config.values import config_to_message
from tensorline.errors import ConfigError
from tensorline.protocol.stubs.inference import model_config_pb2 as pb

PYTHON = """
backend: "python"
input [ { name: "a" data_type: TYPE_STRING dims: [ -1 ] optional: true } ]
output [ { name: "b" data_type: TYPE_BF16 dims: [ 2, 3 ] reshape { shape: [ 6 ] } label_filename: "labels.txt" } ]
parameters { key: "k" value { string_value: "v" } }
"""


def test_a_minimal_model_is_completed() -> None:
    config = config_from_text(PYTHON, "m")
    assert (config.name, config.backend, config.platform, config.max_batch_size) == ("m", "python", "", 0)
    assert config.inputs == (TensorSpec("a", "BYTES", (-1,), optional=True),)
    assert config.outputs == (TensorSpec("b", "BF16", (2, 3), reshape=(6,), label_filename="labels.txt"),)
    assert config.parameters == {"k": "v"}
    assert config.version_policy == VersionPolicy(latest=1)
    assert config.default_model_filename == "model.py"
    assert not config.is_ensemble
    on_cpu = with_devices(config, ())
    assert on_cpu.instance_groups == (InstanceGroup("m", 1, "KIND_CPU"),)
    message = config_to_message(on_cpu)
    assert message.optimization.input_pinned_memory.enable
    assert message.optimization.output_pinned_memory.enable
    assert message.version_policy.latest.num_versions == 1


@pytest.mark.parametrize(
    ("text", "model", "backend", "platform", "filename"),
    [
        ('backend: "onnxruntime"', "m", "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ('platform: "onnxruntime_onnx"', "m", "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ('platform: "tensorrt_plan"', "m", "tensorrt", "tensorrt_plan", "model.plan"),
        ('platform: "libtorch"', "m", "pytorch", "libtorch", "model.pt"),
        ('platform: "torch_aoti"', "m", "pytorch", "torch_aoti", "model.pt2"),
        ('backend: "pytorch"', "m", "pytorch", "pytorch_libtorch", "model.pt"),
        ('backend: "pytorch" default_model_filename: "model.pt2"', "m", "pytorch", "torch_aoti", "model.pt2"),
        ('default_model_filename: "model.onnx"', "m", "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ('default_model_filename: "net.onnx"', "m", "onnxruntime", "onnxruntime_onnx", "net.onnx"),
        ('default_model_filename: "agent.py"', "m", "python", "", "agent.py"),
        ("", "resnet.onnxruntime", "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ('backend: "vllm"', "m", "vllm", "", "model.json"),
        ('backend: "fancy"', "m", "fancy", "", "model.fancy"),
        ('backend: "image"', "m", "image", "", ""),
        ('backend: "classification"', "m", "classification", "", ""),
        ('backend: "onnxruntime" default_model_filename: "x.onnx"', "m", "onnxruntime", "onnxruntime_onnx", "x.onnx"),
    ],
)
def test_backend_platform_and_file(text: str, model: str, backend: str, platform: str, filename: str) -> None:
    config = config_from_text(text, model)
    assert (config.backend, config.platform, config.default_model_filename) == (backend, platform, filename)


@pytest.mark.parametrize(
    ("files", "backend"),
    [
        (["model.plan"], "tensorrt"),
        (["model.onnx"], "onnxruntime"),
        (["model.pt"], "pytorch"),
        (["model.py"], "python"),
        (["model.py", "model.onnx"], "onnxruntime"),
        (["model.fancy", "notes.txt"], "fancy"),
    ],
)
def test_files_name_the_backend(tmp_path: Path, files: list[str], backend: str) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    for file in files:
        (tmp_path / "m" / "1" / file).touch()
    assert load_config(tmp_path / "m").backend == backend


def test_batching_and_queues() -> None:
    config = config_from_text(
        """
        backend: "identity" max_batch_size: 8
        dynamic_batching {
          max_queue_delay_microseconds: 50000 priority_levels: 2 default_priority_level: 2
          default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 7 max_queue_size: 4 }
          priority_queue_policy { key: 1 value { allow_timeout_override: true } }
        }
        instance_group [ { count: 2 kind: KIND_CPU }, { name: "named" kind: KIND_MODEL count: -3 } ]
        metric_tags { key: "team" value: "vision" }
        """,
        "m",
    )
    assert config.dynamic_batching == DynamicBatching(
        preferred_batch_sizes=(8,),
        max_queue_delay_us=50000,
        priority_levels=2,
        default_priority_level=2,
        default_queue_policy=QueuePolicy(default_timeout_us=7, delays=True, max_queue_size=4),
        priority_queue_policy={1: QueuePolicy(allow_timeout_override=True)},
    )
    assert config.max_queue_size == 4
    assert config.instance_groups == (InstanceGroup("m_0", 2, "KIND_CPU"), InstanceGroup("named", 1, "KIND_MODEL"))
    assert config.metric_tags == {"team": "vision"}


def test_sequences_are_normalised() -> None:
    config = config_from_text('backend: "python" max_batch_size: 4 sequence_batching { oldest { } }', "m")
    assert config.sequence_batching == SequenceBatching(max_idle_us=1_000_000, is_oldest=True)
    assert list(config_to_message(config).sequence_batching.oldest.preferred_batch_size) == [4]
    direct = config_from_text('backend: "python" sequence_batching { }', "m")
    assert config_to_message(direct).sequence_batching.HasField("direct")


ENSEMBLE = """
platform: "ensemble" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling { step [
  { model_name: "pre" model_version: -1 input_map { key: "in" value: "x" } output_map { key: "out" value: "a" } },
  { model_name: "post" input_map { key: "in" value: "a" } output_map { key: "out" value: "y" } }
] }
"""


def test_an_ensemble() -> None:
    config = config_from_text(ENSEMBLE, "chain")
    assert config.is_ensemble
    assert (config.backend, config.instance_groups, config.default_model_filename) == ("", (), "")
    assert [(step.model, step.version, step.inputs, step.outputs) for step in config.steps] == [
        ("pre", -1, {"in": "x"}, {"out": "a"}),
        ("post", -1, {"in": "a"}, {"out": "y"}),  # no version is 0: left out, it is the newest
    ]
    message = config_to_message(config)
    assert message.HasField("model_transaction_policy")
    assert not message.HasField("optimization")
    platform_left_out = ENSEMBLE.replace('platform: "ensemble"', "")
    assert config_from_text(platform_left_out, "chain").is_ensemble


TENSORS = 'backend: "identity" input [ { name: "a" data_type: TYPE_FP32 dims: [ 2, 3 ] %s } ]'
GROUP = 'backend: "identity" instance_group [ { %s } ]'
BATCHING = 'backend: "identity" max_batch_size: 8 dynamic_batching { %s }'
STEP = '{ model_name: "pre" input_map { key: "in" value: "%s" } output_map { key: "out" value: "%s" } }'


MORE = '{ name: "z" data_type: TYPE_FP32 dims: [ 4 ] },'


def graph(*steps: tuple[str, str], outputs: str = "y") -> str:
    return f"""
    platform: "ensemble" input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }} ]
    output [ {{ name: "{outputs}" data_type: TYPE_FP32 dims: [ 4 ] }} ]
    ensemble_scheduling {{ step [ {", ".join(STEP % step for step in steps)} ] }}
    """


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('name: "other" backend: "identity"', "model 'm': field 'name' is 'other', must be the directory's name 'm'"),
        ("", "model 'm': field 'backend' is empty"),
        ('backend: "onnxruntime" platform: "tensorrt_plan"', "unexpected 'platform' and 'backend' pair"),
        ('backend: "python" platform: "ensemble"', "unexpected 'platform' and 'backend' pair"),
        (
            'backend: "identity" max_batch_size: -1',
            "model 'm': field max_batch_size is -1, must be 0 (no batching) or more",
        ),
        ('backend: "python" default_model_filename: "../x.py"', "must be a path inside the model's directory"),
        ('backend: "python" cc_model_filenames { key: "7.5" value: "/x" }', "field cc_model_filenames['7.5'] is '/x'"),
        ('backend: "identity" version_policy { specific { versions: [ 1, 0 ] } }', "specific.versions is 0"),
        ('backend: "identity" input [ { data_type: TYPE_FP32 dims: 1 } ]', "field input[0].name is '', must be a name"),
        ('backend: "identity" input [ { name: "a" dims: 1 } ]', "field data_type of input 'a' is 'TYPE_INVALID'"),
        (TENSORS % "" + TENSORS % "", "multiple"),
        (
            'backend: "identity" output [ { name: "a" data_type: TYPE_FP32 }, { name: "a" data_type: TYPE_FP32 } ]',
            "field output[1].name is 'a', must be a name that no other output has",
        ),
        (TENSORS % "dims: 0", "field dims of input 'a' is [2, 3, 0], must be sizes >= 1, or -1 for any size"),
        (TENSORS % "dims: -2", "is [2, 3, -2]"),
        (
            TENSORS % "format: FORMAT_NHWC",
            "field dims of input 'a' is [2, 3], must be exactly 3 for format FORMAT_NHWC",
        ),
        (
            TENSORS % "reshape { shape: [ 5 ] }",
            "field reshape of input 'a' is [5], must be as many elements as dims [2, 3]",
        ),
        (TENSORS % "dims: -1 reshape { shape: [ 6 ] }", "as many elements as dims [2, 3, -1]"),
        (TENSORS % "dims: -1 reshape { shape: [ -1, 6 ] }", "as many elements as dims [2, 3, -1]"),
        (
            'backend: "identity" input [ { name: "a" data_type: TYPE_FP32 dims: 1 reshape { } } ]',
            "field reshape of input 'a' is [], must be not empty where max_batch_size is 0",
        ),
        (
            'backend: "identity" output [ { name: "a" data_type: TYPE_FP32 label_filename: "../l.txt" } ]',
            "field label_filename of output 'a' is '../l.txt'",
        ),
        (
            TENSORS % "" + 'batch_input { target_name: "t" data_type: TYPE_INT8 source_input: "a" }',
            "TYPE_INT32 or TYPE_FP32",
        ),
        (
            TENSORS % "" + 'batch_input { target_name: "t" data_type: TYPE_INT32 }',
            "field batch_input[0].source_input is []",
        ),
        (TENSORS % "" + 'batch_output { source_input: "a" }', "field batch_output[0].target_name is []"),
        (GROUP % "kind: KIND_CPU gpus: [ 0 ]", "field instance_group[0].gpus is [0], must be empty for KIND_CPU"),
        (GROUP % "gpus: [ 1, 1 ]", "must be different ordinals"),
        (GROUP % "kind: 17", "field instance_group[0].kind is 17, must be a value that its enum has"),
        (BATCHING % "preferred_batch_size: [ 4, 9 ]", "preferred_batch_size is 9, must be in 1..8 (max_batch_size)"),
        (BATCHING % "preferred_batch_size: [ 0 ]", "preferred_batch_size is 0"),
        (BATCHING % "priority_levels: 2", "default_priority_level is 0, must be in 1..2 (priority_levels)"),
        (
            BATCHING % "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 3 value { } }",
            "priority_queue_policy is 3, must be a level in 1..2",
        ),
        (
            BATCHING % "preserve_ordering: true priority_levels: 2 default_priority_level: 1",
            "at most 1 with preserve_order",
        ),
        (
            BATCHING
            % "preserve_ordering: true default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 }",
            "field dynamic_batching.preserve_ordering is True",
        ),
        ('backend: "python" response_cache { enable: true } sequence_batching { }', "false with sequence_batching"),
        (
            'backend: "python" response_cache { enable: true } model_transaction_policy { decoupled: true }',
            "false for a decoupled model",
        ),
        (
            'backend: "python" ensemble_scheduling { }',
            "field platform is '', must be 'ensemble' with ensemble_scheduling",
        ),
        ('platform: "ensemble"', "field ensemble_scheduling.step is '', must be one step or more"),
        (graph(("x", "y")) + "instance_group { }", "field instance_group is 1, must be absent from an ensemble"),
        (graph(("x", "y")) + "optimization { }", "field optimization is 'set', must be absent"),
        (graph(("x", "y")) + "model_warmup { }", "field model_warmup is 1, must be absent"),
        (graph(("x", "a")), "ensemble 'm': step 0 (model 'pre') writes 'out' to tensor 'a', which nothing reads"),
        (graph(("x", "y"), ("q", "y2")), "step 1 (model 'pre') reads tensor 'q' as 'in', which nothing writes"),
        (graph(("x", "y"), ("x", "y")), "tensor 'y' is written by step 1 (model 'pre') and by step 0 (model 'pre')"),
        (graph(("x", "x")), "step 0 (model 'pre') writes tensor 'x', which is a pipeline input"),
        (graph(("b", "a"), ("a", "b"), ("x", "y")), "the steps form a cycle: step"),
        (graph(("a", "a"), ("x", "y")), "the steps form a cycle: step 0 (model 'pre') -> step 0"),
        (graph(("x", "y")).replace("output [", "output [ " + MORE, 1), "pipeline output 'z' is written by no step"),
        (graph(("x", "y")).replace("input [", "input [ " + MORE, 1), "pipeline input 'z' is read by no step"),
        (graph(("x", "y")).replace('key: "in" value: "x"', ""), "step 0 (model 'pre')"),
    ],
)
def test_what_is_refused(text: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_text(text, "m")
    assert wanted in str(caught.value)
    assert "m" in str(caught.value)


def test_good_reshapes_pass() -> None:
    for dims, shape in (("2, 3", "6"), ("2, -1, 3", "2, -1, 1, 3"), ("-1, 4", "-1, 2, 2")):
        spec = f'{{ name: "a" data_type: TYPE_FP32 dims: [{dims}] reshape {{ shape: [{shape}] }} }}'
        text = f'backend: "identity" input [ {spec} ]'
        assert config_from_text(text, "m").inputs[0].reshape is not None
    batching = 'backend: "identity" max_batch_size: 1 input [ { name: "a" data_type: TYPE_FP32 dims: 1 reshape { } } ]'
    assert config_from_text(batching, "m").inputs[0].reshape == ()


def test_a_scalar_has_no_dims() -> None:
    assert (
        config_from_text('backend: "identity" input [ { name: "a" data_type: TYPE_FP32 } ]', "m").inputs[0].dims == ()
    )


def group_config(text: str, backend: str = "python") -> ModelConfig:
    return config_from_text(f'backend: "{backend}" instance_group [ {text} ]', "m")


def test_devices_decide_what_auto_means() -> None:
    auto = group_config("{ }", "onnxruntime")
    assert auto.instance_groups == (InstanceGroup("m_0", 1, "KIND_AUTO"),)
    assert with_devices(auto, ()).instance_groups == (InstanceGroup("m_0", 2, "KIND_CPU"),)
    assert with_devices(auto, (0, 1)).instance_groups == (InstanceGroup("m_0", 1, "KIND_GPU", (0, 1)),)
    assert with_devices(group_config("{ gpus: [ 3 ] }"), (0, 1)).instance_groups[0].kind == "KIND_CPU"
    assert with_devices(group_config("{ kind: KIND_MODEL }"), (0,)).instance_groups[0].gpus == ()
    with pytest.raises(ConfigError, match="of model 'm' has kind KIND_GPU but no GPUs are available"):
        with_devices(group_config("{ kind: KIND_GPU }"), ())
    with pytest.raises(ConfigError, match=r"wants GPUs \[2\], the host has \[0, 1\]"):
        with_devices(group_config("{ kind: KIND_GPU gpus: [ 0, 2 ] }"), (0, 1))


def test_a_served_configuration_comes_back_equal() -> None:
    for text in (PYTHON, ENSEMBLE, BATCHING % ""):
        config = config_from_text(text, "m")
        assert config_from_encoded(config.encoded) == config


@pytest.mark.parametrize(
    "encoded",
    [
        b"\xff\xff",
        pb.ModelConfig(input=[pb.ModelInput(name="a")]).SerializeToString(),
        pb.ModelConfig(input=[pb.ModelInput.FromString(b"\x0a\x01a\x10\x4d")]).SerializeToString(),  # data_type 77
    ],
)
def test_a_served_configuration_that_is_none_is_refused(encoded: bytes) -> None:
    with pytest.raises(ConfigError):
        config_from_encoded(encoded)


def test_a_backend_may_complete(tmp_path: Path) -> None:
    for version in ("1", "2", "10", "03", "x"):
        (tmp_path / "m" / version).mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "onnxruntime"')
    asked: list[Path] = []

    def completer(message: pb.ModelConfig, version_path: Path) -> None:
        asked.append(version_path)
        message.input.add(name="a", data_type=pb.TYPE_FP32, dims=[3])

    assert load_config(tmp_path / "m", completer).inputs == (TensorSpec("a", "FP32", (3,)),)
    assert asked == [tmp_path / "m" / "10"]


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_bytes(b'name: "\xff"')
    with pytest.raises(ConfigError, match=r"m/config\.pbtxt is not UTF-8 text: byte 7 is 0xff") as caught:
        load_config(tmp_path / "m")
    assert str(tmp_path) not in str(caught.value)


def test_a_config_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "m" / "config.pbtxt").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"m/config\.pbtxt is no regular file"):
        load_config(tmp_path / "m")
