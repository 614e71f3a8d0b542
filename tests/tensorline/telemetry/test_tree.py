"""The shape, statuses and times of a request's spans (cases G02 and G05)."""

import itertools
from dataclasses import replace

import pytest

from tensorline.telemetry.record import WALL_OFFSET_NS, RequestRecord
from tensorline.telemetry.tree import CLIENT, SERVER, Span, service_name, spans_of
from tests.tensorline.telemetry.records import (
    CALLED,
    GATEWAY,
    MODELS,
    STAGES,
    START,
    failed,
    pipeline,
    refused,
    root_context,
    single,
    timing,
)

PHASES = ["queue", "compute_input", "compute_infer", "compute_output"]
INVALID_ARGUMENT, DEADLINE_EXCEEDED, CANCELLED, INTERNAL, UNAVAILABLE = 3, 4, 1, 13, 14


def children(spans: list[Span], parent: Span) -> list[Span]:
    return [span for span in spans if span.parent_id == parent.span_id]


def told(record: RequestRecord) -> list[Span]:
    return spans_of(record, GATEWAY)


def test_one_tree_from_the_callers_span_to_the_kernel() -> None:
    record = pipeline()
    spans = told(record)
    root = spans[0]
    assert (root.name, root.kind, root.process) == ("ModelInfer photo", SERVER, GATEWAY)
    assert root.parent_id == CALLED.span_id
    steps = children(spans, root)
    assert [(step.name, step.kind, step.process) for step in steps] == [(model, CLIENT, GATEWAY) for model in MODELS]
    for step, process in zip(steps, STAGES, strict=True):
        stage = children(spans, step)
        assert [span.name for span in stage] == PHASES
        assert {span.process for span in stage} == {process}
        assert all(span.end == after.start for span, after in itertools.pairwise(stage))
        assert step.start < stage[0].start
        assert stage[-1].end < step.end
    assert len(spans) == 16
    assert len({span.span_id for span in spans}) == 16


def test_a_trace_that_begins_here_has_a_root_without_parent() -> None:
    assert told(pipeline(root_context()))[0].parent_id == b""


def test_the_same_trace_is_told_with_the_same_ids() -> None:
    record = pipeline()
    assert told(record) == told(record)


def test_times_are_wall_clock() -> None:
    root = told(pipeline())[0]
    assert root.start == START + WALL_OFFSET_NS


def test_attributes_name_the_call_the_model_and_the_batch() -> None:
    record = pipeline()
    spans = told(record)
    assert dict(spans[0].attributes) == {
        "rpc.system.name": "grpc",
        "rpc.method": "inference.GRPCInferenceService/ModelInfer",
        "rpc.response.status_code": "OK",
        "tensorline.model.name": "photo",
        "tensorline.model.version": "1",
        "tensorline.request_id": "r-1",
    }
    assert dict(spans[1].attributes) == {
        "rpc.system.name": "grpc",
        "rpc.method": "tensorline.v1.Stage/Exchange",
        "rpc.response.status_code": "OK",
        "tensorline.model.name": "decode",
        "tensorline.model.version": "1",
        "tensorline.attempt": 1,
        "tensorline.instance": "m_0",
    }
    assert dict(spans[2].attributes) == {"tensorline.model.name": "decode"}


@pytest.mark.parametrize(("rows", "is_shared"), [(1, True), (3, True), (4, False)])
def test_requests_that_shared_a_batch_name_it(rows: int, is_shared: bool) -> None:
    record = single()
    record.steps[0].rows = rows
    record.steps[0].timing = timing(START, batch_id=77, batch_size=4)
    for span in told(record)[2:]:
        attributes = dict(span.attributes)
        assert attributes.pop("tensorline.model.name") == "efficientnet_lite0"
        assert attributes == ({"tensorline.batch.id": 77, "tensorline.batch.size": 4} if is_shared else {})


def test_a_long_request_id_is_cut() -> None:
    record = pipeline(request_id="x" * 65536)
    assert dict(told(record)[0].attributes)["tensorline.request_id"] == "x" * 256


def test_more_attributes_of_a_language_model_are_kept() -> None:
    record = pipeline()
    record.attributes = (("gen_ai.request.model", "llm"),)
    record.steps[1].attributes = (("gen_ai.usage.output_tokens", 20),)
    spans = told(record)
    assert dict(spans[0].attributes)["gen_ai.request.model"] == "llm"
    assert dict(spans[6].attributes)["gen_ai.usage.output_tokens"] == 20


def test_the_failing_stage_has_the_error_and_the_others_do_not() -> None:
    spans = told(failed(INTERNAL, "division by zero"))
    wrong = [span for span in spans if span.is_error]
    assert [(span.name, span.process.service) for span in wrong] == [
        ("ModelInfer photo", "gateway"),
        ("classes", "gateway"),
        ("compute_infer", "postprocess"),
    ]
    assert {span.message for span in wrong} == {"division by zero"}
    assert dict(wrong[0].attributes)["rpc.response.status_code"] == "INTERNAL"
    assert dict(wrong[0].attributes)["error.type"] == "INTERNAL"
    assert dict(spans[1].attributes)["rpc.response.status_code"] == "OK"


