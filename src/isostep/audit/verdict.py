"""From the logs of all ranks to a report. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from .document import INEXACT, NOT_OBSERVED, Finding, Report, Update, Weight
from .records import Backward, Forward, Log, Step
from .remedies import remedy
from .series import Fault, Judged, faults_of_weights
from .surroundings import faults_around
from .terms import outcomes
from .weights import Portion, Timeline, UpdateView, timeline

EXPLAINED = 1e-3
"""Residual up to which the weights of a float32 update stand."""


def judge(logs: Sequence[Log], weighting: str = "declared") -> Report:
    """Judge what all ranks saw. Raises nothing on incomplete logs: what cannot be said is in `not_observed`."""
    world = max(log.world for log in logs)
    times = timeline(logs)
    reasons = _reasons(logs, times, world)
    applied = [view for view in times.updates if view.applied]
    judged = [Judged(view, of_view) for view, of_view in zip(applied, outcomes(applied, weighting), strict=True)]
    seen = [update for update in judged if _blind(update) is None]
    reasons += _blind_updates(judged)
    faults, verdict = faults_of_weights(seen, world, weighting)
    faults += _unsynchronised(judged) + _stale(seen, times) + _lost_at_the_end(logs, times)
    faults += faults_around(logs, times, seen, bool(faults))
    faults = _without_consequences(faults)
    if any(fault.kind in INEXACT_KINDS for fault in faults):
        verdict = INEXACT
    if verdict != INEXACT and (not seen or len(seen) < len(judged)):
        verdict = NOT_OBSERVED
    unknown = any(outcome.unknown for update in seen for outcome in update.outcomes)
    whole = len(logs) == world and all(log.ended and not log.in_backward for log in logs)
    whole &= len({sum(isinstance(event, Step) for event in log.events) for log in logs}) == 1
    unknown |= any(update.view.apart or any(b.unseen for b in _passes_of(update)) for update in seen)
    if verdict != INEXACT and (unknown or not whole):
        verdict = NOT_OBSERVED
    reasons += _unknowns(seen) + _tail(logs, judged)
    library = _library(logs, world)
    return Report(
        verdict, weighting, world, [_update(update) for update in seen],
        [_finding(fault, library, seen, world) for fault in faults], list(dict.fromkeys(reasons)), library,
    )  # fmt: skip


INEXACT_KINDS = {
    "mean-of-means", "mean-of-replicas", "count-mismatch", "term-scale", "partial-group", "stale-gradient",
    "lost-microbatch", "unsynchronised-replicas", "duplicate-example", "uneven-weights", "clip-per-microbatch",
    "clip-before-unscale", "scaler-disagrees", "low-precision-sum", "no-update",
}  # fmt: skip
"""With a finding of these, the gradient that was applied is not the objective's, whatever the weights are."""

CONSEQUENCES = {
    "no-update": {"lost-microbatch"},
    "unsynchronised-replicas": {
        "mean-of-replicas",
        "mean-of-means",
        "lost-microbatch",
        "uneven-weights",
        "scale",
        "term-scale",
        "count-mismatch",
        "partial-group",
    },
    "clip-per-microbatch": {
        "uneven-weights",
        "mean-of-means",
        "scale",
        "term-scale",
        "mean-of-replicas",
        "lost-microbatch",
        "count-mismatch",
        "partial-group",
    },
    "clip-before-unscale": {"scale"},
    "stale-gradient": {"uneven-weights", "scale"},
    "low-precision-sum": {"uneven-weights", "scale", "mean-of-means"},
    "scaler-disagrees": {"unsynchronised-replicas", "scale", "uneven-weights"},
    "sync-every-microbatch": set(),
}
"""A fault, and what it makes the weights look like, which is then not a finding of its own."""


def _without_consequences(faults: Sequence[Fault]) -> list[Fault]:
    kinds = {fault.kind for fault in faults}
    hidden = set().union(*(CONSEQUENCES.get(kind, set()) for kind in kinds))
    return [fault for fault in faults if fault.kind not in hidden]


