"""One replica fails, falls behind or runs out of memory: all agree, nothing is half applied, nobody hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from isostep import OutOfMemoryError, Updater, causal_lm, groups, mse
from isostep.data.groups import DataGroup
from isostep.errors import InputError, PeerError, PeerLostError
from isostep.models.decoder import Decoder
from isostep.verification.problem import COEFFICIENT, build_examples, build_model, objective
from isostep.verification.reference import gradient_error, reference_update
from pool import Pool, WorkerError


def _group(num_examples: int = 8, examples_per_microbatch: int = 2) -> DataGroup:
    plan = groups(
        build_examples(num_examples, 0),
        examples_per_update=num_examples,
        examples_per_microbatch=examples_per_microbatch,
    )
    return next(iter(plan))


class Fault:
    """A forward that calls `effect` before its `at`-th call on one replica, and is as it should be otherwise."""

    def __init__(self, replica: int, at: int, effect: Callable[[Tensor], None]) -> None:
        self.replica, self.at, self.effect, self.calls = replica, at, effect, 0

    def bind(self, rank: int) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
        def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            self.calls += 1
            if rank == self.replica and self.calls == self.at:
                self.effect(batch["input_ids"])
            return model(batch["input_ids"])

        return forward


def _fail(_: Tensor) -> None:
    raise ValueError("no such token")


def _updater(group: Any, fault: Fault | None = None, **options: Any) -> tuple[Updater, Decoder]:
    model = build_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if fault is not None:
        options["forward"] = fault.bind(dist.get_rank(group))
    return Updater(model, optimizer, objective(), process_group=group, **options), model


def _weights(model: nn.Module) -> list[list[float]]:
    return [p.flatten().tolist() for p in model.parameters()]


def _one_fails(group: Any, at: int, overlap: bool) -> tuple[str, bool, list[list[float]]]:
    updater, model = _updater(group, Fault(1, at, _fail), overlap=overlap)
    before = _weights(model)
    with pytest.raises((ValueError, PeerError)) as caught:
        updater.update(_group())
    unchanged = _weights(model) == before and all(p.grad is None for p in model.parameters())
    assert updater.update(_group()).status == "applied"
    return f"{type(caught.value).__name__}: {caught.value}", unchanged, _weights(model)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [1, 2])
def test_error_in_one_forward_reaches_everybody(pool: Pool, at: int, overlap: bool) -> None:
    (other, *first), (own, *second) = pool.run(2, _one_fails, at, overlap)
    assert own == "ValueError: no such token"
    assert other.startswith("PeerError: replica 1 failed in the local phase")
    assert "ValueError: no such token" in other
    assert first[0] is True
    assert second[0] is True
    assert first[1] == second[1]


def _cannot_load(group: Any) -> str:
    class Broken(list[Any]):
        def __getitem__(self, i: Any) -> Any:
            if dist.get_rank(group) == 0:
                raise OSError("disk gone")
            return super().__getitem__(i)

    updater, model = _updater(group)
    before = _weights(model)
    data = Broken(build_examples(8, 0))
    with pytest.raises((OSError, PeerError)) as caught:
        updater.update(next(iter(groups(data, examples_per_update=8))))
    assert _weights(model) == before
    assert updater.update(_group()).status == "applied"
    return f"{type(caught.value).__name__}: {caught.value}"


def test_error_while_loading_reaches_everybody(pool: Pool) -> None:
    own, other = pool.run(2, _cannot_load)
    assert own == "OSError: disk gone"
    assert other.startswith("PeerError: replica 0 failed in the count phase")


# --------------------------------------------------------------------------------------------- lost and late


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    """Workers that a test may kill."""
    pool = Pool(3)
    yield pool
    pool.close()


def _killed(group: Any, at: int) -> None:
    def die(_: Tensor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    updater, model = _updater(group, Fault(1, at, die))
    before = _weights(model)
    began = time.monotonic()
    try:
        updater.update(_group(12))
    except PeerLostError as error:
        assert _weights(model) == before
        raise AssertionError(f"{error} after {time.monotonic() - began < 15} and unchanged") from None


@pytest.mark.parametrize("at", [1, pytest.param(2, marks=pytest.mark.grid)])
def test_killed_replica_is_named_by_all_others(own_pool: Pool, at: int) -> None:
    with pytest.raises(WorkerError) as caught:
        own_pool.run(3, _killed, at)
    report = str(caught.value)
    assert "rank 1: worker died" in report
    for rank in (0, 2):
        part = report.split(f"rank {rank}: ")[1]
        assert "lost replica 1, expected all 3 to answer" in part
        assert "after True and unchanged" in part


def _late(group: Any) -> str:
    """Replica 2 sleeps through the timeout of a process group of one second."""
    quick = dist.new_group([0, 1, 2], timeout=timedelta(seconds=1))
    updater, _ = _updater(quick, Fault(2, 1, lambda _: time.sleep(6)))
    try:
        updater.update(_group())
    except PeerLostError as error:
        return str(error)
    return "applied"


@pytest.mark.grid
def test_late_replica_is_named_by_the_others(own_pool: Pool) -> None:
    first, second, _ = own_pool.run(3, _late)
    assert "lost replica 2" in first
    assert "lost replica 2" in second


# -------------------------------------------------------------------------------------------- out of memory


def _out_of_memory(group: Any, fits: int, replica: int, overlap: bool) -> tuple[float, list[int], list[int]]:
    """More than `fits` examples do not fit on one replica. Returns the gradient error of the first of two updates,
    and the halvings and microbatch sizes of both.
    """

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if len(batch["input_ids"]) > fits and dist.get_rank(group) == replica:
            raise torch.OutOfMemoryError("simulated")
        return model(batch["input_ids"])

    model = build_model(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients: list[dict[str, Tensor]] = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    )
    updater = Updater(model, optimizer, objective(), forward=forward, overlap=overlap, process_group=group)
    reference = reference_update(build_model(torch.float64), build_examples(13, 0), COEFFICIENT, 1e9)
    results = [updater.update(_group(13, 5)) for _ in range(2)]
    error, _ = gradient_error(gradients[0], reference.gradients)
    return error, [r.halvings for r in results], [r.examples_per_microbatch for r in results]


@pytest.mark.parametrize(("replicas", "replica", "overlap"), [(1, 0, False), (2, 1, False), (3, 0, True)])
def test_out_of_memory_halves_for_all_and_keeps_the_gradient(
    pool: Pool, replicas: int, replica: int, overlap: bool
) -> None:
    """5 -> 3 -> 2 examples; later groups begin with what fits."""
    for error, halvings, sizes in pool.run(replicas, _out_of_memory, 2, replica, overlap):
        assert error <= 1e-12
        assert halvings == [2, 0]
        assert sizes == [2, 2]


def _fits(limit: int) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if len(batch["input_ids"]) > limit:
            raise torch.OutOfMemoryError("simulated")
        return model(batch["input_ids"])

    return forward


def _never_fits(group: Any) -> str:
    updater, model = _updater(group, forward=_fits(0))
    before = _weights(model)
    with pytest.raises(OutOfMemoryError) as caught:
        updater.update(_group(8, 4))
    assert _weights(model) == before
    return str(caught.value)


def test_out_of_memory_with_one_example_is_an_error_for_all(pool: Pool) -> None:
    for message in pool.run(2, _never_fits):
        assert "out of memory with 1 example per microbatch" in message


def _ready_never_fits(group: Any) -> str:
    """Ready microbatches of 2 and 3 examples, where 1 fits on replica 1."""

    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if len(batch[0]) > 1 and dist.get_rank(group) == 1:
            raise torch.OutOfMemoryError("simulated")
        return model(batch[0])

    model = nn.Linear(2, 2)
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, forward=forward, process_group=group)
    before = _weights(model)
    with pytest.raises(OutOfMemoryError) as caught:
        updater.update([(torch.ones(2 + updater.replica, 2), torch.ones(2 + updater.replica, 2))])
    assert _weights(model) == before
    assert updater.update([(torch.ones(1, 2), torch.ones(1, 2))]).status == "applied"
    return str(caught.value)


def test_ready_microbatch_that_does_not_fit_is_an_error_for_all(pool: Pool) -> None:
    for message in pool.run(2, _ready_never_fits):
        assert "out of memory in a ready microbatch" in message


class OneReplicaFails(torch.optim.SGD):
    """An optimizer without memory for its state on replica 1."""

    rank = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.rank == 1:
            raise torch.OutOfMemoryError("simulated")
        super().step(closure)


def _late_out_of_memory(group: Any) -> str:
    quick = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    model = build_model(torch.float64)
    optimizer = OneReplicaFails(model.parameters(), lr=0.1)
    optimizer.rank = dist.get_rank(group)
    updater = Updater(model, optimizer, objective(), process_group=quick)
    if updater.replica == 0:
        assert updater.update(_group()).status == "applied"  # it cannot know yet
    with pytest.raises((OutOfMemoryError, PeerLostError)) as caught:
        updater.update(_group())
    return f"{type(caught.value).__name__}: {caught.value}"


def test_out_of_memory_after_the_vote_ends_the_run_for_all(own_pool: Pool) -> None:
    other, own = own_pool.run(2, _late_out_of_memory)
    assert own.startswith("OutOfMemoryError: memory: got out of memory after the vote")
    assert other.startswith("PeerLostError: ")


# -------------------------------------------------------------------------------------------- stop, and models


def _stop(group: Any) -> list[bool]:
    updater, _ = _updater(group)
    first = updater.update(_group()).stop_requested
    if updater.replica == 1:
        updater.request_stop()
    return [first, updater.update(_group()).stop_requested]


def test_one_replica_stops_all_after_the_same_update(pool: Pool) -> None:
    assert pool.run(3, _stop) == [[False, True]] * 3


def _starts(group: Any, width: int) -> tuple[float, str]:
    rank = dist.get_rank(group)
    model = nn.Linear(3, width if rank else 3, bias=False)
    nn.init.constant_(model.weight, rank + 1.0)
    try:
        Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, process_group=group)
    except InputError as error:
        return model.weight[0, 0].item(), str(error)
    return model.weight[0, 0].item(), ""


def test_replicas_start_from_the_same_weights(pool: Pool) -> None:
    assert pool.run(2, _starts, 3) == [(1.0, ""), (1.0, "")]


def test_different_models_are_refused_on_all_replicas(pool: Pool) -> None:
    (first, one), (second, two) = pool.run(2, _starts, 4)
    assert (first, second) == (1.0, 2.0)
    assert "(3, 3)" in one
    assert "(4, 3)" in one
    assert "the same tensors on every replica" in two


def _with_hook(group: Any) -> str:
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    model.register_comm_hook(None, fp16_compress_hook)
    with pytest.raises(InputError) as caught:
        Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), mse)
    return str(caught.value)


def test_communication_hook_is_refused(pool: Pool) -> None:
    for message in pool.run(2, _with_hook):
        assert "communication hook fp16_compress_hook" in message


class Twice(nn.Module):
    """One layer used in two reentrant checkpoints: its gradient arrives twice in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)  # type: ignore[assignment]
        return x


def _reentrant(group: Any, overlap: bool) -> str:
    model = Twice()
    quick = dist.new_group([0, 1], timeout=timedelta(seconds=5)) if overlap else group
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, overlap=overlap, process_group=quick)
    try:
        return updater.update([(torch.ones(1, 2), torch.zeros(1, 2))]).status
    except (InputError, PeerLostError) as error:
        return str(error)


def test_second_gradient_for_a_sent_bucket_is_an_error_and_never_lost(own_pool: Pool) -> None:
    assert own_pool.run(2, _reentrant, False) == ["applied"] * 2
    for message in own_pool.run(2, _reentrant, True):
        assert "a second gradient" in message or "lost" in message


def test_objective_of_one_process_needs_no_process_group() -> None:
    model = build_model(torch.float32)
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), causal_lm)
    assert (updater.replica, updater.replicas) == (0, 1)
    assert updater.update(_group()).status == "applied"
