"""Timelines: what a real pipeline records, one clock for its ranks, and the comparison with what was predicted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from isostep import Term, Updater, causal_lm, groups
from isostep.distributed.stages import StagedModel
from isostep.distributed.timeline import Recorder, Recording, clock_offsets, link_seconds
from isostep.errors import InputError
from isostep.layer_costs import MeasuredLayers
from isostep.ledger import Event, TimelineObserved
from isostep.models.decoder import Decoder, DecoderConfig
from isostep.recipe import timeline as recipe
from isostep.report.timeline import Timeline
from isostep.schedule import gantt_svg, gantt_text, trace
from isostep.schedule.costs import Costs
from isostep.schedule.generate import NAMES, generate
from isostep.schedule.layers import Layer, ModelLayers
from isostep.schedule.measured import Comparison, Handover, Measured, Received, Sent, chunk_costs, handovers
from isostep.schedule.simulate import Simulation, Span, Transfer, simulate
from isostep.schedule.timeline_file import NAME, Recorded, Start, Update, comparisons, line, read, slowest
from isostep.verification.problem import LONGEST, VOCAB_SIZE, build_examples, objective
from pool import Pool
from test_stages import let_go
from written_ledger import write, written

SVG = "{http://www.w3.org/2000/svg}"
SKEW = 5.0


# ------------------------------------------------------------------------------------------- a real run of two ranks


def staged_updater(stages: int, schedule: str, *terms: Term) -> tuple[StagedModel, Updater]:
    model = Decoder(DecoderConfig(VOCAB_SIZE, LONGEST, 16, 4, 2), seed=7)
    staged = StagedModel(model.as_layers(), stages=stages, schedule=schedule)
    return staged, Updater(staged, torch.optim.SGD(staged.parameters(), lr=0.1), terms or objective())


def recorded_update(_: Any, schedule: str, num_examples: int) -> tuple[Recording, Recording, list[float]]:
    """An update under a clock that is 5 s ahead on rank 1: as recorded, on rank 0's clock, and the offsets."""
    staged, updater = staged_updater(2, schedule)
    rank = dist.get_rank()
    recorder = staged.recorder = Recorder(torch.device("cpu"), lambda: time.perf_counter() + SKEW * rank)

    def reading() -> tuple[list[float], tuple[float, float]]:
        offsets = clock_offsets(staged.world, torch.device("cpu"), recorder.clock)
        return offsets, (recorder.clock(), offsets[rank])

    plan = groups(build_examples(num_examples, 0), examples_per_update=num_examples, examples_per_microbatch=2)
    _, before = reading()
    updater.update(next(iter(plan)))
    offsets, after = reading()
    taken = recorder.take(rank)
    let_go(staged)
    return taken, taken.on_first_clock(before, after), offsets


def joined(recordings: Sequence[Recording]) -> list[Handover]:
    rows = dict(enumerate(recordings))
    return handovers({r: each.sent for r, each in rows.items()}, {r: each.received for r, each in rows.items()})


@pytest.mark.parametrize(("schedule", "num_examples"), [("1f1b", 9), ("zb-v", 2), ("interleaved-1f1b", 8)])
def test_a_run_records_each_action_and_each_transfer_once(pair: Pool, schedule: str, num_examples: int) -> None:
    skewed, recordings, offsets = map(list, zip(*pair.run(2, recorded_update, schedule, num_examples), strict=True))
    assert offsets[0] == offsets[1] == [0.0, pytest.approx(SKEW, abs=0.01)]
    sizes = recordings[0].sizes
    assert sizes == recordings[1].sizes
    order = generate(schedule, 2, len(sizes))
    measured = Measured.of(order, [s for each in recordings for s in each.spans], joined(recordings))
    assert len(measured.actions) == order.size  # `Measured.of` has held them to the order of the schedule
    assert all(span.end > span.start for span in measured.actions if span.op == "F")
    crossing = [k for k, (a, b) in enumerate(pairwise(order.rank_of)) if a != b]
    expected = {(k + (op == "B"), index, op) for k in crossing for index in range(len(sizes)) for op in "FB"}
    transfers = measured.transfers()
    assert {(t.stage, t.microbatch_index, t.op) for t in transfers} == expected
    assert len(transfers) == len(expected)
    done = {("B" if s.op == "I" else s.op, s.stage, s.microbatch_index): s for s in measured.actions if s.op != "W"}
    slack = 5e-3  # of the clocks
    for each in measured.handed_over:
        made = done[each.op, each.stage, each.microbatch_index]
        used = done[each.op, each.stage + (1 if each.op == "F" else -1), each.microbatch_index]
        assert made.end <= each.start <= each.end + slack
        assert each.waited <= each.end <= used.start
    gaps = [each.end - each.start for each in joined(skewed)]
    assert min(gaps) < -SKEW / 2, "the control: with the clocks as they are, things arrive before they are sent"


