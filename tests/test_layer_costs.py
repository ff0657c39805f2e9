"""What layers cost: times by comparison with layers that sleep, bytes by hand, and that nothing is changed."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isostep import causal_lm
from isostep.errors import InputError
from isostep.layer_costs import MeasuredLayers, measure
from isostep.models.decoder import Decoder, DecoderConfig
from isostep.schedule.layers import read_layers


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So that a busy machine does not let the threads of one operation wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def square_sum(outputs: Tensor, _: Any) -> Tensor:
    return outputs.square().sum()


def measured(layers: list[nn.Module], entering: Tensor, **options: Any) -> MeasuredLayers:
    names = [f"layer {index}" for index in range(len(layers))]
    return measure(layers, entering, **{"names": names, "inputs": lambda batch: batch, "loss": square_sum, **options})


def decoder_and_batch() -> tuple[Decoder, dict[str, Tensor]]:
    decoder = Decoder(DecoderConfig(64, 64, 64, 3, 2))
    ids = torch.arange(256).reshape(4, 64) % 64
    return decoder, {"input_ids": ids, "labels": ids}


def measured_decoder(decoder: Decoder, batch: dict[str, Tensor], repeats: int = 3) -> MeasuredLayers:
    names = ["embedding", "block 0", "block 1", "block 2", "head"]
    return measure(
        decoder.as_layers(), batch, names=names, inputs=lambda b: b["input_ids"], loss=causal_lm.sum_fn, repeats=repeats
    )


class Sleep(torch.autograd.Function):
    """Sleeps for so many milliseconds, in its backward too."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, forward: float, backward: float) -> Tensor:  # type: ignore[override]
        ctx.backward = backward
        time.sleep(forward / 1000)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.backward / 1000)
        return gradient, None, None


