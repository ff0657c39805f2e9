"""Recomputed layers: one more forward, the same bits, under the full and under the split backward of pipelines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from isostep.errors import IsostepError
from isostep.models.decoder import Decoder, DecoderConfig
from isostep.recomputing import recomputed

WIDTH = 16
Run = Callable[[nn.Module, Tensor], Tensor]


def plain(layer: nn.Module, hidden: Tensor) -> Tensor:
    return layer(hidden)


def by_torch(layer: nn.Module, hidden: Tensor) -> Tensor:
    return checkpoint(layer, hidden, use_reentrant=False)  # type: ignore[return-value]


class Counted(nn.Module):
    """A layer with dropout that counts its forwards."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.dropout, self.forwards = layer, nn.Dropout(0.3), 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.forwards += 1
        return self.dropout(self.layer(hidden))


def through(run: Run, split: bool, precision: Any = None) -> tuple[list[Any], list[int]]:
    """Gradients of a decoder without its embedding, of the input too, and how often each layer ran."""
    decoder = Decoder(DecoderConfig(50, 32, WIDTH, 3, 2), seed=3)
    layers = [Counted(layer) for layer in decoder.as_layers()[1:]]
    torch.manual_seed(5)
    entering = torch.randn(2, 32, WIDTH, requires_grad=True)
    with precision or nullcontext():
        hidden = entering
        for layer in layers:
            hidden = run(layer, hidden)
        loss = hidden.float().logsumexp(-1).sum()
    del hidden
    torch.manual_seed(6)  # where the generators stand must not matter to the second run, nor the second run move them
    parameters = [p for layer in layers for p in layer.parameters()]
    if split:
        (gradient,), groups = stage_backward_input([loss], None, [entering], iter(parameters))
        assert parameters[0].grad is None
        stage_backward_weight(iter(parameters), groups)
    else:
        (gradient,) = stage_backward(loss, None, [entering])
    after = torch.rand(1)
    assert torch.equal(after, torch.rand(1, generator=torch.Generator().manual_seed(6)))
    return [gradient, *(p.grad for p in parameters)], [layer.forwards for layer in layers]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_one_more_forward_and_the_same_bits(split: bool, autocast: bool) -> None:
    def precision() -> Any:
        return torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()

    expected, once = through(plain, split, precision())
    gradients, forwards = through(recomputed, split, precision())
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert once == [1, 1, 1, 1]
    assert forwards == [2, 2, 2, 2]


def test_control_torch_recomputes_for_each_group_of_weights() -> None:
    """Why `recomputed` exists; if torch learns to recompute once, it is no longer needed."""
    gradients, forwards = through(by_torch, split=True)
    assert all(torch.equal(a, b) for a, b in zip(gradients, through(plain, True)[0], strict=True))
    assert max(forwards) > 5
    assert through(by_torch, split=False)[1] == [2, 2, 2, 2]


def test_only_the_input_is_kept_and_what_was_recomputed_goes() -> None:
    """Of each layer's tensors none lives after the forward, some during the backward, none behind it."""
    alive: list[Any] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:  # type: ignore[override]
            result = tensor * 2
            alive.append(torch.utils.weak.TensorWeakRef(result))
            ctx.save_for_backward(result)
            return result.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            (saved,) = ctx.saved_tensors
            counts.append(int(saved.numel()))
            return gradient * 2

    counts: list[int] = []
    linear = nn.Linear(4, 4)
    entering = torch.ones(3, 4, requires_grad=True)
    leaving = recomputed(lambda hidden: Watched.apply(linear(hidden)), entering)
    assert [r() for r in alive] == [None]
    leaving.sum().backward()
    assert counts == [12]
    assert [r() for r in alive] == [None, None]
    kept = linear(entering)
    held = Watched.apply(kept)
    assert alive[-1]() is not None, "control: without recomputation it lives"
    del held


def test_an_input_that_was_changed_in_place_is_refused() -> None:
    entering = torch.ones(3, 4, requires_grad=True) * 1.0
    leaving = recomputed(nn.Linear(4, 4), entering)
    entering.detach().add_(1)
    with pytest.raises(IsostepError, match=r"^input of a recomputed layer: got a tensor that was changed in place"):
        leaving.sum().backward()


def test_a_layer_that_does_less_the_second_time_is_refused() -> None:
    runs: list[int] = []

    def fickle(hidden: Tensor) -> Tensor:
        runs.append(1)
        return hidden.exp().sin() if len(runs) == 1 else hidden * 1.0

    leaving = recomputed(fickle, torch.ones(3, 4, requires_grad=True))
    with pytest.raises(IsostepError, match=r"^recomputed layer: got fewer saved tensors"):
        leaving.sum().backward()
