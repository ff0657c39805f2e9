"""Faults of optimizer, scheduler, loss scale, memory and log that public code has shown.

Every test of one also runs the faulty loop, in plain torch, and must see its fault. Sources are named by
repository and number of the issue or pull request.
"""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
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
KINDS = ("LossScale", "GradScaler")

Scaler = LossScale | torch.amp.GradScaler
Seen = dict[str, Any]


class Linear(nn.Module):
    """An example is a vector of slopes and its output slopes @ w, so its gradient IS its slopes."""

    def __init__(self, width: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(width, dtype=dtype))

    def forward(self, slopes: Tensor) -> Tensor:
        return slopes.to(self.w.dtype) @ self.w


MEAN = Term("mean", lambda outputs, batch: outputs.sum(), lambda batch: len(batch))
"""The mean of the outputs, whose gradient is the mean of the examples' slopes."""


def microbatches_of(*slopes: Sequence[float]) -> list[Tensor]:
    """A microbatch per example."""
    return [torch.tensor([values], dtype=torch.float64) for values in slopes]


def recorded(
    model: nn.Module, objective: Term = MEAN, **settings: Any
) -> tuple[Updater, torch.optim.Optimizer, list[Tensor]]:
    """An Updater, its optimizer, and a list that gets the first parameter's gradient in each applied update.

    settings: of the Updater, but `scheduler` is a function of the optimizer.
    """
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


def scaler_of(kind: str, scale: float, **settings: Any) -> Scaler:
    if kind == "GradScaler":
        return torch.amp.GradScaler("cpu", init_scale=scale, **settings)
    return LossScale(scale, **settings)


def numbers_of(scaler: Scaler) -> tuple[float, int]:
    """The scale, and how many applied updates it has seen in a row."""
    if isinstance(scaler, LossScale):
        return scaler.scale, scaler.applied_in_a_row
    state = scaler.state_dict()
    return state["scale"], state["_growth_tracker"]


# -------------------------------------------------------------------------------------------------- scheduler


def linear_to_zero(optimizer: torch.optim.Optimizer, updates: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda done: max(0.0, 1 - done / updates))


