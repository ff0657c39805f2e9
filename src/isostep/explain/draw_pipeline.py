"""The drawing of `isostep explain pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..schedule import gantt_text
from ..units import count
from .draw import QUIET, Picture, closing, heading, left_out, new_table, number
from .pipeline import Forward, Pipeline, Training, training_simulation

WIDTH, LABEL, CELL = 80, 10, 3
MAX_ROWS, MAX_CHART_ROWS, MAX_CHART_TICKS = 12, 8, 72
TICKS_DRAWN = (WIDTH - LABEL) // CELL
NOTES = """\
held: the most microbatches in flight on a stage, between forward and backward.
latency: median / worst ticks from the start of a microbatch's forward to the
end of its backward.

While the chain fills, stage s waits s turns for its first microbatch, and while
it drains, the last P - 1 - s turns bring it nothing: P - 1 idle turns each.
gpipe runs all forwards first, so it holds the activations of the whole group.
1f1b starts each backward as soon as it can: stage s never holds more than P - s
microbatches, however many there are, at the same idle time.
In a given group, more microbatches are smaller ones, and a device is slower per
token on a small one (not shown). The update is the same whatever M is: gradient
sums over the group, divided by the count of the whole group."""


def draw_pipeline(model: Pipeline) -> RenderableType:
    """The wave of forwards, training under two schedules, and what more microbatches buy and cost."""
    p, m, forward = model.stages, model.num_microbatches, model.forward
    sizes = f"{count(p, 'stage')}, {count(m, 'microbatch')}"
    alone = f"{count(forward.ticks_one_at_a_time, 'tick')}, busy {forward.busy_share_one_at_a_time}"
    return Group(
        heading("pipeline", f"{sizes}; forward: {count(forward.ticks, 'tick')}, busy {forward.busy_share}"),
        "",
        Picture(_wave(forward)),
        *left_out(p - MAX_ROWS, "stage"),
        *left_out(forward.ticks - TICKS_DRAWN, "tick"),
        "",
        f"ticks M + P - 1 = {m} + {p} - 1 = {forward.ticks}; busy M / (M + P - 1) = {_both(model.closed_form)}",
        f"one microbatch at a time: {alone}",
        "",
        Text("Training: a forward takes 1 tick, a backward 2", "bold"),
        *_charts(model),
        _trainings(model.training),
        "",
        Text("What more microbatches buy and cost, in training", "bold"),
        _choices(model),
        "",
        *NOTES.splitlines(),
        *closing(),
    )


def _wave(forward: Forward) -> list[tuple[str, str]]:
    """A row per stage, a column per tick: the microbatch, or a dot where the stage is idle."""
    ticks = range(min(forward.ticks, TICKS_DRAWN))
    lines = [("tick".ljust(LABEL) + _cells([str(tick) for tick in ticks]), QUIET)]
    for stage, row in enumerate(forward.wave[:MAX_ROWS]):
        cells = ["." if row[tick] is None else str(row[tick]) for tick in ticks]
        lines.append((f"stage {stage}".ljust(LABEL) + _cells(cells), ""))
    return lines


def _cells(texts: Sequence[str]) -> str:
    return "".join(text.ljust(CELL) for text in texts)


def _charts(model: Pipeline) -> list[RenderableType]:
    """Both schedules drawn in time, where that is readable; stage s is on rank s."""
    p, m = model.stages, model.num_microbatches
    if p > MAX_CHART_ROWS or model.training[0].ticks > MAX_CHART_TICKS:
        return [Text(f"to draw it: isostep simulate --schedule 1f1b --stages {p} --microbatches {m}", QUIET), ""]
    charts: list[RenderableType] = []
    for training in model.training:
        sim = training_simulation(training.schedule, p, m)
        charts += [training.schedule, gantt_text.draw(sim, width=WIDTH)]
    return [*charts, ""]


def _trainings(trainings: Sequence[Training]) -> Table:
    table = new_table("schedule", "ticks", "busy", "held by each stage", "latency")
    for training in trainings:
        table.add_row(
            training.schedule,
            f"{training.ticks}",
            _both(training.busy_share),
            _held(training.in_flight),
            _latency(training),
        )
    return table


def _choices(model: Pipeline) -> Table:
    """A row per M; held is that of the stage that holds most. Both schedules take equally many ticks."""
    first_name, *others = (training.schedule for training in model.training)
    measures = (f"held: {first_name}", *others, f"latency: {first_name}", *others)
    table = new_table("M", "ticks", "busy", "M/(M+P-1)", *measures, left=0)
    for choice in model.choices:
        first = choice.schedules[0]
        table.add_row(
            f"{choice.num_microbatches}",
            f"{first.ticks}",
            str(first.busy_share),
            f"{float(choice.closed_form):.3f}",
            *(f"{max(training.in_flight)}" for training in choice.schedules),
            *map(_latency, choice.schedules),
            style="bold" if choice.num_microbatches == model.num_microbatches else "",
        )
    return table


def _both(share: Fraction) -> str:
    """2/3 = 0.667; a whole number alone."""
    return str(share) if share.denominator == 1 else f"{share} = {float(share):.3f}"


def _held(in_flight: Sequence[int]) -> str:
    """One number per stage where there are few: 3 2 1, or 64 to 1."""
    few = len(in_flight) <= MAX_CHART_ROWS
    return " ".join(map(str, in_flight)) if few else f"{in_flight[0]} to {in_flight[-1]}"


def _latency(training: Training) -> str:
    return f"{number(training.latency_median)} / {number(training.latency_worst)}"
