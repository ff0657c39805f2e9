"""`isostep train` as a user runs it: to the end, again, stopped, resumed, under a launcher, on another layout."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from command import (
    SMALL,
    assert_nothing_alive,
    events_of,
    run,
    same_bits,
    start,
    torchrun,
    updates_of,
    wait_for_updates,
    weights_of,
    workers,
)
from isostep.ledger import CheckpointAnnounced, MemoryObserved, Resumed, RunEnded


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A complete run of two workers, and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    finished = run("train", "--procs", "2", "--run-dir", str(folder), *SMALL)
    assert finished.returncode == 0, finished.stderr
    return folder, finished.stdout


def test_train_learns_and_proves_coverage(small_run: tuple[Path, str]) -> None:
    folder, text = small_run
    losses = [float(line.split()[2]) for line in text.splitlines() if line.startswith("validation loss ")]
    assert losses[-1] < losses[0] - 1
    assert "each exactly once" in text
    last = events_of(folder)[-1]
    assert isinstance(last, RunEnded)
    assert last.reason == "complete"
    assert weights_of(folder)


def test_the_sheet_is_printed_and_saved(small_run: tuple[Path, str]) -> None:
    folder, text = small_run
    document = json.loads((folder / "sheet.json").read_text())
    assert document["schema"] == 1
    assert document["state"] == "complete"
    assert document["coverage"]["proved"] is True
    assert text.endswith((folder / "sheet.txt").read_text())
    updates = updates_of(folder)
    assert document["updates"]["attempted"] == len(updates)
    assert document["totals"]["attempted"]["supervised_tokens"] == sum(u.counters.supervised_tokens for u in updates)


def test_memory_of_every_replica_is_observed(small_run: tuple[Path, str]) -> None:
    memory = [event for event in events_of(small_run[0]) if isinstance(event, MemoryObserved)][-1]
    assert memory.devices == ["cpu", "cpu"]
    for baseline, first, later in zip(memory.baseline, memory.first_group, memory.later_groups, strict=True):
        assert later is not None
        assert 0 < baseline <= first
        assert later > 0


def test_train_again_says_complete_and_changes_nothing(small_run: tuple[Path, str]) -> None:
    folder, _ = small_run
    before = (folder / "ledger.jsonl").read_bytes()
    finished = run("train", "--procs", "2", "--run-dir", str(folder), *SMALL)
    assert finished.returncode == 0
    assert "is complete; nothing to do" in finished.stderr
    assert (folder / "ledger.jsonl").read_bytes() == before


@pytest.mark.grid
def test_another_layout_trains_on_the_same_examples(small_run: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = small_run
    other = ("--layout.examples-per-microbatch", "3", "--layout.overlap", "false", "--layout.activation-checkpointing")
    assert run("train", "--procs", "1", "--run-dir", str(tmp_path / "one"), *SMALL, *other).returncode == 0
    two, one = updates_of(folder), updates_of(tmp_path / "one")
    assert [e.ids_hash for e in one] == [e.ids_hash for e in two]
    assert [e.denominators for e in one] == [e.denominators for e in two]
    assert one[0].loss == pytest.approx(two[0].loss, rel=1e-5)
    assert one[0].counters.microbatches != two[0].counters.microbatches


@pytest.mark.grid
def test_train_under_torchrun_gives_the_same_run(small_run: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = small_run
    finished = torchrun("train", "--run-dir", str(tmp_path / "two"), "--json", "-", *SMALL)
    assert finished.returncode == 0, finished.stderr
    document = json.loads(finished.stdout)
    assert document["schema"] == 1
    assert document["coverage"]["proved"] is True
    assert [e.loss for e in updates_of(folder)] == [e.loss for e in updates_of(tmp_path / "two")]
    assert same_bits(folder, tmp_path / "two")


# ------------------------------------------------------------------------------------------------ stop and resume


@pytest.mark.grid
@pytest.mark.timeout(240)
@pytest.mark.parametrize("everybody", [True, False])
def test_a_signal_saves_and_the_same_command_resumes(
    small_run: tuple[Path, str], tmp_path: Path, everybody: bool
) -> None:
    """Ctrl-C reaches every process of a terminal; a scheduler's signal may reach the first one alone."""
    marker = f"signal-{everybody}-{tmp_path.name}"
    arguments = ("train", "--procs", "2", "--run-dir", str(tmp_path / "run"), *SMALL)
    process = start(marker, *arguments)
    wait_for_updates(process, tmp_path / "run")
    if everybody:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    done = updates_of(tmp_path / "run")
    assert process.returncode == 130
    assert errors.strip().splitlines() == [
        f"isostep: stopped after update {len(done)}; everything is saved in {tmp_path / 'run'}: give the same command "
        "to resume"
    ]
    assert_nothing_alive(marker)
    ended = events_of(tmp_path / "run")[-1]
    assert isinstance(ended, RunEnded)
    assert ended.reason == "stopped"
    finished = run(*arguments)
    assert finished.returncode == 0, finished.stderr
    assert f"after update {len(done)}" in finished.stdout
    assert same_bits(small_run[0], tmp_path / "run")
    assert [e.ids_hash for e in updates_of(tmp_path / "run")] == [e.ids_hash for e in updates_of(small_run[0])]


@pytest.mark.grid
@pytest.mark.timeout(240)
def test_a_killed_worker_is_one_line_and_the_run_resumes(small_run: tuple[Path, str], tmp_path: Path) -> None:
    marker = f"killed-{tmp_path.name}"
    arguments = ("train", "--procs", "2", "--run-dir", str(tmp_path), *SMALL)
    process = start(marker, *arguments)
    wait_for_updates(process, tmp_path)
    os.kill(max(workers(marker)), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert len(errors.strip().splitlines()) == 1, errors
    assert "expected" in errors
    assert_nothing_alive(marker)
    saved = [event for event in events_of(tmp_path) if isinstance(event, CheckpointAnnounced)]
    assert saved, "what was applied when the worker was lost is saved by replica 0"
    finished = run(*arguments)
    assert finished.returncode == 0, finished.stderr
    resumed = next(event for event in events_of(tmp_path) if isinstance(event, Resumed))
    assert resumed.from_update == saved[-1].after_attempted
    assert same_bits(small_run[0], tmp_path)


@pytest.mark.grid
@pytest.mark.timeout(240)
def test_a_killed_launcher_leaves_no_orphans(tmp_path: Path) -> None:
    marker = f"orphans-{tmp_path.name}"
    process = start(marker, "train", "--procs", "2", "--run-dir", str(tmp_path), *SMALL)
    wait_for_updates(process, tmp_path)
    process.kill()
    process.communicate(timeout=30)
    assert_nothing_alive(marker, seconds=15)
