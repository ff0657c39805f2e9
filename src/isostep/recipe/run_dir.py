"""A run directory: whose it is, what its ledger says, and where a run that is started in it begins."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ..config import hash_of
from ..distributed.checkpoint import CHECKPOINTS
from ..errors import InputError
from ..ledger import CheckpointAnnounced, Evaluated, Event, Resumed, RunEnded, RunStarted, read, standing_events
from ..ledger.sheet import LEDGER

LOCK = "lock"
WEIGHTS = "weights.pt"
AVERAGE = "average.pt"
LENGTH = ("run.epochs", "run.updates")

MAY_BE_ALLOWED = (
    "optimizer.learning_rate", "optimizer.weight_decay", "optimizer.betas", "optimizer.momentum",
    "optimizer.clip_norm", "optimizer.ema_decay", "schedule.shape", "schedule.unit", "schedule.warmup",
    "schedule.decay", "schedule.total", "schedule.final_factor", "precision.dtype",
)  # fmt: skip
"""WHAT that a run can go on with, changed. Order, data and model cannot: coverage and checkpoints would not hold."""

RULE = ("quality.accept_if", "quality.metric", "quality.axis", "data.validation_content_hash")
"""What a quality rule is judged by."""

Settings = dict[str, Any]
"""Every key of a run as "section.key"."""


@dataclass(frozen=True)
class Documents:
    """What a run is now, as documents: WHAT, HOW, RUN by section and key, and the versions of libraries."""

    what: dict[str, Any]
    how: dict[str, Any]
    run: dict[str, Any]
    versions: dict[str, Any]

    @property
    def what_hash(self) -> str:
        return hash_of(self.what)

    @property
    def settings(self) -> Settings:
        return _flat({**self.what, "layout": self.how, "versions": self.versions}) | _flat(self.run)


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How a run begins.

    path, digest: of the checkpoint that it begins from, relative to the run. announced: the checkpoints that stand,
    oldest first. changes: key -> [before, now]. evaluated: after how many applied updates there are validations.
    facts: as recorded at the last start; see `Training.facts`.
    """

    state: Literal["new", "resume", "complete"]
    from_update: int = 0
    path: str | None = None
    digest: str = ""
    announced: list[str] = field(default_factory=list)
    changes: dict[str, Any] = field(default_factory=dict)
    what_override: bool = False
    evaluated: list[int] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def text(self, run_dir: Path) -> list[str]:
        """What the user is told, a line each."""
        if self.state == "new":
            return []
        if self.state == "complete":
            return [f"{run_dir} is complete; nothing to do"]
        where = f"after update {self.from_update}" if self.path else "from the start, for want of a checkpoint"
        changes = [f"changed: {key} was {before!r}, is {now!r}" for key, (before, now) in self.changes.items()]
        return [f"resuming {run_dir} {where}", *changes]


