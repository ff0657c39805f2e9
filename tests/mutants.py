"""Faults put into the engine on purpose, each of which `isostep verify` must find.

A mutant is a function that patches the engine through pytest's MonkeyPatch, so that it can be taken out again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from isostep import update
from isostep.comm import _Known
from isostep.distributed import comm, reduce
from isostep.gradients import GradientSums
from isostep.objective import labels_of
from isostep.verification import problem

Mutant = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Mutant] = {}


def mutant(function: Mutant) -> Mutant:
    MUTANTS[function.__name__] = function
    return function


def apply_for_good(name: str) -> None:
    """Break the engine of this process until it ends; for the workers of a real `isostep verify`."""
    MUTANTS[name](pytest.MonkeyPatch())


def _around(patch: pytest.MonkeyPatch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace owner.name by wrapper(original, *args)."""
    patch.setattr(owner, name, _Wrapped(wrapper, getattr(owner, name)))


class _Wrapped:
    def __init__(self, wrapper: Callable[..., Any], original: Callable[..., Any]) -> None:
        self.wrapper, self.original = wrapper, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper(self.original, *args, **kwargs)

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else partial(self, instance)


@mutant
def drop_microbatch(patch: pytest.MonkeyPatch) -> None:
    """The last microbatch of a replica is never run."""

    def local(original: Any, engine: Any, group: Any, microbatches: list[Any], counting: Any) -> Any:
        del microbatches[max(1, len(microbatches) - 1) :]
        return original(engine, group, microbatches, counting)

    _around(patch, update, "local", local)


@mutant
def duplicate_microbatch(patch: pytest.MonkeyPatch) -> None:
    """The last microbatch of a replica is run twice."""

    def local(original: Any, engine: Any, group: Any, microbatches: list[Any], counting: Any) -> Any:
        return original(engine, group, microbatches + microbatches[-1:], counting)

    _around(patch, update, "local", local)


@mutant
def lose_backward(patch: pytest.MonkeyPatch) -> None:
    """Forward runs, so coverage is right, but the gradient of every other microbatch is lost."""
    calls = iter(range(1 << 30))

    def backward(original: Any, loss: Any) -> None:
        if next(calls) % 2 == 0:
            original(loss)

    _around(patch, update, "backward", backward)


@mutant
def foreign_microbatch(patch: pytest.MonkeyPatch) -> None:
    """Every replica loads replica 0's microbatches, and coverage does not notice."""
    from isostep.data.groups import DataGroup

    _around(patch, DataGroup, "load", lambda original, self, _, *args: original(self, 0, *args))
    patch.setattr(update, "check_coverage", lambda *_: None)


@mutant
def divide_by_replicas(patch: pytest.MonkeyPatch) -> None:
    """Averaged over replicas after sums were divided by the global count."""

    def reduced(original: Any, engine: Any, attempt: Any, verdict: Any) -> None:
        original(engine, attempt, verdict)
        engine.gradients.scale(1 / engine.comm.replicas)

    _around(patch, update, "reduce", reduced)


@mutant
def local_denominators(patch: pytest.MonkeyPatch) -> None:
    """Each replica divides by its own count."""

    def summed(original: Any, self: Any, phase: str, host: Any, device: Any = None) -> Any:
        if phase != "count":
            return original(self, phase, host, device)
        return _Known([*host[:6], *(max(1.0, count) for count in host[6:])], device)

    _around(patch, comm.ProcessGroupComm, "sum", summed)


@mutant
def mean_of_means(patch: pytest.MonkeyPatch) -> None:
    """Each microbatch is averaged by itself, then the averages."""

    def weighted(original: Any, objective: Any, counted: Any, outputs: Any, batch: Any, attempt: Any) -> Any:
        counts = [float(term.count_fn(batch)) for term in objective.terms]
        factors = tuple(
            t.coefficient / (max(n, 1) * counted.counts.microbatches)
            for t, n in zip(objective.terms, counts, strict=True)
        )
        return original(objective, replace(counted, factors=factors), outputs, batch, attempt)

    _around(patch, update, "weighted_loss", weighted)


@mutant
def tail_over_full_group(patch: pytest.MonkeyPatch) -> None:
    """The partial group is divided as if it were a whole one: 13 of 16 examples."""

    def reduced(original: Any, engine: Any, attempt: Any, verdict: Any) -> None:
        original(engine, attempt, verdict)
        engine.gradients.scale(13 / 16)

    _around(patch, update, "reduce", reduced)
    patch.setattr(update, "clip_factor", lambda norm, clip_norm: 1.0)


@mutant
def stale_gradient(patch: pytest.MonkeyPatch) -> None:
    """Gradients that were there before the group are added in."""
    patch.setattr(GradientSums, "begin", lambda self: setattr(self, "_summing", True))


