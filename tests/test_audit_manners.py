"""A watch changes nothing that a loop computes, draws no random numbers, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_imported_before
from torch.optim import lr_scheduler
from torch.optim import optimizer as optimizer_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils import data
from torch.utils.checkpoint import checkpoint

from isostep import audit
from isostep.audit.losses import SIGNATURES
from isostep.errors import InputError


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are small, and others run beside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------------ loss functions

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest difference, relative to the largest value: some roundings of each type."""

REDUCTIONS = ("mean", "sum", "none")
LEGACY = tuple({"size_average": a, "reduce": r} for a in (None, True, False) for r in (None, True, False))[1:]

Given = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """Calls of one loss function, with `reduction` left open."""

    function: Any
    given: Callable[[Maker], Given]
    name: str
    reductions: tuple[str, ...] = REDUCTIONS
    dtypes: tuple[torch.dtype, ...] = FLOATS


class Maker:
    """Tensors of a type, the same ones for the same seed. Those that a gradient goes to are listed."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype = dtype
        self.leaves: list[Tensor] = []
        self._generator = torch.Generator().manual_seed(seed)

    def leaf(self, *shape: int, of: Callable[[Tensor], Tensor] = lambda values: values) -> Tensor:
        values = of(torch.randn(shape, generator=self._generator, dtype=torch.float64)).to(self.dtype)
        self.leaves.append(values.requires_grad_())
        return values

    def numbers(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator, dtype=torch.float64).to(self.dtype)

    def classes(self, count: int, *shape: int, ignored: int | None = None) -> Tensor:
        values = torch.randint(count, shape, generator=self._generator)
        return values if ignored is None else values.masked_fill(self.numbers(*shape) < 0.4, ignored)

    def signs(self, *shape: int) -> Tensor:
        return (self.classes(2, *shape) * 2 - 1).to(self.dtype)


def two(*shape: int) -> Callable[[Maker], Given]:
    """An input with gradient and a target of its shape."""
    return lambda m: ((m.leaf(*shape), m.numbers(*shape)), {})


def pair_of(m: Maker, **options: Any) -> Given:
    return (m.leaf(5, 4), m.leaf(5, 4), m.signs(5)), options


def three(m: Maker, **options: Any) -> Given:
    return (m.leaf(5, 4), m.leaf(5, 4), m.leaf(5, 4)), options


def log_probabilities(*shape: int, axis: int = 1) -> Callable[[Maker], Tensor]:
    return lambda m: m.leaf(*shape, of=lambda values: values.log_softmax(axis))


def ctc(m: Maker) -> Given:
    logs = log_probabilities(9, 3, 5, axis=2)(m)
    lengths = torch.tensor([2, 0, 4])
    return (logs, m.classes(4, 3, 4) + 1, torch.tensor([9, 8, 9]), lengths), {"zero_infinity": True}


def distance(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().sum(-1)


WIDE = (torch.float64, torch.float32)
"""For functions that torch has not written for 16 bits on a CPU."""

CASES = [
    *(
        Case(function, two(6, 3), function.__name__)
        for function in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.poisson_nll_loss)
    ),
    *(
        Case(function, two(), f"{function.__name__} of a scalar")
        for function in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
    ),
    *(
        Case(function, two(0, 3), f"{function.__name__} of nothing", ("mean", "sum", "none"))
        for function in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
    ),
    Case(F.mse_loss, lambda m: ((m.leaf(6, 3), m.leaf(6, 3)), {}), "mse_loss of two inputs"),
    Case(F.mse_loss, lambda m: ((m.leaf(6, 3), m.numbers(6, 3)), {"weight": m.numbers(6, 3)}), "mse_loss weighted"),
    Case(F.l1_loss, lambda m: ((m.leaf(6, 3), m.numbers(6, 3)), {"weight": m.numbers(6, 3)}), "l1_loss weighted"),
    Case(
        F.huber_loss, lambda m: ((m.leaf(6, 3), m.numbers(6, 3)), {"weight": m.numbers(6, 3), "delta": 0.3}),
        "huber_loss weighted",
    ),
    Case(F.smooth_l1_loss, lambda m: ((m.leaf(6, 3), m.numbers(6, 3)), {"beta": 0.2}), "smooth_l1_loss beta"),
    Case(F.binary_cross_entropy, lambda m: ((m.leaf(6, of=torch.sigmoid), m.numbers(6)), {}), "binary_cross_entropy"),
    Case(
        F.binary_cross_entropy,
        lambda m: ((m.leaf(6, 2, of=torch.sigmoid), m.numbers(6, 2)), {"weight": m.numbers(2)}),
        "binary_cross_entropy weighted",
    ),
    Case(F.binary_cross_entropy_with_logits, two(6, 3), "binary_cross_entropy_with_logits"),
    Case(
        F.binary_cross_entropy_with_logits,
        lambda m: ((m.leaf(6, 3), m.numbers(6, 3)), {"pos_weight": m.numbers(3) + 1, "weight": m.numbers(6, 1)}),
        "binary_cross_entropy_with_logits pos_weight",
    ),
    Case(
        F.poisson_nll_loss, lambda m: ((m.leaf(6, of=torch.exp), m.numbers(6)), {"log_input": False, "full": True}),
        "poisson_nll_loss full",
    ),
    Case(
        F.gaussian_nll_loss, lambda m: ((m.leaf(6, 3), m.numbers(6, 3), m.leaf(6, 3, of=torch.exp)), {}),
        "gaussian_nll_loss",
    ),
    Case(
        F.gaussian_nll_loss, lambda m: ((m.leaf(6, 3), m.numbers(6, 3), m.leaf(6, 1, of=torch.exp)), {"full": True}),
        "gaussian_nll_loss one variance per row",
    ),
    Case(F.gaussian_nll_loss, lambda m: ((m.leaf(6, 3), m.numbers(6, 3), 0.5), {}), "gaussian_nll_loss a number"),
    Case(F.soft_margin_loss, lambda m: ((m.leaf(6, 3), m.signs(6, 3)), {}), "soft_margin_loss"),
    Case(
        F.multilabel_soft_margin_loss,
        lambda m: ((m.leaf(6, 3), m.classes(2, 6, 3).to(m.dtype)), {"weight": m.numbers(3)}),
        "multilabel_soft_margin_loss",
    ),
    Case(
        F.multilabel_margin_loss,
        lambda m: ((m.leaf(2, 4), torch.tensor([[3, 0, -1, 1], [1, -1, 0, 2]])), {}),
        "multilabel_margin_loss", dtypes=WIDE,
    ),
    Case(
        F.multi_margin_loss, lambda m: ((m.leaf(6, 4), m.classes(4, 6)), {"weight": m.numbers(4)}),
        "multi_margin_loss", dtypes=WIDE,
    ),
    Case(F.multi_margin_loss, lambda m: ((m.leaf(4), m.classes(4)), {}), "multi_margin_loss of a vector", dtypes=WIDE),
    Case(F.margin_ranking_loss, lambda m: ((m.leaf(6), m.leaf(6), m.signs(6)), {"margin": 0.1}), "margin_ranking_loss"),
    Case(F.hinge_embedding_loss, lambda m: ((m.leaf(6, 3), m.signs(6, 3)), {}), "hinge_embedding_loss"),
    Case(F.cosine_embedding_loss, pair_of, "cosine_embedding_loss"),
    Case(F.triplet_margin_loss, three, "triplet_margin_loss"),
    Case(F.triplet_margin_loss, lambda m: three(m, swap=True, p=1.5), "triplet_margin_loss swapped"),
    Case(F.triplet_margin_with_distance_loss, three, "triplet_margin_with_distance_loss"),
    Case(
        F.triplet_margin_with_distance_loss, lambda m: three(m, distance_function=distance),
        "triplet_margin_with_distance_loss of our own",
    ),
    Case(F.cross_entropy, lambda m: ((m.leaf(6, 4), m.classes(4, 6)), {}), "cross_entropy"),
    Case(F.cross_entropy, lambda m: ((m.leaf(4), m.classes(4)), {}), "cross_entropy of one example"),
    Case(F.cross_entropy, lambda m: ((m.leaf(0, 4), m.classes(4, 0)), {}), "cross_entropy of nothing"),
    Case(F.cross_entropy, lambda m: ((m.leaf(6, 4), m.classes(4, 6, ignored=-100)), {}), "cross_entropy ignored"),
    Case(
        F.cross_entropy, lambda m: ((m.leaf(6, 4), torch.full((6,), -100)), {}), "cross_entropy all ignored",
    ),
    Case(
        F.cross_entropy,
        lambda m: ((m.leaf(6, 4), m.classes(4, 6, ignored=2)), {"ignore_index": 2, "weight": m.numbers(4)}),
        "cross_entropy a class ignored, weighted",
    ),
    Case(
        F.cross_entropy,
        lambda m: ((m.leaf(6, 4), m.classes(4, 6, ignored=-1)),
                   {"ignore_index": -1, "weight": m.numbers(4), "label_smoothing": 0.2}),
        "cross_entropy smoothed, weighted, ignored",
    ),
    Case(
        F.cross_entropy,
        lambda m: ((m.leaf(2, 4, 3, 5), m.classes(4, 2, 3, 5, ignored=-100)), {"weight": m.numbers(4)}),
        "cross_entropy of images",
    ),
    Case(
        F.cross_entropy, lambda m: ((m.leaf(6, 4), m.leaf(6, 4, of=lambda v: v.softmax(1))), {}),
        "cross_entropy of probabilities",
    ),
    Case(
        F.cross_entropy,
        lambda m: ((m.leaf(2, 4, 3), m.numbers(2, 4, 3)), {"weight": m.numbers(4), "label_smoothing": 0.1}),
        "cross_entropy of probabilities, weighted, smoothed, of sequences",
    ),
    Case(F.nll_loss, lambda m: ((log_probabilities(6, 4)(m), m.classes(4, 6, ignored=-100)), {}), "nll_loss"),
    Case(
        F.nll_loss,
        lambda m: ((log_probabilities(2, 4, 3, 3)(m), m.classes(4, 2, 3, 3)), {"weight": m.numbers(4)}),
        "nll_loss of images, weighted",
    ),
    Case(
        F.kl_div, lambda m: ((log_probabilities(6, 4)(m), m.numbers(6, 4)), {}), "kl_div", (*REDUCTIONS, "batchmean"),
    ),
    Case(
        F.kl_div, lambda m: ((log_probabilities(6, 4)(m), log_probabilities(6, 4)(m)), {"log_target": True}),
        "kl_div of logarithms", (*REDUCTIONS, "batchmean"),
    ),
    Case(F.ctc_loss, ctc, "ctc_loss", dtypes=WIDE),
    Case(
        F.ctc_loss,
        lambda m: ((log_probabilities(9, 2, 5, axis=2)(m), m.classes(4, 5) + 1, (9, 9), (2, 3)), {}),
        "ctc_loss of one row of targets", dtypes=WIDE,
    ),
    Case(
        F.ctc_loss,
        lambda m: ((log_probabilities(9, 5)(m), m.classes(4, 3) + 1, torch.tensor(9), torch.tensor(3)), {}),
        "ctc_loss of one example", dtypes=WIDE,
    ),
]  # fmt: skip
if hasattr(F, "linear_cross_entropy"):
    CASES += [
        Case(
            F.linear_cross_entropy, lambda m: ((m.leaf(6, 3), m.leaf(4, 3), m.classes(4, 6, ignored=-100)), {}),
            "linear_cross_entropy", dtypes=WIDE,
        ),
        Case(
            F.linear_cross_entropy,
            lambda m: ((m.leaf(6, 3), m.leaf(4, 3), m.classes(4, 6, ignored=1)),
                       {"linear_bias": m.leaf(4), "weight": m.numbers(4), "ignore_index": 1, "label_smoothing": 0.1}),
            "linear_cross_entropy smoothed, weighted, ignored", dtypes=WIDE,
        ),
    ]  # fmt: skip


def value_and_gradients(case: Case, dtype: torch.dtype, options: dict[str, Any]) -> list[Tensor]:
    """The loss, and the gradient of every input for a gradient of the loss that is not 1."""
    maker = Maker(dtype)
    args, kwargs = case.given(maker)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = getattr(F, case.function.__name__)(*args, **kwargs, **options)  # looked up when it is called
    loss.backward((maker.numbers(*loss.shape) + 0.5).to(loss.dtype))
    return [loss.detach(), *(leaf.grad for leaf in maker.leaves if leaf.grad is not None)]


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float, name: str) -> None:
    assert len(ours) == len(theirs), name
    for a, b in zip(ours, theirs, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert torch.equal(a.isfinite(), b.isfinite()), name
        finite = b.isfinite()
        largest = float(b[finite].abs().max()) if finite.any() else 0.0
        apart = float((a[finite].double() - b[finite].double()).abs().max()) if finite.any() else 0.0
        assert apart <= tolerance * largest, f"{name}: {apart / largest:.2g} apart"


def test_every_function_has_a_case() -> None:
    assert {case.function for case in CASES} == set(SIGNATURES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradient_stay(case: Case) -> None:
    """Of every function, reduction and type: what is computed under a watch is what is computed without one."""
    legacy = [dict(way) for way in LEGACY] if "reduce" in SIGNATURES[case.function].parameters else []
    ways = [{"reduction": reduction} for reduction in case.reductions] + legacy
    calls = [(dtype, way) for dtype in case.dtypes for way in ways]
    expected = [value_and_gradients(case, dtype, way) for dtype, way in calls]
    with audit.watch():
        found = [value_and_gradients(case, dtype, way) for dtype, way in calls]
    for (dtype, way), ours, theirs in zip(calls, found, expected, strict=True):
        assert_close(ours, theirs, CLOSE[dtype], f"{case.name} {dtype} {way}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_sum_in_16_bits_stays(dtype: torch.dtype) -> None:
    """Many elements: torch sums them in float32, and so must a watch."""
    case = Case(F.cross_entropy, lambda m: ((m.leaf(5000, 7), m.classes(7, 5000)), {}), "long")
    for reduction in ("mean", "sum"):
        expected = value_and_gradients(case, dtype, {"reduction": reduction})
        with audit.watch():
            found = value_and_gradients(case, dtype, {"reduction": reduction})
        assert_close(found[:1], expected[:1], 1e-3 if dtype == torch.float16 else 8e-3, reduction)


def test_loss_that_needs_no_gradient_stays() -> None:
    scores, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    expected = F.cross_entropy(scores, targets)
    with audit.watch():
        assert torch.equal(F.cross_entropy(scores, targets), expected)
        with torch.no_grad():
            assert torch.equal(F.cross_entropy(scores.requires_grad_(), targets), expected)
        with torch.inference_mode():
            assert torch.equal(F.cross_entropy(scores, targets), expected)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda x: F.cross_entropy(x, torch.tensor([0, 9])), IndexError),
        (lambda x: F.cross_entropy(x, torch.tensor([0])), ValueError),
        (lambda x: F.cross_entropy(x, torch.tensor([0, 1]), reduction="median"), ValueError),
        (lambda x: F.cross_entropy(x), TypeError),
        (lambda x: F.mse_loss(x, torch.zeros(2, 3), reductions="mean"), TypeError),
    ],
    ids=["class", "shape", "reduction", "too few", "unknown"],
)
def test_wrong_call_raises_what_torch_raises(call: Callable[[Tensor], Tensor], error: type[Exception]) -> None:
    scores = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(error) as theirs:
        call(scores)
    with audit.watch(), pytest.raises(error) as ours:
        call(scores)
    assert type(ours.value) is type(theirs.value)


# ------------------------------------------------------------------------------------------------ whole loops


def batches(count: int, seed: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 6, generator=generator), torch.randint(5, (4,), generator=generator)) for _ in range(count)]


def small(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, **options), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 5, **options))


Loop = Callable[[list[float]], nn.Module]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


@loop
def plain(losses: list[float]) -> nn.Module:
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 6)
    for inputs, targets in batches(6):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets, label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return model


@loop
def accumulated(losses: list[float]) -> nn.Module:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    loss_function = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 4, 5]), reduction="sum")
    for k, (inputs, targets) in enumerate(batches(9)):
        loss = loss_function(model(inputs), targets) / 12
        loss.backward()
        losses.append(float(loss.detach()))
        if k % 3 == 2:
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            model.zero_grad()
    return model


@loop
def autocast(losses: list[float]) -> nn.Module:
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for inputs, targets in batches(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model


@loop
def scaled(losses: list[float]) -> nn.Module:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=2)
    for k, (inputs, targets) in enumerate(batches(5)):
        loss = F.nll_loss(model(inputs).log_softmax(1), targets)
        scaler.scale(loss * (float("inf") if k == 1 else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    losses.append(scaler.get_scale())
    return model


@loop
def closure(losses: list[float]) -> nn.Module:
    model = nn.Linear(6, 5)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    for inputs, targets in batches(2):

        def evaluated(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), F.one_hot(targets, 5).float())
            loss.backward()
            return loss

        losses.append(optimizer.step(evaluated).item())
    return model


@loop
def two_optimizers(losses: list[float]) -> nn.Module:
    model = nn.ModuleList([small(), small()])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    for k, (inputs, targets) in enumerate(batches(6)):
        optimizers[k % 2].zero_grad()
        loss = F.binary_cross_entropy_with_logits(model[k % 2](inputs), F.one_hot(targets, 5).float())
        loss.backward()
        optimizers[k % 2].step()
        losses.append(loss.item())
    return model


@loop
def batch_norm_and_loader(losses: list[float]) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    examples = data.TensorDataset(*(torch.cat(parts) for parts in zip(*batches(4), strict=True)))
    for inputs, targets in data.DataLoader(examples, batch_size=6, shuffle=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model


@loop
def attention(losses: list[float]) -> nn.Module:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, _ in batches(3):
        optimizer.zero_grad()
        inputs = F.pad(inputs, (0, 2)).reshape(2, 2, 8)
        loss = F.smooth_l1_loss(model(inputs), inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model


@loop
def penalised(losses: list[float]) -> nn.Module:
    """A gradient of a gradient, and gradients taken by torch.autograd.grad."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches(3):
        optimizer.zero_grad()
        inputs.requires_grad_()
        loss = F.cross_entropy(model(inputs), targets)
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        whole = loss + 0.1 * slope.square().sum()
        whole.backward()
        optimizer.step()
        losses.append(whole.item())
    return model


