"""The view *Pipeline*: a schedule drawn, measured, and compared with another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ..errors import InputError
from ..schedule import gantt_svg
from ..schedule.drawing import first_spans, percent, window
from ..schedule.simulate import Simulation
from .fields import Choice, Field, Real, Reals, Slider, Switch, Whole
from .pipeline_state import CHOOSE_CHUNKS, SCHEDULE_NAMES, Outcome, outcome_of, settings_of
from .query import query_of
from .view import MINUS, Values, View, number

WIDTH = 820
"""Of the pictures, in pixels."""
FILES = (
    ("schedule.csv", "CSV", "the order of actions, as torch's pipelining runtime reads it"),
    ("gantt.svg", "SVG", "the Gantt chart"),
    ("memory.svg", "SVG", "activations held"),
    ("trace.json", "Chrome trace", "for chrome://tracing and ui.perfetto.dev"),
    ("simulation.json", "JSON", "every number and span of this page"),
)


def answer(values: Values, texts: Mapping[str, str]) -> dict[str, Any]:
    """The pictures of one or two schedules, and their numbers side by side.

    Where the second cannot be drawn, the first is drawn alone and a sentence says why.
    """
    start, end = values["from"] or 0.0, values["to"]
    outcomes = [outcome_of(settings_of(values))]
    window(outcomes[0].sim, start, end)  # refuses one that it does not have
    missing = ""
    if values["compare"]:
        try:
            second = outcome_of(settings_of(values, values["compare"]))
            window(second.sim, start, end)
            outcomes.append(second)
        except InputError as error:
            missing = f"Not beside it: {values['compare']}. {error}"
    return {
        "outcomes": outcomes,
        "missing": missing,
        "summary": _summary(outcomes),
        "brief": _brief(outcomes),
        "pictures": _pictures(outcomes, start, end, values["memory-limit"]),
        "windows": _windows(outcomes[0], start, end, texts),
        "limit": values["memory-limit"],
        "over": [_over(outcome, values["memory-limit"]) for outcome in outcomes],
        "notes": _notes(outcomes),
        "slowest": slowest(outcomes[0].sim),
        "rows": _rows(outcomes),
        "ranks": [_ranks(outcome) for outcome in outcomes],
        "downloads": [_downloads(outcome, texts) for outcome in outcomes],
        "percent": percent,
    }


def _summary(outcomes: Sequence[Outcome]) -> str:
    first, sim = outcomes[0], outcomes[0].sim
    text = f"{sim.schedule.name} takes {number(sim.makespan)}; its ranks are busy {percent(sim.busy_share)} of the time"
    text += f" and hold at most {number(first.peak)} stage activation{'' if first.peak == 1 else 's'}."
    if len(outcomes) == 1:
        return text
    second = outcomes[1]
    change = second.sim.makespan - sim.makespan
    share = f" ({percent(abs(change) / sim.makespan)})" if sim.makespan else ""
    longer = "longer" if change > 0 else "shorter"
    lasts = f"is {number(abs(change))}{share} {longer}" if change else "takes as long"
    held = second.peak - first.peak
    holds = f"{number(abs(held))} {'more' if held > 0 else 'fewer'}" if held else "as many"
    return f"{text} {second.sim.schedule.name} {lasts} and holds {holds}."


def _brief(outcomes: Sequence[Outcome]) -> str:
    """One line of a small screen."""
    sims = [outcome.sim for outcome in outcomes]
    if len(sims) == 1:
        held = number(outcomes[0].peak)
        return f"takes {number(sims[0].makespan)}, busy {percent(sims[0].busy_share)}, holds {held}"
    return ", ".join(f"{sim.schedule.name} {number(sim.makespan)}" for sim in sims)


def _notes(outcomes: Sequence[Outcome]) -> list[str]:
    notes = [f"{outcome.note}." for outcome in outcomes if outcome.note]
    paired = {outcome.sim.schedule.name: None for outcome in outcomes if outcome.sim.schedule.overlapped}
    return notes + [f"{name}: the two actions of an overlapped pair are timed one after the other." for name in paired]


def slowest(sim: Simulation) -> dict[str, Any]:
    """The stage whose rank has the most work: for it the others wait. None where several ranks have the most."""
    on_path = sum(span.end - span.start for span in sim.critical_path if span.stage == sim.critical_stage)
    share = percent(on_path / sim.makespan if sim.makespan else 0.0)
    busiest = sim.busiest
    if len(busiest) != 1 or sim.schedule.stages == 1:
        alike = "equal work" if len(busiest) == sim.schedule.stages else f"{len(busiest)} ranks tie"
        one = "stage" if sim.schedule.chunks == 1 else "chunk"
        note = f"{share} of the longest chain is on {one} {sim.critical_stage}"
        return {"stage": None, "name": f"none: {alike}", "note": note}
    held = [stage for stage, rank in enumerate(sim.schedule.rank_of) if rank == busiest[0]]
    forward, backward, *_ = sim.costs.durations()
    stage = sim.critical_stage
    if stage not in held:
        stage = max(held, key=lambda stage: (forward[stage] + backward[stage], -stage))
    name = f"stage {stage}" if sim.schedule.chunks == 1 else f"chunk {stage} (rank {busiest[0]})"
    note = "its rank has the most work"
    if stage == sim.critical_stage:
        note = f"{share} of the longest chain; its rank sets the cadence"
    return {"stage": stage, "name": name, "note": note}


def _pictures(outcomes: Sequence[Outcome], start: float, end: float | None, limit: int | None) -> list[dict[str, Any]]:
    """Both on one scale of time, the longer one as wide as WIDTH."""
    lasting = [window(outcome.sim, start, end)[1] - start for outcome in outcomes]
    return [
        {
            "gantt": Markup(gantt_svg.draw(outcome.sim, start, end, width, style=False)),
            "memory": Markup(gantt_svg.memory(outcome.sim, limit, width, style=False, start=start, end=end)),
        }
        for outcome, lasts in zip(outcomes, lasting, strict=True)
        for width in [_width(outcome, lasts / max(lasting) if max(lasting) else 1.0)]
    ]


def _width(outcome: Outcome, share: float) -> int:
    frame = gantt_svg.frame_of(outcome.sim, WIDTH, 0.0, 1.0)
    return max(gantt_svg.MIN_WIDTH, round(WIDTH - frame.span * (1 - share)))


def _windows(outcome: Outcome, start: float, end: float | None, texts: Mapping[str, str]) -> dict[str, Any]:
    """What part of the time is drawn, and links that move it."""
    sim = outcome.sim
    first, last = window(sim, start, end)
    asked = last
    if sim.schedule.size > gantt_svg.MAX_SPANS:
        _, last = first_spans(sim, first, last, gantt_svg.MAX_SPANS)
    length, makespan = last - first, sim.makespan
    links = []
    if first > 0:
        links.append(("Earlier", query_of(texts, **{"from": _time(max(0.0, first - length)), "to": _time(first)})))
    if last < makespan:
        links.append(("Later", query_of(texts, **{"from": _time(last), "to": _time(last + length)})))
    middle = first + length / 4
    links.append(("Closer", query_of(texts, **{"from": _time(middle), "to": _time(middle + length / 2)})))
    if (first, last) != (0.0, makespan):
        links.append(("All", query_of(texts, **{"from": None, "to": None})))
    said = ""
    if (first, last) != (0.0, makespan):
        said = f"Drawn: from {number(first)} to {number(last)} of {number(makespan)}."
    if last < asked:
        said += f" A picture holds {gantt_svg.MAX_SPANS:,} actions at most."
    return {"said": said, "links": links if length > 1e-6 * makespan else links[-1:]}


def _time(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _over(outcome: Outcome, limit: int | None) -> str:
    held = outcome.sim.peak_memory
    if limit is None or max(held) <= limit:
        return ""
    rank, name = held.index(max(held)), outcome.sim.schedule.name
    return f"{name} does not fit: rank {rank} holds {number(held[rank])} stage activations, and the limit is {limit}."


def _rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The numbers of each outcome, and the difference of the second to the first."""
    sims = [outcome.sim for outcome in outcomes]
    shares = {
        "Busy share": ("busy_share", [sim.busy_share for sim in sims]),
        "Busy share, closed form": ("closed_form", [outcome.closed_form for outcome in outcomes]),
        "Bubble, share of the makespan": ("rate_global", [sim.rate_global for sim in sims]),
        "Bubble, share of the longest own span": ("rate_own_span", [sim.rate_own_span for sim in sims]),
    }
    plain = {
        "Makespan": ("makespan", [sim.makespan for sim in sims]),
        "Bubble: makespan less the busiest rank's work": ("bubble_global", [sim.bubble_global for sim in sims]),
        "Bubble: longest own span less that work": ("bubble_own_span", [sim.bubble_own_span for sim in sims]),
        "Latency of a microbatch, median": ("latency.median", [sim.latency.median for sim in sims]),
        "Latency of a microbatch, worst": ("latency.worst", [sim.latency.worst for sim in sims]),
        "Most held by a rank, stage activations": ("peak", [outcome.peak for outcome in outcomes]),
        "Chunks on a rank, v": ("chunks", [outcome.chunks for outcome in outcomes]),
        "Actions": ("size", [sim.schedule.size for sim in sims]),
    }
    shown = [_row(name, key, numbers, percent) for name, (key, numbers) in shares.items()]
    others = [_row(name, key, numbers, number) for name, (key, numbers) in plain.items()]
    return [others[0], shown[0], shown[1], others[1], shown[2], others[2], shown[3], *others[3:]]


