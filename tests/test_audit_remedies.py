"""The lines that an audit offers: they parse, fit a terminal, and mend what they are offered for.

In the loops below the loss of token i is w[i], so the gradient of w IS the weight of each token. Each loop is also run
without the lines, and must then show its fault.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from isostep.audit.document import KINDS
from isostep.audit.remedies import CAUSES, IDEAS, LIBRARIES, causes_of, remedy
from isostep.audit.remedy_weights import SCALE
from pool import Pool

WIDEST, LONGEST = 76, 7
TOLERANCE = 1e-12

Batch = dict[str, Tensor]


class Probe(nn.Module):
    """The loss of token i is w[i]."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(num_tokens, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.w[tokens]


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["tokens"])[batch["labels"] != -100].sum()


def batches_of(sizes: Sequence[int], first: int = 0) -> list[Batch]:
    """Microbatches of so many targets, and an ignored token each; targets are numbered through."""
    batches = []
    for size in sizes:
        tokens = torch.tensor([*range(first, first + size), 0])
        batches.append({"tokens": tokens, "labels": torch.tensor([0] * size + [-100])})
        first += size
    return batches


def run(lines: str, **names: Any) -> dict[str, Any]:
    """Runs the lines with torch and the given names in reach; what they leave behind."""
    space: dict[str, Any] = {"torch": torch, "dist": dist, "nullcontext": nullcontext, "loss_sum": loss_sum, "F": F}
    space |= names
    exec(lines, space)
    return space


def assert_weights(gradient: Tensor | None, expected: Sequence[float]) -> None:
    assert gradient is not None
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=gradient.dtype), rtol=TOLERANCE, atol=0)


def every_remedy() -> list[tuple[str, str, str]]:
    """(kind, library, lines) with and without numbers, of every cause."""
    numbers: list[dict[str, Any]] = [{}, {"accumulate": 16, "replicas": 8, "factor": 0.3333}]
    return [
        (kind, library, remedy(kind, library, cause=cause, **given))
        for kind in KINDS
        for library in LIBRARIES
        for cause in (CAUSES if kind == "scale" else [None])
        for given in numbers
    ]


# --------------------------------------------------------------------------------------------- all of them


def test_every_remedy_parses_and_fits() -> None:
    for kind, library, lines in every_remedy():
        ast.parse(lines)
        assert "$" not in lines, (kind, library)
        assert len(lines.splitlines()) <= LONGEST, (kind, library)
        assert max(map(len, lines.splitlines())) <= WIDEST, (kind, library, lines)


def test_control_the_check_of_syntax_sees_a_fault() -> None:
    with pytest.raises(SyntaxError):
        ast.parse("loss.backward(")


def test_every_kind_has_an_idea_and_no_other_has() -> None:
    assert list(IDEAS) == list(KINDS)
    assert set(SCALE) == set(CAUSES)


def test_an_unknown_kind_is_an_error_an_unknown_library_is_pytorch() -> None:
    with pytest.raises(KeyError):
        remedy("no-such-kind", "pytorch")
    for kind in KINDS:
        assert remedy(kind, "no-such-library") == remedy(kind, "pytorch")


def test_trl_speaks_of_its_own_trainer() -> None:
    texts = [remedy(kind, "trl") for kind in KINDS]
    assert not any("TrainingArguments" in text or " Trainer(" in text for text in texts)
    assert any("SFTConfig" in text for text in texts)


@pytest.mark.parametrize(
    ("factor", "accumulate", "replicas", "causes"),
    [
        (4.0, 4, 2, ("A",)),
        (0.25, 4, 2, ("1/A",)),
        (2.0, 4, 2, ("D",)),
        (0.50001, 4, 2, ("1/D",)),
        (2.0, 2, 2, ("A", "D")),
        (8.0, 4, 2, ("A x D",)),
        (0.125, 4, 2, ("1/(A x D)",)),
        (4.0, 4, 1, ("A",)),
        (3.0, 4, 2, ("constant",)),
        (1.0, 1, 1, ("constant",)),
        (4.0, None, None, ("constant",)),
        (None, 4, 2, ("constant",)),
    ],
)
def test_what_a_factor_comes_from(
    factor: float | None, accumulate: int | None, replicas: int | None, causes: tuple[str, ...]
) -> None:
    assert causes_of(factor, accumulate, replicas) == causes
    offered = remedy("scale", "ddp", accumulate=accumulate, replicas=replicas, factor=factor)
    texts = [remedy("scale", "ddp", accumulate=accumulate, replicas=replicas, factor=factor, cause=c) for c in causes]
    assert offered == "\n# or:\n".join(texts)


