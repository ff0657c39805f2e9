"""From the logs of all ranks to updates: which loss calls fed each, by what factor they reached the gradient. No torch.

A token's weight in an update is the gradient that arrived at it times the factor with which its backward pass is in the
gradient that the optimizer applied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .records import Backward, Call, Forward, Log, Step, ZeroGrad
from .solve import Factors, factors

JOINTLY = 1e-3
"""Residual up to which several optimizers of one update are explained as one."""

NOTHING = 1e-3
"""A factor below this share of the largest is none."""


@dataclass
class RankUpdate:
    """One update as one rank lived it: everything from the first forward pass after the last update on."""

    events: list[Any] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)

    @property
    def applied(self) -> bool:
        return any(step.applied for step in self.steps)


@dataclass
class Portion:
    """The tokens of one loss call in one microbatch, and the factor of its backward pass."""

    rank: int
    microbatch: int
    call: Call
    backward: Backward
    factor: float
    term: int = 0

    @property
    def weight(self) -> float:
        """Mean weight of its tokens in the gradient applied."""
        return self.call.weight * self.factor

    @property
    def denominator(self) -> float:
        """What its mean divides by, or would."""
        return self.call.denominator

    @property
    def even(self) -> bool:
        """All its tokens weigh the same."""
        largest = max(abs(self.call.min), abs(self.call.max))
        return abs(self.call.max - self.call.min) <= 2e-3 * largest


@dataclass
class UpdateView:
    """One update over all ranks."""

    index: int
    ranks: Sequence[RankUpdate]
    portions: list[Portion] = field(default_factory=list)
    microbatches: list[int] = field(default_factory=list)
    """Per rank: those whose gradient reached the update."""
    residual: float = float("nan")
    stale: float = 0.0
    synchronised: bool = True
    explained: bool = True
    """The applied gradient is a combination of what was seen."""
    apart: bool = False
    """Its optimizers hold the same microbatch at different factors."""
    low_precision: bool = False
    kept: float = 1.0
    """Where gradients are summed in low precision: how much of the true sum, or mean over replicas, arrived."""

    @property
    def applied(self) -> bool:
        return any(rank.applied for rank in self.ranks)

    @property
    def tokens(self) -> int:
        """Supervised tokens of the loss term that has most."""
        of_terms: dict[int, int] = defaultdict(int)
        for portion in self.portions:
            of_terms[portion.term] += portion.call.tokens
        return max(of_terms.values(), default=0)

    @property
    def scale(self) -> float | None:
        """The loss scale, by the first rank."""
        return next((step.loss_scale for rank in self.ranks for step in rank.steps), None)


@dataclass
class Timeline:
    """All updates, and what came after the last one."""

    updates: list[UpdateView]
    rest: list[RankUpdate]
    """Per rank: what was run and reached no update before the script ended."""


def split(log: Log) -> tuple[list[RankUpdate], RankUpdate]:
    """One rank's events, cut where another forward or backward pass begins after an optimizer call."""
    updates, current = [], RankUpdate()
    for event in log.events:
        if isinstance(event, Forward | Backward) and current.steps:
            updates.append(current)
            current = RankUpdate()
        current.events.append(event)
        if isinstance(event, Step):
            current.steps.append(event)
        elif isinstance(event, Backward):
            current.backwards.append(event)
    if current.steps:
        updates.append(current)
        current = RankUpdate()
    return updates, current


def timeline(logs: Sequence[Log]) -> Timeline:
    """All ranks' logs as updates with weights. The k-th update of a rank belongs to the k-th of every other."""
    ranks = [split(log) for log in logs]
    count = min(len(updates) for updates, _ in ranks)
    for k in range(count):
        _join_parts([updates[k] for updates, _ in ranks])
    views = [UpdateView(k, [updates[k] for updates, _ in ranks]) for k in range(count)]
    candidates = [_candidates(updates[:count]) for updates, _ in ranks]
    solved: dict[tuple[int, int], list[Factors]] = {}
    for view in views:
        optimizers = list(dict.fromkeys(step.optimizer for rank in view.ranks for step in rank.steps if step.applied))
        together = _join_optimizers(view.index, optimizers, candidates)
        if together is not None:
            answers = _solve(view, together, candidates)
            if all(answer.residual <= JOINTLY for answer in answers):
                solved[view.index, together] = answers
                continue
        for optimizer in optimizers:
            solved[view.index, optimizer] = _solve(view, optimizer, candidates)
    used = _used(solved, candidates)
    shared = _shared_targets([updates for updates, _ in ranks])
    for view in views:
        _fill(view, solved, candidates, used, shared)
    return Timeline(views, [rest for _, rest in ranks])


