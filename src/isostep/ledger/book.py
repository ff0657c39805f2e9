"""A ledger opened for its sheet: what several parts of the sheet read from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..grouping import GroupPlan
from .events import Evaluated, Event, Resumed, RunStarted, UpdateDone
from .fold import Totals, fold, standing_events
from .places import Place, places
from .words import find


@dataclass(frozen=True)
class Book:
    """The events of a ledger, and what follows from them."""

    started: RunStarted
    events: Sequence[Event]

    @cached_property
    def standing(self) -> list[Event]:
        return standing_events(self.events)

    @cached_property
    def settled(self) -> list[tuple[UpdateDone, dict[str, Any]]]:
        """Each standing update with the settings that it was attempted under."""
        settings, updates = self._first_settings, []
        for event in self.standing:
            if isinstance(event, Resumed):
                settings = _changed(settings, event.changes)
            elif isinstance(event, UpdateDone):
                updates.append((event, settings))
        return updates

    @cached_property
    def settings(self) -> dict[str, Any]:
        """WHAT and RUN as they are now: what the first start recorded, with every resume's changes."""
        settings = self._first_settings
        for event in self.events:
            settings = _changed(settings, event.changes) if isinstance(event, Resumed) else settings
        return settings

    @property
    def _last_resume(self) -> Resumed | None:
        return next((event for event in reversed(self.events) if isinstance(event, Resumed)), None)

    @property
    def versions(self) -> dict[str, Any]:
        """Of libraries, at the last start."""
        return (self._last_resume and self._last_resume.versions) or self.started.versions

    @property
    def what_hash(self) -> str:
        """Of WHAT at the last start."""
        return (self._last_resume and self._last_resume.what_hash) or self.started.what_hash

    @property
    def _first_settings(self) -> dict[str, Any]:
        return {"what": self.started.what, "run": self.started.run}

    @cached_property
    def attempted(self) -> list[UpdateDone]:
        return [update for update, _ in self.settled]

    @cached_property
    def applied(self) -> list[UpdateDone]:
        return [update for update in self.attempted if update.status == "applied"]

    @cached_property
    def totals(self) -> Totals:
        return fold(self.events)

    @cached_property
    def curve(self) -> list[tuple[Place, UpdateDone | Evaluated]]:
        return list(places(self.standing))

    @cached_property
    def starts(self) -> list[list[Event]]:
        """The events of each start of the run, which begin with the start or the resume."""
        parts: list[list[Event]] = []
        for event in self.events:
            if isinstance(event, RunStarted | Resumed) or not parts:
                parts.append([])
            parts[-1].append(event)
        return parts

    @property
    def facts(self) -> dict[str, Any]:
        """What the recipe announced about the run at its last start."""
        return (self._last_resume and self._last_resume.facts) or find(self.settings, "run", "facts") or {}

    @cached_property
    def plan(self) -> GroupPlan:
        """The order of examples; microbatches and a budget of tokens do not matter to it."""
        started = self.started
        return GroupPlan(
            num_examples=started.num_examples,
            examples_per_update=started.examples_per_update or 1,
            examples_per_microbatch=1,
            seed=started.seed,
        )


def _changed(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The settings after a resume's changes: "section.key" -> [before, now], in the document that has the key."""
    settings = {kind: dict(document) for kind, document in settings.items()}
    for key, change in changes.items():
        section, _, name = key.partition(".")
        for document in settings.values():
            if name in (document.get(section) or ()) and isinstance(change, list) and change:
                document[section] = document[section] | {name: change[-1]}
                break
    return settings
