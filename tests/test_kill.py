"""kill -9 of any process of a run, at any moment: an announced checkpoint is never lost, and nothing is done twice."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from command import (
    alive,
    assert_nothing_alive,
    difference,
    events_of,
    run,
    same_bits,
    start,
    updates_of,
    workers,
    write_data,
)
from isostep.distributed.checkpoint import manifest_of
from isostep.grouping import GroupPlan
from isostep.ledger import CheckpointAnnounced, Resumed, RunEnded, prove_coverage

EXAMPLES, PER_UPDATE, EPOCHS, UPDATES = 60, 4, 12, 160
"""The limit on updates lies within the last epoch."""


def arguments(data: Path, folder: Path, procs: int, *more: str) -> list[str]:
    return [
        "train", "--run-dir", str(folder), "--procs", str(procs), "--data.source", str(data),
        "--model.context-length", "90", "--model.width", "32", "--model.depth", "2",
        "--update.examples-per-update", str(PER_UPDATE), "--layout.examples-per-microbatch", "1",
        "--run.epochs", str(EPOCHS), "--run.updates", str(UPDATES), "--checkpoint.every", "3", "--checkpoint.keep", "1",
        "--validation.every", "10", "--run.timeout", "20", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "examples.jsonl", EXAMPLES)


def lines_of(folder: Path) -> int:
    path = folder / "ledger.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait(process: subprocess.Popen[str], condition: Callable[[], bool]) -> bool:
    """Whether the condition came true before the process ended."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.002)
    return False


def is_saving(folder: Path) -> bool:
    return any((folder / "checkpoints").glob("*.partial"))


def kill_once(dice: random.Random, command: list[str], folder: Path, marker: str, *, saving: bool) -> str:
    """Start the run, kill one of its processes at a random moment, and wait until all are gone. Returns which."""
    process = start(marker, *command)
    more = lines_of(folder) + dice.randint(2, 14)
    wait(process, lambda: lines_of(folder) >= more)
    if saving:
        wait(process, lambda: is_saving(folder))
    else:
        time.sleep(dice.random() * 0.03)
    victims = [*workers(marker), process.pid]
    victim = dice.choice(victims)
    if process.poll() is None:
        os.kill(victim, signal.SIGKILL)
    process.communicate(timeout=90)
    assert_nothing_alive(marker, seconds=45)
    return "launcher" if victim == process.pid else "worker"


def check_announced(folder: Path) -> None:
    """The newest announced checkpoint is there, as it was written."""
    announced = [event for event in events_of(folder) if isinstance(event, CheckpointAnnounced)]
    if announced:
        manifest = manifest_of(folder / announced[-1].path)
        assert manifest["after_attempted"] == announced[-1].after_attempted


def check_coverage(folder: Path) -> None:
    events = events_of(folder)
    assert isinstance(events[-1], RunEnded)
    assert events[-1].reason == "complete"
    num_examples = events[0].num_examples  # type: ignore[attr-defined]
    plan = GroupPlan(num_examples=num_examples, examples_per_update=PER_UPDATE, examples_per_microbatch=1, seed=0)
    proof = prove_coverage(events, plan.ids_of)
    assert proof.ok, proof.faults
    assert sum(isinstance(event, Resumed) for event in events) >= 2, "kills hit runs under way"
    assert [update.attempted for update in updates_of(folder)] == list(range(1, UPDATES + 1))


def killed(data: Path, folder: Path, procs: list[int], kills: int, seed: int, *more: str) -> None:
    """A run that is killed so many times, each time resumed with one of these numbers of workers, to its end."""
    dice = random.Random(seed)
    for kill in range(kills):
        command = arguments(data, folder, dice.choice(procs), *more)
        kill_once(dice, command, folder, f"kill-{folder.name}-{seed}-{kill}", saving=kill % 3 == 2)
        check_announced(folder)
    finished = run(*arguments(data, folder, dice.choice(procs), *more))
    assert finished.returncode == 0, finished.stderr
    check_coverage(folder)


@pytest.mark.timeout(240)
def test_two_kills_lose_nothing(data: Path, tmp_path: Path) -> None:
    killed(data, tmp_path / "killed", [2], 2, seed=5)
    assert run(*arguments(data, tmp_path / "whole", 2)).returncode == 0
    assert same_bits(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.grid
@pytest.mark.timeout(900)
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_ten_kills_at_each_number_of_replicas(data: Path, tmp_path: Path, replicas: int) -> None:
    killed(data, tmp_path / "killed", [replicas], 10, seed=replicas)
    assert run(*arguments(data, tmp_path / "whole", replicas)).returncode == 0
    assert same_bits(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.grid
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("replicas", "schedule"), [(1, "1f1b"), (2, "zb-v")])
def test_ten_kills_of_two_stages(data: Path, tmp_path: Path, replicas: int, schedule: str) -> None:
    stages = ("--layout.stages", "2", "--layout.schedule", schedule)
    killed(data, tmp_path / "killed", [2 * replicas], 10, replicas, *stages)
    assert run(*arguments(data, tmp_path / "whole", 2 * replicas, *stages)).returncode == 0
    assert same_bits(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.grid
@pytest.mark.timeout(600)
def test_kills_and_resumes_on_other_numbers_of_replicas(data: Path, tmp_path: Path) -> None:
    """SGD at a constant rate, whose weights may be compared; the control lacks the last update alone."""
    plain = (
        "--optimizer.name",
        "sgd",
        "--optimizer.momentum",
        "0",
        "--optimizer.learning-rate",
        "0.05",
        "--schedule.shape",
        "constant",
    )
    killed(data, tmp_path / "killed", [1, 2, 3], 5, 11, *plain)
    assert run(*arguments(data, tmp_path / "whole", 1, *plain)).returncode == 0
    shorter = arguments(data, tmp_path / "control", 1, *plain, "--run.updates", str(UPDATES - 1))
    assert run(*shorter).returncode == 0
    tolerance = 1e-4
    assert difference(tmp_path / "killed", tmp_path / "whole") <= tolerance
    assert difference(tmp_path / "control", tmp_path / "whole") > 10 * tolerance
    assert [u.ids_hash for u in updates_of(tmp_path / "killed")] == [u.ids_hash for u in updates_of(tmp_path / "whole")]


def test_marker_finds_processes(tmp_path: Path) -> None:
    """Control of the check that nothing is left alive."""
    marker = f"control-{tmp_path.name}"
    process = start(marker, "verify")
    assert alive(marker)
    process.kill()
    process.communicate(timeout=30)
