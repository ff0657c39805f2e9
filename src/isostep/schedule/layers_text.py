"""The drawing of layers cut into stages: by cost, and beside it by counting layers."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.text import Text

from ..explain.draw import QUIET, WRONG, Picture, decimal, number
from ..units import count
from .drawing import percent
from .layers import COSTS, LayerCut, LayerStage, TimedCut

LABEL, NAMES, COUNT, BAR, COST, MEMORY = 9, 36, 5, 12, 8, 9
MAX_STAGES = 16
LONGEST_SOURCE = 220


def draw_layers(cut: LayerCut) -> RenderableType:
    """Both cuts as bars, a line per stage, then what they come to; at most 80 columns but for the source."""
    layers, stages = cut.model.layers, len(cut.by_cost.stages)
    sizes = f"{count(len(layers), 'layer')} in {count(stages, 'stage')}, {count(cut.num_microbatches, 'microbatch')}"
    total = sum(layer.cost for layer in layers)
    longest = max(cut.by_cost.cadence, cut.equal_counts.cadence)
    return Group(
        Text.assemble(("layers", "bold"), f": {sizes}, 1f1b"),
        Text(f"source: {_beginning(cut.model.source)}", QUIET),
        "",
        *(
            f"{place} layer: {_short(layer.name, 50)}, {percent(layer.cost / total)} of the cost"
            for place, layer in (("first", layers[0]), ("last", layers[-1]))
        ),
        *_limit(cut.memory_limit),
        "",
        *_bars("cut by cost", cut.by_cost, longest, cut.memory_limit),
        "",
        *_bars("equal layer counts", cut.equal_counts, longest, cut.memory_limit),
        "",
        *_comparison(cut),
        "",
        *_command(cut),
        Text("Costs in the unit of the file. Not shown: transfers, recomputed activations.", QUIET),
    )


def _command(cut: LayerCut) -> list[RenderableType]:
    """The command that simulates the stages of the cut, where their costs fit on lines."""
    stages = cut.by_cost.stages
    lines = [f"isostep simulate --schedule all --stages {len(stages)} --microbatches {cut.num_microbatches}"]
    for name in COSTS:
        costs = ",".join(format(getattr(stage, name), ".6g") for stage in stages)
        lines.append(f"  --{name.replace('_', '-')} {costs}")
    if max(map(len, lines)) > 78:
        return ["The costs of the stages, for other schedules, are in what --json writes.", ""]
    return ["The cut by cost under other schedules:", Text(" \\\n".join(lines), QUIET), ""]


def size_of(size: float) -> str:
    """Bytes in a decimal unit: 1.87 GB."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.3g} {unit}"


def _beginning(source: str) -> str:
    return source if len(source) <= LONGEST_SOURCE else f"{source[:LONGEST_SOURCE]}..."


def _limit(limit: float | None) -> list[RenderableType]:
    return [] if limit is None else [f"memory limit of a stage: {size_of(limit)}; beyond it: !"]


def _bars(title: str, cut: TimedCut, longest: float, limit: float | None) -> list[RenderableType]:
    """A line per stage, the length of its bar its cost; of many stages the first, the last and the slowest."""
    stages = len(cut.stages)
    shown = sorted({*range(MAX_STAGES // 2), *range(stages - MAX_STAGES // 2, stages), cut.slowest} & {*range(stages)})
    header = f"{title.ljust(LABEL + NAMES)}{'n'.rjust(COUNT)} {''.ljust(BAR)}{'cost'.rjust(COST)}"
    lines = [(header + ("" if cut.stages[0].memory is None else "memory".rjust(MEMORY)), "bold")]
    before = -1
    for index in shown:
        if index > before + 1:
            lines.append((f"... {count(index - before - 1, 'stage')} not drawn", QUIET))
        before = index
        stage = cut.stages[index]
        over = limit is not None and stage.memory is not None and stage.memory > limit
        style = WRONG if over else "bold" if index == cut.slowest else ""
        lines.append((_line(index, stage, longest) + ("!" if over else ""), style))
    return [Picture(lines)]


def _line(index: int, stage: LayerStage, longest: float) -> str:
    label = f"stage {index}".ljust(LABEL - 1) + " "
    room = LABEL + NAMES - len(label)
    bar = "█" * round(BAR * stage.cost / longest)
    memory = "" if stage.memory is None else size_of(stage.memory).rjust(MEMORY - 1)
    numbers = f"{stage.num_layers:>{COUNT}} {bar:<{BAR}}{decimal(stage.cost).rjust(COST)}"
    return label + set_cell_size(_names(stage, room), room) + numbers + memory


def _names(stage: LayerStage, cells: int) -> str:
    """The first and the last layer, both to be recognised."""
    if stage.num_layers == 1:
        return _short(stage.first, cells)
    between = " .. "
    room = cells - len(between)
    first = _short(stage.first, max(room // 2, room - cell_len(stage.last)))
    return first + between + _short(stage.last, room - cell_len(first))


def _short(name: str, cells: int) -> str:
    """A name in at most so many columns; the middle goes, since numbers stand at the end."""
    if cell_len(name) <= cells:
        return name
    tail = name[-(cells // 3) :] if name.isascii() else ""
    return set_cell_size(name, cells - len(tail) - 1).rstrip() + "~" + tail


def _comparison(cut: LayerCut) -> list[RenderableType]:
    """A row for each measure, a column for each cut, then the sentence."""
    pair = (cut.by_cost, cut.equal_counts)
    rows = [("", "by cost", "equal counts")]
    rows += [("cadence", *(number(timed.cadence) for timed in pair))]
    rows += [("makespan", *(number(timed.makespan) for timed in pair))]
    rows += [("busy share", *(percent(timed.busy_share) for timed in pair))]
    if cut.memory_limit is not None:
        rows += [("within the limit", *("yes" if timed.fits else "no" for timed in pair))]
    lines = [(f"{name:<18}{left:>14}{right:>14}", "" if name else "bold") for name, left, right in rows]
    sentences = ["The slowest stage sets the cadence:"]
    for name, timed in zip(rows[0][1:], pair, strict=True):
        sentences.append(f"  {name}, stage {timed.slowest}: one microbatch every {number(timed.cadence)}")
    if cut.equal_counts.cadence > cut.by_cost.cadence:
        times = cut.equal_counts.makespan / cut.by_cost.makespan
        sentences.append(f"Equal counts are not equal stages: their makespan is {times:.2f} times as long.")
    return [Picture(lines), "", *sentences]