def _row(name: str, key: str, values: Sequence[float | None], text: Any) -> dict[str, Any]:
    cells = [(value, "none known" if value is None else text(value)) for value in values]
    difference = ""
    if len(values) == 2 and values[0] is not None and values[1] is not None:
        change = values[1] - values[0]
        if abs(change) <= 1e-12 * abs(values[0]):
            difference = "same"
        else:
            difference = f"{'+' if change > 0 else MINUS}{text(abs(change))}".replace(" %", " points")
    return {"name": name, "key": key, "cells": cells, "difference": difference}


def _ranks(outcome: Outcome) -> dict[str, Any]:
    sim = outcome.sim
    held = zip(sim.busy, sim.peak_memory, sim.peak_in_flight, strict=True)
    rows = [
        {
            "rank": rank,
            "busy": work,
            "share": work / sim.makespan if sim.makespan else 0.0,
            "memory": memory,
            "in_flight": in_flight,
        }
        for rank, (work, memory, in_flight) in enumerate(held)
    ]
    return {"rows": rows, "slowest": slowest(sim)}


def _downloads(outcome: Outcome, texts: Mapping[str, str]) -> list[tuple[str, str, str]]:
    settings = outcome.settings
    query = query_of(texts, schedule=settings.schedule, compare=None, chunks=settings.chunks)
    return [(f"/pipeline/{name}{query}", kind, said) for name, kind, said in FILES]