def ran(function: Loop, context: Any) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Losses, weights and buffers, and the states of the generators afterwards."""
    torch.manual_seed(5)
    losses: list[float] = []
    with context:
        model = function(losses)
    return losses, [value.double() for value in model.state_dict().values()], [torch.get_rng_state()]


@pytest.mark.parametrize("name", LOOPS)
def test_loop_stays(name: str) -> None:
    """Losses, final weights and random numbers, with and without a watch."""
    losses, weights, states = ran(LOOPS[name], nullcontext())
    their_losses, their_weights, their_states = ran(LOOPS[name], audit.watch())
    assert their_losses == pytest.approx(losses, rel=2e-3 if name == "autocast" else 1e-6)
    assert_close(their_weights, weights, 2e-3 if name == "autocast" else 2e-6, name)
    assert all(torch.equal(a, b) for a, b in zip(states, their_states, strict=True))


def test_watch_alone_draws_no_random_numbers() -> None:
    import random

    import numpy as np

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with audit.watch() as seen:
        pass
    assert seen.report().verdict == "not-observed"
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


# ------------------------------------------------------------------------------------------------ nothing is left


def _subclasses(kind: type) -> Iterator[type]:
    yield kind
    for below in kind.__subclasses__():
        yield from _subclasses(below)


def everything() -> dict[Any, dict[str, Any]]:
    """What a watch might replace: the attributes of classes and modules of torch, by owner."""
    owners = [
        torch, Tensor, torch.autograd, torch.autograd.graph, nn.Module, F, nn.utils, nn.utils.clip_grad, torch.amp,
        dist, dist.distributed_c10d, optimizer_module, lr_scheduler, data.dataloader, data.DataLoader,
        torch.utils.checkpoint, nn.parallel.DistributedDataParallel,
        *_subclasses(torch.optim.Optimizer), *_subclasses(lr_scheduler.LRScheduler), *_subclasses(torch.amp.GradScaler),
        *_subclasses(data.dataloader._BaseDataLoaderIter),
    ]  # fmt: skip
    return {owner: dict(vars(owner)) for owner in owners}


def replaced_since(before: Mapping[Any, Mapping[str, Any]]) -> set[tuple[str, str]]:
    now = everything()
    return {
        (owner.__name__, name)
        for owner in before
        for name in before[owner].keys() | now[owner].keys()
        if before[owner].get(name) is not now[owner].get(name)
        and name not in ("__annotations__", "__annotate__", "__abstractmethods__", "_abc_impl")
    }


@contextmanager
def nothing_left_behind(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    before = everything()
    hooks = [optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks]
    counts = [len(known) for known in hooks]
    stack = _get_current_function_mode_stack()
    instance = set(vars(model)), set(vars(optimizer))
    yield
    assert replaced_since(before) == set()
    assert [len(known) for known in hooks] == counts
    assert _get_current_function_mode_stack() == stack
    assert (set(vars(model)), set(vars(optimizer))) == instance
    for parameter in model.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks
    assert not any((m._forward_hooks, m._forward_pre_hooks, m._backward_hooks) != ({}, {}, {}) for m in model.modules())


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def prepared() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that has made a step: torch sets some attributes at its first."""
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_of(model, optimizer, *batches(1)[0])
    return model, optimizer


