"""The numbers of `isostep simulate` as lines and tables for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..explain.draw import QUIET, RIGHT, WRONG, decimal, new_table, number
from ..schedule import closed_form
from ..schedule.costs import Costs
from ..schedule.drawing import heading, peaks, percent, unit
from ..schedule.generate import NAMES
from ..schedule.simulate import Simulation
from ..schedule.weights import ROUNDING
from ..units import count

CAPTION = """\
rate %: bubble / makespan. own %: what the longest time from a rank's first start
to its last end has beyond the busiest rank's work, as a share of that time.
peak: the most activations that a rank holds. latency: of the slowest microbatch.
Equal work for all: costs and peak are of whole stages; a schedule with v chunks
a rank cuts each stage into v chunks of 1/v of its costs. To see one of them by
itself: --schedule NAME --whole-stages. dualpipe-v: overlapped pairs are timed as
one after the other, so what overlapping gains is not in it."""


def heading_line(sim: Simulation) -> Text:
    """Which schedule, and what its actions cost."""
    return Text.assemble((heading(sim), "bold"), "\n", (_costs_line(sim), QUIET))


def _costs_line(sim: Simulation) -> str:
    costs = sim.costs
    named = [("forward", costs.forward)]
    if _trains(sim):
        named += [("input gradient", costs.input_grad), ("weight gradient", costs.weight_grad)]
    parts = [f"{name} {_range(values)}" for name, values in named]
    if any(costs.transfer):
        parts.append(f"transfer {_range(costs.transfer)}{' (blocking)' if costs.blocking else ''}")
    shares = [share for share in costs.recompute if share is not None]
    if shares:
        where = (
            f" on {len(shares)} of {count(len(costs.recompute), 'chunk')}" if len(shares) < len(costs.recompute) else ""
        )
        parts.append(f"recompute{where}" + (f", {_percents(shares)} kept" if any(shares) else ""))
    if costs.weight_share != 1 and _trains(sim):
        parts.append(f"weight share {percent(costs.weight_share)}")
    text = ", ".join(parts)
    return text if sim.schedule.chunks == 1 or set(costs.activation) != {1.0} else f"of one chunk: {text}"


def _stage(sim: Simulation, stage: int) -> str:
    """A stage index, with its rank where that is another number."""
    schedule = sim.schedule
    return str(stage) if schedule.chunks == 1 else f"chunk {stage} (rank {schedule.rank_of[stage]})"


def _cadence(sim: Simulation) -> str:
    """Whether one rank has more to do than the others, so that they wait for it."""
    if len(sim.busiest) == sim.schedule.stages:
        return "; all ranks have equal work" if sim.schedule.stages > 1 else ""
    sets = sim.busiest == (sim.schedule.rank_of[sim.critical_stage],)
    return "; its rank sets the cadence" if sets else ""


def _trains(sim: Simulation) -> bool:
    """Whether there are backwards."""
    return sim.schedule.size > sim.schedule.num_chunks * sim.schedule.num_microbatches


def _percents(shares: Sequence[float]) -> str:
    low, high = percent(min(shares)), percent(max(shares))
    return low if low == high else f"{low} to {high}"


def _range(values: Sequence[float]) -> str:
    low, high = decimal(min(values)), decimal(max(values))
    return low if low == high else f"{low} to {high}"


def numbers_table(sim: Simulation) -> RenderableType:
    """The numbers of one schedule, each beside its closed form where one is known."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    forms = _closed_forms(sim)
    on_path = sum(span.end - span.start for span in sim.critical_path if span.stage == sim.critical_stage)
    share = percent(on_path / sim.makespan) if sim.makespan else percent(0.0)
    for name, value, note in (
        ("makespan", number(sim.makespan), ""),
        ("busy share", percent(sim.busy_share), ""),
        ("bubble, global", number(sim.bubble_global), f"{percent(sim.rate_global)} of the makespan"),
        ("bubble, own span", number(sim.bubble_own_span), f"rate {percent(sim.rate_own_span)} of the longest own span"),
        ("peak in flight", peaks(sim.peak_in_flight), "activations of chunks, by rank"),
        *_memory_row(sim),
        ("latency, median", number(sim.latency.median), "of a microbatch, to its backward's end on stage 0"),
        ("latency, worst", number(sim.latency.worst), ""),
        ("critical stage", _stage(sim, sim.critical_stage), f"{share} of the longest chain{_cadence(sim)}"),
    ):
        form = forms.get(name, "")
        beside = "= closed form" if form == value else form and f"closed form {form}"
        table.add_row(name, value, ", ".join(filter(None, [note, beside])))
    return table


