"""Schedules against formulas, published tables, torch's own orders, and a plain walk over their actions."""

from __future__ import annotations

import csv
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from isostep.errors import InputError
from isostep.schedule import closed_form, csv_file
from isostep.schedule.costs import Costs
from isostep.schedule.generate import NAMES, SCHEDULES, generate
from isostep.schedule.ir import Schedule
from isostep.schedule.simulate import Simulation, simulate
from isostep.schedule.validate import check
from plain_walk import walk

PUBLISHED = Path(__file__).parent / "published"
SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 7, 8, 12, 16, 24)]
TIMES = [(1, 1, 1), (3, 4, 2), (2, 1, 1), (1, 1, 2), (1, 2, 0.5)]
INTERLEAVED = ("interleaved-1f1b", "looped-bfs", "interleaved-zb")


def built(name: str, p: int, m: int, v: int | None = None) -> Schedule | None:
    """The schedule, None where it does not exist for these sizes."""
    try:
        return generate(name, p, m, v)
    except InputError:
        return None


def run(name: str, p: int, m: int, v: int | None = None, *times: Any, **others: Any) -> Simulation:
    schedule = generate(name, p, m, v)
    return simulate(schedule, Costs.of(schedule, *times, **others))


def table(name: str) -> list[dict[str, Any]]:
    with (PUBLISHED / name).open(newline="") as file:
        rows = [dict(row) for row in csv.DictReader(file)]
    return [{key: int(text) if key in "pmv" else text for key, text in row.items()} for row in rows]


# ---- formulas


@pytest.mark.parametrize("name", NAMES)
def test_closed_forms(name: str) -> None:
    compared = 0
    for p, m in SIZES:
        for v in (1, 2, 3) if name in INTERLEAVED else (None,):
            schedule = built(name, p, m, v)
            if schedule is None:
                continue
            check(schedule)
            for times in TIMES:
                found = simulate(schedule, Costs.of(schedule, *times))
                expected = closed_form.bubble(name, p, m, *times)
                if expected is not None:
                    assert found.bubble_global == pytest.approx(expected, abs=1e-9), (p, m, v, times)
                    share = closed_form.busy_share(name, p, m, schedule.chunks, *times)
                    assert found.busy_share == pytest.approx(share, rel=1e-12)
                    compared += 1
                forward = simulate(schedule.forward_only(), Costs.of(schedule, *times))
                share = closed_form.busy_share(name, p, m, schedule.chunks, *times, forward_only=True)
                if share is not None:
                    assert forward.busy_share == pytest.approx(share, rel=1e-12), (p, m, v, times)
            peaks = [closed_form.peak_in_flight(name, p, m, schedule.chunks, rank) for rank in range(p)]
            for peak, held in zip(peaks, simulate(schedule, Costs.of(schedule)).peak_in_flight, strict=True):
                assert peak is None or peak == held, (p, m, v)
    assert compared >= 10 or name in ("zb-h2", "dualpipe-v"), "the formulas are never used"


def test_control_a_formula_of_another_schedule_is_noticed() -> None:
    found = run("zb-h1", 4, 8, None, 3, 4, 2)
    assert found.bubble_global != pytest.approx(closed_form.bubble("1f1b", 4, 8, 3, 4, 2), rel=0.1)


def test_three_stages_four_microbatches_forward_only() -> None:
    schedule = generate("gpipe", 3, 4).forward_only()
    found = simulate(schedule, Costs.of(schedule))
    assert (found.makespan, found.busy_share, found.peak_in_flight) == (6, pytest.approx(2 / 3), (1, 1, 1))


