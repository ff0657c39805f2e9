"""What a pipeline run really did, in the form of a simulation; and the two compared."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from ..errors import InputError
from .costs import Costs
from .drawing import percent
from .ir import OPS, B, F, I, Schedule, W
from .layers import COSTS, Layer
from .simulate import HELD, Simulation, Span, Transfer, held_at_most, simulate

SMALL = 0.1
"""What takes less than this share of the makespan does not bound a run."""


REMEDY = "record the run again"


class Sent(NamedTuple):
    """A rank posts what a chunk has made: activations (op F) or their gradients (op B)."""

    stage: int
    microbatch_index: int
    op: str
    time: float


class Received(NamedTuple):
    """A rank waits for what the chunk `stage` sends, and has it."""

    stage: int
    microbatch_index: int
    op: str
    waited: float
    """When it began to wait."""
    time: float
    """When it had it."""


class Handover(NamedTuple):
    """A transfer as measured: `Transfer`, and when its receiver began to wait for it.

    What arrives before it is waited for ends with the wait: nobody looks earlier.
    """

    source: int
    target: int
    stage: int
    microbatch_index: int
    op: str
    start: float
    waited: float
    end: float

    @property
    def waited_underway(self) -> float:
        """How long the receiver waited for what had been sent."""
        return max(0.0, self.end - max(self.start, self.waited))


def handovers(sent: dict[int, Sequence[Sent]], received: dict[int, Sequence[Received]]) -> list[Handover]:
    """The transfers of one replica, from what each rank sent and received."""
    posted = {each[:3]: (rank, each.time) for rank, row in sent.items() for each in row}
    found = []
    for target, row in received.items():
        for each in row:
            source, start = posted[each[:3]]
            found.append(Handover(source, target, *each[:3], start, each.waited, each.time))
    return found


@dataclass(frozen=True)
class Measured:
    """One replica's part of an update, from its first start at time 0 on. Build with `Measured.of`.

    It is drawn as a `Simulation` is. What a rank holds is counted in chunk activations.
    """

    schedule: Schedule
    actions: tuple[Span, ...]
    """By rank, and in order of time within one."""
    handed_over: tuple[Handover, ...]
    """In order of their starts."""

    @classmethod
    def of(
        cls, schedule: Schedule, spans: Iterable[Span], handed_over: Iterable[Handover], scale: float = 1.0
    ) -> Measured:
        """From times with any origin, each multiplied by `scale`; ranks from 0 to P - 1.

        Raises InputError unless the spans are the actions of the schedule, in its order, one after the other, and
        the transfers go from chunks to their neighbours.
        """
        actions = sorted(spans, key=lambda span: (span.rank, span.start))
        handed_over = sorted(handed_over, key=lambda each: each.start)
        _check_actions(schedule, actions)
        _check_transfers(schedule, handed_over)
        zero = min(span.start for span in actions)
        if not max(span.end for span in actions) > zero:
            raise InputError.of("spans", "no time between the first and the last", "a makespan above 0", REMEDY)

        def at(time: float) -> float:
            return (time - zero) * scale

        return cls(
            schedule,
            tuple(s._replace(start=at(s.start), end=at(s.end)) for s in actions),
            tuple(h._replace(start=at(h.start), waited=at(h.waited), end=at(h.end)) for h in handed_over),
        )

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max(span.end for span in self.actions)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Work of each rank."""
        return tuple(math.fsum(s.end - s.start for s in self.of_rank(rank)) for rank in range(self.schedule.stages))

    @property
    def busy_share(self) -> float:
        """Work of all ranks / (P * makespan)."""
        return sum(self.busy) / (self.schedule.stages * self.makespan)

    @cached_property
    def costs(self) -> Costs:
        """The mean time of each action on each chunk; a full backward that is never split counts as b, with w = 0."""
        inputs, weights = [], []
        for stage in range(self.schedule.num_chunks):
            b, w = self._backwards(stage)
            inputs.append(b)
            weights.append(w)
        forward = [self._spent(stage, F)[0] / self.schedule.num_microbatches for stage in range(len(inputs))]
        return Costs.of(self.schedule, forward, inputs, weights)

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """The most chunk activations that each rank held at once."""
        return tuple(float(held_at_most(self.schedule, rank)) for rank in range(self.schedule.stages))

    @property
    def waits(self) -> tuple[tuple[float, float], ...]:
        """Of each rank: how long it waited for others, and how long of that for what had been sent already."""
        waited = [[0.0, 0.0] for _ in range(self.schedule.stages)]
        for each in self.handed_over:
            waited[each.target][0] += each.end - each.waited
            waited[each.target][1] += each.waited_underway
        return tuple((both[0], both[1]) for both in waited)

    def of_rank(self, rank: int) -> list[Span]:
        """The actions of one rank, in order."""
        begin, end = (bisect_left(self.actions, each, key=lambda span: span.rank) for each in (rank, rank + 1))
        return list(self.actions[begin:end])

    def spans(self, start: float = 0.0, end: float = float("inf")) -> list[Span]:
        """As `Simulation.spans`."""
        return [s for s in self.actions if s.start < end and (s.end > start or s.start >= start)]

    def transfers(self, start: float = 0.0, end: float = float("inf")) -> list[Transfer]:
        """The transfers that overlap a window, in order of their starts; a transfer ends when its receiver has it."""
        return [Transfer(*h[:5], h.start, h.end) for h in self.handed_over if h.start < end and h.end > start]

    def in_flight(self, rank: int) -> list[tuple[float, float]]:
        """The curve of what a rank holds: (time, chunk activations from then on)."""
        changes = [
            (s.start if s.op == OPS[F] else s.end, int(HELD[OPS.index(s.op)]))
            for s in self.of_rank(rank)
            if s.op != OPS[I]
        ]
        held, curve = 0, {0.0: 0.0}
        for time, change in sorted(changes):
            held += change
            curve[time] = float(held)
        return list(curve.items())

    @cached_property
    def _lasted(self) -> dict[tuple[int, str], list[float]]:
        """How long the actions of each op on each chunk took."""
        lasted: dict[tuple[int, str], list[float]] = {}
        for span in self.actions:
            lasted.setdefault((span.stage, span.op), []).append(span.end - span.start)
        return lasted

    def _spent(self, stage: int, op: int) -> tuple[float, int]:
        """Time of all actions of an op on a chunk, and how many they are."""
        lasted = self._lasted.get((stage, OPS[op]), [])
        return math.fsum(lasted), len(lasted)

    def _backwards(self, stage: int) -> tuple[float, float]:
        """b and w of a chunk, so that the work of all its backwards, full and split, is what was measured."""
        (full, num_full), (inputs, num_split), (weights, _) = (self._spent(stage, op) for op in (B, I, W))
        if not num_split:
            return full / num_full if num_full else 0.0, 0.0
        b, w = inputs / num_split, weights / num_split
        expected = (b + w) * (num_full + num_split)
        fitting = (full + inputs + weights) / expected if expected else 0.0
        return b * fitting, w * fitting