def test_nothing_is_left_behind() -> None:
    model, optimizer = prepared()
    with nothing_left_behind(model, optimizer):
        before = everything()
        with audit.watch() as seen:
            for inputs, targets in batches(2):
                step_of(model, optimizer, inputs, targets)
            during = replaced_since(before)
            assert all(parameter._backward_hooks for parameter in model.parameters())
        assert seen.report().verdict == "exact"
    assert {
        ("Module", "__call__"),
        ("torch.autograd", "backward"),
        ("Optimizer", "zero_grad"),
        ("GradScaler", "step"),
        ("LRScheduler", "step"),
        ("_BaseDataLoaderIter", "__next__"),
        ("torch.distributed", "init_process_group"),
    } <= during, "the control: these are replaced while a watch is entered"  # fmt: skip


@pytest.mark.parametrize("where", ["forward", "backward", "step", "loop", "enter"])
def test_nothing_is_left_behind_by_an_error(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception wherever it is raised, SystemExit and KeyboardInterrupt alike."""

    class Broken(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            if where == "forward":
                raise KeyboardInterrupt("forward")
            result = super().forward(inputs)
            if where == "backward" and result.requires_grad:
                result.register_hook(broken_hook)
            return result

    def broken_hook(_gradient: Tensor) -> None:
        raise RuntimeError("backward")

    class BrokenSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise SystemExit("step")

    model = Broken(6, 5)
    optimizer = BrokenSGD(model.parameters(), lr=0.1)
    if where == "enter":
        monkeypatch.setattr("isostep.audit.around._Around.replacements", _breaks)
    with nothing_left_behind(model, optimizer):
        watch = audit.watch()
        with pytest.raises(BaseException, match=where), watch:  # noqa: PT012
            if where == "loop":
                raise ValueError("loop")
            step_of(model, optimizer, *batches(1)[0])
        if where == "enter":
            with pytest.raises(RuntimeError, match="nothing to report"):
                watch.report()
        else:
            assert watch.report().verdict == "not-observed", "what was seen before the error can be had"
    monkeypatch.undo()
    inner, steps = prepared()
    with audit.watch() as seen:
        step_of(inner, steps, *batches(1)[0])
    assert seen.report().verdict == "exact", "and another watch sees all"


def _breaks(self: Any) -> Iterator[Any]:
    yield nn.Module, "zero_grad", self.module_zero_grad
    raise RuntimeError("enter")


def test_error_caught_by_the_loop_leaves_the_counters_right() -> None:
    """A loop that drops a microbatch which fails goes on, and is seen as before."""
    model, optimizer = prepared()

    def bad(_gradient: Tensor) -> None:
        raise RuntimeError("no memory")

    with audit.watch() as seen:
        for k, (inputs, targets) in enumerate(batches(4)):
            if k == 1:
                loss = F.cross_entropy(model(inputs), targets)
                loss.register_hook(bad)
                with pytest.raises(RuntimeError, match="no memory"):
                    loss.backward()
                with pytest.raises(RuntimeError, match="mat1 and mat2"):
                    model(inputs[:, :2])
            step_of(model, optimizer, inputs, targets)
    report = seen.report()
    assert (report.verdict, len(report.updates), report.findings) == ("exact", 4, [])


# ------------------------------------------------------------------------------------------------ memory


def test_losses_and_graphs_die_with_the_loop() -> None:
    """Without the help of the garbage collector: memory is free as early as without a watch."""
    model, optimizer = prepared()
    gc.collect()
    gc.disable()
    try:
        with audit.watch():
            for inputs, targets in batches(2):
                hidden = model(inputs)
                loss = F.cross_entropy(hidden, targets)
                saved = hidden.detach().clone()
                kept = hidden * saved
                dead = [weakref.ref(hidden), weakref.ref(loss), weakref.ref(saved)]
                (loss + 0 * kept.sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
                del hidden, loss, inputs, targets, saved, kept
                assert [reference() for reference in dead] == [None] * 3
            scores = model(batches(1)[0][0])
            thrown = F.cross_entropy(scores, batches(1)[0][1])
            dead = [weakref.ref(scores), weakref.ref(thrown)]
            del scores, thrown
            assert [reference() for reference in dead] == [None] * 2, "also one that never goes backward"
    finally:
        gc.enable()


def held() -> tuple[int, int]:
    """Tensors that belong to a graph, and the bytes of all tensors."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(t.grad_fn is not None for t in tensors), sum(storages.values())


@pytest.mark.parametrize("kind", ["updates", "losses without updates", "gradients without an optimizer"])
def test_what_is_kept_of_an_update_is_small(kind: str) -> None:
    """A few sketches, and no tensor of a graph, of a model whose gradients have a megabyte."""
    model = nn.Sequential(nn.Linear(6, 512), nn.Linear(512, 512), nn.Linear(512, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    examples = batches(20)
    with audit.watch():
        for k, (inputs, targets) in enumerate(examples):
            if kind == "updates":
                step_of(model, optimizer, inputs, targets)
            else:
                loss = F.cross_entropy(model(inputs), targets)
                if kind == "gradients without an optimizer":
                    loss.backward()
                del loss
            if k in (9, 19):
                counts.append(held())
    (graphs, size), (graphs_later, size_later) = counts
    assert graphs_later <= graphs
    assert size_later - size <= 10 * (48 << 10)


def test_models_and_optimizers_die() -> None:
    """Of several models trained one after the other under one watch, none is kept."""
    with audit.watch() as seen:
        dead = []
        for _ in range(3):
            model = nn.Linear(6, 5)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for inputs, targets in batches(2):
                step_of(model, optimizer, inputs, targets)
            dead += [weakref.ref(model), weakref.ref(optimizer), *map(weakref.ref, model.parameters())]
            del model, optimizer
        gc.collect()
        assert [reference() for reference in dead] == [None] * len(dead)
    report = seen.report()
    assert (report.verdict, len(report.updates)) == ("exact", 6), report.not_observed


# ------------------------------------------------------------------------------------------------ the watch itself


def test_watch_is_entered_once() -> None:
    watch = audit.watch()
    with watch:
        with pytest.raises(RuntimeError, match="entered before"):
            watch.__enter__()
        with pytest.raises(RuntimeError, match="nothing to report"):
            watch.report()
    with pytest.raises(RuntimeError, match="entered before"):
        watch.__enter__()
    assert watch.report() is watch.report()


def test_two_watches_inside_each_other_see_the_same() -> None:
    model, optimizer = prepared()
    with nothing_left_behind(model, optimizer), audit.watch() as outer, audit.watch() as inner:
        for inputs, targets in batches(2):
            step_of(model, optimizer, inputs, targets)
    assert (outer.report().verdict, inner.report().verdict) == ("exact", "exact")


def test_unknown_weighting_is_refused() -> None:
    with pytest.raises(InputError, match=r"weighting: got 'sentence'"):
        audit.watch("sentence")


def means(divide: float) -> None:
    """Microbatches of 1 and 3 targets, each averaged alone."""
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches(2):
        for part in (slice(0, 1), slice(1, 4)):
            (F.cross_entropy(model(inputs[part]), targets[part], reduction="mean") / divide).backward()
        optimizer.step()
        optimizer.zero_grad()


def sums() -> None:
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in batches(2):
        for part in (slice(0, 1), slice(1, 4)):
            (F.cross_entropy(model(inputs[part]), targets[part], reduction="sum") / 4).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_assert_exact_passes_and_returns_the_report() -> None:
    report = audit.assert_exact(sums)
    assert (report.verdict, len(report.updates), report.exit_code) == ("exact", 2, 0)
    assert audit.assert_exact(sums, weighting="token").weighting == "token"


def test_assert_exact_raises_with_the_report_as_text() -> None:
    with pytest.raises(AssertionError) as raised:
        audit.assert_exact(lambda: means(2))
    text = str(raised.value)
    assert text.startswith("the update is not exact\n")
    for part in ("finding 1: mean-of-means", "verdict: inexact", "test_audit_manners.py:", "1/2", "1/6", "mend"):
        assert part in text
    audit.assert_exact(lambda: means(2), weighting="microbatch")


def test_assert_exact_refuses_what_was_not_seen() -> None:
    with pytest.raises(AssertionError, match="not observed"):
        audit.assert_exact(lambda: None)


def test_assert_exact_lets_an_error_of_the_loop_through() -> None:
    def broken() -> None:
        raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError, match="ours"):
        audit.assert_exact(broken)


# ------------------------------------------------------------------------------------------------ corners of torch


def test_optimizer_that_is_made_anew_on_the_same_model_is_seen() -> None:
    model = nn.Linear(6, 5)
    with audit.watch() as seen:
        for rate in (0.1, 0.01):
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            for inputs, targets in batches(2):
                step_of(model, optimizer, inputs, targets)
    report = seen.report()
    assert (report.verdict, len(report.updates)) == ("exact", 4), report.not_observed


def test_copies_of_model_and_optimizer_are_as_without_a_watch() -> None:
    model, optimizer = prepared()
    with audit.watch() as seen:
        step_of(model, optimizer, *batches(1)[0])
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
        assert not any(parameter._backward_hooks for parameter in twin.parameters())
        for inputs, targets in batches(2):
            step_of(twin, twin_optimizer, inputs, targets)
            step_of(model, optimizer, inputs, targets)
        for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    assert seen.report().verdict == "exact", seen.report().not_observed


def test_copy_of_an_optimizer_is_known_before_its_first_step() -> None:
    model, optimizer = prepared()
    model.zero_grad()
    with audit.watch() as seen:
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
        for inputs, targets in batches(2):
            F.cross_entropy(twin(inputs), targets).backward()
            twin_optimizer.step()
            twin.zero_grad()
    report = seen.report()
    assert (report.verdict, len(report.updates)) == ("exact", 2), report.not_observed


def test_saving_and_pickling_during_a_watch() -> None:
    model, optimizer = prepared()
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    with audit.watch():
        step_of(model, optimizer, *batches(1)[0])
        scheduler.step()
        file = io.BytesIO()
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "s": scheduler.state_dict()}, file
        )
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        scheduler.load_state_dict(loaded["s"])
        again = pickle.loads(pickle.dumps(model))
        torch.save(model, io.BytesIO())
        torch.save(optimizer, io.BytesIO())
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    assert not any(parameter._backward_hooks for parameter in again.parameters())


