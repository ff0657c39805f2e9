"""The largest microbatch that fits: found on all replicas alike, and nothing is changed by looking for it."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from isostep import OutOfMemoryError, Updater, causal_lm, fitting, groups, mse
from isostep.errors import InputError, PeerError
from isostep.fitting import Budget, longest, search
from isostep.keeping import keep
from isostep.verification.problem import build_examples, build_model
from pool import Pool

MIB = 1 << 20


@pytest.mark.parametrize("at_most", [1, 2, 3, 7, 8, 20])
def test_search_finds_every_limit_in_few_tries(at_most: int) -> None:
    for limit in range(at_most + 3):
        tried: list[int] = []

        def fits(size: int, tried: list[int] = tried, limit: int = limit) -> bool:
            tried.append(size)
            return size <= limit

        assert search(fits, at_most) == min(limit, at_most)
        assert max(tried) <= at_most
        assert len(tried) == len(set(tried)) <= 2 * at_most.bit_length()


class Lengths(list[Any]):
    lengths = (3, 9, 1, 5)


def test_the_longest_examples_by_what_there_is() -> None:
    """Lengths that are given, then those of the data, then those of the examples."""
    data = Lengths([{"input_ids": torch.ones(n), "name": "x" * 50 * n} for n in (2, 1, 7, 4)])
    assert longest(data, 3, [1, 2, 3, 4]) == [3, 2, 1]
    assert longest(data, 3, None) == [1, 3, 0]
    assert longest(list(data), 3, None) == [2, 3, 0]
    assert longest([(torch.ones(1, 9), 5), (torch.ones(4), 5), ([1, 2, 3], 5), (4, 5)], 9, None) == [1, 2, 3, 0]
    assert longest([[1], [1, 2, 3], [1, 2]], 2, None) == [1, 2]
    assert longest([torch.tensor(1.0), torch.tensor(2.0)], 9, None) == [0, 1]


# -------------------------------------------------------------------------------------------- what fits on all


class Limited(nn.Module):
    """The decoder with room for `fits` examples; notes the sizes and lengths that it was tried with."""

    def __init__(self, fits: int) -> None:
        super().__init__()
        self.decoder = build_model(torch.float32)
        self.fits = fits
        self.seen: list[tuple[int, int]] = []

    def forward(self, input_ids: Tensor) -> Tensor:
        self.seen.append((input_ids.shape[0], input_ids.shape[1]))
        if len(input_ids) > self.fits:
            raise torch.OutOfMemoryError("simulated")
        return self.decoder(input_ids)


def _found(group: Any, fits: tuple[int, ...], at_most: int) -> Any:
    model = Limited(fits[dist.get_rank(group)])
    updater = Updater(model, torch.optim.AdamW(model.parameters()), causal_lm, process_group=group)
    data = build_examples(20, 0)
    try:
        found = updater.largest_microbatch(data, at_most=at_most)
    except OutOfMemoryError as error:
        found = str(error)
    assert {length for _, length in model.seen} == {max(len(example["input_ids"]) for example in data)}
    assert max(size for size, _ in model.seen) <= at_most
    model.fits = 100
    update = updater.update(next(iter(groups(data, examples_per_update=20, examples_per_microbatch=10))))
    assert (update.halvings, update.examples_per_microbatch) == (0, 10), "training begins with what it is given"
    return found


@pytest.mark.parametrize(
    ("fits", "at_most", "expected"),
    [
        ((5,), 16, 5),
        ((8, 3), 16, 3),
        ((6, 9, 7), 16, 6),
        ((100, 100), 6, 6),
        ((100,), 64, 20),  # as many as there are
    ],
)
def test_what_fits_on_every_replica(pool: Pool, fits: tuple[int, ...], at_most: int, expected: int) -> None:
    assert pool.run(len(fits), _found, fits, at_most) == [expected] * len(fits)


@pytest.mark.parametrize("fits", [(0,), (4, 0), (4, 0, 4)])
def test_without_room_for_one_example_all_say_so(pool: Pool, fits: tuple[int, ...]) -> None:
    for message in pool.run(len(fits), _found, fits, 8):
        assert message.startswith("memory: got out of memory with 1 example per microbatch, expected room for one; ")


def _fails(group: Any, where: str) -> str:
    class Broken(list[Any]):
        def __getitem__(self, i: Any) -> Any:
            if where == "reading" and dist.get_rank(group) == 1:
                raise OSError("disk gone")
            return super().__getitem__(i)

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if where == "forward" and dist.get_rank(group) == 1:
            raise ValueError("no such token")
        return model(batch["input_ids"])

    model = build_model(torch.float32)
    updater = Updater(model, torch.optim.AdamW(model.parameters()), causal_lm, forward=forward, process_group=group)
    data = build_examples(8 - (where == "data" and updater.replica), 0)
    try:
        return str(updater.largest_microbatch(Broken(data), at_most=4))
    except (OSError, ValueError, PeerError) as error:
        return f"{type(error).__name__}: {error}"


def test_other_errors_reach_every_replica(pool: Pool) -> None:
    for where, said in (("reading", "OSError: disk gone"), ("forward", "ValueError: no such token")):
        other, own = pool.run(2, _fails, where)
        assert own == said
        assert other.startswith("PeerError: replica 1 failed in the search for the largest microbatch")
        assert said in other
    for message in pool.run(2, _fails, "data"):
        assert message.startswith("InputError: longest examples: got ")
    assert pool.run(2, _fails, "nowhere") == ["4", "4"]


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        ([], {"at_most": 1}, "data: got 'list'"),
        (iter([1]), {"at_most": 1}, "data: got 'list_iterator'"),
        ([1], {"at_most": 0}, "at_most: got 0"),
        ([1], {"at_most": 1, "fraction": 0.0}, "fraction: got 0.0"),
    ],
)
def test_what_cannot_be_searched_is_refused(data: Any, options: dict[str, Any], said: str) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(InputError, match=said):
        Updater(model, torch.optim.SGD(model.parameters()), mse).largest_microbatch(data, **options)


# -------------------------------------------------------------------------------------- a try is like training


def test_a_try_finds_gradients_and_optimizer_state_in_memory() -> None:
    """As a second microbatch of any later update does."""
    found: dict[int, tuple[bool, bool]] = {}

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        state = all(p in optimizer.state for p in model.parameters())
        found[len(batch["input_ids"])] = all(p.grad is not None for p in model.parameters()), state
        return model(batch["input_ids"])

    model = build_model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    updater = Updater(model, optimizer, causal_lm, forward=forward)
    assert updater.largest_microbatch(build_examples(8, 0), at_most=4) == 4
    assert found == {1: (True, True), 2: (True, True), 4: (True, True)}


class Drawing(list[Any]):
    """Draws from every generator when an example is read."""

    def __getitem__(self, i: Any) -> Any:
        random.random(), np.random.rand(), torch.rand(())
        return super().__getitem__(i)


class Changing(nn.Module):
    """Draws, counts in one buffer and replaces another whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = build_model(torch.float32)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, input_ids: Tensor) -> Tensor:
        self.count += 1
        self.last = input_ids
        return self.dropout(self.decoder(input_ids))


