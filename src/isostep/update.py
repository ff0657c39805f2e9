"""THE update: count, local, vote, reduce, apply.

However a group is split over microbatches and replicas, the optimizer sees the gradient of

    sum over terms t of  c_t * (sum over the group of S_t) / (sum over the group of N_t)

because denominators are known for the whole group before the first backward, and only SUMS are reduced.
Nothing here knows process groups (see `comm.Comm`) or logs: an update returns what happened.
"""

from __future__ import annotations

import math
from functools import partial
from zlib import crc32

import torch
from torch import Tensor

from .comm import Pending, leaving
from .counting import counted_from, total_counts
from .engine import Attempt, Counted, Engine, Microbatch, Stages, Verdict, Work
from .errors import AbandonedError, InputError
from .memory import half, is_out_of_memory
from .objective import Batch, Objective, Outputs, to_device
from .randomness import FORWARD, LOADING, microbatch_key, preserved, seed_generators
from .result import Status, UpdateResult
from .units import Coverage, all_equal, derive_key, marks
from .verdicts import abandoned, check_coverage, final, raise_non_finite, raise_shared


def run(engine: Engine, group: Work) -> UpdateResult:
    """One attempted update: applied by every replica or by none.

    Raises AbandonedError, CoverageError, NonFiniteError, OutOfMemoryError or PeerError, and whatever model, objective
    or data raise; up to and including the vote, an error leaves parameters and optimizers untouched on every replica.
    """
    if engine.examples_that_fit is not None and group.divisible:
        group = group.limited(engine.examples_that_fit)
    halvings, tried = 0, group.largest_microbatch
    with preserved(engine.device), leaving(engine.comm):
        try:
            while (result := attempted(engine, group, tried, halvings)) is None:
                group = halved(engine, group)
                halvings += 1
        except AbandonedError:
            engine.stop.answer()
            raise
    if result.stop_requested:
        engine.stop.answer()
    return result


def attempted(engine: Engine, group: Work, tried: int, halvings: int) -> UpdateResult | None:
    """The five phases in order. None where memory ran out in phase 2: nothing has changed, replay the group."""
    engine.gradients.begin()
    try:
        microbatches, counting = count(engine, group)
        attempt = local(engine, group, microbatches, counting)
        counted = counting.result()
        verdict = vote(engine, group, attempt, counted)
        if verdict.out_of_memory:
            return None
        status: Status = "empty"
        norm = None
        rates = tuple(float(g["lr"]) for optimizer in engine.optimizers for g in optimizer.param_groups)
        if not counted.empty:
            reduce(engine, attempt, verdict)
            status, norm = apply(engine, group, attempt, counted, verdict)
    finally:
        engine.gradients.clear()
    return UpdateResult(
        status=status,
        epoch=group.epoch,
        group=group.index,
        positions=group.positions,
        counts=counted.counts,
        denominators=counted.denominators,
        coverage=group.coverage or (verdict.coverage if verdict.coverage.count else None),
        grad_norm=norm,
        learning_rates=rates,
        loss_scale=counted.loss_scale,
        examples_per_microbatch=group.largest_microbatch,
        examples_per_microbatch_tried=tried,
        halvings=halvings,
        stop_requested=verdict.stop_requested,
        _objective=engine.objective,
        _sums=verdict.sums,
        _device=engine.device,
    )


# --------------------------------------------------------------------------------------------- phase 1: count


