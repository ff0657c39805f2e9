"""The pictures of a simulation say what it says: characters, SVG and trace are read back from what is drawn.

The golden texts were worked out by hand from the rules of the papers: a forward is one tick, a full backward two, an
input or weight gradient one each; a stage starts as soon as its neighbour and its own order allow.
"""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from isostep.errors import InputError
from isostep.schedule import drawing, gantt_svg, gantt_text, trace
from isostep.schedule.costs import Costs
from isostep.schedule.generate import NAMES, generate
from isostep.schedule.simulate import Simulation, Span, simulate
from isostep.schedule.svg import Frame, tag

SVG = "{http://www.w3.org/2000/svg}"
Cell = tuple[int, str, int, float]
"""Rank, op (lower case for odd chunks), microbatch, start."""


def simulated(name: str, stages: int, microbatches: int, chunks: int | None = None, **costs: Any) -> Simulation:
    schedule = generate(name, stages, microbatches, chunks)
    return simulate(schedule, Costs.of(schedule, **costs))


def rows(sim: Simulation, start: float = 0.0, end: float | None = None, width: int = 80) -> list[str]:
    lines = gantt_text.draw(sim, start, end, width).plain.splitlines()
    return [line for line in lines if line.startswith("rank")]


# ---- characters

GOLDEN = {
    ("gpipe", 2, 2): """
rank 0  F0 F1 .. .. .. B0─── B1───
rank 1  .. F0 F1 B0─── B1─── .. ..
time    0  1  2  3  4  5  6  7  8
F forward  B backward  . idle""",
    ("gpipe", 3, 4): """
rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0─── B1─── B2─── B3───
rank 1  .. F0 F1 F2 F3 .. .. .. B0─── B1─── B2─── B3─── .. ..
rank 2  .. .. F0 F1 F2 F3 B0─── B1─── B2─── B3─── .. .. .. ..
time    0     2     4     6     8     10    12    14    16
F forward  B backward  . idle""",
    ("1f1b", 2, 3): """
rank 0  F0 F1 .. .. B0─── F2 B1─── .. B2───
rank 1  .. F0 B0─── F1 B1─── F2 B2─── .. ..
time    0     2     4     6     8     10
F forward  B backward  . idle""",
    ("1f1b", 4, 4): """
rank 0  F0 F1 F2 F3 .. .. .. .. .. .. B0─── .. B1─── .. B2─── .. B3───
rank 1  .. F0 F1 F2 .. .. .. .. B0─── F3 B1─── .. B2─── .. B3─── .. ..
rank 2  .. .. F0 F1 .. .. B0─── F2 B1─── F3 B2─── .. B3─── .. .. .. ..
rank 3  .. .. .. F0 B0─── F1 B1─── F2 B2─── F3 B3─── .. .. .. .. .. ..
time    0     2     4     6     8     10    12    14    16    18    20
F forward  B backward  . idle""",
    ("zb-h1", 2, 3): """
rank 0  F0 F1 .. I0 W0 F2 I1 W1 I2 W2
rank 1  .. F0 I0 F1 I1 W0 F2 I2 W1 W2
time    0     2     4     6     8
F forward  I input gradient  W weight gradient  . idle""",
    ("zb-h1", 4, 4): """
rank 0  F0 F1 F2 F3 .. .. .. I0 W0 I1 W1 I2 W2 I3 W3
rank 1  .. F0 F1 F2 .. .. I0 F3 I1 W0 I2 W1 I3 W2 W3
rank 2  .. .. F0 F1 .. I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
rank 3  .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3
time    0     2     4     6     8     10    12    14
F forward  I input gradient  W weight gradient  . idle""",
    ("zb-v", 2, 2): """
rank 0  F0 F1 .. f0 i0 w0 f1 i1 w1 I0 W0 .. I1 W1
rank 1  .. F0 f0 F1 f1 i0 w0 I0 W0 i1 w1 I1 W1 ..
time    0     2     4     6     8     10    12
F forward  I input gradient  W weight gradient  . idle  lower case: chunk 1""",
    ("zb-v", 2, 3): """
rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2 ..
rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2
time    0     2     4     6     8     10    12    14    16    18
F forward  I input gradient  W weight gradient  . idle  lower case: chunk 1""",
}


