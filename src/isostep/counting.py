"""Denominators and counters, of one replica and of all: what updates and evaluations divide by."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .engine import Counted, Engine, Microbatch
from .errors import InputError
from .ledger import Counts
from .objective import Objective


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