class Counting:
    """Phase 1 under way: the counts travel while the first forward runs."""

    def __init__(self, engine: Engine, group: Work, pending: Pending, error: Exception | None, *, none: bool) -> None:
        self._engine, self._group, self._pending, self._error = engine, group, pending, error
        self._counted: Counted | None = None
        self.none_here = none
        """Whether this replica counted no target at all, so that the whole group may be empty."""

    def result(self) -> Counted:
        """The group's counts; waits for every replica, and takes replica 0's loss scale for all.

        Raises on all replicas if loading or counting failed or was cut short on one, or if they are not at the same
        group.
        """
        if self._counted is None:
            engine = self._engine
            (failed, cut_short, more, mark, mark_squared, scale, in_a_row, *values), _ = self._pending.wait()
            self._group.settle(more=more > 0)
            if failed:
                raise_shared(engine.comm, self._error, "count phase of the update")
            if not all_equal(mark, mark_squared, engine.comm.size):
                raise InputError.of(
                    "replicas", "different groups or different trainable parameters", "the same on all",
                    "give every replica the same data, seed, sizes and frozen parameters",
                )  # fmt: skip
            if cut_short:
                raise abandoned(self._group)
            if engine.loss_scale is not None:
                engine.loss_scale.scale = scale
                engine.loss_scale.applied_in_a_row = int(in_a_row)
            self._counted = counted_from(engine, values)
        return self._counted


def count(engine: Engine, group: Work) -> tuple[list[Microbatch], Counting]:
    """Load this replica's microbatches, count their targets, and send the counts on their way. No forward."""
    comm = engine.comm
    microbatches: list[Microbatch] = []
    totals = [0.0] * (len(engine.objective.terms) + 3)
    error = None

    def before_fetch(index: int, ids: tuple[int, ...]) -> None:
        if engine.stop.overdue:
            raise abandoned(group)
        seed_microbatch(engine, group, Coverage.of(ids), index, purpose=LOADING)

    try:
        microbatches = group.load(comm.replica, comm.replicas, before_fetch)
        totals = total_counts(engine.objective, microbatches)
    except Exception as failure:
        error, microbatches = failure, []
    scale = [0.0, 0.0]
    if engine.loss_scale is not None and comm.rank == 0:
        engine.loss_scale.refresh()
        scale = [engine.loss_scale.scale, engine.loss_scale.applied_in_a_row]
    examples = sum(microbatch.examples for microbatch in microbatches)
    cut_short = isinstance(error, AbandonedError)
    flags = [error is not None and not cut_short, cut_short, group.more]
    values = [*flags, *marks(common_to_all(engine, group)), *scale]
    counted = [len(microbatches), examples, *totals]
    pending = comm.sum("count", [*values, *(counted if comm.counts else [0.0] * len(counted))])
    none = not any(totals[: len(engine.objective.terms)])
    return microbatches, Counting(engine, group, pending, None if cut_short else error, none=none)


def common_to_all(engine: Engine, group: Work) -> int:
    """A key of what must be the same on every replica: the examples of the group, and what is trainable."""
    trainable = crc32(bytes(p.requires_grad for p in engine.gradients.parameters))
    coverage = group.coverage or Coverage()
    return derive_key(coverage.hash, coverage.count, trainable)


# --------------------------------------------------------------------------------------------- phase 2: local


def local(engine: Engine, group: Work, microbatches: list[Microbatch], counting: Counting) -> Attempt:
    """Run this replica's microbatches in order; gradients of weighted sums add up. No replica collective inside.

    Empties `microbatches` as it goes. Where reduction overlaps, the last backward is left to phase 4. Stops before
    the next microbatch, and after the wait of phase 1, where the grace of a stop request is over.
    """
    attempt = Attempt()
    index = 0
    if counting.none_here and counting.result().empty:  # nothing to run, but what was loaded is still judged
        attempt.coverage = sum((m.coverage for m in microbatches), attempt.coverage)
        return attempt
    if engine.stages is not None:
        with final(engine, "in a stage"):  # ranks of a replica wait for each other: a failure cannot wait for the vote
            run_in_stages(engine, engine.stages, group, microbatches, counting.result(), attempt)
            if engine.overlap:
                engine.comm.reduce_early(engine.gradients)
        return attempt
    while microbatches:
        attempt.abandoned = engine.stop.overdue
        if attempt.abandoned:
            break
        microbatch = microbatches.pop(0)
        with attempt.recording():
            batch = to_device(microbatch.batch, engine.device)
            outputs = forward(engine, group, attempt, microbatch, batch, index)
        counted = counting.result()
        attempt.abandoned = index == 0 and engine.stop.overdue  # that may have been a long wait for others
        if attempt.error is not None or attempt.abandoned:
            break
        with attempt.recording():
            loss = weighted_loss(engine.objective, counted, outputs, batch, attempt)
            if engine.overlap and not microbatches:
                attempt.last_loss = loss
            else:
                backward(loss)
                engine.gradients.part()
            del loss
        if attempt.error is not None:
            break
        del batch, outputs  # the next forward must not find them in memory
        index += 1
    return attempt


