"""One loss term over several updates: what a factor that stays, or changes, means. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .document import EXACT, EXACT_UP_TO_FACTOR, INEXACT
from .terms import Outcome, allowed_factors, cause_of, same, tolerance_of
from .weights import UpdateView


@dataclass(frozen=True)
class Fault:
    """A finding on weights, before its remedy."""

    kind: str
    update: int | None
    factor: float | None
    evidence: str
    where: str | None
    cause: str | None = None


@dataclass
class Judged:
    """One update, and its loss terms."""

    view: UpdateView
    outcomes: list[Outcome]

    @property
    def microbatches(self) -> int:
        return sum(self.view.microbatches)

    @property
    def optimizers(self) -> tuple[int, ...]:
        return tuple(step.optimizer for step in self.view.ranks[0].steps if step.applied)


def usual_microbatches(updates: Sequence[Judged]) -> dict[tuple[int, ...], int]:
    """Per set of optimizers: the number of microbatches that most of their updates have; of equals, the larger."""
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for update in updates:
        counts[update.optimizers][update.microbatches] += 1
    return {key: max(of_key, key=lambda n: (of_key[n], n)) for key, of_key in counts.items()}


def faults_of_weights(updates: Sequence[Judged], world: int, weighting: str) -> tuple[list[Fault], str]:
    """What is wrong with the weights of all updates, and the verdict on them."""
    found: list[Fault] = []
    verdict = EXACT
    usual = usual_microbatches(updates)
    series: dict[tuple[int, ...], list[tuple[Judged, Outcome]]] = defaultdict(list)
    for update in updates:
        for outcome in update.outcomes:
            found += _patterns(update, outcome)
            if outcome.kinds:
                verdict = INEXACT
            series[outcome.term].append((update, outcome))
    scaled: list[Fault] = []
    sound = False
    for term in series.values():
        faults, of_term, fine = _factors(term, world, weighting, usual, len(series) > 1)
        verdict = max(verdict, of_term, key=(EXACT, EXACT_UP_TO_FACTOR, INEXACT).index)
        scaled += faults
        sound |= fine
    if len(series) > 1 and (sound or not same([f.factor or 0 for f in scaled if f.kind == "scale"], 1e-2)):
        scaled = [Fault(**{**_fields(f), "kind": "term-scale"}) if f.kind == "scale" else f for f in scaled]
        verdict = INEXACT if any(f.kind == "term-scale" for f in scaled) else verdict
    elif len(series) > 1:
        scaled = list({(f.kind, f.update): f for f in reversed(scaled)}.values())
    return found + scaled, verdict


def _fields(fault: Fault) -> dict[str, object]:
    return {name: getattr(fault, name) for name in fault.__dataclass_fields__}


def _patterns(update: Judged, outcome: Outcome) -> list[Fault]:
    """Faults that one update shows by itself."""
    chosen = [(p, r) for p, r in zip(outcome.portions, outcome.ratios, strict=True) if p.call.tokens]
    if not chosen or not outcome.kinds:
        return []
    low, high = min(chosen, key=lambda pair: pair[1]), max(chosen, key=lambda pair: pair[1])
    spread = (
        f"a token of microbatch {low[0].microbatch} on rank {low[0].rank} ({low[0].call.tokens} tokens) weighs "
        f"{low[1]:.3g} of what it should, one of microbatch {high[0].microbatch} on rank {high[0].rank} "
        f"({high[0].call.tokens} tokens) {high[1]:.3g}"
    )
    faults = []
    for kind in outcome.kinds:
        evidence, factor, where = spread, None, outcome.portions[0].call.site
        if kind == "lost-microbatch":
            lost = [p for p, r in chosen if abs(r) < 1e-3]
            tokens = sum(p.call.tokens for p in lost)
            evidence = (
                f"{len(lost)} of {len(chosen)} microbatches, {tokens} tokens, were run backward and are not in the "
                "gradient that was applied"
            )
            factor, where = 0.0, lost[0].backward.where
        elif kind == "mean-of-replicas":
            totals = [sum(p.call.tokens for p in outcome.portions if p.rank == r) for r in _ranks(outcome)]
            evidence = f"replicas have {', '.join(map(str, totals))} tokens and weigh the same; {spread}"
        faults.append(Fault(kind, update.view.index, factor, evidence, where))
    return faults


def _ranks(outcome: Outcome) -> list[int]:
    return sorted({portion.rank for portion in outcome.portions})


def _factors(
    term: Sequence[tuple[Judged, Outcome]], world: int, weighting: str, usual: dict[tuple[int, ...], int], several: bool
) -> tuple[list[Fault], str, bool]:
    """Faults in how large one term is over its updates; the verdict on that; and whether it is as it declares."""
    usable = [(u, o) for u, o in term if np.isfinite(o.factor) and not set(o.kinds) & {"lost-microbatch"}]
    if not usable:
        return [], EXACT, False
    faults: list[Fault] = []
    base = _base(usable, usual)
    if base and any("not divided by A" in (cause_of(base, o, world, 1e-2) or "") for _, o in usable):
        base = None  # nothing is divided, so an odd group is not divided by the wrong number either
    regular: list[tuple[Judged, Outcome]] = []
    for update, outcome in usable:
        expected = usual[update.optimizers]
        tolerance = tolerance_of(update.view)
        share = update.microbatches / expected
        if update.microbatches != expected and base and abs(outcome.factor / base / share - 1) <= tolerance:
            faults.append(_odd_group(update, outcome, share, expected))
        else:
            regular.append((update, outcome))
    declared = weighting == "declared" and not term[0][1].means
    of_rest, verdict, sound = _constant(regular, world, declared, several) if regular else ([], EXACT, False)
    return faults + of_rest, INEXACT if faults else verdict, sound and not faults


def _base(usable: Sequence[tuple[Judged, Outcome]], usual: dict[tuple[int, ...], int]) -> float | None:
    """The factor of updates of the usual size, if they share one and it does not follow the number of tokens."""
    factors = [o.factor for u, o in usable if u.microbatches == usual[u.optimizers]]
    return float(np.mean(factors)) if factors and same(factors, 1e-2) else None


def _odd_group(update: Judged, outcome: Outcome, share: float, expected: int) -> Fault:
    kind = "partial-group" if share < 1 else "stale-gradient"
    what = (
        f"{update.microbatches} microbatches, divided as if they were {expected}"
        if share < 1
        else f"{update.microbatches} microbatches where {expected} belong to an update: what the one before left over"
    )
    where = update.view.ranks[0].steps[0].where
    return Fault(kind, update.view.index, share, f"{what}: weights sum to {outcome.factor:.4g}, not 1", where)


def _constant(
    regular: Sequence[tuple[Judged, Outcome]], world: int, declared: bool, several: bool
) -> tuple[list[Fault], str, bool]:
    """Judge the factors of updates of the usual size.

    declared: the loss call divides by nothing. several: there are other terms, so this one may have a coefficient.
    """
    factors = [outcome.factor for _, outcome in regular]
    update, outcome = regular[0]
    tolerance = max(tolerance_of(u.view) for u, _ in regular)
    site = outcome.portions[0].call.site
    constant = same(factors, tolerance)
    if constant and abs(factors[0] - 1) <= tolerance:
        return [], EXACT, True
    off = [(u, o) for u, o in regular if abs(o.factor - 1) > tolerance]
    empty = [_empty_counted(u, o, tolerance) for u, o in off]
    if all(empty):
        return [fault for fault in empty if fault], INEXACT, False
    if all(_explained(o.factor, o, world, u.view.scale, tolerance) for u, o in regular) and not constant:
        return [], EXACT_UP_TO_FACTOR, True  # numbers of the script's own that change
    if all(_one_per_example(u, o, world, tolerance) for u, o in regular) or _ones(regular, tolerance):
        return [], EXACT_UP_TO_FACTOR, True
    allowed = [factor for factor in allowed_factors(outcome, world, update.view.scale) if factor]
    factor, cause = None, None
    if constant:
        named = [_count_mismatch(u, o, tolerance, exactly=True) for u, o in off]
        if not several and cause_of(factors[0], outcome, world, tolerance) is None and all(named):
            return [fault for fault in named if fault], INEXACT, False
        if any(abs(factors[0] / known - 1) <= tolerance for known in allowed):
            return [], EXACT_UP_TO_FACTOR, True
        readings = [(factors[0] / known, cause_of(factors[0] / known, outcome, world, tolerance)) for known in allowed]
        coefficients = [reading for reading in readings if several and "tokens" not in (reading[1] or "")]
        readings = readings[:1] + coefficients
        factor, cause = next((reading for reading in readings if reading[1]), (factors[0], None))
    follows = declared and _follows_a_count(regular, tolerance, constant)
    if cause is None and not _is_plain_sum(regular, tolerance):
        mismatches = [
            _empty_counted(u, o, tolerance) or _count_mismatch(u, o, tolerance, exactly=follows or constant)
            for u, o in off
        ]
        if all(mismatches):
            return [fault for fault in mismatches if fault], INEXACT, False
    if follows:
        return [], EXACT_UP_TO_FACTOR, True
    if cause is None and not outcome.means and _is_plain_sum(regular, tolerance):
        cause = "a sum over tokens that is divided by no count of them"
    what = (
        f"every weight is {factors[0]:.6g} of what it should be"
        if constant
        else f"weights are {min(factors):.4g} to {max(factors):.4g} of what they should be, and change between updates"
    )
    evidence = f"{what}: {cause or 'the script multiplies by a number of its own'}"
    only = update.view.index if len(regular) == 1 else None
    verdict = EXACT_UP_TO_FACTOR if constant else INEXACT
    return [Fault("scale", only, factor, evidence, site, cause)], verdict, False


def _explained(factor: float, outcome: Outcome, world: int, scale: float | None, tolerance: float) -> bool:
    known = [value for value in allowed_factors(outcome, world, scale) if value]
    return any(abs(factor / value - 1) <= tolerance for value in known)


def _one_per_example(update: Judged, outcome: Outcome, world: int, tolerance: float) -> bool:
    """A sum over an example's numbers, and a mean over the examples: every example weighs the same."""
    if outcome.means or any(portion.call.examples is None for portion in outcome.portions):
        return False
    examples = sum(int((p.call.examples[0] > 0).sum()) for p in outcome.portions if p.call.examples)
    tokens = float(outcome.tokens.sum())
    if examples == tokens:
        return False
    known = [value for value in allowed_factors(outcome, world, update.view.scale) if value]
    coefficients = [value for value in known if value >= 1 or abs(1 / value - round(1 / value)) > 1e-6]
    return any(abs(outcome.weight * examples / value - 1) <= tolerance for value in coefficients)