def detached(_: Any) -> tuple[int, int, int]:
    """Actions recorded while a recorder is attached and the model evaluated, and after it was taken off."""
    staged, updater = staged_updater(2, "1f1b")
    recorder = staged.recorder = Recorder(torch.device("cpu"))
    plan = iter(groups(build_examples(9, 0), examples_per_update=3, examples_per_microbatch=1))
    updater.update(next(plan))
    attached = len(recorder.take(0).spans)
    updater.evaluate(build_examples(3, 1))
    evaluated = len(recorder.take(0).spans)
    staged.recorder = None
    updater.update(next(plan))
    assert staged._stages is not None
    assert all(stage.recorder is None for stage in staged._stages)
    left = recorder.take(0)
    let_go(staged)
    return attached, evaluated, len(left.spans) + len(left.sent) + len(left.received) + len(left.sizes)


def test_without_a_recorder_nothing_is_recorded(pair: Pool) -> None:
    assert pair.run(2, detached) == [(6, 0, 0)] * 2


def slow_loss(_: Any) -> list[float]:
    """How long each forward of this rank took under a loss that takes 50 ms."""

    def sum_fn(outputs: Any, batch: Any) -> torch.Tensor:
        time.sleep(0.05)
        return causal_lm.sum_of(outputs, batch)

    staged, updater = staged_updater(2, "1f1b", Term("slow", sum_fn, causal_lm.count_of))
    staged.recorder = Recorder(torch.device("cpu"))
    ids = torch.arange(6)[None]
    updater.update([{"input_ids": ids, "labels": ids}] * 3)
    taken = staged.recorder.take(dist.get_rank())
    let_go(staged)
    return [span.end - span.start for span in taken.spans if span.op == "F"]


def test_the_loss_belongs_to_the_forward_of_the_last_stage(pair: Pool) -> None:
    first, last = pair.run(2, slow_loss)
    assert min(first) < 0.05 <= min(last)


def links(group: Any) -> list[float]:
    return [link_seconds(group, nbytes, torch.device("cpu"), rounds=5) for nbytes in (8, 32_000_000)]


def test_a_transfer_of_more_bytes_takes_longer_and_all_ranks_say_the_same(pool: Pool) -> None:
    results = pool.run(4, links)
    assert results == results[:1] * 4
    assert 0 < results[0][0] < results[0][1]
    assert pool.run(1, links) == [[0.0, 0.0]]


def offsets_of_four(group: Any) -> list[float]:
    rank = dist.get_rank(group)
    return clock_offsets(group, torch.device("cpu"), lambda: time.perf_counter() - 100.0 * rank)


def test_offsets_of_many_clocks_are_known_on_every_rank(pool: Pool) -> None:
    results = pool.run(4, offsets_of_four)
    assert results == results[:1] * 4
    assert results[0] == [0.0, *(pytest.approx(-100.0 * rank, abs=0.05) for rank in range(1, 4))]