@pytest.mark.parametrize("key", GOLDEN, ids=str)
def test_small_schedules_as_the_papers_draw_them(key: tuple[str, int, int]) -> None:
    drawn = gantt_text.draw(simulated(*key)).plain
    assert f"\n{drawn}" == GOLDEN[key]
    others = [name for name in ("gpipe", "1f1b", "zb-h1", "zb-v") if name != key[0]]
    assert all(gantt_text.draw(simulated(name, *key[1:])).plain != drawn for name in others), "the control is the same"


def test_transfers_delay_the_receiver_and_half_ticks_are_drawn() -> None:
    assert rows(simulated("1f1b", 2, 3, transfer=1)) == [
        "rank 0  F0 F1 .. .. .. .. B0─── F2 B1─── .. .. .. B2───",
        "rank 1  .. .. F0 B0─── F1 B1─── .. .. F2 B2─── .. .. ..",
    ]
    assert rows(simulated("gpipe", 2, 2, transfer=0.5)) == [
        "rank 0  F0─ F1─ ................B0───── B1─────",
        "rank 1  ......F0─ F1─ B0───── B1───── ..........",
    ]


def read_back(sim: Simulation, width: int) -> set[Cell]:
    """Every action as the characters show it; times by the axis that is drawn, with two or more times on it."""
    lines = gantt_text.draw(sim, width=width).plain.splitlines()
    axis = next(line for line in lines if line.startswith("time"))
    (zero, _), *_, (column, last) = [(match.start(), float(match[0])) for match in re.finditer(r"\d\S*", axis)]
    found = set()
    for line in lines:
        if row := re.match(r"rank (\d+)", line):
            for mark in re.finditer(r"([FBIWfbiw])(\d+)", line):
                start = (mark.start() - zero) * last / (column - zero)
                found.add((int(row[1]), mark[1], int(mark[2]), round(start, 6)))
    return found


def as_marks(sim: Simulation) -> set[Cell]:
    chunks = drawing.local_chunks(sim.schedule)
    return {
        (s.rank, s.op.lower() if chunks[s.stage] % 2 else s.op, s.microbatch_index, round(s.start, 6))
        for s in sim.spans()
    }


whole = st.integers(1, 3)
sizes = st.tuples(st.sampled_from(NAMES), st.integers(1, 4), st.integers(2, 12))


@given(sizes, whole, whole, whole, st.integers(0, 2))
def test_every_action_is_read_back_from_the_characters(
    size: tuple[str, int, int], forward: int, inputs: int, weights: int, transfer: int
) -> None:
    try:
        sim = simulated(*size, forward=forward, input_grad=inputs, weight_grad=weights, transfer=transfer)
    except InputError:
        return  # no such schedule
    assert read_back(sim, width=1000) == as_marks(sim)
    slower = simulated(*size, forward=forward + 1, input_grad=inputs, weight_grad=weights, transfer=transfer)
    assert read_back(sim, width=1000) != as_marks(slower)


def filled(sim: Simulation, rank: int, start: float, end: float) -> dict[str, float]:
    """Share of a window by op, "." for idle."""
    shares = dict.fromkeys("FBIW.", 0.0)
    for span in sim.spans():
        if span.rank == rank:
            shares[span.op] += max(0.0, min(end, span.end) - max(start, span.start)) / (end - start)
    shares["."] = 1.0 - sum(shares.values())
    return shares


def test_where_costs_have_no_tick_a_column_shows_what_fills_most_of_it() -> None:
    sim = simulated("zb-h1", 3, 5, forward=1.237, input_grad=0.911, weight_grad=1.413)
    for rank, line in enumerate(rows(sim)):
        row = line[8:].ljust(72)
        op = "."
        for column, mark in enumerate(row):
            op = mark if mark in "FBIW." else op  # digits, lines and blanks go on with the action before them
            shares = filled(sim, rank, sim.makespan * column / 72, sim.makespan * (column + 1) / 72)
            assert shares[op] >= max(shares.values()) - 1e-5, (rank, column)