def _ones(regular: Sequence[tuple[Judged, Outcome]], tolerance: float) -> bool:
    """Losses of one token each that are added up: a sum, written as means of one."""
    single = all(portion.denominator <= 1 for _, outcome in regular for portion in outcome.portions)
    passes = all(len({(p.rank, p.backward.index) for p in o.portions}) == len(_ranks(o)) for _, o in regular)
    return single and passes and _is_plain_sum(regular, tolerance)


def _is_plain_sum(regular: Sequence[tuple[Judged, Outcome]], tolerance: float) -> bool:
    """Every token weighs 1: nothing is divided."""
    return all(abs(outcome.weight - 1) <= tolerance for _, outcome in regular)


def _follows_a_count(regular: Sequence[tuple[Judged, Outcome]], tolerance: float, constant: bool) -> bool:
    """A sum that is divided by nothing, or by what is the same in every update, or by the number of examples."""
    weights = [outcome.weight for _, outcome in regular]
    if not constant:
        examples = [
            float(sum((p.call.examples[0] > 0).sum() for p in o.portions if p.call.examples)) for _, o in regular
        ]
        return same(weights, tolerance) or same(np.array(weights) * examples, tolerance)
    _, outcome = regular[0]
    ranks = len(_ranks(outcome))
    plain = {1.0, 1 / ranks, 1 / outcome.accumulate, 1 / (ranks * outcome.accumulate)}
    varied = not same([float(o.tokens.sum()) for _, o in regular], tolerance)
    recognised = cause_of(regular[0][1].factor, outcome, ranks, tolerance)
    return not varied and (recognised is None or any(abs(weights[0] / value - 1) <= tolerance for value in plain))


