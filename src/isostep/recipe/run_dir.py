"""A run directory: whose it is, what its ledger says, and where a run that is started in it begins."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ..config import Config
from ..distributed.checkpoint import CHECKPOINTS, manifest_of
from ..errors import InputError
from ..ledger import CheckpointAnnounced, Evaluated, Event, Resumed, RunEnded, RunStarted, read, standing_events
from ..ledger.sheet import LEDGER

LOCK = "lock"
LENGTH = ("run.epochs", "run.updates")

Settings = dict[str, Any]
"""Every key of a run as "section.key"."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How a run begins.

    path, manifest: of the checkpoint that it begins from, relative to the run. announced: the checkpoints that stand,
    oldest first. changes: key -> [before, now]. evaluated: after how many applied updates there are validations.
    """

    state: Literal["new", "resume", "complete"]
    from_update: int = 0
    path: str | None = None
    manifest: dict[str, Any] | None = None
    announced: list[str] = field(default_factory=list)
    changes: dict[str, Any] = field(default_factory=dict)
    what_override: bool = False
    evaluated: list[int] = field(default_factory=list)

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

    def open(self, config: Config, what: dict[str, Any], how: dict[str, Any], *, allow_changed_what: bool) -> Opening:
        """Take hold of the directory and find out where to begin. Changes nothing that an earlier start left.

        Raises InputError for a folder that cannot be used or that another process holds, for a run of another WHAT,
        and for a last checkpoint that is not as it was written.
        """
        self._take_hold()
        events = read(self.ledger) if self.ledger.exists() else []
        started = next((event for event in events if isinstance(event, RunStarted)), None)
        if started is None:
            self._check_empty()
            return Opening(state="new")
        changes = _changes(_settings_of(events, started), settings(what, how, config.about_run()))
        changed_what = [key for key in changes if key in _flat(what) or key in _flat(started.what)]
        _check_changes(changes, changed_what, allow_changed_what)
        complete = isinstance(events[-1], RunEnded) and events[-1].reason == "complete"
        if complete and not changed_what and not any(key in changes for key in LENGTH):
            return Opening(state="complete")
        announced = [event for event in _standing_checkpoints(events) if (self.path / event.path).exists()]
        opening = Opening(
            state="resume",
            changes=changes,
            what_override=bool(changed_what),
            announced=[event.path for event in announced],
        )
        if announced:
            last = announced[-1]
            manifest = manifest_of(self.path / last.path)
            opening = replace(opening, from_update=last.after_attempted, path=last.path, manifest=manifest)
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


def settings(what: Mapping[str, Any], how: Mapping[str, Any], run: Mapping[str, Any]) -> Settings:
    """All of a run's settings, by key."""
    return _flat(what) | _flat({"layout": how}) | _flat({k: v for k, v in run.items() if k != "facts"})


def _flat(sections: Mapping[str, Any]) -> Settings:
    return {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}


def _settings_of(events: Sequence[Event], started: RunStarted) -> Settings:
    """The settings of the last start."""
    found = settings(started.what, started.how, started.run)
    for event in events:
        if isinstance(event, Resumed):
            found |= {key: now for key, (_, now) in event.changes.items()}
    return found


def _changes(was: Settings, now: Settings) -> dict[str, list[Any]]:
    """key -> [before, now] of what differs; where a run lies may always change."""
    keys = [key for key in {**was, **now} if key != "run.dir"]
    return {key: [was.get(key), now.get(key)] for key in keys if was.get(key) != now.get(key)}


def _check_changes(changes: Mapping[str, list[Any]], changed_what: Sequence[str], allowed: bool) -> None:
    """Raise InputError for a change of WHAT that was not allowed, and for another quality rule."""
    if changed_what and not allowed:
        key = changed_what[0]
        before, now = changes[key]
        if key == "data.content_hash":
            raise InputError.of(
                "data", f"content {now[:12]}", f"{before[:12]}, which this run has trained on",
                "restore the data, or choose another --run-dir (--allow-changed-what goes on with it nevertheless)",
            )  # fmt: skip
        raise InputError.of(
            key, now, f"{before!r}, which this run has trained with",
            "give the same, or choose another --run-dir (--allow-changed-what goes on with it nevertheless)",
        )  # fmt: skip
    for key, (before, now) in changes.items():
        if key.startswith("quality."):
            raise InputError.of(
                key, now, f"{before!r}, fixed when the run began", "give the same, or another --run-dir"
            )


def _standing_checkpoints(events: Sequence[Event]) -> list[CheckpointAnnounced]:
    """The announced checkpoints that no resume from an earlier one supersedes, oldest first."""
    standing: list[CheckpointAnnounced] = []
    for event in events:
        if isinstance(event, Resumed):
            standing = [c for c in standing if c.after_attempted <= event.from_update]
        elif isinstance(event, CheckpointAnnounced):
            standing = [c for c in standing if c.after_attempted < event.after_attempted] + [event]
    return standing
