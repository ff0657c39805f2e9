"""What each layer of a model costs on this device: times of one microbatch and bytes, measured.

They cut the model into stages and predict a pipeline's time, and are the file that `isostep simulate --layers` reads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .errors import InputError
from .keeping import untouched
from .objective import Batch, Outputs
from .schedule.layers import Layer, ModelLayers


@dataclass(frozen=True)
class MeasuredLayers:
    """The layers of a model as `measure` found them."""

    model: ModelLayers
    """Times in seconds of one microbatch, and bytes."""
    kept_bytes: tuple[float, ...]
    """Of each layer: what enters it, which is all that is kept where its activations are recomputed."""
    boundary_bytes: tuple[float, ...]
    """Of each layer: what leaves it, which a transfer carries where a stage ends behind it."""
    tokens: int
    """Of the measured microbatch, padding counted: positions of what enters the first layer."""

    def document(self) -> dict[str, Any]:
        """What `schedule.layers.read_layers` reads."""
        layers = [asdict(layer) for layer in self.model.layers]
        return {"schema": 1, "source": self.model.source, "layers": layers}


@dataclass(frozen=True)
class _Visit:
    """What one visit of a layer takes, in seconds, and the bytes that its graph holds."""

    forward: float
    backward: float
    input_backward: float
    activation_bytes: float


def measure(
    layers: Sequence[nn.Module],
    batch: Batch,
    *,
    names: Sequence[str],
    inputs: Callable[[Batch], Tensor],
    loss: Callable[[Outputs, Batch], Tensor],
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    repeats: int = 5,
    optimizer_copies: int = 2,
) -> MeasuredLayers:
    """Runs every layer forward and backward on one microbatch, in model order; the median of `repeats` rounds.

    layers: the whole model on one device, modules that each take the one tensor that the one before returns.
    batch: of that device. names: of the layers. inputs(batch): what enters the first layer.
    loss(outputs, batch): the scalar that the backward starts from; it counts to the last layer.
    precision: around each forward. repeats: rounds that count, after one that does not.
    optimizer_copies: tensors as large as a trained parameter that the optimizer keeps: 2 for AdamW, 0 for plain SGD.

    Of each layer: forward; input_grad, the time of the backward for its input alone; weight_grad, what the full
    backward takes beyond that. So input_grad + weight_grad is the full backward, which schedules run that do not
    split it; where it is split, both halves walk the graph, and take a little more together. A layer whose input needs
    no gradient, as the first, has an input_grad of 0.
    state_bytes: parameters, their gradients and optimizer_copies, and buffers. activation_bytes: what enters the layer
    and what its forward saves besides, each storage once, without state and, but for the last layer, without what
    leaves it: that enters the next one.

    Parameters, gradients, buffers and random generators are put back. Raises InputError for layers, names or repeats
    that do not go together, and for a layer that does not return one tensor.
    """
    if not names:
        raise InputError.of("names", 0, "1 or more, one per layer", "name every layer")
    if len(names) != len(layers):
        raise InputError.of("names", len(names), f"{len(layers)}, one per layer", "name every layer")
    if repeats < 1:
        raise InputError.of("repeats", repeats, "1 or more", "measure at least once")
    entering = inputs(batch)
    measuring = _Measuring(layers, lambda outputs: loss(outputs, batch), precision, entering.device)
    with untouched(nn.ModuleList(layers), (), entering.device):
        for parameter in measuring.parameters:
            parameter.grad = None
        rounds = [measuring.round(entering.detach()) for _ in range(1 + repeats)][1:]
    found = tuple(
        _layer(name, visits, _state_bytes(layer, optimizer_copies))
        for name, visits, layer in zip(names, zip(*rounds, strict=True), layers, strict=True)
    )
    shape = " x ".join(map(str, entering.shape[:2]))
    source = f"measured on {_device(entering.device)}, batch of {shape} (examples x tokens)"
    return MeasuredLayers(
        model=ModelLayers(source, found),
        kept_bytes=tuple(measuring.sizes[:-1]),
        boundary_bytes=tuple(measuring.sizes[1:]),
        tokens=entering.shape[:2].numel(),
    )


class _Measuring:
    """A model and how it is run."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        loss: Callable[[Outputs], Tensor],
        precision: Callable[[], AbstractContextManager[Any]],
        device: torch.device,
    ) -> None:
        self._layers, self._loss, self._precision, self._device = layers, loss, precision, device
        self.parameters = [p for layer in layers for p in layer.parameters()]
        self.sizes: list[float] = []
        """Bytes of what enters the first layer and of what leaves each, in the last round."""

    def round(self, hidden: Tensor) -> list[_Visit]:
        """Visits every layer once. Gradients add up from round to round, as in the microbatches of an update."""
        self.sizes = [float(hidden.nbytes)]
        visits = []
        for index in range(len(self._layers)):
            entering = hidden.detach().requires_grad_(index > 0 and hidden.is_floating_point())
            visit, hidden = self._visit(index, entering)
            visits.append(visit)
            self.sizes.append(float(hidden.nbytes))
        return visits

    def _visit(self, index: int, entering: Tensor) -> tuple[_Visit, Tensor]:
        forward, (leaving, result) = self._timed(lambda: self._forward(index, entering))
        if not result.requires_grad:
            return _Visit(forward, 0.0, 0.0, float(entering.nbytes)), leaving.detach()
        gradient = torch.ones_like(result)
        backward, _ = self._timed(lambda: result.backward(gradient))
        entering.grad = None
        saved: dict[int, int] = {}

        def save(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(save, lambda tensor: tensor):
            leaving, result = self._forward(index, entering)
        input_backward = 0.0
        if entering.requires_grad:
            input_backward, _ = self._timed(
                lambda: torch.autograd.grad(result, entering, gradient, retain_graph=True, allow_unused=True)
            )
        last = index == len(self._layers) - 1
        if last:
            save(leaving)
        layer = self._layers[index]
        for tensor in (*layer.parameters(), *layer.buffers(), entering, *(() if last else (leaving,))):
            saved.pop(tensor.untyped_storage().data_ptr(), None)
        held = float(entering.nbytes + sum(saved.values()))
        return _Visit(forward, backward, input_backward, held), leaving.detach()

    def _forward(self, index: int, entering: Tensor) -> tuple[Tensor, Tensor]:
        """What leaves the layer, and what its backward starts from."""
        with self._precision():
            leaving = self._layers[index](entering)
        if not isinstance(leaving, Tensor):
            raise InputError.of(f"layer {index}", type(leaving).__name__, "one tensor", "return what the next takes")
        return leaving, self._loss(leaving) if index == len(self._layers) - 1 else leaving

    def _timed(self, run: Callable[[], Any]) -> tuple[float, Any]:
        self._wait()
        start = time.perf_counter()
        result = run()
        self._wait()
        return time.perf_counter() - start, result

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _layer(name: str, visits: Iterable[_Visit], state_bytes: float) -> Layer:
    forwards, backwards, input_backwards, held = zip(
        *((v.forward, v.backward, v.input_backward, v.activation_bytes) for v in visits), strict=True
    )
    backward = statistics.median(backwards)
    input_grad = min(backward, statistics.median(input_backwards))
    return Layer(name, statistics.median(forwards), input_grad, backward - input_grad, state_bytes, held[-1])


def _state_bytes(layer: nn.Module, optimizer_copies: int) -> float:
    trained = sum(p.nbytes for p in layer.parameters() if p.requires_grad)
    everything = sum(t.nbytes for t in (*layer.parameters(), *layer.buffers()))
    return float(everything + trained * (1 + optimizer_copies))


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' if threads > 1 else ''}"
