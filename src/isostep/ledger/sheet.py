"""The sheet of a run: everything that its ledger says, as one document and as a page of text.

Read from the events alone, so a run that was killed has a sheet too. What a later resume superseded is counted in
"superseded_updates" and nowhere else; only what cannot be undone (memory that ran out, checkpoints, starts, the wall
clock) speaks of all events. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from ..errors import InputError, IsostepError
from ..quality import judge
from .book import Book
from .events import (
    CheckpointAnnounced,
    Dropped,
    Evaluated,
    Event,
    MemoryObserved,
    OutOfMemory,
    Resumed,
    RunEnded,
    RunStarted,
    UpdateDone,
)
from .fold import prove_coverage
from .ledger import read
from .sheet_text import sheet_text
from .words import find, stages_of

__all__ = ["LEDGER", "read_run", "sheet", "sheet_text"]

LEDGER = "ledger.jsonl"
"""Name of the ledger in a run directory."""

SCHEMA = 1
"""Of the sheet's document."""


def read_run(run_dir: Path) -> list[Event]:
    """The events of a run directory. Raises InputError where there is no such directory, or no ledger in it."""
    if not run_dir.is_dir():
        raise InputError.of(
            "run directory", str(run_dir), "a directory that exists", "check the path; `isostep runs` lists runs"
        )
    if not (run_dir / LEDGER).exists():
        raise InputError.of(
            "run directory", str(run_dir), f"one with a {LEDGER}", "give a run's own; `isostep runs` lists runs"
        )
    return read(run_dir / LEDGER)


def sheet(events: Sequence[Event], *, prove: bool = True) -> dict[str, Any]:
    """What the ledger of a run says, as a document that JSON can hold; a float without a number in JSON is text.

    prove: prove coverage, which takes a microsecond per example; "coverage" is None without.
    Raises IsostepError for a ledger in which no run has started.
    """
    started = next((event for event in events if isinstance(event, RunStarted)), None)
    if started is None:
        raise IsostepError("ledger: got no start of a run, expected one; the run died before it began: start it again")
    book = Book(started, events)
    document = {
        "schema": SCHEMA,
        **_outcome(book),
        "what_hash": book.what_hash,
        "what": book.settings["what"],
        "run": book.settings["run"],
        "facts": book.facts,
        "versions": book.versions,
        "num_examples": started.num_examples,
        "seed": started.seed,
        "layouts": _layouts(book),
        "updates": _updates(book),
        "per_applied_update": _per_applied_update(book),
        "totals": _totals(book),
        "normalisation": _normalisation(book),
        "last_group": _last_group(book),
        "clipping": _clipping(book),
        "memory": _memory(book),
        "out_of_memory": [asdict(event) for event in events if isinstance(event, OutOfMemory)],
        "checkpoints": _checkpoints(book),
        "resumes": _resumes(book),
        "time": _time(book),
        "validation": _validation(book),
        "quality": _quality(book),
        "coverage": _coverage(book) if prove else None,
    }
    return _plain(document)


