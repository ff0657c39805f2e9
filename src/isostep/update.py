"""THE update: count, local, vote, reduce, apply.

However a group is split over microbatches and replicas, the optimizer sees the gradient of

    sum over terms t of  c_t * (sum over the group of S_t) / (sum over the group of N_t)

because denominators are known for the whole group before the first backward, and only SUMS are reduced.
Nothing here knows process groups (see `comm.Comm`) or logs: an update returns what happened.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NoReturn
from zlib import crc32

import torch
from torch import Tensor

from .comm import Comm, Pending, leaving
from .engine import Attempt, Counted, Engine, Microbatch, Verdict, Work
from .errors import CoverageError, InputError, NonFiniteError, OutOfMemoryError, PeerError
from .ledger import Counts, format_hash
from .memory import is_out_of_memory
from .objective import Batch, Objective, Outputs, to_device
from .randomness import FORWARD, LOADING, microbatch_key, preserved, seed_generators
from .result import Status, UpdateResult
from .units import Coverage, all_equal, derive_key, marks


def run(engine: Engine, group: Work) -> UpdateResult:
    """One attempted update: applied by every replica or by none.

    Raises CoverageError, NonFiniteError, OutOfMemoryError or PeerError, and whatever model, objective or data raise;
    up to and including the vote, an error leaves parameters and optimizers untouched on every replica.
    """
    if engine.examples_that_fit is not None and group.divisible:
        group = group.limited(engine.examples_that_fit)
    halvings = 0
    with preserved(engine.device), leaving(engine.comm):
        while (result := attempted(engine, group, halvings)) is None:
            group = halved(engine, group)
            halvings += 1
    engine.stop_requested = engine.stop_requested and not result.stop_requested
    return result


def attempted(engine: Engine, group: Work, halvings: int) -> UpdateResult | None:
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
            status, norm = apply(engine, group, attempt, counted)
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

        Raises on all replicas if loading or counting failed on one, or if they are not at the same group.
        """
        if self._counted is None:
            engine = self._engine
            (failed, more, mark, mark_squared, scale, applied_in_a_row, *values), _ = self._pending.wait()
            self._group.settle(more=more > 0)
            if failed:
                raise_shared(engine.comm, self._error, "count phase of the update")
            if not all_equal(mark, mark_squared, engine.comm.replicas):
                raise InputError.of(
                    "replicas", "different groups or different trainable parameters", "the same on all",
                    "give every replica the same data, seed, sizes and frozen parameters",
                )  # fmt: skip
            if engine.loss_scale is not None:
                engine.loss_scale.scale = scale
                engine.loss_scale.applied_in_a_row = int(applied_in_a_row)
            self._counted = counted_from(engine, values)
        return self._counted


def count(engine: Engine, group: Work) -> tuple[list[Microbatch], Counting]:
    """Load this replica's microbatches, count their targets, and send the counts on their way. No forward."""
    comm = engine.comm
    microbatches: list[Microbatch] = []
    totals = [0.0] * (len(engine.objective.terms) + 3)
    error = None

    def before_fetch(index: int, ids: tuple[int, ...]) -> None:
        seed_microbatch(engine, group, Coverage.of(ids), index, purpose=LOADING)

    try:
        microbatches = group.load(comm.replica, comm.replicas, before_fetch)
        totals = total_counts(engine.objective, microbatches)
    except Exception as failure:
        error, microbatches = failure, []
    scale = [0.0, 0.0]
    if engine.loss_scale is not None and comm.replica == 0:
        engine.loss_scale.refresh()
        scale = [engine.loss_scale.scale, engine.loss_scale.applied_in_a_row]
    examples = sum(microbatch.examples for microbatch in microbatches)
    values = [error is not None, group.more, *marks(common_to_all(engine, group)), *scale]
    pending = comm.sum("count", [*values, len(microbatches), examples, *totals])
    none = not any(totals[: len(engine.objective.terms)])
    return microbatches, Counting(engine, group, pending, error, none=none)


def common_to_all(engine: Engine, group: Work) -> int:
    """A key of what must be the same on every replica: the examples of the group, and what is trainable."""
    trainable = crc32(bytes(p.requires_grad for p in engine.gradients.parameters))
    coverage = group.coverage or Coverage()
    return derive_key(coverage.hash, coverage.count, trainable)


