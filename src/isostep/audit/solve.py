"""Which combination of microbatches an applied gradient is, from sketches alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .records import Sketch

TOLERANCE = 2e-4
"""Residual, as a share of the gradient, up to which a simple explanation stands. float32 sums leave 1e-7 to 1e-4."""

LOW_TOLERANCE = 3e-2
"""The same for gradients that are summed in bfloat16 or float16."""

ROUNDING = 1e-5
"""Residual, as a share of the summed norms of the microbatches, that cancellation in float32 explains."""


@dataclass(frozen=True)
class Factors:
    """applied = sum of values[j] * microbatch j + stale * the gradient of the update before + a residual."""

    values: np.ndarray
    """float64, one per microbatch. NaN where the sketches do not tell."""
    stale: float
    residual: float
    """Norm of what is unexplained over the norm of what was applied; NaN where nothing was applied."""


def factors(
    applied: Sketch, local: Sequence[Sketch], ranks: Sequence[int], own: int, stale: Sketch | None, low: bool = False
) -> Factors:
    """Explain one rank's applied gradient by the local gradients of all ranks' microbatches.

    ranks: the rank of each local gradient; own: the rank that applied. stale: the gradient that was applied before and
    not cleared since, if so. low: gradients are kept in bfloat16 or float16.
    The simplest explanation that leaves nothing over is taken: one factor for all; one for this rank's own; one for
    each rank; each with what is stale; and only then a factor for each microbatch, by least squares.
    """
    count = len(local)
    norm = float(np.linalg.norm(applied))
    if not np.isfinite(norm) or not all(np.isfinite(sketch).all() for sketch in local):
        return Factors(np.full(count, np.nan), np.nan, np.nan)
    size = float(sum(np.linalg.norm(sketch) for sketch in local))
    if norm <= 1e-12 * size:
        return Factors(np.zeros(count) if size else np.full(count, np.nan), 0.0, 0.0 if count else np.nan)
    matrix = np.stack([*local], axis=1) if count else np.zeros((applied.shape[0], 0))
    rank_of = np.array(ranks, dtype=int)
    allowed = (LOW_TOLERANCE if low else TOLERANCE) * norm
    equations = int(np.count_nonzero(np.abs(matrix).sum(axis=1) + np.abs(applied)))
    best: Factors | None = None
    for groups in _explanations(rank_of, own, count):
        for with_stale in (False, True) if stale is not None else (False,):
            unknowns = groups.max(initial=-1) + 1 + with_stale
            if best is not None and 2 * unknowns > equations:
                return Factors(np.full(count, np.nan), 0.0, best.residual)  # so few numbers, anything explains them
            found = _fit(applied, matrix, groups, stale if with_stale else None, norm)
            left = found.residual * norm
            if left <= allowed or left <= ROUNDING * float(np.nansum(np.abs(found.values)) * size / max(count, 1)):
                return found
            if best is None or found.residual < 0.5 * best.residual:
                best = found
    assert best is not None
    return best


def _explanations(rank_of: np.ndarray, own: int, count: int) -> list[np.ndarray]:
    """Ways to share factors, the simplest first: for each microbatch the number of its factor, -1 for none."""
    one_for_all = np.zeros(count, dtype=int)
    ways = [one_for_all]
    if count and len(set(rank_of)) > 1:
        ways.append(np.where(rank_of == own, 0, -1))
        ways.append(np.unique(rank_of, return_inverse=True)[1])
    ways.append(np.arange(count))
    return ways


def _fit(applied: Sketch, matrix: np.ndarray, groups: np.ndarray, stale: Sketch | None, norm: float) -> Factors:
    columns = [matrix[:, groups == group].sum(axis=1) for group in range(groups.max(initial=-1) + 1)]
    if stale is not None:
        columns.append(stale)
    if not columns:
        return Factors(np.zeros(0), 0.0, 1.0)
    design = np.stack(columns, axis=1)
    lengths = np.linalg.norm(design, axis=0)
    scaled = design / np.where(lengths > 0, lengths, 1)
    solution, *_ = np.linalg.lstsq(scaled, applied, rcond=1e-6)
    residual = float(np.linalg.norm(applied - scaled @ solution) / norm)
    solution = np.where(lengths > 0, solution / np.where(lengths > 0, lengths, 1), np.nan)
    if len(columns) > 1:
        solution[~_resolved(scaled, lengths, solution, residual, norm)] = np.nan
    values = np.zeros(len(groups))
    used = groups >= 0
    values[used] = solution[groups[used]]
    return Factors(values, float(solution[-1]) if stale is not None else 0.0, residual)


def _resolved(
    scaled: np.ndarray, lengths: np.ndarray, solution: np.ndarray, residual: float, norm: float
) -> np.ndarray:
    """Which factors the sketches tell to 1 % of the largest, given the noise that the residual shows."""
    noise = max(residual, 1e-7) * norm / np.sqrt(max(1, np.count_nonzero(np.abs(scaled).sum(axis=1))))
    values, vectors = np.linalg.eigh(scaled.T @ scaled)
    none = values <= 1e-12 * values.max()
    with np.errstate(divide="ignore", invalid="ignore"):
        error = noise * np.sqrt((vectors[:, ~none] ** 2 / values[~none]).sum(axis=1)) / lengths
    unseen = (vectors[:, none] ** 2).sum(axis=1) > 1e-6
    return (error <= 0.01 * np.nanmax(np.abs(solution), initial=0.0)) & ~unseen