def run_in_stages(
    engine: Engine, stages: Stages, group: Work, microbatches: list[Microbatch], counted: Counted, attempt: Attempt
) -> None:
    """The same through stages that are ranks: what runs when is the schedule's business, and all of it does."""
    batches = [to_device(microbatch.batch, engine.device) for microbatch in microbatches]
    for microbatch in microbatches:
        attempt.coverage += microbatch.coverage
        attempt.ids.append(microbatch.ids)

    def before_layer(index: int, layer: int) -> None:
        seed_microbatch(engine, group, microbatches[index].coverage, index, FORWARD, layer)

    def loss(outputs: Outputs, batch: Batch) -> Tensor:
        return weighted_loss(engine.objective, counted, outputs, batch, attempt)

    stages.run(batches, before_layer, engine.precision, loss, engine.gradients.part)


def seed_microbatch(
    engine: Engine, group: Work, coverage: Coverage, index: int, purpose: int, layer: int | None = None
) -> None:
    """Seed the draws of one microbatch, or of one layer for it; see `randomness.microbatch_key`."""
    place = (group.index, engine.comm.replica, index)
    key = microbatch_key(engine.seed, purpose, group.epoch, coverage, place)
    seed_generators(engine.device, key if layer is None else derive_key(key, layer) >> 1)


def forward(engine: Engine, group: Work, attempt: Attempt, microbatch: Microbatch, batch: Batch, index: int) -> Outputs:
    """One forward with keyed draws; what went in is added to the coverage."""
    seed_microbatch(engine, group, microbatch.coverage, index, purpose=FORWARD)
    attempt.coverage += microbatch.coverage
    attempt.ids.append(microbatch.ids)
    with engine.precision():
        return engine.forward(engine.model, batch)


def weighted_loss(objective: Objective, counted: Counted, outputs: Outputs, batch: Batch, attempt: Attempt) -> Tensor:
    """This microbatch's share of the objective: sum of S_t * c_t / N_t, scaled. Remembers S_t.

    A term that is empty in the whole group is left out. c_t / N_t is a host float64, so a sum in float32 gets the
    correctly rounded quotient.
    """
    scale = 1.0 if counted.loss_scale is None else counted.loss_scale
    total: Tensor | None = None
    sums: list[Tensor | None] = []
    for term, factor in zip(objective.terms, counted.factors, strict=True):
        if factor is None:
            sums.append(None)
            continue
        value = term.sum_of(outputs, batch)
        sums.append(value.detach())
        share = value * (factor * scale)
        total = share if total is None else total + share
    assert total is not None, "an empty group has no loss"
    attempt.sums.append(sums)
    return total


def backward(loss: Tensor | None) -> None:
    """Add a microbatch's gradients to the sums. No loss, or one that no parameter reaches, adds nothing."""
    if loss is not None and loss.requires_grad:
        loss.backward()


# ---------------------------------------------------------------------------------------------- phase 3: vote


