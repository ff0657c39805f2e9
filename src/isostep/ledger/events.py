"""The events of a ledger, and their form as one line of JSON.

A line is a JSON object with `"event"` (which event) and exactly the fields of that event. Two choices make it
both standard JSON and exact:

- A float that JSON has no number for is written as the string "nan", "inf" or "-inf". In the free-form
  documents (`what`, `how`, `run`, `versions`) these three strings therefore always mean floats, and as text
  they are refused.
- Integers are JSON integers of any size. A reader that parses numbers into doubles loses the last digits of
  ids above 2**53; hashes are strings of hex digits for that reason.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from time import time as unix_seconds
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from ..errors import InputError
from ..units import Coverage

SCHEMA = 1
"""The newest schema that this version writes and reads; named by the first event of every ledger."""

NON_FINITE = ("nan", "inf", "-inf")
FIELD_REMEDY = "give the event's own fields and types, or read it with the isostep version that wrote it"

Document = dict[str, Any]
"""A free-form JSON document; a tuple in it is read back as a list."""

UpdateStatus = Literal["applied", "skipped", "empty"]
CoverageStatus = Literal["proved", "unknown"]
EndReason = Literal["complete", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What went into forward, summed over microbatches, replicas or updates.

    `total_tokens` includes padding. Filler microbatches and their tokens are in the filler counts only.
    """

    microbatches: int = 0
    examples: int = 0
    supervised_tokens: int = 0
    total_tokens: int = 0
    padding_tokens: int = 0
    filler_microbatches: int = 0
    filler_tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Counts)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened in a run. `event` is its name in JSON; `time` is in unix seconds."""

    event: ClassVar[str]

    time: float = field(default_factory=unix_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """The first event of a ledger: WHAT is trained (`what_hash` identifies it), HOW, and on how much data.

    num_examples: size of the data set. versions: of the libraries that the numbers depend on.
    examples_per_update: None where updates have a budget of tokens.
    """

    event: ClassVar[str] = "run_started"

    schema: int = SCHEMA
    what_hash: str
    what: Document
    how: Document
    run: Document
    versions: Document
    num_examples: int
    seed: int
    last_group: str
    examples_per_update: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateDone(Event):
    """One attempted update.

    attempted: number of this attempt, from 1. group: index of the group in its epoch, from 0.
    start, stop: positions [start, stop) in the order of the epoch; both -1 where they are unknown.
    ids_hash, num_examples: coverage of what really went into forward (`format_hash`, and how many examples).
    denominators, terms: by name of the loss term. seconds: duration of the update.
    """

    event: ClassVar[str] = "update_done"

    attempted: int
    epoch: int
    group: int
    start: int
    stop: int
    status: UpdateStatus
    ids_hash: str
    num_examples: int
    coverage: CoverageStatus
    counters: Counts
    denominators: dict[str, float]
    loss: float | None
    terms: dict[str, float | None]
    grad_norm: float | None
    learning_rates: list[float]
    loss_scale: float | None
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped(Event):
    """The last, partial group of an epoch, left out: its positions [start, stop) and the ids at them."""

    event: ClassVar[str] = "dropped"

    epoch: int
    start: int
    stop: int
    ids: tuple[int, ...]
    ids_hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Event):
    """A pass over the validation data, after this many applied updates."""

    event: ClassVar[str] = "evaluated"

    after_applied: int
    loss: float | None
    terms: dict[str, float | None]
    counters: Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory(Event):
    """Memory ran out; the group, or the evaluation, was replayed with smaller microbatches.

    attempted: number of the update that was attempted, or of the last one before the evaluation.
    """

    event: ClassVar[str] = "out_of_memory"

    attempted: int
    during: Literal["update", "evaluation"] = "update"
    examples_per_microbatch_before: int
    examples_per_microbatch_after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryObserved(Event):
    """Peaks so far in bytes, an entry per replica: allocated on a CUDA device, resident set on a CPU.

    baseline: after the model was built. first_group: with the first optimizer step of this start of the run.
    later_groups: None before the second group. A later event of the same start supersedes an earlier one.
    """

    event: ClassVar[str] = "memory_observed"

    devices: list[str]
    baseline: list[int]
    first_group: list[int]
    later_groups: list[int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineObserved(Event):
    """When each stage of a pipeline worked in this update was recorded in the file `path`, relative to the run.

    Of the replica that took longest, beside what was predicted: makespans in seconds; busy shares, work of all ranks
    of the replica / (P * makespan). bound: what bounds the run; see `schedule.measured.Bounds`.
    """

    event: ClassVar[str] = "timeline_observed"

    attempted: int
    path: str
    makespan: float
    predicted_makespan: float
    busy_share: float
    predicted_busy_share: float
    bound: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAnnounced(Event):
    """A checkpoint is durable at `path`, relative to the run; it has seen this many attempted updates.

    digest: of its manifest, which has those of its files.
    """

    event: ClassVar[str] = "checkpoint_announced"

    after_attempted: int
    path: str
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """The run continues from a checkpoint that had seen `from_update` attempted updates.

    Events of later attempts that stand before this one are superseded. changes: "section.key" -> [before, now], of
    everything that is not as it was. what_override: the run was told to continue although WHAT changed. facts and
    versions: as of this start; see `RunStarted`.
    """

    event: ClassVar[str] = "resumed"

    from_update: int
    what_override: bool = False
    how: Document
    changes: Document = field(default_factory=dict)
    what_hash: str = ""
    facts: Document = field(default_factory=dict)
    versions: Document = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """The run ended by itself. A run that was killed has no such event."""

    event: ClassVar[str] = "run_ended"

    reason: EndReason
    message: str = ""


Record = TypeVar("Record", Event, Counts)

EVENTS: dict[str, type[Event]] = {
    kind.event: kind
    for kind in (
        RunStarted, UpdateDone, Dropped, Evaluated, OutOfMemory, MemoryObserved, TimelineObserved, CheckpointAnnounced,
        Resumed, RunEnded,
    )
}  # fmt: skip


def format_hash(coverage: Coverage) -> str:
    """The hash of a coverage as events carry it: 16 hex digits."""
    return f"{coverage.hash:016x}"


def to_line(event: Event) -> bytes:
    """The event as one line of ASCII, newline included.

    Raises InputError where a value is not of its field's type: a line that cannot be read is never written.
    """
    document = {"event": event.event} | {
        name: _to_json(getattr(event, name), f"{event.event}.{name}", in_document=hint == Document)
        for name, hint in _hints(type(event)).items()
    }
    line = json.dumps(document, allow_nan=False).encode() + b"\n"
    from_line(line, "event to write")
    return line


def from_line(line: bytes, where: str) -> Event:
    """The event of one line. Raises InputError, whose message begins with `where`, for any other line."""
    try:
        document = json.loads(line, parse_constant=_refuse_constant)
        name = document.pop("event")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        remedy = "restore the file from a copy, or check that it is a ledger"
        raise InputError.of(where, line[:80], "a JSON object with an event", remedy) from None
    kind = EVENTS.get(name) if isinstance(name, str) else None
    if kind is None:
        remedy = "read the ledger with the isostep version that wrote it"
        raise InputError.of(f"{where}: event", name, f"one of {', '.join(EVENTS)}", remedy)
    if kind is RunStarted:
        _check_schema(document.get("schema"), where)
    return _from_fields(document, kind, f"{where}: {name}")


def _check_schema(schema: object, where: str) -> None:
    """Refuse a newer schema before its fields are looked at, which may be others."""
    if isinstance(schema, int) and schema > SCHEMA:
        remedy = "a newer isostep wrote this ledger: upgrade isostep"
        raise InputError.of(f"{where}: schema", schema, f"at most {SCHEMA}", remedy)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not standard JSON")


@cache
def _hints(kind: type) -> dict[str, Any]:
    """The type of each field of an event or of `Counts`."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _to_json(value: Any, where: str, *, in_document: bool) -> Any:
    """The JSON form of a value; in a free-form document no type tells the text "nan" from the float."""
    match value:
        case float() if not math.isfinite(value):
            return str(float(value))
        case str() if in_document and value in NON_FINITE:
            raise InputError.of(where, value, "another text", "it stands for a float here: change the text")
        case None | int() | float() | str():
            return value
        case list() | tuple():
            return [_to_json(v, f"{where}[{i}]", in_document=in_document) for i, v in enumerate(value)]
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _to_json(v, f"{where}.{key}", in_document=in_document) for key, v in value.items()}
        case Counts():
            return _to_json(asdict(value), where, in_document=in_document)
    remedy = "convert it to numbers, text, lists or dicts first"
    raise InputError.of(where, value, "a value that JSON has, under keys of text", remedy)


