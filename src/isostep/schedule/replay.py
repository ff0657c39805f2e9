"""When every action of a schedule starts and ends: the longest path over the graph of actions.

An action waits for the one before it on its rank, and for what it needs: a forward for the forward of the stage
before, a backward for the backward of the stage after, the first backward for its own forward, a weight backward for
its input backward. A forward overlapped with a backward waits for what either needs, and is sent on after both, as
torch's runtime does it. All ranks advance together, one action each a round, in array operations over the ranks; the
number of rounds is that of the longest rank plus its waiting, so the time is linear in the number of actions where
ranks are busy most of the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import InputError
from .costs import Costs
from .ir import OPS, B, F, I, Schedule, W


@dataclass(frozen=True)
class Replay:
    """Times of all actions, rank after rank in order; between ranks stands one place that is no action."""

    schedule: Schedule
    first: np.ndarray
    """int64 (P + 1,): where each rank's actions begin in the arrays below; those of rank r end at first[r + 1] - 1."""
    kinds: np.ndarray
    """int32: op * P * v + stage of each action; looks up the tables of durations and delays."""
    needs: np.ndarray
    """int32: the event that each action waits for."""
    events: np.ndarray
    """int32: the event that each action brings about."""
    starts: np.ndarray
    """float64: when each action starts."""
    paired: np.ndarray | None
    """int8: 1 for a forward that is overlapped with the action behind it; None where there is none."""
    durations: np.ndarray
    """float64 by kind."""
    delays: np.ndarray
    """float64 by kind: the transfer between an action and what it needs."""
    times: np.ndarray
    """float64 by event: when it happened."""

    def rank(self, rank: int) -> slice:
        """The places of one rank's actions."""
        return slice(int(self.first[rank]), int(self.first[rank + 1]) - 1)

    def ends(self, rank: int) -> np.ndarray:
        """When each action of one rank ends; float64, in order."""
        places = self.rank(rank)
        return self.starts[places] + self.durations[self.kinds[places]]

    @cached_property
    def place_of(self) -> np.ndarray:
        """int64 by event: the place of the action that brings it about, -1 for none."""
        places = np.full(len(self.times), -1)
        for rank in range(self.schedule.stages):
            part = self.rank(rank)
            places[self.events[part]] = np.arange(part.start, part.stop)
        return places


def replay(schedule: Schedule, costs: Costs) -> Replay:
    """Starts every action as early as its rank and its needs allow. Raises InputError where none can go on."""
    first, kinds, needs, events = _graph(schedule)
    durations = np.array([*costs.durations(), [0.0] * schedule.num_chunks]).reshape(-1)
    delays, holds = _transfers(schedule, costs)
    slots = _Slots.of(schedule)
    times = np.full(slots.count, np.inf)
    times[slots.begin] = 0.0
    starts = np.zeros(len(kinds))
    paired = _paired(schedule, first)
    at = first[:-1].copy()
    free = np.zeros(schedule.stages)
    left = schedule.size
    while left:
        kind = kinds[at]
        start = np.maximum(times[needs[at]] + delays[kind], free)
        behind = 0.0  # how long after its end the event of an action comes about
        if paired is not None:
            second = at + paired[at]
            start = np.maximum(times[needs[second]] + delays[kinds[second]], start)
            behind = durations[kinds[second]] * paired[at]
        end = start + durations[kind]
        starts[at] = start
        times[events[at]] = end + behind
        ready = end < np.inf
        if holds is None:
            np.copyto(free, end, where=ready)
        elif paired is None:
            np.copyto(free, end + holds[kind], where=ready)
        else:  # both of a pair are sent after both
            sent = holds[kind] + holds[kinds[at - 1]] * paired[at - 1]
            np.copyto(free, end + sent * (1 - paired[at]), where=ready)
        at += ready
        done = int(np.count_nonzero(ready))
        if not done:
            raise _deadlock(schedule, at - first[:-1])
        left -= done
    return Replay(schedule, first, kinds, needs, events, starts, paired, durations, delays, times)