def test_a_clock_that_drifts_is_straightened() -> None:
    true = (10.0, 12.0, 15.0)
    fast = [2 + 1.5 * moment for moment in true]
    recording = Recording(
        (1,), (Span(1, 0, 0, "F", fast[1], fast[2]),), (Sent(0, 0, "F", fast[1]),), (Received(0, 0, "B", *fast[1:]),)
    )
    straight = recording.on_first_clock((fast[0], fast[0] - true[0]), (2 + 1.5 * 20.0, 2 + 0.5 * 20.0))
    assert straight.spans[0][4:] == pytest.approx(true[1:])
    assert straight.sent[0].time == pytest.approx(true[1])
    assert straight.received[0][3:] == pytest.approx(true[1:])
    nearest = recording.on_first_clock((fast[0], fast[0] - true[0]), (fast[0], fast[0] - true[0]))
    assert nearest.spans[0].start == pytest.approx(fast[1] - (fast[0] - true[0]))


# ------------------------------------------------------------------------------------------------ measured, compared


def simulated(name: str, stages: int, microbatches: int, **costs: Any) -> Simulation:
    schedule = generate(name, stages, microbatches)
    return simulate(schedule, Costs.of(schedule, **costs))


def handed(transfers: Sequence[Transfer]) -> list[Handover]:
    return [Handover(*t[:5], t.start, t.end, t.end) for t in transfers]


def measured_as(sim: Simulation, scale: float = 1.0, origin: float = 0.0) -> Measured:
    """A run that went as simulated, on a clock that shows `origin` at its start."""
    spans = [s._replace(start=s.start + origin, end=s.end + origin) for s in sim.spans()]
    transfers = [t._replace(start=t.start + origin, end=t.end + origin) for t in sim.transfers()]
    return Measured.of(sim.schedule, spans, handed(transfers), scale)


@given(st.sampled_from(NAMES), st.integers(1, 3), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3))
def test_a_run_that_goes_as_simulated_measures_as_simulated(
    name: str, stages: int, microbatches: int, forward: int, weights: int
) -> None:
    try:
        sim = simulated(name, stages, microbatches, forward=forward, weight_grad=weights, transfer=0.5)
    except InputError:
        return  # no such schedule
    measured = measured_as(sim, scale=2.0, origin=100.0)
    assert measured.makespan == pytest.approx(2 * sim.makespan)
    assert measured.busy == pytest.approx([2 * work for work in sim.busy])
    assert measured.busy_share == pytest.approx(sim.busy_share)
    assert measured.peak_memory == sim.peak_memory
    assert len(measured.spans(0.0, sim.makespan)) == len(sim.spans(0.0, sim.makespan / 2))
    assert len(measured.transfers(0.0, sim.makespan)) == len(sim.transfers(0.0, sim.makespan / 2))
    for rank in range(stages):
        curve = [(2 * time, held) for time, held in sim.in_flight(rank)]
        drop = [i for i, (now, then) in enumerate(pairwise(curve), start=1) if now[1] == then[1]]  # input gradients
        steps = [step for i, step in enumerate(curve) if i not in drop]
        again = measured.in_flight(rank)
        kept = [step for i, step in enumerate(again) if not i or step[1] != again[i - 1][1]]
        assert [held for _, held in kept] == [held for _, held in steps]
        assert [time for time, _ in kept] == pytest.approx([time for time, _ in steps], abs=1e-9)
    full = [b + w for b, w in zip(measured.costs.input_grad, measured.costs.weight_grad, strict=True)]
    assert measured.costs.forward == pytest.approx([2.0 * forward] * len(full))
    assert full == pytest.approx([2.0 * (1 + weights)] * len(full))
    compared = Comparison(simulate(sim.schedule, replace(measured.costs, transfer=sim.costs.transfer)), measured)
    assert sum(parts(compared)) == pytest.approx(measured.makespan)


def parts(compared: Comparison) -> tuple[float, float, float, float]:
    bounds = compared.bounds
    return bounds.work, bounds.fill_and_drain, bounds.transfers, bounds.unexplained


