"""A request to stop: after the update under way, or by abandoning it, on every replica alike and to the bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from isostep import AbandonedError, LossScale, Updater, causal_lm, groups, mse
from isostep.data.groups import DataGroup
from isostep.distributed.traffic import watched
from isostep.stopping import StopRequest
from isostep.verification.problem import build_examples, build_model
from pool import Pool

LATER = 1000.0


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = build_model(torch.float32)

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.dropout(self.decoder(input_ids), 0.5, self.training)


def _plan(data: Any = None, examples_per_microbatch: int = 2) -> list[DataGroup]:
    data = build_examples(16, 0) if data is None else data
    return list(groups(data, examples_per_update=8, examples_per_microbatch=examples_per_microbatch))


def _updater(group: Any, before_forward: Callable[[int], None] = lambda _: None, **options: Any) -> Updater:
    """`before_forward(n)` is called before the n-th forward, from 1."""
    calls = iter(range(1, 1 << 30))

    def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        before_forward(next(calls))
        return model(batch["input_ids"])

    model = WithDropout()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Updater(model, optimizer, causal_lm, forward=forward, process_group=group, **options)


def _weights(updater: Updater) -> list[Tensor]:
    return [p.detach().clone() for p in updater._engine.model.parameters()]


def _asking(group: Any, at: int, grace: float | None, overlap: bool) -> dict[str, Any]:
    """Two updates; in the second, the last replica is asked to stop before its `at`-th forward of that update.

    An abandoned one is run again.
    """
    first, second = _plan()
    per_update = 4 // dist.get_world_size(group)
    last = dist.get_rank(group) == dist.get_world_size(group) - 1

    def ask(call: int) -> None:
        if last and call == per_update + at:
            updater.request_stop(grace)

    updater = _updater(group, ask if at else lambda _: None, overlap=overlap)
    updater.update(first)
    before, totals, cursor = _weights(updater), str(updater.totals), updater.cursor
    report: dict[str, Any] = {"error": "", "stopped": []}
    with watched() as traffic:
        try:
            report["stopped"].append(updater.update(second).stop_requested)
        except AbandonedError as error:
            report["error"] = str(error)
            same = all(torch.equal(a, b) for a, b in zip(before, _weights(updater), strict=True))
            dropped = all(p.grad is None for p in updater._engine.model.parameters())
            report["unchanged"] = same and dropped and str(updater.totals) == totals and updater.cursor == cursor
            report["small_calls"], report["large_bytes"] = traffic.small_calls, traffic.large_bytes
            report["stopped"].append(updater.update(second).stop_requested)
    report["weights"], report["totals"] = _weights(updater), str(updater.totals)
    return report


def _same(reports: list[dict[str, Any]], expected: dict[str, Any]) -> bool:
    weights = (zip(report["weights"], expected["weights"], strict=True) for report in reports)
    return all(torch.equal(a, b) for pairs in weights for a, b in pairs)


@pytest.mark.parametrize(("replicas", "overlap"), [(1, False), (2, False), (2, True)])
def test_abandoned_group_changes_nothing_and_can_be_run_again(pool: Pool, replicas: int, overlap: bool) -> None:
    expected = pool.run(replicas, _asking, 0, None, overlap)[0]
    reports = pool.run(replicas, _asking, 1, 0.0, overlap)
    for report in reports:
        assert report["error"].startswith("epoch 0, group 1: got a stop request whose grace was over before the vote")
        assert "nothing was applied: resume from what you saved" in report["error"]
        assert report["unchanged"]
        assert report["stopped"] == [False], "the request is answered"
        assert (report["small_calls"], report["large_bytes"]) == ((2, 0) if replicas > 1 else (0, 0))
        assert report["totals"] == expected["totals"]
    assert _same(reports, expected)


@pytest.mark.parametrize("grace", [None, LATER])
@pytest.mark.parametrize(("replicas", "overlap"), [(1, False), (2, True)])
def test_control_with_time_enough_the_group_is_finished(
    pool: Pool, replicas: int, overlap: bool, grace: float | None
) -> None:
    expected = pool.run(replicas, _asking, 0, None, overlap)[0]
    reports = pool.run(replicas, _asking, 1, grace, overlap)
    assert [(report["error"], report["stopped"]) for report in reports] == [("", [True])] * replicas
    assert _same(reports, expected)
    assert not _same(reports, {"weights": _weights(_updater(None))}), "two updates change the weights"


@pytest.mark.parametrize(("replicas", "overlap"), [(1, False), (2, False), (2, True)])
def test_grace_that_ends_in_the_last_microbatch_lets_the_vote_decide_as_usual(
    pool: Pool, replicas: int, overlap: bool
) -> None:
    reports = pool.run(replicas, _asking, 4 // replicas, 0.0, overlap)
    assert [(report["error"], report["stopped"]) for report in reports] == [("", [True])] * replicas


# --------------------------------------------------------------------------------------------- phase 1 is long


class Slow(list[Any]):
    """Examples of which replica 1 waits for the first one; `on_read` is called before each."""

    seconds = 0.0
    on_read: Callable[[], None] = staticmethod(lambda: None)
    reads = 0

    def __getitem__(self, i: Any) -> Any:
        if self.reads == 0:
            time.sleep(self.seconds)
        self.reads += 1
        self.on_read()
        return super().__getitem__(i)


def _waits(group: Any, grace: float, seed: int) -> str:
    """One microbatch each; replica 0 is asked, and then waits for the counts of replica 1."""
    data = Slow(build_examples(8, seed))
    data.seconds = 0.9 * dist.get_rank(group)
    updater = _updater(group)
    if updater.replica == 0:
        updater.request_stop(grace)
    try:
        result = updater.update(_plan(data, examples_per_microbatch=4)[0])
    except AbandonedError:
        return "abandoned"
    return f"{result.status} {result.stop_requested}"


@pytest.mark.parametrize("seed", [1, 0])
def test_grace_that_ends_while_waiting_for_counts(pool: Pool, seed: int) -> None:
    """After the first forward; or before it, where replica 0 has no target of its own, as with seed 0."""
    assert pool.run(2, _waits, 0.4, seed) == ["abandoned"] * 2
    assert pool.run(2, _waits, LATER, seed) == ["applied True"] * 2


def _asked_while_loading(group: Any, grace: float) -> tuple[str, int, int]:
    """Replica 1 is asked when it reads its first of four examples. What happened, examples read, backwards run."""
    data = Slow(build_examples(8, 0))
    updater = _updater(group)
    backwards: list[Tensor] = []
    parameter = next(updater._engine.model.parameters())
    handle = parameter.register_post_accumulate_grad_hook(lambda p: backwards.append(p))
    if updater.replica == 1:
        data.on_read = lambda: updater.request_stop(grace)  # type: ignore[method-assign]
    with watched() as traffic:
        try:
            outcome = updater.update(_plan(data)[0]).status
        except AbandonedError:
            outcome = f"abandoned after {traffic.small_calls} collective"
    handle.remove()
    return outcome, data.reads, len(backwards)


def test_grace_that_ends_while_loading(pool: Pool) -> None:
    """No more is loaded, and nobody runs a backward for nothing."""
    outcomes = pool.run(2, _asked_while_loading, 0.0)
    assert outcomes == [("abandoned after 1 collective", 4, 0), ("abandoned after 1 collective", 2, 0)]
    assert pool.run(2, _asked_while_loading, LATER) == [("applied", 4, 2)] * 2


# --------------------------------------------------------------------------------------------- the request itself


def test_a_later_request_shortens_the_grace_and_never_extends_it() -> None:
    stop = StopRequest()
    stop.ask(None)
    assert (stop.requested, stop.overdue) == (True, False)
    stop.ask(LATER)
    assert not stop.overdue
    stop.ask(0.0)
    assert stop.overdue
    stop.ask(LATER)
    stop.ask(None)
    assert stop.overdue
    stop.answer()
    assert (stop.requested, stop.overdue) == (False, False)


def test_request_from_a_signal_handler() -> None:
    def handle(*_: Any) -> None:
        updater.request_stop(grace=0.0)

    updater = _updater(None, lambda call: os.kill(os.getpid(), signal.SIGUSR1) if call == 2 else None)
    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(AbandonedError):
            updater.update(_plan()[0])
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert updater.totals.attempted == 0
    assert not updater.update(_plan()[0]).stop_requested


def test_request_outlives_an_update_that_fails() -> None:
    def fail(call: int) -> None:
        if call == 1:
            updater.request_stop()
            raise ValueError("no such token")

    updater = _updater(None, fail)
    with pytest.raises(ValueError, match="no such token"):
        updater.update(_plan()[0])
    assert [updater.update(_plan()[0]).stop_requested for _ in range(2)] == [True, False]


def test_grace_that_is_over_between_two_updates_abandons_the_second() -> None:
    forwards: list[int] = []
    updater = _updater(None, forwards.append)
    updater.update(_plan()[0])
    updater.request_stop(0.0)
    with pytest.raises(AbandonedError, match="group 1"):
        updater.update(_plan()[1])
    assert len(forwards) == 4


# --------------------------------------------------------------------------------------------- totals


def test_applied_counts_leave_out_skipped_and_empty_updates() -> None:
    model = nn.Linear(1, 1)
    scale = LossScale(scale=1.0)
    updater = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), mse, loss_scale=scale)

    def batch(num: int, value: float = 1.0) -> tuple[Tensor, Tensor]:
        return torch.full((num, 1), value), torch.zeros(num, 1)

    results = [updater.update([b]) for b in (batch(3), batch(5, float("inf")), batch(0), batch(2))]
    assert [result.status for result in results] == ["applied", "skipped", "empty", "applied"]
    assert updater.totals.counts.examples == 10
    assert updater.totals.applied_counts.examples == 5
    assert updater.totals.applied_counts.supervised_tokens == 5

    twin = nn.Linear(1, 1)
    resumed = Updater(twin, torch.optim.SGD(twin.parameters(), lr=0.1), mse, loss_scale=LossScale())
    resumed.load_state_dict(updater.state_dict())
    assert resumed.totals == updater.totals
    resumed.update([batch(4)])
    assert (resumed.totals.counts.examples, resumed.totals.applied_counts.examples) == (14, 9)
