"""A request as a stage holds it, from its Submit to its last Result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tensorline.rpc.frames import StageResult
from tensorline.stage.backend import ParameterValue
from tensorline.stage.window import ResponseWindow
from tensorline.tensor import Tensor

__all__ = ["StageRequest"]


@dataclass(slots=True, eq=False)
class StageRequest:
    model: str
    version: str
    inputs: list[Tensor]
    outputs: tuple[str, ...]
    """Names wanted; empty: all."""
    request_id: str
    deadline: float
    """Monotonic seconds; infinity for none."""
    answer: Callable[[StageResult], None]
    """Called on the loop: once, and for a decoupled model with each response before."""
    holder: object = None
    """Who holds the leases of its outputs: the stream it came by."""
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    priority: int = 0
    is_inline_only: bool = False
    trace_id: bytes = b""
    span_id: bytes = b""
    trace_flags: int = 0
    tracestate: str = ""
    rows: int = 1
    is_cancelled: bool = False
    received_ns: int = 0
    queued_ns: int = 0
    batched_ns: int = 0
    signature: tuple[object, ...] = ()
    """Equal for requests whose inputs may be stacked."""
    window: ResponseWindow | None = None
    """Of a decoupled model, where the gateway asks for one."""
