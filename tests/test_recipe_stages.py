"""A run over stages: the weights of one process, whatever P, D and schedule, and whatever it resumes on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from command import difference, events_of, same_bits, updates_of, weights_of, write_data
from isostep import NonFiniteError
from isostep.config import load
from isostep.distributed.checkpoint import folder_of, load_tensors
from isostep.ledger import CheckpointAnnounced, Evaluated, RunStarted, prove_coverage
from isostep.ledger.sheet import read_run, sheet
from isostep.schedule.generate import NAMES
from isostep.train import train_worker
from pool import Pool, WorkerError

Flags = Mapping[str, str]


@pytest.fixture(scope="module")
def worlds(pair: Pool, pool: Pool) -> Iterator[dict[int, Pool]]:
    """Worlds of one, two and four workers."""
    alone = Pool(1)
    yield {1: alone, 2: pair, 4: pool}
    alone.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "examples.jsonl", 40)


def trained(_: Any, flags: dict[str, str], breaks: int | None = None) -> None:
    """In a worker: a run. Its process groups end with it. breaks: the attempted update whose loss is not finite."""
    world = dist.distributed_c10d._world
    before = set(world.pg_map)
    with pytest.MonkeyPatch.context() as patch:
        if breaks is not None:
            patch.setattr("isostep.recipe.build.causal_lm", _breaking(breaks))
        try:
            train_worker(load(None, flags), quiet=True)
        finally:
            for group in set(world.pg_map) - before:
                dist.destroy_process_group(group)


def _breaking(attempted: int) -> Any:
    """The objective, whose sum is infinite from one update on."""
    from dataclasses import replace

    from isostep import causal_lm

    calls = [0]

    def sum_fn(outputs: Any, batch: Any) -> Any:
        calls[0] += torch.is_grad_enabled()
        total = causal_lm.sum_of(outputs, batch)
        return total * math.inf if calls[0] > 4 * (attempted - 1) else total

    return replace(causal_lm, sum_fn=sum_fn)


def flags_of(data: Path, folder: Path, stages: int = 1, /, **more: str) -> dict[str, str]:
    """more: keys with __ for the point."""
    return {
        "run.dir": str(folder), "data.source": str(data), "model.context_length": "90", "model.width": "16",
        "model.depth": "6", "model.heads": "2", "update.examples_per_update": "8",
        "layout.examples_per_microbatch": "2", "run.epochs": "1", "run.updates": "4", "schedule.total": "8",
        "checkpoint.every": "2", "validation.every": "2", "run.timeout": "60", "layout.stages": str(stages),
    } | {key.replace("__", "."): value for key, value in more.items()}  # fmt: skip


OPTIONS: dict[str, dict[str, str]] = {
    "plain": {},
    "muon": {"optimizer__name": "muon", "optimizer__ema_decay": "0.5"},
    "recomputed": {"layout__activation_checkpointing": "[true, false]", "optimizer__name": "sgd"},
    "bfloat16": {"precision__dtype": "bfloat16"},
    "float16": {"precision__dtype": "float16"},
}
CASES = [
    ("1f1b", "plain"), ("zb-h1", "muon"), ("zb-v", "recomputed"),
    pytest.param("interleaved-1f1b", "float16", marks=pytest.mark.grid),
    pytest.param("gpipe", "bfloat16", marks=pytest.mark.grid),
]  # fmt: skip


def run(worlds: dict[int, Pool], flags: dict[str, str], world: int) -> None:
    worlds[world].run(world, trained, flags)


@pytest.mark.parametrize(("schedule", "options"), CASES)
def test_two_stages_give_the_bits_of_one_process(
    worlds: dict[int, Pool], data: Path, tmp_path: Path, schedule: str, options: str
) -> None:
    more = OPTIONS[options]
    run(worlds, flags_of(data, tmp_path / "cut", 2, layout__schedule=schedule, **more), 2)
    whole = {key: value for key, value in more.items() if not value.startswith("[")}
    run(worlds, flags_of(data, tmp_path / "whole", **whole), 1)
    assert same_bits(tmp_path / "cut", tmp_path / "whole")
    for name in ("loss", "grad_norm", "status", "ids_hash", "loss_scale", "counters"):
        here, there = ([getattr(u, name) for u in updates_of(tmp_path / folder)] for folder in ("cut", "whole"))
        assert here == pytest.approx(there, rel=1e-6) if name == "loss" else here == there
    here, there = ([e.loss for e in events_of(tmp_path / f) if isinstance(e, Evaluated)] for f in ("cut", "whole"))
    assert len(here) == 3
    assert here == pytest.approx(there, rel=1e-6)
    if "optimizer__ema_decay" in more:
        averages = [torch.load(tmp_path / folder / "average.pt") for folder in ("cut", "whole")]
        assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[1])
        assert any(not torch.equal(averages[0][n], w) for n, w in weights_of(tmp_path / "cut").items())


@pytest.mark.grid
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", NAMES)
def test_every_schedule_trains(worlds: dict[int, Pool], data: Path, tmp_path: Path, schedule: str, stages: int) -> None:
    run(worlds, flags_of(data, tmp_path / "cut", stages, layout__schedule=schedule), stages)
    run(worlds, flags_of(data, tmp_path / "whole"), 1)
    if schedule != "looped-bfs":  # which runs backwards in reverse
        assert same_bits(tmp_path / "cut", tmp_path / "whole")
    assert difference(tmp_path / "cut", tmp_path / "whole") < 1e-5
    if stages == 2:
        run(worlds, flags_of(data, tmp_path / "copies", 2, layout__schedule=schedule), 4)
        assert difference(tmp_path / "copies", tmp_path / "whole") < 1e-4


def test_checkpoints_resume_on_other_stages(worlds: dict[int, Pool], data: Path, tmp_path: Path) -> None:
    """SGD at a constant rate, whose weights may be compared; the control lacks the last update alone."""
    plain = {
        "optimizer__name": "sgd", "optimizer__learning_rate": "0.05", "schedule__shape": "constant",
        "schedule__total": "none",
    }  # fmt: skip
    chain = [(2, 2, "1f1b", 1), (4, 2, "zb-v", 2), (1, 1, "1f1b", 3), (4, 4, "interleaved-zb", 4)]
    for world, stages, schedule, updates in chain:
        more = plain | {"layout__schedule": schedule, "run__updates": str(updates)}
        run(worlds, flags_of(data, tmp_path / "changed", stages, **more), world)
    for name, updates in (("whole", 4), ("control", 3)):
        run(worlds, flags_of(data, tmp_path / name, **plain, run__updates=str(updates)), 1)
    assert difference(tmp_path / "changed", tmp_path / "whole") <= 1e-5
    assert difference(tmp_path / "control", tmp_path / "whole") > 1e-4
    here, there = (updates_of(tmp_path / folder) for folder in ("changed", "whole"))
    assert [u.ids_hash for u in here] == [u.ids_hash for u in there]
    held = [set(load_all(worlds, tmp_path / folder)) for folder in ("changed", "whole")]
    assert held[0] == held[1], "state under other names"
    assert [layout["how"]["stages"] for layout in sheet(read_run(tmp_path / "changed"))["layouts"]] == [2, 2, 1, 4]


def load_all(worlds: dict[int, Pool], folder: Path) -> list[str]:
    """The names in the last checkpoint."""
    path = [event.path for event in events_of(folder) if isinstance(event, CheckpointAnnounced)][-1]
    return worlds[1].run(1, _names, str(folder / path))[0]


def _names(group: Any, path: str) -> list[str]:
    return list(load_tensors(Path(path), torch.device("cpu"), group))


def test_sheet_and_ledger_of_stages(worlds: dict[int, Pool], data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(worlds, flags_of(data, folder, 2, layout__schedule="zb-v", optimizer__ema_decay="0.5"), 4)
    events = read_run(folder)
    started = events[0]
    assert isinstance(started, RunStarted)
    assert (started.how["stages"], started.how["schedule"], started.how["replicas"]) == (2, "zb-v", 2)
    facts = started.run["facts"]
    assert len(facts["cut"]["boundaries"]) == 5
    assert facts["cut"]["layers"][0] == "embedding"
    assert min(facts["cut"]["seconds"][1:]) > 0
    assert facts["parameters"] == sum(w.numel() for w in weights_of(folder).values())
    document = sheet(events)
    assert document["coverage"]["proved"]
    assert document["layouts"][0]["microbatches_per_replica"] == [2, 2]
    rows = document["memory"][0]["replicas"]
    assert [(row["replica"], row["stage"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (folder / folder_of(4)).exists()


def test_an_error_of_all_is_saved_by_all(worlds: dict[int, Pool], data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = flags_of(data, folder, 2, checkpoint__every="0", validation__every="0")
    with pytest.raises(WorkerError, match=NonFiniteError.__name__):
        worlds[2].run(2, trained, flags, 3)
    saved = [event.after_attempted for event in events_of(folder) if isinstance(event, CheckpointAnnounced)]
    assert saved == [2]
    run(worlds, flags, 2)
    run(worlds, flags_of(data, tmp_path / "whole"), 1)
    assert same_bits(folder, tmp_path / "whole")


@pytest.mark.grid
def test_coverage_is_proved(worlds: dict[int, Pool], data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(worlds, flags_of(data, folder, 2, run__updates="none", layout__schedule="zb-v"), 2)
    from isostep.grouping import GroupPlan

    events = read_run(folder)
    plan = GroupPlan(num_examples=events[0].num_examples, examples_per_update=8, examples_per_microbatch=2, seed=0)  # type: ignore[attr-defined]
    proof = prove_coverage(events, plan.ids_of)
    assert proof.ok, proof.faults
