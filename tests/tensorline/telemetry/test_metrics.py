"""Names and rules of `reference/observability.md` §2 and §3, read by Prometheus's own parser."""

import json
import math
import re
import time
from dataclasses import replace

import pytest
from prometheus_client import Counter
from prometheus_client.parser import text_string_to_metric_families

from tensorline.telemetry.counters import ModelTraits
from tensorline.telemetry.metrics import FAMILIES, Metrics
from tensorline.telemetry.metrics_options import MetricsOptions
from tensorline.telemetry.model_table import ModelTable
from tensorline.telemetry.record import RequestRecord, ResponseTiming
from tests.tensorline.telemetry.records import failed, pipeline, refused, single

COUNTERS = [
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
]


SAMPLE = re.compile(r"(\w+)(?:{(.*)})? (\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)",?')


def page(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Values by name and labels. Prometheus's own parser must accept the page, though it renames our counters."""
    text = metrics.render().decode()
    assert list(text_string_to_metric_families(text))
    values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            found = SAMPLE.fullmatch(line)
            assert found is not None
            name, labels, value = found.groups()
            pairs = [(key, json.loads(f'"{text}"')) for key, text in LABEL.findall(labels or "")]
            assert (name, tuple(pairs)) not in values
            values[name, tuple(pairs)] = float(value)
    return values


def of(model: str, **more: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({"model": model, "version": "1", **more}.items()))


def test_the_families_have_tritons_names_and_help_without_samples() -> None:
    text = Metrics(process_metrics=False).render().decode()
    for name in COUNTERS:
        assert f"# TYPE {name} counter\n" in text
        assert f"# HELP {name} " in text
    assert "nv_inference_count_total" not in text


def test_labels_stand_in_alphabetical_order() -> None:
    metrics = Metrics(process_metrics=False)
    metrics.models.declare("m", "1")
    text = metrics.render().decode()
    assert '\nnv_inference_count{model="m",version="1"} 0\n' in text
    for reason in ("BACKEND", "CANCELED", "OTHER", "REJECTED"):
        assert f'\nnv_inference_request_failure{{model="m",reason="{reason}",version="1"}} 0\n' in text


def test_a_request_counts_on_its_model() -> None:
    metrics = Metrics(process_metrics=False)
    record = single()
    record.steps[0].rows = 4
    metrics.record(record)
    values = page(metrics)
    model = of("efficientnet_lite0")
    assert values["nv_inference_request_success", model] == 1
    assert values["nv_inference_count", model] == 4
    assert values["nv_inference_exec_count", model] == 1
    assert values["nv_inference_request_duration_us", model] == (record.ended - record.started) // 1000
    assert values["nv_inference_queue_duration_us", model] == 90
    assert values["nv_inference_compute_input_duration_us", model] == 50
    assert values["nv_inference_compute_infer_duration_us", model] == 1000
    assert values["nv_inference_compute_output_duration_us", model] == 40


def test_a_pipeline_counts_once_and_each_step_on_its_model() -> None:
    metrics = Metrics(process_metrics=False)
    metrics.record(pipeline())
    values = page(metrics)
    for model in ("photo", "decode", "efficientnet_lite0", "classes"):
        assert values["nv_inference_request_success", of(model)] == 1
        assert values["nv_inference_exec_count", of(model)] == 1
    assert values["nv_inference_queue_duration_us", of("photo")] == 270
    assert values["nv_inference_compute_infer_duration_us", of("photo")] == 1200
    row = metrics.models.get("photo", "1")
    assert row is not None
    assert (row.queue_count, row.compute_count) == (1, 1)


def of_batch(size: int, executions: int) -> RequestRecord:
    record = single()
    assert record.steps[0].timing is not None
    record.steps[0].timing = record.steps[0].timing._replace(batch_size=size, executions=executions)
    return record


def test_a_batch_is_one_execution() -> None:
    models = ModelTable()
    for executions in (0, 1, 0, 0):
        models.record(of_batch(4, executions))
    models.record(of_batch(1, 1))
    row = models.get("efficientnet_lite0", "1")
    assert row is not None
    assert (row.success_count, row.inference_count, row.execution_count) == (5, 5, 2)
    assert {size: batch.count for size, batch in row.batches.items()} == {4: 1, 1: 1}
    assert row.batches[4].compute_infer_ns == 1_000_000


def test_a_batch_over_two_gateways_is_one_execution_of_both_together() -> None:
    """Each counts what the stage gave it to count."""
    gateways = ModelTable(), ModelTable()
    gateways[0].record(of_batch(2, 1))
    gateways[1].record(of_batch(2, 0))
    rows = [gateway.get("efficientnet_lite0", "1") for gateway in gateways]
    assert sum(row.execution_count for row in rows if row is not None) == 1
    assert sum(batch.count for row in rows if row is not None for batch in row.batches.values()) == 1


def test_a_batch_that_failed_and_was_run_one_by_one_is_told_whole() -> None:
    models = ModelTable()
    models.record(of_batch(1, 2))
    models.record(of_batch(1, 1))
    row = models.get("efficientnet_lite0", "1")
    assert row is not None
    assert (row.execution_count, row.batches[1].count) == (3, 2)


@pytest.mark.parametrize(
    ("record", "reason", "own_reason"),
    [
        (failed(13), "OTHER", "BACKEND"),
        (failed(3), "OTHER", "BACKEND"),
        (failed(1), "CANCELED", "CANCELED"),
        (failed(4), "OTHER", "REJECTED"),
    ],
)
def test_failures_have_a_reason(record: RequestRecord, reason: str, own_reason: str) -> None:
    metrics = Metrics(process_metrics=False)
    for model in ("photo", "classes"):
        metrics.models.declare(model, "1")
    metrics.record(record)
    values = page(metrics)
    assert values["nv_inference_request_failure", of("photo", reason=reason)] == 1
    assert values["nv_inference_request_failure", of("classes", reason=own_reason)] == 1
    assert values["nv_inference_request_success", of("decode")] == 1
    assert values["nv_inference_exec_count", of("classes")] == 1
    assert sum(value for (name, _), value in values.items() if name == "nv_inference_request_failure") == 2


@pytest.mark.parametrize("status", [3, 5, 8, 14])
def test_what_was_refused_is_ours_to_count_and_not_tritons(status: int) -> None:
    metrics = Metrics(process_metrics=False)
    metrics.models.declare("photo", "1")
    metrics.record(refused(status))
    values = page(metrics)
    assert sum(value for (name, _), value in values.items() if name == "nv_inference_request_failure") == 0
    assert values["tensorline_requests_refused_total", of("photo")] == 1


def test_a_full_queue_is_no_failure_and_a_lost_instance_is_one() -> None:
    metrics = Metrics(process_metrics=False)
    metrics.models.declare("efficientnet_lite0", "1")
    for is_refused in (True, False):
        record = single()
        record.status = record.steps[0].status = 14
        record.steps[0].timing, record.steps[0].is_refused = None, is_refused
        metrics.record(record)
    values = page(metrics)
    assert values["tensorline_requests_refused_total", of("efficientnet_lite0")] == 1
    assert values["nv_inference_request_failure", of("efficientnet_lite0", reason="OTHER")] == 1


def test_a_retry_counts_once_as_a_request_and_once_as_a_retry() -> None:
    metrics = Metrics(process_metrics=False)
    record = single()
    lost = replace(record.steps[0], status=14, timing=None)
    record.steps[0].attempt = 2
    record.steps.insert(0, lost)
    metrics.record(record)
    values = page(metrics)
    assert values["nv_inference_request_success", of("efficientnet_lite0")] == 1
    assert values["nv_inference_request_failure", of("efficientnet_lite0", reason="OTHER")] == 0
    assert values["tensorline_retries_total", ()] == 1


def test_a_step_under_way_when_the_client_left_is_cancelled() -> None:
    metrics = Metrics(process_metrics=False)
    metrics.models.declare("classes", "1")
    record = failed(1)
    record.steps[-1].ended, record.steps[-1].status, record.steps[-1].timing = 0, 0, None
    metrics.record(record)
    assert page(metrics)["nv_inference_request_failure", of("classes", reason="CANCELED")] == 1


def test_client_text_makes_no_series() -> None:
    metrics = Metrics(process_metrics=False)
    metrics.record(refused(5))  # what there is once for all of a status
    before = len(page(metrics))
    for number in range(9_999):
        record = refused(5)
        record.model, record.version = f'evil"{number}\n', "9"
        metrics.record(record)
    assert len(page(metrics)) == before
    assert page(metrics)["tensorline_requests_unknown_total", ()] == 10_000


def test_rows_come_with_a_model_and_go_with_it() -> None:
    metrics = Metrics(process_metrics=False)
    metrics.models.declare("m", "1").success_count = 5
    metrics.models.declare("m", "1")
    assert page(metrics)["nv_inference_request_success", of("m")] == 0
    metrics.models.forget("m", "1")
    assert not any(("model", "m") in labels for _, labels in page(metrics))
    for number in range(5000):
        metrics.models.declare(f"m{number}", "1")
    assert len(list(metrics.models)) == 4096


def test_a_version_that_is_loaded_again_counts_from_zero() -> None:
    metrics = Metrics(process_metrics=False)
    metrics.models.declare("efficientnet_lite0", "1", ModelTraits({"_team": "photos"}))
    metrics.record(single())
    metrics.models.restart("efficientnet_lite0", "1")
    labels = of("efficientnet_lite0", _team="photos")
    assert page(metrics)["nv_inference_request_success", labels] == 0
    metrics.models.restart("unknown", "1")
    assert metrics.models.get("unknown", "1") is None


def test_tags_are_labels_of_each_row_of_the_model() -> None:
    metrics = Metrics(process_metrics=False)
    metrics.models.declare("m", "1", ModelTraits({"_team": "photos"}))
    metrics.watch("nv_inference_pending_request_count", lambda: {("m", "1"): 3, ("n", "1"): 0})
    text = metrics.render().decode()
    assert '\nnv_inference_count{_team="photos",model="m",version="1"} 0\n' in text
    assert '\nnv_inference_request_failure{_team="photos",model="m",reason="OTHER",version="1"} 0\n' in text
    assert '\nnv_inference_pending_request_count{_team="photos",model="m",version="1"} 3\n' in text
    assert '\nnv_inference_pending_request_count{model="n",version="1"} 0\n' in text


def decoupled() -> RequestRecord:
    """Three responses and a bare end; the first came after 250 ms."""
    record = single()
    step = record.steps[0]
    assert step.timing is not None
    ready = step.timing.input_ready
    step.first_response = record.started + 250_000_000
    times = ((100, 110), (300, 330), (400, 450))
    step.responses = [ResponseTiming(ready + computed, ready + written) for computed, written in times]
    step.responses.append(ResponseTiming(ready + 500, ready + 500, is_empty=True))
    return record


def test_each_response_of_a_decoupled_model_has_statistics() -> None:
    models = ModelTable()
    for _ in range(2):
        models.record(decoupled())
    row = models.get("efficientnet_lite0", "1")
    assert row is not None
    assert [each.success for each in row.responses] == [[2, 220], [2, 440], [2, 240], [0, 0]]
    assert [each.compute_infer for each in row.responses] == [[2, 200], [2, 380], [2, 140], [2, 100]]
    assert [each.compute_output for each in row.responses] == [[2, 20], [2, 60], [2, 100], [0, 0]]
    assert row.responses[3].empty_response == [2, 100]


def test_the_time_to_the_first_response_has_a_histogram_when_asked_for() -> None:
    plain = Metrics(process_metrics=False)
    assert "first_response" not in plain.render().decode()
    metrics = Metrics(process_metrics=False, options=MetricsOptions(histogram_latencies=True))
    metrics.models.declare("efficientnet_lite0", "1", ModelTraits(is_decoupled=True))
    metrics.models.declare("other", "1")
    metrics.record(decoupled())
    values = page(metrics)
    name = "nv_inference_first_response_histogram_ms"
    buckets = [
        values[f"{name}_bucket", of("efficientnet_lite0", le=le)] for le in ("100", "500", "2000", "5000", "+Inf")
    ]
    assert buckets == [0, 1, 1, 1, 1]
    assert values[f"{name}_sum", of("efficientnet_lite0")] == 250
    assert values[f"{name}_count", of("efficientnet_lite0")] == 1
    assert not any(("model", "other") in labels for found, labels in values if found.startswith(name))


def test_summaries_are_there_when_asked_for() -> None:
    options = MetricsOptions(summary_latencies=True, quantiles=(0.5, 0.99))
    metrics = Metrics(process_metrics=False, options=options)
    metrics.models.declare("idle", "1")
    for compute_us in range(1, 101):
        metrics.record(single(started=time.monotonic_ns(), compute_us=compute_us))
    values = page(metrics)
    name = "nv_inference_compute_infer_summary_us"
    assert values[name, of("efficientnet_lite0", quantile="0.5")] == 50
    assert values[name, of("efficientnet_lite0", quantile="0.99")] == 99
    assert values[f"{name}_count", of("efficientnet_lite0")] == 100
    assert values[f"{name}_sum", of("efficientnet_lite0")] == 5050
    assert math.isnan(values[name, of("idle", quantile="0.5")])
    assert values[f"{name}_count", of("idle")] == 0


def test_durations_can_be_switched_off() -> None:
    text = Metrics(process_metrics=False, options=MetricsOptions(counter_latencies=False)).render().decode()
    assert "duration_us" not in text
    for name in ("nv_inference_request_success", "nv_inference_request_failure", "nv_inference_exec_count"):
        assert f"# TYPE {name} counter\n" in text


def test_requests_are_counted_by_front_end() -> None:
    metrics = Metrics(process_metrics=False)
    for rpc in ("inference.GRPCInferenceService/ModelInfer", "POST /v2/models/m/infer", "POST /v2/models/n/infer", "x"):
        metrics.record(replace(single(), rpc=rpc))
    metrics.record(replace(refused(3), rpc="HTTP infer"))
    values = page(metrics)
    found = {labels: value for (name, labels), value in values.items() if name == "tensorline_requests_total"}
    assert found == {
        (("front_end", "grpc"), ("status", "OK")): 1,
        (("front_end", "http"), ("status", "OK")): 2,
        (("front_end", "other"), ("status", "OK")): 1,
        (("front_end", "http"), ("status", "INVALID_ARGUMENT")): 1,
    }


def test_hops_are_measured_without_clocks() -> None:
    metrics = Metrics(process_metrics=False)
    record = pipeline()
    for step in record.steps:
        assert step.timing is not None
        times = [getattr(step.timing, name) + 10**15 for name in step.timing._fields[:7]]
        step.timing = step.timing._replace(**dict(zip(step.timing._fields[:7], times, strict=True)))
    metrics.record(record)
    values = page(metrics)
    for service in ("preprocess", "model", "postprocess"):
        labels = (("service", service),)
        assert values["tensorline_hop_seconds_count", labels] == 1
        assert values["tensorline_hop_seconds_sum", labels] == pytest.approx(160e-6)
        assert values["tensorline_hop_seconds_bucket", (("le", "0.0001"), *labels)] == 0
        assert values["tensorline_hop_seconds_bucket", (("le", "0.00025"), *labels)] == 1
        assert values["tensorline_hop_seconds_bucket", (("le", "+Inf"), *labels)] == 1


def test_gauges_are_read_at_each_scrape() -> None:
    metrics = Metrics(process_metrics=False)
    leased = [0]
    metrics.watch("tensorline_arena_bytes_leased", lambda: leased[0])
    metrics.watch("tensorline_instances", lambda: {("model", "READY"): 2, ("model", 'odd"\n\\'): 1})
    metrics.watch("tensorline_queue_depth", lambda: {("a", "1", "i"): 1})
    metrics.watch("tensorline_queue_depth", lambda: {("b", "1", "i"): 2})
    leased[0] = 4096
    values = page(metrics)
    assert values["tensorline_arena_bytes_leased", ()] == 4096
    assert values["tensorline_instances", (("service", "model"), ("state", "READY"))] == 2
    assert values["tensorline_instances", (("service", "model"), ("state", 'odd"\n\\'))] == 1
    assert values["tensorline_queue_depth", (("instance", "i"), ("model", "b"), ("version", "1"))] == 2
    with pytest.raises(KeyError):
        metrics.watch("tensorline_invented", lambda: 0)


def test_a_reader_that_fails_costs_its_own_family(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics(process_metrics=False)

    def broken() -> float:
        raise ZeroDivisionError

    metrics.watch("tensorline_in_flight", broken)
    metrics.watch("tensorline_traces_held", lambda: 3)
    values = page(metrics)
    assert ("tensorline_in_flight", ()) not in values
    assert values["tensorline_traces_held", ()] == 3
    assert "tensorline_in_flight" in caplog.text


def test_the_process_and_what_others_register_are_on_the_page() -> None:
    metrics = Metrics()
    Counter("custom_requests", "Of a model", registry=metrics.registry).inc()
    values = page(metrics)
    assert values["custom_requests_total", ()] == 1
    assert values["process_resident_memory_bytes", ()] > 0


def test_counters_are_named_as_prometheus_wants_unless_triton_named_them() -> None:
    for name, family in FAMILIES.items():
        assert name.startswith("nv_") or (family.kind == "counter") == name.endswith("_total")
