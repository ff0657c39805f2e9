"""Loops that are easily misread, in both directions: what a script wants is no fault, and what it hides is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isostep import audit

UPDATES, ACCUMULATE = 4, 3
CLASSES = 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def batch(rows: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6), torch.randint(CLASSES, (rows,))


def sgd(*modules: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.05)


def each_update(optimizer: torch.optim.Optimizer, loss: Callable[[int], Tensor]) -> None:
    for number in range(UPDATES):
        optimizer.zero_grad()
        loss(number).backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------- what a script wants


def sum_over_features() -> None:
    net, rows = nn.Linear(6, 10), iter((8, 8, 8, 5))

    def loss(_: int) -> Tensor:
        x, _labels = batch(next(rows))
        return F.mse_loss(net(x), x.repeat(1, 2)[:, :10], reduction="none").sum(1).mean()

    each_update(sgd(net), loss)


def annealed_term() -> None:
    net, head = model(), nn.Linear(6, 2)

    def loss(number: int) -> Tensor:
        x, y = batch()
        return F.cross_entropy(net(x), y) + min(1, number / 2) * F.mse_loss(head(x), x[:, :2])

    each_update(sgd(net, head), loss)


def mixed_up() -> None:
    net = model()

    def loss(number: int) -> Tensor:
        (x, y), share = batch(8), 0.2 + number / 7
        other = torch.randperm(8)
        out = net(share * x + (1 - share) * x[other])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[other])

    each_update(sgd(net), loss)


def deep_supervision() -> None:
    body, heads = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(3))

    def loss(_: int) -> Tensor:
        x, y = batch()
        hidden, total = body(x).tanh(), torch.zeros(())
        for weight, head in zip((1.0, 0.4, 0.4), heads, strict=True):
            total = total + weight * F.cross_entropy(head(hidden), y)
        return total

    each_update(sgd(body, heads), loss)


def rehearsed() -> None:
    """Sharpness-aware: the first gradient only says where to look."""
    net = model()
    optimizer = sgd(net)
    for _ in range(UPDATES):
        x, y = batch(8)
        F.cross_entropy(net(x), y).backward()
        steps = [0.05 * p.grad for p in net.parameters() if p.grad is not None]
        with torch.no_grad():
            for p, step in zip(net.parameters(), steps, strict=True):
                p += step
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for p, step in zip(net.parameters(), steps, strict=True):
                p -= step
        optimizer.step()
        optimizer.zero_grad()


def drawn_with_replacement() -> None:
    net, (x, y) = model(), batch(6)

    def loss(_: int) -> Tensor:
        drawn = torch.randint(6, (12,))
        return F.cross_entropy(net(x[drawn]), y[drawn])

    each_update(sgd(net), loss)


# ------------------------------------------------------------------------------------------- what a script hides


def accumulated(optimizers: list[torch.optim.Optimizer], net: nn.Module, between: Callable[[], None]) -> None:
    """Exact but for what `between` does after each backward pass."""
    for _ in range(UPDATES):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(ACCUMULATE):
            x, y = batch()
            (F.cross_entropy(net(x), y) / ACCUMULATE).backward()
            between()
        for optimizer in optimizers:
            optimizer.step()


def hook_of_its_own() -> None:
    net = model()
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    accumulated([sgd(net)], net, lambda: None)


def scaled_after_value_clipping() -> None:
    net = model()
    optimizer = sgd(net)
    for _ in range(UPDATES):
        optimizer.zero_grad()
        x, y = batch()
        F.cross_entropy(net(x), y).backward()
        torch.nn.utils.clip_grad_value_(net.parameters(), 100.0)
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.25)
        optimizer.step()


def second_optimizer_loses() -> None:
    net = model()
    first, second = sgd(net[0]), sgd(net[2])
    number = 0

    def clear() -> None:
        nonlocal number
        number += 1
        if number % ACCUMULATE:
            second.zero_grad()

    accumulated([first, second], net, clear)


def same_labels_lost() -> None:
    net = nn.Linear(6, 5)
    optimizer = sgd(net)
    for _ in range(UPDATES):
        for _ in range(ACCUMULATE):
            optimizer.zero_grad()
            F.cross_entropy(net(torch.randn(5, 6)), torch.arange(5)).backward()
        optimizer.step()


def main_loss_by_hand() -> None:
    net = model()

    def loss(_: int) -> Tensor:
        x, y = batch()
        out = net(x)
        return -out.log_softmax(-1).gather(1, y[:, None]).mean() + 1e-3 * F.mse_loss(out, torch.zeros_like(out))

    each_update(sgd(net), loss)


@pytest.mark.parametrize(
    ("loop", "verdicts", "kinds"),
    [
        (sum_over_features, {"exact-up-to-factor"}, set()),
        (annealed_term, {"exact-up-to-factor"}, set()),
        (mixed_up, {"exact-up-to-factor"}, set()),
        (deep_supervision, {"exact-up-to-factor"}, set()),
        (rehearsed, {"exact"}, set()),
        (drawn_with_replacement, {"exact"}, set()),
        (hook_of_its_own, {"exact-up-to-factor", "inexact"}, {"scale", "count-mismatch"}),
        (scaled_after_value_clipping, {"exact-up-to-factor"}, {"scale"}),
        (second_optimizer_loses, {"not-observed", "inexact"}, set()),
        (same_labels_lost, {"inexact"}, {"lost-microbatch"}),
        (main_loss_by_hand, {"not-observed"}, set()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_easily_misread(loop: Callable[[], None], verdicts: set[str], kinds: set[str]) -> None:
    torch.manual_seed(1)
    with audit.watch() as seen:
        loop()
    report = seen.report()
    assert report.verdict in verdicts, str(report)
    found = {finding.kind for finding in report.findings}
    assert found <= kinds, str(report)
    assert bool(found) == bool(kinds), str(report)
