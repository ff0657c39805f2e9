"""Every layout gives the gradient of the torch-only reference; the same composition gives the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from isostep import Term, Updater, causal_lm, groups, mse, token_cross_entropy
from isostep.distributed import reduce
from isostep.distributed.traffic import watched
from isostep.models.decoder import Decoder, DecoderConfig
from isostep.verification.grid import Options, verify_worker
from isostep.verification.problem import COEFFICIENT, build_examples, build_model, objective
from isostep.verification.reference import gradient_error, reference_update
from pool import Pool

ALL_LAYOUTS = tuple((m, replicas) for m in (1, 2, 3, 4, 5, 13) for replicas in (1, 2, 3, 4))
COVERING = ((1, 1), (3, 1), (1, 2), (13, 2), (2, 3), (5, 3), (3, 4), (4, 4))


def _verify(_: Any, options: Options, bucket_bytes: int | None) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        if bucket_bytes is not None:
            patch.setattr(reduce, "BUCKET_BYTES", bucket_bytes)
        return verify_worker(options)


def _assert_passed(pool: Pool, options: Options) -> None:
    document = pool.run(pool.size, _verify, options, None, timeout=100)[0]
    assert document["passed"], [report for report in document["layouts"] if not report["ok"]]
    assert len(document["layouts"]) == len(options.layouts)
    assert document["control"]["factor"] >= 1000


@pytest.mark.parametrize(
    ("overlap", "ddp", "dtype", "num_examples"),
    [
        (False, False, torch.float64, 13),
        (True, True, torch.float64, 13),
        (False, True, torch.float32, 16),
        (True, False, torch.float32, 5),
    ],
)
def test_covering_layouts(pool: Pool, overlap: bool, ddp: bool, dtype: torch.dtype, num_examples: int) -> None:
    _assert_passed(pool, Options(COVERING, num_examples, overlap=overlap, ddp=ddp, dtype=dtype))


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("num_examples", "seed"), [(2, 0), (5, 1), (13, 2), (16, 3)])
def test_all_layouts(pool: Pool, num_examples: int, seed: int, overlap: bool, ddp: bool, dtype: torch.dtype) -> None:
    _assert_passed(pool, Options(ALL_LAYOUTS, num_examples, seed=seed, overlap=overlap, ddp=ddp, dtype=dtype))


@pytest.mark.parametrize("bucket_bytes", [1, 3000, 20000])
def test_any_bucket_size(pool: Pool, bucket_bytes: int) -> None:
    """Down to one tensor per bucket, whose gradient collectives are then as small as votes."""
    options = Options(((2, 2), (3, 3), (13, 3)), overlap=bucket_bytes != 3000)
    for report in pool.run(pool.size, _verify, options, bucket_bytes)[0]["layouts"]:
        assert report["gradient_error"]["max"] <= 1e-12
        assert not [p for p in report["problems"] if "bytes" not in p and "small" not in p]


# -------------------------------------------------------------------------------------------- golden numbers


class Scalar(nn.Module):
    """w, whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand_as(x)


def _scalar(group: Any, targets: list[list[float]]) -> float:
    """w after one update from w = 1 on (w - y)^2 / 2 at learning rate 0.1; each replica has its own targets."""
    model = Scalar()
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), 0.5 * mse, process_group=group)
    mine = torch.tensor(targets[updater.replica], dtype=torch.float64)
    updater.update([(torch.zeros_like(mine), mine)])
    return model.w.item()


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ([[0.0], [2.0], [4.0]], 1.1),
        ([[0.0], [2.0], [4.0] * 4], 1.2),  # the mean of replica means would give 1.1
        ([[0.0]], 0.9),
        ([[2.0]], 1.1),
        ([[4.0]], 1.3),
    ],
)
def test_golden_numbers_of_replicas(pool: Pool, targets: list[list[float]], expected: float) -> None:
    assert pool.run(len(targets), _scalar, targets) == pytest.approx([expected] * len(targets), abs=1e-15)


def _vector(group: Any) -> list[float]:
    """Weights [5, 5] after one update with gradients [1, 3] on one replica and [3, 1] on the other, averaged."""
    weights = nn.Parameter(torch.tensor([5.0, 5.0], dtype=torch.float64))
    model = nn.ParameterList([weights])
    term = Term("sum", lambda outputs, batch: outputs, lambda batch: 1)
    updater = Updater(
        model, torch.optim.SGD([weights], lr=0.1), term, forward=lambda m, x: (m[0] * x).sum(), process_group=group
    )
    gradient = torch.tensor([[1.0, 3.0], [3.0, 1.0]][updater.replica], dtype=torch.float64)
    updater.update([gradient])
    return weights.tolist()


def test_golden_numbers_of_vectors(pool: Pool) -> None:
    for weights in pool.run(2, _vector):
        assert weights == pytest.approx([4.8, 4.8], abs=1e-15)


# ------------------------------------------------------------------------------------- one process, to the bit