class Sleeping(nn.Module):
    """Sleeps in forward, in the backward for its input, and in the backward for its weight, as long as it is told."""

    def __init__(self, forward: float, input_grad: float, weight_grad: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.milliseconds = forward, input_grad, weight_grad

    def forward(self, hidden: Tensor) -> Tensor:
        forward, input_grad, weight_grad = self.milliseconds
        return Sleep.apply(hidden, forward, input_grad) + Sleep.apply(self.weight, 0, weight_grad)


# ---- times


def test_a_layer_that_sleeps_is_measured_at_it() -> None:
    """A busy machine lets them sleep longer, never shorter."""
    layers = [Sleeping(10, 20, 40), Sleeping(20, 20, 40), Sleeping(0, 0, 0)]
    first, second, last = measured(layers, torch.ones(2, 3)).model.layers
    for got, expected in (
        (first.forward, 10), (first.weight_grad, 40), (second.forward, 20), (second.input_grad, 20),
        (second.input_grad + second.weight_grad, 60), (last.cost, 0),
    ):  # fmt: skip
        assert expected <= got * 1000 <= expected + 25
    assert second.weight_grad > 0.025
    assert first.input_grad == 0, "nothing asks for it, and nothing sleeps for it"


def test_the_loss_counts_to_the_last_layer() -> None:
    def loss(outputs: Tensor, _: Any) -> Tensor:
        return Sleep.apply(outputs, 20, 30).sum()

    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    first, last = measured(layers, torch.ones(2, 3), loss=loss).model.layers
    assert first.cost < 0.02
    assert last.forward >= 0.02
    assert last.input_grad >= 0.03


def test_a_wider_layer_costs_more() -> None:
    narrow, wide = (
        measured([nn.Linear(width, width), nn.Linear(width, width)], torch.ones(512, width), repeats=7).model.layers[1]
        for width in (256, 512)
    )
    for cost in ("forward", "input_grad", "weight_grad"):
        assert getattr(wide, cost) > 1.3 * getattr(narrow, cost), cost


def test_an_embedding_has_no_input_gradient_and_the_sum_is_near_the_whole_model() -> None:
    decoder, batch = decoder_and_batch()
    embedding, *others = measured_decoder(decoder, batch).model.layers
    assert embedding.input_grad == 0
    assert embedding.weight_grad > 0
    assert all(layer.input_grad > 0 for layer in others)
    whole, sums = [], []
    for _ in range(8):  # in turn, and the least of each: a busy machine disturbs some of them
        sums.append(sum(layer.cost for layer in measured_decoder(decoder, batch, repeats=1).model.layers))
        start = time.perf_counter()
        causal_lm.sum_fn(decoder(batch["input_ids"]), batch).backward()
        whole.append(time.perf_counter() - start)
    assert 0.5 < min(sums) / min(whole) < 2


# ---- bytes


class Twice(nn.Module):
    """Saves one tensor twice: the exponential, for itself and for the sine."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.exp().sin()


def test_bytes_by_hand() -> None:
    layers = [nn.Linear(4, 8), Twice(), nn.Tanh(), nn.Linear(8, 2)]
    found = measured(layers, torch.ones(3, 4))
    narrow, wide, leaving = 3 * 4 * 4, 3 * 8 * 4, 3 * 2 * 4
    assert found.kept_bytes == (narrow, wide, wide, wide)
    assert found.boundary_bytes == (wide, wide, wide, leaving)
    held = [layer.activation_bytes for layer in found.model.layers]
    assert held == [narrow, wide + wide, wide, wide + leaving]
    assert [layer.state_bytes for layer in found.model.layers] == [4 * 4 * (32 + 8), 0, 0, 4 * 4 * (16 + 2)]
    assert found.tokens == 12


def test_frozen_parameters_and_buffers_have_no_gradients_or_optimizer_state() -> None:
    normal = nn.BatchNorm1d(4, affine=False)
    frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
    found = measured([frozen, normal, nn.Linear(4, 4, bias=False)], torch.ones(3, 4), optimizer_copies=1)
    assert [layer.state_bytes for layer in found.model.layers] == [64, 16 + 16 + 8, 3 * 64]
    first = found.model.layers[0]
    assert (first.input_grad, first.weight_grad) == (0, 0)


def test_precision_is_that_of_the_forward() -> None:
    half = measured([nn.Linear(4, 4), nn.Linear(4, 4)], torch.ones(3, 4), precision=lambda: torch.autocast("cpu"))
    assert half.boundary_bytes == (24, 24)
    assert measured([nn.Linear(4, 4), nn.Linear(4, 4)], torch.ones(3, 4)).boundary_bytes == (48, 48)


# ---- nothing is changed


class Drawing(nn.Module):
    """Draws from every generator, and counts in a buffer that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls = self.calls + 1
        random.random()
        return self.dropout(self.linear(hidden))


def state_of(layers: nn.Module) -> list[Any]:
    tensors = [t.clone() for t in (*layers.parameters(), *layers.buffers())]
    gradients = [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in layers.parameters()]
    return [tensors, gradients, torch.get_rng_state(), random.getstate(), [m.training for m in layers.modules()]]


def test_nothing_is_changed() -> None:
    layers = nn.Sequential(Drawing(), Drawing().eval(), nn.BatchNorm1d(4))
    layers(torch.ones(3, 4)).sum().backward()
    layers[1].linear.weight.grad = None
    entering = torch.ones(3, 4, requires_grad=True)
    before = state_of(layers)
    measured(list(layers), entering)
    assert same(before, state_of(layers))
    assert entering.grad is None


def test_control_a_plain_forward_and_backward_changes_each_of_these() -> None:
    layers = nn.Sequential(Drawing(), nn.BatchNorm1d(4))
    before = state_of(layers)
    layers(torch.ones(3, 4)).sum().backward()
    after = state_of(layers)
    assert [same(a, b) for a, b in zip(before, after, strict=True)] == [False, False, False, False, True]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


# ---- the file, and what is refused


def test_document_is_what_simulate_reads(tmp_path: Path) -> None:
    decoder, batch = decoder_and_batch()
    found = measured_decoder(decoder, batch)
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(found.document()))
    assert read_layers(str(path)) == found.model
    assert found.model.source == "measured on cpu, 1 thread, batch of 4 x 64 (examples x tokens)"
    assert found.tokens == 256


@pytest.mark.parametrize(
    ("layers", "options", "line"),
    [
        ([], {}, "names: got 0, expected 1 or more"),
        ([nn.Linear(4, 4)], {"names": ["a", "b"]}, "names: got 2, expected 1, one per layer; name every layer"),
        ([nn.Linear(4, 4)], {"repeats": 0}, "repeats: got 0, expected 1 or more; measure at least once"),
        ([nn.LSTM(4, 4)], {}, "layer 0: got 'tuple', expected one tensor; return what the next takes"),
    ],
)
def test_refusals(layers: list[nn.Module], options: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as error:
        measured(layers, torch.ones(3, 4), **options)
    assert str(error.value).startswith(line)
