"""Chunks of a model on one rank: consecutive layers, and the shapes of what enters and leaves them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..randomness import preserved
from ..recomputing import recomputed
from .pipeline import Shape

IN_PLACE = "leaf Variable that requires grad"
"""torch's words where a layer writes over what it is given, and that is what a stage received."""


class Chunk(nn.Module):
    """Consecutive layers, run with the draws and the precision of the update. is_last: what leaves it is not sent."""

    def __init__(self, layers: Sequence[nn.Module], recomputes: bool, is_last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._recomputes, self._is_last, self._writes = recomputes, is_last, False
        self.begin(lambda _: None, None, [])

    def begin(self, before_forward: Callable[[int], None], precision: Any, dtypes: Sequence[torch.dtype]) -> None:
        """Start a group. dtypes: of what leaves this chunk, by microbatch."""
        self._before_forward, self._precision, self._dtypes, self._next = before_forward, precision, dtypes, 0

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
        self._before_forward(self._next)
        hidden = hidden.clone() if self._writes else hidden
        with self._precision():
            recomputes = self._recomputes and torch.is_grad_enabled()
            for layer in self.layers:
                hidden = recomputed(layer, hidden) if recomputes else layer(hidden)
        return hidden


class Shapes:
    """What each chunk takes and gives, found by running the layers on the meta device."""

    def __init__(self, layers: Sequence[nn.Module], bounds: Sequence[int]) -> None:
        self._layers = [copy.deepcopy(layer).to("meta").eval() for layer in layers]
        self._bounds = bounds
        self._known: dict[Shape, list[Shape]] = {}

    def of(self, entering: Tensor) -> list[Shape]:
        """Shape and dtype at the start of each chunk and at the end of the last, for one microbatch."""
        key = (tuple(entering.shape), entering.dtype)
        if key not in self._known:
            with torch.no_grad(), preserved(torch.device("cpu")):
                self._known[key] = self._found(torch.empty(key[0], dtype=key[1], device="meta"))
        return self._known[key]

    def _found(self, hidden: Any) -> list[Shape]:
        shapes = [(tuple(hidden.shape), hidden.dtype)]
        for index, layer in enumerate(self._layers, start=1):
            hidden = layer(hidden)
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
