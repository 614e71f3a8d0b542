"""What the processes of a mesh say, line by line: cutting it out of their pipes, and where it goes."""

import contextlib
import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, Full, Queue
from typing import BinaryIO, Protocol

__all__ = ["JsonOutput", "KeptOutput", "LineSplitter", "Output", "TerminalOutput", "last_words", "plain_text"]

LINE_LIMIT = 64 << 10
QUEUED_LINES = 10_000
CLOSE_S = 2.0
HUMAN = re.compile(rb"\d\d:\d\d:\d\d\.\d+ (debug|info|warning|error|critical) ")
"""How a log line for people begins."""
COLOURS = (36, 33, 32, 35, 34, 96, 93, 92)
"""ANSI foreground colours, handed out in the order in which the names are first heard of."""


class Output(Protocol):
    """Where the lines of a mesh go. Never blocks: a stopped terminal must not stop the processes."""

    def line(self, name: str, text: bytes) -> None:
        """One log line of the process `name`, without its line break."""

    def event(self, name: str, text: str, *, is_bad: bool = False) -> None:
        """Something that the supervisor has to say about `name`."""

    def close(self) -> None:
        """Write out what is waiting, for at most two seconds."""


class LineSplitter:
    """Cuts a stream of bytes into lines; a line over the limit is cut too."""

    def __init__(self, limit: int = LINE_LIMIT) -> None:
        self._limit = limit
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes, without their line breaks."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > self._limit:
            lines.append(self._rest)
            self._rest = b""
        return [line[: self._limit].rstrip(b"\r") for line in lines]

    def end(self) -> list[bytes]:
        """What the stream ended with, when that is not a line break."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


def plain_text(line: bytes) -> str:
    """What a log line tells: the event of a JSON line, the line itself otherwise. Control characters are taken out."""
    text = line.decode(errors="replace")
    if text.startswith("{"):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = str(json.loads(text)["event"])
    return "".join(letter if letter.isprintable() or letter == "\t" else "\ufffd" for letter in text).strip()


def last_words(lines: Sequence[bytes]) -> str:
    """Why a process ended, as far as its last lines tell: the newest that is an error, or that is no log line at all.

    What it was just doing (its newest information) is no reason: "" then.
    """
    for line in reversed(lines):
        level = _level(line)
        if level in ("", "error", "critical") and (text := plain_text(line)):
            return text
    return ""


def _level(line: bytes) -> str:
    """Of a log line in either of its forms; "" for another line."""
    if line.startswith(b"{"):
        with contextlib.suppress(ValueError, AttributeError):
            return str(json.loads(line).get("level", ""))
    found = HUMAN.match(line)
    return found[1].decode() if found else ""


class _Writer:
    """Writes in a thread of its own. Lines beyond the bound are dropped and counted."""

    def __init__(self, write: Callable[[bytes], object], limit: int = QUEUED_LINES) -> None:
        self._write = write
        self._queue: Queue[bytes | None] = Queue(limit)
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        try:
            self._queue.put_nowait(line)
        except Full:
            self._dropped += 1

    def close(self) -> None:
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except Full:
            return
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (line := self._queue.get()) is not None:
            parts = [line]
            while len(parts) < 256:
                try:
                    more = self._queue.get_nowait()
                except Empty:
                    break
                if more is None:
                    self._out(parts)
                    return
                parts.append(more)
            self._out(parts)

    def _out(self, parts: list[bytes]) -> None:
        if self._dropped:
            parts.append(b"(%d lines were dropped: this output is read too slowly)" % self._dropped)
            self._dropped = 0
        try:
            self._write(b"".join(part + b"\n" for part in parts))
        except (OSError, ValueError):
            return  # nobody reads; the processes live on


class TerminalOutput:
    """For people: each line behind the name of its process, in that process's colour."""

    def __init__(self, write: Callable[[bytes], object], width: int = 12) -> None:
        """`write` takes finished lines with ANSI colours. Names are filled up to `width`."""
        self._writer = _Writer(write)
        self._width = width
        self._colours: dict[str, int] = {}

    def line(self, name: str, text: bytes) -> None:
        self._put(name, plain_text(text))

    def event(self, name: str, text: str, *, is_bad: bool = False) -> None:
        self._put(name, f"\x1b[{'31' if is_bad else '2'}m{text}\x1b[0m")

    def close(self) -> None:
        self._writer.close()

    def _put(self, name: str, text: str) -> None:
        colour = self._colours.setdefault(name, COLOURS[len(self._colours) % len(COLOURS)])
        self._writer.put(f"\x1b[{colour}m{name:<{self._width}}\x1b[0m {text}".encode(errors="replace"))


class JsonOutput:
    """For machines: the lines of the processes as they are (JSON already), the supervisor's in the same form."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._writer = _Writer(self._write)

    def line(self, name: str, text: bytes) -> None:
        self._writer.put(text)

    def event(self, name: str, text: str, *, is_bad: bool = False) -> None:
        now = time.time()
        stamp = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1e6):06d}Z"
        level = "warning" if is_bad else "info"
        about = {"time": stamp, "level": level, "event": text, "process": name, "service": "up"}
        self._writer.put(json.dumps(about).encode())

    def close(self) -> None:
        self._writer.close()

    def _write(self, lines: bytes) -> None:
        self._stream.write(lines)
        self._stream.flush()


class KeptOutput:
    """Keeps the newest lines, for whoever shows them only when something went wrong."""

    def __init__(self, limit: int = 200) -> None:
        self.lines: deque[str] = deque(maxlen=limit)

    def line(self, name: str, text: bytes) -> None:
        self.lines.append(f"{name}: {plain_text(text)}")

    def event(self, name: str, text: str, *, is_bad: bool = False) -> None:
        self.lines.append(f"{name}: {text}")

    def close(self) -> None:
        return