def total_counts(objective: Objective, microbatches: Sequence[Microbatch]) -> list[float]:
    """N_t of every term, then supervised, total and padding tokens, summed over this replica's microbatches.

    Integers are exact up to 2**53. One synchronisation if counts are on a device, none if batches are on the host.
    """
    totals = [0.0] * (len(objective.terms) + 3)
    on_device: dict[int, list[Tensor]] = {}
    for microbatch in microbatches:
        for i, value in enumerate(objective.counts(microbatch.batch)):
            if isinstance(value, Tensor) and value.device.type != "cpu":
                on_device.setdefault(i, []).append(value.to(torch.float64))
            else:
                totals[i] += float(value)
    if on_device:
        sums = torch.stack([torch.stack(values).sum() for values in on_device.values()]).tolist()
        for i, value in zip(on_device, sums, strict=True):
            totals[i] += value
    for name, total in zip(objective.names, totals, strict=False):
        if not (math.isfinite(total) and total >= 0):
            raise InputError.of(f"count of {name}", total, "a finite number of 0 or more", "mend its count_fn")
    return totals


def counted_from(engine: Engine, values: Sequence[float]) -> Counted:
    """Denominators and counters from sums over all replicas: microbatches, examples, and `total_counts`."""
    num_microbatches, examples, *totals = values
    terms = engine.objective.terms
    supervised, total, padding = totals[len(terms) :]
    return Counted(
        denominators={term.name: n for term, n in zip(terms, totals, strict=False)},
        factors=tuple(term.coefficient / n if n else None for term, n in zip(terms, totals, strict=False)),
        counts=Counts(
            microbatches=int(num_microbatches),
            examples=int(examples),
            supervised_tokens=int(supervised),
            total_tokens=int(total),
            padding_tokens=int(padding),
        ),
        loss_scale=None if engine.loss_scale is None else engine.loss_scale.scale,
    )


# --------------------------------------------------------------------------------------------- phase 2: local


def local(engine: Engine, group: Work, microbatches: list[Microbatch], counting: Counting) -> Attempt:
    """Run this replica's microbatches in order; gradients of weighted sums add up. No replica collective inside.

    Empties `microbatches` as it goes. Where reduction overlaps, the last backward is left to phase 4.
    """
    attempt = Attempt()
    index = 0
    if counting.none_here and counting.result().empty:  # nothing to run, but what was loaded is still judged
        attempt.coverage = sum((m.coverage for m in microbatches), attempt.coverage)
        return attempt
    while microbatches:
        microbatch = microbatches.pop(0)
        with attempt.recording():
            batch = to_device(microbatch.batch, engine.device)
            outputs = forward(engine, group, attempt, microbatch, batch, index)
        counted = counting.result()
        if attempt.error is not None:
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


def seed_microbatch(engine: Engine, group: Work, coverage: Coverage, index: int, purpose: int) -> None:
    """Seed the draws of one microbatch; see `randomness.microbatch_key`."""
    place = (group.index, engine.comm.replica, index)
    seed_generators(engine.device, microbatch_key(engine.seed, purpose, group.epoch, coverage, place))


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

    Raises on every replica if one failed, or if the ids that went into forward are not the group's.
    """
    error = attempt.error
    out_of_memory = error is not None and is_out_of_memory(error)
    seen = attempt.coverage
    host = [
        out_of_memory,
        error is not None and not out_of_memory,
        engine.stop_requested,
        seen.hash >> 32,
        seen.hash & 0xFFFFFFFF,
        seen.count,
        *engine.gradients.present(),
    ]
    sums = term_sums(attempt, len(engine.objective.terms), engine.device)
    (oom, failed, stop, high, low, num_seen, *present), sums = engine.comm.sum("vote", host, sums).wait()
    if failed:
        raise_shared(engine.comm, None if out_of_memory else error, "local phase of the update")
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


def check_coverage(group: Work, seen: Coverage) -> None:
    """Raise CoverageError unless the examples that went into forward are the group's, each once."""
    if group.coverage is not None and seen != group.coverage:
        raise CoverageError(
            f"coverage of epoch {group.epoch}, group {group.index}: got {seen.count} examples with hash "
            f"{format_hash(seen)} in forward, expected {group.coverage.count} with hash {format_hash(group.coverage)}; "
            "a loader lost, repeated or swapped examples: check what it returns for the ids it is given"
        )


