"""TraceSetting and LogSettings: what is told, what is refused, and that they act (protocol.md §12, errors.md §9)."""

import io
import json
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from gateway.agreement import Agreement
from gateway.operations.settings import Settings
from gateway.siblings import Siblings
from tensorline.errors import InvalidTensorError, TensorlineError, UnsupportedError
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.telemetry.logs import LogLines, configure_logging
from tensorline.telemetry.settings import TelemetrySettings
from tensorline.telemetry.trace_rules import GLOBAL
from tests.gateway.house import House, add, open_house
from tests.tensorline.telemetry.records import single

X = np.array([1, 2], np.float32)
TELEMETRY = TelemetrySettings(target="collector:4317", resource={"team": "a"}, delay_s=0.5)


@pytest.fixture
def stream() -> io.BytesIO:
    return io.BytesIO()


@pytest.fixture
def lines(stream: io.BytesIO) -> Iterator[LogLines]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        yield configure_logging("gateway", "g", stream=stream)
    finally:
        root.handlers[:], _ = before
        root.setLevel(before[1])
        logging.captureWarnings(False)


@asynccontextmanager
async def opened(lines: LogLines) -> AsyncIterator[tuple[House, Settings]]:
    async with open_house({"one": add(1), "two": add(2)}) as house:
        agreement = Agreement(house.recorder.rules, lines, Siblings(()))
        yield house, Settings(house.models, agreement, TELEMETRY)


async def trace(
    settings: Settings, model: str = "", changes: dict[str, Sequence[str]] | None = None
) -> dict[str, list[str]]:
    request = pb.TraceSettingRequest(model_name=model)
    for key, values in (changes or {}).items():
        request.settings[key].value.extend(values)
    answer = await settings.TraceSetting(request)
    return {key: list(setting.value) for key, setting in answer.settings.items()}


async def logged(settings: Settings, **changes: bool | int | str) -> dict[str, bool | int | str]:
    request = pb.LogSettingsRequest()
    for key, value in changes.items():
        if isinstance(value, bool):
            request.settings[key].bool_param = value
        elif isinstance(value, int):
            request.settings[key].uint32_param = value
        else:
            request.settings[key].string_param = value
    answer = await settings.LogSettings(request)
    return {key: getattr(each, each.WhichOneof("parameter_choice") or "") for key, each in answer.settings.items()}


async def test_everything_is_told(lines: LogLines) -> None:
    async with opened(lines) as (_, settings):
        assert await trace(settings) == {
            "trace_level": ["TIMESTAMPS"],
            "trace_rate": ["1"],
            "trace_count": ["-1"],
            "trace_mode": ["opentelemetry"],
            "url": ["http://collector:4317"],
            "resource": ["service.name=tensorline-gateway", "team=a"],
            "bsp_max_queue_size": ["2048"],
            "bsp_schedule_delay": ["500"],
            "bsp_max_export_batch_size": ["512"],
        }
        assert await logged(settings) == {
            "log_file": "",
            "log_info": True,
            "log_warning": True,
            "log_error": True,
            "log_verbose_level": 0,
            "log_format": "default",
        }


async def test_settings_are_everybodys_and_a_models_own(lines: LogLines) -> None:
    async with opened(lines) as (_, settings):
        changed = await trace(settings, "", {"trace_rate": ["7"], "trace_level": ["TENSORS", "TIMESTAMPS"]})
        assert (changed["trace_rate"], changed["trace_level"]) == (["7"], ["TIMESTAMPS", "TENSORS"])
        own = await trace(settings, "one", {"trace_rate": ["3"], "trace_count": ["5"]})
        assert (own["trace_rate"], own["trace_count"]) == (["3"], ["5"])
        assert own["trace_level"] == ["TIMESTAMPS", "TENSORS"]
        assert (await trace(settings, "two"))["trace_rate"] == ["7"]
        await trace(settings, "", {"trace_level": ["OFF"]})
        assert (await trace(settings, "one"))["trace_level"] == ["OFF"]
        cleared = await trace(settings, "one", {"trace_rate": [], "trace_count": []})
        assert (cleared["trace_rate"], cleared["trace_count"]) == (["7"], ["-1"])
        cleared = await trace(settings, "", {"trace_rate": [], "trace_level": []})
        assert (cleared["trace_rate"], cleared["trace_level"]) == (["1"], ["TIMESTAMPS"])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"trace_level": ["OFF", "TENSORS"]}, "Expect only one trace level 'OFF' is specified"),
        ({"trace_rate": ["1", "2"]}, "expect only 1 value for 'trace_rate'"),
        ({"trace_rate": ["often"]}, "Unable to parse 'trace_rate', got: often"),
        ({"trace_rate": [""]}, "Unable to parse 'trace_rate', got: "),
        ({"trace_rate": ["-1"]}, "Unable to parse 'trace_rate', value is out of range"),
        ({"trace_rate": ["4294967296"]}, "Unable to parse 'trace_rate', value is out of range"),
        ({"log_frequency": ["9" * 5000]}, "Unable to parse 'log_frequency', value is out of range"),
        ({"log_frequency": ["-1"]}, "Unable to parse 'log_frequency', value is out of range"),
        ({"trace_count": ["-2"]}, "Expecting value >= -1, got: -2"),
        ({"trace_count": ["2147483648"]}, "Unable to parse 'trace_count', value is out of range"),
        ({"trace_count": ["\u0663"]}, "Unable to parse 'trace_count', got:"),
    ],
)
async def test_one_bad_value_and_nothing_is_applied(
    lines: LogLines, changes: dict[str, Sequence[str]], text: str
) -> None:
    async with opened(lines) as (_, settings):
        before = await trace(settings)
        with pytest.raises(InvalidTensorError, match=text):
            await trace(settings, "", {"trace_level": ["OFF"], "trace_rate": ["5"], "trace_count": ["5"], **changes})
        assert await trace(settings) == before


