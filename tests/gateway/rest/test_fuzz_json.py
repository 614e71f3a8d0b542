"""Whatever stands in a body of JSON is answered, or refused in words."""

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from grpc import StatusCode

from gateway.rest.generation import decode_generate
from gateway.rest.inference import decode_infer
from gateway.validation import RequestChecker
from tensorline.config import config_from_text
from tensorline.errors import TensorlineError

BODIES = 30_000
ALLOWED = {StatusCode.OK, StatusCode.INVALID_ARGUMENT, StatusCode.UNIMPLEMENTED}
CONFIG = config_from_text(
    'backend: "identity" input [{name: "x" data_type: TYPE_FP32 dims: [-1]}, '
    '{name: "s" data_type: TYPE_STRING dims: [-1] optional: true}, '
    '{name: "b" data_type: TYPE_BOOL dims: [-1] optional: true}, '
    '{name: "n" data_type: TYPE_UINT64 dims: [-1] optional: true}] '
    'output [{name: "y" data_type: TYPE_FP32 dims: [-1]}]',
    "line",
)
VALID: tuple[dict[str, Any], ...] = (
    {
        "id": "r1",
        "parameters": {"timeout": 5, "k": "v", "f": 0.5, "sequence_id": 0, "binary_data_output": False},
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1.5, -2]}],
        "outputs": [{"name": "y", "parameters": {"classification": 1, "binary_data": True}}],
    },
    {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1], "data": [1]},
            {"name": "s", "datatype": "BYTES", "shape": [2], "data": ["a", "ü"]},
            {"name": "b", "datatype": "BOOL", "shape": [1], "data": [True]},
            {"name": "n", "datatype": "UINT64", "shape": [1], "data": [18446744073709551615]},
        ]
    },
    {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}]},
    {
        "inputs": [
            {
                "name": "x",
                "datatype": "FP32",
                "shape": [1],
                "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 4},
            }
        ]
    },
    {"x": [1, 2], "s": "text", "b": True, "parameters": {"k": 1}, "id": "g"},
)
ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 1e400, 1 << 63, 1 << 64, -(1 << 64), 10**400),
    *("", "x", "FP16", "BF16", "fp32", "\0", "\ud800", "triton_x", "a" * 3000),
    *([], {}, [[]], [[1], [2, 3]], [None], {"a": {}}, [1] * 200),
)
KEYS = ("name", "shape", "data", "parameters", "inputs", "outputs", "datatype", "triton_x", "", "timeout", "priority")


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key in it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from places(inner)


def changed(document: Any, rng: random.Random) -> None:
    document.setdefault("inputs", [])
    holder, key = rng.choice([*places(document)])
    kind = rng.randrange(4)
    if kind == 0 and isinstance(holder, dict):
        holder[rng.choice(KEYS)] = copy.deepcopy(rng.choice(ODD))
    elif kind == 1:
        del holder[key]
    elif kind == 2 and isinstance(holder, list):
        holder.append(copy.deepcopy(rng.choice([*ODD, *holder])))
    else:
        holder[key] = copy.deepcopy(rng.choice(ODD))


def generated(seed: int) -> Iterator[tuple[bytes, int | None]]:
    """A body, and the length of its JSON, if binary tensors follow."""
    rng = random.Random(seed)
    while True:
        document = json.loads(json.dumps(rng.choice(VALID)))
        for _ in range(rng.randint(0, 3)):
            changed(document, rng)
        body = json.dumps(document, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
        if rng.random() < 0.4:
            cut = bytearray(body)
            at = rng.randrange(len(cut) + 1)
            if rng.random() < 0.5:
                del cut[at : at + rng.randint(1, 9)]
            else:
                cut[at:at] = rng.choice((b"\0", b"[" * 300, b'"', b"{", b"NaN", b"-Infinity", b"1e9999", b"\xff"))
            body = bytes(cut)
        length = len(body) if rng.random() < 0.4 else None
        yield body + (rng.randbytes(rng.choice((0, 4, 5))) if length is not None else b""), length


def answer(body: bytes, length: int | None, checker: RequestChecker) -> StatusCode:
    try:
        checker.check(decode_infer("line", "", body, length).request)
    except TensorlineError as error:
        return error.status if str(error) else StatusCode.UNKNOWN
    return StatusCode.OK


def test_infer_bodies() -> None:
    checker = RequestChecker(CONFIG)
    codes = Counter(
        answer(body, length, checker) for _, (body, length) in zip(range(BODIES), generated(5), strict=False)
    )
    assert set(codes) <= ALLOWED, codes
    assert all(codes[code] > BODIES // 100 for code in (StatusCode.OK, StatusCode.INVALID_ARGUMENT)), codes


def test_generate_bodies() -> None:
    checker = RequestChecker(CONFIG)
    codes: Counter[StatusCode] = Counter()
    for _, (body, _) in zip(range(BODIES), generated(6), strict=False):
        try:
            checker.check(decode_generate("line", "", body, CONFIG))
        except TensorlineError as error:
            codes[error.status if str(error) else StatusCode.UNKNOWN] += 1
        else:
            codes[StatusCode.OK] += 1
    assert set(codes) <= ALLOWED, codes
    assert codes[StatusCode.OK], codes