def _check_actions(schedule: Schedule, actions: Iterable[Span]) -> None:
    """actions: by rank, in order of time."""
    by_rank = {rank: list(row) for rank, row in groupby(actions, key=lambda span: span.rank)}
    for rank in range(schedule.stages):
        row = by_rank.pop(rank, [])
        if [(s.stage, s.op, s.microbatch_index) for s in row] != schedule.actions(rank):
            expected = f"the {len(schedule.orders[rank])} actions of {schedule.name} in their order"
            raise InputError.of(f"spans of rank {rank}", f"{len(row)} others", expected, REMEDY)
        if any(late.start < early.end for early, late in pairwise(row)):
            raise InputError.of(f"spans of rank {rank}", "two at a time", "one action after the other", REMEDY)
    if by_rank:
        raise InputError.of("spans", f"rank {min(by_rank)}", f"ranks below {schedule.stages}", REMEDY)


def _check_transfers(schedule: Schedule, handed_over: Iterable[Handover]) -> None:
    ranks: dict[int, int] = dict(enumerate(schedule.rank_of))
    for each in handed_over:
        target = each.stage + (1 if each.op == "F" else -1)
        if (each.source, each.target) != (ranks.get(each.stage), ranks.get(target)):
            raise InputError.of("transfers", str(each[:5]), "one from a chunk to its neighbour", REMEDY)


def chunk_costs(layers: Sequence[Layer], boundaries: Sequence[int], scale: float = 1.0) -> dict[str, list[float]]:
    """`forward`, `input_grad` and `weight_grad` of each chunk, times `scale`.

    Chunk k has the layers boundaries[k] to boundaries[k + 1] - 1.
    """
    chunks = [layers[begin:end] for begin, end in pairwise(boundaries)]
    return {name: [math.fsum(getattr(layer, name) for layer in chunk) * scale for chunk in chunks] for name in COSTS}


