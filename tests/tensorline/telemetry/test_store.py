import sys
from dataclasses import replace

import pytest

from tensorline.telemetry.record import RequestRecord
from tensorline.telemetry.store import TraceStore
from tensorline.telemetry.view import SpanView
from tests.tensorline.telemetry.records import (
    CALLED,
    GATEWAY,
    MS,
    START,
    failed,
    pipeline,
    refused,
    root_context,
    single,
)

MINUTE = 60 * 10**9


def test_what_is_added_is_found_by_its_trace() -> None:
    store = TraceStore(GATEWAY)
    first, second, other = pipeline(started=START), pipeline(started=START + MS), pipeline(root_context())
    for record in (second, other, first):
        store.add(record)
    assert store.get(CALLED.trace_id) == [first, second]
    assert store.get(other.context.trace_id) == [other]
    assert store.get(bytes(16)) == []
    assert store.last() is first


@pytest.mark.parametrize(
    ("context", "is_kept"),
    [
        (CALLED, True),
        (replace(CALLED, flags=0), False),
        (replace(CALLED, flags=2), False),
        (root_context(0), True),
        (root_context(1), True),
    ],
)
def test_a_caller_who_does_not_want_a_trace_leaves_none(context: object, is_kept: bool) -> None:
    store = TraceStore(GATEWAY)
    assert isinstance(context, type(CALLED))
    store.add(pipeline(context))
    store.add(failed(13, context=context))
    assert len(store) == 2 * is_kept
    assert (store.last() is not None) == is_kept


def test_errors_outlive_the_recent() -> None:
    store = TraceStore(GATEWAY, recent=10, errors=3, slow_per_minute=0)
    errors = [failed(13, context=root_context()) for _ in range(4)]
    for record in errors:
        store.add(record)
    for _ in range(20):
        store.add(pipeline(root_context()))
    assert [store.get(record.context.trace_id) != [] for record in errors] == [False, True, True, True]
    assert len(store.list(errors_only=True)) == 3


def test_the_slowest_of_each_model_and_minute_outlive_the_recent() -> None:
    store = TraceStore(GATEWAY, recent=5, slow_per_minute=2)
    slow: list[RequestRecord] = []
    for minute in range(3):
        for number in range(20):
            slowness = 9000 + minute if number in (4, 5) else number
            record = single(root_context(), started=START + minute * MINUTE + number * MS, compute_us=100 + slowness)
            slow += [record] if number in (4, 5) else []
            store.add(record)
    store.add(pipeline(root_context()))
    assert all(store.get(record.context.trace_id) for record in slow)
    assert len(store) == 6 + 5
    assert store.slowest() is slow[-1] or store.slowest() is slow[-2]
    assert store.slowest("photo") is store.last()
    assert store.slowest("nothing") is None


def test_old_minutes_go() -> None:
    store = TraceStore(GATEWAY, recent=1, slow_minutes=5)
    for minute in range(20):
        store.add(single(root_context(), started=START + minute * MINUTE))
    assert len(store) == 5


def test_client_text_makes_no_entry_of_its_own() -> None:
    store = TraceStore(GATEWAY, recent=10, errors=10)
    for number in range(1000):
        record = refused(5)
        record.model = f"invented-{number}"
        store.add(record)
    assert len(store) == 10
    assert not store._slow


def test_the_list_is_newest_first_and_can_be_narrowed() -> None:
    store = TraceStore(GATEWAY)
    for number in range(5):
        store.add(single(root_context(), started=START + number * MS))
    store.add(failed(13))
    assert [entry["model"] for entry in store.list(limit=2)] == ["efficientnet_lite0"] * 2
    entry = store.list(model="photo")[0]
    assert (entry["trace_id"], entry["status"], entry["steps"]) == (CALLED.trace_id.hex(), "INTERNAL", 3)
    assert [found["status"] for found in store.list(errors_only=True)] == ["INTERNAL"]


def test_fifty_thousand_requests_stay_within_the_bounds() -> None:
    store = TraceStore(GATEWAY, recent=1000, errors=200, byte_limit=8 << 20)
    for number in range(50_000):
        record = pipeline(root_context(), started=START + number * 10 * MS, request_id="r" * (number % 5000))
        if number % 7 == 0:
            record.status, record.error = 13, "x" * 2000
        record.model = f"model-{number % 300}"
        store.add(record)
        assert store.byte_size <= 8 << 20
    assert 1000 <= len(store) <= 1000 + 200 + 3 * 3000
    held = sum(map(_measured, store._held()))
    assert held < 2 * (8 << 20)


def test_bytes_are_counted_down_to_nothing() -> None:
    store = TraceStore(GATEWAY, recent=10, errors=5, slow_minutes=2)
    for number in range(500):
        store.add(failed(13) if number % 3 == 0 else single(started=START + number * 10**9, compute_us=number))
        store.add_spans(number.to_bytes(16, "big"), [])
    while store.byte_size:
        store._drop_one()
    assert len(store) == 0


def test_one_request_larger_than_everything_is_not_kept() -> None:
    store = TraceStore(GATEWAY, byte_limit=10_000)
    store.add(pipeline(request_id="x" * 20_000))
    assert (len(store), store.byte_size) == (0, 0)


def test_spans_from_elsewhere_are_shown_with_their_trace() -> None:
    store = TraceStore(GATEWAY)
    record = pipeline()
    span: SpanView = {
        "name": "tokenize",
        "span_id": "00" * 7 + "01",
        "parent_id": record.steps[0].span_id.hex(),
        "kind": "internal",
        "service": "tensorline-preprocess",
        "instance_id": "p",
        "start_ns": 1,
        "end_ns": 2,
        "is_error": False,
        "message": "",
        "attributes": {},
    }
    store.add_spans(CALLED.trace_id, [span])
    store.add(record)
    view = store.to_json(record)
    assert view["spans"][-1] == span
    assert [shown["name"] for shown in view["spans"][:3]] == ["ModelInfer photo", "decode", "queue"]
    assert view["spans"][0]["parent_id"] == CALLED.span_id.hex()
    assert view["spans"][2]["service"] == "tensorline-preprocess"
    for number in range(5000):
        store.add_spans(number.to_bytes(16, "big"), [span] * 20)
    assert store.byte_size <= 32 << 20
    assert store.get(CALLED.trace_id) == [record]


def _measured(record: RequestRecord) -> int:
    """Bytes of a request and its parts, without what all share."""
    size = sys.getsizeof(record) + sys.getsizeof(record.request_id) + sys.getsizeof(record.error)
    size += sys.getsizeof(record.context) + 100 + sys.getsizeof(record.steps)
    for step in record.steps:
        size += sys.getsizeof(step) + sys.getsizeof(step.timing) + 9 * 32 + 41
    return size
