"""Drawings of the small models, for a terminal of 80 columns, with or without colour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from ..units import count
from .batch import BatchSizes, Epoch
from .replicas import Join, ReplicaUpdate, VectorUpdate
from .tokens import LOOPS, LoopResult, TokenWeights

RIGHT, WRONG, QUIET = "green", "red", "dim"
NOT_SHOWN = "Not shown: speed, quality, optimizer state, the cost of communication."
MAX_REPLICAS = 4
MAX_STAGES = 4
MAX_MICROBATCHES = 8
LABEL_WIDTH = 12
CELL_WIDTH = 17
ASCII = str.maketrans("─│╭╮╰╯┬┴┼▼█", "-|+++++++v#")


@dataclass(frozen=True)
class Picture:
    """Styled lines, never wrapped; drawing characters become ASCII where they cannot be shown."""

    lines: Sequence[tuple[str, str]]
    """Each line with its style."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line, style in self.lines:
            shown = line.translate(ASCII).encode("ascii", "replace").decode() if options.ascii_only else line
            yield Text(shown.rstrip(), style=style, no_wrap=True, overflow="crop")


def number(value: float) -> str:
    """A number in at most 12 characters."""
    return f"{value:.6g}"


def fraction(value: Fraction) -> str:
    """A weight as 1/16, or as a decimal where the fraction would be longer than 7 characters."""
    return exact if len(exact := str(value)) <= 7 else decimal(value)


def decimal(value: float | Fraction) -> str:
    """A whole number, or four digits or more, in at most 7 characters where the size allows."""
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    if 1e4 <= abs(value) < 1e6:
        return f"{float(value):.0f}"
    texts = [f"{float(value):.{digits}g}" for digits in (4, 3, 2)]
    return next((text for text in texts if len(text) <= 7), texts[-1])


def draw_replicas(update: ReplicaUpdate) -> RenderableType:
    """The picture of one update, then the true mean beside the mean of replica means."""
    shown = update.replicas[:MAX_REPLICAS]
    means = ["none" if r.gradient_mean is None else number(r.gradient_mean) for r in shown]
    alone = ["does not move" if r.gradient_mean is None else f"w = {number(r.w_alone)}" for r in shown]
    after = f"w = {number(update.exact.w_after)}"
    joined = f"sum {number(update.gradient_sum)} over {count(update.examples, 'example')}"
    lines = [
        _row("", [f"replica {index}" for index in range(len(shown))], "bold"),
        _row("scatter", [_targets(replica.targets) for replica in shown]),
        _row("backward", [f"sum {number(replica.gradient_sum)}" for replica in shown]),
        _row("", [f"mean {mean}" for mean in means]),
        _row("(alone)", alone, QUIET),
        *_joined(len(shown), "all-reduce", f"{joined} = {number(update.exact.gradient)}"),
        _row("update", [after] * len(shown), f"bold {RIGHT}"),
    ]
    return Group(
        heading("replicas", f"{count(len(update.replicas), 'replica')}, one parameter, one update"),
        f"w = {number(update.w)}; loss of an example (w - y)^2 / 2, gradient w - y; learning rate {number(update.lr)}",
        "",
        Picture(lines),
        *left_out(len(update.replicas) - len(shown), "replica"),
        "",
        "Two ways to join the gradients, and the weight of one example of each replica:",
        _joins(update),
        *_replica_notes(update),
        *closing(),
    )


def draw_vectors(update: VectorUpdate) -> RenderableType:
    """The picture of one update of several parameters from one gradient per replica."""
    shown = update.gradients[:MAX_REPLICAS]
    lines = [
        _row("", [f"replica {index}" for index in range(len(shown))], "bold"),
        _row("weights", [_vector(update.weights)] * len(shown)),
        _row("backward", [_vector(gradient) for gradient in shown]),
        _row("(alone)", [_vector(weights) for weights in update.weights_alone[:MAX_REPLICAS]], QUIET),
        *_joined(len(shown), "all-reduce", f"average {_vector(update.gradient)}"),
        _row("update", [_vector(update.weights_after)] * len(shown), f"bold {RIGHT}"),
    ]
    return Group(
        heading("replicas", f"{count(len(update.gradients), 'replica')}, one gradient each, one update"),
        f"learning rate {number(update.lr)}; every replica has equally many examples",
        "",
        Picture(lines),
        *left_out(len(update.gradients) - len(shown), "replica"),
        *closing(),
    )