def _empty_counted(update: Judged, outcome: Outcome, tolerance: float) -> Fault | None:
    """The update is divided by its microbatches, those without a target included."""
    total, filled = len(outcome.portions), sum(portion.call.tokens > 0 for portion in outcome.portions)
    if filled == total or abs(outcome.factor * total / filled - 1) > tolerance:
        return None
    evidence = f"{total} microbatches, {total - filled} without a target: divided by {total}, not by {filled}"
    return Fault("count-mismatch", update.view.index, outcome.factor, evidence, outcome.portions[0].call.site)


def _count_mismatch(update: Judged, outcome: Outcome, tolerance: float, exactly: bool) -> Fault | None:
    """The update is divided by another whole number of targets than it has.

    exactly: only by a number that has a name; else by any that differs by at most one target per example.
    """
    portions = outcome.portions
    site = portions[0].call.site
    total = float(sum(portion.denominator for portion in portions))
    divided = total / outcome.factor
    examples = [int((p.call.examples[0] > 0).sum()) if p.call.examples else 0 for p in portions]
    if exactly and sum(examples) == total:  # one target per example: an example more is a factor, not a count
        examples = [0]
    others = {
        "one target more per example than the loss sums": total + sum(examples),
        "one target less per example than the loss sums": total - sum(examples),
        "all positions, the masked ones included": float(sum(portion.call.elements for portion in portions)),
    }
    for words, count in others.items():
        if count > 0 and count != total and abs(divided / count - 1) <= min(tolerance, 0.2 * abs(count / total - 1)):
            evidence = f"divided by {count:g}, {words}; {total:g} are summed"
            return Fault("count-mismatch", update.view.index, outcome.factor, evidence, site)
    extra = divided - total
    if not exactly and 0.5 < abs(extra) <= sum(examples) and abs(extra - round(extra)) <= 0.02:
        evidence = f"divided by {divided:.0f} where {total:g} targets are summed"
        return Fault("count-mismatch", update.view.index, outcome.factor, evidence, site)
    return None