BOUND = {
    "work": ("1f1b", 2, 64, {}),
    "slowest stage": ("1f1b", 4, 32, {"forward": [1, 1, 3, 1]}),
    "fill and drain": ("gpipe", 4, 2, {}),
    "transfers": ("gpipe", 2, 3, {"transfer": 10}),
}


@pytest.mark.parametrize("bound", BOUND)
def test_what_bounds_a_run_is_named_and_the_parts_add_up(bound: str) -> None:
    name, stages, microbatches, costs = BOUND[bound]
    sim = simulated(name, stages, microbatches, **costs)
    compared = Comparison(sim, measured_as(sim))
    assert compared.bounds.bound == bound
    assert compared.sentence.startswith(bound.capitalize() if bound not in ("slowest stage",) else "The slowest stage")
    assert sum(parts(compared)) == pytest.approx(compared.measured.makespan, rel=1e-12)
    assert compared.bounds.unexplained == pytest.approx(0.0, abs=1e-9)
    assert (compared.makespan_error, compared.busy_share_error) == pytest.approx((0.0, 0.0))
    assert compared.bounds.imbalance == pytest.approx(max(sim.busy) - sum(sim.busy) / stages)


def test_what_no_cost_explains_is_told_from_wrong_costs() -> None:
    sim = simulated("1f1b", 2, 16)
    twice = measured_as(simulated("1f1b", 2, 16, forward=2, input_grad=2, weight_grad=2))
    compared = Comparison(sim, twice)
    assert compared.makespan_error == pytest.approx(-0.5)
    assert compared.bounds.unexplained == pytest.approx(0.0, abs=1e-9)
    assert compared.explained.makespan == pytest.approx(twice.makespan)
    pauses = [s._replace(start=2 * s.start, end=s.start + s.end) for s in sim.spans()]
    compared = Comparison(sim, Measured.of(sim.schedule, pauses, []))
    assert compared.bounds.bound == "unexplained"
    assert compared.bounds.unexplained == pytest.approx(compared.measured.makespan - sim.makespan)
    assert sum(parts(compared)) == pytest.approx(compared.measured.makespan, rel=1e-12)


def test_waits_tell_what_was_under_way_from_what_was_not_sent() -> None:
    sim = simulated("gpipe", 2, 1, forward=4, transfer=1)
    (forward, backward) = sim.transfers()
    hand = [
        Handover(*forward[:5], start=4.0, waited=0.0, end=5.0),  # one second of five was the transfer
        Handover(*backward[:5], start=11.0, waited=11.5, end=12.0),
    ]
    assert Measured.of(sim.schedule, sim.spans(), hand).waits == ((0.5, 0.5), (5.0, 1.0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s[:-1], "spans of rank 1: got '3 others', expected the 4 actions of gpipe in their order"),
        (lambda s: [*s, s[0]], "spans of rank 0: got '5 others'"),
        (lambda s: [s[0]._replace(end=1.5), *s[1:]], "spans of rank 0: got 'two at a time'"),
        (lambda s: [*s, s[0]._replace(rank=2)], "spans: got 'rank 2', expected ranks below 2"),
        (lambda s: [a._replace(start=0, end=0) for a in s], "spans: got 'no time between the first and the last'"),
    ],
)  # fmt: skip
def test_spans_of_another_schedule_are_refused(change: Any, said: str) -> None:
    sim = simulated("gpipe", 2, 2)
    with pytest.raises(InputError) as error:
        Measured.of(sim.schedule, change(sim.spans()), [])
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("odd", [{"target": 0}, {"stage": 1}, {"op": "B"}, {"op": "X"}, {"stage": 9}])
def test_transfers_between_others_than_neighbours_are_refused(odd: dict[str, Any]) -> None:
    sim = simulated("gpipe", 2, 2, transfer=1)
    good = handed(sim.transfers())
    Measured.of(sim.schedule, sim.spans(), good)
    with pytest.raises(InputError, match=r"^transfers: got"):
        Measured.of(sim.schedule, sim.spans(), [good[0]._replace(**odd), *good[1:]])


