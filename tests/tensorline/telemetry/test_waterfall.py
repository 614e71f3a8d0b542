"""The picture, by properties that hold for any trace."""

import re
from dataclasses import replace

import pytest
from rich.cells import cell_len

from tensorline.telemetry.parts import Part, parts_of, uncovered
from tensorline.telemetry.record import RequestRecord
from tensorline.telemetry.view import SpanView, TraceView, trace_view
from tensorline.telemetry.waterfall import render_waterfall
from tests.tensorline.telemetry.records import CALLED, GATEWAY, failed, pipeline, refused, single


def view(record: RequestRecord) -> TraceView:
    return trace_view(record, GATEWAY)


def rows(text: str) -> list[str]:
    lines = text.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("span "))
    return lines[first + 1 : -1]


def bar_of(row: str, head: str) -> str:
    start = head.index("0.000")
    return row[start : len(head) - 8]


def picture(trace: TraceView, width: int) -> list[tuple[str, str]]:
    """Label and bar of each row."""
    text = render_waterfall(trace, width=width)
    head = next(line for line in text.splitlines() if line.startswith("span "))
    return [(row[: head.index("service")].rstrip(), bar_of(row, head)) for row in rows(text)]


SNAPSHOT = """\
trace 000102030405060708090a0b0c0d0e0f
photo 1 · OK · 2.36 ms · request r-1
Compute of efficientnet_lite0 took 1.09 of 2.36 ms (46 %)

span                   service     0.000            1.18            2.36      ms
"""


def test_the_head_says_what_it_was_and_what_took_the_time() -> None:
    assert render_waterfall(view(pipeline())).startswith(SNAPSHOT)


def test_a_photo_that_waited_for_its_model() -> None:
    record = pipeline(compute_us=15_000)
    sentence = render_waterfall(view(record)).splitlines()[2]
    assert sentence == "Compute of efficientnet_lite0 took 15.1 of 16.4 ms (92 %)"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_every_span_has_one_row_within_the_width(width: int) -> None:
    trace = view(pipeline())
    text = render_waterfall(trace, width=width)
    assert all(cell_len(line) <= max(width, 64) for line in text.splitlines())
    assert len(rows(text)) == len(trace["spans"]) == 16
    labels = [label for label, _ in picture(trace, width)]
    assert labels[0] == "ModelInfer photo"
    assert [label for label in labels if label.startswith("  ") and label[2] != " "] == [
        "  decode",
        "  efficientnet_lite0",
        "  classes",
    ]
    assert labels[2:6] == ["    queue", "    compute_input", "    compute_infer", "    compute_output"]


@pytest.mark.parametrize("width", [80, 200])
def test_bars_follow_one_another_and_tell_their_kind_by_letter(width: int) -> None:
    bars = picture(view(pipeline()), width)
    firsts = [len(bar) - len(bar.lstrip()) for label, bar in bars if label.startswith("    ")]
    assert firsts == sorted(firsts)
    letters = {label.strip(): set(bar.strip()) for label, bar in bars}
    assert letters["queue"] == {"q"}
    assert letters["compute_input"] == {"i"}
    assert letters["compute_infer"] == {"C"}
    assert letters["compute_output"] == {"o"}
    assert letters["efficientnet_lite0"] == {"h", "-"}
    assert letters["ModelInfer photo"] <= {"g", "-"}
    whole = bars[0][1]
    assert whole.strip() == whole  # the request fills the axis


def test_bars_are_as_long_as_their_time() -> None:
    bars = dict(picture(view(pipeline(compute_us=15_000)), 200))
    width = len(bars["ModelInfer photo"])
    step = bars["  efficientnet_lite0"].strip()
    assert len(step) == pytest.approx(width * 15_360 / 16_360, abs=2)


