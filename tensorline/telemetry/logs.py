"""Logs: one JSON object per line on stderr, or a line for people when a terminal is there.

Our own modules log through the standard library or structlog; both end here, with the request they belong to.
"""

import contextlib
import logging
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO, Final

import orjson

__all__ = [
    "CLIENT_TEXT_LIMIT",
    "LINE_LIMIT",
    "LOG_FORMATS",
    "LogLines",
    "LogSwitches",
    "configure_logging",
    "logged_request",
    "one_line",
]

CLIENT_TEXT_LIMIT: Final = 256
LINE_LIMIT: Final = 8 * 1024
LOG_FORMATS: Final = ("default", "ISO8601")
_EVENT_LIMIT: Final = 1024
_STACK_LIMIT: Final = 4 * 1024
_KEY_LIMIT: Final = 64
_FIELDS_LIMIT: Final = 32
_STACKS: Final = ("exception", "stack")
_METHOD_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "msg": logging.INFO, "warning": logging.WARNING}
_RECORD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

# What ends a line, moves a cursor or re-orders text somewhere: C0, DEL, C1, zero-width and bidirectional controls,
# the two Unicode line ends, the byte-order mark, and surrogates, which no encoding can carry.
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")

_request: ContextVar[tuple[bytes, bytes, str] | None] = ContextVar("tensorline_request", default=None)


@dataclass(frozen=True, slots=True)
class LogSwitches:
    """Which lines are written, as Triton's log settings say it: each kind has a switch of its own."""

    verbose: int = 0
    """Above 0, lines of level DEBUG are written."""
    info: bool = True
    warning: bool = True
    error: bool = True
    format: str = "default"
    """Of `LOG_FORMATS`: what begins a line for people. JSON lines have their time in ISO 8601 in either."""

    @classmethod
    def from_level(cls, level: str, log_format: str = "default") -> "LogSwitches":
        """As a level of the standard library says: that one and what is above it."""
        number = logging.getLevelNamesMapping()[level.upper()]
        return cls(
            int(number <= logging.DEBUG),
            number <= logging.INFO,
            number <= logging.WARNING,
            number <= logging.ERROR,
            log_format,
        )

    def shows(self, level: int) -> bool:
        if level >= logging.ERROR:
            return self.error
        if level >= logging.WARNING:
            return self.warning
        return self.info if level >= logging.INFO else self.verbose > 0


@contextlib.contextmanager
def logged_request(trace_id: bytes, span_id: bytes, request_id: str = "") -> Iterator[None]:
    """Lines written inside carry these ids."""
    token = _request.set((trace_id, span_id, request_id))
    try:
        yield
    finally:
        _request.reset(token)


def configure_logging(
    service: str,
    instance_id: str,
    level: str = "INFO",
    json: bool = True,
    stream: BinaryIO | None = None,
    log_format: str = "default",
) -> "LogLines":
    """Send everything that is logged in this process to stderr. Called once, by `main`; `LogLines.switch` changes later
    what is written.

    Args:
        service: "tensorline-gateway", ...; stands in each line with `instance_id`.
        level: "DEBUG", "INFO", "WARNING" or "ERROR".
        json: False for people: `level  event  key=value`.
        stream: Instead of stderr.
        log_format: Of `LOG_FORMATS`.
    """
    # Imported here: 5 MB and 0.1 s (it loads rich) that importers of this module's other names do without.
    import structlog

    lines = LogLines(stream or sys.stderr.buffer, service, instance_id, json=json)
    handler = _Handler(lines)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    lines.switch(LogSwitches.from_level(level, log_format))
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            lines.drop_hidden,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            lines.render,
        ],
        # Lets everything through: the level may change later, and loggers are cached.
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=True,
    )
    return lines


