"""Whether an order of actions is a schedule: everything once, needs before what needs them, forwards in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..errors import InputError
from .ir import OPS, B, F, I, Schedule, W
from .simulate import HELD, held_at_most


@dataclass(frozen=True)
class Fault:
    """What is wrong at one place of an order."""

    rank: int
    position: int
    """Of the action in its rank's order; the length of the order where an action is missing."""
    got: str
    expected: str
    remedy: str


def check(schedule: Schedule, memory_limit: int | None = None) -> None:
    """Raises InputError, which names the place, at the first fault; see `first_fault`. Deadlocks: `simulate`."""
    fault = first_fault(schedule, memory_limit)
    if fault is not None:
        name = f"schedule, rank {fault.rank}, action {fault.position}"
        raise InputError.of(name, fault.got, fault.expected, fault.remedy)


def first_fault(schedule: Schedule, memory_limit: int | None = None) -> Fault | None:
    """The first fault of the first rank that has one, None where each rank's order is right in itself.

    Right: only actions of the rank's own stages, each once; for every microbatch a forward before a full backward, or
    before an input backward before a weight backward, or alone everywhere; forwards of a stage in microbatch order
    (torch pairs losses by it); and at most `memory_limit` chunk activations held.
    """
    trains = any((order >= schedule.num_chunks * schedule.num_microbatches).any() for order in schedule.orders)
    stages_of: list[list[int]] = [[] for _ in range(schedule.stages)]
    for stage, rank in enumerate(schedule.rank_of):
        stages_of[rank].append(stage)
    for rank in range(schedule.stages):
        fault = _fault_of_rank(schedule, rank, stages_of[rank], trains) or _too_much_held(schedule, rank, memory_limit)
        if fault is not None:
            return fault
    return None


def _fault_of_rank(schedule: Schedule, rank: int, expected_stages: Sequence[int], trains: bool) -> Fault | None:
    order = schedule.orders[rank]
    ops, stages, microbatches = schedule.split(order)
    foreign = ~np.isin(stages, expected_stages)
    if foreign.any():
        place = int(np.argmax(foreign))
        own = ", ".join(map(str, expected_stages))
        return _fault(schedule, rank, place, f"an action of stage {own}", "move it to the rank of its stage")
    places = {int(code): place for place, code in reversed(list(enumerate(order.tolist())))}
    for place, code in enumerate(order.tolist()):
        if places[code] != place:
            return _fault(schedule, rank, place, "each action once", "remove one of them")
    found = []
    for stage in expected_stages:
        for microbatch in range(schedule.num_microbatches):
            at = [
                places.get((op * schedule.num_chunks + stage) * schedule.num_microbatches + microbatch)
                for op in (F, B, I, W)
            ]
            fault = _fault_of_microbatch(schedule, rank, stage, microbatch, at, trains)
            if fault is not None:
                found.append(fault)
        fault = _out_of_order(schedule, rank, stage, ops, stages, microbatches)
        if fault is not None:
            found.append(fault)
    return min(found, key=lambda fault: fault.position, default=None)


def _fault_of_microbatch(
    schedule: Schedule, rank: int, stage: int, microbatch: int, at: list[int | None], trains: bool
) -> Fault | None:
    """at: where the rank has the F, B, I and W of this microbatch on this stage, None for nowhere."""
    forward, full, inputs, weights = at
    name, end = f"of microbatch {microbatch} on stage {stage}", len(schedule.orders[rank])
    if forward is None:
        return Fault(rank, end, "no action", f"a forward {name}", f"add {stage}F{microbatch}")
    if full is not None and (inputs is not None or weights is not None):
        extra = inputs if inputs is not None else weights
        assert extra is not None
        return _fault(schedule, rank, max(full, extra), f"one kind of backward {name}", "take B, or I and W")
    if full is None and inputs is None and weights is None:
        if not trains:
            return None
        return Fault(rank, end, "no action", f"a backward {name}", f"add {stage}B{microbatch}")
    if full is None and (inputs is None or weights is None):
        missing = "I" if inputs is None else "W"
        return Fault(rank, end, "no action", f"{missing} {name}", f"add {stage}{missing}{microbatch}")
    chain = [place for place in (forward, full, inputs, weights) if place is not None]
    for before, after in pairwise(chain):
        if after < before:
            needed = schedule.actions(rank)[before]
            return _fault(schedule, rank, after, f"{needed} before it", f"move it behind {needed}")
    return None


def _out_of_order(
    schedule: Schedule, rank: int, stage: int, ops: np.ndarray, stages: np.ndarray, microbatches: np.ndarray
) -> Fault | None:
    mine = np.flatnonzero((ops == F) & (stages == stage))
    wrong = np.flatnonzero(microbatches[mine] != np.arange(len(mine)))
    if not len(wrong):
        return None
    expected = f"forwards of stage {stage} in microbatch order, here {stage}F{wrong[0]}"
    return _fault(schedule, rank, int(mine[wrong[0]]), expected, "put them in order")


def _too_much_held(schedule: Schedule, rank: int, memory_limit: int | None) -> Fault | None:
    if memory_limit is None or held_at_most(schedule, rank) <= memory_limit:
        return None
    ops = schedule.split(schedule.orders[rank])[0]
    held = np.cumsum(HELD[ops])
    place = int(np.argmax(held > memory_limit))
    expected = f"at most {memory_limit} activations held, this is one more"
    return _fault(schedule, rank, place, expected, "raise the memory limit, or move a backward forward")


def _fault(schedule: Schedule, rank: int, position: int, expected: str, remedy: str) -> Fault:
    ops, stages, microbatches = schedule.split(schedule.orders[rank][position : position + 1])
    return Fault(rank, position, f"{stages[0]}{OPS[ops[0]]}{microbatches[0]}", expected, remedy)