def _join_parts(ranks: Sequence[RankUpdate]) -> None:
    """Give every rank the sketch of the whole gradient where each has that of its part."""
    for steps in zip(*(rank.steps for rank in ranks), strict=False):
        if all(step.in_parts and step.sketch is not None for step in steps):
            for name in ("sketch", "final"):
                whole = np.sum([getattr(step, name) for step in steps], axis=0)
                for step in steps:
                    setattr(step, name, whole)


@dataclass
class _Candidates:
    """The backward passes of one rank that may be in one optimizer's gradient."""

    live: list[Backward]
    dead: list[Backward]
    """Cleared before the optimizer ran. Those of earlier evaluations of a closure are nowhere."""
    stale: np.ndarray | None
    """The gradient of the update before, if nobody cleared it."""
    step: Step


def _candidates(updates: Sequence[RankUpdate]) -> dict[tuple[int, int], _Candidates]:
    """By (update, optimizer)."""
    found: dict[tuple[int, int], _Candidates] = {}
    live: dict[int, list[Backward]] = defaultdict(list)
    dead: dict[int, list[Backward]] = defaultdict(list)
    before: dict[int, np.ndarray | None] = {}
    for index, update in enumerate(updates):
        for event in update.events:
            if isinstance(event, Backward):
                for optimizer in event.sketches:
                    live[optimizer].append(event)
            elif isinstance(event, ZeroGrad):
                for optimizer in event.optimizers:
                    dead[optimizer] += live.pop(optimizer, [])
                    before.pop(optimizer, None)
            elif isinstance(event, Step):
                key = event.optimizer
                passes = live.pop(key, [])
                own = [b for b in passes if b.index >= event.first_backward]
                cleared = [b for b in dead.pop(key, []) if b.index >= event.first_backward]
                found[index, key] = _Candidates(own, cleared, before.get(key), event)
                before[key] = event.final
    return found


def _join_optimizers(
    index: int, optimizers: Sequence[int], candidates: list[dict[tuple[int, int], _Candidates]]
) -> int | None:
    """Several optimizers that ran in one update taken as one, under a number of its own; None where there is but one.

    A factor then stands on all their parameters: one that holds only a few tells little by itself.
    """
    if len(optimizers) < 2:
        return None
    number = -1 - index
    for of_rank in candidates:
        parts = [of_rank.get((index, optimizer)) for optimizer in optimizers]
        if any(part is None or part.step.sketch is None for part in parts):
            return None
        known = [part for part in parts if part is not None]
        live = {b.index: b for part in known for b in part.live}
        dead = {b.index: b for part in known for b in part.dead if b.index not in live}
        if any(b.index in live for part in known for b in part.dead):
            return None  # cleared for one, and not for another
        nothing = np.zeros_like(known[0].step.sketch)
        for backward in live.values():
            alive = [any(b is backward for b in part.live) for part in known]
            backward.sketches[number] = np.concatenate(
                [backward.sketches[o] if here else nothing for o, here in zip(optimizers, alive, strict=True)]
            )
        for backward in dead.values():
            backward.sketches[number] = np.concatenate([backward.sketches.get(o, nothing) for o in optimizers])
        stale = None
        if any(part.stale is not None for part in known):
            stale = np.concatenate([nothing if part.stale is None else part.stale for part in known])
        sketches = [part.step.sketch for part in known if part.step.sketch is not None]
        step = replace(
            known[0].step, sketch=np.concatenate(sketches), low_precision=any(p.step.low_precision for p in known)
        )
        of_rank[index, number] = _Candidates(list(live.values()), list(dead.values()), stale, step)
    return number


