"""The ledger: exact lines, crashes at every byte, resumes, and the proof of coverage with its controls."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isostep.errors import InputError
from isostep.ledger import (
    CheckpointAnnounced,
    Counts,
    CoverageProof,
    Dropped,
    Evaluated,
    Event,
    Ledger,
    MemoryObserved,
    OutOfMemory,
    Resumed,
    RunEnded,
    RunStarted,
    TimelineObserved,
    UpdateDone,
    UpdateStatus,
    fold,
    format_hash,
    prove_coverage,
    read,
    standing_events,
)
from isostep.ledger.events import EVENTS, from_line, to_line
from isostep.units import Coverage

NUM_EXAMPLES = 50
EXAMPLES_PER_UPDATE = 8
UPDATES_PER_EPOCH = 6


def ids_of(epoch: int, start: int, stop: int) -> list[int]:
    order = list(range(NUM_EXAMPLES))
    random.Random(epoch).shuffle(order)
    return order[start:stop]


def hash_of(epoch: int, start: int, stop: int) -> str:
    return format_hash(Coverage.of(ids_of(epoch, start, stop)))


def run_started(**changes: Any) -> RunStarted:
    event = RunStarted(
        what_hash="a1", what={"objective": "causal-lm", "clip_norm": math.inf, "betas": [0.9, 0.95]},
        how={"replicas": 2}, run={"path": "runs/ä", "epochs": 2}, versions={"isostep": "0.1.0"},
        num_examples=NUM_EXAMPLES, seed=2**63 + 1, last_group="drop", examples_per_update=EXAMPLES_PER_UPDATE,
    )  # fmt: skip
    return replace(event, **changes)


def update_done(attempted: int, status: UpdateStatus = "applied", **changes: Any) -> UpdateDone:
    """The attempt with this number of a run that never fails: its epoch, range, ids and counts are right."""
    epoch, group = divmod(attempted - 1, UPDATES_PER_EPOCH)
    start, stop = group * EXAMPLES_PER_UPDATE, (group + 1) * EXAMPLES_PER_UPDATE
    event = UpdateDone(
        attempted=attempted, epoch=epoch, group=group, start=start, stop=stop, status=status,
        ids_hash=hash_of(epoch, start, stop), num_examples=stop - start,
        coverage="proved", counters=Counts(microbatches=4, examples=8, supervised_tokens=attempted),
        denominators={"next_token": 512.0}, loss=1 / attempted, terms={"next_token": 0.1, "balance": None},
        grad_norm=math.inf, learning_rates=[1e-3, 5e-324], loss_scale=None, seconds=0.25,
    )  # fmt: skip
    return replace(event, **changes)


def dropped(epoch: int, **changes: Any) -> Dropped:
    start = UPDATES_PER_EPOCH * EXAMPLES_PER_UPDATE
    ids = tuple(ids_of(epoch, start, NUM_EXAMPLES))
    event = Dropped(epoch=epoch, start=start, stop=NUM_EXAMPLES, ids=ids, ids_hash=format_hash(Coverage.of(ids)))
    return replace(event, **changes)


def evaluated(after_applied: int, loss: float = 1.5) -> Evaluated:
    return Evaluated(after_applied=after_applied, loss=loss, terms={"next_token": loss}, counters=Counts(examples=9))


def one_of_each() -> list[Event]:
    return [
        run_started(),
        update_done(1),
        OutOfMemory(attempted=2, examples_per_microbatch_before=8, examples_per_microbatch_after=4),
        update_done(2, "skipped", loss=math.nan),
        evaluated(1),
        MemoryObserved(devices=["cpu", "cuda"], baseline=[1, 2], first_group=[3, 4], later_groups=[None, 5]),
        TimelineObserved(
            attempted=3,
            path="timeline.jsonl",
            makespan=0.2,
            predicted_makespan=0.1,
            busy_share=0.8,
            predicted_busy_share=0.9,
            bound="work",
        ),
        CheckpointAnnounced(after_attempted=2, path="checkpoints/2\n"),
        dropped(0),
        Resumed(from_update=2, what_override=True, how={"replicas": 3}),
        RunEnded(reason="stopped", message="nan"),
    ]


def whole_run(epochs: int = 2) -> list[Event]:
    """Every update of some epochs, of each status, the last group of each epoch dropped."""
    events: list[Event] = [run_started()]
    for epoch in range(epochs):
        first = epoch * UPDATES_PER_EPOCH + 1
        statuses: list[UpdateStatus] = ["skipped", "applied", "empty", "applied", "applied", "applied"]
        events += [update_done(first + i, status) for i, status in enumerate(statuses)]
        events.append(dropped(epoch))
    return events


def write(path: Path, events: Sequence[Event]) -> None:
    with Ledger(path) as ledger:
        for event in events:
            ledger.append(event)


def same(left: Event, right: Event) -> bool:
    """Equality in which NaN equals NaN and 1 differs from 1.0 and True."""
    return type(left) is type(right) and repr(left) == repr(right)


# Lines


def test_every_event_has_an_example_here() -> None:
    assert {type(event) for event in one_of_each()} == set(EVENTS.values())


@pytest.mark.parametrize("event", one_of_each(), ids=lambda event: event.event)
def test_each_event_survives_the_file(event: Event, tmp_path: Path) -> None:
    write(tmp_path / "ledger.jsonl", [event])
    (again,) = read(tmp_path / "ledger.jsonl")
    assert same(again, event)


FLOATS = st.floats(allow_nan=True, allow_infinity=True)
INTS = st.integers(-(2**70), 2**70)
TEXTS = st.text()
DOCUMENTS = st.dictionaries(
    TEXTS,
    st.recursive(
        st.none() | st.booleans() | INTS | FLOATS | TEXTS.filter(lambda text: text not in ("nan", "inf", "-inf")),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)
COUNTS = st.builds(Counts, **{f.name: INTS for f in fields(Counts)})
TERMS = st.dictionaries(TEXTS, st.none() | FLOATS, max_size=3)


@given(
    st.builds(run_started, what=DOCUMENTS, how=DOCUMENTS, seed=INTS, what_hash=TEXTS, time=FLOATS)
    | st.builds(
        update_done, st.just(1), loss=st.none() | FLOATS, terms=TERMS, grad_norm=FLOATS, counters=COUNTS,
        learning_rates=st.lists(FLOATS), denominators=st.dictionaries(TEXTS, FLOATS), time=FLOATS,
    )
    | st.builds(dropped, st.just(0), ids=st.lists(INTS).map(tuple), ids_hash=TEXTS)
    | st.builds(RunEnded, reason=st.sampled_from(["complete", "failed"]), message=TEXTS)
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_values_survive_a_line_exactly(event: Event) -> None:
    line = to_line(event)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not standard JSON"))
    assert same(from_line(line, "test"), event)


def test_an_integer_in_a_field_of_floats_is_read_as_a_float() -> None:
    again = from_line(to_line(update_done(1, loss=3)), "test")
    assert isinstance(again, UpdateDone)
    assert repr(again.loss) == "3.0"


@pytest.mark.parametrize(
    ("event", "named"),
    [
        (update_done(1, loss="low"), "update_done.loss"),
        (update_done(1, loss=True), "update_done.loss"),
        (update_done(1, grad_norm=10**400), "update_done.grad_norm"),
        (replace(update_done(1), attempted=1.0), "update_done.attempted"),
        (replace(update_done(1), attempted=None), "update_done.attempted"),
        (replace(update_done(1), status="lost"), "update_done.status"),
        (update_done(1, counters=Counts(examples=0.5)), "update_done.counters.examples"),  # pyright: ignore
        (dropped(0, ids=(1, "2")), "dropped.ids[1]"),
        (run_started(what={"a": [Path("x")]}), "run_started.what.a[0]"),
        (run_started(what={1: 2}), "run_started.what"),
        (run_started(what={"clip": "inf"}), "run_started.what.clip"),
        (run_started(schema=2), "schema"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_could_not_be_read_back_is_not_written(event: Event, named: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.append(update_done(1))
        before = path.read_bytes()
        with pytest.raises(InputError) as caught:
            ledger.append(event)
    assert named in str(caught.value)
    assert path.read_bytes() == before


def altered(event: Event, /, **changes: Any) -> bytes:
    """The line of an event, with these JSON fields changed or, where the new value is `...`, left out."""
    document = json.loads(to_line(event)) | changes
    return json.dumps({name: value for name, value in document.items() if value is not ...}).encode()


NO_OBJECT = "a JSON object with an event"
BROKEN = {
    "not json": (b'{"event": "upd', NO_OBJECT),
    "not utf-8": (b"\xff\xfe", NO_OBJECT),
    "blank": (b"", NO_OBJECT),
    "a list": (b"[1]", NO_OBJECT),
    "a number": (b"1", NO_OBJECT),
    "too deep": (b"[" * 100_000, NO_OBJECT),
    "bare NaN": (altered(evaluated(1), loss=math.nan), NO_OBJECT),
    "no event": (altered(evaluated(1), event=...), NO_OBJECT),
    "unknown event": (altered(evaluated(1), event="rested"), "event: got 'rested', expected one of"),
    "event no text": (altered(evaluated(1), event=[1]), "event: got [1], expected one of"),
    "unknown field": (altered(evaluated(1), mood=1), "evaluated: got ['mood'], expected only the fields"),
    "missing field": (altered(evaluated(1), terms=...), "evaluated: got no terms, expected "),
    "other type": (
        altered(evaluated(1), after_applied="1"),
        "evaluated.after_applied: got '1', expected int",
    ),
    "no counters": (altered(evaluated(1), counters=1), "evaluated.counters: got 1, expected a JSON object"),
    "newer schema": (altered(run_started(), schema=2, new=0), "schema: got 2, expected at most 1"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_line_is_named(case: str, tmp_path: Path) -> None:
    line, expected = BROKEN[case]
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(to_line(run_started()) + line + b"\n" + to_line(update_done(1)))
    with pytest.raises(InputError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"{path} line 2")
    assert expected in message
    assert "\n" not in message
    assert len(message) < 600


def test_a_newer_schema_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    content = altered(run_started(), schema=2, new=0) + b'\n{"event": "to'
    path.write_bytes(content)
    for use in (read, Ledger):
        with pytest.raises(InputError, match=r"line 1: schema: got 2, expected at most 1; .*upgrade"):
            use(path)
    assert path.read_bytes() == content


# The file


@pytest.mark.parametrize("content", [b"my notes", b"my notes\nmore", b'{"weights": 1', b"\x00\x00"])
def test_a_file_that_is_no_ledger_is_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes(content)
    with pytest.raises(InputError):
        Ledger(path)
    assert path.read_bytes() == content


def test_a_path_that_cannot_be_opened_is_an_input_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "ledger.jsonl"):
        with pytest.raises(InputError, match="expected a file that can be written"):
            Ledger(path)
        with pytest.raises(InputError, match="expected a file that can be read"):
            read(path)


def test_an_append_after_close_is_an_error(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.close()
    ledger.close()
    with pytest.raises(ValueError, match="closed"):
        ledger.append(update_done(1))


@pytest.mark.grid
def test_a_crash_at_every_byte_keeps_the_whole_lines(tmp_path: Path) -> None:
    path, cut = tmp_path / "ledger.jsonl", tmp_path / "cut.jsonl"
    write(path, one_of_each())
    content, events, added = path.read_bytes(), read(path), RunEnded(reason="failed", message="lost")
    for length in range(len(content) + 1):
        prefix = content[:length]
        cut.write_bytes(prefix)
        whole = prefix.count(b"\n")
        assert list(map(repr, read(cut))) == list(map(repr, events[:whole]))
        with Ledger(cut) as ledger:
            kept = prefix[: prefix.rfind(b"\n") + 1]
            assert cut.read_bytes() == kept
            ledger.append(added)
        assert cut.read_bytes() == kept + to_line(added)


def test_a_torn_line_longer_than_a_block_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path, [run_started()])
    kept = path.read_bytes()
    path.write_bytes(kept + to_line(dropped(0, ids=tuple(range(10**12, 10**12 + 20_000))))[:-1])
    with Ledger(path):
        assert path.read_bytes() == kept


def test_events_that_a_resume_relies_on_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable = []
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        monkeypatch.setattr("os.fsync", lambda descriptor: durable.append(event.event))
        for event in one_of_each():
            ledger.append(event)
    assert durable == ["run_started", "checkpoint_announced", "dropped", "resumed", "run_ended"]


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)


WRITER = """
import sys
from isostep.ledger import Ledger, OutOfMemory
with Ledger(sys.argv[1]) as ledger:
    for attempted in range(1, 1_000_000):
        ledger.append(OutOfMemory(
            attempted=attempted, examples_per_microbatch_before=2, examples_per_microbatch_after=1))
        print(attempted, flush=True)
