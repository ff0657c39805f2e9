"""Memory runs out in each phase, and in validation, with one to three replicas: a smaller try, or one clear error."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from isostep import OutOfMemoryError, Updater, groups, mse, pad_batch
from isostep import engine as engine_module
from isostep.data.groups import DataGroup
from isostep.distributed.traffic import watched
from isostep.errors import InputError, PeerError, PeerLostError
from isostep.memory import available_bytes, in_use_bytes, peak_bytes, reset_peak
from isostep.verification.problem import COEFFICIENT, build_examples, build_model, objective
from isostep.verification.reference import gradient_error, reference_update
from pool import Pool

NUM_EXAMPLES = 13
CPU = torch.device("cpu")


def _group(examples_per_microbatch: int) -> DataGroup:
    data = build_examples(NUM_EXAMPLES, 0)
    plan = groups(data, examples_per_update=NUM_EXAMPLES, examples_per_microbatch=examples_per_microbatch)
    return next(iter(plan))


def _simulated(group: Any, fits: int | None) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    """A forward that runs out of memory on replica 1 of several above `fits` examples; with None it never does."""
    here = dist.get_rank(group) == min(1, dist.get_world_size(group) - 1)

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if fits is not None and here and len(batch["input_ids"]) > fits:
            raise torch.OutOfMemoryError("simulated")
        return model(batch["input_ids"])

    return forward


def _updater(group: Any, **options: Any) -> Updater:
    model = build_model(torch.float64)
    return Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), objective(), process_group=group, **options)


# ------------------------------------------------------------------------------------- phase 2: a smaller try


def _gradients(group: Any, fits: int | None, examples_per_microbatch: int, overlap: bool) -> dict[str, Any]:
    """The group's gradients as the optimizer gets them, and how the group was split in the end."""
    updater = _updater(group, forward=_simulated(group, fits), overlap=overlap)
    model = updater._engine.model
    gradients: dict[str, Tensor] = {}
    updater._engine.optimizers[0].register_step_pre_hook(
        lambda *_: gradients.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    )
    result = updater.update(_group(examples_per_microbatch))
    reference = reference_update(build_model(torch.float64), build_examples(NUM_EXAMPLES, 0), COEFFICIENT, 1e9)
    return {
        "gradients": gradients,
        "error": gradient_error(gradients, reference.gradients)[0],
        "split": (result.halvings, result.examples_per_microbatch, result.counts.microbatches),
    }


def _bits_equal(reports: list[dict[str, Any]], expected: dict[str, Any]) -> bool:
    pairs = ((report["gradients"], expected["gradients"]) for report in reports)
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)


@pytest.mark.parametrize(("replicas", "overlap"), [(1, False), (2, False), (2, True), (3, False), (3, True)])
def test_fallback_accumulates_more_and_gives_the_same_gradients(pool: Pool, replicas: int, overlap: bool) -> None:
    """8 -> 4 -> 2 examples: the bits of 2 from the start, and the gradient of any split."""
    fallen = pool.run(replicas, _gradients, 2, 8, overlap)
    direct = pool.run(replicas, _gradients, None, 2, overlap)
    control = pool.run(replicas, _gradients, None, 8, overlap)
    assert [report["split"] for report in fallen] == [(2, 2, 7)] * replicas
    assert [report["split"] for report in direct] == [(0, 2, 7)] * replicas
    assert [report["split"] for report in control] == [(0, 8, 2)] * replicas
    assert _bits_equal(fallen, direct[0])
    assert not _bits_equal(control, direct[0]), "another split has other bits"
    assert max(report["error"] for report in (*fallen, *control)) <= 1e-12


