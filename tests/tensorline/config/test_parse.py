"""Errors in the text of a config.pbtxt say where, and what was probably meant."""

import pytest

from tensorline.config.parse import TEXT_LIMIT, parse_config
from tensorline.errors import ConfigError
from tensorline.protocol.stubs.inference import model_config_pb2 as pb


def test_every_kind_of_field_is_read() -> None:
    message = parse_config(
        """
        name: "m"  # a comment
        max_batch_size: 8
        input [ { name: "a" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, -1, -1 ] reshape { shape: [ ] } } ]
        version_policy: { specific { versions: [ 1, 3 ] } }
        dynamic_batching { priority_queue_policy { key: 2 value { timeout_action: DELAY } } }
        parameters [ { key: "k" value { string_value: "v" } } ]
        metric_tags { key: "team" value: "vision" }
        """,
        "m/config.pbtxt",
    )
    assert message.input[0].data_type == pb.TYPE_FP32
    assert message.input[0].HasField("reshape")
    assert list(message.version_policy.specific.versions) == [1, 3]
    assert message.dynamic_batching.priority_queue_policy[2].timeout_action == pb.ModelQueuePolicy.DELAY
    assert message.parameters["k"].string_value == "v"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('name: "x"\nnmae: "y"', "m/config.pbtxt line 2: unknown field 'nmae' in ModelConfig; did you mean 'name'?"),
        ("input {\n dim: 3 }", "line 2: unknown field 'dim' in ModelInput; did you mean 'dims'?"),
        ("zzzz: 3", "line 1: unknown field 'zzzz' in ModelConfig; it has name, platform, "),
        (
            "input {\n\n data_type: TYPE_FLOAT32 }",
            "line 3: field 'data_type': unknown value 'TYPE_FLOAT32' of DataType; did you mean 'TYPE_FP32'?",
        ),
        ("input { data_type: INT64 }", "unknown value 'INT64' of DataType; did you mean 'TYPE_INT64'?"),
        ("input { data_type: type_fp32 }", "did you mean 'TYPE_FP32'?"),
        ("instance_group { kind: KIND_CPUS }", "of ModelInstanceGroup.Kind; did you mean 'KIND_CPU'?"),
        ('max_batch_size: "x"', "line 1: field 'max_batch_size': Couldn't parse integer"),
        ("max_batch_size: 99999999999", "field 'max_batch_size': Value out of range: 99999999999"),
        ('name: "x"\nname: "y"', 'line 2: field \'name\': Message type "ModelConfig" should not have multiple "name"'),
        ("input [ {\n", "m/config.pbtxt line"),
        ("dynamic_batching { } sequence_batching { }", "sequence_batching"),
        ('name: "\\xff"', "line 1: field 'name': Couldn't parse string"),
        ("{", "line 1: Expected identifier"),
        ("input { data_type: 99999999999 }", "m/config.pbtxt: Value out of range: 99999999999"),
    ],
)
def test_errors_help(text: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "m/config.pbtxt")
    assert wanted in str(caught.value)
    assert "inference." not in str(caught.value)


def test_a_huge_text_is_not_parsed() -> None:
    with pytest.raises(ConfigError, match=f"at most {TEXT_LIMIT} are read"):
        parse_config("#" * (TEXT_LIMIT + 1), "m/config.pbtxt")
