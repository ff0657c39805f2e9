"""`auto`: never worse than a named schedule that fits, within the limit, as good as what was published."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isostep.errors import InputError
from isostep.schedule.costs import Costs
from isostep.schedule.generate import NAMES, generate
from isostep.schedule.search import auto
from isostep.schedule.simulate import simulate
from isostep.schedule.validate import check
from test_schedule import table

SHARES = {"1.5B": (2304, 24), "6.2B": (4096, 32), "14.6B": (5120, 40), "28.3B": (6144, 48)}


def named_that_fit(p: int, m: int, limit: float | None, **costs: Any) -> list[tuple[float, float]]:
    """Makespan and longest own span of every named schedule within the limit."""
    found = []
    for name in NAMES:
        try:
            schedule = generate(name, p, m)
        except InputError:
            continue
        simulation = simulate(schedule, Costs.of_stages(schedule, **costs))
        if limit is None or max(simulation.peak_memory) <= limit + 1e-9:
            found.append((simulation.makespan, max(simulation.own_spans)))
    return found


@st.composite
def problems(draw: Any) -> dict[str, Any]:
    p, m = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    times = st.lists(st.floats(0.1, 9), min_size=p, max_size=p)
    return {
        "stages": p,
        "num_microbatches": m,
        "memory_limit": draw(st.one_of(st.none(), st.floats(1.0, 2 * p))),
        "objective": draw(st.sampled_from(("makespan", "own-span"))),
        "forward": draw(times),
        "input_grad": draw(times),
        "weight_grad": draw(times),
        "transfer": draw(st.lists(st.floats(0, 3), min_size=p - 1, max_size=p - 1)),
        "weight_share": draw(st.sampled_from((1.0, 0.4))),
    }


@settings(max_examples=40, deadline=None)
@given(problems())
def test_never_worse_than_a_named_one_that_fits(problem: dict[str, Any]) -> None:
    costs = {key: problem[key] for key in ("forward", "input_grad", "weight_grad", "transfer", "weight_share")}
    limit = problem["memory_limit"]
    named = named_that_fit(problem["stages"], problem["num_microbatches"], limit, **costs)
    try:
        found = auto(**problem)
    except InputError:
        assert limit is not None
        assert not named
        return
    check(found.simulation.schedule)
    assert limit is None or max(found.simulation.peak_memory) <= limit * (1 + 1e-9)
    which = 0 if problem["objective"] == "makespan" else 1
    value = (found.simulation.makespan, max(found.simulation.own_spans))[which]
    assert value <= min((each[which] for each in named), default=float("inf")) * (1 + 1e-12)


def test_better_than_every_named_one_where_stages_differ() -> None:
    costs: dict[str, Any] = {"forward": [1, 1, 2, 1], "input_grad": [1, 2, 1, 1], "weight_grad": [2, 1, 1, 1]}
    found = auto(4, 16, memory_limit=4, transfer=0.3, **costs)
    named = named_that_fit(4, 16, 4, transfer=0.3, **costs)
    assert found.simulation.makespan < min(makespan for makespan, _ in named)


def test_a_limit_that_nothing_fits_says_what_would() -> None:
    with pytest.raises(InputError, match=r"memory-limit: got 0\.25, expected 1 at least"):
        auto(4, 8, memory_limit=0.25)
    assert auto(4, 8, memory_limit=1).simulation.makespan >= 24


def test_the_same_again() -> None:
    first, second = (auto(4, 12, memory_limit=6, forward=[1, 2, 1, 1.5]) for _ in range(2))
    assert first.simulation.spans() == second.simulation.spans()
    assert (first.origin, first.tried) == (second.origin, second.tried)


def rate(row: dict[str, Any], limit: float, chunks_given: float = 1.0, share: float = 1.0) -> float:
    f, b, w = (chunks_given * float(row[key]) for key in "fbw")
    found = auto(
        row["p"], row["m"], memory_limit=limit, objective="own-span",
        forward=f, input_grad=b, weight_grad=w, transfer=float(row["c"]), weight_share=share,
    )  # fmt: skip
    return found.simulation.rate_own_span


def compare(row: dict[str, Any]) -> None:
    h, a = SHARES[row["model"]]
    share = 32 * h / (34 * h + 5 * a * 1024)
    assert rate(row, row["p"], share=share) <= float(row["zb_1p"]) + 0.005
    assert rate(row, 2 * row["p"], share=share) <= float(row["zb_2p"]) + 0.005


@pytest.mark.parametrize("row", table("zero_bubble_table.csv")[:2])
def test_published_searches_of_the_smallest_model(row: dict[str, Any]) -> None:
    compare(row)


@pytest.mark.grid
@pytest.mark.parametrize("row", table("zero_bubble_table.csv")[2:])
def test_published_searches(row: dict[str, Any]) -> None:
    compare(row)


@pytest.mark.parametrize("row", table("zero_bubble_v_table.csv")[:1])
def test_published_zb_v_search_first_row(row: dict[str, Any]) -> None:
    assert rate(row, row["p"], chunks_given=2.0) <= float(row["zb_v"]) + 0.0001


@pytest.mark.grid
@pytest.mark.parametrize("row", table("zero_bubble_v_table.csv")[1:])
def test_published_zb_v_searches(row: dict[str, Any]) -> None:
    assert rate(row, row["p"], chunks_given=2.0) <= float(row["zb_v"]) + 0.0001


def test_control_one_forward_one_backward_misses_the_published_rates() -> None:
    row = table("zero_bubble_table.csv")[0]
    f, b, w, c = (float(row[key]) for key in "fbwc")
    schedule = generate("1f1b", row["p"], row["m"])
    assert simulate(schedule, Costs.of(schedule, f, b, w, c)).rate_own_span > float(row["zb_1p"]) + 0.05
