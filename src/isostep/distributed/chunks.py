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


class Chunk(nn.Module):
    """Consecutive layers, run with the draws and the precision of the update."""

    def __init__(self, layers: Sequence[nn.Module], recomputes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._recomputes = recomputes
        self.begin(lambda _: None, None, [])

    def begin(self, before_forward: Callable[[int], None], precision: Any, dtypes: Sequence[torch.dtype]) -> None:
        """Start a group. dtypes: of what leaves this chunk, by microbatch."""
        self._before_forward, self._precision, self._dtypes, self._next = before_forward, precision, dtypes, 0

    def forward(self, hidden: Tensor) -> Tensor:
        self._before_forward(self._next)
        with self._precision():
            recomputes = self._recomputes and torch.is_grad_enabled()
            for layer in self.layers:
                hidden = recomputed(layer, hidden) if recomputes else layer(hidden)
        dtype = self._dtypes[self._next]
        self._next += 1
        return hidden.to(dtype).contiguous()  # as what is sent must be


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
            if index in self._bounds:
                shapes.append((tuple(hidden.shape), hidden.dtype))
        return shapes
