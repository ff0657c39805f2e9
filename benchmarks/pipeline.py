"""Pipelines: is a run as fast as predicted, are its ranks as busy as the formulas say, and what does recording cost.

Real processes of one thread each on gloo: two run a decoder, four run layers that sleep, so that two cores can play
four devices. What is compared runs side by side, one update of each case in every round, and the predictions of a
round know only what the layers cost alone, what the stages of 1f1b cost in that round, and what a transfer takes
between idle ranks. An update of the decoder counts if each rank had a processor for 95 % of the time of its actions,
and so had 1f1b in that round; where others use the machine, few do.

Run: python benchmarks/pipeline.py [--quick]. Prints the tables of benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isostep import Term, Updater, causal_lm
from isostep.distributed.launch import run_workers
from isostep.distributed.stages import StagedModel
from isostep.distributed.timeline import Recorder, link_seconds
from isostep.layer_costs import measure
from isostep.models.decoder import Decoder, DecoderConfig
from isostep.schedule import closed_form
from isostep.schedule.costs import Costs
from isostep.schedule.ir import I, Schedule
from isostep.schedule.layers import Layer
from isostep.schedule.measured import Measured, chunk_costs, handovers
from isostep.schedule.simulate import simulate

CPU = torch.device("cpu")
CONFIG = DecoderConfig(vocab_size=258, context_length=128, width=256, depth=6, heads=4)
EXAMPLES = 4
"""Of a microbatch, each as long as the context."""
NUM_MICROBATCHES = 8
NAP = 0.01
"""Seconds that a sleeping layer takes in forward, for the gradient of its input, and for that of its weight."""
UNDISTURBED, TRIES = 0.95, 3
"""Share of the time of its actions for which a rank had a processor; rounds that are run at most for each that counts.
"""
BOUND = 0.1
TIMEOUT = 120.0

Batch = dict[str, Tensor]


class Sleep(torch.autograd.Function):
    """Sleeps for so many seconds, in its backward too."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, forward: float, backward: float) -> Tensor:  # type: ignore[override]
        ctx.seconds = backward
        time.sleep(forward)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient.clone(memory_format=torch.contiguous_format), None, None


class Sleeping(nn.Module):
    """A layer of equal costs f = b = w that needs no processor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return hidden
        return Sleep.apply(hidden, NAP, NAP) + Sleep.apply(self.weight, 0.0, NAP)


@dataclass(frozen=True)
class World:
    """What `stages` processes run."""

    stages: int
    layers: Callable[[], list[nn.Module]]
    batch: Callable[[], Batch]
    term: Term
    unbalanced: tuple[int, ...]
    """Layers of each stage in a cut that is not the best."""
    computes: bool


def decoder_batch() -> Batch:
    ids = torch.randint(CONFIG.vocab_size, (EXAMPLES, CONFIG.context_length))
    return {"input_ids": ids, "labels": ids}


def sleeping_batch() -> Batch:
    return {"input_ids": torch.ones(EXAMPLES, 1)}


def sum_of(outputs: Tensor, _: Batch) -> Tensor:
    return outputs.sum()


def examples_of(batch: Batch) -> int:
    return len(batch["input_ids"])


WORLDS = {
    "decoder": World(2, lambda: Decoder(CONFIG).as_layers(), decoder_batch, causal_lm, (6, 2), computes=True),
    "sleeping": World(
        4, lambda: [Sleeping() for _ in range(8)], sleeping_batch, Term("sum", sum_of, examples_of), (3, 2, 2, 1),
        computes=False,
    ),
}  # fmt: skip


class Watch(Recorder):
    """Also adds up the processor time of this rank's actions."""

    used = begun = 0.0

    def begin(self, stage: int, microbatch_index: int, op: str) -> None:
        super().begin(stage, microbatch_index, op)
        self.begun = time.thread_time()

    def end(self) -> None:
        self.used += time.thread_time() - self.begun
        super().end()


