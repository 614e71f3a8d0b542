"""load, unload, config, stats and shm, against a small server that answers as a gateway does."""

import json
from pathlib import Path

import pytest

from tensorline.cli.app import run
from tests.tensorline.cli.standins import Inference

Capture = pytest.CaptureFixture[str]
PBTXT = 'name: "m"\nmax_batch_size: 4\nversion_policy { specific { versions: 3 } }\n'


def test_a_model_is_loaded_with_what_takes_its_files_place(
    inference: tuple[str, Inference], tmp_path: Path, capsys: Capture
) -> None:
    url, servicer = inference
    (tmp_path / "config.pbtxt").write_text(PBTXT)
    (tmp_path / "config.json").write_text('{"max_batch_size": 2}')
    (tmp_path / "new.onnx").write_bytes(b"\x08\x07")
    assert run(["load", "m", "--url", url]) == 0
    assert capsys.readouterr().out == "m is loaded\n"
    files = ["--file", f"1/model.onnx={tmp_path}/new.onnx"]
    assert run(["load", "m", "--url", url, "--config", f"{tmp_path}/config.pbtxt", *files]) == 0
    assert run(["load", "m", "--url", url, "--config", f"{tmp_path}/config.json"]) == 0
    plain, whole, short = servicer.loads
    assert not plain.parameters
    told = json.loads(whole.parameters["config"].string_param)
    assert told == {"name": "m", "max_batch_size": 4, "version_policy": {"specific": {"versions": [3]}}}
    assert whole.parameters["file:1/model.onnx"].bytes_param == b"\x08\x07"
    assert short.parameters["config"].string_param == '{"max_batch_size": 2}'


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--file", "1/x=new"], "--file needs --config"),
        (["--config", "c.pbtxt", "--file", "1/x"], "--file 1/x: write PATH=LOCAL"),
        (["--config", "c.pbtxt", "--file", "1/x=/nowhere"], "/nowhere: No such file"),
        (["--config", "/nowhere"], "/nowhere: No such file"),
        (["--config", "wrong.pbtxt"], "--config wrong.pbtxt line 1: unknown field"),
        (["--config", "wrong.json"], "--config wrong.json is no JSON"),
    ],
)
def test_a_wrong_load_is_one_sentence(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"c.pbtxt": PBTXT, "wrong.pbtxt": "nam: 3", "wrong.json": "{", "new": ""}.items():
        Path(name).write_text(text)
    assert run(["load", "m", *arguments]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert len(err.splitlines()) == 1


def test_a_model_is_unloaded(inference: tuple[str, Inference], capsys: Capture) -> None:
    assert run(["unload", "m", "--url", inference[0]]) == 0
    assert run(["unload", "m", "--url", inference[0], "--unload-dependents"]) == 0
    plain, whole = inference[1].unloads
    assert not plain.parameters
    assert whole.parameters["unload_dependents"].bool_param is True


def test_a_configuration_is_shown_in_both_forms(inference: tuple[str, Inference], capsys: Capture) -> None:
    assert run(["config", "measure/1", "--url", inference[0]]) == 0
    out = capsys.readouterr().out
    assert out.startswith('name: "measure/1"\n')
    assert "data_type: TYPE_STRING" in out
    assert run(["config", "measure", "--version", "2", "--url", inference[0], "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["name"] == "measure/2"
    assert told["input"] == [{"name": "data", "data_type": "TYPE_STRING", "dims": [-1]}]
    assert told["sequence_batching"]["max_sequence_idle_microseconds"] == 5_000_000
    assert told["parameters"] == {"ending": {"string_value": "!"}}


def test_statistics_are_a_table_of_averages(inference: tuple[str, Inference], capsys: Capture) -> None:
    assert run(["stats", "--url", inference[0]]) == 0
    row = capsys.readouterr().out.splitlines()[3].split()
    assert row == ["measure", "1", "7", "3", "2", "10", "-", "1250", "-"]
    assert run(["stats", "other/1", "--url", inference[0], "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["name"], one["inference_count"], one["inference_stats"]["queue"]) == (
        "other",
        7,
        {"count": 4, "ns": 40_000},
    )


def test_regions_are_listed_where_there_is_no_cuda(inference: tuple[str, Inference], capsys: Capture) -> None:
    assert run(["shm", "--url", inference[0]]) == 0
    assert capsys.readouterr().out.splitlines()[3].split() == ["mine", "system", "64", "4096", "/key"]
    assert run(["shm", "--url", inference[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {"kind": "system", "name": "mine", "key": "/key", "offset": 64, "byte_size": 4096}
    ]


def test_a_gateway_that_does_not_have_a_call_is_told_so(inference: tuple[str, Inference], capsys: Capture) -> None:
    assert run(["stats", "absent", "--url", inference[0]]) == 1
    assert capsys.readouterr().err == f"tensorline: the gateway at {inference[0]} does not have ModelStatistics\n"