def _plain(value: Any) -> Any:
    """The value with "nan", "inf" and "-inf" for such floats, as in a ledger, and lists for tuples."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _outcome(book: Book) -> dict[str, Any]:
    """How the last start of the run ended, if it did."""
    ended = next((event for event in reversed(book.starts[-1]) if isinstance(event, RunEnded)), None)
    return {
        "state": ended.reason if ended else "unfinished",
        "message": ended.message if ended else "",
        "purpose": find(book.settings, "run", "run", "purpose"),
    }


def _layouts(book: Book) -> list[dict[str, Any]]:
    """Each layout in order, with the standing updates under it; a resume with the same one goes on with it."""
    layouts: list[dict[str, Any]] = []
    updates: list[list[UpdateDone]] = []
    for event in book.standing:
        if isinstance(event, RunStarted | Resumed) and not (layouts and layouts[-1]["how"] == event.how):
            layouts.append({"from_update": event.from_update if isinstance(event, Resumed) else 0, "how": event.how})
            updates.append([])
        if isinstance(event, UpdateDone) and updates:
            updates[-1].append(event)
    return [layout | _sizes(layout["how"], under) for layout, under in zip(layouts, updates, strict=True)]


def _sizes(how: dict[str, Any], updates: list[UpdateDone]) -> dict[str, Any]:
    """D, A and the mean m of the updates under a layout. Microbatches are spread to within one over the replicas."""
    replicas, microbatches = find(how, "replicas"), [update.counters.microbatches for update in updates]
    known = isinstance(replicas, int) and replicas > 0 and microbatches
    examples = sum(update.counters.examples for update in updates)
    return {
        "replicas": replicas,
        "updates": len(updates),
        "microbatches_per_replica": [min(microbatches) // replicas, -(-max(microbatches) // replicas)]
        if known
        else None,
        "mean_examples_per_microbatch": examples / sum(microbatches) if sum(microbatches) else None,
    }


def _updates(book: Book) -> dict[str, Any]:
    names = ("attempted", "applied", "skipped", "empty", "dropped_examples")
    everything = sum(isinstance(event, UpdateDone) for event in book.events)
    return {
        **{name: getattr(book.totals, name) for name in names},
        "superseded_updates": everything - book.totals.attempted,
        "planned": book.facts.get("planned_updates"),
    }


def _per_applied_update(book: Book) -> dict[str, Any]:
    return {
        name: _spread([getattr(u.counters, name) for u in book.applied]) for name in ("examples", "supervised_tokens")
    }


def _spread(values: list[int]) -> dict[str, float] | None:
    return {"min": min(values), "median": median(values), "max": max(values)} if values else None


def _totals(book: Book) -> dict[str, Any]:
    """Counts of the attempted updates, and of the applied ones among them."""
    counters = book.totals.counters
    return {
        "attempted": asdict(counters),
        "applied": asdict(book.totals.applied_counters),
        "padding_share": counters.padding_tokens / counters.total_tokens if counters.total_tokens else None,
    }


def _normalisation(book: Book) -> dict[str, Any]:
    """By term: its coefficient and what its sum is divided by. Names alone where the recipe has announced none."""
    seen = {name: {} for update in book.attempted[-1:] for name in update.denominators}
    terms = find(book.facts, "terms") or seen
    return {
        name: {"coefficient": find(t, "coefficient"), "divided_by": find(t, "denominator")} for name, t in terms.items()
    }


def _last_group(book: Book) -> dict[str, Any]:
    """The partial groups at the end of epochs: updates where they are kept, drops where they are dropped."""
    if book.started.last_group == "drop":
        sizes = [len(event.ids) for event in book.standing if isinstance(event, Dropped)]
    else:
        sizes = [u.stop - u.start for u, settings in book.settled if _is_partial(u, book.started, settings["what"])]
    return {"handling": book.started.last_group, "partial_groups": len(sizes), "examples": sum(sizes)}


def _is_partial(update: UpdateDone, started: RunStarted, what: dict[str, Any]) -> bool:
    """Whether the end of the epoch, not the budget, ended the group of this update; see `GroupPlan`."""
    if update.start < 0 or update.stop < started.num_examples:
        return False
    budget = find(what, "update", "tokens_per_update")
    if budget is not None:
        return update.counters.total_tokens - update.counters.padding_tokens < budget
    size = find(what, "update", "examples_per_update") or started.examples_per_update
    return size is not None and update.stop - update.start < size


def _clipping(book: Book) -> dict[str, Any]:
    """The norm that gradients are clipped to (0: not at all), and how many applied updates had a larger one."""
    clipped = 0
    for update, settings in book.settled:
        limit = find(settings, "what", "optimizer", "clip_norm")
        clipped += bool(limit) and update.status == "applied" and (update.grad_norm or 0.0) > limit
    return {"clip_norm": find(book.settings, "what", "optimizer", "clip_norm"), "clipped_updates": clipped}


def _memory(book: Book) -> list[dict[str, Any]]:
    """Peaks in bytes of each start that observed some: its last observation, an entry per replica, or per stage."""
    peaks = []
    for events in book.starts:
        first = events[0]
        stages = stages_of(getattr(first, "how", {}))
        for seen in [event for event in events if isinstance(event, MemoryObserved)][-1:]:
            rows = zip(seen.devices, seen.baseline, seen.first_group, seen.later_groups, strict=False)
            names = ("device", "baseline", "first_group", "later_groups")
            replicas = [_place(i, stages) | dict(zip(names, row, strict=True)) for i, row in enumerate(rows)]
            peaks.append({"from_update": first.from_update if isinstance(first, Resumed) else 0, "replicas": replicas})
    return peaks


def _place(rank: int, stages: int) -> dict[str, int]:
    """Where a rank is; the replica is the outermost."""
    replica, stage = divmod(rank, stages)
    return {"replica": replica} | ({"stage": stage} if stages > 1 else {})


def _checkpoints(book: Book) -> dict[str, Any]:
    announced = [event for event in book.events if isinstance(event, CheckpointAnnounced)]
    last = {"after_attempted": announced[-1].after_attempted, "path": announced[-1].path} if announced else None
    return {"announced": len(announced), "last": last}


def _resumes(book: Book) -> list[dict[str, Any]]:
    """Each resume, and the highest update that had been attempted when it began."""
    resumes, reached = [], 0
    for event in book.events:
        if isinstance(event, UpdateDone):
            reached = event.attempted
        if isinstance(event, Resumed):
            resumes.append(asdict(event) | {"reached": reached})
            reached = event.from_update
    return resumes


def _time(book: Book) -> dict[str, Any]:
    """Seconds of the standing updates, and of the starts by their time stamps, without the gaps between them."""
    timed = [update for update in book.attempted if update.seconds is not None]
    training = sum(update.seconds or 0.0 for update in timed)
    rates = {
        f"{name}_per_second": sum(getattr(update.counters, name) for update in timed) / training if training else None
        for name in ("total_tokens", "supervised_tokens")
    }
    return {
        "started": book.started.time,
        "last_event": book.events[-1].time,
        "starts": len(book.starts),
        "training_seconds": training if timed else None,
        "wall_seconds": sum(max(0.0, events[-1].time - events[0].time) for events in book.starts),
        **rates,
    }


def _validation(book: Book) -> dict[str, Any]:
    """All evaluations with their places, and the first, the best and the last of them."""
    seen: list[dict[str, Any]] = [
        asdict(place) | {"loss": event.loss} for place, event in book.curve if isinstance(event, Evaluated)
    ]
    numbers = [entry for entry in seen if entry["loss"] is not None and math.isfinite(entry["loss"])]
    return {
        "examples": book.facts.get("validation_examples"),
        "first": seen[0] if seen else None,
        "best": min(numbers, key=lambda entry: entry["loss"], default=None),
        "last": seen[-1] if seen else None,
        "evaluations": seen,
    }


def _quality(book: Book) -> dict[str, Any]:
    """The rule that was fixed before the run, and its verdict."""
    rule = find(book.settings, "run", "quality", "accept_if")
    axis = find(book.settings, "run", "quality", "axis") or "supervised_tokens"
    metric = find(book.settings, "run", "quality", "metric") or "validation_loss"
    kind = Evaluated if metric == "validation_loss" else UpdateDone
    measured = [(getattr(place, axis), event.loss) for place, event in book.curve if isinstance(event, kind)]
    verdict = judge(rule, [(float(place), loss) for place, loss in measured if loss is not None])
    return {"rule": rule, "axis": axis, "metric": metric, "verdict": verdict.verdict, "value": verdict.value,
            "place": verdict.place, "text": verdict.text()}  # fmt: skip


def _coverage(book: Book) -> dict[str, Any]:
    """The proof, made anew from the order and the ledger alone."""
    proof = prove_coverage(book.events, book.plan.ids_of)
    epochs = [asdict(epoch) | {"covered": epoch.covered} for epoch in proof.epochs]
    return {"proved": proof.ok, "epochs": epochs, "faults": list(proof.faults)}