class Leaving(nn.Module):
    """Keeps an eye on an activation of the forward that runs out of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.activation: weakref.ref[Tensor] | None = None
        self.alive: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        activation = self.w * x
        if len(x) > 1:
            self.activation = weakref.ref(activation)
            raise torch.OutOfMemoryError("simulated")
        assert self.activation is not None
        self.alive.append(self.activation() is not None)
        return activation


@pytest.mark.parametrize("evaluating", [False, True])
@pytest.mark.parametrize("forgetting", [True, False])
def test_activations_are_gone_before_the_smaller_try(
    monkeypatch: pytest.MonkeyPatch, evaluating: bool, forgetting: bool
) -> None:
    if not forgetting:  # the control
        monkeypatch.setattr(engine_module, "forget_frames", lambda error: None)
    model = Leaving()
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), mse)
    data = [(torch.ones(()), torch.zeros(()))] * 2
    if evaluating:
        updater.evaluate(data, examples_per_microbatch=2)
    else:
        updater.update(next(iter(groups(data, examples_per_update=2, examples_per_microbatch=2))))
    assert model.alive == [not forgetting] * 2


# ----------------------------------------------------------------------------- phases 4 and 5: the end of the run


@pytest.fixture(scope="module")
def own_pools() -> Iterator[Callable[[int], Pool]]:
    """Workers whose process groups a test may end, by number of replicas."""
    pools: dict[int, Pool] = {}

    def pool_of(replicas: int) -> Pool:
        return pools.setdefault(replicas, Pool(replicas))

    yield pool_of
    for pool in pools.values():
        pool.close()


class Reduced(torch.autograd.Function):
    """The identity, whose backward runs out of memory where asked to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:  # type: ignore[override]
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.fails:
            raise torch.OutOfMemoryError("simulated")
        return grad, None


class Stepping(torch.optim.SGD):
    """An optimizer without memory for its step, where asked to."""

    fails = False

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.fails:
            raise torch.OutOfMemoryError("simulated")
        super().step(closure)


def _after_the_vote(group: Any, phase: int, fails: bool) -> dict[str, Any]:
    """Up to three updates, each of which fails on the last replica after the vote; then another one."""
    rank, replicas = dist.get_rank(group), dist.get_world_size(group)
    quick = dist.new_group(list(range(replicas)), timeout=timedelta(seconds=20))
    fails = fails and rank == replicas - 1
    calls = 0

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        nonlocal calls
        calls += 1
        return Reduced.apply(model(batch["input_ids"]), fails and phase == 4 and calls == mine)  # type: ignore[no-any-return]

    model = build_model(torch.float64)
    optimizer = Stepping(model.parameters(), lr=0.1)
    optimizer.fails = fails and phase == 5
    updater = Updater(model, optimizer, objective(), forward=forward, overlap=True, process_group=quick)
    work = _group(2)
    mine = len(work.group.microbatches_of(rank, replicas))
    if replicas == 1 and phase == 4 and fails:  # alone, nothing is reduced, and the last backward is in phase 2
        updater._engine.comm.reduce = _no_room  # type: ignore[method-assign]
    report: dict[str, Any] = {"applied": 0, "error": "", "again": ""}
    began = time.monotonic()
    try:
        for _ in range(3):
            report["applied"] += updater.update(work).status == "applied"
    except (OutOfMemoryError, PeerLostError) as error:
        report["error"] = f"{type(error).__name__}: {error}"
        if replicas > 1:
            with pytest.raises(PeerLostError) as caught:
                updater.update(work)
            report["again"] = str(caught.value)
    report["seconds"] = time.monotonic() - began
    return report


def _no_room(*_: Any) -> None:
    raise torch.OutOfMemoryError("simulated")