class Running:
    """One schedule and one cut on this rank. counts: layers of each stage; None: cut by cost."""

    def __init__(
        self, world: World, schedule: str, layers: Sequence[Layer], counts: tuple[int, ...] | None = None
    ) -> None:
        costs = [layer.cost for layer in layers]
        if counts is not None:  # the cut that is asked for is the only one with equal sums
            costs = [1 / count for count in counts for _ in range(count)]
        self.world, self.schedule = world, schedule
        self.model = StagedModel(world.layers(), stages=world.stages, schedule=schedule, costs=costs)
        self.watch = Watch(CPU)
        self._updater = Updater(self.model, torch.optim.AdamW(self.model.parameters(), lr=1e-4), world.term)

    def update(self, num_microbatches: int, recorded: bool = True) -> tuple[float, float]:
        """Wall time and processor time of this rank for one update."""
        self.model.recorder = self.watch if recorded else None
        dist.barrier()
        return timed(self._updater, [self.world.batch() for _ in range(num_microbatches)])

    def measured(self) -> tuple[Measured, bool]:
        """The timeline of the last update, on every rank; whether it was undisturbed. One machine has one clock."""
        used, self.watch.used = self.watch.used, 0.0
        recordings, processor = zip(*self._updater.gather((self.watch.take(dist.get_rank()), used)), strict=True)
        sent = {rank: each.sent for rank, each in enumerate(recordings)}
        received = {rank: each.received for rank, each in enumerate(recordings)}
        spans = [span for each in recordings for span in each.spans]
        found = Measured.of(self.model.schedule(len(recordings[0].sizes)), spans, handovers(sent, received))
        share = min(used / busy for used, busy in zip(processor, found.busy, strict=True))
        return found, share >= UNDISTURBED or not self.world.computes

    def predicted(self, layers: Sequence[Layer], num_microbatches: int, transfer: float) -> float:
        """Makespan, from what the layers cost."""
        schedule = self.model.schedule(num_microbatches)
        costs = chunk_costs(layers, self.model.bounds)
        if splits(schedule):  # torch runs the whole backward of the first chunk in its weight backward
            costs["weight_grad"][0] += costs["input_grad"][0]
            costs["input_grad"][0] = 0.0
        f, b, w = costs["forward"], costs["input_grad"], costs["weight_grad"]
        return simulate(schedule, Costs.of(schedule, f, b, w, transfer)).makespan


def splits(schedule: Schedule) -> bool:
    return any(bool((schedule.split(order)[0] == I).any()) for order in schedule.orders)


def timed(updater: Updater, batches: list[Batch]) -> tuple[float, float]:
    """Wall time and processor time of one update."""
    wall, processor = time.perf_counter(), time.process_time()
    updater.update(batches)
    return time.perf_counter() - wall, time.process_time() - processor


def layers_alone(world: World) -> list[Layer]:
    """What the layers cost, measured on one rank while the others wait; the same on every rank."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        layers = world.layers()
        names = [f"layer {index}" for index in range(len(layers))]
        inputs, loss = (lambda batch: batch["input_ids"]), world.term.sum_fn
        box = [measure(layers, world.batch(), names=names, inputs=inputs, loss=loss, repeats=9).model.layers]
    dist.broadcast_object_list(box, src=0)
    return list(box[0])


def scaled(layers: Sequence[Layer], bounds: Sequence[int], stages: Measured) -> list[Layer]:
    """The layers, so that each stage's forwards and backwards take as long as they did in `stages`."""
    costs, found = stages.costs, []
    for index, (start, end) in enumerate(pairwise(bounds)):
        part = layers[start:end]
        f = costs.forward[index] / sum(layer.forward for layer in part)
        b = (costs.input_grad[index] + costs.weight_grad[index]) / sum(x.input_grad + x.weight_grad for x in part)
        found += [Layer(x.name, f * x.forward, b * x.input_grad, b * x.weight_grad) for x in part]
    return found


# ---- on every rank


