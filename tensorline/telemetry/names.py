"""Every attribute name that we write, and the versions of the conventions they come from.

Source: OpenTelemetry semantic conventions 1.44. Most of these live in `_incubating` modules of
`opentelemetry-semantic-conventions`, which may move: the strings are copied, not imported.
"""

from typing import Final

__all__ = [
    "ATTEMPT",
    "BATCH_ID",
    "BATCH_SIZE",
    "CLOCK_CLAMPED_NS",
    "CLOCK_ERROR_NS",
    "CLOCK_OFFSET_NS",
    "ERROR_TYPE",
    "GEN_AI_OPERATION_NAME",
    "GEN_AI_PROVIDER_NAME",
    "GEN_AI_REQUEST_MODEL",
    "GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK",
    "GEN_AI_USAGE_INPUT_TOKENS",
    "GEN_AI_USAGE_OUTPUT_TOKENS",
    "HOST_NAME",
    "INSTANCE",
    "MODEL_NAME",
    "MODEL_VERSION",
    "PROCESS_PID",
    "REQUEST_ID",
    "RPC_METHOD",
    "RPC_RESPONSE_STATUS_CODE",
    "RPC_SYSTEM_NAME",
    "SCHEMA_URL",
    "SCOPE_NAME",
    "SERVICE_INSTANCE_ID",
    "SERVICE_NAME",
    "SERVICE_VERSION",
    "TELEMETRY_SDK_LANGUAGE",
    "TELEMETRY_SDK_NAME",
    "TELEMETRY_SDK_VERSION",
]

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
SCOPE_NAME: Final = "tensorline"

SERVICE_NAME: Final = "service.name"
SERVICE_INSTANCE_ID: Final = "service.instance.id"
SERVICE_VERSION: Final = "service.version"
HOST_NAME: Final = "host.name"
PROCESS_PID: Final = "process.pid"
TELEMETRY_SDK_LANGUAGE: Final = "telemetry.sdk.language"
TELEMETRY_SDK_NAME: Final = "telemetry.sdk.name"
TELEMETRY_SDK_VERSION: Final = "telemetry.sdk.version"

ERROR_TYPE: Final = "error.type"
RPC_SYSTEM_NAME: Final = "rpc.system.name"
RPC_METHOD: Final = "rpc.method"
RPC_RESPONSE_STATUS_CODE: Final = "rpc.response.status_code"

MODEL_NAME: Final = "tensorline.model.name"
MODEL_VERSION: Final = "tensorline.model.version"
REQUEST_ID: Final = "tensorline.request_id"
INSTANCE: Final = "tensorline.instance"
ATTEMPT: Final = "tensorline.attempt"
BATCH_ID: Final = "tensorline.batch.id"
BATCH_SIZE: Final = "tensorline.batch.size"
CLOCK_OFFSET_NS: Final = "tensorline.clock_offset_ns"
CLOCK_ERROR_NS: Final = "tensorline.clock_error_ns"
CLOCK_CLAMPED_NS: Final = "tensorline.clock_clamped_ns"
"""By how much a stage's times were moved so that they lie within the call: what the clocks' error hid."""

GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