@pytest.mark.parametrize("phase", [4, 5])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_after_the_vote_every_replica_is_told_what_to_do(
    own_pools: Callable[[int], Pool], replicas: int, phase: int
) -> None:
    *others, own = own_pools(replicas).run(replicas, _after_the_vote, phase, True)
    assert own["error"].startswith("OutOfMemoryError: memory: got out of memory after the vote (simulated), expected ")
    for other in others:
        assert f": lost replica {replicas - 1}, expected all {replicas} to answer" in other["error"]
        assert other["error"].startswith("PeerLostError: ")
    for report in (*others, own):
        assert "resume from the last checkpoint with fewer examples per microbatch" in report["error"]
        assert report["again"] or replicas == 1, "the process group has ended"
        assert report["seconds"] < 15
    assert own["applied"] == 0
    assert {other["applied"] for other in others} <= {0, 1}


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_control_the_same_updates_with_room_are_applied(own_pools: Callable[[int], Pool], replicas: int) -> None:
    for report in own_pools(replicas).run(replicas, _after_the_vote, 4, False):
        assert (report["applied"], report["error"]) == (3, "")


# ------------------------------------------------------------------------------------------------- validation


def _evaluated(group: Any, fits: int | None, examples_per_microbatch: int) -> tuple[Any, int, tuple[int, int]]:
    """The result, its collectives, and the split of an update afterwards. Only without gradients memory runs out."""
    full = _simulated(group, fits)

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["input_ids"]) if torch.is_grad_enabled() else full(model, batch)

    updater = _updater(group, forward=forward)
    with watched() as traffic:
        evaluation = updater.evaluate(build_examples(NUM_EXAMPLES, 0), examples_per_microbatch=examples_per_microbatch)
    assert updater._engine.examples_that_fit is None
    update = updater.update(_group(examples_per_microbatch))
    return evaluation, traffic.small_calls, (update.halvings, update.examples_per_microbatch)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_validation_falls_back_for_all_and_leaves_training_alone(pool: Pool, replicas: int) -> None:
    fallen = pool.run(replicas, _evaluated, 2, 7)
    direct = pool.run(replicas, _evaluated, None, 7)
    for evaluation, small_calls, split in fallen:
        assert (evaluation.examples_per_microbatch, evaluation.halvings) == (2, 2)  # 7 -> 4 -> 2
        assert evaluation.counts.microbatches == 7
        assert evaluation.counts.examples == NUM_EXAMPLES
        assert split == (0, 7)
        assert small_calls == (3 if replicas > 1 else 0)
        assert evaluation == fallen[0][0]
    for evaluation, small_calls, _ in direct:
        assert (evaluation.examples_per_microbatch, evaluation.halvings) == (7, 0)
        assert evaluation.counts.microbatches == 2
        assert small_calls == (1 if replicas > 1 else 0)
    assert fallen[0][0].loss == pytest.approx(direct[0][0].loss, rel=1e-12)
    assert fallen[0][0].denominators == direct[0][0].denominators


def test_validation_begins_with_no_more_than_there_is() -> None:
    updater = _updater(None, forward=lambda model, batch: model(batch["input_ids"]))
    data = build_examples(3, 0)
    assert updater.evaluate(data, examples_per_microbatch=100).examples_per_microbatch == 3
    assert updater.evaluate(iter([pad_batch(data)])).examples_per_microbatch is None


def _no_validation(group: Any, ready: bool) -> str:
    data = build_examples(NUM_EXAMPLES, 0)
    updater = _updater(group, forward=_simulated(group, 0))
    with pytest.raises(OutOfMemoryError) as caught:
        updater.evaluate(iter([pad_batch(data)]) if ready else data, examples_per_microbatch=4)
    assert updater.evaluate([]).loss is None, "the replicas are still in step"
    return str(caught.value)


@pytest.mark.parametrize(("ready", "said"), [(False, "with 1 example per microbatch"), (True, "in a ready microbatch")])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_validation_that_cannot_fall_back_is_an_error_for_all(
    pool: Pool, replicas: int, ready: bool, said: str
) -> None:
    for message in pool.run(replicas, _no_validation, ready):
        assert message.startswith(f"memory: got out of memory {said}, expected room for ")