@pytest.mark.parametrize(
    ("status", "name", "is_error"),
    [
        (INVALID_ARGUMENT, "INVALID_ARGUMENT", False),
        (5, "NOT_FOUND", False),
        (CANCELLED, "CANCELLED", False),
        (8, "RESOURCE_EXHAUSTED", False),
        (16, "UNAUTHENTICATED", False),
        (2, "UNKNOWN", True),
        (DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", True),
        (12, "UNIMPLEMENTED", True),
        (INTERNAL, "INTERNAL", True),
        (UNAVAILABLE, "UNAVAILABLE", True),
        (99, "99", False),
    ],
)
def test_the_servers_span_is_an_error_for_the_servers_faults_alone(status: int, name: str, is_error: bool) -> None:
    root = told(refused(status, "why"))[0]
    assert dict(root.attributes)["rpc.response.status_code"] == name
    assert (root.is_error, root.message) == (is_error, "why" if is_error else "")


def test_a_step_that_refused_its_input_is_the_callers_error() -> None:
    spans = told(failed(INVALID_ARGUMENT, "x has shape [2]"))
    assert [span.is_error for span in spans if span.kind == SERVER] == [False]
    assert [span.name for span in spans if span.is_error] == ["classes", "compute_infer"]


def test_a_request_that_expired_in_the_queue_shows_the_queue_alone() -> None:
    record = failed(DEADLINE_EXCEEDED)
    times = record.steps[-1].timing
    assert times is not None
    record.steps[-1].timing = times._replace(batched=0, input_ready=0)
    stage = [span for span in told(record) if span.process is STAGES[2]]
    assert [span.name for span in stage] == ["queue"]
    assert stage[0].end == times.sent + WALL_OFFSET_NS


def test_a_retried_step_has_a_span_for_each_attempt() -> None:
    record = pipeline()
    lost = replace(record.steps[1], status=UNAVAILABLE, error="gone", timing=None, span_id=b"attempt1")
    record.steps[1].attempt = 2
    record.steps.insert(1, lost)
    attempts = [span for span in told(record) if span.name == MODELS[1]]
    assert [(dict(span.attributes)["tensorline.attempt"], span.is_error) for span in attempts] == [
        (1, True),
        (2, False),
    ]
    assert not told(record)[0].is_error


def test_a_step_that_was_under_way_ends_with_its_request() -> None:
    record = failed(DEADLINE_EXCEEDED, "the deadline passed")
    last = record.steps[-1]
    last.ended, last.status, last.error, last.timing = 0, 0, "", None
    span = told(record)[-1]
    assert (span.end, span.is_error, span.message) == (record.ended + WALL_OFFSET_NS, True, "the deadline passed")
    assert dict(span.attributes)["rpc.response.status_code"] == "DEADLINE_EXCEEDED"


def test_another_hosts_clock_is_corrected_and_said() -> None:
    record = pipeline()
    same = [span[5:7] for span in told(record) if span.process in STAGES]
    for step in record.steps:
        assert step.timing is not None
        ahead = 7_000_000_000
        moved = [value + ahead for value in (getattr(step.timing, name) for name in step.timing._fields[:7])]
        step.timing = step.timing._replace(**dict(zip(step.timing._fields[:7], moved, strict=True)))
        step.clock_offset, step.clock_error = -ahead, 40_000
    assert [span[5:7] for span in told(record) if span.process in STAGES] == same
    attributes = dict(told(record)[1].attributes)
    assert attributes["tensorline.clock_offset_ns"] == -7_000_000_000
    assert attributes["tensorline.clock_error_ns"] == 40_000
    assert "tensorline.clock_clamped_ns" not in attributes


def test_what_a_wrong_clock_puts_outside_its_call_is_moved_in_and_said() -> None:
    record = pipeline()
    step = record.steps[0]
    step.clock_offset, step.clock_error = -300_000, 250_000
    spans = told(record)
    parent, stage = spans[1], spans[2:6]
    assert all(parent.start <= span.start <= span.end <= parent.end for span in stage)
    # The queue began 110 us after the call; 300 us earlier lies 190 us before it.
    assert dict(parent.attributes)["tensorline.clock_clamped_ns"] == 190_000


def test_without_a_clock_error_nothing_is_moved() -> None:
    record = pipeline()
    record.steps[0].clock_offset = -300_000
    spans = told(record)
    assert spans[2].start < spans[1].start
    assert dict(spans[1].attributes)["tensorline.clock_offset_ns"] == -300_000


def test_our_services_have_our_name_and_a_teams_has_its_own() -> None:
    assert service_name(GATEWAY) == "tensorline-gateway"
    assert service_name(replace(GATEWAY, service="fraud")) == "fraud"
