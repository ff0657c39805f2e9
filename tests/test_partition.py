"""Layers into stages: the cut is exact, against every cut there is."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from isostep.errors import InputError
from isostep.schedule.partition import Memory, cut_equal_counts, partition

sizes = st.sampled_from([0.0, 0.1, 0.2, 0.3, 1.0, 1 / 3, 2.5, 1e-9]) | st.floats(0, 10) | st.integers(0, 4)


def every_cut(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, layers), stages - 1):
        yield (0, *inner, layers)


def sums(values: Sequence[float], boundaries: Sequence[int]) -> list[Fraction]:
    """Per stage, without rounding."""
    return [sum(map(Fraction, values[start:end]), Fraction()) for start, end in pairwise(boundaries)]


def held(memory: Memory, boundaries: Sequence[int]) -> list[Fraction]:
    states, activations = sums(memory.state, boundaries), sums(memory.activation, boundaries)
    return [s + n * a for s, n, a in zip(states, memory.in_flight, activations, strict=True)]


def is_optimal(costs: Sequence[float], boundaries: Sequence[int], memory: Memory | None = None) -> bool:
    """By trying every cut: within the limit, and no cut within the limit has a smaller largest cost."""

    def fits(cut: Sequence[int]) -> bool:
        return memory is None or memory.limit is None or max(held(memory, cut)) <= Fraction(memory.limit)

    cuts = [cut for cut in every_cut(len(costs), len(boundaries) - 1) if fits(cut)]
    return tuple(boundaries) in cuts and max(sums(costs, boundaries)) == min(max(sums(costs, cut)) for cut in cuts)


def greedy(costs: Sequence[float], stages: int) -> list[int]:
    """Each stage takes layers until it has its share of the cost: what one would write first."""
    boundaries, share = [0], sum(costs) / stages
    for stage in range(1, stages):
        end = boundaries[-1] + 1
        while end < len(costs) - (stages - stage) and sum(costs[boundaries[-1] : end]) < share:
            end += 1
        boundaries.append(end)
    return [*boundaries, len(costs)]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], int]:
    costs = draw(st.lists(sizes, min_size=1, max_size=10))
    return costs, draw(st.integers(1, len(costs)))


@st.composite
def tight_problems(draw: st.DrawFn) -> tuple[list[float], int, Memory]:
    costs, stages = draw(problems())
    of_layers = st.lists(sizes, min_size=len(costs), max_size=len(costs))
    in_flight = sorted(draw(st.lists(st.integers(1, 8), min_size=stages, max_size=stages)), reverse=True)
    return costs, stages, Memory(draw(of_layers), draw(of_layers), in_flight, draw(st.floats(0, 60)))


@given(problems())
def test_cut_is_the_best_of_all_cuts(problem: tuple[list[float], int]) -> None:
    costs, stages = problem
    cut = partition(costs, stages)
    assert is_optimal(costs, cut.boundaries)
    assert cut.costs == tuple(map(float, sums(costs, cut.boundaries)))
    assert (cut.bottleneck, sum(cut.counts), len(cut.counts)) == (max(cut.costs), len(costs), stages)


@given(tight_problems())
def test_cut_within_a_memory_limit_is_the_best_of_those(problem: tuple[list[float], int, Memory]) -> None:
    costs, stages, memory = problem
    least = min(max(held(memory, cut)) for cut in every_cut(len(costs), stages))
    assert memory.limit is not None
    if least > Fraction(memory.limit):
        with pytest.raises(InputError, match=r"memory limit: got .* or more, the least with which"):
            partition(costs, stages, memory)
        return
    cut = partition(costs, stages, memory)
    assert is_optimal(costs, cut.boundaries, memory)
    assert cut.memory == tuple(map(float, held(memory, cut.boundaries)))


@given(tight_problems())
def test_error_names_the_least_limit_that_can_be_kept(problem: tuple[list[float], int, Memory]) -> None:
    costs, stages, memory = problem
    least = min(max(held(memory, cut)) for cut in every_cut(len(costs), stages))
    assume(least > 0)
    with pytest.raises(InputError) as raised:
        partition(costs, stages, Memory(memory.state, memory.activation, memory.in_flight, 0.0))
    named = float(str(raised.value).split("expected ")[1].split(" or more")[0])
    assert Fraction(math.nextafter(named, 0)) < least <= Fraction(named)
    partition(costs, stages, Memory(memory.state, memory.activation, memory.in_flight, named))


def test_control_equal_counts_and_greedy_cuts_are_not_the_best() -> None:
    draw = random.Random(0)
    failed = {"equal counts": 0, "greedy": 0, "partition": 0}
    for _ in range(100):
        costs = [draw.random() for _ in range(draw.randint(4, 9))]
        stages = draw.randint(2, 4)
        failed["equal counts"] += not is_optimal(costs, cut_equal_counts(costs, stages).boundaries)
        failed["greedy"] += not is_optimal(costs, greedy(costs, stages))
        failed["partition"] += not is_optimal(costs, partition(costs, stages).boundaries)
    assert failed["partition"] == 0
    assert min(failed["equal counts"], failed["greedy"]) >= 30


def test_control_the_best_cut_without_a_limit_breaks_one() -> None:
    costs, memory = [1.0, 1.0, 1.0, 1.0], Memory([0.0] * 4, [1.0] * 4, [2, 1], 3.0)
    assert partition(costs, 2).counts == (2, 2)
    assert not is_optimal(costs, (0, 2, 4), memory)
    assert partition(costs, 2, memory).counts == (1, 3)


def test_sums_are_exact_where_floats_would_tie() -> None:
    ulp = math.ulp(1.0)
    costs = [1 + ulp, ulp / 2, 1 + 2 * ulp]
    rounded = {cut: max(sum(costs[start:end]) for start, end in pairwise(cut)) for cut in every_cut(3, 2)}
    assert rounded[0, 1, 3] == rounded[0, 2, 3]
    assert partition(costs, 2).boundaries == (0, 2, 3)
    assert is_optimal(costs, (0, 2, 3))
    assert not is_optimal(costs, (0, 1, 3))


@given(st.integers(1, 60), st.integers(1, 20), sizes.filter(bool))
def test_layers_of_one_cost_are_cut_into_equal_counts(layers: int, stages: int, cost: float) -> None:
    assume(stages <= layers)
    counts = partition([cost] * layers, stages).counts
    assert max(counts) - min(counts) <= 1


@given(problems())
def test_ties_bring_each_stage_near_the_mean_of_those_still_open(problem: tuple[list[float], int]) -> None:
    costs, stages = problem
    cut = partition(costs, stages).boundaries
    largest = max(sums(costs, cut))
    for stage in range(stages - 1, 0, -1):
        end = cut[stage + 1]
        mean = sum(map(Fraction, costs[:end]), Fraction()) / (stage + 1)
        possible = [c for c in every_cut(end, stage + 1) if max(sums(costs[:end], c)) <= largest]
        distances = [abs(sums(costs[:end], c)[-1] - mean) for c in possible]
        assert abs(sums(costs, cut)[stage] - mean) == min(distances)


@pytest.mark.parametrize("limit", [None, 900.0])
def test_ten_thousand_layers_on_a_thousand_stages_in_a_second(limit: float | None) -> None:
    draw = random.Random(0)
    costs, state, activation = ([draw.random() for _ in range(10_000)] for _ in range(3))
    memory = Memory(state, activation, [min(512, 1024 - stage) for stage in range(1024)], limit)
    begun = time.process_time()
    cut = partition(costs, 1024, memory)
    assert time.process_time() - begun < 1
    assert len(cut.counts) == 1024
    assert min(cut.counts) >= 1
    assert cut.bottleneck >= sum(costs) / 1024
    assert limit is None or max(cut.memory or ()) <= limit


@pytest.mark.parametrize(
    ("cut", "named"),
    [
        (lambda: partition([], 1), "costs"),
        (lambda: partition([1.0, -1.0], 1), r"costs\[1\]: got -1.0"),
        (lambda: partition([1.0, math.nan], 1), r"costs\[1\]: got nan"),
        (lambda: partition([math.inf], 1), r"costs\[0\]: got inf"),
        (lambda: partition([10**200], 1), r"costs\[0\]"),
        (lambda: partition([1.0], 0), "stages: got 0"),
        (lambda: partition([1.0], True), "stages: got True"),
        (lambda: partition([1.0], 2), "stages: got 2, expected at most the 1 layers"),
        (lambda: partition([1.0], 1, Memory([1.0, 1.0], [1.0], [1])), "state: got '2 numbers'"),
        (lambda: partition([1.0], 1, Memory([1.0], [], [1])), "activation: got '0 numbers'"),
        (lambda: partition([1.0], 1, Memory([1.0], [1.0], [1, 1])), "in_flight: got '2 numbers'"),
        (lambda: partition([1.0], 1, Memory([math.nan], [1.0], [1])), r"state\[0\]"),
        (lambda: partition([1.0, 1.0], 2, Memory([1, 1], [1, 1], [1, 2])), r"in_flight\[1\]: got 2"),
        (lambda: partition([1.0], 1, Memory([1.0], [1.0], [0])), r"in_flight\[0\]: got 0"),
        (lambda: partition([1.0], 1, Memory([1.0], [1.0], [1], math.nan)), "memory limit: got nan"),
        (lambda: partition([1.0], 1, Memory([1.0], [1.0], [1], -1)), "memory limit: got -1"),
        (
            lambda: partition([1.0, 1.0, 1.0], 2, Memory([1, 9, 1], [1, 1, 1], [2, 1], 8)),
            r"memory limit: got 8, expected 12 or more, .*layers\[1\] alone needs 10 on stage 1",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(cut: Callable[[], object], named: str) -> None:
    with pytest.raises(InputError, match=named) as raised:
        cut()
    assert "\n" not in str(raised.value)
