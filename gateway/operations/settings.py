"""Trace and log settings: read, changed, cleared, while the gateway runs.

Source: protocol.md §12. Refused here and accepted by Triton 2.51: -1 for `trace_rate` and `log_frequency`, which would
become 4294967295 there.
"""

from collections.abc import Sequence
from typing import Final

from gateway.agreement import Agreement
from gateway.models import Models
from tensorline.errors import InvalidTensorError, UnsupportedError
from tensorline.protocol.infer import shown
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.telemetry.logs import LOG_FORMATS
from tensorline.telemetry.settings import TelemetrySettings
from tensorline.telemetry.trace_config import LEVELS
from tensorline.telemetry.trace_rules import OFF, TRACE_KEYS, TraceValue

__all__ = ["Settings"]

MODE: Final = "opentelemetry"
UINT32_MAX: Final = (1 << 32) - 1
INT32_MAX: Final = (1 << 31) - 1
LEAST: Final = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}
MOST: Final = {"trace_rate": UINT32_MAX, "trace_count": INT32_MAX, "log_frequency": UINT32_MAX}
DIGITS: Final = 12
"""Python itself refuses to read thousands of them; a longer number is out of range anyway."""
SWITCHES: Final = {"log_info": "info", "log_warning": "warning", "log_error": "error"}


class Settings:
    """Args:
    telemetry: Where traces go: told, never changed.
    """

    def __init__(self, models: Models, agreement: Agreement, telemetry: TelemetrySettings) -> None:
        self._models = models
        self._agreement = agreement
        self._telemetry = telemetry

    async def TraceSetting(self, request: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        """Nothing of a request with one bad setting is applied."""
        model = request.model_name
        if model and model not in self._models.names:
            raise InvalidTensorError(f"Request for unknown model : {shown(model)}")
        if "trace_file" in request.settings:
            raise UnsupportedError("trace file location can not be updated through network protocol")
        changes = {key: _value(key, request.settings[key].value) for key in TRACE_KEYS if key in request.settings}
        if changes:
            await self._agreement.set_trace(model, changes)
        return self._trace_settings(model)

    def _trace_settings(self, model: str) -> pb.TraceSettingResponse:
        rules, telemetry = self._agreement.rules, self._telemetry
        levels = rules.value(model, "trace_level")
        resource = {"service.name": telemetry.service_name or "tensorline-gateway", **telemetry.resource}
        scheme = "http" if telemetry.is_insecure else "https"
        values: dict[str, Sequence[str]] = {
            "trace_level": levels if isinstance(levels, tuple) else (),
            "trace_rate": (str(rules.value(model, "trace_rate")),),
            "trace_count": (str(rules.shown_count(model)),),
            "trace_mode": (MODE,),
            "url": (f"{scheme}://{telemetry.target}" if telemetry.is_exporting else "",),
            "resource": [f"{key}={value}" for key, value in resource.items()],
            "bsp_max_queue_size": (str(telemetry.queue_spans),),
            "bsp_schedule_delay": (f"{telemetry.delay_s * 1000:.0f}",),
            "bsp_max_export_batch_size": (str(telemetry.batch_spans),),
        }
        answer = pb.TraceSettingResponse()
        for key, value in values.items():
            answer.settings[key].value.extend(value)
        return answer

    async def LogSettings(self, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        """Applied one by one: what comes before a bad one stays."""
        if "log_file" in request.settings:
            raise UnsupportedError("log file location can not be updated through network protocol")
        for key, switch in SWITCHES.items():
            if key in request.settings:
                if not request.settings[key].HasField("bool_param"):
                    raise InvalidTensorError(f"expect boolean for '{key}'")
                await self._agreement.set_log(**{switch: request.settings[key].bool_param})
        if "log_verbose_level" in request.settings:
            if not request.settings["log_verbose_level"].HasField("uint32_param"):
                raise InvalidTensorError("expect int32 for 'log_verbose_level'")
            await self._agreement.set_log(verbose=request.settings["log_verbose_level"].uint32_param)
        if "log_format" in request.settings:
            if not request.settings["log_format"].HasField("string_param"):
                raise InvalidTensorError("expect string for 'log_format'")
            wanted = request.settings["log_format"].string_param
            if wanted not in LOG_FORMATS:
                raise InvalidTensorError(f"invalid argument for log_format, got: {shown(wanted)}")
            await self._agreement.set_log(format=wanted)
        return self._log_settings()

    def _log_settings(self) -> pb.LogSettingsResponse:
        switches, answer = self._agreement.switches, pb.LogSettingsResponse()
        answer.settings["log_file"].string_param = ""  # the process's standard error, always
        answer.settings["log_info"].bool_param = switches.info
        answer.settings["log_warning"].bool_param = switches.warning
        answer.settings["log_error"].bool_param = switches.error
        answer.settings["log_verbose_level"].uint32_param = switches.verbose
        answer.settings["log_format"].string_param = switches.format
        return answer


def _value(key: str, given: Sequence[str]) -> TraceValue | None:
    """
    Returns:
        The checked value; None: the setting is cleared.
    Raises:
        InvalidTensorError: it cannot have this value.
    """
    if not given:
        return None
    return _levels(given) if key == "trace_level" else _number(key, given)


def _levels(given: Sequence[str]) -> tuple[str, ...]:
    if OFF in given and len(given) > 1:
        raise InvalidTensorError("Expect only one trace level 'OFF' is specified")
    return tuple(level for level in LEVELS if level in given) or (OFF,)  # unknown words are ignored


def _number(key: str, given: Sequence[str]) -> int:
    if len(given) > 1:
        raise InvalidTensorError(f"expect only 1 value for '{key}'")
    text = given[0]
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()):
        raise InvalidTensorError(f"Unable to parse '{key}', got: {shown(text)}")
    least, most = LEAST[key], MOST[key]
    number = int(text) if len(digits) <= DIGITS else most + 1
    if key == "trace_count" and -most <= number < least:
        raise InvalidTensorError(f"Unable to parse '{key}'. Expecting value >= {least}, got: {number}")
    if not least <= number <= most:
        raise InvalidTensorError(
            f"Unable to parse '{key}', value is out of range [ {least}, {most} ], got: {shown(text)}"
        )
    return number