@pytest.mark.parametrize("whole", [False, True], ids=["layer", "loss"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool, whole: bool) -> None:
    """With the loss outside and inside of what is run again in backward."""

    def losses(context: Any) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(0)
        first, second = nn.Linear(6, 8), nn.Linear(8, 5)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        values = []

        def loss_of(hidden: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(second(hidden.tanh()), targets)

        with context:
            for inputs, targets in batches(3):
                optimizer.zero_grad()
                hidden = first(inputs)
                if whole:
                    loss = checkpoint(loss_of, hidden, targets, use_reentrant=reentrant)
                else:
                    loss = F.cross_entropy(checkpoint(second, hidden, use_reentrant=reentrant), targets)
                loss.backward()
                optimizer.step()
                values.append(loss.item())
        return values, [parameter.detach() for parameter in second.parameters()]

    expected = losses(nullcontext())
    watch = audit.watch()
    found = losses(watch)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert_close(found[1], expected[1], 2e-6, "weights")
    report = watch.report()
    if report.verdict == "not-observed":
        assert whole, report.not_observed
        assert any("known loss function" in reason for reason in report.not_observed)
    else:
        assert (report.verdict, len(report.updates), report.findings) == ("exact", 3, [])


def test_backward_twice_through_one_graph() -> None:
    """retain_graph: each pass adds the gradient once more, and the weights say so."""
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with audit.watch() as seen:
        for inputs, targets in batches(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
    report = seen.report()
    assert sum(row.weight * row.tokens for row in report.updates[0].weights) == pytest.approx(2)


def test_one_loss_used_twice_in_a_sum() -> None:
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with audit.watch() as seen:
        for inputs, targets in batches(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            (0.25 * loss + loss * 0.75).backward()
            optimizer.step()
    report = seen.report()
    assert report.verdict == "exact"
    assert [row.weight for row in report.updates[0].weights] == pytest.approx([0.25])


def test_gradient_of_a_gradient_is_not_called_exact_unseen() -> None:
    """A penalty on the gradient goes through the loss and around it: it changes the update, and is no loss call."""
    watch = audit.watch()
    losses: list[float] = []
    with watch:
        penalised(losses)
    report = watch.report()
    assert report.verdict == "not-observed" or any("penalty" in reason for reason in report.not_observed)


def test_clipping_that_was_imported_before_the_watch_is_no_fault() -> None:
    """`from torch.nn.utils import clip_grad_norm_` at the head of a file is how most loops come by it."""
    model, optimizer = prepared()
    with audit.watch() as seen:
        for inputs, targets in batches(3):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            clip_imported_before(model.parameters(), 0.01)
            optimizer.step()
    assert seen.report().findings == []


def test_unreduced_loss_changed_in_place() -> None:
    def train(context: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(6, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with context:
            for inputs, targets in batches(2):
                optimizer.zero_grad()
                losses = F.cross_entropy(model(inputs), targets, reduction="none")
                losses *= torch.tensor([1.0, 0, 1, 1])
                losses[3] = 0
                losses.sum().div_(2).backward()
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    watch = audit.watch()
    assert_close(train(watch), train(nullcontext()), 1e-6, "weights")
    rows = watch.report().updates[0].weights
    assert [(row.tokens, row.weight) for row in rows] == [(2, pytest.approx(0.5))]


@pytest.mark.parametrize("kind", ["sparse", "complex", "leaf"])
def test_parameters_of_an_odd_kind(kind: str) -> None:
    """Gradients that are sparse, parameters that are complex, or a tensor that is no Parameter."""

    def train(context: Any) -> list[Tensor]:
        torch.manual_seed(0)
        table = nn.EmbeddingBag(10, 5, sparse=True, mode="sum")
        waves = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64))
        leaf = torch.randn(4, 5, requires_grad=True)
        held = {"sparse": [table.weight], "complex": [waves], "leaf": [leaf]}[kind]
        optimizer = torch.optim.SGD(held, lr=0.1)
        with context:
            for k, (_, targets) in enumerate(batches(3)):
                optimizer.zero_grad()
                bags = torch.arange(8).view(4, 2) + k % 2
                scores = {"sparse": lambda b=bags: table(b), "complex": waves.abs, "leaf": leaf.tanh}[kind]()
                F.cross_entropy(scores, targets).backward()
                optimizer.step()
        return [torch.view_as_real(p.detach()) if p.is_complex() else p.detach() for p in held]

    watch = audit.watch()
    assert_close(train(watch), train(nullcontext()), 1e-6, kind)
    report = watch.report()
    assert (report.verdict, len(report.updates), report.findings) == ("exact", 3, [])


def test_tensor_that_an_optimizer_holds_can_be_saved() -> None:
    """torch warns of hooks that it does not save, and a warning is an error here."""
    leaf = torch.randn(4, 5, requires_grad=True)
    optimizer = torch.optim.SGD([leaf], lr=0.1)
    with audit.watch():
        F.mse_loss(leaf, torch.zeros(4, 5)).backward()
        optimizer.step()
        file = io.BytesIO()
        torch.save(leaf, file)
        assert not copy.deepcopy(leaf)._backward_hooks
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), leaf)


def test_saved_tensors_are_unpacked_as_often_as_without_a_watch() -> None:
    """Unpacking may compute a layer again, or bring a tensor back from another device."""

    def unpacked(context: Any) -> int:
        count = 0

        def unpack(value: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return value

        model, optimizer = prepared()
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), model)
        with context:
            for inputs, targets in batches(2):
                with torch.autograd.graph.saved_tensors_hooks(lambda value: value, unpack):
                    hidden = model(inputs) * torch.rand(4, 5)
                    loss = F.cross_entropy(hidden, targets) * torch.tensor(0.5) + hidden.square().mean()
                loss.backward()
                optimizer.step()
        return count

    # an elementwise loss and its reduction: the division by the count keeps one more
    assert unpacked(audit.watch()) - unpacked(nullcontext()) <= 2


def test_backward_from_a_gradient_edge() -> None:
    model, _ = prepared()
    model.zero_grad()
    with audit.watch():
        for inputs, targets in batches(2):
            loss = F.cross_entropy(model(inputs), targets)
            torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss), torch.tensor(1.0))
        torch.autograd.backward((F.mse_loss(model(inputs), torch.zeros(4, 5)),), grad_tensors=(torch.tensor(2.0),))
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_optimizers_that_step_within_backward_are_not_accused() -> None:
    """One per parameter, in a hook: the weights cannot be read, and nothing is lost."""
    model = nn.Linear(6, 5)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step)
    with audit.watch() as seen:
        for inputs, targets in batches(3):
            F.cross_entropy(model(inputs), targets).backward()
    report = seen.report()
    assert report.findings == []
    assert report.verdict == ("not-observed" if report.not_observed else "exact")


