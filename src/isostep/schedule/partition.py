"""Consecutive layers into stages so that the slowest stage is as fast as it can be, within a limit of memory.

The answer is exact. A float is a whole number times a power of two, so all sums and comparisons here are made with
whole numbers, without rounding; the sums that a `Cut` reports are rounded once.

How it is found. For a bound on the cost of a stage, `furthest[s]` is the largest number of layers that the first s
stages can hold. Whatever fits a stage also fits when it is shorter, and (because a later stage never holds more
microbatches in flight) when it is moved to a later stage; so the first s stages can hold exactly every number of layers
from s to `furthest[s]`, and one walk over the stages decides whether a bound can be met. The least bound is found by
halving: each walk moves one end of the interval to a sum of layers that really occurs.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from ..errors import InputError

MOST = 1e100
"""Largest cost or size of a layer."""
MOST_IN_FLIGHT = 10**12


@dataclass(frozen=True)
class Memory:
    """What layers hold in memory, in any one unit. Layers on stage s need state + in_flight[s] * activation."""

    state: Sequence[float]
    """Of each layer, once: weights, gradients, optimizer state."""
    activation: Sequence[float]
    """Of each layer, for every microbatch between its forward and its backward."""
    in_flight: Sequence[int]
    """Of each stage: microbatches whose activations it holds at once; never more than the stage before."""
    limit: float | None = None
    """What one stage may need; None for no limit."""


@dataclass(frozen=True)
class Cut:
    """Layers in consecutive, non-empty stages. Stage s is layers boundaries[s] to boundaries[s + 1] - 1."""

    boundaries: tuple[int, ...]
    """One more than stages: 0 first, the number of layers last."""
    costs: tuple[float, ...]
    """Of each stage: the exact sum over its layers, rounded once."""
    memory: tuple[float, ...] | None
    """What each stage needs, as `Memory` says; None where it was not given."""

    @property
    def bottleneck(self) -> float:
        """The cost of the slowest stage."""
        return max(self.costs)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many layers each stage has."""
        return tuple(end - start for start, end in pairwise(self.boundaries))


def partition(costs: Sequence[float], stages: int, memory: Memory | None = None) -> Cut:
    """The cut into exactly `stages` stages whose largest cost is least, every stage within the limit of memory.

    Of several such cuts: from the last stage back to the first, each stage's cost is as near as possible to the mean of
    the stages that are still to be cut. Layers of one cost are therefore cut into counts that differ by one at most.
    With `stages` = ranks times chunks per rank this balances the chunks, not the ranks that hold several of them.

    costs: one per layer, 0 to 1e100, in any one unit. Raises InputError where a value cannot be used, where there are
    fewer layers than stages, or where no cut keeps to the limit: it then names the least limit that can be kept.
    """
    layers = _Layers.of(costs, stages, memory)
    if layers.tight_layer() is not None or layers.walk(layers.cost[-1])[-1] < layers.count:
        raise layers.too_tight()
    bound = layers.least_bound()
    return layers.cut(layers.boundaries(bound))


def cut_equal_counts(costs: Sequence[float], stages: int, memory: Memory | None = None) -> Cut:
    """The cut that counts layers, whatever they cost: the first (layers mod stages) stages have one layer more.

    Ignores the limit of memory. Raises InputError as `partition` does, except for the limit.
    """
    layers = _Layers.of(costs, stages, memory)
    each, more = divmod(layers.count, stages)
    return layers.cut([stage * each + min(stage, more) for stage in range(stages + 1)])