# --------------------------------------------------------------------------------------------------------- pictures

SMALL_PAIR = """
predicted
rank 0  F0───── F1───── ................B0───── B1─────
rank 1  ........F0───── F1───── B0───── B1───── ........
measured
rank 0  F0───── F1───── ................B0───── ........B1─────
rank 1  ........F0───── F1───── B0───── ........B1───── ........
time    0   0.5 1   1.5 2   2.5 3   3.5 4   4.5 5   5.5 6   6.5
F forward  B backward  . idle"""


def small_pair() -> Comparison:
    """gpipe over two ranks and microbatches of one second each; in the run, the second backward came a second late."""
    sim = simulated("gpipe", 2, 2, input_grad=0.5, weight_grad=0.5)
    moved = [
        s._replace(start=s.start + 1, end=s.end + 1) if s.op == "B" and s.microbatch_index == 1 else s
        for s in sim.spans()
    ]
    return Comparison(sim, Measured.of(sim.schedule, moved, []))


def test_both_are_drawn_on_one_scale_of_time() -> None:
    compared = small_pair()
    drawn = gantt_text.pair({"predicted": compared.predicted, "measured": compared.measured}, width=64)
    assert f"\n{drawn.plain}" == SMALL_PAIR


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 512), (64, 128)])
def test_a_large_pair_stays_readable(stages: int, microbatches: int) -> None:
    sim = simulated("1f1b", stages, microbatches)
    measured = measured_as(sim)
    lines = gantt_text.pair({"predicted": sim, "measured": measured}, width=80).plain.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 2 * (gantt_text.MAX_RANKS + 2) + 3
    assert lines[-1].startswith("from 0 to ")
    ElementTree.fromstring(gantt_svg.pair(Comparison(sim, measured), "update 1"))


def test_the_svg_has_both_panels_on_one_axis() -> None:
    sim = simulated("zb-h1", 2, 4, transfer=0.25)
    compared = Comparison(sim, measured_as(simulated("zb-h1", 2, 4, forward=2, transfer=0.25)))
    root = ElementTree.fromstring(gantt_svg.pair(compared, "update 7"))
    panels = [group for group in root.iter(f"{SVG}g") if group.attrib.get("class") == "panel"]
    spans = [[r for r in panel.iter(f"{SVG}rect") if "span" in r.attrib["class"]] for panel in panels]
    assert [len(each) for each in spans] == [sim.schedule.size] * 2
    ends = [max(float(r.attrib["x"]) + float(r.attrib["width"]) for r in each) for each in spans]
    starts = [min(float(r.attrib["x"]) for r in each) for each in spans]
    assert starts[0] == starts[1]
    shares = (ends[0] - starts[0]) / (ends[1] - starts[1])
    assert shares == pytest.approx(sim.makespan / compared.measured.makespan, abs=0.01)
    assert shares < 0.9
    lowest, highest = (edge(float(r.attrib["y"]) for r in each) for edge, each in zip((max, min), spans, strict=True))
    assert lowest < highest
    text = " ".join(element.text or "" for element in root.iter(f"{SVG}text"))
    assert "update 7: zb-h1, 2 stages, 4 microbatches" in text
    assert f"measured: makespan {compared.measured.makespan:.4g} ms" in text
    assert f"makespan {compared.makespan_error:+.1%}" in text
    assert compared.sentence in text


def test_the_trace_has_a_process_for_each_replica() -> None:
    sim = simulated("1f1b", 2, 3, transfer=0.5)
    alone, both = trace.document(measured_as(sim)), trace.document(measured_as(sim), measured_as(sim))
    assert [e for e in both["traceEvents"] if e["pid"] == 0] == alone["traceEvents"]
    assert sum(e["ph"] == "X" for e in both["traceEvents"]) == 2 * sim.schedule.size
    flows = [e["id"] for e in both["traceEvents"] if e["ph"] == "s"]
    assert len(set(flows)) == len(flows) == 2 * len(sim.transfers())


