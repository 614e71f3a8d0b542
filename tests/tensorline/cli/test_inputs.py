from pathlib import Path

import numpy as np
import pytest

from tensorline.cli.failure import UsageError
from tensorline.cli.inputs import Wanted, fit, read_value

IMAGE = Wanted("image", "BYTES", (-1, 1))
PIXELS = Wanted("pixels", "FP32", (-1, 3, 2, 2))
IDS = Wanted("ids", "INT64", (-1, -1))
FLAG = Wanted("flag", "BOOL", (1,))
SMALL = Wanted("small", "UINT8", (-1,))
HALF = Wanted("half", "BF16", (2,))


def value(text: str, wanted: Wanted) -> object:
    array = fit(read_value(text, wanted), wanted)
    return array.tolist()


@pytest.mark.parametrize(
    ("text", "wanted", "found"),
    [
        ("hello", IMAGE, [[b"hello"]]),
        ("@@hello", IMAGE, [[b"@hello"]]),
        ('["a", "b"]', IMAGE, [["a"], ["b"]]),
        ("[not json", IMAGE, [[b"[not json"]]),
        ("[1, 2]", IMAGE, [[b"[1, 2]"]]),
        ("1,2 3", IDS, [[1, 2, 3]]),
        ("[[1, 2], [3, 4]]", IDS, [[1, 2], [3, 4]]),
        ("7", IDS, [[7]]),
        ("true", FLAG, [True]),
        ("255", SMALL, [255]),
        ("1e1", SMALL, [10]),
        ("0.5, 3", HALF, [0.5, 3.0]),
    ],
)
def test_text_becomes_an_array(text: str, wanted: Wanted, found: object) -> None:
    assert value(text, wanted) == found


def test_one_value_fills_a_tensor_and_a_flat_list_its_rows() -> None:
    assert fit(read_value("0.5", PIXELS), PIXELS).shape == (1, 3, 2, 2)
    filled = fit(read_value(",".join(map(str, range(12))), PIXELS), PIXELS)
    assert filled.shape == (1, 3, 2, 2)
    assert filled[0, 1, 0].tolist() == [4, 5]


@pytest.mark.parametrize(
    ("text", "wanted", "told"),
    [
        ("256", SMALL, "--input small: not every value is a UINT8"),
        ("1.5", IDS, "--input ids: not every value is a INT64: '1.5'"),
        ("-1", SMALL, "not every value is a UINT8"),
        ("seven", IDS, "--input ids: 'seven' is no INT64 value"),
        ("null", IDS, "is no INT64 value"),
        ("[[1], [2, 3]]", IDS, "is no INT64 value"),
        ("1,2,3", HALF, r"a value of shape \[3\] does not fit \[2\]"),
        ("@/nowhere.npy", PIXELS, "/nowhere.npy: No such file"),
        ("@/nowhere.txt", IMAGE, "/nowhere.txt: No such file"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(text: str, wanted: Wanted, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        value(text, wanted)


def test_arrays_come_from_files(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12).reshape(3, 2, 2))
    array = fit(read_value(f"@{tmp_path}/x.npy", PIXELS), PIXELS)
    assert array.shape == (1, 3, 2, 2)
    assert array.dtype == np.float32
    (tmp_path / "x.txt").write_text("1 2\n3 4\n")
    assert value(f"@{tmp_path}/x.txt", IDS) == [[1, 2, 3, 4]]
    (tmp_path / "x.jpg").write_bytes(b"\xff\xd8")
    assert value(f"@{tmp_path}/x.jpg", IMAGE) == [[b"\xff\xd8"]]


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(UsageError, match="Object arrays cannot be loaded"):
        read_value(f"@{tmp_path}/x.npy", PIXELS)
    (tmp_path / "y.npy").write_bytes(b"no array")
    with pytest.raises(UsageError):
        read_value(f"@{tmp_path}/y.npy", PIXELS)