def _memory_row(sim: Simulation) -> list[tuple[str, str, str]]:
    """What is held, where that is not the number of activations in flight: where they are computed again."""
    if sim.peak_memory == tuple(map(float, sim.peak_in_flight)):
        return []
    return [("peak memory", peaks(sim.peak_memory), f"{unit(sim)}, by rank")]


def _closed_forms(sim: Simulation) -> dict[str, str]:
    """What formulas say, by the name of the row; none where costs differ, transfers take time, or it is unknown."""
    schedule, costs = sim.schedule, sim.costs
    if schedule.name not in NAMES:
        return {}
    stages, microbatches, chunks = schedule.stages, schedule.num_microbatches, schedule.chunks
    forms = {}
    if _trains(sim):
        held = [closed_form.peak_in_flight(schedule.name, stages, microbatches, chunks, r) for r in range(stages)]
        known = [peak for peak in held if peak is not None]
        if len(known) == stages:
            forms["peak in flight"] = peaks(known)
    each = _equal_costs(costs)
    if each is None:
        return forms
    share = closed_form.busy_share(schedule.name, stages, microbatches, chunks, *each, forward_only=not _trains(sim))
    if share is not None:
        work = chunks * microbatches * (sum(each) if _trains(sim) else each[0])
        forms["busy share"] = percent(share)
        forms["makespan"] = number(work / share)
        forms["bubble, global"] = number(work / share - work)
    return forms


def _equal_costs(costs: Costs) -> tuple[float, float, float] | None:
    """f, b and w where they are equal for all chunks and no transfer takes time."""
    if any(costs.transfer) or any(len(set(row)) > 1 for row in costs.durations()):
        return None
    forward, _, inputs, weights = (row[0] for row in costs.durations())
    return forward, inputs, weights


def over_limit(sim: Simulation, limit: float | None) -> str:
    """The line for a schedule that holds more than `limit` on a rank, in the unit of its costs; else empty."""
    if fits(sim, limit) or limit is None:
        return ""
    worst = max(sim.peak_memory)
    held = f"rank {sim.peak_memory.index(worst)} holds {number(worst)} {unit(sim)}"
    return f"above the memory limit: {held}, the limit is {number(limit)}"


def fits(sim: Simulation, limit: float | None) -> bool:
    """Whether no rank holds more than `limit`, in the unit of the costs' activations."""
    return limit is None or max(sim.peak_memory) <= limit * (1 + ROUNDING)


def comparison(sims: Sequence[Simulation], left_out: Sequence[tuple[str, str]], limit: float | None) -> RenderableType:
    """A row per schedule, and below them those that cannot be built and why."""
    limited = [] if limit is None else ["fits"]
    table = new_table(
        "schedule", "v", "makespan", "busy %", "bubble", "rate %", "own %", "peak", "latency", *limited, gap=0
    )
    table.columns[0].no_wrap = True
    for sim in sims:
        verdict = [] if limit is None else [_verdict(fits(sim, limit))]
        table.add_row(
            sim.schedule.name,
            str(sim.schedule.chunks),
            decimal(sim.makespan),
            f"{100 * sim.busy_share:.1f}",
            decimal(sim.bubble_global),
            f"{100 * sim.rate_global:.1f}",
            f"{100 * sim.rate_own_span:.1f}",
            decimal(max(sim.peak_memory)),
            decimal(sim.latency.worst),
            *verdict,
        )
    parts: list[RenderableType] = []
    if sims:
        first = sims[0].schedule
        sizes = f"{count(first.stages, 'stage')}, {count(first.num_microbatches, 'microbatch')}"
        whole = next(sim for sim in sims if sim.schedule.chunks == 1)
        parts = [Text.assemble(("all schedules", "bold"), f": {sizes}"), Text(_costs_line(whole), QUIET), ""]
        parts += [table, "", Text(CAPTION, QUIET)]
        if limit is not None:
            parts.append(Text(f"fits: holds at most {number(limit)}, the memory limit", QUIET))
    if left_out:
        parts += ["", "Cannot be built for these sizes:"]
        parts += [Padding(f"{name}: {reason}", (0, 0, 0, 2)) for name, reason in left_out]
    return Group(*parts)


def _verdict(good: bool) -> Text:
    return Text("yes", RIGHT) if good else Text("no", WRONG)