def _solve(view: UpdateView, optimizer: int, candidates: list[dict[tuple[int, int], _Candidates]]) -> list[Factors]:
    """Per rank: the factors of all ranks' live passes, then of the dead ones, in the order of `_passes`."""
    key = view.index, optimizer
    found = []
    for rank, of_rank in enumerate(candidates):
        here = of_rank.get(key)
        if here is None or here.step.sketch is None:
            found.append(Factors(np.full(len(_passes(candidates, key)), np.nan), 0.0, float("nan")))
            continue
        live = [(r, b) for r, b, alive in _passes(candidates, key) if alive]
        dead = [(r, b) for r, b, alive in _passes(candidates, key) if not alive]
        options = (here.step.sketch, rank, here.stale, here.step.low_precision)
        answer = _factors(live, optimizer, *options)
        if dead and not answer.residual <= 1e-2:
            fuller = _factors(live + dead, optimizer, *options)
            if fuller.residual < 0.1 * answer.residual:
                found.append(fuller)
                continue
        found.append(Factors(np.concatenate([answer.values, np.zeros(len(dead))]), answer.stale, answer.residual))
    return found


def _factors(
    passes: list[tuple[int, Backward]], optimizer: int, applied: np.ndarray, own: int, stale: np.ndarray | None,
    low: bool,
) -> Factors:  # fmt: skip
    return factors(applied, [b.sketches[optimizer] for _, b in passes], [r for r, _ in passes], own, stale, low)


def _passes(
    candidates: list[dict[tuple[int, int], _Candidates]], key: tuple[int, int]
) -> list[tuple[int, Backward, bool]]:
    """(rank, backward pass, alive) of all ranks, live ones first."""
    here = [(rank, of_rank[key]) for rank, of_rank in enumerate(candidates) if key in of_rank]
    live = [(rank, backward, True) for rank, found in here for backward in found.live]
    return live + [(rank, backward, False) for rank, found in here for backward in found.dead]


def _used(
    solved: dict[tuple[int, int], list[Factors]], candidates: list[dict[tuple[int, int], _Candidates]]
) -> dict[tuple[int, int], set[int]]:
    """By (rank, backward index): the updates that it reached."""
    used: dict[tuple[int, int], set[int]] = defaultdict(set)
    for key, of_ranks in solved.items():
        for position, (rank, backward, alive) in enumerate(_passes(candidates, key)):
            values = np.array([found.values[position] for found in of_ranks])
            largest = max(np.nan_to_num(np.abs(found.values)).max(initial=0) for found in of_ranks)
            here = np.nan_to_num(np.abs(values)).max(initial=0)
            if (alive and np.isnan(values).any()) or here > NOTHING * largest:
                used[rank, backward.index].add(key[0])
    return used


def _fill(
    view: UpdateView,
    solved: dict[tuple[int, int], list[Factors]],
    candidates: list[dict[tuple[int, int], _Candidates]],
    used: dict[tuple[int, int], set[int]],
    shared: set[int],
) -> None:
    """Give an update its portions and what is known of its gradient."""
    own: dict[tuple[int, int], float] = {}
    passes: dict[tuple[int, int], Backward] = {}
    residuals: list[float] = []
    inputs = [_inputs(rank) for rank in view.ranks]
    for key in sorted((k for k in solved if k[0] == view.index), key=lambda k: -_filled(k, candidates)):
        index, of_ranks = key[0], solved[key]
        listed = _passes(candidates, key)
        table = np.stack([found.values for found in of_ranks]) if listed else np.zeros((len(of_ranks), 0))
        steps = [of_rank[key].step for of_rank in candidates if key in of_rank]
        view.low_precision |= any(step.low_precision for step in steps)
        residuals = residuals or [found.residual for found in of_ranks]  # of the optimizer that tells most
        view.stale = max([view.stale, *(abs(found.stale) for found in of_ranks)])
        view.synchronised &= _agree(table, [step.sketch for step in steps], view.low_precision)
        for position, (rank, backward, _) in enumerate(listed):
            reached = used.get((rank, backward.index), set())
            dropped = _dropped(rank, steps, listed) or _replayed(backward, rank, listed, shared, inputs[rank])
            if index not in reached and (reached or dropped):
                continue
            passes[rank, backward.index] = backward
            value = table[rank, position] if rank < len(table) else np.nan
            known = own.get((rank, backward.index), np.nan)
            if not np.isfinite(known):
                own[rank, backward.index] = value
            elif np.isfinite(value):
                view.apart |= bool(abs(value - known) > 1e-3 * max(abs(value), abs(known)))
    view.residual = max((r for r in residuals if np.isfinite(r)), default=float("nan"))
    if view.low_precision:
        view.kept = float(np.median([value * len(view.ranks) for value in own.values()])) if own else 1.0
    _add_portions(view, passes, own)