class LogLines:
    """Renders events and writes them, one line each; what cannot be written is counted and forgotten."""

    def __init__(self, stream: BinaryIO, service: str, instance_id: str, *, json: bool) -> None:
        self._stream = stream
        self._common = {"service": service, "instance": instance_id}
        self._json = json
        self.switches = LogSwitches()
        self.dropped = 0

    def msg(self, line: bytes) -> None:
        """Write one rendered line."""
        try:
            self._stream.write(line)
            self._stream.flush()
        except (OSError, ValueError):  # a closed or full pipe must not end a request
            self.dropped += 1

    debug = info = warning = warn = error = critical = fatal = exception = log = failure = msg

    def switch(self, switches: LogSwitches) -> None:
        """Write by these from now on."""
        self.switches = switches
        logging.getLogger().setLevel(logging.DEBUG if switches.verbose else logging.INFO)

    def drop_hidden(self, logger: object, method: str, event: Mapping[str, Any]) -> Mapping[str, Any]:
        """The first processor of structlog's chain."""
        from structlog import DropEvent

        if not self.switches.shows(_METHOD_LEVELS.get(method, logging.ERROR)):
            raise DropEvent
        return event

    def render(self, logger: object, method: str, event: Mapping[str, Any]) -> bytes:
        """The last processor of structlog's chain: from the event's values to the line."""
        fields = dict(event)
        text = fields.pop("event", "")
        level = fields.pop("level", method)
        return self.line(str(level), str(text), fields)

    def line(self, level: str, event: str, fields: Mapping[str, object], logger: str = "") -> bytes:
        """The finished line: every text in it escaped and cut."""
        values: dict[str, object] = {"time": _now(), "level": level, "event": one_line(event, _EVENT_LIMIT)}
        if logger:
            values["logger"] = logger
        request = _request.get()
        if request is not None:
            values["trace_id"], values["span_id"] = request[0].hex(), request[1].hex()
            if request[2]:
                values["request_id"] = one_line(request[2], CLIENT_TEXT_LIMIT)
        for key, value in islice(fields.items(), _FIELDS_LIMIT):
            values[one_line(key, _KEY_LIMIT)] = _stack(str(value)) if key in _STACKS else _plain(value)
        return self._json_line(values) if self._json else _human_line(values, is_iso=self.switches.format == "ISO8601")

    def _json_line(self, values: dict[str, object]) -> bytes:
        values |= self._common
        line = orjson.dumps(values)
        while len(line) >= LINE_LIMIT:  # halve the longest: ends, since number and size of the fields are bounded
            key = max(values, key=lambda name: len(str(values[name])))
            text = str(values[key])
            values[key] = one_line(text, len(text) // 2)
            line = orjson.dumps(values)
        return line + b"\n"


class _Handler(logging.Handler):
    """The standard library's records, rendered like structlog's."""

    def __init__(self, lines: LogLines) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        if not self._lines.switches.shows(record.levelno):
            return
        try:
            fields = {key: value for key, value in record.__dict__.items() if key not in _RECORD_FIELDS}  # extra={...}
            if record.exc_info and record.exc_info[0] is not None:
                fields["exception"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
            if record.stack_info:
                fields["stack"] = record.stack_info
            level = record.levelname.lower()
            self._lines.msg(self._lines.line(level, record.getMessage(), fields, record.name))
        except Exception:
            self._lines.dropped += 1


def _now() -> str:
    seconds, rest = divmod(time.time_ns(), 10**9)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest // 1000:06d}Z"


def one_line(text: str, limit: int) -> str:
    """One safe line: cut to `limit` characters, what is unsafe as a visible \\uXXXX."""
    if len(text) <= limit and text.isprintable():  # nothing unsafe is printable
        return text
    return _UNSAFE.sub(_escape, text if len(text) <= limit else f"{text[:limit]}…")


def _stack(text: str) -> str:
    """As `one_line`, but with its line breaks (JSON escapes them); the end of a stack says most."""
    cut = text if len(text) <= _STACK_LIMIT else f"…{text[-_STACK_LIMIT:]}"
    return "\n".join(_UNSAFE.sub(_escape, line) for line in cut.split("\n"))


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value
    return one_line(value if isinstance(value, str) else repr(value), CLIENT_TEXT_LIMIT)


def _human_line(values: dict[str, object], *, is_iso: bool) -> bytes:
    when, level, event = str(values.pop("time")), values.pop("level"), values.pop("event")
    stack = "".join(f"\n{values.pop(key)}".replace("\n", "\n    ") for key in _STACKS if key in values)
    more = "".join(f" {key}={value}" for key, value in values.items())
    return f"{when if is_iso else when[11:23]} {level!s:<8} {event}{more}{stack}\n".encode()


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
