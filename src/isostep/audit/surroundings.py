"""Faults around the weights: schedulers, clipping, scalers, logs, memory, data. From events alone. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from .records import Backward, Batch, BatchNorm, Clip, Forward, Log, Logged, Noise, SchedulerStep, Step, ZeroGrad
from .series import Fault, Judged
from .weights import RankUpdate, Timeline

LOG_ERROR = 0.02
"""Relative error of a logged loss from which it is a finding. One over A may be multiplied again by the script."""

LOW_ERROR = 1e-2
"""Relative error of a sum in 16 bits from which it is a finding: five roundings of bfloat16."""


def faults_around(logs: Sequence[Log], timeline: Timeline, judged: Sequence[Judged], wrong: bool) -> list[Fault]:
    """All of them. `judged`: the updates that were applied. `wrong`: the weights are inexact already."""
    found = [
        *_schedulers(timeline),
        *_clipping(timeline),
        *_scalers(timeline),
        *_reductions(timeline),
        *_graphs(timeline),
        *_batch_norm(timeline),
        *_movement(timeline),
        *_missing(timeline),
        *_dropout(logs, timeline),
        *_duplicates(logs, timeline),
        *_precision(judged),
    ]
    return found if wrong else found + list(_logged(judged))


# ------------------------------------------------------------------------------------------------ schedule


def _schedulers(timeline: Timeline) -> Iterator[Fault]:
    """A scheduler that goes on several times per update, in each update; or where the optimizer was skipped."""
    counts: dict[int, list[int]] = defaultdict(list)
    events: dict[int, SchedulerStep] = {}
    for view in timeline.updates:
        rank = view.ranks[0]
        of_update = Counter(event.scheduler for event in rank.events if isinstance(event, SchedulerStep))
        events |= {event.scheduler: event for event in rank.events if isinstance(event, SchedulerStep)}
        for scheduler in {*counts, *of_update}:
            counts[scheduler].append(of_update[scheduler])
    for scheduler, of_updates in counts.items():
        event = events[scheduler]
        regular = of_updates[1:] if len(of_updates) > 1 else of_updates
        if regular and min(regular) >= 2:
            times = float(np.median(regular))
            evidence = f"{event.name} steps {times:g} times for each update of the optimizer"
            yield Fault("scheduler-unit", None, times, evidence, event.where)
    for view in timeline.updates:
        for rank in view.ranks[:1]:
            skipped = {step.optimizer: step for step in rank.steps if not step.applied}
            after = rank.events[_position(rank, rank.steps[0]) :]
            for event in after:
                if isinstance(event, SchedulerStep) and event.optimizer in skipped:
                    scale = skipped[event.optimizer].loss_scale
                    evidence = f"the GradScaler (scale {scale:g}) skipped the optimizer, and {event.name} went on"
                    yield Fault("skip-advances-scheduler", view.index, None, evidence, event.where)
                    break


def _position(rank: RankUpdate, wanted: object) -> int:
    return next(i for i, event in enumerate(rank.events) if event is wanted)


# ------------------------------------------------------------------------------------------------ clipping, scalers


def _clipping(timeline: Timeline) -> Iterator[Fault]:
    for view in timeline.updates:
        rank = view.ranks[0]
        last = {
            optimizer: i
            for i, event in enumerate(rank.events)
            if isinstance(event, Backward)
            for optimizer in event.sketches
        }
        early, scaled = [], []
        for i, event in enumerate(rank.events):
            if not isinstance(event, Clip):
                continue
            if any(i < last.get(o, -1) and not _cleared(rank, i, last[o], o) for o in event.optimizers):
                early.append(event)
            if event.scaled:
                scaled.append(event)
        if early:
            lowest = min(event.coefficient for event in early)
            evidence = (
                f"gradients are clipped {len(early)} times before the last microbatch has added its own "
                f"(by up to x{lowest:.3g}); what is added later is not clipped with them"
            )
            yield Fault("clip-per-microbatch", view.index, None, evidence, early[0].where)
        if scaled:
            evidence = (
                f"the gradients still carried the loss scale {view.scale or 0:g} and were multiplied by "
                f"{scaled[0].coefficient:.3g}"
            )
            yield Fault("clip-before-unscale", view.index, scaled[0].coefficient, evidence, scaled[0].where)


def _cleared(rank: RankUpdate, begin: int, end: int, optimizer: int) -> bool:
    return any(isinstance(e, ZeroGrad) and optimizer in e.optimizers for e in rank.events[begin:end])


def _scalers(timeline: Timeline) -> Iterator[Fault]:
    for view in timeline.updates:
        steps = [rank.steps[0] for rank in view.ranks]
        scales = [step.loss_scale for step in steps]
        if len({*scales}) > 1:
            evidence = f"loss scales by rank: {', '.join(f'{s:g}' if s else 'none' for s in scales)}"
            yield Fault("scaler-disagrees", view.index, None, evidence, steps[0].where)
        elif len({step.applied for step in steps}) > 1:
            skipped = [str(r) for r, step in enumerate(steps) if not step.applied]
            evidence = f"rank {', '.join(skipped)} skipped the update, the others applied it"
            yield Fault("scaler-disagrees", view.index, None, evidence, steps[0].where)


def _reductions(timeline: Timeline) -> Iterator[Fault]:
    """Backward passes that DistributedDataParallel reduces, of those that feed one update."""
    several = []
    for view in timeline.updates:
        count, due = 0, False
        for event in view.ranks[0].events:
            if isinstance(event, Forward):
                due |= event.reduces
            elif isinstance(event, Backward):
                count += due
                due = False
        several.append(count)
    if several and min(several) >= 2:
        forwards = [e for e in timeline.updates[0].ranks[0].events if isinstance(e, Backward)]
        times = float(np.median(several))
        evidence = f"{times:g} backward passes per update reduce all gradients over the replicas; one is enough"
        yield Fault("sync-every-microbatch", None, times, evidence, forwards[0].where)


# ------------------------------------------------------------------------------------------------ memory, modules


def _graphs(timeline: Timeline) -> Iterator[Fault]:
    alive = [view.ranks[0].steps[-1].old_graphs for view in timeline.updates]
    if len(alive) >= 4 and alive[-1] > alive[-2] > 0:
        where = timeline.updates[-1].ranks[0].backwards[-1].where if timeline.updates[-1].ranks[0].backwards else None
        evidence = f"after {len(alive)} updates the graphs of {alive[-1]} loss calls of earlier updates are alive"
        yield Fault("retained-graph", None, None, evidence, where)


def _batch_norm(timeline: Timeline) -> Iterator[Fault]:
    for view in timeline.updates:
        norms = [event for event in view.ranks[0].events if isinstance(event, BatchNorm)]
        if norms and view.microbatches and view.microbatches[0] > 1:
            evidence = (
                f"BatchNorm in training mode takes the statistics of each of {view.microbatches[0]} microbatches; one "
                "big batch has one, and its running statistics move once"
            )
            yield Fault("batchnorm", None, None, evidence, norms[0].where)
            return


def _movement(timeline: Timeline) -> Iterator[Fault]:
    """An optimizer that ran in two updates or more and never moved its parameters."""
    moved: dict[int, list[Step]] = defaultdict(list)
    for view in timeline.updates:
        for step in view.ranks[0].steps:
            if step.applied:
                moved[step.optimizer].append(step)
    for steps in moved.values():
        if all(step.moved is False for step in steps) and (len(steps) > 1 or not steps[0].gradients):
            reason = (
                "none of its parameters has a gradient"
                if not any(step.gradients for step in steps)
                else "the learning rate is 0"
                if not any(step.learning_rate for step in steps)
                else "gradients are 0"
            )
            evidence = f"{steps[0].name} ran {len(steps)} times and moved none of its parameters: {reason}"
            yield Fault("no-update", None, 0.0, evidence, steps[0].where)


def _missing(timeline: Timeline) -> Iterator[Fault]:
    for view in reversed(timeline.updates):
        names = view.ranks[0].steps[-1].missing
        if names:
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            evidence = f"{shown}: a gradient arrives, and no optimizer holds the parameter"
            yield Fault("parameters-missing", None, None, evidence, view.ranks[0].steps[-1].where)
            return


def _dropout(logs: Sequence[Log], timeline: Timeline) -> Iterator[Fault]:
    """The state of the generator at the first dropout of each forward pass is the same on all ranks."""
    if len(logs) < 2:
        return
    states = [{e.forward: e.state for e in log.events if isinstance(e, Noise)} for log in logs]
    shared = set(states[0]).intersection(*states[1:])
    if shared and all(len({of_rank[forward] for of_rank in states}) == 1 for forward in shared):
        where = next((e.where for log in logs for e in log.events if isinstance(e, Backward)), None)
        evidence = f"in {len(shared)} forward passes dropout begins from the same random state on all {len(logs)} ranks"
        yield Fault("dropout-shared", None, None, evidence, where)


# ------------------------------------------------------------------------------------------------ data


def _duplicates(logs: Sequence[Log], timeline: Timeline) -> Iterator[Fault]:
    """By the index that a DataLoader fetched, and by content; content alone only within one update."""
    repeated: Counter[int] = Counter()
    for log in logs:
        repeated.update(h for event in log.events if isinstance(event, Forward) for h in _telling(event))
    contents = sum(count > 1 for count in repeated.values())
    by_index = _repeated_indices(logs if repeated else logs[:1])  # without contents, ranks may hold other data each
    if by_index is not None:
        if by_index and (contents or not repeated):
            shown = ", ".join(map(str, by_index[:6])) + (" and more" if len(by_index) > 6 else "")
            ranks = "on several ranks or " if len(logs) > 1 else ""
            evidence = (
                f"examples {shown} are used {ranks}more than once in one pass over the data ({len(by_index)} in all)"
            )
            yield Fault("duplicate-example", None, None, evidence, None)
        return
    if len(logs) < 2 or any(isinstance(event, Batch) for log in logs for event in log.events):
        return  # within one rank, what comes twice may have been drawn twice
    for view in timeline.updates:
        of_ranks = [{h for e in rank.events if isinstance(e, Forward) for h in _telling(e)} for rank in view.ranks]
        everywhere = Counter(h for of_rank in of_ranks for h in of_rank)
        twice = sum(count > 1 for count in everywhere.values())
        if twice:
            evidence = f"{twice} of the {len(everywhere)} examples of this update are used on several ranks"
            yield Fault("duplicate-example", view.index, None, evidence, None)
            return


def _telling(event: Forward) -> list[int]:
    return [] if event.hashes is None else [int(h) for h in event.hashes if h]


def _repeated_indices(logs: Sequence[Log]) -> list[int] | None:
    """Indices that come more than once within one pass of a training loader over its data; None without a loader."""
    training: dict[int, Counter[int]] = defaultdict(Counter)
    for log in logs:
        last: dict[int, int] = {}
        backward = 0
        fed: set[int] = set()
        batches: list[Batch] = []
        for event in log.events:
            if isinstance(event, Backward):
                backward += 1
                fed |= {loader for loader, before in last.items() if before < backward}
            elif isinstance(event, Batch):
                batches.append(event)
                last = {event.loader: backward}
        for batch in batches:
            if batch.loader in fed and not batch.replacement:
                training[batch.loader].update(batch.indices)
    if not training:
        return None
    return sorted({i for counts in training.values() for i, count in counts.items() if count > 1})


# ------------------------------------------------------------------------------------------------ precision, logs


def _precision(judged: Sequence[Judged]) -> Iterator[Fault]:
    """Sums in bfloat16 or float16 that lose what is added late."""
    for update in judged:
        view = update.view
        lost = abs(view.kept - 1)
        if view.low_precision and (view.residual > LOW_ERROR or LOW_ERROR < lost < 0.5):
            error = float(np.hypot(view.residual, lost if lost < 0.5 else 0))
            evidence = (
                f"{update.microbatches} microbatches are summed in 16 bits: the sum is off by {error:.2%} "
                "(one rounding: 0.2 %)"
            )
            factor = view.kept if LOW_ERROR < lost < 0.5 else None
            yield Fault("low-precision-sum", view.index, factor, evidence, view.ranks[0].steps[0].where)
            return


def _logged(judged: Sequence[Judged]) -> Iterator[Fault]:
    """A value that is read once per update of several microbatches, and is not the loss of the update."""
    for update in judged:
        view = update.view
        if len(update.outcomes) != 1 or not view.microbatches or view.microbatches[0] < 2:
            continue
        own = [portion for portion in update.outcomes[0].portions if portion.rank == 0]
        denominators = sum(portion.denominator for portion in own)
        passes = list({portion.backward.index: portion.backward for portion in own}.values())
        if not denominators or len(own) < 2:
            continue
        right = sum(portion.call.total for portion in own) / denominators
        wrong = {
            "the loss of the last microbatch": [own[-1].call.value, own[-1].call.value / len(own), passes[-1].value],
            "the mean over microbatches of their means": [float(np.mean([portion.call.value for portion in own]))],
        }
        if own[0].call.reduction == "sum":
            wrong = {"the loss of the last microbatch": [passes[-1].value]}
        if len(passes) == 1:
            continue  # one backward pass over all: its value is the update's
        reads = defaultdict(list)
        for event in view.ranks[0].events:
            if isinstance(event, Logged):
                reads[event.where].append(event.value)
        for where, values in reads.items():
            if len(values) != 1 or not np.isfinite(values[0]) or not values[0]:
                continue
            for words, candidates in wrong.items():
                close = any(abs(values[0] - c) <= 1e-6 * max(abs(c), 1e-12) for c in candidates)
                times = len(own) if abs(values[0] * len(own) - own[-1].call.value) <= 1e-6 * abs(values[0]) else 1
                if close and abs(values[0] * times - right) > LOG_ERROR * abs(right):
                    undone = f" (times A: {values[0] * times:.5g})" if times > 1 else ""
                    evidence = f"{values[0]:.5g}{undone} is read, {words}; the loss of the update is {right:.5g}"
                    yield Fault("wrong-log", view.index, values[0] / right, evidence, where)
                    return
