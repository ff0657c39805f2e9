"""Faults of optimizer, scheduler, loss scale, memory and log that accumulation and replicas have shown in public code.

Every test also runs the faulty loop, in plain torch, and must see its fault. Sources are named by repository and
number of the issue or pull request.
"""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from isostep import LossScale, NonFiniteError, Term, Updater, mse
from isostep.distributed.traffic import SMALL_BYTES, watched
from isostep.errors import InputError
from pool import Pool

TOLERANCE = 1e-12
SCALE = 1024.0


class Linear(nn.Module):
    """w * slopes per example: the gradient of an example IS its row of slopes, whatever w is."""

    def __init__(self, width: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(width, dtype=dtype))

    def forward(self, slopes: Tensor) -> Tensor:
        return slopes.to(self.w.dtype) @ self.w


MEAN = Term("mean", lambda outputs, batch: outputs.sum(), lambda batch: len(batch))
"""The mean over examples: the gradient is the mean of the rows of slopes."""


def rows(*slopes: Sequence[float]) -> list[Tensor]:
    """A microbatch per row, of one example each."""
    return [torch.tensor([row], dtype=torch.float64) for row in slopes]


def recorded(
    model: nn.Module, objective: Term = MEAN, **settings: Any
) -> tuple[Updater, torch.optim.Optimizer, list[Tensor]]:
    """An Updater, its optimizer, and a list that gets the first parameter's gradient in every applied update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given: list[Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: given.append(first_gradient(model).clone()))
    scheduler = settings.pop("scheduler", lambda optimizer: None)(optimizer)
    return Updater(model, optimizer, objective, scheduler=scheduler, **settings), optimizer, given


def first_gradient(model: nn.Module) -> Tensor:
    gradient = next(model.parameters()).grad
    assert gradient is not None
    return gradient


def assert_close(seen: Tensor, expected: Sequence[float], tolerance: float = TOLERANCE) -> None:
    assert (seen.double() - torch.tensor(expected, dtype=torch.float64)).abs().max().item() <= tolerance


# -------------------------------------------------------------------------------------------------- scheduler


def linear_to_zero(optimizer: torch.optim.Optimizer, updates: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda done: max(0.0, 1 - done / updates))


def test_a_scheduler_counts_updates_not_microbatches() -> None:
    """accelerate 963: A = 4, linear to 0 over 250 updates, but stepped in every microbatch."""
    updater, optimizer, _ = recorded(Linear(1), scheduler=lambda o: linear_to_zero(o, 250))
    rates = [updater.update(rows([1], [2], [3], [4])).learning_rates[0] for _ in range(250)]
    assert rates == [1 - done / 250 for done in range(250)]
    assert optimizer.param_groups[0]["lr"] == 0

    model = Linear(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = linear_to_zero(optimizer, 250)
    faulty_rates = []
    for _ in range(250):
        faulty_rates.append(optimizer.param_groups[0]["lr"])
        for microbatch in rows([1], [2], [3], [4]):
            (model(microbatch).mean() / 4).backward()
            optimizer.step()
            scheduler.step()
    assert sum(rate > 0 for rate in faulty_rates) == math.ceil(250 / 4)


def rates_of_engine(process_group: Any, updates: int) -> list[float]:
    """The learning rate of every update of the engine, and the one after the last."""
    updater, optimizer, _ = recorded(
        Linear(1), scheduler=lambda o: linear_to_zero(o, updates), process_group=process_group
    )
    rates = [updater.update(rows([1], [2])).learning_rates[0] for _ in range(updates)]
    return [*rates, optimizer.param_groups[0]["lr"]]


def rates_per_rank(process_group: Any, updates: int) -> list[float]:
    """The faulty loop: one scheduler step per rank in every update."""
    model = DistributedDataParallel(Linear(1), process_group=process_group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = linear_to_zero(optimizer, updates)
    rates = []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        model(rows([1])[0]).mean().backward()
        optimizer.step()
        for _ in range(dist.get_world_size(process_group)):
            scheduler.step()
    return [*rates, optimizer.param_groups[0]["lr"]]


def test_a_scheduler_counts_updates_not_replicas(pool: Pool) -> None:
    """accelerate 1382: stepped once per rank, D = 2: the learning rate is 0 halfway."""
    linear = [1 - done / 20 for done in range(20)]
    assert pool.run(2, rates_of_engine, 20) == [[*linear, 0.0]] * 2
    assert pool.run(2, rates_per_rank, 20) == [[*linear[::2], *[0.0] * 11]] * 2


def test_a_skipped_update_leaves_the_scheduler_alone() -> None:
    """pytorch 55585: inf in update 1 under GradScaler, and the scheduler moves on."""
    schedulers: list[LambdaLR] = []

    def scheduler_of(optimizer: torch.optim.Optimizer) -> LambdaLR:
        schedulers.append(linear_to_zero(optimizer, 10))
        return schedulers[0]

    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    updater, optimizer, given = recorded(Linear(1), scheduler=scheduler_of, loss_scale=scaler)
    assert updater.update(rows([math.inf])).status == "skipped"
    assert (schedulers[0].last_epoch, optimizer.param_groups[0]["lr"], len(given)) == (0, 1.0, 0)
    assert updater.update(rows([1])).status == "applied"
    assert (schedulers[0].last_epoch, optimizer.param_groups[0]["lr"], len(given)) == (1, 0.9, 1)

    model = Linear(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = linear_to_zero(optimizer, 10)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(model(rows([math.inf])[0]).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    with pytest.warns(UserWarning, match=r"lr_scheduler\.step\(\)"):
        scheduler.step()
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"], model.w.item()) == (1, 0.9, 0.0)


def test_several_optimizers_and_their_schedulers_move_together_or_not_at_all() -> None:
    model = nn.ModuleDict({"a": Linear(1), "b": Linear(1)})
    optimizers = [torch.optim.SGD(model["a"].parameters(), lr=1.0), torch.optim.SGD(model["b"].parameters(), lr=0.5)]
    schedulers = [linear_to_zero(optimizer, 4) for optimizer in optimizers]
    updater = Updater(
        model,
        optimizers,
        MEAN,
        forward=lambda model, batch: model["a"](batch[:, :1]) + model["b"](batch[:, 1:]),
        scheduler=schedulers,
        loss_scale=LossScale(SCALE),
    )
    statuses = []
    for slopes in ([1, 1], [1, math.inf], [math.inf, 1], [1, 1]):
        statuses.append(updater.update(rows(slopes, [3, 5])).status)
    assert statuses == ["applied", "skipped", "skipped", "applied"]
    assert [scheduler.last_epoch for scheduler in schedulers] == [2, 2]
    assert [model["a"].w.item(), model["b"].w.item()] == [-2 * (1 + 0.75), -3 * 0.5 * (1 + 0.75)]

    # The usual loop with one GradScaler: it judges per optimizer, so that only the one without the inf moves.
    model = nn.ModuleDict({"a": Linear(1), "b": Linear(1)})
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in model.values()]
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    batch = rows([1, math.inf])[0]
    scaler.scale((model["a"](batch[:, :1]) + model["b"](batch[:, 1:])).mean()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert [model["a"].w.item(), model["b"].w.item()] == [-1.0, 0.0]


# --------------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("scaler", [LossScale(65536.0), torch.amp.GradScaler("cpu", init_scale=65536.0)])
def test_gradients_are_clipped_after_they_are_unscaled(scaler: LossScale | torch.amp.GradScaler) -> None:
    """pytorch/examples 1196: norm 0.5, scale 65536, clipped to 1 without unscale_."""
    updater, _, given = recorded(Linear(2), loss_scale=scaler, clip_norm=1.0)
    assert updater.update(rows([0.3, 0.4])).grad_norm == pytest.approx(0.5, abs=TOLERANCE)
    assert_close(given[0], [0.3, 0.4])

    model = Linear(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    faulty = torch.amp.GradScaler("cpu", init_scale=65536.0)
    faulty.scale(model(rows([0.3, 0.4])[0]).mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    faulty.step(optimizer)
    assert model.w.norm().item() == pytest.approx(1 / 65536, rel=1e-6)


def test_the_sum_is_clipped_and_not_each_microbatch() -> None:
    """transformers 986: gradients [2, 0] and [0, 2], clipped to 1 after each microbatch."""
    updater, _, given = recorded(Linear(2), 2.0 * MEAN, clip_norm=1.0)
    assert updater.update(rows([2, 0], [0, 2])).grad_norm == pytest.approx(math.sqrt(8), abs=TOLERANCE)
    assert_close(given[0], [2 / (math.sqrt(8) + 1e-6)] * 2)
    assert_close(given[0], [math.sqrt(0.5)] * 2, 1e-6)

    model = Linear(2)
    for microbatch in rows([2, 0], [0, 2]):
        model(microbatch).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert_close(first_gradient(model), [math.sqrt(0.2), math.sqrt(0.8)], 1e-6)


# ------------------------------------------------------------------------------------------------- loss scale


def scale_for(kind: str, scale: float, **settings: Any) -> LossScale | torch.amp.GradScaler:
    if kind == "GradScaler":
        return torch.amp.GradScaler("cpu", init_scale=scale, **settings)
    return LossScale(scale, **settings)


def scale_of(scaler: LossScale | torch.amp.GradScaler) -> float:
    return scaler.scale if isinstance(scaler, LossScale) else scaler.get_scale()


Seen = dict[str, Any]


def updates_under_scales(process_group: Any, kind: str, verdicts: Sequence[bool]) -> Seen:
    """The engine, with scale 1024 on replica 0 and 2048 on replica 1; the last replica brings every inf."""
    replica, replicas = dist.get_rank(process_group), dist.get_world_size(process_group)
    scaler = scale_for(kind, SCALE * 2 ** min(replica, 1))
    schedulers: list[LambdaLR] = []

    def scheduler_of(optimizer: torch.optim.Optimizer) -> LambdaLR:
        schedulers.append(linear_to_zero(optimizer, 10))
        return schedulers[0]

    model = Linear(2)
    updater, _, given = recorded(
        model, loss_scale=scaler, scheduler=scheduler_of, process_group=process_group
    )
    seen: Seen = {"status": [], "used": [], "scale": [], "scheduler": [], "w": []}
    for finite in verdicts:
        bad = not finite and replica == replicas - 1
        result = updater.update(rows([1 + replica, math.inf if bad else 4.0], [1, 2]))
        seen["status"].append(result.status)
        seen["used"].append(result.loss_scale)
        seen["scale"].append(scale_of(scaler))
        seen["scheduler"].append(schedulers[0].last_epoch)
        seen["w"].append(model.w.tolist())
    seen["given"] = [gradient.tolist() for gradient in given]
    return seen


def scaler_per_rank(process_group: Any, verdicts: Sequence[bool]) -> Seen:
    """The faulty loop: each rank has its scaler, and judges what is its own before gradients are averaged."""
    replica, replicas = dist.get_rank(process_group), dist.get_world_size(process_group)
    model = Linear(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE * 2 ** min(replica, 1))
    seen: Seen = {"scale": [], "w": []}
    for finite in verdicts:
        bad = not finite and replica == replicas - 1
        optimizer.zero_grad()
        scaler.scale(model(rows([1 + replica, math.inf if bad else 4.0])[0]).mean()).backward()
        if finite:
            dist.all_reduce(first_gradient(model), dist.ReduceOp.AVG if False else dist.ReduceOp.SUM, process_group)
        scaler.step(optimizer)
        scaler.update()
        seen["scale"].append(scaler.get_scale())
        seen["w"].append(model.w.tolist())
    return seen
