"""Where to put the weight backwards of a schedule: into its gaps, and where memory asks for one.

Given an order of forwards and input backwards on every rank, each runs as early as it can; before it, weight backwards
of the same rank fill the wait, after Qi et al. 2024, section 3.1 (heuristic algorithm). Transfers are taken as not
blocking: where they are, the orders are the same and only less good.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from .costs import Costs
from .ir import B, F, I, Schedule, W, encode

ROUNDING = 1e-9
"""Relative: sums of shares of activations are off by less."""


@dataclass(frozen=True)
class Rule:
    """How eagerly weight backwards are placed."""

    fill_short_gaps: bool
    """Also into a gap that is shorter than they are; else only where this rank has been idle the longest of all."""
    drain_first: bool
    """On the rank of the first stage, all of them before each input backward once its forwards are done."""


RULES = tuple(Rule(short, drain) for short in (False, True) for drain in (False, True))


def with_weights(schedule: Schedule, costs: Costs, memory_limit: float, rule: Rule) -> Schedule | None:
    """The schedule with full backwards split, and its weight backwards placed anew by the rule.

    memory_limit: in the unit of the costs' activations, held by no rank at any time. None where it cannot be kept,
    or the order of forwards and input backwards is a deadlock.
    """
    ranks = [_Rank.of(schedule, rank) for rank in range(schedule.stages)]
    placing = _Placing(schedule, costs, memory_limit, rule, ranks)
    return placing.result() if placing.run() else None


@dataclass
class _Rank:
    """A rank under way."""

    order: list[tuple[int, int, int]]
    """(op, stage, microbatch) of its forwards and input backwards."""
    forwards_left: int
    position: int = 0
    free: float = 0.0
    idle: float = 0.0
    held: float = 0.0
    pending: deque[tuple[int, int]] = field(default_factory=deque)
    """(stage, microbatch) of weight backwards that can run."""
    placed: list[tuple[int, int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> _Rank:
        codes = zip(*(part.tolist() for part in schedule.split(schedule.orders[rank])), strict=True)
        order = [(I if op == B else op, stage, microbatch) for op, stage, microbatch in codes if op != W]
        return cls(order, sum(op == F for op, _, _ in order))


@dataclass
class _Placing:
    schedule: Schedule
    costs: Costs
    memory_limit: float
    rule: Rule
    ranks: list[_Rank]

    def __post_init__(self) -> None:
        self.done: dict[tuple[int, int, int], float] = {}
        """When each action has ended."""
        self.most_idle = 0.0
        self.durations = self.costs.durations()
        takes, frees = self.costs.memory_changes(trains=True)
        self.takes, self.frees = takes.tolist(), frees.tolist()
        self.limit = self.memory_limit * (1 + ROUNDING)

    def run(self) -> bool:
        """Places everything; False where nothing can go on."""
        able = deque(range(len(self.ranks)))
        waiting: dict[tuple[int, int, int], int] = {}
        while able:
            index = able.popleft()
            rank = self.ranks[index]
            while rank.position < len(rank.order):
                need, delay = self._need(index, rank)
                if need is not None and need not in self.done:
                    waiting[need] = index
                    break
                arrival = 0.0 if need is None else self.done[need] + delay
                if not self._make_room(rank, arrival):
                    return False
                self._run_next(rank, arrival)
                if (freed := waiting.pop(rank.order[rank.position - 1], None)) is not None:
                    able.append(freed)
        for rank in self.ranks:
            if rank.position < len(rank.order):
                return False
            while rank.pending:
                self._run_weight(rank)
        return True

    def result(self) -> Schedule:
        """The schedule that was placed."""
        chunks, microbatches = self.schedule.num_chunks, self.schedule.num_microbatches
        orders = []
        for rank in self.ranks:
            ops, stages, indices = np.array(rank.placed).T
            orders.append(encode(0, 0, (ops * chunks + stages) * microbatches + indices, chunks, microbatches))
        return replace(self.schedule, orders=tuple(orders), overlapped=())

    def _need(self, index: int, rank: _Rank) -> tuple[tuple[int, int, int] | None, float]:
        """The action that the next one of a rank waits for, None for none, and the transfer from it."""
        op, stage, microbatch = rank.order[rank.position]
        ranks, last = self.schedule.rank_of, self.schedule.num_chunks - 1
        if op == F:
            if stage == 0:
                return None, 0.0
            before, link = stage - 1, stage - 1
        elif stage == last:
            return (F, stage, microbatch), 0.0
        else:
            before, link = stage + 1, stage
        return (op, before, microbatch), self.costs.transfer[link] if ranks[before] != index else 0.0

    def _make_room(self, rank: _Rank, arrival: float) -> bool:
        """Runs the weight backwards that come before the next action. False where memory does not suffice."""
        op, stage, _ = rank.order[rank.position]
        while rank.held + self.takes[op][stage] > self.limit:
            if not rank.pending:
                return False
            self._run_weight(rank)
        drains = self.rule.drain_first and op == I and stage == 0 and not rank.forwards_left
        while rank.pending and (drains or rank.free + self._next_weight(rank) <= arrival):
            self._run_weight(rank)
        gap = arrival - rank.free
        worst = self.rule.fill_short_gaps or gap > self.most_idle - rank.idle
        if rank.pending and gap > 0 and worst:
            self._run_weight(rank)
        return True

    def _run_next(self, rank: _Rank, arrival: float) -> None:
        op, stage, microbatch = rank.order[rank.position]
        start = max(rank.free, arrival)
        if rank.position:
            rank.idle += start - rank.free
            self.most_idle = max(self.most_idle, rank.idle)
        rank.free = start + self.durations[op][stage]
        rank.held += self.takes[op][stage] - self.frees[op][stage]
        rank.position += 1
        self.done[op, stage, microbatch] = rank.free
        rank.placed.append((op, stage, microbatch))
        if op == I:
            rank.pending.append((stage, microbatch))
        else:
            rank.forwards_left -= 1

    def _next_weight(self, rank: _Rank) -> float:
        return self.durations[W][rank.pending[0][0]]

    def _run_weight(self, rank: _Rank) -> None:
        stage, microbatch = rank.pending.popleft()
        rank.free += self.durations[W][stage]
        rank.held -= self.frees[W][stage]
        rank.placed.append((W, stage, microbatch))