class RunDirectory:
    """The folder of one run. One process at a time holds it, from `open` to the end of the context."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def ledger(self) -> Path:
        return self.path / LEDGER

    def open(self, now: Documents, *, allow_changed_what: bool) -> Opening:
        """Take hold of the directory and find out where to begin. Changes nothing that an earlier start left.

        Raises InputError for a folder that cannot be used or that another process holds, and for a run of another
        WHAT or quality rule.
        """
        self._take_hold()
        events = read(self.ledger) if self.ledger.exists() else []
        started = next((event for event in events if isinstance(event, RunStarted)), None)
        if started is None:
            self._check_empty()
            return Opening(state="new")
        was = _settings_of(events, started)
        changes = {
            k: [was.get(k), now.settings.get(k)] for k in {**was, **now.settings} if was.get(k) != now.settings.get(k)
        }
        changed_what = [key for key in changes if key in _flat(now.what) or key in _flat(started.what)]
        _check_what(changes, changed_what, allow_changed_what)
        _check_rule(changes, fixed=was.get("quality.accept_if") is not None)
        complete = isinstance(events[-1], RunEnded) and events[-1].reason == "complete"
        complete = complete and (self.path / WEIGHTS).exists()
        if complete and not changed_what and not any(key in changes for key in LENGTH):
            return Opening(state="complete")
        announced = [event for event in _standing_checkpoints(events) if (self.path / event.path).exists()]
        opening = Opening(
            state="resume",
            changes=changes,
            what_override=bool(changed_what),
            announced=[event.path for event in announced],
            facts=_facts_of(events, started),
        )
        if announced:
            last = announced[-1]
            opening = replace(opening, from_update=last.after_attempted, path=last.path, digest=last.digest)
        left = standing_events([*events, Resumed(from_update=opening.from_update, how={})])
        return replace(opening, evaluated=[event.after_applied for event in left if isinstance(event, Evaluated)])

    def _take_hold(self) -> None:
        """Make the folder, and lock it for the life of this process. Raises InputError."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except (OSError, ValueError) as error:  # the latter for a name that no folder can have
            reason = getattr(error, "strerror", None) or error
            raise InputError.of(
                "run directory", str(self.path), "one that can be made and written", f"{reason}"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError.of(
                "run directory", f"{self.path}, which another process is training in", "one for this run alone",
                "wait for that run to end, or choose another --run-dir",
            ) from None  # fmt: skip

    def _check_empty(self) -> None:
        """Raise InputError for a folder that holds somebody's results and no ledger: they would be overwritten."""
        for path in (*self.path.glob("*.pt"), *(self.path / CHECKPOINTS).glob("update-*")):
            raise InputError.of(
                "run directory", f"{path} and no ledger", "a new one, or one with its ledger.jsonl",
                "restore the ledger, or choose another --run-dir",
            )  # fmt: skip

    @property
    def held(self) -> bool:
        """Whether this process holds the directory, as replica 0 does."""
        return self._lock is not None


def _flat(sections: Mapping[str, Any]) -> Settings:
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def _settings_of(events: Sequence[Event], started: RunStarted) -> Settings:
    """The settings of the last start."""
    if not all(isinstance(keys, dict) for keys in (*started.what.values(), *started.run.values())):
        raise InputError.of(
            "ledger", "a run without sections", "one of `isostep train`", "choose another --run-dir for this run"
        )
    run = {section: keys for section, keys in started.run.items() if section != "facts"}
    found = Documents(started.what, started.how, run, started.versions).settings
    for event in events:
        if isinstance(event, Resumed):
            found |= {key: now for key, (_, now) in event.changes.items() if not key.startswith("facts.")}
    return found


def _facts_of(events: Sequence[Event], started: RunStarted) -> dict[str, Any]:
    last = next((event.facts for event in reversed(events) if isinstance(event, Resumed) and event.facts), None)
    return last or started.run.get("facts", {})


def _check_what(changes: Mapping[str, list[Any]], changed_what: Sequence[str], allowed: bool) -> None:
    """Raise InputError for a change of WHAT that was not allowed or cannot be carried on."""
    for key in changed_what:
        before, now = changes[key]
        carried_on = key in MAY_BE_ALLOWED and (key != "optimizer.ema_decay" or (before and now))
        if carried_on and allowed:
            continue
        if key == "data.content_hash":
            raise InputError.of(
                "data", f"content {now[:12]}", f"{before[:12]}, which this run has trained on",
                "restore the data, or choose another --run-dir",
            )  # fmt: skip
        allow = " (--allow-changed-what goes on with it nevertheless)" if carried_on else ""
        raise InputError.of(
            key, now, f"{before!r}, which this run has trained with", f"give the same, or another --run-dir{allow}"
        )


def _check_rule(changes: Mapping[str, list[Any]], *, fixed: bool) -> None:
    """Raise InputError for another quality rule, or other data to judge it by."""
    for key in RULE if fixed else RULE[:1]:
        if key in changes:
            before, now = changes[key]
            remedy = "give the same, or choose another --run-dir"
            raise InputError.of(key, now, f"{before!r}, fixed when the run began", remedy)


def _standing_checkpoints(events: Sequence[Event]) -> list[CheckpointAnnounced]:
    """The announced checkpoints that no resume from an earlier one supersedes, oldest first."""
    standing: list[CheckpointAnnounced] = []
    for event in events:
        if isinstance(event, Resumed):
            standing = [c for c in standing if c.after_attempted <= event.from_update]
        elif isinstance(event, CheckpointAnnounced):
            standing = [c for c in standing if c.after_attempted < event.after_attempted] + [event]
    return standing
