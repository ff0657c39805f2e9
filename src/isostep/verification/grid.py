"""One update in every layout of a grid, in real processes, each compared with the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..distributed.comm import first_ranks, gathered
from ..distributed.worlds import in_worlds
from ..layout import Layout
from ..ledger import format_hash
from ..units import Coverage
from .observe import Observed, Options, Row, observe
from .problem import CLIP_NORM, COEFFICIENT, build_examples
from .reference import Reference, dtype_tolerance, gradient_error, mean_of_means, reference_update

CONTROL_FACTOR = 1000.0
SMALL_COLLECTIVES = {2, 3}
"""Counts and vote; a third only where an overlapped backward is the first to touch some parameter."""
SMALL_WITH_STAGES = {4, 5}
"""Besides these, the norm and the verdict, each summed over the ranks of a replica."""


def verify_worker(options: Options) -> dict[str, Any]:
    """In every worker: all layouts, those in one piece first. Returns the document of `isostep verify`; rank 0's is the
    whole one.

    With stages, process groups that the caller held before have ended afterwards: see `in_worlds`.
    """
    if options.setup is not None:
        options.setup()
    examples = build_examples(options.num_examples, options.seed)
    model = options.model().double()
    reference = reference_update(model, examples, COEFFICIENT, CLIP_NORM)
    tolerance = dtype_tolerance(options.dtype, reference.num_tokens)

    def report(row: Row, group: Any) -> dict[str, Any]:
        mine = observe(options, row, examples, reference, group)
        return _report(row, gathered(mine, group), reference, tolerance)

    whole = [row for row in options.rows if row.schedule is None]
    staged = [row for row in options.rows if row.schedule is not None]
    process_groups = {n: first_ranks(n) for n in range(1, max((row.replicas for row in whole), default=0) + 1)}
    reports = [report(row, group) for row in whole if (group := process_groups[row.replicas]) is not None]
    if staged:
        reports += in_worlds([row.ranks for row in staged], lambda i, world: report(staged[i], world))
    control, _ = gradient_error(mean_of_means(model, examples, COEFFICIENT, CLIP_NORM), reference.gradients)
    return _document(reports, reference, examples, tolerance, control)


def _report(row: Row, observed: Sequence[Observed], reference: Reference, tolerance: float) -> dict[str, Any]:
    """One entry of `layouts`, from what all ranks saw, in rank order; `problems` says why it is not ok."""
    first = observed[0]
    ids = [example_id for rank in observed for example_id in rank.ids]
    worst = max((o.error for o in observed), key=lambda error: error[0])
    problems = [f"raised: {o.raised}" for o in observed[:1] if o.raised]
    problems += _problems(observed, reference, tolerance, ids, worst)
    problems += _problems_of_traffic(row, observed)
    accumulate = Layout(row.examples_per_microbatch, row.replicas).accumulate(reference.num_examples)
    return {
        "layout": {
            "examples_per_microbatch": row.examples_per_microbatch,
            "accumulate": accumulate,
            "replicas": row.replicas,
            "stages": row.stages,
            "schedule": row.schedule,
        },
        "gradient_error": {"max": worst[0], "parameter": worst[1]},
        "gradient_norm": first.norm,
        "loss": first.loss,
        "ids_hash": format_hash(Coverage.of(ids)),
        "num_examples": len(ids),
        "num_supervised_tokens": first.num_supervised_tokens,
        "reduced_bytes_ratio": max(_ratio(o, n) for o, n in zip(observed, _to_reduce(row, observed), strict=True)),
        "attempted": first.attempted,
        "applied": max(o.applied for o in observed),
        "ok": not problems,
        "problems": problems,
    }


def _problems(
    observed: Sequence[Observed], reference: Reference, tolerance: float, ids: Sequence[int], worst: tuple[float, str]
) -> list[str]:
    """What is wrong with the update, a line each."""
    loss_error = max(_relative(o.loss, reference.loss) for o in observed)
    norm_error = max(_relative(o.norm, reference.norm) for o in observed)
    tokens = {o.num_supervised_tokens for o in observed}
    weights: dict[str, set[str]] = {}
    for rank in observed:
        for name, (weights_hash, _) in rank.parameters.items():
            weights.setdefault(name, set()).add(weights_hash)
    checks = {
        f"gradient error {worst[0]:.1e} of {worst[1]} above {tolerance:.1e}": worst[0] <= tolerance,
        f"norm off by {norm_error:.1e}": norm_error <= tolerance,
        f"loss off by {loss_error:.1e}": loss_error <= tolerance,
        "other examples went into forward": sorted(ids) == list(range(reference.num_examples)),
        f"supervised tokens {sorted(tokens)}, not {reference.num_supervised_tokens}":
            tokens == {reference.num_supervised_tokens},
        f"optimizer ran {[o.applied for o in observed]} times, not once": all(o.applied == 1 for o in observed),
        f"attempted {[o.attempted for o in observed]}, not 1": all(o.attempted == 1 for o in observed),
        "some parameters are held by nobody": weights.keys() == reference.gradients.keys(),
        "replicas, or holders of one parameter, have different weights": all(len(w) == 1 for w in weights.values()),
        "gradients left over after the update": not any(o.left_over for o in observed),
    }  # fmt: skip
    return [problem for problem, fine in checks.items() if not fine]


def _problems_of_traffic(row: Row, observed: Sequence[Observed]) -> list[str]:
    """What is wrong with what went over the wire, a line each."""
    wanted, sent = _to_reduce(row, observed), [o.large_bytes for o in observed]
    problems = []
    if sent != wanted:
        problems.append(f"gradient bytes reduced {sent}, not {wanted}")
    small, counts = [o.small_collectives for o in observed], {0}
    if row.ranks > 1:
        counts = SMALL_COLLECTIVES if row.schedule is None else SMALL_WITH_STAGES
    if not counts.issuperset(small):
        problems.append(f"{small} small collectives, not {sorted(counts)}")
    return problems


def _to_reduce(row: Row, observed: Sequence[Observed]) -> list[int]:
    """Bytes that each rank has to reduce: its own gradients over the replicas, where there are several, and those of
    parameters that other ranks of its replica hold too, over these.
    """
    wanted = []
    for rank, mine in enumerate(observed):
        start = rank - rank % row.stages
        others = [o for o in observed[start : start + row.stages] if o is not mine]
        own = sum(nbytes for _, nbytes in mine.parameters.values())
        tied = sum(n for name, (_, n) in mine.parameters.items() if any(name in o.parameters for o in others))
        wanted.append((own if row.replicas > 1 else 0) + tied)
    return wanted


def _ratio(observed: Observed, wanted: int) -> float:
    """Bytes that were reduced, of those wanted; of all that this rank holds where none were."""
    return observed.large_bytes / (wanted or sum(nbytes for _, nbytes in observed.parameters.values()))


def _relative(value: float | None, reference: float) -> float:
    return math.inf if value is None else abs(value - reference) / abs(reference)


def _document(
    reports: list[dict[str, Any]],
    reference: Reference,
    examples: Sequence[Any],
    tolerance: float,
    control: float,
) -> dict[str, Any]:
    factor = control / tolerance
    return {
        "schema": 1,
        "passed": all(report["ok"] for report in reports) and factor >= CONTROL_FACTOR,
        "tolerance": tolerance,
        "reference": {
            "ids_hash": format_hash(Coverage.of(range(len(examples)))),
            "loss": reference.loss,
            "gradient_norm": reference.norm,
            "num_supervised_tokens": reference.num_supervised_tokens,
        },
        "layouts": reports,
        "control": {"gradient_error": {"max": control}, "factor": factor},
    }
