"""Faults that accumulation and replicas have shown in public code, seen in the weight of every token.

The loss of token i is log(1 + exp(2 w[i])), whose slope at w = 0 is 1: the gradient that an optimizer gets IS
the weight of each token in the update. Every test also runs the faulty loop, in plain torch, and must see its
fault. Sources are named by repository and number of the issue or pull request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

from isostep import (
    LossScale,
    NonFiniteError,
    Term,
    Updater,
    causal_lm,
    groups,
    ready_groups,
    token_cross_entropy,
)
from isostep.data.groups import Groups
from isostep.errors import InputError
from isostep.grouping import LastGroup
from pool import Pool

TOLERANCE = 1e-12
IGNORE = -100
TOKEN_MEAN = token_cross_entropy(shift=False)

Batch = dict[str, Tensor]
Gradients = dict[str, Tensor]
Objective = Term | Sequence[Term]
Sizes = Sequence[tuple[int, int]]  # per microbatch: supervised tokens, masked tokens


class Probe(nn.Module):
    """Logits of two classes, all targets being class 0; the slope of a token's loss at w = 0 is `factor`.

    `seen` are the tokens that really went in.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(num_tokens, dtype=torch.float64))
        self.seen: list[int] = []

    def forward(self, tokens: Tensor, factor: Tensor | float = 1.0) -> Tensor:
        self.seen += tokens.flatten().tolist()
        margin = 2 * self.w[tokens] * factor
        return torch.stack([margin, torch.zeros_like(margin)], -1).neg()


def microbatches_of(sizes: Sizes) -> list[Batch]:
    """One example per microbatch, its supervised tokens first; tokens are numbered through."""
    batches, first = [], 0
    for supervised, masked in sizes:
        tokens = torch.arange(first, first + supervised + masked)[None]
        labels = torch.where(tokens < first + supervised, 0, IGNORE)
        batches.append({"tokens": tokens, "labels": labels})
        first += supervised + masked
    return batches


def num_tokens_of(sizes: Sizes) -> int:
    return sum(supervised + masked for supervised, masked in sizes)


def one_token_examples(count: int) -> list[Batch]:
    """A data set in which example i is token i."""
    label = torch.tensor([0])
    return [{"id": torch.tensor(i), "tokens": torch.tensor([i]), "labels": label} for i in range(count)]


def recorded(
    model: nn.Module, objective: Objective = TOKEN_MEAN, learning_rate: float = 0.0, **settings: Any
) -> tuple[Updater, list[Gradients]]:
    """An Updater, and a list that gets what the optimizer is given in every applied update.

    Without a learning rate the parameters stay where slopes are weights.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    given: list[Gradients] = []
    module = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer.register_step_pre_hook(lambda *_: given.append(gradients_of(module)))
    return Updater(model, optimizer, objective, **settings), given


def gradients_of(model: nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def assert_weights(seen: Tensor | Sequence[float] | float, expected: Tensor | Sequence[float] | float) -> None:
    difference = torch.as_tensor(seen, dtype=torch.float64) - torch.as_tensor(expected, dtype=torch.float64)
    assert difference.abs().max().item() <= TOLERANCE


# -------------------------------------------------------------------------------- divisions by a wrong number

Factor = Callable[[int, int, int], float]
"""(targets of the microbatch, microbatches per replica, targets of the group) -> factor of the loss sum."""


def mean_over_a(targets: int, accumulate: int, total: int) -> float:
    return 1 / targets / accumulate


def mean_over_a_twice(targets: int, accumulate: int, total: int) -> float:
    return 1 / targets / accumulate / accumulate


def mean_undivided(targets: int, accumulate: int, total: int) -> float:
    return 1 / targets


def sum_undivided(targets: int, accumulate: int, total: int) -> float:
    return 1.0


def sum_over_total(targets: int, accumulate: int, total: int) -> float:
    return 1 / total


@dataclass(frozen=True)
class Division:
    """A loop that divides wrongly. sizes: of the group's microbatches, consecutive on each replica.

    seen: the weights of each microbatch's tokens in that loop. seen_total: their sum, 1 by default.
    """

    source: str
    sizes: Sizes
    factor: Factor
    seen: tuple[float, ...]
    seen_total: float = 1.0
    replicas: int = 1
    average: bool = True


def targets(*counts: int) -> Sizes:
    return tuple((count, 0) for count in counts)


DIVISIONS = [
    Division("transformers 24725", targets(10, 100), mean_over_a, (0.05, 0.005)),
    Division("levanter 842", ((2, 14), (14, 2)), mean_over_a, (0.25, 1 / 28)),
    Division("accelerate 1767", targets(*[3] * 16), mean_over_a_twice, (1 / 768,) * 16, 1 / 16),
    Division("guided-diffusion 111", targets(5, 5, 5, 5), mean_undivided, (0.2,) * 4, 4.0),
    Division("torchtitan 2972", targets(3, 1, 7, 5), sum_undivided, (1.0,) * 4, 16.0),
    Division("transformers 34242", targets(1, 7), mean_over_a, (0.5, 1 / 14), replicas=2),
    Division("torchtitan 2206", targets(1, 7, 3, 5), mean_over_a, (1 / 4, 1 / 28, 1 / 12, 1 / 20), replicas=2),
    Division("torchtune 2172", targets(3, 5), sum_over_total, (1 / 16, 1 / 16), 1 / 2, replicas=2),
    Division("dinov3 250", targets(4, 4), mean_over_a, (1 / 4, 1 / 4), 2.0, replicas=2, average=False),
]


def updated_weights(process_group: Any, sizes: Sizes, wrap: bool, overlap: bool) -> list[float]:
    """The engine's weights of all tokens, with the microbatches dealt out to the replicas in turn."""
    batches = microbatches_of(sizes)
    model: nn.Module = Probe(num_tokens_of(sizes))
    if wrap:
        model = DistributedDataParallel(model, process_group=process_group)
    updater, given = recorded(model, overlap=overlap, process_group=process_group)
    result = updater.update(batches[updater.replica :: updater.replicas])
    assert (result.status, len(given)) == ("applied", 1)
    return given[0]["w"].tolist()