def halved(engine: Engine, group: Work) -> Work:
    """The group in microbatches of half the size, remembered for later groups. Same objective, more accumulation."""
    size = group.largest_microbatch
    if not group.divisible:
        raise OutOfMemoryError(
            "memory: got out of memory in a ready microbatch, expected room for it; "
            "bring smaller batches, or use `groups` over a map-style data set, which can cut them"
        )
    if size <= 1:
        raise OutOfMemoryError(
            "memory: got out of memory with 1 example per microbatch, expected room for one; "
            "use shorter examples, a smaller model, lower precision or activation checkpointing"
        )
    engine.examples_that_fit = -(-size // 2)
    return group.limited(engine.examples_that_fit)


def raise_shared(comm: Comm, error: Exception | None, phase: str) -> NoReturn:
    """Raise on every replica what failed on one: the error itself there, a PeerError that quotes it elsewhere."""
    reports = comm.gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    replica, report = next((i, report) for i, report in enumerate(reports) if report is not None)
    raise PeerError(f"replica {replica} failed in the {phase}, of which nothing was applied: {report}")


# -------------------------------------------------------------------------------------------- phase 4: reduce


def reduce(engine: Engine, attempt: Attempt, verdict: Verdict) -> None:
    """Gradient sums over replicas, once, in static bucket order; overlapped with the last backward if asked for."""
    last_loss, attempt.last_loss = attempt.last_loss, None
    last_backward = partial(backward, last_loss) if engine.overlap else None
    with final(engine):
        engine.comm.reduce(engine.gradients, last_backward, verdict.present)


@contextmanager
def final(engine: Engine) -> Iterator[None]:
    """After the vote a failure on one replica cannot be taken back by the others: it ends the run for all."""
    try:
        yield
    except BaseException as error:
        engine.comm.end()
        if is_out_of_memory(error):
            raise OutOfMemoryError(
                f"memory: got out of memory after the vote ({error}), expected room for gradients and optimizer "
                "state; resume from the last checkpoint with fewer examples per microbatch"
            ) from error
        raise


# --------------------------------------------------------------------------------------------- phase 5: apply


def apply(engine: Engine, group: Work, attempt: Attempt, counted: Counted) -> tuple[Status, float]:
    """Judge, unscale, clip, and run optimizers and schedulers. Returns the status and the norm before clipping.

    After phase 4 every replica holds the same gradients, so what one finds in them is a verdict for all. An error of
    an optimizer or scheduler ends the run on every replica, since others may have applied the update.
    """
    gradients = engine.gradients
    scale = 1.0 if counted.loss_scale is None else counted.loss_scale
    with final(engine):
        norm = gradients.norm() / scale
        finite = math.isfinite(norm)
        any_present = any(gradients.present())
        if finite and any_present:
            gradients.scale(clip_factor(norm, engine.clip_norm) / scale)
            finite = gradients.hand_over()
    if not finite:
        if engine.loss_scale is None:
            raise_non_finite(engine, group, attempt, norm)
        engine.loss_scale.record(finite=False)
        return "skipped", norm
    if not any_present:
        raise InputError.of("gradients", "none", "a gradient for some parameter", "let the loss depend on the model")
    with final(engine):
        for optimizer in engine.optimizers:
            optimizer.step()
        if engine.loss_scale is not None:
            engine.loss_scale.record(finite=True)
        for scheduler in engine.schedulers:
            scheduler.step()
    return "applied", norm


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """min(1, clip_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ has it; 1 without clipping."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))


def raise_non_finite(engine: Engine, group: Work, attempt: Attempt, norm: float) -> NoReturn:
    """Raise NonFiniteError on every replica, naming the microbatches whose loss was not finite."""
    finite = [all(s is None or bool(s.isfinite()) for s in sums) for sums in attempt.sums]
    reports = [pair for pairs in engine.comm.gather(list(zip(attempt.ids, finite, strict=True))) for pair in pairs]
    if all(ok for _, ok in reports):
        ids = sorted(i for ids, _ in reports for i in ids or ())
        where = f"every loss was finite; example ids of the group: {ids or 'unknown'}"
    else:
        suspects = ["ids unknown" if ids is None else list(ids) for ids, ok in reports if not ok]
        where = f"microbatches with such a loss, by example ids: {suspects}"
    raise NonFiniteError(
        f"gradient norm of epoch {group.epoch}, group {group.index}: got {norm}, expected finite gradients; "
        f"{where}; nothing was applied: mend or leave out the data, or lower the learning rate"
    )