# --------------------------------------------------------------------------------------------------------- the file

LAYERS = (Layer("embedding", 0.1, 0.0, 0.2, 8.0, 4.0), Layer("block", 0.4, 0.3, 0.1, 8.0, 6.0), Layer("head", 1, 2, 3))


def start(**changes: Any) -> Start:
    whole = Start(
        stages=2, replicas=1, schedule="1f1b", chunks=1, boundaries=(0, 2, 3), recomputes=(False, False), tokens=100,
        transfer_seconds=0.01, source="measured", layers=LAYERS, kept_bytes=(1.0, 2.0, 0.0),
    )  # fmt: skip
    return replace(whole, **changes)


def update(begun: Start, attempted: int = 2, slower: float = 1.0, **changes: Any) -> Update:
    """An update of four microbatches that went as predicted, or `slower`; on every replica alike."""
    sim = begun.predicted(4, 100)
    spans, transfers = [], []
    for first in range(0, begun.stages * begun.replicas, begun.stages):
        for s in sim.spans():
            spans.append(s._replace(rank=s.rank + first, start=s.start * slower / 1000, end=s.end * slower / 1000))
        for t in sim.transfers():
            times = (t.start * slower / 1000, t.end * slower / 1000)
            transfers.append(Handover(t.source + first, t.target + first, *t[2:5], times[0], times[1], times[1]))
    whole = Update(attempted, (4,) * begun.replicas, (100.0,) * begun.replicas, tuple(spans), tuple(transfers))
    return replace(whole, **changes)


def test_costs_of_chunks_are_sums_of_layers_in_proportion_to_tokens() -> None:
    assert chunk_costs(LAYERS, (0, 2, 3), 2.0) == {
        "forward": [1.0, 2.0], "input_grad": pytest.approx([0.6, 4.0]), "weight_grad": pytest.approx([0.6, 6.0]),
    }  # fmt: skip
    costs = start().predicted(4, 150).costs
    assert costs.forward == pytest.approx((750.0, 1500.0))
    assert costs.input_grad == pytest.approx((0.0, 3000.0)), "torch's first chunk has no backward for its inputs"
    assert costs.weight_grad == pytest.approx((900.0, 4500.0))
    assert costs.transfer == pytest.approx((15.0,))
    assert costs.activation == pytest.approx((15.0, 0.0))


def test_a_stage_that_recomputes_is_predicted_to_take_longer_and_to_hold_less() -> None:
    plain, recomputed = start().predicted(4, 100), start(recomputes=(True, False)).predicted(4, 100)
    assert recomputed.busy[0] == pytest.approx(plain.busy[0] + 4 * 500)
    assert recomputed.busy[1] == pytest.approx(plain.busy[1])
    assert recomputed.peak_memory[0] < plain.peak_memory[0]


def test_the_file_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / NAME
    first, second = start(), start(replicas=2)
    written = [first, update(first), update(first, 3), second, update(second, 9), start()]
    path.write_text("".join(map(line, written)) + '{"schema": 1, "upd')  # killed
    found = read(path)
    assert [each.start for each in found] == [first, second]
    assert [u.attempted for each in found for u in each.updates] == [2, 3, 9]
    got = found[1].updates[0]
    assert [s[:4] for s in got.spans] == [s[:4] for s in update(second).spans]
    assert [s.start for s in got.spans] == pytest.approx([s.start for s in update(second).spans], abs=1e-7)


