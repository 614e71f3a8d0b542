"""From the command line of `tensorline infer` to its requests."""

import json
from pathlib import Path

import numpy as np
import pytest

from tensorline.cli.client import Request
from tensorline.cli.failure import UsageError
from tensorline.cli.inputs import Wanted
from tensorline.cli.questions import Question, questions_of

IMAGE = Wanted("image", "BYTES", (-1, 1))
PIXELS = Wanted("pixels", "FP32", (-1, 3, 2, 2))
IDS = Wanted("ids", "INT64", (-1, -1))


def requests(question: Question, *wanted: Wanted) -> list[tuple[str, Request]]:
    return list(questions_of(question, wanted))


def only(question: Question, *wanted: Wanted) -> Request:
    ((_, request),) = requests(question, *wanted)
    return request


def test_a_file_goes_to_the_bytes_input_that_is_left(tmp_path: Path) -> None:
    photo = tmp_path / "photo.jpg"
    photo.write_bytes(b"jpeg")
    inputs = only(Question(files=[photo], inputs=["ids=1"]), IDS, IMAGE).inputs
    assert inputs["image"].tolist() == [[b"jpeg"]]
    assert inputs["ids"].tolist() == [[1]]
    assert only(Question(files=[photo]), Wanted("image", "BYTES", (1,))).inputs["image"].tolist() == [b"jpeg"]


def test_each_file_is_a_request_whatever_it_holds(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(12).reshape(3, 2, 2))
    np.savez(tmp_path / "b.npz", pixels=np.zeros((2, 3, 2, 2)))
    (tmp_path / "c.json").write_text(json.dumps([{"pixels": 0.5}, {"pixels": list(range(12))}]))
    files = [tmp_path / name for name in ("a.npy", "b.npz", "c.json")]
    told = requests(Question(files=files), PIXELS)
    assert [about for about, _ in told] == [*map(str, files[:2]), f"{files[2]}[1]", f"{files[2]}[2]"]
    arrays = [request.inputs["pixels"] for _, request in told]
    assert [array.shape for array in arrays] == [(1, 3, 2, 2), (2, 3, 2, 2), (1, 3, 2, 2), (1, 3, 2, 2)]
    assert {array.dtype for array in arrays} == {np.dtype(np.float32)}


def test_arrays_of_text_become_bytes(tmp_path: Path) -> None:
    np.save(tmp_path / "words.npy", np.array(["a", "bc"]))
    assert only(Question(files=[tmp_path / "words.npy"]), IMAGE).inputs["image"].tolist() == [["a"], ["bc"]]


def test_the_form_of_the_rest_protocol_is_sent_as_it_is_written() -> None:
    body = {"inputs": [{"name": "other", "shape": [2, 1], "datatype": "INT8", "data": [[1], [2]]}]}
    array = only(Question(data=[json.dumps(body)]), PIXELS).inputs["other"]
    assert array.dtype == np.dtype(np.int8)
    assert array.tolist() == [[1], [2]]


def test_the_short_form_takes_the_models_datatypes_and_shapes(tmp_path: Path) -> None:
    (tmp_path / "request").write_text('{"ids": [[1, 2]], "image": "x"}')
    inputs = only(Question(data=[f"@{tmp_path}/request"]), IDS, IMAGE).inputs
    assert inputs["ids"].tolist() == [[1, 2]]
    assert inputs["image"].tolist() == [["x"]]


def test_big_integers_are_exact() -> None:
    inputs = only(Question(data=['{"ids": [9007199254740993]}']), IDS).inputs
    assert inputs["ids"].tolist() == [[9007199254740993]]


def test_what_is_not_given_is_made_up() -> None:
    request = only(Question(inputs=["image=x"], is_random=True, shapes=["ids:2,3"], seed=1), IMAGE, IDS, PIXELS)
    assert {name: array.shape for name, array in request.inputs.items()} == {
        "image": (1, 1),
        "ids": (2, 3),
        "pixels": (1, 3, 2, 2),
    }
    assert 0 <= int(request.inputs["ids"].min()) <= int(request.inputs["ids"].max()) < 100
    again = only(Question(inputs=["image=x"], is_random=True, shapes=["ids:2,3"], seed=1), IMAGE, IDS, PIXELS)
    assert np.array_equal(request.inputs["pixels"], again.inputs["pixels"])
    assert only(Question(shapes=["4,3,2,2"]), PIXELS).inputs["pixels"].shape == (4, 3, 2, 2)
    for datatype in ("BYTES", "BOOL", "UINT8", "FP16", "BF16", "FP64"):
        made = only(Question(is_random=True), Wanted("x", datatype, (3,))).inputs["x"]
        assert made.shape == (3,)


