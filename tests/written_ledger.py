"""A ledger written by hand, whose numbers are worked out in the tests that read it.

10 examples, 4 per update, the last group of an epoch (2 examples) dropped: 2 updates per epoch, 3 epochs. Three
starts: the first, on two replicas, runs out of memory and is killed after update 3; the second, on one replica, is
killed after update 3 too; the third completes. Updates 3 of the first two starts are superseded, and made so that
counting either of them is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isostep.grouping import GroupPlan
from isostep.ledger import (
    CheckpointAnnounced,
    Counts,
    Dropped,
    Evaluated,
    Event,
    Ledger,
    MemoryObserved,
    OutOfMemory,
    Resumed,
    RunEnded,
    RunStarted,
    UpdateDone,
    UpdateStatus,
    format_hash,
)
from isostep.units import Coverage

MIB = 2**20
NUM_EXAMPLES, PER_UPDATE, SEED = 10, 4, 3
PLAN = GroupPlan(num_examples=NUM_EXAMPLES, examples_per_update=PER_UPDATE, examples_per_microbatch=1, seed=SEED)

WHAT = {
    "update": {"examples_per_update": PER_UPDATE, "tokens_per_update": None, "last_group": "drop", "seed": SEED},
    "precision": {"dtype": "bfloat16"},
    "model": {"context_length": 384, "width": 128, "depth": 4, "heads": 4},
    "optimizer": {"name": "adamw", "learning_rate": 0.003, "weight_decay": 0.1, "clip_norm": 1.0, "ema_decay": 0.0},
    "schedule": {"shape": "cosine", "unit": "updates"},
    "data": {"content_hash": "c0ffee"},
}
FACTS = {
    "parameters": 857_728,
    "schedule": "linear warm-up over 2 updates, then cosine to 0 at update 6",
    "schedule_total": 6,
    "planned_updates": 6,
    "devices": ["cpu", "cpu"],
    "terms": {"next_token": {"coefficient": 1.0, "denominator": "supervised tokens of the whole group"}},
    "left_out": 5,
    "validation_examples": 7,
}
RUN = {
    "run": {"dir": "runs/written", "epochs": 3, "updates": None, "purpose": "trial", "x_axis": "updates"},
    "quality": {"axis": "supervised_tokens", "metric": "validation_loss", "accept_if": "< 2.25 at 70"},
    "facts": FACTS,
}


def how(replicas: int) -> dict[str, Any]:
    return {
        "examples_per_microbatch": 2, "tokens_per_microbatch": None, "overlap": True,
        "activation_checkpointing": False, "replicas": replicas,
    }  # fmt: skip


def started(**changes: Any) -> RunStarted:
    event = RunStarted(
        time=1000.0, what_hash="a1b2c3", what=WHAT, how=how(2), run=RUN, versions={"isostep": "0.1.0", "torch": "2"},
        num_examples=NUM_EXAMPLES, seed=SEED, last_group="drop", examples_per_update=PER_UPDATE,
    )  # fmt: skip
    return replace(event, **changes)


def update(
    time: float, attempted: int, status: UpdateStatus, microbatches: int, supervised: int, tokens: int, padding: int,
    loss: float | None, norm: float | None, seconds: float | None, **changes: Any,
) -> UpdateDone:  # fmt: skip
    epoch, group = divmod(attempted - 1, 2)
    start, stop = group * PER_UPDATE, (group + 1) * PER_UPDATE
    counters = Counts(
        microbatches=microbatches, examples=PER_UPDATE, supervised_tokens=supervised, total_tokens=tokens,
        padding_tokens=padding,
    )  # fmt: skip
    event = UpdateDone(
        time=time, attempted=attempted, epoch=epoch, group=group, start=start, stop=stop, status=status,
        ids_hash=format_hash(Coverage.of(PLAN.ids_of(epoch, start, stop))), num_examples=PER_UPDATE, coverage="proved",
        counters=counters, denominators={"next_token": float(supervised)}, loss=loss, terms={"next_token": loss},
        grad_norm=norm, learning_rates=[0.001 * attempted], loss_scale=None, seconds=seconds,
    )  # fmt: skip
    return replace(event, **changes)


def dropped(time: float, epoch: int) -> Dropped:
    ids = tuple(PLAN.ids_of(epoch, 8, 10))
    return Dropped(time=time, epoch=epoch, start=8, stop=10, ids=ids, ids_hash=format_hash(Coverage.of(ids)))


def evaluated(time: float, after_applied: int, loss: float | None) -> Evaluated:
    return Evaluated(time=time, after_applied=after_applied, loss=loss, terms={"next_token": loss}, counters=Counts())


def memory(time: float, *rows: tuple[int, int, int | None]) -> MemoryObserved:
    baseline, first, later = ([None if v is None else v * MIB for v in column] for column in zip(*rows, strict=True))
    return MemoryObserved(
        time=time, devices=["cpu"] * len(rows), baseline=baseline, first_group=first, later_groups=later,
    )  # fmt: skip


def written() -> list[Event]:
    return [
        started(),
        evaluated(1001, 0, 4.0),
        update(1003, 1, "applied", 2, 10, 40, 10, 3.0, 2.0, 1.0),
        memory(1003.5, (100, 200, None), (101, 201, None)),
        update(1005, 2, "applied", 3, 20, 60, 20, 2.5, 0.5, 2.0),
        dropped(1005.5, 0),
        CheckpointAnnounced(time=1006, after_attempted=2, path="checkpoints/2"),
        OutOfMemory(time=1007, attempted=3, examples_per_microbatch_before=2, examples_per_microbatch_after=1),
        update(1009, 3, "applied", 40, 1000, 2000, 500, 1.0, 9.0, 9.0),  # superseded
        memory(1009.5, (100, 200, 300), (101, 201, 301)),
        evaluated(1010, 3, 0.1),  # superseded; then killed
        Resumed(time=2000, from_update=2, how=how(1), changes={"layout.replicas": [2, 1]}),
        update(2004, 3, "skipped", 20, 700, 3000, 0, 1.1, 9.0, 9.0),  # superseded; then killed
        Resumed(time=3000, from_update=2, how=how(1)),
        memory(3001, (90, 150, None)),
        update(3002, 3, "skipped", 2, 30, 80, 0, 2.4, 7.0, 1.0),
        update(3003, 4, "applied", 2, 40, 100, 10, 2.0, 1.5, 3.0),
        dropped(3003.5, 1),
        evaluated(3004, 3, 2.2),
        CheckpointAnnounced(time=3004.5, after_attempted=4, path="checkpoints/4"),
        update(3006, 5, "empty", 2, 0, 20, 0, None, None, 1.0),
        update(3008, 6, "applied", 2, 30, 100, 20, 1.5, 1.0, 2.0),
        dropped(3008.5, 2),
        evaluated(3009, 4, 2.3),
        CheckpointAnnounced(time=3009.5, after_attempted=6, path="checkpoints/6"),
        RunEnded(time=3010, reason="complete"),
    ]


def write(run_dir: Path, events: Sequence[Event]) -> Path:
    """The events as the ledger of a run directory, which is returned."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        for event in events:
            ledger.append(event)
    return run_dir