def _passes_of(update: Judged) -> list[Backward]:
    return [portion.backward for portion in update.view.portions]


def _blind(update: Judged) -> str | None:
    """Why the weights of an update cannot be trusted; None where they can."""
    view = update.view
    if not any(portion.call.tokens for portion in view.portions):
        return (
            "no known loss function was run backward (name yours with --loss module:function; run a compiled one "
            "with TORCH_COMPILE_DISABLE=1)"
        )
    if not np.isfinite(view.residual):
        return "the gradient that was applied could not be read (not finite, or in shards)"
    if view.residual > EXPLAINED and not view.low_precision:
        return f"{100 * view.residual:.2g} % of the applied gradient comes from nothing that was seen"
    if not view.explained:
        return "microbatches are too alike to tell what each contributed"
    return None


def _blind_updates(judged: Sequence[Judged]) -> list[str]:
    """The reasons, each once, with its updates."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for update in judged:
        reason = _blind(update)
        if reason is not None:
            numbers[reason].append(update.view.index)
    return [
        f"update{'s' if len(of) > 1 else ''} {', '.join(map(str, of[:4]))}{', ...' if len(of) > 4 else ''}: {reason}"
        for reason, of in numbers.items()
    ]


def _reasons(logs: Sequence[Log], times: Timeline, world: int) -> list[str]:
    reasons = [note for log in logs for note in log.notes]
    if len(logs) < world:
        missing = sorted(set(range(world)) - {log.rank for log in logs})
        reasons.append(f"rank {', '.join(map(str, missing))} of {world} did not report")
    events = [event for log in logs for event in log.events]
    counts = [sum(isinstance(event, Step) for event in log.events) for log in logs]
    if len(set(counts)) > 1:
        times_run = ", ".join(map(str, counts))
        reasons.append(f"optimizers ran {times_run} times by rank: updates that only some ranks made are not judged")
    if any(log.in_backward for log in logs):
        reasons.append("an optimizer ran inside a backward pass, where its updates cannot be told apart")
    if not times.updates:
        backwards = sum(isinstance(event, Backward) for event in events)
        reasons.append(f"no optimizer of torch.optim ran ({backwards} backward passes)")
    if any(event.unseen for event in events if isinstance(event, Backward)):
        reasons.append(
            "a part of the loss comes from the same outputs by no known loss function (fused, compiled, by hand): name "
            "it with --loss module:function"
        )
    elif any(event.bypassed for event in events if isinstance(event, Backward)):
        reasons.append(
            "a part of the loss that goes through no known loss function (a penalty, a fused or compiled loss): its "
            "weight is not judged"
        )
    return reasons


def _unsynchronised(judged: Sequence[Judged]) -> list[Fault]:
    for update in judged:
        view = update.view
        if not view.synchronised:
            where = view.ranks[0].steps[0].where
            evidence = "each rank applies another gradient: the replicas' own, reduced over none or not over all"
            return [Fault("unsynchronised-replicas", view.index, None, evidence, where)]
    for update in judged:
        sums = [step.checksum for step in (rank.steps[-1] for rank in update.view.ranks) if not step.in_parts]
        known = [s for s in sums if s is not None]
        if len(known) > 1 and any(np.linalg.norm(s - known[0]) > 1e-6 * np.linalg.norm(known[0]) for s in known[1:]):
            where = update.view.ranks[0].steps[-1].where
            evidence = "the parameters differ between ranks after the same update"
            return [Fault("unsynchronised-replicas", update.view.index, None, evidence, where)]
    return []


def _stale(seen: Sequence[Judged], times: Timeline) -> list[Fault]:
    """Gradients that an update before, or a skipped group, has left in place."""
    found = []
    for update in seen:
        if update.view.stale > 1e-2:
            evidence = (
                f"{update.view.stale:.3g} times the gradient of the update before is in this one: it was not cleared"
            )
            where = update.view.ranks[0].steps[0].where
            found.append(Fault("stale-gradient", update.view.index, update.view.stale, evidence, where))
    return found + _poisoned(times)


def _poisoned(times: Timeline) -> list[Fault]:
    """A gradient that is not finite though all that was added since the last update is: it was kept."""
    for view in times.updates:
        for step in view.ranks[0].steps:
            passes = [
                backward.sketches[step.optimizer]
                for rank in view.ranks
                for backward in rank.backwards
                if step.optimizer in backward.sketches
            ]
            if step.sketch is None or np.isfinite(step.sketch).all():
                continue
            if passes and all(np.isfinite(sketch).all() for sketch in passes):
                evidence = (
                    f"the gradient is NaN or inf, and none of the {len(passes)} backward passes of this update is: it "
                    "was kept from an update that was skipped"
                )
                return [Fault("stale-gradient", view.index, None, evidence, step.where)]
    return []


def _lost_at_the_end(logs: Sequence[Log], times: Timeline) -> list[Fault]:
    """Backward passes after the last update of a script that ended by itself."""
    if any(log.stopped or not log.ended or log.in_backward for log in logs):
        return []
    rest = times.rest[0].backwards
    lost = [b for b in rest if b.calls]
    if not lost or all(not np.isfinite(s).all() for b in lost for s in b.sketches.values()):
        return []
    tokens = sum(call.tokens for b in lost for call in b.calls)
    what = "no optimizer ran" if not times.updates else "no optimizer ran after them"
    evidence = f"the last {len(lost)} microbatches, {tokens} tokens, were run backward and {what}"
    return [Fault("lost-microbatch", None, 0.0, evidence, lost[-1].where)]


def _unknowns(seen: Sequence[Judged]) -> list[str]:
    apart = [str(update.view.index) for update in seen if update.view.apart]
    reasons = (
        [f"update {', '.join(apart)}: its optimizers hold the same microbatch at different factors"] if apart else []
    )
    return reasons + [
        f"{outcome.portions[0].call.site}: {outcome.unknown}"
        for update in seen
        for outcome in update.outcomes
        if outcome.unknown
    ]


def _tail(logs: Sequence[Log], judged: Sequence[Judged]) -> list[str]:
    sizes = {update.microbatches for update in judged}
    if any(log.stopped for log in logs) and len(sizes) == 1 and max(sizes) > 1:
        return ["tail not observed: no update of fewer microbatches was seen (--updates all runs to the end)"]
    return []


def _library(logs: Sequence[Log], world: int) -> str:
    events = [event for log in logs for event in log.events]
    found = Counter(event.idiom for event in events if isinstance(event, Backward) and event.idiom != "pytorch")
    if found:
        return found.most_common(1)[0][0]
    return "ddp" if world > 1 or any(event.reduces for event in events if isinstance(event, Forward)) else "pytorch"


def _update(update: Judged) -> Update:
    weights = [
        _weight(portion, float(expected), float(ratio))
        for outcome in update.outcomes
        for portion, expected, ratio in zip(outcome.portions, outcome.expected, outcome.ratios, strict=True)
    ]
    weights.sort(key=lambda weight: (weight.rank, weight.microbatch_index))
    view: UpdateView = update.view
    return Update(view.index, view.tokens, view.residual, weights)


def _weight(portion: Portion, expected: float, ratio: float) -> Weight:
    call = portion.call
    low, high = sorted((float(call.min * portion.factor), float(call.max * portion.factor)))
    return Weight(
        portion.rank, portion.microbatch, call.site, call.tokens, float(portion.weight), low, high, expected, ratio
    )


def _finding(fault: Fault, library: str, seen: Sequence[Judged], world: int) -> Finding:
    sizes = Counter(int(outcome.accumulate) for update in seen for outcome in update.outcomes)
    accumulate = sizes.most_common(1)[0][0] if sizes else 1
    factor = None if fault.factor is None else float(fault.factor)
    mend = remedy(fault.kind, library, accumulate=accumulate, replicas=world, factor=factor, cause=fault.cause)
    return Finding(fault.kind, fault.update, factor, fault.evidence, mend, fault.where)
