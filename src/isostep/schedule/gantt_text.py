"""Timelines as a Gantt chart in characters: one line per rank, readable at 80 columns, with or without colour."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ..errors import InputError
from ..explain.draw import ASCII, QUIET, number
from ..units import count
from .drawing import WORDS, Timeline, axis_step, axis_times, first_spans, local_chunks, shown_ranks, window

if TYPE_CHECKING:
    from .simulate import Span

MAX_RANKS = 40
MAX_SPANS = 200_000
MIN_WIDTH, MAX_WIDTH = 40, 1000
COLOURS = {"F": "", "B": "green", "I": "cyan", "W": "magenta"}
LONGER, IDLE = "─", "."


@dataclass(frozen=True)
class Gantt:
    """Styled lines, never wrapped; drawing characters become ASCII where they cannot be shown."""

    lines: tuple[Text, ...]

    @property
    def plain(self) -> str:
        """The lines without style, without blanks at their ends."""
        return "\n".join(line.plain.rstrip() for line in self.lines)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            shown = line.copy()
            if options.ascii_only:
                shown.plain = shown.plain.translate(ASCII)
            shown.rstrip()
            yield shown


@dataclass(frozen=True)
class Scale:
    """How time becomes columns."""

    start: float
    end: float
    columns: int
    """Columns from start to end."""
    cell: int
    """Columns of one tick of a grid that every start and end falls on; 0 where there is no grid that fits."""

    def column(self, time: float) -> float:
        return (time - self.start) / (self.end - self.start) * self.columns


def draw(sim: Timeline, start: float = 0.0, end: float | None = None, width: int = 80) -> Gantt:
    """The Gantt chart of a window of time (in the unit of the costs) in lines of at most `width` columns.

    Where starts and ends fall on a grid that fits, a tick is a cell of one to a few columns, drawn exactly; else the
    time is scaled, and a column shows the op that fills most of it. The mark is the op (F, B, I, W; lower case for
    odd chunks of a rank) and, where it fits, the microbatch. Without `end`, a picture too dense to read is cut to its
    beginning, and the last line says so. Raises InputError for a window that cannot be drawn, and a width
    below 40 or above 1,000.
    """
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise InputError.of("width", width, f"{MIN_WIDTH} to {MAX_WIDTH} columns", "choose another")
    first, last = window(sim, start, end)
    if not sim.makespan:
        return Gantt((Text("Nothing takes any time: every cost is 0."),))
    ranks = shown_ranks(sim.schedule.stages, MAX_RANKS)
    gutter = len(f"rank {sim.schedule.stages - 1}") + 2
    if end is None:
        last = min(last, first + _readable(sim, width - gutter))
    spans, last = first_spans(sim, first, last, MAX_SPANS)
    labels = len(str(sim.schedule.num_microbatches - 1)) + 1
    scale = _scale([span for span in spans if span.end > span.start], first, last, width - gutter, labels)
    more = ""
    if (first, last) != (0.0, sim.makespan):
        more = f"from {number(first)} to {number(last)} of {number(sim.makespan)}; zoom with --from and --to"
    return Gantt((*_ranks(sim, spans, scale, ranks, gutter), *_below(sim, spans, scale, gutter, more)))


def pair(named: Mapping[str, Timeline], width: int = 80) -> Gantt:
    """The Gantt charts of timelines of one schedule below each other on one scale of time, each under its name.

    Where the longest one is twice as dense as `draw` allows, the beginning is drawn, and the last line says so. Raises
    InputError for a width below 40 or above 1,000.
    """
    if not MIN_WIDTH <= width <= MAX_WIDTH:
        raise InputError.of("width", width, f"{MIN_WIDTH} to {MAX_WIDTH} columns", "choose another")
    longest = max(named.values(), key=lambda each: each.makespan)
    stages = longest.schedule.stages
    ranks, gutter = shown_ranks(stages, MAX_RANKS), len(f"rank {stages - 1}") + 2
    end = min(longest.makespan, 2 * _readable(longest, width - gutter))
    scale = Scale(0.0, end, width - gutter, 0)
    lines: list[Text] = []
    for name, timeline in named.items():
        lines.append(Text(name, "bold"))
        for line in _ranks(timeline, timeline.spans(0.0, end), scale, ranks, gutter):
            line.truncate(gutter + math.ceil(scale.column(min(end, timeline.makespan))))
            lines.append(line)
    more = f"from 0 to {number(end)} of {number(longest.makespan)}" if end < longest.makespan else ""
    return Gantt((*lines, *_below(longest, longest.spans(0.0, end), scale, gutter, more)))


def _readable(sim: Timeline, columns: int) -> float:
    """The time in which a column is no longer than the shortest action, or a third of the mean one."""
    shortest = min(cost for row in sim.costs.durations() for cost in row if cost)
    mean = sum(sim.busy) / sim.schedule.size
    return columns * max(shortest, mean / 3)


def _scale(spans: Sequence[Span], start: float, end: float, columns: int, labels: int) -> Scale:
    tick = _tick(spans, start, end, columns)
    if not tick:
        return Scale(start, end, columns, 0)
    ticks = round((end - start) / tick)
    shortest = max(1, round(min(span.end - span.start for span in spans) / tick))
    cell = min(columns // ticks, math.ceil((labels + 1) / shortest))
    return Scale(start, end, ticks * cell, cell)


def _tick(spans: Sequence[Span], start: float, end: float, columns: int) -> float:
    """The longest tick whose multiples after `start` are all starts and ends, of which at most `columns` fit; or 0."""
    if not spans or len(spans) > columns * MAX_RANKS * 4:
        return 0.0
    times = np.unique([time for span in spans for time in (span.start, span.end)])
    times = np.append(times[(times > start) & (times < end)], end) - start
    gaps = np.diff(times, prepend=0.0)
    shortest = float(gaps[gaps > 1e-9 * times[-1]].min())
    for parts in range(1, columns + 1):
        ticks = times / (shortest / parts)
        if ticks[-1] > columns + 0.5:
            break
        if np.abs(ticks - np.round(ticks)).max() < 1e-6:
            return shortest / parts
    return 0.0


def _ranks(sim: Timeline, spans: Sequence[Span], scale: Scale, ranks: Sequence[int], gutter: int) -> Iterator[Text]:
    """A line per rank."""
    chunks = local_chunks(sim.schedule)
    of_rank: dict[int, list[Span]] = {rank: [] for rank in ranks}
    for span in spans:
        if span.rank in of_rank:
            of_rank[span.rank].append(span)
    shown = {rank: _runs(of_rank[rank], scale) for rank in ranks}
    labelled = _labelled([run for runs in shown.values() for run in runs])
    before = -1
    for rank in ranks:
        if rank > before + 1:
            yield Text(f"... {count(rank - before - 1, 'rank')} not drawn", QUIET)
        before = rank
        line = Text().append(f"rank {rank}".ljust(gutter), QUIET)
        for span, length in shown[rank]:
            if span is None:
                line.append(_idle(length, scale.cell), QUIET)
            else:
                odd = chunks[span.stage] % 2 == 1
                line.append(_mark(span, length, odd, span.op in labelled, scale.cell), COLOURS[span.op])
        yield line


def _below(sim: Timeline, spans: Sequence[Span], scale: Scale, gutter: int, more: str) -> Iterator[Text]:
    """The axis, the legend, and what part of the time this is."""
    yield Text(_axis(scale, gutter), QUIET)
    yield _legend({span.op for span in spans}, sim.schedule.chunks)
    if more:
        yield Text(more, QUIET)


def _runs(spans: Sequence[Span], scale: Scale) -> list[tuple[Span | None, int]]:
    """What a rank shows from left to right, and in how many columns; None where it is idle."""
    runs = [(index, len(list(run))) for index, run in groupby(_columns(spans, scale))]
    return [(spans[index] if index >= 0 else None, length) for index, length in runs]


def _labelled(runs: Sequence[tuple[Span | None, int]]) -> set[str]:
    """The ops whose microbatch is written: those where it fits for half of the spans or more."""
    fits: dict[str, list[bool]] = {}
    for span, length in runs:
        if span is not None:
            fits.setdefault(span.op, []).append(len(_label(span)) <= length)
    return {op for op, each in fits.items() if 2 * sum(each) >= len(each)}


def _columns(spans: Sequence[Span], scale: Scale) -> list[int]:
    """For each column, the index of the span that it shows, -1 where the rank is idle for most of it."""
    filled: list[dict[str, float]] = [{} for _ in range(scale.columns)]
    longest: list[dict[str, tuple[float, int]]] = [{} for _ in range(scale.columns)]
    for index, span in enumerate(spans):
        begin, end = max(0.0, scale.column(span.start)), min(float(scale.columns), scale.column(span.end))
        for column in range(math.floor(begin + 1e-6), math.ceil(end - 1e-6)):
            share = min(end, column + 1) - max(begin, column)
            filled[column][span.op] = filled[column].get(span.op, 0.0) + share
            longest[column][span.op] = max(longest[column].get(span.op, (0.0, 0)), (share, -index))
    shown = []
    for ops, spans_of in zip(filled, longest, strict=True):
        op = max(ops, key=lambda op: (round(ops[op], 6), -"FBIW".index(op)), default="")
        idle = 1.0 - sum(ops.values())
        shown.append(-1 if not op or idle > ops[op] + 1e-6 else -spans_of[op][1])
    return shown


def _label(span: Span) -> str:
    return f"{span.op}{span.microbatch_index}"


def _mark(span: Span, length: int, odd: bool, labelled: bool, cell: int) -> str:
    """A span in `length` columns: its op and microbatch, or the op alone; then a line, and a blank where one fits."""
    label = _label(span) if labelled and len(_label(span)) <= length else span.op
    if not labelled and not cell:
        label *= length
    label = label.lower() if odd else label
    if len(label) == length or not labelled:
        return label.ljust(length, LONGER)
    return label.ljust(length - 1, " " if length == cell else LONGER) + " "


def _idle(length: int, cell: int) -> str:
    return ((IDLE * (cell - 1) + " ") * (length // cell)) if cell > 2 else IDLE * length


def _axis(scale: Scale, gutter: int) -> str:
    """Times below their columns; with a grid, those of its ticks."""
    slots = scale.columns / (max(len(number(scale.start)), len(number(scale.end))) + 2)
    if scale.cell:
        ticks = scale.columns // scale.cell
        every = max(1, round(axis_step(ticks, slots)))
        tick = (scale.end - scale.start) / ticks
        times = [scale.start + index * tick for index in range(0, ticks + 1, every)]
    else:
        times = axis_times(scale.start, scale.end, axis_step(scale.end - scale.start, slots))
    line = "time".ljust(gutter)
    for time in times:
        column = gutter + round(scale.column(time))
        text = number(time)
        if column >= len(line) and column + len(text) <= gutter + scale.columns:
            line = line.ljust(column) + text + " "
    return line.rstrip()


def _legend(ops: set[str], chunks: int) -> Text:
    line = Text()
    words = {op: word for op, word in WORDS.items() if op in ops}
    if len(words) == 4:
        words = {"F": "forward", "B": "= I + W", "I": "input grad", "W": "weight grad"}
    for op, word in words.items():
        line.append(op, COLOURS[op]).append(f" {word}  ")
    line.append(f"{IDLE} idle")
    if chunks > 1:
        line.append("  lower case: chunk 1" if chunks == 2 else "  lower case: odd chunks")
    return line