def predictions(name: str, rounds: int) -> list[list[Any]]:
    """A row per case: its name, makespans in seconds, and the errors of their predictions, of rounds that count."""
    world = WORLDS[name]
    layers = layers_alone(world)
    cases = [Running(world, each, layers) for each in ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1")]
    cases.append(Running(world, "1f1b", layers, world.unbalanced))
    carried = EXAMPLES * 4 * (CONFIG.context_length * CONFIG.width if world.computes else 1)
    transfer = link_seconds(cases[0].model.row, carried, CPU)
    found: list[list[Any]] = [[each.schedule, [], []] for each in cases]
    found[-1][0] = f"1f1b, {', '.join(map(str, world.unbalanced))} layers"
    for index in range(TRIES * rounds):
        timelines = []
        for each in cases:
            each.update(NUM_MICROBATCHES)
            timelines.append(each.measured())
        if index == 0 or not timelines[0][1]:
            continue
        known = scaled(layers, cases[0].model.bounds, timelines[0][0])
        for row, each, (timeline, undisturbed) in zip(found, cases, timelines, strict=True):
            if undisturbed and len(row[1]) < rounds:
                row[1].append(timeline.makespan)
                row[2].append(each.predicted(known, NUM_MICROBATCHES, transfer) / timeline.makespan - 1)
        if all(len(makespans) == rounds for _, makespans, _ in found):
            break
    return found


def busy_shares(name: str, rounds: int) -> list[list[Any]]:
    """A row per schedule and M: schedule, M, busy share by formula, and as measured in each round that counts."""
    world = WORLDS[name]
    layers, found = layers_alone(world), []
    for schedule in ("1f1b", "gpipe") if world.computes else ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v"):
        running = Running(world, schedule, layers)
        for num_microbatches in (2, 4, 8, 16):
            built = running.model.schedule(num_microbatches)
            formula = closed_form.busy_share(schedule, world.stages, built.num_microbatches, built.chunks, 1, 1, 1)
            shares = []
            for index in range(TRIES * rounds):
                running.update(num_microbatches)
                timeline, undisturbed = running.measured()
                if undisturbed and index:
                    shares.append(timeline.busy_share)
                if len(shares) == rounds:
                    break
            found.append([schedule, num_microbatches, formula, shares])
    return found


def ratios(rounds: int) -> list[list[Any]]:
    """A row per comparison: what, and the ratio of the processor time of all ranks and of the wall time, per round."""
    world = WORLDS["decoder"]
    staged = Running(world, "1f1b", layers_alone(world))
    alone: Any = dist.new_group([0])
    one = None
    if dist.get_rank() == 0:
        model = Decoder(CONFIG)
        one = Updater(model, torch.optim.AdamW(model.parameters(), lr=1e-4), causal_lm, process_group=alone)

    def recorded(on: bool) -> list[float]:
        return summed(*staged.update(NUM_MICROBATCHES, on))

    def single(_: bool) -> list[float]:
        batches = [decoder_batch() for _ in range(NUM_MICROBATCHES)]
        return summed(*(timed(one, batches) if one is not None else (0.0, 0.0)))

    found = []
    for what, a, b in (
        ("recording / not, 1f1b, P = 2", recorded, recorded),
        ("1f1b, P = 2 / one process", recorded, single),
    ):
        pairs: list[tuple[float, float]] = []
        for index in range(rounds + 1):
            first, second = (a(True), b(False)) if index % 2 else reversed((b(False), a(True)))
            if index:
                pairs.append((first[1] / second[1], first[0] / second[0]))
        found.append([what, [p for p, _ in pairs], [w for _, w in pairs]])
    return found


def summed(wall: float, processor: float) -> list[float]:
    """The longest wall time of all ranks and the sum of their processor times."""
    values = torch.tensor([wall, processor], dtype=torch.float64)
    dist.all_reduce(values[:1], dist.ReduceOp.MAX)
    dist.all_reduce(values[1:])
    return values.tolist()


# ---- tables


def spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "no round counted"
    middle, low, high = (format(each, form) for each in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def prediction_rows(rounds: int) -> Iterator[str]:
    yield "| layers | schedule | P | rounds | makespan | error of the prediction | bound | holds |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, world in WORLDS.items():
        for case, makespans, errors in run_workers(world.stages, predictions, name, rounds, timeout=TIMEOUT):
            holds = "-" if not errors else "yes" if abs(statistics.median(errors)) <= BOUND else "NO"
            times = spread([1000 * each for each in makespans], ".0f")
            cells = name, case, world.stages, len(errors), f"{times} ms", spread(errors, "+.1%"), "10 %", holds
            yield f"| {' | '.join(map(str, cells))} |"


def busy_rows(rounds: int) -> Iterator[str]:
    yield "| layers | schedule | P | M | formula | measured |"
    yield "|---|---|---|---|---|---|"
    for name, world in WORLDS.items():
        for schedule, size, formula, shares in run_workers(world.stages, busy_shares, name, rounds, timeout=TIMEOUT):
            known = "-" if formula is None else f"{formula:.1%}"
            yield f"| {name} | {schedule} | {world.stages} | {size} | {known} | {spread(shares, '.1%')} |"


def ratio_rows(rounds: int) -> Iterator[str]:
    yield "| what | processor time of all ranks | wall time |"
    yield "|---|---|---|"
    for what, processor, wall in run_workers(2, ratios, rounds, timeout=TIMEOUT):
        yield f"| {what} | {spread(processor, '.3f')} | {spread(wall, '.3f')} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 9 (busy shares: always 3)")
    rounds = 3 if parser.parse_args().quick else 9
    print(f"Python {platform.python_version()}, torch {torch.__version__}, 1 thread a rank; median (least to most)\n")
    for rows in (prediction_rows, busy_rows, ratio_rows):
        for row in rows(3 if rows is busy_rows else rounds):
            print(row, flush=True)
        print()


if __name__ == "__main__":
    main()