def test_a_cause_that_is_given_goes_before_the_factor() -> None:
    assert remedy("scale", "ddp", accumulate=4, factor=4.0, cause="N") == remedy("mean-of-means", "ddp")
    words = "not divided by the 110 supervised tokens"
    assert remedy("scale", "ddp", accumulate=4, factor=4.0, cause=words) == remedy("mean-of-means", "ddp")
    assert remedy("scale", "ddp", accumulate=4, factor=4.0, cause="no-such-cause") == remedy("scale", "ddp", cause="A")


def test_numbers_are_written_into_the_lines() -> None:
    assert "len(loader) % 4 " in remedy("partial-group", "pytorch", accumulate=4)
    assert "len(loader) % A " in remedy("partial-group", "pytorch")
    assert "off by 3.5" in remedy("scale", "pytorch", factor=3.5)


# --------------------------------------------------------------------------------------------- one process


@pytest.mark.parametrize("kind", ["mean-of-means", "uneven-weights"])
def test_token_exact_lines_give_each_token_the_same_weight(kind: str) -> None:
    """Microbatches of 10 and 100 tokens: 1/110 each; means of means give 1/20 and 1/200."""
    faulty, mended, batches = Probe(110), Probe(110), batches_of([10, 100])
    for batch in batches:
        (loss_sum(faulty, batch) / (batch["labels"] != -100).sum() / 2).backward()
    assert_weights(faulty.w.grad, [1 / 20] * 10 + [1 / 200] * 100)
    run(remedy(kind, "pytorch"), model=mended, batches=batches)
    assert_weights(mended.w.grad, [1 / 110] * 110)
    by_cause = Probe(110)
    run(remedy("scale", "pytorch", cause="N"), model=by_cause, batches=batches)
    assert_weights(by_cause.w.grad, [1 / 110] * 110)


def test_transformers_loss_is_a_sum_over_the_items_of_the_update() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7)
    labels = torch.tensor([[-100, 3, 2, -100, 1], [-100, -100, 4, 6, -100]])
    lines = remedy("mean-of-means", "transformers").split("trainer =")[0]
    token_loss = run(lines)["token_loss"]
    loss = token_loss(SimpleNamespace(logits=logits), labels, num_items_in_batch=torch.tensor(20))
    rows = [(0, 0, 3), (0, 1, 2), (0, 3, 1), (1, 1, 4), (1, 2, 6)]  # example, position, target after it
    expected = sum(-logits[i, j].log_softmax(-1)[target] for i, j, target in rows) / 20
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("cause", ["A", "1/A"])
def test_one_division_by_the_microbatches(cause: str) -> None:
    """Four microbatches of one token each. Undivided they weigh 1, divided twice 1/16."""
    model, batches = Probe(4), batches_of([1] * 4)
    for batch in batches:
        loss = loss_sum(model, batch)
        loss = loss / 4 if cause == "1/A" else loss
        run(remedy("scale", "pytorch", cause=cause, accumulate=4), loss=loss, batches=batches)
    assert_weights(model.w.grad, [1 / 4] * 4)


def test_counts_what_the_loss_sums() -> None:
    labels = torch.tensor([[5, 6, -100, 7], [-100, -100, -100, -100]])
    space = run(remedy("count-mismatch", "pytorch"), batch={"labels": labels}, tokens=0)
    assert space["tokens"] == 2, "6 and 7: the first position is no target"
    run(remedy("count-mismatch", "transformers"), batch={"labels": labels})
    assert int((labels != -100).sum()) == int((labels[:, 1:] != -100).sum()) == 2


