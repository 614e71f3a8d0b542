"""From the one call per request to what a collector, the store and the metrics page show."""

import asyncio
import time
from dataclasses import replace

from tensorline.telemetry.metrics import Metrics
from tensorline.telemetry.record import TraceContext
from tensorline.telemetry.recorder import Recorder, open_recorder
from tensorline.telemetry.sampling import Sampler
from tensorline.telemetry.settings import TelemetrySettings, telemetry_settings
from tensorline.telemetry.store import TraceStore
from tensorline.telemetry.trace_rules import TraceRules
from tests.tensorline.telemetry.collector import Collector
from tests.tensorline.telemetry.records import GATEWAY, failed, pipeline, single

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"


def exporting(collector: Collector, **environ: str) -> TelemetrySettings:
    return replace(
        telemetry_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector.target}", **environ}), delay_s=0.02
    )


async def test_the_callers_flag_decides_and_else_the_configured_ratio(collector: Collector) -> None:
    """Case G01."""
    settings = exporting(collector, OTEL_TRACES_SAMPLER="parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0.5")
    async with open_recorder(GATEWAY, settings) as recorder:
        contexts: dict[str, list[TraceContext]] = {}
        for flag in ("0", "1", ""):
            metadata = [("traceparent", CALLER + flag)] if flag else []
            contexts[flag] = [recorder.begin(metadata) for _ in range(100)]
            for context in contexts[flag]:
                recorder.record(single(context))
    assert {(context.trace_id.hex()[:4], context.flags) for context in contexts["0"]} == {("0af7", 0)}
    assert not any(held.context.flags == 0 and held.context.is_from_caller for held in recorder.store._held())
    exported = [received.span for received in collector.spans() if received.span.name.startswith("ModelInfer")]
    called = [span for span in exported if span.trace_id == contexts["0"][0].trace_id]
    assert len(called) == 100  # the unsampled hundred shares its trace id with the sampled one, and is not there
    chosen = {context.trace_id for context in contexts[""] if context.is_sampled}
    assert 25 <= len(chosen) <= 75
    assert {span.trace_id for span in exported} - {called[0].trace_id} >= chosen
    assert len(exported) - 100 <= len(chosen) + 10  # the slowest come on top
    assert len(recorder.store) == 200


async def test_an_error_is_exported_though_nobody_sampled_it(collector: Collector) -> None:
    settings = exporting(collector, OTEL_TRACES_SAMPLER="traceidratio", OTEL_TRACES_SAMPLER_ARG="0")
    async with open_recorder(GATEWAY, settings) as recorder:
        recorder.record(single(recorder.begin([])))
        recorder.record(single(recorder.begin([])))
        recorder.record(failed(13, context=recorder.begin([])))
    names = [received.span.name for received in collector.spans()]
    assert names.count("ModelInfer photo") == 1
    assert names.count("ModelInfer efficientnet_lite0") == 1  # the slowest of the minute


async def test_a_rate_that_is_set_chooses_in_the_samplers_place(collector: Collector) -> None:
    async with open_recorder(GATEWAY, exporting(collector), rules=TraceRules({"trace_rate": 5})) as recorder:
        contexts = [recorder.begin([], "photo") for _ in range(20)]
        for context in contexts:
            recorder.record(failed(13, context=context))  # which the sampler would keep, all of them
        recorder.record(pipeline(recorder.begin([("traceparent", f"{CALLER}1")], "photo")))
    assert [number for number, context in enumerate(contexts, 1) if context.is_sampled] == [5, 10, 15, 20]
    exported = {each.span.trace_id for each in collector.spans() if each.span.name == "ModelInfer photo"}
    assert exported == {context.trace_id for context in contexts[4::5]} | {bytes.fromhex(CALLER[3:35])}
    assert len(recorder.store) == 21


async def test_what_is_off_is_neither_exported_nor_kept(collector: Collector) -> None:
    async with open_recorder(GATEWAY, exporting(collector)) as recorder:
        recorder.rules.change("photo", {"trace_level": ("OFF",)})
        for metadata in ([], [("traceparent", f"{CALLER}1")]):
            context = recorder.begin(metadata, "photo")
            assert not context.is_sampled
            recorder.record(failed(13, context=context))
        recorder.record(single(recorder.begin([("traceparent", f"{CALLER}1")], "efficientnet_lite0")))
    assert {received.span.name for received in collector.spans()} >= {"ModelInfer efficientnet_lite0"}
    assert not any("photo" in received.span.name for received in collector.spans())
    assert len(recorder.store) == 1


async def test_switched_off_nothing_leaves_and_the_store_works(collector: Collector) -> None:
    settings = exporting(collector, OTEL_SDK_DISABLED="true")
    async with open_recorder(GATEWAY, settings) as recorder:
        context = recorder.begin([])
        assert not context.is_sampled
        recorder.record(pipeline(context))
        recorder.settle()
        assert len(recorder.store.get(context.trace_id)) == 1
    assert collector.requests == []


async def test_it_uses_the_store_and_metrics_it_is_given() -> None:
    store, metrics = TraceStore(GATEWAY, recent=3), Metrics(process_metrics=False)
    async with open_recorder(GATEWAY, TelemetrySettings(), metrics=metrics, store=store) as recorder:
        assert (recorder.store, recorder.metrics) == (store, metrics)


async def test_the_page_knows_every_request_that_has_ended() -> None:
    async with open_recorder(GATEWAY, TelemetrySettings()) as recorder:
        for _ in range(100):
            recorder.record(pipeline())
        page = recorder.render_metrics().decode()
    assert 'nv_inference_request_success{model="photo",version="1"} 100\n' in page
    assert "tensorline_traces_held 100\n" in page
    assert 'tensorline_spans_dropped_total{reason="busy"} 0\n' in page


async def test_work_follows_by_itself_in_slices() -> None:
    async with open_recorder(GATEWAY, TelemetrySettings()) as recorder:
        for _ in range(3000):
            recorder.record(pipeline())
        worst = 0.0
        async with asyncio.timeout(10):
            while recorder._pending:
                before = time.thread_time()
                await asyncio.sleep(0)
                worst = max(worst, time.thread_time() - before)
        assert len(recorder.store) >= 1000
        assert worst < 0.05


async def test_the_call_costs_next_to_nothing() -> None:
    async with open_recorder(GATEWAY, TelemetrySettings()) as recorder:
        record = single()
        before = time.thread_time()
        for _ in range(10_000):
            recorder.record(record)
        assert time.thread_time() - before < 10_000 * 3e-6


async def test_a_loop_that_never_rests_loses_spans_and_not_memory() -> None:
    recorder = Recorder(Metrics(process_metrics=False), TraceStore(GATEWAY), Sampler())
    record = single()
    for _ in range(30_000):
        recorder.record(record)
    assert len(recorder._pending) == 20_000
    recorder.settle()
    assert 'reason="busy"} 60000' in recorder.render_metrics().decode()


async def test_the_name_of_the_service_can_be_set_from_outside(collector: Collector) -> None:
    settings = exporting(collector, OTEL_SERVICE_NAME="photos", OTEL_RESOURCE_ATTRIBUTES="team=vision")
    async with open_recorder(GATEWAY, settings) as recorder:
        recorder.record(single(TraceContext(bytes(range(16)), b"", 1, "", True)))
    own = next(received for received in collector.spans() if received.span.name.startswith("ModelInfer"))
    assert (own.resource["service.name"], own.resource["team"]) == ("photos", "vision")