def test_optimizer_that_failed_once_is_seen_again() -> None:
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise MemoryError("of the state")
            return super().step(closure)

    model = nn.Linear(6, 5)
    optimizer = Failing(model.parameters(), lr=0.1)
    with audit.watch() as seen:
        for k, (inputs, targets) in enumerate(batches(4)):
            optimizer.fails = k == 1
            with pytest.raises(MemoryError) if k == 1 else nullcontext():
                step_of(model, optimizer, inputs, targets)
    report = seen.report()
    assert len(report.updates) == 3
    assert [finding.kind for finding in report.findings] in ([], ["lost-microbatch"]), "one is lost, as it was"


def test_models_without_data() -> None:
    """On the meta device, as it is used to count what a model needs."""
    with audit.watch():
        model = nn.Linear(6, 5, device="meta")
        loss = F.cross_entropy(model(torch.empty(4, 6, device="meta")), torch.empty(4, 5, device="meta"))
        loss.backward()
        assert "meta" in f"{loss}"


def test_functions_of_torch_func() -> None:
    """vmap, grad and their composition compute what they do without a watch."""
    inputs, targets = batches(1)[0]
    weight = torch.randn(5, 6)

    def loss(weight: Tensor, one: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(one, weight), target)

    def all_ways() -> list[Tensor]:
        gradient = torch.func.grad(loss)(weight, inputs, targets)
        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weight, inputs, targets)
        values = torch.func.vmap(loss, in_dims=(None, 0, 0))(weight, inputs, targets)
        leaf = weight.clone().requires_grad_()
        batched = torch.func.vmap(loss, in_dims=(None, 0, 0))(leaf, inputs, targets)
        batched.mean().backward()
        _, tangent = torch.func.jvp(lambda w: loss(w, inputs, targets), (weight,), (weight,))
        shown = torch.func.vmap(lambda row: (f"{row}", row.sum())[1])(inputs)
        return [gradient, each, values, batched.detach(), leaf.grad, tangent, shown]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # of torch, where forward mode is loaded
        expected = all_ways()
    with audit.watch():
        found = all_ways()
    assert_close(found, expected, 1e-6, "torch.func")


