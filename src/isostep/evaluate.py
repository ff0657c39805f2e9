"""Exact validation: sums over all examples divided by their global counts, however it is split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .comm import leaving
from .engine import Attempt, Engine, Microbatch
from .errors import InputError
from .ledger import Counts
from .objective import to_device
from .randomness import preserved
from .result import objective_value, term_means
from .units import all_equal, marks
from .update import counted_from, raise_shared, total_counts


@dataclass(frozen=True)
class EvaluationResult:
    """Means over every target of the data: `loss` with the terms' coefficients, `terms` without.

    None where nothing was counted. denominators and counts are over all replicas.
    """

    loss: float | None
    terms: dict[str, float | None]
    denominators: dict[str, float]
    counts: Counts


def evaluate(engine: Engine, microbatches: Iterable[Microbatch], size: int = 0) -> EvaluationResult:
    """The objective over this replica's microbatches and those of all others. One small all-reduce, at the end.

    Runs in evaluation mode without gradients; modes and random generators are put back. Raises on every replica if
    one failed, or if they were given data of different `size`.
    """
    with leaving(engine.comm):
        return _evaluate(engine, microbatches, size)


def _evaluate(engine: Engine, microbatches: Iterable[Microbatch], size: int) -> EvaluationResult:
    attempt = Attempt()
    width = len(engine.objective.terms)
    totals = [0.0] * (width + 5)
    sums = torch.zeros(width, dtype=torch.float64, device=engine.device)
    with attempt.recording(), evaluating(engine.model), preserved(engine.device), torch.no_grad():
        for microbatch in microbatches:
            batch = to_device(microbatch.batch, engine.device)
            with engine.precision():
                outputs = engine.forward(engine.model, batch)
            terms = engine.objective.terms
            sums += torch.stack([term.sum_of(outputs, batch).to(torch.float64) for term in terms])
            row = [1, microbatch.examples, *total_counts(engine.objective, [microbatch])]
            totals = [total + value for total, value in zip(totals, row, strict=True)]
            del batch, outputs  # the next forward must not find them in memory
    host = [attempt.error is not None, *marks(size), *totals]
    (failed, mark, mark_squared, *values), group_sums = engine.comm.sum("evaluate", host, sums).wait()
    if failed:
        raise_shared(engine.comm, attempt.error, "evaluation")
    if not all_equal(mark, mark_squared, engine.comm.replicas):
        raise InputError.of("evaluation data", f"{size} examples here", "as many on every replica", "give all the same")
    assert group_sums is not None
    counted = counted_from(engine, values)
    means = term_means(counted.denominators, group_sums.tolist())
    return EvaluationResult(objective_value(engine.objective, means), means, counted.denominators, counted.counts)


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