def _one_fails_otherwise(group: Any) -> str:
    """Replica 1 runs out of memory while replica 0 fails: what cannot be mended is raised."""

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        raise torch.OutOfMemoryError("simulated") if dist.get_rank(group) else ValueError("no such token")

    with pytest.raises((ValueError, PeerError)) as caught:
        _updater(group, forward=forward).evaluate(build_examples(NUM_EXAMPLES, 0), examples_per_microbatch=4)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_another_error_in_validation_is_not_taken_for_a_lack_of_memory(pool: Pool) -> None:
    own, other = pool.run(2, _one_fails_otherwise)
    assert own == "ValueError: no such token"
    assert other.startswith("PeerError: replica 0 failed in the evaluation")


class Line(nn.Module):
    def __init__(self, w: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(w))
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(self.training)
        return self.w * x


def test_another_module_is_evaluated_instead_of_the_trained_one() -> None:
    trained, average = Line(1.0), Line(3.0)
    updater = Updater(trained, torch.optim.SGD(trained.parameters(), lr=0.1), mse)
    data = [(torch.ones(()), torch.zeros(()))] * 2
    assert updater.evaluate(data, model=average).loss == 9.0
    assert (average.modes, trained.modes) == ([False] * 2, [])
    assert average.training
    assert updater.evaluate(data).loss == 1.0


def _different_models(group: Any, differ: bool) -> str:
    model = Line(1.0)
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, process_group=group)
    average = Line(2.0) if updater.replica == 0 or not differ else None
    try:
        updater.evaluate([(torch.ones(()), torch.zeros(()))] * 2, model=average)
    except InputError as error:
        return str(error)
    return "went on"


def test_another_module_on_one_replica_alone_is_an_error_for_all(pool: Pool) -> None:
    for message in pool.run(2, _different_models, True):
        assert message.startswith("evaluation data: got 'other examples, microbatches or model here'")
    assert pool.run(2, _different_models, False) == ["went on"] * 2


# --------------------------------------------------------------------------------------------- what memory there is


def test_what_is_in_use_and_its_peak_follow_an_allocation() -> None:
    size = 200 << 20
    before = in_use_bytes(CPU)
    reset_peak(CPU)
    block = torch.ones(size, dtype=torch.uint8)
    during = in_use_bytes(CPU)
    del block
    assert before > 0
    assert during - before > 0.9 * size
    assert in_use_bytes(CPU) - before < 0.1 * size
    assert peak_bytes(CPU) - before > 0.9 * size
    reset_peak(CPU)
    assert peak_bytes(CPU) - before < 0.1 * size


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_available_memory_is_the_hosts_or_what_a_control_group_leaves(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"

    def available() -> int | None:
        return available_bytes(proc, cgroups)

    assert available() is None
    _write(proc, {"meminfo": "MemTotal:  9000 kB\nMemAvailable:   4000 kB\n", "self/cgroup": "0::/jobs/one\n"})
    assert available() == 4000 * 1024
    # version 2: the cache that can be dropped counts as available; a limit further out holds as well
    _write(cgroups / "jobs", {"one/memory.max": "max\n", "one/memory.current": "9\n"})
    assert available() == 4000 * 1024
    _write(cgroups / "jobs", {"one/memory.max": "1000\n", "one/memory.current": "700\n"})
    _write(cgroups / "jobs", {"one/memory.stat": "anon 600\ninactive_file 100\n"})
    assert available() == 400
    _write(cgroups / "jobs", {"memory.max": "1000\n", "memory.current": "900\n"})
    assert available() == 100
    # version 1, in a container that sees its own group at the top
    _write(proc, {"self/cgroup": "5:cpu,memory:/docker/abc\n"})
    _write(cgroups, {"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "995"})
    _write(cgroups, {"memory/memory.stat": "inactive_file 1\ntotal_inactive_file 2\n"})
    assert available() == 7
    assert (available_bytes() or 0) > 1 << 20
