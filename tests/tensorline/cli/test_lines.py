import io
import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorline.cli.lines import JsonOutput, LineSplitter, TerminalOutput, last_words, plain_text


@given(st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b""))), st.data())
def test_lines_are_the_same_however_the_stream_is_cut(lines: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    splitter, found = LineSplitter(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        found += splitter.feed(stream[:size])
        stream = stream[size:]
    assert found + splitter.end() == lines


@given(st.binary(max_size=300))
def test_no_line_is_longer_than_the_limit_and_nothing_is_kept_beyond_it(stream: bytes) -> None:
    splitter = LineSplitter(limit=16)
    found = [line for at in range(0, len(stream), 7) for line in splitter.feed(stream[at : at + 7])]
    assert all(len(line) <= 16 for line in [*found, *splitter.end()])


def test_the_end_of_a_stream_without_a_line_break_is_a_line() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"a\r\nb") == [b"a"]
    assert splitter.end() == [b"b"]
    assert splitter.end() == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"event": "port taken", "level": "error"}', "port taken"),
        (b'{"level": "error"}', '{"level": "error"}'),
        (b"{broken", "{broken"),
        (b"  plain \x1b[31mred", "plain \ufffd[31mred"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b'{"event": "two\\nlines"}', "two\ufffdlines"),
    ],
)
def test_what_a_line_tells(line: bytes, told: str) -> None:
    assert plain_text(line) == told


def test_a_terminal_shows_names_in_colours_of_their_own() -> None:
    shown: list[bytes] = []
    output = TerminalOutput(shown.append, width=7)
    output.line("gateway", b"one")
    output.line("model", b"two")
    output.event("model", "ended", is_bad=True)
    output.close()
    assert b"".join(shown).decode().splitlines() == [
        "\x1b[36mgateway\x1b[0m one",
        "\x1b[33mmodel  \x1b[0m two",
        "\x1b[33mmodel  \x1b[0m \x1b[31mended\x1b[0m",
    ]


def test_json_passes_and_the_supervisor_speaks_json_too() -> None:
    stream = io.BytesIO()
    output = JsonOutput(stream)
    output.line("model", b'{"event": "ready"}')
    output.event("model", "ended\nwith quotes \"'", is_bad=True)
    output.close()
    first, second = stream.getvalue().splitlines()
    assert first == b'{"event": "ready"}'
    told = json.loads(second)
    assert (told["event"], told["process"], told["level"]) == ("ended\nwith quotes \"'", "model", "warning")


def test_a_reader_that_stands_still_holds_nobody_up() -> None:
    """A terminal stopped with Ctrl-S: lines are dropped, counted and told."""
    goes_on, shown = threading.Event(), io.BytesIO()

    def write(lines: bytes) -> None:
        goes_on.wait(10)
        shown.write(lines)

    output = TerminalOutput(write)
    started = time.monotonic()
    for number in range(30_000):
        output.line("model", b"%d" % number)
    assert time.monotonic() - started < 20
    goes_on.set()
    output.close()
    assert b"lines were dropped" in shown.getvalue()


def test_nobody_reading_at_all_is_no_error() -> None:
    def write(lines: bytes) -> None:
        raise BrokenPipeError

    output = TerminalOutput(write)
    output.line("model", b"x")
    output.close()


INFO = b'{"level": "info", "event": "stage is ready"}'
ERROR = b'{"level": "error", "event": "failed to load model"}'


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], ""),
        ([INFO], ""),
        ([ERROR, INFO], "failed to load model"),
        ([b"Traceback", b"ZeroDivisionError: by zero", INFO], "ZeroDivisionError: by zero"),
        ([b"12:00:01.123 info     stage is ready", INFO], ""),
        ([b"12:00:01.123 error    it broke", b"12:00:01.124 info     bye"], "12:00:01.123 error    it broke"),
        ([b'{"level": 3', b" ", INFO], '{"level": 3'),
        ([b"[1]", INFO], "[1]"),
    ],
)
def test_what_a_process_was_just_doing_is_no_reason_for_its_end(lines: list[bytes], words: str) -> None:
    assert last_words(lines) == words