def _optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _trained(group: Any, name: str, search_before: tuple[int, ...], restoring: bool) -> list[Tensor]:
    """Everything that four updates leave, with searches before some of them; a scheduler and an average included."""
    torch.manual_seed(1 + dist.get_rank(group))
    model = Changing()
    optimizer = _optimizer(name, model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=4)
    average = [torch.zeros_like(p) for p in model.parameters()]
    optimizer.register_step_post_hook(
        lambda *_: torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.5)
    )
    updater = Updater(model, optimizer, causal_lm, scheduler=scheduler, process_group=group)
    data = Drawing(build_examples(16, 1))  # of seed 1, so that no group of this order is without targets
    with pytest.MonkeyPatch.context() as patch:
        if not restoring:
            patch.setattr(fitting, "untouched", _touched)
        for i, data_group in enumerate(groups(data, examples_per_update=4, examples_per_microbatch=2)):
            if i in search_before:
                assert updater.largest_microbatch(data, at_most=3) == 3
                assert updater.totals.attempted == i
            assert updater.update(data_group).status == "applied"
    assert model.count > 0
    state = [value for p in model.parameters() for value in optimizer.state[p].values() if isinstance(value, Tensor)]
    assert state
    learning_rate = torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64)
    return [*(p.detach() for p in model.parameters()), *average, *state, learning_rate, model.count, torch.rand(3)]


