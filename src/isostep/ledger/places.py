"""Where on its axes a run was, when something was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .events import Evaluated, Event, UpdateDone


@dataclass(frozen=True, slots=True)
class Place:
    """How far a run has come: what it has applied. The fields are the axes that curves and rules are given on."""

    updates: int = 0
    examples: int = 0
    supervised_tokens: int = 0

    def after(self, update: UpdateDone) -> Place:
        """The place when this update is done; the same one unless it was applied."""
        if update.status != "applied":
            return self
        counters = update.counters
        return Place(
            self.updates + 1,
            self.examples + counters.examples,
            self.supervised_tokens + counters.supervised_tokens,
        )


def places(standing: Iterable[Event]) -> Iterator[tuple[Place, UpdateDone | Evaluated]]:
    """Each applied update and each evaluation of standing events, in order, with its place; an update counts itself."""
    here = Place()
    for event in standing:
        if isinstance(event, UpdateDone):
            here = here.after(event)
        if isinstance(event, Evaluated) or (isinstance(event, UpdateDone) and event.status == "applied"):
            yield here, event
