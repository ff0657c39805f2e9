"""What one attempted update did."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from .ledger import Counts, UpdateDone, format_hash
from .memory import peak_bytes
from .objective import Objective
from .units import Coverage

Status = Literal["applied", "skipped", "empty"]


def term_means(denominators: dict[str, float], sums: list[float]) -> dict[str, float | None]:
    """Mean of each term, without its coefficient; None where its denominator is 0."""
    return {name: s / n if n else None for (name, n), s in zip(denominators.items(), sums, strict=True)}


def objective_value(objective: Objective, means: dict[str, float | None]) -> float | None:
    """The objective from the terms' means; None where every term is empty."""
    parts = [t.coefficient * mean for t in objective.terms if (mean := means[t.name]) is not None]
    return sum(parts) if parts else None


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What one attempted update did. Reading `loss` or `terms` may wait for the device; the rest is on the host.

    status: "applied", "skipped" (float16: a gradient was not finite) or "empty" (no target in the whole group).
    epoch, group: which group. positions: [start, stop) in the epoch's order; (-1, -1) for ready microbatches.
    counts, denominators: of the whole group, over all replicas; denominators by term.
    coverage: the ids that went into forward, over all replicas; None where batches carry none.
    grad_norm: global 2-norm before clipping; None for an empty update.
    loss_scale: the scale of this update's backward; None without one.
    examples_per_microbatch: the largest microbatch, after `halvings` because memory ran out; `..._tried` before them.
    stop_requested: some replica asked to end the run after this update.
    """

    status: Status
    epoch: int
    group: int
    positions: tuple[int, int]
    counts: Counts
    denominators: dict[str, float]
    coverage: Coverage | None
    grad_norm: float | None
    learning_rates: tuple[float, ...]
    loss_scale: float | None
    examples_per_microbatch: int
    examples_per_microbatch_tried: int
    halvings: int
    stop_requested: bool
    _objective: Objective = field(repr=False)
    _sums: Tensor = field(repr=False)
    _device: torch.device = field(repr=False)

    @cached_property
    def terms(self) -> dict[str, float | None]:
        """Mean of each term over the group, without its coefficient; None where its denominator is 0."""
        return term_means(self.denominators, self._sums.tolist())

    @cached_property
    def loss(self) -> float | None:
        """The objective of the group at the parameters before the update; None where every term is empty."""
        return objective_value(self._objective, self.terms)

    @cached_property
    def memory(self) -> int:
        """Peak memory of this process in bytes when first read: allocated on CUDA, resident set on a CPU."""
        return peak_bytes(self._device)

    def event(self, attempted: int, seconds: float | None = None) -> UpdateDone:
        """This update as a ledger event; `attempted` is its number, from 1."""
        coverage = self.coverage or Coverage(count=self.counts.examples)
        return UpdateDone(
            attempted=attempted,
            epoch=self.epoch,
            group=self.group,
            start=self.positions[0],
            stop=self.positions[1],
            status=self.status,
            ids_hash=format_hash(coverage),
            num_examples=coverage.count,
            coverage="proved" if self.coverage and self.positions[0] >= 0 else "unknown",
            counters=self.counts,
            denominators=self.denominators,
            loss=self.loss,
            terms=self.terms,
            grad_norm=self.grad_norm,
            learning_rates=list(self.learning_rates),
            loss_scale=self.loss_scale,
            seconds=seconds,
        )
