"""Timelines in the trace event format of Chrome, for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .drawing import WORDS, Timeline, heading, unit

if TYPE_CHECKING:
    from .simulate import Span

MICROSECONDS = 1000.0
"""Of one unit of cost: it is drawn as 1 ms."""


def document(*replicas: Timeline) -> dict[str, Any]:
    """The trace: a thread per rank, an event per action, a flow per transfer, a counter of what each rank holds.

    Each replica is a process, the first one names the whole. Times are microseconds, one unit of cost is 1 ms. Grows
    with the number of actions.
    """
    sim = replicas[0]
    return {
        "traceEvents": [event for replica, each in enumerate(replicas) for event in _events(each, replica)],
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": heading(sim),
            "time": "one unit of cost is 1 ms",
            "held": unit(sim),
            "makespan": sim.makespan,
        },
    }


def _events(sim: Timeline, pid: int) -> Iterator[dict[str, Any]]:
    spans = sim.spans()
    for event in (*_names(sim), *map(_action, spans), *_flows(sim, spans, f"{pid}."), *_counters(sim)):
        yield {**event, "pid": pid}


def _names(sim: Timeline) -> Iterator[dict[str, Any]]:
    def name(kind: str, tid: int, value: str | int) -> dict[str, Any]:
        key = "sort_index" if kind.endswith("sort_index") else "name"
        return {"ph": "M", "name": kind, "tid": tid, "args": {key: value}}

    yield name("process_name", 0, heading(sim))
    for rank in range(sim.schedule.stages):
        yield name("thread_name", rank, f"rank {rank}")
        yield name("thread_sort_index", rank, rank)


def _action(span: Span) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{span.op}{span.microbatch_index}",
        "cat": WORDS[span.op],
        "tid": span.rank,
        "ts": span.start * MICROSECONDS,
        "dur": (span.end - span.start) * MICROSECONDS,
        "args": {"stage": span.stage, "microbatch_index": span.microbatch_index},
    }


def _flows(sim: Timeline, spans: list[Span], prefix: str) -> Iterator[dict[str, Any]]:
    """Two events per transfer: one within the action that sends, one at the start of the action that receives."""
    kinds = {"F": "F", "B": "B", "I": "B"}
    places = {(kinds[s.op], s.stage, s.microbatch_index): s for s in spans if s.op in kinds}
    for index, sent in enumerate(sim.transfers()):
        source = places[sent.op, sent.stage, sent.microbatch_index]
        target = places[sent.op, sent.stage + (1 if sent.op == "F" else -1), sent.microbatch_index]
        shared = {"name": "transfer", "cat": "transfer", "id": f"{prefix}{index}"}
        middle = (source.start + source.end) / 2  # a viewer ties a flow to the action that is open at its time
        yield {**shared, "ph": "s", "tid": sent.source, "ts": middle * MICROSECONDS}
        yield {**shared, "ph": "f", "bp": "e", "tid": sent.target, "ts": target.start * MICROSECONDS}


def _counters(sim: Timeline) -> Iterator[dict[str, Any]]:
    for rank in range(sim.schedule.stages):
        for time, held in sim.in_flight(rank):
            yield {
                "ph": "C",
                "name": f"activations in flight, rank {rank}",
                "tid": rank,
                "ts": time * MICROSECONDS,
                "args": {"held": held},
            }
