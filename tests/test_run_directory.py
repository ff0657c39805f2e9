"""Where a run begins: what its directory, its ledger and its checkpoints say."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isostep.config import Config, hash_of, load
from isostep.distributed.checkpoint import MANIFEST, digest_of, folder_of, manifest_of
from isostep.errors import InputError
from isostep.ledger import (
    CheckpointAnnounced,
    Counts,
    Evaluated,
    Event,
    Ledger,
    Resumed,
    RunEnded,
    RunStarted,
    UpdateDone,
)
from isostep.recipe.run_dir import Documents, Opening, RunDirectory


def started(config: Config, content: str = "c0") -> RunStarted:
    what = config.what(content)
    return RunStarted(
        what_hash=hash_of(what), what=what, how=config.how(1), run=config.about_run(), versions={}, num_examples=100,
        seed=0, last_group="keep", examples_per_update=10,
    )  # fmt: skip


def updated(attempted: int) -> UpdateDone:
    return UpdateDone(
        attempted=attempted, epoch=0, group=attempted - 1, start=0, stop=1, status="applied", ids_hash="0" * 16,
        num_examples=1, coverage="proved", counters=Counts(), denominators={}, loss=1.0, terms={}, grad_norm=1.0,
        learning_rates=[], loss_scale=None, seconds=None,
    )  # fmt: skip


def evaluated(after: int) -> Evaluated:
    return Evaluated(after_applied=after, loss=1.0, terms={}, counters=Counts())


def write(folder: Path, events: list[Event]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with Ledger(folder / "ledger.jsonl") as ledger:
        for event in events:
            ledger.append(event)


def checkpoint(folder: Path, after: int, content: bytes = b"weights") -> CheckpointAnnounced:
    """A folder that passes for a checkpoint, and its announcement."""
    path = folder / folder_of(after)
    path.mkdir(parents=True)
    (path / "data").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    manifest = {"files": {"data": digest}, "after_attempted": after}
    (path / MANIFEST).write_text(json.dumps(manifest | {"digest": digest_of(manifest)}))
    return CheckpointAnnounced(after_attempted=after, path=folder_of(after), digest=digest_of(manifest))


def opened(folder: Path, config: Config | None = None, content: str = "c0", **options: Any) -> Opening:
    config = config or Config()
    validation = options.pop("validation", "")
    now = Documents(config.what(content), config.how(1), config.about_run(validation), options.pop("versions", {}))
    with RunDirectory(str(folder)) as directory:
        return directory.open(now, **{"allow_changed_what": False, **options})


# ------------------------------------------------------------------------------------------------------- where


def test_a_ledger_of_something_else_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [replace(started(Config()), what={"objective": "causal-lm"})])
    with pytest.raises(InputError, match="choose another --run-dir"):
        opened(tmp_path)


def test_empty_folder_begins_a_run(tmp_path: Path) -> None:
    assert opened(tmp_path / "new" / "deep").state == "new"


def test_a_ledger_that_was_torn_in_its_first_line_begins_a_run(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_bytes(b'{"event": "run_star')
    assert opened(tmp_path).state == "new"


@pytest.mark.parametrize("left", ["weights.pt", folder_of(3)])
def test_results_without_a_ledger_are_not_overwritten(tmp_path: Path, left: str) -> None:
    (tmp_path / left).mkdir(parents=True)
    with pytest.raises(InputError, match="no ledger"):
        opened(tmp_path)
    assert (tmp_path / left).exists()


def test_complete_run_is_complete(tmp_path: Path) -> None:
    write(tmp_path, [started(Config()), updated(1), RunEnded(reason="complete")])
    assert opened(tmp_path).state == "resume", "its weights are gone"
    (tmp_path / "weights.pt").touch()
    assert opened(tmp_path).state == "complete"


@pytest.mark.parametrize("end", [[], [RunEnded(reason="stopped")], [RunEnded(reason="failed")]])
def test_unfinished_run_resumes_from_its_last_checkpoint(tmp_path: Path, end: list[Event]) -> None:
    events: list[Event] = [started(Config()), updated(1), updated(2), checkpoint(tmp_path, 2), updated(3)]
    write(tmp_path, events + end)
    opening = opened(tmp_path)
    assert (opening.state, opening.from_update, opening.path) == ("resume", 2, folder_of(2))
    assert manifest_of(tmp_path / folder_of(2), opening.digest)["after_attempted"] == 2
    assert not opening.changes


def test_without_a_checkpoint_it_begins_again(tmp_path: Path) -> None:
    write(tmp_path, [started(Config()), updated(1)])
    opening = opened(tmp_path)
    assert (opening.state, opening.from_update, opening.path) == ("resume", 0, None)
    assert "from the start" in opening.text(tmp_path)[0]


def test_a_removed_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    gone = CheckpointAnnounced(after_attempted=4, path=folder_of(4))
    write(tmp_path, [started(Config()), updated(1), updated(2), checkpoint(tmp_path, 2), updated(3), updated(4), gone])
    assert opened(tmp_path).from_update == 2


def test_a_checkpoint_that_an_earlier_resume_supersedes_is_not_taken(tmp_path: Path) -> None:
    """It is of another history: updates 3 and 4 were done again after it."""
    write(
        tmp_path,
        [
            started(Config()),
            checkpoint(tmp_path, 2),
            checkpoint(tmp_path, 4),
            Resumed(from_update=2, how={}),
            updated(3),
        ],
    )
    assert opened(tmp_path).from_update == 2


def test_a_folder_that_was_never_announced_is_not_taken(tmp_path: Path) -> None:
    write(tmp_path, [started(Config()), checkpoint(tmp_path, 2), updated(3)])
    checkpoint(tmp_path, 3)
    assert opened(tmp_path).from_update == 2


def test_validations_that_the_resume_supersedes_are_due_again(tmp_path: Path) -> None:
    write(
        tmp_path,
        [
            started(Config()), evaluated(0), updated(1), updated(2), evaluated(2), checkpoint(tmp_path, 2), updated(3),
            evaluated(3),
        ],
    )  # fmt: skip
    assert opened(tmp_path).evaluated == [0, 2]


# ------------------------------------------------------------------------------------------------------ changes


def test_how_and_run_may_change_and_it_is_said(tmp_path: Path) -> None:
    write(tmp_path, [started(Config()), checkpoint(tmp_path, 2)])
    config = load(None, {"layout.tokens_per_microbatch": "512", "run.epochs": "7", "run.dir": "elsewhere"})
    opening = opened(tmp_path, config)
    assert opening.changes == {
        "layout.tokens_per_microbatch": [4096, 512],
        "run.epochs": [2, 7],
        "run.dir": ["runs/default", "elsewhere"],
    }
    assert any("run.epochs was 2, is 7" in line for line in opening.text(tmp_path))


def test_longer_goes_on_with_a_complete_run(tmp_path: Path) -> None:
    write(tmp_path, [started(Config()), checkpoint(tmp_path, 2), RunEnded(reason="complete")])
    assert opened(tmp_path, load(None, {"run.epochs": "3"})).state == "resume"


def test_changes_of_an_earlier_resume_are_not_said_again(tmp_path: Path) -> None:
    resumed = Resumed(from_update=2, how={}, changes={"run.epochs": [2, 7]})
    write(tmp_path, [started(Config()), checkpoint(tmp_path, 2), resumed])
    assert opened(tmp_path, load(None, {"run.epochs": "7"})).changes == {}


@pytest.mark.parametrize(
    ("flags", "content", "named"),
    [
        ({"optimizer.learning_rate": "0.1"}, "c0", ("optimizer.learning_rate", "0.1", "0.003")),
        ({"update.seed": "5"}, "c0", ("update.seed", "5", "0")),
        ({}, "c1", ("data", "c1", "c0")),
        ({"quality.accept_if": "< 1 at 5"}, "c0", ("quality.accept_if", "< 1 at 5", "None")),
    ],
)
def test_another_what_or_quality_rule_is_refused(
    tmp_path: Path, flags: dict[str, str], content: str, named: tuple[str, ...]
) -> None:
    write(tmp_path, [started(Config()), checkpoint(tmp_path, 2), RunEnded(reason="complete")])
    before = (tmp_path / "ledger.jsonl").read_bytes()
    with pytest.raises(InputError) as refused:
        opened(tmp_path, load(None, flags), content)
    assert all(name in str(refused.value) for name in named)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


def test_another_what_is_taken_where_it_is_allowed(tmp_path: Path) -> None:
    write(tmp_path, [started(Config()), checkpoint(tmp_path, 2), RunEnded(reason="complete")])
    opening = opened(tmp_path, load(None, {"optimizer.learning_rate": "0.1"}), allow_changed_what=True)
    assert opening.state == "resume"
    assert opening.what_override
    assert opening.changes == {"optimizer.learning_rate": [0.003, 0.1]}


@pytest.mark.parametrize(
    "flags", [{"model.width": "64"}, {"update.seed": "1"}, {"optimizer.name": "sgd"}, {"optimizer.ema_decay": "0.5"}]
)
def test_what_cannot_be_carried_on_is_refused_all_the_same(tmp_path: Path, flags: dict[str, str]) -> None:
    """Another order or model: coverage and checkpoint would not hold."""
    write(tmp_path, [started(Config()), checkpoint(tmp_path, 2)])
    with pytest.raises(InputError) as refused:
        opened(tmp_path, load(None, flags), allow_changed_what=True)
    assert "--allow-changed-what" not in str(refused.value)


def test_keys_without_effect_are_no_change(tmp_path: Path) -> None:
    write(tmp_path, [started(Config()), checkpoint(tmp_path, 2)])
    config = load(None, {"optimizer.momentum": "0.5", "schedule.decay": "3"})
    assert opened(tmp_path, config).changes == {}


def test_other_validation_data_is_said_aloud_and_refused_under_a_rule(tmp_path: Path) -> None:
    write(tmp_path / "free", [started(Config()), checkpoint(tmp_path / "free", 2)])
    assert opened(tmp_path / "free", validation="v1").changes == {"data.validation_content_hash": ["", "v1"]}
    ruled = load(None, {"quality.accept_if": "< 1 at 5"})
    write(tmp_path / "ruled", [started(ruled), checkpoint(tmp_path / "ruled", 2)])
    with pytest.raises(InputError, match="validation_content_hash"):
        opened(tmp_path / "ruled", ruled, validation="v1")


def test_other_versions_are_said_aloud(tmp_path: Path) -> None:
    write(tmp_path, [started(Config()), checkpoint(tmp_path, 2)])
    assert opened(tmp_path, versions={"torch": "9"}).changes == {"versions.torch": [None, "9"]}


def test_a_quality_rule_never_changes(tmp_path: Path) -> None:
    write(tmp_path, [started(Config())])
    with pytest.raises(InputError, match="fixed when the run began"):
        opened(tmp_path, load(None, {"quality.accept_if": "< 1 at 5"}), allow_changed_what=True)


# ---------------------------------------------------------------------------------------------- damage, company


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: _flip(folder / "data"),
        lambda folder: (folder / "data").write_bytes(b"weig"),
        lambda folder: (folder / "data").unlink(),
        lambda folder: _flip(folder / MANIFEST),
        lambda folder: (folder / MANIFEST).unlink(),
        lambda folder: (folder / MANIFEST).write_bytes(b'{"files": {"da'),
        lambda folder: (folder / MANIFEST).write_bytes(b"[]"),
        lambda folder: (folder / MANIFEST).write_bytes(b'{"files": {}}'),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_says_what_to_do(tmp_path: Path, damage: Any) -> None:
    write(tmp_path, [started(Config()), checkpoint(tmp_path, 2), checkpoint(tmp_path, 4)])
    damage(tmp_path / folder_of(4))
    opening = opened(tmp_path)
    with pytest.raises(InputError, match=f"{folder_of(4)}.*remove that folder"):
        manifest_of(tmp_path / folder_of(4), opening.digest)
    assert (tmp_path / folder_of(2)).exists()


def test_a_checkpoint_of_another_run_under_the_right_name_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [started(Config()), checkpoint(tmp_path, 2)])
    (tmp_path / folder_of(2)).rename(tmp_path / "gone")
    checkpoint(tmp_path, 2, content=b"others")
    assert manifest_of(tmp_path / folder_of(2))
    with pytest.raises(InputError, match=MANIFEST):
        manifest_of(tmp_path / folder_of(2), opened(tmp_path).digest)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    write(tmp_path, [started(Config())])
    code = (
        "import sys; from isostep.recipe.run_dir import RunDirectory; d = RunDirectory(sys.argv[1]); d._take_hold();"
        "print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(InputError, match="another process"):
        opened(tmp_path)
    other.kill()
    other.communicate()
    assert opened(tmp_path).state == "resume"