@pytest.mark.parametrize(
    ("question", "told"),
    [
        (Question(inputs=["image"]), "--input image: write NAME=VALUE"),
        (Question(inputs=["imag=x"]), "--input imag: the model takes image, ids"),
        (Question(inputs=["ids=1", "ids=2"]), "--input ids is given twice"),
        (
            Question(inputs=["image=x"], files=[Path("a.jpg")]),
            "a.jpg needs one BYTES input to go to, and the model takes",
        ),
        (Question(files=[Path("/no/a.npy")]), "/no/a.npy: No such file or directory"),
        (Question(files=[Path("/no/a.json")]), "/no/a.json: No such file or directory"),
        (Question(files=[Path("bad.npz")]), "bad.npz: "),
        (Question(files=[Path("odd.npz")]), "odd.npz holds 'x', and the model takes image, ids"),
        (Question(data=["{"]), "--data is no JSON"),
        (Question(data=["3"]), "--data: an object is wanted, a number is there"),
        (Question(data=['{"x": 1}']), "--data: 'x' is no input; the model takes image, ids"),
        (Question(data=['{"image": 1}']), "--data: image: '1' is no BYTES value: strings are wanted"),
        (Question(data=['{"ids": ["a"]}']), "--data: ids: '[\"a\"]' is no INT64 value"),
        (Question(data=['{"ids": 1}'], inputs=["ids=1"]), "--input ids is given a second time by --data"),
        (Question(data=['{"inputs": [{}]}']), r"--data: inputs[0]: an object with a name is wanted"),
        (Question(data=['{"inputs": [], "model": 1}']), "--data: 'model' is not known"),
        (Question(data=['{"inputs": [{"name": "a"}]}']), "--data: inputs[0] (a): shape is missing"),
        (
            Question(data=['{"inputs": [{"name": "a", "shape": [2], "datatype": "INT8", "data": [1]}]}']),
            "--data: inputs[0] (a): data has 1 elements, shape [2] wants 2",
        ),
        (
            Question(data=['{"inputs": [{"name": "a", "shape": [-1], "datatype": "INT8", "data": [1]}]}']),
            "--data: inputs[0].shape is [-1]; a list of sizes from 0 is wanted",
        ),
        (
            Question(data=['{"inputs": [{"name": "a", "shape": [1], "datatype": "INT", "data": [1]}]}']),
            "--data: inputs[0].datatype is 'INT'; one of BOOL",
        ),
        (
            Question(data=['{"inputs": [{"name": "a", "shape": [1], "datatype": "INT8", "parameters": {"k": 1}}]}']),
            "--data: inputs[0].parameters cannot be sent by this command",
        ),
        (
            Question(data=['{"inputs": [], "parameters": {"a": []}}']),
            "--data.parameters.a is a list; a string, a number",
        ),
        (Question(data=['{"inputs": [], "id": 3}']), "--data: id is a number, a string is wanted"),
        (Question(inputs=["ids=1"], parameters=["x"]), "--parameter x: write NAME=VALUE"),
        (Question(inputs=["ids=1"], parameters=["x=18446744073709551616"]), "--parameter x is 18446744073709551616"),
        (Question(is_random=True), "--random: ids has the shape [-1, -1]; choose sizes with --shape ids:N,N"),
        (Question(shapes=["1,2"]), "--shape 1,2: write NAME:SIZE,SIZE…; the model takes image, ids"),
        (Question(shapes=["ids:1"]), "--shape ids:1: the model takes [-1, -1]"),
        (Question(shapes=["ids:1,x"]), "--shape ids:1,x: 'x' is no size"),
        (Question(shapes=["ids:1,1", "ids:1,1"]), "--shape ids is given twice"),
        (Question(shapes=["ids:99999999,9999999"]), "elements are more than"),
    ],
)
def test_what_is_wrong_is_told_by_name(
    question: Question, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jpg").write_bytes(b"")
    Path("bad.npz").write_bytes(b"PK nothing")
    np.savez("odd.npz", x=np.zeros(1))
    with pytest.raises(UsageError) as caught:
        requests(question, IMAGE, IDS)
    assert told in str(caught.value)
