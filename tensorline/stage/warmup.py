"""The requests that a model's instances run before it is READY: `model_warmup` in its configuration."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from tensorline.config import ModelConfig
from tensorline.config.model import WarmupInput, WarmupSample
from tensorline.errors import ConfigError, InvalidTensorError
from tensorline.rpc.frames import StageResult
from tensorline.stage.request import StageRequest
from tensorline.tensor import BYTES, DATATYPES, Tensor, decode_array, encode_array, encode_bytes_tensor

__all__ = ["WARMUP_FOLDER", "warmup_requests", "warmup_tensors"]

WARMUP_FOLDER: Final = "warmup"
SAMPLE_LIMIT: Final = 1 << 30
"""Bytes of one input."""
WORD_BYTES: Final = 8
"""Of each random string."""


def warmup_tensors(config: ModelConfig, sample: WarmupSample, path: Path) -> list[Tensor]:
    """The inputs of one row that `sample` stands for. Reads its files: not for the event loop.

    Args:
        path: The model's directory.
    Raises:
        ConfigError: an input that the model does not have, or a file that is not there or does not fit.
    """
    tensors = []
    for name, given in sample.inputs.items():
        where = f"warmup sample '{sample.name}', input '{name}'"
        spec = config.input(name)
        if spec is None:
            raise ConfigError(f"{where}: the model has no such input")
        if spec.datatype != given.datatype:
            raise ConfigError(f"{where}: data_type is {given.datatype}, the model takes {spec.datatype}")
        shape = (1, *given.dims) if config.max_batch_size > 0 else given.dims
        data = _read(where, path, given) if given.file else _made(where, given)
        try:
            decode_array(given.datatype, shape, data)
        except InvalidTensorError as error:
            raise ConfigError(f"{where}: {error}") from error
        tensors.append(Tensor(name, given.datatype, shape, data))
    return tensors


def _read(where: str, path: Path, given: WarmupInput) -> bytes:
    file = path / WARMUP_FOLDER / given.file
    try:
        if not file.resolve().is_relative_to(path.resolve()) or not file.is_file():
            raise ConfigError(f"{where}: the model's folder has no file '{WARMUP_FOLDER}/{given.file}'")
        if file.stat().st_size > SAMPLE_LIMIT:
            raise ConfigError(f"{where}: the file has {file.stat().st_size} bytes, at most {SAMPLE_LIMIT} are read")
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{where}: the file cannot be read: {os.strerror(error.errno or 0)}") from error


def _made(where: str, given: WarmupInput) -> bytes:
    random = np.random.default_rng()
    count = math.prod(given.dims)
    if count * WORD_BYTES > SAMPLE_LIMIT:
        raise ConfigError(f"{where}: {count} elements are more than a sample may have")
    if given.datatype == BYTES:
        words = np.empty(count, object)
        words[:] = [os.urandom(WORD_BYTES).hex().encode() if given.is_random else b"" for _ in range(count)]
        return bytes(encode_bytes_tensor(words))
    dtype = DATATYPES[given.datatype]
    if not given.is_random:
        return bytes(count * dtype.itemsize)
    if dtype.kind in "iub":
        return random.bytes(count * dtype.itemsize) if dtype.kind != "b" else bytes(random.integers(0, 2, count, "u1"))
    return bytes(encode_array(random.random(count).astype(dtype)))  # of any bytes some would be no numbers


def warmup_requests(
    config: ModelConfig, version: int, tensors: list[Tensor], count: int, answer: Callable[[StageResult], None]
) -> list[StageRequest]:
    """`count` requests of these inputs, without a deadline."""
    return [
        StageRequest(config.name, str(version), list(tensors), (), "warmup", math.inf, answer) for _ in range(count)
    ]