"""


def test_a_killed_writer_leaves_all_that_it_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with python(WRITER, str(path)) as writer:
        assert writer.stdout is not None
        output = "".join(writer.stdout.readline() for _ in range(200))
        writer.kill()
        output += writer.stdout.read()
    acknowledged = output.count("\n")
    assert acknowledged >= 200
    numbers = [event.attempted for event in read(path) if isinstance(event, OutOfMemory)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert acknowledged <= len(numbers) <= acknowledged + 1
    write(path, [update_done(1)])
    assert len(read(path)) == len(numbers) + 1


FULL_DISK = """
import resource, sys
from pathlib import Path
from isostep.ledger import Ledger, OutOfMemory, read
path, event = Path(sys.argv[1]), OutOfMemory(
    attempted=1, examples_per_microbatch_before=2, examples_per_microbatch_after=1)
with Ledger(path) as ledger:
    ledger.append(event)
    before = path.read_bytes()
    for room in (0, 1, len(before) - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, resource.RLIM_INFINITY))
        try:
            ledger.append(event)
        except OSError:
            assert path.read_bytes() == before
        else:
            sys.exit("no error")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ledger.append(event)
assert read(path) == [event, event]
print("fine")
"""


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    with python(FULL_DISK, str(tmp_path / "ledger.jsonl")) as process:
        output, _ = process.communicate()
    assert output == "fine\n"


def test_the_ledger_imports_no_torch() -> None:
    with python("import sys, isostep.ledger; print('torch' in sys.modules)") as process:
        output, _ = process.communicate()
    assert output == "False\n"


# Folds


def test_counts_add_up_field_by_field() -> None:
    one = Counts(**{f.name: i for i, f in enumerate(fields(Counts), start=1)})
    ten = Counts(**{name: 10 * value for name, value in asdict(one).items()})
    assert asdict(one + ten) == {name: 11 * value for name, value in asdict(one).items()}
    assert one + Counts() == one


def test_fold_adds_up_by_status() -> None:
    events = [
        *whole_run(epochs=2),
        OutOfMemory(attempted=13, examples_per_microbatch_before=4, examples_per_microbatch_after=2),
        update_done(13, loss=0.5),
        update_done(14, "skipped", loss=math.nan),
        evaluated(9),
        evaluated(9, loss=2.0),
    ]
    totals = fold(events)
    assert (totals.attempted, totals.applied, totals.skipped, totals.empty) == (14, 9, 3, 2)
    assert totals.counters == Counts(microbatches=56, examples=112, supervised_tokens=sum(range(15)))
    applied = [2, 4, 5, 6, 8, 10, 11, 12, 13]
    assert totals.applied_counters == Counts(microbatches=36, examples=72, supervised_tokens=sum(applied))
    assert totals.dropped_examples == 4
    assert totals.out_of_memory == 1
    assert totals.last_loss == 0.5
    assert [e.loss for e in totals.evaluations] == [1.5, 2.0]


def test_fold_of_nothing() -> None:
    totals = fold([])
    assert (totals.attempted, totals.counters, totals.last_loss, totals.evaluations) == (
        0,
        Counts(),
        None,
        (),
    )


def resumed(from_update: int) -> Resumed:
    return Resumed(from_update=from_update, how={})


def updates(first: int, last: int) -> list[Event]:
    return [update_done(attempted) for attempted in range(first, last + 1)]


RESUMES: dict[str, tuple[list[Event], list[int]]] = {
    "none": (updates(1, 4), [1, 2, 3, 4]),
    "in the middle": ([*updates(1, 4), resumed(2), *updates(3, 5)], [1, 2, 3, 4, 5]),
    "at the end": ([*updates(1, 4), resumed(4), *updates(5, 5)], [1, 2, 3, 4, 5]),
    "to 0": ([*updates(1, 4), resumed(0), *updates(1, 2)], [1, 2]),
    "two in a row": ([*updates(1, 4), resumed(3), resumed(1), *updates(2, 2)], [1, 2]),
    "later then earlier": (
        [*updates(1, 4), resumed(2), *updates(3, 6), resumed(1), *updates(2, 3)],
        [1, 2, 3],
    ),
    "earlier then later": ([*updates(1, 4), resumed(1), *updates(2, 6), resumed(5)], [1, 2, 3, 4, 5]),
    "as the last event": ([*updates(1, 4), resumed(0)], []),
    "without updates": ([resumed(0), *updates(1, 1)], [1]),
}


@pytest.mark.parametrize("case", RESUMES)
def test_a_resume_supersedes_later_attempts(case: str) -> None:
    events, expected = RESUMES[case]
    standing = standing_events(events)
    assert [e.attempted for e in standing if isinstance(e, UpdateDone)] == expected
    counted = fold(events)
    assert counted.attempted == len(expected)
    assert counted.counters.supervised_tokens == sum(expected)


def test_a_resume_supersedes_what_followed_later_attempts_only() -> None:
    ran_out = OutOfMemory(attempted=12, examples_per_microbatch_before=2, examples_per_microbatch_after=1)
    saved = CheckpointAnnounced(after_attempted=6, path="6")
    before = [run_started(), *updates(1, 6), dropped(0), evaluated(6), saved]
    events = [*before, *updates(7, 11), ran_out, *updates(12, 12), dropped(1), evaluated(12), resumed(6)]
    assert standing_events(events) == [*before, ran_out, events[-1]]


@pytest.mark.parametrize("resumes", [1, 2])
def test_a_drop_that_a_resumed_run_repeats_counts_once(resumes: int) -> None:
    repeated = [resumed(6), dropped(0), evaluated(6, loss=1.25)] * resumes
    events = [run_started(), *updates(1, 6), dropped(0), evaluated(6), *repeated, *updates(7, 7)]
    totals = fold(events)
    assert totals.dropped_examples == 2
    assert [e.loss for e in totals.evaluations] == [1.25]
    assert prove_coverage(events, ids_of).ok


@pytest.mark.parametrize(
    "between", [[], [resumed(6), *updates(7, 7)]], ids=["without a resume", "after a later update"]
)
def test_a_drop_that_no_resume_explains_is_not_forgiven(between: list[Event]) -> None:
    events = [run_started(), *updates(1, 6), dropped(0), *between, dropped(0)]
    assert fold(events).dropped_examples == 4
    assert not prove_coverage(events, ids_of).ok


# The proof of coverage


def test_coverage_is_proved_for_complete_epochs_and_the_one_in_progress() -> None:
    proof = prove_coverage([*whole_run(epochs=2), *updates(13, 14)], ids_of)
    assert proof.ok
    assert proof.faults == ()
    assert proof.text().split("\n") == [
        "epoch 0: 50 of 50 examples, each exactly once: 32 applied, 8 skipped, 8 empty, 2 dropped",
        "epoch 1: 50 of 50 examples, each exactly once: 32 applied, 8 skipped, 8 empty, 2 dropped",
        "epoch 2: 16 of 50 examples, each at most once so far: 16 applied, 0 skipped, 0 empty, 0 dropped",
    ]


def test_coverage_is_proved_through_resumes() -> None:
    first, second = whole_run(epochs=1), whole_run(epochs=2)
    events = [*first, *updates(7, 9), resumed(7), *updates(8, 8), resumed(0), *second[1:], resumed(12)]
    proof = prove_coverage(events, ids_of)
    assert proof.ok, proof.text()
    assert [epoch.covered for epoch in proof.epochs] == [50, 50]


def test_a_run_that_has_not_begun_has_no_fault() -> None:
    assert prove_coverage([run_started()], ids_of) == CoverageProof(epochs=(), faults=())


Change = Callable[[list[Event]], object]


def alter(index: int, **changes: Any) -> Change:
    def change(events: list[Event]) -> None:
        events[index] = replace(events[index], **changes)

    return change


# In `whole_run()`: 0 is the start, 1 to 6 the updates of epoch 0, 7 its drop; 8 to 14 are epoch 1.
CONTROLS: dict[str, tuple[Change, str]] = {
    "lost range": (
        lambda events: events.pop(3),
        "epoch 0, positions [16, 24): got no update and no drop, expected exactly one",
    ),
    "lost first range": (
        lambda events: events.pop(1),
        "epoch 0, positions [0, 8): got no update and no drop, expected exactly one",
    ),
    "lost drop": (
        lambda events: events.pop(7),
        "epoch 0, positions [48, 50): got no update and no drop, expected exactly one",
    ),
    "lost epoch": (
        lambda events: events.__delitem__(slice(1, 8)),
        "ledger: got epoch 1, expected epoch 0 next",
    ),
    "lost beginning": (
        lambda events: events.pop(0),
        "ledger: got no run_started, expected it first",
    ),
    "same range in two updates": (
        lambda events: events.insert(3, update_done(2)),
        "epoch 0, positions [8, 16) applied by attempted update 2: "
        "got this start, expected 16: used twice or out of order",
    ),
    "applied and skipped": (
        lambda events: events.insert(3, update_done(2, "skipped")),
        "epoch 0, positions [8, 16) skipped by attempted update 2: "
        "got this start, expected 16: used twice or out of order",
    ),
    "applied and dropped": (
        alter(7, start=40, ids=tuple(ids_of(0, 40, 50)), ids_hash=hash_of(0, 40, 50)),
        "epoch 0, positions [40, 50) dropped: got this start, expected 48: used twice or out of order",
    ),
    "overlap": (
        alter(3, start=15, num_examples=9, ids_hash=hash_of(0, 15, 24)),
        "epoch 0, positions [15, 24) empty by attempted update 3: "
        "got this start, expected 16: used twice or out of order",
    ),
    "range inside an earlier one": (
        lambda events: events.insert(3, update_done(3, start=2, stop=4, num_examples=2, ids_hash=hash_of(0, 2, 4))),
        "epoch 0, positions [2, 4) applied by attempted update 3: "
        "got this start, expected 16: used twice or out of order",
    ),
    "wrong hash": (
        alter(2, ids_hash="0123456789abcdef"),
        "epoch 0, positions [8, 16) applied by attempted update 2: got ids_hash 0123456789abcdef, expected "
        + hash_of(0, 8, 16),
    ),
    "hash of another epoch": (
        alter(8, ids_hash=hash_of(0, 0, 8)),
        "epoch 1, positions [0, 8) skipped by attempted update 7: "
        f"got ids_hash {hash_of(0, 0, 8)}, expected {hash_of(1, 0, 8)}",
    ),
    "wrong count": (
        alter(2, num_examples=7),
        "epoch 0, positions [8, 16) applied by attempted update 2: got 7 examples, expected 8",
    ),
    "fewer ids dropped": (
        alter(7, ids=()),
        "epoch 0, positions [48, 50) dropped: got dropped ids 0000000000000000/0, "
        f"expected {Coverage.of(ids_of(0, 48, 50))} (hash/count)",
    ),
    "other ids dropped": (
        alter(7, ids=tuple(ids_of(0, 0, 2))),
        f"epoch 0, positions [48, 50) dropped: got dropped ids {Coverage.of(ids_of(0, 0, 2))}, "
        f"expected {Coverage.of(ids_of(0, 48, 50))} (hash/count)",
    ),
    "range outside the data set": (
        alter(14, stop=51),
        "epoch 1, positions [48, 51) dropped: got this range, expected one within [0, 50)",
    ),
    "range backwards": (
        alter(14, start=50, stop=48),
        "epoch 1, positions [50, 48) dropped: got this range, expected one within [0, 50)",
    ),
    "unknown coverage": (
        alter(10, start=-1, stop=-1, coverage="unknown"),
        "epoch 1: got 1 updates of unknown coverage, expected none",
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_fault_in_the_ledger_is_found_and_named(control: str) -> None:
    change, expected = CONTROLS[control]
    events = whole_run()
    assert prove_coverage(events, ids_of).ok
    change(events)
    proof = prove_coverage(events, ids_of)
    assert not proof.ok
    assert proof.faults == (expected,)
    assert proof.text().endswith(f"\n{expected}" if proof.epochs else expected)


@pytest.mark.parametrize("index", range(1, 14))
def test_every_lost_event_is_found(index: int) -> None:
    events = whole_run()
    del events[index]
    assert not prove_coverage(events, ids_of).ok


def test_an_order_that_holds_an_id_in_two_ranges_is_found() -> None:
    def repeating(epoch: int, start: int, stop: int) -> list[int]:
        return [example_id if example_id != 7 else 8 for example_id in ids_of(epoch, start, stop)]

    events = whole_run(epochs=1)
    for i, event in enumerate(events):
        if isinstance(event, UpdateDone | Dropped):
            ids = repeating(event.epoch, event.start, event.stop)
            events[i] = replace(event, ids_hash=format_hash(Coverage.of(ids)))
            if isinstance(event, Dropped):
                events[i] = replace(events[i], ids=tuple(ids))
    proof = prove_coverage(events, repeating)
    assert len(proof.faults) == 1
    assert "of ids 0 to 49, each once" in proof.faults[0]


def test_an_order_of_another_size_is_found() -> None:
    events = whole_run(epochs=1)
    proof = prove_coverage(events, lambda epoch, start, stop: ids_of(epoch, start, min(stop, 49)))
    assert proof.faults[0] == "epoch 0, positions [48, 50) dropped: got 1 ids from the order, expected 2"


def test_the_proof_asks_for_one_group_at_a_time() -> None:
    asked = []

    def watched(epoch: int, start: int, stop: int) -> list[int]:
        asked.append(stop - start)
        return ids_of(epoch, start, stop)

    assert prove_coverage(whole_run(), watched).ok
    assert max(asked) == EXAMPLES_PER_UPDATE
    assert len(asked) == 2 * (UPDATES_PER_EPOCH + 1)