def test_a_picture_too_dense_is_cut_and_says_so_and_zooms() -> None:
    sim = simulated("1f1b", 4, 64)
    drawn = gantt_text.draw(sim).plain
    assert drawn.endswith("from 0 to 72 of 201; zoom with --from and --to")
    assert rows(sim)[3].startswith("rank 3  ...FB─FB─FB─")
    assert rows(sim, 20, 30) == [
        "rank 0  B3  F7  B4───── F8  B5───── F9  B6─────",
        "rank 1  B4───── F7  B5───── F8  B6───── F9  B7",
        "rank 2  F6  B5───── F7  B6───── F8  B7───── F9",
        "rank 3  B5  F6  B6───── F7  B7───── F8  B8─────",
    ]
    whole_time = gantt_text.draw(sim, 0, 201).plain
    assert "zoom" not in whole_time
    assert gantt_text.draw(sim, 0, 1e9).plain == whole_time


def test_many_ranks_are_the_first_and_the_last() -> None:
    drawn = gantt_text.draw(simulated("gpipe", 100, 2)).plain
    shown = [int(rank) for rank in re.findall(r"^rank (\d+)", drawn, re.MULTILINE)]
    assert shown == [*range(20), *range(80, 100)]
    assert "... 60 ranks not drawn" in drawn
    assert "not drawn" not in gantt_text.draw(simulated("gpipe", 40, 2)).plain


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [40, 80, 133])
def test_no_line_is_wider_than_asked(name: str, width: int) -> None:
    for sim in (simulated(name, 4, 8), simulated(name, 4, 64), simulated(name, 3, 12, forward=1234.567)):
        lines = gantt_text.draw(sim, width=width).plain.splitlines()
        legend = next(line for line in lines if line.startswith("F forward"))
        assert len(legend) <= 80
        assert max(len(line) for line in lines if line is not legend) <= max(width, 60)


def test_ops_are_told_apart_by_colour_too_and_in_ascii() -> None:
    lines = gantt_text.draw(simulated("dualpipe-v", 2, 4)).lines[:2]
    styles = {line.plain[part.start].upper(): str(part.style) for line in lines for part in line.spans}
    assert len({styles[op] for op in "BIW"}) == 3
    assert "F" not in styles
    console = Console(width=80, record=True, file=open("/dev/null", "w", encoding="ascii"))  # noqa: SIM115
    console.print(gantt_text.draw(simulated("1f1b", 2, 3)))
    text = console.export_text()
    console.file.close()
    assert text.isascii()
    assert "B0--- F2 B1---" in text


@pytest.mark.parametrize(
    ("start", "end", "named"),
    [(-1.0, None, "from"), (99.0, None, "from"), (float("nan"), None, "from"), (3.0, 3.0, "to"), (3.0, 2.0, "to"),
     (0.0, float("nan"), "to")],
)  # fmt: skip
def test_windows_that_cannot_be_drawn(start: float, end: float | None, named: str) -> None:
    sim = simulated("1f1b", 2, 3)
    for draw in (gantt_text.draw, gantt_svg.draw):
        with pytest.raises(InputError, match=f"^{named}: got"):
            draw(sim, start, end)


def test_nothing_takes_time() -> None:
    sim = simulated("1f1b", 2, 2, forward=0, input_grad=0, weight_grad=0)
    assert gantt_text.draw(sim).plain == "Nothing takes any time: every cost is 0."
    assert len(rectangles(gantt_svg.draw(sim))) == sim.schedule.size


# ---- SVG


def rectangles(svg: str) -> list[ElementTree.Element]:
    return [e for e in ElementTree.fromstring(svg).iter(f"{SVG}rect") if "span" in e.attrib["class"].split()]


def from_rectangles(svg: str, sim: Simulation) -> set[Span]:
    """Actions by their rectangles; times by their places, to a hundredth of a pixel."""
    root = ElementTree.fromstring(svg)
    lane = next(e for e in root.iter(f"{SVG}rect") if e.attrib["class"] == "lane")
    left, wide = float(lane.attrib["x"]), float(lane.attrib["width"])
    found = set()
    for rectangle in rectangles(svg):
        data = rectangle.attrib
        op = data["class"].split()[1].upper()
        start = (float(data["x"]) - left) / wide * sim.makespan
        rank, stage, microbatch = (int(data[f"data-{key}"]) for key in ("rank", "stage", "microbatch"))
        found.add(Span(rank, stage, microbatch, op, round(start, 1), 0.0))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_rectangle_for_every_action_where_it_belongs(name: str) -> None:
    sim = simulated(name, 3, 6, transfer=0.2)
    svg = gantt_svg.draw(sim)
    expected = {span._replace(start=round(span.start, 1), end=0.0) for span in sim.spans()}
    other = {span._replace(start=round(span.start, 1), end=0.0) for span in simulated(name, 3, 6).spans()}
    assert len(rectangles(svg)) == sim.schedule.size
    assert from_rectangles(svg, sim) == expected
    assert expected != other
    links = [e.attrib["d"].count("M") for e in ElementTree.fromstring(svg).iter(f"{SVG}path") if "d" in e.attrib]
    assert sum(links) == len(sim.transfers()) + 1, "every transfer, and the one of the legend"


