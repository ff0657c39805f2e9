"""`auto`: the best order that is found under a memory limit, for costs that may differ from stage to stage.

The named schedules that fit, each with its default number of chunks, are candidates as they are. The orders of 1f1b and
of those that split the backward are also tried with their weight backwards placed anew, and so are orders of one chunk
a rank whose warm-up is as long as the costs ask for, which are then improved rank by rank. The best of all is taken, so
it is never worse than a named one, with its default chunks, that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from ..errors import InputError
from .costs import Costs
from .generate import NAMES, generate, order_with_warm_up
from .ir import Schedule, check_size
from .simulate import Simulation, simulate
from .weights import ROUNDING, RULES, with_weights

Objective = Literal["makespan", "own-span"]
MAX_WORK = 1_000_000
"""Actions placed until the search tries nothing more: a few seconds."""
MAX_SIZE = 50_000
"""P * M that is searched."""


@dataclass(frozen=True)
class Found:
    """The best order, and what it was chosen from."""

    simulation: Simulation
    origin: str
    """The candidate that it is: a name, or how it was built."""
    tried: int
    """Orders that were built and simulated."""


def auto(
    stages: int,
    num_microbatches: int,
    *,
    memory_limit: float | None = None,
    objective: Objective = "makespan",
    progress: Callable[[int], None] = lambda tried: None,
    **costs: Any,
) -> Found:
    """The best order for P whole stages and M microbatches, found under a memory limit.

    memory_limit: activations of a whole stage that a rank may hold; None for no limit. objective: what is made
    least, ties by the other: the makespan, or the longest span of a rank from its first start to its last end.
    progress: called with the number of orders tried. costs: as in `Costs.of_stages`.
    Raises InputError where no order fits the limit, or as `Costs.of_stages` does.
    """
    check_size(stages, 2, num_microbatches)
    if stages * num_microbatches > MAX_SIZE:
        got = f"{stages} stages x {num_microbatches} microbatches"
        raise InputError.of("auto", got, f"at most {MAX_SIZE:,} in all", "choose a named schedule, or search a part")
    search = _Search(memory_limit, objective, costs, progress)
    bases = []
    for name in NAMES:
        try:
            schedule = generate(name, stages, num_microbatches)
        except InputError:
            continue  # this one does not exist for these sizes
        search.consider(schedule, search.costs_of(schedule), name)
        if name not in ("gpipe", "looped-bfs", "interleaved-1f1b"):
            bases.append((schedule, f"{name}, weights placed"))
    for schedule, origin in bases:
        if search.work < MAX_WORK:
            search.place(schedule, origin)
    search.warm_up(stages, num_microbatches)
    if search.best is None:
        least = f"{search.least_memory:g} at least"
        remedy = "raise the limit, or recompute activations"
        raise InputError.of("memory-limit", memory_limit, least, remedy)
    return Found(search.best, search.origin, search.tried)


class _Search:
    """The best so far, and the rules by which orders are tried."""

    def __init__(
        self,
        memory_limit: float | None,
        objective: Objective,
        costs: dict[str, Any],
        progress: Callable[[int], None],
    ) -> None:
        self.memory_limit = float("inf") if memory_limit is None else memory_limit
        self.objective = objective
        self.costs = costs
        self.progress = progress
        self.best: Simulation | None = None
        self.best_value = (float("inf"), float("inf"))
        self.origin = ""
        self.tried = 0
        self.work = 0
        self.least_memory = float("inf")

    def costs_of(self, schedule: Schedule) -> Costs:
        """What this machine and model cost under a schedule, whatever the order of its actions."""
        return Costs.of_stages(schedule, **self.costs)

    def consider(self, schedule: Schedule, costs: Costs, origin: str) -> tuple[float, float] | None:
        """Simulates an order and keeps it if it is the best that fits. Returns its value, None if it does not fit."""
        simulation = simulate(replace(schedule, name="auto"), costs)
        self.tried += 1
        self.progress(self.tried)
        peak = max(simulation.peak_memory)
        self.least_memory = min(self.least_memory, peak)
        if peak > self.memory_limit * (1 + ROUNDING):
            return None
        value = self._value(simulation)
        if self.best is None or value < self.best_value:
            self.best, self.best_value, self.origin = simulation, value, origin
        return value

    def place(self, schedule: Schedule, origin: str) -> tuple[float, float] | None:
        """Considers an order of forwards and input backwards with its weight backwards placed by every rule."""
        costs = self.costs_of(schedule)
        values = []
        for rule in RULES:
            self.work += schedule.size
            placed = with_weights(schedule, costs, self.memory_limit, rule)
            values.append(None if placed is None else self.consider(placed, costs, origin))
        return min((value for value in values if value is not None), default=None)

    def warm_up(self, stages: int, num_microbatches: int) -> None:
        """Orders of one chunk a rank: the warm-up that fills the wait for the first backward, then improved."""
        plain = generate("1f1b", stages, num_microbatches)
        costs = self.costs_of(plain)

        def value_of(counts: tuple[int, ...]) -> tuple[float, float] | None:
            return self.place(order_with_warm_up(plain, counts), "one chunk, warm-up and weights placed")

        alone = (1,) * stages
        self.consider(order_with_warm_up(plain, alone), costs, "one microbatch at a time")
        starts = {alone} | {_filling(plain, costs, self.memory_limit, overfull) for overfull in (False, True)}
        starts.add(tuple(range(stages, 0, -1)))
        values = {counts: value_of(counts) for counts in sorted(starts)}
        fitting = {counts: value for counts, value in values.items() if value is not None}
        if not fitting:
            return
        counts = min(fitting, key=lambda each: fitting[each])
        best = fitting[counts]
        improved = True
        while improved and self.work < MAX_WORK:
            improved = False
            for other in _neighbours(counts, num_microbatches):
                if self.work >= MAX_WORK or other in values:
                    continue
                values[other] = value = value_of(other)
                if value is not None and value < best:
                    counts, best, improved = other, value, True
                    break

    def _value(self, simulation: Simulation) -> tuple[float, float]:
        own_span = max(simulation.own_spans)
        if self.objective == "makespan":
            return simulation.makespan, own_span
        return own_span, simulation.makespan


def _filling(plain: Schedule, costs: Costs, memory_limit: float, overfull: bool) -> tuple[int, ...]:
    """Forwards of each rank before its first backward: as many as fill the wait for it, one more if `overfull`.

    Fewer on each rank than on the one before, as none can run that has not come (Qi et al. 2024, section 3.1).
    """
    stages, most = plain.stages, plain.num_microbatches
    if memory_limit < most:
        most = max(1, int(memory_limit * (1 + ROUNDING)))
    forward, backward, transfer = costs.forward, costs.input_grad, (*costs.transfer, 0.0)
    ends = np.cumsum([forward[rank] + (transfer[rank - 1] if rank else 0.0) for rank in range(stages)])
    arrival = float(ends[-1])
    counts = [1] * stages
    for rank in reversed(range(stages)):
        time = float(ends[rank])
        while counts[rank] < most and (time < arrival if overfull else time + forward[rank] <= arrival):
            time += forward[rank]
            counts[rank] += 1
            if not forward[rank]:
                break
        arrival = max(time, arrival) + backward[rank] + transfer[rank - 1]
    for rank in range(1, stages):
        counts[rank] = max(1, min(counts[rank], counts[rank - 1] - 1))
    return tuple(counts)


def _neighbours(counts: tuple[int, ...], num_microbatches: int) -> Iterator[tuple[int, ...]]:
    """Warm-ups that differ by one, on one rank or on it and all before it."""
    for change in (1, -1):
        for rank in range(len(counts)):
            for first in (rank, 0):
                other = list(counts)
                for place in range(first, rank + 1):
                    other[place] += change
                falls = all(a >= b for a, b in pairwise(other))
                if falls and other[-1] >= 1 and other[0] <= num_microbatches:
                    yield tuple(other)