def test_double_backward_of_an_input_gradient_under_functional_call() -> None:
    model, _ = prepared()
    inputs, targets = batches(1)[0]
    with audit.watch():
        values = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
        loss = F.cross_entropy(torch.func.functional_call(model, values, (inputs,)), targets)
        loss.backward()
    assert values["weight"].grad is not None
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_tracing_goes_on() -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(6, 5)

        def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.line(inputs), targets)

    model = Trained()
    inputs, targets = batches(1)[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        with audit.watch():
            traced = torch.jit.trace(model, (inputs, targets))
        other, labels = batches(2)[1]
    assert torch.allclose(traced(other, labels), model(other, labels))
    assert torch.allclose(traced(other, (labels + 1) % 5), model(other, (labels + 1) % 5))


@pytest.fixture
def compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


BACKENDS = ["eager", pytest.param("aot_eager", marks=pytest.mark.grid)]


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_model_is_seen(backend: str) -> None:
    """The loss outside of what is compiled."""

    def values(context: Any) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        run = torch.compile(model, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with context:
            return [step_of(run, optimizer, inputs, targets).item() for inputs, targets in batches(3)]

    expected = values(nullcontext())
    torch._dynamo.reset()
    watch = audit.watch()
    assert values(watch) == pytest.approx(expected, rel=1e-6)
    report = watch.report()
    assert (report.verdict, len(report.updates)) == ("exact", 3), report.not_observed


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("before", [False, True], ids=["inside", "before"])
def test_compiled_loss_is_seen_or_named(backend: str, before: bool) -> None:
    """A loss within what is compiled, under the watch or before it: weights are exact, or they are not observed."""
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend=backend)
    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), targets)

    def train() -> list[float]:
        values = []
        for inputs, targets in batches(3):
            optimizer.zero_grad()
            loss = loss_of(inputs, targets)
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        return values

    state = copy.deepcopy(model.state_dict())
    expected = train()
    model.load_state_dict(state)
    if not before:
        torch._dynamo.reset()
    with audit.watch() as seen:
        assert train() == pytest.approx(expected, rel=1e-6)
    model.load_state_dict(state)
    assert train() == pytest.approx(expected, rel=1e-6), "and what was compiled under the watch is fit to be used"
    report = seen.report()
    if report.verdict == "not-observed":
        assert any("compiled" in reason for reason in report.not_observed)
    else:
        assert (report.verdict, len(report.updates), backend) == ("exact", 3, "eager")