def _textbook(model: nn.Module, optimizer: torch.optim.Optimizer, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """The loop of a textbook: sum losses over all targets divided by their number, one optimizer call."""
    total = sum(int((targets != -100).sum()) for _, targets in pairs)
    optimizer.zero_grad()
    for inputs, targets in pairs:
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum") / total
        loss.backward()
    optimizer.step()


def _pairs(num: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Microbatches of inputs and aligned targets; unequal counts, and one microbatch without any target."""
    generator = torch.Generator().manual_seed(seed)
    pairs = []
    for i in range(num):
        inputs = torch.randint(61, (2, 5 + i), generator=generator)
        targets = torch.randint(61, (2, 5 + i), generator=generator)
        targets[torch.rand(targets.shape, generator=generator) < 0.2 * i] = -100
        pairs.append((inputs, targets if i != 1 else torch.full_like(targets, -100)))
    return pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_textbook_loop_to_the_bit(dtype: torch.dtype, make: Callable[..., torch.optim.Optimizer]) -> None:
    theirs = build_model(dtype)
    ours, mine = copy.deepcopy(theirs), copy.deepcopy(theirs)
    optimizer, control = make(theirs.parameters(), lr=0.01), make(mine.parameters(), lr=0.01)
    updater = Updater(ours, make(ours.parameters(), lr=0.01), token_cross_entropy(shift=False))
    for i in range(3):
        pairs = _pairs(4, seed=i)
        _textbook(theirs, optimizer, pairs)
        assert updater.update(pairs).status == "applied"
        _textbook(mine, control, pairs[:-1])
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(mine.parameters(), ours.parameters(), strict=True))


def _train_bits(group: Any, overlap: bool, seed: int) -> list[Tensor]:
    model = build_model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    updater = Updater(model, optimizer, objective(), overlap=overlap, process_group=group)
    for data_group in groups(build_examples(20, 0), examples_per_update=7, examples_per_microbatch=2, seed=seed):
        updater.update(data_group)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("replicas", "overlap"), [(1, False), (2, False), (3, True)])
def test_same_layout_twice_to_the_bit(pool: Pool, replicas: int, overlap: bool) -> None:
    first = pool.run(replicas, _train_bits, overlap, 0)
    again = pool.run(replicas, _train_bits, overlap, 0)
    other = pool.run(replicas, _train_bits, overlap, 1)
    for weights in (*first, *again):
        assert all(torch.equal(a, b) for a, b in zip(weights, first[0], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(other[0], first[0], strict=True))


def _replayed(group: Any, examples_per_microbatch: int, first_fails: bool) -> list[Tensor]:
    """Weights after two updates; the first attempt of the first runs out of memory half-way, if asked for."""
    model = WithDropout().float()
    calls = 0

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        if first_fails and calls == 2:
            raise torch.OutOfMemoryError("simulated")
        return model(batch["input_ids"])

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    updater = Updater(model, optimizer, causal_lm, forward=forward, process_group=group)
    data = build_examples(16, 0)
    for data_group in groups(data, examples_per_update=16, examples_per_microbatch=examples_per_microbatch, epochs=2):
        updater.update(data_group)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("replicas", [1, 2])
def test_replay_of_the_same_composition_to_the_bit(pool: Pool, replicas: int) -> None:
    """4 examples halved to 2 after a failed attempt, dropout included, are as if there had been 2 from the start."""
    replayed = pool.run(replicas, _replayed, 4, True)
    direct = pool.run(replicas, _replayed, 2, False)
    control = pool.run(replicas, _replayed, 4, False)
    for weights in (*replayed, *direct):
        assert all(torch.equal(a, b) for a, b in zip(weights, direct[0], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(control[0], direct[0], strict=True))


# ------------------------------------------------------------------------------------------- particular groups


class Parts(nn.Module):
    """Two parameters, of which a batch uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in ("left", "right", "never")})

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return sum((self.parts[name] * x).sum() for name, x in batch.items() if name in self.parts)  # type: ignore[return-value]


PARTS = Term("sum", lambda outputs, batch: outputs, lambda batch: 1)


def _unused(group: Any, overlap: bool) -> tuple[dict[str, list[float]], list[str]]:
    """Replica 0 touches "left", replica 1 touches "right"; nobody touches "never"."""
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    had: list[str] = []
    optimizer.register_step_pre_hook(
        lambda *_: had.extend(name for name, p in model.parts.items() if p.grad is not None)
    )
    updater = Updater(model, optimizer, PARTS, forward=lambda m, batch: m(batch), overlap=overlap, process_group=group)
    name = "left" if updater.replica == 0 else "right"
    updater.update([{name: torch.full((3,), 2.0)}])
    return {name: p.tolist() for name, p in model.parts.items()}, had


@pytest.mark.parametrize("overlap", [False, True])
def test_parameter_that_some_or_no_replica_uses(pool: Pool, overlap: bool) -> None:
    """Weight decay must reach a parameter that any replica used, and none that nobody did."""
    for weights, had in pool.run(2, _unused, overlap):
        assert weights == {"left": [-0.5] * 3, "right": [-0.5] * 3, "never": [1.0] * 3}
        assert sorted(had) == ["left", "right"]