REFUSED = {
    "not json\n": "line 1: got 'not json', expected schema 1: Invalid JSON",
    "{}\n": "line 1.schema: got '{}', expected schema 1: Field required",
    line(start()).replace('"schema": 1', '"schema": 2'): "line 1.schema: got '2', expected schema 1: Input should be 1",
    line(update(start())): "line 1: got 'no start of a run', expected one before the first update",
    line(start()).replace('"forward": 0.1', '"forward": NaN'): "line 1.start.layers.0.forward: got 'nan', expected",
    line(start()).replace('"stages": 2', '"stages": "2"'): "line 1.start.stages: got '2', expected",
    line(start()).replace('"boundaries": [0, 2, 3]', '"boundaries": [0, 3]'): "line 1.start: got",
    line(start()).replace('"kept_bytes": [1.0, ', '"kept_bytes": ['): "line 1.start: got",
    line(start()) + line(update(start())).replace("[100.0]", "[100.0, 1.0]"): "line 2.update: got",
    line(start()) + line(update(start())).replace('"spans"', '"spins"'): "line 2.update.spans: got",
    line(start()) + line(update(start())).replace('"F", 0.0', '"F", Infinity', 1): "line 2.update.spans.0.4: got 'inf'",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_bad_file_is_one_line_that_names_the_place(text: str, tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read(path)
    assert str(error.value).startswith(f"{path} {REFUSED[text]}")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^timeline: got '{tmp_path / NAME}', expected a file that can be read"):
        read(tmp_path / NAME)


def test_the_typical_update_is_the_median_of_those_of_the_usual_size() -> None:
    begun = start()
    short = replace(begun.predicted(2, 100))
    odd = Update(9, (2,), (100.0,), tuple(s._replace(start=s.start / 1e3, end=s.end / 1e3) for s in short.spans()), ())
    updates = (update(begun, 2, 3.0), update(begun, 3, 1.0), update(begun, 4, 2.0), odd)
    chosen, compared = Recorded(begun, updates).typical()
    assert chosen.attempted == 4
    assert compared[0].makespan_error == pytest.approx(-0.5, abs=1e-4)


def test_of_several_replicas_the_slowest_counts_and_one_without_work_is_left_out() -> None:
    begun = start(replicas=2)
    both = update(begun)
    later = tuple(s._replace(start=2 * s.start, end=2 * s.end) if s.rank >= 2 else s for s in both.spans)
    compared = comparisons(begun, replace(both, spans=later, transfers=()))
    assert slowest(compared) is compared[1]
    assert compared[1].measured.makespan == pytest.approx(2 * compared[0].measured.makespan)
    alone = replace(
        both, num_microbatches=(4, 0), spans=tuple(s for s in both.spans if s.rank < 2),
        transfers=tuple(t for t in both.transfers if t.source < 2),
    )  # fmt: skip
    assert list(comparisons(begun, alone)) == [0]


# ------------------------------------------------------------------------------------------------------- the report


def observed(attempted: int) -> TimelineObserved:
    return TimelineObserved(
        attempted=attempted, path=NAME, makespan=0.2, predicted_makespan=0.1, busy_share=0.8, predicted_busy_share=0.9,
        bound="work",
    )  # fmt: skip


def reported(run_dir: Path, *options: str) -> str:
    code = "import sys; sys.modules['torch'] = None; from isostep.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "report", str(run_dir), *options]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")
    return finished.stdout


def test_report_shows_the_last_start_that_recorded_updates(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", [*written(), observed(2)])
    begun = start(replicas=2)
    lines = [start(), update(start()), begun, update(begun, 4), update(begun, 5, 1.5), begun]
    (run_dir / NAME).write_text("".join(map(line, lines)))
    text = reported(run_dir)
    section = text[text.index("pipeline timeline") :].splitlines()
    assert section[0].startswith("pipeline timeline in ms: update 4, typical of 2 recorded; replica 0")
    assert max(map(len, section)) <= 100
    makespan = f"{begun.predicted(4, 100).makespan:.1f}"
    assert any(row.split() == ["makespan", makespan, makespan, "+0.0", "%"] for row in section), section
    assert section[-1].strip().endswith("help.")
    timeline = json.loads(reported(run_dir, "--json", "-"))["timeline"]
    assert (timeline["attempted"], timeline["recorded_updates"], timeline["unit"]) == (4, 2, "ms")
    assert timeline["bounds"]["bound"] == "slowest stage"
    document = Timeline.of(run_dir, NAME).document()
    assert timeline == document


def test_report_says_in_a_line_that_the_timeline_is_no_good(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", [*written(), observed(2)])
    assert f"pipeline timeline: not shown: timeline: got '{run_dir / NAME}'" in reported(run_dir)
    assert json.loads(reported(run_dir, "--json", "-"))["timeline"].keys() == {"error"}


# ------------------------------------------------------------------------------------------------------- the recipe


def costs_of(staged: StagedModel) -> MeasuredLayers:
    layers = tuple(Layer(f"layer {k}", 1e-3, 1e-3, 1e-3, 0.0, 64.0) for k in range(staged.bounds[-1]))
    sizes = (64.0,) * len(layers)
    return MeasuredLayers(ModelLayers("given", layers), kept_bytes=sizes, boundary_bytes=sizes, tokens=40)


def run_with_timeline(_: Any, folder: str, updates: int, recorded: int) -> list[Event]:
    """A few updates under a writer; then, as after an error, a finish that nobody answers."""
    staged, updater = staged_updater(2, "1f1b")
    events: list[Event] = []
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "RECORDED", recorded)
        writer = recipe.TimelineWriter(updater, staged, Path(folder), costs_of(staged), events.append, told.append)
    plan = groups(build_examples(20, 0), examples_per_update=5, examples_per_microbatch=1, epochs=9)
    for attempted, group in enumerate(plan, start=1):
        writer.after_update(updater.update(group), attempted)
        if attempted == updates:
            break
    if dist.get_rank() == 0:
        writer.finish()
        writer.finish()
        assert staged.recorder is None
    assert [text.startswith("timeline of update" if updates > 1 else "timeline: nothing") for text in told] == (
        [True] if dist.get_rank() == 0 else []
    )
    let_go(staged)
    return events


def test_a_run_writes_its_timeline_and_stops_recording(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(line(start()) + '{"schema": 1, "upda')  # of a start that was killed
    events, *others = pool.run(4, run_with_timeline, str(tmp_path), 6, 3)
    assert others == [[], [], []]
    (found,) = read(tmp_path / NAME)
    assert (found.start.stages, found.start.replicas, found.start.schedule) == (2, 2, "1f1b")
    assert found.start.transfer_seconds > 0
    assert [each.attempted for each in found.updates] == [event.attempted for event in events] == [2, 3, 4]
    for each, event in zip(found.updates, events, strict=True):
        assert each.num_microbatches == (3, 2)
        assert {span.rank for span in each.spans} == {0, 1, 2, 3}
        chosen = slowest(comparisons(found.start, each))
        assert event.makespan * 1000 == pytest.approx(chosen.measured.makespan, abs=1e-3)
        assert event.predicted_makespan * 1000 == pytest.approx(chosen.predicted.makespan)
        assert event.bound == chosen.bounds.bound
    assert min(span.start for span in found.updates[0].spans) == 0.0
    root = ElementTree.fromstring((tmp_path / recipe.SVG).read_text())
    assert "predicted and measured" in (root[0].text or "")
    actions = [e for e in json.loads((tmp_path / recipe.TRACE).read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(actions) == sum(2 * 2 * n for n in (3, 2))
    assert not list(tmp_path.glob("*.partial"))


def test_a_run_that_ends_early_draws_what_it_has_without_the_others(pair: Pool, tmp_path: Path) -> None:
    pair.run(2, run_with_timeline, str(tmp_path), 3, 20)
    (found,) = read(tmp_path / NAME)
    assert [each.attempted for each in found.updates] == [2, 3]
    assert (tmp_path / recipe.SVG).exists()
    nothing = tmp_path / "one"
    nothing.mkdir()
    pair.run(2, run_with_timeline, str(nothing), 1, 20)
    assert read(nothing / NAME) == []
    assert not (nothing / recipe.SVG).exists()