def test_loader_with_workers() -> None:
    model, optimizer = prepared()
    inputs, targets = (torch.cat(parts) for parts in zip(*batches(4), strict=True))
    loader = data.DataLoader(data.TensorDataset(inputs, targets), batch_size=4, num_workers=2)
    with audit.watch() as seen:
        for some, labels in loader:
            step_of(model, optimizer, some, labels)
    report = seen.report()
    assert (report.verdict, len(report.updates), report.findings) == ("exact", 4, [])


def test_forward_passes_of_other_threads_do_not_disturb() -> None:
    """One that is under way all the time, and many short ones."""
    inside, done = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    class Slow(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            inside.set()
            assert done.wait(30)
            return super().forward(inputs)

    def slow() -> None:
        with torch.no_grad():
            Slow(6, 5)(torch.randn(4, 6))

    def many() -> None:
        other = small()
        try:
            while not done.is_set():
                F.mse_loss(other(torch.randn(4, 6)), torch.zeros(4, 5)).backward()
        except BaseException as error:
            errors.append(error)

    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected: list[tuple[int, int]] = []
    for background in (None, slow, many):
        done.clear()
        thread = threading.Thread(target=background or (lambda: None), daemon=True)
        passes: list[threading.Thread] = []
        with audit.watch() as seen:
            seen.capture.before_pass = lambda passes=passes: passes.append(threading.current_thread())
            thread.start()
            assert background is not slow or inside.wait(30)
            for inputs, targets in batches(3):
                for part in (slice(0, 1), slice(1, 4)):
                    (F.cross_entropy(model(inputs[part]), targets[part], reduction="sum") / 4).backward()
                optimizer.step()
                optimizer.zero_grad()
            done.set()
            thread.join(30)
        assert not errors, errors
        assert set(passes) == {threading.current_thread()}, "a loop is stopped where it runs, and nowhere else"
        report = seen.report()
        rows = [(row.microbatch_index, row.tokens) for update in report.updates for row in update.weights]
        expected = expected or rows
        assert (report.verdict, rows) == ("exact", expected), (background, report.not_observed)


def test_watch_in_another_thread_than_the_loop_says_that_it_saw_nothing() -> None:
    model, optimizer = prepared()
    with audit.watch() as seen:
        thread = threading.Thread(target=lambda: step_of(model, optimizer, *batches(1)[0]))
        thread.start()
        thread.join()
    report = seen.report()
    assert report.verdict == "not-observed"
    assert report.not_observed