def test_each_term_over_its_own_denominator() -> None:
    """Cross-entropy over microbatches of 1, 3, 3, 1 tokens; an auxiliary mean per microbatch, which counts once."""
    ce, aux = Probe(8), nn.Parameter(torch.zeros((), dtype=torch.float64))
    for batch in batches_of([1, 3, 3, 1]):
        names = {"ce_sum": loss_sum(ce, batch), "aux_mean": aux * 1, "coefficient": 0.5, "tokens": 8}
        run(remedy("term-scale", "pytorch"), batches=range(4), **names)
    assert_weights(ce.w.grad, [1 / 8] * 8)
    assert aux.grad is not None
    assert aux.grad.item() == 0.5


def test_the_tail_is_divided_by_its_own_number() -> None:
    """Seven microbatches and A = 4: weights of the last update sum to 1, not to 3/4."""
    lines = remedy("partial-group", "pytorch", accumulate=4)
    for microbatches, updates in ((7, [1, 1]), (8, [1, 1]), (3, [1])):
        model, loader, sums = Probe(8), batches_of([1] * microbatches), []
        for i, batch in enumerate(loader):
            run(lines, loader=loader, i=i, loss=loss_sum(model, batch))
            if (i + 1) % 4 == 0 or i + 1 == len(loader):
                assert model.w.grad is not None
                sums.append(model.w.grad.sum().item())
                model.zero_grad()
        assert sums == pytest.approx(updates, rel=TOLERANCE)


def test_nothing_of_an_earlier_update_is_left() -> None:
    model = Probe(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    first, second = batches_of([2, 1]), batches_of([1, 3], first=3)
    lines = remedy("stale-gradient", "pytorch")
    run(lines, model=model, optimizer=optimizer, batches=first, tokens=3)
    faulty = lines.replace("optimizer.zero_grad()", "pass")
    assert faulty != lines
    run(lines, model=model, optimizer=optimizer, batches=second, tokens=4)
    assert_weights(model.w.grad, [0] * 3 + [1 / 4] * 4)
    run(faulty, model=model, optimizer=optimizer, batches=second, tokens=4)
    assert_weights(model.w.grad, [0] * 3 + [1 / 2] * 4)


def test_no_microbatch_is_lost() -> None:
    """Six microbatches, A = 4: updates of four and of two."""
    model, applied = Probe(6), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: applied.append((model.w.grad != 0).int().tolist()))
    loader = batches_of([1] * 6)
    for i, batch in enumerate(loader):
        loss_sum(model, batch).backward()
        run(remedy("lost-microbatch", "pytorch", accumulate=4), optimizer=optimizer, loader=loader, i=i)
    assert applied == [[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]]


def test_clips_once_per_update() -> None:
    """Gradients [2, 0] and [0, 2], largest norm 1."""
    model = Probe(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    names = {"model": model, "optimizer": optimizer, "tokens": 0.5, "max_norm": 1.0}
    run(remedy("clip-per-microbatch", "pytorch"), batches=batches_of([1, 1]), **names)
    torch.testing.assert_close(
        -model.w.detach(), torch.full((2,), math.sqrt(0.5), dtype=torch.float64), rtol=1e-5, atol=0
    )


def test_the_scale_is_undone_before_clipping() -> None:
    """A gradient of norm .5 under a loss scale, largest norm 1: it stays .5."""
    lines = remedy("clip-before-unscale", "pytorch")
    for text, expected in ((lines, 0.5), (lines.replace("scaler.unscale_(optimizer)", "pass"), 1 / 65536)):
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu")
        scaler.scale(0.5 * model.weight.sum()).backward()
        run(text, model=model, optimizer=optimizer, scaler=scaler, max_norm=1.0)
        assert -model.weight.item() == pytest.approx(expected, rel=1e-5)


def test_a_skipped_update_leaves_the_scheduler_alone() -> None:
    model = nn.Linear(1, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    for factor, updates in ((math.inf, 0), (1.0, 1)):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1)).sum() * factor).backward()
        run(remedy("skip-advances-scheduler", "pytorch"), optimizer=optimizer, scaler=scaler, scheduler=scheduler)
        assert scheduler.last_epoch == updates


