"""Exact validation: sums over all examples divided by their global counts, however it is split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor, nn

from .comm import leaving
from .counting import counted_from, total_counts
from .engine import Attempt, Counted, Engine, Microbatch
from .errors import AbandonedError, InputError
from .ledger import Counts
from .memory import half, is_out_of_memory
from .objective import Batch, Outputs, to_device
from .randomness import preserved
from .result import objective_value, term_means
from .units import all_equal, derive_key, marks
from .verdicts import evaluation_abandoned, final, raise_shared

AT_A_TIME = 16
"""Microbatches that are evaluated together through stages."""
Share: TypeAlias = Callable[[int], Iterable[Microbatch]]


@dataclass(frozen=True)
class EvaluationResult:
    """Means over every target of the data: `loss` with the terms' coefficients, `terms` without.

    None where nothing was counted. denominators and counts are over all replicas.
    examples_per_microbatch: at most, after `halvings` because memory ran out; None for ready microbatches.
    """

    loss: float | None
    terms: dict[str, float | None]
    denominators: dict[str, float]
    counts: Counts
    examples_per_microbatch: int | None = None
    halvings: int = 0


def evaluate(
    engine: Engine, share: Share, *, examples_per_microbatch: int | None, size: int, model: nn.Module | None
) -> EvaluationResult:
    """The objective over this replica's microbatches and those of all others. One small all-reduce, at the end.

    share(m): this replica's microbatches, of m examples at most; ready ones where `examples_per_microbatch` is None.
    size: examples in the data. model: evaluated instead of the trained one.

    Runs in evaluation mode without gradients; modes and random generators are put back. Where memory runs out on one
    replica, all begin again with half of the examples per microbatch, and training keeps its own. Raises on every
    replica if one failed, if they were given different data, sizes or models, and AbandonedError where the grace of a
    stop request was over on one.
    """
    module = engine.model if model is None or engine.stages is not None else model
    current, halvings = examples_per_microbatch, 0
    instead = nullcontext() if model is None or engine.stages is None else in_place_of(engine.model, model)
    with leaving(engine.comm), instead:
        while True:
            key = derive_key(size, current or 0, model is not None)
            outcome = _attempted(engine, module, share(current or 0), key)
            if outcome is not None:
                break
            current = half(current)
            halvings += 1
    counted, sums = outcome
    means = term_means(counted.denominators, sums.tolist())
    loss = objective_value(engine.objective, means)
    return EvaluationResult(loss, means, counted.denominators, counted.counts, current, halvings)


def _attempted(
    engine: Engine, model: nn.Module, microbatches: Iterable[Microbatch], key: int
) -> tuple[Counted, Tensor] | None:
    """Counts and sums over all replicas; None where memory ran out on one. `key` must be the same on all."""
    error, totals, sums = _run(engine, model, microbatches)
    out_of_memory = error is not None and is_out_of_memory(error)
    abandoned = isinstance(error, AbandonedError)
    failed_here = error is not None and not out_of_memory and not abandoned
    host = [failed_here, out_of_memory, abandoned, *marks(key), *totals]
    (failed, oom, abandon, mark, mark_squared, *values), group_sums = engine.comm.sum("evaluate", host, sums).wait()
    if failed:
        raise_shared(engine.comm, error if failed_here else None, "evaluation")
    if not all_equal(mark, mark_squared, engine.comm.size):
        raise InputError.of(
            "evaluation data", "other examples, microbatches or model here", "the same on every replica",
            "give all the same data, examples_per_microbatch and model",
        )  # fmt: skip
    if abandon:
        engine.stop.answer()
        raise evaluation_abandoned()
    if oom:
        return None
    assert group_sums is not None
    return counted_from(engine, values), group_sums


def _run(
    engine: Engine, model: nn.Module, microbatches: Iterable[Microbatch]
) -> tuple[Exception | None, list[float], Tensor]:
    """This replica's error, counts and term sums. Whatever a forward left in memory is gone when this returns."""
    attempt = Attempt()
    terms = engine.objective.terms
    totals = [0.0] * (len(terms) + 5)
    sums = torch.zeros(len(terms), dtype=torch.float64, device=engine.device)
    recording = attempt.recording() if engine.stages is None else nullcontext()  # stages cannot wait with an error
    with recording, evaluating(model), preserved(engine.device), torch.no_grad():
        for microbatch, batch, outputs in _forwards(engine, model, microbatches):
            if engine.comm.scores:
                sums += torch.stack([term.sum_of(outputs, batch).to(torch.float64) for term in terms])
            if engine.comm.counts:
                row = [1, microbatch.examples, *total_counts(engine.objective, [microbatch])]
                totals = [total + value for total, value in zip(totals, row, strict=True)]
            del batch, outputs  # the next forward must not find them in memory
    return attempt.error, totals, sums


def _forwards(
    engine: Engine, model: nn.Module, microbatches: Iterable[Microbatch]
) -> Iterator[tuple[Microbatch, Batch, Outputs]]:
    """Each microbatch with its outputs; through stages several at a time, so that they do not wait for each other."""
    if engine.stages is None:
        for microbatch in microbatches:
            if engine.stop.overdue:
                raise evaluation_abandoned()
            batch = to_device(microbatch.batch, engine.device)
            with engine.precision():
                outputs = engine.forward(model, batch)
            yield microbatch, batch, outputs
            del batch, outputs
        return
    source = iter(microbatches)
    while several := list(islice(source, AT_A_TIME)):
        batches = [to_device(microbatch.batch, engine.device) for microbatch in several]
        with final(engine, "in a stage"):  # ranks of one replica wait for each other
            outputs = engine.stages.evaluated(batches, engine.precision)
        yield from zip(several, batches, outputs, strict=True)


@contextmanager
def in_place_of(trained: nn.Module, other: nn.Module) -> Iterator[None]:
    """The weights of another model of the same parameters in the trained one. Raises InputError where it has others."""
    ours, theirs = list(trained.parameters()), list(other.parameters())
    if [p.shape for p in ours] != [p.shape for p in theirs]:
        raise InputError.of(
            "model", f"{len(theirs)} parameters", f"the {len(ours)} of this rank's layers, in their shapes",
            "give a copy of the staged model's `layers`",
        )  # fmt: skip

    def swap() -> None:
        for p, q in zip(ours, theirs, strict=True):
            p.data, q.data = q.data, p.data

    swap()
    try:
        yield
    finally:
        swap()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module is back in the mode that it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:  # parents first: a child's own mode comes last
            if module.training != training:
                module.train(training)  # which may do more than set the flag
            module.training = training
