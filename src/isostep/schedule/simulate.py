"""A schedule under costs: how long it takes, where it is idle, what it holds, and why."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .costs import Costs
from .ir import OPS, B, F, Schedule, W
from .replay import Replay, replay

HELD = np.array([1, -1, 0, -1])
"""What each op adds to the activations that a rank holds: a full or a weight backward frees one."""


class Span(NamedTuple):
    """One action in time, predicted or measured."""

    rank: int
    stage: int
    """Stage index: the model chunk, in model order."""
    microbatch_index: int
    op: str
    """F forward, B full backward, I backward for the inputs, W backward for the weights."""
    start: float
    end: float


class Transfer(NamedTuple):
    """Activations (op F) or their gradients (op B) on their way from one rank to another."""

    source: int
    target: int
    stage: int
    """Stage index of the sending chunk."""
    microbatch_index: int
    op: str
    start: float
    end: float


@dataclass(frozen=True)
class Latency:
    """From the start of a microbatch's first forward to the end of its backward on the first stage."""

    median: float
    worst: float


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Runs a schedule on paper. Raises InputError, which names the waiting ranks, where its order is a deadlock."""
    return Simulation(schedule, costs, replay(schedule, costs))


@dataclass(frozen=True)
class Simulation:
    """What came out, in the unit of the costs."""

    schedule: Schedule
    costs: Costs
    times: Replay

    @cached_property
    def makespan(self) -> float:
        """From time 0 to the end of the last action."""
        return max(end for _, end in self._from_to)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Work of each rank."""
        kinds = (np.bincount(self.times.kinds[self.times.rank(r)], minlength=1) for r in range(self.schedule.stages))
        return tuple(float(counts @ self.times.durations[: len(counts)]) for counts in kinds)

    @cached_property
    def busiest(self) -> tuple[int, ...]:
        """The ranks with the most work; if it is one, the others wait for it."""
        most = max(self.busy)
        return tuple(rank for rank, work in enumerate(self.busy) if work >= most * (1 - 1e-9))

    @property
    def busy_share(self) -> float:
        """Work of all ranks / (P * makespan); 0 where nothing takes any time."""
        return sum(self.busy) / (self.schedule.stages * self.makespan) if self.makespan else 0.0

    @property
    def own_spans(self) -> tuple[float, ...]:
        """From the first start to the last end of each rank."""
        return tuple(end - start for start, end in self._from_to)

    @property
    def bubble_global(self) -> float:
        """Makespan - work of the busiest rank."""
        return max(0.0, self.makespan - max(self.busy))

    @cached_property
    def bubble_own_span(self) -> float:
        """The longest own span - work of the busiest rank. With equal work it is a rank's own idle time."""
        return max(0.0, max(self.own_spans) - max(self.busy))

    @property
    def rate_global(self) -> float:
        """Bubble / makespan."""
        return self.bubble_global / self.makespan if self.makespan else 0.0

    @cached_property
    def rate_own_span(self) -> float:
        """Own-span bubble / the longest own span (Qi et al. 2024)."""
        longest = max(self.own_spans)
        return self.bubble_own_span / longest if longest else 0.0

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most chunk activations that each rank holds at once; 1 where there is no backward to hold them for."""
        return tuple(held_at_most(self.schedule, rank) for rank in range(self.schedule.stages))

    @cached_property
    def latency(self) -> Latency:
        """Of one microbatch, over all of them."""
        size, forwards = self.schedule.num_microbatches, self.schedule.num_chunks * self.schedule.num_microbatches
        ends = self.times.times[forwards : forwards + size] if self._trains else self.times.times[:forwards][-size:]
        lasted = (ends - self.times.starts[self.times.place_of[:size]]).tolist()
        return Latency(statistics.median(lasted), max(lasted))

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of actions that sets the makespan, first to last: each starts when the one before lets it."""
        return tuple(self._span(rank, place) for rank, place in reversed(list(self._backwards_from_last())))

    @cached_property
    def critical_stage(self) -> int:
        """The stage index with the most time on the critical path; of equals the one with the most work per action."""
        on_path = [0.0] * self.schedule.num_chunks
        for span in self.critical_path:
            on_path[span.stage] += span.end - span.start
        return max(range(len(on_path)), key=lambda stage: (on_path[stage], self.costs.forward[stage], -stage))

    def spans(self, start: float = 0.0, end: float = float("inf")) -> list[Span]:
        """Actions that overlap a window of time (those without duration: that start in it), by rank, then by start."""
        found = []
        for rank in range(self.schedule.stages):
            places = self.times.rank(rank)
            starts, ends = self.times.starts[places], self.times.ends(rank)
            chosen = np.flatnonzero((starts < end) & ((ends > start) | (starts >= start)))
            ops, stages, microbatches = self.schedule.split(self.schedule.orders[rank][chosen])
            columns = (stages, microbatches, ops, starts[chosen], ends[chosen])
            for stage, microbatch, op, begun, ended in zip(*(c.tolist() for c in columns), strict=True):
                found.append(Span(rank, stage, microbatch, OPS[op], begun, ended))
        return found

    def transfers(self, start: float = 0.0, end: float = float("inf")) -> list[Transfer]:
        """The transfers between ranks that take time and overlap a window, in the order of the senders' spans."""
        last, ranks = self.schedule.num_chunks - 1, self.schedule.rank_of
        found: list[Transfer] = []
        if not any(self.costs.transfer):
            return found
        longest_before = max(self.costs.transfer) + (max(self.times.durations) if self.schedule.overlapped else 0.0)
        for span in self.spans(start - longest_before, end):
            forward = span.op == OPS[F]
            to = span.stage + (1 if forward else -1)
            if span.op == OPS[W] or not 0 <= to <= last or ranks[to] == span.rank:
                continue
            cost = self.costs.transfer[min(to, span.stage)]
            event = ((0 if forward else last + 1) + span.stage) * self.schedule.num_microbatches + span.microbatch_index
            sent = float(self.times.times[event])  # after the action, or after both of an overlapped pair
            if cost and sent < end and sent + cost > start:
                op, arrived = OPS[F] if forward else OPS[B], sent + cost
                found.append(Transfer(span.rank, ranks[to], span.stage, span.microbatch_index, op, sent, arrived))
        return found

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """The most that each rank holds at once, in the unit of the activations of the costs."""
        return tuple(
            memory_at_most(self.schedule, self.costs, rank, self._trains) for rank in range(self.schedule.stages)
        )

    def in_flight(self, rank: int) -> list[tuple[float, float]]:
        """The curve of what a rank holds: (time, activations from then on, in their unit), each time once."""
        takes, frees = (change.reshape(-1) for change in self.costs.memory_changes(self._trains))
        places = self.times.rank(rank)
        kinds = self.times.kinds[places]
        times = np.concatenate([[0.0], self.times.starts[places], self.times.ends(rank)])
        changes = np.concatenate([[0.0], takes[kinds], -frees[kinds]])
        moments, where = np.unique(times, return_inverse=True)
        held = np.cumsum(np.bincount(where, weights=changes))
        return list(zip(moments.tolist(), held.tolist(), strict=True))

    def document(self, spans: bool = False) -> dict[str, Any]:
        """The numbers as JSON can hold them; every span too if `spans`."""
        schedule = self.schedule
        return {
            "schema": 1,
            "schedule": schedule.name,
            "stages": schedule.stages,
            "chunks": schedule.chunks,
            "num_microbatches": schedule.num_microbatches,
            "makespan": self.makespan,
            "busy_share": self.busy_share,
            "bubble_global": self.bubble_global,
            "bubble_own_span": self.bubble_own_span,
            "rate_global": self.rate_global,
            "rate_own_span": self.rate_own_span,
            "peak_in_flight": list(self.peak_in_flight),
            "peak_memory": list(self.peak_memory),
            "busy": list(self.busy),
            "latency": asdict(self.latency),
            "critical_stage": self.critical_stage,
            "critical_path": [span._asdict() for span in self.critical_path],
            "spans": [span._asdict() for span in self.spans()] if spans else [],
        }

    @property
    def _trains(self) -> bool:
        return not np.isinf(self.times.times[self.schedule.num_chunks * self.schedule.num_microbatches])

    @cached_property
    def _from_to(self) -> list[tuple[float, float]]:
        """The first start and the last end of each rank."""
        return [
            (float(self.times.starts[self.times.first[rank]]), float(self.times.ends(rank)[-1]))
            for rank in range(self.schedule.stages)
        ]

    def _span(self, rank: int, place: int) -> Span:
        code = self.schedule.orders[rank][place - int(self.times.first[rank])]
        op, stage, microbatch = (int(part) for part in self.schedule.split(code))
        start = float(self.times.starts[place])
        return Span(
            rank, stage, microbatch, OPS[op], start, start + float(self.times.durations[self.times.kinds[place]])
        )

    def _backwards_from_last(self) -> Iterator[tuple[int, int]]:
        """(rank, place) of the critical actions, last to first: on the same rank as long as it was not idle."""
        times = self.times
        ends = [end for _, end in self._from_to]
        rank = ends.index(max(ends))
        place = int(times.first[rank + 1]) - 2
        while place >= 0:
            yield rank, place
            later = place + 1 if self._is_paired(place) and self._ready(place + 1) > self._ready(place) else place
            if place > times.first[rank] and (self._ready(later) < times.starts[place] or self._follows(place)):
                place -= 1
                continue
            place = int(times.place_of[times.needs[later]])
            place += self._is_paired(place)
            rank = int(np.searchsorted(times.first, place, side="right")) - 1

    def _ready(self, place: int) -> float:
        """When an action could have started for all that it needs; of an overlapped forward, without the backward."""
        times = self.times
        return float(times.times[times.needs[place]] + times.delays[times.kinds[place]])

    def _follows(self, place: int) -> bool:
        """Whether an action started when the one before it on its rank ended."""
        times = self.times
        return bool(times.starts[place - 1] + times.durations[times.kinds[place - 1]] == times.starts[place])

    def _is_paired(self, place: int) -> bool:
        return self.times.paired is not None and place >= 0 and bool(self.times.paired[place])


def held_at_most(schedule: Schedule, rank: int) -> int:
    """The most chunk activations that a rank holds at once, by the order of its actions alone."""
    if not len(schedule.orders[rank]):
        return 0
    changes = HELD[schedule.split(schedule.orders[rank])[0]]
    return int(np.cumsum(changes).max()) if (changes < 0).any() else 1


def memory_at_most(schedule: Schedule, costs: Costs, rank: int, trains: bool = True) -> float:
    """The most that a rank holds at once, in the unit of the costs' activations, by the order of its actions alone."""
    takes, frees = (change.reshape(-1) for change in costs.memory_changes(trains))
    kinds = schedule.orders[rank] // schedule.num_microbatches
    if not len(kinds):
        return 0.0
    after = np.cumsum(takes[kinds] - frees[kinds])
    return float((after + frees[kinds]).max())