@mutant
def gradients_not_cleared(patch: pytest.MonkeyPatch) -> None:
    """Gradients stay on the parameters after the update."""

    def clear_before_only(original: Any, self: GradientSums) -> None:
        if not self._summing and any(p.grad is not None and bool((p.grad == 1).all()) for p in self.parameters):
            original(self)

    _around(patch, GradientSums, "clear", clear_before_only)


@mutant
def count_plus_one(patch: pytest.MonkeyPatch) -> None:
    """One target too many in the denominator."""

    def totals(original: Any, objective: Any, microbatches: Any) -> list[float]:
        first, *rest = original(objective, microbatches)
        return [first + 1, *rest]

    _around(patch, update, "total_counts", totals)


@mutant
def unshifted_count(patch: pytest.MonkeyPatch) -> None:
    """Labels counted before the causal shift: one extra for each example whose first label is supervised."""
    unshifted = replace(problem.causal_lm, count_fn=lambda batch: (labels_of(batch) != -100).sum())
    patch.setattr(problem, "causal_lm", unshifted)


@mutant
def padding_counted(patch: pytest.MonkeyPatch) -> None:
    """The second term's denominator counts padding that its sum leaves out."""
    term = problem.squared_log_partition

    def counting(coefficient: float) -> Any:
        return replace(term(coefficient), count_fn=lambda batch: batch["attention_mask"].numel())

    patch.setattr(problem, "squared_log_partition", counting)


@mutant
def coefficient_ignored(patch: pytest.MonkeyPatch) -> None:
    """Every term weighs 1."""

    def counted(original: Any, engine: Any, values: Any, **kwargs: Any) -> Any:
        result = original(engine, values, **kwargs)
        return replace(result, factors=tuple(1 / n if n else None for n in result.denominators.values()))

    _around(patch, update, "counted_from", counted)


@mutant
def clip_per_replica(patch: pytest.MonkeyPatch) -> None:
    """Each replica clips its own sum before reduction."""

    def reduced(original: Any, engine: Any, attempt: Any, verdict: Any) -> None:
        nn.utils.clip_grad_norm_(engine.model.parameters(), engine.clip_norm / engine.comm.replicas)
        original(engine, attempt, verdict)

    _around(patch, update, "reduce", reduced)


@mutant
def clip_per_microbatch(patch: pytest.MonkeyPatch) -> None:
    """The running sum is clipped after each backward."""

    def local(original: Any, engine: Any, *args: Any) -> Any:
        def clipping(loss: Any) -> None:
            loss.backward()
            nn.utils.clip_grad_norm_(engine.model.parameters(), engine.clip_norm)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(update, "backward", clipping)
            return original(engine, *args)

    _around(patch, update, "local", local)


@mutant
def clip_per_part(patch: pytest.MonkeyPatch) -> None:
    """The norm of half of the parameters, as if each stage clipped by its own."""

    def half(original: Any, self: GradientSums) -> float:
        return original(GradientSums(self.parameters[: len(self.parameters) // 2]))

    _around(patch, GradientSums, "norm", half)


@mutant
def no_clip(patch: pytest.MonkeyPatch) -> None:
    """The norm is reported and not used."""
    patch.setattr(update, "clip_factor", lambda norm, clip_norm: 1.0)


@mutant
def reduce_twice(patch: pytest.MonkeyPatch) -> None:
    """As many bytes again go over the wire; the gradient itself stays right."""

    def reduced(original: Any, engine: Any, attempt: Any, verdict: Any) -> None:
        original(engine, attempt, verdict)
        if engine.comm.replicas > 1:
            for parameter in engine.model.parameters():
                dist.all_reduce(torch.zeros(max(1024, parameter.numel())), group=engine.comm._group)

    _around(patch, update, "reduce", reduced)


@mutant
def lose_bucket(patch: pytest.MonkeyPatch) -> None:
    """The last bucket is not reduced."""
    _around(patch, reduce, "cut_buckets", lambda original, gradients, limit: original(gradients, 4096)[:-1])


@mutant
def update_twice(patch: pytest.MonkeyPatch) -> None:
    """The optimizer runs twice for one group."""

    def applied(original: Any, engine: Any, *args: Any) -> Any:
        engine.optimizers = [*engine.optimizers[:1], *engine.optimizers[:1]]
        return original(engine, *args)

    _around(patch, update, "apply", applied)


@mutant
def last_loss_only(patch: pytest.MonkeyPatch) -> None:
    """The loss of the last microbatch is taken for the group's."""

    def voted(original: Any, engine: Any, group: Any, attempt: Any, counted: Any) -> Any:
        del attempt.sums[:-1]
        return original(engine, group, attempt, counted)

    _around(patch, update, "vote", voted)


@mutant
def replica_drifts(patch: pytest.MonkeyPatch) -> None:
    """One replica applies slightly more than the others, below the gradient tolerance of one update."""

    def applied(original: Any, engine: Any, *args: Any) -> Any:
        if engine.comm.replica:
            engine.gradients.scale(1 + 1e-14)
        return original(engine, *args)

    _around(patch, update, "apply", applied)
