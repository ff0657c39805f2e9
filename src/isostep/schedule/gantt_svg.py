"""A simulation as SVG: the Gantt chart of its ranks, and what each rank holds over time.

The pictures hold no script and no inline style: classes and attributes alone, so that a page under a strict content
security policy can show them with `STYLE` in its own style sheet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import InputError
from ..explain.draw import number
from ..units import count
from .drawing import WORDS, Timeline, first_spans, heading, local_chunks, peaks, percent, shown_ranks, unit, window
from .svg import CHARACTER, STYLE, Frame, axis, decimal, document, legend, tag
from .weights import ROUNDING

if TYPE_CHECKING:
    from .measured import Comparison
    from .simulate import Simulation, Span

MAX_SPANS = 4000
MAX_RANKS = 512
MIN_WIDTH, MAX_WIDTH = 320, 10_000
MAX_CURVES = 8
ROUND = ' rx="2"'
TOP, CURVE = 62.0, 46.0


def draw(sim: Simulation, start: float = 0.0, end: float | None = None, width: int = 960, style: bool = True) -> str:
    """A whole SVG of a window of time (in the unit of the costs): a lane per rank, a rectangle per action.

    Each rectangle has the class `span` and that of its op (f, b, i, w), and the attributes data-rank, data-stage and
    data-microbatch. Forwards stand high in a lane, backwards low, weight
    backwards lower. Where a window has more than 4,000 actions, its
    beginning is drawn and the title says so. Without `style` the style sheet is left out: put `STYLE` into the page's.
    Raises InputError for a window that cannot be drawn, and a width below 320 or above 10,000.
    """
    _check_width(width)
    first, last = window(sim, start, end)
    spans, last = first_spans(sim, first, last, MAX_SPANS)
    rows = _Rows.of(sim, width, first, last)
    title = heading(sim)
    if (first, last) != (0.0, sim.makespan):
        title += f": from {number(first)} to {number(last)} of {number(sim.makespan)}"
    body = [
        tag("text", "heading", title, x=20, y=27),
        tag("text", "quiet", _fitting(_clauses(sim), width), x=20, y=47),
        *rows.lanes(),
    ]
    lines, times = axis(rows.frame, TOP, rows.bottom)
    body += lines
    levels = _levels(sim)
    body += _spans(spans, rows, levels)
    links = list(_links(sim, rows))
    key, height = legend(_marks(sim, spans, bool(links)), rows.frame.left, width - 20, rows.bottom + 32)
    told = "; ".join(_clauses(sim)) + "."
    return "\n".join(document(width, height + 10, title, told, [*body, *links, *times, *key], style))


def memory(
    sim: Simulation,
    limit: float | None = None,
    width: int = 960,
    style: bool = True,
    start: float = 0.0,
    end: float | None = None,
) -> str:
    """A whole SVG of what ranks hold over time, below each other on one scale, in the unit of the costs' activations.

    Of more than 8 ranks the worst, the first, the last and the median are drawn. `limit` is a dashed line, in the same
    unit. Its time axis is that of `draw` with the same window and width. Raises InputError as `draw` does.
    """
    _check_width(width)
    frame = frame_of(sim, width, *window(sim, start, end))
    chosen = _curves(sim)
    most = max(sim.peak_memory + (limit or 0.0,)) or 1.0
    title = f"Activations held: {heading(sim)}"
    told = [f"The most that each rank holds, {unit(sim)}: {peaks(sim.peak_memory)}"]
    told += [] if limit is None else [f"the limit is {number(limit)}"]
    body = [tag("text", "heading", title, x=20, y=27), tag("text", "quiet", _fitting(told, width), x=20, y=47)]
    bottom = TOP + (CURVE + 10) * len(chosen) - 10
    lines, times = axis(frame, TOP, bottom)
    for row, (rank, words) in enumerate(chosen.items()):
        body += _curve(sim, rank, words, TOP + row * (CURVE + 10), frame, most, limit)
    marks = [(tag("rect", "held", width=20, height=12) + tag("line", "held-line", x1=0, x2=20, y1=0, y2=0), "held")]
    if limit is not None:
        marks.append((tag("line", "limit", x1=0, x2=20, y1=6, y2=6), f"limit {number(limit)}"))
    key, height = legend(marks, frame.left, width - 20, bottom + 32)
    return "\n".join(document(width, height + 10, title, "; ".join(told) + ".", [*body, *lines, *times, *key], style))


def pair(compared: Comparison, title: str, width: int = 960) -> str:
    """A whole SVG of a prediction above what was measured, on one axis of time in milliseconds.

    Rectangles are those of `draw`, each panel's in a group of the class `panel`. Where there are more than 4,000
    actions, the beginning is drawn and the title says so. Raises InputError for a width below 320 or above 10,000.
    """
    _check_width(width)
    panels: dict[str, Timeline] = {"predicted": compared.predicted, "measured": compared.measured}
    whole = max(each.makespan for each in panels.values())
    end = min(first_spans(each, 0.0, whole, MAX_SPANS // 2)[1] for each in panels.values())
    title = f"{title}: {heading(compared.measured)}, predicted and measured, in ms"
    if end < whole:
        title += f": from 0 to {end:.4g} of {whole:.4g}"
    top = TOP + 38
    above = _Rows.of(compared.predicted, width, 0.0, end, top)
    below = _Rows.of(compared.measured, width, 0.0, end, above.bottom + 42)
    lines, times = axis(above.frame, top, below.bottom)
    body, marks = [*above.lanes(), *below.lanes(), *lines], {}
    for rows, (name, each) in zip((above, below), panels.items(), strict=True):
        spans, links = each.spans(0.0, end), list(_links(each, rows))
        name = f"{name}: makespan {each.makespan:.4g} ms, ranks busy {percent(each.busy_share)}"
        body += ['<g class="panel">', tag("text", "", name, x=rows.frame.left, y=min(rows.y.values()) - 10)]
        body += [*_spans(spans, rows, _levels(each)), *links, "</g>"]
        marks |= {words: mark for mark, words in _marks(each, spans, bool(links))}
    key, height = legend(((m, words) for words, m in marks.items()), above.frame.left, width - 20, below.bottom + 32)
    errors = f"makespan {compared.makespan_error:+.1%}, busy share {100 * compared.busy_share_error:+.1f} points"
    told = [f"Error of the prediction: {errors}.", compared.sentence]
    head = [tag("text", "heading", title, x=20, y=27)]
    head += [tag("text", "quiet", text, x=20, y=47 + 17 * row) for row, text in enumerate(told)]
    return "\n".join(document(width, height + 10, title, " ".join(told), [*head, *body, *times, *key], style=True))


@dataclass(frozen=True)
class _Rows:
    """Where the ranks lie."""

    frame: Frame
    pitch: float
    y: dict[int, float]
    """Top of the lane of each rank that is drawn."""
    stages: int

    @classmethod
    def of(cls, sim: Timeline, width: int, start: float, end: float, top: float = TOP) -> _Rows:
        stages = sim.schedule.stages
        pitch = next(pitch for most, pitch in _PITCHES if stages <= most)
        ranks = shown_ranks(stages, MAX_RANKS)
        gap = [16.0 if rank >= MAX_RANKS // 2 and len(ranks) < stages else 0.0 for rank in ranks]
        y = {rank: top + row * pitch + gap[row] for row, rank in enumerate(ranks)}
        return cls(frame_of(sim, width, start, end), pitch, y, stages)

    @property
    def lane(self) -> float:
        """Height of a lane."""
        return self.pitch * 0.8

    @property
    def bottom(self) -> float:
        return max(self.y.values()) + self.lane

    def lanes(self) -> Iterator[str]:
        every = max(1, round(14 / self.pitch + 0.49))
        for row, (rank, y) in enumerate(self.y.items()):
            yield tag("rect", "lane", x=self.frame.left, y=y, width=self.frame.span, height=self.lane, rx=2)
            if row % every == 0:
                yield tag("text", "end", f"rank {rank}", x=self.frame.left - 10, y=y + self.lane / 2 + 4)
        if len(self.y) < self.stages:
            words = f"... {count(self.stages - len(self.y), 'rank')} not drawn"
            y = self.y[MAX_RANKS // 2 - 1] + self.lane + 13
            yield tag("text", "quiet", words, x=self.frame.left, y=y)


_PITCHES = ((4, 40.0), (8, 34.0), (16, 26.0), (32, 19.0), (64, 13.0), (float("inf"), 8.0))
"""(up to so many ranks, height from lane to lane)"""


def _check_width(width: int) -> None:
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise InputError.of("width", width, f"{MIN_WIDTH} to {MAX_WIDTH:,} pixels", "choose another")


def frame_of(sim: Timeline, width: int, start: float, end: float) -> Frame:
    """Where time lies on a picture of this width."""
    return Frame(width, 38 + 12 * CHARACTER * len(f"rank {sim.schedule.stages - 1}"), start, end)


def _clauses(sim: Simulation) -> list[str]:
    """The numbers, most telling first."""
    return [
        f"Makespan {number(sim.makespan)}",
        f"ranks are busy {percent(sim.busy_share)} of the time",
        f"bubble {number(sim.bubble_global)} ({percent(sim.rate_global)})",
        f"a rank holds at most {number(max(sim.peak_memory))} {unit(sim)}",
    ]


def _fitting(clauses: Sequence[str], width: int) -> str:
    """As many clauses as fit a line of the picture."""
    fitting = clauses[:1]
    for clause in clauses[1:]:
        if 12 * CHARACTER * len("; ".join([*fitting, clause])) < width - 40:
            fitting = [*fitting, clause]
    return "; ".join(fitting)


def _levels(sim: Timeline) -> list[int]:
    """The tint of each stage index, 0 to 3, by its place among the chunks of its rank."""
    tints = {1: (1,), 2: (1, 2)}.get(sim.schedule.chunks, (0, 1, 2, 3))
    return [tints[chunk % len(tints)] for chunk in local_chunks(sim.schedule)]


def _spans(spans: Sequence[Span], rows: _Rows, levels: Sequence[int]) -> Iterator[str]:
    """A rectangle for each action, and what is written on it. Called for thousands: numbers are formatted in place."""
    frame, lane = rows.frame, rows.lane
    scale = frame.span / (frame.end - frame.start) if frame.end > frame.start else 0.0
    origin, most = frame.left - scale * frame.start, frame.left + frame.span
    insets = {op: lane * inset for op, inset in (("F", 0.0), ("B", 0.14), ("I", 0.14), ("W", 0.3))}
    for rank, stage, microbatch, op, start, end in spans:
        if rank not in rows.y:
            continue
        left, right = max(frame.left, origin + scale * start), min(most, origin + scale * end)
        room = right - left
        classes = f"{op.lower()} l{levels[stage]}"
        inset = insets[op]
        y, height = rows.y[rank] + inset, lane - (inset or insets["B"])
        yield (
            f'<rect class="span {classes}" x="{left:.1f}" y="{y:.1f}" width="{room - min(1.0, room / 8):.1f}" '
            f'height="{height:.1f}"{ROUND if room > 8 else ""} data-rank="{rank}" data-stage="{stage}" '
            f'data-microbatch="{microbatch}"><title>{WORDS[op]} of microbatch {microbatch}, stage {stage}, '
            f"rank {rank}: {start:.6g} to {end:.6g}</title></rect>"
        )
        size = 11 if height >= 18 else 9
        label = _label(op, microbatch, room / (CHARACTER * size)) if height >= 11 else ""
        if label:
            small = " small" if size == 9 else ""
            x, base = (left + right) / 2, y + height / 2 + size * 0.36
            yield f'<text class="label{small} {classes}" x="{x:.1f}" y="{base:.1f}">{label}</text>'


def _label(op: str, microbatch: int, characters: float) -> str:
    """The op and the microbatch, or the microbatch, or nothing, as fits."""
    number_text = str(microbatch)
    if len(number_text) + 1.9 <= characters:
        return op + number_text
    return number_text if len(number_text) + 0.5 <= characters else ""


def _links(sim: Timeline, rows: _Rows) -> Iterator[str]:
    """Transfers, as one path of thin lines for each direction."""
    paths: dict[str, list[str]] = {"F": [], "B": []}
    frame = rows.frame
    for transfer in sim.transfers(frame.start, frame.end):
        if transfer.source in rows.y and transfer.target in rows.y:
            down = transfer.target > transfer.source
            begin = rows.y[transfer.source] + (rows.lane if down else 0.0)
            finish = rows.y[transfer.target] + (0.0 if down else rows.lane)
            x = decimal(frame.x(transfer.start)), decimal(frame.x(transfer.end))
            paths[transfer.op].append(f"M{x[0]} {decimal(begin)}L{x[1]} {decimal(finish)}")
    for op, path in paths.items():
        if path:
            yield tag("path", f"link {op.lower()}", d="".join(path))


def _marks(sim: Timeline, spans: Sequence[Span], links: bool) -> Iterator[tuple[str, str]]:
    """The marks of the legend and their words."""
    levels = _levels(sim)
    present = {span.op for span in spans}
    first = levels[0]
    for op, words in WORDS.items():
        if op in present:
            mark = tag("rect", f"{op.lower()} l{first}", width=20, height=12, rx=2)
            yield mark + tag("text", f"label small {op.lower()} l{first}", op, x=10, y=9.3), words
    if sim.schedule.chunks > 1:
        for chunk, level in enumerate(dict.fromkeys(levels)):
            yield tag("rect", f"f l{level}", width=20, height=12, rx=2), f"chunk {chunk}"
    yield tag("rect", "lane", width=20, height=12, rx=2), "idle"
    if links:
        yield tag("path", "link f", d="M0 0L20 12"), "transfer"


def _curves(sim: Simulation) -> dict[int, str]:
    """The ranks whose curve is drawn, in order, each with its name."""
    held = sim.peak_memory
    if len(held) <= MAX_CURVES:
        return {rank: f"rank {rank}" for rank in range(len(held))}
    order = sorted(range(len(held)), key=lambda rank: (-held[rank], rank))
    names: dict[int, list[str]] = {}
    for name, rank in (
        ("worst", order[0]),
        ("first", 0),
        ("median", order[len(order) // 2]),
        ("last", len(held) - 1),
    ):
        names.setdefault(rank, []).append(name)
    return {rank: f"rank {rank} ({', '.join(names[rank])})" for rank in sorted(names)}


def _curve(
    sim: Simulation, rank: int, words: str, top: float, frame: Frame, most: float, limit: float | None
) -> Iterator[str]:
    """One rank's steps, filled down to 0, with its peak and the limit."""

    def y(held: float) -> float:
        return top + CURVE * (1 - held / most)

    peak = sim.peak_memory[rank]
    over = "over" if limit is not None and peak > limit * (1 + ROUNDING) else ""
    points = _steps(sim.in_flight(rank), frame)
    line = f"M{decimal(points[0][0])} {decimal(y(points[0][1]))}"
    line += "".join(f"H{decimal(x)}V{decimal(y(held))}" for x, held in points[1:])
    line += f"H{decimal(frame.x(frame.end))}"
    ground = decimal(y(0))
    yield f'<g class="curve {over}" data-rank="{rank}" data-peak="{number(peak)}">'
    yield tag("rect", "lane", x=frame.left, y=top, width=frame.span, height=CURVE)
    yield tag("path", "held", d=f"{line}V{ground}H{decimal(points[0][0])}Z")
    yield tag("path", "held-line", d=line)
    if limit is not None:
        yield tag("line", "limit", x1=frame.left, x2=frame.left + frame.span, y1=y(limit), y2=y(limit))
    yield tag("text", "end", f"rank {rank}", x=frame.left - 10, y=top + CURVE / 2)
    yield tag("text", "quiet end", f"peak {peak:.3g}", x=frame.left - 10, y=top + CURVE / 2 + 14)
    yield f"<title>{words}: at most {number(peak)} {unit(sim)}</title></g>"


def _steps(curve: Sequence[tuple[float, float]], frame: Frame) -> list[tuple[float, float]]:
    """(x, held from there on) within the window; of the steps within one pixel, the last and the highest."""
    before = [held for time, held in curve if time <= frame.start]
    points = [(frame.left, before[-1] if before else 0.0)]
    for time, held in curve:
        if not frame.start < time <= frame.end:
            continue
        x = frame.x(time)
        if len(points) > 2 and x - points[-2][0] < 0.5:
            points[-2] = (points[-2][0], max(points[-2][1], points[-1][1]))
            points[-1] = (x, held)
        else:
            points.append((x, held))
    return points


__all__ = ["MAX_SPANS", "MIN_WIDTH", "STYLE", "draw", "frame_of", "memory", "pair"]
