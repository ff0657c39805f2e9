"""A simulation in the trace event format of Chrome, for chrome://tracing and ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .drawing import WORDS, heading, unit

if TYPE_CHECKING:
    from .simulate import Simulation, Span

MICROSECONDS = 1000.0
"""Of one unit of cost: it is drawn as 1 ms."""
PID = 0


def document(sim: Simulation) -> dict[str, Any]:
    """The trace: a thread per rank, an event per action, a flow per transfer, a counter of what each rank holds.

    Times are microseconds, one unit of cost is 1 ms. Grows with the number of actions.
    """
    spans = sim.spans()
    events = [*_names(sim), *map(_action, spans), *_flows(sim, spans), *_counters(sim)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": heading(sim),
            "time": "one unit of cost is 1 ms",
            "held": unit(sim),
            "makespan": sim.makespan,
        },
    }


def _names(sim: Simulation) -> Iterator[dict[str, Any]]:
    def name(kind: str, tid: int, value: str | int) -> dict[str, Any]:
        key = "sort_index" if kind.endswith("sort_index") else "name"
        return {"ph": "M", "name": kind, "pid": PID, "tid": tid, "args": {key: value}}

    yield name("process_name", 0, heading(sim))
    for rank in range(sim.schedule.stages):
        yield name("thread_name", rank, f"rank {rank}")
        yield name("thread_sort_index", rank, rank)


def _action(span: Span) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{span.op}{span.microbatch_index}",
        "cat": WORDS[span.op],
        "pid": PID,
        "tid": span.rank,
        "ts": span.start * MICROSECONDS,
        "dur": (span.end - span.start) * MICROSECONDS,
        "args": {"stage": span.stage, "microbatch_index": span.microbatch_index},
    }


def _flows(sim: Simulation, spans: list[Span]) -> Iterator[dict[str, Any]]:
    """Two events per transfer: one within the action that sends, one at the start of the action that receives."""
    kinds = {"F": "F", "B": "B", "I": "B"}
    places = {(kinds[s.op], s.stage, s.microbatch_index): s for s in spans if s.op in kinds}
    for index, sent in enumerate(sim.transfers()):
        source = places[sent.op, sent.stage, sent.microbatch_index]
        target = places[sent.op, sent.stage + (1 if sent.op == "F" else -1), sent.microbatch_index]
        shared = {"name": "transfer", "cat": "transfer", "id": index, "pid": PID}
        middle = (source.start + source.end) / 2  # a viewer ties a flow to the action that is open at its time
        yield {**shared, "ph": "s", "tid": sent.source, "ts": middle * MICROSECONDS}
        yield {**shared, "ph": "f", "bp": "e", "tid": sent.target, "ts": target.start * MICROSECONDS}


def _counters(sim: Simulation) -> Iterator[dict[str, Any]]:
    for rank in range(sim.schedule.stages):
        for time, held in sim.in_flight(rank):
            yield {
                "ph": "C",
                "name": f"activations in flight, rank {rank}",
                "pid": PID,
                "tid": rank,
                "ts": time * MICROSECONDS,
                "args": {"held": held},
            }
