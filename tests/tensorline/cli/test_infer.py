"""`tensorline infer` against a small server that answers as a gateway does."""

import json
from pathlib import Path

import numpy as np
import pytest

from tensorline.cli.app import run
from tests.tensorline.cli.standins import Api, Inference

Capture = pytest.CaptureFixture[str]


def test_a_file_is_sent_and_its_answer_shown(inference: tuple[str, Inference], tmp_path: Path, capsys: Capture) -> None:
    url, servicer = inference
    (tmp_path / "a.txt").write_bytes(b"hello")
    (tmp_path / "b.txt").write_bytes(b"hi")
    assert run(["infer", "measure", f"{tmp_path}/a.txt", f"{tmp_path}/b.txt", "--url", url, "--output", "size"]) == 0
    out = capsys.readouterr().out
    assert "a.txt · measure 1" in out
    assert "size INT32" in out
    assert "hello" in out
    assert "2 bytes" in out
    assert [[output.name for output in request.outputs] for request in servicer.requests] == [["size"], ["size"]]
    assert servicer.traceparents == []


def test_an_answer_as_json(inference: tuple[str, Inference], capsys: Capture) -> None:
    assert run(["infer", "measure/1", "--input", "data=hello", "--url", inference[0], "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["model_version"] == "1"
    assert answer["outputs"] == [
        {"name": "size", "datatype": "INT32", "shape": [1, 1], "data": [5]},
        {"name": "copy", "datatype": "BYTES", "shape": [1, 1], "data": ["hello"]},
        {"name": "odd", "datatype": "BYTES", "shape": [2], "encoding": "base64", "data": ["/wA=", "eA=="]},
    ]
    assert inference[1].requests[0].model_version == "1"


def test_a_trace_is_asked_for_by_the_id_that_was_sent(
    inference: tuple[str, Inference], api: Api, capsys: Capture
) -> None:
    url, servicer = inference
    assert run(["infer", "measure", "--input", "data=x", "--url", url, "--trace", "--http-url", api.url]) == 0
    version, trace_id, _, flags = servicer.traceparents[0].split("-")
    assert (version, flags) == ("00", "01")
    assert api.asked == [("/api/traces", {"which": [trace_id]})]
    assert "ModelInfer classify" in capsys.readouterr().out


def test_the_trace_of_a_failing_request_is_shown(inference: tuple[str, Inference], api: Api, capsys: Capture) -> None:
    url, servicer = inference
    asked = ["infer", "measure", "--input", "data=bad", "--url", url, "--trace", "--http-url", api.url]
    assert run(asked) == 1
    shown = capsys.readouterr()
    assert "ModelInfer classify" in shown.out
    assert shown.err == "tensorline: INVALID_ARGUMENT: data is bad\n"
    assert api.asked == [("/api/traces", {"which": [servicer.traceparents[0].split("-")[1]]})]
    assert run([*asked, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["error"] == "INVALID_ARGUMENT: data is bad"
    assert document["traces"][0]["model"] == "classify"


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (['[{"data": ["bad"]}, {"data": ["good"]}, {"data": ["bad"]}]'], ["--data[1]", "--data[3]"]),
        (['{"data": ["bad"]}', '{"data": ["good"]}', '{"data": ["bad"]}'], ["--data[1]", "--data[3]"]),
    ],
)
def test_each_of_several_failures_is_told(
    inference: tuple[str, Inference], capsys: Capture, data: list[str], names: list[str]
) -> None:
    given = [word for one in data for word in ("--data", one)]
    assert run(["infer", "measure", *given, "--url", inference[0]]) == 1
    assert capsys.readouterr().err.splitlines() == [
        *(f"tensorline: {name}: INVALID_ARGUMENT: data is bad" for name in names),
        "tensorline: 2 of 3 requests failed",
    ]


def test_a_request_that_fails_does_not_keep_the_next_from_being_sent(
    inference: tuple[str, Inference], tmp_path: Path, capsys: Capture
) -> None:
    for name, text in (("a", "bad"), ("b", "good")):
        (tmp_path / name).write_text(text)
    assert run(["infer", "measure", f"{tmp_path}/a", f"{tmp_path}/b", "--url", inference[0]]) == 1
    shown = capsys.readouterr()
    assert f"{tmp_path}/b · measure 1" in shown.out
    assert shown.err.splitlines() == [
        f"tensorline: {tmp_path}/a: INVALID_ARGUMENT: data is bad",
        "tensorline: 1 of 2 requests failed",
    ]


def test_a_stream_shows_every_answer_of_every_request(
    inference: tuple[str, Inference], api: Api, tmp_path: Path, capsys: Capture
) -> None:
    for name, text in (("a", "hello"), ("b", "bad"), ("c", "hi")):
        (tmp_path / name).write_text(text)
    files = [f"{tmp_path}/{name}" for name in "abc"]
    asked = ["infer", "measure", *files, "--url", inference[0], "--stream", "--trace", "--http-url", api.url]
    assert run(asked) == 1
    shown = capsys.readouterr()
    assert [line.split(" ")[0] for line in shown.out.splitlines() if "· measure 1" in line] == [
        files[0],
        files[0],
        files[2],
        files[2],
    ]
    assert f"{files[1]}: data is bad" in shown.err
    assert len(api.asked) == 1, "one stream, one trace"
    assert inference[1].requests[0].parameters["triton_enable_empty_final_response"].bool_param


def test_outputs_are_written_to_files(inference: tuple[str, Inference], tmp_path: Path, capsys: Capture) -> None:
    asked = ["infer", "measure", "--data", '[{"data": "a"}, {"data": "bc"}]', "--url", inference[0]]
    assert run([*asked, "--output-npz", f"{tmp_path}/out.npz"]) == 1
    assert "--output-npz: odd has an element that ends with a zero byte" in capsys.readouterr().err
    inference[1].is_odd = False
    assert run([*asked, "--output-npz", f"{tmp_path}/out.npz"]) == 0
    with np.load(tmp_path / "out.npz") as first, np.load(tmp_path / "out-2.npz") as second:
        assert (first["size"].tolist(), first["copy"].tolist()) == ([[1]], [[b"a"]])
        assert second["copy"].tolist() == [[b"bc"]]
    assert run([*asked, "--output-npz", f"{tmp_path}/no/out.npz"]) == 1
    assert "/no/out.npz: No such file or directory" in capsys.readouterr().err


def test_parameters_and_the_id_are_sent(inference: tuple[str, Inference], capsys: Capture) -> None:
    body = {
        "id": "mine",
        "parameters": {"priority": 3, "binary_data_output": True},
        "inputs": [{"name": "data", "shape": [1, 1], "datatype": "BYTES", "data": ["x"]}],
        "outputs": [{"name": "size", "parameters": {"classification": 2, "binary_data": False}}],
    }
    asked = [
        "infer",
        "measure",
        "--data",
        json.dumps(body),
        "--parameter",
        "tone=loud",
        "--parameter",
        "sequence_end=true",
    ]
    assert run([*asked, "--url", inference[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "mine"
    (request,) = inference[1].requests
    assert request.id == "mine"
    assert request.parameters["priority"].int64_param == 3
    assert request.parameters["tone"].string_param == "loud"
    assert request.parameters["sequence_end"].bool_param is True
    assert set(request.parameters) == {"priority", "tone", "sequence_end"}
    assert request.outputs[0].parameters["classification"].int64_param == 2
    assert set(request.outputs[0].parameters) == {"classification"}


def test_inputs_are_made_up(inference: tuple[str, Inference], capsys: Capture) -> None:
    for _ in range(2):
        assert run(["infer", "measure", "--random", "--seed", "5", "--url", inference[0]]) == 0
    first, second = inference[1].requests
    assert first == second
    assert len(first.raw_input_contents[0]) == 4 + 8