def _fields() -> tuple[Field, ...]:
    names = tuple((name, name) for name in SCHEDULE_NAMES)
    cost = {"least": 0.0, "most": 1e6, "slider": Slider(0, 4, 0.1)}
    return (
        Choice("schedule", "Schedule", "1f1b", options=names),
        Choice("compare", "Compare with", "", options=(("", "nothing"), *names)),
        Whole("stages", "P, stages", "4", least=1, most=64, slider=Slider(1, 16)),
        Whole("microbatches", "M, microbatches", "8", least=1, most=1024, slider=Slider(1, 64)),
        Whole("chunks", "v, chunks on a rank", "", f"For {', '.join(CHOOSE_CHUNKS[:-1])} and {CHOOSE_CHUNKS[-1]}. "
              "Empty: what the schedule has.", Slider(1, 8), least=1, most=16, optional=True),
        Reals("forward", "Forward", "1", "One number, or one for each stage.", **cost),
        Reals("input-grad", "Input gradient", "1", **cost),
        Reals("weight-grad", "Weight gradient", "1", **cost),
        Reals("transfer", "Transfer", "0", "From a stage to the next: one number, or one for each link.",
              Slider(0, 2, 0.05), least=0.0, most=1e6),
        Switch("recompute", "Recompute activations"),
        Switch("forward-only", "Forwards only"),
        Whole("memory-limit", "Memory limit", "", "Stage activations that a rank may hold.", Slider(1, 32), least=1,
              most=4096, optional=True),
        Real("from", "Drawn from", "", least=0.0, most=1e12, optional=True),
        Real("to", "Drawn to", "", least=0.0, most=1e12, optional=True),
    )  # fmt: skip


VIEW = View(
    name="pipeline",
    title="Pipeline",
    lead="Layers are cut into stages on P ranks, and M microbatches stream through. Ranks are idle while the chain "
    "fills and drains, and hold the activations of every microbatch whose backward is still to come.",
    summary="Schedules over stages and microbatches: Gantt chart, idle time, memory, and two of them side by side.",
    fields=_fields(),
    answer=answer,
    presets=(
        ("Forwards alone: 6 ticks, busy 2/3", "?stages=3&microbatches=4&forward-only=1"),
        ("1F1B against GPipe: same time, less memory", "?schedule=gpipe&compare=1f1b&stages=4&microbatches=8"),
        ("1F1B against ZB-V: the idle time goes", "?schedule=1f1b&compare=zb-v&stages=4&microbatches=8"),
        ("Chunks, and transfers that cost", "?schedule=1f1b&compare=interleaved-1f1b&microbatches=8&transfer=0.25"),
        ("An order searched within a limit", "?schedule=1f1b&compare=auto&memory-limit=4&forward=1,1,2,1"),
        ("A slow stage sets the cadence", "?schedule=1f1b&stages=4&microbatches=8&forward=1,1,2,1"),
    ),
    form=lambda texts: {"choose_chunks": " ".join(CHOOSE_CHUNKS)},
    not_shown="Not shown: quality, optimizer state, bytes of a transfer, what a kernel gains from larger microbatches.",
)
