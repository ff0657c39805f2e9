"""Faults of counting, resuming and falling back that public code has shown.

Every test of one also runs the faulty rule and must see its fault. Sources are named by repository and number of the
issue or pull request. A run through `isostep train` is resumed in test_resume.py, and killed in test_kill.py.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from isostep import Term, Updater, groups
from isostep.grouping import Cursor, EpochOrder, GroupPlan, LastGroup
from pool import Pool

MEAN = Term("mean", lambda outputs, batch: outputs.sum(), lambda batch: len(batch))
"""The mean of the outputs: an example's gradient is one over the number of examples of its update."""


class Slots(nn.Module):
    """Example i is the number i and its output w[i], so w's gradient is the weight of each example."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        self.fails_above = size + 1
        self.fails_at_call = 0
        self.calls = 0

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += self.training
        if len(ids) > self.fails_above:
            raise torch.OutOfMemoryError("simulated")
        if self.calls == self.fails_at_call:
            raise ConnectionError("simulated")
        return self.w[ids]


def training(size: int, **settings: Any) -> tuple[Slots, Updater, list[Tensor]]:
    """A model, its Updater, and a list that gets the weights of the examples in each applied update."""
    model = Slots(size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: given.append(model.w.grad.clone()))  # type: ignore[union-attr]
    return model, Updater(model, optimizer, MEAN, **settings), given


def numbers(size: int) -> list[Tensor]:
    return [torch.tensor(i) for i in range(size)]


def ids_of(size: int, per_update: int, start: int | Cursor, seed: int = 0, epochs: int = 1) -> list[tuple[int, ...]]:
    return [g.ids for g in groups(numbers(size), examples_per_update=per_update, seed=seed, start=start, epochs=epochs)]


@pytest.mark.parametrize(
    ("microbatches", "last_group", "right"), [(10, "keep", 3), (10, "drop", 2), (8, "keep", 2), (8, "drop", 2)]
)
def test_updates_per_epoch(microbatches: int, last_group: LastGroup, right: int) -> None:
    """transformers 35960: off by one, or an empty update more, for A = 4."""
    plan = GroupPlan(
        num_examples=microbatches * 2, examples_per_update=8, examples_per_microbatch=2, last_group=last_group
    )
    walked = [group for group, drop in plan.walk(Cursor(), 1) if not drop]
    assert plan.updates_per_epoch == len(walked) == right
    assert all(group.ids for group in walked)
    faulty = microbatches // 4 + 1
    assert (faulty == right) is (microbatches == 10 and last_group == "keep")


def test_updates_and_microbatches_have_their_own_names() -> None:
    """Lightning 7407: a limit on "steps" counted microbatches in one place and updates in another."""
    _, updater, _ = training(10)
    for group in groups(numbers(10), examples_per_update=4, examples_per_microbatch=1):
        updater.update(group)
    assert (updater.totals.attempted, updater.totals.counts.microbatches) == (3, 10)
    faulty_epochs_of_a_limit_of_30_updates = 30 / updater.totals.counts.microbatches
    assert (30 / updater.totals.attempted, faulty_epochs_of_a_limit_of_30_updates) == (10, 3)


def test_a_resume_skips_the_examples_of_whole_updates() -> None:
    """transformers 5605: a resume at update 2748 with A = 4 skipped 2748 microbatches and not 10992."""
    size, per_update = 12_000, 4
    (first, *_) = ids_of(size, per_update, 2748)
    order = EpochOrder(size, 0, 0)
    assert list(first) == order.ids(10_992, 10_996)
    faulty = order.ids(2748, 2752)
    assert set(faulty) <= {i for ids in ids_of(size, per_update, 0)[:2748] for i in ids}, "already seen"


def test_a_resume_keeps_the_order() -> None:
    """transgenic 59: after a resume at 20 of 64 the order was drawn anew; 15 examples came twice, 15 never."""
    before = ids_of(64, 4, 0)[:5]
    after = ids_of(64, 4, 5)
    assert sorted(i for ids in before + after for i in ids) == list(range(64))
    redrawn = ids_of(64, 4, 5, seed=1)
    seen = Counter(i for ids in before + redrawn for i in ids)
    assert 2 in seen.values()
    assert len(seen) < 64


def test_a_resume_on_another_number_of_replicas() -> None:
    """transformers 40245: resumed on another number of processes, examples were lost."""

    def seen(group: Any, replicas: int) -> list[int]:
        return [i for r in range(replicas) for ids in group.group.microbatches_of(r, replicas) for i in ids]

    plan = list(groups(numbers(30), examples_per_update=6, examples_per_microbatch=2))
    used = [i for k, group in enumerate(plan) for i in seen(group, 2 if k < 2 else 3)]
    assert sorted(used) == list(range(30))
    order = EpochOrder(30, 0, 0).ids(0, 30)
    before = [i for r in range(2) for i in order[r::2][:6]]  # what two samplers gave in two updates of six
    after = [i for r in range(3) for i in order[r::3][6:]]  # three samplers that skip as many each
    assert set(range(30)) - set(before + after), "lost by skipping per process"


def test_a_checkpoint_never_lies_inside_a_group() -> None:
    """transformers 22143: saved inside a group, a resume lost what had been added up."""
    data = numbers(8)
    whole_model, whole, _ = training(8)
    for group in groups(data, examples_per_update=4, examples_per_microbatch=1):
        whole.update(group)

    model, updater, given = training(8)
    first, second = groups(data, examples_per_update=4, examples_per_microbatch=1)
    updater.update(first)
    model.fails_at_call = model.calls + 3  # in the third of four microbatches
    with pytest.raises(ConnectionError):
        updater.update(second)
    saved = updater.state_dict()
    assert saved["cursor"] == {"epoch": 0, "position": 4, "index": 1}
    assert saved["totals"]["attempted"] == 1
    for group in groups(data, examples_per_update=4, examples_per_microbatch=1, start=Cursor(**saved["cursor"])):
        updater.update(group)
    assert torch.equal(model.w, whole_model.w)
    faulty = torch.zeros(8, dtype=torch.float64)
    faulty[list(second.ids[2:])] = 1 / 4  # a resume at the third microbatch
    assert not torch.equal(faulty, given[-1])


def test_out_of_memory_accumulates_more() -> None:
    """EuroEval 22: from 32 to 16 examples per microbatch with A unchanged, so half a batch per update."""
    model, updater, given = training(64)
    model.fails_above = 16
    for group in groups(numbers(64), examples_per_update=32, examples_per_microbatch=32):
        result = updater.update(group)
        assert (result.counts.examples, result.counts.microbatches, result.examples_per_microbatch) == (32, 2, 16)
    assert torch.equal(given[0] + given[1], torch.full((64,), 1 / 32, dtype=torch.float64))
    model, updater, given = training(64)
    for group in groups(numbers(64), examples_per_update=16, examples_per_microbatch=16):  # the faulty fallback
        updater.update(group)
    assert len(given) == 4
    assert given[0].max() == 1 / 16


def test_out_of_memory_in_validation_leaves_the_training_batch_alone() -> None:
    """transformers 46809: it halved the training's batch."""
    model, updater, _ = training(64)
    plan = list(groups(numbers(64), examples_per_update=32, examples_per_microbatch=32))
    assert updater.update(plan[0]).examples_per_microbatch == 32
    model.fails_above = 8
    assert updater.evaluate(numbers(64), examples_per_microbatch=32).examples_per_microbatch == 8
    model.fails_above = 64
    assert updater.update(plan[1]).examples_per_microbatch == 32
    model.fails_above = 8  # control: in training it would be remembered
    assert updater.update(plan[1]).examples_per_microbatch == 8
    model.fails_above = 64
    assert updater.update(plan[1]).examples_per_microbatch == 8


def _replicas(group: Any) -> tuple[int, int, int]:
    """Replicas of an Updater over a group of ranks, the examples that it uses in an epoch, and the world size."""
    _, updater, _ = training(8, process_group=group)
    for work in groups(numbers(8), examples_per_update=4, examples_per_microbatch=1):
        updater.update(work)
    return updater.replicas, updater.totals.counts.examples, dist.get_world_size()


def test_replicas_are_not_the_world_size(pool: Pool) -> None:
    """axolotl 3444: two ranks of one tensor-parallel replica were taken for two replicas: half the data per epoch."""
    assert pool.run(1, _replicas) == [(1, 8, 4)]
    assert pool.run(2, _replicas) == [(2, 8, 4), (2, 8, 4)]
    plan = GroupPlan(num_examples=8, examples_per_update=4, examples_per_microbatch=1)
    faulty = [i for k in range(2) for i in plan.group(0, k).microbatches_of(0, 4)]  # by the world size
    assert len(faulty) < 8