def vote(engine: Engine, group: Work, attempt: Attempt, counted: Counted) -> Verdict:
    """One small all-reduce: status, coverage, which parameters have gradients, and the loss sums.

    Raises on every replica if one failed or is to abandon the group, or if the ids that went into forward are not
    the group's.
    """
    error = attempt.error
    out_of_memory = error is not None and is_out_of_memory(error)
    seen = attempt.coverage if engine.comm.counts else Coverage()
    host = [
        out_of_memory,
        error is not None and not out_of_memory,
        engine.stop.requested,
        attempt.abandoned,
        seen.hash >> 32,
        seen.hash & 0xFFFFFFFF,
        seen.count,
        *engine.gradients.present(),
    ]
    sums = term_sums(attempt, len(engine.objective.terms), engine.device)
    (oom, failed, stop, abandon, high, low, num_seen, *present), sums = engine.comm.sum("vote", host, sums).wait()
    if failed:
        raise_shared(engine.comm, None if out_of_memory else error, "local phase of the update")
    if abandon:
        raise abandoned(group)
    total = Coverage((int(high) << 32) + int(low) & (1 << 64) - 1, int(num_seen))
    if not oom:
        check_coverage(group, total)
    assert sums is not None
    return Verdict(oom > 0, stop > 0, total, [p > 0 for p in present], sums)


def term_sums(attempt: Attempt, num_terms: int, device: torch.device) -> Tensor:
    """S_t over this replica's microbatches, added up in float64: [terms]."""
    sums = torch.zeros(num_terms, dtype=torch.float64, device=device)
    for t, values in enumerate(zip(*attempt.sums, strict=True)):
        if present := [value for value in values if value is not None]:
            sums[t] = torch.stack([value.to(device) for value in present]).to(torch.float64).sum()
    return sums


def halved(engine: Engine, group: Work) -> Work:
    """The group in microbatches of half the size, remembered for later groups. Same objective, more accumulation."""
    engine.examples_that_fit = half(group.largest_microbatch if group.divisible else None)
    return group.limited(engine.examples_that_fit)


# -------------------------------------------------------------------------------------------- phase 4: reduce


def reduce(engine: Engine, attempt: Attempt, verdict: Verdict) -> None:
    """Gradient sums over replicas, once, in static bucket order; overlapped with the last backward if asked for."""
    last_loss, attempt.last_loss = attempt.last_loss, None
    last_backward = partial(backward, last_loss) if engine.overlap else None
    with final(engine):
        engine.comm.reduce(engine.gradients, last_backward, verdict.present)


# --------------------------------------------------------------------------------------------- phase 5: apply


def apply(engine: Engine, group: Work, attempt: Attempt, counted: Counted, verdict: Verdict) -> tuple[Status, float]:
    """Judge, unscale, clip, and run optimizers and schedulers. Returns the status and the norm before clipping.

    After phase 4 every replica holds the same gradients, so what one finds in them is a verdict for all. An error of
    an optimizer or scheduler ends the run on every replica, since others may have applied the update.
    """
    gradients = engine.gradients
    scale = 1.0 if counted.loss_scale is None else counted.loss_scale
    with final(engine):
        norm = gradients.norm(engine.comm.everywhere) / scale
        finite = math.isfinite(norm)
        any_present = any(verdict.present) or any(gradients.present())
        if finite and any_present:
            gradients.scale(clip_factor(norm, engine.clip_norm) / scale)
            finite = engine.comm.agreed(gradients.hand_over())
    if not finite:
        if engine.loss_scale is None:
            raise_non_finite(engine, group, attempt, norm)
        engine.loss_scale.record(finite=False)
        return "skipped", norm
    if not any_present:
        raise InputError.of("gradients", "none", "a gradient for some parameter", "let the loss depend on the model")
    with final(engine):
        engine.intact = False
        for optimizer in engine.optimizers:
            optimizer.step()
        if engine.loss_scale is not None:
            engine.loss_scale.record(finite=True)
        for scheduler in engine.schedulers:
            scheduler.step()
        engine.intact = True
    return "applied", norm


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """min(1, clip_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ has it; 1 without clipping."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
