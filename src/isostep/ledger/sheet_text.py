"""The sheet of a run as a page of text, at most 88 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from ..units import count
from .words import duration, find, mebibytes, moment, number, stages_of, whole

WIDTH = 88
LABEL = 20
"""Columns of a label, its indent included."""

MOST_ROWS = 8
"""Rows of a long list that are shown; the rest is counted."""

Row = tuple[str, str | None]
"""A label and its text. Without a text, the row is left out."""

STATES = {
    "complete": "complete",
    "stopped": "stopped on request; it can be resumed",
    "failed": "failed",
    "unfinished": "unfinished: still running, or killed",
}


def sheet_text(document: dict[str, Any], width: int = WIDTH) -> str:
    """The document of `sheet` for people: sections of aligned lines, the long ones wrapped at `width`."""
    sections = [
        _section("run", _run(document), width),
        _section("model", _model(document), width),
        _section("layout", _layouts(document["layouts"]), width),
        _section("update", _update(document), width),
        _section("totals", _totals(document), width),
        _section("time", _time(document["time"]), width),
        _section("history", _history(document), width),
        _memory(document["memory"]),
        _validation(document["validation"]),
        _section("quality", _quality(document["quality"]), width),
        _coverage(document["coverage"], document["num_examples"]),
    ]
    return "\n\n".join(section for section in sections if section)


# --------------------------------------------------------------------------------------------- sections


def _section(title: str, rows: Sequence[Row], width: int) -> str:
    """A title over rows of label and text; long texts go on below themselves."""
    lines = [line for label, text in rows if text is not None for line in _lines(label, text, width)]
    return "\n".join([title, *lines]) if lines else ""


def _lines(label: str, text: str, width: int) -> Iterator[str]:
    wrapped = [part for line in text.splitlines() for part in textwrap.wrap(line, width - LABEL)] or ["-"]
    for i, part in enumerate(wrapped):
        yield f"{'  ' + label if i == 0 else '':<{LABEL - 1}} {part}"


def _shown(lines: Sequence[str], most: int = MOST_ROWS) -> list[str]:
    """The first few lines, and how many more there are."""
    return [*lines[:most], *([f"... and {len(lines) - most:,} more"] if len(lines) > most else [])]


def _run(document: dict[str, Any]) -> list[Row]:
    message = f": {document['message']}" if document["message"] else ""
    overridden = any(resume["what_override"] for resume in document["resumes"])
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    return [
        ("directory", find(document, "run", "run", "dir")),
        ("state", f"{STATES[document['state']]}{message}"),
        ("purpose", document["purpose"] or "-"),
        ("what", document["what_hash"] + ("; changed by a resume" if overridden else "")),
        ("seed", str(document["seed"])),
        ("versions", versions or "-"),
    ]


def _model(document: dict[str, Any]) -> list[Row]:
    parameters, model = find(document, "facts", "parameters"), find(document, "what", "model") or {}
    sizes = [f"{name} {model[name]}" for name in ("width", "depth", "heads") if name in model]
    context = model.get("context_length")
    return [
        ("parameters", None if parameters is None else "   ".join([f"{parameters:,}", ", ".join(sizes)]).rstrip()),
        ("context length", None if context is None else count(context, "token")),
        ("precision", find(document, "what", "precision", "dtype")),
    ]


def _layouts(layouts: list[dict[str, Any]]) -> list[Row]:
    rows: list[Row] = []
    for layout in layouts:
        if len(layouts) > 1:
            end = count(layout["updates"], "standing update")
            rows.append(("from update", f"{layout['from_update']:,}; {end}"))
        rows += _layout(layout)
    return rows


def _update(document: dict[str, Any]) -> list[Row]:
    per_update = document["per_applied_update"]
    return [
        ("examples", _spread(per_update["examples"])),
        ("supervised tokens", _spread(per_update["supervised_tokens"])),
        ("divided by", _normalisation(document["normalisation"])),
        ("last group", _last_group(document["last_group"])),
        ("clipping", _clipping(document)),
        ("optimizer", _optimizer(find(document, "what", "optimizer"))),
        ("average (ema)", _ema(find(document, "what", "optimizer", "ema_decay"))),
        ("schedule", _schedule(document)),
    ]


def _layout(layout: dict[str, Any]) -> list[Row]:
    spread = layout["microbatches_per_replica"]
    fewest, most = spread or (None, None)
    many = "-" if most is None else str(most) if fewest == most else f"{fewest} to {most}"
    recomputes = layout["how"].get("activation_checkpointing")
    extras = ["overlap"] if layout["how"].get("overlap") else []
    if recomputes is True or (isinstance(recomputes, list) and any(recomputes)):
        stages = [] if recomputes is True else [str(stage) for stage, on in enumerate(recomputes) if on]
        extras.append("activation checkpointing" + (f" of stage {', '.join(stages)}" if stages else ""))
    return [
        ("D", count(layout["replicas"], "replica") if layout["replicas"] else "-"),
        ("P", _stages(layout["how"])),
        ("m", _microbatch(layout["how"], layout["mean_examples_per_microbatch"])),
        ("A", f"{many} microbatch{'' if many == '1' else 'es'} per replica and update"),
        ("with", ", ".join(extras) or None),
    ]


def _stages(how: dict[str, Any]) -> str | None:
    return f"{how['stages']} stages, {how.get('schedule')}" if stages_of(how) > 1 else None


def _microbatch(how: dict[str, Any], mean: float | None) -> str:
    """The budget of a microbatch, and what it came to."""
    examples, tokens = how.get("examples_per_microbatch"), how.get("tokens_per_microbatch")
    budget = f"{tokens:,} tokens, padding counted" if tokens else f"{examples or '-'} examples"
    return ("auto, what fits" if budget.startswith("auto") else f"at most {budget}") + (
        "" if mean is None else f"; {mean:.1f} examples on average"
    )


def _spread(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "no update applied"
    if spread["min"] == spread["max"]:
        return f"{whole(spread['min'])} in every applied update"
    return f"{whole(spread['min'])} to {whole(spread['max'])} per applied update, median {whole(spread['median'])}"


def _normalisation(terms: dict[str, Any]) -> str | None:
    lines = []
    for name, term in terms.items():
        coefficient = "" if term["coefficient"] in (None, 1) else f"{term['coefficient']} * "
        lines.append(f"{coefficient}{name}: by {term['divided_by'] or 'its own count, over the whole group'}")
    return "\n".join(lines) or None


def _last_group(last: dict[str, Any]) -> str:
    kept = "kept" if last["handling"] == "keep" else "dropped"
    if not last["partial_groups"]:
        return f"{kept}; no partial group so far"
    together = "" if last["partial_groups"] == 1 else " together"
    return f"{kept}; {count(last['partial_groups'], 'partial group')} of {count(last['examples'], 'example')}{together}"


def _clipping(document: dict[str, Any]) -> str | None:
    limit, clipped = document["clipping"]["clip_norm"], document["clipping"]["clipped_updates"]
    if not limit:
        return "none" if limit == 0 else None
    return (
        f"global gradient norm to {limit}; clipped in {clipped:,} of {document['updates']['applied']:,} applied updates"
    )


def _optimizer(optimizer: Any) -> str | None:
    if not isinstance(optimizer, dict):
        return optimizer if isinstance(optimizer, str) else None
    about = [
        f"{key.replace('_', ' ')} {optimizer[key]}" for key in ("learning_rate", "weight_decay") if key in optimizer
    ]
    return ", ".join([str(optimizer.get("name", "-")), *about])


def _ema(decay: float | None) -> str | None:
    return None if decay is None else f"decay {decay}; it is what validation measures" if decay else "none"


def _schedule(document: dict[str, Any]) -> str | None:
    announced, unit = find(document, "facts", "schedule"), find(document, "what", "schedule", "unit")
    if announced is None and unit is None:
        return None
    total = find(document, "facts", "schedule_total")
    length = "" if total is None else f", {total:,} in all"
    return f"{announced or '-'}\nunit: {(unit or '-').replace('_', ' ')}{length}"


def _totals(document: dict[str, Any]) -> list[Row]:
    updates, totals = document["updates"], document["totals"]
    counts, applied, share = totals["attempted"], totals["applied"], totals["padding_share"]
    planned = "" if updates["planned"] is None else f" of {updates['planned']:,} planned"
    kinds = ", ".join(f"{updates[name]:,} {name}" for name in ("applied", "skipped", "empty"))
    dropped = f"; {updates['dropped_examples']:,} dropped" if updates["dropped_examples"] else ""
    padding = "" if share is None else f", of which {100 * share:.1f} % padding"
    left_out = find(document, "facts", "left_out")
    return [
        ("updates", f"{updates['attempted']:,} attempted{planned}: {kinds}"),
        ("examples", f"{counts['examples']:,} in {count(counts['microbatches'], 'microbatch')}{dropped}"),
        ("supervised tokens", f"{counts['supervised_tokens']:,}"),
        ("tokens", f"{counts['total_tokens']:,}{padding}"),
        (
            "of these, applied",
            f"{count(applied['examples'], 'example')}, {count(applied['supervised_tokens'], 'supervised token')}"
            if updates["applied"] != updates["attempted"]
            else None,
        ),
        ("left out", f"{count(left_out, 'example')} of the data, too long for the context" if left_out else None),
    ]


def _time(times: dict[str, Any]) -> list[Row]:
    rate, supervised = times["total_tokens_per_second"], times["supervised_tokens_per_second"]
    starts = "" if times["starts"] == 1 else f", in {times['starts']} starts, without the time between them"
    per_second = f"{whole(round(rate))} tokens, padding counted; {whole(round(supervised))} supervised" if rate else "-"
    standing = "" if times["starts"] == 1 else ", of those that stand"
    return [
        ("started", f"{moment(times['started'])} UTC"),
        ("wall clock", f"{duration(times['wall_seconds'])}{starts}"),
        ("in updates", f"{duration(times['training_seconds'])}{standing}"),
        ("per second", per_second),
    ]


def _history(document: dict[str, Any]) -> list[Row]:
    checkpoints, superseded = document["checkpoints"], document["updates"]["superseded_updates"]
    last = checkpoints["last"]
    announced = (
        f"{checkpoints['announced']:,}, the last after update {last['after_attempted']:,}: {last['path']}"
        if last
        else "none"
    )
    memory = [
        f"{event['during']} {event['attempted']:,}: m from {event['examples_per_microbatch_before']} to "
        f"{event['examples_per_microbatch_after']}".replace("evaluation ", "evaluation after update ")
        for event in document["out_of_memory"]
    ]
    return [
        ("checkpoints", announced),
        ("resumes", "\n".join(_shown([line for r in document["resumes"] for line in _resume(r)])) or "none"),
        ("done twice", f"{count(superseded, 'update')}, superseded by a resume; counted once" if superseded else None),
        ("out of memory", "\n".join(_shown(memory)) or "never"),
    ]


def _resume(resume: dict[str, Any]) -> Iterator[str]:
    changes = ", ".join(f"{key} {before} -> {now}" for key, (before, now) in _pairs(resume["changes"]))
    lost = f" (had reached {resume['reached']:,})" if resume["reached"] != resume["from_update"] else ""
    told = "; told to go on with another WHAT" if resume["what_override"] else ""
    yield f"from update {resume['from_update']:,}{lost}: {changes or 'nothing changed'}{told}"


def _pairs(changes: dict[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key, change in changes.items():
        yield key, tuple(change) if isinstance(change, list) and len(change) == 2 else ("?", change)


# --------------------------------------------------------------------------------------------- tables


def _table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, gap: int = 3) -> str:
    """Columns as wide as they need to be; the first `left` hold text, the others numbers."""
    cells = [[title, *headers], *(["  " + row[0], *row[1:]] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[0] = max(widths[0], LABEL - 3)
    texts = (
        [f"{c:<{w}}" if i < left else f"{c:>{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        for row in cells
    )
    return "\n".join((" " * gap).join(row).rstrip() for row in texts)


def _memory(starts: list[dict[str, Any]]) -> str:
    """Observed peaks: a row per replica, and a heading per start where there are several."""
    rows = []
    for start in starts:
        where = "" if len(starts) == 1 else f", from update {start['from_update']:,}"
        for entry in start["replicas"][:MOST_ROWS]:
            peaks = [mebibytes(entry[name]) for name in ("baseline", "first_group", "later_groups")]
            stage = f", stage {entry['stage']}" if "stage" in entry else ""
            rows.append([f"replica {entry['replica']}{stage}{where}", entry["device"], *peaks])
        if left := start["replicas"][MOST_ROWS:]:
            names = ("baseline", "first_group", "later_groups")
            highest = [max((e[name] for e in left if e[name] is not None), default=None) for name in names]
            rows.append([f"highest of {len(left)} more", "", *map(mebibytes, highest)])
    return _table("memory, peak", ["device", "baseline", "first group", "later groups"], rows, left=2) if rows else ""


def _validation(validation: dict[str, Any]) -> str:
    rows = [
        [name, number(entry["loss"]), *(f"{entry[axis]:,}" for axis in ("updates", "examples", "supervised_tokens"))]
        for name in ("first", "best", "last")
        if (entry := validation[name]) is not None
    ]
    if not rows:
        return "validation\n  none so far"
    over = validation["examples"]
    note = "" if over is None else f"\n  {'each over':<{LABEL - 3}} all {count(over, 'validation example')}"
    return _table("validation", ["loss", "updates", "examples", "supervised tokens"], rows) + note


def _quality(quality: dict[str, Any]) -> list[Row]:
    if quality["rule"] is None:
        return [("rule", "none was fixed before the run")]
    axis, metric = (str(quality[key]).replace("_", " ") for key in ("axis", "metric"))
    return [("rule", f"{metric} {quality['rule']} {axis}"), ("verdict", quality["text"])]


def _coverage(coverage: dict[str, Any] | None, num_examples: int) -> str:
    """Epochs that went alike share a row."""
    if coverage is None:
        return ""
    names = ("covered", "applied", "skipped", "empty", "dropped")
    rows = []
    for (numbers, faults), same in groupby(
        coverage["epochs"], key=lambda epoch: (tuple(epoch[name] for name in names), len(epoch["faults"]))
    ):
        epochs = [epoch["epoch"] for epoch in same]
        where = f"epoch {epochs[0]}" if len(epochs) == 1 else f"epochs {epochs[0]} to {epochs[-1]}"
        verdict = "each exactly once" if numbers[0] == num_examples else "each at most once"
        rows.append([where, *(f"{value:,}" for value in numbers), f"{faults:,} faults" if faults else verdict])
    proved = "proved" if coverage["proved"] else f"NOT proved: {count(len(coverage['faults']), 'fault')}"
    proved = proved if rows or coverage["faults"] else "no update so far"
    lines = [f"coverage: {proved}, of {count(num_examples, 'example')} per epoch, from seed and positions alone"]
    if rows:
        lines.append(_table("", [*names, ""], rows, gap=2))
    return "\n".join([*lines, *(f"  {fault}" for fault in _shown(coverage["faults"]))])
