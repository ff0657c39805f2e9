"""Exact validation: sums over all examples divided by their global counts, however it is split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from .comm import leaving
from .counting import counted_from, total_counts
from .engine import Attempt, Counted, Engine, Microbatch
from .errors import AbandonedError, InputError
from .ledger import Counts
from .memory import half, is_out_of_memory
from .objective import to_device
from .randomness import preserved
from .result import objective_value, term_means
from .units import all_equal, derive_key, marks
from .verdicts import evaluation_abandoned, raise_shared

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
    module = engine.model if model is None else model
    current, halvings = examples_per_microbatch, 0
    with leaving(engine.comm):
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
    if not all_equal(mark, mark_squared, engine.comm.replicas):
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
    with attempt.recording(), evaluating(model), preserved(engine.device), torch.no_grad():
        for microbatch in microbatches:
            if engine.stop.overdue:
                raise evaluation_abandoned()
            batch = to_device(microbatch.batch, engine.device)
            with engine.precision():
                outputs = engine.forward(model, batch)
            sums += torch.stack([term.sum_of(outputs, batch).to(torch.float64) for term in terms])
            row = [1, microbatch.examples, *total_counts(engine.objective, [microbatch])]
            totals = [total + value for total, value in zip(totals, row, strict=True)]
            del batch, outputs  # the next forward must not find them in memory
    return attempt.error, totals, sums


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
