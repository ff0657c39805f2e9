"""Corners in which an update was, or could be, quietly wrong: memory layouts, wrappers, randomness, settings."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from isostep import InputError, LossScale, NonFiniteError, Term, Updater, groups, mse, pad_batch, ready_groups
from isostep.distributed import reduce
from pool import Pool

SUM = Term("sum", lambda outputs, batch: outputs.sum(), lambda batch: 1)


def _flat(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()]).tolist()


# ------------------------------------------------------------------------------------------- memory layouts


def _channels_last(group: Any, bucket_bytes: int, overlap: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    images = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    term = Term("s", lambda outputs, batch: outputs.square().sum(), len)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce, "BUCKET_BYTES", bucket_bytes)
        updater = Updater(model, optimizer, term, overlap=overlap, process_group=group)
        share = images.chunk(updater.replicas)[updater.replica]
        for _ in range(2):
            updater.update(list(share.split(1)))
    return _flat(model)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_fused_optimizer_on_channels_last_parameters(pool: Pool, bucket_bytes: int, overlap: bool) -> None:
    """A fused optimizer walks parameter and gradient linearly, so the gradient needs the parameter's strides."""
    alone = pool.run(1, _channels_last, bucket_bytes, False)[0]
    for weights in pool.run(2, _channels_last, bucket_bytes, overlap):
        assert weights == pytest.approx(alone, abs=1e-5)


class TwoViews(nn.Module):
    """Behind the views of two parameters that are added up, autograd hands both one gradient storage."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2, 2))
        self.b = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.a.view(4) + self.b) * x).sum()


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 1, 1, 1)])
def test_parameters_whose_gradients_share_memory(sizes: tuple[int, ...]) -> None:
    x = torch.arange(16.0).view(4, 4)
    model = TwoViews()
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=1.0), SUM, clip_norm=1.0)
    updater.update(list(x.split(list(sizes))))
    reference = TwoViews()
    reference(x).backward()
    expected = torch.cat([p.grad.flatten().clone() for p in reference.parameters() if p.grad is not None])
    expected = -expected / expected.norm()
    assert _flat(model) == pytest.approx(expected.tolist(), abs=1e-5)


# ------------------------------------------------------------------------------------------------- wrappers


def _pending_forward(group: Any, overlap: bool) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    alone = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model, process_group=group)
    updater = Updater(wrapped, torch.optim.SGD(model.parameters(), lr=1.0), mse, overlap=overlap, process_group=group)
    pairs = [(torch.full((1, 3), float(i)), torch.ones(1, 2).double()) for i in range(5)]
    pairs = [(x.double(), y) for x, y in pairs]
    wrapped(pairs[0][0])  # without a backward: the wrapper is now waiting for one
    updater.update(pairs[:3] if updater.replica == 0 else pairs[3:])
    loss = sum(((alone(x) - y) ** 2).sum() for x, y in pairs) / 10
    loss.backward()  # type: ignore[union-attr]
    with torch.no_grad():
        for p in alone.parameters():
            assert p.grad is not None
            p -= p.grad
    return _flat(model), _flat(alone)


@pytest.mark.parametrize("overlap", [False, True])
def test_wrapper_that_waits_for_a_backward_does_not_reduce(pool: Pool, overlap: bool) -> None:
    for ours, reference in pool.run(2, _pending_forward, overlap):
        assert ours == pytest.approx(reference, abs=1e-12)


def _nested(group: Any) -> str:
    model = nn.Sequential(DistributedDataParallel(nn.Linear(2, 2), process_group=group))
    with pytest.raises(InputError) as caught:
        Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, process_group=group)
    return str(caught.value)


def test_wrapper_inside_a_model_is_refused(pool: Pool) -> None:
    for message in pool.run(2, _nested):
        assert "'0': got 'DistributedDataParallel'" in message


def test_sparse_and_complex_parameters_are_refused() -> None:
    for model in (nn.Embedding(3, 2, sparse=True), nn.Linear(2, 2, dtype=torch.complex64)):
        with pytest.raises(InputError, match=r"sparse|complex64"):
            Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), mse)


# ----------------------------------------------------------------------------------------------- randomness


class Draws(nn.Module):
    """Keeps what it drew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.drawn.append(torch.rand(()).item())
        return self.w * x


def _draws(group: Any, how: str) -> list[float]:
    model = Draws()
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), SUM, process_group=group)
    batches = [torch.ones(1) for _ in range(6)]
    if how == "lists":
        for i in range(0, 6, 2):
            updater.update(batches[i : i + 2])
    else:
        for ready in ready_groups(DataLoader(batches, batch_size=1), microbatches_per_replica=2):  # type: ignore[arg-type]
            updater.update(ready)
    return model.drawn


@pytest.mark.parametrize("how", ["lists", "ready_groups"])
def test_batches_without_ids_draw_anew_in_every_update_and_replica(pool: Pool, how: str) -> None:
    drawn = [value for values in pool.run(2, _draws, how) for value in values]
    assert len(set(drawn)) == len(drawn) == 12
    assert [value for values in pool.run(2, _draws, how) for value in values] == drawn  # keyed: repeatable


