"""What a load request may bring: which paths of files, which JSON, and what it is told of what is wrong."""

from pathlib import Path

import pytest

from tensorline.config import config_from_override
from tensorline.config.override import check_file_path, check_files, load_error, override_digest, write_files
from tensorline.errors import ConfigError, InvalidTensorError, UnloadableError

ESCAPES = ["", ".", "..", "../x", "a/../../x", "a/..", "/x", "//x", "a/", "a//b", "./a", "a/./b", "a\\b", "a\0", "a\nb"]
ESCAPES += ["x" * 256, "/".join("ab" * 500)]


@pytest.mark.parametrize("path", ["1/model.onnx", "a", "..a/b..", "labels/é.txt", "x" * 255, "/".join("a" * 500)])
def test_paths_inside(path: str) -> None:
    check_file_path(path)


@pytest.mark.parametrize(
    "path",
    ESCAPES,
)
def test_paths_that_may_not_be(path: str) -> None:
    with pytest.raises(InvalidTensorError, match="file override") as caught:
        check_file_path(path)
    assert len(str(caught.value)) < 400


def test_files_are_written_by_their_paths(tmp_path: Path) -> None:
    write_files(tmp_path / "m", {"1/a/b": b"1", "1/c": memoryview(b"2"), "d": b""})
    assert {str(p.relative_to(tmp_path)): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == {
        "m/1/a/b": b"1",
        "m/1/c": b"2",
        "m/d": b"",
    }
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o700
    with pytest.raises(FileExistsError):
        write_files(tmp_path / "m", {})
    for files in ({"../x": b""}, {"a": b"", "a/b": b""}, {str(n): b"" for n in range(1025)}):
        with pytest.raises(InvalidTensorError):
            check_files(files)
        with pytest.raises(InvalidTensorError):
            write_files(tmp_path / "n", files)
    assert not (tmp_path / "n").exists()


def test_digests() -> None:
    assert override_digest("", {}) == ""
    given = [("{}", {}), ("{ }", {}), ("{}", {"a": b"1"}), ("{}", {"a": b"2"}), ("{}", {"b": b"1"})]
    assert len({override_digest(config, files) for config, files in given}) == 5
    assert override_digest("{}", {"a": b"1", "b": b"2"}) == override_digest("{}", {"b": b"2", "a": memoryview(b"1")})


GOOD = '{"backend": "b", "maxBatchSize": 4, "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": ["3"]}]}'


def test_json_has_either_form_of_names() -> None:
    config = config_from_override(GOOD, "m", None)
    assert (config.name, config.max_batch_size, config.inputs[0].dims) == ("m", 4, (3,))
    assert config.version_policy.latest == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "m: config override is no JSON object"),
        ("[]", "m: config override is no JSON object"),
        ('{\n"backend": "b",\n}', "line 3"),
        ('{"max_batch_sise": 1}', "unknown field 'max_batch_sise' in ModelConfig; did you mean 'max_batch_size'?"),
        ('{"input": [{"nam": "x"}]}', "unknown field 'nam' in ModelInput; did you mean 'name'?"),
        ('{"input": [{"data_type": "TYPE_FP33"}]}', "field 'input[0].data_type': unknown value 'TYPE_FP33'"),
        ('{"max_batch_size": "many"}', "max_batch_size"),
        ('{"max_batch_size": 99999999999}', "max_batch_size"),
        ("{" * 5000, "config override"),
        ('{"a":' * 5000, "config override"),
        ('{"name": "n", "backend": "b"}', "must be the directory's name 'm'"),
        ("{" + " " * (1 << 20) + "}", "at most 1048576 are read"),
    ],
)
def test_json_that_is_no_configuration(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_override(text, "m", None)
    assert told in str(caught.value)
    assert not isinstance(caught.value, UnloadableError)


def test_what_only_a_load_finds() -> None:
    with pytest.raises(UnloadableError) as caught:
        config_from_override(GOOD.replace('"3"', '"0"'), "m", None)
    error = load_error("m", caught.value)
    assert (error.status.name, str(error)[:27]) == ("INVALID_ARGUMENT", "load failed for model 'm': ")
    error = load_error("m", ConfigError("reason"))
    assert error.status.name == "INTERNAL"
    assert str(error) == "failed to load 'm', failed to poll from model repository: reason"