def test_a_loss_scale_is_undone_by_the_scaler() -> None:
    model = Probe(1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale(model.w.sum()).backward()
    run(remedy("scale", "pytorch", factor=65536.0), optimizer=optimizer, scaler=scaler)
    assert model.w.item() == -1


def test_the_scheduler_goes_once_per_update() -> None:
    """Six microbatches, A = 4, three epochs: six updates."""
    optimizer = torch.optim.SGD(Probe(1).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    optimizer.zero_grad()
    for i in range(18):
        names = {"math": math, "loader": range(6), "epochs": 3, "i": i % 6}
        space = run(
            remedy("scheduler-unit", "pytorch", accumulate=4), optimizer=optimizer, scheduler=scheduler, **names
        )
    assert scheduler.last_epoch == space["updates"] == 6


def test_what_is_kept_holds_no_graph() -> None:
    model = Probe(2)
    names = {"total_loss": torch.zeros(()), "history": [], "loss": model.w.sum()}
    space = run(remedy("retained-graph", "pytorch"), **names)
    assert space["total_loss"].grad_fn is None
    assert space["history"] == [0.0]


def test_sums_in_float32_under_autocast() -> None:
    model = nn.Linear(4, 1).to(torch.bfloat16)
    names = {"device_type": "cpu", "batch": torch.ones(2, 4), "compute_loss": lambda model, batch: model(batch).sum()}
    run(remedy("low-precision-sum", "pytorch"), model=model, **names)
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32


def test_statistics_stay_as_they_are() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).train()
    run(remedy("batchnorm", "pytorch"), model=model)
    model(torch.ones(3, 2))
    assert torch.equal(model[0].running_mean, torch.zeros(2))
    assert model[1].training


def test_logs_the_loss_of_the_update(capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens of loss 4 (one) and 2 (three): 10/4, not 3 and not 1."""
    model = Probe(4)
    with torch.no_grad():
        model.w.copy_(torch.tensor([4.0, 2, 2, 2]))
    run(remedy("wrong-log", "pytorch"), model=model, batches=batches_of([1, 3]), tokens=4)
    assert float(capsys.readouterr().out) == 2.5


def test_an_update_moves_something() -> None:
    model = Probe(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run(remedy("no-update", "pytorch"), optimizer=optimizer, loss=model.w.sum())
    assert model.w.tolist() == [-1, -1]
    assert model.w.grad is None
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(AssertionError):
        run(remedy("no-update", "pytorch"), optimizer=optimizer, loss=model.w.sum())


def test_the_optimizer_gets_what_it_lacks() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0)
    run(remedy("parameters-missing", "pytorch"), model=model, optimizer=optimizer)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())


def test_ranks_take_each_example_once() -> None:
    seen = []
    for rank in range(3):
        names = {
            "DistributedSampler": partial(torch.utils.data.DistributedSampler, num_replicas=3, rank=rank),
            "DataLoader": torch.utils.data.DataLoader,
        }
        space = run(remedy("duplicate-example", "pytorch"), dataset=range(10), batch_size=1, epoch=1, **names)
        seen += [int(example) for example in space["loader"]]
    assert len(seen) == len(set(seen)) == 9


# --------------------------------------------------------------------------------------------- several ranks

SIZES = ((1, 7), (3, 6), (2, 2), (4, 1))
"""Targets of the microbatches of each rank."""

TOTAL = sum(map(sum, SIZES))
REPLICAS = len(SIZES)


def own_batches(rank: int) -> list[Batch]:
    return batches_of(SIZES[rank], first=sum(map(sum, SIZES[:rank])))


def weights_on_a_rank(group: Any, kind: str, library: str, cause: str | None) -> list[float]:
    """The weight of each token after the lines, on one of four ranks."""
    rank, probe = dist.get_rank(), Probe(TOTAL)
    model = DistributedDataParallel(probe) if library == "ddp" else probe
    lines = remedy(kind, library, cause=cause)
    if "for i, batch in" in lines or "for batch in" in lines:
        run(lines, model=model, batches=own_batches(rank))
    elif library == "ddp":  # the lines are those of one microbatch
        for i, batch in enumerate(own_batches(rank)):
            with nullcontext() if i else model.no_sync():
                run(lines, model=model, batch=batch, tokens=TOTAL)
    else:  # the lines come after the backward
        for batch in own_batches(rank):
            (loss_sum(model, batch) / TOTAL).backward()
        run(lines, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    assert probe.w.grad is not None
    return probe.w.grad.tolist()


@pytest.mark.parametrize(
    ("kind", "library", "cause"),
    [
        ("mean-of-means", "ddp", None),
        ("mean-of-replicas", "ddp", None),
        ("mean-of-replicas", "pytorch", None),
        ("scale", "ddp", "1/D"),
        ("scale", "pytorch", "1/D"),
    ],
)
def test_weights_are_exact_on_every_rank(pool: Pool, kind: str, library: str, cause: str | None) -> None:
    for weights in pool.run(REPLICAS, weights_on_a_rank, kind, library, cause):
        assert weights == pytest.approx([1 / TOTAL] * TOTAL, rel=TOLERANCE)


def mean_of_replicas_on_a_rank(group: Any) -> list[float]:
    probe = Probe(TOTAL)
    model = DistributedDataParallel(probe)
    batches = own_batches(dist.get_rank())
    tokens = sum(int((batch["labels"] != -100).sum()) for batch in batches)
    for i, batch in enumerate(batches, 1):
        with model.no_sync() if i < len(batches) else nullcontext():
            (loss_sum(model, batch) / tokens).backward()
    assert probe.w.grad is not None
    return probe.w.grad.tolist()


def test_control_local_means_are_not_exact(pool: Pool) -> None:
    weights = pool.run(REPLICAS, mean_of_replicas_on_a_rank)[0]
    assert weights[0] == pytest.approx(1 / 8 / REPLICAS)
    assert abs(weights[0] * TOTAL - 1) > 1e-2


def average_on_a_rank(group: Any, kind: str, cause: str | None) -> float:
    """Each rank has a gradient of its rank, and runs the lines after backward."""
    probe = Probe(1)
    (probe.w.sum() * dist.get_rank()).backward()
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.0)
    run(remedy(kind, "pytorch", cause=cause), model=probe, optimizer=optimizer)
    assert probe.w.grad is not None
    return probe.w.grad.item()


@pytest.mark.parametrize(("kind", "cause"), [("unsynchronised-replicas", None), ("scale", "D")])
def test_replicas_average(pool: Pool, kind: str, cause: str | None) -> None:
    assert pool.run(REPLICAS, average_on_a_rank, kind, cause) == [1.5] * REPLICAS


def around_on_a_rank(group: Any) -> tuple[float, float, float]:
    """The scale that ranks agree on, the loss that is logged, and a draw of this rank."""
    rank = dist.get_rank()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + rank))
    scaler.scale(model(torch.ones(1)).sum()).backward()
    run(remedy("scaler-disagrees", "pytorch"), optimizer=optimizer, scaler=scaler, device="cpu")
    printed: list[float] = []
    losses = [torch.tensor(2.0 * rank), torch.tensor(4.0)]
    run(remedy("wrong-log", "ddp"), losses=losses, tokens=TOTAL, print=printed.append)
    run(remedy("dropout-shared", "pytorch"), seed=7, build=lambda: None)
    return scaler.get_scale(), printed[0], torch.rand(()).item()


def test_ranks_agree_on_scale_and_loss_and_draw_their_own(pool: Pool) -> None:
    scales, losses, draws = zip(*pool.run(REPLICAS, around_on_a_rank), strict=True)
    assert set(scales) == {2.0**10}
    assert set(losses) == {(2 * (0 + 1 + 2 + 3) + 4 * REPLICAS) / TOTAL}
    assert len(set(draws)) == REPLICAS
