"""What an audit found: the report, and its JSON document. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

EXACT = "exact"
EXACT_UP_TO_FACTOR = "exact-up-to-factor"
INEXACT = "inexact"
NOT_OBSERVED = "not-observed"
VERDICTS = (EXACT, EXACT_UP_TO_FACTOR, INEXACT, NOT_OBSERVED)

WEIGHTINGS = ("declared", "token", "example", "microbatch")
"""What the weights are judged by.

declared: what the loss calls say; a mean divides by its own count, a sum by nothing, each over the whole update.
token, example, microbatch: each of them weighs the same.
"""

KINDS = {
    "mean-of-means": "each microbatch is averaged alone, so the tokens of a short one weigh more",
    "mean-of-replicas": "each replica is averaged alone, so the tokens of one with few weigh more",
    "scale": "every weight is off by one factor",
    "count-mismatch": "the denominator counts other targets than the loss sums",
    "term-scale": "one loss term is scaled otherwise than the others",
    "partial-group": "an update of fewer microbatches is divided by the full number",
    "stale-gradient": "gradients of an earlier update are still in this one",
    "lost-microbatch": "a microbatch was run backward and reached no update",
    "unsynchronised-replicas": "replicas apply different gradients",
    "duplicate-example": "an example is used more often than the others",
    "uneven-weights": "tokens weigh differently in a pattern that none of the other kinds explains",
    "scheduler-unit": "the scheduler steps more often than the optimizer",
    "skip-advances-scheduler": "the scheduler steps where the optimizer was skipped",
    "clip-before-unscale": "gradients are clipped while they still carry the loss scale",
    "clip-per-microbatch": "gradients are clipped before the last microbatch has added its own",
    "scaler-disagrees": "loss scales, or what they skip, differ between replicas",
    "sync-every-microbatch": "gradients are reduced over replicas more than once per update",
    "retained-graph": "graphs of earlier updates are kept alive",
    "low-precision-sum": "microbatches are summed in a precision that loses the small ones",
    "batchnorm": "batch statistics are those of a microbatch, not of the update",
    "wrong-log": "the loss that is logged is not the loss of the update",
    "no-update": "the optimizer ran and moved nothing, or never ran",
    "dropout-shared": "all replicas drop the same positions",
    "parameters-missing": "parameters get gradients, and no optimizer holds them",
}
"""Every kind of finding, and what it means. Those up to uneven-weights speak of weights, the others of what is around
them."""


@dataclass(frozen=True, slots=True)
class Weight:
    """The tokens of one loss call in one microbatch on one rank, and what each weighed in the gradient applied."""

    rank: int
    microbatch_index: int
    """Within this rank's part of the update."""
    site: str
    """file:line of the loss call."""
    tokens: int
    weight: float
    """Mean over the tokens; min and max are the extremes."""
    min: float
    max: float
    expected: float
    """NaN where there is nothing to judge by."""
    ratio: float
    """weight / expected."""


@dataclass(frozen=True, slots=True)
class Update:
    """One update and all its weights."""

    update: int
    """From 0."""
    tokens: int
    residual: float
    """Share of the applied gradient that the microbatches do not explain, by norm; NaN where it was not measured."""
    weights: Sequence[Weight]


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault: what kind, how much, how it shows, what mends it, and where."""

    kind: str
    update: int | None
    factor: float | None
    """What is seen over what is right; None where there is no one number."""
    evidence: str
    remedy: str
    where: str | None


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of an audit."""

    verdict: str
    weighting: str
    world: int
    updates: Sequence[Update] = ()
    findings: Sequence[Finding] = ()
    not_observed: Sequence[str] = field(default=())
    library: str = "pytorch"
    """The library whose idiom the remedies speak; see `remedies.LIBRARIES`."""

    @property
    def exit_code(self) -> int:
        """See `exit_code`."""
        return exit_code(self.verdict, len(self.findings))

    def __str__(self) -> str:
        """The report as `isostep audit` prints it."""
        from .text import report_text

        return report_text(self.document())

    def document(self) -> dict[str, Any]:
        """The report as JSON values. A number that is not finite becomes null."""
        return {"schema": 1, **_plain(asdict(self))}


def exit_code(verdict: str, num_findings: int) -> int:
    """0 nothing found, 1 findings or inexact, 3 not observed."""
    if num_findings or verdict == INEXACT:
        return 1
    return 3 if verdict == NOT_OBSERVED else 0


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
