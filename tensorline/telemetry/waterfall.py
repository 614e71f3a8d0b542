"""One trace as a waterfall in the terminal: a row per span, bars on one axis, and in a sentence what took the time."""

import io
from collections.abc import Iterator
from itertools import groupby
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from tensorline.telemetry.logs import one_line
from tensorline.telemetry.parts import children_of, dominant, uncovered
from tensorline.telemetry.view import SpanView, TraceView

__all__ = ["render_waterfall", "waterfall"]

MIN_WIDTH: Final = 64
_NAME_WIDTH: Final = (22, 40)
_SERVICE_WIDTH: Final = (11, 20)
_NUMBER_WIDTH: Final = 7
_DEPTH_LIMIT: Final = 8
_AXIS_MARKS: Final = 3

# A letter tells the kinds apart where a colour cannot.
_FILLS: Final = {
    "queue": ("q", "yellow"),
    "compute_input": ("i", "cyan"),
    "compute_infer": ("C", "green"),
    "compute_output": ("o", "cyan"),
}
_OWN: Final = {"server": ("g", "blue"), "client": ("h", "magenta")}
_ELSEWHERE: Final = ("=", "white")
_COVERED: Final = ("-", "bright_black")
_LEGEND: Final = (
    ("g", "blue", "gateway"),
    ("h", "magenta", "hop"),
    ("q", "yellow", "queue"),
    ("i", "cyan", "input"),
    ("C", "green", "compute"),
    ("o", "cyan", "output"),
    ("-", "bright_black", "below"),
)
_Row = tuple[int, SpanView, list[SpanView]]


def render_waterfall(trace: TraceView, *, width: int = 80, color: bool = False) -> str:
    """The waterfall as text of lines of at most `width` columns (64 at least), with ANSI colours if asked for."""
    width = max(width, MIN_WIDTH)
    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        legacy_windows=False,
        _environ={},
    )
    console.print(waterfall(trace, width), end="")
    return out.getvalue()


def waterfall(trace: TraceView, width: int = 80) -> Text:
    """For a rich console of at least `width` columns."""
    spans = trace["spans"]
    start = min(span["start_ns"] for span in spans)
    total = max(max(span["end_ns"] for span in spans) - start, 1)
    axis = _Axis(start, total, max(width, MIN_WIDTH))
    text = Text()
    for line in (*_header(trace), axis.head(), *(axis.row(*row) for row in _rows(spans)), _legend()):
        text.append_text(line).append("\n")
    return text


def _header(trace: TraceView) -> Iterator[Text]:
    yield Text(f"trace {trace['trace_id']}", style="bold")
    model = f"{one_line(trace['model'], 128)} {one_line(trace['version'], 32)}".rstrip()
    request = f" · request {one_line(trace['request_id'], 64)}" if trace["request_id"] else ""
    line = Text(f"{model} · ")
    line.append(trace["status"], style="green" if trace["status"] == "OK" else "bold red")
    yield line.append(f" · {_ms(trace['duration_ns'])} ms{request}")
    for span in trace["spans"]:
        if span["is_error"] and span["message"]:
            yield Text(f"failed in {one_line(span['name'], 128)}: {one_line(span['message'], 512)}", style="red")
            break
    part, whole = dominant(trace), max(trace["duration_ns"], 1)
    share = round(100 * part.duration_ns / whole)
    sentence = f"{part} took {_ms(part.duration_ns)} of {_ms(trace['duration_ns'])} ms ({share} %)"
    yield Text(one_line(sentence[0].upper() + sentence[1:], 256))
    yield Text("")


def _rows(spans: list[SpanView]) -> Iterator[_Row]:
    """Depth, span and its children, parents first. Spans whose parent is not here stand at the top."""
    children = children_of(spans)
    known = {span["span_id"] for span in spans}
    seen: set[str] = set()

    def walk(span: SpanView, depth: int) -> Iterator[_Row]:
        seen.add(span["span_id"])
        below = [child for child in children[span["span_id"]] if child["span_id"] not in seen]
        yield depth, span, below
        for child in below:
            if child["span_id"] not in seen:
                yield from walk(child, depth + 1)

    roots = [span for span in spans if span["parent_id"] not in known]
    for span in (*roots, *spans):  # the second time for what hangs in a circle
        if span["span_id"] not in seen:
            yield from walk(span, 0)