@dataclass(frozen=True)
class Bounds:
    """A measured makespan in parts that add up to it: work, fill and drain, transfers, and what they do not explain.

    The work is measured. The order of the schedule with the mean measured time of each action says how much longer
    the chain takes for filling and draining, and with the transfers of the prediction how much longer for those.
    """

    makespan: float
    work: float
    """Of the busiest rank: the slowest stage."""
    imbalance: float
    """How much of that is more than the mean of all ranks."""
    fill_and_drain: float
    """How much longer the chain takes than its busiest rank works."""
    transfers: float
    """How much longer again with transfers."""
    unexplained: float
    """The rest; negative where the run took less."""

    @property
    def bound(self) -> str:
        """What costs most, of what takes a tenth of the makespan or more; "work" where nothing does."""
        losses = {
            "slowest stage": self.imbalance,
            "fill and drain": self.fill_and_drain,
            "transfers": self.transfers,
            "unexplained": self.unexplained,
        }
        most = max(losses, key=lambda name: losses[name])
        return most if losses[most] >= SMALL * self.makespan else "work"


@dataclass(frozen=True)
class Comparison:
    """A prediction beside what was measured, both in one unit of time and of the same schedule."""

    predicted: Simulation
    measured: Measured

    @property
    def makespan_error(self) -> float:
        """(predicted - measured) / measured: below 0 where the run took longer."""
        return self.predicted.makespan / self.measured.makespan - 1

    @property
    def busy_share_error(self) -> float:
        """Predicted - measured, a difference of two shares of one."""
        return self.predicted.busy_share - self.measured.busy_share

    @cached_property
    def explained(self) -> Simulation:
        """The prediction with the mean measured time of each action in place of the predicted ones."""
        return simulate(self.measured.schedule, replace(self.measured.costs, transfer=self.predicted.costs.transfer))

    @cached_property
    def bounds(self) -> Bounds:
        """Where the measured makespan goes."""
        busy, explained = self.measured.busy, self.explained
        without = replace(explained.costs, transfer=(0.0,) * len(explained.costs.transfer))
        chain = simulate(explained.schedule, without).makespan
        return Bounds(
            makespan=self.measured.makespan,
            work=max(busy),
            imbalance=max(busy) - math.fsum(busy) / len(busy),
            fill_and_drain=chain - max(busy),
            transfers=explained.makespan - chain,
            unexplained=self.measured.makespan - explained.makespan,
        )

    @property
    def sentence(self) -> str:
        """What bounds the run, and what would help."""
        bounds, busy = self.bounds, self.measured.busy

        def share(part: float) -> str:
            return percent(part / bounds.makespan)

        return {
            "work": f"Work bounds the run: ranks are busy {percent(self.measured.busy_share)} of the time.",
            "slowest stage": (
                f"The slowest stage bounds the run: rank {busy.index(max(busy))} works {share(bounds.work)} of the "
                f"makespan, the mean rank {share(bounds.work - bounds.imbalance)}; a more even cut would help."
            ),
            "fill and drain": (
                f"Fill and drain bound the run: they take {share(bounds.fill_and_drain)} of the makespan; more "
                "microbatches per update would make it less."
            ),
            "transfers": (
                f"Transfers bound the run: they take {share(bounds.transfers)} of the makespan; larger microbatches or "
                "fewer chunks would hand over less often."
            ),
            "unexplained": (
                f"What no cost explains bounds the run: {share(bounds.unexplained)} of the makespan; ranks may share "
                "cores or links, and actions vary."
            ),
        }[bounds.bound]

    def document(self) -> dict[str, Any]:
        """The numbers as JSON can hold them, in the unit of the two."""
        bounds = self.bounds
        return {
            "makespan": {
                "predicted": self.predicted.makespan,
                "measured": self.measured.makespan,
                "error": self.makespan_error,
                "with_measured_times": self.explained.makespan,
            },
            "busy_share": {
                "predicted": self.predicted.busy_share,
                "measured": self.measured.busy_share,
                "error": self.busy_share_error,
            },
            "ranks": [
                {"predicted_work": predicted, "work": work, "waits": waits, "waits_for_transfers": underway}
                for predicted, work, (waits, underway) in zip(
                    self.predicted.busy, self.measured.busy, self.measured.waits, strict=True
                )
            ],
            "bounds": {
                "work": bounds.work,
                "imbalance": bounds.imbalance,
                "fill_and_drain": bounds.fill_and_drain,
                "transfers": bounds.transfers,
                "unexplained": bounds.unexplained,
                "bound": bounds.bound,
            },
            "sentence": self.sentence,
        }
