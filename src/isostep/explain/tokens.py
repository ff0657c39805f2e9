"""The weight that one token has in an update, under six common training loops.

Every loop gives the tokens of one microbatch the same weight, 1 / divisor; the loops differ in the divisor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

from ..errors import InputError
from .batch import check_count
from .replicas import check_number

Verdict = Literal["exact", "scaled", "uneven"]


@dataclass(frozen=True)
class Counts:
    """Tokens of each microbatch of a group; every replica has the same number of microbatches."""

    tokens: tuple[tuple[int, ...], ...]
    """[replica][microbatch]."""

    @property
    def replicas(self) -> int:
        """Replicas, D."""
        return len(self.tokens)

    @property
    def microbatches(self) -> int:
        """Microbatches per replica, A."""
        return len(self.tokens[0])

    @cached_property
    def total(self) -> int:
        """Tokens of the group, N."""
        return sum(map(sum, self.tokens))

    @cached_property
    def per_replica(self) -> tuple[int, ...]:
        """Tokens of each replica, N_d."""
        return tuple(map(sum, self.tokens))


@dataclass(frozen=True)
class Loop:
    """A common training loop, by what it divides the loss of one token by."""

    name: str
    backward_on: str
    across_replicas: Literal["sum", "average"]
    weight: str
    """The weight of a token as a formula."""
    divisor: Callable[[Counts, int, int], int]
    """Of the counts, a replica and a microbatch; 0 where the loop takes a mean over no token."""


@dataclass(frozen=True)
class LoopResult:
    """What one loop does with a group."""

    name: str
    token_weights: tuple[tuple[Fraction | None, ...], ...]
    """The weight of one token of [replica][microbatch]; None where there is no token."""
    ratios: tuple[tuple[Fraction | None, ...], ...]
    """The same as a multiple of the exact weight."""
    weight_sum: Fraction
    """Over all tokens of the group; 1 is right."""
    heaviest_to_lightest: Fraction
    """The heaviest token's weight / the lightest's; 1 is right."""
    verdict: Verdict
    loss_is_nan: bool
    """The loop takes a mean over no token, so its loss is NaN."""
    loss: float | None
    """The loss that the loop optimises; None where it is NaN or the losses are not known."""


@dataclass(frozen=True)
class TokenWeights:
    """A group and what each of `LOOPS` does with it, in that order."""

    counts: Counts
    losses: tuple[tuple[float, ...], ...] | None
    """Mean loss of each microbatch, [replica][microbatch]; not used where there is no token."""
    loops: tuple[LoopResult, ...]


LOOPS = (
    Loop("exact", "sum / N", "sum", "1 / N", lambda counts, d, a: counts.total),
    Loop(
        "mean of means",
        "mean / A",
        "average",
        "1 / (D A n)",
        lambda counts, d, a: counts.replicas * counts.microbatches * counts.tokens[d][a],
    ),
    Loop(
        "mean of replicas",
        "sum / N_d",
        "average",
        "1 / (D N_d)",
        lambda counts, d, a: counts.replicas * counts.per_replica[d],
    ),
    Loop(
        "mean, A forgotten",
        "mean",
        "average",
        "1 / (D n)",
        lambda counts, d, a: counts.replicas * counts.tokens[d][a],
    ),
    Loop(
        "divided by D too",
        "sum / N",
        "average",
        "1 / (D N)",
        lambda counts, d, a: counts.replicas * counts.total,
    ),
    Loop("never divided", "sum", "sum", "1", lambda counts, d, a: 1),
)


def token_weights(tokens: Sequence[Sequence[int]], losses: Sequence[Sequence[float]] | None = None) -> TokenWeights:
    """What each loop does with these microbatches.

    tokens: supervised tokens, [replica][microbatch], the same number of microbatches on every replica.
    losses: mean loss per token of each microbatch, in the same shape.
    Raises InputError where shapes differ, the group has no token, or a number is not finite or out of range.
    """
    counts = _counts(tokens)
    means = None if losses is None else _losses(losses, counts)
    return TokenWeights(counts, means, tuple(loop_result(loop, counts, means) for loop in LOOPS))


def loop_result(loop: Loop, counts: Counts, losses: tuple[tuple[float, ...], ...] | None) -> LoopResult:
    """What one loop does with a group of one token or more."""
    places = [(d, a) for d in range(counts.replicas) for a in range(counts.microbatches)]
    divisors = {place: loop.divisor(counts, *place) for place in places}
    filled = [(d, a) for d, a in places if counts.tokens[d][a]]
    used = [divisors[place] for place in filled]
    loss_is_nan = 0 in divisors.values()
    loss = None
    if losses is not None and not loss_is_nan:
        loss = math.fsum(counts.tokens[d][a] / divisors[d, a] * losses[d][a] for d, a in filled)

    def per_token(numerator: int) -> tuple[tuple[Fraction | None, ...], ...]:
        return tuple(
            tuple(Fraction(numerator, divisors[d, a]) if n else None for a, n in enumerate(row))
            for d, row in enumerate(counts.tokens)
        )

    return LoopResult(
        name=loop.name,
        token_weights=per_token(1),
        ratios=per_token(counts.total),
        weight_sum=sum((Fraction(counts.tokens[d][a], divisors[d, a]) for d, a in filled), Fraction(0)),
        heaviest_to_lightest=Fraction(max(used), min(used)),
        verdict=_verdict(used, counts.total),
        loss_is_nan=loss_is_nan,
        loss=loss,
    )


def _verdict(divisors: Sequence[int], total: int) -> Verdict:
    if len(set(divisors)) > 1:
        return "uneven"
    return "exact" if divisors[0] == total else "scaled"


def _counts(tokens: Sequence[Sequence[int]]) -> Counts:
    if not tokens or not tokens[0]:
        raise InputError.of("counts", tokens, "one microbatch or more", "give its number of tokens")
    for index, row in enumerate(tokens):
        for count in row:
            check_count("counts", count, least=0)
        if len(row) != len(tokens[0]):
            raise InputError.of(
                "counts",
                len(row),
                f"{len(tokens[0])} microbatches on replica {index}, as on replica 0",
                "write 0 for a microbatch without tokens",
            )
    counts = Counts(tuple(map(tuple, tokens)))
    if not counts.total:
        raise InputError.of("counts", 0, "one token or more in the group", "give a microbatch some tokens")
    return counts


def _losses(losses: Sequence[Sequence[float]], counts: Counts) -> tuple[tuple[float, ...], ...]:
    remedy = "give one mean loss per microbatch, in the shape of the counts"
    if len(losses) != counts.replicas:
        raise InputError.of("losses", len(losses), f"{counts.replicas} replicas", remedy)
    for index, row in enumerate(losses):
        if len(row) != counts.microbatches:
            raise InputError.of("losses", len(row), f"{counts.microbatches} on replica {index}", remedy)
        for loss in row:
            check_number("losses", loss)
    return tuple(map(tuple, losses))
