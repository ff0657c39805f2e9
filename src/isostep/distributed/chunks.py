"""Chunks of a model on one rank: consecutive layers, and the shapes of what enters and leaves them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..errors import InputError
from ..randomness import preserved
from ..recomputing import recomputed
from .pipeline import Shape

IN_PLACE = "leaf Variable that requires grad"
"""torch's words where a layer writes over what it is given, and that is what a stage received."""


class Chunk(nn.Module):
    """Consecutive layers by their index, run with the draws and the precision of the update.

    is_last: what leaves it is not sent.
    """

    def __init__(self, layers: Mapping[int, nn.Module], recomputes: bool, is_last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers.values())
        self._indices = list(layers)
        self._recomputes, self._is_last, self._writes = recomputes, is_last, False
        self.begin(lambda *_: None, None, [])

    def begin(self, before_layer: Callable[[int, int], None], precision: Any, dtypes: Sequence[torch.dtype]) -> None:
        """Start a group. dtypes: of what leaves this chunk, by microbatch."""
        self._before_layer, self._precision, self._dtypes, self._next = before_layer, precision, dtypes, 0

    def forward(self, hidden: Tensor) -> Tensor:
        try:
            outputs = self._run(hidden)
        except RuntimeError as error:
            if self._writes or IN_PLACE not in str(error):
                raise
            self._writes = True  # from now on, over a copy
            outputs = self._run(hidden)
        outputs = outputs.to(self._dtypes[self._next])
        self._next += 1
        if self._is_last or (outputs.is_contiguous() and not outputs._is_view()):
            return outputs
        return outputs.clone(memory_format=torch.contiguous_format)  # as what is sent must be, and no view

    def _run(self, hidden: Tensor) -> Tensor:
        hidden = hidden.clone() if self._writes else hidden
        with self._precision():
            recomputes = self._recomputes and torch.is_grad_enabled()
            for index, layer in zip(self._indices, self.layers, strict=True):
                self._before_layer(self._next, index)
                hidden = recomputed(layer, hidden) if recomputes else layer(hidden)
        return hidden


class Shapes:
    """What each chunk takes and gives, found by running the layers on tensors without data."""

    def __init__(self, layers: Sequence[nn.Module], bounds: Sequence[int]) -> None:
        self._device = next((p.device for layer in layers for p in layer.parameters()), torch.device("cpu"))
        self._layers = [copy.deepcopy(layer).to("meta").eval() for layer in layers]
        self._bounds = bounds
        self._known: dict[Any, list[Shape]] = {}

    def of(self, entering: Tensor, precision: Callable[[], AbstractContextManager[Any]]) -> list[Shape]:
        """Shape and dtype at the start of each chunk and at the end of the last, for one microbatch."""
        kind = self._device.type
        with precision():
            key = (entering.shape, entering.dtype, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            if key not in self._known:
                mode = FakeTensorMode(allow_non_fake_inputs=True)
                with torch.no_grad(), preserved(torch.device("cpu")), mode:
                    self._known[key] = self._found(torch.empty_like(entering, device=self._device))
        return self._known[key]

    def _found(self, hidden: Any) -> list[Shape]:
        shapes = [(tuple(hidden.shape), hidden.dtype)]
        for index, layer in enumerate(self._layers, start=1):
            state = {name: torch.empty_like(t, device=self._device) for name, t in _tensors(layer)}
            try:
                hidden = torch.func.functional_call(layer, state, (hidden,))
            except Exception as error:
                said = str(error).strip().partition("\n")[0][:200]
                raise InputError.of(
                    f"layer {index - 1}", f"{type(error).__name__}: {said}",
                    "a layer that takes what the one before returns, and that runs on tensors without data",
                    "mend it; shapes between stages are found so",
                ) from error  # fmt: skip
            if not isinstance(hidden, Tensor):
                raise InputError.of(
                    f"layer {index - 1}", type(hidden).__name__, "one tensor", "return what the next layer takes"
                )
            if index in self._bounds[1:-1] and not hidden.is_floating_point():
                raise InputError.of(
                    f"layer {index - 1}, the last of a chunk", hidden.dtype, "floating point, which has a gradient",
                    "join it with the layer behind it into one, or give other costs",
                )  # fmt: skip
            if index in self._bounds:
                shapes.append((tuple(hidden.shape), hidden.dtype))
        return shapes


def _tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters()
    yield from layer.named_buffers()