def test_svg_is_accessible_and_fits_a_strict_policy() -> None:
    sim = simulated("zb-v", 2, 4, transfer=0.5)
    for svg in (gantt_svg.draw(sim), gantt_svg.memory(sim, limit=3)):
        root = ElementTree.fromstring(svg)
        assert root.attrib["role"] == "img"
        assert [child.tag for child in root][:3] == [f"{SVG}title", f"{SVG}desc", f"{SVG}style"]
        assert "4 microbatches" in (root[0].text or "")
        assert (root[1].text or "").endswith(".")
        names = {name for element in root.iter() for name in element.attrib}
        assert not [name for name in names if name.startswith("on") or name in ("style", "href")]
        assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
            "svg", "title", "desc", "style", "rect", "text", "line", "path", "g",
        }  # fmt: skip
    bare = gantt_svg.draw(sim, style=False)
    assert "<style" not in bare
    assert gantt_svg.draw(sim).replace(f"<style>\n{gantt_svg.STYLE}</style>\n", "") == bare


def test_every_text_is_escaped() -> None:
    sim = simulated("1f1b", 2, 2)
    hostile = replace(sim, schedule=replace(sim.schedule, name="a\x00\x1b<script>alert('1')&\"'.csv"))
    for svg in (gantt_svg.draw(hostile), gantt_svg.memory(hostile)):
        root = ElementTree.fromstring(svg)
        assert "a??<script>alert('1')&\"'.csv" in (root[0].text or "")
        assert "<script" not in svg


def test_attributes_are_escaped() -> None:
    assert tag("rect", "lane", data_name='"<&>', x=1.0) == '<rect class="lane" data-name="&quot;&lt;&amp;&gt;" x="1"/>'


def test_at_most_four_thousand_spans_are_drawn_and_the_title_says_so() -> None:
    sim = simulated("1f1b", 16, 256)
    assert sim.schedule.size > gantt_svg.MAX_SPANS
    svg = gantt_svg.draw(sim)
    drawn = rectangles(svg)
    title = ElementTree.fromstring(svg)[0].text or ""
    last = float(re.findall(r"from 0 to ([\d.]+) of", title)[0])
    assert gantt_svg.MAX_SPANS * 0.9 < len(drawn) <= gantt_svg.MAX_SPANS
    assert len(drawn) == len(sim.spans(0, last))
    part = gantt_svg.draw(sim, 100, 120)
    assert len(rectangles(part)) == len(sim.spans(100, 120))
    assert "from 100 to 120 of 813" in part
    assert "from" not in (ElementTree.fromstring(gantt_svg.draw(simulated("1f1b", 16, 64)))[0].text or "")


def test_first_spans_leaves_out_none_that_begin_before_its_end() -> None:
    sim = simulated("gpipe", 4, 10)
    for start, end, most in itertools.product((0.0, 5.5), (20.0, sim.makespan), (1, 7, 30, 1000)):
        spans, last = drawing.first_spans(sim, start, end, most)
        inside = sim.spans(start, last)
        assert len(spans) <= most
        assert start <= last <= end
        assert sorted(spans) == sorted(inside) or len(inside) > most
    assert len(drawing.first_spans(sim, 0.0, sim.makespan, 1000)[0]) == sim.schedule.size


def test_chunks_are_told_apart_without_the_hue() -> None:
    for chunks, tints in ((1, 1), (2, 2), (4, 4)):
        svg = gantt_svg.draw(simulated("looped-bfs", 2, 4, chunks))
        by_stage = {(e.attrib["data-stage"], e.attrib["class"].split()[2]) for e in rectangles(svg)}
        assert len(by_stage) == 2 * chunks
        assert len({tint for _, tint in by_stage}) == tints
        assert svg.count(">chunk ") == (chunks if chunks > 1 else 0)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def fills(style: str) -> dict[str, str]:
    """The fill of each selector, without the name of the picture; later rules win."""
    found = {}
    for selectors, colour in re.findall(r"^(\.isostep-gantt [^{]*) \{ fill: (#\w{6}); \}", style, re.MULTILINE):
        for selector in selectors.split(", "):
            found[selector.removeprefix(".isostep-gantt ")] = colour
    return found