def _filled(key: tuple[int, int], candidates: list[dict[tuple[int, int], _Candidates]]) -> int:
    """Numbers that an optimizer's sketches hold: how much they can tell."""
    steps = [of_rank[key].step for of_rank in candidates if key in of_rank]
    return max((int(np.count_nonzero(step.sketch)) for step in steps if step.sketch is not None), default=0)


def _agree(table: np.ndarray, sketches: Sequence[np.ndarray | None], low: bool) -> bool:
    """All ranks applied the same gradient."""
    known = [sketch for sketch in sketches if sketch is not None]
    if len(known) < 2 or len(known) != len(table):
        return True
    largest = max(float(np.linalg.norm(sketch)) for sketch in known)
    apart = max(float(np.linalg.norm(sketch - known[0])) for sketch in known)
    return not apart > (1e-2 if low else 1e-4) * largest


def _dropped(rank: int, steps: Sequence[Step], listed: Sequence[tuple[int, Backward, bool]]) -> bool:
    """A group with a loss that is not finite was thrown away, and a whole one run after it."""
    live = sum(alive for other, _, alive in listed if other == rank)
    return any(step.broken for step in steps) and 2 * live >= sum(other == rank for other, _, _ in listed)


def _shared_targets(ranks: Sequence[Sequence[RankUpdate]]) -> set[int]:
    """Hashes of targets that come in several updates or on several ranks: they tell no data apart."""
    seen: set[int] = {0}
    shared: set[int] = {0}
    for updates in ranks:
        for update in updates:
            here = {call.targets for backward in update.backwards for call in backward.calls}
            shared |= here & seen
            seen |= here
    return shared


def _replayed(
    backward: Backward,
    rank: int,
    listed: Sequence[tuple[int, Backward, bool]],
    shared: set[int],
    inputs: dict[int, tuple[int, ...]],
) -> bool:
    """A pass that reached nothing, over what a later pass of the update ran again (a probe or a rehearsal).

    The same inputs, by their hashes in each forward pass of this rank, or the same targets where they tell data apart.
    """
    targets = {call.targets for call in backward.calls}
    fed = {inputs.get(call.forward, ()) for call in backward.calls}
    for other_rank, other, alive in listed:
        if not alive or other_rank != rank or other.index <= backward.index:
            continue
        again = {inputs.get(call.forward, ()) for call in other.calls}
        if fed and () not in fed and fed <= again:
            return True
        if targets and not targets & shared and targets <= {call.targets for call in other.calls}:
            return True
    return False


def _inputs(update: RankUpdate) -> dict[int, tuple[int, ...]]:
    """By forward pass: the hashes of its examples; nothing where one says too little."""
    forwards = [event for event in update.events if isinstance(event, Forward) and event.hashes is not None]
    return {event.index: tuple(map(int, event.hashes)) for event in forwards if event.hashes.all()}  # pyright: ignore


def _add_portions(view: UpdateView, passes: dict[tuple[int, int], Backward], own: dict[tuple[int, int], float]) -> None:
    finite = [value for value in own.values() if np.isfinite(value) and value]
    common = float(np.median(finite)) if finite else float("nan")
    for rank in range(len(view.ranks)):
        number, live = -1, 0
        for (of_rank, _), backward in sorted(passes.items(), key=lambda item: item[0]):
            if of_rank != rank:
                continue
            factor = own[rank, backward.index]
            if not np.isfinite(factor):
                empty = all(call.tokens == 0 for call in backward.calls)
                view.explained &= empty
                factor = common
            forwards = sorted({call.forward for call in backward.calls})
            for call in sorted(backward.calls, key=lambda call: call.order):
                microbatch = number + 1 + forwards.index(call.forward)
                view.portions.append(Portion(rank, microbatch, call, backward, factor))
            number += max(1, len(forwards))
            live += max(1, len(forwards)) if factor else 0
        view.microbatches.append(live)
