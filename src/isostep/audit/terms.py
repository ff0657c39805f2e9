"""Judging the weights of one loss term in one update: the pattern they follow, and the factor that is left. No torch.

The reference is the loop in one big batch: what the loss call sums over what it divides by, both over all microbatches
of all replicas.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from .weights import NOTHING, Portion, UpdateView

TOLERANCE = 5e-4
"""Weights that differ by less, relatively, are the same."""

LOW_TOLERANCE = 2e-2
"""The same where gradients are kept in bfloat16 or float16."""


@dataclass
class Outcome:
    """One loss term in one update."""

    term: tuple[int, ...]
    portions: list[Portion]
    expected: np.ndarray
    """Mean weight of a token of each portion; NaN where it has none."""
    kinds: list[str] = field(default_factory=list)
    """What is wrong with the weights among each other."""
    factor: float = float("nan")
    """What they are over what they should be, the pattern aside. NaN where it cannot be said."""
    common: tuple[float, ...] = ()
    """Numbers that every term of the update is multiplied by."""
    terms: int = 1
    """Terms of the update."""
    averaged: bool = False
    """All its terms are multiplied by the same numbers: it may be their mean."""
    unknown: str | None = None
    """Why the weights cannot be judged."""

    @property
    def weights(self) -> np.ndarray:
        return np.array([portion.weight for portion in self.portions])

    @property
    def ratios(self) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.weights / self.expected

    @property
    def tokens(self) -> np.ndarray:
        """Supervised tokens, none where the script multiplies them by 0."""
        return np.array(
            [portion.call.tokens if portion.call.max or portion.call.min else 0 for portion in self.portions],
            dtype=float,
        )

    @property
    def denominator(self) -> float:
        """What a mean over all portions divides by, or would."""
        return sum(portion.denominator for portion in self.portions)

    @property
    def weight(self) -> float:
        """Mean weight over the portions that have tokens."""
        return float(self.weights[self.tokens > 0].mean())

    @property
    def means(self) -> bool:
        """The loss call divides by a count of its own."""
        return self.portions[0].call.reduction == "mean"

    @property
    def accumulate(self) -> float:
        """Microbatches per rank."""
        ranks = {portion.rank for portion in self.portions}
        return len({(portion.rank, portion.microbatch) for portion in self.portions}) / max(1, len(ranks))

    @property
    def sound(self) -> bool:
        """Nothing is wrong within the update."""
        return not self.kinds and self.unknown is None


def outcomes(views: Sequence[UpdateView], weighting: str) -> list[list[Outcome]]:
    """Every loss term of every update, judged. Numbers the terms of the portions.

    A term is a loss call at one place of the code. Where that does not come out exact, places that may be one loss in
    the code of a loop (its last microbatch is often written apart) are taken as one.
    """
    terms = [_terms(view) for view in views]
    found = [_judged(view, of_view, weighting) for view, of_view in zip(views, terms, strict=True)]
    homes = _homes(terms)
    if any(home != term for term, home in homes.items()) and not all(
        _exact(outcome, view) for view, of_view in zip(views, found, strict=True) for outcome in of_view
    ):
        together = [_moved(of_view, homes) for of_view in terms]
        found = [_judged(view, of_view, weighting) for view, of_view in zip(views, together, strict=True)]
    for of_view in found:
        for number, outcome in enumerate(of_view):
            for portion in outcome.portions:
                portion.term = number
    return found


Term = tuple[int, int]
"""A place of the code, and which of its calls within one forward pass."""


def _terms(view: UpdateView) -> dict[Term, list[Portion]]:
    terms: dict[Term, list[Portion]] = defaultdict(list)
    seen: dict[tuple[int, int, int, int], int] = defaultdict(int)
    for portion in view.portions:
        call = portion.call
        place = portion.rank, portion.backward.index, call.forward, call.key
        terms[call.key, seen[place]].append(portion)
        seen[place] += 1
    return terms


def _homes(terms: Sequence[dict[Term, list[Portion]]]) -> dict[Term, Term]:
    """Terms that may be one: the same function and reduction, and never both after one forward pass."""
    kinds: dict[Term, set[tuple[str, str]]] = defaultdict(set)
    passes: dict[Term, set[tuple[int, int, int]]] = defaultdict(set)
    for of_view in terms:
        for term, portions in of_view.items():
            kinds[term] |= {(p.call.function, p.call.reduction) for p in portions}
            passes[term] |= {(p.rank, p.backward.index, p.call.forward) for p in portions}
    homes: dict[Term, Term] = {}
    for term in kinds:
        fits = (home for home in homes.values() if kinds[home] == kinds[term] and not passes[home] & passes[term])
        homes[term] = home = next(fits, term)
        passes[home] |= passes[term]
    return homes


def _moved(terms: dict[Term, list[Portion]], homes: dict[Term, Term]) -> dict[Term, list[Portion]]:
    moved: dict[Term, list[Portion]] = defaultdict(list)
    for term, portions in terms.items():
        moved[homes[term]].extend(portions)
    return moved


def _exact(outcome: Outcome, view: UpdateView) -> bool:
    empty = not outcome.tokens.any()
    return empty or (outcome.sound and abs(outcome.factor - 1) <= tolerance_of(view))


def tolerance_of(view: UpdateView) -> float:
    return LOW_TOLERANCE if view.low_precision else TOLERANCE


def _judged(view: UpdateView, terms: dict[Term, list[Portion]], weighting: str) -> list[Outcome]:
    found = []
    for term, portions in terms.items():
        outcome = Outcome(term, portions, _expected(portions, weighting))
        _judge(outcome, view, weighting)
        found.append(outcome)
    counts = [Counter(next((p.call.scalars for p in o.portions if p.call.scalars), ())) for o in found]
    common = tuple(functools.reduce(lambda a, b: a & b, counts).elements()) if counts else ()
    for outcome in found:
        outcome.common, outcome.terms = common, len(found)
        outcome.averaged = len(found) > 1 and all(count == counts[0] for count in counts)
    return found


def _expected(portions: Sequence[Portion], weighting: str) -> np.ndarray:
    tokens = np.array([portion.call.tokens for portion in portions], dtype=float)
    denominators = np.array([portion.denominator for portion in portions])
    empty = tokens == 0
    if weighting == "microbatch":
        result = 1 / (max(1, (~empty).sum()) * np.where(empty, 1, denominators))
    elif weighting == "example":
        examples = np.array([_examples(portion) for portion in portions])
        result = examples / (max(1.0, examples.sum()) * np.where(empty, 1, tokens))
    else:
        result = np.full(len(portions), 1 / max(denominators.sum(), 1e-30))
    return np.where(empty, np.nan, result)


def _examples(portion: Portion) -> float:
    """Examples with supervised tokens; without knowing them, one."""
    return 1.0 if portion.call.examples is None else float((portion.call.examples[0] > 0).sum())


def _judge(outcome: Outcome, view: UpdateView, weighting: str) -> None:
    tolerance = tolerance_of(view)
    chosen = outcome.tokens > 0
    if not chosen.any():
        return
    if weighting == "example" or (weighting == "declared" and not all(p.even for p in outcome.portions)):
        _judge_examples(outcome, chosen, tolerance, weighting)
        return
    if not all(portion.even for portion in outcome.portions):
        outcome.kinds.append("uneven-weights")
        return
    ratios = outcome.ratios[chosen]
    lost = np.abs(ratios) <= NOTHING * np.abs(ratios).max()
    if lost.all():
        outcome.kinds.append("lost-microbatch")
        return
    if lost.any():
        outcome.kinds.append("lost-microbatch")
        kept = [p for p, keep in zip(np.array(outcome.portions, dtype=object)[chosen], ~lost, strict=True) if keep]
        outcome.kinds += [kind for kind in _pattern(kept, ratios[~lost], tolerance)[0] if kind != "mean-of-means"]
        return
    kept = [portion for portion, here in zip(outcome.portions, chosen, strict=True) if here]
    outcome.kinds, outcome.factor = _pattern(kept, ratios, tolerance)
    by_tokens = outcome.factor / outcome.denominator * outcome.tokens.sum()
    if not outcome.means and abs(by_tokens - 1) <= tolerance:  # a weighted sum may be divided by its tokens instead
        outcome.expected = np.where(chosen, 1 / outcome.tokens.sum(), np.nan)
        outcome.factor = float(by_tokens)


def _judge_examples(outcome: Outcome, chosen: np.ndarray, tolerance: float, weighting: str) -> None:
    """By the sum of weights of each example, which should be the same for all."""
    known = [p for p, keep in zip(outcome.portions, chosen, strict=True) if keep]
    if any(portion.call.examples is None for portion in known):
        outcome.unknown = "its tokens cannot be told apart by example"
        return
    sums = np.concatenate(
        [p.call.examples[1][p.call.examples[0] > 0] * p.factor for p in known if p.call.examples is not None]
    )
    if same(sums, tolerance):
        outcome.factor = float(sums.mean() * len(sums))
    elif weighting == "example":
        outcome.kinds.append("uneven-weights")
    else:
        outcome.unknown = "its tokens weigh differently within one call, as the script wants it; see --weighting"


def same(values: Iterable[float], tolerance: float) -> bool:
    """All values are equal, relatively."""
    array = np.asarray(list(values), dtype=float)
    if not array.size:
        return True
    return bool(np.isfinite(array).all()) and float(np.ptp(array)) <= tolerance * float(np.abs(array).max())


def _pattern(portions: Sequence[Portion], ratios: np.ndarray, tolerance: float) -> tuple[list[str], float]:
    """How weights that should follow one rule differ from it: the kinds, and the factor left."""
    if same(ratios, tolerance):
        return [], float(ratios.mean())
    weights = np.array([portion.weight for portion in portions])
    shares = weights * np.array([portion.denominator for portion in portions])
    ranks = np.array([portion.rank for portion in portions])
    per_rank = [ranks == rank for rank in sorted(set(ranks.tolist()))]
    several = max(int(of_rank.sum()) for of_rank in per_rank) > 1
    tokens = np.array([sum(p.denominator for p in np.array(portions, dtype=object)[of_rank]) for of_rank in per_rank])
    totals = np.array([shares[of_rank].sum() for of_rank in per_rank])
    if same(shares, tolerance):
        kinds = ["mean-of-means"] if several else []
        kinds += ["mean-of-replicas"] if len(per_rank) > 1 else []
        return kinds, float(shares.sum())
    if all(same(weights[of_rank], tolerance) for of_rank in per_rank) and same(totals, tolerance):
        return ["mean-of-replicas"], float(totals.sum())
    if all(same(shares[of_rank], tolerance) for of_rank in per_rank) and same(totals / tokens, tolerance):
        return ["mean-of-means"], float(totals.sum())
    numbers = np.array([portion.microbatch for portion in portions])
    per_number = [numbers == number for number in sorted(set(numbers.tolist()))]
    across = np.array([shares[of_number].sum() for of_number in per_number])
    if all(same(weights[of_number], tolerance) for of_number in per_number) and same(across, tolerance):
        return ["mean-of-means"], float(across.sum())  # each microbatch by its count over all ranks
    if _other_counts(portions, weights, tolerance):
        return ["count-mismatch"], float("nan")
    return ["uneven-weights"], float("nan")


def _other_counts(portions: Sequence[Portion], weights: np.ndarray, tolerance: float) -> bool:
    """Every microbatch is divided by a count, but not by its own: by one more per example, or by all positions."""
    tokens = np.array([portion.call.tokens for portion in portions], dtype=float)
    others: list[np.ndarray] = [
        tokens + np.array([_examples(portion) for portion in portions]),
        np.array([portion.call.elements for portion in portions], dtype=float),
    ]
    return any(same(weights * counts, tolerance) and not same(counts / tokens, tolerance) for counts in others)


def allowed_factors(outcome: Outcome, world: int, scale: float | None) -> list[float]:
    """Factors that numbers in the script explain: products of what it multiplies the loss by.

    A and D are aside, and a loss scale, unless they stand before this term alone, or the terms are averaged.
    """
    normalisers = [n for n in _normalisers(outcome.accumulate, world) if n != 1]
    common = list(outcome.common)
    scalars = []
    for scalar in next((p.call.scalars for p in outcome.portions if p.call.scalars), ()):
        if scale and np.isclose(scalar, scale, rtol=1e-4):
            continue
        shared = scalar in common
        if shared:
            common.remove(scalar)
        averaged = outcome.averaged and np.isclose(scalar, 1 / outcome.terms, rtol=1e-4)
        normalising = any(np.isclose(scalar, n, rtol=1e-4) for n in normalisers)
        if averaged or not (shared and normalising):
            scalars.append(scalar)
    scalars = scalars[:6]
    products = [float(np.prod(chosen)) for size in range(len(scalars) + 1) for chosen in combinations(scalars, size)]
    return [1.0, *products]


def _normalisers(accumulate: float, world: int) -> list[float]:
    both = {accumulate, world, accumulate * world}
    return [*both, *(1 / n for n in both if n)]


def cause_of(factor: float, outcome: Outcome, world: int, tolerance: float) -> str | None:
    """The likely reason for a factor, in words; None if it is no number of the layout."""
    accumulate = outcome.accumulate
    tokens = float(outcome.tokens.sum())
    readings: list[tuple[float, str]] = [
        (1 / accumulate, f"divided by A = {accumulate:g} once more than it should"),
        (accumulate, f"not divided by A = {accumulate:g}"),
        (1 / world, f"averaged over D = {world} replicas once more than it should"),
        (world, f"summed over D = {world} replicas where an average was assumed"),
        (1 / (accumulate * world), f"divided by A x D = {accumulate * world:g} once more than it should"),
        (accumulate * world, f"not divided by A x D = {accumulate * world:g}"),
        (tokens, f"not divided by the {tokens:g} supervised tokens"),
        (tokens / world, f"not divided by the {tokens:g} supervised tokens, and averaged over D = {world} replicas"),
    ]
    for value, words in readings:
        if value != 1 and abs(factor / value - 1) <= tolerance:
            return words
    return None