@pytest.mark.parametrize("part", [0, 1], ids=["light", "dark"])
def test_text_has_enough_contrast(part: int) -> None:
    colours = fills(gantt_svg.STYLE.split("@media (prefers-color-scheme: dark)")[part])
    assert contrast(colours["text"], colours[".page"]) >= 7
    assert contrast(colours["text.quiet"], colours[".page"]) >= 4.5
    for op, level in itertools.product("fbiw", range(4)):
        text = colours.get(f"text.{op}.l{level}", colours[f"text.l{level}"])
        assert contrast(text, colours[f"rect.{op}.l{level}"]) >= 4.5, (op, level)
    assert contrast("#ffffff", fills(gantt_svg.STYLE.split("@media")[0])["rect.i.l1"]) < 4.5, "the control passes"


def test_style_touches_nothing_outside_the_picture() -> None:
    rules = re.findall(r"^([^{}@]+)\{", gantt_svg.STYLE, re.MULTILINE)
    assert len(rules) > 50
    assert [rule for rule in rules for part in rule.split(",") if not part.strip().startswith(".isostep-gantt")] == []


# ---- memory curves


def curves(svg: str) -> dict[int, tuple[str, list[tuple[float, float]]]]:
    """By rank: the classes of its group, and (x, y) of each step of its line."""
    found = {}
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        if "data-rank" in group.attrib:
            line = next(e.attrib["d"] for e in group.iter(f"{SVG}path") if e.attrib["class"] == "held-line")
            steps = [(float(x), float(y)) for x, y in re.findall(r"[MH]([\d.]+)[ V]([\d.]+)", line)]
            found[int(group.attrib["data-rank"])] = (group.attrib["class"], steps)
    return found


def test_memory_curves_are_the_steps_of_the_simulation() -> None:
    sim = simulated("1f1b", 4, 8, transfer=0.5)
    found = curves(gantt_svg.memory(sim, limit=3))
    assert {rank: classes for rank, (classes, _) in found.items()} == {
        0: "curve over", 1: "curve ", 2: "curve ", 3: "curve ",
    }  # fmt: skip
    other = simulated("gpipe", 4, 8, transfer=0.5)
    for rank, (_, steps) in found.items():
        base, left = max(y for _, y in steps), steps[0][0]
        scale = (steps[-1][0] - left) / sim.in_flight(rank)[-1][0]
        one = (base - min(y for _, y in steps)) / sim.peak_in_flight[rank]
        drawn = [(round((x - left) / scale, 1), round((base - y) / one)) for x, y in steps]
        assert drawn == [(round(time, 1), held) for time, held in sim.in_flight(rank)]
        assert drawn != [(round(time, 1), held) for time, held in other.in_flight(rank)]


def test_memory_is_in_the_unit_of_the_costs() -> None:
    schedule = generate("zb-v", 2, 4)
    for costs, told in (
        (Costs.of(schedule), "chunk activations: 4"),
        (Costs.of_stages(schedule), "stage activations: 2"),
        (Costs.of_stages(schedule, recompute=0.25), "stage activations: 0.875"),
        (Costs.of(schedule, activation=1e9), "held: 4e+09"),
    ):
        description = ElementTree.fromstring(gantt_svg.memory(simulate(schedule, costs)))[1].text or ""
        assert told in description


def test_of_many_ranks_the_worst_first_median_and_last_are_drawn() -> None:
    assert list(curves(gantt_svg.memory(simulated("1f1b", 8, 16)))) == list(range(8))
    assert list(curves(gantt_svg.memory(simulated("1f1b", 20, 40)))) == [0, 10, 19]
    assert list(curves(gantt_svg.memory(simulated("interleaved-1f1b", 9, 18, 2)))) == [0, 4, 8]


def test_long_curves_keep_their_peak_and_stay_small() -> None:
    sim = simulated("1f1b", 4, 4000)
    svg = gantt_svg.memory(sim, limit=4)
    assert len(svg) < 200_000
    for rank, (_, steps) in curves(svg).items():
        heights = {y for _, y in steps}
        assert (max(heights) - min(heights)) / 46 == pytest.approx(sim.peak_in_flight[rank] / 4, abs=0.01)