@pytest.mark.parametrize(
    ("p", "m", "free", "makespan"), [(2, 4, 15, 17), (4, 4, 21, 26), (4, 8, 33, 41), (8, 32, 117, 151)]
)
def test_one_forward_one_backward_with_transfers(p: int, m: int, free: float, makespan: float) -> None:
    assert run("1f1b", p, m).makespan == free
    assert run("1f1b", p, m, None, 1, 1, 1, 0.5).makespan == makespan


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 8)])
def test_gpipe_with_transfers(p: int, m: int) -> None:
    assert run("gpipe", p, m, None, 2, 3, 1, 0.25).makespan == (m + p - 1) * 6 + 2 * (p - 1) * 0.25


@pytest.mark.parametrize(
    ("times", "overall", "own_span"),
    [((2, 2, 1), 6, 6), ((3, 4, 2), 12, 12), ((2, 1, 1), 8, 6), ((1, 1, 2), 5, 2), ((1, 1, 1), 3, 0)],
)
def test_zb_v(times: tuple[float, ...], overall: float, own_span: float) -> None:
    found = run("zb-v", 4, 16, None, *times)
    assert (found.bubble_global, found.bubble_own_span) == (overall, own_span)
    assert found.peak_in_flight == (8,) * 4


@pytest.mark.parametrize(("times", "bubble"), [((3, 4, 2), 24), ((2, 1, 1), 12), ((1, 1, 2), 6), ((1, 1, 1), 6)])
def test_dualpipe_v_where_overlapped_pairs_run_one_after_the_other(times: tuple[float, ...], bubble: float) -> None:
    found = run("dualpipe-v", 4, 16, None, *times)
    assert found.bubble_global == bubble
    assert found.peak_in_flight == (9,) * 4


