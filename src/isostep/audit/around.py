"""What happens around the loss: optimizers, clipping, loss scales, schedulers, data loaders. Writes to a capture's log.

Everything is put in place by `installed` and taken away at its end; nothing of torch stays changed.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from ..distributed.shards import whole_of
from . import places, records
from .capture import Capture, in_parts, out_of_sight
from .custom import function_apply
from .replacing import Wrap, replaced, weighted_l1


@contextmanager
def installed(capture: Capture) -> Iterator[None]:
    """All hooks and replacements, as long as the context lasts."""
    with ExitStack() as stack:
        stack.callback(capture.release)
        for known in [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]:
            if "param_groups" in vars(known):
                capture.index_of(known)
        around = _Around(capture)
        stack.callback(register_optimizer_step_pre_hook(around.before_step).remove)
        stack.callback(register_optimizer_step_post_hook(around.after_step).remove)
        for owner, name, wrap in around.replacements():
            stack.enter_context(replaced(owner, name, wrap))
        stack.enter_context(weighted_l1(capture.stand_ins))
        stack.enter_context(replaced(torch.autograd.Function, "apply", lambda apply: function_apply(capture, apply)))
        yield


@dataclass
class _Call:
    """An optimizer call under way."""

    index: int
    where: str
    applied: bool = True
    first_backward: int = 0
    evaluations: int = 0
    sketch: np.ndarray | None = None
    final: np.ndarray | None = None
    gradients: int = 0
    low_precision: bool = False


@dataclass
class _Clipped:
    """A gradient before it was clipped, and by how much that was."""

    backwards: int
    """Backward passes before."""
    gradient: np.ndarray | None
    after: np.ndarray | None = None
    """The gradient once it was clipped."""

    def undone(self, final: np.ndarray, factor: float) -> np.ndarray:
        """The gradient without clipping; the final one if something else than clipping has changed it since."""
        if self.gradient is None or self.after is None:
            return final
        after = self.after * factor
        apart = np.linalg.norm(final - after)
        return self.gradient * factor if apart <= 1e-3 * np.linalg.norm(after) else final


class _Around:
    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.log = capture.log.events
        self.thread = threading.get_ident()
        self.depth = 0
        """Of optimizers inside optimizers: only the outermost counts."""
        self.evaluating = 0
        """Depth of closures under way."""
        self.call: _Call | None = None
        self.calls = 0
        self.parameters: dict[int, np.ndarray | None] = {}
        self.clipped: dict[int, _Clipped] = {}
        """Per optimizer: the gradient before it was first clipped after the last backward pass."""
        self.backwards_at_update = 0
        self.scale: float | None = None
        """Of the GradScaler that scaled a loss since the last update."""
        self.unscaled: set[int] = set()
        self.stepping = 0
        """Depth of schedulers inside schedulers."""
        self.loaders: weakref.WeakKeyDictionary[Any, tuple[int, list[tuple[int, ...]]]] = weakref.WeakKeyDictionary()
        self.num_loaders = 0

    def replacements(self) -> Iterator[tuple[Any, str, Wrap]]:
        """(owner, name, wrapper of the original) of everything that is replaced."""
        yield torch.nn.Module, "__call__", self.module_call
        yield torch.nn.Module, "zero_grad", self.module_zero_grad
        yield torch.autograd, "backward", self.backward
        yield Optimizer, "zero_grad", self.zero_grad
        yield Optimizer, "add_param_group", self.add_param_group
        yield Optimizer, "__setstate__", self.add_param_group
        yield torch.autograd, "_engine_run_backward", self.engine
        yield clip_grad, "_clip_grads_with_norm_", self.clip_with_norm
        yield torch.nn.utils, "clip_grads_with_norm_", self.clip_with_norm
        for module in (clip_grad, torch.nn.utils):
            yield module, "clip_grad_value_", self.clip_value
        scaler = torch.amp.GradScaler
        yield scaler, "scale", self.scaler_scale
        yield scaler, "unscale_", self.scaler_unscale
        yield scaler, "step", self.scaler_step
        for kind in _subclasses(lr_scheduler.LRScheduler):
            if "step" in vars(kind):
                yield kind, "step", self.scheduler_step
        yield dataloader._BaseDataLoaderIter, "_next_index", self.next_index
        yield dataloader._BaseDataLoaderIter, "__next__", self.next_batch

    # ------------------------------------------------------------------------------------------ passes

    def module_call(self, original: Any) -> Any:
        capture = self.capture

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if out_of_sight() or threading.get_ident() != self.thread:
                return original(module, *args, **kwargs)
            with capture.module(module, args, kwargs):
                return original(module, *args, **kwargs)

        return call

    def backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:
                return original(tensors, *args, **kwargs)
            if not self.evaluating:
                self.depth, self.call = 0, None  # an optimizer that was still under way has failed
            roots = [tensors] if isinstance(tensors, Tensor | torch.autograd.graph.GradientEdge) else list(tensors)
            with self.capture.backward(roots):
                return original(roots, *args, **kwargs)

        return backward

    def engine(self, original: Any) -> Any:
        """Functions that run in backward, checkpointed ones again, are seen as in forward."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:
                return original(*args, **kwargs)
            with self.capture:
                return original(*args, **kwargs)

        return run

    # ------------------------------------------------------------------------------------------ optimizers

    def add_param_group(self, original: Any) -> Any:
        def add(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            result = original(optimizer, *args, **kwargs)
            self.capture.index_of(optimizer)
            return result

        return add

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        self.depth += 1
        if self.depth > 1:
            return None
        self.calls += 1
        if self.capture.in_backward and not self.evaluating:
            self.capture.log.in_backward = True
            return None
        index = self.capture.index_of(optimizer)
        call = self.call = _Call(index, places.script_line())
        if index not in self.parameters:
            self.parameters[index] = self.capture.sketch_of(optimizer, lambda parameter: parameter)
        found_inf = getattr(optimizer, "found_inf", None)
        call.applied = found_inf is None or not float(found_inf)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._read_gradients(optimizer, call)
            return None

        def evaluated() -> Any:
            if call.evaluations:
                call.first_backward = self.capture.backwards
            call.evaluations += 1
            self.evaluating += 1
            try:
                result = closure()
            finally:
                self.evaluating -= 1
            self._read_gradients(optimizer, call)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    def _read_gradients(self, optimizer: Optimizer, call: _Call) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        call.gradients = len(gradients)
        call.low_precision = any(g.dtype in (torch.float16, torch.bfloat16) for g in gradients)
        grad_scale = getattr(optimizer, "grad_scale", None)
        factor = 1.0 if grad_scale is None else 1 / float(grad_scale)
        final = self.capture.sketch_of(optimizer, lambda parameter: parameter.grad)
        call.final = None if final is None else final * factor
        call.sketch = call.final
        clipped = self.clipped.pop(call.index, None)
        if clipped is not None and clipped.backwards == self.capture.backwards and call.final is not None:
            call.sketch = clipped.undone(call.final, factor)

    def after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.depth = max(0, self.depth - 1)
        if self.depth or self.call is None:
            return
        call, self.call = self.call, None
        self._write_step(optimizer, call)

    def _write_step(self, optimizer: Optimizer, call: _Call) -> None:
        if self.capture.backwards != self.backwards_at_update:
            self.backwards_at_update = self.capture.backwards
            self.capture.updates += 1
        before = self.parameters.get(call.index)
        after = self.parameters[call.index] = self.capture.sketch_of(optimizer, lambda parameter: parameter)
        moved = None if before is None or after is None else not np.array_equal(before, after)
        rates = [group.get("lr") for group in optimizer.param_groups]
        rate = max((1.0 if rate is None else float(rate) for rate in rates), default=0.0)
        self.log.append(
            records.Step(
                call.index, type(optimizer).__name__, call.where, call.applied, call.first_backward, call.sketch,
                call.final, self.scale, moved, rate, call.gradients, call.low_precision,
                in_parts(optimizer), after, self._old_graphs(), self._broken(), self._missing(),
            )
        )  # fmt: skip
        self.unscaled.discard(call.index)

    def _broken(self) -> bool:
        totals, self.capture.totals = self.capture.totals, []
        return not all(bool(torch.isfinite(total)) for total in totals)

    def _old_graphs(self) -> int:
        """Graphs alive that belong to the update before the last one, or to an older one."""

        def alive() -> int:
            self.capture.graphs = [entry for entry in self.capture.graphs if entry[1]() is not None]
            return sum(update < self.capture.updates - 2 for update, _ in self.capture.graphs)

        if alive():
            gc.collect()
        return alive()

    def _missing(self) -> tuple[str, ...]:
        held = {id(p) for _, known in self.capture.living() for group in known.param_groups for p in group["params"]}
        missing: dict[str, None] = {}
        for module in self.capture.modules:
            named = [(name, p) for name, p in module.named_parameters() if p.requires_grad and p.grad is not None]
            missing.update((name, None) for name, p in named if id(p) not in held)
        return tuple(missing)

    def zero_grad(self, original: Any) -> Any:
        def zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self.capture.index_of(optimizer)
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.log.append(records.ZeroGrad(self._owners(held, all), places.script_line()))
            return original(optimizer, *args, **kwargs)

        return zero_grad

    def module_zero_grad(self, original: Any) -> Any:
        def zero_grad(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.log.append(records.ZeroGrad(self._owners(list(module.parameters()), all), places.script_line()))
            return original(module, *args, **kwargs)

        return zero_grad

    def _owners(self, parameters: list[Tensor], some: Callable[..., bool] = any) -> tuple[int, ...]:
        """Optimizers that hold any of the parameters, or (`all`) that hold nothing else."""
        given = {id(parameter) for parameter in parameters}
        return tuple(
            index
            for index, optimizer in self.capture.living()
            if some(id(p) in given for group in optimizer.param_groups for p in group["params"])
        )

    # ------------------------------------------------------------------------------------------ clipping, loss scale

    def clip_with_norm(self, original: Any) -> Any:
        def clip(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            owners = self._before_clipping(given)
            result = original(given, max_norm, total_norm, *args, **kwargs)
            self._write_clip(owners, "norm", min(1.0, float(max_norm) / (float(whole_of(total_norm)) + 1e-6)))
            return result

        return clip

    def clip_value(self, original: Any) -> Any:
        def clip(parameters: Any, clip_value: float, *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            owners = self._before_clipping(given)
            largest = max(
                (float(p.grad.abs().max()) for p in given if p.grad is not None and p.grad.numel()), default=0
            )
            result = original(given, clip_value, *args, **kwargs)
            self._write_clip(owners, "value", min(1.0, float(clip_value) / (largest + 1e-30)))
            return result

        return clip

    def _before_clipping(self, parameters: list[Tensor]) -> tuple[int, ...]:
        owners = self._owners(parameters)
        for index, optimizer in self.capture.living():
            known = self.clipped.get(index)
            if index in owners and (known is None or known.backwards != self.capture.backwards):
                gradient = self.capture.sketch_of(optimizer, lambda parameter: parameter.grad)
                self.clipped[index] = _Clipped(self.capture.backwards, gradient)
        return owners

    def _write_clip(self, owners: tuple[int, ...], by: str, coefficient: float) -> None:
        for index, optimizer in self.capture.living():
            if index in owners and index in self.clipped:
                self.clipped[index].after = self.capture.sketch_of(optimizer, lambda parameter: parameter.grad)
        scaled = self.scale not in (None, 1.0) and not self.unscaled.issuperset(owners)
        self.log.append(records.Clip(owners, places.script_line(), by, coefficient, scaled))

    def scaler_scale(self, original: Any) -> Any:
        def scale(scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, *args, **kwargs)
            if scaler.is_enabled():
                self.scale = scaler.get_scale()
                self.unscaled.clear()
            return result

        return scale

    def scaler_unscale(self, original: Any) -> Any:
        def unscale(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Any:
            result = original(scaler, optimizer)
            index = self.capture.index_of(getattr(optimizer, "optimizer", optimizer))
            if scaler.is_enabled() and index not in self.unscaled:
                self.unscaled.add(index)
                clipped = self.clipped.get(index)
                if clipped is not None and clipped.gradient is not None:
                    clipped.gradient = clipped.gradient / scaler.get_scale()
                    clipped.after = None if clipped.after is None else clipped.after / scaler.get_scale()
            return result

        return unscale

    def scaler_step(self, original: Any) -> Any:
        def step(scaler: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            calls = self.calls
            result = original(scaler, optimizer, *args, **kwargs)
            if scaler.is_enabled() and self.calls == calls:
                inner = getattr(optimizer, "optimizer", optimizer)
                call = _Call(self.capture.index_of(inner), places.script_line(), applied=False)
                self._read_gradients(inner, call)
                self._write_step(inner, call)
            return result

        return step

    # ------------------------------------------------------------------------------------------ schedulers, data

    def scheduler_step(self, original: Any) -> Any:
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            self.stepping += 1
            try:
                if self.stepping == 1 and not getattr(scheduler, "_is_initial", False):
                    optimizer = getattr(scheduler, "optimizer", None)
                    index = self.capture.index_of(optimizer) if isinstance(optimizer, Optimizer) else -1
                    name = type(scheduler).__name__
                    self.log.append(records.SchedulerStep(id(scheduler), name, index, places.script_line()))
                return original(scheduler, *args, **kwargs)
            finally:
                self.stepping -= 1

        return step

    def next_index(self, original: Any) -> Any:
        def next_index(iterator: Any) -> Any:
            try:
                indices = original(iterator)
            except StopIteration:
                if iterator in self.loaders and not self.loaders[iterator][1]:
                    del self.loaders[iterator]  # one that is used again begins another epoch
                raise
            if iterator not in self.loaders:
                self.loaders[iterator] = (self.num_loaders, [])
                self.num_loaders += 1
            flat = indices if isinstance(indices, list | tuple) else [indices]
            self.loaders[iterator][1].append(tuple(i for i in flat if isinstance(i, int)))
            return indices

        return next_index

    def next_batch(self, original: Any) -> Any:
        def next_batch(iterator: Any) -> Any:
            batch = original(iterator)
            number, waiting = self.loaders.get(iterator, (-1, []))
            if waiting:
                sampler = getattr(iterator, "_index_sampler", None)
                inner = getattr(sampler, "sampler", sampler)
                self.log.append(records.Batch(number, waiting.pop(0), bool(getattr(inner, "replacement", False))))
            return batch

        return next_batch


def _subclasses(kind: type) -> Iterator[type]:
    yield kind
    for below in kind.__subclasses__():
        yield from _subclasses(below)