def _from_fields(document: Any, kind: type[Record], where: str) -> Record:
    """An event or `Counts` from a JSON object that has exactly its fields."""
    hints = _hints(kind)
    if not isinstance(document, dict):
        raise InputError.of(where, document, "a JSON object", FIELD_REMEDY)
    if unknown := sorted(document.keys() - hints.keys()):
        raise InputError.of(where, unknown, f"only the fields {', '.join(hints)}", FIELD_REMEDY)
    if missing := sorted(hints.keys() - document.keys()):
        raise InputError(f"{where}: got no {', '.join(missing)}, expected {', '.join(hints)}; {FIELD_REMEDY}")
    return kind(**{name: _from_json(document[name], hint, f"{where}.{name}") for name, hint in hints.items()})


def _from_json(value: Any, hint: Any, where: str) -> Any:
    """The value of type `hint` that `_to_json` wrote."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return _from_document(value)
    if origin is UnionType:
        return None if value is None else _from_json(value, arguments[0], where)
    if hint is Counts:
        return _from_fields(value, Counts, where)
    if origin is dict and isinstance(value, dict):
        return {key: _from_json(v, arguments[1], f"{where}.{key}") for key, v in value.items()}
    if origin in (list, tuple) and isinstance(value, list):
        return origin(_from_json(v, arguments[0], f"{where}[{i}]") for i, v in enumerate(value))
    if hint is float and (type(value) in (int, float) or value in NON_FINITE):
        with suppress(OverflowError):
            return float(value)
    if type(value) is hint or (origin is Literal and value in arguments):
        return value
    raise InputError.of(where, value, hint.__name__ if isinstance(hint, type) else str(hint), FIELD_REMEDY)


def _from_document(value: Any) -> Any:
    """A value of a free-form document, with its floats that JSON has no number for."""
    if isinstance(value, dict):
        return {key: _from_document(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_from_document(v) for v in value]
    return float(value) if value in NON_FINITE else value