@dataclass(frozen=True)
class _Layers:
    """The layers as exact sums over the first 0, 1, 2, ... of them, each sum a whole number of units."""

    cost: Sequence[int]
    cost_unit: int
    """How many units are 1."""
    stages: int
    given: Memory | None
    state: Sequence[int] = ()
    activation: Sequence[int] = ()
    memory_unit: int = 1

    @classmethod
    def of(cls, costs: Sequence[float], stages: int, memory: Memory | None) -> _Layers:
        """Checks every value. Raises InputError."""
        values = _checked("costs", costs)
        if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
            raise InputError.of("stages", stages, "a whole number of 1 or more", "change it")
        if len(values) < stages:
            expected = f"at most the {len(values)} layers, for every stage needs one"
            raise InputError.of("stages", stages, expected, "take fewer stages or cut the layers finer")
        whole, unit = _whole_numbers(values)
        layers = cls(_sums(whole), unit, stages, memory)
        if memory is None:
            return layers
        _check_memory(memory, len(values), stages)
        state = _checked("state", memory.state)
        whole, unit = _whole_numbers([*state, *_checked("activation", memory.activation)])
        middle = len(state)
        return replace(layers, state=_sums(whole[:middle]), activation=_sums(whole[middle:]), memory_unit=unit)

    @property
    def count(self) -> int:
        return len(self.cost) - 1

    @property
    def limit(self) -> int | None:
        """The limit of memory in units, rounded down: no loss, for what is compared with it is whole."""
        if self.given is None or self.given.limit is None:
            return None
        numerator, denominator = float(self.given.limit).as_integer_ratio()
        return numerator * self.memory_unit // denominator

    def held(self, stage: int, start: int, end: int) -> int:
        """Memory of layers start to end - 1 on a stage, in units."""
        assert self.given is not None
        activation = self.activation[end] - self.activation[start]
        return self.state[end] - self.state[start] + int(self.given.in_flight[stage]) * activation

    def tight_layer(self) -> int | None:
        """A layer that no stage can hold, or None. Stage min(index, stages - 1) is the latest that can have it."""
        limit = self.limit
        if limit is None:
            return None
        needs = [self.held(min(index, self.stages - 1), index, index + 1) for index in range(self.count)]
        worst = max(range(self.count), key=needs.__getitem__)
        return worst if needs[worst] > limit else None

    def reach(self, stage: int, start: int, end: int, limit: int | None) -> int:
        """The furthest end, at most `end`, up to which the stage can hold the layers from `start` on."""
        if limit is None or self.held(stage, start, end) <= limit:
            return end
        ends = range(start, end + 1)
        return start + bisect_right(ends, limit, key=lambda stop: self.held(stage, start, stop)) - 1

    def walk(self, bound: int) -> list[int]:
        """`furthest` of 0 to `stages` stages, none of which costs more than the bound. Needs no tight layer."""
        furthest, limit = [0], self.limit
        for stage in range(self.stages):
            start = furthest[-1]
            end = bisect_right(self.cost, self.cost[start] + bound, lo=start) - 1
            furthest.append(self.reach(stage, start, end, limit))
        return furthest

    def least_bound(self) -> int:
        """The least bound on the cost of a stage that some cut meets, in units. Needs a cut within the limit."""
        dearest = max(after - before for before, after in pairwise(self.cost))
        low, high = max(dearest, -(-self.cost[-1] // self.stages)), self.cost[-1]
        while low < high:
            bound = (low + high) // 2
            furthest = self.walk(bound)
            if furthest[-1] == self.count:
                high = max(self.cost[end] - self.cost[start] for start, end in pairwise(furthest))
                continue
            longer = (self.cost[end + 1] - self.cost[start] for start, end in pairwise(furthest))
            low = min(cost for cost in longer if cost > bound)  # no bound below this changes the walk
        return high

    def boundaries(self, bound: int) -> list[int]:
        """The cut under a bound that can be met, from the last stage back; see `partition` for the choice."""
        furthest, limit = self.walk(bound), self.limit
        boundaries = [self.count]
        for stage in range(self.stages - 1, -1, -1):
            end = boundaries[-1]
            latest = min(furthest[stage], end - 1)
            earliest = max(stage, bisect_left(self.cost, self.cost[end] - bound, hi=end))
            if limit is not None:
                starts = range(earliest, latest + 1)
                earliest += bisect_left(starts, -limit, key=lambda start: -self.held(stage, start, end))
            boundaries.append(min(max(self.nearest_to_mean(stage, end), earliest), latest))
        return boundaries[::-1]

    def nearest_to_mean(self, stage: int, end: int) -> int:
        """Where the stage would start for its cost to be nearest to the mean over stages 0 to `stage`."""
        aim = self.cost[end] * stage  # in units / (stage + 1), as the distances
        above = bisect_left(self.cost, -(-aim // (stage + 1)), hi=end)
        if above == 0:
            return 0
        below = bisect_left(self.cost, self.cost[above - 1])
        return min(below, above, key=lambda start: abs(self.cost[start] * (stage + 1) - aim))

    def cut(self, boundaries: Sequence[int]) -> Cut:
        """These boundaries, with what each stage costs and holds."""
        places = list(enumerate(pairwise(boundaries)))
        costs = tuple((self.cost[end] - self.cost[start]) / self.cost_unit for _, (start, end) in places)
        if self.given is None:
            return Cut(tuple(boundaries), costs, None)
        held = tuple(self.held(stage, start, end) / self.memory_unit for stage, (start, end) in places)
        return Cut(tuple(boundaries), costs, held)

    def too_tight(self) -> InputError:
        """The limit cannot be kept: the least float that can be, and the layer that alone is too large, if one is."""
        assert self.given is not None
        low, high = 0, _order(math.nextafter(self.held(0, 0, self.count) / self.memory_unit, math.inf))
        while low < high:
            middle = (low + high) // 2
            trial = replace(self, given=replace(self.given, limit=_float(middle)))
            if trial.tight_layer() is None and trial.walk(trial.cost[-1])[-1] == trial.count:
                high = middle
            else:
                low = middle + 1
        expected = f"{_shown(_float(high))} or more, the least with which {self.stages} stages can hold these layers"
        if (layer := self.tight_layer()) is not None:
            stage = min(layer, self.stages - 1)
            alone = _shown(self.held(stage, layer, layer + 1) / self.memory_unit)
            expected += f" (layers[{layer}] alone needs {alone} on stage {stage})"
        remedy = "raise it, make microbatches smaller, or change the number of stages"
        return InputError.of("memory limit", _shown(self.given.limit), expected, remedy)


def _check_memory(memory: Memory, layers: int, stages: int) -> None:
    for name, values, length, each in (
        ("state", memory.state, layers, "layer"),
        ("activation", memory.activation, layers, "layer"),
        ("in_flight", memory.in_flight, stages, "stage"),
    ):
        if len(values) != length:
            raise InputError.of(name, f"{len(values)} numbers", f"{length}, one per {each}", "make them equally many")
    before = MOST_IN_FLIGHT
    for stage, number in enumerate(memory.in_flight):
        if not (1 <= number <= before and number % 1 == 0):
            expected = f"a whole number from 1 to {before}: never more than the stage before"
            raise InputError.of(f"in_flight[{stage}]", number, expected, "change it")
        before = int(number)
    if memory.limit is not None and not 0 <= memory.limit < math.inf:
        raise InputError.of("memory limit", memory.limit, "a finite number of 0 or more", "change it")


def _checked(name: str, values: Sequence[float]) -> list[float]:
    if not len(values):
        raise InputError.of(name, "nothing", "one number per layer", "give at least one layer")
    for index, value in enumerate(values):
        if not 0 <= value <= MOST:
            raise InputError.of(f"{name}[{index}]", value, f"a number from 0 to {MOST:g}", "change it")
    return [float(value) for value in values]


def _whole_numbers(values: Sequence[float]) -> tuple[list[int], int]:
    """The values as whole numbers of one unit, and how many units are 1: a power of two, so nothing is rounded."""
    ratios = [value.as_integer_ratio() for value in values]
    unit = max(denominator for _, denominator in ratios)
    return [numerator * (unit // denominator) for numerator, denominator in ratios], unit


def _sums(values: Sequence[int]) -> list[int]:
    return list(accumulate(values, initial=0))


def _order(value: float) -> int:
    """Floats of 0 or more counted upwards from 0."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def _float(order: int) -> float:
    return struct.unpack("<d", struct.pack("<q", order))[0]


def _shown(value: Any) -> Any:
    """A whole number without its .0."""
    return int(value) if value is not None and value == int(value) and value < 1e15 else value
