"""Resume on another number of replicas and another microbatch: the same examples in every update."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from command import difference, events_of, run, updates_of, write_data
from isostep.ledger import Resumed

EXAMPLES = ("--update.examples-per-update", "5")
TOKENS = ("--update.tokens-per-update", "150")


@dataclass(frozen=True)
class Way:
    """How a run is laid out."""

    replicas: int
    microbatch: tuple[str, str]

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--procs", str(self.replicas), *self.microbatch)


def m(size: int | str) -> tuple[str, str]:
    return ("--layout.examples-per-microbatch", str(size))


def tokens(size: int) -> tuple[str, str]:
    return ("--layout.tokens-per-microbatch", str(size))


GRID = [
    (Way(2, m(2)), Way(1, m(5)), EXAMPLES),
    (Way(1, m(1)), Way(2, tokens(40)), TOKENS),
    (Way(1, m(3)), Way(3, m(1)), EXAMPLES),
    (Way(3, tokens(64)), Way(2, m("auto")), EXAMPLES),
    (Way(2, tokens(90)), Way(3, m(2)), TOKENS),
    (Way(3, m(2)), Way(1, tokens(200)), TOKENS),
]


def arguments(data: Path, folder: Path, budget: tuple[str, ...], *more: str) -> list[str]:
    return [
        "train", "--run-dir", str(folder), "--data.source", str(data), "--model.context-length", "90",
        "--model.width", "16", "--model.depth", "1", "--model.heads", "2", "--optimizer.name", "sgd",
        "--optimizer.learning-rate", "0.05", "--schedule.unit", "examples", "--schedule.total", "150",
        "--validation.every", "0", "--checkpoint.every", "0", "--run.epochs", "3", *budget, *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "examples.jsonl", 40)


@pytest.mark.grid
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("before", "after", "budget"), GRID)
def test_the_same_examples_in_every_update(
    data: Path, tmp_path: Path, before: Way, after: Way, budget: tuple[str, ...]
) -> None:
    """Stopped in the middle of the second epoch and of the schedule; weights within float32, at SGD."""
    whole = run(*arguments(data, tmp_path / "whole", budget, "--run.updates", "20"))
    assert whole.returncode == 0, whole.stderr
    first = run(*arguments(data, tmp_path / "parts", budget, *before.flags, "--run.updates", "11"))
    assert first.returncode == 0, first.stderr
    second = run(*arguments(data, tmp_path / "parts", budget, *after.flags, "--run.updates", "20"))
    assert second.returncode == 0, second.stderr
    resumed = next(event for event in events_of(tmp_path / "parts") if isinstance(event, Resumed))
    assert resumed.from_update == 11
    theirs, ours = updates_of(tmp_path / "whole"), updates_of(tmp_path / "parts")
    assert theirs[10].epoch == 1
    assert 0 < theirs[10].stop < 38, "in the middle of an epoch"
    assert len(ours) == 20
    assert [(u.epoch, u.start, u.stop, u.ids_hash) for u in ours] == [
        (u.epoch, u.start, u.stop, u.ids_hash) for u in theirs
    ]
    assert [u.denominators for u in ours] == [u.denominators for u in theirs]
    assert [u.learning_rates for u in ours] == [u.learning_rates for u in theirs]
    assert len({tuple(u.learning_rates) for u in ours}) > 15
    assert difference(tmp_path / "parts", tmp_path / "whole") <= 1e-5