@pytest.mark.parametrize("c", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("times", [(1, 1, 1), (3, 4, 2)])
def test_zb_h2_own_span(times: tuple[float, float, float], c: float) -> None:
    f, b, w = times
    found = run("zb-h2", 4, 16, None, *times, c)
    assert found.bubble_own_span == pytest.approx(3 * max(0, f + b + 2 * c - 2 * w), abs=1e-9)
    assert found.peak_in_flight[0] == 7


# ---- published tables


ONE_CHUNK = [("1f1b", "1f1b", False), ("zb_h1", "zb-h1", False), ("zb_h2", "zb-h2", True)]
ROWS = [(row, row["v"], 1.0) for row in table("zero_bubble_table.csv")]
ROWS += [(row, 2, 2.0) for row in table("zero_bubble_v_table.csv")]


@pytest.mark.parametrize(("row", "v", "chunks_given"), ROWS)
def test_published_rates(row: dict[str, Any], v: int, chunks_given: float) -> None:
    p, m = row["p"], row["m"]
    f, b, w = (chunks_given * float(row[key]) for key in "fbw")
    c = float(row["c"])
    for column, name, own_span in ONE_CHUNK:
        found = run(name, p, m, None, f, b, w, c)
        assert f"{found.rate_own_span if own_span else found.rate_global:.4f}" == f"{float(row[column]):.4f}", column
    schedule = generate("interleaved-1f1b", p, m, v)
    durations = {"F": [f / v] * p * v, "B": [(b + w) / v] * p * v}
    orders = [[tuple(action) for action in schedule.actions(rank)] for rank in range(p)]
    links = [c] * (p * v - 1)
    right, shortcut = (
        max(spans[-1][1] for spans in walk(orders, schedule.rank_of, durations, links, each)) for each in (0, p)
    )
    work = m * (f + b + w)
    assert f"{(shortcut - work) / shortcut:.4f}" == f"{float(row['interleaved']):.4f}"
    found = run("interleaved-1f1b", p, m, v, f / v, b / v, w / v, c)
    assert found.makespan == pytest.approx(right, rel=1e-12)
    assert found.makespan - shortcut == pytest.approx(p * c, rel=0.05), "what the published script leaves out"


@pytest.mark.parametrize("row", table("zero_bubble_v_table.csv"))
def test_published_zb_v(row: dict[str, Any]) -> None:
    times = [float(row[key]) for key in "fbwc"]
    assert run("zb-v", row["p"], row["m"], None, *times).rate_own_span <= float(row["zb_v"]) + 0.005


# ---- a plain walk, and properties


def costs_for(draw: Any, chunks: int) -> dict[str, Any]:
    times = st.lists(st.integers(0, 9), min_size=chunks, max_size=chunks)
    links = st.lists(st.integers(0, 4), min_size=chunks - 1, max_size=chunks - 1)
    return {"forward": draw(times), "input_grad": draw(times), "weight_grad": draw(times), "transfer": draw(links)}


@st.composite
def cases(draw: Any) -> tuple[Schedule, dict[str, Any]]:
    name = draw(st.sampled_from(NAMES))
    v = draw(st.integers(1, 3)) if name in INTERLEAVED else None
    schedule = built(name, draw(st.integers(1, 5)), draw(st.integers(1, 14)), v)
    assume(schedule is not None)
    assert schedule is not None
    return schedule, costs_for(draw, schedule.num_chunks)


@settings(max_examples=200, deadline=None)
@given(cases())
def test_properties(case: tuple[Schedule, dict[str, Any]]) -> None:
    schedule, given_costs = case
    check(schedule)
    costs = Costs.of(schedule, **given_costs)
    found = simulate(schedule, costs)
    spans = found.spans()
    assert len(spans) == schedule.size == len({(s.op, s.stage, s.microbatch_index) for s in spans})
    for before, after in pairwise(spans):
        assert before.rank < after.rank or before.end <= after.start, "a rank does two things at once"
    assert found.makespan >= max(found.busy) - 1e-9
    crossing = [c for k, c in enumerate(costs.transfer) if schedule.rank_of[k] != schedule.rank_of[k + 1]]
    chain = sum(costs.forward) + sum(costs.input_grad) + 2 * sum(crossing)
    assert found.makespan >= chain + costs.weight_grad[0] - 1e-9
    assert found.latency.worst >= chain - 1e-9
    round_size = schedule.num_microbatches // max(1, schedule.num_microbatches // schedule.stages)
    bound = max((schedule.chunks - 1) * round_size + 2 * schedule.stages - 1, 2 * schedule.stages + 1)
    if schedule.name not in ("gpipe", "looped-bfs"):
        assert max(found.peak_in_flight) <= min(bound, schedule.num_microbatches * schedule.chunks)
    started = {(s.rank, s.stage, s.microbatch_index, s.op == "F"): s.start for s in reversed(spans) if s.op != "W"}
    for sent in found.transfers():
        to = sent.stage + (1 if sent.op == "F" else -1)
        arrived = started[sent.target, to, sent.microbatch_index, sent.op == "F"]
        assert arrived >= sent.end - 1e-9, "used before it has arrived"
    path = found.critical_path
    waits = sum(after.start - before.end for before, after in pairwise(path))
    assert waits == 0 or any(costs.transfer)
    assert path[0].start == 0
    assert path[-1].end == found.makespan
    assert all(before.end <= after.start for before, after in pairwise(path))


@settings(max_examples=200, deadline=None)
@given(cases(), st.booleans())
def test_a_plain_walk_comes_to_the_same_times(case: tuple[Schedule, dict[str, Any]], blocking: bool) -> None:
    schedule, given_costs = case
    costs = Costs.of(schedule, **given_costs, blocking=blocking)
    assert times_of(simulate(schedule, costs)) == walked(schedule, costs)


def test_control_a_walk_without_transfers_comes_to_other_times() -> None:
    schedule = generate("1f1b", 3, 6)
    costs = Costs.of(schedule, transfer=0.5)
    assert times_of(simulate(schedule, costs)) != walked(schedule, Costs.of(schedule))


def times_of(simulation: Simulation) -> list[list[tuple[float, float]]]:
    spans = simulation.spans()
    return [[(s.start, s.end) for s in spans if s.rank == rank] for rank in range(simulation.schedule.stages)]


def walked(schedule: Schedule, costs: Costs) -> list[list[tuple[float, float]]]:
    orders = [[tuple(action) for action in schedule.actions(rank)] for rank in range(schedule.stages)]
    durations = dict(zip("FBIW", costs.durations(), strict=True))
    return [
        sorted(spans)
        for spans in walk(orders, schedule.rank_of, durations, costs.transfer, 0, schedule.overlapped, costs.blocking)
    ]


def test_blocking_transfers_keep_their_sender() -> None:
    free = run("1f1b", 4, 8, None, 1, 1, 1, 0.5)
    kept = run("1f1b", 4, 8, None, 1, 1, 1, 0.5, blocking=True)
    assert kept.makespan > free.makespan
    # by hand: rank 1 has its forwards at 1.5, 3 and 4.5, its backwards at 5.5, 8 and 10.5, the last one sent at 13
    assert run("gpipe", 2, 3, None, 1, 1, 1, 0.5, blocking=True).makespan == 15


def test_recomputing_takes_a_forward_more_and_holds_less() -> None:
    kept, again = run("gpipe", 3, 6, None, 1, 2, 1), run("gpipe", 3, 6, None, 1, 2, 1, recompute=0.1)
    assert again.makespan == kept.makespan + 8 * 1
    assert kept.peak_memory == (6.0,) * 3
    assert again.peak_memory == pytest.approx((6 * 0.1 + 0.9,) * 3)
    assert again.peak_in_flight == kept.peak_in_flight


def test_chunks_recompute_each_for_itself() -> None:
    """By hand: rank 0 has B0 from 5 to 8 and B1 to 11; rank 1 keeps its activations and runs B0 from 3 to 5."""
    mixed = run("gpipe", 2, 2, None, 1, 1, 1, recompute=[0.25, None])
    assert mixed.makespan == 11
    assert mixed.in_flight(0) == [(0, 0.25), (1, 0.5), (2, 0.5), (5, 1.25), (8, 1), (11, 0)]
    assert mixed.in_flight(1) == [(0, 0), (1, 1), (2, 2), (3, 2), (5, 1), (7, 0)]
    assert mixed.peak_memory == (1.25, 2)
    other = run("gpipe", 2, 2, None, 1, 1, 1, recompute=[None, 0.25])
    assert (other.makespan, other.peak_memory) == (11, (2, 1.25))
    assert run("gpipe", 2, 2, None, 1, 1, 1).makespan == 9


@pytest.mark.parametrize("name", NAMES)
def test_recomputing_chunks_are_those_of_the_plain_walk(name: str) -> None:
    schedule = generate(name, 3, 6)
    chunks = range(schedule.num_chunks)
    forward, inputs, weights = [1 + k / 8 for k in chunks], [2 - k / 8 for k in chunks], [0.5 + k / 4 for k in chunks]
    again = [f if k % 2 else 0.0 for k, f in enumerate(forward)]
    held_back = [b + f for b, f in zip(inputs, again, strict=True)]
    full = [b + w for b, w in zip(held_back, weights, strict=True)]
    orders = [[tuple(action) for action in schedule.actions(rank)] for rank in range(3)]
    durations = {"F": forward, "B": full, "I": held_back, "W": weights}
    transfer = [0.25] * (schedule.num_chunks - 1)
    expected = walk(orders, schedule.rank_of, durations, transfer, 0, schedule.overlapped)
    recompute = [0.1 if k % 2 else None for k in chunks]
    found = simulate(schedule, Costs.of(schedule, forward, inputs, weights, 0.25, recompute=recompute))
    assert times_of(found) == [sorted(spans) for spans in expected]
    plain = simulate(schedule, Costs.of(schedule, forward, inputs, weights, 0.25))
    assert times_of(plain) != times_of(found)


def test_stages_recompute_with_all_of_their_chunks() -> None:
    schedule = generate("interleaved-1f1b", 2, 4)
    assert Costs.of_stages(schedule, recompute=[0.5, None]).recompute == (0.5, 0.5, None, None)
    assert Costs.of_stages(schedule, recompute=0.5).recompute == (0.5,) * 4
    assert Costs.of_stages(schedule).recompute == (None,) * 4
    with pytest.raises(InputError, match=r"^recompute: got '4 numbers', expected 1 number, or 2: one for each stage"):
        Costs.of_stages(schedule, recompute=[0.5] * 4)


@pytest.mark.parametrize("name", NAMES)
def test_memory_curve_starts_and_ends_at_nothing_and_has_the_peak(name: str) -> None:
    found = run(name, 3, 6)
    for rank in range(3):
        curve = found.in_flight(rank)
        assert curve[-1][1] == pytest.approx(0)
        assert max(held for _, held in curve) == pytest.approx(found.peak_memory[rank])
        assert found.peak_memory[rank] == found.peak_in_flight[rank]


def test_slowest_stage_is_critical() -> None:
    assert run("1f1b", 4, 16, None, [1, 1, 3, 1], [1, 1, 3, 1], [1, 1, 3, 1]).critical_stage == 2


def test_costs_of_stages_are_one_model_for_every_schedule() -> None:
    for name in NAMES:
        schedule = generate(name, 4, 8)
        costs = Costs.of_stages(schedule, [1, 2, 3, 4], 1, 1, [1, 2, 3])
        assert sum(costs.forward) == pytest.approx(10)
        assert sum(costs.activation) == pytest.approx(4)
        assert all(a <= b for a, b in pairwise(costs.forward)), "in model order"


@pytest.mark.parametrize(
    ("costs", "named"),
    [
        ({"forward": [1, 2]}, "forward: got '2 numbers', expected 1 number, or 3"),
        ({"transfer": [1, 2, 3]}, "one for each link"),
        ({"input_grad": -1}, "input-grad: got -1"),
        ({"weight_grad": math.nan}, "weight-grad: got nan"),
        ({"forward": math.inf}, "forward: got inf"),
        ({"weight_share": 1.5}, "weight-share: got 1.5"),
        ({"recompute": -0.1}, "recompute: got -0.1"),
        ({"recompute": [0.5, None, math.nan]}, "recompute: got nan, expected a share from 0 to 1"),
        ({"recompute": [0.5, None]}, "recompute: got '2 numbers', expected 1 number, or 3: one for each chunk"),
    ],
)
def test_bad_costs_are_one_line(costs: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError) as caught:
        Costs.of(generate("1f1b", 3, 4), **costs)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("1f1c", 2, 2), "1f1c"),
        (("1f1b", 0, 2), "stages: got 0"),
        (("1f1b", 2, -1), "microbatches: got -1"),
        (("1f1b", 2, 2, 2), "chunks: got 2, expected 1"),
        (("zb-v", 2, 8, 3), "chunks: got 3, expected 2"),
        (("interleaved-1f1b", 4, 9), "a multiple of 2"),
        (("dualpipe-v", 4, 7), "at least 8"),
        (("1f1b", 10_000, 10_000), "at most"),
    ],
)
def test_schedules_that_do_not_exist_are_one_line(arguments: tuple[Any, ...], named: str) -> None:
    with pytest.raises(InputError, match=named):
        generate(*arguments)