@dataclass(frozen=True)
class _Slots:
    """Numbers of events: forwards, backwards for the inputs, the beginning, what never comes, what nobody awaits."""

    backward: int
    begin: int
    never: int
    nobody: int
    count: int

    @classmethod
    def of(cls, schedule: Schedule) -> _Slots:
        size = schedule.num_chunks * schedule.num_microbatches
        return cls(size, 2 * size, 2 * size + 1, 2 * size + 2, 2 * size + 3)


def _graph(schedule: Schedule) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`first`, `kinds`, `needs` and `events` of a Replay."""
    chunks, microbatches, slots = schedule.num_chunks, schedule.num_microbatches, _Slots.of(schedule)
    last_kind = len(OPS) * chunks
    bases = np.empty((2, len(OPS) + 1, chunks), np.int64)  # of needs and of events, by op and stage
    index = np.arange(chunks) * microbatches
    bases[0, F] = np.concatenate([[slots.begin], index[:-1]])
    bases[0, [B, I]] = np.concatenate([slots.backward + index[1:], index[-1:]])
    bases[0, W] = slots.backward + index
    bases[1, F], bases[1, [B, I]], bases[1, W] = index, slots.backward + index, slots.nobody
    bases[0, -1], bases[1, -1] = slots.never, slots.nobody
    shared = {slots.begin, slots.never, slots.nobody}  # events that are not one per microbatch
    bases = bases.reshape(2, -1).astype(np.int32)
    steps = (~np.isin(bases, list(shared))).astype(np.int32)
    first = np.concatenate([[0], np.cumsum([len(order) + 1 for order in schedule.orders])])
    kinds = np.full(first[-1], last_kind, np.int32)
    needs = np.full(first[-1], slots.never, np.int32)
    events = np.full(first[-1], slots.nobody, np.int32)
    for rank, order in enumerate(schedule.orders):
        part = slice(first[rank], first[rank + 1] - 1)
        kind, microbatch = np.divmod(order, np.int32(microbatches))
        kinds[part] = kind
        needs[part] = bases[0][kind] + steps[0][kind] * microbatch
        events[part] = bases[1][kind] + steps[1][kind] * microbatch
    return first, kinds, needs, events


def _paired(schedule: Schedule, first: np.ndarray) -> np.ndarray | None:
    if not schedule.overlapped:
        return None
    paired = np.zeros(first[-1], np.int8)
    for rank, places in enumerate(schedule.overlapped):
        paired[first[rank] + np.array(sorted(places), np.int64)] = 1
    return paired


def _transfers(schedule: Schedule, costs: Costs) -> tuple[np.ndarray, np.ndarray | None]:
    """By kind: how long after its need an action can start; how long a rank is held after an action (None: never)."""
    ranks = schedule.rank_of
    links = [c if ranks[k] != ranks[k + 1] else 0.0 for k, c in enumerate(costs.transfer)]
    delays = np.zeros((len(OPS) + 1, schedule.num_chunks))
    delays[F, 1:] = links
    delays[B, :-1] = delays[I, :-1] = links
    if not costs.blocking:
        return delays.reshape(-1), None
    holds = np.zeros_like(delays)
    holds[F, :-1] = links
    holds[B, 1:] = holds[I, 1:] = links
    return delays.reshape(-1), holds.reshape(-1)


def _deadlock(schedule: Schedule, done: np.ndarray) -> InputError:
    """What the first waiting ranks wait for."""
    waiting = []
    for rank, order in enumerate(schedule.orders):
        if done[rank] < len(order):
            ops, stages, microbatches = schedule.split(order[int(done[rank]) : int(done[rank]) + 1])
            action = f"{stages[0]}{OPS[ops[0]]}{microbatches[0]}"
            waiting.append(f"rank {rank} at {action}")
    shown = ", ".join(waiting[:3]) + (f" and {len(waiting) - 3} more" if len(waiting) > 3 else "")
    expected = "an order in which some rank can always go on"
    return InputError.of("schedule", f"a deadlock: {shown}", expected, "move what they wait for forward")
