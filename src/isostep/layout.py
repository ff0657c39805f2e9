"""HOW an update is split, and the sizes that follow from it at every scope."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import InputError
from .grouping import GroupPlan


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


def ladder(layout: Layout, plan: GroupPlan, context_length: int) -> str:
    """The sizes from one example up to an epoch, a line each. Tokens are upper bounds, at full context length."""
    size = plan.examples_per_update
    assert size is not None
    accumulate = layout.accumulate(size)
    per_replica = min(size, accumulate * layout.examples_per_microbatch)
    scopes = [
        ("example", 1, f"context length {context_length}"),
        ("microbatch", layout.examples_per_microbatch, f"m = {layout.examples_per_microbatch}"),
        ("replica, per update", per_replica, f"A = {accumulate} microbatches, at most"),
        ("update", size, f"D = {layout.replicas} replicas"),
    ]
    lines = [
        f"{name:<20}{n:>9,} {'example ' if n == 1 else 'examples'}{n * context_length:>12,} tokens at most   {note}"
        for name, n, note in scopes
    ]
    rest = plan.num_examples % size
    last = f", the last of {rest} examples" if rest and plan.last_group == "keep" else ""
    left_out = f", {rest} examples dropped" if rest and plan.last_group == "drop" else ""
    lines.append(f"{'epoch':<20}{plan.num_examples:>9,} examples = {plan.updates_per_epoch:,} updates{last}{left_out}")
    return "\n".join(lines)
