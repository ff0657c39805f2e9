"""The sheet of a run against numbers worked out by hand from `written_ledger`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isostep.errors import InputError, IsostepError
from isostep.ledger import Event, Resumed, RunEnded, UpdateDone, read
from isostep.ledger.places import Place, places
from isostep.ledger.sheet import read_run, sheet, sheet_text
from isostep.ledger.words import duration, moment, number, whole
from written_ledger import FACTS, MIB, RUN, WHAT, dropped, evaluated, how, started, update, write, written


def lines(document: dict[str, Any]) -> list[str]:
    return [" ".join(line.split()) for line in sheet_text(document).splitlines()]


def test_counts_each_standing_update_once() -> None:
    document = sheet(written())
    assert document["updates"] == {
        "attempted": 6, "applied": 4, "skipped": 1, "empty": 1, "dropped_examples": 6, "superseded_updates": 2,
        "planned": 6,
    }  # fmt: skip
    totals = document["totals"]
    names = ("microbatches", "examples", "supervised_tokens", "total_tokens", "padding_tokens")
    assert [totals["attempted"][name] for name in names] == [13, 24, 130, 400, 60]
    assert [totals["applied"][name] for name in names] == [9, 16, 100, 300, 60]
    assert totals["padding_share"] == 0.15
    assert document["per_applied_update"] == {
        "examples": {"min": 4, "median": 4, "max": 4},
        "supervised_tokens": {"min": 10, "median": 25, "max": 40},
    }


def test_layouts_and_microbatches_per_replica() -> None:
    """On two replicas 2 and 3 microbatches: 1 to 2 each. On one replica 2 in every update that stands."""
    first, second = sheet(written())["layouts"]
    assert (first["from_update"], first["replicas"], first["updates"]) == (0, 2, 2)
    assert first["microbatches_per_replica"] == [1, 2]
    assert first["mean_examples_per_microbatch"] == 8 / 5
    assert (second["from_update"], second["replicas"], second["updates"]) == (2, 1, 4)
    assert second["microbatches_per_replica"] == [2, 2]
    assert second["mean_examples_per_microbatch"] == 2


def test_a_budget_of_tokens_per_microbatch_is_said() -> None:
    layout = how(2) | {"examples_per_microbatch": None, "tokens_per_microbatch": 4096}
    assert "m at most 4,096 tokens, padding counted" in lines(sheet([started(how=layout)]))
    found = lines(sheet([started(how=layout), *written()[1:5]]))
    assert "m at most 4,096 tokens, padding counted; 1.6 examples on average" in found


def test_settings_are_those_of_the_ledger() -> None:
    document = sheet(written())
    assert (document["schema"], document["what_hash"], document["purpose"]) == (1, "a1b2c3", "trial")
    assert document["facts"] == FACTS
    assert document["what"] == WHAT
    assert document["normalisation"] == {
        "next_token": {"coefficient": 1.0, "divided_by": "supervised tokens of the whole group"}
    }
    assert document["versions"] == {"isostep": "0.1.0", "torch": "2"}
    assert document["last_group"] == {"handling": "drop", "partial_groups": 3, "examples": 6}


def test_clipped_updates_are_applied_ones_above_the_norm() -> None:
    """Norms of applied updates: 2.0, 0.5, 1.5 and exactly 1.0; those superseded or skipped had more."""
    assert sheet(written())["clipping"] == {"clip_norm": 1.0, "clipped_updates": 2}


def test_memory_is_the_last_word_of_each_start() -> None:
    first, third = sheet(written())["memory"]
    assert (first["from_update"], third["from_update"]) == (0, 2)
    assert first["replicas"][1] == {
        "replica": 1, "device": "cpu", "baseline": 101 * MIB, "first_group": 201 * MIB, "later_groups": 301 * MIB,
    }  # fmt: skip
    assert len(first["replicas"]) == 2
    assert [(r["baseline"], r["first_group"], r["later_groups"]) for r in third["replicas"]] == [
        (90 * MIB, 150 * MIB, None)
    ]


def test_history_speaks_of_all_starts() -> None:
    document = sheet(written())
    assert [(e["attempted"], e["during"]) for e in document["out_of_memory"]] == [(3, "update")]
    assert document["checkpoints"] == {"announced": 3, "last": {"after_attempted": 6, "path": "checkpoints/6"}}
    assert [(r["from_update"], r["reached"], r["changes"]) for r in document["resumes"]] == [
        (2, 3, {"layout.replicas": [2, 1]}),
        (2, 3, {}),
    ]


def test_a_start_that_was_killed_at_once_has_reached_nothing() -> None:
    events = written()
    again = Resumed(time=2500, from_update=2, how=how(1))
    resumes = sheet([*events[:12], again, *events[13:]])["resumes"]
    assert [(r["from_update"], r["reached"]) for r in resumes] == [(2, 3), (2, 2), (2, 2)]


def test_seconds_of_what_stands_and_of_the_wall() -> None:
    """Starts of 10, 4 and 10 seconds; the standing updates took 1 + 2 + 1 + 3 + 1 + 2."""
    times = sheet(written())["time"]
    assert (times["training_seconds"], times["wall_seconds"], times["starts"]) == (10.0, 24.0, 3)
    assert times["total_tokens_per_second"] == 40.0
    assert times["supervised_tokens_per_second"] == 13.0
    assert (times["started"], times["last_event"]) == (1000.0, 3010.0)


def test_updates_without_seconds_do_not_make_the_others_look_fast() -> None:
    events = [replace(e, seconds=None) if isinstance(e, UpdateDone) and e.attempted > 1 else e for e in written()]
    assert sheet(events)["time"]["total_tokens_per_second"] == 40.0  # update 1 alone: 40 tokens in 1 s
    events = [replace(e, seconds=None) if isinstance(e, UpdateDone) else e for e in written()]
    times = sheet(events)["time"]
    assert times["training_seconds"] is times["total_tokens_per_second"] is None


def test_validation_has_its_places() -> None:
    validation = sheet(written())["validation"]
    first = {"updates": 0, "examples": 0, "supervised_tokens": 0, "loss": 4.0}
    best = {"updates": 3, "examples": 12, "supervised_tokens": 70, "loss": 2.2}
    last = {"updates": 4, "examples": 16, "supervised_tokens": 100, "loss": 2.3}
    assert (validation["first"], validation["best"], validation["last"]) == (first, best, last)
    assert validation["evaluations"] == [first, best, last]


def test_places_count_applied_updates_only() -> None:
    found = [(place, event.loss) for place, event in places(written()[-11:])]
    assert found == [(Place(1, 4, 40), 2.0), (Place(1, 4, 40), 2.2), (Place(2, 8, 70), 1.5), (Place(2, 8, 70), 2.3)]


@pytest.mark.parametrize(
    ("axis", "metric", "rule", "verdict", "value", "place"),
    [
        ("supervised_tokens", "validation_loss", "< 2.25 at 70", "accepted", 2.2, 70),
        ("supervised_tokens", "validation_loss", "< 2.25 at 69", "rejected", 4.0, 0),
        ("updates", "validation_loss", "< 2.25 at 4", "rejected", 2.3, 4),
        ("examples", "validation_loss", "<= 2.3 at 16", "accepted", 2.3, 16),
        ("supervised_tokens", "training_loss", "< 2.0 at 70", "rejected", 2.0, 70),
        ("examples", "training_loss", "< 2.0 at 16", "accepted", 1.5, 16),
        ("examples", "training_loss", "< 2.0 at 17", "not reached", None, None),
    ],
)
def test_quality_is_judged_at_places(
    axis: str, metric: str, rule: str, verdict: str, value: float | None, place: float | None
) -> None:
    run = RUN | {"quality": {"axis": axis, "metric": metric, "accept_if": rule}}
    quality = sheet([started(run=run), *written()[1:]])["quality"]
    assert (quality["verdict"], quality["rule"]) == (verdict, rule)
    if value is not None:
        assert (quality["value"], quality["place"]) == (value, place)


def test_no_rule_is_said() -> None:
    quality = sheet([started(run={"facts": FACTS}), *written()[1:]])["quality"]
    assert (quality["rule"], quality["verdict"]) == (None, "no rule")


def test_coverage_is_proved_and_a_wrong_order_is_found() -> None:
    coverage = sheet(written())["coverage"]
    assert coverage["proved"] is True
    assert [(e["applied"], e["skipped"], e["empty"], e["dropped"], e["covered"]) for e in coverage["epochs"]] == [
        (8, 0, 0, 2, 10),
        (4, 4, 0, 2, 10),
        (4, 0, 4, 2, 10),
    ]
    other = sheet([started(seed=4), *written()[1:]])
    assert other["coverage"]["proved"] is False
    assert "NOT proved" in sheet_text(other)
    assert "... and" in sheet_text(other)
    assert sheet(written(), prove=False)["coverage"] is None


def test_partial_groups_that_are_kept() -> None:
    last = update(1005, 2, "applied", 1, 5, 20, 0, 2.0, 1.0, 1.0, start=8, stop=10)
    events = [started(last_group="keep"), update(1003, 1, "applied", 2, 10, 40, 10, 3.0, 2.0, 1.0), last]
    assert sheet(events)["last_group"] == {"handling": "keep", "partial_groups": 1, "examples": 2}
    whole_one = replace(last, start=6)
    assert sheet([*events[:2], whole_one])["last_group"]["partial_groups"] == 0


@pytest.mark.parametrize(("padding", "partial"), [(1, 1), (0, 0)])
def test_partial_groups_of_a_budget_of_tokens(padding: int, partial: int) -> None:
    """Budget 20: the last group of an epoch has 19 tokens beside padding, or is full."""
    what = WHAT | {"update": {"examples_per_update": None, "tokens_per_update": 20}}
    last = update(1005, 1, "applied", 1, 5, 20, padding, 2.0, 1.0, 1.0, start=8, stop=10)
    document = sheet([started(last_group="keep", what=what, examples_per_update=None), last])
    assert document["last_group"]["partial_groups"] == partial


def test_a_resume_with_other_settings_holds_from_there_on() -> None:
    """Update 6 has norm 1.0: clipped at 0.9, which the resume before it brought; update 2 with 0.5 never is."""
    changes = {"optimizer.clip_norm": [1.0, 0.9], "run.purpose": ["trial", "accepted"], "run.epochs": [3, 5]}
    resume = Resumed(time=3005, from_update=4, what_override=True, how=how(1), changes=changes,
                     facts={"planned_updates": 10}, versions={"torch": "9"}, what_hash="b2")  # fmt: skip
    events = written()
    document = sheet([*events[:20], resume, *events[20:]])
    assert document["clipping"] == {"clip_norm": 0.9, "clipped_updates": 3}
    assert document["purpose"] == "accepted"
    assert document["updates"]["planned"] == 10
    assert (document["versions"], document["what_hash"]) == ({"torch": "9"}, "b2")
    assert document["layouts"][1]["updates"] == 4
    assert document["what"]["optimizer"]["clip_norm"] == 0.9
    assert WHAT["optimizer"]["clip_norm"] == 1.0
    assert "what b2; changed by a resume" in lines(document)
    assert "optimizer.clip_norm 1.0 -> 0.9" in " ".join(lines(document))
    assert "told to go on with another WHAT" in " ".join(lines(document))


@pytest.mark.parametrize(
    ("cut", "state"),
    [
        (lambda events: events, "complete"),
        (lambda events: events[:-1], "unfinished"),
        (lambda events: [*events[:-1], RunEnded(reason="failed", message="replica 1 is gone")], "failed"),
        (lambda events: [*events[:8], RunEnded(reason="stopped")], "stopped"),
        (lambda events: [*events[:8], RunEnded(reason="stopped"), *events[11:13]], "unfinished"),
        (lambda events: [*events[:8], RunEnded(reason="failed"), *events[11:]], "complete"),
    ],
)
def test_state_is_that_of_the_last_start(cut: Callable[[list[Event]], list[Event]], state: str) -> None:
    document = sheet(cut(written()))
    assert document["state"] == state
    if state == "failed":
        assert "state failed: replica 1 is gone" in lines(document)


def test_a_run_killed_after_any_event_has_a_sheet() -> None:
    events = written()
    for end in range(1, len(events)):
        document = sheet(events[:end])
        assert document["state"] == "unfinished"
        assert document["coverage"]["proved"], (end, document["coverage"])
        json.dumps(document, allow_nan=False)
        assert max(map(len, sheet_text(document).splitlines())) <= 88


def test_the_least_that_a_ledger_can_say() -> None:
    event = started(what={}, how={}, run={}, versions={})
    document = sheet([event])
    assert document["state"] == "unfinished"
    assert document["layouts"][0]["replicas"] is None
    assert document["validation"]["last"] is None
    assert "updates 0 attempted: 0 applied, 0 skipped, 0 empty" in lines(document)
    assert "coverage: no update so far, of 10 examples per epoch, from seed and positions alone" in lines(document)


@pytest.mark.parametrize("events", [[], [RunEnded(reason="failed")]])
def test_a_ledger_without_a_start_is_one_line(events: Sequence[Event]) -> None:
    with pytest.raises(IsostepError, match=r"^ledger: got no start of a run, expected one; [^\n]*$"):
        sheet(events)


def test_numbers_that_json_lacks_are_text() -> None:
    events = [*written()[:-2], evaluated(3009.2, 4, math.nan), evaluated(3009.3, 4, math.inf)]
    document = json.loads(json.dumps(sheet(events), allow_nan=False))
    assert [e["loss"] for e in document["validation"]["evaluations"][-2:]] == ["nan", "inf"]
    assert document["validation"]["best"]["loss"] == 2.2
    assert any(line.startswith("last inf ") for line in lines(document))


def test_text_says_what_the_document_says() -> None:
    found = lines(sheet(written()))
    for line in (
        "directory runs/written",
        "state complete",
        "purpose trial",
        "parameters 857,728 width 128, depth 4, heads 4",
        "context length 384 tokens",
        "precision bfloat16",
        "from update 0; 2 standing updates",
        "D 2 replicas",
        "m at most 2 examples; 1.6 examples on average",
        "A 1 to 2 microbatches per replica and update",
        "from update 2; 4 standing updates",
        "D 1 replica",
        "A 2 microbatches per replica and update",
        "examples 4 in every applied update",
        "supervised tokens 10 to 40 per applied update, median 25",
        "divided by next_token: by supervised tokens of the whole group",
        "last group dropped; 3 partial groups of 6 examples together",
        "clipping global gradient norm to 1.0; clipped in 2 of 4 applied updates",
        "average (ema) none",
        "unit: updates, 6 in all",
        "updates 6 attempted of 6 planned: 4 applied, 1 skipped, 1 empty",
        "examples 24 in 13 microbatches; 6 dropped",
        "tokens 400, of which 15.0 % padding",
        "of these, applied 16 examples, 100 supervised tokens",
        "left out 5 examples of the data, too long for the context",
        "wall clock 24 s, in 3 starts, without the time between them",
        "in updates 10 s, of those that stand",
        "per second 40 tokens, padding counted; 13 supervised",
        "checkpoints 3, the last after update 6: checkpoints/6",
        "resumes from update 2 (had reached 3): layout.replicas 2 -> 1",
        "from update 2 (had reached 3): nothing changed",
        "done twice 2 updates, superseded by a resume; counted once",
        "out of memory update 3: m from 2 to 1",
        "replica 1, from update 0 cpu 101 MiB 201 MiB 301 MiB",
        "replica 0, from update 2 cpu 90 MiB 150 MiB -",
        "best 2.2000 3 12 70",
        "last 2.3000 4 16 100",
        "each over all 7 validation examples",
        "rule validation loss < 2.25 at 70 supervised tokens",
        "epoch 1 10 4 4 0 2 each exactly once",
    ):
        assert line in found, line
    (verdict,) = [line for line in found if line.startswith("verdict ")]
    assert verdict.startswith("verdict accepted")


def test_epochs_that_went_alike_share_a_row() -> None:
    events: list[Event] = [started()]
    for epoch in range(3):
        events += [update(1, 2 * epoch + g, "applied", 2, 1, 4, 0, 1.0, 1.0, 1.0) for g in (1, 2)]
        events.append(dropped(1, epoch))
    assert "epochs 0 to 2 10 8 0 0 2 each exactly once" in lines(sheet(events))


def test_many_replicas_are_summed_up() -> None:
    events = written()
    many = replace(
        events[3], devices=["cuda"] * 20, baseline=[1 * MIB] * 20, first_group=[*[2 * MIB] * 19, 5 * MIB],
        later_groups=[None] * 20,
    )  # fmt: skip
    found = lines(sheet([events[0], many]))
    assert "highest of 12 more 1 MiB 5 MiB -" in found
    assert sum(line.startswith("replica ") for line in found) == 8


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.04, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (59.7, "1 min"), (73, "1 min 13 s"),
     (3599.8, "1 h"), (7500, "2 h 5 min"), (86399, "1 d"), (90000, "1 d 1 h")],
)  # fmt: skip
def test_durations_in_words(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_other_words() -> None:
    assert [number(None), number(1.23456), number("nan")] == ["-", "1.2346", "nan"]
    assert [whole(None), whole(12_345), whole(2.5), whole(2.0)] == ["-", "12,345", "2.5", "2"]
    assert moment(0) == "1970-01-01 00:00:00"
    assert moment(1e300) == moment(math.nan) == "-"


def test_read_run_names_what_is_missing(tmp_path: Path) -> None:
    assert read_run(write(tmp_path / "run", written())) == read(tmp_path / "run" / "ledger.jsonl")
    with pytest.raises(InputError, match="a directory that exists"):
        read_run(tmp_path / "none")
    with pytest.raises(InputError, match=r"one with a ledger\.jsonl"):
        read_run(tmp_path)
