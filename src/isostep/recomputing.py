"""Activation checkpointing (Chen et al. 2016, arXiv 1604.06174) that recomputes once, however often a backward returns.

torch.utils.checkpoint recomputes for every call of the autograd engine. Pipeline schedules that split the backward call
it for the inputs, and then for each group of weights: a decoder block would run ten more times. Here, what was
recomputed stays with the graph until the graph lets go of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .errors import IsostepError
from .randomness import preserved


def recomputed(layer: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """layer(hidden), of which only `hidden` is kept for the backward; the first backward runs the layer once more.

    That second run finds torch's random generators and autocast as the first one did, and ends where the last tensor
    that the backward needs is there. Raises IsostepError in the backward where the second run saves fewer tensors
    than the first, and where `hidden` was changed in place since.
    """
    region = _Region(layer, hidden)
    with saved_tensors_hooks(region.save, region.found):
        return layer(hidden)


class _Saved:
    """Stands in the graph for a tensor that the first run saved; the tensor comes with the second."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


class _EnoughError(BaseException):
    """The second run has saved everything; a layer that catches every Exception lets it through."""


class _Region:
    """One run of a layer. The graph holds its `_Saved` and, through the hooks, the region."""

    def __init__(self, layer: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
        kind = hidden.device.type
        self._layer, self._hidden, self._differentiable = layer, hidden.detach(), hidden.requires_grad
        self._version = hidden._version
        self._generators = torch.get_rng_state(), torch.cuda.get_rng_state(hidden.device) if kind == "cuda" else None
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._saved: list[ref[_Saved]] = []

    def save(self, _: Tensor) -> _Saved:
        saved = _Saved()
        self._saved.append(ref(saved))
        return saved

    def found(self, saved: _Saved) -> Tensor:
        if saved.tensor is None:
            self._run_again()
        if saved.tensor is None:
            raise IsostepError(
                "recomputed layer: got fewer saved tensors than in its first forward, expected as many; "
                "make it do the same in every forward"
            )
        return saved.tensor

    def _run_again(self) -> None:
        hidden, (cpu, cuda), (enabled, dtype) = self._hidden, self._generators, self._autocast
        if hidden._version != self._version:
            raise IsostepError(
                "input of a recomputed layer: got a tensor that was changed in place since, expected it as it was; "
                "change a copy"
            )
        places = iter(self._saved)

        def save(tensor: Tensor) -> Tensor:
            tensor, place = tensor.detach(), next(places)
            if (saved := place()) is not None:
                saved.tensor = tensor
            if place is self._saved[-1]:
                raise _EnoughError
            return tensor

        autocast = torch.autocast(hidden.device.type, dtype, enabled)
        with preserved(hidden.device), torch.enable_grad(), autocast, suppress(_EnoughError):
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, hidden.device)
            with saved_tensors_hooks(save, lambda tensor: tensor):
                self._layer(hidden.detach().requires_grad_(self._differentiable))
