"""Values that are put back as they were, in place, so that whoever holds them finds them unchanged."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from .randomness import preserved

PutBack: TypeAlias = Callable[[], Any]


def keep(value: Any) -> PutBack:
    """A function that makes `value` what it is now and returns it; tensors are copied to the host meanwhile."""
    if isinstance(value, Tensor):
        return _keep_tensor(value)
    if isinstance(value, dict):
        entries = {key: keep(entry) for key, entry in value.items()}
        return lambda: _refill(value, {key: put_back() for key, put_back in entries.items()})
    if isinstance(value, (list, tuple)):
        items = [keep(item) for item in value]
        return lambda: type(value)(put_back() for put_back in items)
    copied = copy.deepcopy(value)
    return lambda: copied


def keep_tensors(model: nn.Module) -> PutBack:
    """Parameters and buffers of a model, buffers also where a forward replaces or drops them."""
    return keep([list(model.parameters()), [module._buffers for module in model.modules()]])


def keep_optimizer(optimizer: torch.optim.Optimizer) -> PutBack:
    """State and settings of an optimizer; the parameters themselves are the model's."""
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    kept = keep([optimizer.state, settings])

    def put_back() -> None:
        _, settings = kept()
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            _refill(group, {"params": group["params"], **before})

    return put_back


@contextmanager
def untouched(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> Iterator[PutBack]:
    """Leave a model, its gradients, its optimizers and all random generators as they were found.

    Gives a function that puts back the model's tensors at once. Step hooks of the optimizers do not run meanwhile.
    """
    gradients = [(p, p.grad) for p in model.parameters()]
    tensors, steps = keep_tensors(model), [keep_optimizer(optimizer) for optimizer in optimizers]
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with preserved(device), _without_hooks(optimizers):
            yield tensors
    finally:
        for put_back in (tensors, *steps):
            put_back()
        for p, gradient in gradients:
            p.grad = gradient
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _without_hooks(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Nobody's average of weights or log of steps learns of a step that is taken back."""
    hooks = [getattr(o, f"_optimizer_step_{when}_hooks", {}) for o in optimizers for when in ("pre", "post")]
    before = [dict(h) for h in hooks]
    for h in hooks:
        h.clear()
    try:
        yield
    finally:
        for h, entries in zip(hooks, before, strict=True):
            _refill(h, entries)


def _keep_tensor(tensor: Tensor) -> PutBack:
    if any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        # an expanded tensor is a constant
        return lambda: tensor
    copied = tensor.detach().to("cpu", copy=True)
    return lambda: (tensor.detach().copy_(copied), tensor)[1]


def _refill(mapping: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    mapping.clear()
    mapping.update(entries)
    return mapping