def _empty_term(group: Any) -> tuple[float, dict[str, float | None], float]:
    poison = Term("poison", lambda outputs, _: outputs.logsumexp(-1).sum() * float("nan"), lambda _: 0)
    model = build_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients: dict[str, Tensor] = {}
    optimizer.register_step_pre_hook(
        lambda *_: gradients.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    )
    updater = Updater(model, optimizer, [*objective(), poison], process_group=group)
    examples = build_examples(9, 0)
    reference = reference_update(build_model(torch.float64), examples, COEFFICIENT, 1e9)
    result = updater.update(next(iter(groups(examples, examples_per_update=9, examples_per_microbatch=2))))
    return gradient_error(gradients, reference.gradients)[0], result.terms, result.denominators["poison"]


def test_term_that_is_empty_in_the_whole_group(pool: Pool) -> None:
    for error, terms, denominator in pool.run(2, _empty_term):
        assert error <= 1e-12
        assert terms["poison"] is None
        assert denominator == 0


def _tied(group: Any) -> float:
    """Error of the gradient norm, where embedding and head are one parameter."""
    config = DecoderConfig(61, 24, width=16, depth=1, heads=2, tie_embeddings=True)
    model, same = Decoder(config).double(), Decoder(config).double()
    examples = build_examples(6, 0)
    reference = reference_update(same, examples, 0.0, 1e9)
    norm = torch.stack([g.square().sum() for g in reference.gradients.values()]).sum().sqrt().item()
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), causal_lm, process_group=group)
    result = updater.update(next(iter(groups(examples, examples_per_update=6, examples_per_microbatch=1))))
    assert result.grad_norm is not None
    return abs(result.grad_norm - norm) / norm


def test_shared_parameter_counts_once_in_the_norm(pool: Pool) -> None:
    assert max(pool.run(2, _tied)) <= 1e-12


# ------------------------------------------------------------------------------------------------- randomness


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = build_model(torch.float64)

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.dropout(self.decoder(input_ids), 0.5, self.training)


def _dropout(group: Any, examples_per_microbatch: int) -> list[Tensor]:
    model = WithDropout()
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=1.0), causal_lm, seed=3, process_group=group)
    torch.manual_seed(updater.replica)
    before = torch.get_rng_state()
    for data_group in groups(
        build_examples(12, 0), examples_per_update=6, examples_per_microbatch=examples_per_microbatch, seed=0
    ):
        updater.update(data_group)
    assert torch.equal(torch.get_rng_state(), before)
    return [p.detach().clone() for p in model.parameters()]


def test_draws_follow_the_examples_and_not_the_replica(pool: Pool) -> None:
    """Dropout repeats at another D with the same microbatches; at another m it differs, which is the control."""
    alone = pool.run(1, _dropout, 2)[0]
    for weights in pool.run(3, _dropout, 2):
        assert max((a - b).abs().max().item() for a, b in zip(weights, alone, strict=True)) <= 1e-12
    other = pool.run(1, _dropout, 3)[0]
    assert max((a - b).abs().max().item() for a, b in zip(other, alone, strict=True)) > 1e-4


# ------------------------------------------------------------------------------------------------ collectives


def _collectives(group: Any, overlap: bool) -> tuple[int, int, int]:
    model = build_model(torch.float32)
    updater = Updater(
        model, torch.optim.SGD(model.parameters(), lr=0.1), causal_lm, overlap=overlap, process_group=group
    )
    with watched() as traffic:
        for data_group in groups(build_examples(16, 0), examples_per_update=16, examples_per_microbatch=1):
            updater.update(data_group)
    return (
        traffic.small_calls,
        traffic.large_bytes,
        sum(p.numel() * p.element_size() for p in model.parameters()),
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_two_small_collectives_and_gradients_once(pool: Pool, overlap: bool) -> None:
    for small_calls, large_bytes, gradient_bytes in pool.run(2, _collectives, overlap):
        assert small_calls == 2
        assert large_bytes == gradient_bytes


class Synchronisations(TorchDispatchMode):
    """Counts the operators that make the host wait for a device: reading a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.item)
        return func(*args, **(kwargs or {}))


def test_no_synchronisation_per_microbatch() -> None:
    """Counts known on the host: what is read of tensors does not grow with the number of microbatches."""
    term = Term("sum", lambda outputs, batch: outputs.square().sum(), lambda batch: batch.numel())
    model = nn.Linear(3, 3)
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), term, clip_norm=1.0)

    def reads(num_microbatches: int) -> int:
        with Synchronisations() as mode:
            updater.update([torch.ones(2, 3)] * num_microbatches)
        return mode.count

    assert reads(1) == reads(7)
    with Synchronisations() as control:
        torch.ones(()).item()
    assert control.count == 1