class Augmented:
    """A data set that draws when it is read."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Tensor:
        return torch.rand(1)


def _augmented(group: Any) -> dict[tuple[int, int], float]:
    seen: dict[tuple[int, int], float] = {}
    model = Draws()
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.0), SUM, process_group=group)
    values: list[float] = []
    model.register_forward_pre_hook(lambda _, args: values.append(args[0].item()))
    for g in groups(Augmented(), examples_per_update=2, examples_per_microbatch=1, epochs=2):
        mine = g.group.microbatches_of(updater.replica, updater.replicas)
        updater.update(g)
        seen.update({(g.epoch, ids[0]): value for ids, value in zip(mine, values[-len(mine) :], strict=True)})
    return seen


def test_draws_while_loading_differ_by_example_and_epoch_and_not_by_layout(pool: Pool) -> None:
    alone = pool.run(1, _augmented)[0]
    assert len(alone) == 12
    assert len(set(alone.values())) == 12
    shared: dict[tuple[int, int], float] = {}
    for part in pool.run(2, _augmented):
        shared.update(part)
    assert shared == alone


# ------------------------------------------------------------------------------------------- low precision


def test_frozen_and_later_unfrozen_low_precision_parameters() -> None:
    """As with adapters on a bfloat16 model. Sums of what is trainable now are in float32."""
    model = Draws().bfloat16()
    frozen = nn.Module()
    frozen.model, frozen.base = model, nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
    updater = Updater(
        frozen, torch.optim.SGD(frozen.parameters(), lr=1.0), SUM, forward=lambda m, x: m.model.w * x + m.base.sum() * x
    )
    assert updater.update([torch.ones(1)]).status == "applied"
    assert frozen.base.tolist() == [1.0, 1.0]
    frozen.base.requires_grad_()
    with torch.no_grad():
        frozen.base.zero_()
    updater.update([torch.ones(1)] + [torch.full((1,), 1e-3)] * 256)  # in bfloat16, 1 + 1e-3 is 1
    # every microbatch counts 1, so the sum 1.256 is divided by 257
    assert frozen.base[0].item() == pytest.approx(-1.256 / 257, rel=1e-2)
    assert not any(p._post_accumulate_grad_hooks for p in frozen.parameters())


@pytest.mark.parametrize("scaled", [False, True])
def test_sum_that_overflows_when_it_is_rounded_to_float16(scaled: bool) -> None:
    """Finite in float32 at 1e5, inf in float16: nothing may be applied."""
    model = nn.Linear(1, 1, bias=False).half()
    before = _flat(model)
    scale = LossScale(scale=1.0) if scaled else None
    term = Term("sum", lambda outputs, batch: outputs.float().sum(), lambda batch: 1e-5)
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=1e-6), term, loss_scale=scale)
    batches = [torch.ones(1, 1).half()]
    if scaled:
        assert updater.update(batches).status == "skipped"
    else:
        with pytest.raises(NonFiniteError):
            updater.update(batches)
    assert _flat(model) == before


# ---------------------------------------------------------------------------------------- targets and padding


def test_float_targets_of_unequal_length_are_refused_and_not_padded() -> None:
    pairs = [(torch.ones(n, 4), torch.ones(n, 2)) for n in (1, 3)]
    with pytest.raises(InputError, match="padding would count as targets"):
        pad_batch(pairs)
    labels = pad_batch([(torch.ones(n), torch.ones(n, dtype=torch.uint8)) for n in (1, 3)])[1]
    assert labels.tolist() == [[1, -100, -100], [1, 1, 1]]


# ----------------------------------------------------------------------------------------- replicas that differ


def _expect(group: Any, case: str) -> str:
    rank = dist.get_rank(group)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + (case == "lr") * rank))
    data = [(torch.ones(2), torch.zeros(2))] * (8 if case != "data" else 8 - 4 * rank)
    try:
        updater = Updater(model, optimizer, mse, clip_norm=1.0 + (case == "clip_norm") * rank, process_group=group)
        if case == "frozen":
            model.bias.requires_grad_(rank == 0)
        if case == "size":
            updater.evaluate(data[: 8 - rank])
        if case == "evaluate" and rank == 0:
            updater.evaluate(data)
        for g in groups(data, examples_per_update=4, examples_per_microbatch=2, seed=(case == "order") * rank):
            updater.update(g)
    except InputError as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("lr", "optimizers: got"),
        ("clip_norm", "clip_norm: got"),
        ("data", "different groups"),
        ("order", "different groups"),
        ("frozen", "different trainable parameters"),
        ("size", "evaluation data"),
        ("evaluate", "different calls"),
    ],
)
def test_replicas_that_differ_all_say_so(own_pool: Pool, case: str, message: str) -> None:
    for said in own_pool.run(2, _expect, case):
        assert message in said
    assert own_pool.run(2, _expect, "none") == ["went on"] * 2 if case != "evaluate" else True


@pytest.fixture(scope="module")
def own_pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


def test_world_without_a_process_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match="init_process_group"):
        Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), mse)


def test_parameters_added_later_and_an_optimizer_given_twice_are_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    with pytest.raises(InputError, match="same one twice"):
        Updater(model, [optimizer, optimizer], mse)
    updater = Updater(model, optimizer, mse)
    optimizer.add_param_group({"params": [model.bias]})
    with pytest.raises(InputError, match="parameters added"):
        updater.update([(torch.ones(1, 2), torch.ones(1, 2))])


def _loader_fails(group: Any) -> str:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(4):
            if i == 2 and dist.get_rank(group) == 1:
                raise OSError("worker gone")
            yield torch.ones(1, 2), torch.zeros(1, 2)

    model = nn.Linear(2, 2)
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, process_group=group)
    applied = 0
    try:
        for ready in ready_groups(batches(), microbatches_per_replica=1):
            applied += updater.update(ready).status == "applied"
    except Exception as error:
        return f"{applied} {type(error).__name__}: {error}"
    return "went on"


def test_error_of_one_replicas_loader_reaches_everybody(own_pool: Pool) -> None:
    other, own = own_pool.run(2, _loader_fails)
    assert own == "2 OSError: worker gone"
    assert other.startswith("2 PeerError: replica 1 failed in the count phase")
