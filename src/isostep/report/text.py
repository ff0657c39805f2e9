"""A run for the terminal: its sheet, pictures of its curves, its coverage and its timeline. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..errors import InputError
from ..ledger import Evaluated, Event, UpdateDone, standing_events
from ..ledger.places import places
from ..ledger.sheet_text import sheet_text
from ..ledger.words import find
from .plot import plot, shares, sparkline
from .timeline import Timeline

NARROWEST, WIDEST = 80, 100
PLOT_HEIGHT = 12
MOST_EPOCHS = 12
LABEL = 16
AFTER = 36
"""Columns that are left for numbers behind a bar."""


def report_text(
    document: dict[str, Any], events: Sequence[Event], width: int, timeline: Timeline | InputError | None = None
) -> str:
    """The sheet of `document`, then the pictures that the events and the timeline give.

    At most `width` columns wide (80 to 100). timeline: the error, where there should be one and is not.
    """
    width = max(NARROWEST, min(WIDEST, width))
    standing = standing_events(events)
    applied = [event for event in standing if isinstance(event, UpdateDone) and event.status == "applied"]
    pictures = [
        list(_loss(standing, find(document, "run", "run", "x_axis") or "updates", width)),
        list(_lines_of_bars(applied, width)),
        list(_coverage(document["coverage"], document["num_examples"], width)),
        list(_timeline(timeline, width)),
    ]
    return "\n\n".join([sheet_text(document, width), *("\n".join(lines) for lines in pictures if lines)])


def _timeline(timeline: Timeline | InputError | None, width: int) -> Iterator[str]:
    if isinstance(timeline, Timeline):
        yield timeline.text(width)
    elif timeline is not None:
        yield f"pipeline timeline: not shown: {timeline}"


def _loss(standing: Sequence[Event], axis: str, width: int) -> Iterator[str]:
    """Training loss as a line, validation losses as marks."""
    training, validation = [], []
    for place, event in places(standing):
        if event.loss is not None:
            (validation if isinstance(event, Evaluated) else training).append((getattr(place, axis), event.loss))
    lines = plot(training, validation, width - 2, PLOT_HEIGHT, f"{axis.replace('_', ' ')} applied")
    if lines:
        yield "loss: line of each update, o of the validation data"
        yield from (f"  {line}" for line in lines)


def _lines_of_bars(applied: Sequence[UpdateDone], width: int) -> Iterator[str]:
    """Learning rate and gradient norm over the applied updates, a line each."""
    curves = {
        "learning rate": [update.learning_rates[0] for update in applied if update.learning_rates],
        "gradient norm": [update.grad_norm for update in applied if update.grad_norm is not None],
    }
    for name, values in curves.items():
        if values:
            numbers = f"{min(values):.3g} to {max(values):.3g}, last {values[-1]:.3g}"
            yield f"{name:<{LABEL}}{sparkline(values, width - LABEL - AFTER):<{width - LABEL - AFTER}}  {numbers}"


def _coverage(coverage: dict[str, Any] | None, num_examples: int, width: int) -> Iterator[str]:
    """A bar per epoch: what became of its examples. Of many epochs, the last ones."""
    epochs = coverage["epochs"] if coverage else []
    if epochs:
        yield "examples of each epoch: █ applied  ▒ skipped  ░ empty  x dropped  · not yet"
    if len(epochs) > MOST_EPOCHS:
        yield f"  ... {len(epochs) - MOST_EPOCHS:,} epochs before"
    for epoch in epochs[-MOST_EPOCHS:]:
        rest = max(0, num_examples - epoch["covered"])
        parts = [("█", "applied"), ("▒", "skipped"), ("░", "empty"), ("x", "dropped")]
        bar = shares([*((character, epoch[name]) for character, name in parts), ("·", rest)], width - LABEL - AFTER)
        fault = f", {len(epoch['faults']):,} faults" if epoch["faults"] else ""
        yield f"{'  epoch ' + str(epoch['epoch']):<{LABEL}}{bar}  {epoch['covered']:,} of {num_examples:,}{fault}"