def draw_tokens(weights: TokenWeights) -> RenderableType:
    """The six loops, the weight of one token under each, and the same against the exact weight."""
    counts = weights.counts
    return Group(
        heading("tokens", f"the weight of one token in six loops, over {count(counts.total, 'token')}"),
        "",
        _loops(),
        "sum, mean: over a microbatch.  n, N_d, N: tokens of microbatch, replica, group.",
        f"A (microbatches per replica) = {counts.microbatches:,}, D (replicas) = {counts.replicas:,}.",
        "",
        _token_table(weights),
        *_token_notes(weights),
        *closing(),
    )


def draw_batch(sizes: BatchSizes) -> RenderableType:
    """The ladder of units, the grid of ranks, and the fault of taking the world size for the replicas."""
    return Group(
        heading("batch", "how the sizes of one update multiply, and which ranks are replicas"),
        "",
        _ladder(sizes),
        *_epoch(sizes.epoch),
        "",
        f"world size = D x P x T = {sizes.replicas:,} x {sizes.stages:,} x {sizes.slices:,} = "
        f"{count(sizes.world_size, 'rank')}, {sizes.ranks_per_replica:,} per replica",
        "",
        _rank_grid(sizes),
        *left_out(sizes.replicas - MAX_REPLICAS, "replica"),
        *left_out(sizes.stages - MAX_STAGES, "stage"),
        Text("Ranks are counted slice by slice, then stage by stage, then replica by replica.", QUIET),
        "",
        *_world_size_fault(sizes),
        *closing(),
    )


def heading(topic: str, text: str) -> Text:
    """The first line of a topic."""
    return Text.assemble((topic, "bold"), ": ", text)


def closing() -> list[RenderableType]:
    """The last line of every topic."""
    return ["", Text(NOT_SHOWN, style=QUIET)]


def left_out(more: int, one: str) -> list[RenderableType]:
    """A line that says how many are not drawn; nothing where `more` is not above 0."""
    return [Text(f"... and {count(more, one)} more, not drawn", style=QUIET)] if more > 0 else []


def _size(value: int) -> str:
    return f"{value:,}" if value < 1e6 else f"{value:.3g}"


def new_table(*headers: str, left: int = 1, gap: int = 1) -> Table:
    """A table without vertical lines; the first `left` columns are text, the others numbers."""
    table = Table(box=SIMPLE_HEAD, padding=(0, gap, 0, 0), show_edge=False, header_style="bold")
    for index, header in enumerate(headers):
        table.add_column(header, justify="left" if index < left else "right", overflow="fold")
    return table


def _row(label: str, cells: Sequence[str], style: str = "") -> tuple[str, str]:
    return label.ljust(LABEL_WIDTH) + "".join(cell.center(CELL_WIDTH) for cell in cells), style


def _joined(columns: int, label: str, text: str) -> list[tuple[str, str]]:
    """Lines from every column into one text, and from it back into every column."""
    stems, heads = _row("", ["│"] * columns), _row("", ["▼"] * columns)
    middle = label.ljust(LABEL_WIDTH) + text.center(CELL_WIDTH * columns)
    if columns == 1:
        return [stems, (middle, "bold"), heads]
    return [
        stems,
        (_branches(columns, "╰┴╯┬┼"), ""),
        (middle, "bold"),
        (_branches(columns, "╭┬╮┴┼"), ""),
        heads,
    ]


