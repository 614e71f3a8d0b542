"""Lines as a program reads them (promise 8, checks IN16)."""

import io
import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorline.telemetry.logs import _UNSAFE, LINE_LIMIT, LogLines, configure_logging, logged_request, one_line

Lines = Callable[[], list[dict[str, object]]]

ENDS = "\r\n\v\f\x1c\x1d\x1e\x85\u2028\u2029"
HOSTILE = f"a{ENDS}b\x1b[31mred\x00\x7f\u202egnitirw"


class Stream(io.BytesIO):
    def lines(self) -> list[str]:
        text = self.getvalue().decode()
        lines = text.split("\n")
        assert lines.pop() == ""
        return lines


@pytest.fixture
def stream() -> Iterator[Stream]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = Stream()
    configure_logging("tensorline-model", "model-1", "INFO", stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()


@pytest.fixture
def logged(stream: Stream) -> Lines:
    def read() -> list[dict[str, object]]:
        for line in stream.lines():
            assert len(line.splitlines()) == 1
            assert len(line.encode()) < LINE_LIMIT
        return [json.loads(line) for line in stream.lines()]

    return read


def test_the_standard_library_and_structlog_write_alike(logged: Lines) -> None:
    logging.getLogger("gateway.main").info("serving on %s", "here", extra={"port": 8001})
    structlog.get_logger().info("serving on here", port=8001)
    first, second = logged()
    assert first.pop("logger") == "gateway.main"
    assert first.pop("time") <= second.pop("time")  # type: ignore[operator]
    assert first == second
    assert first == {
        "level": "info",
        "event": "serving on here",
        "port": 8001,
        "service": "tensorline-model",
        "instance": "model-1",
    }


def test_lines_of_a_request_carry_its_ids(logged: Lines) -> None:
    with logged_request(bytes(range(16)), bytes(range(8)), "r-1"):
        logging.getLogger("x").warning("slow")
        structlog.get_logger().warning("slow")
    logging.getLogger("x").warning("after")
    *inside, after = logged()
    for line in inside:
        assert line["trace_id"] == "000102030405060708090a0b0c0d0e0f"
        assert line["span_id"] == "0001020304050607"
        assert line["request_id"] == "r-1"
    assert "trace_id" not in after


def test_levels_are_obeyed(logged: Lines) -> None:
    logging.getLogger("x").debug("no")
    structlog.get_logger().debug("no")
    logging.getLogger("x").error("yes")
    assert [line["event"] for line in logged()] == ["yes"]


def test_text_from_outside_cannot_forge_a_line(logged: Lines, stream: Stream) -> None:
    log, structured = logging.getLogger("x"), structlog.get_logger()
    with logged_request(bytes(16), bytes(8), HOSTILE):
        log.error("unknown model %s", HOSTILE, extra={"model": HOSTILE, HOSTILE: 1})
        structured.error(f"unknown model {HOSTILE}", model=HOSTILE)
    for line in logged():
        assert not any(ord(char) < 32 for value in line.values() if isinstance(value, str) for char in value)
        assert line["model"] == line["request_id"]
    assert all(char not in stream.getvalue().decode() for char in ENDS.replace("\n", ""))


def test_long_text_is_cut_and_a_line_has_a_limit(logged: Lines) -> None:
    huge = "\x1b" * 65536
    with logged_request(bytes(16), bytes(8), huge):
        logging.getLogger("x").error(huge, extra={f"{huge}{n}": huge for n in range(100)})
        logging.getLogger("x").error("short", extra={"model": "m" * 65536})
        structlog.get_logger().error(huge, **{f"k{n}": huge for n in range(100)})
    second = logged()[1]
    assert second["model"] == "m" * 256 + "…"


def test_an_exception_is_told_in_one_line(logged: Lines) -> None:
    try:
        raise ValueError(HOSTILE + "x" * 100_000)
    except ValueError:
        logging.getLogger("x").exception("it broke")
        structlog.get_logger().exception("it broke")
    for line in logged():
        assert line["event"] == "it broke"
        assert "exception" in line


def test_a_short_stack_is_whole(logged: Lines) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("x").exception("it broke")
    text = str(logged()[0]["exception"])
    assert text.startswith("Traceback")
    assert text.endswith("\nValueError: no")


def test_values_of_any_kind_are_written(logged: Lines) -> None:
    class Odd:
        def __repr__(self) -> str:
            return HOSTILE

    structlog.get_logger().info("x", number=1.5, big=2**70, none=None, flag=True, odd=Odd(), parts=[1, 2], raw=b"\xff")
    line = logged()[0]
    assert (line["number"], line["none"], line["flag"], line["parts"]) == (1.5, None, True, "[1, 2]")
    assert line["big"] == str(2**70)


def test_warnings_go_to_the_log(logged: Lines) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old", UserWarning, stacklevel=1)
    assert "UserWarning: old" in str(logged()[0]["event"])


def test_a_message_that_cannot_be_formatted_or_written_is_counted() -> None:
    root = logging.getLogger()
    handlers = root.handlers[:]
    closed = io.BytesIO()
    closed.close()
    lines = configure_logging("s", "i", stream=closed)
    logging.getLogger("x").error("%d", "not a number")
    logging.getLogger("x").error("lost")
    structlog.get_logger().error("lost")
    assert lines.dropped == 3
    root.handlers[:] = handlers
    logging.captureWarnings(False)
    structlog.reset_defaults()


def test_for_people_there_are_lines_without_json() -> None:
    lines = LogLines(Stream(), "s", "i", json=False)
    line = lines.line(
        "warning", f"slow {HOSTILE}", {"model": "m", "exception": "Traceback\n  here"}, "gateway"
    ).decode()
    assert line.endswith(" logger=gateway model=m\n    Traceback\n      here\n")
    assert " warning  slow a\\u000d\\u000a" in line
    assert "\x1b" not in line


@settings(deadline=None)  # the machine may be busy
@given(st.text(), st.integers(1, 100))
def test_one_line_is_one_line(text: str, limit: int) -> None:
    line = one_line(text, limit)
    assert len(line.splitlines()) <= 1
    assert line.encode().decode() == line
    assert len(line) <= 6 * limit + 1


def test_nothing_that_is_escaped_counts_as_printable() -> None:
    assert not any(chr(code).isprintable() for code in range(sys.maxunicode) if _UNSAFE.match(chr(code)))


def test_one_line_escapes_surrogates() -> None:
    assert one_line("\ud800", 5) == "\\ud800"


def test_stderr_is_the_default() -> None:
    program = """
import logging
from tensorline.telemetry.logs import configure_logging
configure_logging("s", "i")
logging.info("x")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert json.loads(done.stderr)["event"] == "x"
    assert done.stdout == b""
