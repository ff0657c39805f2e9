"""HOW an update is split, and the sizes that follow from it at every scope."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InputError
from .grouping import GroupPlan
from .units import count


@dataclass(frozen=True)
class Layout:
    """Sizes of microbatches and number of data-parallel replicas. Raises InputError for a size below 1."""

    examples_per_microbatch: int
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in ("examples_per_microbatch", "replicas"):
            if getattr(self, name) < 1:
                raise InputError.of(name, getattr(self, name), "1 or more", "give a positive size")

    def accumulate(self, examples: int) -> int:
        """A: microbatches per replica for a group of `examples`, at most; some replicas may run one less, or none."""
        num_microbatches = -(-examples // self.examples_per_microbatch)
        return -(-num_microbatches // self.replicas)


def ladder(plan: GroupPlan, replicas: int, context_length: int) -> str:
    """The sizes from one example up to an epoch, a line each. Tokens are upper bounds, at full context length."""
    rows: list[tuple[str, int | None, int | None, str]] = [
        ("example", 1, context_length, f"context length {context_length}")
    ]
    m, size = plan.examples_per_microbatch, plan.examples_per_update
    if m is not None:
        rows.append(("microbatch", m, m * context_length, f"m = {m}"))
    else:
        rows.append(("microbatch", None, plan.tokens_per_microbatch, "m by length, padding counted"))
    if size is not None:
        if m is not None:
            accumulate = Layout(m, replicas).accumulate(size)
            n = min(size, accumulate * m)
            rows.append(
                ("replica, per update", n, n * context_length, f"A = {count(accumulate, 'microbatch')}, at most")
            )
        rows.append(("update", size, size * context_length, f"D = {count(replicas, 'replica')}"))
    else:
        rows.append(("update", None, plan.tokens_per_update, f"D = {count(replicas, 'replica')}"))
    return "\n".join([*(_rung(*row) for row in rows), _epoch(plan)])


def _rung(scope: str, examples: int | None, tokens: int | None, note: str) -> str:
    amount = "by length" if examples is None else f"{examples:,} {'example ' if examples == 1 else 'examples'}"
    return f"{scope:<20}{amount:>18}{tokens or 0:>14,} tokens at most   {note}"


def _epoch(plan: GroupPlan) -> str:
    size, updates = plan.examples_per_update, plan.updates_per_epoch
    line = f"{'epoch':<20}{plan.num_examples:>9,} examples"
    if size is None or updates is None:
        return line
    rest = plan.num_examples % size
    last = f", the last of {rest} examples" if rest and plan.last_group == "keep" else ""
    left_out = f", {rest} examples dropped" if rest and plan.last_group == "drop" else ""
    return f"{line} = {count(updates, 'update')}{last}{left_out}"