@contextmanager
def _touched(*_: Any) -> Iterator[Any]:
    yield lambda: None


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_training_after_a_search_has_the_bits_of_training_without(pool: Pool, replicas: int, name: str) -> None:
    """Before the first update, where optimizers have no state yet, and between two later ones."""
    without = pool.run(replicas, _trained, name, (), True)
    after = pool.run(replicas, _trained, name, (0, 2), True)
    for ours, theirs in zip(after, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for when in (0, 2):
        control = pool.run(replicas, _trained, name, (when,), False)
        assert not any(torch.equal(a, b) for a, b in zip(control[0][:3], without[0][:3], strict=True))


def test_everything_is_put_back_at_once() -> None:
    model = Changing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    updater = Updater(model, optimizer, causal_lm)
    gradients = [torch.ones_like(p) for p in model.parameters()]
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient
    data = Drawing(build_examples(8, 1))
    tensors = {name: (t, t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    drawn = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]

    assert updater.largest_microbatch(data, at_most=2) == 2
    now = model.state_dict(keep_vars=True)
    assert list(now) == list(tensors)
    assert all(now[name] is t and torch.equal(t, before) for name, (t, before) in tensors.items())
    assert model.last is None
    assert not optimizer.state
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert all(bool((gradient == 1).all()) for gradient in gradients)
    assert drawn == (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]

    updater.update(next(iter(groups(data, examples_per_update=8))))  # the control: an update changes all of it
    assert model.count > 0
    assert model.last is not None
    assert optimizer.state
    assert drawn[1] != random.getstate()
    assert drawn[2] != np.random.get_state()[1].tolist()  # type: ignore[index]


def test_state_is_put_back_in_place_whatever_its_shape() -> None:
    tensor, deep = torch.zeros(2), {"a": [torch.zeros(3), (1, "x")], "b": {}}
    inner = deep["a"][0]
    put_back = keep({"t": tensor, "deep": deep})
    tensor.add_(1)
    inner.add_(1)  # type: ignore[union-attr]
    deep["a"] = None  # type: ignore[assignment]
    deep["b"]["new"] = 1  # type: ignore[index]
    before = put_back()
    assert before["t"] is tensor
    assert before["deep"] is deep
    assert tensor.tolist() == [0, 0]
    assert deep["b"] == {}
    assert deep["a"][0] is inner  # type: ignore[index]
    assert deep["a"][1] == (1, "x")  # type: ignore[index]
    assert inner.tolist() == [0, 0, 0]  # type: ignore[union-attr]


# --------------------------------------------------------------------------------------------- memory of a CPU


class Hungry(nn.Module):
    """Takes 4 MiB for each example that it sees, about four times: two factors' worth forward, and their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.tried: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.tried.add(len(x))
        kept = torch.ones(len(x), MIB) * self.w  # float32
        return kept[:, 0] * x


def _hungry(group: Any, available: int, fraction: float) -> tuple[int, set[int]]:
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests have freed would be taken again unseen
    model = Hungry()
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, process_group=group)
    data = [(torch.ones(()), torch.zeros(()))] * 64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "available_bytes", lambda: available)
        found = updater.largest_microbatch(data, at_most=32, fraction=fraction)
    return found, model.tried


@pytest.mark.parametrize("replicas", [1, 2])
def test_on_a_cpu_no_size_is_tried_that_is_predicted_to_need_too_much(pool: Pool, replicas: int) -> None:
    budget = 160 * MIB
    available = 2 * replicas * budget  # of which each replica has its share, and of that half
    for found, tried in pool.run(replicas, _hungry, available, 0.5):
        assert 5 <= found <= 13
        assert max(tried) * 12 * MIB <= budget
    for found, _ in pool.run(replicas, _hungry, 2 * available, 0.5):
        assert found > 13, "with more memory more fits"
    assert [found for found, _ in pool.run(replicas, _hungry, 20 * available, 0.5)] == [32] * replicas


def test_budget_predicts_along_a_straight_line() -> None:
    budget = Budget(limit=100, peaks={0: 20})
    assert budget.allows(1), "nothing is known yet"
    budget.peaks[1] = 30
    assert budget.allows(8)
    assert not budget.allows(9)
    budget.peaks[2] = 50
    assert budget.allows(4)
    assert not budget.allows(5)
    budget.peaks[4] = 45
    assert budget.allows(1000), "peaks that do not grow predict none that do"