def test_of_steps_within_a_pixel_the_highest_is_drawn() -> None:
    frame = Frame(width=960, left=80, start=0, end=100)
    curve = [(0.0, 0.0), (10.0, 1.0), (10.001, 9.0), (10.002, 2.0), (10.003, 1.0), (20.0, 0.0)]
    drawn = gantt_svg._steps(curve, frame)
    assert [held for _, held in drawn] == [0.0, 9.0, 1.0, 0.0]
    assert drawn[-1][0] == frame.x(20)


def test_gantt_and_memory_share_their_time_axis() -> None:
    sim = simulated("zb-h2", 4, 8)
    for window in ((0.0, None), (5.0, 20.0)):
        axes = []
        for svg in (gantt_svg.draw(sim, *window), gantt_svg.memory(sim, start=window[0], end=window[1])):
            texts = ElementTree.fromstring(svg).iter(f"{SVG}text")
            axes.append([(e.text, e.attrib["x"]) for e in texts if e.attrib["class"] == "quiet middle"])
        assert axes[0] == axes[1]
        assert len(axes[0]) > 3


# ---- trace


def events(document: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def test_trace_holds_every_action_and_transfer() -> None:
    sim = simulated("1f1b", 3, 4, forward=0.5, transfer=0.25)
    document = json.loads(json.dumps(trace.document(sim)))
    assert document["otherData"]["time"] == "one unit of cost is 1 ms"
    actions = events(document, "X")
    assert {(e["tid"], e["name"], e["ts"], e["dur"]) for e in actions} == {
        (s.rank, f"{s.op}{s.microbatch_index}", s.start * 1000, (s.end - s.start) * 1000) for s in sim.spans()
    }
    names = {e["tid"]: e["args"]["name"] for e in events(document, "M") if e["name"] == "thread_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    sent = {e["id"]: e for e in events(document, "s")}
    received = {e["id"]: e for e in events(document, "f")}
    assert len(sent) == len(received) == len(sim.transfers()) == 2 * 2 * 4
    for key, event in sent.items():
        source = next(a for a in actions if a["tid"] == event["tid"] and within(event["ts"], a))
        target = next(a for a in actions if a["tid"] == received[key]["tid"] and a["ts"] == received[key]["ts"])
        assert source["name"] == target["name"]
        assert target["ts"] >= source["ts"] + source["dur"] + 250 - 1e-9


def within(time: float, action: dict[str, float]) -> bool:
    return action["ts"] <= time < action["ts"] + action["dur"]


def test_trace_counts_what_is_held() -> None:
    sim = simulated("zb-v", 2, 4)
    counters = events(trace.document(sim), "C")
    for rank in range(2):
        curve = [(e["ts"], e["args"]["held"]) for e in counters if e["tid"] == rank]
        assert curve == [(time * 1000, held) for time, held in sim.in_flight(rank)]
        assert max(held for _, held in curve) == sim.peak_in_flight[rank]


# ---- what the pictures share


@given(st.floats(1e-6, 1e9), st.floats(1, 500))
def test_axis_steps_are_round_and_as_small_as_fits(length: float, slots: float) -> None:
    step = drawing.axis_step(length, slots)
    mantissa = float(f"{step:.6e}".split("e")[0])
    assert mantissa in (1.0, 2.0, 5.0)
    assert length / step <= slots * (1 + 1e-6)
    assert length / step > slots / 2.5 * (1 - 1e-6)


def test_axis_times_are_multiples_in_the_window() -> None:
    assert drawing.axis_times(0.0, 1.0, 0.5) == [0.0, 0.5, 1.0]
    assert drawing.axis_times(0.3, 2.2, 0.5) == [0.5, 1.0, 1.5, 2.0]


def test_local_chunks_and_peaks() -> None:
    assert drawing.local_chunks(generate("zb-v", 3, 6)) == (0, 0, 0, 1, 1, 1)
    assert drawing.local_chunks(generate("interleaved-1f1b", 2, 4, 3)) == (0, 0, 1, 1, 2, 2)
    shown: Sequence[tuple[list[int], str]] = [([4, 3], "4 3"), ([2, 2], "2"), (list(range(1, 20)), "1 to 19")]
    assert [drawing.peaks(counts) for counts, _ in shown] == [words for _, words in shown]