async def test_what_is_refused_and_what_is_ignored(lines: LogLines) -> None:
    async with opened(lines) as (_, settings):
        with pytest.raises(UnsupportedError, match="trace file location can not be updated through network protocol"):
            await trace(settings, "", {"trace_file": ["/tmp/x"]})
        with pytest.raises(InvalidTensorError, match="Request for unknown model : nobody"):
            await trace(settings, "nobody")
        before = await trace(settings)
        assert await trace(settings, "", {"colour": ["red"], "trace_mode": ["triton"], "url": ["x"]}) == before
        assert (await trace(settings, "", {"trace_level": ["LOUD"]}))["trace_level"] == ["OFF"]
        assert (await trace(settings, "", {"trace_level": ["LOUD", "TENSORS"]}))["trace_level"] == ["TENSORS"]


async def test_a_model_that_is_off_is_kept_nowhere(lines: LogLines) -> None:
    async with opened(lines) as (house, settings):
        await trace(settings, "one", {"trace_level": ["OFF"]})
        sampled = [("traceparent", f"00-{'1' * 32}-{'2' * 16}-01")]
        for metadata in ((), sampled):
            context = house.recorder.begin(metadata, "one")
            assert not context.is_sampled
            house.recorder.record(single(context))
        house.recorder.settle()
        assert house.recorder.store.list() == []
        assert house.recorder.begin(sampled, "two").is_sampled


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"log_info": 1}, InvalidTensorError, "expect boolean for 'log_info'"),
        ({"log_error": "yes"}, InvalidTensorError, "expect boolean for 'log_error'"),
        ({"log_verbose_level": True}, InvalidTensorError, "expect int32 for 'log_verbose_level'"),
        ({"log_format": "XML"}, InvalidTensorError, "invalid argument for log_format, got: XML"),
        ({"log_format": True}, InvalidTensorError, "expect string for 'log_format'"),
        (
            {"log_file": "/etc/passwd"},
            UnsupportedError,
            "log file location can not be updated through network protocol",
        ),
    ],
)
async def test_a_bad_log_setting(
    lines: LogLines, changes: dict[str, bool | int | str], error: type[TensorlineError], text: str
) -> None:
    async with opened(lines) as (_, settings):
        with pytest.raises(error, match=text):
            await logged(settings, **changes)


async def test_log_settings_are_applied_one_by_one(lines: LogLines) -> None:
    async with opened(lines) as (_, settings):
        with pytest.raises(InvalidTensorError):
            await logged(settings, log_warning=False, log_verbose_level=2, log_format="XML")
        found = await logged(settings, colour="red")
        assert (found["log_warning"], found["log_verbose_level"], found["log_format"]) == (False, 2, "default")


async def test_log_settings_act_at_once(lines: LogLines, stream: io.BytesIO) -> None:
    log = logging.getLogger("tensorline.test")
    async with opened(lines) as (_, settings):
        await logged(settings, log_info=False, log_verbose_level=1)
        stream.truncate(0)
        log.debug("d1")
        log.info("i1")
        log.warning("w1")
        log.error("e1")
        await logged(settings, log_info=True, log_verbose_level=0, log_warning=False, log_error=False)
        log.debug("d2")
        log.info("i2")
        log.warning("w2")
        log.error("e2")
    written = [json.loads(line)["event"] for line in stream.getvalue().strip(b"\0").splitlines()]
    assert [event for event in written if len(event) == 2] == ["d1", "w1", "e1", "i2"]


async def test_structlog_obeys_too(lines: LogLines, stream: io.BytesIO) -> None:
    import structlog

    log = structlog.get_logger()
    async with opened(lines) as (_, settings):
        log.debug("hidden")
        await logged(settings, log_verbose_level=1, log_info=False)
        log.debug("shown")
        log.info("hidden")
    assert b"hidden" not in stream.getvalue()
    assert b"shown" in stream.getvalue()


async def test_what_is_set_at_the_start_is_what_clearing_goes_back_to(lines: LogLines) -> None:
    async with opened(lines) as (house, settings):
        house.recorder.rules.change(GLOBAL, {"trace_rate": 9})
        assert (await trace(settings))["trace_rate"] == ["9"]
        assert (await trace(settings, "", {"trace_rate": []}))["trace_rate"] == ["1"]