def _branches(columns: int, corners: str) -> str:
    """A horizontal line that meets every column, and the text in the middle from the other side."""
    first, between, last, meets, crosses = corners
    line = ["─"] * (CELL_WIDTH * (columns - 1) + 1)
    for column in range(1, columns - 1):
        line[CELL_WIDTH * column] = between
    middle = len(line) // 2
    line[middle] = crosses if line[middle] == between else meets
    line[0], line[-1] = first, last
    return " " * (LABEL_WIDTH + (CELL_WIDTH - 1) // 2) + "".join(line)


def _targets(targets: Sequence[float]) -> str:
    """Targets in the width of a cell: y = 0, 2 or y = 4 (4 times)."""
    if not targets:
        return "no example"
    runs = [(number(y), len(list(same))) for y, same in groupby(targets)]
    text = "y = " + ", ".join(y if times == 1 else f"{y} (x{times})" for y, times in runs)
    return text if len(text) < CELL_WIDTH else f"{text[: CELL_WIDTH - 5]} ..."


def _vector(numbers: Sequence[float]) -> str:
    text = f"[{', '.join(map(number, numbers))}]"
    return text if len(text) < CELL_WIDTH else f"{text[: CELL_WIDTH - 6]} ...]"


def _joins(update: ReplicaUpdate) -> Table:
    shown = len(update.replicas[:MAX_REPLICAS])
    table = new_table("joined by", "gradient", "w after", *(f"replica {i}" for i in range(shown)))
    same = update.mean_of_means.example_weights == update.exact.example_weights
    rows: list[tuple[str, Join, str]] = [
        ("true mean", update.exact, RIGHT),
        ("mean of means", update.mean_of_means, RIGHT if same else WRONG),
    ]
    for name, join, style in rows:
        cells = [decimal(join.gradient), decimal(join.w_after)]
        cells += ["-" if weight is None else fraction(weight) for weight in join.example_weights[:shown]]
        table.add_row(name, *cells, style=style)
    return table


def _replica_notes(update: ReplicaUpdate) -> list[RenderableType]:
    sizes = {len(replica.targets) for replica in update.replicas}
    if len(sizes) == 1:
        return ["", "With equally many examples on every replica, the mean of means is the true mean."]
    notes: list[RenderableType] = [
        "",
        "The mean of means is wrong here: an example counts for more where there are few.",
    ]
    if 0 in sizes:
        notes.append("A replica without examples is counted too, and its mean loss is NaN in torch.")
    return notes


def _loops() -> Table:
    table = new_table("", "loop", "backward on", "across replicas", "weight of a token", left=5)
    for index, loop in enumerate(LOOPS, start=1):
        table.add_row(str(index), loop.name, loop.backward_on, loop.across_replicas, loop.weight)
    return table


def _token_table(weights: TokenWeights) -> Table:
    loops = weights.loops
    table = new_table("", "tokens", *(f"loop {index}" for index in range(1, len(loops) + 1)), gap=0)
    table.add_row(Text("weight of one token", "bold"))
    _add_microbatches(table, weights, [loop.token_weights for loop in loops], fraction)
    table.add_row("all: sum of weights", _size(weights.counts.total), *(_judged(r.weight_sum) for r in loops))
    table.add_row()
    table.add_row(Text("times the exact weight", "bold"))
    _add_microbatches(table, weights, [loop.ratios for loop in loops], decimal)
    table.add_row("heaviest / lightest", "", *(_judged(loop.heaviest_to_lightest) for loop in loops))
    table.add_section()
    if weights.losses is not None or any(loop.loss_is_nan for loop in loops):
        table.add_row("loss", "", *map(_loss, loops))
    table.add_row("verdict", "", *(Text(r.verdict, RIGHT if r.verdict == "exact" else WRONG) for r in loops))
    return table


def _add_microbatches(
    table: Table,
    weights: TokenWeights,
    matrices: Sequence[Sequence[Sequence[Fraction | None]]],
    form: Callable[[Fraction], str],
) -> None:
    """One row per microbatch, with its value in the matrix of each loop; only the first few microbatches."""
    counts = weights.counts
    places = [(d, a) for d in range(counts.replicas) for a in range(counts.microbatches)]
    for d, a in places[:MAX_MICROBATCHES]:
        cells = []
        for matrix, loop in zip(matrices, weights.loops, strict=True):
            value = matrix[d][a]
            style = RIGHT if loop.ratios[d][a] == 1 else WRONG
            cells.append(Text("-") if value is None else Text(form(value), style))
        table.add_row(f"replica {d} microbatch {a}", _size(counts.tokens[d][a]), *cells)
    if len(places) > MAX_MICROBATCHES:
        table.add_row(Text(f"... and {len(places) - MAX_MICROBATCHES:,} more", QUIET))


def _judged(value: Fraction) -> Text:
    return Text(decimal(value), RIGHT if value == 1 else WRONG)


def _loss(loop: LoopResult) -> Text:
    if loop.loss_is_nan:
        return Text("NaN", WRONG)
    style = RIGHT if loop.verdict == "exact" else WRONG
    return Text("-") if loop.loss is None else Text(decimal(loop.loss), style)


def _token_notes(weights: TokenWeights) -> list[RenderableType]:
    notes: list[RenderableType] = [
        "",
        "uneven: some tokens count for more than others; no learning rate repairs that.",
        "scaled: all tokens count alike; plain SGD sees another learning rate.",
    ]
    lucky = [str(i) for i, loop in enumerate(weights.loops, start=1) if loop.verdict == "exact"][1:]
    if lucky:
        notes.append(f"Exact for this group but not for every group: loop {' and '.join(lucky)}.")
    if any(loop.loss_is_nan for loop in weights.loops):
        notes += [
            "NaN: a mean over no token. The weights drawn are those of torch's ignore_index,",
            "where its gradient is 0; with a mask multiplied in, every gradient is NaN too.",
        ]
    return notes


def _ladder(sizes: BatchSizes) -> Table:
    m, a, d = sizes.examples_per_microbatch, sizes.microbatches_per_replica, sizes.replicas
    context = sizes.context_length
    headers = ["scope", "size", "examples"] + ([] if context is None else ["tokens, at most"])
    table = new_table(*headers, left=2)
    for scope, formula, examples in (
        ("one example", "", 1),
        ("microbatch", f"m = {m:,}", m),
        ("replica, per update", f"m x A = {m:,} x {a:,}", sizes.examples_per_replica),
        ("update", f"m x A x D = {m:,} x {a:,} x {d:,}", sizes.examples_per_update),
    ):
        tokens = [] if context is None else [f"{examples * context:,}"]
        table.add_row(scope, formula, f"{examples:,}", *tokens, style=RIGHT if scope == "update" else "")
    return table


def _epoch(epoch: Epoch | None) -> list[RenderableType]:
    if epoch is None:
        return []
    text = f"An epoch of {count(epoch.examples, 'example')} is {count(epoch.updates, 'update')}"
    if epoch.updates:
        text += f", the last of {count(epoch.examples_in_last_update, 'example')}"
    if epoch.examples_dropped:
        text += f"; {count(epoch.examples_dropped, 'example')} dropped"
    return ["", f"{text}."]


def _rank_grid(sizes: BatchSizes) -> Table:
    stages = range(min(sizes.stages, MAX_STAGES))
    table = new_table("", *(f"stage {stage}" for stage in stages), left=1 + len(stages))
    for replica in range(min(sizes.replicas, MAX_REPLICAS)):
        table.add_row(f"replica {replica}", *(_rank_names(sizes.ranks(replica, stage)) for stage in stages))
    return table


def _rank_names(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def _world_size_fault(sizes: BatchSizes) -> list[RenderableType]:
    fault = sizes.world_size_fault
    if fault.factor == 1:
        return ["Every rank is a replica here, so D is the world size; stages or slices end that."]
    table = new_table("if D is taken to be", f"{sizes.replicas:,} replicas", f"{sizes.world_size:,} ranks", "factor")
    believed = fault.examples_per_update_believed
    table.add_row("examples per update", f"{sizes.examples_per_update:,}", f"{believed:,}", f"x {fault.factor:,}")
    table.add_row("gradient, its sum / examples", "1", f"1/{fault.factor:,}", f"x 1/{fault.factor:,}")
    return [table, "", "All ranks of a replica work on the same examples, so a replica counts once."]