def test_a_scheduler_counts_updates_not_microbatches() -> None:
    """accelerate 963: A = 4, linear to 0 over 250 updates, but stepped in every microbatch."""
    updater, optimizer, _ = recorded(Linear(1), scheduler=lambda o: linear_to_zero(o, 250))
    rates = [updater.update(microbatches_of([1], [2], [3], [4])).learning_rates[0] for _ in range(250)]
    assert rates == [1 - done / 250 for done in range(250)]
    assert optimizer.param_groups[0]["lr"] == 0

    model = Linear(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = linear_to_zero(optimizer, 250)
    faulty_rates = []
    for _ in range(250):
        faulty_rates.append(optimizer.param_groups[0]["lr"])
        for microbatch in microbatches_of([1], [2], [3], [4]):
            (model(microbatch).mean() / 4).backward()
            optimizer.step()
            scheduler.step()
    assert sum(rate > 0 for rate in faulty_rates) == math.ceil(250 / 4)


def rates_of_engine(process_group: Any, updates: int) -> list[float]:
    """The learning rate of every update of the engine, and the one after the last."""
    updater, optimizer, _ = recorded(
        Linear(1), scheduler=lambda o: linear_to_zero(o, updates), process_group=process_group
    )
    rates = [updater.update(microbatches_of([1], [2])).learning_rates[0] for _ in range(updates)]
    return [*rates, optimizer.param_groups[0]["lr"]]


def rates_per_rank(process_group: Any, updates: int) -> list[float]:
    """The faulty loop: the scheduler is stepped once per rank in every update."""
    model = DistributedDataParallel(Linear(1), process_group=process_group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = linear_to_zero(optimizer, updates)
    rates = []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        model(microbatches_of([1])[0]).mean().backward()
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
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    updater, optimizer, given = recorded(Linear(1), scheduler=lambda o: linear_to_zero(o, 10), loss_scale=scaler)
    for slope, status, done in ((math.inf, "skipped", 0), (1.0, "applied", 1)):
        assert updater.update(microbatches_of([slope])).status == status
        assert updater.state_dict()["schedulers"][0]["last_epoch"] == done
        assert (optimizer.param_groups[0]["lr"], len(given)) == (1 - done / 10, done)

    model = Linear(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = linear_to_zero(optimizer, 10)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(model(microbatches_of([math.inf])[0]).mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    with pytest.warns(UserWarning, match=r"lr_scheduler\.step\(\)"):
        scheduler.step()
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"], model.w.item()) == (1, 0.9, 0.0)


class TwoParts(nn.Module):
    """The gradient of `a` is the mean of an example's first slope, that of `b` of its second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Linear(1), Linear(1)

    def forward(self, slopes: Tensor) -> Tensor:
        return self.a(slopes[:, :1]) + self.b(slopes[:, 1:])

    def weights(self) -> list[float]:
        return [self.a.w.item(), self.b.w.item()]


def test_several_optimizers_and_their_schedulers_move_together_or_not_at_all() -> None:
    model = TwoParts()
    optimizers = [
        torch.optim.SGD(model.a.parameters(), lr=1.0),
        torch.optim.SGD(model.b.parameters(), lr=0.5),
    ]
    schedulers = [linear_to_zero(optimizer, 4) for optimizer in optimizers]
    updater = Updater(model, optimizers, MEAN, scheduler=schedulers, loss_scale=LossScale(SCALE))
    groups = ([1, 1], [1, math.inf], [math.inf, 1], [1, 1])
    results = [updater.update(microbatches_of(slopes, [3, 5])) for slopes in groups]
    assert [result.status for result in results] == ["applied", "skipped", "skipped", "applied"]
    assert [result.learning_rates for result in results] == [(1.0, 0.5), *[(0.75, 0.375)] * 3]
    assert [scheduler.last_epoch for scheduler in schedulers] == [2, 2]
    assert model.weights() == [-2 * (1 + 0.75), -3 * (0.5 + 0.375)]

    # A GradScaler judges per optimizer: the one without the inf moves alone.
    model = TwoParts()
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in (model.a, model.b)]
    scaler.scale(model(microbatches_of([1, math.inf])[0]).mean()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert model.weights() == [-1.0, 0.0]


# --------------------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_clipped_after_they_are_unscaled(kind: str) -> None:
    """pytorch/examples 1196: norm 0.5, scale 65536, clipped to 1 without unscale_."""
    updater, _, given = recorded(Linear(2), loss_scale=scaler_of(kind, 65536.0), clip_norm=1.0)
    assert updater.update(microbatches_of([0.3, 0.4])).grad_norm == pytest.approx(0.5, abs=TOLERANCE)
    assert_close(given[0], [0.3, 0.4])

    model = Linear(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    faulty = torch.amp.GradScaler("cpu", init_scale=65536.0)
    faulty.scale(model(microbatches_of([0.3, 0.4])[0]).mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    faulty.step(optimizer)
    assert model.w.norm().item() == pytest.approx(1 / 65536, rel=1e-6)


def test_the_sum_is_clipped_and_not_each_microbatch() -> None:
    """transformers 986: gradients [2, 0] and [0, 2], clipped to 1 after each microbatch."""
    updater, _, given = recorded(Linear(2), 2.0 * MEAN, clip_norm=1.0)
    assert updater.update(microbatches_of([2, 0], [0, 2])).grad_norm == pytest.approx(math.sqrt(8), abs=TOLERANCE)
    assert_close(given[0], [2 / (math.sqrt(8) + 1e-6)] * 2)
    assert_close(given[0], [math.sqrt(0.5)] * 2, 1e-6)

    model = Linear(2)
    for microbatch in microbatches_of([2, 0], [0, 2]):
        model(microbatch).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert_close(first_gradient(model), [math.sqrt(0.2), math.sqrt(0.8)], 1e-6)


# ------------------------------------------------------------------------------------------------- loss scale


def batch_of(replica: int, *, finite: bool) -> Tensor:
    """Two slopes per example; not finite, the last of replica 1 is inf."""
    return microbatches_of([1 + replica, 4.0 if finite or replica != 1 else math.inf])[0]


def updates_under_scales(process_group: Any, kind: str, verdicts: Sequence[bool]) -> Seen:
    """The engine, with scale 1024 on replica 0 and 2048 on the others; replica 1 brings every inf."""
    replica = dist.get_rank(process_group)
    scaler = scaler_of(kind, SCALE * 2 ** min(replica, 1))
    model = Linear(2)
    updater, optimizer, given = recorded(
        model, loss_scale=scaler, scheduler=lambda o: linear_to_zero(o, 10), process_group=process_group
    )
    seen: Seen = {"status": [], "used": [], "scale": [], "rate": [], "w": []}
    for finite in verdicts:
        result = updater.update([batch_of(replica, finite=finite)])
        seen["status"].append(result.status)
        seen["used"].append(result.loss_scale)
        seen["scale"].append(numbers_of(scaler)[0])
        seen["rate"].append(optimizer.param_groups[0]["lr"])
        seen["w"].append(model.w.tolist())
    return {**seen, "given": [gradient.tolist() for gradient in given]}


def scaler_per_rank(process_group: Any, finite: bool, judge_first: bool) -> tuple[list[float], float]:
    """The faulty loop: a scaler per rank, which judges its own gradients before they are added up, or the sums.

    Returns the weights and the scale after one update.
    """
    replica = dist.get_rank(process_group)
    model = Linear(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE * 2 ** min(replica, 1))
    scaler.scale(model(batch_of(replica, finite=finite)).mean()).backward()
    if judge_first:
        scaler.unscale_(optimizer)
    dist.all_reduce(first_gradient(model), group=process_group)
    scaler.step(optimizer)
    scaler.update()
    return model.w.tolist(), scaler.get_scale()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_share_one_scale_and_one_verdict(pool: Pool, kind: str, replicas: int) -> None:
    """pytorch 136009, Megatron-Bridge 5591: scales 1024 and 2048, inf on one rank, and replicas that diverge."""
    seen = pool.run(replicas, updates_under_scales, kind, [True, False, True])
    mean = pytest.approx([1 + (replicas - 1) / 2, 4.0], abs=TOLERANCE)
    for replica in seen:
        assert replica["status"] == ["applied", "skipped", "applied"]
        assert replica["used"] == [1024, 1024, 512]
        assert replica["scale"] == [1024, 512, 512]
        assert replica["rate"] == [0.9, 0.9, 0.8]
        assert replica["given"] == [mean, mean]
        assert [-w for w in replica["w"][0]] == mean
        assert replica["w"][1] == replica["w"][0]
        assert replica["w"] == seen[0]["w"]

    (w0, _), (w1, _) = pool.run(2, scaler_per_rank, True, False)
    assert w0 == [2 * w for w in w1]
    (w0, scale0), (w1, scale1) = pool.run(2, scaler_per_rank, False, True)
    assert (w0[1], w1[1]) == (-math.inf, 0.0)
    assert (scale0, scale1) == (1024, 1024)


def half_precision_inputs(replica: int, *, finite: bool) -> tuple[Tensor, Tensor]:
    """Inputs and targets; not finite, an input of replica 1 is beyond the largest float16."""
    return torch.tensor([[1.0, 1.0 if finite or replica != 1 else 1e5]]), torch.tensor([[0.75]])


def half_precision_model() -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, 0.25)
    return model


def half_precision_updates(process_group: Any) -> Seen:
    """The engine in float16, with a loss scale that it made itself: an inf on replica 1, then none."""
    model = half_precision_model()
    updater, optimizer, given = recorded(
        model,
        mse,
        precision="float16",
        scheduler=lambda o: linear_to_zero(o, 10),
        process_group=process_group,
    )
    seen: Seen = {"status": [], "scale": [], "rate": [], "w": []}
    for finite in (False, True):
        seen["status"].append(updater.update([half_precision_inputs(updater.replica, finite=finite)]).status)
        seen["scale"].append(updater.state_dict()["loss_scale"]["scale"])
        seen["rate"].append(optimizer.param_groups[0]["lr"])
        seen["w"].append(model.weight.flatten().tolist())
    return {**seen, "given": [gradient.tolist() for gradient in given]}


def half_precision_alone(process_group: Any) -> list[float]:
    """The faulty loop: each rank judges its own float16 gradients, and skips alone."""
    model = half_precision_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    inputs, wanted = half_precision_inputs(dist.get_rank(process_group), finite=False)
    with torch.autocast("cpu", torch.float16):
        loss = F.mse_loss(model(inputs), wanted.half())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    return model.weight.flatten().tolist()


@pytest.mark.parametrize("replicas", [2, 3])
def test_inf_in_float16_on_one_replica_skips_the_update_on_all(pool: Pool, replicas: int) -> None:
    seen = pool.run(replicas, half_precision_updates)
    for replica in seen:
        assert replica["status"] == ["skipped", "applied"]
        assert replica["scale"] == [32768, 32768]
        assert replica["rate"] == [1.0, 0.9]
        assert len(replica["given"]) == 1
        assert replica["given"][0][0] == pytest.approx([-0.5, -0.5], rel=2**-10)
        assert replica["w"][0] == [0.25, 0.25]
        assert replica["w"] == seen[0]["w"]
    assert pool.run(2, half_precision_alone) == [[0.75, 0.75], [0.25, 0.25]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("scale", "settings"),
    [
        (SCALE, {"growth_interval": 3}),
        (SCALE, {"growth_interval": 2, "growth_factor": 4.0, "backoff_factor": 0.25}),
        (2.0**126, {"growth_interval": 1}),
    ],
)
def test_the_scale_moves_as_in_torch(kind: str, scale: float, settings: dict[str, Any]) -> None:
    """Over random verdicts, scale, tracker and weights after every update are those of a GradScaler by hand.

    The last case grows up to the largest power of two in float32.
    """
    scaler = scaler_of(kind, scale, **settings)
    model = Linear(1)
    updater, _, _ = recorded(model, loss_scale=scaler)
    by_hand = Linear(1)
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=1.0)
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=scale, **settings)
    draw = random.Random(3)
    scales = []
    for _ in range(60):
        batch = microbatches_of([1.0 if draw.random() < 0.75 else math.inf])[0]
        result = updater.update([batch])
        torch_scaler.scale(by_hand(batch).mean()).backward()
        torch_scaler.step(optimizer)
        torch_scaler.update()
        optimizer.zero_grad()
        assert numbers_of(scaler) == numbers_of(torch_scaler)
        assert model.w.item() == by_hand.w.item()
        assert (result.status == "applied") == math.isfinite(batch.item())
        scales.append(torch_scaler.get_scale())
    assert any(a < b for a, b in pairwise(scales))
    assert any(a > b for a, b in pairwise(scales))


@pytest.mark.parametrize("kind", KINDS)
def test_the_scale_goes_on_from_a_state_dict(kind: str) -> None:
    """Loaded after two of three applied updates, it grows in the third, as without the break."""

    def fresh() -> tuple[Updater, Scaler]:
        scaler = scaler_of(kind, SCALE, growth_interval=3)
        return recorded(Linear(1), loss_scale=scaler)[0], scaler

    first, scaler = fresh()
    for slope in (math.inf, 1, 1):
        first.update(microbatches_of([slope]))
    assert numbers_of(scaler) == (512, 2)
    second, scaler = fresh()
    second.load_state_dict(first.state_dict())
    assert numbers_of(scaler) == (512, 2)
    assert second.update(microbatches_of([1])).loss_scale == 512
    assert numbers_of(scaler) == (1024, 0)
    without, scaler = fresh()
    without.update(microbatches_of([1]))
    assert numbers_of(scaler) == (1024, 1)


def test_a_grad_scaler_that_is_restored_after_the_updater_was_built_is_taken_up() -> None:
    """The usual order on resume: build everything, then load every state."""
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=3)
    updater, _, _ = recorded(Linear(1), loss_scale=scaler)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0, "_growth_tracker": 1})
    assert updater.state_dict()["loss_scale"]["scale"] == 8
    assert updater.update(microbatches_of([1])).loss_scale == 8
    assert numbers_of(scaler) == (8, 2)
    assert updater.update(microbatches_of([1])).status == "applied"
    assert numbers_of(scaler) == (16, 0)


def test_a_loss_scale_has_a_state_of_its_own() -> None:
    before = LossScale(2.0, 4.0, 0.25, 7, 3)
    after = LossScale()
    after.load_state_dict(before.state_dict())
    assert after == before
    assert LossScale() != before


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_is_skipped_at_any_scale_is_an_error(kind: str) -> None:
    model = Linear(1)
    scaler = scaler_of(kind, 2.0**-22)
    updater, _, given = recorded(model, loss_scale=scaler)
    assert [updater.update(microbatches_of([math.inf])).status for _ in range(2)] == ["skipped"] * 2
    with pytest.raises(NonFiniteError, match="non-finite at any scale"):
        updater.update(microbatches_of([math.inf]))
    assert (given, model.w.item(), model.w.grad) == ([], 0.0, None)

    by_hand = torch.amp.GradScaler("cpu", init_scale=2.0**-22)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(200):
        by_hand.scale(model(microbatches_of([math.inf])[0]).mean()).backward()
        by_hand.step(optimizer)
        by_hand.update()
    assert by_hand.get_scale() == 0.0  # it skips for ever, and says nothing


# -------------------------------------------------------------------------------------------------- precision


def updates_in_low_precision(process_group: Any, num_gradients: int) -> tuple[Tensor, float]:
    """Gradient of a bfloat16 weight, and its norm: 1 in one microbatch, then 1e-3 in each of the others."""
    num_microbatches = num_gradients + 1
    model = Linear(1, torch.bfloat16)
    updater, _, given = recorded(model, float(num_microbatches) * MEAN, process_group=process_group)
    microbatches = microbatches_of([1.0], *[[1e-3]] * num_gradients)
    result = updater.update(microbatches[updater.replica :: updater.replicas])
    assert result.grad_norm is not None
    return given[0], result.grad_norm


@pytest.mark.parametrize("replicas", [1, 2])
def test_gradients_of_low_precision_are_summed_in_float32(pool: Pool, replicas: int) -> None:
    """pytorch 106395: 1e-3 added to 1.0 in bfloat16, 256 times, is 1.0."""
    summed = 1.0 + 256 * float(torch.tensor(1e-3).bfloat16())
    for gradient, norm in pool.run(replicas, updates_in_low_precision, 256):
        assert norm == summed
        assert gradient.dtype == torch.bfloat16
        assert gradient.item() == torch.tensor(1.256).bfloat16().item()

    model = Linear(1, torch.bfloat16)
    for microbatch in microbatches_of([1.0], *[[1e-3]] * 256):
        model(microbatch).sum().backward()
    assert first_gradient(model).item() == 1.0


def test_bfloat16_autocast_sums_losses_in_float32() -> None:
    """257 losses of 1: their sum in bfloat16 is 256."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    seen: list[torch.dtype] = []
    model.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.dtype))
    updater, _, given = recorded(model, mse, precision="bfloat16")
    batch = (torch.ones(257, 1), torch.zeros(257, 1))
    with torch.autocast("cpu", torch.bfloat16):
        faulty_sum = model(batch[0]).square().sum().item()
    result = updater.update([batch, (torch.ones(1, 1), torch.ones(1, 1))])
    assert seen == [torch.bfloat16] * 3
    assert result.terms == {"mse": 257 / 258}
    assert given[0].dtype == torch.float32
    assert given[0].item() == pytest.approx(2 * 257 / 258, rel=2**-8)
    assert faulty_sum == 256


# ----------------------------------------------------------------------------------------- traffic and memory


def engine_collectives(process_group: Any, accumulate: int, overlap: bool) -> list[int]:
    """Bytes of every collective in the engine's second update, of `accumulate` microbatches per replica."""
    updater, _, _ = recorded(Linear(256), overlap=overlap, process_group=process_group)
    microbatches = microbatches_of(*[[1.0] * 256] * accumulate)
    updater.update(microbatches)
    with watched() as traffic:
        updater.update(microbatches)
    return traffic.calls


def ddp_collectives(process_group: Any, accumulate: int, around_forward: bool) -> list[int]:
    """Bytes of every collective of DDP, with `no_sync` around backward alone or around forward too."""
    model = DistributedDataParallel(Linear(256), process_group=process_group)

    def summed(state, bucket):
        work = dist.all_reduce(bucket.buffer(), group=process_group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, summed)
    with watched() as traffic:
        for i, microbatch in enumerate(microbatches_of(*[[1.0] * 256] * accumulate)):
            silent = model.no_sync if i < accumulate - 1 else nullcontext
            with silent() if around_forward else nullcontext():
                loss = model(microbatch).mean()
                with nullcontext() if around_forward else silent():
                    loss.backward()
    return traffic.calls


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_gradients_travel_once_per_update(pool: Pool, accumulate: int, overlap: bool) -> None:
    """accelerate 1726: `no_sync` around backward alone, A = 4, and an all-reduce in every microbatch."""
    for calls in pool.run(2, engine_collectives, accumulate, overlap):
        assert [nbytes for nbytes in calls if nbytes >= SMALL_BYTES] == [256 * 8]
        assert len(calls) <= (4 if overlap else 3)
    assert pool.run(2, ddp_collectives, accumulate, False) == [[256 * 8] * accumulate] * 2
    assert pool.run(2, ddp_collectives, accumulate, True) == [[256 * 8]] * 2


class Marker:
    """Something to keep in a graph and to watch."""


class Marked(torch.autograd.Function):
    """Identity; its node in the graph holds a marker, which lives exactly as long."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, marker: Marker) -> Tensor:
        ctx.marker = marker
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Watching(Linear):
    """At the start of a forward, `alive` gets how many graphs, outputs and losses of earlier ones remain."""

    def __init__(self) -> None:
        super().__init__(1)
        self.alive: list[tuple[int, int, int]] = []
        self.graphs: list[weakref.ref[Marker]] = []
        self.outputs: list[weakref.ref[Tensor]] = []
        self.losses: list[weakref.ref[Tensor]] = []

    def forward(self, slopes: Tensor) -> Tensor:
        watched = (self.graphs, self.outputs, self.losses)
        graphs, outputs, losses = (sum(ref() is not None for ref in refs) for refs in watched)
        self.alive.append((graphs, outputs, losses))
        marker = Marker()
        values = Marked.apply(super().forward(slopes), marker)
        self.graphs.append(weakref.ref(marker))
        self.outputs.append(weakref.ref(values))
        return values

    def loss_sum(self, outputs: Tensor, batch: Tensor) -> Tensor:
        loss = outputs.sum()
        self.losses.append(weakref.ref(loss))
        return loss


def test_nothing_of_a_microbatch_is_kept_for_the_next() -> None:
    """horovod 641: `total_loss += loss` keeps the graph of every microbatch."""
    model = Watching()
    updater, _, _ = recorded(model, Term("mean", model.loss_sum, len))
    results = [updater.update(microbatches_of([1], [2], [3], [4])) for _ in range(2)]
    assert model.alive == [(0, 0, 0)] * 8
    assert [result.loss for result in results] == [0.0, -2.5 * 2.5]

    model = Watching()
    total_loss: Tensor | float = 0.0
    for microbatch in microbatches_of([1], [2], [3], [4]):
        loss = model.loss_sum(model(microbatch), microbatch)
        loss.backward()
        total_loss = total_loss + loss
    assert [graphs for graphs, _, _ in model.alive] == [0, 1, 2, 3]


# -------------------------------------------------------------------------------------------------- batchnorm


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, momentum=0.1)

    def forward(self, values: Tensor) -> Tensor:
        return self.norm(values)


def test_batchnorm_is_refused_unless_it_is_allowed() -> None:
    """pytorch 46516: microbatches of zeros and of twos move the running mean to 0.2, one of both to 0.1."""
    zeros, twos = torch.zeros(2, 1), torch.full((2, 1), 2.0)
    model = Normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(InputError, match="batchnorm in norm"):
        Updater(model, optimizer, mse)
    assert Updater(model.eval(), optimizer, mse).update([(zeros, zeros), (twos, twos)]).status == "applied"

    def running_mean(*microbatches: Tensor) -> float:
        model = Normalised()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        updater = Updater(model, optimizer, mse, allow=("batchnorm",))
        assert updater.update([(values, values) for values in microbatches]).status == "applied"
        assert model.norm.running_mean is not None
        return model.norm.running_mean.item()

    assert running_mean(torch.cat([zeros, twos])) == pytest.approx(0.1)
    assert running_mean(zeros, twos) == pytest.approx(0.2)  # the difference that is refused

    # BatchNorm in a plain loop does the same, and says nothing.
    by_hand = Normalised()
    for microbatch in (zeros, twos):
        by_hand(microbatch)
    assert by_hand.norm.running_mean is not None
    assert by_hand.norm.running_mean.item() == pytest.approx(0.2)


# -------------------------------------------------------------------------------------------------------- log


def model_and_microbatches(losses: Sequence[float], sizes: Sequence[int]) -> tuple[Linear, list[Tensor]]:
    """Microbatches with these mean losses and numbers of examples."""
    model = Linear(1)
    nn.init.ones_(model.w)
    return model, [torch.full((size, 1), loss) for loss, size in zip(losses, sizes, strict=True)]


def logged_loss(process_group: Any, losses: Sequence[float], sizes: Sequence[int]) -> float | None:
    """The engine's loss of a group."""
    model, microbatches = model_and_microbatches(losses, sizes)
    updater, _, _ = recorded(model, process_group=process_group)
    return updater.update(microbatches[updater.replica :: updater.replicas]).loss


Log = Callable[[float, float, int], float]
"""(what is logged so far, loss of this microbatch, A) -> what is logged."""


def last_over_a(logged: float, loss: float, accumulate: int) -> float:
    return loss / accumulate


def last_alone(logged: float, loss: float, accumulate: int) -> float:
    return loss


def mean_of_means(logged: float, loss: float, accumulate: int) -> float:
    return logged + loss / accumulate


@pytest.mark.parametrize(
    ("losses", "sizes", "right", "faulty", "seen"),
    [
        pytest.param([4, 2], [1, 1], 3, last_over_a, 1, id="allennlp 4706"),
        pytest.param([1, 2, 3, 6], [1] * 4, 3, last_alone, 6, id="nanochat 52"),
        pytest.param([2, 4], [512, 1536], 3.5, mean_of_means, 3, id="unequal microbatches"),
    ],
)
def test_the_loss_is_that_of_the_whole_group(
    pool: Pool,
    losses: list[float],
    sizes: list[int],
    right: float,
    faulty: Log,
    seen: float,
) -> None:
    for replicas in (1, 2, 3):
        assert pool.run(replicas, logged_loss, losses, sizes) == [right] * replicas

    model, microbatches = model_and_microbatches(losses, sizes)
    logged = 0.0
    for microbatch in microbatches:
        loss = model(microbatch).mean()
        (loss / len(microbatches)).backward()
        logged = faulty(logged, loss.item(), len(microbatches))
    assert logged == seen
