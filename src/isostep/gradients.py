"""The gradient sum of every parameter while a group runs, its global norm, and its hand-over to the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

LOW_PRECISION = (torch.float16, torch.bfloat16)


class GradientSums:
    """One gradient sum per parameter, in model order; None where nothing reached the parameter.

    A parameter that another rank of the replica holds stands here on the meta device, and never has a gradient.
    A parameter of float32 or wider is summed by autograd in `p.grad`. A parameter of float16 or bfloat16 is summed
    in float32 beside the model and rounded once, when the optimizer gets it: in bfloat16, adding 1e-3 to 1 leaves 1.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._wide: dict[int, Tensor | None] = {}
        self._hooks: list[RemovableHandle] = []
        self._parted = False

    def begin(self) -> None:
        """Start a group from nothing; gradients that were left on the parameters are dropped."""
        self.clear()
        for i, p in enumerate(self.parameters):
            if p.dtype in LOW_PRECISION and p.requires_grad and not p.is_meta:
                self._wide[i] = None
                self._hooks.append(p.register_post_accumulate_grad_hook(partial(self._widen, i)))

    def clear(self) -> None:
        """Drop all gradients and stop summing."""
        for p in self.parameters:
            p.grad = None
        self._stop()

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._wide, self._parted = [], {}, False

    def _widen(self, i: int, p: Tensor) -> None:
        if p.grad is not None:
            total = self._wide[i]
            self._wide[i] = p.grad.float() if total is None else total.add_(p.grad)
            p.grad = None

    def part(self) -> None:
        """Take in what a backward has left on parameters that are summed beside the model: torch's backward for the
        weights alone runs no hook. And give every gradient memory of its own.

        Behind views of two parameters that are added up, autograd may hand both the same storage; whatever is then
        added to one would be added to the other. Called after each backward that may have made gradients.
        """
        for i in self._wide:
            self._widen(i, self.parameters[i])
        if self._parted:
            return
        seen: set[int] = set()
        for i, p in enumerate(self.parameters):
            if i not in self._wide and p.grad is not None and p.grad.numel():
                storage = p.grad.untyped_storage().data_ptr()
                if storage in seen:
                    p.grad = p.grad.clone()
                seen.add(storage)
        self._parted = all(self.present())

    def __len__(self) -> int:
        return len(self.parameters)

    def __getitem__(self, i: int) -> Tensor | None:
        return self._wide[i] if i in self._wide else self.parameters[i].grad

    def __setitem__(self, i: int, gradient: Tensor | None) -> None:
        if i in self._wide:
            self._wide[i] = gradient
        else:
            self.parameters[i].grad = gradient

    def dtype(self, i: int) -> torch.dtype:
        """The dtype in which parameter i's gradients are summed."""
        dtype = self.parameters[i].dtype
        return torch.float32 if dtype in LOW_PRECISION else dtype

    def present(self) -> list[bool]:
        """Per parameter, whether it has a gradient."""
        return [self[i] is not None for i in range(len(self))]

    def norm(self, everywhere: Callable[[Sequence[float | None]], list[float]]) -> float:
        """The global 2-norm; inf or NaN where some gradient is (or, in float64, above 1e154).

        Squares are summed in float64, per parameter and then over parameters in model order, so that the same
        gradients have the same norm however they were split. One host-device synchronisation.
        everywhere: see `comm.Comm.everywhere`.
        """
        present = [i for i in range(len(self)) if self[i] is not None]
        norms = [torch.linalg.vector_norm(self[i], 2, dtype=torch.float64) for i in present]  # pyright: ignore
        squares: list[float | None] = [None] * len(self)
        for i, norm in zip(present, torch.stack(norms).tolist() if norms else (), strict=True):
            squares[i] = norm * norm
        total = 0.0
        for square in everywhere(squares):
            total += square
        return math.sqrt(total)

    def scale(self, factor: float) -> None:
        """Multiply every gradient by a host number."""
        if factor != 1.0 and (gradients := [g for i in range(len(self)) if (g := self[i]) is not None]):
            torch._foreach_mul_(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]

    def hand_over(self) -> bool:
        """Put the sums where optimizers look: `p.grad`, in the parameter's own dtype.

        Returns whether sums that were rounded to float16 or bfloat16 are still finite.
        """
        rounded = []
        for i, total in self._wide.items():
            p = self.parameters[i]
            if total is not None:
                p.grad = total.to(p.dtype)
                rounded.append(p.grad)
        self._stop()
        return not rounded or bool(torch.stack([g.isfinite().all() for g in rounded]).all())