def test_remedy_for_rounds_works() -> None:
    with pytest.raises(InputError, match="choose 8 or 12"):
        generate("interleaved-1f1b", 4, 9)
    assert generate("interleaved-1f1b", 4, 8).size == generate("interleaved-1f1b", 4, 12).size * 2 // 3


# ---- files


@settings(max_examples=60, deadline=None)
@given(cases())
def test_csv_round_trip(case: tuple[Schedule, dict[str, Any]]) -> None:
    schedule = case[0]
    again = csv_file.parse(csv_file.text(schedule), schedule.name)
    assert (again.rank_of, again.chunks, again.overlapped) == (schedule.rank_of, schedule.chunks, schedule.overlapped)
    assert all(np.array_equal(a, b) for a, b in zip(again.orders, schedule.orders, strict=True))


GOOD = "0F0,0F1,,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("0F0,0F1,,0X0,0B1\n1F0,1B0,1F1,1B1\n", "row 1, column 4: got '0X0'"),
        ("0F0,0F1,,0B0,0B1\n1F0,1B0,1F1,1B1,1B1\n", "row 2, column 5: got '1B1', expected each action once"),
        ("0F0,0F1,,0B0,0B1\n1F0,1B0,1F1\n", "row 2, at its end: got 'no action', expected a backward of microbatch 1"),
        ("0F1,0F0,,0B0,0B1\n1F0,1B0,1F1,1B1\n", "row 1, column 1: got '0F1', expected forwards"),
        ("0B0,0F0,0F1,0B1\n1F0,1B0,1F1,1B1\n", "row 1, column 1: got '0B0', expected 0F0 before it"),
        ("0F0,0F1,0I0,0B1\n1F0,1B0,1F1,1B1\n", "expected W of microbatch 0"),
        ("0F0,0F1,0W0,0I0,0B1\n1F0,1B0,1F1,1B1\n", "row 1, column 3: got '0W0', expected 0I0 before it"),
        ("0F0,0F1,0I0,0W0,0B0,0B1\n1F0,1B0,1F1,1B1\n", "one kind of backward"),
        ("0F0,0F1,,0B0,0B1\n0F0,1B0,1F1,1B1\n", "row 2, column 1: got '0F0', expected stage 0 on one rank"),
        ("0F0,0F1,,0B0,0B1\n2F0,2B0,2F1,2B1\n", "no action of stage 1"),
        ("0F0,0F1,,0B0,0B1\n", None),
        ("", "an empty file"),
        ("0F0,0B0\n,,\n1F0,1B0\n", "row 2: got 'no action'"),
        ("0F0," + "x" * 200_000, "field limit"),
        ("0F0,0F999999999,0B0\n", "row 1, column 2: got '0F999999999', expected microbatches 0 to 0"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F2,1B1\n", "row 2, column 3: got '1F2', expected microbatches 0 to 1"),
        ("\n".join(f"{s}F{m}" for s in (0,) for m in (200_000,)), "at most"),
    ],
)
def test_a_bad_cell_is_named(text: str, named: str | None) -> None:
    if named is None:
        assert csv_file.parse(text, "one rank").stages == 1
        return
    with pytest.raises(InputError) as caught:
        csv_file.parse(text, "order.csv")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_deadlock_names_the_waiting_ranks() -> None:
    text = "0F0,0F1,0B1,0B0\n1F0,1F1,1B0,1B1\n"
    schedule = csv_file.parse(text, "order.csv")
    assert simulate(schedule, Costs.of(schedule)).makespan == 11, "late, but it ends"
    schedule = csv_file.parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "order.csv")
    with pytest.raises(InputError, match="rank 0 at 0B0, rank 1 at 1F1"):
        simulate(schedule, Costs.of(schedule))


def test_more_held_than_allowed_names_the_place() -> None:
    check(generate("1f1b", 4, 8), memory_limit=4)
    with pytest.raises(InputError, match=r"rank 0, action 3.*at most 3 activations"):
        check(generate("1f1b", 4, 8), memory_limit=3)


def test_communication_cells_of_torch_are_passed_over() -> None:
    text = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0B1,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1\n"
    assert csv_file.text(csv_file.parse(text, "order.csv")) == csv_file.text(csv_file.parse(GOOD, "order.csv"))


def test_defaults() -> None:
    assert [named.chunks for named in SCHEDULES.values()] == [1, 1, 2, 2, 1, 1, 2, 2, 2]
    assert all(named.summary for named in SCHEDULES.values())
