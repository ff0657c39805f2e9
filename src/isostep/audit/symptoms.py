"""Five complaints that people come with: the kinds of fault behind each, where to look, what mends. No torch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from .document import KINDS

NARROWEST = 60
LABEL = 10
"""Columns of a label, its indent included."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """One complaint."""

    complaint: str
    kinds: tuple[str, ...]
    """The most likely one first; keys of `KINDS`."""
    look: str
    """What of a report tells them apart."""
    mend: str


SYMPTOMS = (
    Symptom(
        "the loss is unusually small, or unusually large",
        ("scale", "wrong-log", "count-mismatch", "partial-group"),
        "the factor: 1/A or 1/D is one division too many, A or D one too few, a number near 1 another count. Weights "
        "that are exact beside a wrong-log finding: only the printed number is off",
        "divide once, by the targets that the loss sums over the whole update; log that same quotient",
    ),
    Symptom(
        "results change with the split: batch size x accumulation x GPUs",
        (
            "mean-of-means",
            "mean-of-replicas",
            "uneven-weights",
            "partial-group",
            "count-mismatch",
            "term-scale",
            "duplicate-example",
            "unsynchronised-replicas",
            "batchnorm",
            "dropout-shared",
        ),
        "the column x exact: ratios that differ between microbatches, between ranks, or in the last update of an "
        "epoch alone. Audit two splits of the same examples and compare",
        "sum the losses, and divide by the targets of all microbatches and all ranks",
    ),
    Symptom(
        "accumulation has no effect",
        ("lost-microbatch", "scale", "no-update", "clip-per-microbatch", "low-precision-sum"),
        "microbatches of ratio 0, updates that hold one microbatch only, clipping or zero_grad before the last one",
        "run the optimizer, clip, and clear the gradients once per update, after its last microbatch",
    ),
    Symptom(
        "memory grows",
        ("retained-graph", "parameters-missing"),
        "graphs that are alive after their update. Growth that ends with the second update is no fault: gradients and "
        "the optimizer's state are allocated in the first",
        "detach what is kept: total += loss.detach()",
    ),
    Symptom(
        "the schedule is shifted: the learning rate ends too early or too late",
        ("scheduler-unit", "skip-advances-scheduler", "lost-microbatch", "no-update"),
        "how often the scheduler and the optimizer ran: A times, D times, or once more after a skipped update",
        "step the scheduler once per applied update, and give its length in updates",
    ),
)


def symptoms_text(width: int = 88) -> str:
    """The complaints for a terminal, wrapped at `width` (60 columns at least)."""
    return "\n\n".join("\n".join(_symptom(symptom, max(NARROWEST, width))) for symptom in SYMPTOMS)


def symptoms_markdown() -> str:
    """The complaints as a Markdown table."""
    rows = ["| complaint | kinds | what to look at | what mends it |", "|---|---|---|---|"]
    for symptom in SYMPTOMS:
        kinds = ", ".join(f"`{kind}`" for kind in symptom.kinds)
        cells = [_upper(symptom.complaint), kinds, _upper(symptom.look), _upper(symptom.mend)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _symptom(symptom: Symptom, width: int) -> Iterator[str]:
    yield from _wrapped("", _upper(symptom.complaint), width)
    yield from _wrapped(f"{'  look at':<{LABEL}} ", symptom.look, width)
    yield from _wrapped(f"{'  mend':<{LABEL}} ", symptom.mend, width)
    column = max(map(len, symptom.kinds))
    for i, kind in enumerate(symptom.kinds):
        yield from _wrapped(f"{'  kinds' if i == 0 else '':<{LABEL}} {kind:<{column}}  ", KINDS[kind], width)


def _wrapped(head: str, text: str, width: int) -> list[str]:
    """The text behind its head, going on below itself."""
    return textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)


def _upper(text: str) -> str:
    """With a capital first letter; the rest as it is."""
    return text[:1].upper() + text[1:]