class _Axis:
    """Columns of the picture, and where a time lies in them."""

    def __init__(self, start: int, total: int, width: int) -> None:
        room = width - _NUMBER_WIDTH - 3
        self._start, self._total = start, total
        self._name = min(max(_NAME_WIDTH[0], room // 4), _NAME_WIDTH[1])
        self._service = min(max(_SERVICE_WIDTH[0], room // 8), _SERVICE_WIDTH[1])
        self._bar = room - self._name - self._service

    def head(self) -> Text:
        marks = [f"{_ms(self._total * n // (_AXIS_MARKS - 1))}" for n in range(_AXIS_MARKS)]
        middle = marks[1].center(self._bar - 2 * max(len(marks[0]), len(marks[2])))
        pad = max(len(marks[0]), len(marks[2]))
        axis = f"{marks[0].ljust(pad)}{middle}{marks[2].rjust(pad)}"
        return Text(f"{'span':<{self._name}} {'service':<{self._service}} {axis} {'ms':>{_NUMBER_WIDTH}}", style="dim")

    def row(self, depth: int, span: SpanView, below: list[SpanView]) -> Text:
        label = "  " * min(depth, _DEPTH_LIMIT) + one_line(span["name"], 128) + (" !" if span["is_error"] else "")
        service = one_line(span["service"].removeprefix("tensorline-"), 64)
        line = Text(f"{_fit(label, self._name)} {_fit(service, self._service)} ")
        if span["is_error"]:
            line.stylize("red")
        line.append_text(self._picture(span, below))
        return line.append(f" {_ms(span['end_ns'] - span['start_ns']):>{_NUMBER_WIDTH}}")

    def _picture(self, span: SpanView, below: list[SpanView]) -> Text:
        fill = _FILLS.get(span["name"]) or (_OWN.get(span["kind"]) if below else None) or _own(span)
        cells: list[tuple[str, str]] = [(" ", "")] * self._bar
        first, last = self._cells(span["start_ns"], span["end_ns"])
        cells[first:last] = [_COVERED if below else fill] * (last - first)
        if below:
            own = uncovered(span["start_ns"], span["end_ns"], ((s["start_ns"], s["end_ns"]) for s in below))
            for start, end in own:
                column, after = self._cells(start, end)
                if (end - start) * self._bar * 2 >= self._total:  # shorter than half a cell: the rows below say more
                    cells[column:after] = [fill] * (after - column)
        picture = Text()
        for (character, style), run in groupby(cells):
            picture.append(character * len(list(run)), style=style)
        return picture

    def _cells(self, start: int, end: int) -> tuple[int, int]:
        """First cell and the one after the last: at least one, inside the picture."""
        first = min(max((start - self._start) * self._bar // self._total, 0), self._bar - 1)
        last = -((self._start - end) * self._bar // self._total)
        return first, min(max(last, first + 1), self._bar)


def _own(span: SpanView) -> tuple[str, str]:
    return _OWN.get(span["kind"], _ELSEWHERE)


def _legend() -> Text:
    legend = Text("")
    for letter, style, meaning in _LEGEND:
        legend.append(letter, style=style).append(f" {meaning}  ", style="dim")
    legend.rstrip()
    return legend


def _fit(text: str, width: int) -> str:
    """Exactly `width` columns; East Asian letters take two."""
    return set_cell_size(text if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…", width)


def _ms(duration_ns: int) -> str:
    ms = max(duration_ns, 0) / 1e6
    if ms >= 1e7:
        return f"{ms:.1e}"
    if ms >= 99.95:
        return f"{ms:.0f}"
    return f"{ms:.1f}" if ms >= 9.995 else f"{ms:.2f}" if ms >= 0.9995 else f"{ms:.3f}"