def divided_weights(process_group: Any, sizes: Sizes, factor: Factor, average: bool) -> list[float]:
    """The weights where each loss sum is multiplied by `factor` and DDP averages, or an all-reduce sums."""
    replicas = 1 if process_group is None else dist.get_world_size(process_group)
    accumulate = len(sizes) // replicas
    first = 0 if process_group is None else dist.get_rank(process_group) * accumulate
    total = sum(supervised for supervised, _ in sizes)
    probe = Probe(num_tokens_of(sizes))
    ddp = DistributedDataParallel(probe, process_group=process_group) if replicas > 1 and average else None
    for i in range(first, first + accumulate):
        batch = microbatches_of(sizes)[i]
        with ddp.no_sync() if ddp and i < first + accumulate - 1 else nullcontext():
            loss = cross_entropy_sum((ddp or probe)(batch["tokens"]), batch["labels"])
            (loss * factor(sizes[i][0], accumulate, total)).backward()
    assert probe.w.grad is not None
    if not average:
        dist.all_reduce(probe.w.grad, group=process_group)
    return probe.w.grad.tolist()


def on_replicas(pool: Pool, replicas: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What the function returns on each replica; a single one is this process, without a process group."""
    return pool.run(replicas, function, *args) if replicas > 1 else [function(None, *args)]


@pytest.mark.parametrize("case", DIVISIONS, ids=lambda case: case.source)
def test_every_target_of_the_group_has_the_same_weight(pool: Pool, case: Division) -> None:
    def spread(per_microbatch: Sequence[float]) -> list[float]:
        pairs = zip(case.sizes, per_microbatch, strict=True)
        return [w for (some, masked), weight in pairs for w in [weight] * some + [0.0] * masked]

    num_targets = sum(supervised for supervised, _ in case.sizes)
    right = spread([1 / num_targets] * len(case.sizes))
    layouts = ((1, False, False), (2, False, False), (2, True, True), (3, True, False), (4, False, True))
    for replicas, wrap, overlap in layouts:
        for weights in on_replicas(pool, replicas, updated_weights, case.sizes, wrap, overlap):
            assert_weights(weights, right)
            assert_weights(sum(weights), 1.0)

    for weights in on_replicas(pool, case.replicas, divided_weights, case.sizes, case.factor, case.average):
        assert_weights(weights, spread(case.seen))
        assert_weights(sum(weights), case.seen_total)
    assert max(abs(a - b) for a, b in zip(spread(case.seen), right, strict=True)) > 1e-3


# ------------------------------------------------------------------------- counts that are not what is summed


def test_count_follows_the_shift_of_the_labels() -> None:
    """ms-swift 9167: unshifted labels counted against a shifted loss, one target too many per example."""
    lengths = (3, 5)
    num_targets = sum(lengths) - len(lengths)
    batches = microbatches_of(targets(*lengths))
    predicting = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0], dtype=torch.float64)
    updater, given = recorded(Probe(sum(lengths)), causal_lm)
    assert updater.update(batches).denominators == {"causal_lm": num_targets}
    assert_weights(given[0]["w"], predicting / num_targets)

    probe = Probe(sum(lengths))
    counted = sum(int((batch["labels"] != IGNORE).sum()) for batch in batches)
    for batch in batches:
        (cross_entropy_sum(probe(batch["tokens"])[:, :-1], batch["labels"][:, 1:]) / counted).backward()
    assert_weights(gradients_of(probe)["w"], predicting / (num_targets + len(lengths)))


def test_a_microbatch_without_targets_is_no_part_of_the_mean() -> None:
    """NeMo-RL 212: four microbatches, one fully masked, divided by 4."""
    sizes = ((1, 2), (2, 1), (0, 3), (3, 0))
    batches = microbatches_of(sizes)
    supervised = (torch.cat([batch["labels"].flatten() for batch in batches]) == 0).double()
    updater, given = recorded(Probe(num_tokens_of(sizes)))
    updater.update(batches)
    assert_weights(given[0]["w"], supervised / 6)

    def mean_of_microbatch(logits: Tensor, batch: Batch) -> Tensor:
        return cross_entropy_sum(logits, batch["labels"]) / (batch["labels"] == 0).sum().clamp(min=1)

    microbatch_mean = Term("microbatch_mean", mean_of_microbatch, lambda batch: (batch["labels"] == 0).any())
    updater, given = recorded(Probe(num_tokens_of(sizes)), microbatch_mean)
    assert updater.update(batches).denominators == {"microbatch_mean": 3}
    by_microbatch = given[0]["w"].split([sum(size) for size in sizes])
    assert_weights([float(weights.sum()) for weights in by_microbatch], [1 / 3, 1 / 3, 0, 1 / 3])

    probe = Probe(num_tokens_of(sizes))
    for batch in batches:
        (mean_of_microbatch(probe(batch["tokens"]), batch) / len(batches)).backward()
    assert_weights(gradients_of(probe)["w"].sum(), 3 / 4)


# ---------------------------------------------------------------------------------------------- a second term


class WithAuxiliary(Probe):
    """Beside the logits, an auxiliary loss `a` in each microbatch: the gradient of `a` is its weight."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.a = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, tokens: Tensor, factor: Tensor | float = 1.0) -> Any:
        return super().forward(tokens, factor), self.a * 1.0


AUXILIARY = Term("auxiliary", lambda outputs, batch: outputs[1], lambda batch: 1)
AUXILIARY_SIZES = targets(1, 7, 3, 5)


def weights_with_auxiliary(process_group: Any) -> dict[str, list[float]]:
    """The engine's weights of tokens and auxiliary term over the replicas of a process group."""
    updater, given = recorded(WithAuxiliary(16), (TOKEN_MEAN, 0.5 * AUXILIARY), process_group=process_group)
    result = updater.update(microbatches_of(AUXILIARY_SIZES)[updater.replica :: updater.replicas])
    assert result.denominators == {"cross_entropy": 16, "auxiliary": 4}
    return {name: gradient.tolist() for name, gradient in given[0].items()}


def total_times_replicas(process_group: Any) -> dict[str, list[float]]:
    """The faulty loop: tokens / global count + auxiliary mean, all of it times D to undo DDP's average."""
    replicas = dist.get_world_size(process_group)
    probe = WithAuxiliary(16)
    model = DistributedDataParallel(probe, process_group=process_group)
    batches = microbatches_of(AUXILIARY_SIZES)[dist.get_rank(process_group) :: replicas]
    logits, auxiliary = model(torch.cat([batch["tokens"] for batch in batches], 1))
    labels = torch.cat([batch["labels"] for batch in batches], 1)
    ((cross_entropy_sum(logits, labels) / 16 + 0.5 * auxiliary) * replicas).backward()
    return {name: gradient.tolist() for name, gradient in gradients_of(probe).items()}


def test_an_auxiliary_term_counts_once_however_many_microbatches() -> None:
    """OpenNMT-py 2209: cross entropy / N_total, plus the auxiliary term in each of A = 4 microbatches."""
    weights = weights_with_auxiliary(None)
    assert_weights(weights["w"], [1 / 16] * 16)
    assert_weights(weights["a"], 0.5)

    probe = WithAuxiliary(16)
    for batch in microbatches_of(AUXILIARY_SIZES):
        logits, auxiliary = probe(batch["tokens"])
        (cross_entropy_sum(logits, batch["labels"]) / 16 + 0.5 * auxiliary).backward()
    assert_weights(gradients_of(probe)["w"], [1 / 16] * 16)
    assert_weights(gradients_of(probe)["a"], 4 * 0.5)


@pytest.mark.parametrize("replicas", [2, 4])
def test_an_auxiliary_term_counts_once_however_many_replicas(pool: Pool, replicas: int) -> None:
    """transformers 48706: the factor D that undoes DDP's average also multiplies the auxiliary term."""
    for weights in pool.run(replicas, weights_with_auxiliary):
        assert_weights(weights["w"], [1 / 16] * 16)
        assert_weights(weights["a"], 0.5)
    for weights in pool.run(replicas, total_times_replicas):
        assert_weights(weights["w"], [1 / 16] * 16)
        assert_weights(weights["a"], replicas * 0.5)


# ------------------------------------------------------------------- partial groups, lost and stale gradients


def updates_of(
    num_examples: int, accumulate: int, last_group: LastGroup, epochs: int = 1
) -> tuple[list[Tensor], Groups]:
    """Weights in each update of groups of `accumulate` microbatches of one example, and the groups."""
    updater, given = recorded(Probe(num_examples))
    data_groups = groups(
        one_token_examples(num_examples),
        examples_per_update=accumulate,
        examples_per_microbatch=1,
        last_group=last_group,
        epochs=epochs,
    )
    for group in data_groups:
        assert updater.update(group).status == "applied"
    return [gradients["w"] for gradients in given], data_groups


def hand_written_updates(num_examples: int, accumulate: int, epochs: int = 1, *, tail: bool = False) -> list[Tensor]:
    """The usual loop: losses / A, an update where (i + 1) % A == 0, and after the last microbatch if `tail`."""
    probe = Probe(num_examples)
    given = []
    for _ in range(epochs):
        for i in range(num_examples):
            (cross_entropy_sum(probe(torch.tensor([i])), torch.tensor([0])) / accumulate).backward()
            if (i + 1) % accumulate == 0 or (tail and i + 1 == num_examples):
                given.append(gradients_of(probe)["w"])
                probe.zero_grad()
    return given


def test_a_partial_group_has_its_own_denominator() -> None:
    """Lightning 19987: 7 microbatches, A = 4, the tail of 3 divided by 4."""
    kept, _ = updates_of(7, 4, "keep")
    assert_weights([float(weights.sum()) for weights in kept], [1, 1])
    assert_weights(kept[1].sort().values, [0] * 4 + [1 / 3] * 3)
    assert torch.equal((kept[0] > 0) ^ (kept[1] > 0), torch.ones(7, dtype=torch.bool))

    dropped, data_groups = updates_of(7, 4, "drop")
    assert len(dropped) == 1
    assert_weights(dropped[0], kept[0])
    assert sorted(data_groups.dropped[0].ids) == kept[1].nonzero().flatten().tolist()

    updater, ready = recorded(Probe(7))
    for group in ready_groups(microbatches_of(targets(*[1] * 7)), microbatches_per_replica=4):
        updater.update(group)
    assert_weights(ready[0]["w"], [1 / 4] * 4 + [0] * 3)
    assert_weights(ready[1]["w"], [0] * 4 + [1 / 3] * 3)

    assert_weights([float(weights.sum()) for weights in hand_written_updates(7, 4, tail=True)], [1, 0.75])


def test_the_tail_of_an_epoch_does_not_leak_into_the_next() -> None:
    """torchtune 2745: 63 microbatches, A = 8; the next epoch's first update holds 15 of them."""
    cases: list[tuple[LastGroup, list[int]]] = [("keep", [*[8] * 7, 7] * 2), ("drop", [8] * 14)]
    for last_group, wanted in cases:
        given, _ = updates_of(63, 8, last_group, epochs=2)
        assert [int((weights > 0).sum()) for weights in given] == wanted
        for weights, count in zip(given, wanted, strict=True):
            assert_weights(weights[weights > 0], [1 / count] * count)

    leaked = hand_written_updates(63, 8, epochs=2)
    assert [round(float(weights.sum()) * 8) for weights in leaked] == [8] * 7 + [15] + [8] * 6


def test_fewer_microbatches_than_a_group_are_an_update_or_said_to_be_dropped() -> None:
    """AnimaLoraStudio 305: 3 microbatches, A = 4, and no update at all."""
    kept, _ = updates_of(3, 4, "keep")
    assert len(kept) == 1
    assert_weights(kept[0], [1 / 3] * 3)
    with pytest.raises(InputError, match="no group would be left"):
        updates_of(3, 4, "drop")

    assert hand_written_updates(3, 4) == []


def test_no_microbatch_is_lost_to_zero_grad() -> None:
    """RAE 67: gradients cleared before every microbatch, A = 4, so that only the last one counts."""
    updater, given = recorded(Probe(4))
    updater.update(microbatches_of(targets(1, 1, 1, 1)))
    assert_weights(given[0]["w"], [1 / 4] * 4)

    probe = Probe(4)
    for batch in microbatches_of(targets(1, 1, 1, 1)):
        probe.zero_grad()
        (cross_entropy_sum(probe(batch["tokens"]), batch["labels"]) / 4).backward()
    assert_weights(gradients_of(probe)["w"], [0, 0, 0, 1 / 4])


def with_factors(*factors: float) -> list[dict[str, Any]]:
    """A microbatch per factor, each of one token, whose loss has that slope."""
    batches = microbatches_of(targets(*[1] * len(factors)))
    return [
        {**batch, "id": [10 + i], "factor": torch.tensor(factor)}
        for i, (batch, factor) in enumerate(zip(batches, factors, strict=True))
    ]


def test_a_skipped_group_leaves_no_gradients_behind() -> None:
    """espnet 3283: NaN in microbatch 2 of 4; the update is skipped, but its gradients stay for the next."""
    probe = Probe(4)
    updater, given = recorded(probe, learning_rate=1.0, loss_scale=LossScale(1024.0))
    assert updater.update(with_factors(1, math.nan, 1, 1)).status == "skipped"
    assert given == []
    assert gradients_of(probe) == {}
    assert_weights(probe.w.detach(), [0] * 4)
    assert updater.update(with_factors(1, 1, 1, 1)).status == "applied"
    assert_weights(given[0]["w"], [1 / 4] * 4)

    probe = Probe(4)
    for factors in ((1, math.nan, 1, 1), (1, 1, 1, 1)):
        for batch in with_factors(*factors):
            (cross_entropy_sum(probe(batch["tokens"], batch["factor"]), batch["labels"]) / 4).backward()
        if torch.isfinite(gradients_of(probe)["w"]).all():
            probe.zero_grad()
    assert torch.isnan(gradients_of(probe)["w"][1])


def test_without_a_loss_scale_nan_names_its_examples_and_stops() -> None:
    """espnet 3283 without a loss scale to lower: nothing is applied, and the next update is clean."""
    probe = Probe(4)
    updater, given = recorded(probe, learning_rate=1.0)
    with pytest.raises(NonFiniteError, match=r"example ids: \[\[11\]\]"):
        updater.update(with_factors(1, math.nan, 1, 1))
    assert given == []
    assert gradients_of(probe) == {}
    assert_weights(probe.w.detach(), [0] * 4)
    assert updater.totals.applied == 0
    updater.update(with_factors(1, 1, 1, 1))
    assert_weights(given[0]["w"], [1 / 4] * 4)

    probe = Probe(4)
    optimizer = torch.optim.SGD(probe.parameters(), lr=1.0)
    for batch in with_factors(1, math.nan, 1, 1):
        (cross_entropy_sum(probe(batch["tokens"], batch["factor"]), batch["labels"]) / 4).backward()
    optimizer.step()
    assert torch.isnan(probe.w[1])


# ------------------------------------------------------------------- replicas: gradients shared, examples not


def engine_gradient(process_group: Any, before: bool) -> float:
    """The engine's gradient of a token whose slope is 1 on replica 0 and 3 on replica 1; the model is in DDP.

    before: whether DDP has synchronised a backward of its own before.
    """
    model = DistributedDataParallel(Probe(1), process_group=process_group)
    if before:
        model(torch.tensor([0])).sum().backward()
    updater, given = recorded(model)
    slope = torch.tensor(1.0 + 2.0 * updater.replica)
    updater.update([{"tokens": torch.tensor([[0]]), "labels": torch.tensor([[0]]), "factor": slope}])
    return given[0]["w"].item()


def module_gradient(process_group: Any) -> float:
    """The faulty loop: forward through `ddp.module`, so that DDP never learns of the backward."""
    model = DistributedDataParallel(Probe(1), process_group=process_group)
    slope = 1.0 + 2.0 * dist.get_rank(process_group)
    cross_entropy_sum(model.module(torch.tensor([0]), slope), torch.tensor([0])).backward()
    return gradients_of(model.module)["w"].item()


@pytest.mark.parametrize("before", [False, True])
def test_replicas_share_their_gradients_where_ddp_is_taken_off(pool: Pool, before: bool) -> None:
    """icefall 226: forward through `ddp.module` leaves each replica with its own gradient."""
    assert pool.run(2, engine_gradient, before) == [2.0, 2.0]
    assert pool.run(2, module_gradient) == [1.0, 3.0]


def fed_ids(process_group: Any, num_examples: int, examples_per_update: int, epochs: int) -> list[list[int]]:
    """Per epoch, the ids that really went into this replica's forward."""
    probe = Probe(num_examples)
    updater, _ = recorded(probe, process_group=process_group)
    data_groups = groups(
        one_token_examples(num_examples),
        examples_per_update=examples_per_update,
        examples_per_microbatch=1,
        epochs=epochs,
    )
    fed: list[list[int]] = [[] for _ in range(epochs)]
    for group in data_groups:
        updater.update(group)
        fed[group.epoch] += probe.seen
        probe.seen.clear()
    return fed


def padding_sampler(replica: int, replicas: int, num_examples: int) -> list[int]:
    """torch's sampler: repeats the first ids until the replicas have equally many."""
    data = TensorDataset(torch.arange(num_examples))
    return list(DistributedSampler(data, replicas, replica, shuffle=False))


def own_shuffle(replica: int, replicas: int, num_examples: int) -> list[int]:
    """Every replica shuffles with a seed of its own, then takes its part."""
    order = torch.randperm(num_examples, generator=torch.Generator().manual_seed(replica)).tolist()
    return order[replica::replicas]


def evened_batches(replica: int, replicas: int, num_examples: int) -> list[int]:
    """Batches of one example in turn; a replica that comes out short begins again at the first."""
    mine = list(range(replica, num_examples, replicas))
    return mine if len(mine) == -(-num_examples // replicas) else [*mine, 0]


def assert_each_id_once(fed: Sequence[Sequence[Sequence[int]]], num_examples: int) -> None:
    """fed: per replica and epoch."""
    for epoch in zip(*fed, strict=True):
        assert sorted(i for replica in epoch for i in replica) == list(range(num_examples))


def test_no_example_is_repeated_to_pad_an_epoch(pool: Pool) -> None:
    """pytorch 25162: 10 examples, 4 ranks, examples 0 and 1 twice."""
    assert_each_id_once(pool.run(4, fed_ids, 10, 10, 2), 10)
    assert_each_id_once(pool.run(4, fed_ids, 10, 3, 1), 10)
    repeated = Counter(i for replica in range(4) for i in padding_sampler(replica, 4, 10))
    assert [i for i, times in sorted(repeated.items()) if times == 2] == [0, 1]
    assert sum(repeated.values()) == 12


def test_replicas_take_disjoint_parts_of_one_order(pool: Pool) -> None:
    """CrowdDet 36: 8 examples, 2 ranks, each with its own shuffle: some come twice, some never."""
    fed = pool.run(2, fed_ids, 8, 4, 3)
    assert_each_id_once(fed, 8)
    assert all(set(a).isdisjoint(b) for a, b in zip(*fed, strict=True))
    drawn = Counter(i for replica in range(2) for i in own_shuffle(replica, 2, 8))
    assert max(drawn.values()) == 2
    assert set(range(8)) - set(drawn)


def test_no_example_is_repeated_to_even_out_the_replicas() -> None:
    """accelerate 2316: 24 examples, 5 ranks, 25 examples in an epoch."""
    five = Pool(5)
    try:
        assert_each_id_once(five.run(5, fed_ids, 24, 24, 1), 24)
    finally:
        five.close()
    evened = [i for replica in range(5) for i in evened_batches(replica, 5, 24)]
    assert (len(evened), evened.count(0)) == (25, 2)