def test_milliseconds_stand_at_the_end_of_each_row() -> None:
    text = render_waterfall(view(single(compute_us=1234)))
    numbers = [row.split()[-1] for row in rows(text)]
    assert numbers == ["1.59", "1.59", "0.090", "0.050", "1.23", "0.040"]


def test_the_parts_add_up_to_the_whole() -> None:
    record = pipeline()
    parts = parts_of(view(record))
    assert sum(part.duration_ns for part in parts) == record.ended - record.started
    assert parts == sorted(parts, key=lambda part: -part.duration_ns)
    by_name = {(part.kind, part.model): part.duration_ns for part in parts}
    assert by_name["gateway", ""] == 80_000
    assert by_name["queue", "decode"] == 90_000
    assert by_name["hop", "classes"] == 100_000 + 10_000 + 10_000 + 60_000
    assert by_name["compute", "efficientnet_lite0"] == 1_090_000


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (Part("gateway", "", 1), "the gateway's own work"),
        (Part("hop", "m", 1), "the hop to m"),
        (Part("queue", "m", 1), "the queue of m"),
        (Part("compute", "m", 1), "compute of m"),
    ],
)
def test_parts_are_named(part: Part, text: str) -> None:
    assert str(part) == text


def test_what_is_left_uncovered() -> None:
    assert uncovered(0, 10, []) == [(0, 10)]
    assert uncovered(0, 10, [(2, 4), (3, 5), (8, 20)]) == [(0, 2), (5, 8)]
    assert uncovered(0, 10, [(-5, 0), (0, 10)]) == []
    assert uncovered(0, 10, [(12, 14)]) == [(0, 10)]


def test_a_failure_is_marked_and_said() -> None:
    text = render_waterfall(view(failed(13, "CUDA\x1b[2J out of memory")))
    assert "photo 1 · INTERNAL · " in text
    assert "failed in ModelInfer photo: CUDA\\u001b[2J out of memory\n" in text
    assert [label for label, _ in picture(view(failed(13)), 80) if label.endswith(" !")] == [
        *("ModelInfer photo !", "  classes !", "    compute_infer !")
    ]


def test_a_refusal_is_one_row() -> None:
    text = render_waterfall(view(refused(3)))
    assert len(rows(text)) == 1
    assert "The gateway's own work took 1.00 of 1.00 ms (100 %)" in text


def test_colours_are_added_only_where_asked_for() -> None:
    plain, coloured = render_waterfall(view(pipeline())), render_waterfall(view(pipeline()), color=True)
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


def odd(**changes: object) -> SpanView:
    span = view(single())["spans"][0]
    return {**span, "span_id": "aa", "parent_id": "bb", "name": "odd", **changes}  # type: ignore[typeddict-item]


def test_spans_from_elsewhere_do_not_break_the_picture() -> None:
    record = single()
    record.context = replace(CALLED)
    trace = view(record)
    trace["spans"] += [
        odd(),
        odd(span_id="cc", parent_id="dd"),
        odd(span_id="dd", parent_id="cc"),
        odd(span_id="ee", parent_id="ee", name="\x1b[2J\u202e" + "名" * 500),
        odd(span_id="ff", parent_id="aa", name="below", kind="producer"),
        odd(span_id="11", parent_id="", name="[bold]markup[/bold]", end_ns=0),
        odd(span_id="12", parent_id="", name="for ever", start_ns=0, end_ns=2**63),
    ]
    text = render_waterfall(trace)
    assert len(rows(text)) == len(trace["spans"])
    assert all(cell_len(line) <= 80 for line in text.splitlines())
    assert "[bold]markup[/bold]" in text
    assert "\x1b" not in text


def test_deep_trees_keep_room_for_their_names() -> None:
    trace = view(single())
    parent = ""
    for number in range(100):
        trace["spans"].append(odd(span_id=f"x{number}", parent_id=parent, name=f"d{number}"))
        parent = f"x{number}"
    text = render_waterfall(trace)
    assert all(f"d{number} " in text for number in range(100))
